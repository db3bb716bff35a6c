"""examples/dlrmv4.py trains by the live plan of a store, in place of TorchRec's planner."""

import importlib
import json
from pathlib import Path

import pytest

import neuroshard as ns
from helpers.forked import run_script


@pytest.mark.slow
def test_sequences_and_candidates_train_by_the_plan_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root := Path(__file__).resolve().parents[2]))
    lookups = json.loads((root / "examples" / "dlrmv4_lookups.json").read_text())
    tables = ns.tables("examples.dlrmv4:make_model", pooling_factors=lookups, quiet=True)
    plan = ns.search(tables, "analytic:cpu", devices=2, memory="4GiB", batch_size=64, pipeline="none", quiet=True)
    ns.deploy(plan, str(tmp_path), "dlrmv4", model="analytic:cpu")
    main = importlib.import_module("examples.dlrmv4").main
    done = run_script(main, "--store", tmp_path, "--name", "dlrmv4", cwd=root, environment={})
    assert "step 2: loss 0." in done.stdout, done.stderr
