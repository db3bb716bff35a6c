"""Descend: move by move to a more even plan, until no move improves the objective.

Moves start from the slowest device and from the widest: where one shard that cannot be cut outweighs all else, no move helps the
slowest, and only columns can be evened out.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.improve.moves import Moves, Priced, cells, changes, price
from neuroshard.search.improve.neighborhood import Neighborhood
from neuroshard.search.improve.swaps import swaps
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.objective import Objective, SoftMaximum
from neuroshard.search.problem.plans import Plans

Cells = tuple[Ints, Ints, Ints]  # groups, devices, and the units that were there before
Changed = dict[int, list[Cells]]  # by plan


def descend(
    plans: Plans, objective: Objective, rng: np.random.Generator, current: CurrentPlacement | None = None
) -> Iterator[Changed]:
    """Change the plans in place, a round of moves at a time, until no priced move improves them; yields what changed.

    Every move improves the objective, not every one the cost. With a `current` placement each keeps its move budget.
    """
    all_plans = moving = np.full(len(plans), True)
    while moving.any():
        changed = step(plans, objective, rng, moving, current, to_all=all_plans)
        moving = np.isin(np.arange(len(plans)), list(changed))
        if changed:
            yield changed


def step(
    plans: Plans,
    objective: Objective,
    rng: np.random.Generator,
    moving: NDArray[np.bool_],
    current: CurrentPlacement | None,
    to_all: NDArray[np.bool_],
) -> Changed:
    """A round of moves of the plans that are `moving` (B,), as in `descend`; nothing of those that no move improves.

    Moves to others than the least loaded devices are tried where none to these fits, and of plans `to_all` (B,) also where none
    to these gains.
    """
    devices, changed = plans.problem.devices, Changed()
    if devices == 1:
        return changed
    soft, trying = SoftMaximum(objective, plans.compute, plans.dims), moving.copy()
    for to_least_loaded in (True, False) if devices - 1 > plans.problem.tuning.receivers else (True,):
        plan, source = np.nonzero(soft.worst_devices & trying[:, None])
        moves = candidates(plans, soft, plan, source, rng, to_least_loaded)
        changed |= _move(plans, soft, moves, current)
        trying[list(changed)] = False
        trying[moves.plan[~to_all[moves.plan]]] = False
        if not trying.any():
            break
    return changed


def _move(plans: Plans, soft: SoftMaximum, moves: Moves, current: CurrentPlacement | None) -> Changed:
    """Make those of the moves that gain enough by the cost model, the best first."""
    if not len(moves):
        return {}
    priced = price(plans, soft, moves)
    chosen = _chosen(plans, soft, moves, priced.change, current)
    return _make(plans, moves, priced, np.array(chosen)) if chosen else {}


def _chosen(
    plans: Plans, soft: SoftMaximum, moves: Moves, change: Floats, current: CurrentPlacement | None
) -> list[int]:
    """The moves that gain most, no two of one plan on one device or of one table group, that keep the move budget."""
    budget = current if current is not None and current.budget_bytes is not None else None
    gains = np.flatnonzero(change < -plans.problem.tuning.min_gain * soft.slowest[moves.plan])
    gains = gains[np.argsort(change[gains], kind="stable")]
    # a number for each device and each group of all plans; a move that takes nothing names its source twice
    some = moves[gains]
    plan, give, take = some.plan, some.give, some.take
    count, groups = plans.dims.size, len(plans.problem.first)
    source, receiver = (device * len(plans) + plan for device in (some.source, some.receiver))
    give = count + plan * groups + give
    touched = np.array([source, receiver, give, np.where(take < 0, source, count + plan * groups + take)]).T.tolist()
    chosen: list[int] = []
    used: set[int] = set()
    moved: set[int] = set()
    for index, of_plan, touches in zip(gains.tolist(), plan.tolist(), touched, strict=True):
        if not used.isdisjoint(touches):
            continue
        if budget is not None:
            if of_plan in moved or not _affordable(budget, plans, of_plan, moves, index):
                continue
            moved.add(of_plan)  # one move a round, since the budget is checked against the plan before it
        chosen.append(index)
        used.update(touches)
    return chosen


def _affordable(budget: CurrentPlacement, plans: Plans, plan: int, moves: Moves, index: int) -> bool:
    widths, (groups, devices, units) = plans.widths[plan], changes(moves, index)
    rows = {group: widths[group].copy() for group in groups.tolist()}
    for group, device, more in zip(groups.tolist(), devices.tolist(), units.tolist(), strict=True):
        rows[group][device] += more
    return budget.affords(plans.problems[plan], widths, list(rows), np.array(list(rows.values())))


def _make(plans: Plans, moves: Moves, priced: Priced, chosen: Ints) -> Changed:
    """Change the plans by the chosen moves."""
    made, changed, problem = moves[chosen], Changed(), plans.problem
    plan, (groups, devices, units) = made.plan, cells(made)
    before = plans.widths[plan, groups, devices]
    # if a cell occurs twice, as that of no group taken does, the last value counts
    after = before + units
    plans.widths[plan, groups, devices] = after
    plans.held[plan, devices, groups] = after > 0
    slots = problem.slots[groups] + before
    more_bytes = problem.slot_bytes.take(slots + units) - problem.slot_bytes.take(slots)
    plans.free[plan, devices[:2]] -= more_bytes[:2] + more_bytes[2:]
    plans.shards[plan, groups] = np.count_nonzero(plans.widths[plan, groups], axis=-1)
    for place, one in enumerate(plan.tolist()):
        changed.setdefault(one, []).append((groups[:, place], devices[:, place], before[:, place]))
    both = (a[:, chosen].reshape(2 * len(chosen), *a.shape[2:]) for a in (priced.sums, priced.dims, priced.compute))
    plans.put(np.concatenate([plan, plan]), devices[2:].ravel(), *both)
    return changed


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
