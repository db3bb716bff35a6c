"""The day a GPU is there, rehearsed: the same stages on the CPU and by the formula."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.gpu_day import stages
from bench.gpu_day.operators import check
from bench.gpu_day.page import SCALES, Day
from bench.gpu_day.stages import OURS, THEIRS, gain, run
from helpers.commands import Done
from helpers.costs import BENCH
from neuroshard.core.cost import Costs
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.run import RunSummary

QUICK = replace(
    SCALES["cpu"], compute_cases=24, collective_cases=0, tasks=2, rounds=2, most_rows=2000, batch_size=64,
    other_batch_size=32, epochs=3,
)  # fmt: skip


class Clock:
    """Seconds that pass when somebody looks."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_day_that_is_cut_off_again_and_again_does_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neuroshard: Callable[..., Done[str]]
) -> None:
    """On this CPU, by the real operator, with few repeats. Commands run in this process; what doctor finds is its tests'."""

    def here(day: Day, *arguments: object, check_exit: bool = True) -> str:
        if arguments[0] == "doctor":
            return "[]"
        done = neuroshard(*arguments, cwd=day.folder)
        assert done.returncode == 0 or not check_exit, done.stderr
        return done.stdout.strip()

    monkeypatch.setattr(stages, "_neuroshard", here)
    monkeypatch.setattr(stages, "MeasureSettings", partial(MeasureSettings, warmup=1, repeats=3))
    monkeypatch.setattr(stages, "TASK_TABLES", (6, 9))
    said: list[str] = []
    calls = 0
    while True:
        calls += 1
        clock = Clock(step=20.0)
        day = Day(tmp_path, QUICK, [], (), ends=260.0, clock=clock, say=said.append)
        before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
        if run(day):
            break
        assert calls < 10, said
        after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
        assert before.items() <= after.items()
    assert calls > 1
    assert [line for line in said if line.startswith("plans: task")] == ["plans: task 1 of 2", "plans: task 2 of 2"]
    assert load_cost_model(tmp_path / "model").manifest.bench.backend == "cpu"
    plans = json.loads((tmp_path / "plans.json").read_text())
    assert plans["tasks"] == 2
    assert plans["gains"][THEIRS]["low"] <= plans["gains"][THEIRS]["mean"] <= plans["gains"][THEIRS]["high"]
    measured = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
    assert all(len(ms) == 2 and min(ms) > 0 for task in measured for ms in task["ms"].values())
    page = (tmp_path / "page.md").read_text()
    assert "24 of 24 kinds" in page
    assert f"| {THEIRS} |" in page
    assert "Tables beyond HBM: none was measured, as a CPU has no tiers." in page


def test_costs_are_done_once_nothing_is_left_whatever_the_machine_cannot_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 all-to-alls are of more ranks than this machine has: they are not among those planned."""
    measured = iter((1800, 2000))

    def measure(*arguments: object) -> RunSummary:
        costs = Costs(bench=BENCH, compute=(), collective=())
        return RunSummary(
            costs=costs,
            planned=2000,
            measured=next(measured),
            now_by_ranks={},
            impossible=200,
            without_tiers=0,
            no_tiers="",
            seconds=1.0,
            drift_case_ms=(),
        )

    monkeypatch.setattr(stages, "measure", measure)
    found = stages.costs(Day(tmp_path, QUICK, [], (), ends=1e9, say=lambda line: None))
    assert found["measured"] == 2000


def test_a_difference_that_is_there_has_an_interval_without_zero_and_noise_has_one_with_it() -> None:
    rng = np.random.default_rng(0)

    def tasks(longer: float) -> list[dict[str, np.ndarray]]:
        return [{OURS: rng.normal(1.0, 0.01, 7), THEIRS: (1 + longer) * rng.normal(1.0, 0.01, 7)} for _ in range(30)]

    found, none = gain(tasks(0.05), OURS, THEIRS), gain(tasks(0.0), OURS, THEIRS)
    assert 0.03 < found.low < 0.05 < found.high < 0.07
    assert none.low < 0 < none.high


def test_an_operator_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def step(device: str, *kind: object) -> list[torch.Tensor]:
        return [torch.ones(2) * (1.01 if device == "broken" else 1.0)]

    monkeypatch.setattr("bench.gpu_day.operators._step", step)
    assert all(each.good for each in check("cpu"))
    assert not any(", cached" in each.what for each in check("cpu"))
    beyond = [each.what for each in check("cuda") if each.what.endswith((", cached", ", host"))]
    assert len(beyond) == len(set(beyond)) == 12
    assert not any(each.good for each in check("broken") if "fp32" in each.what)


def test_what_a_command_says_when_it_fails_ends_the_stage(tmp_path: Path) -> None:
    from neuroshard.core.errors import NeuroshardError

    day = Day(tmp_path, QUICK, [], (), ends=1e9)
    with pytest.raises(NeuroshardError):
        stages._neuroshard(day, "augment", "none.json")
