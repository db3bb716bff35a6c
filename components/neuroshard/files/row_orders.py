"""The files of row orders (core/row_order.py): the hot ids of a table, most read first, as a vector in NumPy's format.

A file is named by the sha256 of its bytes: `rows/<sha256>.npy` beside a tables.json, `<model>/rows/<sha256>.npy` in a store.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.row_order import LISTS_FOLDER, RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import sha256, shown
from neuroshard.files.access import Floats, Ints
from neuroshard.files.disk import disk_errors, read_bytes, write_bytes

MOST_LIST_BYTES = 16 * 2**20  # as any object of a store may have
MOST_IN_ORDER = MOST_LIST_BYTES // 4  # of the ids 0, 1, 2, … that need no list: as many as a list may have
_HEADER = re.compile(  # of a vector of ids, as np.save writes it
    rb"\s*\{\s*'descr':\s*'(<i[48])',\s*'fortran_order':\s*(?:False|True),\s*'shape':\s*\(([0-9]{1,9}),\),?\s*\}\s*"
)
# Of all lookups: an order whose hottest rows have so many less now is reported, and a new one is taken where its hottest rows
# have so many more: a guess
DRIFTED = 0.05
_REMADE = "make the order anew"

ReadIds: TypeAlias = Callable[[RowOrder], Ints]


class Drift(NamedTuple):
    """An order of the rows of `table` whose hottest `rows` had a share of the lookups when it was `made`, and have another `now`,
    by a newer order, whose `best` as many rows have a share too; and the old order with the shares of now."""

    table: str
    rows: int
    made: float
    now: float
    best: float
    time: str
    order: RowOrder

    @property
    def is_large(self) -> bool:
        """Whether the hottest rows have much less than when the order was made."""
        return self.now < self.made - DRIFTED

    @property
    def is_worth_an_order(self) -> bool:
        """Whether the newer order's hottest rows have so much more that the rows are worth moving."""
        return self.now < self.best - DRIFTED

    @property
    def text(self) -> str:
        """In one line."""
        return (
            f"row order of table {self.table!r}: its hottest {self.rows:,} rows had {self.made:.1%} of the lookups when it was "
            f"made ({self.time}), {self.now:.1%} now; as many of the newer order have {self.best:.1%}"
        )


def bytes_of_ids(ids: Ints) -> bytes:
    """The file that lists these ids. It has 4 bytes an id where all are below 2^31, else 8."""
    dtype = "<i4" if not len(ids) or int(ids.max()) < 2**31 else "<i8"
    data = io.BytesIO()
    np.save(data, ids.astype(dtype), allow_pickle=False)
    return data.getvalue()


def ids_path(folder: Path, order: RowOrder) -> Path:
    """Where a folder holds the file of an order."""
    return folder / f"{order.ids_digest}.npy"


def write_ids(folder: Path, files: Iterable[bytes]) -> None:
    """Write files of ids into a folder, each under its digest. One that is there already is left as it is."""
    for data in files:
        path = folder / f"{sha256(data)}.npy"
        if not path.exists():
            write_bytes(path, data)


def files_of(folder: Path | None, orders: Iterable[RowOrder]) -> dict[str, bytes]:
    """The files of those orders whose list is in the folder, by its digest, checked as by `ids_of`."""
    found = {}
    for order in orders:
        if order.ids_digest and folder is not None and (path := ids_path(folder, order)).exists():
            ids_of(folder, order)
            found[order.ids_digest] = path.read_bytes()
    return found


