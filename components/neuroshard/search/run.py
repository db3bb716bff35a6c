"""Sharding task + cost model -> plan.

    neuroshard search tables.json --model model/ --devices 4 --memory 32GiB -o plan.json

A task becomes its sharding options, as arrays (`problem/`), an algorithm finds a plan (`algorithms.py`), and the plan is laid out
and priced, with the heuristics' plans and a lower bound beside it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuroshard.core.clean import log
from neuroshard.core.comparable import other_groups
from neuroshard.core.errors import Infeasible, InvalidInput, NeuroshardError, UsageError
from neuroshard.core.moves import changed_state
from neuroshard.core.plan import Plan
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import first_few
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.analytic import SPREAD
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.protocol import CostModel, Ints, trains_on
from neuroshard.costmodel.tiers import InTiers, in_tiers
from neuroshard.costmodel.uncertainty import cost_ranges
from neuroshard.files.constraints import resolve
from neuroshard.files.disk import check_can_write
from neuroshard.files.plan import read_plan, write_plan
from neuroshard.files.row_orders import ReadIds, files_of, ids_among, kept_orders, write_ids
from neuroshard.files.tables import read_tables
from neuroshard.models.open import open_cost_model
from neuroshard.orders.options import LOCAL_SEARCH
from neuroshard.orders.search import SearchOrder
from neuroshard.search import index_dedup as dedup
from neuroshard.search import notes as say
from neuroshard.search.algorithms import Found, find, go_on
from neuroshard.search.as_it_is import or_as_it_is
from neuroshard.search.asked import Asked, keeping_cuts
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.copies import STAY, check_mapped, check_room
from neuroshard.search.cut_sequences import Cut, cut_alike
from neuroshard.search.groups import cheapest, less_memory, may_average_less, tasks_of
from neuroshard.search.infeasible.feasibility import any_plan, feasible
from neuroshard.search.infeasible.hints import first_fit
from neuroshard.search.problem.changes import compare
from neuroshard.search.problem.kept_cuts import KeptCuts
from neuroshard.search.problem.kinds import blocks_over_all, copies_of
from neuroshard.search.problem.layout import compared, lay_out, make_plan
from neuroshard.search.problem.previous import Previous
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.baselines import KEYS, Attempt, baselines
from neuroshard.search.rows_by_access import NONE_HELD, assuming, choose, held_as_before, may_be_held
from neuroshard.search.settings import UNKNOWN, USUAL, SearchSettings, Trust
from neuroshard.search.step_room import Room, StepDoesNotFit, check_step, short_bytes, with_room
from neuroshard.search.tiers.plan import beyond_hbm, cheaper_beyond, check_host_memory, is_tight, needs_tiers
from neuroshard.search.watch import Watch


def search(
    task: ShardingTask,
    cost_model: CostModel,
    settings: SearchSettings = USUAL,
    *,
    previous: Plan | None = None,
    trust: Trust = UNKNOWN,
    notes: tuple[str, ...] = (),
    watch: Watch | None = None,
) -> Plan:
    """The plan with the fastest slowest device that `settings.algorithm` finds, and what the heuristics' plans cost.

    With a `previous` plan the search starts from it. `trust` and `notes` go into the plan's provenance. `watch` is the clock of
    the search, with the time budget of the settings, from now on unless it began before. It is told of every plan that is better
    than all before. Once its `stop` is set, the search ends with the best plan so far.

    Raises UsageError for an unknown algorithm or no effort, Infeasible if no plan fits or none is found, and InvalidInput where
    the previous plan cannot be compared or the cost model predicts no cost, as for so many devices.
    """
    settings.check(from_a_plan=previous is not None)
    previous = previous and previous.named
    watch = watch or Watch(settings.time_budget_s)

    def asked(one: ShardingTask, watch: Watch = watch) -> Asked:
        before = None if previous is None else Previous.of(previous, one)
        return Asked.of(one.parted, cost_model, settings, watch, before, trust, notes)

    def found() -> Plan:
        searched = partial(_found_plan, cost_model=cost_model, settings=settings, previous=previous, asked=asked)
        if settings.try_index_dedup and settings.algorithm == LOCAL_SEARCH and dedup.may_send_once(task, cost_model):
            return dedup.choose(task, cost_model, searched, watch)
        return searched(task, watch=watch)

    plan = found() if previous is None else or_as_it_is(found, lambda: replace(asked(task), task=task), previous)
    own = say.of_plan(plan, task, cost_model, previous if settings.keep_optimizer_state else None)
    own = [*own, *([] if previous is None else say.no_longer_by_access(plan.task, previous))]
    ranges = None if trust.instead else cost_ranges(cost_model, plan)  # of the hardware that was measured
    by_rounds = settings.algorithm == LOCAL_SEARCH and settings.time_budget_s is None
    said = {"cost_ranges": ranges, "rounds": settings.most_rounds if by_rounds else None}
    provenance = plan.provenance.model_copy(update=said)
    plan = say.with_notes(plan.model_copy(update={"provenance": provenance}), *own, *[say.STOPPED] * watch.stopped)
    return plan.answering(task).read_back("the plan found")


def _found_plan(
    task: ShardingTask,
    cost_model: CostModel,
    settings: SearchSettings,
    previous: Plan | None,
    watch: Watch,
    asked: Callable[[ShardingTask, Watch], Asked],
) -> Plan:
    """As `search`, without what it says of the plan that it returns; `asked` is what is then asked for a task."""
    if previous is not None and (differ := other_groups(previous.task, task)):
        raise UsageError(
            f"the plan to start from and the one to search are for {differ}, so devices of one are other ranks in the other; "
            "leave out --from, or give --devices and --group-size as of that plan"
        )
    chooses = settings.try_rows_by_access and may_be_held(task)
    if chooses and (settings.algorithm != LOCAL_SEARCH or not cost_model.prices_rows):
        raise UsageError(
            f"only {LOCAL_SEARCH}, with a cost model that prices rows, chooses tables by access; leave out --rows-by-access, or "
            "name the tables in constraints.json (rows_by_access)"
        )

    def found(one: ShardingTask, watch: Watch) -> Plan:
        def fits(task: ShardingTask) -> bool:
            with suppress(Infeasible):
                return bool(_searched(asked(task, watch.quiet())))
            return False

        try:
            plan = _searched(asked(one, watch))
        except StepDoesNotFit as error:
            raise error.with_hint(fits, one) from None
        return plan if one.parted is one else plan.of_task(plan.task.unparted(one))

    if not chooses:
        plan = found(task, watch)
        if settings.try_rows_by_access:
            plan = say.with_notes(plan, *say.no_row_orders(task))
        return assuming(plan, NONE_HELD) if may_be_held(task) else plan
    rules = task.constraints.rules().keys()
    if previous is not None:
        task = held_as_before(task, previous)
    with watch.sharing(settings.tuning.time.as_held):
        plan = found(task, watch.anew())
    if watch.expired:
        return assuming(plan, NONE_HELD)

    keeping = previous if settings.keep_optimizer_state else None

    def other(one: ShardingTask) -> Plan:
        another = found(one, watch.anew())
        if keeping is not None and set(changed_state(keeping, another)).difference(changed_state(keeping, plan)):
            raise Infeasible("the plan found does not keep the optimizer state of a table held otherwise by access")
        return another

    return choose(task, plan, cost_model, other, rules)


def _searched(asked: Asked) -> Plan:
    """The plan of a task without tables in two parts."""
    task, previous = asked.task, asked.previous
    check_mapped(task, asked.cost_model, trains_on(asked.cost_model))
    if task.mapped and not task.placed:
        changed = () if previous is None else compare(task, previous.plan)
        return _without_choice(asked, asked.permitted, (*asked.notes, *changed))
    return _placed(asked)


def _placed(asked: Asked) -> Plan:
    """The plan of a task with tables to place."""
    task, watch = asked.task, asked.watch
    if needs_tiers(asked.permitted):
        return beyond_hbm(asked)
    tight, in_hbm = is_tight(asked), None
    try:
        with watch.sharing(asked.settings.tuning.time.in_hbm if tight else 1.0):
            in_hbm = cut_alike(asked, _in_hbm)
    except Infeasible:  # HBM has enough bytes, but no plan fits into it
        if task.host_memory_bytes is None or asked.settings.algorithm != LOCAL_SEARCH:
            raise
    if in_hbm is None:
        return beyond_hbm(asked)
    return cheaper_beyond(asked, in_hbm) if tight and not watch.expired else in_hbm


def _in_hbm(asked: Asked) -> Cut:
    """The plan of tables that HBM holds, but for those in a tier of their own.

    Where ranks train in groups, a step also averages as many bytes as the fullest device holds, which a search does not weigh. So
    it is repeated with less memory, as far as that may make the plan cheaper.
    """
    model, tuning = for_task(asked.cost_model, asked.permitted), asked.settings.tuning
    problem = feasible(asked.permitted, model, tuning, may=asked.may, cut_into=asked.cut_into)
    problem.alone_ms(problem.whole)  # reject invalid costs before the search starts
    nothing = np.zeros(problem.devices, dtype=np.int64)
    if asked.task.groups is None:
        return _with_memory(asked, problem, nothing)
    with asked.watch.sharing(tuning.time.uneven):
        best = _with_memory(asked, problem, nothing)
    for share in tuning.uneven_shares if asked.settings.algorithm == LOCAL_SEARCH else ():
        if asked.watch.expired or not may_average_less(best[0], asked.cost_model, tuning.worth_averaging_less):
            break
        try:
            evener = _with_memory(asked, problem, less_memory(best[0], problem, share))
        except Infeasible:
            break
        best = min(best, evener, key=lambda one: one[0].cost_ms or 0.0)
    return best


def _with_memory(asked: Asked, problem: Problem, less: Ints) -> Cut:
    """As `_in_hbm`, on devices with so many bytes (D,) less."""
    task, settings = asked.task, asked.settings
    said = [*asked.notes, *_rows_not_split(problem, settings), *_copies_not_chosen(settings)]
    rooms = list[Room | None]()

    def placed(problem: Problem, room: Room | None, near: State | None) -> tuple[Found, ShardingTask]:
        rooms.append(room)
        roomy = problem if room is None else problem.keeping_free(*room)
        found = keeping_cuts(
            replace(asked, permitted=roomy.task), lambda one: _found(roomy, one, less, near), attrgetter("shards")
        )
        planned = asked.planned(found.best)
        check_step(planned, found.shards, found.best)
        return found, planned

    try:
        found, planned = with_room(problem.task, partial(placed, problem))
    except StepDoesNotFit:  # of the plans that it improved; one that hints find may
        first = None if asked.previous or less.any() else first_fit(Problem(problem.task, problem.model))
        if first is None:
            raise
        found, planned = Found(first, shards=lay_out(first)), asked.planned(first)
    if problem.may_copy and asked.previous is None and len(rooms) > 1:  # it kept room for steps of plans with copies
        with suppress(Infeasible):
            without = with_room(problem.task, partial(placed, problem.without_copies()))
            found, planned = min((found, planned), without, key=lambda one: one[0].best.cost)
    if settings.algorithm == LOCAL_SEARCH:
        said += say.mean_pooled(task, settings.try_row_wise)
    if not planned.placed:
        return _without_choice(asked, planned, [*said, *found.notes]), found.best
    if planned.copied != task.copied or (found.cut_before and problem.wide):
        cuts, into = found.cut_before, asked.cut_into
        problem = Problem(planned, problem.model, problem.tuning, cut_before=cuts, cut_into=into)
    else:
        problem = problem.for_planned(planned)
    heuristics = {} if settings.algorithm in KEYS else _with_their_steps(asked, problem)
    best = min([found.best, *(one for one in heuristics.values() if isinstance(one, State))], key=lambda one: one.cost)
    is_ours = settings.algorithm == LOCAL_SEARCH and settings.tuning.baselines and asked.previous is None
    if best is not found.best and is_ours and not less.any():
        found, planned = found._replace(best=best, shards=lay_out(best), notes=()), asked.planned(best)
    bound = lower_bound(problem, found.best) if asked.bounded else Bound(None, ())
    check_host_memory(problem.task, found.shards)
    plan = make_plan(
        asked.cost_model,
        planned,
        found.shards,
        baselines=compared(asked.cost_model, heuristics),
        bound_ms=bound.ms,
        bound_assumptions=bound.why,
        improvements=found.improvements,
        provenance=asked.provenance([*said, *found.notes]),
    )
    return plan, found.best


def _with_their_steps(asked: Asked, problem: Problem) -> dict[str, Attempt]:
    """The heuristics' plans, which need not keep the room that a search does. They are none where their step does not fit."""
    plans = baselines(problem, asked.settings.seed)
    for name, plan in plans.items():
        if isinstance(plan, State) and (short := short_bytes(asked.planned(plan), lay_out(plan)).max()) > 0:
            plans[name] = f"its training step needs {format_bytes(int(short), 'up')} more of a device"
    return plans


