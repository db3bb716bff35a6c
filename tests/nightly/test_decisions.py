"""What a night does for a kind of hardware that no live cost model covers: every row of nightly/survey.py's DECISIONS."""

from typing import Any

import pytest

from neuroshard import __version__
from neuroshard.core.cost import Hardware
from neuroshard.core.table import Table
from neuroshard.fleet.coverage import KindCoverage
from neuroshard.fleet.labels import Kind
from neuroshard.fleet.survey import SurveySettings
from neuroshard.nightly.augment import _drawn, _put, lacking
from neuroshard.nightly.survey import DECISIONS, standing
from neuroshard.orders.nightly import Campaign, Request
from neuroshard.store.folder import FolderStore
from neuroshard.store.measuring import LEARNED, Share, costs_digest, write_record

GPU = Hardware(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30)
TABLES = tuple(Table(name=f"ads/t{i}", rows=10**6 + i, dim=64, pooling_factor=2.0 + i) for i in range(8))
REQUEST = Request(compute_cases=20, collective_cases=0, batch_size=65536, seed=0, backend="cuda")
CAMPAIGN = Campaign(
    hardware=GPU, folder="_measuring/f/k", pods=1, devices=8, resource="", node_selector={}, tolerations=()
)
REFUSED = {"refused": "its error is 30 %", "max_error": 0.2}
LIVE = {"state": "model too old", "bundle": "b" * 64}


@pytest.mark.parametrize(
    ("row", "learned", "covered", "more"),
    [
        ("too old", {}, LIVE, {"oldest_seconds": 60.0}),
        ("not measured", {}, LIVE, {"left": None}),  # no pod ran to its end
        ("not measured", {}, LIVE, {"left": 3}),
        ("not measured", {}, LIVE, {"tables": (*TABLES, Table(name="ads/new", rows=9, dim=4, pooling_factor=1.0))}),
        ("not measured", {}, LIVE, {"drawn": False}),
        ("not learned", {}, LIVE, {"learned": False}),
        ("not learned", {"costs": "of before"}, LIVE, {}),
        ("not learned", {"version": "0.0"}, LIVE, {}),
        ("not readable", {}, {**LIVE, "lacks": ("unreadable",)}, {}),
        ("not readable", {}, {**LIVE, "lacks": ("dated in the future",)}, {}),
        ("not live", {}, {}, {}),
        ("not live", REFUSED, {}, {"max_error": 0.4}),  # a person allows a larger error
        ("not live", REFUSED, {}, {"max_error": None}),
        ("too far off", REFUSED, {}, {}),
        ("too far off", REFUSED, LIVE, {}),
        ("too far off", {}, {**LIVE, "lacks": ("error too high",)}, {}),
        ("exhausted", REFUSED, {}, {"most_drawn": 1.0}),
        ("exhausted", {}, LIVE, {}),
    ],
)
def test_the_first_thing_that_is_so_decides(
    row: str,
    learned: dict[str, Any],
    covered: dict[str, Any],
    more: dict[str, Any],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, folder = FolderStore(tmp_path), CAMPAIGN.folder
    if "most_drawn" in more:
        monkeypatch.setattr("neuroshard.nightly.augment.MOST_DRAWN", more["most_drawn"])
    if more.get("drawn", True):
        _put(_drawn(CAMPAIGN, REQUEST, TABLES, [], lacking(CAMPAIGN, REQUEST, TABLES, []), 1), store, folder, 1)
    if (left := more.get("left", 0)) is not None:
        write_record(store, f"{folder}/{Share(1, 1, 1).ended}", {"left": left})
    if more.get("learned", True):
        record = {"costs": costs_digest(store, folder), "version": __version__, "refused": "", "max_error": 0.2}
        write_record(store, f"{folder}/{LEARNED}", {**record, **learned})

    campaign = CAMPAIGN.model_copy(update={"oldest_seconds": more.get("oldest_seconds")})
    kind = KindCoverage(kind=Kind(hardware=GPU, nodes=1, devices=8), **{"state": "new", "why": "so", **covered})
    settings = SurveySettings(REQUEST, max_error=more.get("max_error", 0.2))
    assert standing(store, campaign, more.get("tables", TABLES), kind, settings)[0] == row


def test_more_is_drawn_only_where_it_may_help_and_nothing_is_done_only_where_nothing_is_left() -> None:
    decided = {decision: [row for row, one in DECISIONS.items() if one == decision] for decision in DECISIONS.values()}
    assert (decided["draw more"], decided["leave"], len(decided["go on"])) == (["too far off"], ["exhausted"], 5)
