"""Plans with some tables row-wise: greedy plans for the sets of tables that an estimate ranks best.

The narrowest column shard of a table has all its lookups, so one heavy table can outweigh all else however it is cut. Its row
blocks have a share of the lookups each, but each of their devices then sends all its columns. So sets are sought in two orders of
the tables: by what their narrowest shard takes, longest first; and by what their blocks save, all taken together.
"""

from itertools import product

import numpy as np

from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.row_blocks import EVERYWHERE, FIRST_GRID, OVER_ALL, OVER_DOMAIN
from neuroshard.search.problem.state import State, column_ms
from neuroshard.search.proposers.greedy import first_plans


def propose(problem: Problem, seed: int) -> list[State]:
    """A greedy plan for each of the sets of tables that are estimated to cost least; none where no table may be row-wise."""
    found = []
    for groups, domains in _sets(problem):
        there = problem.with_row_wise(groups, domains)
        if there is not None:
            found += first_plans(there, 1)
    return sorted(found, key=lambda state: state.cost)


def _sets(problem: Problem) -> list[tuple[Ints, Ints]]:
    """The sets of table groups, and the domains of each, that are estimated to cost least. Of few groups, all sets."""
    blocks, tuning = problem.row_blocks, problem.tuning
    permitted = blocks.groups[blocks.allowed.any(axis=1)]
    if len(permitted) <= tuning.all_row_sets_up_to:
        every = _all_sets(problem, permitted)
        if len(every) * problem.devices * len(problem.whole) <= tuning.all_row_sets_most_cells or blocks.domains == 1:
            return every
    estimate, found = _SetCosts(problem), dict[bytes, tuple[Ints, Ints]]()
    several = blocks.domains > 1
    ways = ((OVER_ALL,), *((OVER_DOMAIN,), tuple(range(FIRST_GRID, len(blocks.parts)))) * several)
    for some in ways:
        heaviest = permitted[np.argsort(-estimate.narrow_ms[permitted], kind="stable")]
        saved_ms = estimate.saved_ms[blocks.positions(permitted)][:, list(some)].max(axis=1)
        saving = permitted[np.argsort(-saved_ms, kind="stable")][: np.count_nonzero(saved_ms > 0)]
        for order in (heaviest, saving):
            for groups, domains in _sets_of(problem, estimate, order, some):
                found.setdefault(groups.tobytes() + domains.tobytes(), (groups, domains))
    return list(found.values())


def _sets_of(problem: Problem, estimate: "_SetCosts", order: Ints, ways: tuple[int, ...]) -> list[tuple[Ints, Ints]]:
    """The first groups of an order, split in one of these ways; where there are domains, also with some of the first in this way
    and the others over domains."""
    tuning, allowed = problem.tuning, problem.row_blocks.allowed[problem.row_blocks.positions(order)]
    counts = _counts(len(order), tuning.row_sets_one_by_one)
    if not len(counts):
        return []
    found: list[tuple[Ints, Ints]] = []
    mixed = tuning.row_sets_leading if problem.row_blocks.domains > 1 and ways != (OVER_DOMAIN,) else ()
    for leading in ((len(order),), mixed) if mixed else ((len(order),),):
        tried, costs = [], []
        for way, first in product(ways, leading):
            wanted = np.where(np.arange(len(order)) < first, way, OVER_DOMAIN) if mixed else np.full(len(order), way)
            may = np.take_along_axis(allowed, wanted[:, None], axis=1)[:, 0]
            split = np.where(may, wanted, allowed.argmax(axis=1))
            more = counts[counts > first] if leading is mixed else counts  # fewer are all split in one way
            if len(more):
                tried += [(split, count) for count in more.tolist()]
                costs.append(estimate.costs(order, split, more))
        if not tried:
            continue
        cost = np.concatenate(costs)
        for best in np.argsort(cost, kind="stable")[: tuning.row_sets].tolist():
            if np.isfinite(cost[best]):
                split, count = tried[best]
                by_number = np.argsort(order[:count])
                found.append((order[:count][by_number], _domains(problem, order[:count], split[:count])[by_number]))
    return found


