"""A part that was measured too little, or that a net predicts worse than the datasheet -> cases labelled by the datasheet.

A net that learns from ten cases predicts worse than a datasheet. So for each such part (table sets, or the all-to-alls of one
number of ranks in one direction), cases are drawn and labelled by the hardware's analytic model, fitted to the measured cases: a
factor, and a constant where operators or all-to-alls take longer to begin than the datasheet says. The net learns the drawn and
the measured cases together. Errors are reported on measured cases only. The cost model lists these parts as stand-ins, so that
plans and the gate treat them as less certain.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np

from neuroshard.core.case import FEWEST_TRAIN_ALL_TO_ALLS, FEWEST_TRAIN_SETS, CollectiveCase, ComputeCase, Split
from neuroshard.core.cost import CollectiveCost, ComputeCost, Costs
from neuroshard.core.errors import InvalidInput
from neuroshard.core.label import Case, Cost, teaches
from neuroshard.core.part import Part
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.text import counted
from neuroshard.core.value import shown
from neuroshard.costmodel.analytic import Analytic, analytic_for
from neuroshard.costmodel.protocol import Floats, sums_of_sets
from neuroshard.pretrain.all_to_all import WAYS, Way
from neuroshard.pretrain.labels import CLOCK_MS, mape

DRAWN_SETS: Final = 400  # enough for a net to be within 5 % of the analytic model
DRAWN_ALL_TO_ALLS: Final = 120
VALID_EVERY: Final = 10  # every tenth drawn case is in the split that chooses the best epoch
LATEST_START_MS: Final = 20.0  # latest start of a rank, as in augment
# reads STAND; with the seed it makes a stream of random numbers that no other draw of a run has
OWN_STREAM: Final = 0x57A2D
FEWEST_FOR_CONSTANT: Final = 8  # of fewer measured times only the factor is fitted
# of a usual case's time, what the datasheet explains
SHARES: Final = np.array([1.0, *np.geomspace(0.99, 0.01, 40), 0.0])

SETS: Final = "compute"
LearnedPart = Literal["compute"] | tuple[Way, int]  # SETS, or a direction and a number of ranks
AllToAlls = tuple[tuple[CollectiveCase, CollectiveCost], ...]


class Fitted(NamedTuple):
    """From the datasheet's ms to measured ms, by so many measured cases."""

    constant_ms: float
    factor: float
    cases: int

    @classmethod
    def to(cls, measured_ms: Floats, datasheet_ms: Floats) -> "Fitted":
        """What is off least in the mean |log(fitted / measured)|: two (N,)."""
        if not len(measured_ms):
            return cls(0.0, 1.0, 0)
        usual = float(np.median(datasheet_ms))
        shares = SHARES[: None if len(measured_ms) >= FEWEST_FOR_CONSTANT else 1]
        off = np.log(np.maximum(measured_ms, CLOCK_MS)) - np.log(np.outer(shares, datasheet_ms - usual) + usual)
        middle = np.median(off, axis=1)
        best = int(np.abs(off - middle[:, None]).mean(axis=1).argmin())
        scale, share = math.exp(middle[best]), float(shares[best])
        return cls(scale * (1 - share) * usual, scale * share, len(measured_ms))

    def ms(self, datasheet_ms: Floats) -> Floats:
        found: Floats = self.constant_ms + self.factor * datasheet_ms
        return found

    def __str__(self) -> str:
        return f"times {self.factor:.3g}" + (f" plus {self.constant_ms:.3g} ms" if self.constant_ms else "")


class Compared(NamedTuple):
    """Mean |predicted / measured - 1| of the analytic model and of a net on so many cases held back."""

    datasheet: float
    net: float
    cases: int

    def __str__(self) -> str:
        return (
            f"{self.datasheet:.1%} off on {counted(self.cases, 'case')} held back, where a net is {self.net:.1%} off; "
            "measure more cases to learn it"
        )


@dataclass(frozen=True)
class Completed:
    """Measured costs, and with drawn cases. Drawn is for parts of which too little was measured (`guessed`), and for those that a
    net predicts `worse` than the analytic model. `stand_ins` and `better` have a sentence for each."""

    measured: Costs
    costs: Costs  # with drawn table sets; all-to-alls as measured
    all_to_alls: Mapping[Way, AllToAlls]  # with drawn ones
    guessed: frozenset[LearnedPart]
    worse: Mapping[LearnedPart, Compared]
    stand_ins: tuple[str, ...]
    better: tuple[str, ...]

    @property
    def drawn(self) -> frozenset[LearnedPart]:
        return self.guessed | self.worse.keys()


