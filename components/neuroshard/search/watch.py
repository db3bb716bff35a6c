"""What a search reports while it runs, and when it must stop. Only this module reads the clock."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from neuroshard.core.plan import Improvement
from neuroshard.progress import Bar

OnImprovement = Callable[[float, float], None]  # seconds since the search began, cost in ms


MOST_IMPROVEMENTS = 100  # in a plan: a curve needs no more
SHOWN_EVERY_S = 0.5  # the progress bar, while a round takes long


class Watch:
    """The best cost so far in ms, each improvement with the step at which it came, and whether the time is up.

    `on_improvement` receives the seconds since the watch began and the cost in ms of every plan that is better than all before,
    of all searches that share the time. Once `stop` is set, the time is up.
    """

    def __init__(
        self,
        time_budget_s: float | None = None,
        on_improvement: OnImprovement | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.began = self.shown = self.drawn = time.perf_counter()
        self.ends = None if time_budget_s is None else self.began + time_budget_s
        self.on_improvement, self.stop = on_improvement, stop
        self.bar: Bar | None = None
        self.best_ms = float("inf")
        self.steps = 0
        self._improvements: list[tuple[int, float]] = []  # step and cost in ms
        self._reported: list[float] = []  # costs in ms, of all searches that share the time

    def note(self, cost_ms: float, steps: int = 0) -> None:
        """A plan of this cost was found, so many steps after the one before."""
        self.steps += steps
        if cost_ms < self.best_ms:
            self.best_ms = cost_ms
            self._improvements.append((self.steps, cost_ms))
            if self.on_improvement is not None and cost_ms < min(self._reported, default=math.inf):
                self._reported.append(cost_ms)
                self.on_improvement(time.perf_counter() - self.began, cost_ms)
        if self.bar is not None and time.perf_counter() >= self.drawn + SHOWN_EVERY_S:
            self._show(0.0)

    @property
    def improvements(self) -> tuple[Improvement, ...]:
        """All of them, or 100 of more, the first and the last among them."""
        some, last = self._improvements, len(self._improvements) - 1
        if last >= MOST_IMPROVEMENTS:
            some = [some[last * place // (MOST_IMPROVEMENTS - 1)] for place in range(MOST_IMPROVEMENTS)]
        return tuple(Improvement(step=step, cost_ms=cost_ms) for step, cost_ms in some)

    def advance(self) -> None:
        """One round of the search is done. With a time budget the bar counts seconds instead."""
        if self.bar is not None:
            self._show(1.0)

    def _show(self, rounds: float) -> None:
        assert self.bar is not None
        steps, self.drawn = rounds, time.perf_counter()
        if self.ends is not None:
            before, self.shown = self.shown, min(self.drawn, self.ends)
            steps = self.shown - before
        self.bar.advance(steps, f"best {self.best_ms:.3f} ms")

    def amount(self, rounds: int) -> tuple[float, str]:
        """What a progress bar counts from here on: rounds, or, with a time budget, the seconds that are left of it."""
        return (rounds, "rounds") if self.ends is None else (max(self.ends - self.shown, 0.0), "s")

    @contextmanager
    def sharing(self, part: float) -> Iterator[None]:
        """Inside, only this share of the time that is left may be spent, if there is a budget."""
        ends = self.ends
        if ends is not None:
            now = time.perf_counter()
            self.ends = now + part * max(ends - now, 0.0)
        try:
            yield
        finally:
            self.ends = ends

    def anew(self) -> "Watch":
        """For one of several searches that share the time: the same clock and caller, and no plan yet."""
        other = Watch(None, self.on_improvement, self.stop)
        other.began, other.ends, other._reported = self.began, self.ends, self._reported
        return other

    def quiet(self) -> "Watch":
        """The same for a search whose plans are none of the task's: the caller does not hear of them."""
        other = self.anew()
        other.on_improvement = None
        return other

    @property
    def stopped(self) -> bool:
        """Whether somebody asked the search to stop."""
        return self.stop is not None and self.stop.is_set()

    @property
    def expired(self) -> bool:
        """Whether the time budget is spent, or the search was stopped."""
        return self.stopped or (self.ends is not None and time.perf_counter() >= self.ends)
