"""What lies in the folder of a work."""

from pathlib import Path

from neuroshard.store.folder import FolderStore
from neuroshard.store.measuring import Share, measuring, set_aside_share


def test_of_a_draw_whose_costs_are_set_aside_no_share_counts_as_ended(tmp_path: Path) -> None:
    """Two pods ended at once, since one pod had measured all before: without its costs there is everything to measure."""
    store = FolderStore(tmp_path / "store")
    for name in ("costs-1-of-1/costs.json", "ended-1-of-2.json", "ended-2-of-2.json"):
        store.create(f"work/draw-0001/{name}", b"{}")
    store.create("work/draw-0002/ended-1-of-2.json", b"{}")

    set_aside_share(store, "work", Share(1, 1, 1), "it cannot be read")

    now = measuring(store, "work")
    assert not now.shares
    assert now.ended == (Share(2, 1, 2),)
    assert store.read("work/aside/draw-0001/costs-1-of-1/costs.json") == b"{}"
