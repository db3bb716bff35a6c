"""Steps of all devices at the same time: when memory is asked whether it holds their ranks. No process is started."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import ComputeCost
from neuroshard.core.plan import DeviceCost, Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.measure import real_devices
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.evaluate import evaluate
from neuroshard.measure.machine import CpuMachine
from neuroshard.measure.real_devices import RealDevices, cpu
from neuroshard.measure.timing.all_to_all import RankTiming, TimeReorder
from neuroshard.measure.timing.harness import Timing
from neuroshard.measure.timing.steps import TimeSteps
from neuroshard.measure.timing.table_sets import CpuProbe, ProbeCpu, TimeTableSets

SETTINGS = MeasureSettings(batch_size=64, repeats=3)
TABLES = tuple(Table(name=name, rows=1000, dim=32, pooling_factor=2.0) for name in "ab")
SETS = tuple(ComputeCase(tables=(table,)) for table in TABLES)
ALL_TO_ALL = CollectiveCase(device_dims=(32, 32), start_delays_ms=(0.0, 0.0))
CASES = Cases(tables=TABLES, compute=SETS, collective=(ALL_TO_ALL,), max_dim=32, seed=0)


class Pools(list["Pool"]):
    """All pools of a backend, and the requests to them."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, target: str, *_: Any) -> "Pool":
        self.append(Pool(self, target))
        return self[-1]

    @property
    def running(self) -> list[str]:
        return [pool.target.partition(":")[2] for pool in self if pool.workers]

    @property
    def steps(self) -> int:
        return sum(isinstance(message, TimeSteps) for message in self.asked)


class Pool:
    """A pool whose workers take no time; each step takes a millisecond more than the one before."""

    def __init__(self, pools: Pools, target: str) -> None:
        self.pools, self.target = pools, target
        self.workers: list[str] = []

    def ask(self, message: Any, count: int) -> Sequence[Any]:
        self.pools.asked.append(message)
        self.workers = ["worker"] * count
        return [self.answer(message)] * count

    def answer(self, message: Any) -> Any:
        if isinstance(message, TimeSteps):
            return DeviceCost(compute_ms=float(self.pools.steps), forward_collective_ms=1.0, backward_collective_ms=1.0)
        if isinstance(message, ProbeCpu):
            return CpuProbe(flush_bytes=0, calm_ms={})
        timing = Timing(1.0, 0.0, 1.0)
        return 0.001 if isinstance(message, TimeReorder) else RankTiming(timing, timing, 1.0)

    def close(self) -> None:
        self.workers = []


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    made = Pools()
    monkeypatch.setattr(real_devices, "WorkerPool", made)
    monkeypatch.setattr("neuroshard.system.cores", lambda: 2)
    return made


def memory_holds_ranks_where(fits: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMachine, "holds", lambda self, ranks, rank_bytes: fits())


def opened_after_a_set(settings: MeasureSettings = SETTINGS) -> RealDevices:
    """A backend whose workers for table sets run, and its ranks of all-to-alls."""
    opened = cpu(CASES, settings, None)
    opened.set_workers.ask(ProbeCpu(0.0, None), count=1)
    opened.rank_workers.ask(TimeReorder(2), count=2)
    return opened


def test_memory_is_asked_for_ranks_of_steps_once_all_other_workers_have_given_theirs_back(
    monkeypatch: pytest.MonkeyPatch, pools: Pools
) -> None:
    opened = opened_after_a_set()
    assert pools.running == ["TableSets", "Rank"]
    memory_holds_ranks_where(lambda: not pools.running, monkeypatch)
    assert opened.steps(SETS, ALL_TO_ALL) is not None
    assert pools.running == ["StepRank"]


def test_all_rounds_of_steps_are_run_where_memory_holds_the_ranks_but_once(
    monkeypatch: pytest.MonkeyPatch, pools: Pools
) -> None:
    """What each device takes is then the median of three rounds, of 1, 2 and 3 ms."""
    memory_holds_ranks_where(lambda: "StepRank" not in pools.running, monkeypatch)
    shards = tuple(Shard(table=table.name, rows=1000, dim=32, device=i) for i, table in enumerate(TABLES))
    task = ShardingTask(tables=TABLES, device_memory_bytes=(2**30,) * 2, batch_size=64)
    plan = Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))

    one = evaluate(plan, "cpu", SETTINGS, rounds=3)

    assert (one.at_once, pools.steps, one.rounds_differ) == (True, 3, 2.0)
    assert [device.measured.compute_ms for device in one.devices if device.measured] == [2.0, 2.0]


def test_a_set_that_the_operator_cannot_hold_is_a_row_with_an_error_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, pools: Pools
) -> None:
    wide = ComputeCase(tables=(TABLES[0], TABLES[1].with_dim(1028)))
    opened = cpu(CASES, SETTINGS, None)
    monkeypatch.setattr(opened.machine, "kind", "cuda")
    timed: list[ComputeCase] = []

    def ask_each(requests: Sequence[TimeTableSets]) -> list[list[ComputeCost]]:
        timed.extend(case for request in requests for case, _ in request.cases)
        return [
            [ComputeCost(case_id=c.case_id, round=r, forward_ms=1.0, backward_ms=1.0) for c, r in q.cases]
            for q in requests
        ]

    monkeypatch.setattr(opened.set_workers, "ask_each", ask_each, raising=False)
    first, refused, last = opened.compute_many([(SETS[0], 0), (wide, 1), (SETS[1], 0)])
    assert [one.case_id for one in (first, refused, last)] == [one.case_id for one in (SETS[0], wide, SETS[1])]
    assert "1,028 columns" in (refused.error or "")
    assert "holds 1,024" in (refused.error or "")
    assert (first.error, last.error, sorted(one.case_id for one in timed)) == (
        None,
        None,
        sorted(c.case_id for c in SETS),
    )
    assert opened.steps((SETS[0], wide), ALL_TO_ALL) is None


@pytest.mark.parametrize(("threads", "cores"), [(2, 2), (1, 1)])
def test_no_worker_is_closed_where_devices_take_turns_in_any_case(
    monkeypatch: pytest.MonkeyPatch, pools: Pools, threads: int, cores: int
) -> None:
    monkeypatch.setattr("neuroshard.system.cores", lambda: cores)
    opened = opened_after_a_set(MeasureSettings(batch_size=64, repeats=3, threads=threads))
    assert opened.steps(SETS, ALL_TO_ALL) is None
    assert pools.running == ["TableSets", "Rank"]
