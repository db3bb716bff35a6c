"""What show, diff, releases, models and fleet print fits 80 columns, without colour where it is piped; --json says the same."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.limits import HANGS
from helpers.plans import make_plan, row_plan
from neuroshard.cli import app
from neuroshard.core.plan import Plan
from neuroshard.core.text import wrapped
from neuroshard.files.plan import read_plan, write_plan
from neuroshard.report.numbers import bar

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
LONG = "model.sparse.some_very_long_module_path.embedding_collection.table_of_users_by_country_and_device_0815"


def run(folder: Path, command: str) -> Any:
    """The command in this process, as if piped: ten processes that each import torch would take half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "80")
        return CliRunner().invoke(app, command.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Plans of a few tables, one with an endless name, of few and of many devices, and a store with releases and a model."""
    folder = tmp_path_factory.mktemp("terminal")
    tables = [{"name": f"t{i}", "rows": 10_000 * (i + 1), "dim": 64, "pooling_factor": 2.0} for i in range(40)]
    tables[3]["name"] = LONG
    (folder / "tables.json").write_text(json.dumps({"tables": tables}))
    small = [{"name": f"t{i}", "rows": 1000, "dim": 16, "pooling_factor": 2.0} for i in range(6)]
    (folder / "small.json").write_text(json.dumps({"tables": small}))
    model = "--model analytic:h100 --batch-size 4096 --memory 1GiB --rounds 1"
    for step in (
        f"search tables.json {model} --devices 4 -o old.json",
        f"search tables.json {model} --devices 4 --algorithm size -o new.json",
        f"search tables.json {model} --devices 40 -o many.json",
        "deploy new.json --store store --name ads",
        "deploy old.json --store store --name ads --force",
        "deploy new.json --store store --name ads",
        "augment small.json --compute-cases 60 --collective-cases 20 --devices 2 --memory 1GiB -o cases",
        "measure cases --backend synthetic -o costs",
        "pretrain costs --epochs 3 -o model",
        "publish-model model --store store --force",
    ):
        done = run(folder, step)
        assert done.exit_code == 0, (step, done.output, done.exception)
    return folder


COMMANDS = [
    "show old.json",
    "show many.json",
    "diff old.json new.json",
    "diff old.json many.json",
    "releases --store store --name ads",
    "releases --store store --name ads --refused",
    "models --store store",
    "fleet",
    "fleet --against store",
    f"fleet --nodes {ROOT}/tests/fleet/nodes-recorded.json --against store",
    "tables --from tables.json --check",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_it_fits_80_columns_and_has_no_colour_where_it_is_piped(folder, command):
    done = run(folder, command)

    assert done.exit_code in (0, 3), done.output
    assert "\x1b" not in done.stdout
    too_wide = [line for line in done.stdout.splitlines() if len(line) > 80 and LONG not in line]
    assert not too_wide


@pytest.mark.parametrize(
    "command", ["show old.json", "diff old.json new.json", "releases --store store --name ads", "fleet"]
)
def test_json_says_the_same(folder, command):
    text, data = (run(folder, f"{command} {more}").stdout for more in ("", "--json"))
    said = json.loads(data)

    figures = {
        "show": lambda: [f"{device['total_ms']:.3f}" for device in said["devices"]] + [said["digest"][:12]],
        "diff": lambda: [f"{said['old_ms']:.3f} ms", f"{said['new_ms']:.3f} ms", said["new"][:12]],
        "releases": lambda: [f"{one['cost_ms']:.3f} ms" for one in said] + [one["plan_digest"][:12] for one in said],
        "fleet": lambda: [kind["fingerprint"] for kind in said["kinds"]],
    }[command.split()[0]]()
    assert figures
    assert [figure for figure in figures if figure not in text] == []


def test_of_many_devices_the_slowest_are_shown_and_json_has_all(folder):
    text = run(folder, "show many.json").stdout
    said = json.loads(run(folder, "show many.json --json").stdout)

    assert len(said["devices"]) == 40
    assert "the 32 slowest; 8 devices more with --json" in text
    slowest = max(said["devices"], key=lambda device: device["total_ms"])
    assert re.search(rf"^ +{slowest['device']} .* {slowest['total_ms']:.3f} ", text, re.M)


def test_a_plan_without_the_parts_of_its_prediction_is_shown_without_bars(tmp_path):
    write_plan(tmp_path / "plan.json", make_plan())
    done = run(tmp_path, "show plan.json")
    assert "1.500 ms a step" in done.stdout
    assert "█" not in done.stdout


def test_a_plan_that_splits_rows_says_which_and_its_diff_says_which_rows_move(tmp_path):
    write_plan(tmp_path / "columns.json", make_plan())
    write_plan(tmp_path / "rows.json", row_plan())
    shown = run(tmp_path, "show rows.json").stdout
    forth, back = (
        run(tmp_path, f"diff {names}").stdout for names in ("columns.json rows.json", "rows.json columns.json")
    )

    assert "3 tables in 5 shards (1 cut, 1 table row-wise), 2 devices" in shown
    assert "user: row-wise over 2 devices (rows 0-499 on device 0)" in shown
    assert json.loads(run(tmp_path, "show rows.json --json").stdout)["row_wise_tables"] == ["user"]
    # half of user's elements are on the other device; where a device had columns of a row, its state is there already
    assert "columns          rows    table" in forth
    assert re.search(r"^   1    0 +7\.8 KiB  0-3 +0-499   user$", forth, re.M)
    assert re.search(r"^   0    1 +9\.8 KiB  0-3 +0-499   user$", back, re.M)  # with the state of 500 rows
    assert re.search(r"^   1    0 +5\.9 KiB  0-3 +all +item$", forth, re.M)
    said = json.loads(run(tmp_path, "diff columns.json rows.json --json").stdout)
    assert said["moved_bytes"] == 4 * (1000 * 16 // 2 + 300 * 4 + 7 * 4) + 4 * (300 + 7)
    assert max(map(len, (shown + forth + back).splitlines())) <= 80
    assert "  the optimizer state of 2 tables does not carry over exactly: user, item\n" in forth
    assert said["tables_changed_state"] == ["user", "item"]
    assert json.loads(run(tmp_path, "diff rows.json rows.json --json").stdout)["tables_changed_state"] == []


def test_a_diff_says_whether_outputs_come_in_another_order(tmp_path):
    write_plan(tmp_path / "columns.json", make_plan())
    write_plan(tmp_path / "rows.json", row_plan())
    text = run(tmp_path, "diff columns.json rows.json").stdout

    assert (
        "  the outputs of the model come in another order: read them by key, or call\n    keep_output_order(model)\n"
        in text
    )
    (said,) = json.loads(run(tmp_path, "diff columns.json rows.json --json").stdout)["reordered"]
    assert said == {"module": "", "old": "country", "new": "item"}
    assert json.loads(run(tmp_path, "diff rows.json rows.json --json").stdout)["reordered"] == []
    assert "order" not in run(tmp_path, "diff rows.json rows.json").stdout


def test_one_shard_that_moves_is_one_piece(tmp_path):
    old = make_plan()
    first, *others = old.shards
    moved = first.model_copy(update={"device": 1 - first.device})
    write_plan(tmp_path / "old.json", old)
    write_plan(tmp_path / "new.json", Plan(task=old.task, shards=(moved, *others), provenance=old.provenance))

    assert "to move in 1 piece\n" in run(tmp_path, "diff old.json new.json").stdout


def test_text_that_the_terminal_cannot_show_is_no_traceback(folder, neuroshard_process):
    done = neuroshard_process("show", "old.json", cwd=folder, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "predicted ms: ? compute" in done.stdout


def test_bars_are_as_long_as_their_parts():
    assert bar([2, 1, 1], 4, 8) == "████▓▓░░"
    assert bar([1], 4, 8) == "██      "
    assert bar([9], 4, 8) == "█" * 8
    assert bar([0, 0], 0, 3) == "   "


def test_a_long_word_stays_whole_when_a_line_is_wrapped():
    lines = wrapped(f"a note on {LONG} and more of it", indent=2)
    assert any(LONG in line for line in lines)


PROGRESS = """
from neuroshard.progress import progress
with progress("measure on a device with quite a long name indeed", 2000, "cases") as bar:
    for step in range(4):
        bar.advance(500, f"0 errors, {step} disturbed")
"""


def test_progress_on_a_terminal_keeps_to_one_line_of_its_width(tmp_path):
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    child = subprocess.Popen([sys.executable, "-c", PROGRESS], stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while select.select([master], [], [], HANGS)[0]:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    assert child.wait(HANGS) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    lines = [line for line in re.split(r"[\r\n]+", plain) if line.strip()]

    assert lines
    assert max(map(len, lines)) <= 80
    for words in ("measure on", "2000/2000 cases", "0 errors, 3 disturbed"):
        assert words in lines[-1]


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal, also where these tests run in the background
from neuroshard.cli import main
from neuroshard.augment import run as room
where, what = {"in a room": (room, "run"), "before": (sys.modules["neuroshard.cli.app"], "app")}[sys.argv[1]]
setattr(where, what, lambda *_, **__: signal.raise_signal(signal.SIGINT))
sys.argv[1:] = "augment tables.json --devices 2 --memory 1GiB -o cases/".split()
main()
"""

STOPPED = """
import signal, sys
times, handler, budget = int(sys.argv[1]), getattr(signal, sys.argv[2]), sys.argv[3]
number = signal.Signals(int(sys.argv[4]))
signal.signal(number, handler)
from neuroshard.cli import main
from neuroshard.search.improve import local_search
perturbed = local_search.perturbed
def pressed(*given):
    global times
    if times:
        times -= 1
        signal.raise_signal(number)
    return perturbed(*given)
local_search.perturbed = pressed
sys.argv[1:] = "search t.json --model analytic:h100 --batch-size 64 --devices 2 --memory 1GiB -o plan.json".split()
sys.argv += ["--time-budget", budget, "--simplicity", "0"]
main()
"""


def searched_and_interrupted(folder, times, handler, budget, by=signal.SIGINT):
    tables = [{"name": f"t{i}", "rows": 1000 * i + 10, "dim": 64, "pooling_factor": 3.0 * i} for i in range(9)]
    (folder / "t.json").write_text(json.dumps({"tables": tables}))
    command = [sys.executable, "-c", STOPPED, str(times), handler, budget, str(int(by))]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANGS)


