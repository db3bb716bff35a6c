"""How many measured cases a compute net needs: its error by their number, drawn at random or acquired, over some draws.

Beside it the paper's net and recipe, after as many random cases as its error is to be reached with fewer of.

Each draw has tables of its own, of which up to TABLES are taken, cases of its own and a seed of its own. Nets are tested on
devices of plans and on random sets of the same tables, against the formula without noise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from helpers.costs import BENCH
from helpers.parts import wholes
from neuroshard.augment.acquire import CANDIDATES, acquire
from neuroshard.augment.run import augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import ComputeCase
from neuroshard.core.cost import Costs
from neuroshard.core.table import Table
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import Floats
from neuroshard.measure import formula
from neuroshard.pretrain.run import pretrain

TESTS = ("plans", "sets")
TABLES = 200
MOST_IN_A_CASE = 60
TESTED = 800  # cases of either kind
AIM = 4000  # random cases, whose error is to be reached with fewer
MEMORY_BYTES = 80 * 2**30

Label = Callable[[list[ComputeCase]], Costs]  # a tenth of them held back
Said = Callable[
    [Costs, list[ComputeCase]], Floats
]  # what the paper's net, trained on the one, says of the other, in ms


@dataclass(frozen=True)
class Point:
    """Errors of one net: of which draw, by how many cases, chosen how."""

    draw: int
    chosen: str
    cases: int
    plans: float
    sets: float


def curve(
    tables: Sequence[Table],
    draw: int,
    sizes: Sequence[int],
    acquired: Sequence[int],
    epochs: int | None,
    label: Label,
    paper: Said,
) -> Iterator[Point]:
    """Errors with so many random cases, and with the fewest of `sizes` at random and all further ones `acquired`.

    Those of `paper` are of AIM random cases, or of the most that there are.
    """
    rng = np.random.default_rng([7, draw])
    some = [tables[i] for i in rng.permutation(len(tables))[:TABLES]]
    tests = [_cases(some, TESTED, 100 * draw + kind, plan_share=float(kind), vary_share=0.0) for kind in (1, 0)]
    truths = [truth(test) for test in tests]

    def point(chosen: str, cases: list[ComputeCase]) -> tuple[Point, TrainedCostModel]:
        model = pretrain(label(cases), seed=draw, epochs=epochs)
        return Point(draw, chosen, len(cases), *off([predicted(model, test) for test in tests])), model

    def off(said: Sequence[Floats]) -> list[float]:
        return [float(np.abs(one / ms - 1).mean()) for one, ms in zip(said, truths, strict=True)]

    random = _cases(some, max(sizes), 100 * draw + 2)
    models = {}
    for size in sizes:
        found, models[size] = point("random", random[:size])
        yield found

    shown = random[: min(AIM, max(sizes))]
    together = paper(label(shown), [case for test in tests for case in test])
    yield Point(draw, "paper", len(shown), *off(np.split(together, [len(tests[0])])))

    cases, model = random[: min(sizes)], models[min(sizes)]
    for size in acquired:
        more = size - len(cases)
        of_plans = round(AugmentSettings.plan_share * more)
        known = {case.case_id for case in cases}
        devices, sets = (
            [case for case in _cases(some, count, seed, plan_share=share) if case.case_id not in known]
            for count, seed, share in (
                (CANDIDATES * of_plans, 100 * draw + 3 + size, 1.0),
                (more - of_plans, 100 * draw + 4 + size, 0.0),
            )
        )
        cases = [*cases, *sets, *acquire(devices, sets, model, of_plans)]
        cases = [cases[i] for i in rng.permutation(len(cases))]
        found, model = point("acquired", cases)
        yield found


def needed(
    points: Sequence[Point], draw: int, test: str, chosen: str = "acquired", beside: str = "random"
) -> float | None:
    """Cases at which a draw's curve, begun at random, has the error that AIM random ones give `beside`; None where none has."""
    of = {(p.chosen, p.cases): getattr(p, test) for p in points if p.draw == draw}
    most = max(cases for kind, cases in of if kind == "random")
    aim = of[beside, min(AIM, most)]
    fewest = min(cases for _, cases in of)
    found = {
        cases: error for (kind, cases), error in of.items() if kind == chosen or (kind, cases) == ("random", fewest)
    }
    return reached(sorted(found), [found[cases] for cases in sorted(found)], aim)


def reached(sizes: Sequence[int], errors: Sequence[float], aim: float) -> float | None:
    """Where a curve of errors falls to `aim`, straight between its points in logarithms; None where it does not."""
    pairs = list(zip(sizes, errors, strict=True))
    for (one, before), (other, after) in pairwise(pairs):
        if after <= aim:
            share = (np.log(before) - np.log(aim)) / (np.log(before) - np.log(after)) if before > aim else 0.0
            return float(one * (other / one) ** share)
    return None


def truth(cases: Sequence[ComputeCase]) -> Floats:
    """Forward and backward ms of each case by the formula: (cases,)."""
    return np.array([formula.compute_ms(case.tables, BENCH.batch_size) for case in cases])


def predicted(model: TrainedCostModel, cases: Sequence[ComputeCase]) -> Floats:
    """The same by a model."""
    tables = [table for case in cases for table in case.tables]
    vectors = model.part_vectors(wholes(tables))
    return model.compute_ms(np.add.reduceat(vectors, np.cumsum([0, *(len(c.tables) for c in cases)])[:-1], axis=0))


def _cases(tables: Sequence[Table], count: int, seed: int, **more: Any) -> list[ComputeCase]:
    """Cases of all of these tables, as `augment` draws those to train on; without a `vary_share`, those to test with."""
    drawn = augment(
        tables,
        AugmentSettings(
            compute_cases=round(count / 0.8) + 8,
            collective_cases=0,
            devices=(4, 8, 16),
            memory_bytes=MEMORY_BYTES,
            max_tables=MOST_IN_A_CASE,
            test_share=0.0,
            seed=seed,
            **more,
        ),
    ).compute
    return [case for case in drawn if case.split == "train"][:count]