def _without_choice(asked: Asked, task: ShardingTask, notes: Sequence[str]) -> Plan:
    """The plan of a task that has nothing but copies, and row blocks of tables that give rows to ids. Raises Infeasible if none
    fit."""
    check_room(task, task.copies_bytes)
    blocks = {table.name: blocks_over_all([table], task.devices) for table in task.mapped}
    some = blocks | {table.name: copies_of([table], task.devices) for table in task.copied}
    return make_plan(
        asked.cost_model,
        task,
        tuple(shard for table in task.tables for shard in some[table.name]),
        bound_ms=np.inf,
        bound_assumptions=(STAY if task.copied else "no table can be held otherwise",),
        provenance=asked.provenance(notes),
    )


def _found(problem: Problem, asked: Asked, less: Ints, near: State | None) -> Found:
    """What the algorithm finds on devices with so many bytes (D,) less. It goes on from a plan `near` one that fits."""
    before, kept = replace(asked, kept=None).placement(problem), asked.kept
    if kept is not None:
        problem = _with_kept_cuts(problem, kept)
    asked = replace(asked, watch=asked.watch.anew(), current=asked.placement(problem) if kept else before)
    if asked.current is not None:
        less = less + asked.current.reserved_bytes
    there = problem.with_less_memory(less) if less.any() else problem
    found = (near and go_on(there, near, asked)) or find(there, asked)
    shards, notes = lay_out(found.best, asked.current), () if before is None else before.notes
    if kept is not None:
        shards, notes = kept.shards(shards), (*notes, kept.note)
    return found._replace(shards=shards, notes=(*notes, *found.notes), cut_before=kept.cut if kept else ())


