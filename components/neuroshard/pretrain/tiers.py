"""Measured tables beyond HBM -> the constants of costmodel/manifest.py, and how far they are off on cases held out.

What a case takes more than the same tables in HBM is a sum over its tables, linear in the constants. They are at least 0, and
those with the least absolute error as a share of what the case takes: a few disturbed cases do not move them (a linear program).
Rows that a batch reads and misses are those that were counted.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import linprog

from neuroshard.core.case import TierCase
from neuroshard.core.cost import BackendName, Costs, TierCost
from neuroshard.core.label import teaches
from neuroshard.core.part import Part
from neuroshard.core.table import OPTIMIZER_BYTES
from neuroshard.core.text import counted
from neuroshard.core.tiers import BeyondHbmTier
from neuroshard.core.value import shown
from neuroshard.costmodel.analytic import DATASHEETS, Analytic, analytic_for
from neuroshard.costmodel.manifest import MeasuredTiers, Rates, rates
from neuroshard.costmodel.measured_tiers import Work
from neuroshard.costmodel.protocol import Floats
from neuroshard.costmodel.report import TierErrors

# Cases to train on, of each tier, for four constants a pass. Fewer leave the datasheet's
FEWEST: Final[dict[BeyondHbmTier, int]] = {"cached": 10, "host": 5}
# What a model says where no case was measured; a formula's models are of no device
NOTHING: Final[dict[BackendName, str]] = {
    "cuda": "nothing beyond HBM was measured: tables there are priced by the datasheet's bus",
    "cpu": "backend cpu has no tiers: plans by this cost model have no table beyond HBM",
}
FORWARD, BACKWARD = 0, 1  # the numbers of passes


class Learned(NamedTuple):
    """The constants, None where too little was measured to learn them; their errors by tier; and what is missing."""

    tiers: MeasuredTiers | None
    errors: dict[BeyondHbmTier, TierErrors]
    gaps: tuple[str, ...]


class _Case(NamedTuple):
    """What a case moves, by pass: work (2, 4) without state of elements, and that state (4,); ms beyond HBM, and in HBM, (2,)."""

    work: Floats
    state: Floats
    beyond_ms: Floats
    hbm_ms: Floats


def learn_tiers(costs: Costs) -> Learned:
    """The constants that the costs beyond HBM show; None, and a gap, where too few cases were measured."""
    rows = [(case, cost) for case, cost in costs.tiers if teaches(cost)]
    if not costs.tiers:
        return Learned(None, {}, tuple(gap for backend, gap in NOTHING.items() if backend == costs.bench.backend))
    some = {tier: {train: _cases(rows, tier, train, costs) for train in (True, False)} for tier in FEWEST}
    lacking = [tier for tier, fewest in FEWEST.items() if len(some[tier][True]) < fewest]
    if lacking:
        return Learned(None, {}, (_gap(lacking, {tier: len(some[tier][True]) for tier in lacking}, costs),))

    host = [_fitted(some["host"][True], number) for number in (FORWARD, BACKWARD)]
    # state of elements moves as rows in host memory do
    cached = [_fitted(some["cached"][True], FORWARD), _fitted(some["cached"][True], BACKWARD, host[BACKWARD])]
    found = MeasuredTiers(
        cached_forward=cached[FORWARD],
        cached_backward=cached[BACKWARD],
        host_forward=host[FORWARD],
        host_backward=host[BACKWARD],
        cases=sum(len(some[tier][True]) for tier in FEWEST),
    )
    passes: dict[BeyondHbmTier, list[Rates]] = {"cached": cached, "host": host}
    errors = {
        tier: TierErrors(
            train_cases=len(some[tier][True]),
            values=len(some[tier][False]),
            mape=_off(some[tier][False], both, host[BACKWARD]),
            datasheet_mape=_datasheet_off(rows, tier, costs),
        )
        for tier, both in passes.items()
    }
    return Learned(found, errors, ())


def _gap(lacking: Sequence[BeyondHbmTier], known: dict[BeyondHbmTier, int], costs: Costs) -> str:
    few = " and ".join(f"{counted(known[tier], f'{tier} case')} of {FEWEST[tier]}" for tier in lacking)
    errors = [cost.error for _, cost in costs.tiers if cost.error]
    why = f" ({len(errors)} of {len(costs.tiers)} failed, the first: {shown(errors[0], 200)})" if errors else ""
    return f"beyond HBM, {few} to learn from: tables there are priced by the datasheet's bus{why}"


def _cases(rows: Sequence[tuple[TierCase, TierCost]], tier: BeyondHbmTier, train: bool, costs: Costs) -> list[_Case]:
    sheet = DATASHEETS[analytic_for(costs.bench.hardware)[0]]
    found = []
    for case, cost in rows:
        if case.tier != tier or (case.split == "train") != train:
            continue
        work = Work.of(
            list(map(Part.of, case.tables)),
            case.batch_size or costs.bench.batch_size,
            np.full(len(case.tables), float(OPTIMIZER_BYTES[costs.bench.optimizer][1])),
            sheet,
            np.array(cost.distinct_rows),
        )
        cached = work.missing(np.array(cost.missed_rows)), work.through_a_cache
        both = np.array([each.sum(axis=0) for each in (cached if tier == "cached" else (work.read, work.written))])
        times = np.array(cost.times_ms)
        found.append(_Case(both, work.state.sum(axis=0), times[:2], times[2:]))
    return found


def _fitted(cases: Sequence[_Case], number: int, of_state: Rates | None = None) -> Rates:
    """The constants of a pass, by its number. Backward, state of elements moves as in the work, or by `of_state`."""
    work = np.array([case.work[number] for case in cases])
    more = np.array([case.beyond_ms[number] - case.hbm_ms[number] for case in cases])
    if number == BACKWARD:
        state = np.array([case.state for case in cases])
        if of_state is None:
            work = work + state
        else:
            more = more - of_state.ms(state)
    return rates(_least_absolute(work, more, np.array([case.beyond_ms[number] for case in cases])))


def _least_absolute(work: Floats, more_ms: Floats, beyond_ms: Floats) -> list[float]:
    """Constants (4,), at least 0, with the least sum of |work @ constants - more| / beyond: (N, 4), (N,), (N,) -> (4,)."""
    scale = np.maximum(work.max(axis=0), 1e-30)  # constants are very unlike each other, and a solver has one tolerance
    scaled, wanted = work / scale / beyond_ms[:, None], more_ms / beyond_ms
    count, terms = scaled.shape
    above = np.hstack([scaled, -np.eye(count)])
    below = np.hstack([-scaled, -np.eye(count)])
    solved = linprog(
        np.concatenate([np.zeros(terms), np.ones(count)]),
        A_ub=np.vstack([above, below]),
        b_ub=np.concatenate([wanted, -wanted]),
        method="highs",
    )
    used = work.max(axis=0) > 0
    return [float(value) for value in np.where(used, np.maximum(solved.x[:terms], 0.0) / scale, 0.0)]


def _off(cases: Sequence[_Case], both: Sequence[Rates], of_state: Rates) -> float | None:
    """Mean |predicted / measured - 1| of forward and backward together; None without cases."""
    off = []
    for case in cases:
        more = sum(float(one.ms(work)) for one, work in zip(both, case.work, strict=True)) + float(
            of_state.ms(case.state)
        )
        off.append(abs((case.hbm_ms.sum() + more) / case.beyond_ms.sum() - 1))
    return float(np.mean(off)) if off else None


def _datasheet_off(rows: Sequence[tuple[TierCase, TierCost]], tier: BeyondHbmTier, costs: Costs) -> float | None:
    """The same of the datasheet, on the same cases; None where it states no bus."""
    name, off = analytic_for(costs.bench.hardware)[0], []
    element_bytes = {"optimizer_bytes_per_element": OPTIMIZER_BYTES[costs.bench.optimizer][1]}
    for case, cost in rows:
        sheet = Analytic(name, case.batch_size or costs.bench.batch_size)
        if case.tier != tier or case.split == "train" or not sheet.has_tiers:
            continue
        beyond = sheet.beyond_hbm([Part.of(table.model_copy(update=element_bytes)) for table in case.tables])
        cached = beyond.cached_ms + np.array(cost.missed_rows) * beyond.missed
        more = float((cached if tier == "cached" else beyond.host_ms).sum())
        forward, backward, hbm_forward, hbm_backward = cost.times_ms
        off.append(abs((hbm_forward + hbm_backward + more) / (forward + backward) - 1))
    return float(np.mean(off)) if off else None
