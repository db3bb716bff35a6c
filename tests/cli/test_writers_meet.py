"""Two commands that write one place: the second begins while the first writes. Both are right, or one says no."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_day import stages
from bench.gpu_day.page import SCALES, Day, OutOfTime
from helpers.commands import in_this_process as neuroshard
from helpers.costs import formula_costs, random_tables
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.files import costs as costs_file
from neuroshard.files import tables
from neuroshard.files.costs import CostWriter, read_costs


@pytest.fixture
def meets(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`meets(module, name, second)`: the first call of module.name runs `second` before it does its own work."""

    def meet(module: Any, name: str, second: Callable[[], None]) -> None:
        write = getattr(module, name)

        def in_between(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(module, name, write)
            second()
            return write(*arguments, **options)

        monkeypatch.setattr(module, name, in_between)

    return meet


def test_files_of_tables_that_belong_together_are_those_of_one_command(meets, tmp_path: Path) -> None:
    for name in ("first", "second"):
        table = {"name": name, "rows": 10, "dim": 4, "pooling_factor": 1}
        (tmp_path / f"{name}.json").write_text(json.dumps({"tables": [table]}))
    said = []

    def second() -> None:
        said.append(neuroshard("tables", "--from", "second.json", "-o", "out.json", cwd=tmp_path).stderr)
        other = neuroshard("tables", "--from", "second.json", "-o", "other.json", cwd=tmp_path)
        assert other.returncode == 0, other.stderr

    meets(tables, "write_tables", second)
    assert neuroshard("tables", "--from", "first.json", "-o", "out.json", cwd=tmp_path).returncode == 0
    assert said[0].startswith("error: ")
    assert "another run is writing out.json" in said[0]
    assert '"first"' in (tmp_path / "out.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"first.json", "second.json", "out.json", "other.json"}


def test_a_file_of_its_own_is_the_whole_one_of_the_command_that_ended_last(meets, tmp_path: Path) -> None:
    table = {"name": "a", "rows": 10, "dim": 4, "pooling_factor": 1}
    (tmp_path / "tables.json").write_text(json.dumps({"tables": [table]}))
    search = "search tables.json --model analytic:h100 --batch-size 8 --memory 1GiB -o plan.json --devices"
    ended = []
    meets(Path, "replace", lambda: ended.append(neuroshard(*search.split(), 2, cwd=tmp_path).returncode))
    assert neuroshard(*search.split(), 4, cwd=tmp_path).returncode == 0
    assert ended == [0]
    assert len(json.loads((tmp_path / "plan.json").read_bytes())["task"]["device_memory_bytes"]) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"tables.json", "plan.json"}


def test_of_two_merges_into_one_folder_one_says_no(meets, tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("second", 1)):
        costs = formula_costs(random_tables(20), compute_cases=3, twice=0, seed=seed)
        with CostWriter(tmp_path / name, costs.bench, random_tables(20)) as writer:
            for each in costs.compute:
                writer.add(*each)
    meets(costs_file, "write_rows", lambda: neuroshard("merge", "second", "-o", "out", cwd=tmp_path))
    said = neuroshard("merge", "first", "-o", "out", cwd=tmp_path)
    assert (said.returncode, said.stderr.count("\n")) == (1, 1), said.stderr
    assert read_costs(tmp_path / "out").compute == read_costs(tmp_path / "second").compute
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "out"}


def test_a_gpu_day_runs_once_at_a_time_in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    day = Day(tmp_path / "day", SCALES["cpu"], [], (), ends=0.0, clock=lambda: 0.0, say=lambda line: None)

    def stage(_: Day) -> None:
        with refused(InvalidInput, tmp_path / "day", "another run is writing a GPU day"):
            stages.run(day)
        raise OutOfTime

    monkeypatch.setattr(stages, "STAGES", {"doctor": stage})
    assert not stages.run(day)
    assert not stages.run(day)  # the lock went with the first
