"""Ctrl-C, SIGTERM and SIGHUP for work that can be cut short: the first asks it to finish, the second ends it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from neuroshard.cli.app import say

# schedulers send SIGTERM some seconds before they kill a process; a terminal that is closed sends SIGHUP
AGAIN = {signal.SIGINT: "Ctrl-C again", signal.SIGTERM: "a second SIGTERM", signal.SIGHUP: "a second SIGHUP"}


class Stop(threading.Event):
    """Set by the first signal. `exit_code` is then the shell's code for it: 128 plus its number."""

    exit_code = 0


@contextmanager
def asked_to_stop(what: str) -> Iterator[Stop]:
    """An event that the first of these signals sets. A message then says `what` happens now.

    Signals that the process already ignores stay ignored: Ctrl-C in a shell's background job, SIGHUP under nohup.
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
