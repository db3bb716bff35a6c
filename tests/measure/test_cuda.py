"""Backend `cuda`: on a machine without a GPU it says so; on one with, it measures."""

from collections.abc import Callable

import pytest
import torch

from neuroshard.core.case import Cases, ComputeCase
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import Table
from neuroshard.measure.backends import Settings, open_backend

GPUS = torch.cuda.device_count()


def cases_of(*tables: Table) -> Cases:
    compute = tuple(ComputeCase(tables=(one,)) for one in tables)
    return Cases(tables=tables, compute=compute, comm=(), max_dim=128, seed=0)


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(table: Callable[..., Table]) -> None:
    with pytest.raises(MeasureError, match="backend cuda needs an NVIDIA GPU, and torch sees none here"):
        open_backend("cuda", cases_of(table("a")), Settings(batch_size=64))


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU; torch sees none here")
def test_more_lookups_cost_more_and_what_does_not_fit_is_a_row(table: Callable[..., Table]) -> None:
    tables = (
        table("few", rows=10**6, dim=64),
        table("many", rows=10**6, dim=64, pooling_factor=64.0),
        table("huge", rows=10**9, dim=128),
    )
    cases = cases_of(*tables)
    backend = open_backend("cuda", cases, Settings(batch_size=65536))
    try:
        few, many, huge = (backend.compute(case, 0) for case in cases.compute)
    finally:
        backend.close()
    assert few.total_ms < many.total_ms / 4
    assert (huge.error or "").startswith("out of memory")


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs")
def test_gpus_measure_table_sets_side_by_side(table: Callable[..., Table]) -> None:
    tables = tuple(table(f"t{i}", rows=10**6, dim=64, pooling_factor=float(i + 1)) for i in range(GPUS))
    cases = cases_of(*tables)
    backend = open_backend("cuda", cases, Settings(batch_size=65536))
    try:
        costs = backend.compute_abreast([(case, 0) for case in cases.compute])
        alone = [backend.compute(case, 1) for case in cases.compute]
    finally:
        backend.close()
    assert [cost.case_id for cost in costs] == [case.case_id for case in cases.compute]
    for side_by_side, one in zip(costs, alone, strict=True):
        assert side_by_side.total_ms == pytest.approx(one.total_ms, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA GPU; torch sees none here")
def test_a_bench_on_gpus_tells_their_clocks_and_power(table: Callable[..., Table]) -> None:
    pytest.importorskip("pynvml")
    backend = open_backend("cuda", cases_of(table("a")), Settings(batch_size=64))
    backend.close()
    assert {"largest SM clock", "largest memory clock", "power cap"} <= backend.bench.facts.keys()
