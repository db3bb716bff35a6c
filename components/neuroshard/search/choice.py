"""Which of the plans found to take: the one expected to be fast, not the one predicted to be the fastest; and whether fewer
cuts are worth a little of that.

A strong search finds what its cost model gets wrong. So plans are compared under random errors of the cost model. All plans get
the same errors: the error of a table, or of a part of it, moves with it, so plans that share it are wrong by the same amount.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.current import CurrentPlacement
from neuroshard.search.problem.state import State, about_as_cheap


def choose(found: Sequence[State], instead: State | None = None, at_most_ms: float = np.inf) -> State:
    """Of the plans about as cheap as the cheapest, and of at most `at_most_ms`, the one expected to be the fastest.

    The longer a search runs, the more of its gain is the cost model's error. So a safer plan, `instead`, is given up only for one
    that costs no more and is expected to be faster even though a loss counts more than a gain.
    """
    tuning = found[0].problem.tuning
    if not tuning.choice_under_doubt:
        return min([*found, *([instead] if instead else [])], key=lambda state: state.cost)
    cheapest, *others = about_as_cheap(found)
    plans = [cheapest, *(state for state in others if state.cost <= at_most_ms)]
    if instead is None:
        return plans[int(drawn_ms(plans).mean(axis=1).argmin())]
    plans = [*(state for state in plans if state.cost <= instead.cost), instead]
    ms = drawn_ms(plans)
    lost = np.maximum(ms - ms[-1], 0.0)
    return plans[int((ms + tuning.regret * lost).mean(axis=1).argmin())]


def simplest(plans: Sequence[State], simplicity: float, current: CurrentPlacement | None = None) -> State:
    """The plan with the fewest cuts, among those that cost at most the share `simplicity` more than the first one, both as
    predicted and as expected. Of equally few cuts: the one that moves least, then the one expected to be the fastest."""
    near = [state for state in plans if state.cost <= plans[0].cost * (1 + simplicity)]
    doubt = plans[0].problem.tuning.choice_under_doubt
    expected = drawn_ms(near).mean(axis=1) if doubt else np.array([state.cost for state in near])

    def key(place: int) -> tuple[int, int, float]:
        state = near[place]
        moving = 0 if current is None else current.moving_bytes(state.problem, state.widths)
        return state.cuts, moving, float(expected[place])

    return near[min(np.flatnonzero(expected <= expected[0] * (1 + simplicity)).tolist(), key=key)]


def drawn_ms(states: Sequence[State]) -> Floats:
    """What P plans of one task cost under errors of the cost model drawn at random: (P, 2 x draws), in ms.

    The error of a device is normal, with the deviation that the cost model states. It is the sum of errors of its table groups
    and of its shards, each in proportion to the root of its share of the device's ms. So the errors of two devices correlate as
    far as the devices hold the same.
    """
    tuning = states[0].problem.tuning
    plans = [_Doubts.of(state) for state in states]
    shards, shard = np.unique(np.concatenate([one.shards for one in plans]), return_inverse=True)
    rng = np.random.default_rng(0)  # the same errors whatever the seed of the search
    of_tables = np.float32(tuning.error_of_tables**0.5) * rng.standard_normal(
        (len(states[0].widths), tuning.draws), dtype=np.float32
    )
    of_shards = np.float32((1 - tuning.error_of_tables) ** 0.5) * rng.standard_normal(
        (len(shards), tuning.draws), dtype=np.float32
    )
    drawn, begin = np.empty((len(plans), 2, tuning.draws)), 0
    for place, one in enumerate(plans):
        end = begin + len(one.shards)
        errors = one.roots[:, None] * (of_tables[one.groups] + of_shards[shard[begin:end]])
        off = one.spread[:, None] * np.add.reduceat(errors, one.begins)
        drawn[place, 0] = np.maximum((one.ready[:, None] + off).max(axis=0), one.idle_ready)
        drawn[place, 1] = np.maximum((one.ready[:, None] - off).max(axis=0), one.idle_ready)
        drawn[place] += one.ahead
        begin = end
    return drawn.reshape(len(plans), 2 * tuning.draws)


@dataclass(frozen=True)
class _Doubts:
    """Errors of the R devices of a plan that may end last, and the S shards that they hold, device by device.

    Of shards: `groups` (S,), `shards` (S,), a number for each width of each group and for its row block, `roots` (S,) of their
    shares of the device's ms. Of devices: `begins` (R,) of their shards, and ms `ready` and `spread`.
    """

    groups: Ints
    shards: Ints
    roots: Floats
    begins: Ints
    ready: Floats
    spread: Floats
    idle_ready: float  # ms at which the last device that holds nothing is ready
    ahead: float  # ms of the forward all-to-all and of launches

    @classmethod
    def of(cls, state: State) -> "_Doubts":
        problem, model, tuning = state.problem, state.problem.model, state.problem.tuning
        # the spread of their compute: one device alone needs no all-to-all
        alone = model.spread_ms(state.sums[:, None], state.dims[:, None])[:, 0]
        spread = np.minimum(alone, tuning.most_error * state.compute)
        busy, ready = state.dims > 0, state.ready
        surely = np.where(busy, ready - tuning.far * spread, 0.0).max()
        devices = np.flatnonzero(busy & (ready + tuning.far * spread >= surely))

        groups, on = np.nonzero(state.widths[:, devices])
        shards = problem.first[groups] + state.widths[groups, devices[on]]
        slope = np.maximum(model.compute_slope(state.sums[devices]), 0.0)
        ms = np.einsum("sk,sk->s", problem.vectors[shards], slope[on])
        if len(row_wise := problem.row_wise):
            in_blocks = problem.row_blocks.ms(row_wise, problem.domains, devices, slope)
            of, where = np.nonzero(np.isfinite(in_blocks))
            groups, on = np.concatenate([groups, row_wise[of]]), np.concatenate([on, where])
            shards = np.concatenate([shards, len(problem.group) + row_wise[of]])
            ms = np.concatenate([ms, in_blocks[of, where]])

        order = np.argsort(on, kind="stable")
        ms, on = np.maximum(ms[order], 1e-30), on[order]
        begins = np.flatnonzero(np.diff(on, prepend=-1))
        total = np.add.reduceat(ms, begins)
        return cls(
            groups=groups[order],
            shards=shards[order],
            roots=np.sqrt(ms / total[on]).astype(np.float32),
            begins=begins,
            ready=ready[devices],
            spread=spread[devices],
            idle_ready=float(ready[~busy].max(initial=0.0)),
            ahead=float(state.forward.max()) + state.launched_ms,
        )
