"""What all tests of the search use."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest

from helpers.analytic import AnalyticModel
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.search import watch

GIB = 2**30
MakeTask = Callable[..., ShardingTask]


@pytest.fixture
def model() -> AnalyticModel:
    return AnalyticModel()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search's clock goes on by a millisecond whenever it is looked at, however fast this machine is."""
    ticks = count()
    monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))


@pytest.fixture
def make_task() -> MakeTask:
    """`make_task([(rows, dim, pooling factor), …], [GiB of each device, …])`"""

    def make(tables: list[tuple[int, int, float]], memory_gib: list[float]) -> ShardingTask:
        return ShardingTask(
            tables=tuple(
                Table(name=f"t{i}", rows=rows, dim=dim, pooling_factor=pooling, reuse_bins=(0.0,) * 17)
                for i, (rows, dim, pooling) in enumerate(tables)
            ),
            device_memory_bytes=tuple(int(gib * GIB) for gib in memory_gib),
            batch_size=65536,
        )

    return make
