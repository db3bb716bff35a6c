"""NeuroShard's search as published: an outer beam over column splits, an inner greedy under a grid of caps on columns.

A node is a list of shards. Its children each have one more split in halves, of one of the N costliest or N largest shards. A
node costs what the best of its greedy placements costs: costliest shard first, on the cheapest device that has room, under
caps from 1.0 to 1.5 x the mean columns of a device. K nodes are kept at each of L levels. Paper: N=10, K=3, L=10, M=11 caps.

It differs from the paper in four points: it splits no shard of which half is no multiple of 4 columns, keeps nodes that do not
fit after all that do, honours constraints on cuts and devices, and begins with no shard that the operator cannot hold.
"""

from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.protocol import Ints
from neuroshard.search.problem.column_shards import Placement
from neuroshard.search.problem.problem import Problem
from neuroshard.search.proposers.lockstep import costliest_first, place_lists
from neuroshard.search.proposers.splits import halves, split_wide
from neuroshard.search.tuning import BeamWidth
from neuroshard.search.watch import Watch


@dataclass(frozen=True)
class BeamState:
    """A list of shards and its best greedy placement; `cost_ms` is infinite if none fits."""

    placement: Placement
    cost_ms: float


def beam_search(problem: Problem, width: BeamWidth, watch: Watch) -> Placement:
    """The best placement met. Children of the kept nodes replace them at every level."""
    nodes = _evaluated(problem, costliest_first(problem, [split_wide(problem, problem.whole)]), width.grid)
    best = nodes[0]
    watch.note(best.cost_ms)
    for _ in range(width.depth):
        lists = [child for node in nodes for child in _children(problem, node.placement.shards, width.candidates)]
        if not lists or watch.expired:
            break
        nodes = sorted(_evaluated(problem, costliest_first(problem, lists), width.grid), key=_cost)[: width.beam]
        best = min(best, nodes[0], key=_cost)
        watch.note(best.cost_ms, steps=1)
        watch.advance()
    return best.placement


def _cost(node: BeamState) -> float:
    return node.cost_ms


def _children(problem: Problem, shards: Ints, candidates: int) -> list[Ints]:
    """Lists with one split more, of each of the costliest and of the largest shards. `shards` are in order of cost."""
    wanted = np.arange(len(shards)) < candidates
    wanted[np.argsort(-problem.nbytes[shards], kind="stable")[:candidates]] = True
    chosen = np.flatnonzero(wanted)
    units, group = problem.units[shards[chosen]], problem.group[shards[chosen]]
    count = np.bincount(problem.group[shards], minlength=len(problem.whole))
    even = ((units % 2 == 0) | problem.in_equal_shards[group]) & (units // 2 >= problem.min_units[group])
    chosen = chosen[even & (count[group] < problem.max_shards[group])]
    left, right = halves(problem, shards[chosen])
    return [np.append(np.delete(shards, at), pair) for at, *pair in zip(chosen, left, right, strict=True)]


def _evaluated(problem: Problem, lists: list[Ints], grid: int) -> list[BeamState]:
    """The best greedy placement of each list, all lists and caps in lockstep, as far as memory goes. `lists` are ordered."""
    row_bytes = 8 * problem.devices * problem.vectors.shape[1]
    at_once = max(1, problem.tuning.lockstep_bytes // (grid * row_bytes))
    nodes = []
    for begin in range(0, len(lists), at_once):
        some = lists[begin : begin + at_once]
        placed, costs = place_lists(problem, some, np.linspace(1.0, 1.5, grid))
        for row, (shards, cap) in enumerate(zip(some, costs.argmin(axis=-1), strict=True)):
            placement = problem.held(Placement(shards, placed.devices[row, cap, : len(shards)]))
            nodes.append(BeamState(placement, float(costs[row, cap]) if placement.fits else float("inf")))
    return nodes
