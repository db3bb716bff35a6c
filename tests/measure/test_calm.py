"""How visits become a label: each repeat is scaled by reference kernels, with more visits while they disagree."""

from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest

from neuroshard.core.case import ComputeCase
from neuroshard.core.cost import READS, SLOWDOWN_EXPONENTS, SMALL_SET, slowness
from neuroshard.measure.timing import calm
from neuroshard.measure.timing.calm import (
    VISITS,
    ReferenceKernel,
    Repeat,
    case_timing,
    dealt_out,
    enough,
    visit,
)
from neuroshard.measure.timing.clocks import TimedDevice
from neuroshard.measure.timing.harness import LONG_CASE_MS, MIN_REPEATS


def repeats(*slownesses: float, ms: float = 1.0) -> list[Repeat]:
    """Forwards of `ms` and backwards of twice that, on a machine so slow."""
    return [Repeat(ms * slow, 2 * ms * slow, slow) for slow in slownesses]


def test_a_slow_moment_that_the_reference_kernel_sees_changes_no_label() -> None:
    calm, slow = [repeats(1.0, 1.0)] * 4, [repeats(1.6, 1.5), repeats(1.0, 1.2), repeats(2.0, 2.0), repeats(1.6, 1.1)]
    for one, other in zip(case_timing(slow)[:2], case_timing(calm)[:2], strict=True):
        assert (one.ms, one.spread) == pytest.approx((other.ms, other.spread))
    assert case_timing(slow).forward.median == pytest.approx(1.55)  # as it was timed
    assert not case_timing(slow).disturbed


def test_a_moment_that_it_does_not_see_is_outvoted() -> None:
    timed = case_timing([repeats(1.0, 1.0), [Repeat(9.0, 9.0, 1.0)] * 2, repeats(1.0, 1.0), repeats(1.0, 1.0)])
    assert (timed.forward.ms, timed.backward.ms, timed.disturbed) == (1.0, 2.0, True)


def test_visits_that_agree_are_enough_and_others_are_repeated_up_to_twice() -> None:
    agreeing, other = repeats(1.0, 1.1), repeats(1.0, 1.0, ms=1.5)
    assert not enough([agreeing] * (VISITS - 1), 7)
    assert enough([agreeing] * VISITS, 7)
    assert not enough([agreeing, other] * (VISITS // 2), 7)
    assert enough([agreeing, other] * VISITS, 7)


def test_of_a_long_case_fewer_are_enough_but_not_before_it_has_a_few() -> None:
    long = repeats(1.0, ms=LONG_CASE_MS)
    assert [enough([long * n], 7) for n in (MIN_REPEATS - 1, MIN_REPEATS)] == [False, True]


@pytest.mark.parametrize("asked", range(1, 40))
def test_repeats_are_dealt_out_to_few_visits(asked: int) -> None:
    visits, each = dealt_out(asked)
    assert asked <= visits * each < asked + VISITS
    assert visits <= VISITS
    assert enough([repeats(*[1.0] * each)] * visits, asked)


class Scripted:
    """A device on which a step takes as long as the script says."""

    torch: Any = None

    def __init__(self, script: Iterator[float]) -> None:
        self.script, self.flushes = script, 0

    def flush(self) -> None:
        self.flushes += 1

    def timed(self, step: Any, waiting: bool = False) -> tuple[float, Any]:
        return next(self.script), step()


def test_a_visit_times_cold_steps_and_asks_how_slow_it_is_after_each_repeat() -> None:
    device = Scripted(iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0]))
    slow = iter([1.5, 1.25])
    taken = visit(device, lambda: "out", lambda out: None, warmup=1, repeats=2, slow=lambda: next(slow))
    assert taken == [Repeat(1.0, 2.0, 1.5), Repeat(3.0, 4.0, 1.25)]
    assert device.flushes == 6


def test_usual_times_of_the_reference_kernel_are_those_after_a_table_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """And after a first run of its own: otherwise a large set before it would make it slower, and the set's label too small."""
    device, ran = Scripted(iter([7.0, 8.0, 0.25, 0.5, 0.75])), list[tuple[int, int]]()

    def steps(case: ComputeCase) -> tuple[Any, Any]:
        return (lambda: ran.append((case.tables[0].rows, device.flushes))), (lambda _: None)

    monkeypatch.setattr(calm, "TableBatchedEmbedding", Mock(return_value=Mock(steps=steps)))
    assert ReferenceKernel(cast(TimedDevice, device), 1, 2**20).calm_ms(0) == {READS: 0.25, SMALL_SET: 1.25}
    assert [flushes for _, flushes in ran] == [
        1,
        2,
        2,
    ]  # the set, from a cold cache; then the kernel, untimed and timed
    assert ran[0][0] > ran[1][0] == ran[2][0]


def test_the_machine_is_the_slower_the_longer_the_reference_kernel_takes() -> None:
    calm_ms = {READS: 0.4, SMALL_SET: 0.8}
    assert slowness(calm_ms, calm_ms) == 1.0
    assert slowness({READS: 0.8, SMALL_SET: 1.6}, calm_ms) == pytest.approx(2 ** sum(SLOWDOWN_EXPONENTS.values()))
    assert 1.0 < slowness({READS: 0.4, SMALL_SET: 1.6}, calm_ms) < slowness({READS: 0.8, SMALL_SET: 0.8}, calm_ms)