def _rows_not_split(problem: Problem, settings: SearchSettings) -> tuple[str, ...]:
    """A line where tables may be split row-wise and the algorithm does not. Raises UsageError where the cost model cannot price
    some of their rows."""
    if settings.algorithm == LOCAL_SEARCH and problem.model.prices_rows:
        return ()
    if not problem.may_split_rows:
        return ()
    if not problem.model.prices_rows:
        raise UsageError(
            "given costs are of whole tables: they do not say what some of the rows cost; search without --row-wise"
        )
    return (f"{settings.algorithm} splits tables column-wise only, not row-wise",)


def _copies_not_chosen(settings: SearchSettings) -> tuple[str, ...]:
    """A line where the algorithm does not choose which tables to copy, though it is asked to."""
    if not settings.try_data_parallel or settings.algorithm == LOCAL_SEARCH:
        return ()
    return (
        f"{settings.algorithm} copies no tables by itself: name them (--data-parallel PATTERN), or take {LOCAL_SEARCH}",
    )


def _with_kept_cuts(problem: Problem, kept: KeptCuts) -> Problem:
    """The problem of a task whose tables keep their column cuts. Raises Infeasible where then nothing fits, and UsageError where
    the cost model does not price what they are cut into."""
    model = problem.model
    if kept.cut and not model.prices_rows:
        raise UsageError(
            f"given costs are of whole tables: they do not say what the kept cuts of {first_few(kept.cut)} cost; leave out "
            "--keep-optimizer-state, or give a cost model"
        )
    if isinstance(model, InTiers):  # of tiers that rules name; the pieces have rules of their own
        model = in_tiers(model.inner, kept.task)
    try:
        pieces, into = kept.pieces, problem.cut_into
        searched = feasible(kept.task, model, problem.tuning, may=problem.may, pieces=pieces, cut_into=into)
        any_plan(searched)
    except Infeasible:
        any_plan(problem)  # raises where nothing fits without the option either
        raise Infeasible(kept.no_plan) from None
    return searched


