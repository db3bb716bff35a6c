"""Which tables to deal over their row blocks, and which to hold in two parts with how many hot rows (core/parts.py).

A table may be held so if it has a row order and no rule says how it is held. Choices are made beside a plan without them:

1. **Estimates**: shards of the plan, with parts in place of a table, are priced as if all devices held as much. Of a few points
   of each order that one is taken which saves most: hot rows in HBM and cold ones in host memory, of tables beyond HBM; copies of
   hot rows, of sequences. What HBM these need more is worth what the plan's caches would lose by it.
2. **A trial**: the best of these together, in tiers that are named, so that no tiers are searched.
3. **A search** of the task held so, and with uneven row blocks dealt, if the trial is cheaper or dealing may save enough.

The cheapest plan is taken, and one with tables held by access only if that saves WORTH. A table that gains nothing by it is not
dealt.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from neuroshard.core.errors import Infeasible
from neuroshard.core.parts import RowsByAccess, part_names
from neuroshard.core.plan import Plan, Shard, device_memory, unparted
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.tiers import Tier
from neuroshard.costmodel.pricing import LaunchPrices, map_ms, price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.notes import with_notes
from neuroshard.search.tiers.division import tier_of

# Share that a plan must save by tables that are dealt or in two parts, for which a trainer needs a wrapper: a guess
WORTH = 0.02
LEAST_GAP = (
    0.04  # share that a plan must be above its bound, or its mean device, for blocks to be dealt: a guess, twice WORTH
)
LEAST_GAIN = 0.002  # share of a plan's ms that a table in two parts must save by its estimate: a guess
POINTS_TRIED = 6  # numbers of hot rows of a table that are estimated, evenly among the points of its order: a guess
TABLES_TRIED = 16  # tables whose parts are estimated, those with most columns looked up: a guess
MOST_IN_TWO = 8  # tables in two parts that are tried together, each of which has launches of its own: a guess
SHRUNK = 0.9  # share of its rows that a cache keeps where it is estimated what HBM is worth: a guess
CACHES = (
    1.0,
    0.75,
    0.5,
    0.25,
    0.0,
)  # share of its rows that a cache has in a trial, the first with which tables fit: a guess
MOST_OF_CACHES = 0.5  # share of the caches' HBM that hot rows may take: a guess

AS_HELD = (
    "tables are in two parts as in this plan, and row blocks that may be dealt have even lookups: others in two parts, and "
    "other numbers of hot rows, may cost less"
)
NONE_HELD = "no more tables are dealt or in two parts than in this plan"

OF_A_TASK = {"format_version", "task", "task_digest", "predicted", "predicted_ms"}  # fields of a plan

Held = Mapping[str, RowsByAccess]
Search = Callable[[ShardingTask], Plan]


def may_be_held(task: ShardingTask) -> bool:
    """Whether some table might be dealt or in two parts: it has a row order, and no rule says so already."""
    return any(
        table.row_order is not None for table in task.tables if table.name not in task.constraints.rows_by_access
    )


def assuming(plan: Plan, what: str) -> Plan:
    """The plan, whose bound is one under this assumption too."""
    if plan.lower_bound_ms is None:
        return plan
    return plan.model_copy(update={"bound_assumptions": (*plan.bound_assumptions, what)})


def held_as_before(task: ShardingTask, previous: Plan) -> ShardingTask:
    """The task with tables that no rule names held by access as those of the `previous` plan, where they still can be."""
    given, before = task.constraints.rows_by_access, previous.task
    ruled, tables = task.constraints.rules(), {table.name: table for table in task.tables}
    kept = {
        name: how
        for name, how in before.constraints.rows_by_access.items()
        if name in tables and name not in ruled and how.fault(tables[name]) is None
    }
    if not kept:
        return task
    copied = before.constraints.data_parallel & {part_names(name)[0] for name in kept}
    return _copying(task.with_rows_by_access({**given, **kept}), copied)


def unparted_in_blocks(plan: Plan, task: ShardingTask, ruled: Collection[str], model: CostModel) -> Plan:
    """A plan of the parted task of `task`, or of that with other rules and settings, as one of `task` with these. A table that is
    in no row blocks is not dealt, unless it is one of those `ruled`: then pydantic's ValidationError names it."""
    held, in_blocks = task.constraints.rows_by_access, _in_blocks(plan)
    kept = {name: how for name, how in held.items() if not how.dealt or name in ruled or name in in_blocks}
    found = unparted(plan, task.with_rows_by_access(kept))
    return found if len(kept) == len(held) else _anew(found, found.task, model) or found


