"""Parquet files of any writer: one line for what is wrong with one, and columns of any equivalent type.

A file of a few hundred KB can hold gigabytes: a value a million times, a long text once and many references to it. So the memory
of a file is limited by its size: by what its footer says before anything is read, then by what was read, row group by row group.
A page that is larger than the footer says is found only once it is read.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from neuroshard.core.errors import InvalidInput
from neuroshard.core.text import one_line
from neuroshard.files.disk import check_unpacked
from neuroshard.files.parquet_footer import read_footer

ROW_BYTES, VALUE_BYTES = 256, 8  # in Python, at least: a row is a dict, a value is a reference


@contextmanager
def opened(path: Path, columns: Collection[str] | None = None) -> Iterator[pa.Table]:
    """The whole file, or these columns of it.

    Raises InvalidInput where it is missing, not a file, damaged or not Parquet, even if that shows only inside the block; and
    where it would take much more memory than a file of its size should.
    """
    with _file(path) as file:
        yield _read(file, columns, path)


@contextmanager
def _file(path: Path) -> Iterator[pa.NativeFile]:
    """The file. Errors of Arrow in the block become InvalidInput."""
    if not path.exists():
        raise InvalidInput(f"{path}: no such file")
    if not path.is_file():
        raise InvalidInput(f"{path}: not a file")
    try:
        # of a file that Python opened, a thread of Arrow's may let go while Python ends, and abort the process; of a path
        # pyarrow wants to know whether it is a URL
        with pa.OSFile(os.fsencode(path)) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = one_line(error, 120) or type(error).__name__
        raise InvalidInput(f"{path}: not a whole Parquet file ({said}); make it again") from None


def column_names(path: Path) -> list[str]:
    """The names of the columns, which need not be distinct. Raises InvalidInput as `opened` does."""
    with _file(path) as file:
        return list(pq.read_schema(file).names)


def _read(file: pa.NativeFile, columns: Collection[str] | None, path: Path) -> pa.Table:
    size = path.stat().st_size
    footer = read_footer(path)
    wanted = [chunk for chunk in footer.chunks if columns is None or chunk.path[0] in columns]
    taken = footer.rows * ROW_BYTES
    taken += sum(max(chunk.nbytes, chunk.values * max(chunk.value_bytes, VALUE_BYTES), 0) for chunk in wanted)
    check_unpacked(taken, size, path)

    # a text that occurs a million times is read once, with a million references
    texts = sorted({".".join(chunk.path) for chunk in wanted if chunk.is_text})
    schema = pq.ParquetFile(file).schema_arrow
    kept = None if columns is None else [name for name in schema.names if name in columns]
    try:
        reader = pq.ParquetFile(file, page_checksum_verification=True, read_dictionary=texts)
    except KeyError as error:
        raise pa.ArrowInvalid(f"its schema lacks the column {error}") from None
    groups, read = [], 0
    for number in range(reader.num_row_groups):
        groups.append(reader.read_row_group(number, columns=kept))
        read += groups[-1].nbytes + sum(_text_bytes(one) for one in groups[-1].columns)
        check_unpacked(read, size, path)
    if not groups:
        groups = [reader.read(columns=kept)]
    fields = [field.with_type(_castable(field.type)) for field in schema if kept is None or field.name in kept]
    return pa.concat_tables(groups).cast(pa.schema(fields, schema.metadata))


def _castable(kind: pa.DataType) -> pa.DataType:
    """The type, without views of text, to which Arrow does not cast."""
    if kinds.is_list(kind):
        return pa.list_(_castable(kind.value_type))
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _text_bytes(values: pa.ChunkedArray) -> int:
    """Bytes of all texts in a column, each as often as it occurs."""
    total = 0
    for array in values.chunks:
        while kinds.is_list(array.type) or kinds.is_large_list(array.type) or kinds.is_fixed_size_list(array.type):
            array = array.flatten()
        if kinds.is_struct(array.type):
            total += sum(_text_bytes(pa.chunked_array([part])) for part in array.flatten())
        elif kinds.is_dictionary(array.type) and (
            _is_text(array.type.value_type) or kinds.is_binary(array.type.value_type)
        ):
            lengths = pc.binary_length(array.dictionary).cast(pa.int64())
            total += pc.sum(lengths.take(array.indices)).as_py() or 0
    return total


def column(table: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray | None:
    """A column as `kind`, if its own type can hold the same values, as other programs write them; None where it cannot.

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