class KeptOrders(NamedTuple):
    """A plan whose row orders tables keep, and what reads the lists of these and of newer ones."""

    plan: Plan
    read: ReadIds


def run(
    tables: Path | Sequence[Table],
    cost_model: str | Path,
    out: Path | None,
    order: SearchOrder,
    *,
    instead: str = "",
    notes: tuple[str, ...] = (),
    keeping: KeptOrders | None = None,
    watch: Watch | None = None,
) -> Plan:
    """Search a plan for tables, or a tables.json, with the cost model of this name (see models/open.py). With `out`, write it as
    plan.json.

    Row-wise tables are tried unless the order's constraints say which may be so, or that none may. `instead` says why this cost
    model is not the one of the plan's hardware: then the plan gives it at least the error of a datasheet. `notes` on the tables
    go into the plan. Tables keep the row orders of the plan `keeping`, by default of that to start from, unless newer ones are
    worth moving rows for. `watch` is the clock, as for `search`: made before this call, its time budget counts what is read here.

    Raises InvalidInput, UsageError and Infeasible; then nothing is written.
    """
    settings = settings_of(order)
    if out is not None:
        check_can_write(out)
    listed, said = read_listed(tables) if isinstance(tables, Path) else (tuple(tables), ())
    before = read_plan(order.previous) if isinstance(order.previous, Path) else order.previous
    beside = [path.parent / LISTS_FOLDER for path in (tables, order.previous, out) if isinstance(path, Path)]
    keeping = keeping or (None if before is None else KeptOrders(before, partial(ids_among, beside)))
    if keeping is not None:
        listed, more = kept_orders(listed, keeping.plan.held, keeping.read)
        said = (*said, *more)
    # groups have batches of their own, which a model may know without that of all ranks
    model = open_cost_model(cost_model, order.task.get("batch_size")) if order.groups is None else None
    task = task_of(order, listed, model)
    lists = {} if out is None else _lists(task, beside, out)

    def find(one: ShardingTask, watch: Watch) -> Plan:
        own = model or open_cost_model(cost_model, one.batch_size)
        trust = trust_in(own, instead)
        return search(one, own, settings, previous=before, trust=trust, notes=(*said, *notes), watch=watch)

    plan = search_in_groups(order, task, find, watch or Watch(settings.time_budget_s), before)
    if out is not None:
        write_plan(out, plan)
        write_ids(out.parent / LISTS_FOLDER, lists.values())
    return plan


