"""A bound on the time, and on the threads, of what has none of its own: a dead file system, a connection that trickles."""

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from neuroshard.core.errors import Unreachable

THREADS = 16  # of reads of one place, those that hang included; as many ranks as a host has may read at once

T = TypeVar("T")


class Reader:
    """Reads in at most `threads` threads, and waits for each read for a bounded time.

    A read that hangs keeps its thread until it ends, or the process does. Where all threads hang, the next read waits for one
    of them, and does not start another: a store that hangs for days costs no more threads than one that hangs for a minute.
    """

    def __init__(self, threads: int = 1) -> None:
        self.free = threading.Semaphore(threads)

    def within(self, seconds: float, where: str, read: Callable[[], T]) -> T:
        """What `read` returns or raises, or Unreachable after `seconds`."""
        ends = time.monotonic() + seconds
        if not self.free.acquire(timeout=max(seconds, 0.0)):
            raise too_late(where, seconds)
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(read())
            except BaseException as error:
                errors.append(error)
            finally:
                self.free.release()

        thread = threading.Thread(target=work, name="neuroshard store", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine has no thread left
            self.free.release()
            raise
        thread.join(max(ends - time.monotonic(), 0.0))
        if errors:
            raise errors[0]
        if not results:
            raise too_late(where, seconds)
        return results[0]


_readers: dict[str, Reader] = {}
os.register_at_fork(after_in_child=_readers.clear)  # a child has none of the threads that hold a place


def within(seconds: float, where: str, read: Callable[[], T], *, place: str = "") -> T:
    """`Reader.within`, by the one reader of `place` (by default `where`), whoever in this process asks."""
    return _readers.setdefault(place or where, Reader(THREADS)).within(seconds, where, read)


def too_late(where: str, seconds: float) -> Unreachable:
    return Unreachable(f"{where}: no answer within {round(seconds, 1):g} s")
