"""Too few measurements of a part -> cases labelled by the analytic model, scaled to the measurements.

A net that learns from ten cases predicts worse than a datasheet. So for each part with too few cases (table sets, or the
all-to-alls of one number of ranks), cases are drawn and labelled by the hardware's analytic model, times the median ratio of
measured to analytic time. The net learns the drawn and the measured cases together. Errors are reported on measured cases only.
The cost model lists these parts as stand-ins, so that plans and the gate treat them as less certain.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from neuroshard.core.case import FEWEST_TRAIN_ALL_TO_ALLS, FEWEST_TRAIN_SETS, CollectiveCase, ComputeCase, Split
from neuroshard.core.cost import CollectiveCost, ComputeCost, Costs
from neuroshard.core.errors import InvalidInput
from neuroshard.core.label import teaches
from neuroshard.core.part import Part
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.text import counted
from neuroshard.core.value import shown
from neuroshard.costmodel.analytic import Analytic, analytic_for
from neuroshard.costmodel.protocol import Floats

DRAWN_SETS: Final = 400  # enough for a net to be within 5 % of the analytic model
DRAWN_ALL_TO_ALLS: Final = 120
VALID_EVERY: Final = 10  # every tenth drawn case is in the split that chooses the best epoch
LATEST_START_MS: Final = 20.0  # latest start of a rank, as in augment
OWN_STREAM: Final = (
    0x57A2D  # reads STAND; with the seed it makes a stream of random numbers that no other draw of a run has
)


@dataclass(frozen=True)
class Completed:
    """Measured costs plus drawn cases, which parts were drawn, and a sentence for each of these."""

    costs: Costs
    drawn_sets: bool
    drawn_all_to_alls: bool  # of some number of ranks
    stand_ins: tuple[str, ...]


def completed(costs: Costs, seed: int, sets_too: bool = False) -> Completed:
    """The costs, plus drawn table sets if there are too few (or `sets_too`), and drawn all-to-alls for each wanted number of
    ranks with too few. Raises InvalidInput if table sets must be drawn and no tables are known."""
    rng = np.random.default_rng([seed, OWN_STREAM])
    analytic = Analytic(analytic_for(costs.bench.hardware)[0], costs.bench.batch_size)
    train = [case for case, cost in costs.compute if case.split == "train" and cost.round == 0 and teaches(cost)]
    of_sets, of_all_to_alls = [], []
    compute, collective = list(costs.compute), list(costs.collective)

    if sets_too or len(train) < FEWEST_TRAIN_SETS:
        factor, known = _sets_factor(analytic, costs)
        compute += _drawn_sets(analytic, costs, factor, rng)
        of_sets.append(
            f"compute costs are those of {analytic.name}, {_scaled(factor, known, 'table set', costs.compute)}"
            + ("" if len(train) < FEWEST_TRAIN_SETS else ", which predicts them better than a net of so few cases")
        )
    for ranks in wanted_ranks(costs):
        of_ranks = [cost for case, cost in costs.collective if len(case.device_dims) == ranks and case.split == "train"]
        enough = sum(cost.round == 0 and teaches(cost) for cost in of_ranks)
        if enough < FEWEST_TRAIN_ALL_TO_ALLS:
            factors, known = _all_to_all_factors(analytic, costs, ranks)
            collective += _drawn_all_to_alls(analytic, costs, ranks, factors, rng)
            of_all_to_alls.append(
                f"all-to-all costs of {ranks:,} ranks are those of {analytic.name}, "
                f"{_scaled(math.sqrt(math.prod(factors)), known, 'all-to-all', costs.collective)}"
            )
    drawn = costs.model_copy(update={"compute": tuple(compute), "collective": tuple(collective)})
    return Completed(drawn, bool(of_sets), bool(of_all_to_alls), (*of_sets, *of_all_to_alls))


def wanted_ranks(costs: Costs) -> list[int]:
    """Numbers of ranks whose all-to-all was requested or measured."""
    return sorted({*costs.device_counts, *(len(case.device_dims) for case, _ in costs.collective)} - {1})


def sets_error(costs: Costs, cases: Sequence[ComputeCase], measured_ms: Floats) -> float:
    """Mean |predicted / measured - 1| on these cases, of the analytic model scaled to the training cases."""
    analytic = Analytic(analytic_for(costs.bench.hardware)[0], costs.bench.batch_size)
    factor, _ = _sets_factor(analytic, costs)
    predicted = np.array([factor * sum(_set_ms(analytic, case.tables, case.batch_size)) for case in cases])
    return float(np.mean(np.abs(predicted / measured_ms - 1)))


def _sets_factor(analytic: Analytic, costs: Costs) -> tuple[float, int]:
    """Median of measured / analytic time over the training table sets, and their number."""
    rows = [(case, cost) for case, cost in costs.compute if case.split == "train" and cost.round == 0 and teaches(cost)]
    ratios = [cost.total_ms / sum(_set_ms(analytic, case.tables, case.batch_size)) for case, cost in rows]
    return (float(np.median(ratios)) if ratios else 1.0), len(ratios)


def _set_ms(analytic: Analytic, tables: Sequence[Table], batch_size: int | None = None) -> tuple[float, float]:
    """Forward and backward ms of a table set, with the model's batch size or another."""
    if batch_size not in (None, analytic.batch_size):
        analytic = Analytic(analytic.name.partition(":")[2], batch_size)
    sums = analytic.part_vectors(list(map(Part.of, tables))).sum(axis=0)
    forward, backward = analytic.parts_ms(sums)
    return float(forward), float(backward)