def ids_of(folder: Path, order: RowOrder) -> Ints:
    """The hot ids of an order whose file is in this folder (hot_rows,), int32 or int64. Raises InvalidInput in one line."""
    if not order.ids_digest:
        return first_ids(order)
    path = ids_path(folder, order)
    if not path.exists():
        raise InvalidInput(
            f"{path}: no such file; it lists {order.hot_rows:,} hot rows of a table: copy it there, or {_REMADE}"
        )
    with disk_errors(path, "read it"):
        if path.stat().st_size > MOST_LIST_BYTES:
            raise InvalidInput(
                f"{path}: {path.stat().st_size:,} bytes, but a list has at most {MOST_LIST_BYTES:,}; {_REMADE}"
            )
        data = read_bytes(path, MOST_LIST_BYTES)
    digest = sha256(data)
    if digest != order.ids_digest:
        raise InvalidInput(
            f"{path}: its bytes have the digest {digest[:12]}, the row order has {order.ids_digest[:12]}, so it was cut off "
            f"or changed; copy it again, or {_REMADE}"
        )
    return ids_in(data, order, str(path))


def ids_among(folders: Sequence[Path], order: RowOrder, otherwise: ReadIds | None = None) -> Ints:
    """The hot ids of an order whose file is in one of these folders, as by `ids_of`, of several the first; else as another reads
    them."""
    there = [folder for folder in folders if ids_path(folder, order).exists()]
    if not there and otherwise is not None:
        return otherwise(order)
    return ids_of((there or [*folders, Path(LISTS_FOLDER)])[0], order)


def first_ids(order: RowOrder) -> Ints:
    """The ids of an order without a list. Raises InvalidInput where they are more than a list could have."""
    if order.hot_rows > MOST_IN_ORDER:
        raise InvalidInput(
            f"a row order without a list has {order.hot_rows:,} hot rows; up to {MOST_IN_ORDER:,} are compared"
        )
    return np.arange(order.hot_rows)


def ids_in(data: bytes, order: RowOrder, where: str) -> Ints:
    """The hot ids of an order (hot_rows,) in a file's bytes, whose digest was checked: all of them distinct ids of the table.

    Another program may have written them. np.load would allocate what a header asks for, and open zips. Raises InvalidInput in
    one line.
    """
    start = 12 if data[6:7] in (b"\2", b"\3") else 10  # of the header, after its length
    begin = start + int.from_bytes(data[8:start], "little")
    header = _HEADER.fullmatch(data, start, begin)
    if not re.match(rb"\x93NUMPY[\1-\3]\0", data) or header is None:
        raise InvalidInput(
            f"{where}: not a vector of little-endian int32 or int64 as numpy.save writes it, but "
            f"{shown(data[start:begin][:200] or data[:20], 120)}; {_REMADE}"
        )
    dtype, rows = np.dtype(header[1].decode()), int(header[2])
    if len(data) - begin != rows * dtype.itemsize:
        raise InvalidInput(
            f"{where}: has {len(data) - begin:,} bytes of ids, but its header says {rows:,} of {dtype}; {_REMADE}"
        )
    ids: Ints = np.frombuffer(data, dtype, rows, begin).copy()
    check_ids(ids, order, where)
    return ids


def check_ids(ids: Ints, order: RowOrder, where: str) -> None:
    """Raise InvalidInput unless these are the ids that an order may list."""
    if len(ids) != order.hot_rows:
        raise InvalidInput(f"{where}: lists {len(ids):,} rows, but the row order has {order.hot_rows:,}; {_REMADE}")
    in_order = np.sort(ids)
    if not 0 <= in_order[0] <= in_order[-1] < order.rows:
        wrong = int(in_order[0] if in_order[0] < 0 else in_order[-1])
        raise InvalidInput(f"{where}: lists row {wrong:,}, but the table had rows 0 to {order.rows - 1:,}; {_REMADE}")
    twice = in_order[1:][np.diff(in_order) == 0]
    if len(twice):
        raise InvalidInput(f"{where}: lists row {int(twice[0]):,} twice; {_REMADE}")


def drifts(was: ShardingTask, newer: Mapping[str, RowOrder], read: ReadIds) -> list[Drift]:
    """How access has drifted from the row orders of a plan's task, by table, where there are `newer` orders. Of a table in two
    parts the hot rows count, else all that its order lists. `read` returns an order's ids."""
    held, found = was.constraints.rows_by_access, []
    for name, old in was.orders.items():
        new = newer.get(name)
        if new is None or old.time >= new.time:
            continue
        shares = np.cumsum(shares_now(read(old), new, read(new)))
        rows = held[name].hot_rows or old.hot_rows
        points = tuple((count, min(float(shares[count - 1]), 1.0)) for count, _ in old.points)
        now = {"points": points, "lookup_share": min(float(shares[-1]), 1.0)}
        of_rows = (old.share_of(rows), float(shares[rows - 1]), new.share_of(rows))
        found.append(Drift(name, rows, *of_rows, old.time, old.model_copy(update=now)))
    return found


