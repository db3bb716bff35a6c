"""The greedy heuristics that people use without a cost model: one greedy, a key each.

Whole tables are placed, largest key first, on the device with the smallest sum of keys that has room. What finds no room is
cut in halves, and all is placed anew: where memory is tight, a heuristic that never cuts has no plan at all. The keys of
size, dim, lookup and size-lookup are those of the original NeuroShard, which puts what fits nowhere on the last device. Its
random picks any device; ours is this greedy with random keys.
"""

from collections.abc import Callable, Sequence

import numpy as np

from neuroshard.core.errors import Infeasible
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.infeasible.feasibility import misfit
from neuroshard.search.problem.column_shards import Placement
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.lockstep import place_by_load
from neuroshard.search.proposers.splits import split, split_oversized

Attempt = State | str  # a plan, or why there is none
Key = Callable[[Problem, Ints, np.random.Generator], Floats]


def _random(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return rng.random(len(shards))


def _size(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return np.asarray(problem.nbytes[shards], dtype=np.float64)


def _dim(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    return np.asarray(problem.columns[shards], dtype=np.float64)


def _lookup(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    lookups = np.array([sum(table.dim * table.pooling_factor for table in tables) for tables in problem.tables])
    group = problem.group[shards]
    keys: Floats = lookups[group] * problem.units[shards] / problem.all_units[group]
    return keys


def _size_lookup(problem: Problem, shards: Ints, rng: np.random.Generator) -> Floats:
    rows = np.array([sum(table.rows for table in tables) for tables in problem.tables])
    keys: Floats = _lookup(problem, shards, rng) * np.log10(rows[problem.group[shards]])
    return keys


KEYS: dict[str, Key] = {"random": _random, "size": _size, "dim": _dim, "lookup": _lookup, "size-lookup": _size_lookup}


def best_baseline(problem: Problem, seed: int) -> State | None:
    """The cheapest plan of all heuristics; None if none has one."""
    plans = [one for one in baselines(problem, seed).values() if isinstance(one, State)]
    return min(plans, key=lambda state: state.cost, default=None)


def baseline(problem: Problem, name: str, rng: np.random.Generator) -> Placement:
    """The placement of one heuristic. Raises Infeasible that says which shard found no room though cut as far as allowed."""
    shards = split_oversized(problem, problem.whole)
    while not (placement := _place(problem, shards, [KEYS[name](problem, shards, rng)])[0]).fits:
        cut = split(problem, placement.shards, np.flatnonzero(placement.devices < 0))
        # a cut only adds bytes, since each shard keeps the optimizer's state of every row: above all memory no cut helps
        if cut is None or problem.nbytes[cut].sum() > sum(problem.memory.tolist()):
            raise Infeasible(f"{name} cuts only what finds no room, and still {misfit(problem, placement)}")
        shards = cut
    return placement


def baselines(problem: Problem, seed: int) -> dict[str, Attempt]:
    """The plan of each heuristic, or why there is none; those that need no cuts in lockstep."""
    shards, found = split_oversized(problem, problem.whole), dict[str, Placement | str]()
    keys = [key(problem, shards, np.random.default_rng(seed)) for key in KEYS.values()]
    for name, placement in zip(KEYS, _place(problem, shards, keys), strict=True):
        try:
            found[name] = placement if placement.fits else baseline(problem, name, np.random.default_rng(seed))
        except Infeasible as error:
            found[name] = str(error)
    placed = [problem.widths(one) for one in found.values() if isinstance(one, Placement)]
    plans = iter(State.each(problem, placed) if placed else [])
    return {name: one if isinstance(one, str) else next(plans) for name, one in found.items()}


def _place(problem: Problem, shards: Ints, keys: Sequence[Floats]) -> list[Placement]:
    """The shards on the devices by each of the keys, largest first; -1 where one found no room."""
    orders = np.stack([np.lexsort((shards, -problem.nbytes[shards], -key)) for key in keys])
    rows = len(shards) * np.arange(len(keys))[:, None]
    placed = place_by_load(problem, np.tile(shards, len(keys)), np.concatenate(keys), rows + orders)
    pairs = zip(orders, placed.devices, strict=True)
    return [problem.held(Placement(shards[order], devices[0])) for order, devices in pairs]
