"""The switches and constants of the lower bound, in one frozen value. They make a bound lower or slower, never wrong."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BoundSettings:
    """A switch first, then constants by the module that reads them. "Share" is a share of a plan's cost unless said."""

    branches: bool = True  # distinguish plans by which tables are row-wise

    # lower_bound
    tangents: int = 10  # tried for one question: 20 and 40 gave the same bounds on 26 tasks
    halvings: int = 8  # of the range in which the bound is sought: to 1/256 of it
    least_gain: float = 1e-4  # share by which a bound must be better to count as better
    branch_cells: int = 2**20  # shards x branches that are looked at, at most: each is a bound of its own

    # cuts
    exact_cut_units: int = 64  # widest table cut by dynamic programming (256 columns): it takes time in units squared


BOUND = BoundSettings()
QUICK = BoundSettings(branches=False)  # with branches a bound takes up to five times as long
