"""The files of row orders (core/row_order.py): the hot ids of a table, most read first, as a vector in NumPy's format.

A file is named by the sha256 of its bytes: `rows/<sha256>.npy` beside a tables.json, `<model>/rows/<sha256>.npy` in a store.
"""

import hashlib
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuroshard.core.errors import InvalidInput
from neuroshard.core.row_order import RowOrder
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import one_line
from neuroshard.files.access import Ints
from neuroshard.files.disk import disk_errors, write_bytes

MOST_LIST_BYTES = 16 * 2**20  # as any object of a store may have
NOT_NUMPY = (ValueError, EOFError, SyntaxError)  # what np.load raises
DRIFTED = 0.05  # of all lookups: an order whose hottest rows have so many less now is reported; a guess
_REMADE = "make the order anew"


class Drift(NamedTuple):
    """An order of the rows of `table` whose hottest `rows` had a share of the lookups when it was made, and have another now."""

    table: str
    rows: int
    made: float
    now: float
    time: str

    @property
    def text(self) -> str:
        """In one line."""
        return (
            f"row order of table {self.table!r}: its hottest {self.rows:,} rows had {self.made:.1%} of the lookups when it was "
            f"made ({self.time}), {self.now:.1%} now"
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
        path = folder / f"{hashlib.sha256(data).hexdigest()}.npy"
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
    """The hot ids of an order whose file is in this folder (hot_rows,), int32 or int64, mapped into memory: do not write to them.

    The file is read once, for its digest and its ids: all of them distinct ids of the table. Raises InvalidInput in one line.
    """
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
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != order.ids_digest:
            raise InvalidInput(
                f"{path}: its bytes have the digest {digest[:12]}, the row order has {order.ids_digest[:12]}, so it was cut off "
                f"or changed; copy it again, or {_REMADE}"
            )
        try:
            ids: Ints = np.load(path, mmap_mode="r", allow_pickle=False)
        except NOT_NUMPY as error:  # of the right digest, so another program wrote it
            raise InvalidInput(f"{path}: not an array in NumPy's format ({one_line(error, 80)}); {_REMADE}") from None
    check_ids(ids, order, str(path))
    return ids


def first_ids(order: RowOrder) -> Ints:
    """The ids of an order without a list."""
    return np.arange(order.hot_rows)


def ids_in(data: bytes, order: RowOrder, where: str) -> Ints:
    """The hot ids of an order (hot_rows,) in a file's bytes, whose digest was checked. Raises InvalidInput in one line."""
    try:
        ids: Ints = np.load(io.BytesIO(data), allow_pickle=False)
    except NOT_NUMPY as error:
        raise InvalidInput(f"{where}: not an array in NumPy's format ({one_line(error, 80)}); {_REMADE}") from None
    check_ids(ids, order, where)
    return ids


def check_ids(ids: Ints, order: RowOrder, where: str) -> None:
    """Raise InvalidInput unless these are the ids that an order may list."""
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.str not in ("<i4", "<i8"):
        what = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise InvalidInput(f"{where}: ids must be a vector of little-endian int32 or int64, not {what}; {_REMADE}")
    if len(ids) != order.hot_rows:
        raise InvalidInput(f"{where}: lists {len(ids):,} rows, but the row order has {order.hot_rows:,}; {_REMADE}")
    in_order = np.sort(ids)
    if not 0 <= in_order[0] <= in_order[-1] < order.rows:
        wrong = int(in_order[0] if in_order[0] < 0 else in_order[-1])
        raise InvalidInput(f"{where}: lists row {wrong:,}, but the table had rows 0 to {order.rows - 1:,}; {_REMADE}")
    twice = in_order[1:][np.diff(in_order) == 0]
    if len(twice):
        raise InvalidInput(f"{where}: lists row {int(twice[0]):,} twice; {_REMADE}")


def share_now(old: Ints, new: RowOrder, new_ids: Ints) -> float:
    """The share of lookups that some hot rows (N,) of an order have by a newer order of the table, whose ids these are.

    Rows between two points of the new order have equal shares, as have all that it does not list.
    """
    rows, shares = zip(*new.curve, strict=True)
    return float(np.diff(np.interp(_ranks(old, new, new_ids)[:, None] + [0, 1], rows, shares), axis=1).sum())


def drifts(was: ShardingTask, now: ShardingTask, read: Callable[[RowOrder], Ints]) -> list[Drift]:
    """The row orders of a plan's task that access has drifted from, by newer orders in a later plan's, of tables that both hold
    by access. Of a table in two parts the hot rows count, else all that its order lists. `read` returns an order's ids."""
    held, newer, found = was.constraints.rows_by_access, now.orders, []
    for name, old in was.orders.items():
        new = newer.get(name)
        if new is None or old.time >= new.time:
            continue
        rows = held[name].hot_rows or old.hot_rows
        drift = Drift(name, rows, old.share_of(rows), share_now(read(old)[:rows], new, read(new)), old.time)
        if drift.now < drift.made - DRIFTED:
            found.append(drift)
    return found


def _ranks(rows: Ints, order: RowOrder, ids: Ints) -> Ints:
    """The ranks of some rows (N,) in an order with these ids; of a row that is not listed, that of the first that is not."""
    by_id = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids, rows, sorter=by_id), len(ids) - 1)
    found = by_id[place]
    return np.where(ids[found] == rows, found, order.hot_rows)
