"""Sharding task + cost model -> plan.

    neuroshard search tables.json --model model/ --devices 4 --memory 32GiB -o plan.json

A task becomes arrays (`problem/`), an algorithm finds a plan (`algorithms.py`), and the plan is laid out and priced, with the
heuristics' plans and a lower bound beside it. Data-parallel tables are taken out before and added afterwards.
"""

import math
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuroshard import __version__
from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.plan import Improvement, Plan, Provenance, Shard
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.step_memory import DEFAULT_PIPELINE
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import SPREAD
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.protocol import CostModel, trains_on
from neuroshard.files.constraints import ConstraintsFile, resolve
from neuroshard.files.disk import check_can_write
from neuroshard.files.plan import read_plan, write_plan
from neuroshard.files.tables import read_tables
from neuroshard.models.open import open_cost_model
from neuroshard.search import notes as say
from neuroshard.search.algorithms import Asked, find
from neuroshard.search.bound.lower_bound import lower_bound
from neuroshard.search.data_parallel import Copies, may_be_copied, rescuing, worth_copying
from neuroshard.search.infeasible.feasibility import any_plan, feasible
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.kept_cuts import WAY_OUT, KeptCuts
from neuroshard.search.problem.layout import lay_out, make_plan, placement_of
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.baselines import KEYS, Attempt, baselines
from neuroshard.search.settings import LOCAL_SEARCH, UNKNOWN, USUAL, SearchSettings, Trust
from neuroshard.search.watch import OnImprovement, Watch, only_better


@dataclass(frozen=True)
class _Caller:
    """What a caller gives besides the task, the cost model and the settings: see `search`."""

    previous: Plan | None
    trust: Trust
    notes: tuple[str, ...]
    watch: Watch


def search(
    task: ShardingTask,
    cost_model: CostModel,
    settings: SearchSettings = USUAL,
    *,
    previous: Plan | None = None,
    trust: Trust = UNKNOWN,
    notes: tuple[str, ...] = (),
    on_improvement: OnImprovement | None = None,
    stop: threading.Event | None = None,
) -> Plan:
    """The plan with the fastest slowest device that `settings.algorithm` finds, and what the heuristics' plans cost.

    With a `previous` plan the search starts from it. `trust` and `notes` go into the plan's provenance. `on_improvement`
    receives the seconds since the search began and the cost in ms of every plan that is better than all before. Once `stop` is
    set, the search ends with the best plan so far.

    Raises UsageError for an unknown algorithm or no effort, Infeasible if no plan fits or none is found, and InvalidInput where
    the previous plan cannot be compared or the cost model predicts no cost, as for so many devices.
    """
    settings.check(from_a_plan=previous is not None)
    report = None if on_improvement is None else only_better(on_improvement)
    caller = _Caller(previous, trust, notes, Watch(settings.time_budget_s, report, stop))
    searched = _choosing_copies if settings.try_data_parallel else _beside_copies
    return searched(task, for_task(cost_model, task), settings, caller)


def _choosing_copies(task: ShardingTask, cost_model: CostModel, settings: SearchSettings, caller: _Caller) -> Plan:
    """The cheapest of some plans: with the copies that the task asks for; with copies of more small tables, if those make plans
    cheaper; and with those of the plan to start from. Where nothing fits so, one with copies that make the task fit. Of a time
    budget a share is for choosing copies, and the searches share the rest."""
    if not cost_model.prices_rows:
        raise UsageError("given costs do not say what copies of tables cost; name the tables: --data-parallel PATTERN")
    allowed = _trying_row_wise(task) if settings.try_row_wise else None
    there = frozenset() if caller.previous is None else caller.previous.task.constraints.data_parallel
    # copies would lose the state of its tables, or go to all other devices
    keeps = settings.keep_optimizer_state or settings.move_budget_bytes is not None
    before = caller.previous if keeps else None
    stay = () if before is None else {table.name for table in before.task.tables} - there

    def beside(names: Collection[str]) -> Plan:
        copied = task.with_copies(task.constraints.data_parallel.union(names)) if names else task
        return _beside_copies(copied, cost_model, settings, caller)

    watch = caller.watch
    with watch.sharing(settings.tuning.time_for_copies):
        chosen = worth_copying(allowed or task, cost_model, settings, watch.anew(silent=True), stay)
    held = there.intersection(table.name for table in may_be_copied(task, stay, trains_on(cost_model)))
    sets = dict.fromkeys([frozenset(), frozenset(chosen), held])
    plans, faults = [], []
    for done, names in enumerate(sets):
        try:
            with watch.sharing(1 / (len(sets) - done)):
                plans.append(beside(names))
        except Infeasible as fault:  # beside some copies the current plan has no room, or none to move in
            faults.append(fault)
    if not plans and (needed := rescuing(allowed or task, cost_model, settings, watch.anew(silent=True), stay)):
        with suppress(Infeasible):
            plans.append(beside(needed))
    if not plans:
        raise faults[0]
    return min(plans, key=lambda one: one.cost_ms if one.cost_ms is not None else math.inf)


