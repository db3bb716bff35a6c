"""Which tables to split row-wise: first sets of them by an estimate, then one table more or fewer at a time.

A table's narrowest column part has all its lookups, so one heavy table can outweigh all else however it is cut; its blocks of
rows have a share of the lookups each, but every device then sends all its columns. So sets are sought among tables in two
orders: those whose narrowest part takes longest first, and those first whose blocks save most, all taken together.
"""

from itertools import combinations

import numpy as np

from neuroshard.core.text import counted
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.perturb import within_budget
from neuroshard.search.infeasible.packing import cheapest_plan
from neuroshard.search.problem.plans import Level, Yardstick
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State, transfers
from neuroshard.search.proposers.start import column_ms, first_plans, resumed

SETS = 3  # tried of each order
ALL_SETS = 4  # tables of which every set is tried
ONE_BY_ONE = 12  # tables of an order up to which sets differ by one; beyond, by a fifth
SOURCES = 2  # devices that a table is taken off to split it row-wise
CONSIDERED = 32  # tables at most
WORTH_ALLOWING = (
    0.1  # of the cost, by which a first plan row-wise must be cheaper, to be worth a word where none is allowed
)
LARGE = 100_000  # tables x devices, above which that try takes long: 1.4 s of CPU for 2,002 x 128
LUCK = 1.5  # how far down the list of tables a turn goes on average


def row_plans(problem: Problem) -> list[State]:
    """First plans with the sets of tables row-wise that are estimated to be the cheapest, the cheapest plan first."""
    found = []
    for items in _sets(problem):
        there = problem.with_rows(items)
        if there is not None:
            found += [*first_plans(there, 1), *cheapest_plan(there)]
    return sorted(found, key=lambda state: state.cost)


def _sets(problem: Problem) -> list[Ints]:
    """The sets that are estimated to be the cheapest, a few of each order; of few tables, all."""
    blocks = problem.row_blocks
    if len(blocks.items) <= ALL_SETS:
        return [
            np.array(some) for n in range(1, len(blocks.items) + 1) for some in combinations(blocks.items.tolist(), n)
        ]
    estimate = _Estimate(problem)
    heaviest = blocks.items[np.argsort(-estimate.narrow_ms[blocks.items], kind="stable")]
    saving = blocks.items[np.argsort(-estimate.saved_ms, kind="stable")][: np.count_nonzero(estimate.saved_ms > 0)]
    sets: dict[bytes, Ints] = {}
    for order in (heaviest, saving):
        counts = _counts(len(order))
        if not len(counts):
            continue
        costs = estimate.costs(order, counts)
        for best in np.argsort(costs, kind="stable")[:SETS].tolist():
            if np.isfinite(costs[best]):
                items = np.sort(order[: counts[best]])
                sets.setdefault(items.tobytes(), items)
    return list(sets.values())


