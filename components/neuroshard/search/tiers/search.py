"""Search plans of tables that HBM does not hold: which are beyond it, how they are cut, and on which devices.

First every part may be in any tier, and devices divide their HBM as is cheapest: a relaxation, since a table is in one tier.
Its plan says what a byte of HBM is worth on each device, and at these prices which tables would rather be in HBM, whole. Those
stay there, as far as they fit; the others are cached or in host memory. A search finds a plan for them. Then single tables
change sides, those that an estimate ranks best, as long as that helps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import WAYS
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.costmodel.tiers import with_tiers
from neuroshard.progress import progress
from neuroshard.search.algorithms import Asked, Found, find
from neuroshard.search.bound.lower_bound import Bound, lower_bound
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.infeasible.feasibility import feasible
from neuroshard.search.problem.filling import complete
from neuroshard.search.problem.layout import lay_out
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.spread import MayHold
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.division import Tiers, divided
from neuroshard.search.tiers.points import PartPoints, refined
from neuroshard.search.tiers.sides import Sides, ThreeProblems, bound_by_sides

# The first options of a table group: in HBM; beyond it, with as many cached rows as its device has room for
WHOLE, DIVIDED = 0, 1
LEVELS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)  # shares of cached rows of large tables, an option each: a guess
# Of the relaxation, and of first plans. 12 gave plans within 0.1 % on three tasks of 60 tables, and took half as long again
RELAXED_ROUNDS = 4
TOGGLES = 120  # tables that change sides, one after another, where no time budget is given: a guess
ROUNDS_A_TOGGLE = 2  # of local search after each: a guess
TOGGLE_CANDIDATES = 12  # the best by the estimate, of which one is drawn: a guess
TWO_AT_A_TIME = 0.35  # share of the times that two change sides: a guess
TOGGLE_LUCK = 2.5  # mean rank of the one that is drawn: a guess
CUT_FROM = 0.5  # share of a device's mean ms from which a table beyond HBM may be cut: a guess
# Shares of all HBM that tables in it fill at first: the first that can be packed. Guesses
ROOMS = (0.97, 0.9, 0.75, 0.5, 0.25, 0.0)
SIDES_SHARDS = 6_000  # over the shards of the problem: the bound distinguishes so many tables, at least 1: a guess


@dataclass(frozen=True)
class InTierPlan:
    """A plan of table groups with these options (G,), its shards, the tiers of its tables, and what it costs in ms."""

    state: State
    choice: Ints
    shards: tuple[Shard, ...]
    tiers: Tiers
    cost: float


@dataclass(frozen=True)
class FoundTiers:
    """The best plan found, how the search got there, and the bound."""

    plan: InTierPlan
    found: Found
    bound: Bound


class TierProblems:
    """A task as problems that share all but bytes and prices: in `anywhere` a table may be in any tier; in `options` all are in
    HBM (WHOLE), all beyond it and not cut (DIVIDED), or have one share of their rows cached, of LEVELS.

    A table beyond HBM has one load factor, for which the fullest of its devices must have room, and each of its column shards
    has all of its lookups. So only `large` ones may be cut, and then what they cache is chosen beforehand.
    """

    def __init__(self, task: ShardingTask, model: CostModel, prices: Floats, points: PartPoints, may: MayHold) -> None:
        hbm, names = task.placeable_bytes, [table.name for table in task.placed]
        if len(set(hbm)) > 1:
            raise UsageError(
                "devices have different memory for tables: beyond HBM all must have as much; say one --memory for all"
            )
        self.task, self.cost_model, self.prices, self.points = task, model, prices, points
        in_host = task.with_tiers(dict.fromkeys(names, ("host", None)))

        def dividing(**given: Any) -> CostModel:
            return cast(CostModel, Divided(model, hbm[0], prices, points, **given))

        self.anywhere = feasible(in_host, dividing(), may=may)
        self.anywhere.price(np.arange(len(self.anywhere.group)))
        whole = Problem(task, dividing(whole=names), may=may)
        outside = Problem(in_host, dividing(beyond=names), may=may)
        self.large = outside.alone_ms(outside.whole) >= CUT_FROM * self.mean_ms
        self.wide = (outside.operator_units < outside.all_units) | outside.in_equal_shards
        self.large |= self.wide
        self.options = [whole, outside]
        if self.large.any():
            some = [tables[0] for tables, is_large in zip(outside.tables, self.large, strict=True) if is_large]
            for share in LEVELS:
                rows = {table.name: int(share * table.rows) // WAYS * WAYS for table in some}
                held = {name: ("cached" if count else "host", count or None) for name, count in rows.items()}
                in_level = in_host.with_tiers(cast(Any, held))
                self.options.append(Problem(in_level, dividing(beyond=names, cached=rows), may=may))
        for problem in self.options:
            problem.price(np.arange(len(problem.group)))

    @property
    def sides(self) -> ThreeProblems:
        """Those of which the bound is made."""
        return ThreeProblems(self.anywhere, self.options[WHOLE], self.options[DIVIDED])

    def of(self, choice: Ints) -> Problem:
        """The problem in which each table group has its choice of the options (G,)."""
        problem = self.options[DIVIDED]
        for number in np.unique(choice).tolist():
            if number != DIVIDED:
                problem = problem.with_options_of(self.options[number], choice == number)
        return problem.uncut_groups(choice == DIVIDED)

    @cached_property
    def mean_ms(self) -> float:
        """What a device takes if all tables are spread evenly over all, in any tier."""
        vectors = self.anywhere.vectors[self.anywhere.whole]
        return float(self.anywhere.model.compute_ms(vectors.sum(axis=0) / self.anywhere.devices))

    def prices_of(self, state: State) -> Floats:
        """What a byte of HBM is worth on each device of a plan: (D,)."""
        return cast(Divided, state.problem.model).price_of(state.sums)

    def in_tiers(self, state: State, choice: Ints) -> InTierPlan:
        """A plan with its HBM divided, as it is then priced."""
        shards, groups = lay_out(state), zip(self.anywhere.tables, choice.tolist(), strict=True)
        held = {tables[0].name: number for tables, number in groups if number != WHOLE}
        cached = {}
        for name, number in held.items():
            if number != DIVIDED:
                rule = self.options[number].task.constraints.beyond_hbm[name]
                cached[name] = rule.tier, rule.cached_rows
        tiers = divided(self.task, shards, held, cached, self.points)
        prices = price_shards(self.cost_model, self.task.with_tiers(tiers), shards)
        assert prices is not None
        return InTierPlan(state, choice, shards, tiers, float(prices.total_ms.max()))

    @cached_property
    def need_bytes(self) -> Floats:
        """HBM that each table group needs, uncut, by option: (O, G)."""
        return np.array([problem.nbytes[problem.whole] for problem in self.options], dtype=np.float64)


def search_tiers(task: ShardingTask, model: CostModel, asked: Asked, may: MayHold) -> FoundTiers:
    """The best plan found, where the task's tables do not all fit into HBM. Raises Infeasible where HBM does not even hold what
    tables need there that are in host memory, and UsageError where the model knows no tiers."""
    points = PartPoints(task, with_tiers(model))
    few = replace(
        asked, settings=replace(asked.settings, rounds=RELAXED_ROUNDS, simplicity=0.0), watch=asked.watch.anew()
    )
    rng = np.random.default_rng(asked.settings.seed)
    with asked.watch.sharing(0.4):
        prices = points.prices()
        problems = TierProblems(task, model, refined(prices, _mean_price(task, model, prices, points)), points, may)
        relaxed = find(problems.anywhere, replace(few, watch=few.watch.anew())).best
    first = lower_bound(problems.anywhere, relaxed)
    plan, found = _first_plan(problems, relaxed, _first_choices(problems, relaxed, None), few, asked)
    most = max(SIDES_SHARDS // len(problems.anywhere.group), 1)
    bound, sides = bound_by_sides(problems.sides, first, plan.state, most, lambda: asked.watch.expired)
    if sides.inside.any() or sides.beyond.any():
        other, other_found = _first_plan(problems, relaxed, _first_choices(problems, relaxed, sides), few, asked)
        plan, found = min((plan, found), (other, other_found), key=lambda one: one[0].cost)
    plan = _toggled(problems, plan, asked, rng)
    last = LocalSearch([plan.state], rng, asked.watch.anew()).run(asked.settings.most_rounds)
    return FoundTiers(min(plan, problems.in_tiers(last, plan.choice), key=lambda one: one.cost), found, bound)


def _mean_price(task: ShardingTask, model: CostModel, prices: Floats, points: PartPoints) -> Floats:
    """What a byte of HBM is worth, in ms, if every device has an equal share of every table: (1,)."""
    relaxed = Divided(model, task.placeable_bytes[0], prices, points)
    terms = relaxed.of_parts(list(map(Part.of, task.placed)))
    return relaxed.price_of(terms.sum(axis=0)[None] / task.devices)


def _first_plan(
    problems: TierProblems, relaxed: State, choices: Iterable[Ints], few: Asked, asked: Asked
) -> tuple[InTierPlan, Found]:
    """A plan of the first of these choices for which there is one. Raises Infeasible where there is none."""
    why = None
    for choice in choices:
        try:
            found = find(problems.of(choice), replace(few, watch=asked.watch.anew()))
        except Infeasible as error:
            why = why or error
            continue
        return problems.in_tiers(found.best, choice), found
    assert why is not None
    raise why


def _first_choices(problems: TierProblems, relaxed: State, sides: Sides | None) -> Iterator[Ints]:
    """`_first_choice` with less and less HBM filled, until what is there can be packed."""
    for room in ROOMS:
        yield _first_choice(problems, relaxed, room, sides)


def _first_choice(problems: TierProblems, relaxed: State, share: float, sides: Sides | None) -> Ints:
    """What each table group would rather be at the prices of the relaxed plan: in HBM, those first that gain most a byte as far
    as they fit into this share of it, or else beyond it. Groups with a side are on it, if they fit."""
    prices, model = problems.prices_of(relaxed), cast(Divided, relaxed.problem.model)
    worth = _linear(problems, relaxed, np.stack([model.slope_at(price) for price in prices]))
    worth[DIVIDED, problems.large] = np.inf
    if len(problems.options) > 2:
        worth[2:, ~problems.large] = np.inf
    choice: Ints = 1 + worth[1:].argmin(axis=0)
    gain = worth[1:].min(axis=0) - worth[WHOLE]
    need = problems.need_bytes
    if sides is not None:
        gain[sides.inside], gain[sides.beyond] = np.inf, -np.inf
    room = share * sum(problems.task.placeable_bytes) - float(need[choice, np.arange(len(choice))].sum())
    more = need[WHOLE] - need[choice, np.arange(len(choice))]
    for group in np.argsort(-gain / more, kind="stable").tolist():
        if gain[group] > 0 and more[group] <= room:
            choice[group] = WHOLE
            room -= more[group]
    return choice


def _toggled(problems: TierProblems, best: InTierPlan, asked: Asked, rng: np.random.Generator) -> InTierPlan:
    """The cheapest plan found by giving one or two table groups another option at a time."""
    with progress("search tiers", total=TOGGLES, unit="tables") as bar:
        for _ in range(TOGGLES):
            if asked.watch.expired:
                break
            change = _change(problems, best)
            candidates = np.argsort(change, axis=None, kind="stable")[:TOGGLE_CANDIDATES]
            choice = best.choice.copy()
            for _ in range(1 + (rng.random() < TWO_AT_A_TIME)):
                number, group = np.unravel_index(
                    candidates[min(int(rng.exponential(TOGGLE_LUCK)), len(candidates) - 1)], change.shape
                )
                choice[group] = number
            choice = _with_room(problems, choice, best.choice, change)
            there = problems.of(choice).with_spread(best.state.problem.spread, best.state.problem.places)
            start = None if there is None else _start(there, best, choice)
            if start is not None:
                found = LocalSearch([start], rng, asked.watch.anew()).run(ROUNDS_A_TOGGLE)
                best = min(best, problems.in_tiers(found, choice), key=lambda plan: plan.cost)
            bar.advance(1, f"best {best.cost:.3f} ms")
    return best


def _with_room(problems: TierProblems, choice: Ints, before: Ints, change: Floats) -> Ints:
    """The choice in which so many other table groups leave HBM that the rest has room, those first that cost least a byte."""
    need, each, choice = problems.need_bytes, np.arange(len(choice)), choice.copy()
    room = sum(problems.task.placeable_bytes) - float(need[choice, each].sum())
    if room >= 0:
        return choice
    out = 1 + change[1:].argmin(axis=0)
    freed = need[WHOLE] - need[out, each]
    may = (choice == WHOLE) & (before == WHOLE) & (freed > 0) & np.isfinite(change[out, each])
    for group in np.argsort(np.where(may, change[out, each] / np.maximum(freed, 1.0), np.inf), kind="stable").tolist():
        if room >= 0 or not may[group]:
            break
        choice[group] = out[group]
        room += freed[group]
    return choice


def _start(problem: Problem, plan: InTierPlan, choice: Ints) -> State | None:
    """A plan of the problem with the shards of another plan; groups of another option find new places if they have no room."""
    kept = complete(problem, plan.state.widths.copy())
    if kept is not None:
        return kept
    widths = plan.state.widths.copy()
    widths[choice != plan.choice] = 0
    return complete(problem, widths)


def _change(problems: TierProblems, plan: InTierPlan) -> Floats:
    """By a linear estimate, what each table group changes on the busy devices if it has another option: (O, G). Infinite where it
    has it already, or may not."""
    state = plan.state
    slope = state.problem.model.compute_slope(state.sums)
    busy = (state.ready / state.ready.max()) ** 8
    worth = _linear(problems, state, slope * busy[:, None])
    change: Floats = worth - worth[plan.choice, np.arange(len(plan.choice))]
    change[plan.choice, np.arange(len(plan.choice))] = np.inf
    change[DIVIDED, problems.wide] = np.inf
    change[2:, ~problems.large] = np.inf
    return change


def _linear(problems: TierProblems, state: State, slope: Floats) -> Floats:
    """What each table group of a plan takes by the slopes of its devices (D, K), in every option: (O, G)."""
    groups, devices = np.nonzero(state.widths)
    shards = state.problem.first[groups] + state.widths[groups, devices]
    found = np.zeros((len(problems.options), len(state.widths)))
    spread = list(zip(state.problem.spread, state.problem.places, strict=True))
    for number, problem in enumerate(problems.options):
        np.add.at(found[number], groups, np.einsum("sk,sk->s", problem.vectors[shards], slope[devices]))
        for group, place in spread:
            vectors = problem.options.load(np.array([group]), np.array([place])).vectors
            found[number, group] = float((vectors * slope).sum())
    return found
