"""How a run went, and how far its costs can be trusted: repeated measurements against labels, and drift."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neuroshard.core.cost import Costs
from neuroshard.core.text import agreeing, counted


@dataclass(frozen=True)
class RunSummary:
    """How a run went. Counts are of measurements: one for each case, and a second one for some of them."""

    costs: Costs  # that the run left in its folder
    planned: int
    measured: int  # by this run and those before it
    # by this run: table sets under 0, tables beyond HBM under -1, all-to-alls under their number of ranks
    now_by_ranks: Mapping[int, int]
    impossible: int  # all-to-alls among more ranks than this machine can have
    without_tiers: int  # cases beyond HBM that were left out, and why there are …
    no_tiers: str  # … no tiers here; empty where there are
    seconds: float  # of this run
    drift_case_ms: Sequence[float]

    @property
    def errors(self) -> int:
        """Among the measured."""
        return sum(bool(cost.error) for _, cost in self.costs.every)

    @property
    def disturbed(self) -> int:
        """Labels that were measured while something else kept the machine busy."""
        return sum(cost.disturbed for _, cost in self.costs.compute if cost.round == 0)

    @property
    def repeatability(self) -> dict[str, float | None]:
        """The median relative difference between a first and a later measurement of a case; None where none was."""
        forward, backward = collective_repeatability(self.costs)
        compute = compute_repeatability(self.costs)
        return {"compute": compute, "forward all-to-alls": forward, "backward all-to-alls": backward}

    @property
    def drift(self) -> float | None:
        """How much slower the drift case was in the second half of the run than in the first: the medians; None for fewer than
        four samples."""
        taken, half = self.drift_case_ms, len(self.drift_case_ms) // 2
        return statistics.median(taken[-half:]) / statistics.median(taken[:half]) - 1 if half >= 2 else None

    @property
    def now(self) -> int:
        """What this run measured."""
        return sum(self.now_by_ranks.values())

    @property
    def left(self) -> int:
        """What a later run would still measure."""
        return self.planned - self.measured

    def __str__(self) -> str:
        text = [
            f"{self.measured} of {self.planned} measured ({self.now} now, in {self.seconds:.0f} s), "
            f"{counted(self.errors, 'error')}"
        ]
        if self.now:
            text.append(f"now: {_kinds(self.now_by_ranks)}")
        if self.left and not self.now:
            # workers start, and a first run finds out how fast the machine is in calm
            text.append(
                f"the start took the whole budget: run it again, as the next start into this folder may be faster, or give more "
                f"than {math.ceil(self.seconds)}s"
            )
        elif self.left:
            text.append(f"the budget is used up with {self.left} left: run it again to continue")
        if self.disturbed:
            disturbed = agreeing(self.disturbed, "label", "was", "were")
            text.append(f"{disturbed} measured while the machine was disturbed, and marked so")
        if self.impossible:
            text.append(f"{counted(self.impossible, 'all-to-all')} left out, of more ranks than this machine can have")
        if self.without_tiers:
            text.append(f"{counted(self.without_tiers, 'case')} beyond HBM left out: {self.no_tiers}")
        for name, value in self.repeatability.items():
            if value is not None:
                text.append(f"{name} measured again differ by {value:.1%} (median)")
        if self.drift is not None:
            text.append(f"drift {self.drift:+.1%}")
        return "; ".join(text)


def _kinds(by_ranks: Mapping[int, int]) -> str:
    """`310 table sets, 62 all-to-alls of 4 ranks`."""
    return ", ".join(
        f"{counted(count, 'all-to-all')} of {ranks:,} ranks"
        if ranks > 0
        else f"{counted(count, 'case')} beyond HBM"
        if ranks < 0
        else counted(count, "table set")
        for ranks, count in by_ranks.items()
    )


def compute_repeatability(costs: Costs) -> float | None:
    """Median of |later / first - 1| of forward + backward, over the table sets measured twice.

    Leaves out a disturbed repetition of an undisturbed label: it says nothing about the noise of that label.
    """
    first = {cost.case_id: cost for _, cost in costs.compute if cost.round == 0 and not cost.error}
    pairs = [
        (first[cost.case_id], cost)
        for _, cost in costs.compute
        if cost.round == 1 and not cost.error and cost.case_id in first
    ]
    return _median_difference([(one.total_ms, two.total_ms) for one, two in pairs if one.disturbed >= two.disturbed])


def collective_repeatability(costs: Costs) -> tuple[float | None, float | None]:
    """The same for all-to-alls, forward and backward, over all devices of those measured twice."""
    first = {cost.case_id: cost for _, cost in costs.collective if cost.round == 0 and not cost.error}
    pairs = [(first[c.case_id], c) for _, c in costs.collective if c.round == 1 and not c.error and c.case_id in first]
    forward = [times for one, two in pairs for times in zip(one.forward_ms or (), two.forward_ms or (), strict=True)]
    backward = [times for one, two in pairs for times in zip(one.backward_ms or (), two.backward_ms or (), strict=True)]
    return _median_difference(forward), _median_difference(backward)


def _median_difference(pairs: Sequence[tuple[float, float]]) -> float | None:
    return statistics.median(abs(again / first - 1) for first, again in pairs if first) if pairs else None
