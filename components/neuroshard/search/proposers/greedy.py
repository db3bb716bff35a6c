"""First plans, fast: many greedy placements in lockstep, the costliest shard first.

They differ in how tables are cut beforehand and in a cap on the columns of a device. Where these give too few plans, as where
memory is tight, others use linear estimates, and weigh memory as well as ms. Shards without room are then cut to fill
devices. The last of them looks at bytes only. Where memory is nearly full, tables are packed by bytes and ms too (`packed.py`).
"""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.table import DIM_STEP
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.infeasible.packing import fill
from neuroshard.search.problem.column_shards import Placement, Widths
from neuroshard.search.problem.filling import Shares, fewest_and_most_shards, put_back
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.lockstep import costliest_first, padded, place_by_load, place_lists
from neuroshard.search.proposers.packed import packings
from neuroshard.search.proposers.splits import split


def first_plans(problem: Problem, most: int) -> list[State]:
    """At most so many plans, cheapest first; none if memory is too tight for all of these placements."""
    if not problem.whole.any():  # all row-wise
        return [State(problem, np.zeros((len(problem.whole), problem.devices), dtype=np.int64))]
    shares, tuning = Shares.of(problem), problem.tuning
    found = _by_cost(problem, [cut_to(problem, shares.ms, fineness) for fineness in tuning.fineness], most)
    if len(found) < most and tuning.linear_estimates:
        found += _by_estimates(problem, shares)
    if len(found) < most and tuning.packed and (widths := fill(problem)) is not None:
        found.append(State(problem, widths))
    if problem.is_full and tuning.packed:
        packed = {widths.tobytes(): widths for widths in packings(problem, shares)}
        found += State.each(problem, list(packed.values())) if packed else []
    return sorted(found, key=lambda state: state.cost)[:most]


def _by_cost(problem: Problem, lists: Sequence[Ints], most: int) -> list[State]:
    """At most so many plans by the cost model, from lists of shards and from halving the costliest of the first list."""
    problem.price(np.concatenate(lists))  # together, since a batch of one takes as long as some hundred shards
    lists = [*lists, *_halved(problem, lists[0])]
    every = costliest_first(problem, [*lists, *_with_all_sequences_cut(problem, lists)])
    tried = list({shards.tobytes(): shards for shards in every}.values())
    placed, costs = place_lists(problem, tried, _caps(problem), soft=True)
    costs += _cuts_ms(problem, tried)[:, None]
    found: dict[bytes, Widths] = {}
    caps = costs.argmin(axis=1)
    for row in np.argsort(costs.min(axis=1), kind="stable").tolist():
        cap = int(caps[row])
        if len(found) == most or not np.isfinite(costs[row, cap]):
            break
        widths = problem.widths(Placement(tried[row], placed.devices[row, cap, : len(tried[row])]))
        if (widths <= problem.max_units[:, None]).all():  # shards of a group on one device may be too wide together
            found.setdefault(widths.tobytes(), widths)
    return State.each(problem, list(found.values())) if found else []


def _cuts_ms(problem: Problem, lists: Sequence[Ints]) -> Floats:
    """What the launches of each list take beyond those of uncut tables, and putting outputs into order: (B,) ms."""
    count = len(problem.whole)
    uncut_ms = problem.launched_ms(np.ones(count, dtype=np.int64))
    counts = (np.bincount(problem.group[shards], minlength=count) for shards in lists)
    return np.array([problem.launched_ms(each) - uncut_ms for each in counts])


def _caps(problem: Problem) -> Floats:
    """Columns that a device may hold, as multiples of the mean: those of the tuning, and the least possible, also for when one
    device has only a shard that outweighs all else, and sends few columns."""
    devices, tuning = problem.devices, problem.tuning
    if not tuning.column_caps or devices == 1:
        return np.array([np.inf])
    step = DIM_STEP / max(problem.mean_columns, DIM_STEP)
    return np.array(sorted({1 + step, devices / (devices - 1) + step, *tuning.caps}))


