"""In which order to measure: at random, so that a run cut short is a fair sample and drift does not look like a trend.

Some cases are measured again later, which tells how repeatable the labels are; or all are, in several rounds, whose mean is
the label. One is measured over and over, which tells whether the machine has become slower or faster meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from neuroshard.core.case import Cases, CommCase, ComputeCase

Case = ComputeCase | CommCase

AGAIN_EVERY = 33  # 3 % of the cases have a round 1 …
AGAIN_AT_LEAST = 8  # … and a larger share of small sets, so that a median over the pairs says something
AGAIN_LATER = 0.1  # … once this share of the others has been measured since: minutes later, or hours
BLOCK = (
    40  # compute and exchange cases take turns in blocks of about this size, so that both are measured whenever it ends
)
SENTINEL = -1  # the round of a sentinel step, which is not written to the costs


@dataclass(frozen=True)
class Step:
    """One case to measure. Round 0 is the first measurement, later ones repeat it; SENTINEL is a look at the drift."""

    case: Case
    round_: int

    @property
    def kind(self) -> Literal["compute", "comm"]:
        return "compute" if isinstance(self.case, ComputeCase) else "comm"


def schedule(cases: Cases, seed: int, rounds: int = 1) -> list[Step]:
    """All steps, in the same order for the same seed. The first compute case is the sentinel, once a block.

    Of several `rounds` each is all cases once, in the same order: what repeats a case comes as late as it can.
    """
    rng = np.random.default_rng(seed)
    compute = _in_rounds([cases.compute[i] for i in rng.permutation(len(cases.compute))], rounds)
    comm = _in_rounds([cases.comm[i] for i in rng.permutation(len(cases.comm))], rounds)
    sentinel = [Step(step.case, SENTINEL) for step in compute[:1]]

    blocks = -(-max(len(compute), len(comm)) // BLOCK)
    order: list[Step] = []
    for block in range(blocks):
        order += sentinel
        for steps in (compute, comm):
            order += steps[block * len(steps) // blocks : (block + 1) * len(steps) // blocks]
    return order


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
