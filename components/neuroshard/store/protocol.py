"""What a store can do. Any object with these methods is one: a folder, a bucket, a dict in a test."""

from datetime import datetime
from typing import NamedTuple, Protocol

from neuroshard.core.errors import UsageError

MAX_BYTES = (
    16 * 2**20
)  # of one object. A plan of 2,000 tables in 4,000 shards has 1 MiB; hostile JSON takes 35 times its size


class Entry(NamedTuple):
    """An object as a listing tells of it. `modified` is by the store's own clock."""

    key: str
    size: int
    modified: datetime


class Store(Protocol):
    """Objects under keys (`ads-ranker/live.json`), each read and written whole.

    A key is checked by `check_key`, and no key is also the folder of another. Every method raises StoreError in one line
    that names the key.
    """

    @property
    def url(self) -> str:
        """Where it is, for messages. Never holds a secret."""

    @property
    def identity(self) -> str:
        """What tells it from every other store, for a cache's key; not to be shown."""

    def read(self, key: str, max_bytes: int = MAX_BYTES) -> bytes:
        """The object. Raises NotFound, and InvalidInput where it is larger than `max_bytes`."""

    def read_versioned(self, key: str, max_bytes: int = MAX_BYTES) -> tuple[bytes, str]:
        """The object, and a token that `swap` takes: the token of an object changes when its bytes do."""

    def create(self, key: str, data: bytes) -> bool:
        """Write once; False where the key already holds the same bytes. Raises Conflict where it holds others."""

    def swap(self, key: str, data: bytes, expected: str | None) -> None:
        """Replace the object if its token still is `expected` (None: if it does not exist). Raises Conflict if not."""

    def list(self, prefix: str) -> tuple[Entry, ...]:
        """All objects whose key starts with `prefix`, sorted by key; but for those that `check_key` refuses. None is no error."""

    def delete(self, key: str) -> None:
        """Remove the object. It need not be there."""

    def clock(self) -> datetime:
        """What time it is by the store's own clock, which `modified` is by: this machine's may be hours off."""


def check_key(key: str) -> str:
    """`key`, if it is safe in a folder as well as in a bucket. Raises UsageError.

    Segments that start with a dot are left to the stores' own scratch files.
    """
    segments = key.split("/")
    if any(not segment or segment.startswith(".") for segment in segments):
        raise UsageError(f"{key!r} is not a usable key: no part between the slashes may be empty or start with a dot")
    if not key.isprintable() or "\\" in key or len(key.encode()) > 900:  # S3 takes 1,024 bytes
        raise UsageError(
            f"{key[:60]!r} is not a usable key: at most 900 bytes, without backslashes or control characters"
        )
    return key


def is_key(text: str) -> bool:
    """Whether `check_key` lets it pass."""
    try:
        check_key(text)
    except UsageError:
        return False
    return True
