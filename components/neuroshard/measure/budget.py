"""What to measure within a budget on this machine: how often to repeat each case, and in which order.

A few cases are timed first. While fewer than ENOUGH fit, each is repeated less often: a net averages out the noise of labels, but
it cannot guess cases that it never saw. Beyond ENOUGH, what does not fit is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neuroshard.core.case import CollectiveCase, TierCase
from neuroshard.core.text import counted
from neuroshard.measure.schedule import DRIFT, Step

Ranks = int  # of an all-to-all, or SETS or TIERS: steps of as many ranks take about equally long
SETS: Ranks = 0
TIERS: Ranks = -1  # of tables beyond HBM
TRIAL_SETS = 3  # to time first; the first one does not count, since it also draws lookups and touches memory
FEWEST_REPEATS = 2
# Table sets, all-to-alls of each number of ranks, and tables beyond HBM. Beyond these, more repeats help more than more cases.
ENOUGH = {"compute": 400, "collective": 60, "tiers": 24}
# Of the time that is left after the least, in proportion. Nets of all-to-alls need fewer cases, and the constants beyond HBM
# have had enough.
TIME_SHARES = {"compute": 0.7, "collective": 0.3, "tiers": 0.05}
PART = 20  # steps of one kind in a row, so that workers do not change at every step …
PART_APART = 120  # … and where a change ends processes and starts others


@dataclass(frozen=True)
class Bought:
    """The repeats of each case, the steps in order, and how many steps of each kind are expected to fit the time."""

    repeats: int
    steps: tuple[Step, ...]
    expected: Mapping[str, int]
    asked: Mapping[str, int]
    seconds: float
    usual_repeats: int

    def __str__(self) -> str:
        what = {"compute": "table sets", "collective": "all-to-alls", "tiers": "tables beyond HBM"}
        measured = [
            f"{self.expected[kind]:,} of {counted(self.asked[kind], 'measurement')} of {nouns}"
            for kind, nouns in what.items()
            if self.asked[kind]
        ]
        fewer = f", each with {self.repeats} repeats instead of {self.usual_repeats}"
        return (
            f"{self.seconds:.0f} s are enough for about {' and '.join(measured)}"
            f"{fewer if self.repeats < self.usual_repeats else ''}"
        )


def ranks_of(step: Step) -> Ranks:
    """An all-to-all's number of ranks, SETS, or TIERS."""
    if isinstance(step.case, TierCase):
        return TIERS
    return len(step.case.device_dims) if isinstance(step.case, CollectiveCase) else SETS


def trial(steps: Sequence[Step]) -> list[Step]:
    """The first table sets, and the first all-to-all of each number of ranks, to find out how long they take."""
    wanted: dict[Ranks, int] = {}
    chosen = []
    for step in steps:
        if step.round_ == DRIFT:
            continue
        wanted[ranks_of(step)] = wanted.get(ranks_of(step), 0) + 1
        if wanted[ranks_of(step)] <= (TRIAL_SETS if ranks_of(step) == SETS else 1):
            chosen.append(step)
    return chosen


def buy(
    least: Sequence[Step],
    others: Sequence[Step],
    seconds_each: Mapping[Ranks, float],
    seconds: float,
    usual_repeats: int,
    apart: bool = False,
) -> Bought:
    """The steps that `seconds` buy, given how long a step of each number of ranks took with `usual_repeats`.

    The `least` come first, in their order. Each kind of the `others` gets its share of the time (TIME_SHARES). `apart` means that
    changing from table sets to all-to-alls is slow.
    """
    if apart:  # the all-to-alls were timed last, so their processes are still running
        least = sorted(least, key=lambda step: step.kind == "compute")
    at = {
        ranks: seconds_each.get(ranks, max(seconds_each.values(), default=0.0))
        for ranks in map(ranks_of, [*least, *others])
    }
    for repeats in _fewer_and_fewer(usual_repeats):
        cost = {ranks: each * share_of_time(repeats, usual_repeats) for ranks, each in at.items()}
        steps = [*least, *_by_value(others, cost, PART_APART if apart else PART)]
        affordable = _affordable(steps, cost, seconds)
        asked, expected = _count(steps), _count(affordable)
        enough = {**ENOUGH, "collective": ENOUGH["collective"] * len(at.keys() - {SETS, TIERS})}
        if all(expected[kind] >= min(count, asked[kind]) for kind, count in enough.items()):
            break
    return Bought(repeats, tuple(steps), expected, asked, seconds, usual_repeats)


def _fewer_and_fewer(repeats: int) -> list[int]:
    """7 -> 7, 4, 2."""
    counts = [repeats]
    while counts[-1] > FEWEST_REPEATS:
        counts.append(max(-(-counts[-1] // 2), FEWEST_REPEATS))
    return counts


def share_of_time(repeats: int, usual: int) -> float:
    """The share of a case's usual time that it takes with fewer repeats. Drawing lookups takes the same time with any."""
    return 0.2 + 0.8 * repeats / usual


def _by_value(steps: Sequence[Step], seconds_each: Mapping[Ranks, float], part: int) -> list[Step]:
    """The steps in parts of one kind each, ordered so that each kind has its share of the time at any moment."""
    parts: list[tuple[float, list[Step]]] = []
    for kind, share in TIME_SHARES.items():
        of_kind = [step for step in steps if step.kind == kind]
        spent = 0.0
        for begin in range(0, len(of_kind), part):
            some = of_kind[begin : begin + part]
            parts.append((spent / share, some))
            spent += sum(seconds_each[ranks_of(step)] for step in some)
    return [step for _, some in sorted(parts, key=lambda one: one[0]) for step in some]


def _affordable(steps: Sequence[Step], seconds_each: Mapping[Ranks, float], seconds: float) -> list[Step]:
    """The first steps, as many as fit the time."""
    found = []
    for step in steps:
        seconds -= seconds_each[ranks_of(step)]
        if seconds < 0:
            break
        found.append(step)
    return found


def _count(steps: Sequence[Step]) -> dict[str, int]:
    kinds = [step.kind for step in steps if step.round_ != DRIFT]
    return {kind: kinds.count(kind) for kind in TIME_SHARES}  # type: ignore[arg-type]
