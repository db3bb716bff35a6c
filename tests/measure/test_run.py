"""The stage: budget, restart after a kill, errors that are rows, and workers that are lost."""

import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.limits import HANGS
from helpers.processes import wait_until
from helpers.refusals import names, refused
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost
from neuroshard.core.errors import InvalidInput, MeasureError, UsageError
from neuroshard.files.cases import write_cases
from neuroshard.files.costs import read_costs, read_manifest
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.formula import Synthetic
from neuroshard.measure.run import STILL_DISTURBED, in_chunks, measure, run
from neuroshard.measure.schedule import DRIFT, Step, schedule
from neuroshard.measure.workers.processes import WorkerLost


def rows(folder: Path) -> list[tuple[str, int]]:
    costs = read_costs(folder)
    return [(cost.case_id, cost.round) for _, cost in costs.compute] + [
        (c.case_id, c.round) for _, c in costs.collective
    ]


def planned(cases: Cases, seed: int = 0) -> list[tuple[str, int]]:
    return [(step.case.case_id, step.round_) for step in schedule(cases, seed).steps if step.round_ != DRIFT]


def test_all_cases_are_measured_and_some_again(cases: Cases, cases_folder: Path, tmp_path: Path) -> None:
    measured = run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512))
    assert sorted(rows(tmp_path / "costs")) == sorted(planned(cases))
    assert (measured.planned, measured.measured, measured.now, measured.left) == (len(planned(cases)),) * 3 + (0,)
    assert 0 < (measured.repeatability["compute"] or 0) < 0.1
    assert str(measured).startswith(f"{measured.planned} of {measured.planned} measured")


def test_a_budget_stops_cleanly_and_a_later_run_goes_on(cases: Cases, cases_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "costs"
    stopped = run(cases_folder, out, "synthetic", MeasureSettings(batch_size=512, budget_seconds=1e-9))
    assert (stopped.measured, stopped.left) == (0, len(planned(cases)))
    assert (stopped.now, names(str(stopped), f"{math.ceil(stopped.seconds)}s")) == (0, True)
    bench = read_manifest(out).bench
    finished = run(cases_folder, out, "synthetic", MeasureSettings(batch_size=512))
    assert (finished.now, finished.left) == (len(planned(cases)), 0)
    again = run(cases_folder, out, "synthetic", MeasureSettings(batch_size=512))
    assert (again.now, again.measured) == (0, len(planned(cases)))
    assert read_manifest(out).bench == bench


def test_what_sets_side_by_side_take_is_counted_for_each_of_them(
    cases_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time of a chunk comes with the first of its sets, and the others with none."""
    at_once = Synthetic.compute_many

    def slowly(self: Synthetic, some: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        time.sleep(0.4)
        return at_once(self, some)

    monkeypatch.setattr(Synthetic, "concurrency", 4)
    monkeypatch.setattr(Synthetic, "compute_many", slowly)
    stopped = run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512, budget_seconds=1.5))
    assert 0 < stopped.measured < stopped.planned
    said = re.search(r"enough for about ([\d,]+) of ([\d,]+) measurements of table sets", capsys.readouterr().err)
    assert said
    assert int(said[1]) < int(said[2]) / 2


def test_further_rounds_are_added_to_what_is_there(cases: Cases, cases_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "costs"
    once = run(cases_folder, out, "synthetic", MeasureSettings(batch_size=512))
    more = run(cases_folder, out, "synthetic", MeasureSettings(batch_size=512), rounds=3)
    every = len(cases.compute) + len(cases.collective)
    assert (more.planned, more.now, more.left) == (3 * every, 3 * every - once.measured, 0)
    assert sorted(rows(out)) == sorted(
        (case.case_id, round_) for case in cases.compute + cases.collective for round_ in range(3)
    )


def test_costs_of_another_bench_are_refused(cases_folder: Path, tmp_path: Path) -> None:
    run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512, budget_seconds=1e-9))
    with refused(InvalidInput, "batch_size", 512, 1024):
        run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=1024))


def test_costs_of_another_backend_are_refused_before_one_is_opened(
    cases_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start workers and wait for calm first, and measure with the other's memory limit."""
    out = tmp_path / "costs"
    run(cases_folder, out, "synthetic", MeasureSettings(batch_size=512, budget_seconds=1e-9))
    monkeypatch.setattr("neuroshard.measure.run.open_backend", lambda *_: pytest.fail("a backend was opened"))
    with refused(InvalidInput, out / "costs.json", "backend", "synthetic there", "cpu now", "-o"):
        run(cases_folder, out, "cpu", MeasureSettings(batch_size=512))


def test_an_unknown_backend_is_called_unknown_in_a_folder_of_costs_too(cases_folder: Path, tmp_path: Path) -> None:
    run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512, budget_seconds=1e-9))
    with refused(UsageError, "unknown backend", "'tpu'"):
        run(cases_folder, tmp_path / "costs", "tpu", MeasureSettings(batch_size=512))


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"backend": "tpu"}, ["backend", "'tpu'", "synthetic", "cpu", "cuda"]),
        ({"optimizer": "lion"}, ["optimizer", "'lion'", "sgd", "rowwise_adagrad", "adagrad"]),
        ({"repeats": 0}, ["repeats", "not 0"]),
        ({"rounds": 0}, ["rounds", "not 0"]),
        ({"timeout_seconds": 0.0}, ["timeout_seconds", "not 0.0"]),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_written(
    cases_folder: Path, tmp_path: Path, arguments: dict[str, object], facts: list[str]
) -> None:
    asked = {"backend": "synthetic", "rounds": 1, "batch_size": 512, **arguments}
    backend, rounds = str(asked.pop("backend")), asked.pop("rounds")
    with refused(UsageError, *facts):
        run(
            cases_folder,
            tmp_path / "costs",
            backend,
            MeasureSettings(**asked),
            rounds=rounds,
        )
    assert not (tmp_path / "costs").exists()


