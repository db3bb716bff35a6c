"""The interface of a store. Any object with these methods is a store: a folder, a bucket, a dict in a test.

- A key has no empty segment, none that begins with a dot, no backslash or control character, and at most 900 bytes.
- Create is `If-None-Match: *` on S3, in a folder a flushed temporary file that is hard-linked to its name. Swap is `If-Match`
  with the ETag of the reading, in a folder compare and rename under `flock`. Before its first write to S3, a writer finds out
  whether the store honours both. An ETag is no hash of the content, and a proxy that compresses answers changes it (`W/"abc"`,
  `"abc-gzip"`).
- A writer that lost a swap does not write the same with a fresh token: what it decided to replace is gone. Only records of
  nightly runs and pages of sizes may be written over whatever is there.
- A request is tried again after 500, 502, 503, 504, throttling, a timeout or a broken-off answer, not after 403 or 404; a
  conditional write also after 409, with the same condition. It ends after 120 s with all its attempts, a listing after 10,000
  pages.
- Writes to S3 carry Content-MD5. In a folder an object is a regular file, or a link to one.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple, Protocol

from neuroshard.core.errors import StoreError

# Of one object. A plan of 2,000 tables in 4,000 shards has 1 MiB. Decoded, hostile JSON takes 35 times its size.
MAX_BYTES = 16 * 2**20


class ObjectInfo(NamedTuple):
    """One object of a listing. `modified` is by the store's own clock."""

    key: str
    size: int
    modified: datetime


class PartlyListed(StoreError):
    """Some folders may not be listed: `denied` maps the key of each to the reason. `entries` are all other objects."""

    def __init__(self, entries: tuple[ObjectInfo, ...], denied: Mapping[str, str]) -> None:
        super().__init__("; ".join(denied.values()))
        self.entries, self.denied = entries, denied


class Store(Protocol):
    """Objects under keys such as `ads-ranker/live.json`. Each object is read and written as a whole.

    Every key passes `check_key`, and no key is also the folder of another. Every method raises StoreError, in one line that
    names the key.
    """

    @property
    def url(self) -> str:
        """Where it is, for messages. Never holds a secret."""

    @property
    def identity(self) -> str:
        """A text that no other store has, for a cache's key. It is not for showing."""

    def read(self, key: str, max_bytes: int = MAX_BYTES) -> bytes:
        """The object. Raises NotFound, and InvalidInput where it is larger than `max_bytes`."""

    def read_versioned(self, key: str, max_bytes: int = MAX_BYTES) -> tuple[bytes, str]:
        """The object, and a token that `swap` takes: the token of an object changes when its bytes do."""

    def create(self, key: str, data: bytes) -> bool:
        """Write once; False where the key already holds the same bytes, however many. Raises Conflict where it holds others."""

    def swap(self, key: str, data: bytes, expected: str | None) -> None:
        """Replace the object if its token still is `expected` (None: if it does not exist). Raises Conflict if not."""

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        """All objects whose key starts with `prefix`, sorted by key. Keys that `check_key` refuses are left out.

        Raises PartlyListed where folders that may hold such objects may not be listed.
        """

    def delete(self, key: str) -> None:
        """Delete the object. It is no error if it does not exist."""

    def clock(self) -> datetime:
        """The time by the store's own clock, as in `modified`: this machine's clock may be hours off."""