def completed(costs: Costs, seed: int, worse: Mapping[LearnedPart, Compared] = MappingProxyType({})) -> Completed:
    """The costs, plus drawn cases of each part with too few measured ones, and of those that a net predicts `worse`.

    Raises InvalidInput if table sets must be drawn and no tables are known."""
    rng = np.random.default_rng([seed, OWN_STREAM])
    name = _datasheet(costs).name
    compute, all_to_alls = list(costs.compute), {way: list(costs.collective) for way in WAYS}
    guessed, stand_ins, better = set[LearnedPart](), list[str](), list[str]()

    if (few := len(_to_train_on(costs.compute)) < FEWEST_TRAIN_SETS) or SETS in worse:
        fit = fitted_sets(costs)
        compute += _drawn_sets(costs, fit, rng)
        said = f"compute costs are those of {name}, {_by(fit, str(fit), 'table set', costs.compute)}"
        if few:
            guessed.add(SETS)
            stand_ins.append(f"{said}; a net needs {FEWEST_TRAIN_SETS} to train on")
        else:
            better.append(f"{said}: {worse[SETS]}")
    for ranks in wanted_ranks(costs):
        few = len(_to_train_on(of_ranks(costs, ranks))) < FEWEST_TRAIN_ALL_TO_ALLS
        ways = [way for way in WAYS if few or (way, ranks) in worse]
        fits = {way: fitted_all_to_alls(costs, ranks, way) for way in ways}
        said = f"all-to-all costs of {ranks:,} ranks are those of {name}, "
        for way, fit in fits.items():
            all_to_alls[way] += _drawn_all_to_alls(costs, ranks, way, fit, rng)
            if not few:
                better.append(f"{way} {said}{_by(fit, str(fit), 'all-to-all', costs.collective)}: {worse[way, ranks]}")
        if few:
            guessed |= {(way, ranks) for way in WAYS}
            times = " and ".join(f"{fit} {way}" for way, fit in fits.items())
            by = _by(fits[WAYS[0]], times, "all-to-all", costs.collective)
            stand_ins.append(f"{said}{by}; a net needs {FEWEST_TRAIN_ALL_TO_ALLS} to train on")
    return Completed(
        costs,
        costs.model_copy(update={"compute": tuple(compute)}),
        {way: tuple(rows) for way, rows in all_to_alls.items()},
        frozenset(guessed),
        worse,
        tuple(stand_ins),
        tuple(better),
    )


def wanted_ranks(costs: Costs) -> list[int]:
    """Numbers of ranks whose all-to-all was requested or measured."""
    return sorted({*costs.device_counts, *(len(case.device_dims) for case, _ in costs.collective)} - {1})


def of_ranks(costs: Costs, ranks: int) -> AllToAlls:
    return tuple(row for row in costs.collective if len(row[0].device_dims) == ranks)


def sets_error(costs: Costs, cases: Sequence[ComputeCase], measured_ms: Floats) -> float:
    """Mean |predicted / measured - 1| on these cases, of the analytic model fitted to the training cases."""
    return mape(measured_ms, fitted_sets(costs).ms(_sets_ms(costs, cases).sum(axis=1)))


def all_to_alls_error(costs: Costs, cases: Sequence[CollectiveCase], measured_ms: Floats, way: Way) -> float:
    """As `sets_error`, on all-to-alls of one number of ranks, measured as (N, ranks) ms."""
    analytic, fit = _datasheet(costs), fitted_all_to_alls(costs, measured_ms.shape[1], way)
    return mape(measured_ms, np.array([_waits_ms(case, way) + fit.ms(_transfer_ms(analytic, case)) for case in cases]))


def fitted_sets(costs: Costs) -> Fitted:
    rows = _to_train_on(costs.compute)
    took = np.array([cost.total_ms for _, cost in rows])
    return Fitted.to(took, _sets_ms(costs, [case for case, _ in rows]).sum(axis=1))


def fitted_all_to_alls(costs: Costs, ranks: int, way: Way) -> Fitted:
    """By the all-to-alls of this number of ranks if any was measured, else by all."""
    analytic, rows = _datasheet(costs), _to_train_on(of_ranks(costs, ranks)) or _to_train_on(costs.collective)
    took = [np.array(getattr(cost, f"{way}_ms")) - _waits_ms(case, way) for case, cost in rows]
    sheet = [_transfer_ms(analytic, case) for case, _ in rows]
    fit = Fitted.to(*(np.concatenate(each) if rows else np.empty(0) for each in (took, sheet)))
    return fit._replace(cases=len(rows))


def _datasheet(costs: Costs) -> Analytic:
    return Analytic(analytic_for(costs.bench.hardware)[0], costs.bench.batch_size)


def _to_train_on(rows: Sequence[tuple[Case, Cost]]) -> list[tuple[Case, Cost]]:
    return [(case, cost) for case, cost in rows if case.split == "train" and cost.round == 0 and teaches(cost)]


