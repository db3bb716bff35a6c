"""Plans in which a device that may be the last is not left with a part or two: variants for `trusted` to choose among.

Nets that fall with no table cannot say that one more makes a device faster. But a part all alone does not fill a GPU, and the
tables beside it take next to nothing: see FEW in trust.py.
"""

import numpy as np

from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.search.problem.state import State

LATE = 0.97  # share of the time at which the last device is ready, from which on a device may be the last
ALONE = 2  # parts of a device, up to which it gets one more
TIMES = 2


def accompanied(state: State) -> list[State]:
    """The plan with a light part moved to each late device that holds next to none; and so once more."""
    found, after = list[State](), state if isinstance(state.problem.model, TrainedCostModel) else None
    for _ in range(TIMES):
        after = after and _with_one_more(after)
        if after is not None:
            found.append(after)
    return found


def _with_one_more(state: State) -> State | None:
    """The parts that add least are taken from devices that have several to spare; None where nothing moves."""
    problem = state.problem
    widths, sums, free = state.widths.copy(), state.sums.copy(), state.free.copy()
    parts = np.count_nonzero(widths, axis=0)
    late = np.flatnonzero((parts > 0) & (parts <= ALONE) & (state.ready >= LATE * state.ready.max()))
    moved = False
    for device in late.tolist():
        items, on = np.nonzero(widths)
        shards = problem.first[items] + widths[items, on]
        may = (parts[on] > ALONE + 1) & problem.allowed[items, device] & (problem.nbytes[shards] <= free[device])
        may &= widths[items, device] == 0
        if not may.any():
            continue
        items, on, shards = items[may], on[may], shards[may]
        best = int(problem.model.compute_ms(sums[device] + problem.vectors[shards]).argmin())
        item, source, shard = int(items[best]), int(on[best]), int(shards[best])
        widths[item, device], widths[item, source] = widths[item, source], 0
        for where, times in ((device, 1), (source, -1)):
            sums[where] += times * problem.vectors[shard]
            free[where] -= times * problem.nbytes[shard]
            parts[where] += times
        moved = True
    return State(problem, widths) if moved else None
