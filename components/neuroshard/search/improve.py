"""Improve a plan: descend to a local optimum, shake it, descend again; the best so far is at hand at any moment."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from neuroshard.costmodel.protocol import Floats
from neuroshard.search.problem import Problem, Widths
from neuroshard.search.start import squeeze
from neuroshard.search.state import State
from neuroshard.search.steps import Guess, Steps, Yardstick, changes, price, promising, take, yardstick
from neuroshard.search.watch import Watch

MIN_GAIN = 1e-6  # share of the slowest device's ms, below which a step is none
SHARPNESS = 6  # of the yardstick of a descent: exponent 64
SOURCES = 2  # devices that steps are tried from, before a plan counts as a local optimum
WORSE = 0.003  # share by which a local optimum may cost more than the one that it was shaken from, to go on from it
AS_CHEAP = 0.005  # share by which plans count as equally cheap, and what to expect of them decides
# Share by which a plan must be expected to be faster than the published search's to be taken instead: at most the first, and at
# most the second of the spread.
WORTH_LEAVING = (0.01, 0.25)
OWN_VARIANCE = 0.5  # of the variance of a device's error, what other devices of the plan do not have as well
KEPT, KEPT_BYTES = 24, 256 * 2**20  # of the plans found, but two at least; more would need memory by the round
PATIENCE = 30  # rounds without a better plan, after which the search goes back to the best

Turn = Callable[[State, Yardstick, np.random.Generator], State | None]  # another plan, or none


def descend(state: State, stick: Yardstick) -> Iterator[State]:
    """The state after each step that makes it more even by the yardstick, until no priced step does.

    Steps go from the devices whose ease would help most. Not every step makes the plan cheaper.
    """
    better = True
    while better:
        guess, better = Guess(state, stick), False
        for source in guess.order()[:SOURCES].tolist():
            steps = promising(state, guess, source)
            if not len(steps):
                continue
            change = price(state, guess, steps)
            best = _affordable(state, steps, change, -MIN_GAIN * guess.slowest)
            if best is not None:
                take(state, steps, best)
                yield state
                better = True
                break


def _affordable(state: State, steps: Steps, change: Floats, most: float) -> int | None:
    """The step of the least change, below `most`, that does not move more bytes than there is a budget for."""
    held = state.problem.held
    if held is None or held.budget_bytes is None:
        best = int(change.argmin())
        return best if change[best] < most else None
    spent = held.total(state.widths)
    for index in np.argsort(change, kind="stable").tolist():
        if change[index] >= most:
            break
        items, devices, units = changes(steps, index)
        rows = {item: state.widths[item].copy() for item in items.tolist()}
        for item, device, more in zip(items.tolist(), devices.tolist(), units.tolist(), strict=True):
            rows[item][device] += more
        if held.affords(state.widths, list(rows), np.array(list(rows.values())), spent):
            return int(index)
    return None


def improve(
    starts: Sequence[State], rounds: int, rng: np.random.Generator, watch: Watch, turn: Turn | None = None
) -> list[State]:
    """The plans that local search ends in from plans that fit, the cheapest first, of those about as cheap.

    A round shakes the plan at hand by a few random steps and descends again; every other round goes by `turn` instead, where
    there is one. It goes on from what it finds if that costs hardly more, and from the best after many rounds in vain.
    """
    stick = yardstick(starts[0].problem, SHARPNESS)
    found: list[State] = []
    for start in starts:
        if not found or not watch.expired:
            found += _descended(start.copy(), stick, watch)
    best = at = min(found, key=_cost)
    vain = 0
    for number in range(rounds):
        if watch.expired:
            break
        turned = turn(at, stick, rng) if turn is not None and number % 2 == 0 else None
        trial = turned or at.copy()
        if turned is None:
            shake(trial, stick, rng)
        ends = _descended(trial, stick, watch)
        trial = ends[0]
        found = _near([*found, *ends])
        vain += 1
        if trial.cost < best.cost * (1 - MIN_GAIN):
            best, vain = trial, 0
        if trial.cost <= at.cost * (1 + WORSE):
            at = trial
        if vain >= PATIENCE:
            at, vain = best, 0
        watch.advance()
    return _near(found)


def _cost(state: State) -> float:
    return state.cost


def _near(found: Sequence[State]) -> list[State]:
    """The cheapest, and those about as cheap."""
    most = min(max(KEPT_BYTES // found[0].widths.nbytes, 2), KEPT)
    ranked = sorted(found, key=_cost)[:most]
    return [state for state in ranked if state.cost <= ranked[0].cost * (1 + AS_CHEAP)]


def trusted(found: Sequence[State], published: State | None = None, at_most_ms: float = np.inf) -> State:
    """Of the plans about as cheap as the cheapest, and of at most `at_most_ms`, the one expected to be the fastest in truth.

    The longer a search, the more of what it gains is the cost model's error. So the plan of the `published` search, which tries
    far fewer, is kept where it is as cheap and hardly more is to be expected of another; and none is taken that costs more.
    """
    cheapest, *others = _near(found)
    near = [cheapest, *(state for state in others if state.cost <= at_most_ms)]
    if published is None:
        return min(near, key=expected_ms)
    best = min([near[0], *(state for state in near if state.cost <= published.cost)], key=expected_ms)
    worth = 1 + min(WORTH_LEAVING[0], WORTH_LEAVING[1] * _spread_ms(published) / published.cost)
    as_cheap = published.cost <= near[0].cost * worth
    return published if as_cheap and expected_ms(published) <= expected_ms(best) * worth else best


def expected_ms(state: State) -> float:
    """What to expect of a plan whose devices are each off by their spread, one this way, another that.

    The more devices are about as slow as the slowest, the later the last of them will be: the expected maximum, for errors of
    Gumbel's distribution, which give it as a sum.
    """
    scale = _spread_ms(state) * np.sqrt(6 * OWN_VARIANCE) / np.pi
    slowest = float(state.ready.max())
    later = scale * np.log(np.exp((state.ready - slowest) / scale).sum()) if scale > 0 else 0.0
    return float(slowest + later + state.forward.max())


def _spread_ms(state: State) -> float:
    """The spread of the device that is told least surely."""
    spread = state.problem.model.spread_ms(state.sums, state.dims)
    return float(np.where(state.dims > 0, spread, 0.0).max())


def _descended(state: State, stick: Yardstick, watch: Watch) -> tuple[State, State]:
    """The cheapest state on the way down, and the one at the end, the most even; cut short where time is up."""
    watch.note(state.cost)
    best = state.copy()
    for step in descend(state, stick):
        watch.note(step.cost, steps=1)
        if step.cost < best.cost:
            best = step.copy()
        if watch.expired:
            break
    return best, state


def shake(state: State, stick: Yardstick, rng: np.random.Generator) -> None:
    """Take some items off a few devices, one of them the one that is ready last, and put them back one by one, cut anew.

    Nothing changes where they find no room.
    """
    problem = state.problem
    devices = [int(state.ready.argmax()), *rng.integers(problem.devices, size=rng.integers(1, 4)).tolist()]
    items = np.flatnonzero(state.widths[:, devices].any(axis=1))
    items = items[rng.random(len(items)) < rng.uniform(0.1, 0.6)]
    if not len(items):
        return
    guess, widths, free = Guess(state, stick), state.widths.copy(), state.free.copy()
    load, column_ms = guess.load.copy(), stick.own_ms + stick.all_ms
    where, at = np.nonzero(widths[items])
    taken = problem.numbers(items[where], widths[items[where], at])
    np.add.at(free, at, problem.nbytes[taken])
    removed = np.einsum("sk,sk->s", problem.vectors[taken], guess.slope[at]) + column_ms * problem.dims[taken]
    load += stick.all_ms * state.dims
    np.subtract.at(load, at, removed)
    widths[items] = 0

    whole = problem.first[items] + problem.cap[items]
    problem.price(whole)
    weight = (problem.vectors[whole] @ guess.slope.mean(axis=0)) * problem.widest[items] / problem.cap[items]
    lost: list[tuple[int, int]] = []
    for index in np.argsort(-weight * rng.uniform(0.7, 1.4, len(items))).tolist():
        item = int(items[index])
        heavy = weight[index] / max(float(state.ready.mean()), 1e-30)
        for units in _parts(problem, item, heavy, rng):
            shard = int(problem.first[item]) + units
            problem.price(np.array([shard]))
            ms = load + guess.slope @ problem.vectors[shard] + column_ms * problem.dims[shard]
            room = (free >= problem.nbytes[shard]) & problem.allowed[item] & (widths[item] == 0)
            if not room.any():
                lost.append((item, units))
                continue
            device = int(np.where(room, ms, np.inf).argmin())
            widths[item, device], load[device] = units, ms[device]
            free[device] -= problem.nbytes[shard]
    if squeeze(problem, widths, free, lost) and _within_budget(problem, widths):
        where, at = np.nonzero(widths != state.widths)
        if len(where):
            state.change(where, at, widths[where, at])


def _within_budget(problem: Problem, widths: Widths) -> bool:
    held = problem.held
    return held is None or held.budget_bytes is None or held.total(widths) <= held.budget_bytes


def _parts(problem: Problem, item: int, heavy: float, rng: np.random.Generator) -> list[int]:
    """Units of the parts that an item is cut into: seldom more than it must be, more often where it is heavy; half of the
    cuts as even as can be, half anywhere."""
    widest, most = int(problem.widest[item]), int(min(problem.most[item], problem.allowed[item].sum()))
    size, largest = int(problem.nbytes[problem.whole[item]]), int(problem.memory[problem.allowed[item]].max())
    fewest = max(-(-widest // int(problem.cap[item])), -(-size // max(largest, 1)))
    count = fewest + (int(rng.integers(1, 4)) if rng.random() < 0.1 + heavy else 0)
    least = int(problem.least[item])
    count = max(1, min(count, most, widest // least))
    if count > 1 and rng.random() < 0.5:
        places = least * np.sort(rng.choice(np.arange(1, widest // least), size=count - 1, replace=False))
        parts = np.diff(places, prepend=0, append=widest)
        if parts.max() <= problem.cap[item]:
            return [*map(int, sorted(parts, reverse=True))]
    return [widest // count + (part < widest % count) for part in range(count)]
