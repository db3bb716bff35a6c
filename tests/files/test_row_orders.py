"""Files of hot ids: what is written is read, and whatever is wrong with one is said in one line with the way out."""

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import sha256
from neuroshard.files.row_orders import (
    Drift,
    as_now,
    bytes_of_ids,
    drifts,
    ids_in,
    ids_of,
    ids_path,
    kept_orders,
    shares_now,
    write_ids,
)

TIME = "2026-11-24T09:00:00Z"


def order_of(ids: Any, rows: int = 100, file: bytes | None = None, **fields: Any) -> RowOrder:
    data = bytes_of_ids(np.array(ids)) if file is None else file
    said = {"ids_digest": sha256(data), "rows": rows, "hot_rows": len(ids), "lookup_share": 0.8, "time": TIME}
    return RowOrder.parse(said | fields, "it")


def written(folder: Path, ids: Any, rows: int = 100, file: bytes | None = None) -> RowOrder:
    data = bytes_of_ids(np.array(ids)) if file is None else file
    write_ids(folder, [data])
    return order_of(ids, rows, data)


def saved(array: Any) -> bytes:
    """The array in NumPy's format, whatever it is."""
    data = BytesIO()
    np.save(data, array)
    return data.getvalue()


def headed(shape: str, version: int = 1) -> bytes:
    """A file with 8 bytes of ids whose header says another shape."""
    header = ("{'descr': '<i4', 'fortran_order': False, " + shape + "}").encode()
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2, "little") + header + bytes(8)


def test_ids_are_read_as_they_were_written(tmp_path: Path) -> None:
    ids = ids_of(tmp_path / "rows", written(tmp_path / "rows", [7, 99, 0]))
    assert ids.tolist() == [7, 99, 0]
    assert os.listdir(tmp_path / "rows") == [f"{order_of([7, 99, 0]).ids_digest}.npy"]


def test_an_order_without_a_file_lists_the_first_rows(tmp_path: Path) -> None:
    assert ids_of(tmp_path, order_of([7, 99, 0], ids_digest="")).tolist() == [0, 1, 2]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_list_in_any_version_of_numpys_format_is_read(version: int) -> None:
    data = BytesIO()
    np.lib.format.write_array(data, np.array([7, 2**39], dtype="<i8"), version=(version, 0))
    assert ids_in(data.getvalue(), order_of([7, 2**39], 2**40, data.getvalue()), "it").tolist() == [7, 2**39]


def test_an_order_of_more_rows_than_a_list_can_have_takes_no_memory(tmp_path: Path) -> None:
    order = order_of([1], 2**40).model_copy(update={"hot_rows": 2**40, "ids_digest": ""})
    with refused(InvalidInput, f"{2**40:,}"):
        ids_of(tmp_path, order)


def test_equal_ids_are_written_once(tmp_path: Path) -> None:
    written(tmp_path, [3, 1])
    first = os.stat(ids_path(tmp_path, order_of([3, 1])))
    written(tmp_path, [3, 1])
    assert os.stat(ids_path(tmp_path, order_of([3, 1]))).st_ino == first.st_ino


