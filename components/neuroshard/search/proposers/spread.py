"""Plans with some tables spread: greedy plans for the sets of tables that an estimate ranks best.

The narrowest column shard of a table has all its lookups, so one heavy table can outweigh all else however it is cut. Its row
blocks have a share of the lookups each, but each of their devices then sends all its columns. So sets are sought in two orders of
the tables: by what their narrowest shard takes, longest first; and by what their blocks save, all taken together. Where memory is
nearly full, or tables are larger than a device, also with the largest 1, 2, 3, … before the others: column shards repeat the
optimizer state of rows, and blocks do not.

A copy of a table saves a device its outputs, of as many columns for all samples, and takes gradients of as many columns for all
rows: the fewer rows, the better. So of the tables in order of their rows the first 1, 2, 4, … are tried as copies, and those of
at most 1, 2, 4, … rows.
"""

from bisect import bisect_right
from itertools import groupby, product
from operator import itemgetter

import numpy as np

from neuroshard.core.sharding import SHARDINGS
from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.filling import whole_vectors
from neuroshard.search.problem.kinds import OVER_ALL, OVER_DOMAIN
from neuroshard.search.problem.launches import WHOLE
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State, column_ms
from neuroshard.search.proposers.greedy import first_plans

Set = tuple[float, Ints, Ints]  # what it is estimated to cost in ms, 0 if that is not; groups, and the place of each


def row_wise_plans(problem: Problem, most_ms: float = np.inf) -> list[State]:
    """A greedy plan for each of the sets of tables that are estimated to cost least, and no more than `most_ms`; none where no
    table may be row-wise. All are beside the tables that the problem has spread."""
    return _first_plans(problem, _sets(problem.root, most_ms))


def plans_with_copies(problem: Problem) -> list[State]:
    """A greedy plan for each number of tables that are copied, beside those that the problem has spread; and, where all others
    may be split row-wise in one way, one in which they are. None where no table may be copied."""
    options, way = problem.options, problem.options.copied
    if way < 0:
        return []
    may_be = np.flatnonzero(options.allowed[:, way])
    rows = np.array([options.tables[position].rows for position in may_be.tolist()], dtype=np.int64)
    order = may_be[np.argsort(rows, kind="stable")]
    powers = range(int(rows.max(initial=1)).bit_length() + 1)
    counts = {bisect_right(np.sort(rows).tolist(), 2**power) for power in powers} | set(
        _counts(len(rows), problem.tuning.copies_one_by_one).tolist()
    )
    every = [options.groups[np.sort(order[:count])] for count in sorted(counts - {0})]
    sets = [(0.0, groups, np.full(len(groups), options.place_of(way))) for groups in every]
    return _first_plans(problem, [*sets, *(more for some in sets for more in _with_all_others_split(problem, some))])


def _with_all_others_split(problem: Problem, some: Set) -> list[Set]:
    """These groups at these places, and all others split row-wise: over all devices and over domains, where they may be. Without
    column shards outputs need not be put into order, which single tables do not show."""
    options, (_, groups, places), found = problem.options, some, list[Set]()
    others = np.setdiff1d(np.flatnonzero(problem.whole), groups)
    for way in (OVER_ALL, OVER_DOMAIN)[: 1 + options.over_domains] if np.isin(others, options.groups).all() else ():
        if len(others) and options.allowed[options.positions(others), way].all():
            at = _places(problem, others, np.full(len(others), way))
            found.append((0.0, np.concatenate([groups, others]), np.concatenate([places, at])))
    return found


def _first_plans(problem: Problem, sets: list[Set]) -> list[State]:
    """The cheapest greedy plan with each of these sets, beside the groups that the problem has spread; of estimated ones until
    some in a row are no cheaper."""
    found, spread, at, idle = list[State](), problem.spread, problem.places, 0
    for cost, groups, places in sets:
        best = min((plan.cost for plan in found), default=np.inf)
        if cost and idle >= problem.tuning.row_sets_idle:
            break
        others = ~np.isin(groups, spread)
        there = problem.root.with_spread(np.concatenate([spread, groups[others]]), np.concatenate([at, places[others]]))
        plans = [] if there is None else first_plans(there, 1)
        idle = 0 if any(plan.cost < best for plan in plans) else idle + len(plans)
        found += plans
    return sorted(found, key=lambda state: state.cost)


