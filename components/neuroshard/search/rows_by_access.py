"""Which sequences have copies of their hot rows on every rank, and how many rows are hot (core/parts.py).

A sequence may be held so if it has a row order, lies in HBM, and no rule says how it is held. Choices are made beside a plan
without them, or with those of the plan to start from. Estimates come first: the plan's shards, with copies of hot rows and the
other rows in place of a table, are priced as if all devices held as much. Of a few points of each order that one is taken which
saves most, while HBM has room. Where hot rows are copied already, another number of them may be taken, or none. The task held so
is then searched, and its plan is taken if it saves WORTH.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import parts_of_table
from neuroshard.core.parts import RowsByAccess, part_names
from neuroshard.core.plan import Plan, Shard, device_memory
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.notes import with_notes
from neuroshard.search.problem.previous import cut_alike
from neuroshard.search.problem.room import contradicts_itself

WORTH = 0.02  # share that a plan must save by copied hot rows, for which a trainer needs a wrapper: a guess
LEAST_GAIN = 0.002  # share of a plan's ms that the hot rows of a table must save by their estimate: a guess
POINTS_TRIED = 6  # numbers of hot rows of a table that are estimated, evenly among the points of its order: a guess
TABLES_TRIED = 16  # sequences that are estimated, those with most columns looked up: a guess
MOST_IN_TWO = 8  # sequences in two parts that are tried together, each of which has launches of its own: a guess

AS_HELD = "hot rows are copied as in this plan: those of other sequences, and other numbers of them, may cost less"
NONE_HELD = "hot rows of no more sequences are copied than in this plan"
NONE_WORTH = f"rows by access: no plan that was found with other hot rows of sequences copied costs {WORTH:.0%} less"

Search = Callable[[ShardingTask], Plan]


def may_be_held(task: ShardingTask) -> bool:
    """Whether hot rows of some table might be copied: of a sequence with a row order, of which no rule says so already."""
    return any(table.name not in task.constraints.rows_by_access for table in _with_order(task))


def assuming(plan: Plan, what: str) -> Plan:
    """The plan, whose bound is one under this assumption too."""
    if plan.lower_bound_ms is None:
        return plan
    return plan.model_copy(update={"bound_assumptions": (*plan.bound_assumptions, what)})


def held_as_before(task: ShardingTask, previous: Plan) -> ShardingTask:
    """The task with hot rows copied as in the `previous` plan, of sequences that no rule names, where they still can be."""
    copied, before = previous.task.constraints.data_parallel, previous.task.constraints.rows_by_access
    kept = dict[str, int]()
    for table in _with_order(task, task.constraints.rules()):
        how = before.get(table.name)
        if how is not None and how.hot_rows and part_names(table.name)[0] in copied and not how.fault(table):
            kept[table.name] = how.hot_rows
    return _holding(task, kept) if kept else task


def choose(task: ShardingTask, plan: Plan, model: CostModel, search: Search, ruled: Collection[str]) -> Plan:
    """The `plan` of a task, or a cheaper one that `search` finds with other hot rows copied, but for tables that are `ruled`."""
    if plan.cost_ms is None:
        return plan
    as_it_is = with_notes(assuming(plan, NONE_HELD), NONE_WORTH)
    held = _worth_trying(plan, model, {*ruled, *(name for group in task.constraints.together for name in group)})
    if not held:
        return as_it_is
    try:
        best = search(_holding(task, held))
    except Infeasible:
        return as_it_is
    if best.cost_ms is None or best.cost_ms >= plan.cost_ms * (1 - WORTH):
        return as_it_is
    return with_notes(assuming(best, AS_HELD), _saves(held, 1 - best.cost_ms / plan.cost_ms, plan))


def _with_order(task: ShardingTask, ruled: Collection[str] = ()) -> list[Table]:
    """The sequences with a row order that several devices may hold, but for those `ruled`."""
    some = task.tables if task.devices > 1 else ()
    return [t for t in some if t.pooling == "none" and t.row_order is not None and t.name not in ruled]


def _worth_trying(plan: Plan, model: CostModel, ruled: Collection[str]) -> dict[str, int]:
    """How many hot rows are worth copying by their estimates, by sequence, 0 where none are any more; while HBM has room."""
    found, beyond = list[tuple[float, int, str, int]](), plan.parted.constraints.beyond_hbm  # ms saved, bytes more
    tables = [t for t in _with_order(plan.task, ruled) if not beyond.keys() & {t.name, *part_names(t.name)}]
    if not tables:
        return {}
    before_ms, before_bytes = _even_ms(model, plan.task, plan.shards), _hbm(plan.task, plan.shards)
    for table in sorted(tables, key=lambda table: -table.pooling_factor * table.dim)[:TABLES_TRIED]:
        parts = {part.name for part in parts_of_table(table, _held(plan).get(table.name))}
        others = [shard for shard in plan.shards if shard.table not in parts]
        if before_ms - _even_ms(model, plan.task, others) < LEAST_GAIN * before_ms:  # more than it takes it cannot save
            continue
        for hot_rows in [*_points(table), *([0] if table.name in _held(plan) else [])]:
            task, shards = _in_two(plan, table, hot_rows)
            if not contradicts_itself(task):
                more = _hbm(task, shards) - before_bytes
                found.append((before_ms - _even_ms(model, task, shards), more, table.name, hot_rows))
    room, chosen = sum(plan.task.usable_bytes) - before_bytes, dict[str, int]()
    for saved_ms, more, name, hot_rows in sorted(found, reverse=True):
        enough = saved_ms > LEAST_GAIN * before_ms and more <= room
        if enough and name not in chosen and len(chosen) < MOST_IN_TWO:
            room -= more
            chosen[name] = hot_rows
    return chosen


def _points(table: Table) -> list[int]:
    """A few numbers of hot rows of a table with an order: of its points."""
    assert table.row_order is not None
    some = [rows for rows, _ in table.row_order.curve[1:] if rows <= min(table.row_order.hot_rows, table.rows - 1)]
    last = len(some) - 1
    return (
        [some[at] for at in sorted({round(last * n / (POINTS_TRIED - 1)) for n in range(POINTS_TRIED)})] if some else []
    )


def _in_two(plan: Plan, table: Table, hot_rows: int) -> tuple[ShardingTask, list[Shard]]:
    """The plan's task and shards with so many hot rows of a table copied, the others cut as the table, or its cold part, is."""
    was, task = parts_of_table(table, _held(plan).get(table.name)), _holding(plan.task, {table.name: hot_rows})
    *hot, cold = parts_of_table(table, task.constraints.rows_by_access.get(table.name))
    names = {part.name for part in was}
    shards = [shard for shard in plan.shards if shard.table not in names]
    shards += cut_alike(plan.by_table()[was[-1].name], was[-1], cold, table)
    for part in hot:
        shards += [Shard(table=part.name, rows=part.rows, dim=table.dim, device=n) for n in range(task.devices)]
    return task, shards


