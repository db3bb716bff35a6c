"""From a placement to a plan: where each shard's columns begin, what the plan is predicted to cost, what to know about it."""

from collections.abc import Mapping

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Baseline, DeviceCost, Improvement, Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.text import counted
from neuroshard.search.bound.bound import Bound
from neuroshard.search.problem.problem import Placement, Problem
from neuroshard.search.problem.row_blocks import row_shards
from neuroshard.search.proposers.baselines import Attempt


def make_plan(
    problem: Problem,
    placement: Placement,
    others: Mapping[str, Attempt],
    bound: Bound,
    improvements: tuple[Improvement, ...],
    provenance: Provenance,
) -> Plan:
    """The plan of a placement, beside what the others would cost. All are priced from scratch, in one batch.

    Raises InvalidInput where the cost model predicts what cannot be.
    """
    if problem.held is not None:
        placement = problem.held.as_it_lies(placement)
    solved = {name: other for name, other in others.items() if isinstance(other, Placement)}
    compute, forward, backward = problem.costs([placement, *solved.values()])
    total = compute + forward + backward
    if not (np.isfinite(total).all() and total.min() >= 0):
        raise InvalidInput(f"cost model {problem.model.name} predicts {total.min():g} ms for a device; train it again")
    baseline_ms = dict(zip(solved, total[1:].tolist(), strict=True))
    return Plan(
        task=problem.task,
        shards=lay_out(problem, placement),
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
            for name, other in others.items()
        ),
        lower_bound_ms=bound.ms,
        bound_assumptions=bound.why,
        improvements=improvements,
        provenance=provenance,
    )


def lay_out(problem: Problem, placement: Placement) -> tuple[Shard, ...]:
    """Shards in the order of the tables; each table's columns are dealt out from left to right, by device, widest first;
    or so that most of them stay where they lie already."""
    row_wise = {item: row_shards(problem.members[item][0], problem.devices) for item in placement.row_wise.tolist()}
    if problem.held is not None:
        held, widths = problem.held, problem.widths(placement)
        laid_out = [row_wise.get(item) or held.lay_out(item, row) for item, row in enumerate(widths)]
        return tuple(shard for laid in laid_out for shard in laid)
    order = np.lexsort((-placement.shards, placement.devices, problem.item[placement.shards]))
    shards: dict[str, list[Shard]] = {table.name: [] for table in problem.task.tables}
    for blocks in row_wise.values():
        shards[blocks[0].table] = blocks
    for shard, device in zip(placement.shards[order].tolist(), placement.devices[order].tolist(), strict=True):
        members = problem.members[problem.item[shard]]
        for table in members:
            laid, dim = shards[table.name], table.dim if len(members) > 1 else int(problem.dims[shard])
            offset = laid[-1].column_offset + laid[-1].dim if laid else 0
            laid.append(Shard(table=table.name, rows=table.rows, column_offset=offset, dim=dim, device=device))
    return tuple(shard for laid in shards.values() for shard in laid)


def _asked(problem: Problem, placement: Placement) -> list[Table]:
    """The tables as the cost model is asked for them, widths aside: those that are split row-wise as one of their blocks."""
    tables = {table.name: table for table in problem.task.tables}
    for item in placement.row_wise.tolist():
        table = problem.members[item][0]
        tables[table.name] = table.part(table.block_rows(problem.devices), table.dim)
    return list(tables.values())


def caveats(problem: Problem, placement: Placement) -> list[str]:
    """Where the cost model was not measured for what the plan asks of it, a line each."""
    notes = []
    model, dims = problem.model, problem.dims[placement.shards]
    if (wide := dims > model.max_dim).any():
        notes.append(
            f"{wide.sum()} of {len(dims)} shards are wider than the {model.max_dim} columns that the cost model has seen "
            f"(widest: {dims.max()}); their costs are extrapolated"
        )
    if wide_tables := problem.too_wide_for_rows:
        widest = max(table.dim for table in wide_tables)
        notes.append(
            f"{counted(len(wide_tables), 'table')} that may be split row-wise stayed column-wise: wider (up to {widest} columns) "
            f"than the {model.max_dim} that the cost model has seen; augment with --max-dim {widest}, measure and pretrain again"
        )
    notes += model.caveats(problem.devices, _asked(problem, placement))
    if problem.task.batch_size != model.batch_size:
        notes.append(
            f"costs are predicted for the cost model's batch size {model.batch_size:,}, not for the task's "
            f"{problem.task.batch_size:,}"
        )
    if count := len(placement.row_wise):
        notes.append(
            f"{counted(count, 'table')} of {len(problem.task.tables)} split row-wise over all {problem.devices} devices: "
            "costs take all rows of a table to be looked up alike, and the reduce-scatter of its sums to take as long as an "
            "all-to-all of as many bytes"
        )
    return notes
