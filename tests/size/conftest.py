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
        batch = {} if "batch_per_device" in options else {"batch_size": 512}
        usual = {"rounds": 1, "pipeline": "none", **batch}
        return run(tables, size_order(models, devices=devices, memory=[memory], **{**usual, **options}))

    return sizes
