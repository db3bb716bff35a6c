"""Sharding task + cost model -> plan.

    neuroshard search tables.json --model model/ --devices 4 --memory 32GiB -o plan.json

`local-search` starts from plans of several proposers, improves them until its rounds or its time are spent, and chooses one
under doubt. `neuroshard-2023` is the beam search of the NeuroShard paper (MLSys 2023, arXiv 2305.01868) as published. The
others are heuristics that need no cost model.

The order of the steps is decided here and nowhere below: read `_local_search` from top to bottom.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from neuroshard import __version__
from neuroshard.core.constraints import SIMPLICITY, check_simplicity
from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.moves import changed_state
from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.precision import ExchangePrecision
from neuroshard.core.step_memory import DEFAULT_PIPELINE
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import SPREAD
from neuroshard.costmodel.network import CODEC_BYTES, for_task
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.files.constraints import ConstraintsFile, resolve
from neuroshard.files.disk import check_can_write
from neuroshard.files.plan import read_plan, write_plan
from neuroshard.files.tables import read_tables
from neuroshard.models.open import open_cost_model
from neuroshard.progress import progress
from neuroshard.search.bound.lower_bound import lower_bound
from neuroshard.search.choice import choose, simplest
from neuroshard.search.data_parallel import Copies, with_copies, worth_copying
from neuroshard.search.improve.fewer_cuts import fewer_cuts
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.infeasible.feasibility import any_plan, feasible, misfit
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.kept_cuts import WAY_OUT, KeptCuts
from neuroshard.search.problem.layout import caveats, lay_out, make_plan
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.base import ProposalRequest
from neuroshard.search.proposers.baselines import KEYS, Attempt, baseline, baselines
from neuroshard.search.proposers.beam import beam_search
from neuroshard.search.proposers.current import plans_in_place
from neuroshard.search.proposers.registry import propose
from neuroshard.search.proposers.row_wise import worth_allowing
from neuroshard.search.tuning import PAPER, TUNING, BeamWidth, Tuning
from neuroshard.search.watch import OnImprovement, Watch

LOCAL_SEARCH, PUBLISHED = "local-search", "neuroshard-2023"
ALGORITHMS = (LOCAL_SEARCH, PUBLISHED, *KEYS)
Take = Literal["expected", "cheapest"]
LEAST_SAID = 0.0005  # share of the cost by which a plan may be dearer than the cheapest without a word
UNTIL_TIME_IS_UP = 10**6  # rounds of a search with a time budget


@dataclass(frozen=True)
class SearchSettings:
    """How to search.

    Local search runs so many `rounds` (by default those of the `tuning`), or, with a time budget, as many as there is time for:
    then the plan depends on the machine, else on the seed alone. `width` is that of the published search. A search from a
    current plan moves at most `move_budget_bytes` of weights and optimizer state. The plan may cost the share `simplicity` more
    than the cheapest found if it then has fewer cuts. With `keep_optimizer_state`, tables whose optimizer has state by the row
    keep the column cuts of the current plan. With `try_row_wise`, and if the task has no rule about rows, tables may be split
    row-wise if a first plan with rows split is cheaper than all first column-wise plans. With `try_data_parallel`, small tables
    are data-parallel where first plans are cheaper so. `take` is the plan expected to be the
    fastest in truth, or the "cheapest" found by the cost model, whatever its doubt and its cuts.
    """

    algorithm: str = LOCAL_SEARCH
    seed: int = 0
    rounds: int | None = None
    time_budget_s: float | None = None
    move_budget_bytes: int | None = None
    simplicity: float = SIMPLICITY
    keep_optimizer_state: bool = False
    try_row_wise: bool = False
    try_data_parallel: bool = False
    take: Take = "expected"
    width: BeamWidth = PAPER
    tuning: Tuning = TUNING

    def check(self, from_a_plan: bool) -> None:
        """Raise UsageError for settings that contradict each other, or whether the search starts from a current plan."""
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f"unknown algorithm {self.algorithm!r}; there are {', '.join(ALGORITHMS)}")
        if self.time_budget_s is not None and not 0 < self.time_budget_s < math.inf:
            raise UsageError(
                f"the time budget must be above 0 seconds, not {self.time_budget_s:g}; leave it out to search to the end"
            )
        if self.rounds is not None and self.rounds < 0:
            raise UsageError(f"rounds must be at least 0, not {self.rounds}")
        check_simplicity(self.simplicity)
        if self.take not in get_args(Take):
            raise UsageError(f"take must be {' or '.join(get_args(Take))}, not {self.take!r}")
        self.width.check()
        if from_a_plan and self.algorithm != LOCAL_SEARCH:
            raise UsageError(f"{self.algorithm} places all tables anew; only {LOCAL_SEARCH} starts from a plan")
        if self.move_budget_bytes is not None and not from_a_plan:
            raise UsageError("a move budget is for a search that starts from a plan; give it with --from")
        if self.keep_optimizer_state and not from_a_plan:
            raise UsageError(
                "optimizer state is kept by a search that starts from a plan; give --keep-optimizer-state with --from"
            )

    @property
    def most_rounds(self) -> int:
        """Rounds of local search, if its time is not up before."""
        if self.rounds is not None:
            return self.rounds
        return self.tuning.rounds if self.time_budget_s is None else UNTIL_TIME_IS_UP


USUAL = SearchSettings()


@dataclass(frozen=True)
class Trust:
    """How far the cost model can be trusted, as the plan's provenance says it.

    `error` is how far predictions are off measured costs, as a share. `instead` says why this is not the hardware's own model.
    """

    error: float | None = None
    instead: str = ""


UNKNOWN = Trust()


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

    Raises UsageError for an unknown algorithm or no effort, Infeasible if no plan fits or none is found, and what the cost
    model raises where it knows no all-to-all between so many devices.
    """
    settings.check(from_a_plan=previous is not None)
    if settings.take == "cheapest":
        settings = replace(settings, simplicity=0.0, tuning=replace(settings.tuning, choice_under_doubt=False))
    cost_model = for_task(cost_model, task)
    more: dict[str, Any] = {
        "previous": previous,
        "trust": trust,
        "notes": notes,
        "on_improvement": on_improvement,
        "stop": stop,
    }
    if settings.try_data_parallel:
        return _with_or_without_copies(task, cost_model, replace(settings, try_data_parallel=False), more)
    if task.constraints.data_parallel:
        copies = Copies(task)
        more["previous"] = None if previous is None else copies.without(previous)
        rest = search(copies.rest, cost_model, settings, **more)
        return copies.added_to(rest, cost_model)
    is_ours = settings.algorithm == LOCAL_SEARCH
    watch = Watch(settings.time_budget_s, on_improvement, stop)
    tried = _with_row_wise(task) if settings.try_row_wise and is_ours and cost_model.prices_rows else None
    problem = feasible(tried or task, cost_model, settings.tuning)
    problem.alone_ms(problem.whole)  # reject invalid costs before the search starts
    if len(problem.row_blocks.groups):
        if not cost_model.prices_rows:
            raise UsageError(
                "given costs are of whole tables: they do not tell what some of the rows cost; search without --row-wise"
            )
        if not is_ours:
            notes = (*notes, f"{settings.algorithm} splits tables column-wise only, not row-wise")
    searched, current, kept = problem, None, None
    if previous is not None:
        current = CurrentPlacement(problem, previous, settings.move_budget_bytes)
        notes = (*notes, *current.notes)
        if settings.keep_optimizer_state:
            kept = KeptCuts(problem.task, previous, cost_model.max_dim)
            searched = _with_kept_cuts(problem, kept)
            current = CurrentPlacement(searched, kept.plan, settings.move_budget_bytes)
            notes = (*notes, kept.note)
        searched.memory = searched.memory - current.reserved_bytes

    request = ProposalRequest(watch, settings.seed, current)
    best, found_notes = _found(searched, request, settings, tried is not None)
    notes = (*notes, *found_notes)
    if is_ours:
        notes = (*notes, *_mean_pooled(task, settings.try_row_wise))
    if tried is not None and not len(best.problem.row_wise):
        problem = problem.without_row_wise(task)
    heuristics: dict[str, Attempt] = {} if settings.algorithm in KEYS else baselines(problem, settings.seed)
    if is_ours and previous is None and tried is None and not len(problem.row_blocks.groups) and cost_model.prices_rows:
        notes = (*notes, *worth_allowing(problem, best, request))
    if watch.stopped:
        notes = (*notes, "the search was stopped by hand: more of it might have found a better plan")
    placement = best.placement if current is None else current.with_spans(best.placement)
    shards = lay_out(searched, placement, current)
    if kept is not None:
        placement, shards = kept.placement(problem, searched, placement), kept.shards(shards)
    provenance = Provenance(
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
        notes=(*notes, *caveats(problem, placement)),
    )
    bound = lower_bound(problem, best)
    plan = make_plan(
        problem,
        placement,
        shards,
        baselines=heuristics,
        bound_ms=bound.ms,
        bound_assumptions=bound.why,
        improvements=watch.improvements,
        provenance=provenance,
    )
    plan = _saying_what_precision_saves(plan, cost_model)
    return plan if kept is None or previous is None else _naming_changed_state(plan, previous, kept)


