"""Each bad input gets one clear line on stderr, a non-zero exit, no traceback, and nothing half-written."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.limits import HANGS
from helpers.shared import copy_of_made
from neuroshard.cli.options import named_as_typed
from neuroshard.core.errors import Infeasible
from neuroshard.files.costs import read_costs

GOOD = {"name": "a", "rows": 1000, "dim": 64, "pooling_factor": 2.0}


def assert_one_line(done, exit_code: int, *words: str) -> None:
    assert done.returncode == exit_code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    assert len(errors) == 1, done.stderr
    for word in words:
        assert word in errors[0]


def write_tables(path: Path, *tables: object) -> Path:
    path.write_text(json.dumps({"tables": list(tables)}))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory, neuroshard) -> Path:
    """A folder with good tables.json, cases, costs, model and plan.json, made small."""
    tables = [{**GOOD, "name": f"t{i}", "rows": 1000 * (i + 1), "dim": 16 * (1 + i % 4)} for i in range(6)]
    steps = [
        "augment tables.json --compute-cases 60 --collective-cases 40 --devices 2 --memory 1GiB -o cases",
        "measure cases --backend synthetic -o costs",
        "pretrain costs --epochs 3 -o model",
        "search tables.json --model model --devices 2 --memory 1GiB -o plan.json",
    ]

    def fill(folder: Path) -> None:
        write_tables(folder / "tables.json", *tables)
        for step in steps:
            done = neuroshard(*step.split(), cwd=folder)
            assert done.returncode == 0, done.stderr

    return copy_of_made(tmp_path_factory, "made", fill)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 6}, ["tables[1]", "dim", "multiple of 4", "6"]),
        ({"dim": 10**100}, ["tables[1]", "dim", "at most 65536, not 1000", "…"]),
        ({"rows": 0}, ["tables[1]", "rows", "0"]),
        ({"rows": -5}, ["tables[1]", "rows", "-5"]),
        ({"pooling_factor": math.nan}, ["tables[1]", "pooling_factor", "nan"]),
        ({"pooling_factor": -1}, ["tables[1]", "pooling_factor", "-1"]),
        ({"rows": "many"}, ["tables[1]", "rows", "many"]),
        ({"rows": True}, ["tables[1]", "rows", "must be a whole number, not true"]),
        ({"rows": "1000"}, ["tables[1]", "rows", "must be a whole number, not '1000'"]),
        ({"name": "t0"}, ["tables[1]", "tables[0]", "t0"]),
        ({"reuse_bins": [1.0]}, ["tables[1]", "reuse_bins", "17"]),
    ],
)
def test_a_bad_table_is_named_with_its_value(tmp_path, neuroshard, change, words):
    path = write_tables(tmp_path / "tables.json", {**GOOD, "name": "t0"}, {**GOOD, **change})

    arguments = ("augment", path, "--devices", 2, "--memory", "1GiB", "-o", tmp_path / "cases")
    assert_one_line(neuroshard(*arguments), 1, str(path), *words)
    assert not (tmp_path / "cases").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"tables": []}', ["empty"]),
        ('{"tables": 3}', ["tables", "3"]),
        ("[]", ["object"]),
        ('{"tables": [{"name": "a", ', ["not JSON", "cut off"]),
        ('{"format_version": 99, "tables": []}', ["99", "newer"]),
        ("", ["not JSON"]),
    ],
)
def test_a_broken_tables_file_is_distinguished(tmp_path, neuroshard, text, words):
    path = tmp_path / "tables.json"
    path.write_text(text)

    arguments = ("augment", path, "--devices", 2, "--memory", "1GiB", "-o", tmp_path / "cases")
    assert_one_line(neuroshard(*arguments), 1, str(path), *words)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        ("tables --preset nonesuch -o x", 2, ["nonesuch", "mlperf-dlrm-dcnv2"]),
        ("tables -o x", 2, ["--preset", "--from"]),
        ("show -", 2, ["show", "/dev/stdin"]),
        ("tables --from missing.json -o x", 1, ["missing.json"]),
        ("tables --from-torchrec a:b --dtype fp16 -o x", 2, ["--dtype is for --preset, --from and --from-stats"]),
        ("tables --from t.json --default-pooling-factor 2 -o x", 2, ["pooling_factor of each table"]),
        ("tables --from t.json --memory 80GiB -o x", 2, ["--memory", "--plan-out"]),
        ("tables --from t.json --row-orders -o x", 2, ["--row-orders", "--access-from"]),
        ("measure cases --backend synthetic -o costs -n 3", 2, ["--count", "--verify"]),
        ("doctor --namespace ads", 2, ["--namespace", "--service-account"]),
        ("tables --preset mlperf-dlrm-dcnv2 --dim 64 -o x", 2, ["--dim is for --from FILE.pt"]),
        ("tables --from tables.json --dim 64 -o x", 2, ["--dim is for --from FILE.pt"]),
        ("tables --from-stats log --check --plan-out x", 2, ["--plan-out is for -o tables.json"]),
        ("tables --from-stats log --check --costs-out x", 2, ["--costs-out is for -o tables.json"]),
        ("tables --from a.pt --check --traces x", 2, ["--traces is for -o tables.json"]),
        ("augment tables.json --devices 0 --memory 1GiB -o x", 2, ["--devices"]),
        ("augment tables.json --devices 2 --memory 1Gib8 -o x", 2, ["--memory: '1Gib8'"]),
        ("augment tables.json --devices 2 --memory 1KiB -o x", 1, ["KiB"]),
        ("measure cases --backend abacus -o x", 2, ["abacus", "synthetic"]),
        ("measure nowhere --backend synthetic -o x", 1, ["nowhere", "cases.json"]),
        ("measure cases --backend synthetic --budget soon -o x", 2, ["soon"]),
        ("measure cases --backend cuda -o x", 1, ["GPU"]),
        ("measure cases --backend synthetic --traces cases -o x", 2, ["leave out --traces cases"]),
        ("measure cases --backend synthetic --batch-size 128 -o costs", 1, ["batch_size", "65536", "128"]),
        ("pretrain nowhere -o x", 1, ["nowhere", "costs.json"]),
        ("search tables.json --model costs --devices 2 --memory 1GiB -o x", 1, ["costs, not a", "pretrain costs"]),
        ("pretrain costs --start-from nowhere -o x", 1, ["nowhere", "model.json"]),
        ("pretrain costs --start-from analytic:h100 -o x", 2, ["--start-from analytic:h100", "neuroshard pretrain"]),
        ("pretrain costs --publish http://x -o x", 2, ["http"]),
        ("pretrain costs --single-writer -o x", 2, ["--single-writer is for --publish"]),
        (
            "search tables.json --model model --devices 2 --memory 1GiB --algorithm guess -o x",
            2,
            ["guess", "local-search"],
        ),
        ("search tables.json --model model --devices 2 --memory 100KiB -o x", 1, ["short", "step"]),
        ("search tables.json --model s3://b/p --devices 2 --memory 1GiB -o x", 2, ["'s3://b/p'", "STORE#HARDWARE"]),
        (
            "augment tables.json --devices 2 --memory 1GiB --acquire analytic:h100 -o x",
            2,
            ["analytic:h100", "neuroshard pretrain"],
        ),
        (
            "augment tables.json --devices 2 --memory 1GiB --acquire given:c.json -o x",
            2,
            ["given:c.json", "neuroshard pretrain"],
        ),
        ("search tables.json --model model --devices 2 --memory 1GiB,1GiB,1GiB -o x", 2, ["3", "2"]),
        ("search tables.json --model model --devices 3 --memory 1GiB -o x", 1, ["3", "2"]),
        ("search tables.json --model nowhere --devices 2 --memory 1GiB -o x", 1, ["nowhere"]),
        (
            "search tables.json --model model --devices 2 --memory 1GiB --pipeline fast -o x",
            2,
            ["pipeline", "none, base, sparse-dist", "'fast'"],
        ),
        (
            "search tables.json --model model --devices 2 --memory 1GiB --reserve 100% -o x",
            2,
            ["reserve", "'100%'", "15%"],
        ),
        ("show nowhere.json", 1, ["nowhere.json"]),
        ("show s3://bucket/plan.json", 1, ["s3:/bucket/plan.json: no such file", "copy it to this machine"]),
        ("deploy plan.json --store store --name ../evil", 2, ["../evil"]),
        ("deploy plan.json --store http://x --name m", 2, ["http"]),
        ("releases --store nowhere --name m", 1, ["nowhere"]),
        ("rollback --store nowhere --name m", 1, ["nowhere"]),
    ],
)
def test_a_wrong_argument_gets_one_line_and_writes_nothing(made, neuroshard, arguments, exit_code, words):
    assert_one_line(neuroshard(*arguments.split(), cwd=made), exit_code, *words)
    assert not (made / "x").exists()


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("cases/compute.parquet", "measure cases --backend synthetic -o x"),
        ("cases/collective.parquet", "measure cases --backend synthetic -o x"),
        ("cases/cases.json", "measure cases --backend synthetic -o x"),
        ("costs/compute-00000.parquet", "pretrain costs -o x"),
        ("costs/costs.json", "pretrain costs -o x"),
        ("model/model.json", "search tables.json --model model --devices 2 --memory 1GiB -o x"),
        ("model/nets.safetensors", "search tables.json --model model --devices 2 --memory 1GiB -o x"),
        ("plan.json", "show plan.json"),
        ("plan.json", "deploy plan.json --store x --name m"),
    ],
)
def test_a_truncated_file_is_named(made, tmp_path, neuroshard, file, command):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[: len(data) * 2 // 3])

    assert_one_line(neuroshard(*command.split(), cwd=tmp_path), 1, Path(file).name)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("file", ["cases/cases.json", "costs/costs.json", "model/model.json", "plan.json"])
def test_a_file_from_the_future_is_refused(made, tmp_path, neuroshard, file):
    commands = {
        "cases": "measure cases --backend synthetic -o x",
        "costs": "pretrain costs -o x",
        "model": "search tables.json --model model --devices 2 --memory 1GiB -o x",
        "plan.json": "show plan.json",
    }
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**data, "format_version": 99}))

    done = neuroshard(*commands[file.split("/")[0]].split(), cwd=tmp_path)
    assert_one_line(done, 1, Path(file).name, "99", "newer")


def test_what_is_misspelt_in_constraints_and_what_breaks_a_task_are_reported_as_such(made, tmp_path, neuroshard):
    """A constraint that contradicts the task is no fault of the tables."""
    (tmp_path / "constraints.json").write_text(json.dumps({"tabels": []}))
    search = ("search", made / "tables.json", "--model", made / "model", "--devices", 2, "--memory", "1GiB")
    typed = neuroshard(*search, "--constraints", "constraints.json", "--rounds", 0, "-o", "plan.json", cwd=tmp_path)
    assert typed.returncode == 0
    assert "note: constraints.json: ignored unknown keys, which constrain nothing: tabels\n" in typed.stderr
    pinned = neuroshard(*search, "--pin", "t0=5", "-o", "no", cwd=tmp_path)
    assert_one_line(pinned, 1, "error: the task: table 't0' is pinned to device 5, but there are 2")


def changed_shard(data: dict, **change: int) -> dict:
    shards = [{**data["shards"][0], **change}, *data["shards"][1:]]
    return {**data, "shards": shards}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: {**d, "shards": d["shards"][1:]}, ["gap"]),
        (lambda d: {**d, "shards": [*d["shards"], d["shards"][0]]}, ["overlap"]),
        (lambda d: changed_shard(d, device=7), ["device 7"]),
        (lambda d: changed_shard(d, dim=6), ["multiples of 4"]),
        (lambda d: {**d, "task": {**d["task"], "batch_size": 1}}, ["task_digest"]),
        (lambda d: {**d, "predicted_ms": [1.0]}, ["predicted_ms"]),
        (lambda d: {**d, "predicted_ms": [1e300, 1.0]}, ["predicted_ms[0]", "less than or equal to"]),
        (
            lambda d: {**d, "predicted": [{**d["predicted"][0], "compute_ms": -1e300}, d["predicted"][1]]},
            ["predicted[0].compute_ms", "greater than or equal to 0"],
        ),
    ],
)
def test_a_plan_with_a_fault_is_neither_shown_nor_deployed(made, tmp_path, neuroshard, change, words):
    plan = tmp_path / "bad.json"
    plan.write_text(json.dumps(change(json.loads((made / "plan.json").read_text()))))

    assert_one_line(neuroshard("show", plan), 1, "bad.json", *words)
    assert_one_line(neuroshard("deploy", plan, "--store", tmp_path / "x", "--name", "m"), 1, "bad.json", *words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("tables --preset mlperf-dlrm-dcnv2 -o new.json", "new.json"),
        ("augment tables.json --devices 2 --memory 1GiB -o new", "new/cases.json"),
        ("measure cases --backend synthetic -o new", "new/compute-00000.parquet"),
        ("pretrain costs --epochs 1 -o new", "new/model.json"),
        ("search tables.json --model model --devices 2 --memory 1GiB -o new.json", "new.json"),
        ("deploy plan.json --store new --name m", "new/m/live.json"),
    ],
)
def test_a_full_disk_ends_in_one_line_and_leaves_nothing_half_written(made, tmp_path, command, out):
    """A limit of 1 KiB a file stands for the full disk: every larger write fails the same way. With -B, or Python
    would keep half of the modules that it compiles, and no process could import them ever after."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    limited = f"ulimit -f 1; exec {sys.executable} -B -m neuroshard {command}"
    done = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)

    assert_one_line(done, 1, "new")
    assert not (tmp_path / out).exists()
    assert [path.name for path in tmp_path.rglob(".*") if path.is_file() and path.name != ".lock"] == []


