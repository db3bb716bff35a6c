"""The plan of a task whose tables HBM does not hold."""

from collections.abc import Sequence
from dataclasses import replace

from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard, host_memory
from neuroshard.core.sharding import DATA_PARALLEL
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import agreeing
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.tiers import knows_tiers
from neuroshard.orders.options import LOCAL_SEARCH
from neuroshard.search.asked import Asked, keeping_cuts
from neuroshard.search.bound.lower_bound import lower_bound
from neuroshard.search.infeasible.feasibility import any_plan, feasible
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.problem.layout import make_plan
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.greedy import first_plans
from neuroshard.search.step_room import Room, check_step, with_room
from neuroshard.search.tiers.search import FoundTiers, relaxation, search_tiers

IN_ANY_TIER = (
    "a table may be in any tier, or in part in one and in part in another; devices divide their HBM as is cheapest"
)

# HBM is tight from this share on that tables need of it; and, where one of them needs so much of a device, from the second on.
# Of 8 drawn tasks of 10 to 40 tables on 2 to 64 devices, host memory made four 2 to 19 % cheaper where tables need 67 % of HBM,
# and none more than 1.3 % where they need 40 %
TIGHT, TIGHT_BESIDE_LARGE = 0.9, 0.5
# Share that a plan beyond HBM must cost less than one in HBM: a guess. If plans in HBM are shown to be so near what any plan
# costs, none beyond it is sought
WORTH = 0.005


def needs_tiers(task: ShardingTask) -> bool:
    """Whether HBM does not hold all tables of the task, and some may go to host memory."""
    return _may_choose(task) and task.need_bytes > sum(task.placeable_bytes)


def is_tight(asked: Asked) -> bool:
    """Whether HBM holds all tables of the task, but a plan may be cheaper with some of them in host memory: where HBM has little
    room, large tables need costly cuts."""
    task = asked.permitted
    if not _may_choose(task) or asked.settings.algorithm != LOCAL_SEARCH or not knows_tiers(asked.cost_model):
        return False
    filled = task.need_bytes / sum(task.placeable_bytes)
    largest = max(memory.total for memory in task.memories(list(map(Part.of, task.without_tier))))
    return filled > TIGHT or (filled > TIGHT_BESIDE_LARGE and largest > TIGHT_BESIDE_LARGE * max(task.placeable_bytes))


def _may_choose(task: ShardingTask) -> bool:
    return task.host_memory_bytes is not None and bool(task.without_tier)


def check_host_memory(task: ShardingTask, shards: Sequence[Shard]) -> None:
    """Raise Infeasible where a host has less memory than its tables need."""
    used = host_memory(task, shards)
    fullest, limit = max(used), task.host_memory_bytes or 0
    if fullest > limit:
        raise Infeasible(
            f"no plan was found in which tables beyond HBM need less than {format_bytes(fullest, 'up')} of the memory of host "
            f"{used.index(fullest)}, which has {format_bytes(limit)} for them; give {format_bytes(fullest - limit, 'up')} "
            "more of --host-memory, or more --memory or devices"
        )


def _check_bytes(task: ShardingTask, may: MayHold) -> None:
    """Raise Infeasible where hosts have too little memory, together, for what HBM does not hold, wherever tables lie. A table
    that leaves HBM needs as much of a host as it needs less of HBM."""
    if may.get(DATA_PARALLEL):  # copies may need less
        return
    hosts = task.devices // task.devices_of_host
    named = sum(memory.host for memory in task.memories(list(map(Part.of, task.placed))))
    have, least = hosts * (task.host_memory_bytes or 0), task.need_bytes - sum(task.placeable_bytes) + named
    if least > have:
        raise Infeasible(
            f"devices have {format_bytes(sum(task.placeable_bytes))} of HBM for tables, of which at least "
            f"{format_bytes(least, 'up')} must be in host memory; {agreeing(hosts, 'host', 'has', 'have')} "
            f"{format_bytes(have)} for them: give {format_bytes(-(-(least - have) // hosts), 'up')} more of --host-memory, "
            "or more --memory or devices"
        )


def beyond_hbm(asked: Asked) -> Plan:
    """The plan of tables that HBM does not hold, some of them cached or in host memory."""

    def found(room: Room | None, _: State | None) -> Plan:
        if room is None:
            return _beyond_hbm(asked)
        kept = room.nbytes + room.beside_blocks
        permitted = asked.permitted.keeping_free(kept.tolist(), counts_sent=room.counts_sent)
        plan = _beyond_hbm(replace(asked, permitted=permitted))
        why = f"devices keep up to {format_bytes(max(int(kept.max()), 0))} free for what a step needs beyond its shards"
        return plan.model_copy(update={"bound_assumptions": (*plan.bound_assumptions, why)})

    return with_room(asked.permitted, found)


