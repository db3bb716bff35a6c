"""A bound on the time of what has none of its own: a dead file system, a connection that trickles."""

import threading
from collections.abc import Callable
from typing import TypeVar

from neuroshard.core.errors import Unreachable

T = TypeVar("T")


def within(seconds: float, where: str, read: Callable[[], T]) -> T:
    """What `read` returns or raises, or Unreachable after `seconds`. Then it is left behind, in a thread that ends with the
    process at the latest."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(read())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="neuroshard store", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if errors:
        raise errors[0]
    if not results:
        raise too_late(where, seconds)
    return results[0]


def too_late(where: str, seconds: float) -> Unreachable:
    return Unreachable(f"{where}: no answer within {round(seconds, 1):g} s")
