"""How many measured cases a compute net needs: its error by their number, drawn at random or acquired, over some draws.

Each draw has tables of its own, of which up to TABLES are taken, cases of its own and a seed of its own. Nets are tested on
devices of plans and on random sets of the same tables, against the formula without noise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from helpers.costs import BENCH
from neuroshard.augment.acquire import CANDIDATES, acquire
from neuroshard.augment.run import augment
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


@dataclass(frozen=True)
class Point:
    """Errors of one net: of which draw, by how many cases, chosen how."""

    draw: int
    chosen: str
    cases: int
    plans: float
    sets: float


def curve(
    tables: Sequence[Table], draw: int, sizes: Sequence[int], acquired: Sequence[int], epochs: int | None, label: Label
) -> Iterator[Point]:
    """Errors with so many random cases, and with the fewest of `sizes` at random and all further ones `acquired`."""
    rng = np.random.default_rng([7, draw])
    some = [tables[i] for i in rng.permutation(len(tables))[:TABLES]]
    tests = [_cases(some, TESTED, 100 * draw + kind, plan_share=float(kind), vary_share=0.0) for kind in (1, 0)]
    truths = [truth(test) for test in tests]

    def point(chosen: str, cases: list[ComputeCase]) -> tuple[Point, TrainedCostModel]:
        model = pretrain(label(cases), seed=draw, epochs=epochs)
        errors = [float(np.abs(predicted(model, t) / ms - 1).mean()) for t, ms in zip(tests, truths, strict=True)]
        return Point(draw, chosen, len(cases), *errors), model

    random = _cases(some, max(sizes), 100 * draw + 2)
    models = {}
    for size in sizes:
        found, models[size] = point("random", random[:size])
        yield found

    cases, model = random[: min(sizes)], models[min(sizes)]
    for size in acquired:
        more = size - len(cases)
        known = {case.case_id for case in cases}
        candidates = [
            case for case in _cases(some, CANDIDATES * more, 100 * draw + 3 + size) if case.case_id not in known
        ]
        cases = [*cases, *acquire(candidates, model, rng)[:more]]
        cases = [cases[i] for i in rng.permutation(len(cases))]
        found, model = point("acquired", cases)
        yield found


def needed(points: Sequence[Point], draw: int, test: str) -> float | None:
    """Cases at which the acquired curve of a draw, begun at random, has the error of AIM random ones; None where none has."""
    of = {(p.chosen, p.cases): getattr(p, test) for p in points if p.draw == draw}
    most = max(cases for chosen, cases in of if chosen == "random")
    aim = of["random", min(AIM, most)]
    fewest = min(cases for _, cases in of)
    found = {cases: error for (chosen, cases), error in of.items() if chosen == "acquired" or cases == fewest}
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
    vectors = model.table_vectors(tables, np.array([table.dim for table in tables]))
    return model.compute_ms(np.add.reduceat(vectors, np.cumsum([0, *(len(c.tables) for c in cases)])[:-1], axis=0))


def _cases(tables: Sequence[Table], count: int, seed: int, **more: float) -> list[ComputeCase]:
    """Cases of all of these tables, as `augment` draws those to train on; without a `vary_share`, those to test with."""
    drawn = augment(
        tables,
        compute_cases=round(count / 0.8) + 8,
        comm_cases=0,
        devices=(4, 8, 16),
        memory_bytes=MEMORY_BYTES,
        max_tables=MOST_IN_A_CASE,
        test_share=0.0,
        seed=seed,
        **more,
    ).compute
    return [case for case in drawn if case.split == "train"][:count]
