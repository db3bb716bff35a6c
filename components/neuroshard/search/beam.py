"""NeuroShard's search: an outer beam over column splits, an inner greedy under a grid of caps on each device's columns.

A state is a multiset of shards. Its children each have one more split, of one of the N costliest or N largest shards. A
state costs what the best of its greedy placements costs: costliest shard first, on the cheapest device that has room, under
caps from 1.0 to 1.5 x the mean columns a device. K states are kept at each of L levels. Paper: N=10, K=3, L=10, M=11 caps.
"""

from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.protocol import Ints, exchange_costs
from neuroshard.progress import progress
from neuroshard.search.greedy import place
from neuroshard.search.problem import Placement, Problem
from neuroshard.search.splits import halves

CHUNK_BYTES = 256 * 2**20  # of running sums: all states x caps x devices at once, unless that is more


@dataclass(frozen=True)
class Effort:
    """How wide and deep to search: the paper's N, K, L and M, and how many steps of improvement follow at most."""

    candidates: int = 10
    beam: int = 3
    depth: int = 10
    grid: int = 11
    improve_steps: int = 0


@dataclass(frozen=True)
class Rules:
    """What the published search does not do. `paper` has none of it, `neuroshard` all."""

    uneven: bool  # split 12 columns into 8 + 4 as well; published: only halves that are multiples of 4
    uncapped: bool  # a last cap of infinity, for tables wider than any cap, and for tight memory
    repair: bool  # order states that do not fit by how far they are from it; published: all are equally bad
    distinct: bool  # visit a state once, and cut no two equal shards; published: [a, b] and [b, a] are two


PAPER = Rules(uneven=False, uncapped=False, repair=False, distinct=False)
NEUROSHARD = Rules(uneven=True, uncapped=True, repair=True, distinct=True)


@dataclass(frozen=True)
class State:
    """A multiset of shards and its best greedy placement; `cost_ms` is infinite where none fits."""

    placement: Placement
    cost_ms: float
    excess_bytes: float  # how far from fitting, where it does not


def beam_search(problem: Problem, starts: list[Ints], effort: Effort, rules: Rules) -> State:
    """The best state met. Children of the kept states replace them at every level, as published."""

    def rank(state: State) -> tuple[float, float]:
        return state.cost_ms, state.excess_bytes if rules.repair else 0.0

    seen: set[bytes] = set()
    fresh = _unseen(problem, starts, seen, rules)
    states = sorted(evaluate(problem, fresh, effort.grid, rules), key=rank)[: effort.beam]
    best = states[0]
    with progress("search splits", total=effort.depth, unit="levels") as bar:
        for _ in range(effort.depth):
            children = [c for s in states for c in _children(problem, s.placement.shards, effort.candidates, rules)]
            fresh = _unseen(problem, children, seen, rules)
            if not fresh:
                break
            states = sorted(evaluate(problem, fresh, effort.grid, rules), key=rank)[: effort.beam]
            best = min(best, states[0], key=rank)
            bar.advance(1, f"best {best.cost_ms:.3f} ms" if best.placement.fits else "nothing fits yet")
    return best


def _unseen(problem: Problem, multisets: list[Ints], seen: set[bytes], rules: Rules) -> list[Ints]:
    """Each multiset costliest shard first; those met before are left out."""
    if multisets:
        problem.price(np.concatenate(multisets))
    fresh = []
    for shards in multisets:
        ordered = shards[np.lexsort((shards, -problem.nbytes[shards], -problem.alone_ms[shards]))]
        key = ordered.tobytes()
        if key not in seen or not rules.distinct:
            seen.add(key)
            fresh.append(ordered)
    return fresh


def _children(problem: Problem, shards: Ints, candidates: int, rules: Rules) -> list[Ints]:
    """One split more: of each of the costliest and of the largest shards. `shards` are in order of cost."""
    units = problem.units[shards]
    eligible = np.arange(len(shards))
    if rules.distinct:
        eligible = eligible[(units > 1) & (np.diff(shards, prepend=-1) != 0)]
    largest = eligible[np.argsort(-problem.nbytes[shards[eligible]], kind="stable")]
    chosen = np.union1d(eligible[:candidates], largest[:candidates])
    chosen = chosen[units[chosen] > 1 if rules.uneven else units[chosen] % 2 == 0]
    left, right = halves(problem, shards[chosen])
    return [np.append(np.delete(shards, at), pair) for at, *pair in zip(chosen, left, right, strict=True)]


def evaluate(problem: Problem, multisets: list[Ints], grid: int, rules: Rules) -> list[State]:
    """The best greedy placement of each multiset, all multisets and caps in lockstep. `multisets` are in order of cost."""
    rows = grid + rules.uncapped
    row_bytes = 8 * problem.devices * problem.vectors.shape[1]
    at_once = max(1, CHUNK_BYTES // (rows * row_bytes))
    return [
        state
        for begin in range(0, len(multisets), at_once)
        for state in _evaluate(problem, multisets[begin : begin + at_once], grid, rules)
    ]


def _evaluate(problem: Problem, multisets: list[Ints], grid: int, rules: Rules) -> list[State]:
    longest = max(map(len, multisets))
    orders = np.stack([np.pad(shards, (0, longest - len(shards))) for shards in multisets])
    mean_dims = problem.dims[problem.whole].sum() / problem.devices
    caps = mean_dims * np.linspace(1.0, 1.5, grid)
    if rules.uncapped:
        caps = np.append(caps, np.inf)
    placed = place(
        problem.vectors[orders],
        problem.dims[orders],
        problem.nbytes[orders],
        np.broadcast_to(caps, (len(orders), len(caps))),
        problem.memory,
        problem.model.compute_ms,
    )
    forward, backward = exchange_costs(problem.model, placed.load, placed.dims)
    worst = (placed.load + forward + backward).max(axis=-1)
    costs = np.where(placed.fits, worst, np.inf)
    best = np.where(np.isfinite(costs).any(axis=-1), costs.argmin(axis=-1), len(caps) - 1)
    return [
        State(
            Placement(shards, placed.devices[row, cap, : len(shards)]),
            float(costs[row, cap]),
            float(placed.excess_bytes[row, cap]),
        )
        for row, (shards, cap) in enumerate(zip(multisets, best, strict=True))
    ]
