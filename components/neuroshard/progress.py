"""One progress style for all long work: what, how far, how long still, the one figure that matters.

    with progress("measure compute cases", total=2000, unit="cases") as bar:
        bar.advance(1, "median 0.42 ms")

On a terminal it is a rich bar; elsewhere (a log, KFP, a pipe) a plain line every few seconds. All of it goes to stderr.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LINE_EVERY_SECONDS = 5.0


class Bar(Protocol):
    def advance(self, steps: float = 1, figure: str = "") -> None:
        """`steps` more are done; `figure` is the text to show beside the bar from now on."""


class _Lines:
    """Progress as plain lines, at most one every few seconds, and one at the end."""

    def __init__(self, what: str, total: float, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.figure = 0.0, ""
        self.began = self.shown_at = time.monotonic()

    def advance(self, steps: float = 1, figure: str = "") -> None:
        self.done += steps
        self.figure = figure or self.figure
        if time.monotonic() - self.shown_at >= LINE_EVERY_SECONDS:
            self.show()

    def show(self) -> None:
        self.shown_at = time.monotonic()
        spent = self.shown_at - self.began
        left = f", {spent / self.done * (self.total - self.done):.0f} s left" if 0 < self.done < self.total else ""
        figure = f", {self.figure}" if self.figure else ""
        of = f"{self.done:.0f}/{self.total:.0f} {self.unit}".rstrip()
        print(f"{self.what}: {of}, {spent:.0f} s{left}{figure}", file=sys.stderr, flush=True)


class _Rich:
    """Progress as a bar on a terminal."""

    def __init__(self, what: str, total: float, unit: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.columns = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figure]}"),
            console=Console(stderr=True),
        )
        self.columns.start()
        self.task = self.columns.add_task(what, total=total, figure="")

    def advance(self, steps: float = 1, figure: str = "") -> None:
        self.columns.update(self.task, advance=steps)
        if figure:
            self.columns.update(self.task, figure=figure)


@contextmanager
def progress(what: str, total: float, unit: str = "") -> Iterator[Bar]:
    """A bar for `total` steps. It ends with the block, also when the block fails."""
    if sys.stderr.isatty():
        try:
            bar = _Rich(what, total, unit)
        except ImportError:  # rich comes with the `cli` extra only
            pass
        else:
            try:
                yield bar
            finally:
                bar.columns.stop()
            return
    lines = _Lines(what, total, unit)
    try:
        yield lines
    finally:
        lines.show()