def _saying_what_precision_saves(plan: Plan, cost_model: CostModel) -> Plan:
    """The plan with a note on what its exchange precision saves against fp32, or costs."""
    if plan.task.exchange_precision is None or plan.cost_ms is None:
        return plan
    prices = price_shards(cost_model, plan.task.model_copy(update={"exchange_precision": None}), plan.shards)
    if prices is None:
        return plan
    before, words = float(prices.total_ms.max()), plan.task.exchange_precision.text
    saved = before - plan.cost_ms
    what = (
        f"saves {saved:.3g} ms a step"
        if saved >= 0
        else f"costs {-saved:.3g} ms a step: leave out --exchange-precision"
    )
    note = (
        f"exchange in {words}, which {what} (in fp32 this plan takes {before:.3f} ms); encoding was not measured: it is taken to "
        f"move {CODEC_BYTES:g} bytes of memory a value. The trainer's sharders must have client.torchrec.qcomms(plan)"
    )
    return _with_note(plan, note)


def _with_note(plan: Plan, note: str) -> Plan:
    provenance = plan.provenance.model_copy(update={"notes": (*plan.provenance.notes, note)})
    return plan.model_copy(update={"provenance": provenance})


def _with_or_without_copies(
    task: ShardingTask, cost_model: CostModel, settings: SearchSettings, more: dict[str, Any]
) -> Plan:
    """The cheaper of two plans: with small tables data-parallel, if first plans are cheaper so, and with none beside those that
    are anyway. Each search has half of a time budget."""
    if not cost_model.prices_rows:
        raise UsageError("given costs do not tell what copies of tables cost; name the tables: --data-parallel PATTERN")
    allowed = _with_row_wise(task) if settings.try_row_wise else None
    chosen = worth_copying(allowed or task, cost_model, settings.tuning)
    if chosen and settings.time_budget_s is not None:
        settings = replace(settings, time_budget_s=settings.time_budget_s / 2)
    plan = search(task, cost_model, settings, **more)
    if not chosen:
        return plan
    copied = search(with_copies(task, chosen), cost_model, settings, **more)
    return min((plan, copied), key=lambda one: one.cost_ms if one.cost_ms is not None else math.inf)


