"""Skew of row blocks: what the largest block of a table has of its lookups, by how often rows are read and not which they are.

Ids are taken to be hashed, so the rows of a block are drawn at random, without putting back. The hottest row is in one block for
certain, and the others fall on blocks by chance. What they bring to a block is a sum of independent terms, centered on the mean
row, so that rows that are all read alike bring nothing. Its distribution is made on a grid: of heavy rows by convolution, of all
others together as a normal one. Blocks are then taken to be independent of each other. Beside random placements
(tests/core/test_skew.py) means are within 2 %, and up to 5 % too low where some rows of the same load have nearly all lookups.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

HIGH = 0.95  # the quantile that memory counts: one plan in twenty has a fuller block
CELLS = 192  # of the grid: shares are within 1 % of those on a fine one, and take 1 ms
HEAVY = 1 / 8  # of the standard deviation: rows that bring more to a block are on the grid
ALIKE = 1.3  # loads up to this ratio apart are joined on the grid
DENSE = 40.0  # rows of a group in a block from which their number is normal enough


class Loads(NamedTuple):
    """The loads of a table's rows: `groups` of so many rows with so much load each, hottest first; its other rows have none."""

    rows: int
    groups: tuple[tuple[float, float], ...]

    @property
    def total(self) -> float:
        return math.fsum(rows * load for rows, load in self.groups)

    def times(self, factor: float) -> "Loads":
        return Loads(self.rows, tuple((rows, load * factor) for rows, load in self.groups))


class Largest(NamedTuple):
    """The load of the largest of some row blocks: its mean over where rows may lie, and its quantile `HIGH`."""

    expected: float
    high: float


class _Term(NamedTuple):
    """So many rows, each of which adds `load` to a block with this probability."""

    rows: float
    load: float
    chance: float

    @property
    def variance(self) -> float:
        return self.rows * self.load**2 * self.chance * (1 - self.chance)


