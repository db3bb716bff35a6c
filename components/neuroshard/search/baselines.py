"""The greedy heuristics that people use without a cost model: one greedy, a key each.

Whole tables are placed, largest key first, on the device with the smallest sum of keys that has room. Only a table larger
than the largest device is split, in halves until it fits one. Keys of size, dim, lookup and size-lookup are those of the
NeuroShard paper; its random takes any device, here random keys balance by chance, and memory is always kept.
"""

from collections.abc import Callable

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.feasibility import misfit
from neuroshard.search.greedy import place
from neuroshard.search.problem import Placement, Problem
from neuroshard.search.splits import split_oversized

Key = Callable[[Problem, Ints, np.random.Generator], Floats]


def _random(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return rng.random(len(shards))


def _size(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return np.asarray(problem.nbytes[shards], dtype=np.float64)


def _dim(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return np.asarray(problem.dims[shards], dtype=np.float64)


def _lookup(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    pooling_factors = np.array([table.pooling_factor for table in problem.task.tables])
    keys: Floats = problem.dims[shards] * pooling_factors[problem.table[shards]]
    return keys


def _size_lookup(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    rows = np.array([table.rows for table in problem.task.tables])
    keys: Floats = _lookup(problem, shards, rng) * np.log10(rows[problem.table[shards]])
    return keys


KEYS: dict[str, Key] = {
    "random": _random,
    "size": _size,
    "dim": _dim,
    "lookup": _lookup,
    "size-lookup": _size_lookup,
}


def baseline(problem: Problem, name: str, rng: np.random.Generator) -> Placement:
    """The placement of one heuristic. Raises Infeasible that says what found no room."""
    shards = split_oversized(problem, problem.whole)
    keys = KEYS[name](problem, shards, rng)
    order = np.lexsort((shards, -problem.nbytes[shards], -keys))
    shards = shards[order]
    placed = place(
        vectors=keys[order][None, :, None],
        dims=problem.dims[shards][None],
        nbytes=problem.nbytes[shards][None],
        caps=np.array([[np.inf]]),
        memory=problem.memory,
        weigh=lambda sums: sums[..., 0],
    )
    placement = Placement(shards, placed.devices[0, 0])
    if not placement.fits:
        raise Infeasible(f"{name} places whole tables, and {misfit(problem, placement)}")
    return placement
