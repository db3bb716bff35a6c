"""Column splits in halves, as the published search and the heuristics make them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Ints
from neuroshard.search.problem.problem import Problem


def halves(problem: Problem, shards: Ints) -> tuple[Ints, Ints]:
    """Each shard cut in two as evenly as steps of 4 columns allow: 128 -> 64 + 64, 12 -> 8 + 4, 4 -> 4 + none."""
    groups, left = problem.group[shards], (problem.units[shards] + 1) // 2
    return problem.shards_of(groups, left), problem.shards_of(groups, problem.units[shards] - left)


def split(problem: Problem, shards: Ints, wanted: Ints) -> Ints | None:
    """The shards, with those at the places `wanted` halved as far as constraints allow; None if they allow no cut."""
    group = problem.group[shards[wanted]]
    count = np.bincount(problem.group[shards], minlength=len(problem.whole))
    earlier = np.array([(group[:place] == one).sum() for place, one in enumerate(group)], dtype=np.int64)
    wide = problem.units[shards[wanted]] >= 2 * problem.min_units[group]
    can = wide & (count[group] + earlier < problem.max_shards[group])
    if not can.any():
        return None
    cut = wanted[can]
    stays = np.ones(len(shards), dtype=bool)
    stays[cut] = False
    return np.concatenate([shards[stays], *halves(problem, shards[cut])])


def split_oversized(problem: Problem, shards: Ints) -> Ints:
    """Halve what is larger than the largest device, or too wide, until nothing is, or no further cut is allowed."""
    return _split_while(problem, split_wide(problem, shards), lambda some: problem.nbytes[some] > problem.memory.max())


def split_wide(problem: Problem, shards: Ints) -> Ints:
    """Halve what is wider than the operator holds until nothing is, or no further cut is allowed."""
    return _split_while(problem, shards, lambda some: problem.units[some] > problem.operator_units[problem.group[some]])


def _split_while(problem: Problem, shards: Ints, too_large: Callable[[Ints], NDArray[np.bool_]]) -> Ints:
    while (large := np.flatnonzero(too_large(shards))).size:
        cut = split(problem, shards, large)
        if cut is None:
            break
        shards = cut
    return shards
