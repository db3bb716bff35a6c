"""First plans by the cost model: ways to cut tables x caps on columns, in lockstep.

A row is one greedy placement, costliest piece first.
"""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.table import DIM_STEP
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Placement, Problem, Widths
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.greedy import costliest_first, place_lists
from neuroshard.search.proposers.splits import halves, split
from neuroshard.search.watch import Watch

HALVINGS = 3  # of the costliest piece and those that cost the same, one after another: these lists are tried as well
COLUMNS = (1.04, 1.1, np.inf)  # a device holds at most so many times the mean columns
# or about as many as all must hold where so many devices have next to none: where a piece outweighs all else on a device of its
# own, how fast a plan is depends on the most columns that another one holds
ALONE = (0, 1, 2)
LIKELY = 6  # of the costliest pieces, whose parts are priced beforehand


def greedy_plans(problem: Problem, lists: Sequence[Ints], most: int, watch: Watch | None) -> list[State]:
    """At most so many plans, from lists of pieces: the first is halved further. Cheapest first; `watch` is told."""
    # all at once, since every question to the cost model takes as long as some hundred shards do
    if not problem.all_priced:
        problem.price(np.concatenate([*lists, *_parts(problem, lists[0])]))
    every = costliest_first(problem, [*lists, *_halved(problem, lists[0])])
    tried = list({shards.tobytes(): shards for shards in every}.values())
    placed, costs = place_lists(problem, tried, _caps(problem), soft=True)
    found: dict[bytes, Widths] = {}
    for place in np.argsort(costs, axis=None, kind="stable").tolist():
        row, cap = divmod(place, costs.shape[1])
        if len(found) == most or not np.isfinite(costs[row, cap]):
            break
        widths = problem.widths(Placement(tried[row], placed.devices[row, cap, : len(tried[row])]))
        key = widths.tobytes()
        # shards of an item together may be too wide for one
        if key in found or (widths > problem.cap[:, None]).any():
            continue
        found[key] = widths
    if not found:
        return []
    states = sorted(State.each(problem, list(found.values())), key=lambda state: state.cost)
    if watch is not None:
        watch.note(states[0].cost)
    return states


def _caps(problem: Problem) -> Floats:
    """How many times the mean columns a device may hold, in the rows of each list."""
    devices, step = problem.devices, DIM_STEP / max(problem.mean_columns, DIM_STEP)
    caps = {*COLUMNS, *(devices / (devices - alone) + step for alone in ALONE if alone < devices)}
    return np.array(sorted({cap if cap < devices else np.inf for cap in caps}))  # np.unique would import for 10 ms


def _parts(problem: Problem, shards: Ints) -> list[Ints]:
    """Halves, quarters, … of the costliest shards, which are likely to be tried."""
    (ordered,) = costliest_first(problem, [shards])
    parts = [ordered[:LIKELY]]
    for _ in range(HALVINGS):
        parts.append(np.concatenate(halves(problem, parts[-1])))
    return parts


def _halved(problem: Problem, shards: Ints) -> list[Ints]:
    """The costliest shard in halves, of what is then there again the costliest, and so on; what costs the same with it."""
    lists: list[Ints] = []
    for _ in range(HALVINGS):
        item = problem.item[shards]
        count = np.bincount(item, minlength=len(problem.whole))
        may_be = (problem.units[shards] >= 2 * problem.least[item]) & (count[item] < problem.places[item])
        cost = np.where(may_be, problem.alone_ms(shards), 0.0)
        cut = split(problem, shards, np.flatnonzero(may_be & (cost >= cost.max() * (1 - 1e-9))))
        if cut is None:
            break
        shards = cut
        lists.append(shards)
    return lists