def _all_sets(problem: Problem, permitted: Ints) -> list[tuple[Ints, Ints]]:
    """Every set of these groups, split in every way; of domains that are alike, the first is taken first."""
    blocks = problem.row_blocks
    alike = blocks.domains > 1 and problem.any_device and len(set(problem.memory.tolist())) == 1
    found: list[tuple[tuple[int, int], ...]] = [()]
    for group, allowed in zip(permitted.tolist(), blocks.allowed[blocks.positions(permitted)].tolist(), strict=True):
        longer = []
        for some in found:
            used = max((domain for _, domain in some), default=EVERYWHERE)
            places = blocks.places()
            places = places[places <= max(used, EVERYWHERE) + 1] if alike else places
            over = [place for place in places.tolist() if allowed[int(blocks.way_of(np.array(place)))]]
            longer += [some, *((*some, (group, domain)) for domain in over)]
        found = longer
    pairs = sorted((some for some in found if some), key=lambda some: (len(some), some))
    return [(np.array([group for group, _ in some]), np.array([domain for _, domain in some])) for some in pairs]


def _domains(problem: Problem, groups: Ints, ways: Ints) -> Ints:
    """The domain of each group, or its place in a grid: each, heaviest first, goes where the blocks of those before take the
    least time."""
    domains, blocks = np.full(len(groups), EVERYWHERE), problem.row_blocks
    over = np.flatnonzero(ways != OVER_ALL)
    if not len(over):
        return domains
    vectors = blocks.vectors[blocks.positions(groups[over]), ways[over], 0]
    ms = np.maximum(vectors @ problem.model.compute_slope(vectors.sum(axis=0)), 0.0)
    load = np.zeros(blocks.domains)
    for place in np.argsort(-ms, kind="stable").tolist():
        way = int(ways[over[place]])
        taken = load.reshape(-1, blocks.parts[way]).max(axis=1)
        first = int(taken.argmin()) * blocks.parts[way]
        domains[over[place]] = blocks.place_of(way, first)
        load[first : first + blocks.parts[way]] += max(ms[place], 1e-30)
    return domains


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
        self.problem, blocks, devices = problem, problem.row_blocks, problem.devices
        self.narrow_ms = problem.narrowest_ms()
        widest = problem.first + problem.max_units
        problem.price(widest)
        self.vectors = problem.vectors[widest] * (problem.all_units / problem.max_units)[:, None]
        self.all_blocks: Floats = blocks.all_blocks
        slope = problem.model.compute_slope(self.vectors.sum(axis=0) / devices)
        all_to_all = devices * column_ms(problem, problem.mean_columns) * blocks.more
        self.saved_ms: Floats = (self.vectors[blocks.groups, None] - self.all_blocks) @ slope - all_to_all

    def costs(self, order: Ints, ways: Ints, counts: Ints) -> Floats:
        """Ms if the first `counts` (C,) groups of an order are row-wise, each in its way: (C,). Infinite if a device has no
        room for the blocks. Those over one domain are taken to be spread evenly over the domains.

        The slowest device holds the blocks, and either its share of all the rest or the heaviest narrowest shard.
        """
        problem, model, devices = self.problem, self.problem.model, self.problem.devices
        blocks, last = problem.row_blocks, counts - 1
        positions, share = blocks.positions(order), np.array(blocks.parts)[ways] / blocks.domains
        share[ways == OVER_ALL] = 1.0  # of the devices that have a block
        nbytes = (blocks.nbytes[positions, ways] * share[:, None]).cumsum(axis=0)[last]
        fits = (nbytes[:, :1] <= problem.memory[:-1]).all(axis=1) & (nbytes[:, 1] <= problem.memory[-1])
        block = (blocks.vectors[positions, ways, 0] * share[:, None]).cumsum(axis=0)[last]
        more = (self.all_blocks[positions, ways] - self.vectors[order]).cumsum(axis=0)[last]
        mean = model.compute_ms((self.vectors.sum(axis=0) + more) / devices)
        columns = problem.mean_columns + blocks.more[positions, ways].cumsum()[last]
        forward, backward = transfers_ms(problem.model, np.repeat(columns[:, None], devices, axis=1))

        others = np.delete(np.arange(len(self.narrow_ms)), order)
        left = np.concatenate([order, others])
        worst = np.array(
            [left[count:][self.narrow_ms[left[count:]].argmax()] if count < len(left) else -1 for count in counts]
        )
        heavy = problem.vectors[problem.narrowest[worst]] * (worst >= 0)[:, None]
        heaviest = np.where(np.isfinite(self.narrow_ms[worst]) | (worst < 0), model.compute_ms(block + heavy), np.inf)
        over = np.select([ways == OVER_ALL, ways == OVER_DOMAIN], [EVERYWHERE, 0], EVERYWHERE - 1)
        launched = [problem.launches.of(order[:count], over[:count]).total_ms for count in counts.tolist()]
        costs: Floats = np.maximum(mean, heaviest) + (forward + backward).mean(axis=-1) + launched
        return np.where(fits, costs, np.inf)
