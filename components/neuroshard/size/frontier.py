"""The rows that no other beats, the rows whose order is not certain, and what a GiB of HBM is worth."""

from collections.abc import Sequence
from typing import NamedTuple

from neuroshard.core.plan import Plan
from neuroshard.size.cells import Row

GIB = 2**30
MOST_OF_A_NAME = 40  # characters of a kind in a file name, far below the 255 bytes of file systems


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other beats in both time and money, or in time and devices where there are no prices. Time is that of a
    sample: batches may differ. Of rows alike in both, the one with the least memory."""
    kept = list[Row]()
    fitting = [row for row in rows if row.fits]
    for row in sorted(fitting, key=lambda row: (_second(row), row.sample_ms, row.cell.memory_bytes)):
        if not kept or row.sample_ms < kept[-1].sample_ms:
            kept.append(row)
    return kept


def _second(row: Row) -> float:
    return float(row.cell.devices) if row.money is None else row.money


def may_be_reversed(rows: Sequence[Row]) -> dict[int, list[int]]:
    """For each row that fits, by its place, the places of the rows of other kinds whose times a sample overlap with its own
    within the errors of both models. Rows of one kind have their error in common, and are not among them."""
    spans = {
        place: (row.cell.kind, low / row.batch_size, high / row.batch_size)
        for place, row in enumerate(rows)
        if row.fits and row.interval_ms is not None
        for low, high in (row.interval_ms,)
    }
    return {
        place: [at for at, (other, least, most) in spans.items() if other != kind and least < high and most > low]
        for place, (kind, low, high) in spans.items()
    }


def may_join_or_leave(rows: Sequence[Row]) -> set[int]:
    """The places of rows whose place on the frontier is not certain: one on it that a row of another kind beats if that is as
    fast as its model's error allows, and it as slow; one off it that no row beats if it is as fast, and those of other kinds as
    slow."""
    best = {id(row) for row in frontier(rows)}
    fitting, found = [row for row in rows if row.fits], set()
    for place, row in enumerate(rows):
        if row.fits:
            on_it = id(row) in best
            mine = _scale(row, slow=on_it)
            beaten = any(
                _beats(other, 1.0 if other.cell.kind == row.cell.kind else _scale(other, slow=not on_it) / mine, row)
                for other in fitting
                if other is not row
            )
            found |= {place} if beaten == on_it else set()
    return found


def _scale(row: Row, *, slow: bool) -> float:
    """The slowest or fastest that a row may be, over what is predicted."""
    interval = row.interval_ms
    return 1.0 if interval is None else interval[slow] / row.step_ms


def _beats(one: Row, times: float, other: Row) -> bool:
    """Whether a row that takes so many times as long, relative to the other, is no worse in both, and better in one."""
    if times != times or times == float("inf"):  # both may take for ever
        return False
    mine = one.sample_ms * times, _second(one) * (1.0 if one.money is None else times)
    its = other.sample_ms, _second(other)
    alike = mine == its and one.cell.memory_bytes < other.cell.memory_bytes
    return mine[0] <= its[0] and mine[1] <= its[1] and (mine != its or alike)


class MemoryPoint(NamedTuple):
    """A memory of a kind and number of devices, and the ms that each GiB more saved since the point before it; None at the
    first."""

    row: Row
    ms_a_gib: float | None


def memory_frontiers(rows: Sequence[Row]) -> list[list[MemoryPoint]]:
    """For each kind and number of devices with several memories: step time against HBM for tables, without the amounts that save
    nothing. What a larger dense model would cost is read from it backwards."""
    found = []
    for least, *others in with_several_memories(rows):
        points = [MemoryPoint(least, None)]
        for row in others:
            before = points[-1].row
            if row.step_ms < before.step_ms:
                gib = (row.cell.memory_bytes - before.cell.memory_bytes) / GIB
                points.append(MemoryPoint(row, (before.step_ms - row.step_ms) / gib))
        found.append(points)
    return found


def with_several_memories(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows that fit, by kind and number of devices, where these fit with several amounts of memory; the least
    memory first."""
    groups = dict[object, list[Row]]()
    for row in rows:
        if row.fits:
            groups.setdefault((row.cell.kind, row.cell.devices), []).append(row)
    return [sorted(group, key=lambda row: row.cell.memory_bytes) for group in groups.values() if len(group) > 1]


def plans_of(rows: Sequence[Row]) -> dict[str, Plan]:
    """The plans of both frontiers, by a file name that says the size."""
    points = [*frontier(rows), *(point.row for points in memory_frontiers(rows) for point in points)]
    alike = dict[str, list[Row]]()
    for row in {id(row): row for row in points}.values():
        alike.setdefault(_size_in_a_name(row), []).append(row)
    return {
        f"{size}-{number}.json" if number > 1 else f"{size}.json": row.found
        for size, of_it in alike.items()
        for number, row in enumerate(of_it, 1)
    }


def _size_in_a_name(row: Row) -> str:
    """`h100-8x40GiB`: memory is rounded, and of a path its end is taken, so sizes may be alike in it."""
    kind = "".join(letter if letter.isalnum() else "-" for letter in row.cell.kind.name.removeprefix("analytic:"))
    return f"{kind[-MOST_OF_A_NAME:].strip('-')}-{row.cell.devices}x{row.cell.memory_bytes / GIB:.4g}GiB"
