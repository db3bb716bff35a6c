"""`make run`: the whole pipeline from its compiled YAML, by KFP's local runner."""

import json
import re
import shutil
from pathlib import Path

import pytest

from neuroshard.client import load_plan
from neuroshard.files.plan import read_plan
from pipelines.run_local import Failed, Log, in_use, set_aside

pytestmark = pytest.mark.slow


@pytest.fixture
def out(ran, tmp_path) -> Path:
    """A copy of that folder, for more runs."""
    return shutil.copytree(ran[0], tmp_path / "run")


def test_a_clone_under_an_odd_path_without_home_temporary_folder_and_utf8_ends_in_a_trained_model(clone, ran) -> None:
    _, ended = ran
    assert "measured on 2 ranks (cpu, gloo)" in ended.stdout
    assert list(clone.parent.rglob("executed")) == []
    assert list(clone.glob("run/*/.*")) == []


def test_the_live_plan_is_the_one_that_was_searched(ran) -> None:
    out, _ = ran
    [plan] = out.glob("2*/plan.json")
    live = load_plan(str(out / "store"), "ads")
    assert live == read_plan(plan)
    assert (len(live.task.tables), live.task.devices, live.task.batch_size) == (26, 2, 512)
    assert set(live.task.device_memory_bytes) == {64 * 2**30}
    assert max(live.memory_bytes()) <= 0.9 * 64 * 2**30  # a tenth is left free
    assert live.provenance.cost_model_backend == "synthetic"


def test_every_output_is_kept_and_nothing_else(ran) -> None:
    out, _ = ran
    [folder] = out.glob("2*")
    kept = {path.name for path in folder.iterdir()}
    made = {"tables.json", "costs", "cost_model", "plan.json", "release.json", "report.html", "train.json"}
    assert kept == {*made, "log.txt"}
    assert json.loads((folder / "release.json").read_bytes())["number"] == 1


def test_progress_is_reported_on_stderr_and_the_summary_on_stdout(ran) -> None:
    out, ended = ran
    assert "Executing task 'measure'" in ended.stderr
    assert "to measure: 1 of 1 kinds of hardware" in ended.stderr
    assert re.search(r"    measure on .*, by a formula: ", ended.stderr)
    assert "predicted cost (slowest device)" in ended.stdout
    assert "of costs by a formula, nothing was measured" in ended.stdout
    assert str(out / "store") in ended.stdout
    assert "executor_input" not in ended.stderr


def test_an_unchanged_fleet_measures_nothing_and_still_gets_a_plan(out: Path, run_local) -> None:
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


def test_models_of_ones_own_are_planned_as_a_night_does(out: Path, tmp_path: Path, run_local) -> None:
    model = "- {{name: {}, tables: mlperf-dlrm-dcnv2, devices: 2, memory: {}GiB}}\n"
    (tmp_path / "models.yaml").write_text(model.format("one", 64) + model.format("two", 60))
    ended = run_local(out, "--models", tmp_path / "models.yaml")
    assert ended.returncode == 0, ended.stderr
    assert re.findall("^(.*) has today's plan [(]release 1 is live[)]", ended.stdout, re.M) == ["one", "two"]
    (tmp_path / "models.yaml").write_text(model.format("one", -1) + model.format("two", "x"))
    ended = run_local(out, "--models", tmp_path / "models.yaml")
    assert re.fullmatch(r"error: .*model 'one'.*model 'two'.*\n", ended.stderr)


def test_a_step_that_fails_is_one_line_and_leaves_the_live_plan(out: Path, run_local) -> None:
    before = {path: path.read_bytes() for path in (out / "store" / "ads").rglob("*") if path.is_file()}
    ended = run_local(out, "--model", "new", "--memory", "1MiB")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.match(r"error: .*'?new'?.*all output: .*log\.txt", ended.stderr.splitlines()[-1])
    assert "Traceback" not in ended.stderr
    assert {path: path.read_bytes() for path in (out / "store" / "ads").rglob("*") if path.is_file()} == before
    assert not (out / "store" / "new" / "live.json").exists()


def test_what_cannot_be_is_said_before_anything_is_made_a_line_each(tmp_path: Path, run_local) -> None:
    wrong = ["--seed", "-1", "--max-error", "-1", "--algorithm", "nope", "--model", "hardware", "--budget", "long"]
    ended = run_local(tmp_path / "out", *wrong, "--devices", "17", "--steps", "3", "--memory-margin", "1.5")
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert [line.split(": ")[1] for line in lines[:-1]] == [
        *("models", "--budget", "--max-error", "--memory-margin", "--algorithm", "--seed")
    ]
    assert lines[-1].startswith("error: --devices 17: the trainer starts at most 16 ranks")
    assert not (tmp_path / "out").exists()


def test_a_cpu_that_fbgemm_cannot_read_is_said_before_anything_is_made(tmp_path: Path, run_local, monkeypatch) -> None:
    monkeypatch.setenv("NEUROSHARD_SYSTEM_ROOT", str(tmp_path))
    ended = run_local(tmp_path / "out", "--backend", "cpu")
    assert (ended.returncode, ended.stderr) == (
        1, "error: FBGEMM needs /proc/cpuinfo, which cannot be read here; mount /proc: mount -t proc proc /proc\n",
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/sys/devices").exists(), reason="needs /sys, as Linux has")
def test_a_folder_that_cannot_be_written_is_said_with_the_way_out(run_local) -> None:
    ended = run_local(Path("/sys/none/run"))  # where nobody, not even root, makes a folder
    assert ended.returncode == 1
    assert re.fullmatch(r"error: /sys/none: .*; give --out a folder that can be written\n", ended.stderr)


def test_tables_that_are_nowhere_end_at_once(tmp_path: Path, run_local) -> None:
    ended = run_local(tmp_path, "--tables", "no-such-tables")
    assert ended.returncode == 1
    assert "error: 'no-such-tables' is neither a file nor a preset" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "store" / "mlperf-dlrm-dcnv2").exists()


def test_a_fresh_run_keeps_the_old_store_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "store" / "ads").mkdir(parents=True)
    first = set_aside(tmp_path / "store")
    (tmp_path / "store").mkdir()
    second = set_aside(tmp_path / "store")
    assert (first / "ads").is_dir()
    assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert not (tmp_path / "store").exists()


def test_a_fresh_run_does_not_take_the_store_from_a_run_under_way(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with in_use(store, fresh=False), in_use(store, fresh=False):  # runs share it
        (store / "plan").write_text("of the run under way")
        with pytest.raises(Failed, match="is in use by another run"), in_use(store, fresh=True):
            pass
        assert (store / "plan").exists()
    with in_use(store, fresh=True):
        assert list(store.iterdir()) == []
    assert len(list(tmp_path.iterdir())) == 2


def test_fresh_is_for_folders(tmp_path: Path, run_local) -> None:
    ended = run_local(tmp_path / "out", "--fresh", "--store", "s3://bucket/prefix")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: --fresh renames a store in a folder, not s3://bucket/prefix")


def test_lines_name_outputs_by_where_they_are_found_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "log.txt").open("w") as file:
        log = Log(file, {"/out/now/.scratch": "/out/now"})
        log.write("    note: /out/now/.scratch/neuroshard-2026/pretrain/costs: is large\n")
        log.write("    note: /out/now/.scratch/neuroshard-2026/for-loop-1-iteration-0/plan-2/plan: 1 table\n")
    lines = "    note: /out/now/costs: is large\n    note: /out/now/plan.json: 1 table\n"
    assert capsys.readouterr().err == (tmp_path / "log.txt").read_text() == lines
