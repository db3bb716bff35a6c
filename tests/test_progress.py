"""Progress as plain lines, by a clock that the test moves."""

import errno
import io
import sys
import time

import pytest

from neuroshard.core.units import format_duration
from neuroshard.progress import progress


@pytest.fixture
def clock(monkeypatch):
    """`clock(5)` lets five seconds pass."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


def test_a_line_says_what_how_far_how_long_still_and_the_figure(clock, capsys):
    with progress("measure", total=100, unit="cases") as bar:
        clock(40)
        bar.advance(10, "2 errors")
        bar.advance(90)
    assert capsys.readouterr().err.splitlines() == [
        "measure: 10/100 cases, 40 s, 6 min left, 2 errors",
        "measure: 100/100 cases, 40 s, 2 errors",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.ENOSPC, "No space left"), OSError(errno.EIO, "I/O")],
)
def test_a_log_or_a_terminal_that_takes_nothing_more_does_not_end_the_work(monkeypatch, error, is_terminal):
    class Gone(io.StringIO):
        def isatty(self):
            return is_terminal

        def write(self, text):
            raise error

    monkeypatch.setattr(sys, "stderr", Gone())
    done = 0
    with progress("measure", total=3) as bar:
        for _ in range(3):
            bar.advance(1)
            done += 1
    assert done == 3


def test_no_more_is_left_than_the_budget_has(clock, capsys):
    with progress("measure", total=1000, unit="cases", ends_in_seconds=60) as bar:
        clock(30)
        bar.advance(10)
    assert capsys.readouterr().err.splitlines()[0] == "measure: 10/1000 cases, 30 s, 30 s left"


def test_a_night_has_some_hundred_lines_and_a_minute_one_every_five_seconds(clock, capsys):
    def lines_of(hours):
        with progress("measure", total=3600 * hours) as bar:
            for _ in range(int(3600 * hours)):
                clock(1)
                bar.advance(1)
        return len(capsys.readouterr().err.splitlines())

    assert lines_of(1 / 60) == 13
    assert 100 < lines_of(8) < 300


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (95, "95 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_are_as_exact_as_one_wants_to_know(seconds, text):
    assert format_duration(seconds) == text
