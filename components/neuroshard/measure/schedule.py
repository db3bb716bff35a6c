"""The order of measurements: first the least that a cost model needs, then the others at random.

The least is some cases of every kind: table sets of each split and width, and all-to-alls of each split and number of ranks. So
a run that ends early has some of each. The others are in random order, so such a run has a fair sample, and drift does not look
like a trend.

A few cases are measured again later, which shows how repeatable labels are; with several rounds all cases are, and the mean is
the label. One case, the drift case, is measured in every block, which shows whether the machine becomes slower or faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from neuroshard.core.case import (
    FEWEST_TRAIN_ALL_TO_ALLS,
    FEWEST_TRAIN_SETS,
    Case,
    Cases,
    CollectiveCase,
    ComputeCase,
    Split,
)

_Case = TypeVar("_Case", ComputeCase, CollectiveCase)

AGAIN_EVERY = 33  # 3 % of the cases have a round 1 …
AGAIN_AT_LEAST = 8  # … and at least this many, since the repeatability is a median over them …
AGAIN_LATER = 0.1  # … after this share of the other cases was measured: minutes later, or hours
BLOCK = 40  # table sets and all-to-alls alternate in blocks of about this size, so a run that ends early has both
# Cases to measure first, of each split: a few more to train on than a net needs, as some end in errors, and enough others to
# know its error.
LEAST_SETS: dict[Split, int] = {"train": FEWEST_TRAIN_SETS + 8, "valid": 5, "test_sets": 5, "test_tables": 10}
# of each number of ranks
LEAST_ALL_TO_ALLS: dict[Split, int] = {
    "train": FEWEST_TRAIN_ALL_TO_ALLS + 2,
    "valid": 3,
    "test_sets": 3,
    "test_tables": 0,
}
LEAST_TIERS = 24  # beyond HBM: what the few constants need that are fitted to them
LEAST_BLOCKS = 4  # of table sets and all-to-alls in the least
DRIFT = -1  # the round of the drift case, which is not written to the costs


@dataclass(frozen=True)
class Step:
    """One case to measure. Round 0 is the first measurement, later rounds repeat it; DRIFT is the drift case."""

    case: Case
    round_: int

    @property
    def kind(self) -> Literal["compute", "collective", "tiers"]:
        return self.case.kind


@dataclass(frozen=True)
class Schedule:
    """All steps in their order: the least that a cost model needs, then the others."""

    least: tuple[Step, ...]
    others: tuple[Step, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.least, *self.others)

    def only(self, wanted: Callable[[Step], bool]) -> "Schedule":
        """The schedule with the wanted steps only."""
        return Schedule(tuple(filter(wanted, self.least)), tuple(filter(wanted, self.others)))


def schedule(cases: Cases, seed: int, rounds: int = 1) -> Schedule:
    """All steps, in the same order for the same seed. The first table set is the drift case, once in each block.

    With several `rounds`, each round has all cases in the same order, so a repetition comes as late as possible.
    """
    rng = np.random.default_rng(seed)
    drawn_sets = [cases.compute[i] for i in rng.permutation(len(cases.compute))]
    drawn_all_to_alls = [cases.collective[i] for i in rng.permutation(len(cases.collective))]
    least_sets, least_all_to_alls = _least_sets(drawn_sets), _least_all_to_alls(drawn_all_to_alls)
    drawn_tiers = [cases.tiers[i] for i in rng.permutation(len(cases.tiers))]
    least_tiers = drawn_tiers[:LEAST_TIERS]
    first = {case.case_id for some in (least_sets, least_all_to_alls, least_tiers) for case in some}

    def rest(steps: Sequence[Step]) -> list[Step]:
        return [step for step in steps if step.round_ != 0 or step.case.case_id not in first]

    compute, collective = (_in_rounds(some, rounds) for some in (drawn_sets, drawn_all_to_alls))
    drift_case = [Step(step.case, DRIFT) for step in compute[:1]]
    tiers = [Step(case, round_) for round_ in range(rounds) for case in drawn_tiers]
    once = ([Step(case, 0) for case in some] for some in (least_sets, least_all_to_alls, least_tiers))
    kinds = (compute, collective, tiers)
    return Schedule(
        least=_in_blocks(drift_case, list(once), LEAST_BLOCKS),
        others=_in_blocks(drift_case, list(map(rest, kinds)), -(-max(map(len, kinds)) // BLOCK)),
    )


def _in_blocks(drift_case: Sequence[Step], kinds: Sequence[Sequence[Step]], blocks: int) -> tuple[Step, ...]:
    """The steps in `blocks` blocks: the drift case, and a part of each kind."""
    order: list[Step] = []
    for block in range(blocks):
        parts = [steps[block * len(steps) // blocks : (block + 1) * len(steps) // blocks] for steps in kinds]
        if any(parts):
            order += [*drift_case, *(step for part in parts for step in part)]
    return tuple(order)


def _least_sets(drawn: Sequence[ComputeCase]) -> list[ComputeCase]:
    """The first cases of each split. Half of those to train on each bring a width that the ones before lack."""
    by_split: dict[str, list[ComputeCase]] = {}
    for case in drawn:
        by_split.setdefault(case.split, []).append(case)
    widths: set[int] = set()
    with_new_widths: list[ComputeCase] = []
    for case in by_split.get("train", ()):
        new = {table.dim for table in case.tables} - widths
        if new and len(with_new_widths) < LEAST_SETS["train"] // 2:
            widths |= new
            with_new_widths.append(case)
    known = {case.case_id for case in with_new_widths}
    by_split["train"] = [*with_new_widths, *(case for case in by_split.get("train", ()) if case.case_id not in known)]
    return _evenly([by_split.get(split, [])[:count] for split, count in LEAST_SETS.items()])


def _least_all_to_alls(drawn: Sequence[CollectiveCase]) -> list[CollectiveCase]:
    """The first of each split and number of ranks."""
    kinds: dict[tuple[int, str], list[CollectiveCase]] = {}
    for case in drawn:
        some = kinds.setdefault((len(case.device_dims), case.split), [])
        if len(some) < LEAST_ALL_TO_ALLS[case.split]:
            some.append(case)
    return _evenly(list(kinds.values()))


def _evenly(kinds: Sequence[Sequence[_Case]]) -> list[_Case]:
    """All cases, each kind spread evenly over the whole."""
    placed = [((place + 0.5) / len(kind), case) for kind in kinds for place, case in enumerate(kind)]
    return [case for _, case in sorted(placed, key=lambda one: one[0])]


def _in_rounds(cases: Sequence[Case], rounds: int) -> list[Step]:
    if rounds == 1:
        return _with_repetitions(cases)
    return [Step(case, round_) for round_ in range(rounds) for case in cases]


def _with_repetitions(cases: Sequence[Case]) -> list[Step]:
    """Round 0 of every case, and round 1 of some of them, later."""
    every = max(1, min(AGAIN_EVERY, len(cases) // AGAIN_AT_LEAST))
    later = max(1, round(AGAIN_LATER * len(cases)))
    first = [(float(place), Step(case, 0)) for place, case in enumerate(cases)]
    again = [(place + later + 0.5, Step(case, 1)) for place, case in enumerate(cases) if place % every == 0]
    return [step for _, step in sorted(first + again, key=lambda placed: placed[0])]