def _counts(most: int) -> Ints:
    """Numbers of tables to try: 1, 2, 3 …, then by leaps."""
    counts, count = [], 1
    while count <= most:
        counts.append(count)
        count += max(1, (count - ONE_BY_ONE) // 5)
    return np.array(counts, dtype=np.int64)


def worth_allowing(problem: Problem, found: State) -> list[str]:
    """A line where a plan that splits tables row-wise, which the task does not allow, is far cheaper at the first try."""
    if problem.devices * len(problem.whole) > LARGE:
        return []
    task, constraints = problem.task, problem.task.constraints.model_copy(update={"row_wise": True})
    plans = row_plans(Problem(task.model_copy(update={"constraints": constraints}), problem.model))
    if not plans or plans[0].cost > found.cost * (1 - WORTH_ALLOWING):
        return []
    return [
        f"with {counted(len(plans[0].problem.row_wise), 'table')} split row-wise, a first try costs {plans[0].cost:.3f} ms, "
        f"{1 - plans[0].cost / found.cost:.0%} less than this plan; --row-wise lets a search do so"
    ]


class _Estimate:
    """What plans cost that split some items row-wise, as if all else could be dealt out evenly: `costs`.

    `narrow_ms` (I,) is what the narrowest part of an item takes alone, infinite where no device has room for it; `saved_ms` (P,)
    what all devices together save by the blocks of an item instead of the item whole, by a linear guess.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, blocks, devices = problem, problem.row_blocks, problem.devices
        narrow = problem.first + np.maximum(-(-problem.widest // problem.places), problem.least)
        fits = problem.nbytes[narrow] <= problem.roomiest()
        self.narrow, self.narrow_ms = narrow, np.where(fits, problem.alone_ms(narrow), np.inf)
        widest = problem.first + problem.cap
        problem.price(widest)
        self.vectors = problem.vectors[widest] * (problem.widest / problem.cap)[:, None]
        self.all_blocks: Floats = blocks.vectors[:, 0] * (devices - 1) + blocks.vectors[:, 1]
        slope = problem.model.compute_slope(self.vectors.sum(axis=0) / devices)
        all_to_all = (devices - 1) * column_ms(problem, problem.mean_columns) * blocks.dims
        self.saved_ms: Floats = (self.vectors[blocks.items] - self.all_blocks) @ slope - all_to_all

    def costs(self, order: Ints, counts: Ints) -> Floats:
        """Ms where the first so many items of an order are row-wise: (C,). Infinite where a device has no room for its blocks."""
        problem, model, devices = self.problem, self.problem.model, self.problem.devices
        places, last = problem.row_blocks.places(order), counts - 1
        nbytes = problem.row_blocks.nbytes[places].cumsum(axis=0)[last]
        fits = (nbytes[:, :1] <= problem.memory[:-1]).all(axis=1) & (nbytes[:, 1] <= problem.memory[-1])
        block = problem.row_blocks.vectors[places, 0].cumsum(axis=0)[last]
        more = (self.all_blocks[places] - self.vectors[order]).cumsum(axis=0)[last]
        mean = model.compute_ms((self.vectors.sum(axis=0) + more) / devices)
        columns = problem.mean_columns + problem.row_blocks.dims[places].cumsum()[last] * (1 - 1 / devices)
        forward, backward = transfers(problem, np.repeat(columns[:, None], devices, axis=1))

        others = np.delete(np.arange(len(self.narrow)), order)
        left = np.concatenate([order, others])
        worst = np.array(
            [left[count:][self.narrow_ms[left[count:]].argmax()] if count < len(left) else -1 for count in counts]
        )
        beside = problem.vectors[self.narrow[worst]] * (worst >= 0)[:, None]
        heaviest = np.where(np.isfinite(self.narrow_ms[worst]) | (worst < 0), model.compute_ms(block + beside), np.inf)
        costs: Floats = np.maximum(mean, heaviest) + (forward + backward).mean(axis=-1)
        return np.where(fits, costs, np.inf)


class _Guess:
    """A state as the linear guess sees it: what each component and each column add to each device."""

    def __init__(self, state: State, stick: Yardstick) -> None:
        self.level, self.own_ms = Level(stick, state.compute[None], state.dims[None]), stick.own_ms
        self.slope = state.problem.model.compute_slope(state.sums)  # (D, K)
        self.load, self.dims = self.level.load[0], state.dims

    def order(self) -> Ints:
        """Devices, the one whose ease would help most first."""
        return np.argsort(-self.level.counts[0], kind="stable")


def turned(state: State, stick: Yardstick, rng: np.random.Generator) -> State | None:
    """The plan with a table split row-wise that was not, or one no more that was: by chance one of those that promise most.

    None where there is no such table, or no room.
    """
    problem, guess = state.problem, _Guess(state, stick)
    sources = guess.order()[:SOURCES]
    blocks = problem.row_blocks.items
    into = blocks[state.widths[blocks][:, sources].any(axis=1)][:CONSIDERED]
    out = (
        problem.row_wise
        if len(problem.row_wise) <= CONSIDERED
        else rng.choice(problem.row_wise, CONSIDERED, replace=False)
    )
    into_change = _into_rows(state, guess, into)
    out_change, parts = _out_of_rows(state, guess, out)
    items, change = np.concatenate([into, out]), np.concatenate([into_change, out_change])
    items, change = items[np.isfinite(change)], change[np.isfinite(change)]
    if not len(items):
        return None
    item = int(items[np.argsort(change, kind="stable")[min(int(rng.exponential(LUCK)), len(items) - 1)]])
    widths = state.widths.copy()
    if item in into:
        there = problem.with_rows(np.append(problem.row_wise, item))
        widths[item] = 0
    else:
        there = problem.with_rows(problem.row_wise[problem.row_wise != item])
        widths[item] = parts[item]
    return None if there is None else _completed(there, widths)


def _completed(problem: Problem, widths: Ints) -> State | None:
    """The plan, with what no device has room for put elsewhere; None where that cannot be, or would move too much."""
    state = resumed(problem, widths)
    return state if state is not None and within_budget(problem, state.widths) else None


def _into_rows(state: State, guess: _Guess, items: Ints) -> Floats:
    """What the yardstick is guessed to change by where each of these items is split row-wise: (C,)."""
    load, dims = _blocks(state, guess, items)
    problem, held = state.problem, state.widths[items]
    shards = problem.numbers(items[:, None], held)
    problem.price(shards.ravel())
    leaves = np.einsum("cdk,dk->cd", problem.vectors[shards], guess.slope)
    columns = problem.dims[shards]
    return _changed(guess, load - leaves - guess.own_ms * columns, dims - columns)


def _out_of_rows(state: State, guess: _Guess, items: Ints) -> tuple[Floats, dict[int, Ints]]:
    """The same where each of these is cut column-wise instead, evenly over the least loaded devices: (C,); and into what units on
    which devices (D,), of every item."""
    problem = state.problem
    load, dims = _blocks(state, guess, items)
    ease = np.argsort(guess.load, kind="stable")
    best, parts = np.full(len(items), np.inf), {}
    for index, item in enumerate(items.tolist()):
        count = -(-int(problem.widest[item]) // int(problem.cap[item]))
        most = min(int(problem.most[item]), int(problem.widest[item] // problem.least[item]), problem.devices)
        while count <= most:
            units = np.zeros(problem.devices, dtype=np.int64)
            units[ease[:count]] = problem.widest[item] // count
            units[ease[: problem.widest[item] % count]] += 1
            shards = problem.numbers(np.full(problem.devices, item), units)
            problem.price(shards)
            columns = problem.dims[shards]
            arrives = np.einsum("dk,dk->d", problem.vectors[shards], guess.slope) + guess.own_ms * columns
            change = float(_changed(guess, (arrives - load[index])[None], (columns - dims[index])[None])[0])
            if change < best[index]:
                best[index], parts[item] = change, units
            count *= 2
    return best, parts


def _blocks(state: State, guess: _Guess, items: Ints) -> tuple[Floats, Ints]:
    """Ms (C, D) and columns (C, 1) that the blocks of these items are on each device."""
    blocks = state.problem.row_blocks
    places = blocks.places(items)
    load = blocks.vectors[places, 0] @ guess.slope.T
    load[:, -1] = blocks.vectors[places, 1] @ guess.slope[-1]
    dims = blocks.dims[places][:, None]
    return load + guess.own_ms * dims, dims


def _changed(guess: _Guess, load: Floats, dims: Ints) -> Floats:
    """What the yardstick changes by where all devices get so many ms and columns more: two (C, D) -> (C,)."""
    level = guess.level
    change: Floats = level.soft(np.stack([(guess.load + load).T, (guess.dims + dims).T]), np.zeros(1, dtype=np.int64))
    change -= level.counts[0].sum()
    return change