def _naming_changed_state(plan: Plan, previous: Plan, kept: KeptCuts) -> Plan:
    """The plan with a note on tables whose cuts were kept and whose state changes all the same: neighbouring shards of unequal
    widths on one device are one shard to TorchRec."""
    changed = [name for name in changed_state(previous, plan) if name in kept.tables]
    if not changed:
        return plan
    note = (
        f"the optimizer state of {counted(len(changed), 'table')} ({first_few(changed)}) does not carry over exactly though its "
        "cuts are kept: neighbouring shards of unequal widths lie on one device, where TorchRec joins them"
    )
    return _with_note(plan, note)


def _with_row_wise(task: ShardingTask) -> ShardingTask | None:
    """The task with permission to split row-wise every table that no rule keeps whole. None if there is no such table, or if the
    task permits some already."""
    constraints = task.constraints
    too_few = constraints.max_shards is not None and constraints.max_shards < task.devices
    if too_few or constraints.may_split_rows(task.tables, task.devices):
        return None
    tried = task.model_copy(update={"constraints": constraints.model_copy(update={"row_wise": True})})
    return tried if tried.constraints.may_split_rows(task.tables, task.devices) else None


def _mean_pooled(task: ShardingTask, tried: bool) -> tuple[str, ...]:
    """A line about tables that are not split row-wise, though tried or allowed, because their rows are averaged."""
    rules, allowed = task.constraints.rules(), tried or task.constraints.row_wise
    said = {name: rule.row_wise for name, rule in rules.items() if rule.row_wise is not None}
    names = [table.name for table in task.tables if table.pooling == "mean" and said.get(table.name, allowed)]
    if not names:
        return ()
    return (
        f"{counted(len(names), 'table')} pooled by mean not split row-wise ({first_few(names)}): TorchRec would then divide "
        "the sums of whole tables too",
    )


