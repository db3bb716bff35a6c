"""The real thing on this machine's CPU: FBGEMM in a worker, gloo between processes."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.limits import HANGS
from helpers.refusals import names, refused
from neuroshard import system
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import SLOWDOWN_EXPONENTS
from neuroshard.core.errors import MeasureError
from neuroshard.core.extras import install_command
from neuroshard.core.table import Table
from neuroshard.files.traces import Lookups, Traces, write_traces
from neuroshard.measure import real_devices
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.machine import CpuMachine
from neuroshard.measure.real_devices import TURNS_SECONDS, RealDevices, cpu
from neuroshard.measure.rowcap import buffer_bytes
from neuroshard.measure.run import measure
from neuroshard.measure.schedule import Step
from neuroshard.measure.timing import all_to_all
from neuroshard.measure.timing.all_to_all import Rank, RankTiming, TimeAllToAll
from neuroshard.measure.timing.fbgemm import MOMENT, WEIGHT, TableBatchedEmbedding
from neuroshard.measure.timing.harness import Timing
from neuroshard.measure.timing.table_sets import TimeTableSets
from neuroshard.measure.workers.processes import Worker, WorkerLost, WorkerPool

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]


MIB, GIB = 2**20, 2**30
SETTINGS = MeasureSettings(batch_size=256, warmup=1, repeats=5, memory_limit_bytes=64 * MIB, timeout_seconds=HANGS)
MakeTable = Callable[..., Table]


def table(name: str, **shape: Any) -> Table:
    return Table.model_validate({"name": name, "rows": 100_000, "dim": 32, "pooling_factor": 4.0, **shape})


def cases_of(*compute: ComputeCase, collective: tuple[CollectiveCase, ...] = ()) -> Cases:
    tables = {t.name: t for case in compute for t in case.tables}
    return Cases(tables=tuple(tables.values()), compute=compute, collective=collective, max_dim=128, seed=0)


FEW = ComputeCase(tables=(table("a"),))
MANY = ComputeCase(tables=(table("b", pooling_factor=256.0),))
WIDE = ComputeCase(tables=(table("c", dim=128, pooling_factor=256.0),))
LARGE = ComputeCase(tables=(table("d", rows=1_000_000),))  # 128 MB: more than the limit
ALL_TO_ALL = CollectiveCase(device_dims=(64, 64), start_delays_ms=(0, 0))
ALL = cases_of(FEW, MANY, WIDE, LARGE, collective=(ALL_TO_ALL,))


@pytest.fixture(scope="module")
def backend(forked_workers: None) -> Iterator[RealDevices]:
    """Another run that goes on with this one's bench starts no workers to find how calm the machine is."""
    opened = cpu(ALL, SETTINGS, None)
    yield opened
    opened.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of FBGEMM
def test_what_is_timed_is_what_was_asked_for() -> None:
    """Each sample's row is the sum of as many weights as it has lookups, as wide as the table; and backward updates them."""
    for case in (FEW, MANY, WIDE):
        sets = TableBatchedEmbedding("cpu", 0, SETTINGS, None, *buffer_bytes([case], SETTINGS.optimizer, None))
        forward, backward = sets.steps(case)
        (pooled,) = forward()
        asked = case.tables[0]
        assert tuple(pooled.shape) == (SETTINGS.batch_size, asked.dim)
        assert float(pooled.detach().sum()) == pytest.approx(
            SETTINGS.batch_size * asked.dim * asked.pooling_factor * WEIGHT, rel=1e-3
        )
        backward([pooled])
        assert sets.buffers is not None
        assert float(sets.buffers.state.max()) > MOMENT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of FBGEMM
