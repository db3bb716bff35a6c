"""A store in a dict, for what needs thousands of them."""

from datetime import UTC, datetime

from neuroshard.core.errors import Conflict, InvalidInput, NotFound
from neuroshard.core.store_url import check_key
from neuroshard.core.value import sha256
from neuroshard.store.protocol import MAX_BYTES, ObjectInfo


class MemoryStore:
    url = "memory"

    def __init__(self) -> None:
        self.identity = f"memory {id(self)}"
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, datetime] = {}
        self.now = datetime.now(UTC)  # by its own clock

    def read(self, key: str, max_bytes: int = MAX_BYTES) -> bytes:
        if check_key(key) not in self.objects:
            raise NotFound(f"{self.url}/{key}: does not exist")
        if len(self.objects[key]) > max_bytes:
            raise InvalidInput(f"{self.url}/{key}: more than the {max_bytes:,} bytes that it may have")
        return self.objects[key]

    def read_versioned(self, key: str, max_bytes: int = MAX_BYTES) -> tuple[bytes, str]:
        data = self.read(key, max_bytes)
        return data, sha256(data)

    def create(self, key: str, data: bytes) -> bool:
        is_new = check_key(key) not in self.objects
        if self.objects.setdefault(key, data) != data:
            raise Conflict(f"{self.url}/{key}: already exists with other content, and is written only once")
        self.modified.setdefault(key, self.now)
        return is_new

    def swap(self, key: str, data: bytes, expected: str | None) -> None:
        current = sha256(self.objects[key]) if check_key(key) in self.objects else None
        if current != expected:
            raise Conflict(f"{self.url}/{key}: somebody else changed it in between")
        self.objects[key], self.modified[key] = data, self.now

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        found = sorted(key for key in self.objects if key.startswith(prefix))
        return tuple(ObjectInfo(key, len(self.objects[key]), self.modified[key]) for key in found)

    def clock(self) -> datetime:
        return self.now

    def delete(self, key: str) -> None:
        self.objects.pop(check_key(key), None)
        self.modified.pop(key, None)
