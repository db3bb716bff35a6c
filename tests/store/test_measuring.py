"""What lies in the folder of a work."""

from pathlib import Path

import pytest

from neuroshard.store.folder import FolderStore
from neuroshard.store.measuring import (
    FAILED,
    Share,
    cases_of,
    left_of_share,
    measuring,
    note_failure,
    read_record,
    set_aside,
    set_aside_share,
    write_record,
)
from neuroshard.store.protocol import MAX_BYTES


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


def test_draws_are_in_their_order(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    for draw in (8, 1, 16):
        store.create(f"work/{cases_of(draw)}/cases.json", b"{}")
    assert measuring(store, "work").draws == (1, 8, 16)


@pytest.mark.parametrize(("record", "left"), [(3, 3), (0, 0), (-1, None), (True, None), ("3", None), (None, None)])
def test_only_a_count_says_what_is_left_of_a_share(tmp_path: Path, record: object, left: int | None) -> None:
    store = FolderStore(tmp_path / "store")
    write_record(store, f"work/{Share(1, 1, 1).ended}", {"left": record})
    assert left_of_share(store, "work", Share(1, 1, 1)) == left


def test_of_a_draw_that_is_set_aside_a_copy_is_kept_however_large_it_is(tmp_path: Path) -> None:
    store, large = FolderStore(tmp_path / "store"), bytes(MAX_BYTES + 1)
    store.create(f"work/{cases_of(1)}/compute.parquet", large)

    set_aside(store, "work", cases_of(1), "it cannot be read")

    assert [one.key for one in store.list("work/")] == [f"work/aside/{cases_of(1)}/compute.parquet"]
    assert store.read(f"work/aside/{cases_of(1)}/compute.parquet", len(large)) == large


def test_a_later_step_that_fails_does_not_hide_the_failure_of_an_earlier_one(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    for step, why in (("measure", "no GPU"), ("measure", "lost"), ("publish", "too far off")):
        note_failure(store, "work", step, why)

    record = read_record(store, f"work/{FAILED}")
    assert record == {"format_version": 1, "step": "measure", "why": "lost; publish: too far off"}


def test_after_draw_9999_comes_draw_10000(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    share = Share(10000, 1, 2)
    for name in (
        f"{cases_of(10000)}/cases.json",
        f"{share.costs}/costs.json",
        share.ended,
        "draw-00001/cases/cases.json",
    ):
        store.create(f"work/{name}", b"{}")

    now = measuring(store, "work")
    assert (now.draws, [*now.shares], now.ended) == ((10000,), [share], (share,))