def test_a_stdout_without_room_is_named_and_what_was_written_stays(tmp_path):
    command = f"{sys.executable} -m neuroshard tables --preset mlperf-dlrm-dcnv2 -o tables.json > /dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)

    assert_one_line(done, 1, "stdout: cannot write the result: No space left on device")
    assert (tmp_path / "tables.json").exists()


@pytest.mark.parametrize(
    ("missing", "words"), [("typer", ["typer", "-e", "[cli]"]), ("numpy", ["numpy", "-e", "[all]", "torchrec"])]
)
def test_a_package_that_is_not_installed_is_named(made, missing, words):
    """`None` in sys.modules is how Python says that a module is not there."""
    arguments = ["search", "tables.json", "--model", "model", "--devices", "2", "--memory", "1GiB", "-o", "x"]
    script = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = {arguments}; import neuroshard.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=made, capture_output=True, text=True, timeout=HANGS)

    assert_one_line(done, 1, *words)


def test_what_pretrain_lacks_is_reported_before_torch_is_imported(made):
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = 'pretrain costs --start-from nowhere -o x'.split(); "
        "import neuroshard.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=made, capture_output=True, text=True, timeout=HANGS)

    assert_one_line(done, 1, "nowhere: no model.json here")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("show", ["show"]),
        ("measure cases --backend synthetic -o", ["-o"]),
        ("search tables.json --devices 2 --memory 1GiB -o x --model", ["--model"]),
    ],
)
@pytest.mark.parametrize("empty", ["", " "])
def test_a_variable_that_is_not_set_names_not_the_current_folder(made, neuroshard, command, words, empty):
    assert_one_line(neuroshard(*command.split(), empty, cwd=made), 2, "is empty", *words)


