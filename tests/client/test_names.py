"""The public names of the client's rooms, and their earlier modules, which trainers import."""

import importlib

import pytest

pytest.importorskip("torchrec")
EARLIER = {
    "torchrec_optimizer": ("checkpoint", ["PLAN", "load_resharded", "saved_plan"]),
    "torchrec_reshard": ("checkpoint", ["reshard"]),
    "torchrec_pipelines": ("torchrec", ["check_pipeline"]),
    "rows_lists": ("rows", ["hot_ids"]),
    "rows_plan": ("rows", ["by_access"]),
    "rows_sharded": ("rows", ["CollectionByAccessSharder"]),
    "rows_state": ("checkpoint", ["load_model_state", "model_state"]),
}


@pytest.mark.parametrize("earlier", EARLIER)
def test_an_earlier_module_gives_what_its_room_does(earlier: str) -> None:
    room, names = EARLIER[earlier]
    old, new = (importlib.import_module(f"neuroshard.client.{name}") for name in (earlier, room))

    assert [getattr(old, name) for name in names] == [getattr(new, name) for name in names]
