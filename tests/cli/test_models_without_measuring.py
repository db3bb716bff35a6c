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
    assert "cost model analytic:h100 of datasheets, not measured (H100 SXM)" in " ".join(done.stdout.split())


def test_a_plan_under_given_costs_says_so_and_balances_them(folder: Path, neuroshard) -> None:
    done = neuroshard(*SEARCH.split(), "given:costs.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "of costs as given, not measured here" in " ".join(done.stdout.split())
    assert json.loads((folder / "plan.json").read_text())["predicted_ms"] == pytest.approx([5.0, 5.0])


def test_where_it_may_a_search_splits_a_heavy_table_row_wise_and_says_so(folder: Path, neuroshard) -> None:
    heavy = {"name": "heavy", "rows": 100_000, "dim": 16, "pooling_factor": 900.0}
    (folder / "tables.json").write_text(json.dumps({"tables": [*TABLES, heavy]}))
    ask = (
        *SEARCH.split(),
        "analytic:h100",
        "--batch-size",
        65536,
        "--memory",
        "4GiB",
        "--allocator-share",
        0,
        "--row-wise",
    )
    done = neuroshard(*ask, "heav*", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "1 table of 6 split row-wise over all 2 devices" in " ".join(done.stdout.split())
    shards = [s for s in json.loads((folder / "plan.json").read_text())["shards"] if s["table"] == "heavy"]
    assert [(s["row_offset"], s["rows"], s["dim"], s["device"]) for s in shards] == [
        (0, 50_000, 16, 0),
        (50_000, 50_000, 16, 1),
    ]
    refused = neuroshard(*ask, "heavy", "--never-split", "heavy", cwd=folder)
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        "error: the task: table 'heavy' may be split row-wise, over all 2 devices, but may have 1 shard at most; "
        "say one of them"
    ]


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("analytic:v100", 2, ["analytic model 'v100'", "analytic:h100"]),
        ("analytic:h100", 2, ["--batch-size"]),
        ("given:none.json", 1, ["none.json", "no such file"]),
        ("given:costs.json --row-wise *", 2, ["given costs are of whole tables", "search without --row-wise"]),
    ],
)
def test_a_model_that_cannot_be_gets_one_line(
    folder: Path, neuroshard, model: str, code: int, words: list[str]
) -> None:
    done = neuroshard(*SEARCH.split(), *model.split(), cwd=folder)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not (folder / "plan.json").exists()
