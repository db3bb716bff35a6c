"""`make run`: the whole pipeline from its compiled YAML, by KFP's local runner."""

import json
import re
from pathlib import Path

import pytest

from neuroshard.client import load_plan
from neuroshard.files.plan import read_plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(run_local, tmp_path_factory):  # type: ignore[no-untyped-def]
    """The folder of a run that went well, and how it ended."""
    out = tmp_path_factory.mktemp("run")
    ended = run_local(out, "--model", "ads")
    assert ended.returncode == 0, ended.stderr
    return out, ended


def test_the_live_plan_is_the_one_that_was_searched(done) -> None:  # type: ignore[no-untyped-def]
    out, _ = done
    [plan] = out.glob("2*/plan.json")
    live = load_plan(str(out / "store"), "ads")
    assert live == read_plan(plan)
    assert (len(live.task.tables), live.task.devices, live.task.batch_size) == (26, 4, 512)
    assert live.provenance.cost_model_backend == "synthetic"


def test_every_output_is_kept_and_nothing_else(done) -> None:  # type: ignore[no-untyped-def]
    out, _ = done
    [folder] = out.glob("2*")
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"tables.json", "costs", "cost_model", "plan.json", "release.json", "report.html", "log.txt"}
    assert json.loads((folder / "release.json").read_bytes())["number"] == 1


def test_progress_is_told_on_stderr_and_the_summary_on_stdout(done) -> None:  # type: ignore[no-untyped-def]
    out, ended = done
    assert "Executing task 'measure'" in ended.stderr
    assert "to measure: 1 of 1 kinds of hardware" in ended.stderr
    assert re.search(r"    measure on .*, by a formula: ", ended.stderr)
    assert "predicted cost (slowest device)" in ended.stdout
    assert "of costs by a formula, nothing was measured" in ended.stdout
    assert str(out / "store") in ended.stdout
    assert "executor_input" not in ended.stderr


def test_an_unchanged_fleet_measures_nothing_and_still_gets_a_plan(done, run_local) -> None:  # type: ignore[no-untyped-def]
    out, _ = done
    before = {path.name for path in out.glob("2*")}
    models = sorted((out / "store" / "hardware").rglob("model.json"))
    ended = run_local(out, "--model", "feed")
    assert ended.returncode == 0, ended.stderr
    assert "-> covered: cost model" in ended.stderr
    assert "to measure: 0 of 1 kinds of hardware" in ended.stderr
    assert "Executing task 'measure'" not in ended.stderr
    assert re.search(r"cost model [0-9a-f]{12} of an earlier run", ended.stdout)
    [folder] = [path for path in out.glob("2*") if path.name not in before]
    assert load_plan(str(out / "store"), "feed") == read_plan(folder / "plan.json")
    assert sorted((out / "store" / "hardware").rglob("model.json")) == models


def test_a_step_that_fails_is_one_line_and_leaves_the_live_plan(done, run_local) -> None:  # type: ignore[no-untyped-def]
    out, _ = done
    before = {path: path.read_bytes() for path in (out / "store").rglob("*") if path.is_file()}
    ended = run_local(out, "--model", "ads", "--backend", "tpu")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1].startswith("error: unknown backend 'tpu'")
    assert "Traceback" not in ended.stderr
    assert {path: path.read_bytes() for path in (out / "store").rglob("*") if path.is_file()} == before


def test_tables_that_are_nowhere_end_at_once(tmp_path: Path, run_local) -> None:  # type: ignore[no-untyped-def]
    ended = run_local(tmp_path, "--tables", "no-such-tables")
    assert ended.returncode == 1
    assert "error: 'no-such-tables' is neither a file nor a preset" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "store" / "mlperf-dlrm-dcnv2").exists()