@pytest.mark.parametrize(
    ("ids", "file", "said"),
    [
        ([1, 2, 100], None, "lists row 100, but the table had rows 0 to 99; make the order anew"),
        ([1, -2, 3], None, "lists row -2, but the table had rows 0 to 99; make the order anew"),
        ([1, 2, 1], None, "lists row 1 twice; make the order anew"),
        ([1, 2], saved(np.array([1, 2, 3], dtype="<i4")), "lists 3 rows, but the row order has 2; make the order anew"),
        ([1, 2], saved(np.array([[1, 2]], dtype="<i4")), "(1, 2)"),
        ([1, 2], saved(np.array([1, 2], dtype=">i4")), ">i4"),
        ([1, 2], saved(np.array([1.0, 2.0])), "<f8"),
        ([1, 2], saved(np.array([1, 2], dtype="<M8[s]")), "<M8[s]"),
        ([1, 2], saved(np.array([1, None])), "|O"),
        ([1, 2], b"ids", "ids"),
        ([1, 2], b"", "not a vector of little-endian int32 or int64"),
        ([1, 2], b"PK\x03\x04" + bytes(60), "PK"),
        ([1, 2], saved(np.array([1, 2], dtype="<i4"))[:-1], "7 bytes of ids, but its header says 2 of int32"),
        ([1, 2], saved(np.array([1, 2], dtype="<i4")) + b"\0", "9 bytes of ids"),
        ([1, 2], headed("'shape': (10000000000000,), "), "10000000000000"),
        ([1, 2], headed("'shape': (999999999,), "), "999,999,999"),
        ([1, 2], headed("'shape': (1" + "0" * 30 + ",), "), "1000000000"),
        ([1, 2], headed("'shape': (-2,), "), "-2"),
        ([1, 2], headed("'shape': (True,), "), "True"),
        ([1, 2], headed("'shape': (2,), ", version=9), "not a vector"),
        ([1, 2], headed("'shape': " + "(" * 5000 + "2,), "), "(((("),
    ],
)
def test_a_file_that_lists_what_it_must_not_is_refused_in_one_line(
    tmp_path: Path, ids: Any, file: bytes | None, said: str
) -> None:
    order = written(tmp_path, ids, file=file)
    with pytest.raises(InvalidInput) as error:
        ids_of(tmp_path, order)
    assert str(error.value).startswith(str(ids_path(tmp_path, order)))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(2**40)


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (lambda path: path.write_bytes(bytes_of_ids(np.array([1, 3]))), ["digest", "cut off"]),
        (grown, ["1,099,511,627,776 bytes", "at most 16,777,216", "make the order anew"]),
        (Path.unlink, ["no such file", "2 hot rows", "copy it there", "make the order anew"]),
    ],
    ids=["changed", "as no store would hold it", "gone"],
)
def test_a_file_that_is_another_than_was_written_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], facts: list[str]
) -> None:
    order = written(tmp_path, [1, 2])
    spoil(ids_path(tmp_path, order))
    with refused(InvalidInput, ids_path(tmp_path, order), *facts):
        ids_of(tmp_path, order)


def test_an_order_has_drifted_where_its_hottest_rows_have_less_by_a_newer_one() -> None:
    lists = {order: np.array(ids) for ids in ([5, 6, 7, 8], [50, 5, 60, 61]) for order in [order_of(ids).ids_digest]}
    old, new = (
        order_of(ids, points=[[1, 0.4], [2, 0.6]], time=f"2026-11-2{day}T09:00:00Z")
        for day, ids in enumerate(([5, 6, 7, 8], [50, 5, 60, 61]))
    )

    def task(order: RowOrder | None, hot_rows: int | None, *, held: bool) -> ShardingTask:
        by = RowsByAccess(hot_rows=hot_rows) if hot_rows else RowsByAccess(dealt=True)
        table = Table.parse({"name": "t", "rows": 100, "dim": 4, "pooling_factor": 1.0, "row_order": order}, "it")
        rules = (TableRule(table="t", rows_by_access=by),) if order and held else ()
        return ShardingTask(
            tables=(table,), device_memory_bytes=(2**20,), batch_size=4, constraints=Constraints(tables=rules)
        )

    def found(
        were: RowOrder | None, are: RowOrder | None, hot_rows: int | None = None, *, held: bool = True
    ) -> list[Drift]:
        tasks = task(were, hot_rows, held=held), task(are, hot_rows, held=True)
        return drifts(tasks[0], tasks[1].orders, lambda order: lists[order.ids_digest])

    (drift,) = found(old, new)
    assert (drift.rows, drift.made, drift.now) == (4, 0.8, pytest.approx(0.2 + 3 * 0.2 / 96))
    assert drift.text == (
        "row order of table 't': its hottest 4 rows had 80.0% of the lookups when it was made (2026-11-20T09:00:00Z), "
        "20.6% now; as many of the newer order have 80.0%"
    )
    assert (drift.is_large, drift.is_worth_an_order) == (True, True)
    flat = new.model_copy(update={"points": (), "lookup_share": 0.05})
    (drift,) = found(old, flat)
    assert (drift.is_large, drift.is_worth_an_order) == (True, False)  # no rows are hot now
    assert found(old, new, 1)[0].made == 0.4  # of a table in two parts its hot rows count
    assert found(old, new, held=False) == []
    assert [found(old, None), found(None, new), found(old, old), found(new, old)] == [[], [], [], []]


