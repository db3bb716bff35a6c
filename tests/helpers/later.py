"""A store as it will be after a while, without waiting."""

from datetime import datetime, timedelta
from typing import Any

from neuroshard.store.protocol import ObjectInfo, Store


class Later:
    """The store `after` so long: its clock, and the times of what is written through this, are that much ahead."""

    def __init__(self, store: Store, after: timedelta) -> None:
        self.store, self.after, self.url = store, after, store.url
        self.written: set[str] = set()

    def clock(self) -> datetime:
        return self.store.clock() + self.after

    def create(self, key: str, data: bytes) -> bool:
        self.written.add(key)
        return self.store.create(key, data)

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        entries = self.store.list(prefix)
        return tuple(e._replace(modified=e.modified + self.after) if e.key in self.written else e for e in entries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)