def _holding(task: ShardingTask, hot_rows: Mapping[str, int]) -> ShardingTask:
    """The task with so many hot rows of these tables copied, 0 for none, beside those that are held by access already."""
    held = {name: how for name, how in task.constraints.rows_by_access.items() if name not in hot_rows}
    held |= {name: RowsByAccess(hot_rows=rows) for name, rows in hot_rows.items() if rows}
    task = task.with_rows_by_access(held)
    copied = {part_names(name)[0] for name, rows in hot_rows.items() if rows}
    return task.with_copies(task.constraints.data_parallel | copied) if copied else task


def _even_ms(model: CostModel, task: ShardingTask, shards: Sequence[Shard]) -> float:
    """What a device would take if all held as much."""
    prices = price_shards(model, task, shards, evenly=True)
    assert prices is not None  # models that price no rows choose nothing
    return float(prices.total_ms.max())


def _hbm(task: ShardingTask, shards: Sequence[Shard]) -> int:
    """Bytes of HBM of all devices that the shards and maps take."""
    return sum(memory.total for memory in device_memory(task, shards))


def _held(plan: Plan) -> Mapping[str, RowsByAccess]:
    return plan.task.constraints.rows_by_access


def _saves(held: Mapping[str, int], share: float, without: Plan) -> str:
    """A line on the hot rows that were chosen, and the share of a plan's ms that they save."""
    in_two, whole = ([name for name, rows in held.items() if bool(rows) is so] for so in (True, False))
    said = [f"hot rows of {counted(len(in_two), 'sequence')} are copied ({first_few(in_two)})"] if in_two else []
    said += (
        [f"hot rows of {counted(len(whole), 'sequence')} are no longer copied ({first_few(whole)})"] if whole else []
    )
    needs = "; the trainer needs their lists of hot ids. TorchRec's use_index_dedup needs none, and may save as much"
    return (
        f"{' and '.join(said)}: that saves {share:.1%} of the {without.cost_ms:.3f} ms of the plan found "
        f"{'with tables held as before' if _held(without) else 'without'}{needs if in_two else ''}"
    )