def choose(task: ShardingTask, plan: Plan, model: CostModel, search: Search, may_split: Collection[str]) -> Plan:
    """The `plan` of a task, or a cheaper one of which more tables are dealt or in two parts. `search` finds the plan of a task,
    and deals no table that is in no row blocks; tables that `may_split` may be split row-wise."""
    cost_ms = plan.cost_ms
    if cost_ms is None:
        return plan
    in_two = _worth_trying(task, plan, model)
    dealt = _worth_dealing(task, plan, model, {*may_split} - in_two.keys())
    found = list[Plan]()
    if in_two and plan.parted.constraints.beyond_hbm:
        found = _found(search, _named(task, plan, in_two, dealt), model, _cleaned_of(task))
        if not found or _ms(found[0]) >= cost_ms:
            found, in_two = [], {}
    if not in_two and not dealt:
        return assuming(plan, NONE_HELD)
    holding = _holding(task, in_two, dealt)
    searched = _found(search, holding, model)
    if not searched:
        return assuming(plan, NONE_HELD)
    found += searched
    in_place = {name: RowsByAccess(dealt=True) for name in dealt if name in _in_blocks(plan)}
    if in_place:
        dealt_in_place = _anew(plan, plan.task.with_rows_by_access({**_held(plan), **in_place}), model)
        found += [] if dealt_in_place is None else [dealt_in_place]
    best = min((_fewer_dealt(one, dealt, model) for one in found), key=_ms)
    if _held(best) == _held(plan) or _ms(best) >= cost_ms * (1 - WORTH):
        return assuming(plan, NONE_HELD)
    bound_ms = searched[0].lower_bound_ms
    if bound_ms is not None:
        bound_ms = min(max(bound_ms - _dropped_ms(holding, best.task, model), 0.0), _ms(best))
    bounded = {"lower_bound_ms": bound_ms, "bound_assumptions": searched[0].bound_assumptions}
    return with_notes(assuming(best.model_copy(update=bounded), AS_HELD), _saves(best, plan))


class _InTwo(NamedTuple):
    """How a table is held in two parts: how many rows are hot, whether these are copied, and whether the cold ones are in host
    memory."""

    hot_rows: int
    copied: bool
    beyond: bool


def _worth_trying(task: ShardingTask, plan: Plan, model: CostModel) -> dict[str, _InTwo]:
    """Tables that are worth holding in two parts by their estimates, and how, as many as HBM has room for."""
    beyond = plan.parted.constraints.beyond_hbm
    ruled = {*task.constraints.rules(), *(name for group in task.constraints.together for name in group)}
    tables = [
        table
        for table in task.tables
        if table.row_order is not None
        and table.name not in ruled
        and (table.name in beyond or (table.pooling == "none" and task.devices > 1))
    ]
    if not tables:
        return {}
    tables = sorted(tables, key=lambda table: -table.pooling_factor * table.dim)[:TABLES_TRIED]
    before_ms, before_bytes = _even_ms(model, plan.task, plan.shards), _hbm(plan.task, plan.shards)
    a_byte_ms, cache_bytes = _worth_of_hbm(plan, model, before_ms, before_bytes)
    found = list[tuple[float, int, str, _InTwo]]()  # ms that are saved, bytes of HBM for them
    for table in tables:
        rule = beyond.get(table.name)
        for hot_rows in _points(table, None if rule is None else rule.cached_rows):
            for copied in (False, True) if rule is not None and table.pooling == "none" else (rule is None,):
                how = _InTwo(hot_rows, copied, rule is not None)
                if (held := _in_two(plan, table, how)) is not None:
                    more = _hbm(*held) - before_bytes
                    found.append((before_ms - _even_ms(model, *held) - a_byte_ms * more, more, table.name, how))
    room = sum(plan.task.usable_bytes) - before_bytes + MOST_OF_CACHES * cache_bytes
    chosen = dict[str, _InTwo]()
    for saved_ms, more, name, how in sorted(found, reverse=True):
        enough = saved_ms > LEAST_GAIN * before_ms and more <= room
        if enough and name not in chosen and len(chosen) < MOST_IN_TWO:
            room -= more
            chosen[name] = how
    return chosen


def _points(table: Table, cached_rows: int | None) -> list[int]:
    """A few numbers of hot rows of a table with an order: of its points, and as many as its cache has."""
    assert table.row_order is not None
    some = [rows for rows, _ in table.row_order.curve[1:] if rows <= min(table.row_order.hot_rows, table.rows - 1)]
    last = len(some) - 1
    places = {round(last * place / (POINTS_TRIED - 1)) for place in range(POINTS_TRIED)} if some else set()
    listed = {some[place] for place in places}
    if cached_rows is not None:
        listed.add(min(cached_rows, table.row_order.hot_rows, table.rows - 1))
    return sorted(rows for rows in listed if rows > 0)


