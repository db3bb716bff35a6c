"""From a placement to a plan: where each shard's columns begin, and what the plan is predicted to cost."""

from collections.abc import Mapping, Sequence

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.part import Part
from neuroshard.core.plan import Baseline, DeviceCost, Improvement, Plan, Provenance, Shard
from neuroshard.costmodel.averaging import averaging_ms, least_averaging_ms
from neuroshard.search.problem.column_shards import Placement
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.kinds import blocks_over_all, copies_of
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State


def make_plan(
    problem: Problem,
    placement: Placement,
    shards: tuple[Shard, ...],
    *,
    baselines: Mapping[str, Placement | str],
    bound_ms: float | None,
    bound_assumptions: tuple[str, ...],
    improvements: tuple[Improvement, ...],
    provenance: Provenance,
) -> Plan:
    """The plan of a placement in these shards, with what each baseline's costs, or why it has none. All are priced anew.

    Raises InvalidInput where the cost model predicts a cost that is negative or not finite.
    """
    solved = {name: other for name, other in baselines.items() if isinstance(other, Placement)}
    placements = [placement, *solved.values()]
    compute, forward, backward = problem.costs(placements)
    held = (
        np.zeros(len(placements)) if problem.task.groups is None else [_averaged_bytes(problem, p) for p in placements]
    )
    averaging = np.array([averaging_ms(problem.model, problem.task, float(nbytes)) for nbytes in held])
    total = compute + forward + backward + averaging[:, None]
    if not (np.isfinite(total).all() and total.min() >= 0):
        raise InvalidInput(f"cost model {problem.model.name} predicts {total.min():g} ms for a device; train it again")
    baseline_ms = dict(zip(solved, total[1:].tolist(), strict=True))
    return Plan(
        task=problem.task.keeping_free(()),
        shards=shards,
        predicted_ms=tuple(total[0].tolist()),
        predicted=tuple(
            DeviceCost(
                compute_ms=c, forward_collective_ms=f, backward_collective_ms=b, averaging_ms=float(averaging[0])
            )
            for c, f, b in zip(compute[0].tolist(), forward[0].tolist(), backward[0].tolist(), strict=True)
        ),
        baselines=tuple(
            Baseline(algorithm=name, error=other)
            if isinstance(other, str)
            else Baseline(
                algorithm=name,
                predicted_ms=tuple(baseline_ms[name]),
                cuts=len(other.shards) - len(problem.whole),
            )
            for name, other in baselines.items()
        ),
        lower_bound_ms=None
        if bound_ms is None
        else min(bound_ms + least_averaging_ms(problem.model, problem.task), float(total[0].max())),  # sums round
        bound_assumptions=bound_assumptions,
        # a search does not weigh averaging, whose cost differs from plan to plan
        improvements=() if problem.task.groups is not None else improvements,
        provenance=provenance,
    )


def _averaged_bytes(problem: Problem, placement: Placement) -> int:
    """Bytes of weights and optimizer state of the device that holds most under a placement, without copies."""
    parts, devices, times = list[Part](), list[int](), list[int]()
    for shard, device in zip(placement.shards.tolist(), placement.devices.tolist(), strict=True):
        group = problem.group[shard]
        equal = int(problem.units[shard]) if problem.in_equal_shards[group] else 1
        tables = problem.tables[group]
        for table in tables:
            dim = table.dim if len(tables) > 1 else int(problem.columns[shard]) // equal
            parts.append(Part(table, table.rows, dim))
            devices.append(device)
            times.append(equal)
    for group, place in zip(placement.spread.tolist(), placement.places.tolist(), strict=True):
        if problem.options.way_of[place] == problem.options.copied:
            continue
        table = problem.tables[group][0]
        for piece in problem.options.shards(table, place):
            parts.append(Part(table, piece.rows, piece.dim))
            devices.append(piece.device)
            times.append(1)
    held = [0] * problem.devices
    for memory, device, equal in zip(problem.task.memories(parts), devices, times, strict=True):
        held[device] += equal * (memory.weights + memory.optimizer)
    return max(held)


def lay_out(plan: State, current: CurrentPlacement | None = None) -> tuple[Shard, ...]:
    """Shards in the order of the tables. The columns of a table are dealt out from left to right, by device; or, from a current
    plan, so that most of them stay where they are."""
    problem = plan.problem
    places = dict(zip(problem.spread.tolist(), problem.places.tolist(), strict=True))
    shards: dict[str, list[Shard]] = {table.name: [] for table in problem.task.tables}
    for shard in (
        *copies_of(problem.copied, problem.devices),
        *blocks_over_all(problem.mapped, problem.devices),
    ):
        shards[shard.table].append(shard)
    for group, (tables, widths) in enumerate(zip(problem.tables, plan.widths, strict=True)):
        if group in places:
            laid = problem.options.shards(tables[0], places[group])
        elif current is not None:
            laid = current.lay_out(group, widths)
        else:
            by_device = np.flatnonzero(widths).tolist()
            laid = [shard for table in tables for shard in problem.dealt(group, table, widths, by_device)]
        for shard in laid:
            shards[shard.table].append(shard)
    return tuple(shard for laid in shards.values() for shard in laid)


def placement_of(problem: Problem, shards: Sequence[Shard], plan: State) -> Placement:
    """These shards of a plan as a placement. Several shards of a table on one device stay several, unlike in the plan's widths;
    and the problem may have cut the tables otherwise than the plan's, which keeps the cuts of a current plan."""
    number = {tables[0].name: group for group, tables in enumerate(problem.tables)}
    there = zip((plan.problem.tables[group][0].name for group in plan.problem.spread), plan.problem.places, strict=True)
    spread = {
        number[name]: place for name, place in there if name in number
    }  # not those that are copied in the problem anyway
    column_wise = set(number.values()).difference(spread)
    held = sorted(
        (number[shard.table], shard.device, shard.column_offset, shard.dim)
        for shard in shards
        if number.get(shard.table) in column_wise
    )
    groups, devices, _, dims = np.array(held, dtype=np.int64).reshape(-1, 4).T
    widest = np.array([tables[0].dim for tables in problem.tables])[groups]
    units = dims * problem.all_units[groups] // widest
    chosen, places = (np.array(list(of), dtype=np.int64) for of in (spread, spread.values()))
    return Placement(problem.first[groups] + units, devices, chosen, places)
