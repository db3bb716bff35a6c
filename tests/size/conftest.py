"""Sweeps of few small tables."""

from collections.abc import Callable
from typing import Any

import pytest

from neuroshard.core.table import Table
from neuroshard.orders.sizes import size_order
from neuroshard.size.run import Sizes, run

Swept = Callable[..., Sizes]


@pytest.fixture
def swept() -> Swept:
    """The sizes of these tables, on an H100 unless said otherwise."""

    def sizes(tables: tuple[Table, ...], devices: str, memory: str, **options: Any) -> Sizes:
        models = options.pop("models", ["analytic:h100"])
        own = ("price", "dense_time", "domain", "local_world_size", "host_memory", "batch_per_device", "time_budget")
        mine = {name: options.pop(name) for name in own if name in options}
        search = {"rounds": 1, "pipeline": "none", **options}
        if "batch_per_device" not in mine:
            search.setdefault("batch_size", 512)
        return run(tables, size_order(models, devices, memory=[memory], search=search, **mine))

    return sizes
