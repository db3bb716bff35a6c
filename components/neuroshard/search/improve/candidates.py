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
    """The best move of each shard: whole, half, or the part that levels the two devices."""
    problem, of, held = near.problem, near.of, near.held[:, None]
    own_ms, unit = near.soft.objective.own_ms, near.unit_columns[:, None]
    unit_ms = (near.give_receiver_ms + near.give_source_ms[:, None]) / held + 2 * own_ms * unit
    level = (near.source_ms[:, None] - near.receiver_ms)[of] / np.maximum(unit_ms, 1e-30)
    some = np.broadcast_arrays(held, level, 0.5 * held)[: 3 if problem.tuning.partial_moves else 1]
    parts = np.maximum(np.stack(some, axis=1), 1.0)
    np.minimum(parts, held[:, None], out=parts)
    units = parts.astype(np.int64)  # (N, P, R)

    column = np.broadcast_to(np.arange(level.shape[1]), level.shape)
    given = near.given(units, column)
    change = near.change(column, given.source_ms, given.receiver_ms, given.columns)
    if near.soft.objective.byte_ms:
        change += near.soft.objective.byte_ms * (given.more_bytes - given.less_bytes)
    change[~given.fits | (given.more_bytes > near.receiver_free[of][:, None])] = np.inf
    rows, part, receiver = near.best(change)
    none = np.full(len(rows), -1)
    return near.moves(rows, units[rows, part, receiver], receiver, none, np.zeros_like(none))