def test_table_sets_go_side_by_side_and_all_to_alls_and_the_drift_case_alone(cases: Cases) -> None:
    one, two, three = (Step(case, 0) for case in cases.compute[:3])
    all_to_all, drift_case = Step(cases.collective[0], 0), Step(cases.compute[0], DRIFT)
    steps = [drift_case, one, two, three, all_to_all, one, drift_case, two]
    chunks = list(in_chunks(steps, lambda: 2))
    assert chunks == [[drift_case], [one, two], [three], [all_to_all], [one], [drift_case], [two]]
    assert list(in_chunks(steps, lambda: 1)) == [[step] for step in steps]


def test_of_long_table_sets_fewer_are_taken_together(cases: Cases) -> None:
    steps = [Step(case, 0) for case in cases.compute[:6]]
    wanted = iter([3, 3, 1, 1, 1])
    assert [len(chunk) for chunk in in_chunks(steps, lambda: next(wanted))] == [3, 1, 1, 1]


class Scripted:
    """A backend that loses its worker as often as the script says, case by case."""

    bench: Bench
    most_devices = None
    concurrency = 1

    def __init__(self, losses: Sequence[int]) -> None:
        self.losses = list(losses)
        self.asked: list[str] = []

    def compute(self, case: ComputeCase, round_: int) -> ComputeCost:
        place = len(dict.fromkeys([*self.asked, case.case_id])) - 1
        self.asked.append(case.case_id)
        if self.asked.count(case.case_id) <= self.losses[place]:
            raise WorkerLost("worker died (killed by SIGKILL)")
        return ComputeCost(case_id=case.case_id, round=round_, forward_ms=1.0, backward_ms=2.0)

    def compute_many(self, cases: Sequence[tuple[ComputeCase, int]]) -> list[ComputeCost]:
        raise NotImplementedError

    def all_to_all(self, case: CollectiveCase, round_: int) -> CollectiveCost:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.fixture
def steps(cases: Cases) -> list[Step]:
    return [Step(case, 0) for case in cases.compute]


def test_a_lost_worker_is_tried_once_more(steps: list[Step]) -> None:
    backend = Scripted([0, 1, 0])
    costs = [cost for _, cost in measure(steps[:3], backend)]
    assert [cost.error for cost in costs] == [None, None, None]
    assert backend.asked.count(steps[1].case.case_id) == 2