@pytest.mark.parametrize("where", ["in a room", "before"])
def test_ctrl_c_ends_with_130_and_without_a_traceback(where):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, where], capture_output=True, text=True, timeout=HANGS)

    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize(("times", "written"), [(1, True), (2, False)])
def test_ctrl_c_during_a_search_writes_the_best_so_far_and_twice_leaves_without(tmp_path, times, written):
    done = searched_and_interrupted(tmp_path, times, "default_int_handler", "10m")
    assert done.returncode == 130
    assert "stopping: the best plan so far is written; Ctrl-C again leaves at once" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "plan.json").exists() is written
    if written:
        plan = read_plan(tmp_path / "plan.json")
        assert plan.cost_ms <= min(max(one.predicted_ms) for one in plan.baselines if one.predicted_ms)
        assert any(note.startswith("the search was stopped by hand") for note in plan.provenance.notes)


@pytest.mark.parametrize(
    ("by", "times", "exit_code", "written"),
    [
        (signal.SIGTERM, 1, 128 + signal.SIGTERM, True),
        (signal.SIGTERM, 2, -signal.SIGTERM, False),
        (signal.SIGHUP, 1, 128 + signal.SIGHUP, True),
    ],
)
def test_sigterm_and_a_closed_terminal_do_what_ctrl_c_does(tmp_path, by, times, exit_code, written):
    done = searched_and_interrupted(tmp_path, times, "SIG_DFL", "10m", by)
    assert done.returncode == exit_code
    assert f"stopping: the best plan so far is written; a second {by.name} leaves at once" in done.stderr
    assert (tmp_path / "plan.json").exists() is written
    if written:
        notes = read_plan(tmp_path / "plan.json").provenance.notes
        assert any(note.startswith("the search was stopped by hand") for note in notes)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGHUP])
def test_a_search_in_the_background_is_not_stopped_by_ctrl_c_nor_by_logging_out(tmp_path, by):
    done = searched_and_interrupted(tmp_path, 2, "SIG_IGN", "1s", by)
    assert done.returncode == 0
    assert "stopping" not in done.stderr
    assert not any("stopped by hand" in note for note in read_plan(tmp_path / "plan.json").provenance.notes)
