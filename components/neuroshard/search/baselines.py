"""The greedy heuristics that people use without a cost model: one greedy, a key each.

Whole tables are placed, largest key first, on the device with the smallest sum of keys that has room. What finds no room is
cut in halves, and all is placed anew: where memory is tight, a heuristic that never cuts has no plan at all. The keys of
size, dim, lookup and size-lookup are those of the original NeuroShard, which puts what fits nowhere on the last device; its
random takes any device, here random keys balance by chance.
"""

from collections.abc import Callable

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.feasibility import misfit
from neuroshard.search.greedy import place
from neuroshard.search.problem import Placement, Problem
from neuroshard.search.splits import split, split_oversized

Key = Callable[[Problem, Ints, np.random.Generator], Floats]


def _random(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return rng.random(len(shards))


def _size(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return np.asarray(problem.nbytes[shards], dtype=np.float64)


def _dim(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return np.asarray(problem.dims[shards], dtype=np.float64)


def _lookup(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    lookups = np.array([sum(table.dim * table.pooling_factor for table in one) for one in problem.members])
    keys: Floats = lookups[problem.item[shards]] * problem.units[shards] / problem.widest[problem.item[shards]]
    return keys


def _size_lookup(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    rows = np.array([sum(table.rows for table in one) for one in problem.members])
    keys: Floats = _lookup(problem, shards, rng) * np.log10(rows[problem.item[shards]])
    return keys


KEYS: dict[str, Key] = {
    "random": _random,
    "size": _size,
    "dim": _dim,
    "lookup": _lookup,
    "size-lookup": _size_lookup,
}


def baseline(problem: Problem, name: str, rng: np.random.Generator) -> Placement:
    """The placement of one heuristic. Raises Infeasible that says what found no room though it was cut as far as allowed."""
    shards = split_oversized(problem, problem.whole)
    while not (placement := _place(problem, shards, KEYS[name](problem, shards, rng))).fits:
        cut = split(problem, placement.shards, np.flatnonzero(placement.devices < 0))
        # a cut only adds bytes, for each part keeps the optimizer's state of a row: past all memory no further one can help
        if cut is None or problem.nbytes[cut].sum() > sum(problem.memory.tolist()):
            raise Infeasible(f"{name} cuts only what finds no room, and still {misfit(problem, placement)}")
        shards = cut
    return placement


def _place(problem: Problem, shards: Ints, keys: Floats) -> Placement:
    """The shards on the devices, largest key first; -1 where one found no room."""
    order = np.lexsort((shards, -problem.nbytes[shards], -keys))
    shards = shards[order]
    placed = place(
        vectors=keys[order][:, None],
        orders=np.arange(len(shards))[None],
        dims=problem.dims[shards],
        nbytes=problem.nbytes[shards],
        caps=np.array([[np.inf]]),
        memory=problem.memory,
        weigh=lambda sums: sums[..., 0],
        allowed=problem.allowed[problem.item[shards]],
    )
    return Placement(shards, placed.devices[0, 0])
