"""The best moves and swaps away from a device, by a linear estimate, for many plans at once."""

import numpy as np

from neuroshard.costmodel.protocol import Ints
from neuroshard.search.improve.moves import Moves
from neuroshard.search.improve.neighborhood import Neighborhood
from neuroshard.search.improve.swaps import swaps
from neuroshard.search.problem.objective import SoftMaximum
from neuroshard.search.problem.plans import Plans


def candidates(
    plans: Plans, soft: SoftMaximum, plan: Ints, source: Ints, rng: np.random.Generator, to_least_loaded: bool = True
) -> Moves:
    """For each shard on J devices, plan (J,) and source (J,), the best move and the best swap that fit.

    They go to the least loaded devices, as many as the tuning's `receivers`, or to all others.
    """
    devices, most = plans.problem.devices, plans.problem.tuning.receivers
    receivers = (source[:, None] + np.arange(1, devices)) % devices
    if devices - 1 > most:
        order = np.argpartition(soft.load[plan[:, None], receivers], most, axis=1)
        receivers = np.take_along_axis(receivers, order[:, :most] if to_least_loaded else order[:, most:], axis=1)
    near = Neighborhood(plans, soft, plan, source, receivers, rng)
    return single_moves(near) + swaps(near) if plans.problem.tuning.swaps else single_moves(near)


def single_moves(near: Neighborhood) -> Moves:
    """The best move of each shard: whole, half, or the part that levels the two devices in ms or in columns."""
    problem, job, mine = near.problem, near.job, near.mine[:, None]
    own, unit = near.soft.objective.own_ms, near.unit[:, None]
    unit_ms = (near.whole[:, :-1] + near.leaves[:, None]) / mine + 2 * own * unit
    level = (near.load[:, None] - near.load_there)[job] / np.maximum(unit_ms, 1e-30)
    even = (near.dims[:, None] - near.dims_there)[job] / (2 * unit)
    parts = np.empty((len(job), 6 if problem.tuning.partial_moves else 1, level.shape[1]))
    for place, part in enumerate((mine, level, level + 1, even, np.minimum(level, even), 0.5 * mine)[: parts.shape[1]]):
        parts[:, place] = part
    np.maximum(parts, 1.0, out=parts)
    np.minimum(parts, mine[:, None], out=parts)
    out = parts.astype(np.int64)  # (N, P, R) units

    there, slot = near.there[:, None], near.slot[:, None, None]
    kept, joined = mine[:, None] - out, there + out
    fits = near.fit(kept, joined, there)
    np.minimum(joined, near.cap[:, None, None], out=joined)
    fits &= near.bytes(slot + joined) <= near.free_there[job][:, None] + near.bytes(slot + there)
    if not problem.any_device:
        fits &= problem.allowed[near.group[:, None], near.receivers[job]][:, None]
    moved = unit[:, None] * out
    moved_ms = own * moved
    load, dims = amounts = np.empty((2, 2, *out.shape))
    np.subtract((near.load[job] - near.leaves)[:, None, None], moved_ms, out=load[0])
    load[0] += near.flat.take(near.begin[:, -1, None, None] + kept)
    np.add(near.load_there[job][:, None], moved_ms, out=load[1])
    load[1] += near.joining(near.begin[:, None, :-1], there, joined)
    np.subtract(near.dims[job][:, None, None], moved, out=dims[0])
    np.add(near.dims_there[job][:, None], moved, out=dims[1])
    change = near.change(amounts, np.arange(out.shape[2]))
    change[~fits] = np.inf
    rows, best = near.best(change)
    part_of, column = np.divmod(best, out.shape[2])
    none = np.full(len(rows), -1)
    return near.moves(rows, out[rows, part_of, column], column, none, np.zeros_like(none))
