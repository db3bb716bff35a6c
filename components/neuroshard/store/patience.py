"""Waits for a store that does not answer, in the steps of a nightly run."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import TypeVar

from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, NotFound, Unreachable
from neuroshard.store.open import open_store
from neuroshard.store.protocol import MAX_BYTES, ObjectInfo, Store

PATIENCE_SECONDS = 600.0  # boto3's own retries take under a minute
WAIT_SECONDS, SLOW_SECONDS = 5.0, 20.0  # between two requests; a request that takes longer is said

T = TypeVar("T")


def patiently(ask: Callable[[], T], patience_seconds: float = PATIENCE_SECONDS) -> T:
    """Ask until a store answers. Raises what `ask` raises, but Unreachable only after `patience_seconds`."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return ask()
        except Unreachable:
            if time.monotonic() + WAIT_SECONDS > deadline:
                raise
            time.sleep(WAIT_SECONDS)


class PatientStore:
    """A store each of whose requests is repeated until it answers: it raises Unreachable only after PATIENCE_SECONDS.

    `impatient` is the store itself, for requests that are repeated anyway. One that takes long is said, while it does.
    """

    def __init__(self, store: Store) -> None:
        self.impatient = store

    def _ask(self, ask: Callable[[], T]) -> T:
        began = time.monotonic()
        most = f"{PATIENCE_SECONDS / 60:.0f} min"
        said = f"note: {self.url} has not answered for {SLOW_SECONDS:.0f} s; it is asked for up to {most}"
        slow = threading.Timer(SLOW_SECONDS, log, [said])
        slow.daemon = True
        slow.start()
        try:
            answer = patiently(ask)
        finally:
            slow.cancel()
        if (waited := time.monotonic() - began) > SLOW_SECONDS:
            log(f"note: {self.url} answers again, after {waited:.0f} s")
        return answer

    @property
    def url(self) -> str:
        return self.impatient.url

    @property
    def identity(self) -> str:
        return self.impatient.identity

    def read(self, key: str, max_bytes: int = MAX_BYTES) -> bytes:
        return self._ask(lambda: self.impatient.read(key, max_bytes))

    def read_versioned(self, key: str, max_bytes: int = MAX_BYTES) -> tuple[bytes, str]:
        return self._ask(lambda: self.impatient.read_versioned(key, max_bytes))

    def create(self, key: str, data: bytes) -> bool:
        """False also where a first try wrote the object and only its answer was lost."""
        return self._ask(lambda: self.impatient.create(key, data))

    def swap(self, key: str, data: bytes, expected: str | None) -> None:
        try:
            self._ask(lambda: self.impatient.swap(key, data, expected))
        except Conflict:
            with suppress(NotFound):
                if self.read(key) == data:  # a first try wrote it, and only its answer was lost
                    return
            raise

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        return self._ask(lambda: self.impatient.list(prefix))

    def delete(self, key: str) -> None:
        self._ask(lambda: self.impatient.delete(key))

    def clock(self) -> datetime:
        return self._ask(self.impatient.clock)


def open_patiently(url: str, *, single_writer: bool = False) -> PatientStore:
    """The store at `url`, as `open_store` opens it. Raises UsageError."""
    return PatientStore(open_store(url, single_writer=single_writer))
