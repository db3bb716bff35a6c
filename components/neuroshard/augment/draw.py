"""The draws of one case after another, all from one generator: table sets, devices of plans, and all-to-alls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.augment.acquire import CANDIDATES, acquire
from neuroshard.augment.placements import draw_all_to_all
from neuroshard.augment.plans import draw_device
from neuroshard.augment.pools import Pool
from neuroshard.augment.sets import SetSizes, draw_set, in_order
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import CollectiveCase, ComputeCase, Split
from neuroshard.core.table import Table
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import Ints

DrawCompute = Callable[[Split], ComputeCase]


@dataclass(frozen=True)
class Draw:
    """Draws cases as the settings say. `seen` are the shards to train on, `unseen` those of tables held out.

    `dims` (T,) are the columns of all tables, `table_count` is the number of tables of which a shard fits a device.
    """

    settings: AugmentSettings
    seen: Pool
    unseen: Pool
    dims: Ints
    table_count: int
    rng: np.random.Generator

    def compute(self, split: Split, of_plan: bool | None = None) -> ComputeCase:
        """A table set of the split: what one device of a plan holds, or a random set. `of_plan` None leaves that to chance."""
        settings, rng = self.settings, self.rng
        pool = self.unseen if split == "test_tables" else self.seen
        vary_share = settings.vary_share if split in ("train", "valid") else 0.0
        if (rng.random() < settings.plan_share) if of_plan is None else of_plan:
            tables = self._device_of_plan(pool, vary_share)
        else:
            tables = draw_set(
                pool, sizes=self._set_sizes(), memory_bytes=settings.memory_bytes, vary_share=vary_share, rng=rng
            )
        batch_size = int(rng.choice(settings.batch_sizes)) if settings.batch_sizes else None
        return ComputeCase(tables=tables, split=split, batch_size=batch_size)

    def all_to_all(self, kind: tuple[int, Split]) -> CollectiveCase:
        """An all-to-all of a number of devices, for a split."""
        devices, split = kind
        device_dims, start_delays_ms = draw_all_to_all(self.dims, devices, self.settings.max_delay_ms, self.rng)
        return CollectiveCase(device_dims=device_dims, start_delays_ms=start_delays_ms, split=split)

    def acquired(self, splits: Sequence[Split], model: TrainedCostModel) -> DrawCompute:
        """Draws as `compute` does, but the devices of plans to train on are those that the model learns most from.

        `splits` are those of all cases to draw.
        """
        of_plans = (self.rng.random(splits.count("train")) < self.settings.plan_share).tolist()
        sets = [self.compute("train", of_plan=False) for of_plan in of_plans if not of_plan]
        candidates = [self.compute("train", of_plan=True) for _ in range(CANDIDATES * sum(of_plans))]
        chosen, others = acquire(candidates, sets, model, sum(of_plans)), iter(sets)
        train = (next(chosen if of_plan else others) for of_plan in of_plans)

        def draw(split: Split) -> ComputeCase:
            return (next(train, None) if split == "train" else None) or self.compute(split)

        return draw

    def _device_of_plan(self, pool: Pool, vary_share: float) -> tuple[Table, ...]:
        settings, rng = self.settings, self.rng
        drawn = draw_device(
            pool,
            tables=self.table_count,
            devices=int(rng.choice(settings.devices)),
            memory_bytes=settings.memory_bytes,
            max_dim=settings.max_dim,
            vary_share=vary_share,
            rng=rng,
        )
        most = settings.max_tables
        if most is None or len(drawn) <= most:
            return drawn
        return in_order(drawn[place] for place in rng.choice(len(drawn), size=most, replace=False))

    def _set_sizes(self) -> SetSizes:
        if self.settings.max_tables is not None:
            return SetSizes(self.settings.max_tables)
        return SetSizes.for_plans(self.table_count, min(self.settings.devices))
