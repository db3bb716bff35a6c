"""Plans with some tables row-wise: greedy plans for the sets of tables that an estimate ranks best.

The narrowest column shard of a table has all its lookups, so one heavy table can outweigh all else however it is cut. Its row
blocks have a share of the lookups each, but every device then sends all its columns. So sets are sought in two orders of the
tables: by what their narrowest shard takes, longest first; and by what their blocks save, all taken together.
"""

from itertools import combinations

import numpy as np

from neuroshard.core.text import counted
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State, column_ms, transfers
from neuroshard.search.proposers.base import ProposalRequest
from neuroshard.search.proposers.greedy import first_plans


def propose(problem: Problem, request: ProposalRequest) -> list[State]:
    """A greedy plan for each of the sets of tables that are estimated to cost least; none where no table may be row-wise."""
    found = []
    for groups in _sets(problem):
        there = problem.with_row_wise(groups)
        if there is not None:
            found += first_plans(there, 1)
    return sorted(found, key=lambda state: state.cost)


def worth_allowing(problem: Problem, found: State, request: ProposalRequest) -> list[str]:
    """A note for the plan if splitting tables row-wise, which the task does not allow, costs far less at the first try."""
    tuning = problem.tuning
    if problem.devices * len(problem.whole) > tuning.row_wise_hint_most_cells:
        return []
    task, constraints = problem.task, problem.task.constraints.model_copy(update={"row_wise": True})
    allowed = task.model_copy(update={"constraints": constraints})
    plans = propose(Problem(allowed, problem.model, tuning), request)
    if not plans or plans[0].cost > found.cost * (1 - tuning.row_wise_hint):
        return []
    return [
        f"with {counted(len(plans[0].problem.row_wise), 'table')} split row-wise, a first try costs {plans[0].cost:.3f} ms, "
        f"{1 - plans[0].cost / found.cost:.0%} less than this plan; --row-wise lets a search do so"
    ]


def _sets(problem: Problem) -> list[Ints]:
    """The sets of table groups that are estimated to cost least, some of each order; of few groups, all sets."""
    permitted, tuning = problem.row_blocks.groups, problem.tuning
    if len(permitted) <= tuning.all_row_sets_up_to:
        counts = range(1, len(permitted) + 1)
        return [np.array(some) for count in counts for some in combinations(permitted.tolist(), count)]
    estimate = _SetCosts(problem)
    heaviest = permitted[np.argsort(-estimate.narrow_ms[permitted], kind="stable")]
    saving = permitted[np.argsort(-estimate.saved_ms, kind="stable")][: np.count_nonzero(estimate.saved_ms > 0)]
    sets: dict[bytes, Ints] = {}
    for order in (heaviest, saving):
        counts_tried = _counts(len(order), tuning.row_sets_one_by_one)
        if not len(counts_tried):
            continue
        costs = estimate.costs(order, counts_tried)
        for best in np.argsort(costs, kind="stable")[: tuning.row_sets].tolist():
            if np.isfinite(costs[best]):
                groups = np.sort(order[: counts_tried[best]])
                sets.setdefault(groups.tobytes(), groups)
    return list(sets.values())


def _counts(most: int, one_by_one: int) -> Ints:
    """Numbers of tables to try: 1, 2, 3 …, then in growing steps."""
    counts, count = [], 1
    while count <= most:
        counts.append(count)
        count += max(1, (count - one_by_one) // 5)
    return np.array(counts, dtype=np.int64)


class _SetCosts:
    """What plans cost with some groups row-wise if all else could be spread evenly: see `costs`.

    `narrow_ms` (G,) is what the narrowest shard of a group takes alone, infinite if no device has room for it; `saved_ms` (P,)
    what all devices together save with the blocks of a group instead of the group whole, by a linear estimate.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, blocks, devices = problem, problem.row_blocks, problem.devices
        narrow = problem.first + np.maximum(-(-problem.all_units // problem.max_devices), problem.min_units)
        fits = problem.nbytes[narrow] <= problem.roomiest()
        self.narrow, self.narrow_ms = narrow, np.where(fits, problem.alone_ms(narrow), np.inf)
        widest = problem.first + problem.max_units
        problem.price(widest)
        self.vectors = problem.vectors[widest] * (problem.all_units / problem.max_units)[:, None]
        self.all_blocks: Floats = blocks.vectors[:, 0] * (devices - 1) + blocks.vectors[:, 1]
        slope = problem.model.compute_slope(self.vectors.sum(axis=0) / devices)
        all_to_all = devices * column_ms(problem, problem.mean_columns) * blocks.more
        self.saved_ms: Floats = (self.vectors[blocks.groups] - self.all_blocks) @ slope - all_to_all

    def costs(self, order: Ints, counts: Ints) -> Floats:
        """Ms if the first `counts` (C,) groups of an order are row-wise: (C,). Infinite if a device has no room for the blocks.

        The slowest device holds the blocks, and either its share of all the rest or the heaviest narrowest shard.
        """
        problem, model, devices = self.problem, self.problem.model, self.problem.devices
        positions, last = problem.row_blocks.positions(order), counts - 1
        nbytes = problem.row_blocks.nbytes[positions].cumsum(axis=0)[last]
        fits = (nbytes[:, :1] <= problem.memory[:-1]).all(axis=1) & (nbytes[:, 1] <= problem.memory[-1])
        block = problem.row_blocks.vectors[positions, 0].cumsum(axis=0)[last]
        more = (self.all_blocks[positions] - self.vectors[order]).cumsum(axis=0)[last]
        mean = model.compute_ms((self.vectors.sum(axis=0) + more) / devices)
        columns = problem.mean_columns + problem.row_blocks.more[positions].cumsum()[last]
        forward, backward = transfers(problem, np.repeat(columns[:, None], devices, axis=1))

        others = np.delete(np.arange(len(self.narrow)), order)
        left = np.concatenate([order, others])
        worst = np.array(
            [left[count:][self.narrow_ms[left[count:]].argmax()] if count < len(left) else -1 for count in counts]
        )
        heavy = problem.vectors[self.narrow[worst]] * (worst >= 0)[:, None]
        heaviest = np.where(np.isfinite(self.narrow_ms[worst]) | (worst < 0), model.compute_ms(block + heavy), np.inf)
        launched = [problem.launches.of(order[:count]).total_ms for count in counts.tolist()]
        costs: Floats = np.maximum(mean, heaviest) + (forward + backward).mean(axis=-1) + launched
        return np.where(fits, costs, np.inf)
