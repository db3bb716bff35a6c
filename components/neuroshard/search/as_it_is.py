"""The plan to start from, as it is: today's plan too, unless a search finds a better one.

A search makes choices one after another: copies, tiers, parts, cuts. From a plan in which all of these were made, a step that
leaves one out may find no plan within a move budget, or only a dearer one.
"""

from collections.abc import Callable

from pydantic import ValidationError

from neuroshard.core.errors import Infeasible
from neuroshard.core.operator_limits import fault_of_plan
from neuroshard.core.plan import Plan, shardings_of
from neuroshard.core.sharding import DATA_PARALLEL, SHARDINGS, TABLE_WISE
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel, trains_on
from neuroshard.costmodel.tiers import knows_tiers
from neuroshard.search.asked import Asked
from neuroshard.search.copies import with_dense_optimizer
from neuroshard.search.problem.changes import compare
from neuroshard.search.problem.kinds import enumerated
from neuroshard.search.problem.room import contradicts_itself
from neuroshard.search.tuning import TUNING


def or_as_it_is(found: Callable[[], Plan], asked: Callable[[], Asked], previous: Plan) -> Plan:
    """The plan `found`, or the `previous` one as it is, where none is found, or a dearer one, or one for next to no gain that is
    no simpler. `asked` is of the task before it is parted. Raises Infeasible where neither is a plan."""
    try:
        plan = found()
    except Infeasible:
        if (same := as_it_is(asked(), previous)) is None:
            raise
        return same
    if set(plan.shards) == set(previous.shards) and plan.task.held_as(previous.task) == plan.task:
        return plan
    same = as_it_is(asked(), previous)
    if same is None or same.cost_ms is None or plan.cost_ms is None:
        return plan
    worth = 0.0 if _holdings(plan) < _holdings(same) else TUNING.worth_moving
    if plan.cost_ms <= same.cost_ms * (1 - worth):
        return plan
    bound_ms = None if plan.lower_bound_ms is None else min(plan.lower_bound_ms, same.cost_ms)
    return same.model_copy(update={"lower_bound_ms": bound_ms, "bound_assumptions": plan.bound_assumptions})


def as_it_is(asked: Asked, previous: Plan) -> Plan | None:
    """The `previous` plan as one of today's task, priced anew and without a bound; None if the task asks for another."""
    task, held = asked.task, asked.task.held_as(previous.task)
    was, now = ((one.devices, {(t.name, t.rows, t.dim) for t in one.tables}) for one in (previous.task, task))
    if was != now or held.tables != task.tables or contradicts_itself(held) or not _may_be_held(asked, held):
        return None
    if held.densely_trained:
        held = with_dense_optimizer(held)
    splits_rows = {name for name, kind in shardings_of(previous).items() if kind.splits_rows}
    if splits_rows.difference(table.name for table in held.mapped) and not held.may_split_rows:
        rows = {"row_wise": asked.permitted.constraints.row_wise}
        held = held.model_copy(update={"constraints": held.constraints.model_copy(update=rows)})
    fresh = {"baselines": (), "improvements": (), "lower_bound_ms": None, "bound_assumptions": ()}
    notes = (*asked.notes, *compare(task, previous))
    plan = _anew(previous.model_copy(update={**fresh, "provenance": asked.provenance(notes)}), held, asked.cost_model)
    return plan if plan is not None and _may_lie_so(asked, plan) else None


def _anew(plan: Plan, task: ShardingTask, model: CostModel) -> Plan | None:
    """The plan's shards as a plan of this task, priced anew; None where they are none."""
    prices = price_shards(model, task, plan.shards)
    if prices is None:
        return None
    predicted = prices.of_devices
    try:
        return plan.of_task(task, predicted=predicted, predicted_ms=tuple(device.total_ms for device in predicted))
    except ValidationError:
        return None


def _may_be_held(asked: Asked, held: ShardingTask) -> bool:
    """Whether today's rules and options let tables be `held` so: in copies, in tiers, by access."""
    task, parted = asked.task, held.parted
    if held.sent_once - task.sent_once and not asked.settings.try_index_dedup:
        return False
    by_access, ruled = held.constraints.rows_by_access, task.constraints.rows_by_access
    more = {name for name, how in by_access.items() if ruled.get(name) != how}
    if not ruled.keys() <= by_access.keys() or (more and not asked.settings.try_rows_by_access):
        return False
    if any(table.name in by_access and by_access[table.name].went(table) for table in held.tables):
        return False
    rules = task.constraints.rules()
    if more & rules.keys():
        return False
    today, now = task.parted.constraints.rules(), parted.constraints.rules()
    for name, rule in today.items():
        said = {field: getattr(rule, field) for field in ("data_parallel", "tier", "cached_rows")}
        own = now.get(name)
        if any(value and (own is None or getattr(own, field) != value) for field, value in said.items()):
            return False
    copied = parted.constraints.data_parallel - task.parted.constraints.data_parallel
    if not copied <= {*asked.may.get(DATA_PARALLEL, ()), *(held.by_access.hot if more else ())}:
        return False
    beyond = parted.constraints.beyond_hbm.keys()
    return not beyond or (task.host_memory_bytes is not None and knows_tiers(asked.cost_model))


def _may_lie_so(asked: Asked, plan: Plan) -> bool:
    """Whether today's rules and options, and the operator, let the shards of a plan be as they are."""
    task, shards = plan.parted, plan.by_table()
    may = {one: task.may_split_rows for one in SHARDINGS if one.splits_rows}
    kinds, shardings = enumerated(task, may), shardings_of(plan)
    for table in task.tables:
        sharding, now = shardings[table.name], set(shards[table.name])
        if sharding in (TABLE_WISE, DATA_PARALLEL) or table.id_map is not None:
            continue
        if not sharding.splits_rows:
            permitted = task.constraints.may_use(sharding.name)
        else:
            permitted = any(
                kind.allows(table, task, asked.cost_model, may) and set(kind.shards(table, start)) == now
                for kind in kinds
                for start in kind.starts
            )
        if not permitted:
            return False
    return not fault_of_plan(plan, trains_on(asked.cost_model))


def _holdings(plan: Plan) -> int:
    """What a plan has beyond a shard for each table in HBM: the fewer, the simpler it is."""
    held = shardings_of(plan)
    shards = sum(1 if held[name].copied else len(some) for name, some in plan.by_table().items())
    return shards + len(plan.parted.constraints.beyond_hbm)
