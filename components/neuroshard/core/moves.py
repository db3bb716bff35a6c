"""From one plan to another: which columns of which table go from where to where, and how many bytes that is.

What a device holds already stays. Rows and tables that the old plan does not have are made, not moved.
"""

from collections import defaultdict
from collections.abc import Iterator

from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.value import Value


class Move(Value):
    """A rectangle of a table that goes to `to_device`: from `from_device`, or, where that is None, made there anew.

    `nbytes` counts weights and optimizer state. State that is kept by the row goes along with the first columns of its rows.
    """

    table: str
    row_offset: int
    rows: int
    column_offset: int
    dim: int
    from_device: int | None
    to_device: int
    nbytes: int


def moves(old: Plan, new: Plan) -> tuple[Move, ...]:
    """Everything that devices must get under `new` and did not hold under `old`, in the order of the new plan's shards."""
    held: dict[str, list[Shard]] = defaultdict(list)
    for shard in old.shards:
        held[shard.table].append(shard)
    tables = {table.name: table for table in new.task.tables}
    return tuple(move for shard in new.shards for move in _arriving(shard, tables[shard.table], held[shard.table]))


def moved_bytes(old: Plan, new: Plan) -> int:
    """Weights and optimizer state that go from one device to another."""
    return sum(move.nbytes for move in moves(old, new) if move.from_device is not None)


def _arriving(shard: Shard, table: Table, held: list[Shard]) -> Iterator[Move]:
    element_bytes = table.element_bytes + table.optimizer_bytes_per_element
    known = [span for one in held if one.device == shard.device and (span := _rows(shard, one))]
    with_state = sorted(known)
    missing = shard.rows * shard.dim - sum(_area(shard, one) for one in held)
    for one in sorted(held, key=lambda other: (other.column_offset, other.row_offset)):
        if one.device == shard.device or not _area(shard, one):
            continue
        first, end = _rows(shard, one) or (0, 0)
        left, right = _columns(shard, one)
        bare = end - first - _covered(with_state, first, end)
        with_state = sorted([*with_state, (first, end)])
        yield Move(
            table=table.name,
            row_offset=first,
            rows=end - first,
            column_offset=left,
            dim=right - left,
            from_device=one.device,
            to_device=shard.device,
            nbytes=(end - first) * (right - left) * element_bytes + bare * table.optimizer_bytes_per_row,
        )
    if missing:
        bare = shard.rows - _covered(with_state, shard.row_offset, shard.row_offset + shard.rows)
        yield Move(
            table=table.name,
            row_offset=shard.row_offset,
            rows=shard.rows,
            column_offset=shard.column_offset,
            dim=shard.dim,
            from_device=None,
            to_device=shard.device,
            nbytes=missing * element_bytes + bare * table.optimizer_bytes_per_row,
        )


def _rows(one: Shard, other: Shard) -> tuple[int, int] | None:
    """First row, and the one after the last, that both have."""
    first = max(one.row_offset, other.row_offset)
    end = min(one.row_offset + one.rows, other.row_offset + other.rows)
    return (first, end) if first < end else None


def _columns(one: Shard, other: Shard) -> tuple[int, int]:
    end = min(one.column_offset + one.dim, other.column_offset + other.dim)
    return max(one.column_offset, other.column_offset), end


def _area(one: Shard, other: Shard) -> int:
    rows, (left, right) = _rows(one, other), _columns(one, other)
    return (rows[1] - rows[0]) * max(0, right - left) if rows else 0


def _covered(spans: list[tuple[int, int]], first: int, end: int) -> int:
    """How many of the rows from `first` to `end` the sorted spans cover."""
    covered, reached = 0, first
    for begin, stop in spans:
        covered += max(0, min(stop, end) - max(begin, reached))
        reached = max(reached, min(stop, end))
    return covered
