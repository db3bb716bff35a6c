"""Waits for a store that does not answer, in the steps of a nightly run."""

import time
from collections.abc import Callable
from typing import TypeVar

from neuroshard.core.errors import Unreachable

PATIENCE_SECONDS = 600.0  # boto3's own retries take under a minute
WAIT_SECONDS = 5.0

T = TypeVar("T")


def patiently(ask: Callable[[], T], patience_seconds: float = PATIENCE_SECONDS) -> T:
    """Ask a store until it answers. Raises StoreError, but Unreachable only after `patience_seconds`."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return ask()
        except Unreachable:
            if time.monotonic() + WAIT_SECONDS > deadline:
                raise
            time.sleep(WAIT_SECONDS)