def _beyond_hbm(asked: Asked) -> Plan:
    """As `beyond_hbm`, with the room that the permitted task keeps free."""
    permitted = asked.permitted
    if asked.settings.algorithm != LOCAL_SEARCH:
        raise UsageError(
            f"{asked.settings.algorithm} is for tables that fit into HBM, and these need {format_bytes(permitted.need_bytes)} of "
            f"{format_bytes(sum(permitted.placeable_bytes))}: leave that out, give more --memory, or no --host-memory"
        )
    _check_bytes(permitted, asked.may)
    asked, found = _with_or_without_copies(asked)
    planned, shards = asked.planned(found.plan.state).with_tiers(found.plan.tiers), found.plan.shards
    check_host_memory(planned, shards)
    check_step(planned, shards, found.plan.state)
    return make_plan(
        asked.cost_model,
        planned,
        shards,
        bound_ms=found.bound.ms,
        bound_assumptions=(*found.bound.why, IN_ANY_TIER),
        improvements=asked.watch.improvements,
        provenance=asked.provenance((*asked.notes, *found.notes)),
    )


def cheaper_beyond(asked: Asked, in_hbm: Plan) -> Plan:
    """The plan `in_hbm`, or one with tables beyond HBM if that is cheaper. None of these costs less than every plan of devices
    with more HBM; so if the one in HBM is near their bound, none is sought."""
    task, cost_ms = asked.permitted, in_hbm.cost_ms
    assert cost_ms is not None
    more = max(task.device_memory_bytes) + 2 * task.need_bytes
    roomy = task.model_copy(update={"device_memory_bytes": (more,) * task.devices})
    problem = Problem(roomy, for_task(asked.cost_model, roomy))
    bounds_ms = [lower_bound(problem, plan).ms or 0.0 for plan in first_plans(problem, 1)]
    if max(bounds_ms, default=0.0) > cost_ms * (1 - WORTH):
        return in_hbm
    try:
        beyond = beyond_hbm(asked)
    except Infeasible:  # hosts have too little memory
        return in_hbm
    if beyond.cost_ms is not None and beyond.cost_ms < cost_ms * (1 - max(WORTH, asked.settings.simplicity)):
        return beyond
    bound_ms = None if beyond.lower_bound_ms is None else min(beyond.lower_bound_ms, cost_ms)
    return in_hbm.model_copy(update={"lower_bound_ms": bound_ms, "bound_assumptions": beyond.bound_assumptions})


def _with_or_without_copies(asked: Asked) -> tuple[Asked, FoundTiers]:
    """What the search finds, and for what task: without copies beside those that are named or, where tables may be
    copied and that is worth it, with some."""
    names, task = asked.may.get(DATA_PARALLEL, ()), asked.permitted
    rest = {sharding: some for sharding, some in asked.may.items() if sharding is not DATA_PARALLEL}
    if not names:
        return asked, _found(replace(asked, may=rest))
    had, best, fault = frozenset[str](), None, None
    if asked.previous is not None:
        had = asked.previous.plan.task.constraints.data_parallel.intersection(names)
    with asked.watch.sharing(asked.settings.tuning.time.without_copies):
        without = replace(asked, may=rest, watch=asked.watch.anew())
        try:
            best = without, _found(without)
        except Infeasible as error:  # the plan to start from may serve with its copies alone
            fault = error
    copied = frozenset[str]()
    if best is not None:
        if asked.watch.expired:
            return best
        relaxed = relaxation(replace(asked, watch=asked.watch.quiet(), previous=None))[1]
        copied = frozenset(name for name, kind in relaxed.problem.spread_as.items() if kind.copied)
    worth, named = 1.0 if had else 1 - asked.settings.tuning.copies_worth, task.constraints.data_parallel
    # those of the plan to start from alone, too: beside others they may cost more
    for copies in filter(None, dict.fromkeys((copied | had, had))):
        some, permitted = asked.task.with_copies(copies | named), task.with_copies(copies | named)
        with_some = replace(asked, task=some, permitted=permitted, may=rest, watch=asked.watch.anew())
        try:
            other = _found(with_some)
        except Infeasible as error:
            fault = fault or error
            continue
        if best is None or (other.plan.over, other.plan.cost) < (best[1].plan.over, best[1].plan.cost * worth):
            best, worth = (with_some, other), 1.0
    if best is None:
        assert fault is not None
        raise fault
    return best


def _found(asked: Asked) -> FoundTiers:
    """What the search finds, with the cuts that are to be kept."""

    def found(asked: Asked) -> FoundTiers:
        try:
            return search_tiers(asked)
        except Infeasible:
            task, kept = asked.permitted, asked.kept
            if kept is None or asked.settings.move_budget_bytes is not None:
                raise
            in_host = task.with_tiers({table.name: ("host", None) for table in task.without_tier})
            any_plan(feasible(in_host, for_task(asked.cost_model, in_host)))  # raises where there is none without cuts
            raise Infeasible(kept.no_plan) from None

    return keeping_cuts(asked, found, lambda found: found.plan.shards)
