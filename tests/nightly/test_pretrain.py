"""What a cost model counts as learned from."""

from pathlib import Path
from typing import Any

import pytest

from helpers.costs import random_model
from helpers.nightly import Place, spec, tables
from helpers.nodes import node
from helpers.plans import NOW
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.deploy.bundles import PublishRule, publish_model
from neuroshard.files.tables import write_tables
from neuroshard.measure.shares.job import merge_shares
from neuroshard.nightly.pretrain import _serves_less
from neuroshard.orders.nightly import Campaign
from neuroshard.store.folder import FolderStore
from neuroshard.store.measuring import LEARNED, costs_digest, read_record


@pytest.mark.parametrize(
    ("live", "new", "ranks", "missing"),
    [
        ((), (2,), (2, 4), ""),  # nothing is live
        ((2, 4), (2, 4), (2, 4), ""),
        ((2, 4), (2,), (2, 4), "4 devices"),
        ((2, 4, 8), (2,), (4, 8), "4, 8 devices"),
        ((2, 4), (2,), (2,), ""),  # nobody asks for 4 any more, nor can they be measured
        ((2,), (4,), (4,), ""),
    ],
)
def test_no_cost_model_goes_live_that_predicts_fewer_numbers_of_devices_than_the_live_one(
    tmp_path: Path, live: tuple[int, ...], new: tuple[int, ...], ranks: tuple[int, ...], missing: str
) -> None:
    store, model = FolderStore(tmp_path / "store"), random_model(*new, seed=1)
    if live:
        save_cost_model(tmp_path / "live", random_model(*live))
        publish_model(tmp_path / "live", store, now=NOW, asked=PublishRule(max_error=None))
    bench = model.manifest.bench
    campaign = Campaign(
        hardware=bench.hardware,
        folder="f",
        pods=1,
        devices=8,
        resource="",
        node_selector={},
        tolerations=(),
        ranks=ranks,
    )
    found = _serves_less(store, campaign, bench.batch_size, model)
    assert bool(found) == bool(missing)
    assert missing in found


@pytest.mark.slow
def test_costs_that_come_while_shares_are_merged_are_still_to_be_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods of another nightly run send parts at any time."""
    place = Place(tmp_path / "place", [node("a")])
    write_tables(place.folder / "six.json", tables(6))
    place.models = [spec(place)]
    store, folders = FolderStore(Path(place.store)), []

    def merge(campaign: Campaign, *arguments: Any, **more: Any) -> None:
        merge_shares(campaign, *arguments, **more)
        folders.append(campaign.folder)
        store.create(f"{campaign.folder}/draw-00001/costs-of-another-run/part", b"late")

    monkeypatch.setattr("neuroshard.nightly.pretrain.merge_shares", merge)
    assert place.nightly_run().ends == {"ads": "live"}
    [folder] = folders
    learned = read_record(store, f"{folder}/{LEARNED}")
    assert learned is not None
    assert learned["costs"] != costs_digest(store, folder)
