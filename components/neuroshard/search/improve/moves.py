"""All steps away from a device, ranked by a linear guess: the most promising of many plans at once."""

import numpy as np

from neuroshard.costmodel.protocol import Ints
from neuroshard.search.improve.steps import Steps
from neuroshard.search.improve.swaps import swaps
from neuroshard.search.improve.view import View
from neuroshard.search.problem.plans import Level, Plans

RECEIVERS = 24  # devices that are tried at a step where none are named, the least loaded ones


def promising(plans: Plans, level: Level, plan: Ints, source: Ints, rng: np.random.Generator) -> Steps:
    """`towards` the least loaded devices."""
    devices = plans.problem.devices
    receivers = (source[:, None] + np.arange(1, devices)) % devices
    if devices - 1 > RECEIVERS:
        least = np.argpartition(level.load[plan[:, None], receivers], RECEIVERS, axis=1)[:, :RECEIVERS]
        receivers = np.take_along_axis(receivers, least, axis=1)
    return towards(plans, level, plan, source, receivers, rng)


def towards(plans: Plans, level: Level, plan: Ints, source: Ints, receivers: Ints, rng: np.random.Generator) -> Steps:
    """Of each table of each job (J,) the move and the swap that fit and have the best linear guess, to some devices (J, R)."""
    view = View(plans, level, plan, source, receivers, rng)
    return moves(view) + swaps(view)


def moves(view: View) -> Steps:
    """Moves of whole shards, and of those parts of them which level the two devices in ms or in columns."""
    problem, job, mine = view.problem, view.job, view.mine[:, None]
    own, unit = view.level.stick.own_ms, view.unit[:, None]
    unit_ms = (view.whole[:, :-1] + view.leaves[:, None]) / mine + 2 * own * unit
    level = (view.load[:, None] - view.load_there)[job] / np.maximum(unit_ms, 1e-30)
    even = (view.dims[:, None] - view.dims_there)[job] / (2 * unit)
    parts = np.empty((len(job), 6, level.shape[1]))
    parts[:, 0], parts[:, 1], parts[:, 2], parts[:, 3], parts[:, 5] = mine, level, level + 1, even, 0.5 * mine
    np.minimum(level, even, out=parts[:, 4])
    np.maximum(parts, 1.0, out=parts)
    np.minimum(parts, mine[:, None], out=parts)
    out = parts.astype(np.int64)  # (G, 6, R)

    there, slot = view.there[:, None], view.slot[:, None, None]
    kept, joined = mine[:, None] - out, there + out
    fits = view.fit(kept, joined, there)
    np.minimum(joined, view.cap[:, None, None], out=joined)
    fits &= view.bytes(slot + joined) <= view.free_there[job][:, None] + view.bytes(slot + there)
    if not problem.free_to_go:
        fits &= problem.allowed[view.item[:, None], view.receivers[job]][:, None]
    moved = unit[:, None] * out
    moved_ms = own * moved
    load, dims = amounts = np.empty((2, 2, *out.shape))
    np.subtract((view.load[job] - view.leaves)[:, None, None], moved_ms, out=load[0])
    load[0] += view.flat.take(view.begin[:, -1, None, None] + kept)
    np.add(view.load_there[job][:, None], moved_ms, out=load[1])
    load[1] += view.joining(view.begin[:, None, :-1], there, joined)
    np.subtract(view.dims[job][:, None, None], moved, out=dims[0])
    np.add(view.dims_there[job][:, None], moved, out=dims[1])
    change = view.change(amounts, np.arange(out.shape[2]))
    change[~fits] = np.inf
    rows, best = view.best(change)
    part, column = np.divmod(best, out.shape[2])
    none = np.full(len(rows), -1)
    return view.steps(rows, out[rows, part, column], column, none, np.zeros_like(none))
