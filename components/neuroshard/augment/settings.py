"""What to draw: how many cases, for which devices, and how far they vary."""

from dataclasses import dataclass
from typing import Annotated

from neuroshard.core.cost import MOST_MS
from neuroshard.core.errors import UsageError
from neuroshard.core.table import DIM_STEP, MAX_DIM
from neuroshard.core.task import MAX_DEVICES
from neuroshard.orders.options import BYTES, COUNTS, Option, Seed

MOST_CASES = 10_000_000  # a hundred times the paper's
MOST_TIER_CASES = 10_000
MOST_TABLES = 100_000  # all tables of a large task on one device


@dataclass(frozen=True, kw_only=True)
class AugmentSettings:
    """How many cases to draw, and what they are drawn from. Raises UsageError for a number or share out of range.

    `collective_cases` are split evenly over the numbers of `devices`; one device has no all-to-all. Table sets fit
    `memory_bytes`. A table that is wider than `max_dim` also comes in its own width and its halves. `test_share` of the tables
    is kept for the split `test_tables`. In training and validation, `vary_share` of the shards have other rows and pooling
    factors than their table.

    `plan_share` of the compute cases are what one device holds in a random plan for one of the numbers of `devices`; the others
    are random sets of 1 to 15 tables. Where a device has more tables on average, a fifth of the sets have more, up to 1.3 times
    the average on the least of `devices`. With `max_tables`, every case has 1 to that many tables instead.
    """

    devices: Annotated[tuple[int, ...], "Numbers of devices whose all-to-all to measure: 4, or 2,4,8.", Option(COUNTS)]
    memory_bytes: Annotated[int, "Memory of a device: bytes or a unit (32GiB).", Option(BYTES, "SIZE", flag="--memory")]
    compute_cases: Annotated[int, "Table sets to measure on one device.", Option(int, least=1, default=2000)]
    collective_cases: Annotated[
        int, "All-to-alls to measure, over all numbers of devices.", Option(int, least=0, default=400)
    ]
    tier_cases: Annotated[
        int, "Cases of tables beyond HBM, cached and in host memory; GPUs only: 48 are enough.", Option(int, least=0)
    ] = 0
    max_dim: Annotated[int, "Widest shard to measure.", Option(int)] = 128  # as in the paper
    max_tables: Annotated[
        int | None, "Most tables in a set [default: 15, and more where a device has more].", Option(int, least=1)
    ] = None
    max_delay_ms: Annotated[
        float, "Latest start of a device in an all-to-all, in ms.", Option(float, "MS", least=0, flag="--max-delay")
    ] = 20.0
    test_share: Annotated[
        float, "Share of tables kept from training, to test on.", Option(float, "SHARE", least=0, most=0.9)
    ] = 0.2
    vary_share: float = 0.5
    plan_share: float = 0.75
    batch_sizes: Annotated[
        tuple[int, ...] | None,
        "Batch sizes of the table sets, one for each set: 256,512,1024 [default: that of `measure`].",
        Option(COUNTS, "NUMBERS"),
    ] = None
    seed: Seed

    def __post_init__(self) -> None:
        if not DIM_STEP <= self.max_dim <= MAX_DIM or self.max_dim % DIM_STEP:
            raise UsageError(
                f"the widest shard must have a multiple of {DIM_STEP} columns, at most {MAX_DIM}, not {self.max_dim}"
            )
        if not 0 <= self.test_share < 1:
            raise UsageError(f"the test share must be from 0 to below 1, not {self.test_share:g}")
        for name, share in (("vary", self.vary_share), ("plan", self.plan_share)):
            if not 0 <= share <= 1:
                raise UsageError(f"the {name} share must be from 0 to 1, not {share:g}")
        if self.max_tables is not None and self.max_tables < 1:
            raise UsageError(f"a set must have at least 1 table, not {self.max_tables}")
        if not 0 <= self.max_delay_ms <= MOST_MS:
            raise UsageError(f"the latest start must be from 0 to {MOST_MS:,.0f} ms, not {self.max_delay_ms:g}")
        if self.tier_cases > MOST_TIER_CASES:
            raise UsageError(
                f"at most {MOST_TIER_CASES:,} cases beyond HBM can be drawn, not {self.tier_cases:,}: they give a few constants"
            )
        if max(self.compute_cases, self.collective_cases) > MOST_CASES or (self.max_tables or 0) > MOST_TABLES:
            raise UsageError(
                f"at most {MOST_CASES:,} table sets and as many all-to-alls can be drawn, of {MOST_TABLES:,} tables each, not "
                f"{self.compute_cases:,} and {self.collective_cases:,}"
                + (f" of {self.max_tables:,}" if self.max_tables else "")
            )
        if max(self.devices) > MAX_DEVICES:
            raise UsageError(f"an all-to-all is of at most {MAX_DEVICES:,} devices, not {max(self.devices):,}")
