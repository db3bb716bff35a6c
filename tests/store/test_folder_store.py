"""What is special about a folder: its files, its lock, its errors."""

import errno
import fcntl
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.refusals import refused
from neuroshard.core.errors import Conflict, InvalidInput, NeuroshardError, NotFound, StoreError
from neuroshard.store import folder
from neuroshard.store.folder import FolderStore
from neuroshard.store.protocol import PartlyListed


def files(store: FolderStore) -> set[str]:
    return {str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()}


def test_writes_leave_no_scratch_but_the_lock(store):
    store.create("m/a", b"one")
    store.swap("m/live.json", b"one", None)

    assert files(store) == {"m/a", "m/live.json", "m/.lock"}


def test_files_are_as_readable_as_others(store, tmp_path):
    store.create("m/a", b"one")
    (tmp_path / "other").write_bytes(b"")

    assert (store.root / "m/a").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_lock_that_is_never_freed_ends_in_bounded_time(store, monkeypatch):
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.2)
    store.swap("m/live.json", b"one", None)
    with (store.root / "m/.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with refused(StoreError, "m/.lock"):
            store.swap("m/live.json", b"two", None)

    assert files(store) == {"m/live.json", "m/.lock"}


def test_a_pipe_for_a_lock_waits_for_nobody(store):
    (store.root / "m").mkdir(parents=True)
    os.mkfifo(store.root / "m/.lock")
    store.swap("m/live.json", b"one", None)

    assert store.read("m/live.json") == b"one"


def test_a_file_where_a_folder_should_be_and_a_folder_in_place_of_the_lock_are_named(store):
    store.create("m", b"")
    for use in (lambda: store.create("m/a", b""), lambda: store.swap("m/a", b"", None), lambda: store.read("m/a")):
        with refused(StoreError, "store/m"):
            use()
    (store.root / "n" / ".lock").mkdir(parents=True)
    with refused(StoreError, "n/.lock"):
        store.swap("n/live.json", b"one", None)


def test_a_place_where_no_folder_can_be_made_is_reported_as_that():
    with refused(StoreError, "/proc/nonesuch") as caught:
        FolderStore(Path("/proc/nonesuch")).create("m/a", b"one")
    assert not isinstance(caught.value, NotFound)


def test_a_folder_that_cannot_be_listed_is_an_error_and_no_empty_one(store, monkeypatch):
    """What a listing leaves out is taken for not there: a mark of a gc, say."""
    store.create("m/condemned/a", b"one")
    store.create("m/plans/b", b"two")
    scandir = os.scandir

    def denied(path: str) -> object:
        if str(path).endswith("condemned"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PartlyListed) as caught:
        store.list("m/")
    assert [*caught.value.denied] == ["m/condemned"]
    assert [entry.key for entry in caught.value.entries] == ["m/plans/b"]


def test_a_hidden_folder_need_not_be_readable(store, monkeypatch):
    """A file server's .snapshot, say."""
    store.create("m/a", b"one")
    (store.root / "m" / ".snapshot").mkdir()
    scandir, listed = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))

    assert [entry.key for entry in store.list("m/")] == ["m/a"]
    assert listed == ["m"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_folder_without_permission_is_reported_in_one_line(store):
    store.create("m/a", b"one")
    (store.root / "m").chmod(0)
    try:
        for use in (lambda: store.read("m/a"), lambda: store.create("m/b", b"")):
            with refused(StoreError, "Permission denied"):
                use()
    finally:
        (store.root / "m").chmod(0o755)


def test_a_disk_that_is_full_leaves_nothing_behind(store, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused(NeuroshardError, "m/a", "No space left on device"):
        store.create("m/a", b"one")

    assert files(store) == set()


@pytest.mark.parametrize("what", ["pipe", "endless device", "too large"])
def test_what_is_no_file_or_too_large_is_refused_at_once(store, what):
    store.create("m/b", b"")
    path = store.root / "m" / "a"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "endless device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    for use in (lambda: store.read("m/a"), lambda: store.create("m/a", b""), lambda: store.swap("m/a", b"", None)):
        with refused(InvalidInput, "m/a"):
            use()

    assert path.exists()
    assert files(store) - {"m/a"} == {"m/b", "m/.lock"}


def test_folders_that_are_made_are_safe_on_disk_before_what_is_in_them(store, monkeypatch):
    """The entry of a new folder is its parent's, so it is the parent that must be flushed."""
    flushed = []
    monkeypatch.setattr(folder, "_sync_folder", lambda path: flushed.append(path))
    store.create("m/plans/a", b"one")

    assert flushed == [store.root.parent, store.root, store.root / "m", store.root / "m" / "plans"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_a_key_is_still_written_once_and_by_one_writer(store, monkeypatch, number):
    def no_links(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_links)
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda _: store.create("m/a", b"one"), range(8)))
    assert sorted(created) == [False] * 7 + [True]
    with refused(Conflict, "m/a"):
        store.create("m/a", b"two")
    assert store.read("m/a") == b"one"
    assert files(store) == {"m/a", "m/.lock"}


@pytest.mark.parametrize("write", ["create", "swap", "delete"])
def test_a_folder_where_an_object_belongs_is_no_object_and_in_nobodys_way(tmp_path: Path, write: str) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "m" / "live.json").mkdir(parents=True)
    (tmp_path / "m" / "live.json" / "notes").write_bytes(b"somebody's")
    with refused(NotFound, "live.json", "folder"):
        store.read("m/live.json")
    if write == "create":
        assert store.create("m/live.json", b"1")
    elif write == "swap":
        store.swap("m/live.json", b"1", None)
    else:
        store.delete("m/live.json")
    assert [entry.key for entry in store.list("m/")] == ([] if write == "delete" else ["m/live.json"])
    assert [path.read_bytes() for path in tmp_path.rglob("notes")] == [b"somebody's"]


@pytest.mark.parametrize("seconds", [10**14, -(10**12)])
def test_a_file_of_a_date_that_no_calendar_has_is_listed(seconds):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs a tmpfs, which keeps such dates")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        store = FolderStore(Path(root))
        store.create("m/a", b"one")
        os.utime(store.root / "m/a", (seconds, seconds))

        assert [entry.key for entry in store.list("m/")] == ["m/a"]
