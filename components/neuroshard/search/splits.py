"""Column splits: in halves, until every shard fits some device, and until all shards together fit all devices."""

import heapq

import numpy as np

from neuroshard.costmodel.protocol import Ints
from neuroshard.search.problem import Placement, Problem


def halves(problem: Problem, shards: Ints) -> tuple[Ints, Ints]:
    """Each shard cut in two as evenly as steps of 4 columns allow: 128 -> 64 + 64, 12 -> 8 + 4, 4 -> 4 + none."""
    left = (problem.units[shards] + 1) // 2
    return problem.cut(shards, left), problem.cut(shards, problem.units[shards] - left)


def split_oversized(problem: Problem, shards: Ints) -> Ints:
    """Halve what is larger than the largest device until nothing is. feasibility.py has seen that this ends."""
    while (large := problem.nbytes[shards] > problem.memory.max()).any():
        shards = np.concatenate([shards[~large], *halves(problem, shards[large])])
    return shards


def pack(problem: Problem) -> Placement:
    """All tables on the devices by memory alone, split where they must be; tried by halving, then by filling.

    Filling fails only where every device has less room left than one narrowest shard of the table that is left over.
    The result may lack room for some shards: then it is the better of the two tries, by bytes left over.
    """
    halving = _pack(problem, problem.nbytes, fill=False)
    if halving.fits:
        return halving
    filling = _pack(
        problem, problem.nbytes[problem.cut(np.arange(len(problem.units)), np.ones_like(problem.units))], fill=True
    )
    return min(filling, halving, key=lambda placement: problem.nbytes[placement.shards[placement.devices < 0]].sum())


def _pack(problem: Problem, priority: Ints, fill: bool) -> Placement:
    """The first shard by priority goes on the device with the most room, or to fill it on the one with the least.

    A shard that fits nowhere is cut, in halves or so that it fills the roomiest device, and its pieces queue again.
    """
    free = problem.memory.copy()
    queue = [(-int(priority[shard]), int(shard)) for shard in problem.whole]
    heapq.heapify(queue)
    placed: list[tuple[int, int]] = []
    while queue:
        _, shard = heapq.heappop(queue)
        room = free >= problem.nbytes[shard]
        if room.any():
            device = int(np.where(room, free, np.iinfo(np.int64).max).argmin() if fill else free.argmax())
            free[device] -= problem.nbytes[shard]
            placed.append((shard, device))
            continue
        units = int(problem.units[shard])
        narrowest = shard - units + 1
        fitting = int(np.searchsorted(problem.nbytes[narrowest:shard], free.max(), side="right"))
        left = fitting if fill else units // 2
        if not left:
            placed.append((shard, -1))
            continue
        for piece in (narrowest + left - 1, narrowest + units - left - 1):
            heapq.heappush(queue, (-int(priority[piece]), piece))
    shards, devices = np.array(placed, dtype=np.int64).T
    return Placement(shards, devices)
