"""In which order to measure: first the least that a cost model needs, then at random.

The least is some cases of every kind: table sets of each split and width, and all-to-alls of each split and number of ranks. A
run that its budget cuts short has then something of all. Beyond it the order is random, so that such a run has a fair sample and
drift does not look like a trend.

Some cases are measured again later, which tells how repeatable the labels are; or all are, in several rounds, whose mean is
the label. One is measured over and over, which tells whether the machine has become slower or faster meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase, Split

Case = ComputeCase | CollectiveCase
_Case = TypeVar("_Case", ComputeCase, CollectiveCase)

AGAIN_EVERY = 33  # 3 % of the cases have a round 1 …
AGAIN_AT_LEAST = 8  # … and a larger share of small sets, so that a median over the pairs says something
AGAIN_LATER = 0.1  # … once this share of the others has been measured since: minutes later, or hours
BLOCK = 40  # compute and all-to-all cases take turns in blocks of about this size, so that both are measured whenever it ends
# Cases to measure first of each split: with 20 all-to-alls of a number of ranks to train on there is a net for it (pretrain), and
# with so many others its error is known.
LEAST_SETS: dict[Split, int] = {"train": 32, "valid": 5, "test_sets": 5, "test_tables": 10}
LEAST_EXCHANGES: dict[Split, int] = {"train": 22, "valid": 3, "test_sets": 3, "test_tables": 0}
LEAST_BLOCKS = 4  # in which table sets and all-to-alls of the least take turns
REFERENCE = -1  # the round of a reference kernel step, which is not written to the costs


@dataclass(frozen=True)
class Step:
    """One case to measure. Round 0 is the first measurement, later ones repeat it; REFERENCE is a look at the drift."""

    case: Case
    round_: int

    @property
    def kind(self) -> Literal["compute", "collective"]:
        return "compute" if isinstance(self.case, ComputeCase) else "collective"


@dataclass(frozen=True)
class Schedule:
    """All steps in their order: the least that a cost model needs, then the others."""

    least: tuple[Step, ...]
    others: tuple[Step, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.least, *self.others)

    def only(self, wanted: Callable[[Step], bool]) -> "Schedule":
        """Those of the steps that are wanted."""
        return Schedule(tuple(filter(wanted, self.least)), tuple(filter(wanted, self.others)))


def schedule(cases: Cases, seed: int, rounds: int = 1) -> Schedule:
    """All steps, in the same order for the same seed: the least first. The first compute case is the reference,
    once a block.

    Of several `rounds` each is all cases once, in the same order: what repeats a case comes as late as it can.
    """
    rng = np.random.default_rng(seed)
    drawn_sets = [cases.compute[i] for i in rng.permutation(len(cases.compute))]
    drawn_all_to_alls = [cases.collective[i] for i in rng.permutation(len(cases.collective))]
    least_sets, least_all_to_alls = _least_sets(drawn_sets), _least_all_to_alls(drawn_all_to_alls)
    first = {case.case_id for case in least_sets} | {case.case_id for case in least_all_to_alls}

    def rest(steps: Sequence[Step]) -> list[Step]:
        return [step for step in steps if step.round_ != 0 or step.case.case_id not in first]

    compute, collective = (_in_rounds(some, rounds) for some in (drawn_sets, drawn_all_to_alls))
    reference_kernel = [Step(step.case, REFERENCE) for step in compute[:1]]
    once_sets, once_all_to_alls = ([Step(case, 0) for case in some] for some in (least_sets, least_all_to_alls))
    return Schedule(
        least=_in_turns(reference_kernel, once_sets, once_all_to_alls, LEAST_BLOCKS),
        others=_in_turns(
            reference_kernel, rest(compute), rest(collective), -(-max(len(compute), len(collective)) // BLOCK)
        ),
    )


def _in_turns(
    reference_kernel: Sequence[Step], compute: Sequence[Step], collective: Sequence[Step], blocks: int
) -> tuple[Step, ...]:
    """So many blocks, each with a look at the reference kernel, its part of the table sets, and its part of the all-to-alls."""
    order: list[Step] = []
    for block in range(blocks):
        parts = [
            steps[block * len(steps) // blocks : (block + 1) * len(steps) // blocks] for steps in (compute, collective)
        ]
        if any(parts):
            order += [*reference_kernel, *parts[0], *parts[1]]
    return tuple(order)


def _least_sets(drawn: Sequence[ComputeCase]) -> list[ComputeCase]:
    """The first of each split, and to train on for a half such as bring a width that the others lack."""
    by_split: dict[str, list[ComputeCase]] = {}
    for case in drawn:
        by_split.setdefault(case.split, []).append(case)
    widths: set[int] = set()
    bringing: list[ComputeCase] = []
    for case in by_split.get("train", ()):
        brings = {table.dim for table in case.tables} - widths
        if brings and len(bringing) < LEAST_SETS["train"] // 2:
            widths |= brings
            bringing.append(case)
    known = {case.case_id for case in bringing}
    by_split["train"] = [*bringing, *(case for case in by_split.get("train", ()) if case.case_id not in known)]
    return _evenly([by_split.get(split, [])[:count] for split, count in LEAST_SETS.items()])


def _least_all_to_alls(drawn: Sequence[CollectiveCase]) -> list[CollectiveCase]:
    """The first of each split and number of ranks."""
    kinds: dict[tuple[int, str], list[CollectiveCase]] = {}
    for case in drawn:
        some = kinds.setdefault((len(case.device_dims), case.split), [])
        if len(some) < LEAST_EXCHANGES[case.split]:
            some.append(case)
    return _evenly(list(kinds.values()))


def _evenly(kinds: Sequence[Sequence[_Case]]) -> list[_Case]:
    """All of them, each kind spread evenly over the whole."""
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