def _beside_copies(task: ShardingTask, cost_model: CostModel, settings: SearchSettings, caller: _Caller) -> Plan:
    """The plan of a task some of whose tables may be data-parallel: the others are placed in the memory that copies leave."""
    if not task.constraints.data_parallel:
        return _sharded(task, cost_model, settings, caller)
    copies = Copies(task, trains_on(cost_model))
    if caller.previous is not None:
        if settings.move_budget_bytes is not None:
            settings = replace(
                settings, move_budget_bytes=copies.budget_left(caller.previous, settings.move_budget_bytes)
            )
        caller = replace(caller, previous=copies.without(caller.previous))
    return _sharded(copies.rest, for_task(cost_model, copies.rest), settings, caller, copies)


def _sharded(
    task: ShardingTask,
    cost_model: CostModel,
    settings: SearchSettings,
    caller: _Caller,
    copies: Copies | None = None,
) -> Plan:
    """The plan of a task without data-parallel tables, and of these `copies` beside them."""
    beside_ms = 0.0 if copies is None else copies.ms(cost_model)
    is_ours = settings.algorithm == LOCAL_SEARCH
    tried = _trying_row_wise(task) if settings.try_row_wise and is_ours and cost_model.prices_rows else None
    problem = feasible(tried or task, cost_model, settings.tuning)
    problem.alone_ms(problem.whole)  # reject invalid costs before the search starts
    notes = [*caller.notes, *_rows_not_split(problem, settings)]

    found = _found(problem, settings, caller, beside_ms, tries_row_wise=tried is not None)
    best, kept, shards = found.best, found.kept, found.shards
    if kept is not None and problem.wide:
        problem = Problem(problem.task, cost_model, settings.tuning, kept.cut)
    notes += found.notes
    if is_ours:
        notes += say.mean_pooled(task, settings.try_row_wise)
    if tried is not None and not len(best.problem.row_wise):
        problem = problem.without_row_wise(task)
    heuristics: dict[str, Attempt] = {} if settings.algorithm in KEYS else baselines(problem, settings.seed)
    if caller.watch.stopped:
        notes.append(say.STOPPED)

    placement = placement_of(problem, shards, best)
    bound = lower_bound(problem, best)
    plan = make_plan(
        problem,
        placement,
        shards,
        baselines=heuristics,
        bound_ms=bound.ms,
        bound_assumptions=bound.why,
        improvements=found.improvements,
        provenance=_provenance(cost_model, settings, caller.trust, tuple(notes)),
    )
    if copies is not None:
        plan = copies.added_to(plan, cost_model)
    plan = say.with_notes(plan, *say.caveats(plan, problem), *say.precision_saves(plan, cost_model))
    if kept is None or caller.previous is None:
        return plan
    return say.with_notes(plan, *say.state_changed(plan, caller.previous, kept))


class _Found(NamedTuple):
    """The plan that a search found, its shards, and how it got there."""

    best: State
    shards: tuple[Shard, ...]
    kept: KeptCuts | None
    notes: tuple[str, ...]
    improvements: tuple[Improvement, ...]


def _found(
    problem: Problem, settings: SearchSettings, caller: _Caller, beside_ms: float, *, tries_row_wise: bool
) -> _Found:
    """What the algorithm finds. Where shards whose cuts are kept lie so that TorchRec would mix them up, it searches again with
    these where they were."""
    stay = frozenset[str]()
    while True:
        watch = caller.watch.anew(beside_ms)
        start = _starting_from(caller.previous, problem, settings, stay)
        best, notes = find(start.problem, Asked(settings, watch, start.current, tries_row_wise))
        shards, kept = lay_out(best, start.current), start.kept
        if kept is not None:
            shards = kept.shards(shards)
        mixed_up = frozenset[str]() if kept is None else kept.mixed_up(shards) - stay
        if not mixed_up:
            return _Found(best, shards, kept, (*start.notes, *notes), watch.improvements)
        stay |= mixed_up


class _Start(NamedTuple):
    """The problem to search, with column cuts that are `kept` or without, the current plan in it, and notes on both."""

    problem: Problem
    current: CurrentPlacement | None = None
    kept: KeptCuts | None = None
    notes: tuple[str, ...] = ()


def _starting_from(previous: Plan | None, problem: Problem, settings: SearchSettings, stay: Collection[str]) -> _Start:
    """What to search from a plan, if there is one."""
    if previous is None:
        return _Start(problem)
    current, kept = CurrentPlacement(problem, previous, settings.move_budget_bytes), None
    notes = current.notes
    if settings.keep_optimizer_state:
        kept = KeptCuts(problem.task, previous, problem.model, stay)
        problem = _with_kept_cuts(problem, kept)
        current = CurrentPlacement(problem, kept.plan, settings.move_budget_bytes)
        notes = (*notes, kept.note)
    return _Start(problem.with_less_memory(current.reserved_bytes), current, kept, notes)


