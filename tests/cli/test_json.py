"""--json: stdout is one JSON document, also of what writes files or changes a store; --quiet: nothing else is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from neuroshard.cli import app
from neuroshard.files.plan import read_plan

pytestmark = pytest.mark.slow
TABLES = [{"name": f"t{i}", "rows": 1000 * (i + 1), "dim": 16, "pooling_factor": 2.0} for i in range(6)]
SEARCH = "search tables.json --model analytic:h100 --batch-size 4096 --devices 2 --memory 1GiB --rounds 1"


def run(folder: Path, command: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(app, command.split())


def said(folder: Path, command: str) -> Any:
    """What a command prints with --json --quiet; it says nothing else."""
    done = run(folder, f"{command} --json --quiet")
    assert (done.exit_code, done.stderr) == (0, ""), (done.output, done.exception)
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tables.json").write_text(json.dumps({"tables": TABLES}))
    return tmp_path


def test_plans_and_releases_as_json(folder: Path) -> None:
    found = said(folder, f"{SEARCH} -o plan.json")
    digest = read_plan(folder / "plan.json").digest()
    assert (found["out"], found["digest"]) == ("plan.json", digest)
    assert found == {"out": "plan.json", **said(folder, "show plan.json")}
    page = said(folder, "report plan.json --model analytic:h100 -o page.html")
    assert page == {"out": "page.html", "bytes": (folder / "page.html").stat().st_size}
    other = said(folder, f"{SEARCH} --algorithm size -o other.json")["digest"]

    place = "--store store --name ads"
    deployed = said(folder, f"deploy plan.json {place}")
    assert (deployed["store"], deployed["kept"], deployed["release"]["plan_digest"]) == ("store", False, digest)
    assert deployed["decision"]["verdict"]
    published = said(folder, f"publish other.json {place}")
    assert published == {"store": "store", "name": "ads", "plan": other}
    promoted = said(folder, f"promote {other} {place}")
    assert (promoted["release"]["number"], promoted["release"]["plan_digest"]) == (2, other)
    back = said(folder, f"rollback {place}")
    assert (back["release"]["action"], back["release"]["plan_digest"]) == ("rollback", digest)
    assert [one["number"] for one in said(folder, f"releases {place}")] == [3, 2, 1]
    garbage = said(folder, f"gc {place}")
    assert (garbage["store"], garbage["deleted"], garbage["entries"]) == ("store", False, [])


def test_from_cases_to_a_cost_model_as_json(folder: Path) -> None:
    counts = {"table_sets": 60, "all_to_alls": 20}
    drawn = "--compute-cases 60 --collective-cases 20 --devices 2 --memory 1GiB"
    assert said(folder, f"augment tables.json {drawn} -o cases") == {"out": "cases", **counts}
    for share in (1, 2):
        shared = f"measure cases --backend synthetic --batch-size 4096 --share {share}/2 -o part{share}"
        measured = said(folder, shared)
        assert (measured["out"], measured["errors"]) == (f"part{share}", 0)
        assert measured["measured"] == measured["planned"] > 0
    merged = said(folder, "merge part1 part2 -o costs")
    assert (merged["out"], merged["table_sets"] >= 60) == ("costs", True)
    verified = said(folder, "measure --verify costs -n 20")
    assert (verified["agrees"], verified["errors"]) == (True, [])

    trained = said(folder, "pretrain costs --epochs 3 -o model")
    assert (trained["out"], trained["backend"]) == ("model", "synthetic")
    live = said(folder, "publish-model model --store store --force")
    assert live["release"]["bundle_digest"] == trained["model"]
    assert said(folder, "models --store store")[0]["digest"] == trained["model"]


def test_without_quiet_a_search_says_how_far_it_is(folder: Path) -> None:
    assert "search from first plans: 1/1 rounds" in run(folder, f"{SEARCH} -o plan.json").stderr
    assert run(folder, f"{SEARCH} -o plan.json --quiet").stderr == ""


def test_quiet_leaves_out_notes_and_keeps_errors(folder: Path) -> None:
    (folder / "more.json").write_text(json.dumps({"tables": [{**TABLES[0], "colour": "red"}]}))
    command = "tables --from more.json -o out.json"
    assert "note: " in run(folder, command).stderr
    assert run(folder, f"{command} -q").stderr == ""

    wrong = run(folder, "show nowhere.json -q")
    assert wrong.exit_code != 0
    assert "nowhere.json: no such file" in f"{wrong.stderr}{wrong.exception}"
