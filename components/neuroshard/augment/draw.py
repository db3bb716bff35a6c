"""The draws of one case after another, all from one generator: table sets, devices of plans, and all-to-alls."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neuroshard.augment.acquire import CANDIDATES, acquire
from neuroshard.augment.plans import draw_device
from neuroshard.augment.pools import Pool, SetSizes, draw_set, in_order
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import CollectiveCase, ComputeCase, Split
from neuroshard.core.table import DIM_STEP, Table
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


ALL_TABLES_SHARE = 0.5  # of the all-to-alls have all tables, as every plan does
SAME_START_SHARE = 0.2
NARROWEST_CUT = 16  # columns
# Concentration of the Dirichlet distribution of the devices' shares. The largest share of 4 devices is then on average 2.1 to 1.2
# times the mean share, that of 96 devices 5.1 to 1.5 times.
EVENNESS = (1.0, 30.0)


class AllToAll(NamedTuple):
    """The summed dims of each device, and how many ms after the first device it starts."""

    device_dims: tuple[int, ...]
    start_delays_ms: tuple[float, ...]


def draw_all_to_all(dims: Ints, devices: int, max_delay_ms: float, rng: np.random.Generator) -> AllToAll:
    """A random placement of tables with `dims` (T,) columns on `devices`, and random start delays.

    Half of the placements have all tables, the others some of them, cut into column shards no wider than a random w. A share
    1 - p of the shards, with p uniform, goes greedily to the emptiest device. The others go to random devices with unequal
    probabilities, so that even 2,000 tables are placed lopsided, and a device may stay empty. In a fifth of the all-to-alls all
    devices start together. In the others one starts first, and the rest within u x `max_delay_ms` of it, with u uniform.
    """
    if rng.random() >= ALL_TABLES_SHARE:
        dims = rng.choice(dims, size=rng.integers(1, len(dims) + 1), replace=False)
    shards = rng.permutation(_cut(dims, rng))
    at_random = round(rng.random() * len(shards))
    device_dims = _greedy(shards[at_random:], devices)
    likely = rng.dirichlet(np.full(devices, rng.uniform(*EVENNESS)))
    np.add.at(device_dims, rng.choice(devices, size=at_random, p=likely), shards[:at_random])

    delays = np.zeros(devices)
    if rng.random() >= SAME_START_SHARE:
        # NumPy refuses a range that ends at -0.0
        delays = rng.uniform(0, rng.random() * abs(max_delay_ms), size=devices)
    delays = np.round(delays - delays.min(), 3)  # no process starts with more precision than a microsecond
    return AllToAll(tuple(device_dims.tolist()), tuple(delays.tolist()))


def _cut(dims: Ints, rng: np.random.Generator) -> Ints:
    """Each table in shards of at most w columns, equal up to steps of 4 columns; w is log-uniform from 16 up."""
    widest = np.exp(rng.uniform(np.log(NARROWEST_CUT), np.log(max(dims.max(), NARROWEST_CUT))))
    steps, pieces = dims // DIM_STEP, np.ceil(dims / widest).astype(np.int64)
    place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    each, over = np.repeat(steps // pieces, pieces), np.repeat(steps % pieces, pieces)
    cut: Ints = DIM_STEP * (each + (place < over))
    return cut


def _greedy(shards: Ints, devices: int) -> Ints:
    """Summed dims of each device, with each shard, the widest first, on the device that is then emptiest."""
    emptiest = [(0, device) for device in range(devices)]
    for dim in np.sort(shards)[::-1].tolist():
        filled, device = emptiest[0]
        heapq.heapreplace(emptiest, (filled + dim, device))
    device_dims = np.zeros(devices, dtype=np.int64)
    for filled, device in emptiest:
        device_dims[device] = filled
    return device_dims