def _in_two(plan: Plan, table: Table, how: _InTwo) -> tuple[ShardingTask, list[Shard]] | None:
    """The plan's task and shards with two parts of a table in its place, cut as it is, the hot one maybe copied; None where it
    cannot be held so."""
    if RowsByAccess(hot_rows=how.hot_rows).fault(table):
        return None
    hot, cold = part_names(table.name)
    task = plan.task.with_tiers({table.name: (None, None)}) if how.beyond else plan.task
    task = _holding(task, {table.name: how}, ())
    if how.beyond:
        task = task.with_tiers({cold: ("host", None)})
    if task.contradicts_itself:
        return None
    shards = [shard for shard in plan.shards if shard.table != table.name]
    own = [shard for shard in plan.shards if shard.table == table.name]
    firsts = sorted({shard.row_offset for shard in own})
    for part in task.parted.tables:
        if part.name == hot and how.copied:
            shards += [Shard(table=hot, rows=part.rows, dim=part.dim, device=device) for device in range(task.devices)]
        elif part.name in (hot, cold):
            blocks = part.row_blocks(len(firsts))
            if any(rows == 0 for _, rows in blocks):
                return None
            of = dict(zip(firsts, blocks, strict=True))
            for shard in own:
                first, rows = of[shard.row_offset]
                shards.append(shard.model_copy(update={"table": part.name, "row_offset": first, "rows": rows}))
    return task, shards


def _worth_of_hbm(plan: Plan, model: CostModel, before_ms: float, before_bytes: int) -> tuple[float, float]:
    """The ms that a byte of HBM saves in the plan's caches, and the bytes of these; zeros where there are none."""
    rules = plan.parted.constraints.beyond_hbm
    rows = {name: rule.cached_rows for name, rule in rules.items() if rule.cached_rows}
    less = {name: tier_of(cached * SHRUNK) for name, cached in rows.items() if cached}
    if not less:
        return 0.0, 0.0
    task = plan.task.with_tiers(less)
    freed = before_bytes - _hbm(task, plan.shards)
    lost_ms = max(_even_ms(model, task, plan.shards) - before_ms, 0.0)
    return (lost_ms / freed, freed / (1 - SHRUNK)) if freed > 0 else (0.0, 0.0)


def _named(task: ShardingTask, plan: Plan, in_two: Mapping[str, _InTwo], dealt: Collection[str]) -> ShardingTask:
    """The task with these tables in two parts or dealt, and a tier named for every table: its own in the plan, with less cache
    where HBM needs it."""
    held, beyond = _holding(task, in_two, dealt), plan.parted.constraints.beyond_hbm
    cold = {part_names(name)[1] for name, how in in_two.items() if how.beyond}
    named = held
    for share in CACHES:
        tiers = dict[str, tuple[Tier | None, int | None]]()
        for table in held.parted.without_tier:
            rule = beyond.get(table.name)
            if table.name in cold:
                tiers[table.name] = "host", None
            elif rule is None:
                tiers[table.name] = "hbm", None
            else:
                rows = rule.cached_rows
                tiers[table.name] = ("host", None) if rows is None else tier_of(rows * share)
        named = held.with_tiers(tiers)
        if named.parted.need_bytes <= sum(named.parted.placeable_bytes):
            break
    return named


def _cleaned_of(task: ShardingTask) -> Callable[[ShardingTask], ShardingTask]:
    """What takes tiers of HBM from a task which `_named` them, but for those that this task says."""
    said = {rule.table for rule in task.constraints.tables if rule.tier is not None}

    def cleaned(named: ShardingTask) -> ShardingTask:
        rules = named.constraints.tables
        free = named.with_tiers({r.table: (None, None) for r in rules if r.tier == "hbm" and r.table not in said})
        some = tuple(rule for rule in free.constraints.tables if rule.says_more or rule.rows_by_access is not None)
        return free.model_copy(update={"constraints": free.constraints.model_copy(update={"tables": some})})

    return cleaned


def _found(
    search: Search, task: ShardingTask, model: CostModel, as_task: Callable[[ShardingTask], ShardingTask] | None = None
) -> list[Plan]:
    """The plan that is found of a task, as one of what `as_task` makes of that; none where none is found."""
    try:
        plan = search(task)
    except Infeasible:
        return []
    other = plan if as_task is None else _anew(plan, as_task(plan.task), model)
    return [] if other is None else [other]


def _holding(task: ShardingTask, in_two: Mapping[str, _InTwo], dealt: Collection[str]) -> ShardingTask:
    """The task with these tables held so, beside those that are already."""
    held = {name: RowsByAccess(hot_rows=how.hot_rows) for name, how in in_two.items()}
    held |= {name: RowsByAccess(dealt=True) for name in dealt}
    copied = {part_names(name)[0] for name, how in in_two.items() if how.copied}
    return _copying(task.with_rows_by_access({**task.constraints.rows_by_access, **held}), copied)


