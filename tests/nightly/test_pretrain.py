"""What a cost model counts as learned from."""

from pathlib import Path
from typing import Any

import pytest

from helpers.nightly import Place, spec, tables
from helpers.nodes import node
from neuroshard.files.tables import write_tables
from neuroshard.measure.shares.job import merge_shares
from neuroshard.orders.nightly import Campaign
from neuroshard.store.folder import FolderStore
from neuroshard.store.measuring import LEARNED, costs_digest, read_record

pytestmark = pytest.mark.slow


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
