"""Repeats a call in its own thread while a block runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(every_seconds: float, do: Callable[[], None]) -> Iterator[None]:
    """Call `do` every `every_seconds` while the block runs. `do` must not raise.

    The block does not end before the last call has.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_seconds):
            do()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
