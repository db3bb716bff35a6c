"""A folder kept in a store while it grows, and a store that is away for a while."""

import threading
import time
from pathlib import Path

import pytest

from helpers.limits import HANGS
from helpers.memory_store import MemoryStore
from helpers.refusals import refused
from neuroshard.core.errors import Conflict, StoreError, Unreachable
from neuroshard.store import patience
from neuroshard.store.folders import delete_folder, fetch_folder, kept, send_folder
from neuroshard.store.patience import PatientStore, patiently
from neuroshard.store.protocol import MAX_BYTES


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "WAIT_SECONDS", 0.01)


def test_what_a_folder_has_at_the_end_is_in_the_store_and_comes_back(tmp_path: Path) -> None:
    store, here, there = MemoryStore(), tmp_path / "here", tmp_path / "there"
    with kept(PatientStore(store), "work/costs", here):
        (here / "deep").mkdir(parents=True)
        (here / "a.json").write_text("a")
        (here / "deep" / "b").write_text("b")
        (here / ".half").write_text("not whole yet")
    assert set(fetch_folder(store, "work/costs", there)) == {"a.json", "deep/b"}
    assert {path.name: path.read_text() for path in there.rglob("*") if path.is_file()} == {"a.json": "a", "b": "b"}


def test_a_draw_of_many_cases_comes_back_though_it_is_larger_than_a_plan_may_be(tmp_path: Path) -> None:
    store, large = MemoryStore(), bytes(MAX_BYTES + 1)
    store.create("work/draw-0001/cases/compute.parquet", large)
    fetch_folder(store, "work/draw-0001/cases", tmp_path)
    assert (tmp_path / "compute.parquet").read_bytes() == large


def test_it_is_sent_while_the_work_goes_on_so_that_a_killed_pod_loses_little(tmp_path: Path) -> None:
    store, sent = MemoryStore(), threading.Event()
    create = store.create

    def recorded(key: str, data: bytes) -> None:
        create(key, data)
        sent.set()

    store.create = recorded
    with kept(PatientStore(store), "w", tmp_path, every_seconds=0.01):
        (tmp_path / "part").write_text("1")
        assert sent.wait(HANGS)
        assert store.read("w/part") == b"1"


def test_what_is_there_already_is_not_sent_again(tmp_path: Path) -> None:
    store = MemoryStore()
    store.create("w/part", b"1")
    fetch_folder(store, "w", tmp_path)
    with kept(PatientStore(store), "w", tmp_path):
        (tmp_path / "part").write_text("changed, which a part never is")
    assert store.read("w/part") == b"1"


def fails_thrice(store: MemoryStore, error: Exception) -> tuple[list[str], threading.Event]:
    """The keys that are tried from now on, of which the first three are refused, and whether one has been created since."""
    tries, sent = list[str](), threading.Event()
    create = store.create

    def refused(key: str, data: bytes) -> None:
        tries.append(key)
        if len(tries) < 4:
            raise error
        create(key, data)
        sent.set()

    store.create = refused
    return tries, sent


def test_a_store_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    store = MemoryStore()
    tries, _ = fails_thrice(store, Unreachable("no answer"))
    with kept(PatientStore(store), "w", tmp_path):
        (tmp_path / "part").write_text("1")
    assert (store.read("w/part"), len(tries)) == (b"1", 4)


def test_what_cannot_be_sent_meanwhile_is_reported_once_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MemoryStore()
    _, sent = fails_thrice(store, StoreError("the credentials have expired"))
    (tmp_path / "part").write_text("1")
    with kept(PatientStore(store), "w", tmp_path, every_seconds=0.01):
        assert sent.wait(HANGS)
    note = capsys.readouterr().err
    assert note.startswith("note: the credentials have expired")
    assert note.count("\n") == 1


def test_of_two_that_fill_one_folder_the_second_sends_no_part(tmp_path: Path) -> None:
    store, one, other = MemoryStore(), tmp_path / "one", tmp_path / "other"
    for folder, part in ((one, "b-0"), (other, "a-0")):
        folder.mkdir()
        (folder / part).write_text("a part")
        (folder / "costs.json").write_text(f"of {folder.name}")
    send_folder(store, "w", one, set())
    with pytest.raises(Conflict):
        send_folder(store, "w", other, set())
    assert [entry.key for entry in store.list("w/")] == ["w/b-0", "w/costs.json"]


def test_patience_ends_and_a_refusal_is_reported_at_once() -> None:
    def away() -> None:
        raise Unreachable("no answer")

    with pytest.raises(Unreachable):
        patiently(away, patience_seconds=0.05)
    asked = []

    def refusing() -> None:
        asked.append(1)
        raise Conflict("no")

    with pytest.raises(Conflict):
        patiently(refusing)
    assert len(asked) == 1


def test_a_swap_whose_answer_was_lost_is_not_taken_for_another_writers() -> None:
    store = MemoryStore()
    swap, answers = store.swap, iter([False])

    def lost_once(key: str, data: bytes, expected: str | None) -> None:
        swap(key, data, expected)
        if not next(answers, True):
            raise Unreachable("no answer")

    store.swap = lost_once
    PatientStore(store).swap("k", b"ours", None)
    assert store.read("k") == b"ours"
    with pytest.raises(Conflict):
        PatientStore(store).swap("k", b"another", None)


def test_an_error_of_the_work_is_reported_and_what_it_made_is_kept(tmp_path: Path) -> None:
    store = MemoryStore()

    def work() -> None:
        with kept(PatientStore(store), "w", tmp_path):
            (tmp_path / "part").write_text("1")
            raise ValueError("of the work")

    with refused(ValueError, "of the work"):
        work()
    assert store.read("w/part") == b"1"


def test_deleting_a_folder_leaves_its_neighbours() -> None:
    store = MemoryStore()
    for key in ("w/a", "w/b/c", "w2/d"):
        store.create(key, b"")
    delete_folder(store, "w")
    assert [entry.key for entry in store.list("")] == ["w2/d"]


def test_a_store_that_hangs_says_so_while_it_does_and_when_it_answers_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, said = MemoryStore(), [""]

    def hanging(*_: object) -> bytes:
        while not said[-1]:  # until somebody says it
            said.append(capsys.readouterr().err)
            time.sleep(0.01)
        return b"there"

    monkeypatch.setattr(patience, "SLOW_SECONDS", 0.02)
    monkeypatch.setattr(store, "read", hanging)
    assert PatientStore(store).read("k") == b"there"
    assert said[-1] == f"note: {store.url} has not answered for 0 s; it is asked for up to 10 min\n"
    assert f"note: {store.url} answers again, after 0 s\n" in capsys.readouterr().err