def _halved(problem: Problem, shards: Ints) -> list[Ints]:
    """A list with the costliest shard halved, one with the costliest shard of that list halved too, and so on. Shards that cost
    the same are halved together, unless they are so many that devices are even with them whole."""
    lists, tuning = list[Ints](), problem.tuning
    for _ in range(tuning.halvings):
        group = problem.group[shards]
        count = np.bincount(group, minlength=len(problem.whole))
        may_be = (problem.units[shards] >= 2 * problem.min_units[group]) & (count[group] < problem.max_devices[group])
        cost = np.where(may_be, problem.alone_ms(shards), 0.0)
        costliest = np.flatnonzero(may_be & (cost >= cost.max() * (1 - 1e-9)))
        cut = None if len(costliest) > tuning.halved_each * problem.devices else split(problem, shards, costliest)
        if cut is None:
            break
        shards = cut
        lists.append(shards)
    return lists


def _with_all_sequences_cut(problem: Problem, lists: Sequence[Ints]) -> list[Ints]:
    """Those of the lists in which some sequences of a collection are cut and others whole, with all of them cut: TorchRec runs
    whole ones by themselves, with all-to-alls of their own."""
    collections, found = problem.launches.sequences, list[Ints]()
    if not (collections >= 0).any():
        return found
    for shards in lists:
        group = problem.group[shards]
        is_cut = problem.units[shards] < problem.all_units[group]
        some_cut = np.isin(collections[group], collections[group[is_cut & (collections[group] >= 0)]])
        cut = split(problem, shards, np.flatnonzero(some_cut & ~is_cut))
        found += [] if cut is None else [cut]
    return found


def _by_estimates(problem: Problem, shares: Shares) -> list[State]:
    """All placements by linear estimates of ms and memory that can be completed."""
    found: dict[bytes, Widths] = {}
    for memory in problem.tuning.memory_weights:
        weight = np.maximum(shares.ms, shares.nbytes * (memory > 0))
        lists = [cut_to(problem, weight, fineness) for fineness in problem.tuning.guessed_fineness]
        load = shares.ms + memory * shares.nbytes
        found |= {widths.tobytes(): widths for widths in by_load(problem, load, lists)}
    return State.each(problem, list(found.values())) if found else []


def cut_to(problem: Problem, weight: Floats, fineness: float) -> Ints:
    """Shards of all groups, as even as can be, none heavier than `fineness` mean loads nor larger than the roomiest device,
    heaviest first.
    `weight` (G,) is in mean loads."""
    fewest, most = fewest_and_most_shards(problem)
    count = np.minimum(np.maximum(np.ceil(weight / fineness), fewest), most).astype(np.int64)
    group = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    units = problem.all_units[group] // count[group] + (nth < problem.all_units[group] % count[group])
    heavy = weight[group] / problem.all_units[group] * units
    order = np.lexsort((group, -heavy))
    shards: Ints = problem.first[group[order]] + units[order]
    return shards


def by_load(problem: Problem, weight: Floats, lists: Sequence[Ints]) -> list[Widths]:
    """Greedy placements of lists of shards by a fixed load, `weight` (G,) for a whole group, that can be completed: (G, D) each.
    Shards of one group go on different devices."""
    shards = np.concatenate([[0], *lists])
    group, begins = problem.group[shards], 1 + np.cumsum([0, *map(len, lists)])
    load = weight[group] * problem.units[shards] / problem.all_units[group]
    orders = padded([begin + np.arange(len(one)) for begin, one in zip(begins, lists, strict=False)])
    placed = place_by_load(problem, shards, load, orders, apart=group)
    found = []
    for one, devices in zip(lists, placed.devices[:, 0], strict=True):
        devices = devices[: len(one)]
        fits = devices >= 0
        widths = problem.widths(Placement(one[fits], devices[fits]))
        free = problem.memory.copy()
        np.subtract.at(free, devices[fits], problem.nbytes[one[fits]])
        lost = [(int(problem.group[shard]), int(problem.units[shard])) for shard in one[~fits].tolist()]
        if put_back(problem, widths, free, lost):
            found.append(widths)
    return found
