"""Whole files or nothing."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.files.disk import (
    check_can_write,
    check_folder_exists,
    only_writer,
    read_bytes,
    write_bytes,
    writing,
    writing_folder,
)


def test_what_is_written_is_read_back_and_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "c.bin"
    write_bytes(path, b"123")
    assert read_bytes(path) == b"123"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x" * 255, "\u65e5" * 85, os.fsdecode(b"\xff\xfe")])
def test_any_name_that_the_disk_takes_is_written(tmp_path, name):
    write_bytes(tmp_path / name, b"123")
    with writing_folder(tmp_path / f"{name[:-1]}f") as folder:
        (folder / "x").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, f"{name[:-1]}f"])


def test_a_file_that_is_written_can_be_read_by_others(tmp_path):
    write_bytes(tmp_path / "x", b"")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_full_disk_is_reported_in_one_line_and_leaves_the_old_file(tmp_path, full_disk):
    path = tmp_path / "x"
    write_bytes(path, b"old")
    with full_disk(), refused(NeuroshardError, path, "File too large"):
        write_bytes(path, b"n" * 1000)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"x": b"old"}


def test_what_is_written_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, flushed = tmp_path / "a.json", []

    def fsync(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes(path, b"whole")

    assert flushed == [(5, False)]
    assert path.read_bytes() == b"whole"


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_bytes(path, b"old")

    def half():
        with writing(path) as temporary:
            temporary.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"x": b"old"}


def test_a_path_that_cannot_be_is_reported_in_one_line(tmp_path):
    write_bytes(tmp_path / "file", b"")
    for path in (tmp_path, tmp_path / "file" / "below", tmp_path / ("n" * 300)):
        with refused(NeuroshardError, path):
            write_bytes(path, b"")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path, there):
    link, target = tmp_path / "plan.json", tmp_path / "shared" / "plan.json"
    if there:
        write_bytes(target, b"old")
    link.symlink_to(target)
    write_bytes(link, b"new")
    assert (link.is_symlink(), target.read_bytes()) == (True, b"new")
    assert [path.name for path in target.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("there", [True, False])
def test_the_folder_that_a_link_leads_to_is_written_and_the_link_stays(tmp_path, there):
    link, target = tmp_path / "costs", tmp_path / "large disk" / "costs"
    if there:
        target.mkdir(parents=True)
    link.symlink_to(target)
    with writing_folder(link) as folder:
        (folder / "costs.json").touch()
    assert (link.is_symlink(), [path.name for path in target.iterdir()]) == (True, ["costs.json"])
    assert [path.name for path in target.parent.iterdir()] == ["costs"]


def test_a_pipe_gets_the_bytes_and_stays_a_pipe(tmp_path):
    """As /dev/null should, which a run as root could otherwise replace by a file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes(path, b"plan")
        assert os.read(reading, 100) == b"plan"
    finally:
        os.close(reading)
    assert (path.is_fifo(), [one.name for one in tmp_path.iterdir()]) == (True, ["pipe"])


def test_reading_names_the_path_and_what_is_wrong_with_it(tmp_path):
    with refused(InvalidInput, "ghost"):
        read_bytes(tmp_path / "ghost")
    with refused(NeuroshardError, tmp_path, "Is a directory"):
        read_bytes(tmp_path)
    with refused(NeuroshardError, "File name too long"):
        read_bytes(tmp_path / ("n" * 300))
    write_bytes(tmp_path / "big", b"12345")
    with refused(InvalidInput, "5 bytes", 4):
        read_bytes(tmp_path / "big", max_bytes=4)
    with refused(InvalidInput, "4 bytes"):
        read_bytes(Path("/dev/zero"), max_bytes=4)


@pytest.mark.parametrize("write", [check_can_write, lambda path: write_bytes(path, b"")])
def test_what_cannot_be_written_is_reported_beforehand_and_nothing_is_made(tmp_path, write):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()

    with refused(NeuroshardError, tmp_path / "folder", "Is a directory"):
        write(tmp_path / "folder")
    with refused(NeuroshardError, tmp_path / "file" / "x" / "y", tmp_path / "file"):
        write(tmp_path / "file" / "x" / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    ("flags", "reason"), [(0, f"user {os.getuid()} may not write"), (os.ST_RDONLY, "read-only file system")]
)
def test_a_folder_that_may_not_be_written_to_is_named_with_the_reason_and_the_way_out(
    tmp_path, monkeypatch, flags, reason
):
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs the tests may be allowed all
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))

    with refused(NeuroshardError, tmp_path / "there" / "plan.json", tmp_path / "there", reason, "another path"):
        write_bytes(tmp_path / "there" / "plan.json", b"")


def test_where_something_can_be_written_asking_makes_nothing(tmp_path):
    check_can_write(tmp_path / "a" / "b" / "c")
    check_can_write(tmp_path / "a" / "b", folder=True)
    check_can_write(tmp_path, folder=True)

    assert list(tmp_path.iterdir()) == []


def test_of_a_path_that_a_person_gives_only_the_last_part_may_be_new(tmp_path):
    check_folder_exists(tmp_path / "new.json")
    with refused(UsageError, tmp_path / "nowhere" / "x.json", tmp_path / "nowhere"):
        check_folder_exists(tmp_path / "nowhere" / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_of_two_runs_that_write_into_one_folder_the_second_says_so_and_changes_nothing(tmp_path):
    folder = tmp_path / "model"
    with only_writer(folder, "a cost model"):
        (folder / "half").touch()
        with (
            refused(InvalidInput, folder, "another run is writing a cost model", "-o"),
            only_writer(folder, "a cost model"),
        ):
            pass
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "half"]
    with only_writer(folder, "a cost model"):
        pass
    assert [path.name for path in folder.iterdir()] == ["half"]


def test_a_run_that_wrote_nothing_leaves_no_folder(tmp_path):
    def fail() -> None:
        with only_writer(tmp_path / "model", "a cost model"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_many_runs_that_meet_are_never_two_at_once(tmp_path):
    inside, most, held = [], [], []

    def write() -> None:
        for _ in range(200):
            try:
                with only_writer(tmp_path / "model", "x"):
                    inside.append(1)
                    most.append(len(inside))
                    held.append(1)
                    inside.pop()
            except InvalidInput:
                pass

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert held


@pytest.mark.slow
def test_the_lock_of_a_killed_run_keeps_nobody_out(tmp_path):
    hold = (
        "import sys, time; from pathlib import Path; from neuroshard.files.disk import only_writer\n"
        "with only_writer(Path(sys.argv[1]), 'x'): print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "m")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with refused(InvalidInput, tmp_path / "m"), only_writer(tmp_path / "m", "x"):
        pass
    process.kill()
    process.communicate()
    assert (tmp_path / "m" / ".lock").exists()
    with only_writer(tmp_path / "m", "x"):
        pass


def test_where_a_file_system_has_no_locks_the_run_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with only_writer(tmp_path / "m", "costs"):
        pass
    assert f"note: {tmp_path / 'm'}: its file system has no locks" in capsys.readouterr().err
