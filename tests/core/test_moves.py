"""What moves from one plan to another, held against counting every element."""

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.core.moves import moves
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

TABLE = Table(name="t", rows=12, dim=16, pooling_factor=1.0, optimizer_bytes_per_row=4)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """The table cut into rectangles by cuts from edge to edge."""

    def cut(first: int, end: int, left: int, right: int, depth: int) -> Iterator[tuple[int, int, int, int]]:
        way = draw(st.sampled_from(["rows", "columns", "whole"])) if depth else "whole"
        if way == "rows" and end - first > 1:
            at = draw(st.integers(first + 1, end - 1))
            yield from cut(first, at, left, right, depth - 1)
            yield from cut(at, end, left, right, depth - 1)
        elif way == "columns" and right - left > 4:
            at = 4 * draw(st.integers(left // 4 + 1, right // 4 - 1))
            yield from cut(first, end, left, at, depth - 1)
            yield from cut(first, end, at, right, depth - 1)
        else:
            yield first, end, left, right

    shards = tuple(
        Shard(table="t", row_offset=a, rows=b - a, column_offset=c, dim=d - c, device=draw(st.integers(0, 2)))
        for a, b, c, d in cut(0, TABLE.rows, 0, TABLE.dim, 3)
    )
    task = ShardingTask(tables=(TABLE,), device_memory_bytes=(10**6,) * 3, batch_size=1)
    return Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="test"))


def owners(plan: Plan) -> dict[tuple[int, int], int]:
    return {
        (row, column): shard.device
        for shard in plan.shards
        for row in range(shard.row_offset, shard.row_offset + shard.rows)
        for column in range(shard.column_offset, shard.column_offset + shard.dim)
    }


@settings(max_examples=60, deadline=None)
@given(old=plans(), new=plans())
def test_every_element_that_changes_its_device_is_moved_once_and_nothing_else(old, new):
    before, after = owners(old), owners(new)
    moved = [
        (row, column, move.from_device, move.to_device)
        for move in moves(old, new)
        for row in range(move.row_offset, move.row_offset + move.rows)
        for column in range(move.column_offset, move.column_offset + move.dim)
    ]
    assert sorted(moved) == sorted((*at, before[at], after[at]) for at in before if before[at] != after[at])


@settings(max_examples=60, deadline=None)
@given(old=plans(), new=plans())
def test_state_kept_by_the_row_goes_once_to_each_shard_that_has_its_row_on_no_column(old, new):
    before, after = owners(old), owners(new)
    held = {(row, device) for (row, _), device in before.items()}
    elements = sum(before[at] != after[at] for at in before)
    rows = sum(
        (row, shard.device) not in held
        for shard in new.shards
        for row in range(shard.row_offset, shard.row_offset + shard.rows)
    )
    assert sum(move.nbytes for move in moves(old, new)) == 4 * elements + 4 * rows