def test_the_share_that_old_hot_rows_have_now_is_read_off_the_new_order() -> None:
    new = order_of([5, 6, 7, 8], lookup_share=0.8, points=[[1, 0.4], [2, 0.6]])
    ids = np.array([5, 6, 7, 8])
    shares = [
        float(shares_now(np.array(rows), new, ids).sum()) for rows in ([5], [6, 5], [8], [7, 8], [50], [5, 50, 51], [])
    ]
    assert shares == pytest.approx([0.4, 0.6, 0.1, 0.2, 0.2 / 96, 0.4 + 2 * 0.2 / 96, 0.0])
    assert shares_now(np.arange(100), new, ids).sum() == pytest.approx(1.0)


LISTS = {"old": [5, 6, 7, 8], "alike": [6, 5, 8, 7], "other": [50, 5, 60, 61]}


def dated(name: str, day: int = 20, **fields: Any) -> RowOrder:
    return order_of(LISTS[name], points=[[1, 0.4], [2, 0.6]], time=f"2026-11-{day}T09:00:00Z", **fields)


def read(order: RowOrder) -> Any:
    return next(np.array(ids) for ids in LISTS.values() if order_of(ids).ids_digest == order.ids_digest)


def held_by(order: RowOrder, rows: int = 100) -> ShardingTask:
    rule = TableRule(table="t", rows_by_access=RowsByAccess(dealt=True))
    return ShardingTask(
        tables=(table_with(order, rows),),
        device_memory_bytes=(2**20,),
        batch_size=4,
        constraints=Constraints(tables=(rule,)),
    )


def table_with(order: RowOrder | None, rows: int = 100) -> Table:
    return Table.parse({"name": "t", "rows": rows, "dim": 4, "pooling_factor": 1.0, "row_order": order}, "it")


def test_a_plan_has_the_shares_that_its_hot_rows_have_now() -> None:
    now, (drift,) = as_now(held_by(dated("old")), held_by(dated("other", 21)), read)
    (order,) = now.orders.values()
    assert order.ids_digest == dated("old").ids_digest
    assert dict(order.points) == pytest.approx({1: 0.2, 2: 0.2 + 0.2 / 96})
    assert order.lookup_share == pytest.approx(drift.now)
    was = held_by(dated("old"))
    assert as_now(was, was, read) == (was, [])


def test_tables_keep_the_order_of_a_plan_until_a_newer_one_is_worth_moving_rows() -> None:
    was = held_by(dated("old"))
    for new in (None, dated("alike", 21), dated("other", 19)):
        (table,), notes = kept_orders([table_with(new)], was, read)
        assert (table.row_order, notes) == (dated("old"), ())
    counted_anew = dated("old", 21, lookup_share=0.7)  # the same list, with the shares of today
    (table,), notes = kept_orders([table_with(counted_anew)], was, read)
    assert (table.row_order, notes) == (counted_anew, ())
    (table,), (note,) = kept_orders([table_with(dated("other", 21))], was, read)
    assert table.row_order == dated("other", 21)
    assert note.startswith(
        "table 't' has a new row order, and its rows move: row order of table 't': its hottest 4 rows had"
    )


def test_an_order_that_cannot_be_read_or_is_of_more_rows_is_not_kept(tmp_path: Path) -> None:
    new = dated("alike", 21)
    (table,), (note,) = kept_orders([table_with(new)], held_by(dated("old")), lambda order: ids_of(tmp_path, order))
    assert table.row_order == new
    assert "whether access has drifted from the order of the plan before is not known" in note
    assert "no such file" in note
    fewer = dated("alike", 21, rows=90)
    (table,), notes = kept_orders([table_with(fewer, 90)], held_by(dated("old")), read)
    assert (table.row_order, notes) == (fewer, ())