def _sets(problem: Problem, most_ms: float) -> list[Set]:
    """The sets of groups split row-wise, and the place of each, that are estimated to cost least, and no more than `most_ms`; the
    cheapest first."""
    options, tuning = problem.options, problem.tuning
    split_rows = [way for way, kind in enumerate(options.kinds) if kind.sharding.splits_rows]
    permitted = options.groups[options.allowed[:, split_rows].any(axis=1)]
    estimate, found = _SetCosts(problem), dict[bytes, Set]()
    nbytes = problem.nbytes[problem.whole]
    largest = permitted[np.argsort(-nbytes[permitted], kind="stable")]
    for _, alike in groupby(split_rows, key=lambda way: options.kinds[way].sharding):
        some = tuple(alike)
        heaviest = permitted[np.argsort(-estimate.narrow_ms[permitted], kind="stable")]
        saved_ms = estimate.saved_ms[options.positions(permitted)][:, list(some)].max(axis=1)
        saving = permitted[np.argsort(-saved_ms, kind="stable")][: np.count_nonzero(saved_ms > 0)]
        orders = [(heaviest, 0), (saving, 0)]
        # where no device holds a table whole, its shards fill some devices, and leave others no room for blocks
        least_bytes = (tuning.large if problem.is_full else 1.0) * problem.memory.max()
        if many := int(np.count_nonzero(nbytes[permitted] >= least_bytes)):
            counts = _counts(many, tuning.row_sets_one_by_one)
            cells = tuning.full_sets_most_cells if problem.is_full else tuning.larger_sets_most_cells
            most = max(cells // (problem.devices * len(problem.whole)), 2)
            counts = counts[np.unique(np.linspace(len(counts) - 1, 0, most).round().astype(np.int64))]
            big = largest[:many]  # by bytes, and by what their blocks cost for these bytes
            lost_ms = np.maximum(-estimate.saved_ms[options.positions(big)][:, list(some)].max(axis=1), 0.0)
            cheapest = big[np.argsort(lost_ms / nbytes[big], kind="stable")]
            firsts = (big, cheapest)
            orders += [(_first_of(first, heaviest, count), count) for count in counts.tolist() for first in firsts]
        for order, least in orders:
            for one in _sets_of(problem, estimate, order, some, most_ms, least):
                found.setdefault(one[1].tobytes() + one[2].tobytes(), one)
    return sorted(found.values(), key=itemgetter(0))


def _first_of(order: Ints, others: Ints, count: int) -> Ints:
    """The first `count` groups of an order, then the rest in the order of the `others`."""
    return np.concatenate([order[:count], others[~np.isin(others, order[:count])]])


def _sets_of(
    problem: Problem, estimate: "_SetCosts", order: Ints, ways: tuple[int, ...], most_ms: float, least: int = 0
) -> list[Set]:
    """Of the sets that are the first 1, 2, 3 … groups of an order, from `least` on, those that are estimated to cost least, and
    no more than `most_ms`. All groups of a set are split in one of these ways; where there are domains also the first few in one
    of them, and the rest over a domain:

        the order       a b c d e f g …
        in one way      [w w w w w]         row_sets of these
        over domains    [w w d d d d]       and row_sets of these

    A group that may not be split as wanted is split in the first way that it may.
    """
    tuning, options = problem.tuning, problem.options
    counts = _counts(len(order), max(tuning.row_sets_one_by_one, least))
    counts = counts[counts >= least]
    in_one_way = [(np.full(len(order), way), counts) for way in ways]
    leading = tuning.row_sets_leading if options.over_domains and ways != (OVER_DOMAIN,) else ()
    over_domains = [
        (np.where(np.arange(len(order)) < first, way, OVER_DOMAIN), counts[counts > first])
        for way, first in product(ways, leading)
    ]
    allowed = options.allowed[options.positions(order)]
    found: list[Set] = []
    for kind in (in_one_way, over_domains):
        tried: list[tuple[float, Ints, int]] = []
        for wanted, longer in kind:
            may = np.take_along_axis(allowed, wanted[:, None], axis=1)[:, 0]
            split = np.where(may, wanted, allowed.argmax(axis=1))  # the first way is never a copy: rows may be split
            costs = estimate.costs(order, split, longer) if len(longer) else np.zeros(0)
            tried += [(cost, split, count) for cost, count in zip(costs.tolist(), longer.tolist(), strict=True)]
        for cost, split, count in sorted(tried, key=itemgetter(0))[: tuning.row_sets]:
            if np.isfinite(cost) and cost <= most_ms:
                by_number = np.argsort(order[:count])
                places = _places(problem, order[:count], split[:count])
                found.append((cost, order[:count][by_number], places[by_number]))
    return found


def _places(problem: Problem, groups: Ints, ways: Ints) -> Ints:
    """The place of each group: each, heaviest first, goes where the blocks of those before take the least time."""
    options = problem.options
    places = np.full(len(groups), options.place_of(OVER_ALL))
    over = np.flatnonzero(ways != OVER_ALL)
    if not len(over):
        return places
    vectors = options.of_fullest(options.vectors, options.positions(groups[over]), ways[over])
    ms = np.maximum(vectors @ problem.model.compute_slope(vectors.sum(axis=0)), 0.0)
    load = np.zeros(problem.devices)
    for one in np.argsort(-ms, kind="stable").tolist():
        way = int(ways[over[one]])
        devices = options.kinds[way].devices
        start = int(load.reshape(-1, devices).max(axis=1).argmin()) * devices
        places[over[one]] = options.place_of(way, start)
        load[start : start + devices] += max(ms[one], 1e-30)
    return places


def _counts(most: int, one_by_one: int) -> Ints:
    """Numbers of tables to try: 1, 2, 3 …, then in growing steps."""
    counts, count = [], 1
    while count <= most:
        counts.append(count)
        count += max(1, (count - one_by_one) // 5)
    return np.array(counts, dtype=np.int64)


class _SetCosts:
    """What plans cost with some groups row-wise if all else could be spread evenly: see `costs`.

    `narrow_ms` (G,) is what the narrowest shard of a group takes alone, infinite if no device has room for it; `saved_ms` (P, W)
    what all devices together save with the blocks of a group instead of the group whole, by a linear estimate.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, options, devices = problem, problem.options, problem.devices
        self.narrow_ms = problem.narrowest_ms()
        self.vectors = whole_vectors(problem)
        self.all_pieces: Floats = options.all_pieces
        slope = problem.model.compute_slope(self.vectors.sum(axis=0) / devices)
        all_to_all = devices * column_ms(problem, problem.mean_columns) * options.more
        self.saved_ms: Floats = (self.vectors[options.groups, None] - self.all_pieces) @ slope - all_to_all

    def costs(self, order: Ints, ways: Ints, counts: Ints) -> Floats:
        """Ms if the first `counts` (C,) groups of an order are row-wise, each in its way: (C,). Infinite if a device has no
        room for the blocks. Those over one domain are taken to be spread evenly over the domains.

        The slowest device holds the blocks, and either its share of all the rest or the heaviest narrowest shard; or one block
        alone, which over a domain is more than a device's share of it.
        """
        problem, model, devices = self.problem, self.problem.model, self.problem.devices
        options, last = problem.options, counts - 1
        positions = options.positions(order)
        share = np.array([kind.devices for kind in options.kinds])[ways] / devices  # of the devices, that have a block
        nbytes = (options.nbytes[positions, ways] * share[:, None]).cumsum(axis=0)[last]
        others = nbytes[:, :-1].max(axis=1, keepdims=True)
        fits = (others <= problem.memory[:-1]).all(axis=1) & (nbytes[:, -1] <= problem.memory[-1])
        blocks = options.of_fullest(options.vectors, positions, ways)
        block, alone = (blocks * share[:, None]).cumsum(axis=0)[last], model.compute_ms(blocks)
        more = (self.all_pieces[positions, ways] - self.vectors[order]).cumsum(axis=0)[last]
        mean = model.compute_ms((self.vectors.sum(axis=0) + more) / devices)
        columns = problem.mean_columns + options.more[positions, ways].cumsum()[last]
        forward, backward = transfers_ms(problem.model, np.repeat(columns[:, None], devices, axis=1))

        others = np.delete(np.arange(len(self.narrow_ms)), order)
        left = np.concatenate([order, others])
        worst = np.array(
            [left[count:][self.narrow_ms[left[count:]].argmax()] if count < len(left) else -1 for count in counts]
        )
        heavy = problem.vectors[problem.narrowest[worst]] * (worst >= 0)[:, None]
        heaviest = np.where(np.isfinite(self.narrow_ms[worst]) | (worst < 0), model.compute_ms(block + heavy), np.inf)
        heaviest = np.maximum(heaviest, np.maximum.accumulate(alone)[last])
        of_kind = np.array([SHARDINGS.index(kind.sharding) for kind in options.kinds])[ways]
        held = np.full((len(counts), len(self.narrow_ms)), WHOLE)
        held[:, order] = np.where(np.arange(len(order)) < counts[:, None], of_kind, WHOLE)
        launched = problem.launches.of(held)
        costs: Floats = np.maximum(mean, heaviest) + (forward + backward).mean(axis=-1) + launched
        return np.where(fits, costs, np.inf)