def test_a_package_whose_libraries_do_not_fit_is_reported_in_one_line(made, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open it')")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = 'pretrain costs -o x'.split(); "
        "import neuroshard.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=made, capture_output=True, text=True, timeout=HANGS)

    assert_one_line(done, 1, "libcudart.so.12: cannot open it", "neuroshard doctor")


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_what_a_shell_has_closed_is_not_spoken_to_and_no_file_takes_its_place(made, tmp_path, closed):
    """A cron job may close them. The first file that is opened then gets the number of stderr."""
    command = f"{sys.executable} -m neuroshard measure {made}/cases --backend synthetic -o costs {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=HANGS)
    assert done.returncode == 0
    assert read_costs(tmp_path / "costs") == read_costs(made / "costs")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("search tables.json --model model --devices 2 --memory 1GiB --rounds 1000000 -o cases", ["Is a directory"]),
        ("evaluate plan.json --backend cpu --rounds 1000 -o model", ["Is a directory"]),
        ("pretrain costs -o plan.json", ["plan.json is not a folder"]),
        ("augment tables.json --devices 2 --memory 1GiB -o plan.json", ["plan.json is not a folder"]),
        ("measure cases --backend synthetic -o /dev/null", ["/dev/null is not a folder"]),
        ("pretrain costs -o loop", ["loop is a broken link"]),
        ("augment tables.json --devices 2 --memory 1GiB -o loop/cases", ["loop is a broken link"]),
    ],
)
def test_what_cannot_be_written_is_reported_before_the_work(made, neuroshard, command, words):
    (made / "loop").unlink(missing_ok=True)
    (made / "loop").symlink_to("loop")
    assert_one_line(neuroshard(*command.split(), cwd=made), 1, "cannot write it", *words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("augment tables.json --devices 2147483647 --memory 1GiB -o no", ["4,096", "2,147,483,647"]),
        ("augment tables.json --devices 2 --memory 1GiB --max-delay inf -o no", ["latest start", "inf"]),
        ("augment tables.json --devices 2 --memory 1GiB --max-delay 1e308 -o no", ["latest start", "1,000,000,000"]),
        ("augment tables.json --devices 2 --memory 1GiB --max-tables 99999999 -o no", ["100,000", "99,999,999"]),
        ("augment tables.json --devices 2 --memory 1GiB --collective-cases 99999999999 -o no", ["99,999,999,999"]),
        ("measure cases --backend synthetic --batch-size 99999999999 -o no", ["batch_size", "99,999,999,999"]),
        ("measure cases --backend synthetic --repeats 99999999999 -o no", ["repeats", "1,000,000", "99,999,999,999"]),
        ("search tables.json --model model --devices 2 --memory 1GiB --max-shards 99999999999 -o no", ["max_shards"]),
    ],
)
def test_numbers_beyond_all_reason_are_refused_at_once(made, neuroshard, command, words):
    assert_one_line(neuroshard(*command.split(), cwd=made), 2, *words)
    assert not (made / "no").exists()


