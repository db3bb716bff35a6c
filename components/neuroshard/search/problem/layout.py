"""From a placement to a plan: where each shard's columns begin, what the plan is predicted to cost, what to know about it."""

from collections.abc import Mapping, Sequence

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Baseline, DeviceCost, Improvement, Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.text import counted
from neuroshard.search.problem.current import CurrentPlacement, dealt
from neuroshard.search.problem.problem import Placement, Problem
from neuroshard.search.problem.row_blocks import EVERYWHERE
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
    """The plan of a placement in these shards, with what each baseline's costs, or why it has none. All are priced anew, in one
    batch.

    Raises InvalidInput where the cost model predicts a cost that is negative or not finite.
    """
    solved = {name: other for name, other in baselines.items() if isinstance(other, Placement)}
    compute, forward, backward = problem.costs([placement, *solved.values()])
    total = compute + forward + backward
    if not (np.isfinite(total).all() and total.min() >= 0):
        raise InvalidInput(f"cost model {problem.model.name} predicts {total.min():g} ms for a device; train it again")
    baseline_ms = dict(zip(solved, total[1:].tolist(), strict=True))
    return Plan(
        task=problem.task,
        shards=shards,
        predicted_ms=tuple(total[0].tolist()),
        predicted=tuple(
            DeviceCost(compute_ms=c, forward_collective_ms=f, backward_collective_ms=b)
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
        lower_bound_ms=bound_ms,
        bound_assumptions=bound_assumptions,
        improvements=improvements,
        provenance=provenance,
    )


def lay_out(plan: State, current: CurrentPlacement | None = None) -> tuple[Shard, ...]:
    """Shards in the order of the tables. The columns of a table are dealt out from left to right, by device; or, from a current
    plan, so that most of them stay where they are."""
    problem = plan.problem
    domains = dict(zip(problem.row_wise.tolist(), problem.domains.tolist(), strict=True))
    shards: dict[str, list[Shard]] = {table.name: [] for table in problem.task.tables}
    for group, (tables, widths) in enumerate(zip(problem.tables, plan.widths, strict=True)):
        if group in domains:
            laid = problem.row_blocks.shards(tables[0], domains[group])
        elif current is not None:
            laid = current.lay_out(group, widths)
        else:
            by_device = np.flatnonzero(widths).tolist()
            laid = [shard for table in tables for shard in dealt(problem, group, table, widths, by_device)]
        for shard in laid:
            shards[shard.table].append(shard)
    return tuple(shard for laid in shards.values() for shard in laid)


def placement_of(problem: Problem, shards: Sequence[Shard], plan: State) -> Placement:
    """These shards of a plan as a placement. Several shards of a table on one device stay several, unlike in the plan's widths;
    and the problem may have cut the tables otherwise than the plan's, which keeps the cuts of a current plan."""
    number = {tables[0].name: group for group, tables in enumerate(problem.tables)}
    names = [plan.problem.tables[group][0].name for group in plan.problem.row_wise.tolist()]
    row_wise = np.array([number[name] for name in names], dtype=np.int64)
    held = sorted(
        (number[shard.table], shard.device, shard.column_offset, shard.dim)
        for shard in shards
        if shard.table in number and shard.table not in names
    )
    groups, devices, _, dims = np.array(held, dtype=np.int64).reshape(-1, 4).T
    widest = np.array([tables[0].dim for tables in problem.tables])[groups]
    units = dims * problem.all_units[groups] // widest
    return Placement(problem.first[groups] + units, devices, row_wise, plan.problem.domains)


def caveats(problem: Problem, placement: Placement) -> list[str]:
    """A line for each thing that the plan asks of the cost model and that was not measured for it."""
    notes = []
    model, dims = problem.model, problem.columns[placement.shards]
    if (wide := dims > model.max_dim).any():
        notes.append(
            f"{wide.sum()} of {len(dims)} shards are wider than the {model.max_dim} columns that the cost model has seen "
            f"(widest: {dims.max()}); their costs are extrapolated"
        )
    if wide_tables := problem.too_wide_for_row_wise:
        widest = max(table.dim for table in wide_tables)
        notes.append(
            f"{counted(len(wide_tables), 'table')} that may be split row-wise stayed column-wise: wider (up to {widest} columns) "
            f"than the {model.max_dim} that the cost model has seen; augment with --max-dim {widest}, measure and pretrain again"
        )
    asked = problem.task.constraints.sharding_types or ()
    if "table-row-wise" in asked and problem.row_blocks.domains == 1 and problem.task.devices > 1:
        notes.append(
            "no table can be table-row-wise: all devices are one domain (--domain says how many share fast links)"
        )
    notes += model.caveats(problem.devices, _as_asked(problem, placement))
    if problem.task.batch_size != model.batch_size:
        notes.append(
            f"costs are predicted for the cost model's batch size {model.batch_size:,}, not for the task's "
            f"{problem.task.batch_size:,}"
        )
    if len(placement.row_wise):
        domains, of = placement.domains, len(problem.task.tables)
        counts = {
            f"over all {problem.devices} devices": np.count_nonzero(domains == EVERYWHERE),
            "over the devices of a domain": np.count_nonzero(domains >= 0),
            "in a grid, columns over domains and rows over their devices": np.count_nonzero(domains < EVERYWHERE),
        }
        some = {way: count for way, count in counts.items() if count}
        ways = list(some) if len(some) == 1 else [f"{count} {way}" for way, count in some.items()]
        notes.append(
            f"{counted(len(placement.row_wise), 'table')} of {of} split row-wise {', '.join(ways)}: costs take all rows of a "
            "table to be looked up alike, and the reduce-scatter of its sums to take as long as an all-to-all of as many bytes"
        )
    return notes


def _as_asked(problem: Problem, placement: Placement) -> list[Table]:
    """The tables that the cost model is asked for, apart from their widths: of those row-wise, one of their blocks."""
    tables = {table.name: table for table in problem.task.tables}
    for group, domain in zip(placement.row_wise.tolist(), placement.domains.tolist(), strict=True):
        table = problem.tables[group][0]
        blocks = problem.row_blocks.shards(table, domain)
        tables[table.name] = table.part(blocks[0].rows, table.dim)
    return list(tables.values())