def _copying(task: ShardingTask, names: Collection[str]) -> ShardingTask:
    """The task with these parts copied beside what is."""
    return task.with_copies(task.constraints.data_parallel.union(names)) if names else task


def _worth_dealing(task: ShardingTask, plan: Plan, model: CostModel, may_split: Collection[str]) -> list[str]:
    """Tables of which it is known that their row blocks have uneven lookups, and that may be dealt over them, if that may save
    enough beside their maps: hardly more than a plan is above its bound, or above what a device takes on average."""
    even_ms = _even_ms(model, plan.task, plan.shards)
    most_ms = _ms(plan) - min(even_ms, even_ms if plan.lower_bound_ms is None else plan.lower_bound_ms)
    if most_ms < LEAST_GAP * _ms(plan):
        return []
    held, deal, maps_ms = task.constraints.rows_by_access, RowsByAccess(dealt=True), map_ms(model, task)
    uneven = [
        table.name
        for table in task.tables
        if table.name in may_split
        and table.name not in held
        and deal.fault(table) is None
        and table.lookup_share(0, table.block_rows(task.devices)) is not None
    ]
    return [name for name in uneven if map_ms(model, _holding(task, {}, [name])) - maps_ms < most_ms]


def _in_blocks(plan: Plan) -> set[str]:
    """Names of tables that are in row blocks."""
    rows = {table.name: table.rows for table in plan.parted.tables}
    return {shard.table for shard in plan.shards if shard.rows < rows[shard.table]}


def _fewer_dealt(plan: Plan, dealt: Sequence[str], model: CostModel) -> Plan:
    """The plan without those of the tables `dealt` that gain nothing by it."""
    for name in dealt:
        rest = {other: how for other, how in _held(plan).items() if other != name}
        if len(rest) < len(_held(plan)):
            less = _anew(plan, plan.task.with_rows_by_access(rest), model)
            plan = less if less is not None and _ms(less) <= _ms(plan) else plan
    return plan


def _anew(plan: Plan, task: ShardingTask, model: CostModel) -> Plan | None:
    """The plan's shards as a plan of this task, priced anew; None where they are none."""
    prices = price_shards(model, task, plan.shards)
    if prices is None:
        return None
    predicted = prices.of_devices
    fields = {name: getattr(plan, name) for name in Plan.model_fields if name not in OF_A_TASK}
    try:
        return Plan(
            task=task, **fields, predicted=predicted, predicted_ms=tuple(device.total_ms for device in predicted)
        )
    except ValidationError:
        return None


def _dropped_ms(searched: ShardingTask, held: ShardingTask, model: CostModel) -> float:
    """What every plan of the task searched takes at most, and none of the same tables that are no longer dealt: for maps, and to
    join outputs."""
    columns = max(searched.by_access.columns - held.by_access.columns, 0.0)
    joining = LaunchPrices.of(model, held.devices).ms(0, 0, 0, columns).total_ms
    return max(map_ms(model, searched) - map_ms(model, held), 0.0) + joining


def _even_ms(model: CostModel, task: ShardingTask, shards: Sequence[Shard]) -> float:
    """What a device would take if all held as much."""
    prices = price_shards(model, task, shards, evenly=True)
    assert prices is not None  # models that price no rows choose nothing
    return float(prices.total_ms.max())


def _hbm(task: ShardingTask, shards: Sequence[Shard]) -> int:
    """Bytes of HBM of all devices that the shards and maps take."""
    return sum(memory.total for memory in device_memory(task, shards)) + task.devices * task.by_access.map_bytes


def _held(plan: Plan) -> Held:
    return plan.task.constraints.rows_by_access


def _ms(plan: Plan) -> float:
    assert plan.cost_ms is not None
    return plan.cost_ms


def _saves(plan: Plan, without: Plan) -> str:
    """A line on the tables by access that were chosen, and what that saves."""
    chosen = {name: how for name, how in _held(plan).items() if name not in _held(without)}
    in_two = [name for name, how in chosen.items() if how.hot_rows is not None]
    dealt = [name for name in chosen if name not in in_two]
    said = [
        f"{counted(len(names), 'table')} {how} ({first_few(names)})"
        for names, how in ((in_two, "in two parts"), (dealt, "dealt over row blocks"))
        if names
    ]
    return (
        f"{' and '.join(said)} by access: that saves {1 - _ms(plan) / _ms(without):.1%} of the {_ms(without):.3f} ms of the plan "
        "found without; the trainer needs their lists of hot ids"
    )
