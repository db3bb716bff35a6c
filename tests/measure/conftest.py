"""Small tables and case sets for the measuring tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.table import Table
from neuroshard.files.cases import write_cases


def small_table(name: str, **shape: float) -> Table:
    return Table.model_validate({"name": name, "rows": 1000, "dim": 16, "pooling_factor": 2.0, **shape})


@pytest.fixture
def table() -> Callable[..., Table]:
    """`table("a", rows=50)`: 1000 rows, dim 16, pooling 2 unless said."""
    return small_table


@pytest.fixture
def cases() -> Cases:
    """Thirty sets of one to three of five tables, and six all-to-alls between 2 devices."""
    tables = tuple(small_table(f"t{i}", rows=1000 * (i + 1), pooling_factor=i + 1) for i in range(5))
    compute = tuple(
        ComputeCase(tables=tuple(tables[(i + k) % 5].with_dim(4 * (i + 1)) for k in range(i % 3 + 1)))
        for i in range(30)
    )
    collective = tuple(CollectiveCase(device_dims=(32 * i + 32, 64), start_delays_ms=(0.0, 0.5 * i)) for i in range(6))
    return Cases(tables=tables, compute=compute, collective=collective, max_dim=120, seed=0)


@pytest.fixture
def cases_folder(cases: Cases, tmp_path: Path) -> Path:
    write_cases(tmp_path / "cases", cases)
    return tmp_path / "cases"
