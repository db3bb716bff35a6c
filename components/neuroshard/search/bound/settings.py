"""The switches and constants of the lower bound, in one frozen value. They make a bound lower or slower, never wrong."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BoundSettings:
    """Switches first, then constants by the module that reads them. "Share" is a share of a plan's cost unless said."""

    branches: bool = True  # distinguish plans by which tables are row-wise
    heavy_shards: bool = True  # count the columns that a device with a heavy shard leaves to the others

    # lower_bound
    tangents: int = 10  # tried for one question: 20 and 40 gave the same bounds on 26 tasks
    halvings: int = 8  # of the range in which the bound is sought: to 1/256 of it
    least_gain: float = 1e-4  # share by which a bound must be better to count as better
    branch_cells: int = 2**20  # shards x branches that are looked at, at most: each is a bound of its own

    # cuts
    exact_cut_units: int = 64  # widest table cut by dynamic programming (256 columns): it takes time in units squared

    # branches
    beyond_mean: float = 1.1  # columns of a device up to which its all-to-alls are tabulated, as a share of the mean
    # Columns x devices up to which they are, for heavy shards: 1.1 million took nine tenths of a search, and raised no bound
    all_to_all_cells: int = 300_000

    # heavy_shards
    heavy_share: float = 0.75  # share that a shard must cost by itself to be looked at
    heavy_most: int = 256  # shards that are looked at, the heaviest of these
    heavy_cells: int = 300_000  # shards x shards beside them, at most: 0.15 s of CPU


BOUND = BoundSettings()
QUICK = BoundSettings(branches=False)  # with branches a bound takes up to five times as long
