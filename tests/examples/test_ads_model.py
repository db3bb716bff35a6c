"""examples/ads_model.py, whose tables the tutorial plans with TorchRec's planner and with ours."""

import json
from pathlib import Path

import pytest

import neuroshard as ns

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_both_planners_plan_with_the_same_lookups(
    neuroshard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples import ads_model

    ads_model.print_planner()
    (tmp_path / "planner.log").write_text(caplog.text)
    done = neuroshard("tables", "--from-stats", tmp_path / "planner.log", "-o", tmp_path / "printed.json")
    assert done.returncode == 0, done.stderr

    lookups = json.loads((ROOT / "examples" / "ads_lookups.json").read_text())
    ours = ns.tables("examples.ads_model:make_model", pooling_factors=lookups, quiet=True)
    printed = ns.tables(tmp_path / "printed.json", quiet=True)
    assert {t.name: t.pooling_factor for t in printed} == {t.name: t.pooling_factor for t in ours}
    assert {f.name: f.pooling_factor for t in ours for f in t.features} == {
        name: lookups[name] for name in ("shown_ad", "recent_ads", "shown_page", "recent_pages")
    }
