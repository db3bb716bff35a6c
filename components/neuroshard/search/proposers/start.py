"""First plans, fast: many greedy placements in lockstep.

A row is one placement: how fine heavy items are cut beforehand, and how many columns a device may hold. Each step puts the next
heaviest piece of every row on the device with the least compute ms. Where memory is too tight for that, other rows go by linear
guesses and let memory and columns count beside ms; and what finds no room is cut to fill devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem, Widths
from neuroshard.search.problem.state import State, transfers
from neuroshard.search.proposers.greedy import padded
from neuroshard.search.proposers.grid import greedy_plans
from neuroshard.search.watch import Watch

FINENESS = (np.inf, 1.0, 0.8, 0.6)  # a piece weighs at most so many mean loads of a device
# where memory is tight: likewise, and the weight of memory and of columns in the load beside ms
GUESSED_FINENESS = (np.inf, 1.0, 0.6, 0.4, 0.25)
BESIDES = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (2.0, 0.0))


@dataclass(frozen=True)
class Shares:
    """What each whole item (I,) adds to a device by a linear guess at the mean device, as shares of what a device gets on
    average: ms, bytes and columns. A part of an item adds in proportion."""

    ms: Floats
    nbytes: Floats
    columns: Floats

    @classmethod
    def of(cls, problem: Problem) -> "Shares":
        widest = problem.first + problem.cap
        problem.price(widest)
        times = problem.widest / problem.cap
        vectors = problem.vectors[widest] * times[:, None]
        vectors[problem.row_wise] = 0.0
        base = problem.base.mean(axis=0)
        slope = problem.model.compute_slope(vectors.sum(axis=0) / problem.devices + base)
        dims = problem.dims[problem.whole].astype(np.float64)
        a_column = column_ms(problem, problem.mean_columns)
        ms = np.maximum(vectors @ slope, 0.0) + a_column * dims
        base_ms = max(float(base @ slope), 0.0) + a_column * problem.base_dims
        amounts = ((ms, base_ms), (problem.nbytes[problem.whole], 0.0), (dims, 0.0))
        return cls(*(amount / max(amount.sum() / problem.devices + beside, 1e-30) for amount, beside in amounts))


def column_ms(problem: Problem, columns: float) -> float:
    """What a column more on every device adds to both all-to-alls, where all hold `columns`."""
    even = np.full((2, problem.devices), columns)
    even[1] *= 1.01
    forward, backward = transfers(problem, even)
    more = (forward + backward).max(axis=-1)
    return max(float(more[1] - more[0]) / (0.01 * columns), 0.0)


def first_plans(problem: Problem, most: int, watch: Watch | None = None) -> list[State]:
    """At most so many plans that fit, cheapest first; none where memory is too tight for all of these greedy placements.

    `watch` is told of them as they are made.
    """
    if not problem.whole.any():  # all row-wise
        return [State(problem, np.zeros((len(problem.whole), problem.devices), dtype=np.int64))]
    shares = Shares.of(problem)
    found = greedy_plans(problem, _pieces(problem, [(shares.ms, fine) for fine in FINENESS]), most, watch)
    if len(found) < most:
        found += _guessed(problem, shares)
    return sorted(found, key=lambda state: state.cost)[:most]


def _guessed(problem: Problem, shares: Shares) -> list[State]:
    """All rows that go by linear guesses and could be completed."""
    weights = [
        (fine, np.maximum(shares.ms, shares.nbytes * (memory > 0)), memory, columns)
        for fine in GUESSED_FINENESS
        for memory, columns in BESIDES
    ]
    pieces = _pieces(problem, [(weight, fine) for fine, weight, _, _ in weights])
    rows = _lockstep(problem, shares, pieces, np.array([(memory, columns) for _, _, memory, columns in weights]))
    return [State(problem, widths) for widths in {plan.tobytes(): plan for plan in rows}.values()]


def _pieces(problem: Problem, wanted: Sequence[tuple[Floats, float]]) -> list[Ints]:
    """For each weight of the items, and `fine`: shards of all items, none heavier than `fine` mean loads nor larger than what the
    roomiest device holds, heaviest first."""
    fewest, most = _parts(problem)
    counts = (np.minimum(np.maximum(np.ceil(weight / fine), fewest), most) for weight, fine in wanted)
    return [_cut(problem, weight, count.astype(np.int64)) for (weight, _), count in zip(wanted, counts, strict=True)]


def in_parts(problem: Problem, shares: Shares, parts: Sequence[int]) -> list[Widths]:
    """Placements of all items in so many parts each, as far as they may be, one for each of `parts` that can be completed."""
    fewest, most = _parts(problem)
    counts = (np.minimum(np.maximum(count, fewest), most).astype(np.int64) for count in parts)
    return _lockstep(problem, shares, [_cut(problem, shares.ms, count) for count in counts], np.zeros((len(parts), 2)))


def _parts(problem: Problem) -> tuple[Floats, Ints]:
    """How many parts items must have at least, for what a shard may be and a device hold, and how many they may have."""
    fewest = np.maximum(-(-problem.widest // problem.cap), 1)
    fewest = np.maximum(fewest, np.ceil(problem.nbytes[problem.whole] / np.maximum(problem.roomiest(), 1)))
    return fewest, np.where(problem.whole > 0, np.minimum(problem.widest // problem.least, problem.places), 0)


def _cut(problem: Problem, weight: Floats, count: Ints) -> Ints:
    """Shards of all items, each cut into so many, the heaviest first."""
    item = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
    units = problem.widest[item] // count[item] + (nth < problem.widest[item] % count[item])
    heavy = weight[item] / problem.widest[item] * units
    order = np.lexsort((item, -heavy))
    shards: Ints = problem.first[item[order]] + units[order]
    return shards


def _lockstep(problem: Problem, shares: Shares, pieces: list[Ints], besides: Floats) -> list[Widths]:
    """The placements of all rows that could be completed."""
    count, orders = len(pieces), padded(pieces).T  # (S, R)
    items, units = problem.item[orders], problem.units[orders]
    share = units / problem.widest[items]
    size, ms = problem.nbytes[orders], share * shares.ms[items]
    extra = share * (besides[:, 0] * shares.nbytes[items] + besides[:, 1] * shares.columns[items])

    rows = np.arange(count)
    widths = np.zeros((count, len(problem.whole), problem.devices), dtype=np.int64)
    free, load = np.tile(problem.memory, (count, 1)), np.zeros((count, problem.devices))
    lost: list[list[tuple[int, int]]] = [[] for _ in pieces]
    for step in range(len(orders)):
        held = widths[rows, items[step]]
        room = (free >= size[step][:, None]) & (held == 0)
        if not problem.free_to_go:
            room &= problem.allowed[items[step]]
        device = np.where(room, load, np.inf).argmin(axis=1)
        found = room[rows, device]
        if not found.all():
            for row in np.flatnonzero(~found):
                lost[row].append((int(items[step][row]), int(units[step][row])))
        widths[rows, items[step], device] += np.where(found, units[step], 0)
        load[rows, device] += np.where(found, ms[step] + extra[step], 0.0)
        free[rows, device] -= np.where(found, size[step], 0)
    return [widths[row] for row in range(count) if squeeze(problem, widths[row], free[row], lost[row])]


def squeeze(problem: Problem, widths: Widths, free: Ints, lost: list[tuple[int, int]]) -> bool:
    """Put (item, units) that found no room where there is some, cut to fill it, in place; False where that fails."""
    for item, units in lost:
        left = units
        while left:
            first, held = int(problem.first[item]), widths[item]
            fill = _fill(problem, item, left, free, held)
            if fill is None:
                return False
            device, wide = fill
            free[device] -= (
                problem.nbytes[first + held[device] + wide]
                - problem.nbytes[first + held[device] if held[device] else 0]
            )
            held[device] += wide
            left -= wide
    return True


def _fill(problem: Problem, item: int, left: int, free: Ints, held: Ints) -> tuple[int, int] | None:
    """The device that takes most of the `left` units of an item, such that the rest may still be a shard, and how many."""
    first, least = int(problem.first[item]), int(problem.least[item])
    shards_left = int(problem.most[item] - np.count_nonzero(held))
    best = (0, 0)
    for device in np.flatnonzero(problem.allowed[item]).tolist():
        now = int(held[device])
        if not now and shards_left < 1:
            continue
        top = min(left, int(problem.cap[item]) - now)
        spare = free[device] + (problem.nbytes[first + now] if now else 0)
        units = int(np.searchsorted(problem.nbytes[first + now + 1 : first + now + top + 1], spare, side="right"))
        if units < left:
            units = min(units, left - least) if shards_left > (0 if now else 1) else 0
        if now + units >= least and units > best[0]:
            best = (units, device)
    return (best[1], best[0]) if best[0] else None


def resumed(problem: Problem, widths: Widths, *, sparing: bool = False) -> State | None:
    """A plan from the units that lie where they may: what no device has room for any more, and what is new, is put where it
    is least loaded. None where there is no room.

    Shards leave a full device whole, or, where it shall be `sparing` of bytes to move, only in part.
    """
    size = np.where(widths > 0, problem.nbytes[problem.first[:, None] + widths], 0)
    free = problem.memory - size.sum(axis=0)
    while free.min() < 0:
        device = int(free.argmin())
        item, stays = _leaving(problem, widths, size, device, -int(free[device]), sparing)
        rest = problem.nbytes[problem.numbers(np.array([item]), np.array([stays]))[0]]
        if stays:
            free[device] += size[item, device] - rest
            size[item, device], widths[item, device] = rest, stays
        else:
            free += size[item]
            size[item], widths[item] = 0, 0
    shares = Shares.of(problem)
    load = (widths / problem.widest[:, None] * shares.ms[:, None]).sum(axis=0)
    left = np.where(problem.whole > 0, problem.widest - widths.sum(axis=1), 0)
    missing = np.flatnonzero(left)
    for item in missing[np.argsort(-problem.nbytes[problem.first + left][missing], kind="stable")].tolist():
        shard = int(problem.whole[item])
        room = (free >= problem.nbytes[shard]) & problem.allowed[item]
        before = widths[item].copy()
        if left[item] == problem.widest[item] <= problem.cap[item] and room.any():
            device = int(np.where(room, load, np.inf).argmin())
            widths[item, device] = problem.widest[item]
            free[device] -= problem.nbytes[shard]
        elif not squeeze(problem, widths, free, [(item, int(left[item]))]):
            return None
        load += (widths[item] - before) / problem.widest[item] * shares.ms[item]
    return State(problem, widths)


def _leaving(problem: Problem, widths: Widths, size: Ints, device: int, short: int, sparing: bool) -> tuple[int, int]:
    """The item whose shard is to leave a device that is so many bytes short, and how many of its units stay there."""
    there = size[:, device]
    enough = np.where(there >= short, there, np.iinfo(np.int64).max)
    whole = int(enough.argmin() if (there >= short).any() else there.argmax())
    options = [(int(there[whole]), whole, 0)]
    held = np.flatnonzero(widths[:, device]) if sparing else np.zeros(0, dtype=np.int64)
    for item in held[np.count_nonzero(widths[held], axis=1) < problem.places[held]].tolist():
        first, least, units = int(problem.first[item]), int(problem.least[item]), int(widths[item, device])
        stays = int(np.searchsorted(problem.nbytes[first + 1 : first + units + 1], there[item] - short, side="right"))
        stays = min(stays, units - least)
        if stays >= least:
            options.append((int(there[item] - problem.nbytes[first + stays]), item, stays))
    _, item, stays = min(options)
    return item, stays
