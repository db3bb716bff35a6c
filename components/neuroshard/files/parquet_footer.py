"""What a Parquet file's footer says of its columns, read without Arrow, so that a damaged one is an error that names the file.

The footer is a FileMetaData of parquet.thrift in Thrift's compact protocol: https://github.com/apache/parquet-format
"""

from collections.abc import Iterator
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
        found = _Compact(data).struct()
        longest = max((element.get(2, 0) for element in found[2]), default=0)
        chunks = tuple(_chunk(column[3], longest) for group in found[4] for column in group[1])
        return Footer(int(found[3]), chunks)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise InvalidInput(f"{path}: not a whole Parquet file (its footer is damaged); make it again") from None


def _chunk(fields: dict[int, Any], longest: int) -> Chunk:
    path = tuple(part.decode() for part in fields[3])
    width = longest if fields[1] == FIXED_LENGTH else 0
    return Chunk(path, fields[1] == BYTE_ARRAY, int(fields[5]), int(fields[6]), int(width), frozenset(fields[2]))


class _Compact:
    """Thrift's compact protocol: a struct is a dict by the numbers of its fields. Raises IndexError at the end of the data."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def struct(self) -> dict[int, Any]:
        return dict(self._fields())

    def _fields(self) -> Iterator[tuple[int, Any]]:
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            yield number, kind == 1 if kind in (1, 2) else self._value(kind)

    def _value(self, kind: int) -> Any:
        if kind in (1, 2, 3):  # of a list; a byte
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            return self._take(8)
        if kind == 8:
            return self._take(self._varint())
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15) for _ in range(count)]
        if kind == 11:
            count = self._varint()
            kinds = self._byte() if count else 0
            return [(self._value(kinds >> 4), self._value(kinds & 15)) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise ValueError(kind)

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise IndexError(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def _varint(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("too long")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