def as_now(was: ShardingTask, today: ShardingTask, read: ReadIds) -> tuple[ShardingTask, list[Drift]]:
    """The task of a plan with the shares of the lookups that the rows of its orders have now, and their `drifts`, by the newer
    orders of today's tables. Where `read` finds no list (NotFound) of a table that is not held by access today, nothing is known
    of it."""
    newer = dict(today.orders)
    for table in today.tables:
        if table.row_order is not None and table.name in was.orders.keys() - newer.keys():
            with suppress(NotFound):
                read(table.row_order)
                newer[table.name] = table.row_order
    found = drifts(was, newer, read)
    orders = {drift.table: drift.order for drift in found}
    tables = (
        table.model_copy(update={"row_order": orders[table.name]}) if table.name in orders else table
        for table in was.tables
    )
    return was.model_copy(update={"tables": tuple(tables)}), found


def with_drift(
    was: ShardingTask, today: ShardingTask, read: ReadIds, whose: str
) -> tuple[ShardingTask, tuple[str, ...], str]:
    """The task of a plan as by `as_now`; a line on each of its orders that access has drifted from, which begins with `whose` it
    is; and why that is not known, where a list is missing or damaged."""
    try:
        task, found = as_now(was, today, read) if was.orders else (was, [])
    except (NotFound, InvalidInput) as error:
        return was, (), f"whether access has drifted from {whose} row orders is not known: {error}"
    return task, tuple(f"{whose} {drift.text}" for drift in found if drift.is_large), ""


def kept_orders(tables: Sequence[Table], was: ShardingTask, read: ReadIds) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables with the row orders by which the task of a plan holds them, unless newer ones are worth moving rows for; and
    notes on those. A table without an order has the plan's."""
    held, kept, notes = was.constraints.rows_by_access, [], []
    for table in tables:
        old, new, how = was.orders.get(table.name), table.row_order, held.get(table.name)
        same = old is not None and new is not None and old.ids_digest == new.ids_digest  # counted anew: no row moves
        if old is None or how is None or old.rows > table.rows or (same and how.fault(table) is None):
            kept.append(table)
            continue
        try:
            (drift,) = drifts(was, {} if new is None else {table.name: new}, read) or (None,)
        except (NotFound, InvalidInput) as error:
            notes.append(
                f"table {table.name!r} has its new row order, and its rows may move: whether access has drifted from the "
                f"order of the plan before is not known: {error}"
            )
            kept.append(table)
            continue
        if drift is not None and drift.is_worth_an_order:
            notes.append(f"table {table.name!r} has a new row order, and its rows move: {drift.text}")
            kept.append(table)
        else:
            kept.append(table.model_copy(update={"row_order": old}))
    return tuple(kept), tuple(notes)


def shares_now(old: Ints, new: RowOrder, new_ids: Ints) -> Floats:
    """The share of lookups that each of some rows (N,) has by a newer order of the table, with these ids. Rows between two of
    its points have equal shares, as have all that it does not list."""
    rows, shares = zip(*new.curve, strict=True)
    each: Floats = np.diff(np.interp(_ranks(old, new, new_ids)[:, None] + [0, 1], rows, shares), axis=1)[:, 0]
    return each


def _ranks(rows: Ints, order: RowOrder, ids: Ints) -> Ints:
    """The ranks of some rows (N,) in an order with these ids; of a row that is not listed, that of the first that is not."""
    by_id = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids, rows, sorter=by_id), len(ids) - 1)
    found = by_id[place]
    return np.where(ids[found] == rows, found, order.hot_rows)
