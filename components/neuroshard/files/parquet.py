"""Parquet files as anybody may have written them: one line for what is wrong with one, and types that say the same."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds

from neuroshard.core.errors import InvalidInput
from neuroshard.core.text import one_line


@contextmanager
def opened(path: Path) -> Iterator[pa.Table]:
    """The whole file. Raises InvalidInput where it is missing, no file, damaged or not Parquet, also where that shows later."""
    if not path.exists():
        raise InvalidInput(f"{path}: no such file")
    if not path.is_file():
        raise InvalidInput(f"{path}: not a file")
    try:
        # of a file that Python opened, a thread of Arrow's may let go while Python ends, and abort the process; of a path
        # pyarrow wants to know whether it is a URL
        with pa.OSFile(os.fsencode(path)) as file:
            yield pq.ParquetFile(file, page_checksum_verification=True).read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = one_line(error, 120) or type(error).__name__
        raise InvalidInput(f"{path}: not a whole Parquet file ({said}); make it again") from None


def column(table: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray | None:
    """A column as `kind`, if what it holds says the same in another way, as other programs do; None where it does not.

    Text may be large or in a dictionary, lists and numbers of another width, and a column of nulls only of no type at all.
    """
    values = table.column(name)
    if values.type == kind:
        return values
    if not _alike(values.type, kind):
        return None
    try:
        return values.cast(kind)
    except pa.ArrowException:  # a number that `kind` cannot hold
        return None


def _alike(one: pa.DataType, other: pa.DataType) -> bool:
    if kinds.is_dictionary(one):
        one = one.value_type
    if kinds.is_list(other):
        lists = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
        return kinds.is_null(one) or (any(is_one(one) for is_one in lists) and _alike(one.value_type, other.value_type))
    return one == other or kinds.is_null(one) or any(is_one(one) and is_one(other) for is_one in (_is_text, _is_number))


def _is_text(kind: pa.DataType) -> bool:
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind))