def search_in_groups(
    order: SearchOrder,
    task: ShardingTask,
    find: Callable[[ShardingTask, Watch], Plan],
    watch: Watch,
    previous: Plan | None = None,
) -> Plan:
    """What `find` finds for the `task` of an order or, where its ranks train in groups, for that of a group. Of several sizes
    and numberings the cheapest, with a note on each of the others; with a `previous` plan its own. Raises as `find`, and
    UsageError."""
    if order.groups is None:
        return find(task, watch)
    asked, plans, failed = tasks_of(task, order.groups), dict[str, Plan](), dict[str, NeuroshardError]()
    if previous is not None:
        own = [one for one in asked if isinstance(one[1], ShardingTask) and not other_groups(previous.task, one[1])]
        asked = own or asked[:1]
    for place, (what, one) in enumerate(asked):
        if isinstance(one, InvalidInput):
            failed[what] = one
            continue
        try:
            with watch.sharing(1 / (len(asked) - place)):
                plans[what] = find(one, watch.anew())
        except (Infeasible, InvalidInput, UsageError) as error:
            failed[what] = error
        if watch.stopped and plans:
            break
    plan, lines = cheapest(plans, failed)
    return say.with_notes(plan, *lines)


def _lists(task: ShardingTask, beside: Sequence[Path], out: Path) -> dict[str, bytes]:
    """The lists of hot rows, `beside` a tables.json or a plan to start from, that belong beside the plan as well. Those in no
    place are noted. Raises InvalidInput for a damaged one."""
    orders = {name: order for name, order in task.orders.items() if order.ids_digest}
    found = {digest: data for folder in beside for digest, data in files_of(folder, orders.values()).items()}
    missing = [name for name, order in orders.items() if order.ids_digest not in found]
    if missing:
        log(
            f"note: the lists of hot rows of {first_few(missing)} are not in {out.parent / LISTS_FOLDER}; put them there "
            "before the plan is deployed, unless they are in its store"
        )
    return found


def settings_of(order: SearchOrder) -> SearchSettings:
    """How an order wants to be searched. Row-wise tables are tried unless its constraints say which may be so."""
    return SearchSettings(**order.settings, try_row_wise=order.constraints.says_nothing_of_rows)


def task_of(order: SearchOrder, tables: tuple[Table, ...], model: CostModel | None) -> ShardingTask:
    """The task of an order, with the batch size of the cost model where it names none; then it needs one. Raises InvalidInput."""
    batch_size = order.task.get("batch_size")
    task = {
        **order.task,
        "tables": tables,
        "batch_size": model.batch_size if batch_size is None and model is not None else batch_size,
        "constraints": resolve(order.constraints, tables, "constraints"),
    }
    return ShardingTask.parse(task, "the task")


def trust_in(model: CostModel, instead: str = "") -> Trust:
    """How far plans by this cost model can be trusted, at most as far as a datasheet where it answers `instead` of another."""
    own_error = model.error_on_unseen_tables
    return Trust(max(own_error or 0.0, SPREAD) if instead else own_error, instead or "; ".join(model.stand_ins))


def read_listed(path: Path) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables of a tables.json, and notes for the plan. Raises InvalidInput in one line."""
    tables, notes = read_tables(path)
    # The folder's name would make the digests of equal plans differ
    notes = tuple(note.replace(str(path), path.name) for note in notes)
    return tables, tuple(note.encode(errors="replace").decode() for note in notes)  # such a name may be no text
