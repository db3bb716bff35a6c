"""Which tables to deal over their row blocks, and which to hold in two parts with how many hot rows (core/parts.py).

A table may be held so if it has a row order and no rule says how it is held. Choices are made beside a plan without them, or with
those of the plan to start from:

1. **Estimates**: shards of the plan, with parts in place of a table, are priced as if all devices held as much. Of a few points
   of each order that one is taken which saves most: hot rows in HBM and cold ones in host memory, of tables beyond HBM; copies of
   hot rows, of sequences. What HBM these need more is worth what the plan's caches would lose by it. A table that is in two
   parts already may get other numbers of hot rows, or be whole again.
2. **A trial**: a short search of the best of these together, and of uneven row blocks dealt, in tiers that are named, so that no
   tiers are searched.
3. **A search** of the task held so, if the trial is cheaper.

The cheapest plan is taken, and one with tables held otherwise by access only if that saves WORTH. A table that gains nothing by
it is not dealt.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import ValidationError

from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import parts_of_table
from neuroshard.core.parts import RowsByAccess, part_names
from neuroshard.core.plan import Plan, Shard, device_memory, unparted
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.tiers import Tier
from neuroshard.costmodel.pricing import LaunchPrices, map_ms, price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.notes import with_notes
from neuroshard.search.problem.previous import cut_alike
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tiers.division import tier_of

# Share that a plan must save by tables that are dealt or in two parts, for which a trainer needs a wrapper: a guess
WORTH = 0.02
TRIAL_ROUNDS = 4  # of local search in a trial, a tenth of a search: a guess
TRIED = 0.01  # share that the plan of a trial must save, whose search is short: a guess, half of WORTH
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
NONE_WORTH = f"rows by access: no plan that was found with other tables dealt or in two parts costs {WORTH:.0%} less"

OF_A_TASK = {"format_version", "task", "task_digest", "predicted", "predicted_ms"}  # fields of a plan

Held = Mapping[str, RowsByAccess]
Search = Callable[[ShardingTask], Plan]


def may_be_held(task: ShardingTask) -> bool:
    """Whether some table might be dealt or in two parts: it has a row order, and no rule says so already."""
    return any(
        table.row_order is not None for table in task.tables if table.name not in task.constraints.rows_by_access
    )


def short(settings: SearchSettings) -> SearchSettings:
    """How a trial is searched."""
    return replace(settings, rounds=min(TRIAL_ROUNDS, settings.most_rounds), simplicity=0.0)


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
    less = None if len(kept) == len(held) else anew(found, found.task, model)
    return found if less is None else _bounded(less, plan, _dropped_ms(task, less.task, model))


def choose(
    task: ShardingTask,
    plan: Plan,
    model: CostModel,
    search: Search,
    trial: Search,
    may_split: Collection[str],
    ruled: Collection[str],
) -> Plan:
    """The `plan` of a task, or a cheaper one of which other tables are dealt or in two parts, but for those `ruled`. `search` and
    the shorter `trial` find the plan of a task, and deal no table that is in no row blocks; tables that `may_split` may be split
    row-wise."""
    cost_ms = plan.cost_ms
    if cost_ms is None:
        return plan
    in_two = _worth_trying(plan, model, {*ruled, *(name for group in task.constraints.together for name in group)})
    dealt = _worth_dealing(task, plan, model, {*may_split} - in_two.keys())
    tried: Plan | None = None
    for some, others in dict.fromkeys(((tuple(in_two), tuple(dealt)), ((), tuple(dealt)), (tuple(in_two), ()))):
        if tried is None and (some or others):
            apart = {name: in_two[name] for name in some}
            found = _found(trial, _named(task, plan, apart, others), model, _cleaned_of(task))
            cheaper = [
                one for one in (_fewer_dealt(each, others, model) for each in found) if _ms(one) < cost_ms * (1 - TRIED)
            ]
            if cheaper:
                (tried,), in_two = cheaper, apart
    as_it_is = with_notes(assuming(plan, NONE_HELD), NONE_WORTH)
    if tried is None or _held(tried) == _held(plan):
        return as_it_is
    dealt = [name for name, how in _held(tried).items() if how.dealt and name not in _held(plan)]
    searched = _found(search, _holding(task, in_two, dealt), model)
    if not searched:
        return as_it_is
    best = min((tried, *(_fewer_dealt(one, dealt, model) for one in searched)), key=_ms)
    if _held(best) == _held(plan) or _ms(best) >= cost_ms * (1 - WORTH):
        return as_it_is
    bounded = _bounded(best, searched[0], _dropped_ms(searched[0].task, best.task, model))
    return with_notes(assuming(bounded, AS_HELD), _saves(best, plan))


class _InTwo(NamedTuple):
    """How a table is held in two parts: how many rows are hot, 0 where it is whole; whether these are copied, and whether the
    cold ones are beyond HBM."""

    hot_rows: int
    copied: bool
    beyond: bool

    @property
    def held(self) -> RowsByAccess | None:
        return RowsByAccess(hot_rows=self.hot_rows) if self.hot_rows else None


def _worth_trying(plan: Plan, model: CostModel, ruled: Collection[str]) -> dict[str, _InTwo]:
    """Tables that are worth holding in two parts, or in other ones, by their estimates, and how, as many as HBM has room for."""
    found = list[tuple[float, int, str, _InTwo]]()  # ms that are saved, bytes of HBM for them
    tables = [table for table in plan.task.tables if table.row_order is not None and table.name not in ruled]
    tables = sorted(tables, key=lambda table: -table.pooling_factor * table.dim)
    ways = {table.name: some for table in tables if (some := _ways(plan, table))}
    tables = [table for table in tables if table.name in ways][:TABLES_TRIED]
    if not tables:
        return {}
    before_ms, before_bytes = _even_ms(model, plan.task, plan.shards), _hbm(plan.task, plan.shards)
    a_byte_ms, cache_bytes = _worth_of_hbm(plan, model, before_ms, before_bytes)
    for table in tables:
        parts = {part.name for part in parts_of_table(table, _held(plan).get(table.name))}
        others = [shard for shard in plan.shards if shard.table not in parts]
        its_ms, its_bytes = before_ms - _even_ms(model, plan.task, others), before_bytes - _hbm(plan.task, others)
        if its_ms + a_byte_ms * its_bytes < LEAST_GAIN * before_ms:  # more than it takes it cannot save
            continue
        for how in ways[table.name]:
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


def _ways(plan: Plan, table: Table) -> list[_InTwo]:
    """How else a table with an order may be held: in two parts where it is beyond HBM, or a sequence; or whole again."""
    constraints, (hot, cold) = plan.parted.constraints, part_names(table.name)
    now = _held(plan).get(table.name)
    if now is not None and now.dealt:
        return []
    rule = constraints.beyond_hbm.get(table.name if now is None else cold)
    is_sequence = table.pooling == "none" and plan.task.devices > 1
    copied: tuple[bool, ...] = (True,) if is_sequence else ()
    if now is not None:
        copied = (hot in constraints.data_parallel,)
    elif rule is not None:
        copied = (False, *copied)
    cached = None if rule is None or rule.cached_rows is None else rule.cached_rows + ((now and now.hot_rows) or 0)
    ways = [_InTwo(rows, so, rule is not None) for rows in _points(table, cached) for so in copied]
    return [*ways, _InTwo(0, False, rule is not None)] if now is not None else ways


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
    """The plan's task, parted, and shards with the table held so, parts cut as it is, or as its parts are, and the hot one maybe
    copied; None where it cannot be held so."""
    if how.held is not None and how.held.fault(table):
        return None
    was = parts_of_table(table, _held(plan).get(table.name))
    source, now = was[-1], parts_of_table(table, how.held)
    task = _holding(plan.task, {table.name: how}, ())
    if how.beyond:
        rule = plan.parted.constraints.beyond_hbm[source.name]
        tier = ("host", None) if source.name == table.name else (rule.tier, rule.cached_rows)
        task = task.with_tiers({now[-1].name: tier})
    if task.contradicts_itself:
        return None
    names = {part.name for part in was}
    shards, own = [shard for shard in plan.shards if shard.table not in names], plan.by_table()[source.name]
    for part in now:
        if how.copied and part is not now[-1]:
            shards += [
                Shard(table=part.name, rows=part.rows, dim=table.dim, device=device) for device in range(task.devices)
            ]
        else:
            shards += cut_alike(own, source, part, table)
    return task.parted, shards


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
    where HBM needs it. Cold rows have as much of a cache as hot ones leave them."""
    held, beyond = _holding(task, in_two, dealt), plan.parted.constraints.beyond_hbm
    if task.host_memory_bytes is None:
        return held
    source = {table.name: beyond.get(table.name) for table in held.parted.tables}
    fewer = dict.fromkeys(source, 0)
    for name, how in in_two.items():
        now, (hot, cold) = _held(plan).get(name), part_names(name)
        last = cold if how.hot_rows else name
        source[last] = beyond.get(cold if now else name)
        source[hot], fewer[last] = None, how.hot_rows - ((now and now.hot_rows) or 0)
    named = held
    for share in CACHES:
        tiers = dict[str, tuple[Tier | None, int | None]]()
        for table in held.parted.without_tier:
            rule = source[table.name]
            if rule is None:
                tiers[table.name] = "hbm", None
            elif rule.cached_rows is None:
                tiers[table.name] = "host", None
            else:
                rows = min(max(rule.cached_rows - fewer[table.name], 0), table.rows)
                tiers[table.name] = tier_of(rows * share)
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
    other = plan if as_task is None else anew(plan, as_task(plan.task), model)
    return [] if other is None else [other]