def _with_kept_cuts(problem: Problem, kept: KeptCuts) -> Problem:
    """The problem of a task whose tables keep their column cuts. Raises Infeasible where then nothing fits."""
    try:
        searched = feasible(kept.task, problem.model, problem.tuning)
        any_plan(searched)
    except Infeasible:
        any_plan(problem)  # raises where nothing fits without the option either
        raise Infeasible(
            "no plan was found that keeps the column cuts of the plan to start from, those of "
            f"{counted(len(kept.tables), 'table')} ({first_few(kept.tables)}); {WAY_OUT}, without which tables fit"
        ) from None
    return searched


def _found(
    problem: Problem, request: ProposalRequest, settings: SearchSettings, tries_row_wise: bool
) -> tuple[State, tuple[str, ...]]:
    """The plan that the algorithm finds, and notes on it. Raises Infeasible."""
    watch, rng = request.watch, np.random.default_rng(settings.seed)
    if settings.algorithm == LOCAL_SEARCH:
        return _with_or_without_cuts(problem, request, settings, tries_row_wise, rng)
    if settings.algorithm != PUBLISHED:
        return State.of(problem, baseline(problem, settings.algorithm, rng)), ()
    with progress("search splits", total=settings.width.depth, unit="levels") as watch.bar:
        placement = beam_search(problem, settings.width, watch)
    if not placement.fits:
        raise Infeasible(
            f"{PUBLISHED}, which gives a device at most 1.5 x the mean columns, found no plan: "
            f"{misfit(problem, placement)}; {LOCAL_SEARCH} splits until tables fit: try it"
        )
    return State.of(problem, placement), ()


def _with_or_without_cuts(
    problem: Problem, request: ProposalRequest, settings: SearchSettings, tries_row_wise: bool, rng: np.random.Generator
) -> tuple[State, tuple[str, ...]]:
    """The cheaper of two plans: of those that cut no pooled table, whose outputs need not be put into order, and of all others.

    Either is looked for only if its first plans are not far dearer than those of the other.
    """
    watch, uncut, far = request.watch, _uncut(problem, request), 1 - problem.tuning.promising
    first, first_uncut = (_first_cost(one, request) if one is not None else math.inf for one in (problem, uncut))
    if uncut is None or first < far * first_uncut:
        return _local_search(problem, request, settings, tries_row_wise, rng)
    uncut_rng = rng.spawn(1)[0]
    if first_uncut < far * first:
        return _local_search(uncut, request, settings, tries_row_wise, uncut_rng)
    with watch.sharing(0.5):
        without = _local_search(uncut, request, settings, tries_row_wise, uncut_rng)
    cut = _local_search(problem, request, settings, tries_row_wise, rng)
    return min(without, cut, key=lambda found: found[0].cost)


def _uncut(problem: Problem, request: ProposalRequest) -> Problem | None:
    """The problem without cuts of pooled tables, if that saves anything. A search from a plan with cuts has none: its starts are
    cut."""
    current = request.current
    if not problem.launches.least_reorder_ms():
        return None
    if current is not None and any(plan.cuts > len(plan.problem.row_wise) for plan in plans_in_place(problem, current)):
        return None
    return problem.uncut()


def _first_cost(problem: Problem, request: ProposalRequest) -> float:
    """Ms of the cheapest first plan, row-wise ones too where they are allowed; infinite if no column-wise one fits."""
    plans = propose("greedy", problem, request)
    return min(plan.cost for plan in [*plans, *propose("row_wise", problem, request)]) if plans else math.inf


