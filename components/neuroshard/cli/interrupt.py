"""Ctrl-C, SIGTERM and SIGHUP for work that can be cut short: the first asks it to come to an end, the second ends it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from neuroshard.cli.app import say

# SIGTERM is sent by what runs commands for people, with some seconds left; SIGHUP where the terminal is closed
AGAIN = {signal.SIGINT: "Ctrl-C again", signal.SIGTERM: "a second SIGTERM", signal.SIGHUP: "a second SIGHUP"}


class Stop(threading.Event):
    """Set by the first signal, which leaves its exit code here, as a shell has it: 128 and its number."""

    exit_code = 0


@contextmanager
def asked_to_stop(what: str) -> Iterator[Stop]:
    """An event that is set by the first of these signals in here, which is told `what` happens now.

    A run that a shell put in the background, where Ctrl-C is ignored, goes on ignoring it; one under nohup ignores SIGHUP.
    """
    asked = Stop()
    before = {number: signal.getsignal(number) for number in AGAIN}
    listened_to = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.exit_code = 128 + number
        asked.set()
        leave()
        with suppress(OSError):  # the terminal may be gone
            say("", err=True)
            say(f"stopping: {what}; {AGAIN[signal.Signals(number)]} leaves at once", err=True)

    def leave() -> None:
        for number in listened_to:
            signal.signal(number, before[number])

    for number in listened_to:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        leave()
