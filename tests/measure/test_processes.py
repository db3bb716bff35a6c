"""Workers: a death is an error at once, a hang is one in bounded time, and the next request finds a new worker."""

import errno
import functools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from helpers.limits import HANGS
from helpers.processes import needs_proc
from helpers.refusals import refused
from neuroshard import system
from neuroshard.core.errors import MeasureError
from neuroshard.measure.workers import processes
from neuroshard.measure.workers.processes import WorkerLost, WorkerPool

FOR_EVER = 10 * HANGS
MIB = 2**20


def pool(function: object, *arguments: object, count: int = 1, timeout: float = HANGS) -> WorkerPool:
    """Workers that call `function(*arguments, message)`."""
    return WorkerPool("functools:partial", lambda: [(function, *arguments)] * count, timeout)


def process_ids(workers: WorkerPool) -> list[int]:
    return [worker.process.pid for worker in workers.workers]


def exists(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


@pytest.mark.slow
def test_workers_answer_in_order_and_stay_the_same() -> None:
    adders = pool(int.__add__, 3, count=2)
    try:
        assert adders.ask(4) == [7, 7]
        first = process_ids(adders)
        assert adders.ask(5, count=1) == [8]
        assert process_ids(adders) == first
    finally:
        adders.close()
    assert not any(map(exists, first))


@pytest.mark.slow
@needs_proc
def test_a_worker_whose_parent_was_killed_while_it_started_ends_without_a_message() -> None:
    """Its arguments may be in the pipe already: a rank would then wait for the others for a minute."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        other = str(os.getppid())  # not the one that starts it
        command = [
            sys.executable,
            "-m",
            "neuroshard.measure.workers.processes",
            other,
            str(theirs.fileno()),
            "time:sleep",
        ]
        started = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        assert started.wait(HANGS) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_modules_of_the_working_directory_do_not_take_the_place_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tempfile.py").write_text("raise SystemExit('not that one')")
    monkeypatch.chdir(tmp_path)
    adder = pool(int.__add__, 3)
    try:
        assert adder.ask(4) == [7]
    finally:
        adder.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message", "reasons"),
    [
        (signal.raise_signal, signal.SIGKILL, ["out of memory", "SIGKILL"]),  # as the kernel kills
        (
            functools.partial(exec),
            "import os; os.write(2, b'std::bad_alloc'); os.abort()",
            ["out of memory", "SIGABRT"],
        ),
        (os._exit, 3, ["exit code 3"]),
        (os.listdir, "/nowhere", ["FileNotFoundError", "/nowhere"]),
        (functools.partial(exec), "import os; os.write(2, b'the reason'); os.abort()", ["SIGABRT", "the reason"]),
    ],
)
def test_a_dead_worker_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, function: object, message: object, reasons: list[str]
) -> None:
    monkeypatch.setattr(processes, "CLOSE_SECONDS", HANGS)  # to end in
    dying = pool(function)
    with refused(WorkerLost, *reasons):
        dying.ask(message)
    assert dying.workers == []


@pytest.mark.slow
@needs_proc
def test_a_worker_takes_no_more_than_its_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel would promise more; nothing is written, so this takes no memory."""
    free = [1024 * MIB]
    monkeypatch.setattr(system, "available_bytes", lambda: free[0])
    workers = pool(functools.partial(exec), count=2)
    try:
        workers.ask(f"bytearray({400 * MIB})")
        with refused(WorkerLost, "out of memory", "MemoryError"):
            workers.ask(f"bytearray({600 * MIB})")
        workers.ask(f"bytearray({600 * MIB})", count=1)  # alone
        free[0] = 256 * MIB
        with refused(WorkerLost, "out of memory", "MemoryError"):
            workers.ask(f"bytearray({400 * MIB})", count=1)
    finally:
        workers.close()


@pytest.mark.slow
def test_of_ranks_that_lose_one_the_error_is_how_that_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ENDS_SECONDS", HANGS)
    ranks = pool(functools.partial(exec), count=2)
    with refused(WorkerLost, "out of memory", "SIGKILL"):
        ranks.ask_each(["raise OSError('connection reset')", "import os; os.kill(os.getpid(), 9)"])


@pytest.mark.slow
def test_a_hung_worker_is_killed_when_its_time_is_up_and_replaced() -> None:
    sleeper = pool(time.sleep, timeout=0.5)
    sleeper.start()
    first = process_ids(sleeper)
    with refused(WorkerLost, "0.5 s") as raised:
        sleeper.ask(FOR_EVER)
    assert "memory" not in str(raised.value)
    assert not any(map(exists, first))
    sleeper.timeout_seconds = HANGS
    try:
        assert sleeper.ask(0) == [None]
    finally:
        sleeper.close()


BABBLE = """
import os, time
links = {int(fd): os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
pipe = next(fd for fd, link in links.items() if "socket:" in link)
os.write(pipe, WRITTEN)
time.sleep(FOR_EVER)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the worker looks for its pipe in /proc")
@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (b"\0\0\0\7garbage", "cannot be read"),
        (b"\0\0\0\3\x80\4N", "closed its pipe"),  # as a cut-off answer reads
        (b"\0\0\0\4\x80\4N.", "cannot be read"),  # whole, and None
        (b"\0\0\1\0half", "killed"),  # the rest of which never comes
    ],
)
def test_garbage_for_an_answer_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch, written: bytes, reason: str) -> None:
    monkeypatch.setattr(processes, "CLOSE_SECONDS", 1.0)
    babbling = pool(functools.partial(exec), timeout=HANGS if reason != "killed" else 2.0)
    with refused(WorkerLost, reason) as raised:
        babbling.ask(BABBLE.replace("WRITTEN", repr(written)).replace("FOR_EVER", repr(FOR_EVER)))
    assert "memory" not in str(raised.value)  # killed by us
    assert babbling.workers == []


@pytest.mark.slow
def test_one_death_ends_the_wait_for_all() -> None:
    """One rank dies while the others are in a collective that will never end."""
    mixed = WorkerPool("functools:partial", lambda: [(time.sleep,), (time.sleep,), (os.abort,)], FOR_EVER)
    mixed.start()
    others = process_ids(mixed)
    mixed.workers[2].process.kill()
    began = time.monotonic()
    with pytest.raises(WorkerLost):
        mixed.ask(FOR_EVER)
    assert time.monotonic() - began < HANGS
    assert not any(map(exists, others))


def test_where_no_process_can_be_started_the_error_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", start)
    pool = WorkerPool("time:sleep", lambda: [(0,)], HANGS)
    with refused(MeasureError, "ulimit -u"):
        pool.start()


def open_files() -> list[int]:
    """As many open files as the limit still allows."""
    opened: list[int] = []
    while True:
        try:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return opened


@pytest.mark.parametrize("free", range(6))
def test_where_no_more_files_may_be_open_the_error_names_that_limit_and_none_stays_open(free: int) -> None:
    """A start takes six: two ends of a pipe, the output, and three of subprocess."""
    tempfile.gettempdir()  # looked for once in a process
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    held = open_files()
    try:
        for _ in range(free):
            os.close(held.pop())
        with refused(MeasureError, "ulimit -n") as raised:
            WorkerPool("time:sleep", lambda: [(0,)], HANGS).start()
        left = open_files()  # while `raised` keeps alive what the start had in hand
        held += left
        assert (len(left), raised.type) == (free, MeasureError)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_where_temporary_files_have_no_place_the_error_says_how_to_name_one_and_no_pipe_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Pipe()
    monkeypatch.setattr(processes, "Pipe", lambda: ends)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with refused(MeasureError, "No such file or directory", "TMPDIR"):
        WorkerPool("time:sleep", lambda: [(0,)], HANGS).start()
    assert [end.closed for end in ends] == [True, True]


@pytest.mark.slow
def test_a_worker_that_cannot_serve_at_all_says_why() -> None:
    missing = WorkerPool("neuroshard.measure.timing.clocks:Cuda", lambda: [(99,)], HANGS)
    with refused(MeasureError, "GPU 99") as raised:
        missing.ask("anything")
    assert not isinstance(raised.value, WorkerLost)