def _local_search(
    problem: Problem, request: ProposalRequest, settings: SearchSettings, tries_row_wise: bool, rng: np.random.Generator
) -> tuple[State, tuple[str, ...]]:
    """The plan to take, and a note where it costs more than the cheapest for fewer cuts.

    If it only `tries_row_wise`, it compares first plans. Only if one with rows split is cheaper than all others, the rounds that
    some column-wise ones leave split rows. Raises Infeasible if nothing fits, or if the move budget is too small.
    """
    watch, current, tuning, rounds = request.watch, request.current, problem.tuning, settings.most_rounds
    may_split_rows = len(problem.row_blocks.groups) > 0 and tuning.row_wise
    column_wise_rounds = min(rounds, tuning.rounds_before_rows) if tries_row_wise else rounds
    row_wise_rounds = rounds - column_wise_rounds if tries_row_wise else rounds
    total, unit = watch.amount(column_wise_rounds + may_split_rows * row_wise_rounds)
    with progress("search", total=total, unit=unit) as watch.bar:
        with watch.sharing(1 - tuning.time_for_cuts if settings.simplicity else 1.0):
            starts = _starts(problem, request)
            watch.note(min(plan.cost for plan in starts))
            with watch.sharing(0.5 if may_split_rows else 1.0):
                go_on = LocalSearch(starts, rng, watch, current)
                found = go_on.run(column_wise_rounds)
            row_wise: list[State] = []
            if may_split_rows:
                plans = _affordable(propose("row_wise", problem, request), current)
                cheaper = _rows_are_cheaper(plans, starts)
                if tries_row_wise and not cheaper:
                    found = go_on.run(row_wise_rounds)
                else:
                    # rounds would go on from the cheapest: an improved column-wise plan hides first ones that lead further
                    ends = [] if cheaper else [_choose_column_wise(found, starts[0], current)]
                    go_on = LocalSearch(
                        [*plans, *ends], rng.spawn(1)[0], watch, current, toggle_row_wise=tuning.toggle_row_wise
                    )
                    row_wise = go_on.run(row_wise_rounds)

        # The choice: among the column-wise plans that are about as cheap, then between that one and plans with rows split.
        found = [*found, *(plan for plan in row_wise if not len(plan.problem.row_wise))]
        best = _choose_column_wise(found, starts[0], current)
        if row_wise:
            best = choose([*row_wise, best], best)

        # No heuristic's plan is cheaper.
        within_budget = current is not None and current.budget_bytes is not None
        heuristic = None if within_budget else next(iter(propose("baselines", problem, request)), None)
        worth_ms = best.cost * (1 - tuning.worth_moving) if current is not None else best.cost
        if heuristic is not None and heuristic.cost < worth_ms:
            best = heuristic

        said = _doubted(best, watch.best_ms) if current is None else ()
        if not settings.simplicity:
            return best, said
        simple = _with_few_cuts(best, starts[0], heuristic, request, settings.simplicity, rng.spawn(1)[0])
    return simple, (*said, *_instead(best, simple))


def _doubted(taken: State, cheapest_ms: float) -> tuple[str, ...]:
    """A line where a plan is taken that costs more than the cheapest found."""
    if taken.cost <= cheapest_ms * (1 + LEAST_SAID):
        return ()
    more = taken.cost / cheapest_ms - 1
    return (
        f"{more:.2%} more than the cheapest plan found ({cheapest_ms:.3f} ms), which gains from errors of the cost model: this "
        "plan is expected to be faster in truth (--take cheapest takes that one)",
    )


def _rows_are_cheaper(row_wise: Sequence[State], column_wise: Sequence[State]) -> bool:
    """Whether one of the first plans with rows split costs less than all first column-wise plans. Improving lowers both."""
    return min((plan.cost for plan in row_wise), default=math.inf) < min(plan.cost for plan in column_wise)


def _with_few_cuts(
    best: State,
    start: State,
    heuristic: State | None,
    request: ProposalRequest,
    simplicity: float,
    rng: np.random.Generator,
) -> State:
    """The plan with the fewest cuts that costs little more than the `best` one.

    It costs no more than the best heuristic's plan. From a current plan (`start`) it is cheap enough to be worth moving for.
    """
    current, limits = request.current, [best.cost * (1 + simplicity)]
    if current is None:
        limits += [] if heuristic is None else [heuristic.cost]
    elif best is not start:
        limits += [max(start.cost * (1 - start.problem.tuning.worth_moving), best.cost)]
    plans = [best, *fewer_cuts(best, min(limits), rng, request.watch, current)]
    return simplest(plans if current is None else [*plans, start], simplicity, current)


def _instead(best: State, simple: State) -> tuple[str, ...]:
    """A line about what fewer cuts, or fewer bytes to move, cost, if they cost anything."""
    if simple.cost <= best.cost:
        return ()
    cuts, instead = (state.cuts - len(state.problem.row_wise) for state in (simple, best))
    what = (
        f"{counted(cuts, 'cut')} instead of {instead}" if cuts < instead else "fewer row-wise tables, or less to move"
    )
    return (
        f"{what}, for {simple.cost / best.cost - 1:.2%} more than the plan that would be taken otherwise (--simplicity 0)",
    )


