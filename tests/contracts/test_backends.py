"""What every backend does, whatever it measures with; cuda where there is a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from helpers.limits import HANGS
from helpers.refusals import refused
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import Bench
from neuroshard.core.errors import UsageError
from neuroshard.core.table import Table
from neuroshard.measure.backends import BACKENDS, Backend, MeasureSettings, open_backend

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]


MIB = 2**20
# 32 MiB is a quarter of what the huge table needs on the CPU, and enough for the others in the formula's device
SETTINGS = MeasureSettings(batch_size=65, warmup=1, repeats=3, memory_limit_bytes=32 * MIB, timeout_seconds=HANGS)


def table(name: str, **shape: Any) -> Table:
    return Table.model_validate({"name": name, "rows": 1000, "dim": 16, "pooling_factor": 2.0, **shape})


COMPUTE = {
    "one": ComputeCase(tables=(table("a"),)),
    "several": ComputeCase(tables=(table("a"), table("b", dim=128), table("c", rows=3, pooling_factor=0.5))),
    "one table twice": ComputeCase(tables=(table("a"), table("a", dim=4))),
    "fp16 and fp32": ComputeCase(tables=(table("a"), table("half", element_bytes=2))),
    "pooled by mean": ComputeCase(tables=(table("a", pooling="mean"),)),
    "weighted": ComputeCase(tables=(table("a", weighted=True),)),
    "four operators": ComputeCase(
        tables=(table("a"), table("m", pooling="mean"), table("w", weighted=True), table("h", element_bytes=2))
    ),
    "mean with weights": ComputeCase(tables=(table("mw", pooling="mean", weighted=True),)),
    "a batch of its own": ComputeCase(tables=(table("a"),), batch_size=7),
    "one row, narrow and wide": ComputeCase(tables=(table("r", rows=1, dim=4), table("v", rows=1, dim=1024))),
    "never read": ComputeCase(tables=(table("unread", pooling_factor=0.0),)),
}
TOO_MUCH = ComputeCase(tables=(table("endless", pooling_factor=1e9, rows=2**21, dim=128),))
COMM = {
    "balanced": CollectiveCase(device_dims=(64, 64), start_delays_ms=(0, 0)),
    "one sends nothing": CollectiveCase(device_dims=(128, 0), start_delays_ms=(0, 0)),
    "three, one late": CollectiveCase(device_dims=(64, 32, 4), start_delays_ms=(0, 0, 100)),
}


@pytest.fixture(scope="module")
def cases() -> Cases:
    compute = (*COMPUTE.values(), TOO_MUCH)
    return Cases(
        tables=tuple({t.name: t for case in compute for t in case.tables}.values()),
        compute=compute,
        collective=tuple(COMM.values()),
        max_dim=128,
        seed=0,
    )


@pytest.fixture(scope="module", params=BACKENDS)
def make(request: pytest.FixtureRequest, cases: Cases, forked_workers: None) -> Callable[[Bench | None], Backend]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return lambda begun: open_backend(request.param, cases, SETTINGS, begun)


@pytest.fixture(scope="module")
def backend(make: Callable[[Bench | None], Backend]) -> Iterator[Backend]:
    opened = make(None)
    yield opened
    opened.close()


class TestBackend:
    @pytest.mark.parametrize("which", COMPUTE)
    def test_a_table_set_takes_time_forward_and_backward(self, backend: Backend, which: str) -> None:
        cost = backend.compute(COMPUTE[which], 1)
        assert (cost.case_id, cost.round, cost.error) == (COMPUTE[which].case_id, 1, None)
        assert min(cost.forward_ms or 0, cost.backward_ms or 0) > 0

    def test_out_of_memory_is_a_row_and_the_next_case_is_measured(self, backend: Backend) -> None:
        cost = backend.compute(TOO_MUCH, 0)
        assert (cost.forward_ms, cost.backward_ms) == (None, None)
        assert (cost.error or "").startswith("out of memory")
        assert backend.compute(COMPUTE["one"], 0).error is None

    @pytest.mark.parametrize("which", COMM)
    def test_an_all_to_all_takes_time_on_every_device(self, backend: Backend, which: str) -> None:
        case = COMM[which]
        if backend.bench.backend == "cuda" and torch.cuda.device_count() < len(case.device_dims):
            pytest.skip(f"needs {len(case.device_dims)} NVIDIA GPUs")
        cost = backend.all_to_all(case, 1)
        assert (cost.case_id, cost.round, cost.error) == (case.case_id, 1, None)
        for times in (cost.forward_ms, cost.backward_ms, cost.forward_spread_ms, cost.backward_spread_ms):
            assert len(times or ()) == len(case.device_dims)
        assert min(*(cost.forward_ms or [0]), *(cost.backward_ms or [0])) > 0

    def test_the_bench_says_how_it_was_measured_and_is_the_same_where_a_run_goes_on(
        self, make: Callable[[Bench | None], Backend], backend: Backend
    ) -> None:
        again = make(
            backend.bench
        )  # what is timed when a run begins, such as how calm the machine is, is not timed anew
        again.close()
        assert again.bench == backend.bench
        assert backend.bench.hardware.kind == backend.bench.backend
        assert (backend.bench.batch_size, backend.bench.warmup, backend.bench.repeats) == (65, 1, 3)
        assert backend.bench.notes


def test_by_the_formula_a_delay_shows_as_waiting_of_those_who_started_first(cases: Cases) -> None:
    cost = open_backend("synthetic", cases, SETTINGS).all_to_all(COMM["three, one late"], 0)
    first, second, late = cost.forward_ms or (0.0, 0.0, 0.0)
    assert min(first, second) > late + 50  # of 100 ms
    assert max(late, *(cost.backward_ms or [99])) < 50


def test_by_the_formula_a_larger_batch_costs_more(cases: Cases) -> None:
    backend = open_backend("synthetic", cases, SETTINGS)
    tables = (table("big", rows=10_000, dim=64, pooling_factor=8.0),)
    small, large = (backend.compute(ComputeCase(tables=tables, batch_size=size), 0) for size in (16, 32768))
    assert small.total_ms * 1.2 < large.total_ms


def test_by_the_formula_tables_that_cannot_share_an_operator_cost_more(cases: Cases) -> None:
    backend = open_backend("synthetic", cases, SETTINGS)
    alike = ComputeCase(tables=tuple(table(name) for name in "pqrs"))
    assert backend.compute(alike, 0).total_ms < backend.compute(COMPUTE["four operators"], 0).total_ms


def test_an_unknown_backend_is_refused_with_the_known_ones(cases: Cases) -> None:
    with refused(UsageError, "'tpu'", *BACKENDS):
        open_backend("tpu", cases, SETTINGS)
