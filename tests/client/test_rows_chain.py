"""A plan that splits rows, from the search to the trainer: every command takes it like any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from typer.testing import CliRunner

from neuroshard.cli import app
from neuroshard.client import load_plan
from neuroshard.client.torchrec import to_torchrec
from neuroshard.files.plan import read_plan

SEARCH = "search tables.json --model analytic:h100 --batch-size 8192 --devices 4 --memory 4GiB --min-dim 64 --rounds 2"
HEAVY = {"name": "heavy", "rows": 1_000_003, "dim": 16, "pooling_factor": 2000.0}
LIGHT = [{"name": f"t{i}", "rows": 5000, "dim": 32, "pooling_factor": 1.0 + i} for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "tables.json").write_text(json.dumps({"tables": [HEAVY, *LIGHT]}))
    run(folder, f"{SEARCH} --no-row-wise -o columns.json")
    run(folder, f"{SEARCH} --row-wise heavy -o rows.json")
    return folder


def run(folder: Path, command: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, (command, done.output, done.exception)
    return done


def test_the_search_splits_rows_and_show_report_and_evaluate_tell_of_them(folder):
    plan = read_plan(folder / "rows.json")
    run(folder, "report rows.json --model analytic:h100 --live columns.json -o report.html")

    assert [(s.row_offset, s.rows, s.device) for s in plan.by_table()["heavy"]] == [
        (250_001 * d, 250_001 if d < 3 else 250_000, d) for d in range(4)
    ]
    assert plan.cost_ms < read_plan(folder / "columns.json").cost_ms
    assert "heavy: row-wise over 4 devices (rows 0-250,000 on device 0)" in run(folder, "show rows.json").stdout
    assert "1 table row-wise" in (folder / "report.html").read_text()
    assert "1 table split row-wise" in run(folder, "evaluate rows.json --backend synthetic").stdout


def test_the_gate_prices_it_both_ways_and_the_trainer_gets_it(folder):
    place = "--store store --name ads --tables tables.json --model analytic:h100"
    run(folder, f"deploy columns.json {place}")
    forth, back = (run(folder, f"deploy {plan}.json {place}").output for plan in ("rows", "columns"))
    plan = load_plan(str(folder / "store"), "ads", world_size=4, cache_dir=False)
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in plan.task.tables
        ],
        device=torch.device("meta"),
    )
    heavy = to_torchrec(plan, module, optimizer="rowwise_adagrad").plan[""]["heavy"]

    assert plan == read_plan(folder / "rows.json")
    assert "lower than the live plan's" in forth
    assert "higher than the live plan's" in back
    assert (heavy.sharding_type, heavy.ranks) == ("row_wise", [0, 1, 2, 3])
