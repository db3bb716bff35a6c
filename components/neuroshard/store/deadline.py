"""Limits the time and the threads of reads that have no limit of their own: dead file systems, very slow connections."""

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from neuroshard.core.errors import Unreachable

THREADS = 16  # that read one place at once, including those that hang: enough for all ranks of a host

T = TypeVar("T")


class Reader:
    """Reads in at most `threads` threads, and waits for each read for a limited time.

    A read that hangs keeps its thread until the read or the process ends. Where all threads hang, the next read waits for one
    of them and starts no other. So a store that hangs for days costs no more threads than one that hangs for a minute.
    """

    def __init__(self, threads: int = 1) -> None:
        self.free = threading.Semaphore(threads)

    def within(self, seconds: float, where: str, read: Callable[[], T]) -> T:
        """Return or raise what `read` does. Raises Unreachable after `seconds`."""
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
os.register_at_fork(after_in_child=_readers.clear)  # a child process has none of the threads


def within(seconds: float, where: str, read: Callable[[], T], *, place: str = "") -> T:
    """`Reader.within`, with one reader for each `place` (by default `where`) in this process."""
    return _readers.setdefault(place or where, Reader(THREADS)).within(seconds, where, read)


def too_late(where: str, seconds: float) -> Unreachable:
    return Unreachable(f"{where}: no answer within {round(seconds, 1):g} s")
