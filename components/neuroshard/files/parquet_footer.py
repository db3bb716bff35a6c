"""A user's Parquet file that was damaged on its way is refused in one line: asked for the columns of a damaged footer, Arrow ends
the process (pyarrow 26). So the columns are read here: a FileMetaData of parquet.thrift in Thrift's compact protocol
(https://github.com/apache/parquet-format).
"""

import io
from pathlib import Path
from typing import Any, NamedTuple

from neuroshard.core.errors import InvalidInput

BYTE_ARRAY, FIXED_LENGTH = 6, 7  # parquet.thrift's Type
DICTIONARY, DELTA_LENGTH, DELTA_TEXT = (2, 8), 6, 7  # and its Encoding


class Chunk(NamedTuple):
    """A column of a row group: values at the leaves, and bytes once unpacked, of which many values may share some."""

    path: tuple[str, ...]
    is_text: bool
    values: int
    nbytes: int
    value_bytes: int  # of a value of fixed length
    encodings: frozenset[int]


class Footer(NamedTuple):
    rows: int
    chunks: tuple[Chunk, ...]


def read_footer(path: Path) -> Footer:
    """The footer of a file. Raises InvalidInput where it has none, or a damaged one."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 8, 0))
        end = file.read()
        length = int.from_bytes(end[:4], "little")
        if len(end) < 8 or end[4:] != b"PAR1" or length > size - 8:
            raise InvalidInput(f"{path}: not a whole Parquet file (it has no footer, so it was cut off); make it again")
        file.seek(size - 8 - length)
        data = file.read(length)
    try:
        found = _struct(io.BytesIO(data))
        longest = max((element.get(2, 0) for element in found[2]), default=0)
        chunks = tuple(_chunk(column[3], longest) for group in found[4] for column in group[1])
        return Footer(int(found[3]), chunks)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise InvalidInput(f"{path}: not a whole Parquet file (its footer is damaged); make it again") from None


def _chunk(fields: dict[int, Any], longest: int) -> Chunk:
    path = tuple(part.decode() for part in fields[3])
    width = longest if fields[1] == FIXED_LENGTH else 0
    return Chunk(path, fields[1] == BYTE_ARRAY, int(fields[5]), int(fields[6]), int(width), frozenset(fields[2]))


def _struct(data: io.BytesIO) -> dict[int, Any]:
    """Values by the numbers of the fields. Raises IndexError at the end of the data."""
    found, number = dict[int, Any](), 0
    while head := _bytes(data, 1)[0]:
        number = number + (head >> 4) if head >> 4 else _zigzag(data)
        found[number] = head & 15 == 1 if head & 15 in (1, 2) else _value(data, head & 15)
    return found


def _value(data: io.BytesIO, kind: int) -> Any:
    if kind in (1, 2, 3):  # of a list; a byte
        return _bytes(data, 1)[0]
    if kind in (4, 5, 6):
        return _zigzag(data)
    if kind in (7, 8):
        return _bytes(data, 8 if kind == 7 else _varint(data))
    if kind in (9, 10):
        head = _bytes(data, 1)[0]
        return [_value(data, head & 15) for _ in range(head >> 4 if head >> 4 < 15 else _varint(data))]
    if kind == 11:
        count = _varint(data)
        kinds = _bytes(data, 1)[0] if count else 0
        return [(_value(data, kinds >> 4), _value(data, kinds & 15)) for _ in range(count)]
    if kind == 12:
        return _struct(data)
    raise ValueError(kind)


def _bytes(data: io.BytesIO, count: int) -> bytes:
    found = data.read(min(count, 2**31))
    if len(found) < count:
        raise IndexError(count)
    return found


def _varint(data: io.BytesIO) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte = _bytes(data, 1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("too long")


def _zigzag(data: io.BytesIO) -> int:
    value = _varint(data)
    return (value >> 1) ^ -(value & 1)
