"""`--model analytic:NAME` and `--model given:FILE` on the command line."""

import json
from pathlib import Path

import pytest

TABLES = [{"name": f"t{i}", "rows": 1000 * (i + 1), "dim": 64, "pooling_factor": 2.0 + i} for i in range(5)]
SEARCH = "search tables.json --devices 2 --memory 1GiB -o plan.json --model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tables.json").write_text(json.dumps({"tables": TABLES}))
    costs = {"tables": [{"name": t["name"], "cost_ms": 2.0} for t in TABLES], "batch_size": 2560}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    return tmp_path


def test_a_plan_says_that_its_costs_come_from_a_datasheet(folder: Path, neuroshard) -> None:
    done = neuroshard(*SEARCH.split(), "analytic:h100", "--batch-size", 65536, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "cost model analytic:h100, computed from datasheets, not measured (H100 SXM)" in " ".join(
        done.stdout.split()
    )


def test_a_plan_under_given_costs_says_so_and_balances_them(folder: Path, neuroshard) -> None:
    done = neuroshard(*SEARCH.split(), "given:costs.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "given costs" in done.stdout
    assert json.loads((folder / "plan.json").read_text())["predicted_ms"] == pytest.approx([5.0, 5.0])


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("analytic:b200", 2, ["analytic model 'b200'", "analytic:h100"]),
        ("analytic:h100", 2, ["--batch-size"]),
        ("given:none.json", 1, ["none.json", "no such file"]),
    ],
)
def test_a_model_that_cannot_be_gets_one_line(
    folder: Path, neuroshard, model: str, code: int, words: list[str]
) -> None:
    done = neuroshard(*SEARCH.split(), model, cwd=folder)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not (folder / "plan.json").exists()
