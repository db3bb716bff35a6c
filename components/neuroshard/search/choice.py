"""Which of the plans found to take: one that is expected to be fast, rather than the one that is predicted to be the fastest.

A strong search finds what its cost model gets wrong. So plans are compared under errors drawn at random: the same errors in all
of them, since the error of a table, and of a part of it, goes wherever that lies, and plans that share them are off alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.state import State

AS_CHEAP = 0.005  # share by which plans count as equally cheap, and what to expect of them decides
KEPT, KEPT_BYTES = 24, 256 * 2**20  # of the plans found, but two at least; more would need memory by the round
DRAWS = 256  # of errors; each counts with its opposite as well
# of the variance of a device's error: comes with its tables however wide, the rest with parts of that width
OF_TABLES = 0.5
MOST_OFF = 0.05  # share of a device's ms that errors tell plans apart by at most: a cost model that is further off is so for all
FAR = 3.0  # deviations between two devices, beyond which the faster one is never the last
# Deviations by which nets are taken to be off on a device with one part, half as many with two, a third with three. They fall
# with no table, while a part all alone fills no GPU; and what is chosen for being cheap is: the late devices of 60 tasks are
# predicted 2.4 % too fast with one part, 0.7 % with two and 0.3 % too slow with more.
FEW = 1.0
# How much more a ms counts by which a plan may turn out slower than the published search's; and one with rows, than the best by
# columns, which was sought as hard.
REGRET, REGRET_ROWS = 2.0, 0.5


def near(found: Sequence[State]) -> list[State]:
    """The cheapest, and those about as cheap, each once."""
    most = min(max(KEPT_BYTES // found[0].widths.nbytes, 2), KEPT)
    kept: list[State] = []
    for state in sorted(found, key=lambda state: state.cost):
        if len(kept) == most or (kept and state.cost > kept[0].cost * (1 + AS_CHEAP)):
            break
        if not any(state.cost == one.cost and _same(state, one) for one in kept[-3:]):
            kept.append(state)
    return kept


def _same(one: State, other: State) -> bool:
    return np.array_equal(one.problem.row_wise, other.problem.row_wise) and np.array_equal(one.widths, other.widths)


def trusted(
    found: Sequence[State], instead: State | None = None, regret: float = REGRET, at_most_ms: float = np.inf
) -> State:
    """Of the plans about as cheap as the cheapest, and of at most `at_most_ms`, the one expected to be the fastest in truth.

    The longer a search, the more of what it gains is the cost model's error. So the plan that would be had `instead`, such as
    that of the published search, which tries far fewer, is left only for one that is expected to be faster even if what may be
    lost counts more than what may be gained, by `regret`; and none is taken that costs more.
    """
    cheapest, *others = near(found)
    plans = [cheapest, *(state for state in others if state.cost <= at_most_ms)]
    if instead is None:
        return plans[int(drawn_ms(plans).mean(axis=1).argmin())]
    plans = [*(state for state in plans if state.cost <= instead.cost), instead]
    ms = drawn_ms(plans)
    lost = np.maximum(ms - ms[-1], 0.0)
    return plans[int((ms + regret * lost).mean(axis=1).argmin())]


def expected_ms(state: State) -> float:
    """What to expect of a plan: the more devices are about as slow as the slowest, the later the last of them will be."""
    return float(drawn_ms([state]).mean())


def drawn_ms(states: Sequence[State]) -> Floats:
    """What P plans of one task cost under errors of the cost model drawn at random: (P, 2 x DRAWS).

    The error of a device is normal, with the deviation that the cost model tells. It is the sum of errors of the tables and of
    the parts that lie there, each by the root of its share of the device's ms; so devices are off alike as far as they hold the
    same.
    """
    plans = [_Doubts.of(state) for state in states]
    parts, part = np.unique(np.concatenate([one.parts for one in plans]), return_inverse=True)
    rng = np.random.default_rng(0)  # chance decides nothing here that a seed should
    of_tables = np.float32(OF_TABLES**0.5) * rng.standard_normal((len(states[0].widths), DRAWS), dtype=np.float32)
    of_parts = np.float32((1 - OF_TABLES) ** 0.5) * rng.standard_normal((len(parts), DRAWS), dtype=np.float32)
    drawn, begin = np.empty((len(plans), 2, DRAWS)), 0
    for place, one in enumerate(plans):
        end = begin + len(one.parts)
        errors = one.roots[:, None] * (of_tables[one.items] + of_parts[part[begin:end]])
        off = one.spread[:, None] * np.add.reduceat(errors, one.begins)
        drawn[place, 0] = np.maximum((one.ready[:, None] + off).max(axis=0), one.idle_ready)
        drawn[place, 1] = np.maximum((one.ready[:, None] - off).max(axis=0), one.idle_ready)
        drawn[place] += one.ahead
        begin = end
    return drawn.reshape(len(plans), 2 * DRAWS)


@dataclass(frozen=True)
class _Doubts:
    """How far the devices of a plan may be off that may be its last (R,), and by what lies there: S parts, device by device.

    Of parts: `items` (S,), `parts` (S,), a number for each width of each item and for its rows, `roots` (S,) of shares of
    the device's ms. Of devices: `begins` (R,) of their parts, and ms `ready` and `spread`.
    """

    items: Ints
    parts: Ints
    roots: Floats
    begins: Ints
    ready: Floats
    spread: Floats
    idle_ready: float  # ms at which the last device is ready that holds nothing
    ahead: float  # ms of the forward all-to-all

    @classmethod
    def of(cls, state: State) -> "_Doubts":
        problem, model = state.problem, state.problem.model
        # of their compute: one device alone needs no all-to-all
        alone = model.spread_ms(state.sums[:, None], state.dims[:, None])[:, 0]
        spread = np.minimum(alone, MOST_OFF * state.compute)
        busy = state.dims > 0
        ready = state.ready
        if isinstance(model, TrainedCostModel):
            ready = ready + FEW * spread / np.maximum(np.count_nonzero(state.widths, axis=0) + len(problem.row_wise), 1)
        surely = np.where(busy, ready - FAR * spread, 0.0).max()
        devices = np.flatnonzero(busy & (ready + FAR * spread >= surely))

        items, on = np.nonzero(state.widths[:, devices])
        shards = problem.first[items] + state.widths[items, devices[on]]
        slope = np.maximum(model.compute_slope(state.sums[devices]), 0.0)
        ms = np.einsum("sk,sk->s", problem.vectors[shards], slope[on])
        parts = shards
        if len(row_wise := problem.row_wise):
            blocks = problem.row_blocks.vectors[problem.row_blocks.places(row_wise)]  # (P, 2, K)
            is_last = (devices == problem.devices - 1).astype(np.int64)
            in_blocks = np.einsum("prk,rk->pr", blocks[:, is_last], slope)
            every = np.repeat(np.arange(len(devices)), len(row_wise))
            items, on = np.concatenate([items, np.tile(row_wise, len(devices))]), np.concatenate([on, every])
            parts = np.concatenate([parts, np.tile(len(problem.item) + row_wise, len(devices))])
            ms = np.concatenate([ms, in_blocks.T.ravel()])

        order = np.argsort(on, kind="stable")
        ms, on = np.maximum(ms[order], 1e-30), on[order]
        begins = np.flatnonzero(np.diff(on, prepend=-1))
        total = np.add.reduceat(ms, begins)
        return cls(
            items=items[order],
            parts=parts[order],
            roots=np.sqrt(ms / total[on]).astype(np.float32),
            begins=begins,
            ready=ready[devices],
            spread=spread[devices],
            idle_ready=float(state.ready[~busy].max(initial=0.0)),
            ahead=float(state.forward.max()),
        )
