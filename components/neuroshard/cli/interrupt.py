"""Ctrl-C for work that can be cut short: the first asks it to come to an end, the second ends it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

INTERRUPTED = 130  # exit code, as of a shell: 128 + SIGINT


@contextmanager
def asked_to_stop(what: str) -> Iterator[threading.Event]:
    """An event that is set by the first Ctrl-C in here, which is told `what` happens now.

    A run that a shell put in the background, where Ctrl-C is ignored, goes on ignoring it.
    """
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield asked
        return

    def ask(_signal: int, _frame: FrameType | None) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        typer.echo(f"\nstopping: {what}; Ctrl-C again leaves at once", err=True)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