@lru_cache(maxsize=4096)
def largest_block(tables: tuple[Loads, ...], blocks: int) -> Largest:
    """Of the row blocks of several tables, of which each has one on each of so many ranks, the load on the fullest rank. Each
    row has a chance of 1 / blocks; where blocks are of few rows, those with the hottest row are dealt as TorchRec does."""
    means = [table.total / table.rows for table in tables]
    first = max(range(len(tables)), key=lambda i: (tables[i].groups[0][1] if tables[i].groups else 0.0) - means[i])
    even, beyond, terms = 0.0, 0.0, list[_Term]()
    for number, table in enumerate(tables):
        rows, block_rows = table.rows, table.rows / blocks
        total, groups, mean, chance = table.total, table.groups, means[number], 1 / blocks
        if number == first and groups:  # without its hottest row, which one block has for certain
            hottest, groups = groups[0][1], ((groups[0][0] - 1, groups[0][1]), *groups[1:])
            rows, mean, block_rows = rows - 1, max(total - hottest, 0.0) / max(rows - 1, 1), -(-rows // blocks)
            beyond, chance = hottest - mean, (block_rows - 1) / max(rows, 1)
        even += block_rows * mean
        unread = rows - math.fsum(count for count, _ in groups)
        terms += [_Term(n, load - mean, chance) for n, load in (*groups, (unread, 0.0)) if n > 0]
    deviation, most = math.sqrt(math.fsum(term.variance for term in terms)), math.fsum(table.total for table in tables)
    if deviation <= 1e-9 * even:
        return Largest(min(even + beyond, most), min(even + beyond, most))
    cumulated, low, step = _distribution(terms, deviation)
    ahead = beyond / step
    below = [here * _at(cumulated, cell + ahead) ** (blocks - 1) for cell, here in enumerate(cumulated)]
    least, place = even + beyond + low, next((at for at, share in enumerate(below) if share >= HIGH), CELLS - 1)
    expected, high = step * math.fsum(1 - share for share in below), step * place
    return Largest(min(least + expected, most), min(least + high, most))


def _distribution(terms: Sequence[_Term], deviation: float) -> tuple[list[float], float, float]:
    """What the terms bring to a block: the probability of no more than each cell of a grid, its first cell, and its step."""
    heavy = [term for term in _joined(terms, HEAVY * deviation) if term.rows * term.chance <= DENSE]
    on_grid = math.fsum(term.variance for term in heavy)
    mean = math.fsum(term.rows * term.load * term.chance for term in terms)
    low = mean - 6 * deviation
    step = (14 * deviation + max((term.load for term in heavy), default=0.0)) / CELLS
    cells = [0.0] * CELLS
    for place, share in _spread([(mean - low, 1.0)], step).items():
        cells[place] = share
    light = math.sqrt(max(deviation**2 - on_grid, 0.0))
    for kernel in (_normal(light), *map(_binomial, heavy)):
        cells = _convolved(cells, _spread(kernel, step))
    total, cumulated = 0.0, list[float]()
    for share in cells:
        total = min(total + share, 1.0)
        cumulated.append(total)
    return cumulated, low, step


def _joined(terms: Sequence[_Term], least: float) -> Iterator[_Term]:
    """The terms of more than the `least` load, those of nearly the same load as one."""
    some = list[_Term]()
    for term in (*sorted((one for one in terms if one.load > least), key=lambda one: -one.load), None):
        if some and (term is None or some[0].load > ALIKE * term.load or some[0].chance != term.chance):
            rows = max(round(math.fsum(one.rows for one in some)), 1)
            yield some[0]._replace(rows=rows, load=math.fsum(one.rows * one.load for one in some) / rows)
            some.clear()
        if term is not None:
            some.append(term)


def _binomial(term: _Term) -> list[tuple[float, float]]:
    """What equal rows bring to a block beyond their mean, and with which probability."""
    rows, chance = int(term.rows), term.chance
    found, share = list[tuple[float, float]](), (1 - chance) ** rows
    for count in range(rows + 1):
        if share > 1e-9:
            found.append(((count - rows * chance) * term.load, share))
        elif count > rows * chance:
            break
        share *= (rows - count) / (count + 1) * chance / (1 - chance) if chance < 1 else 0.0
    return found


def _normal(deviation: float) -> list[tuple[float, float]]:
    """The same of a normal distribution around 0, in steps of a fifth of its deviation."""
    if not deviation:
        return [(0.0, 1.0)]
    edges = [NormalDist().cdf((number - 0.5) / 5) for number in range(-25, 27)]
    return [((at - 25) * deviation / 5, after - edges[at]) for at, after in enumerate(edges[1:])]


def _spread(kernel: Sequence[tuple[float, float]], step: float) -> dict[int, float]:
    """The kernel on the cells of a grid, each of its loads on the two that are next to it."""
    found = dict[int, float]()
    for load, share in kernel:
        cell = math.floor(load / step)
        part = load / step - cell
        for at, some in ((cell, share * (1 - part)), (cell + 1, share * part)):
            if some > 1e-10:
                found[at] = found.get(at, 0.0) + some
    return found


def _convolved(cells: list[float], kernel: dict[int, float]) -> list[float]:
    """The cells after a sum; what is beyond the last is lost."""
    found, count = [0.0] * len(cells), len(cells)
    for shift, share in kernel.items():
        if shift >= 0:
            moved = [0.0] * min(shift, count) + cells[: max(count - shift, 0)]
        else:
            moved = cells[-shift:] + [0.0] * min(-shift, count)
        found = [here + share * there for here, there in zip(found, moved, strict=True)]
    return found


def _at(cumulated: Sequence[float], cell: float) -> float:
    """The cumulated share at a place between cells; past the last, 1."""
    whole = int(cell)
    if whole + 1 >= len(cumulated):
        return 1.0
    return cumulated[whole] + (cell - whole) * (cumulated[whole + 1] - cumulated[whole])
