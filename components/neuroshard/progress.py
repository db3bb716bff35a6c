"""One progress style for all long work: what it does, how far it is, the time left, and one figure.

    with progress("measure compute cases", total=2000, unit="cases") as bar:
        bar.advance(1, "median 0.42 ms")

On a terminal it is a rich bar. Elsewhere (a log, KFP, a pipe) it is a plain line, every 5 seconds at first and then less and
less often, so that hours of work print about a hundred lines. All output goes to stderr.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol, TextIO, cast

from neuroshard.core.clean import clean, is_silent, log
from neuroshard.core.units import format_duration

LINE_EVERY_SECONDS = 5.0
LINE_EVERY_SHARE = 0.02  # of the time spent so far


class Bar(Protocol):
    def advance(self, steps: float = 1, figure: str = "") -> None:
        """`steps` more are done. `figure` is the text to show after the bar from now on."""


class _Lines:
    """Progress as plain lines, at most one every few seconds, and one at the end."""

    def __init__(self, what: str, total: float, unit: str, ends_in_seconds: float | None) -> None:
        self.what, self.total, self.unit, self.budget = what, total, unit, ends_in_seconds
        self.done, self.figure = 0.0, ""
        self.began = self.shown_at = time.monotonic()

    def advance(self, steps: float = 1, figure: str = "") -> None:
        self.done += steps
        self.figure = clean(figure) or self.figure
        now = time.monotonic()
        if now - self.shown_at >= max(LINE_EVERY_SECONDS, LINE_EVERY_SHARE * (now - self.began)):
            self.show()

    def show(self) -> None:
        self.shown_at = time.monotonic()
        spent = self.shown_at - self.began
        left = ""
        if 0 < self.done < self.total:
            seconds = spent / self.done * (self.total - self.done)
            if self.budget is not None:
                seconds = min(seconds, max(self.budget - spent, 0.0))
            left = f", {format_duration(seconds)} left"
        figure = f", {self.figure}" if self.figure else ""
        of = f"{self.done:.0f}/{self.total:.0f} {self.unit}".rstrip()
        with suppress(OSError):  # a closed pipe or a full disk of the log must not end hours of work
            log(f"{self.what}: {of}, {format_duration(spent)}{left}{figure}")


class _Nothing:
    def advance(self, steps: float = 1, figure: str = "") -> None:
        pass


class _Terminal:
    """A terminal that may be closed during the work: writing to it then does nothing."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.terminal.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


class _Rich:
    """Progress as a bar on a terminal."""

    def __init__(self, what: str, total: float, unit: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        self.columns = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=28)),
            BarColumn(bar_width=None),
            TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}".rstrip(), table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[figure]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(file=cast(IO[str], _Terminal(sys.stderr))),
            expand=True,
        )
        self.columns.start()
        self.task = self.columns.add_task(what, total=total, figure="")

    def advance(self, steps: float = 1, figure: str = "") -> None:
        self.columns.update(self.task, advance=steps)
        if figure:
            self.columns.update(self.task, figure=clean(figure))


@contextmanager
def progress(what: str, total: float, unit: str = "", ends_in_seconds: float | None = None) -> Iterator[Bar]:
    """A bar for `total` steps. It ends with the block, also when the block fails.

    `ends_in_seconds` is the work's time budget, if it has one; the time left is never shown as more than that.
    """
    if is_silent():
        yield _Nothing()
        return
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
    lines = _Lines(what, total, unit, ends_in_seconds)
    try:
        yield lines
    finally:
        lines.show()