def _drawn_sets(
    analytic: Analytic, costs: Costs, factor: float, rng: np.random.Generator
) -> Iterator[tuple[ComputeCase, ComputeCost]]:
    """Random sets of the known tables at random widths, like the shards of a device, with their analytic costs."""
    tables = _tables_to_train_on(costs)
    seen = {case.case_id for case, _ in costs.compute}
    for number in range(DRAWN_SETS):
        size = min(round(math.exp(rng.uniform(0, math.log(len(tables) + 1)))), len(tables)) or 1
        chosen = [tables[place] for place in rng.choice(len(tables), size=size, replace=False)]
        cut = tuple(table.with_dim(_width(table, rng)) for table in sorted(chosen, key=lambda t: t.name))
        case = ComputeCase(tables=cut, split=_split(number))
        if case.case_id in seen:
            continue
        seen.add(case.case_id)
        forward, backward = (factor * ms for ms in _set_ms(analytic, cut))
        yield case, ComputeCost(case_id=case.case_id, round=0, forward_ms=forward, backward_ms=backward)


def _tables_to_train_on(costs: Costs) -> list[Table]:
    """The tables that occur in no test case, or all tables if that leaves none."""
    held_out = {table.name for case, _ in costs.compute if case.split == "test_tables" for table in case.tables}
    known = costs.tables or tuple({t.name: t for case, _ in costs.compute for t in case.tables}.values())
    if not known:
        raise InvalidInput("nothing was measured, and the costs name no tables, so no cost model can be made of them")
    return [table for table in known if table.name not in held_out] or list(known)


def _width(table: Table, rng: np.random.Generator) -> int:
    """The whole width half of the time; otherwise a number of halvings that a plan may have, all equally likely."""
    halvings = int(math.log2(table.dim / table.narrowest_cut))
    cut = table.dim >> int(rng.integers(0, halvings + 1)) if rng.random() < 0.5 else table.dim
    return cut // DIM_STEP * DIM_STEP


def _all_to_all_factors(analytic: Analytic, costs: Costs, ranks: int) -> tuple[tuple[float, float], int]:
    """Measured over computed ms of all-to-alls, forward and backward, and from how many: those of this number of ranks if any was
    measured, else all."""
    rows = [(case, cost) for case, cost in costs.collective if cost.round == 0 and teaches(cost)]
    rows = [row for row in rows if len(row[0].device_dims) == ranks] or rows
    factors = []
    for way in ("forward_ms", "backward_ms"):
        ratios = []
        for case, cost in rows:
            dims, delays = np.array(case.device_dims, dtype=float), np.array(case.start_delays_ms)
            waiting = delays.max() - delays if way == "forward_ms" else 0.0
            took = np.array(getattr(cost, way)) - waiting
            ratios.append(float(took.max()) / float(analytic.backward_collective_ms(dims).max()))
        usual = float(np.median(ratios)) if ratios else 1.0
        factors.append(usual if usual > 0 else 1.0)
    return (factors[0], factors[1]), len(rows)


def _drawn_all_to_alls(
    analytic: Analytic, costs: Costs, ranks: int, factors: tuple[float, float], rng: np.random.Generator
) -> Iterator[tuple[CollectiveCase, CollectiveCost]]:
    """Random all-to-alls of `ranks` ranks, from balanced to lopsided, of the columns that all tables send together."""
    columns = sum(Part.of(table).sent_columns for table in costs.tables) or max(
        (sum(case.device_dims) for case, _ in costs.collective), default=DIM_STEP * ranks
    )
    for number in range(DRAWN_ALL_TO_ALLS):
        total = columns * rng.uniform(0.25, 1.5)
        shares = rng.dirichlet(np.full(ranks, math.exp(rng.uniform(-0.5, 5.0))))
        dims = np.maximum(np.rint(total * shares / DIM_STEP), 1).astype(int) * DIM_STEP
        delays = rng.uniform(0, LATEST_START_MS, ranks) * rng.random()
        delays -= delays.min()
        transfer = analytic.backward_collective_ms(dims.astype(float))
        case = CollectiveCase(
            device_dims=tuple(dims.tolist()), start_delays_ms=tuple(delays.tolist()), split=_split(number)
        )
        yield (
            case,
            CollectiveCost(
                case_id=case.case_id,
                round=0,
                forward_ms=_ms(delays.max() - delays + factors[0] * transfer),
                backward_ms=_ms(factors[1] * transfer),
            ),
        )


def _ms(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())


def _split(number: int) -> Split:
    return "train" if (number + 1) % VALID_EVERY else "valid"


def _scaled(factor: float, known: int, noun: str, rows: Sequence[tuple[object, ComputeCost | CollectiveCost]]) -> str:
    if not known:
        errors = [cost.error for _, cost in rows if cost.error]
        why = f" ({len(errors)} of {len(rows)} failed, the first: {shown(errors[0], 200)})" if errors else ""
        return f"from datasheets alone, since none was measured{why}"
    return f"times {factor:.3g} by {counted(known, f'measured {noun}')}"