def _holding(task: ShardingTask, in_two: Mapping[str, _InTwo], dealt: Collection[str]) -> ShardingTask:
    """The task with these tables held so, beside those that are already."""
    held = {name: how for name, how in task.constraints.rows_by_access.items() if name not in in_two}
    held |= {name: how.held for name, how in in_two.items() if how.held is not None}
    held |= {name: RowsByAccess(dealt=True) for name in dealt}
    hot = {part_names(name)[0]: how.copied for name, how in in_two.items()}
    free = task.with_tiers({name: (None, None) for name in in_two if name in task.constraints.beyond_hbm})
    copied = free.constraints.data_parallel.difference(hot) | {name for name, so in hot.items() if so}
    held_so = free.with_rows_by_access(held)
    return held_so if copied == held_so.constraints.data_parallel else held_so.with_copies(copied)


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
    held, deal, maps_ms = _held(plan), RowsByAccess(dealt=True), map_ms(model, task)
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
            less = anew(plan, plan.task.with_rows_by_access(rest), model)
            plan = less if less is not None and _ms(less) <= _ms(plan) else plan
    return plan


def anew(plan: Plan, task: ShardingTask, model: CostModel) -> Plan | None:
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


def _bounded(plan: Plan, searched: Plan, dropped_ms: float) -> Plan:
    """The plan with the bound of another that was `searched`, of which every plan takes so much more."""
    bound_ms = searched.lower_bound_ms
    if bound_ms is not None:
        bound_ms = min(max(bound_ms - dropped_ms, 0.0), _ms(plan))
    return plan.model_copy(update={"lower_bound_ms": bound_ms, "bound_assumptions": searched.bound_assumptions})


