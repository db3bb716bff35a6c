"""Complete a plan of which some shards found no room: cut them to what the devices have left."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.column_shards import Widths
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State, column_ms


@dataclass(frozen=True)
class Shares:
    """What each whole table group (G,) adds to a device, as a share of what a device gets on average: ms, bytes.

    Ms are a linear estimate at the mean device. A part of a group adds in proportion to its units.
    """

    ms: Floats
    nbytes: Floats

    @classmethod
    def of(cls, problem: Problem) -> "Shares":
        vectors = whole_vectors(problem)
        vectors[problem.spread] = 0.0
        base = problem.base.mean(axis=0)
        slope = problem.model.compute_slope(vectors.sum(axis=0) / problem.devices + base)
        dims = problem.dims[problem.whole]
        of_column = column_ms(problem, problem.mean_columns)
        ms = np.maximum(vectors @ slope, 0.0) + of_column * dims
        base_ms = max(float(base @ slope), 0.0) + of_column * float(problem.base_dims.mean())
        amounts = ((ms, base_ms), (problem.nbytes[problem.whole], 0.0))
        return cls(*(amount / max(amount.sum() / problem.devices + held, 1e-30) for amount, held in amounts))


def whole_vectors(problem: Problem) -> Floats:
    """The vector of each table group (G, K): that of its widest shard, as often as it takes."""
    widest = problem.first + problem.max_units
    problem.price(widest)
    vectors: Floats = problem.vectors[widest] * (problem.all_units / problem.max_units)[:, None]
    return vectors


def fewest_and_most_shards(problem: Problem) -> tuple[Ints, Ints]:
    """Into how many shards each table group must be cut, by width and by memory, and may be cut: two (G,)."""
    fewest = np.maximum(-(-problem.all_units // problem.max_units), 1)
    of_memory = np.ceil(problem.nbytes[problem.whole] / np.maximum(problem.roomiest(), 1))
    most = np.minimum(problem.all_units // problem.min_units, problem.max_devices)
    return np.maximum(fewest, of_memory.astype(np.int64)), np.where(problem.whole > 0, most, 0)


def put_back(problem: Problem, widths: Widths, free: Ints, lost: list[tuple[int, int]]) -> bool:
    """Place the `lost` units of table groups, (group, units) each: cut them to fill the devices, those with the most room first.

    Changes `widths` (G, D) and the `free` bytes (D,) in place. False if some do not fit; then both are invalid.
    """
    for group, units in lost:
        left = units
        while left:
            first, held = int(problem.first[group]), widths[group]
            found = _roomiest(problem, group, left, free, held)
            if found is None:
                return False
            device, fits = found
            before = problem.nbytes[first + held[device]] if held[device] else 0
            free[device] -= problem.nbytes[first + held[device] + fits] - before
            held[device] += fits
            left -= fits
    return True


def _roomiest(problem: Problem, group: int, left: int, free: Ints, held: Ints) -> tuple[int, int] | None:
    """The device that takes most of the `left` units of a group, and how many: all, or so many that the rest is a valid shard."""
    first, least, most = int(problem.first[group]), int(problem.min_units[group]), int(problem.max_units[group])
    shards_left = int(problem.max_shards[group] - np.count_nonzero(held))
    spare = free + np.where(held, problem.nbytes[first + held], 0)
    # units that each device has room for, with those held
    room = np.searchsorted(problem.nbytes[first + 1 : first + most + 1], spare, side="right")
    units = np.minimum(room - held, left)
    may_split = shards_left > np.where(held, 0, 1)
    units = np.where(units < left, np.where(may_split, np.minimum(units, left - least), 0), units)
    may = problem.allowed[group] & ((held > 0) | (shards_left > 0)) & (held + units >= least)
    units = np.where(may, units, 0)
    device = int(units.argmax())
    return (device, int(units[device])) if units[device] > 0 else None


def complete(problem: Problem, widths: Widths, *, sparing: bool = False) -> State | None:
    """The plan that keeps as many of these units (G, D), changed in place, as fit; None if there is no room for the rest.

    Shards leave devices that are too full: whole, or in part where `sparing`, so that fewer bytes move. They and the groups that
    are missing then go to the least loaded devices.
    """
    size = np.where(widths > 0, problem.nbytes[problem.first[:, None] + widths], 0)
    free = problem.memory - size.sum(axis=0)
    while free.min() < 0:
        device = int(free.argmin())
        group, stays = _leaving(problem, widths, size, device, -int(free[device]), sparing)
        rest = problem.nbytes[problem.first[group] + stays] if stays else 0
        if stays:
            free[device] += size[group, device] - rest
            size[group, device], widths[group, device] = rest, stays
        else:
            free += size[group]
            size[group], widths[group] = 0, 0
    shares = Shares.of(problem)
    load = (widths / problem.all_units[:, None] * shares.ms[:, None]).sum(axis=0)
    left = np.where(problem.whole > 0, problem.all_units - widths.sum(axis=1), 0)
    missing = np.flatnonzero(left)
    for group in missing[np.argsort(-problem.nbytes[problem.first + left][missing], kind="stable")].tolist():
        shard = int(problem.whole[group])
        room = (free >= problem.nbytes[shard]) & problem.allowed[group]
        before = widths[group].copy()
        if left[group] == problem.all_units[group] <= problem.max_units[group] and room.any():
            device = int(np.where(room, load, np.inf).argmin())
            widths[group, device] = problem.all_units[group]
            free[device] -= problem.nbytes[shard]
        elif not put_back(problem, widths, free, [(group, int(left[group]))]):
            return None
        load += (widths[group] - before) / problem.all_units[group] * shares.ms[group]
    return State(problem, widths)


def started(problem: Problem, plan: State, anew: NDArray[np.bool_] | None = None) -> State | None:
    """A plan of the problem with the shards of a plan of other tiers, or of roomier devices. Those of table groups that may not
    be cut so, or are placed `anew` (G,), and those without room, find new places; None if there is none."""
    there, widths = problem.with_spread(plan.problem.spread, plan.problem.places), plan.widths.copy()
    if there is None:
        return None
    shards, narrow = np.count_nonzero(widths, axis=1), (widths > 0) & (widths < there.min_units[:, None])
    widths[(shards > there.max_shards) | narrow.any(axis=1)] = 0
    if anew is not None:
        widths[anew] = 0
    return complete(there, widths)


def _leaving(problem: Problem, widths: Widths, size: Ints, device: int, short: int, sparing: bool) -> tuple[int, int]:
    """The group whose shard is to leave a device that is `short` of bytes, and how many of its units stay there."""
    there = size[:, device]
    enough = np.where(there >= short, there, np.iinfo(np.int64).max)
    whole = int(enough.argmin() if (there >= short).any() else there.argmax())
    options = [(int(there[whole]), whole, 0)]
    held = np.flatnonzero(widths[:, device]) if sparing else np.zeros(0, dtype=np.int64)
    for group in held[np.count_nonzero(widths[held], axis=1) < problem.max_devices[held]].tolist():
        first, least, units = int(problem.first[group]), int(problem.min_units[group]), int(widths[group, device])
        stays = int(np.searchsorted(problem.nbytes[first + 1 : first + units + 1], there[group] - short, side="right"))
        stays = min(stays, units - least)
        if stays >= least:
            options.append((int(there[group] - problem.nbytes[first + stays]), group, stays))
    _, group, stays = min(options)
    return group, stays
