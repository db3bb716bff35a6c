"""The plan that each algorithm finds.

`local-search` starts from plans of several proposers, improves them until its rounds or its time are spent, and undoes cuts.
`neuroshard-2023` is the beam search of the NeuroShard paper (MLSys 2023, arXiv 2305.01868) as published. The
others are heuristics that need no cost model.

The order of the steps is decided here and nowhere below: read `_local_search` from top to bottom.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.core.plan import Improvement, Shard
from neuroshard.orders.options import LOCAL_SEARCH, PUBLISHED
from neuroshard.progress import progress
from neuroshard.search.asked import Asked
from neuroshard.search.bound.lower_bound import least_with_cuts_ms, lower_bound
from neuroshard.search.bound.settings import QUICK
from neuroshard.search.improve.fewer_cuts import fewer_cuts, simplest
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.infeasible.feasibility import any_plan, misfit
from neuroshard.search.notes import fewer_cuts_cost
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.filling import started
from neuroshard.search.problem.plans import Plans
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.baselines import baseline, best_baseline
from neuroshard.search.proposers.beam import beam_search
from neuroshard.search.proposers.current import plans_in_place
from neuroshard.search.proposers.greedy import first_plans
from neuroshard.search.proposers.spread import plans_with_copies, row_wise_plans
from neuroshard.search.settings import SearchSettings
from neuroshard.search.watch import Watch

GO_ON = 4  # the share of rounds of a search that goes on from a plan is one of so many: a guess
WITHOUT_CUTS = "search without cuts"  # the name of its progress bar


class Found(NamedTuple):
    """A plan, notes on it, and how the search got there; once it is laid out, its shards, and the tables whose cuts are kept."""

    best: State
    notes: tuple[str, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    shards: tuple[Shard, ...] = ()
    cut_before: Collection[str] = ()


def find(problem: Problem, asked: Asked) -> Found:
    """The plan that the algorithm finds. Raises Infeasible."""
    settings, rng = asked.settings, np.random.default_rng(asked.settings.seed)
    if settings.algorithm == LOCAL_SEARCH:
        return _local_search(problem, asked, rng)
    if settings.algorithm == PUBLISHED:
        return Found(_published_search(problem, settings, asked.watch))
    return Found(State.of(problem, baseline(problem, settings.algorithm, rng)))


def go_on(problem: Problem, near: State, asked: Asked) -> Found | None:
    """What a few rounds find from a plan `near` one of this problem, which has little less room, or from greedy plans that spread
    the same tables where its shards find no new places. None where none of these keep the move budget or all that is found is far
    dearer, where the algorithm is none that goes on, or where cuts are kept, which may be others."""
    settings = asked.settings
    if settings.algorithm != LOCAL_SEARCH or asked.kept is not None:
        return None
    if not near.problem.copies_some:  # copies that are worth little are none that it may choose
        problem = problem.without_copies()
    there, start = problem.with_spread(near.problem.spread, near.problem.places), started(problem, near)
    first = [start] if start is not None else [] if there is None else first_plans(there, problem.tuning.greedy_plans)
    first = _affordable(first, asked.current)
    few = replace(asked, settings=replace(settings, rounds=settings.most_rounds // GO_ON))
    found = _local_search(problem, few, np.random.default_rng(settings.seed), first) if first else None
    far = near.cost * (1 + problem.tuning.both_kinds_within)
    return None if found is None or found.best.cost > far else found


def _published_search(problem: Problem, settings: SearchSettings, watch: Watch) -> State:
    with progress("search splits", total=settings.width.depth, unit="levels") as watch.bar:
        placement = beam_search(problem, settings.width, watch)
    if not placement.fits:
        raise Infeasible(
            f"{PUBLISHED}, which gives a device at most 1.5 x the mean columns, found no plan: "
            f"{misfit(problem, placement)}; {LOCAL_SEARCH} splits until tables fit: try it"
        )
    return State.of(problem, placement)


def _cheapest(problem: Problem, asked: Asked, rng: np.random.Generator) -> State:
    """The cheapest plan found, of all that tables may be: first without copies beside those that the task has, and then, from
    there, with some. Copies must be worth that tables are trained otherwise, unless the current plan has some, or nothing fits
    without. Raises Infeasible if nothing fits, or if the move budget is too small."""
    current, best, fault = asked.current, None, None
    has_some = current is not None and bool((problem.options.way_of[current.places] == problem.options.copied).any())
    if not problem.may_copy or has_some:
        return _with_or_without_cuts(problem, asked, rng)
    try:
        with asked.watch.sharing(problem.tuning.time.without_copies):
            best = _with_or_without_cuts(problem.without_copies(), asked, rng)
    except Infeasible as error:
        fault = error
    if best is not None and asked.watch.expired:
        return best
    try:
        some = _with_copies(problem, best, asked, rng.spawn(1)[0])
    except Infeasible as error:
        raise fault or error from None
    worth = 1 - problem.tuning.copies_worth if some.problem.copies_some else 1.0
    return some if best is None or some.cost < best.cost * worth else best


def _with_copies(problem: Problem, best: State | None, asked: Asked, rng: np.random.Generator) -> State:
    """The cheapest plan found from first plans with copies and from the `best` one without; without cuts if that has none. None
    is sought if the first ones are far dearer."""
    if best is None:
        return _improved(problem, _first(problem, asked, rng), asked, rng)
    uncut = problem.uncut() if best.cuts == len(best.problem.spread) else None
    kinds = [kind for kind in (uncut, problem) if kind is not None]
    proposed = [_affordable(_with_rows_split(kind, _copying(kind)), asked.current) for kind in kinds]
    first = min(proposed, key=_least_ms)
    kind = first[0].problem.root if first else problem
    if first and _least_ms(first) * (1 - kind.tuning.both_kinds_within) > best.cost:
        return best
    kind = kind if first else problem  # where first plans with copies have no room, cuts may make some
    there = kind.with_spread(best.problem.spread, best.problem.places)
    assert there is not None
    return _improved(kind, [State(there, best.widths), *first], asked, rng)


def _with_or_without_cuts(problem: Problem, asked: Asked, rng: np.random.Generator) -> State:
    """The cheaper of two plans: the best found that cuts no pooled table, whose outputs need not be put into order, and the best
    found that may cut any.

    A kind of plan is searched only if its first plans are not far dearer than those of the other kind, and plans with cuts only
    unless they are proven to cost no less than the best found without. If the current plan has cuts, plans with cuts are always
    searched, and one without must be worth moving for.
    """
    first, current, far = _first(problem, asked, rng), asked.current, 1 - problem.tuning.both_kinds_within
    asked.watch.note(_least_ms(first))
    uncut = _uncut(problem, _least_ms(first) / far)
    first_uncut = [] if uncut is None else _affordable(_with_rows_split(uncut, _proposed(uncut, asked)), current)
    if uncut is None or _least_ms(first) < far * _least_ms(first_uncut):
        return _improved(problem, first, asked, rng)
    uncut_rng = rng.spawn(1)[0]
    from_cuts = current is not None and first[0].cuts > len(first[0].problem.spread)
    if _least_ms(first_uncut) < far * _least_ms(first) and not from_cuts:
        return _improved(uncut, first_uncut, asked, uncut_rng, WITHOUT_CUTS)
    with asked.watch.sharing(problem.tuning.time.without_cuts):
        without = _improved(uncut, first_uncut, asked, uncut_rng, WITHOUT_CUTS)
    if not from_cuts and least_with_cuts_ms(problem, without) * (1 + asked.settings.simplicity) >= without.cost:
        return without
    found = _improved(problem, first, asked, rng)
    worth = 1 - problem.tuning.worth_moving if from_cuts else 1.0
    return without if without.cost <= found.cost * worth else found


def _least_ms(plans: Sequence[State]) -> float:
    return min((plan.cost for plan in plans), default=np.inf)


def _uncut(problem: Problem, most_ms: float) -> Problem | None:
    """The problem without cuts of pooled tables; None if that saves nothing, or if some table costs more than `most_ms` whole."""
    uncut = problem.uncut() if problem.orders_cut else None
    stay_whole = np.setdiff1d(np.arange(len(problem.whole)), problem.options.groups)
    if uncut is None or (problem.alone_ms(problem.whole[stay_whole]) > most_ms).any():
        return None
    return uncut


def _local_search(problem: Problem, asked: Asked, rng: np.random.Generator, first: Sequence[State] = ()) -> Found:
    """The plan to take, with notes where it costs more than the cheapest; found from these `first` ones, if there are any."""
    settings, watch, current, tuning = asked.settings, asked.watch, asked.current, problem.tuning
    with watch.sharing(tuning.time.until_cuts if settings.simplicity else 1.0):
        best = _improved(problem, first, asked, rng) if first else _cheapest(problem, asked, rng)

    # From a current plan nothing moves for next to no gain.
    in_place = [] if current is None else _affordable(plans_in_place(problem, current), current)
    start, worth = (in_place[0], 1 - tuning.worth_moving) if in_place else (None, 1.0)
    if start is not None and best.cost > start.cost * worth:
        best = start

    # No heuristic's plan is cheaper.
    within_budget = current is not None and current.budget_bytes is not None
    heuristic = best_baseline(problem, settings.seed) if tuning.baselines and not within_budget else None
    if heuristic is not None and heuristic.cost < best.cost * worth:
        best = heuristic

    simple = _with_few_cuts(best, start, heuristic, asked, rng.spawn(1)[0]) if settings.simplicity else best
    return Found(simple, fewer_cuts_cost(best, simple), watch.improvements)


def _enough_ms(problem: Problem, plans: Sequence[State], asked: Asked) -> float:
    """A plan that costs at most this is proven to cost at most `simplicity` more than the cheapest, so it is simplified, and not
    improved. 0 if there is no bound, as where tables may be copied."""
    if not asked.settings.simplicity or not plans or problem.may_copy:
        return 0.0
    if problem.root not in asked.bounds_ms:
        asked.bounds_ms[problem.root] = lower_bound(problem, min(plans, key=lambda plan: plan.cost), QUICK).ms or 0.0
    return asked.bounds_ms[problem.root] * (1 + asked.settings.simplicity)


def _improved(
    problem: Problem, first: Sequence[State], asked: Asked, rng: np.random.Generator, name: str = "search"
) -> State:
    """The cheapest plan that local search finds from these, or one that is proven to be cheap enough.

    It goes on from the plan that is cheapest once all have descended, and few toggles lead from there to one in which several
    tables split row-wise pay only together. So if the cheapest of these plans has rows split, half of the rounds go on from one
    of those that do.
    """
    watch, current, ends, tuning = asked.watch, asked.current, asked.ends, problem.tuning
    toggle = tuning.toggle and (problem.may_copy or _may_split_rows(problem))
    asked_for = problem.may_copy or (_may_split_rows(problem) and bool(asked.task.may_split_rows))
    rounds = asked.settings.most_rounds * (2 if asked_for else 1)  # more ways to hold a table want more of them
    if current is None:  # else they move unlike amounts of bytes
        most_ms = _least_ms(first) * (1 + tuning.starts_within)
        first = [plan for plan in first if plan in ends or plan.cost <= most_ms]
    split, enough_ms = [plan for plan in first if plan.problem.splits_rows], _enough_ms(problem, first, asked)
    search = partial(LocalSearch, watch=watch, current=current, toggle=toggle, ends=ends, enough_ms=enough_ms)
    total, unit = watch.amount(rounds)
    with progress(name, total=total, unit=unit) as watch.bar:
        if not 0 < len(split) < len(first) or _least_ms(split) > _least_ms(first):
            return search(first, rng).run(rounds)
        with watch.sharing(tuning.time.from_rows):
            from_rows = search(split, rng.spawn(1)[0])
            with_rows = from_rows.run(rounds // 2)
        others = [*(plan for plan in first if plan not in split), *from_rows.descended]
        best = search(others, rng).run(rounds - rounds // 2)
    return min(with_rows, best, key=lambda plan: plan.cost)


def _may_split_rows(problem: Problem) -> bool:
    return problem.may_spread and problem.tuning.row_wise


def _with_few_cuts(
    best: State, start: State | None, heuristic: State | None, asked: Asked, rng: np.random.Generator
) -> State:
    """The plan with the fewest cuts that costs little more than the `best` one.

    Without a current plan it costs no more than the best heuristic's; from one (`start`) it is cheap enough to be worth moving
    for.
    """
    current, simplicity = asked.current, asked.settings.simplicity
    limits = [best.cost * (1 + simplicity)]
    if current is None:
        limits += [] if heuristic is None else [heuristic.cost]
    elif start is not None and best is not start:
        limits += [max(start.cost * (1 - start.problem.tuning.worth_moving), best.cost)]
    plans = [best, *fewer_cuts(best, min(limits), rng, asked.watch, current)]
    return simplest(plans if start is None else [*plans, start], simplicity, current)


def _first(problem: Problem, asked: Asked, rng: np.random.Generator) -> list[State]:
    """Plans to improve, that fit and keep the move budget: those proposed or, if there are none, any plan that fits; then ones
    with rows split. Local search begins with the first few before these are made, so that a good plan is reported soon."""
    plans, current = _proposed(problem, asked) or [State(*any_plan(problem))], asked.current
    some = _affordable(plans, current)
    if some and _begin(problem, some[: min(problem.tuning.begin_with, Plans.at_once(problem))], asked, rng):
        return some
    plans = _with_rows_split(problem, some or plans)
    if current is not None and current.budget_bytes is not None:
        current.check(min(current.moving_bytes(plan.problem, plan.widths) for plan in plans))
    return _affordable(plans, current)


def _begin(problem: Problem, plans: Sequence[State], asked: Asked, rng: np.random.Generator) -> bool:
    """Descend from these first plans; whether that found one that is proven to be cheap enough."""
    watch, share = asked.watch, problem.tuning.time.first_plans
    watch.note(_least_ms(plans))
    total, unit = watch.amount(1)
    with progress("search from first plans", total=total, unit=unit) as watch.bar, watch.sharing(share):
        enough_ms = _enough_ms(problem, plans, asked)
        ends = LocalSearch(plans, rng, watch, asked.current, enough_ms=enough_ms).descended
        asked.ends.update(zip(plans, ends, strict=False))  # if time is up or one is cheap enough, not from all
        watch.advance()
    return _least_ms(ends) <= enough_ms


def _proposed(problem: Problem, asked: Asked) -> list[State]:
    """First the current plan, if there is one, then greedy plans, cheapest first, and some with copies."""
    in_place, tuning = [] if asked.current is None else plans_in_place(problem, asked.current), problem.tuning
    most = tuning.greedy_plans if Plans.at_once(problem) > 1 else 1
    return [*in_place, *(first_plans(problem, most) if tuning.greedy else ()), *_copying(problem)]


def _copying(problem: Problem) -> list[State]:
    """Proposed plans with copies, beside the tables that the problem has spread."""
    tuning = problem.tuning
    return plans_with_copies(problem)[: tuning.greedy_plans] if problem.may_copy and tuning.copies else []


def _with_rows_split(problem: Problem, plans: list[State]) -> list[State]:
    """These plans, and proposed ones with rows split, where rows may be split. Sets that are estimated to cost far more than the
    cheapest of these plans are not tried.

    Where tables may be copied, rows are split beside the copies of the cheapest of these plans, and tables copied beside the
    row-wise ones of the cheapest plan without copies: where one table outweighs all else, what copies save shows only then.
    """
    if not plans or not _may_split_rows(problem):
        return plans
    most_ms = np.inf if problem.may_copy else _least_ms(plans) * (1 + problem.tuning.row_sets_within)
    found = row_wise_plans(problem, most_ms)
    if problem.may_copy and problem.tuning.copies:
        copies = _copying(found[0].problem) if found else []
        found = [*row_wise_plans(min(plans, key=lambda plan: plan.cost).problem), *copies]
    return [*plans, *found]


def _affordable(plans: Sequence[State], current: CurrentPlacement | None) -> list[State]:
    """Those of the plans that keep the move budget."""
    return [plan for plan in plans if current is None or current.within_budget(plan.problem, plan.widths)]
