"""First plans where memory is nearly full: tables packed by bytes and by ms, in as few shards as may be.

Each cut repeats the optimizer state of rows, so what is left of memory pays for a few cuts of large tables only. A greedy by
cost spends it on any table, and one by bytes does not see what devices take. Here every device has room for bytes and for ms, a
table is cut only to what a device has room for, and of devices that take as much the one is chosen whose rooms are then most
even: tables of many bytes go beside tables of many ms. Several packings are made in lockstep.
"""

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.column_shards import Widths
from neuroshard.search.problem.filling import Shares
from neuroshard.search.problem.problem import Problem


def packings(problem: Problem, shares: Shares) -> list[Widths]:
    """Units of every group on every device, (G, D) each: for each of some orders of the groups and each of some levels of ms that
    devices should keep below. Those that find no room for a group are left out."""
    tuning, groups = problem.tuning, np.flatnonzero(problem.whole)
    keys = [np.maximum(shares.ms, weight * shares.nbytes)[groups] for weight in tuning.packed_byte_weights]
    orders = np.stack([groups[np.argsort(-key, kind="stable")] for key in keys])
    levels = np.array(tuning.packed_levels)
    rows = _Packings(problem, shares, np.repeat(orders, len(levels), axis=0), np.tile(levels, len(orders)))
    while rows.step():
        pass
    return rows.widths


class _Packings:
    """R packings in the making; of each the `orders` (R, S) of groups, how many of these are placed (`at`), the units `left` of
    the next, what devices have `held` (R, G, D), and their room of bytes (`free`) and of ms, in mean loads: (R, D).

    Packings leave when they are done, then their `widths` are kept, or have no room for a group.
    """

    def __init__(self, problem: Problem, shares: Shares, orders: Ints, levels: Floats) -> None:
        self.problem, self.orders = problem, orders
        self.held = np.zeros((len(orders), len(problem.whole), problem.devices), dtype=np.int64)
        self.free = np.tile(problem.memory, (len(orders), 1))
        elsewhere = 1 - shares.ms.sum() / problem.devices  # ms of what is spread
        self.room = np.repeat((levels - elsewhere)[:, None], problem.devices, axis=1)
        self.ms = np.maximum(shares.ms / problem.all_units, 1e-30)  # of a unit
        self.unit, self.fixed = np.maximum(problem.unit_bytes, 1), problem.shard_bytes
        self.mean_bytes = max(float(problem.nbytes[problem.whole].sum()) / problem.devices, 1.0)
        self.at = np.zeros(len(orders), dtype=np.int64)
        self.left = problem.all_units[orders[:, 0]]
        self.widths: list[Widths] = []

    def step(self) -> bool:
        """Place one shard more of every packing, and keep those that are done; whether any is left."""
        problem, each = self.problem, np.arange(len(self.at))
        group, left = self.orders[each, self.at], self.left[:, None]
        held = self.held[each, group]
        there, least = held > 0, problem.min_units[group][:, None]
        shards_left = (problem.max_shards[group] - np.count_nonzero(there, axis=1))[:, None]
        may_split = shards_left > np.where(there, 0, 1)
        by_bytes = (self.free - np.where(there, 0, self.fixed[group][:, None])) // self.unit[group][:, None]
        most = np.minimum(np.minimum(by_bytes, problem.max_units[group][:, None] - held), left)
        may = problem.allowed[group] & (there | (shards_left > 0))
        ms = self.ms[group][:, None]

        def takes(units: Ints) -> Ints:
            """So many units, if the rest can be a shard; else fewer, or none."""
            units = np.where(units < left, np.where(may_split, np.minimum(units, left - least), 0), units)
            return np.where(may & (held + units >= least), units, 0)

        within = takes(np.minimum(most, np.minimum(self.room / ms + 1e-9, 2**40)).astype(np.int64))
        beyond = takes(most)
        fits = within.any(axis=1, keepdims=True)
        units = np.where(fits, within, beyond)
        uneven = np.abs((self.free - units * self.unit[group][:, None]) / self.mean_bytes - (self.room - units * ms))
        score = np.where(fits, uneven, -self.room)
        device = np.where(units == units.max(axis=1, keepdims=True), score, np.inf).argmin(axis=1)
        given = units[each, device]
        self.held[each, group, device] += given
        new = ~there[each, device]
        self.free[each, device] -= given * self.unit[group] + np.where(new, self.fixed[group], 0)
        self.room[each, device] -= given * self.ms[group]
        self.left -= given
        done = self.left == 0
        self.at += done
        over = self.at == self.orders.shape[1]
        self.widths += list(self.held[over])
        stay = (given > 0) & ~over
        for name in ("orders", "held", "free", "room", "at", "left"):
            setattr(self, name, getattr(self, name)[stay])
        done = done[stay]
        self.left[done] = problem.all_units[self.orders[done, self.at[done]]]
        return len(self.at) > 0