def _starts(problem: Problem, request: ProposalRequest) -> list[State]:
    """Plans that fit and keep the move budget: first the current one, if there is one, then greedy plans, cheapest first. If
    there are neither, any plan that fits."""
    current = request.current
    in_place = [] if current is None else plans_in_place(problem, current)
    starts = [*in_place, *propose("greedy", problem, request)] or [State(*any_plan(problem))]
    if current is not None and current.budget_bytes is not None:
        current.check(min(current.moving_bytes(plan.problem, plan.widths) for plan in starts))
    return _affordable(starts, current)


def _affordable(plans: Sequence[State], current: CurrentPlacement | None) -> list[State]:
    """Those of the plans that keep the move budget."""
    return [plan for plan in plans if current is None or current.within_budget(plan.problem, plan.widths)]


def _choose_column_wise(found: Sequence[State], first: State, current: CurrentPlacement | None) -> State:
    """The plan to take of those found. The current plan (`first`), if there is one, stays unless another is clearly cheaper."""
    if current is None:
        return choose(found)
    best = choose(found, at_most_ms=first.cost)
    return first if best.cost > first.cost * (1 - first.problem.tuning.worth_moving) else best


def run(
    tables_path: Path,
    cost_model: str | Path,
    out: Path,
    settings: SearchSettings = USUAL,
    *,
    memory_bytes: tuple[int, ...],
    batch_size: int | None = None,
    pipeline: str = DEFAULT_PIPELINE,
    topology: Topology | None = None,
    exchange_precision: ExchangePrecision | None = None,
    constraints: ConstraintsFile | None = None,
    previous: Path | Plan | None = None,
    instead: str = "",
) -> Plan:
    """Search a plan for a tables.json, and write it as plan.json. Otherwise as `search_tables`.

    Raises InvalidInput, UsageError and Infeasible; then nothing is written.
    """
    check_can_write(out)
    tables, notes = read_tables_of_a_search(tables_path)
    plan = search_tables(
        tables,
        cost_model,
        settings,
        memory_bytes=memory_bytes,
        batch_size=batch_size,
        pipeline=pipeline,
        topology=topology,
        exchange_precision=exchange_precision,
        constraints=constraints,
        previous=read_plan(previous) if isinstance(previous, Path) else previous,
        instead=instead,
        notes=notes,
    )
    write_plan(out, plan)
    return plan


def read_tables_of_a_search(path: Path) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables of a tables.json, and notes for the plan. Raises InvalidInput in one line."""
    tables, notes = read_tables(path)
    # The folder's name would make the digests of equal plans differ
    return tables, tuple(note.replace(str(path), path.name) for note in notes)


def search_tables(
    tables: Sequence[Table],
    cost_model: str | Path,
    settings: SearchSettings = USUAL,
    *,
    memory_bytes: tuple[int, ...],
    batch_size: int | None = None,
    pipeline: str = DEFAULT_PIPELINE,
    topology: Topology | None = None,
    exchange_precision: ExchangePrecision | None = None,
    constraints: ConstraintsFile | None = None,
    previous: Plan | None = None,
    instead: str = "",
    notes: tuple[str, ...] = (),
    stop: threading.Event | None = None,
) -> Plan:
    """Search a plan for tables with the cost model of this name (see models/open.py).

    `memory_bytes` is one number for each device; `batch_size` is the cost model's unless given; `pipeline` is the trainer's
    (core/step_memory.py), `topology` its hosts and links, `exchange_precision` that of its collectives; `previous` is a plan to
    start from; `stop`, once it is set, ends the search. Row-wise tables are tried unless the constraints say which may be so, or
    that none may. `instead` says why this cost model is not the one of the plan's hardware: then it may be off by no less than a
    guess. Raises InvalidInput, UsageError and Infeasible.
    """
    given = constraints or ConstraintsFile()
    model = open_cost_model(cost_model, batch_size)
    task = ShardingTask.parse(
        {
            "tables": tables,
            "device_memory_bytes": memory_bytes,
            "batch_size": model.batch_size if batch_size is None else batch_size,
            "constraints": resolve(given, tables, "constraints"),
            "pipeline": pipeline,
            "topology": topology,
            "exchange_precision": exchange_precision,
        },
        "the task",
    )
    own_error = model.error_on_unseen_tables
    return search(
        task,
        model,
        replace(settings, try_row_wise=given.says_nothing_of_rows),
        previous=previous,
        trust=Trust(max(own_error or 0.0, SPREAD) if instead else own_error, instead or "; ".join(model.stand_ins)),
        notes=notes,
        stop=stop,
    )