def _even_ms(model: CostModel, task: ShardingTask, shards: Sequence[Shard]) -> float:
    """What a device would take if all held as much."""
    prices = price_shards(model, task, shards, evenly=True)
    assert prices is not None  # models that price no rows choose nothing
    return float(prices.total_ms.max())


def _hbm(task: ShardingTask, shards: Sequence[Shard]) -> int:
    """Bytes of HBM of all devices that the shards and maps take."""
    return sum(memory.total for memory in device_memory(task, shards))


def _held(plan: Plan) -> Held:
    return plan.task.constraints.rows_by_access


def _ms(plan: Plan) -> float:
    assert plan.cost_ms is not None
    return plan.cost_ms


def _saves(plan: Plan, without: Plan) -> str:
    """A line on the tables by access that were chosen, and what that saves."""
    were, are = _held(without), _held(plan)
    chosen = {name: how for name, how in are.items() if how != were.get(name)}
    in_two = [name for name, how in chosen.items() if how.hot_rows is not None]
    said = [
        f"{counted(len(names), 'table')} {how} ({first_few(names)})"
        for names, how in (
            (in_two, "in two parts"),
            ([name for name in chosen if name not in in_two], "dealt over row blocks"),
            ([name for name in were if name not in are], "no longer apart"),
        )
        if names
    ]
    return (
        f"{' and '.join(said)} by access: that saves {1 - _ms(plan) / _ms(without):.1%} of the {_ms(without):.3f} ms of the plan "
        f"found {'with tables held as before' if were else 'without'}; the trainer needs their lists of hot ids"
    )