def test_a_larger_batch_is_more_work_and_tables_that_cannot_share_an_operator_are_several_calls() -> None:
    """As many outputs as operators, as long as the batch."""
    tables = (table("a"), table("m", pooling="mean"), table("w", weighted=True), table("h", element_bytes=2))
    differing, alike = ComputeCase(tables=tables), ComputeCase(tables=tuple(table(name) for name in "pqrs"))
    large = ComputeCase(tables=(table("a"),), batch_size=32768)
    shapes = []
    for case in (differing, alike, large):
        sets = TableBatchedEmbedding("cpu", 0, SETTINGS, None, *buffer_bytes([case], SETTINGS.optimizer, None))
        forward, _ = sets.steps(case)
        shapes.append([tuple(pooled.shape) for pooled in forward()])
    assert shapes == [[(256, 32)] * 4, [(256, 128)], [(32768, 32)]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of FBGEMM
def test_features_are_pooled_each_by_itself_and_sequences_not_at_all() -> None:
    """Of a table with three features a sample has three vectors; of a sequence one a lookup, in an operator of its width."""
    shared = table("f", features=[{"name": name, "pooling_factor": 8.0} for name in "xyz"], pooling_factor=24.0)
    sequences = [table("s", pooling="none"), table("n", pooling="none", dim=16), table("t", pooling="none")]
    case = ComputeCase(tables=(shared, *sequences))
    sets = TableBatchedEmbedding("cpu", 0, SETTINGS, None, *buffer_bytes([case], SETTINGS.optimizer, None))
    forward, backward = sets.steps(case)

    outputs = forward()

    lookups = 256 * round(sequences[0].pooling_factor)
    assert [tuple(one.shape) for one in outputs] == [(256, 3 * 32), (2 * lookups, 32), (lookups, 16)]
    assert float(outputs[0].detach().sum()) == pytest.approx(256 * 24 * 32 * WEIGHT, rel=1e-3)
    assert float(outputs[1].detach().min()) == float(outputs[1].detach().max()) == WEIGHT
    backward(outputs)


def test_a_measured_set_takes_time_forward_and_backward(backend: RealDevices) -> None:
    cost = backend.compute(MANY, 0)
    assert (cost.forward_ms or 0) > 0
    assert (cost.backward_ms or 0) > 0
    assert (cost.forward_median_ms or 0) > 0


def test_a_table_larger_than_the_memory_limit_is_measured_with_fewer_rows_as_the_bench_says(
    backend: RealDevices,
) -> None:
    assert backend.bench.row_cap_bytes == 64 * MIB
    assert backend.bench.capped_tables == ("d",)
    assert backend.compute(LARGE, 0).error is None


def test_a_killed_worker_is_replaced(backend: RealDevices) -> None:
    backend.compute(FEW, 0)
    killed = backend.set_workers.workers[0].process
    killed.kill()
    killed.wait()
    with refused(MeasureError, "SIGKILL"):
        backend.compute(FEW, 0)
    assert backend.compute(FEW, 0).error is None


def test_sets_side_by_side_are_each_measured_on_a_worker_of_its_own(
    backend: RealDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on several GPUs: here two workers share a CPU. One of them is killed, and the run goes on with another."""
    monkeypatch.setattr(CpuMachine, "concurrency", lambda self: 2)
    settings = MeasureSettings(batch_size=64, repeats=3, timeout_seconds=HANGS)
    opened = cpu(cases_of(FEW, MANY), settings, backend.bench)
    try:
        steps = [Step(FEW, 0), Step(MANY, 0), Step(FEW, 1)]
        costs = [cost for _, cost in measure(steps, opened)]
        assert [(cost.case_id, cost.round, cost.error) for cost in costs] == [
            (step.case.case_id, step.round_, None) for step in steps
        ]
        assert len({worker.process.pid for worker in opened.set_workers.workers}) == 2
        opened.set_workers.workers[1].process.kill()
        opened.set_workers.workers[1].process.wait()
        assert [cost.error for _, cost in measure(steps, opened)] == [None] * 3
    finally:
        opened.close()


def test_a_rank_killed_in_an_all_to_all_is_an_error_and_all_ranks_are_replaced(backend: RealDevices) -> None:
    backend.all_to_all(ALL_TO_ALL, 0)
    killed = backend.rank_workers.workers[1].process
    killed.kill()
    killed.wait()
    with refused(MeasureError, "SIGKILL"):
        backend.all_to_all(ALL_TO_ALL, 0)
    assert backend.all_to_all(ALL_TO_ALL, 0).error is None


def test_a_rank_starts_its_delay_after_the_moment_that_rank_0_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who is late already starts at once. The clock is a script's."""
    import torch.distributed as dist

    slept: list[float] = []
    for now, chosen, delay_ms in ((100.0, 100.5, 0.0), (100.0, 100.5, 250.0), (101.0, 100.5, 250.0)):
        monkeypatch.setattr(dist, "broadcast", lambda moment, source, group, chosen=chosen: moment.fill_(chosen))
        monkeypatch.setattr(all_to_all, "time", SimpleNamespace(monotonic=lambda now=now: now, sleep=slept.append))
        Rank._start_together(SimpleNamespace(clocks={2: None}), 2, delay_ms)  # type: ignore[arg-type]
    assert slept == [0.5, 0.75, 0.0]


def test_a_rank_without_samples_has_no_outputs_to_put_into_order() -> None:
    rank = SimpleNamespace(rank=2, settings=MeasureSettings(batch_size=2))
    assert Rank._reorder_ms(rank, 4) == 0.0  # type: ignore[arg-type]


def test_ranks_that_never_meet_leave_no_folder(
    backend: RealDevices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lost = WorkerPool("neuroshard.measure.timing.all_to_all:Nobody", backend.rank_workers.arguments, HANGS)
    for _ in range(2):
        with refused(WorkerLost, "Nobody"):
            lost.start()
    assert len(list(tmp_path.iterdir())) == 1
    backend.meetings.close()
    assert not list(tmp_path.iterdir())


def test_a_continued_run_keeps_its_memory_limit_and_its_calm_times(backend: RealDevices) -> None:
    """The defaults depend on the free memory, and on how calm the machine is, so they are found once."""
    unsaid = MeasureSettings(batch_size=256, warmup=1, repeats=5, timeout_seconds=HANGS)
    fresh = cpu(ALL, unsaid, None)
    fresh.close()
    assert fresh.bench != backend.bench
    assert list(fresh.bench.calm_all_to_all_ms) == ["2"]
    assert fresh.bench.calm_compute_ms.keys() == SLOWDOWN_EXPONENTS.keys()
    assert min(fresh.bench.calm_compute_ms.values()) > 0
    assert cpu(ALL, unsaid, backend.bench).bench == backend.bench


def test_a_rank_lost_while_calm_is_measured_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = [], WorkerPool.ask

    def lost_once(self: WorkerPool, message: object, count: int | None = None) -> list[object]:
        asked.append(message)
        if len(asked) == 2:
            self.workers[0].process.kill()
        return ask(self, message, count)

    monkeypatch.setattr(WorkerPool, "ask", lost_once)
    opened = cpu(cases_of(collective=(ALL_TO_ALL,)), SETTINGS, None)
    opened.close()
    assert opened.bench.calm_all_to_all_ms["2"] > 0


def test_an_all_to_all_on_a_machine_half_as_fast_is_scaled_to_its_calm_speed(
    backend: RealDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CollectiveCase(device_dims=(64, 64), start_delays_ms=(0, 5))
    calm = backend.bench.calm_all_to_all_ms["2"]
    slow = [
        RankTiming(Timing(9.0, 0.5, 9.5), Timing(4.0, 0.5, 4.5), 2 * calm),
        RankTiming(Timing(4.0, 0.5, 4.5), Timing(4.0, 0.5, 4.5), 2 * calm),
    ]
    monkeypatch.setattr(backend.rank_workers, "ask", lambda case, count: slow)
    cost = backend.all_to_all(case, 0)
    assert (cost.forward_ms, cost.backward_ms) == ((7.0, 2.0), (2.0, 2.0))


def test_table_sets_are_measured_even_if_ranks_are_always_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = WorkerPool.ask

    def lost(self: WorkerPool, message: object, count: int | None = None) -> list[object]:
        if isinstance(message, TimeAllToAll):
            raise WorkerLost("worker died (exit code 1): no network interface")
        return ask(self, message, count)

    monkeypatch.setattr(WorkerPool, "ask", lost)
    opened = cpu(cases_of(FEW, collective=(ALL_TO_ALL,)), SETTINGS, None)
    try:
        assert opened.compute(FEW, 0).error is None
        assert (opened.most_devices, opened.bench.calm_all_to_all_ms) == (1, {})
    finally:
        opened.close()
    assert names(capsys.readouterr().err, "no network interface")


def test_processes_that_memory_does_not_hold_at_once_take_turns(
    backend: RealDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuMachine, "apart", lambda self, buffer_bytes, ranks: True)
    opened = cpu(cases_of(FEW, collective=(ALL_TO_ALL,)), SETTINGS, backend.bench)
    try:
        assert opened.compute(FEW, 0).error is None
        assert (len(opened.set_workers.workers), len(opened.rank_workers.workers)) == (1, 0)
        assert opened.all_to_all(ALL_TO_ALL, 0).error is None
        assert (len(opened.set_workers.workers), len(opened.rank_workers.workers)) == (0, 2)
    finally:
        opened.close()


def test_a_run_does_not_begin_if_workers_are_lost_while_calm_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(self: WorkerPool, message: object, count: int | None = None) -> list[object]:
        raise WorkerLost("worker died (killed by SIGKILL)")

    monkeypatch.setattr(WorkerPool, "ask", lost)
    with refused(MeasureError, "SIGKILL"):
        cpu(cases_of(FEW), SETTINGS, None)


def test_table_sets_are_split_among_the_workers_with_the_calm_times(
    backend: RealDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And come back in the order in which they were given."""
    dealt: list[TimeTableSets] = []

    def answered(requests: list[TimeTableSets]) -> list[list[str]]:
        dealt.extend(requests)
        return [[case.case_id for case, _ in request.cases] for request in requests]

    monkeypatch.setattr(CpuMachine, "concurrency", lambda self: 2)
    monkeypatch.setattr(backend.set_workers, "ask_each", answered)
    given = [(FEW, 0), (MANY, 0), (WIDE, 1)]
    assert backend.compute_many(given) == [case.case_id for case, _ in given]
    assert [request.cases for request in dealt] == [((FEW, 0), (WIDE, 1)), ((MANY, 0),)]
    assert all(request.calm_ms == backend.bench.calm_compute_ms for request in dealt)


def test_of_long_table_sets_fewer_are_measured_together(backend: RealDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    together = []
    for seconds in (0.01, 1.0, 100.0):
        monkeypatch.setattr(backend, "seconds_a_set", seconds)
        together.append(backend.concurrency)
    assert together == [CpuMachine().in_turns(), TURNS_SECONDS, 1]


ENDLESS = ComputeCase(tables=(table("endless", pooling_factor=1e6),))  # lookups of 2 GiB


def test_a_set_that_runs_out_of_memory_leaves_the_others_in_its_request_intact(
    backend: RealDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GiB free, whatever the kernel promises."""
    monkeypatch.setattr(system, "available_bytes", lambda: GIB)
    costs = backend.compute_many([(FEW, 0), (ENDLESS, 0), (FEW, 1)])
    assert [(cost.case_id, cost.round) for cost in costs] == [(FEW.case_id, 0), (ENDLESS.case_id, 0), (FEW.case_id, 1)]
    assert [bool(cost.error) for cost in costs] == [False, True, False]
    assert (costs[1].error or "").startswith("out of memory")
    assert len(backend.set_workers.workers) == 1  # which goes on


def test_a_set_whose_worker_the_kernel_kills_is_a_row_and_the_others_of_its_request_are_measured_again(
    backend: RealDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Worker.send

    def too_large(self: Worker, message: Any, room: int) -> None:
        send(self, message, room)
        if isinstance(message, TimeTableSets) and ENDLESS in [case for case, _ in message.cases]:
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Worker, "send", too_large)
    monkeypatch.setattr(system, "available_bytes", lambda: GIB)
    monkeypatch.setattr(backend, "seconds_a_set", 0.001)  # so that all are asked together
    steps = [Step(FEW, 0), Step(ENDLESS, 0), Step(MANY, 0), Step(FEW, 1)]
    costs = dict(measure(steps, backend))
    assert (costs.pop(steps[1]).error or "").startswith("out of memory")
    assert [cost.error for cost in costs.values()] == [None] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of FBGEMM
def test_a_set_of_every_kind_of_operator_fits_the_computed_memory() -> None:
    kinds = itertools.product((2, 4), ("sum", "mean"), (False, True))
    tables = tuple(
        Table.model_validate(
            {"name": f"t{i}", "rows": 1, "dim": 4, "pooling_factor": 1.0}
            | {"element_bytes": element_bytes, "pooling": pooling, "weighted": weighted}
        )
        for i, (element_bytes, pooling, weighted) in enumerate(kinds)
    )
    case = ComputeCase(tables=tables)
    for optimizer in ("sgd", "rowwise_adagrad", "adagrad"):
        settings = MeasureSettings(batch_size=4, optimizer=optimizer)
        sets = TableBatchedEmbedding("cpu", 0, settings, None, *buffer_bytes([case], optimizer, None))
        forward, backward = sets.steps(case)
        outputs = forward()
        backward(outputs)
        assert [tuple(output.shape) for output in outputs] == [(4, 4)] * 8


def test_traces_are_looked_up_as_they_are(backend: RealDevices, tmp_path: Path) -> None:
    """The recorded rows, not drawn ones: all of them one row here."""
    hot = Lookups(np.zeros(256 * 256, dtype=np.int64), np.full(256, 256))
    write_traces(tmp_path / "traces.safetensors", Traces({"c": hot}))
    settings = MeasureSettings(
        batch_size=256, warmup=1, repeats=5, timeout_seconds=HANGS, traces=tmp_path / "traces.safetensors"
    )
    traced, drawn = (TableBatchedEmbedding("cpu", 0, one, None, 0, 0) for one in (settings, SETTINGS))
    table = WIDE.tables[0]
    assert set(traced.lookups.of(table, table.rows, 256)[0].tolist()) == {0}
    assert len(set(drawn.lookups.of(table, table.rows, 256)[0].tolist())) > 256
    opened = cpu(cases_of(WIDE), settings, backend.bench)
    try:
        assert opened.compute(WIDE, 0).error is None
        assert "lookups from traces" in opened.bench.notes
    finally:
        opened.close()


def test_more_memory_than_the_machine_has_is_refused_before_it_is_allocated() -> None:
    endless = cases_of(ComputeCase(tables=(table("endless", rows=2**40),)))
    with refused(MeasureError, "TiB", "--memory-limit"):
        cpu(endless, MeasureSettings(batch_size=256, memory_limit_bytes=2**47), None)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_other_optimizers_are_measured_too(backend: RealDevices, optimizer: str) -> None:
    settings = MeasureSettings(batch_size=64, repeats=3, timeout_seconds=HANGS, optimizer=optimizer)
    opened = cpu(cases_of(FEW), settings, backend.bench)
    try:
        assert opened.compute(FEW, 0).error is None
        assert opened.bench.optimizer == optimizer
    finally:
        opened.close()


def test_without_fbgemm_the_error_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fbgemm_gpu" else object())
    with refused(MeasureError, "backend cpu", "fbgemm_gpu", install_command("measure")):
        cpu(ALL, SETTINGS, None)


def test_where_the_cpu_cannot_be_read_the_error_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEUROSHARD_SYSTEM_ROOT", str(tmp_path))
    with refused(MeasureError, "cpuinfo", "mount /proc"):
        cpu(ALL, SETTINGS, None)


def test_workers_keep_the_memory_that_a_step_frees() -> None:
    asked = """
import resource, torch
def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    results = [torch.ones(int(mib * 2**18)) for mib in (20, 1, 8, 3, 0.25, 15)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([new_pages() for _ in range(8)])
"""
    worker = {**os.environ, **real_devices.kept_memory({})}
    output = subprocess.run(
        [sys.executable, "-c", asked], check=True, env=worker, capture_output=True, text=True
    ).stdout
    first, *_, last = json.loads(output)
    assert first > 10 > last


def test_other_glibc_settings_of_the_user_reach_the_workers() -> None:
    (ours,) = real_devices.kept_memory({}).values()
    theirs = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=1::glibc.malloc.top_pad=0:glibc.rtld.nns=8"}
    merged = real_devices.kept_memory(theirs)
    assert merged == {"GLIBC_TUNABLES": f"glibc.malloc.tcache_count=1:glibc.rtld.nns=8:{ours}"}
    assert real_devices.kept_memory(merged) == merged
