import json
from itertools import accumulate
from typing import Any

import pytest

from neuroshard.core.errors import InvalidInput
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

TIME = "2026-11-24T09:00:00Z"
ORDER = {
    "ids_digest": "a" * 64, "rows": 1000, "hot_rows": 100, "lookup_share": 0.8, "points": [[1, 0.2], [10, 0.5]], "time": TIME,
}  # fmt: skip
TABLE = {"name": "a", "rows": 1000, "dim": 16, "pooling_factor": 2.0}


def test_the_share_of_lookups_is_read_off_the_points() -> None:
    order = RowOrder.parse(ORDER, "it")
    shares = [order.share_of(rows) for rows in (0, 1, 10, 55, 100, 550, 1000, 1200)]
    assert shares == pytest.approx([0, 0.2, 0.5, 0.65, 0.8, 0.9, 1, 1])
    assert list(accumulate(shares, max)) == shares


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ids_digest": "abc"}, "ids_digest"),
        ({"hot_rows": 1001}, "lists 1,001 rows, but the table had 1,000"),
        ({"lookup_share": 1.2}, "lookup_share"),
        ({"points": [[10, 0.5], [10, 0.6]]}, "points[1]: 10 rows have 0.6 of the lookups, after 10 with 0.5"),
        ({"points": [[10, 0.9]]}, "hot_rows and lookup_share: 100 rows have 0.8 of the lookups, after 10 with 0.9"),
        ({"points": [[100, 0.8]]}, "hot_rows and lookup_share"),
        ({"source": "a\nb"}, "one line"),
        ({"time": "today"}, "time"),
    ],
)
def test_an_order_that_cannot_be_is_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match="row order: ") as error:
        RowOrder.parse(ORDER | fields, "row order")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_keeps_its_order_as_it_grows_but_not_as_it_shrinks() -> None:
    grown = Table.parse(TABLE | {"rows": 2000, "row_order": ORDER}, "it")
    assert grown.row_order == RowOrder.parse(ORDER, "it")
    with pytest.raises(
        InvalidInput, match="row_order is of a table with 1,000 rows, but the table has 999; make it anew"
    ):
        Table.parse(TABLE | {"rows": 999, "row_order": ORDER}, "it")


def test_rows_of_a_table_have_no_order_and_columns_have_the_tables() -> None:
    table = Table.parse(TABLE | {"row_order": ORDER}, "it")
    assert table.with_dim(8).row_order == table.row_order
    assert table.resized(1000, 8, 1.0).row_order == table.row_order
    assert table.resized(500, 16, 1.0).row_order is None


def test_a_table_is_written_with_its_order_and_without_one_as_before() -> None:
    table = Table.parse(TABLE | {"row_order": ORDER}, "it")
    assert Table.parse(json.loads(table.canonical_json()), "it") == table
    assert b"row_order" not in Table.parse(TABLE, "it").canonical_json()


def test_a_plan_of_tables_with_an_order_is_not_of_a_format_that_would_drop_it() -> None:
    task = {"device_memory_bytes": [2**30], "batch_size": 8}
    without, with_order = (
        ShardingTask.parse(task | {"tables": [TABLE | more]}, "it") for more in ({}, {"row_order": ORDER})
    )
    assert (without.plan_format, with_order.plan_format) == (2, 3)