def test_a_case_that_loses_both_workers_is_an_error_row(steps: list[Step]) -> None:
    costs = dict(measure(steps[:4], Scripted([0, 2, 2, 0])))
    assert [costs[step].error for step in steps[:4]] == [
        None,
        "worker died (killed by SIGKILL)",
        "worker died (killed by SIGKILL)",
        None,
    ]


def test_workers_lost_again_and_again_stop_the_run_and_are_not_blamed_on_the_cases(steps: list[Step]) -> None:
    yielded: list[Any] = []
    with refused(MeasureError, "3 cases", "worker died"):
        yielded.extend(measure(steps, Scripted([2, 2, 2])))
    assert yielded == []

    class Breaking(Scripted):
        def compute(self, case: ComputeCase, round_: int) -> ComputeCost:
            if self.asked and case == steps[0].case:
                raise WorkerLost("nothing works any more")
            return super().compute(case, round_)

    with refused(MeasureError, "3 cases"):
        yielded.extend(measure(steps, Breaking([0, 2, 2, 2])))
    assert [step for step, _ in yielded] == steps[:1]


def test_poison_cases_in_a_row_are_errors_where_a_case_that_went_well_still_does(steps: list[Step]) -> None:
    costs = dict(measure(steps[:9], Scripted([0, *[2] * 7, 0])))
    assert [bool(costs[step].error) for step in steps[:9]] == [False, *[True] * 7, False]


def test_poison_cases_first_are_errors_where_a_case_of_an_earlier_run_still_goes_well(
    cases: Cases, cases_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is seeded, so every later run would meet the same three first and end there."""
    out, settings = tmp_path / "costs", MeasureSettings(batch_size=512)
    drift_case = next(step.case for step in schedule(cases, 0).steps if step.round_ == DRIFT)
    poisoned = 1 if drift_case in cases.compute[::2] else 2
    run(cases_folder, out, "synthetic", settings, share=(3 - poisoned, 2))
    poison = {case.case_id for case in cases.compute[poisoned - 1 :: 2]}
    compute = Synthetic.compute

    def deadly(self: Synthetic, case: ComputeCase, round_: int) -> ComputeCost:
        if case.case_id in poison:
            raise WorkerLost("worker died (killed by SIGKILL)")
        return compute(self, case, round_)

    monkeypatch.setattr(Synthetic, "compute", deadly)
    assert run(cases_folder, out, "synthetic", settings).left == 0
    assert {cost.case_id for _, cost in read_costs(out).compute if cost.error} == poison


def test_cases_lost_at_the_end_are_errors_too(steps: list[Step]) -> None:
    costs = list(measure(steps[:2], Scripted([0, 2])))
    assert [bool(cost.error) for _, cost in costs] == [False, True]


def test_what_was_disturbed_is_measured_once_more(
    cases: Cases, cases_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disturbed are the first measurements of five table sets, and every measurement of a sixth."""
    chosen = {case.case_id for case in cases.compute[:5]}
    always = cases.compute[5].case_id
    compute = Synthetic.compute

    def disturbed(self: Synthetic, case: ComputeCase, round_: int) -> ComputeCost:
        cost = compute(self, case, round_)
        is_disturbed = case.case_id == always or (case.case_id in chosen and round_ == 0)
        return cost.model_copy(update={"disturbed": is_disturbed})

    monkeypatch.setattr(Synthetic, "compute", disturbed)
    measured = run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512))
    costs = read_costs(tmp_path / "costs").compute
    assert {cost.case_id for _, cost in costs if cost.round == 0 and cost.disturbed} == {always}
    assert {cost.case_id for _, cost in costs if cost.round == 1} >= chosen | {always}
    assert (measured.disturbed, names(str(measured), "1 label")) == (1, True)
    again = len(costs)
    run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512))
    assert len(read_costs(tmp_path / "costs").compute) == again