def _provenance(cost_model: CostModel, settings: SearchSettings, trust: Trust, notes: tuple[str, ...]) -> Provenance:
    is_ours = settings.algorithm == LOCAL_SEARCH
    return Provenance(
        neuroshard_version=__version__,
        algorithm=settings.algorithm,
        seed=settings.seed,
        rounds=settings.most_rounds if is_ours and settings.time_budget_s is None else None,
        time_budget_s=settings.time_budget_s if is_ours else None,
        cost_model=cost_model.name,
        cost_model_backend=cost_model.backend,
        cost_model_device=cost_model.device_name,
        cost_model_error=trust.error,
        instead=trust.instead,
        notes=notes,
    )


def _trying_row_wise(task: ShardingTask) -> ShardingTask | None:
    """The task with permission to split row-wise every table that no rule keeps whole. None if there is no such table, if the
    task permits some already, or if it contradicts a limit of shards."""
    if task.may_split_rows:
        return None
    tried = task.model_copy(update={"constraints": task.constraints.model_copy(update={"row_wise": True})})
    return tried if tried.may_split_rows and not tried.contradicts_itself else None


def _rows_not_split(problem: Problem, settings: SearchSettings) -> tuple[str, ...]:
    """A line where tables may be split row-wise and the algorithm does not. Raises UsageError where the cost model cannot price
    some of their rows."""
    if not len(problem.row_blocks.groups):
        return ()
    if not problem.model.prices_rows:
        raise UsageError(
            "given costs are of whole tables: they do not say what some of the rows cost; search without --row-wise"
        )
    if settings.algorithm == LOCAL_SEARCH:
        return ()
    return (f"{settings.algorithm} splits tables column-wise only, not row-wise",)


def _with_kept_cuts(problem: Problem, kept: KeptCuts) -> Problem:
    """The problem of a task whose tables keep their column cuts. Raises Infeasible where then nothing fits."""
    try:
        searched = feasible(kept.task, problem.model, problem.tuning)
        names = [tables[0].name for tables in searched.tables]
        searched.launches.pieces = np.flatnonzero([kept.is_piece(name) for name in names])
        any_plan(searched)
    except Infeasible:
        any_plan(problem)  # raises where nothing fits without the option either
        raise Infeasible(
            "no plan was found that keeps the column cuts of the plan to start from, those of "
            f"{counted(len(kept.tables), 'table')} ({first_few(kept.tables)}); {WAY_OUT}, without which tables fit"
        ) from None
    return searched


def run(
    tables: Path | Sequence[Table],
    cost_model: str | Path,
    out: Path | None,
    settings: SearchSettings = USUAL,
    *,
    memory_bytes: tuple[int, ...],
    batch_size: int | None = None,
    pipeline: str = DEFAULT_PIPELINE,
    topology: Topology | None = None,
    collective_precision: CollectivePrecision | None = None,
    dense_optimizer: str | None = None,
    constraints: ConstraintsFile | None = None,
    previous: Path | Plan | None = None,
    instead: str = "",
    stop: threading.Event | None = None,
) -> Plan:
    """Search a plan for tables, or a tables.json, with the cost model of this name (see models/open.py). With `out`, write it as
    plan.json.

    `memory_bytes` is one number for each device; `batch_size` is the cost model's unless given; `pipeline` is the trainer's
    (core/step_memory.py), `topology` its hosts and links, `collective_precision` that of its collectives, `dense_optimizer` what
    trains data-parallel tables; `previous` is a plan to start from; `stop`, once it is set, ends the search. Row-wise tables are
    tried unless the constraints say which may be so, or that none may. `instead` says why this cost model is not the one of the
    plan's hardware: then the plan gives it at least the error of a datasheet.

    Raises InvalidInput, UsageError and Infeasible; then nothing is written.
    """
    if out is not None:
        check_can_write(out)
    listed, notes = _read(tables) if isinstance(tables, Path) else (tuple(tables), ())
    before = read_plan(previous) if isinstance(previous, Path) else previous
    given = constraints or ConstraintsFile()
    model = open_cost_model(cost_model, batch_size)
    task = ShardingTask.parse(
        {
            "tables": listed,
            "device_memory_bytes": memory_bytes,
            "batch_size": model.batch_size if batch_size is None else batch_size,
            "constraints": resolve(given, listed, "constraints"),
            "pipeline": pipeline,
            "topology": topology,
            "collective_precision": collective_precision,
            "dense_optimizer": dense_optimizer,
        },
        "the task",
    )
    own_error = model.error_on_unseen_tables
    plan = search(
        task,
        model,
        replace(settings, try_row_wise=given.says_nothing_of_rows),
        previous=before,
        trust=Trust(max(own_error or 0.0, SPREAD) if instead else own_error, instead or "; ".join(model.stand_ins)),
        notes=notes,
        stop=stop,
    )
    if out is not None:
        write_plan(out, plan)
    return plan


def _read(path: Path) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables of a tables.json, and notes for the plan. Raises InvalidInput in one line."""
    tables, notes = read_tables(path)
    # The folder's name would make the digests of equal plans differ
    return tables, tuple(note.replace(str(path), path.name) for note in notes)
