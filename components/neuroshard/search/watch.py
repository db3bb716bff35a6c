"""What a search tells while it runs, and when it must stop: the clock stands here, so that the search itself has none."""

import time
from collections.abc import Callable

from neuroshard.progress import Bar

OnImprovement = Callable[[float, float], None]  # seconds since the search began, cost in ms


class Watch:
    """The best cost so far, each improvement with its time, and whether the time is up."""

    def __init__(self, time_budget_s: float | None = None, on_improvement: OnImprovement | None = None) -> None:
        self.began = self.shown = time.perf_counter()
        self.budget_s = time_budget_s
        self.ends = None if time_budget_s is None else self.began + time_budget_s
        self.on_improvement = on_improvement
        self.bar: Bar | None = None
        self.best_ms = float("inf")

    def note(self, cost_ms: float) -> None:
        """A plan of this cost is at hand."""
        if cost_ms < self.best_ms:
            self.best_ms = cost_ms
            if self.on_improvement is not None:
                self.on_improvement(time.perf_counter() - self.began, cost_ms)

    def advance(self) -> None:
        """One round of the search is done. With a time budget the bar shows seconds of it."""
        if self.bar is None:
            return
        steps = 1.0
        if self.ends is not None:
            before, self.shown = self.shown, min(time.perf_counter(), self.ends)
            steps = self.shown - before
        self.bar.advance(steps, f"best {self.best_ms:.3f} ms")

    @property
    def expired(self) -> bool:
        """Whether the time budget is spent."""
        return self.ends is not None and time.perf_counter() >= self.ends
