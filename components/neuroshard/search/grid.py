"""First plans by the cost model: ways to cut tables x caps on columns, in lockstep; then what comes out best, cut further.

A row is one greedy placement, costliest piece first. Small tasks go on from their best rows as the published search does, a cut
at a time, but from cuts and under caps that are nearly right already.
"""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.table import DIM_STEP
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.beam import children
from neuroshard.search.greedy import costliest_first, place_lists
from neuroshard.search.problem import Placement, Problem
from neuroshard.search.splits import halves, split
from neuroshard.search.state import State
from neuroshard.search.watch import Watch

HALVINGS = 3  # of the costliest piece and those that cost the same, one after another: these lists are tried as well
COLUMNS = (1.04, 1.1, np.inf)  # a device holds at most so many times the mean columns
# or about as many as all must hold where so many devices have next to none: where a piece outweighs all else on a device of its
# own, how fast a plan is depends on the most columns that another one holds
ALONE = (0, 1, 2)
SMALL = 1000  # tables x devices, up to which the best list is cut once more: it then takes as long as a round of steps
CANDIDATES, CAPS = 6, 2  # its costliest pieces, and as many of the largest, that are cut; caps that are tried


def greedy_plans(problem: Problem, lists: Sequence[Ints], most: int, watch: Watch | None) -> list[State]:
    """At most so many plans, from lists of pieces: the first is halved further. Cheapest first; `watch` is told of each."""
    # all at once, since every question to the cost model takes as long as a hundred shards do
    problem.price(np.concatenate([*lists, *_parts(problem, lists[0])]))
    plans, caps = _Plans(problem, watch), _caps(problem)
    costs = plans.place([*lists, *_halved(problem, lists[0])], caps)
    best = plans.build(1)
    if best and problem.devices * len(problem.whole) <= SMALL:
        near = caps[np.sort(np.argsort(costs, kind="stable")[:CAPS])]
        plans.place(children(problem, plans.placed[0][2], CANDIDATES), near)
    return plans.build(most)


class _Plans:
    """Placements of lists of shards, the cheapest first, and the states of some of them."""

    def __init__(self, problem: Problem, watch: Watch | None) -> None:
        self.problem, self.watch = problem, watch
        self.seen: set[bytes] = set()  # lists that were placed
        self.placed: list[tuple[float, int, Ints, Ints]] = []  # cost, number, shards and their devices
        self.states: dict[bytes, State] = {}

    def place(self, lists: Sequence[Ints], caps: Floats) -> Floats:
        """Place lists, those that were not yet, under all of the caps; the least cost under each."""
        new = {shards.tobytes(): shards for shards in costliest_first(self.problem, lists)} if lists else {}
        left = [shards for key, shards in new.items() if key not in self.seen]
        if not left:
            return np.full(len(caps), np.inf)
        self.seen |= new.keys()
        placed, costs = place_lists(self.problem, left, caps, soft=True)
        for (row, cap), cost in np.ndenumerate(costs):
            if np.isfinite(cost):
                devices = placed.devices[row, cap, : len(left[row])]
                self.placed.append((float(cost), len(self.placed), left[row], devices))
        self.placed.sort(key=lambda one: one[:2])
        least: Floats = costs.min(axis=0)
        return least

    def build(self, most: int) -> list[State]:
        """States of so many of the cheapest that differ, of those in which no shards of an item together are too wide for one."""
        problem, found = self.problem, dict[bytes, State]()
        for _, _, shards, devices in self.placed:
            if len(found) == most:
                break
            widths = problem.widths(Placement(shards, devices))
            key = widths.tobytes()
            if (widths > problem.cap[:, None]).any():
                continue
            if key not in self.states:
                self.states[key] = State(problem, widths)
                if self.watch is not None:
                    self.watch.note(self.states[key].cost)
            found[key] = self.states[key]
        return sorted(found.values(), key=lambda state: state.cost)


def _caps(problem: Problem) -> Floats:
    """How many times the mean columns a device may hold, in the rows of each list."""
    devices, step = problem.devices, DIM_STEP / max(problem.mean_columns, DIM_STEP)
    caps = {*COLUMNS, *(devices / (devices - alone) + step for alone in ALONE if alone < devices)}
    return np.array(sorted({cap if cap < devices else np.inf for cap in caps}))  # np.unique would import for 10 ms


def _parts(problem: Problem, shards: Ints) -> list[Ints]:
    """Halves, quarters, … of the costliest and the largest shards, which are likely to be tried."""
    (ordered,) = costliest_first(problem, [shards])
    largest = np.argsort(-problem.nbytes[ordered], kind="stable")
    parts = [np.concatenate([ordered[:CANDIDATES], ordered[largest[:CANDIDATES]]])]
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