def test_what_was_disturbed_and_then_an_error_is_measured_again_in_a_round_that_is_kept(
    cases: Cases, cases_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, settings = tmp_path / "costs", MeasureSettings(batch_size=512)
    twice = {case_id for case_id, round_ in planned(cases) if round_ == 1}
    chosen = next(case.case_id for case in cases.compute if case.case_id not in twice)
    compute, asked = Synthetic.compute, []

    def troubled(self: Synthetic, case: ComputeCase, round_: int) -> ComputeCost:
        if case.case_id != chosen:
            return compute(self, case, round_)
        asked.append(round_)
        if round_ == 1:
            return ComputeCost(case_id=chosen, round=1, error="worker died")
        return compute(self, case, round_).model_copy(update={"disturbed": round_ == 0})

    monkeypatch.setattr(Synthetic, "compute", troubled)
    for _ in range(3):
        run(cases_folder, out, "synthetic", settings)
    measured_rounds = [round_ for place, round_ in enumerate(asked) if round_ not in asked[:place]]
    label = next(cost for _, cost in read_costs(out).compute if (cost.case_id, cost.round) == (chosen, 0))
    assert (measured_rounds, asked.count(2), label.error, label.disturbed) == ([0, 1, 2], 1, None, False)


def test_a_machine_that_gets_no_calmer_is_left_alone(
    cases: Cases, cases_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Synthetic.compute
    monkeypatch.setattr(Synthetic, "compute", lambda *a: compute(*a).model_copy(update={"disturbed": True}))
    run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512))
    costs = read_costs(tmp_path / "costs").compute
    planned_again = sum(round_ == 1 for case, round_ in planned(cases) if case in {c.case_id for c in cases.compute})
    assert sum(cost.round == 1 for _, cost in costs) == planned_again + STILL_DISTURBED


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
from neuroshard import cli
sys.argv = ["neuroshard", "measure", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_leaves_what_was_measured(
    cases: Cases, cases_folder: Path, tmp_path: Path
) -> None:
    """No file can grow beyond 3,000 bytes, which costs.json needs less than and a part needs more."""
    out = tmp_path / "costs"
    asked = [str(cases_folder), "--backend", "synthetic", "--batch-size", "512", "-o", str(out)]
    run(cases_folder, out, "synthetic", MeasureSettings(batch_size=512), share=(1, 2))
    before = rows(out)
    ended = subprocess.run([sys.executable, "-B", "-c", LIMITED, *asked], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert "cannot write it" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert rows(out) == before
    assert not list(out.glob(".*.parquet.*"))
    run(cases_folder, out, "synthetic", MeasureSettings(batch_size=512))
    assert set(rows(out)) >= set(planned(cases))


MEASURE = """
import sys
from pathlib import Path
import neuroshard.files.costs as costs
from neuroshard.measure import real_devices
from neuroshard.measure import run as room
from neuroshard.measure.backends import MeasureSettings
costs.FLUSH_SECONDS, real_devices.CALM_SECONDS = 0.0, 0.3
measure = room.measure
# of all measurements the first five, then one that never ends
def some(*given):
    for place, measured in enumerate(measure(*given)):
        if place == 5:
            sys.stdin.read()
        yield measured
room.measure = some
room.run(Path(sys.argv[1]), Path(sys.argv[2]), "cpu", MeasureSettings(batch_size=64, warmup=0, repeats=1))
"""


def children(process_id: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_killed_and_started_again_it_goes_on_with_no_row_lost_or_doubled(cases: Cases, tmp_path: Path) -> None:
    """Killed with -9 in mid-measurement on the real CPU backend; its workers die with it."""
    more = (cases.tables[0].model_copy(update={"rows": 1000 + n}) for n in range(20))
    cases = cases.model_copy(update={"compute": tuple(ComputeCase(tables=(one,)) for one in more)})
    write_cases(tmp_path / "cases", cases)
    out = tmp_path / "costs"
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "cases"), str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            parts = partial(out.glob, "compute-*.parquet")
            assert wait_until(lambda: len(list(parts())) >= 2 or process.poll() is not None, HANGS)
            workers = children(process.pid)
        finally:
            process.kill()

    before, bench = rows(out), read_manifest(out).bench
    assert 0 < len(before) < len(planned(cases))
    assert workers
    assert wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), HANGS)

    measured = run(tmp_path / "cases", out, "cpu", MeasureSettings(batch_size=64, warmup=0, repeats=1))
    assert measured.now == len(planned(cases)) - len(before)
    held = rows(out)
    assert len(held) == len(set(held))
    assert set(held) >= set(planned(cases))  # and what was disturbed, once more
    assert read_manifest(out).bench == bench
