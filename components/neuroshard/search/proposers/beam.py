"""NeuroShard's search as published: an outer beam over column splits, an inner greedy under a grid of caps on columns.

A state is a list of shards. Its children each have one more split in halves, of one of the N costliest or N largest shards. A
state costs what the best of its greedy placements costs: costliest shard first, on the cheapest device that has room, under
caps from 1.0 to 1.5 x the mean columns a device. K states are kept at each of L levels. Paper: N=10, K=3, L=10, M=11 caps.

What it does not do, and `neuroshard` does: split where half is no multiple of 4, order states that do not fit, visit a state
once. Constraints it honours: it cuts nothing further than they allow, and places nothing where it may not be.
"""

from dataclasses import dataclass

import numpy as np

from neuroshard.core.errors import UsageError
from neuroshard.costmodel.protocol import Ints
from neuroshard.search.problem.problem import Placement, Problem
from neuroshard.search.proposers.greedy import costliest_first, place_lists
from neuroshard.search.proposers.splits import halves
from neuroshard.search.watch import Watch

# of sums of vectors, which placements by nets make twice as long: all states x caps x devices at once, unless that is more
CHUNK_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Width:
    """How wide and deep the published search goes: the paper's N, K, L and M."""

    candidates: int = 10
    beam: int = 3
    depth: int = 10
    grid: int = 11

    def check(self) -> None:
        """Raise UsageError for a search of nothing."""
        for name, least in (("candidates", 1), ("beam", 1), ("depth", 0), ("grid", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")


PAPER = Width()


@dataclass(frozen=True)
class BeamState:
    """A list of shards and its best greedy placement; `cost_ms` is infinite where none fits."""

    placement: Placement
    cost_ms: float


def beam_search(problem: Problem, width: Width, watch: Watch) -> BeamState:
    """The best state met. Children of the kept states replace them at every level."""
    states = evaluate(problem, costliest_first(problem, [problem.whole]), width.grid)
    best = states[0]
    watch.note(best.cost_ms)
    for _ in range(width.depth):
        lists = [child for s in states for child in _children(problem, s.placement.shards, width.candidates)]
        if not lists or watch.expired:
            break
        states = sorted(evaluate(problem, costliest_first(problem, lists), width.grid), key=_cost)[: width.beam]
        best = min(best, states[0], key=_cost)
        watch.note(best.cost_ms, steps=1)
        watch.advance()
    return best


def _cost(state: BeamState) -> float:
    return state.cost_ms


def _children(problem: Problem, shards: Ints, candidates: int) -> list[Ints]:
    """One split more: of each of the costliest and of the largest shards. `shards` are in order of cost."""
    wanted = np.arange(len(shards)) < candidates
    wanted[np.argsort(-problem.nbytes[shards], kind="stable")[:candidates]] = True
    chosen = np.flatnonzero(wanted)  # np.union1d would import for 10 ms
    units, item = problem.units[shards[chosen]], problem.item[shards[chosen]]
    count = np.bincount(problem.item[shards], minlength=len(problem.whole))
    chosen = chosen[(units % 2 == 0) & (units // 2 >= problem.least[item]) & (count[item] < problem.most[item])]
    left, right = halves(problem, shards[chosen])
    return [np.append(np.delete(shards, at), pair) for at, *pair in zip(chosen, left, right, strict=True)]


def evaluate(problem: Problem, lists: list[Ints], grid: int) -> list[BeamState]:
    """The best greedy placement of each list, all lists and caps in lockstep. `lists` are in order of cost."""
    row_bytes = 8 * problem.devices * problem.vectors.shape[1]
    at_once = max(1, CHUNK_BYTES // (grid * row_bytes))
    return [
        state
        for begin in range(0, len(lists), at_once)
        for state in _evaluate(problem, lists[begin : begin + at_once], grid)
    ]


def _evaluate(problem: Problem, lists: list[Ints], grid: int) -> list[BeamState]:
    placed, costs = place_lists(problem, lists, np.linspace(1.0, 1.5, grid))
    best = costs.argmin(axis=-1)
    return [
        BeamState(Placement(shards, placed.devices[row, cap, : len(shards)]), float(costs[row, cap]))
        for row, (shards, cap) in enumerate(zip(lists, best, strict=True))
    ]
