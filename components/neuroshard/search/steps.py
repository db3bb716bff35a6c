"""All steps away from a device, ranked by a linear guess, and the most promising of them priced by the cost model.

A step takes `out` units of item `give` from the device to another, `to`, and `into` units of item `take` (or none, -1) from
there: a move of a table or of any part of it, a swap, or a swap for a part. What an item has on the other device already, the
units join. A step changes two devices only, so these are all that is asked of the compute net.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem import Problem
from neuroshard.search.state import State, transfers

PRICED = 24
RECEIVERS = 24  # devices that are tried at a step, the least loaded ones


@dataclass(frozen=True)
class Steps:
    """C steps from device `source`, a number each."""

    source: int
    give: Ints
    out: Ints
    to: Ints
    take: Ints
    into: Ints

    def __len__(self) -> int:
        return len(self.give)

    def __getitem__(self, chosen: Ints) -> "Steps":
        return Steps(self.source, *(getattr(self, name)[chosen] for name in ("give", "out", "to", "take", "into")))

    def __add__(self, other: "Steps") -> "Steps":
        names = ("give", "out", "to", "take", "into")
        return Steps(self.source, *(np.concatenate([getattr(self, n), getattr(other, n)]) for n in names))


@dataclass(frozen=True)
class Yardstick:
    """How even a plan is, as one number that falls with every step towards an even one, and that two devices change.

    It stands for the plan's cost, max(compute + backward) + max(forward): the exchange as a linear function of a device's own
    columns and of the most columns on any device, and soft maxima in place of the maxima, since where several devices
    are equally slow no single step makes the plan cheaper. `sharpness` doublings of the exponent make them hard.
    """

    own_ms: float  # a column on a device adds to the device
    all_ms: float  # a column on the device with the most adds to the plan
    sharpness: int

    def load(self, compute: Floats, dims: Floats) -> Floats:
        """Ms of devices without what they all share."""
        return compute + self.own_ms * dims

    def soft(self, level: Floats) -> Floats:
        """Shares of a maximum, as they count in the soft one."""
        level = np.maximum(level, 0.0)
        for _ in range(self.sharpness):
            level = level * level
        return level


def yardstick(problem: Problem, sharpness: int) -> Yardstick:
    """The exchange told by what one device with a tenth more columns than all others changes."""
    if problem.devices == 1:
        return Yardstick(0.0, 0.0, sharpness)
    columns = problem.mean_columns
    dims = np.full((2, problem.devices), columns)
    dims[1, 0] *= 1.1
    forward, backward = transfers(problem, dims)
    rise = (backward[1] - backward[0]) / (0.1 * columns)
    shared = max(float(rise[1:].mean()), 0.0)
    ahead = max(float(forward[1].max() - forward[0].max()) / (0.1 * columns), 0.0)
    return Yardstick(max(float(rise[0]) - shared, 0.0), shared + ahead, sharpness)


class Guess:
    """A state as the linear guess sees it: what each component and each column add to each device."""

    def __init__(self, state: State, stick: Yardstick) -> None:
        self.stick = stick
        self.slope = state.problem.model.compute_slope(state.sums)  # (D, K)
        self.load = stick.load(state.compute, state.dims)
        self.slowest, self.widest = max(float(self.load.max()), 1e-30), max(float(state.dims.max()), 1.0)
        self.dims = state.dims
        self.busy, self.wide = stick.soft(self.load / self.slowest), stick.soft(self.dims / self.widest)
        # of a soft maximum m = (sum x^p)^(1/p) the derivative by the sum is m^(1-p) / p; both terms in ms
        exponent = 2.0**stick.sharpness
        self.load_weight = self.slowest * self.busy.sum() ** (1 / exponent - 1)
        self.wide_weight = stick.all_ms * self.widest * self.wide.sum() ** (1 / exponent - 1)

    def change(self, device: int | Ints, load: Floats, dims: Floats) -> Floats:
        """What the yardstick changes by where a device comes to so many ms and columns; negative is better."""
        busy = self.stick.soft(load / self.slowest) - self.busy[device]
        change: Floats = self.load_weight * busy
        if self.wide_weight:
            change = change + self.wide_weight * (self.stick.soft(dims / self.widest) - self.wide[device])
        return change

    def order(self) -> Ints:
        """Devices, the one whose ease would help most first."""
        return np.argsort(-(self.load_weight * self.busy + self.wide_weight * self.wide), kind="stable")


def promising(state: State, guess: Guess, source: int) -> Steps:
    """The steps from a device that fit, and of those the ones with the best linear guess."""
    held = np.flatnonzero(state.widths[:, source])
    receivers = np.delete(np.arange(state.problem.devices), source)
    if len(receivers) > RECEIVERS:
        receivers = np.sort(receivers[np.argpartition(guess.load[receivers], RECEIVERS)[:RECEIVERS]])
    if not len(held) or not len(receivers):
        none = np.zeros(0, dtype=np.int64)
        return Steps(source, none, none, none, none, none)
    view = _View(state, guess, source, held, receivers)
    return view.moves() + view.swaps()


class _View:
    """What the source holds, and what every width of it is guessed to add to every receiver, and to the source."""

    def __init__(self, state: State, guess: Guess, source: int, held: Ints, receivers: Ints) -> None:
        self.state, self.guess, self.source, self.held, self.receivers = state, guess, source, held, receivers
        problem = self.problem = state.problem
        self.first, self.least, self.cap = problem.first[held], problem.least[held], problem.cap[held]
        self.mine = state.widths[held, source]  # (n,)
        self.there = state.widths[held][:, receivers]  # (n, B)
        known = np.maximum(self.cap, np.maximum(self.mine, self.there.max(axis=1)))
        width = np.arange(int(known.max()) + 1)
        shards = np.where((width > 0) & (width <= known[:, None]), self.first[:, None] + width, 0)
        problem.price(shards.ravel())
        self.added = problem.vectors[shards] @ guess.slope[np.append(receivers, source)].T  # (n, U, B + 1)
        self.columns = problem.dims[self.first + self.mine] / self.mine  # a unit
        self.leaves = self.added[np.arange(len(held)), self.mine, -1]
        self.gap = guess.load[source] - guess.load[receivers]

    def moves(self) -> Steps:
        """Moves of whole shards, and of those parts of them which level the two devices in ms or in columns."""
        guess, mine = self.guess, self.mine[:, None]
        arrives = self.added[np.arange(len(mine))[:, None], mine, np.arange(len(self.receivers))]
        unit_ms = (arrives + self.leaves[:, None]) / mine + 2 * guess.stick.own_ms * self.columns[:, None]
        level = self.gap / np.maximum(unit_ms, 1e-30)
        even = (guess.dims[self.source] - guess.dims[self.receivers]) / (2 * self.columns[:, None])
        parts = np.empty((6, *level.shape))
        parts[0], parts[1], parts[2], parts[3], parts[5] = mine, level, level + 1, even, 0.5 * mine
        np.minimum(level, even, out=parts[4])
        out = np.minimum(np.maximum(parts, 1), mine).astype(np.int64)  # (P, n, B)
        nothing = np.zeros((1, len(self.receivers)), dtype=np.int64)
        fits, change = self._guess(out, np.arange(len(self.receivers)), nothing, nothing[0], nothing[0])
        fits[1:] &= out[1:] != out[0]
        fits[2:] &= out[2:] != out[1]
        best = _least(np.where(fits, change, np.inf).ravel(), PRICED)
        part, row, column = np.unravel_index(best, out.shape)
        none = np.full(len(best), -1)
        return Steps(
            self.source, self.held[row], out[part, row, column], self.receivers[column], none, np.zeros_like(none)
        )

    def swaps(self) -> Steps:
        """Swaps of whole shards, of a part for a whole one, and of a whole one for a part: as much as levels both devices,
        or as there is memory for."""
        state, problem, guess = self.state, self.problem, self.guess
        take, column = np.nonzero(state.widths[:, self.receivers])
        to = self.receivers[column]
        theirs = state.widths[take, to]
        shards = problem.first[take] + theirs
        problem.price(shards)
        vectors, dims = problem.vectors[shards], problem.dims[shards]
        comes, goes = vectors @ guess.slope[self.source], np.einsum("sk,sk->s", vectors, guess.slope[to])

        mine, own = self.mine[:, None], guess.stick.own_ms
        arrives = self.added[np.arange(len(mine))[:, None], mine, column]  # (n, S)
        give_ms = (arrives + self.leaves[:, None]) / 2 + own * (self.columns * self.mine)[:, None]
        take_ms = (comes + goes) / 2 + own * dims
        half = self.gap[column] / 2
        size = problem.nbytes[self.first + self.mine] / self.mine
        room = (state.free[to] + problem.nbytes[shards]) / np.maximum(size, 1.0)[:, None]
        part = np.minimum(mine * (half + take_ms) / np.maximum(give_ms, 1e-30), room)
        back = theirs * (give_ms - half) / np.maximum(take_ms, 1e-30)
        out, into = np.empty((2, 3, *arrives.shape), dtype=np.int64)
        out[0], out[1], out[2] = mine, np.minimum(np.maximum(part, 1), mine), mine
        into[0], into[1], into[2] = theirs, theirs, np.minimum(np.maximum(back, 1), theirs)
        fits, change = self._guess(out, column, into, comes / theirs, goes / theirs, take)
        fits[1] &= out[1] < mine
        fits[2] &= into[2] < theirs
        best = _least(np.where(fits, change, np.inf).ravel(), PRICED)
        kind, row, pair = np.unravel_index(best, out.shape)
        return Steps(self.source, self.held[row], out[kind, row, pair], to[pair], take[pair], into[kind, row, pair])

    def _guess(
        self, out: Ints, column: Ints, into: Ints, comes: Floats, goes: Floats, take: Ints | None = None
    ) -> tuple[NDArray[np.bool_], Floats]:
        """Whether steps fit, and what they change the yardstick by: `out` units (P, n, S) of every shard to the receiver
        numbered `column` (S,), `into` units of item `take` back, each of which adds `comes` ms here and `goes` ms there."""
        state, problem, guess, source = self.state, self.problem, self.guess, self.source
        to, there, row = self.receivers[column], self.there[:, column], np.arange(len(self.held))[:, None]
        kept, joined = self.mine[:, None] - out, there + out
        least, cap = self.least[:, None], self.cap[:, None]
        fits = (joined <= cap) & (joined >= least) & ((kept == 0) | (kept >= least))
        fits &= (there > 0) | (kept == 0) | (state.shards[self.held] < problem.most[self.held])[:, None]
        joined = np.minimum(joined, cap)
        first = self.first[:, None]
        arrived = problem.nbytes[first + joined] - problem.nbytes[np.where(there > 0, first + there, 0)]
        spare = state.free[to]
        moved = self.columns[:, None] * out
        if take is not None:
            here, left = state.widths[take, source], state.widths[take, to] - into
            fits &= (
                (self.held[:, None] != take) & (here + into <= problem.cap[take]) & (here + into >= problem.least[take])
            )
            fits &= (left == 0) | (left >= problem.least[take])
            fits &= (here > 0) | (left == 0) | (state.shards[take] < problem.most[take])
            gone = (
                problem.nbytes[problem.numbers(take, state.widths[take, to])]
                - problem.nbytes[problem.numbers(take, left)]
            )
            came = problem.nbytes[problem.first[take] + np.minimum(here + into, problem.cap[take])]
            came = came - problem.nbytes[problem.numbers(take, here)]
            released = problem.nbytes[first + self.mine[:, None]] - problem.nbytes[np.where(kept > 0, first + kept, 0)]
            fits &= came - released <= state.free[source]
            spare = spare + gone
            if not problem.free_to_go:
                fits &= problem.allowed[take, source]
            moved = moved - problem.dims[problem.first[take] + 1] * into
        fits &= arrived <= spare
        if not problem.free_to_go:
            fits &= problem.allowed[self.held[:, None], to]
        own = guess.stick.own_ms * moved
        here_load = guess.load[source] + self.added[row, kept, -1] - self.leaves[:, None] + comes * into - own
        there_load = (
            guess.load[to] + self.added[row, joined, column] - self.added[row, there, column] - goes * into + own
        )
        change = guess.change(source, here_load, guess.dims[source] - moved)
        return fits, change + guess.change(to, there_load, guess.dims[to] + moved)


def _least(guess: Floats, count: int) -> Ints:
    """Where the `count` least finite numbers are."""
    best = np.argpartition(guess, count)[:count] if len(guess) > count else np.arange(len(guess))
    return best[np.isfinite(guess[best])]


def price(state: State, guess: Guess, steps: Steps) -> Floats:
    """What each step changes the yardstick by, by the cost model's compute ms of the two devices: (C,)."""
    problem, source, count = state.problem, steps.source, len(steps)
    give_out, give_in = (
        _difference(state, steps.give, source, -steps.out),
        _difference(state, steps.give, steps.to, steps.out),
    )
    here, there = state.sums[source] + give_out[0], state.sums[steps.to] + give_in[0]
    columns = give_in[1]
    taking = np.flatnonzero(steps.take >= 0)
    if len(taking):
        item, units, to = steps.take[taking], steps.into[taking], steps.to[taking]
        take_in, take_out = _difference(state, item, source, units), _difference(state, item, to, -units)
        here[taking] += take_in[0]
        there[taking] += take_out[0]
        columns[taking] -= take_in[1]
    asked = problem.model.compute_ms(np.concatenate([here, there]))
    here_dims, there_dims = state.dims[source] - columns, state.dims[steps.to] + columns
    here_ms, there_ms = np.where(here_dims > 0, asked[:count], 0.0), np.where(there_dims > 0, asked[count:], 0.0)
    load = guess.stick.load
    change: Floats = guess.change(source, load(here_ms, here_dims), here_dims)
    return change + guess.change(steps.to, load(there_ms, there_dims), there_dims)


def _difference(state: State, items: Ints, devices: int | Ints, units: Ints) -> tuple[Floats, Ints]:
    """Vectors and columns that so many units more (or fewer) of each item make on the devices."""
    problem = state.problem
    before = state.widths[items, devices]
    old, new = problem.numbers(items, before), problem.numbers(items, before + units)
    problem.price(new)
    return problem.vectors[new] - problem.vectors[old], problem.dims[new] - problem.dims[old]


def take(state: State, steps: Steps, chosen: int) -> None:
    """Change the state by one of the steps."""
    items, devices, units = changes(steps, chosen)
    state.change(items, devices, state.widths[items, devices] + units)


def changes(steps: Steps, chosen: int) -> tuple[Ints, Ints, Ints]:
    """What one of the steps changes: items, devices, and how many units more or fewer."""
    source, give, out, to = steps.source, steps.give[chosen], steps.out[chosen], steps.to[chosen]
    changed = [(give, source, -out), (give, to, out)]
    if steps.take[chosen] >= 0:
        changed += [(steps.take[chosen], source, steps.into[chosen]), (steps.take[chosen], to, -steps.into[chosen])]
    items, devices, units = np.array(changed).T
    return items, devices, units