@pytest.mark.parametrize(
    "command",
    [
        "tables --preset mlperf-dlrm-dcnv2 -o {nowhere}/tables.json",
        "augment tables.json --devices 2 --memory 1GiB -o {nowhere}/cases",
        "measure cases --backend synthetic -o {nowhere}/costs",
        "pretrain costs -o {nowhere}/model",
        "search tables.json --devices 2 --memory 1GiB --model model -o {nowhere}/plan.json",
        "submit --patience 0 --endpoint http://127.0.0.1:9 --metrics {nowhere}/neuroshard.prom",
    ],
)
def test_a_mistyped_folder_is_not_made(made: Path, neuroshard, command: str) -> None:
    nowhere = made / "no" / "where"
    done = neuroshard(*command.format(nowhere=nowhere).split(), cwd=made)
    assert_one_line(done, 2, f"its folder {nowhere} does not exist", "mkdir -p")
    assert not nowhere.parent.exists()


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("tables --from tables.json -o ./tables.json", "tables.json"),
        ("tables --from-stats log.txt --plan-out tables.json -o tables.json", "tables.json"),
        ("search tables.json --devices 2 --memory 1GiB --model model -o link.json", "link.json"),
        ("search tables.json --devices 2 --memory 1GiB --model model --from plan.json -o plan.json", "plan.json"),
        ("search tables.json --devices 2 --memory 1GiB --model given:plan.json -o plan.json", "plan.json"),
        ("report plan.json --live tables.json -o tables.json", "tables.json"),
        ("pretrain costs --start-from model -o model", "model"),
        ("submit --patience 0 --endpoint http://127.0.0.1:9 --models tables.json --metrics tables.json", "tables.json"),
    ],
)
def test_an_output_over_another_file_of_the_command_is_refused(made, tmp_path, neuroshard, command, out):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True, symlinks=True)
    (tmp_path / "link.json").symlink_to("tables.json")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}

    assert_one_line(neuroshard(*command.split(), cwd=tmp_path), 2, f"{out}: ")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_a_device_may_be_read_and_written(made, neuroshard):
    command = "tables --from-stats /dev/null --plan-out /dev/null --costs-out /dev/null -o /dev/null"
    assert_one_line(neuroshard(*command.split(), cwd=made), 1, "/dev/null")


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("host_memory: 'x' is not an amount", "--host-memory: 'x' is not an amount"),
        ("the task: host_memory_bytes: must be smaller", "--host-memory: must be smaller"),
        ("the task: device_memory_bytes[1]: must be smaller", "--memory: must be smaller"),
        ("previous: not a plan", "--from: not a plan"),
        ("rounds must be at least 0", "--rounds must be at least 0"),
        ("devices have 3 GiB", "devices have 3 GiB"),
        ("tables[3].dim: must be a multiple of 4", "tables[3].dim: must be a multiple of 4"),
    ],
)
def test_an_error_of_a_search_that_begins_with_an_option_has_its_flag_and_keeps_its_kind(said: str, typed: str) -> None:
    with pytest.raises(Infeasible) as error, named_as_typed():
        raise Infeasible(said, proven=True)
    assert (str(error.value), error.value.proven) == (typed, True)  # type: ignore[unreachable] # mypy: named_as_typed lets all pass