def _waits_ms(case: CollectiveCase, way: Way) -> Floats:
    """How long each rank waits for the last one to start, which in backward none does: (ranks,)."""
    delays = np.array(case.start_delays_ms) * (way == "forward")
    waits: Floats = delays.max() - delays
    return waits


def _transfer_ms(analytic: Analytic, case: CollectiveCase) -> Floats:
    """The datasheet's ms of an all-to-all without waiting: (ranks,)."""
    return analytic.backward_collective_ms(np.array(case.device_dims, dtype=float))


def _sets_ms(costs: Costs, cases: Sequence[ComputeCase]) -> Floats:
    """The datasheet's forward and backward ms of N table sets, each in a batch of its size: (N, 2)."""
    found = np.empty((len(cases), 2))
    sizes = np.array([case.batch_size or costs.bench.batch_size for case in cases])
    for size in np.unique(sizes):
        places = np.flatnonzero(sizes == size)
        some = [cases[place].tables for place in places.tolist()]
        analytic = Analytic(_datasheet(costs).name.partition(":")[2], int(size))
        vectors = analytic.part_vectors([Part.of(table) for tables in some for table in tables])
        found[places] = np.stack(analytic.parts_ms(sums_of_sets(vectors, [len(tables) for tables in some])), axis=1)
    return found


def _drawn_sets(costs: Costs, fit: Fitted, rng: np.random.Generator) -> Iterator[tuple[ComputeCase, ComputeCost]]:
    """Random sets of the known tables at random widths, like the shards of a device, with their fitted analytic costs."""
    tables = _tables_to_train_on(costs)
    cases = {case.case_id: case for case, _ in costs.compute}
    measured = len(cases)
    for number in range(DRAWN_SETS):
        size = min(round(math.exp(rng.uniform(0, math.log(len(tables) + 1)))), len(tables)) or 1
        chosen = [tables[place] for place in rng.choice(len(tables), size=size, replace=False)]
        cut = tuple(table.with_dim(_width(table, rng)) for table in sorted(chosen, key=lambda t: t.name))
        case = ComputeCase(tables=cut, split=_split(number))
        cases.setdefault(case.case_id, case)
    drawn = list(cases.values())[measured:]
    for case, ms in zip(drawn, _sets_ms(costs, drawn), strict=True):
        forward, backward = (ms * (fit.ms(ms.sum()) / ms.sum())).tolist()
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
    halvings = int(math.log2(table.dim / DIM_STEP))
    cut = table.dim >> int(rng.integers(0, halvings + 1)) if rng.random() < 0.5 else table.dim
    return cut // DIM_STEP * DIM_STEP


def _drawn_all_to_alls(
    costs: Costs, ranks: int, way: Way, fit: Fitted, rng: np.random.Generator
) -> Iterator[tuple[CollectiveCase, CollectiveCost]]:
    """Random all-to-alls of `ranks` ranks, from balanced to lopsided, of the columns that all tables send together.

    Both directions take what this one does.
    """
    analytic = _datasheet(costs)
    columns = sum(Part.of(table).sent_columns for table in costs.tables) or max(
        (sum(case.device_dims) for case, _ in costs.collective), default=DIM_STEP * ranks
    )
    for number in range(DRAWN_ALL_TO_ALLS):
        total = columns * rng.uniform(0.25, 1.5)
        shares = rng.dirichlet(np.full(ranks, math.exp(rng.uniform(-0.5, 5.0))))
        dims = np.maximum(np.rint(total * shares / DIM_STEP), 1).astype(int) * DIM_STEP
        delays = rng.uniform(0, LATEST_START_MS, ranks) * rng.random()
        delays -= delays.min()
        case = CollectiveCase(
            device_dims=tuple(dims.tolist()), start_delays_ms=tuple(delays.tolist()), split=_split(number)
        )
        ms = tuple((_waits_ms(case, way) + fit.ms(_transfer_ms(analytic, case))).tolist())
        yield case, CollectiveCost(case_id=case.case_id, round=0, forward_ms=ms, backward_ms=ms)


def _split(number: int) -> Split:
    return "train" if (number + 1) % VALID_EVERY else "valid"


def _by(fit: Fitted, times: str, noun: str, rows: Sequence[tuple[object, ComputeCost | CollectiveCost]]) -> str:
    """What the datasheet was fitted to, or why to nothing."""
    if not fit.cases:
        errors = [cost.error for _, cost in rows if cost.error]
        why = f" ({len(errors)} of {len(rows)} failed, the first: {shown(errors[0], 200)})" if errors else ""
        return f"from datasheets alone, since none was measured{why}"
    return f"{times} by {counted(fit.cases, f'measured {noun}')}"
