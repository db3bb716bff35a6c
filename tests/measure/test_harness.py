"""How repeats become a label: the fastest counts, and more are taken while the fastest disagree."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from neuroshard.measure.timing.all_to_all import agreed
from neuroshard.measure.timing.clocks import may_go_first
from neuroshard.measure.timing.harness import LONG_CASE_MS, MIN_REPEATS, CaseTiming, time_case, timing


class Scripted:
    """A device on which steps take as long as the script says, forward and backward in turns."""

    torch: Any = None

    def __init__(self, script: Iterator[float]) -> None:
        self.script, self.steps, self.flushes = script, 0, 0

    def flush(self) -> None:
        self.flushes += 1

    def timed(self, step: Callable[[], Any], waiting: bool = False) -> tuple[float, Any]:
        assert self.flushes > self.steps  # each step from a cold cache
        self.steps += 1
        return next(self.script), step()


def timed(*script: float, warmup: int = 0, repeats: int = 4) -> tuple[CaseTiming, int]:
    """What comes of these times, forward and backward alike, and how many repeats were taken."""
    device = Scripted(ms for ms in script for _ in range(2))
    return time_case(device, lambda: "out", lambda out: None, warmup, repeats), device.steps // 2


def test_the_fastest_repeat_counts_and_others_do_not_disturb_it() -> None:
    case, repeats = timed(9.0, 1.0, 1.01, 30.0, 1.02)
    assert (case.forward.ms, case.backward.ms, case.disturbed, repeats) == (1.0, 1.0, False, 5)


def test_repeats_that_agree_are_enough() -> None:
    assert timed(*[1.0] * 8)[1] == 4


def test_while_they_disagree_up_to_twice_as_many_are_taken() -> None:
    case, repeats = timed(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)
    assert (case.forward.ms, case.disturbed, repeats) == (1.0, True, 8)


def test_the_warm_up_does_not_count() -> None:
    case, repeats = timed(0.1, *[1.0] * 4, warmup=1)
    assert (case.forward.ms, repeats) == (1.0, 5)


def test_a_long_case_ends_early() -> None:
    case, repeats = timed(*[LONG_CASE_MS] * 8)
    assert (case.forward.ms, repeats) == (LONG_CASE_MS, MIN_REPEATS)


def test_one_repeat_is_a_label_without_a_spread() -> None:
    case, repeats = timed(2.0, 1.0, repeats=1)
    assert (case.forward, repeats) == ((2.0, 0.0, 2.0), 1)
    assert timing([3.0], min) == (3.0, 0.0, 3.0)


def test_the_median_of_the_repeats_is_kept_with_the_fastest() -> None:
    assert timing([5.0, 1.0, 3.0, 2.0, 4.0], min) == (1.0, 1.0, 3.0)


def test_all_to_alls_agree_where_the_fastest_of_each_kind_do() -> None:
    assert agreed([1.0, 1.05, 1.09, 7.0], [2.0], [])
    assert not agreed([1.0, 1.05, 1.09], [1.0, 1.05, 1.2, 1.0 - 0.05])


@pytest.mark.skipif(sys.platform != "linux", reason="a matter of Linux's scheduler")
def test_asking_for_priority_takes_none() -> None:
    before = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    may_go_first()
    assert (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority) == before
