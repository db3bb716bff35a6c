"""How to search, and how far the cost model can be trusted."""

import math
from dataclasses import dataclass

from neuroshard.core.constraints import SIMPLICITY, check_simplicity
from neuroshard.core.errors import UsageError
from neuroshard.orders.options import ALGORITHMS, LOCAL_SEARCH
from neuroshard.orders.values import maybe, one_of, whole
from neuroshard.search.tuning import PAPER, TUNING, BeamWidth, Tuning

UNTIL_TIME_IS_UP = 10**6  # rounds of a search with a time budget


@dataclass(frozen=True)
class SearchSettings:
    """How to search, as the options say (orders/options.py), with rounds of the `tuning` by default.

    `width` is that of the published search. With `try_row_wise`, and if the task has no rule about rows, tables may be split
    row-wise if a first plan with rows split is cheaper than all first column-wise plans. With `try_data_parallel`, small tables
    are data-parallel if the plan found with copies is cheaper than the one found without by what the tuning says. With
    `try_rows_by_access`, hot rows of sequences with a row order are copied where that is cheaper (rows_by_access.py); with
    `try_index_dedup`, ids of sequences are sent once where that is (index_dedup.py).
    """

    algorithm: str = LOCAL_SEARCH
    seed: int = 0
    rounds: int | None = None
    time_budget_s: float | None = None
    move_budget_bytes: int | None = None
    simplicity: float = SIMPLICITY
    keep_optimizer_state: bool = False
    try_row_wise: bool = False
    try_data_parallel: bool = False
    try_rows_by_access: bool = False
    try_index_dedup: bool = False
    width: BeamWidth = PAPER
    tuning: Tuning = TUNING

    def check(self, from_a_plan: bool) -> None:
        """Raise UsageError for settings that contradict each other, or `from_a_plan`: whether the search starts from one."""
        one_of("algorithm", self.algorithm, ALGORITHMS)
        if self.time_budget_s is not None and not 0 < self.time_budget_s < math.inf:
            raise UsageError(
                f"the time budget must be above 0 seconds, not {self.time_budget_s:g}; leave it out to search to the end"
            )
        maybe(whole, "rounds", self.rounds, 0, UNTIL_TIME_IS_UP)
        check_simplicity(self.simplicity)
        self.width.check()
        if from_a_plan and self.algorithm != LOCAL_SEARCH:
            raise UsageError(f"{self.algorithm} places all tables anew; only {LOCAL_SEARCH} starts from a plan")
        if self.move_budget_bytes is not None and not from_a_plan:
            raise UsageError("a move budget is for a search that starts from a plan; give it with --from")
        if self.keep_optimizer_state and not from_a_plan:
            raise UsageError(
                "optimizer state is kept by a search that starts from a plan; give --keep-optimizer-state with --from"
            )

    @property
    def most_rounds(self) -> int:
        """Rounds of local search, if its time is not up before."""
        if self.rounds is not None:
            return self.rounds
        return self.tuning.rounds if self.time_budget_s is None else UNTIL_TIME_IS_UP


USUAL = SearchSettings()


@dataclass(frozen=True)
class Trust:
    """How far the cost model can be trusted, as the plan's provenance says it.

    `error` is how far predictions are off measured costs, as a share. `instead` says why this is not the hardware's own model.
    """

    error: float | None = None
    instead: str = ""


UNKNOWN = Trust()
