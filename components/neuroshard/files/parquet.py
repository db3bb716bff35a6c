"""Parquet files of any writer: one line for what is wrong with one, and columns of any equivalent type.

A file of a few hundred KB can hold gigabytes: a value a million times, a long text once and many references to it. So the memory
of a file is limited by its size: by what its footer says before anything is read, then by what was read, row group by row group.
A page that is larger than the footer says is found only once it is read.
"""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from neuroshard.core.errors import InvalidInput
from neuroshard.core.text import one_line
from neuroshard.files.disk import LEAST_UNPACKED_BYTES, check_unpacked, disk_errors
from neuroshard.files.parquet_footer import DELTA_LENGTH, DELTA_TEXT, DICTIONARY, Chunk, read_footer

REWRITE = "write it again as pandas does: Parquet version 1, plain or dictionary encoding, no encryption"
_CANNOT = re.compile(r"not (yet )?implemented|support|not built|codec|[de]n?crypt", re.I)  # what Arrow says then
ROW_BYTES, VALUE_BYTES = 256, 8  # in Python, at least: a row is a dict, a value is a reference


@contextmanager
def opened(path: Path, columns: Collection[str] | None = None) -> Iterator[pa.Table]:
    """The whole file, or these columns of it.

    Raises InvalidInput where it is missing, not a file, damaged, not Parquet or in a form that is not read, even if that shows
    only inside the block; and where it would take much more memory than a file of its size should.
    """
    with _file(path) as file:
        yield _read(file, columns, path)


@contextmanager
def _file(path: Path) -> Iterator[pa.NativeFile]:
    """The file. Errors of Arrow in the block become InvalidInput."""
    if not path.exists():
        raise InvalidInput(f"{path}: no such file")
    if path.is_dir():
        raise InvalidInput(
            f"{path}: is a folder, as Spark writes; give the file in it, and write one if it has several"
        )
    if not path.is_file():
        raise InvalidInput(f"{path}: not a file")
    with disk_errors(path, "read it"), path.open("rb") as plain:
        mark = plain.read(4)
    if mark == b"PARE":
        raise InvalidInput(f"{path}: is encrypted, and such files are not read; write it again without encryption")
    if mark != b"PAR1":
        raise InvalidInput(f"{path}: not a Parquet file (it begins with {mark!r}); give it the suffix of what it is")
    try:
        # of a file that Python opened, a thread of Arrow's may let go while Python ends, and abort the process; of a path
        # pyarrow wants to know whether it is a URL
        with pa.OSFile(os.fsencode(path)) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = one_line(error, 120) or type(error).__name__
        if isinstance(error, pa.ArrowNotImplementedError) or _CANNOT.search(said):
            raise InvalidInput(f"{path}: has what pyarrow does not read ({said}); {REWRITE}") from None
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

    # a text that occurs a million times is read once, with a million references, but for columns that have pages of deltas
    deltas = {chunk.path for chunk in wanted if chunk.is_text and chunk.encodings & {DELTA_LENGTH, DELTA_TEXT}}
    texts = sorted({".".join(chunk.path) for chunk in wanted if chunk.is_text and chunk.path not in deltas})
    at_once = _rows_at_once([chunk for chunk in wanted if chunk.path in deltas], path)
    schema = pq.ParquetFile(file).schema_arrow
    kept = None if columns is None else [name for name in schema.names if name in columns]
    try:
        reader = pq.ParquetFile(file, page_checksum_verification=True, read_dictionary=texts)
    except KeyError as error:
        raise pa.ArrowInvalid(f"its schema lacks the column {error}") from None
    groups, read = [], 0
    for number in range(reader.num_row_groups):
        for part in _parts(reader, number, kept, at_once):
            groups.append(part)
            read += part.nbytes + sum(_text_bytes(one) for one in part.columns)
            check_unpacked(read, size, path)
    if not groups:
        groups = [reader.read(columns=kept)]
    fields = [field.with_type(_castable(field.type)) for field in schema if kept is None or field.name in kept]
    return pa.concat_tables(groups).cast(pa.schema(fields, schema.metadata))


def _rows_at_once(chunks: Collection[Chunk], path: Path) -> int | None:
    """Of texts that may repeat others, in a dictionary or by deltas: how many rows to read at once, so that they take little
    memory if each is as long as all that the file has; None for no limit. Raises InvalidInput for many in lists: rows do not say
    how many."""
    growing = [chunk for chunk in chunks if chunk.encodings & {DELTA_TEXT, *DICTIONARY} and chunk.nbytes > 0]
    for chunk in growing:
        if len(chunk.path) > 1 and chunk.values * chunk.nbytes > LEAST_UNPACKED_BYTES:
            column = ".".join(chunk.path)
            raise InvalidInput(f"{path}: column {column} has lists of texts by deltas, which are not read; {REWRITE}")
    return max(LEAST_UNPACKED_BYTES // max(chunk.nbytes for chunk in growing), 1) if growing else None


def _parts(reader: pq.ParquetFile, group: int, columns: list[str] | None, at_once: int | None) -> Iterator[pa.Table]:
    """A row group, or its parts of so many rows."""
    if at_once is None:
        yield reader.read_row_group(group, columns=columns)
    else:
        yield from (pa.Table.from_batches([batch]) for batch in reader.iter_batches(at_once, [group], columns))


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
