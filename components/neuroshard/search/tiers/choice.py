"""The tiers of tables that a search tries first."""

from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np

from neuroshard.costmodel.cache import convex_hull
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.options import DIVIDED, WHOLE, TierProblems, linear_ms


class Estimates(NamedTuple):
    """What each option of each table group takes in ms, and the bytes of HBM that it then has, by the shards and the prices of
    the relaxed plan: (O, G) each. Ms are infinite where a group may not have the option."""

    ms: Floats
    nbytes: Floats

    @classmethod
    def of(cls, problems: TierProblems, relaxed: State) -> "Estimates":
        model = cast(Divided, relaxed.problem.model)
        ms, nbytes = (linear_ms(problems, relaxed, slope) for slope in model.parts_of_slope(relaxed.sums))
        return cls(_possible(problems, ms), nbytes)


def first_choice(problems: TierProblems, estimates: Estimates, share: float) -> Ints:
    """An option of each table group (G,), so that they fill this share of all HBM and take few ms.

    All begin with the option that needs least HBM. Where hosts have too little memory for that, tables come to HBM, those first
    that gain most a byte. Then bytes are given along the convex hull of each group's options, first where they save most: the
    greedy way for a knapsack of several choices.
    """
    ms, nbytes = estimates
    room, choice = share * sum(problems.task.placeable_bytes), np.zeros(ms.shape[1], dtype=np.int64)
    orders: dict[int, Ints] = {}  # of a table group of each owner, its options from the least bytes on
    for group in np.unique(problems.owner, return_index=True)[1].tolist():
        possible = np.flatnonzero(np.isfinite(ms[:, group]))
        orders[group] = order = possible[np.lexsort((ms[possible, group], nbytes[possible, group]))]
        choice[problems.owner == problems.owner[group]] = order[0]
        room -= nbytes[order[0], group]
    room = _off_hosts(problems, choice, ms, nbytes, room)
    steps = []
    for group, order in orders.items():
        if choice[group] == WHOLE:
            continue
        size, best = nbytes[order, group], np.minimum.accumulate(ms[order, group])
        for first, last in pairwise(convex_hull(size, best)):
            saved = (best[first] - best[last]) / max(size[last] - size[first], 1.0)
            if saved > 0:
                steps.append((-saved, group, int(order[last]), float(size[last] - size[first])))
    full = np.zeros(len(choice), dtype=bool)
    for _, group, option, more in sorted(steps):
        full[group] |= more > room
        if not full[group]:
            choice[problems.owner == problems.owner[group]] = option
            room -= more
    return choice


def _off_hosts(problems: TierProblems, choice: Ints, ms: Floats, nbytes: Floats, room: float) -> float:
    """Take so many tables to HBM in `choice` (G,) that hosts, together, have memory for the others, those first that gain most a
    byte; the bytes of HBM that are then left of `room`. `ms` and `nbytes` are those of each owner's options (O, G)."""
    if not problems.hosts_are_short:
        return room
    hosts, each = problems.task.devices // problems.task.devices_of_host, np.arange(len(choice))
    owned = problems.of_owner(problems.host_bytes)
    lacking = problems.host_bytes[choice, each].sum() - hosts * (problems.task.host_memory_bytes or 0)
    more = nbytes[WHOLE] - nbytes[choice, each]
    gain = ms[choice, each] - ms[WHOLE]
    for group in np.argsort(-gain / np.maximum(more, 1.0), kind="stable").tolist():
        if lacking > 0 and choice[group] != WHOLE and np.isfinite(gain[group]) and more[group] <= room:
            lacking -= owned[choice[group], group] - owned[WHOLE, group]
            choice[problems.owner == problems.owner[group]] = WHOLE
            room -= float(more[group])
    return room


def _possible(problems: TierProblems, of_options: Floats) -> Floats:
    """What is of each option (O, G), and infinite where a table group may not have it."""
    of_options[DIVIDED, problems.large] = np.inf
    of_options[2:, ~problems.large] = np.inf
    of_options[1:, ~problems.chosen] = np.inf
    return of_options
