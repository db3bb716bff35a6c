"""Worker processes for work that may crash or hang: asked over a pipe, and lost if they do not answer in time.

A worker runs `python -P -m neuroshard.measure.workers.processes PARENT FD MODULE:FUNCTION`. With -P Python ignores the working
directory, where a user may have a random.py or a queue.py. The worker calls the function once, with the arguments of the first
message. It answers every later message with the result of the callable that this returned. It ends when its parent does.

With each message comes what the worker may take of the memory that is free then (`system.take_no_more`). So a request that is too
large ends in a MemoryError, also where the kernel promises more than it has, as on a Kubernetes node.
"""

import ctypes
import errno
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, TypeVar

from neuroshard import system
from neuroshard.core.errors import MeasureError, NeuroshardError

# Importing torch from a cold disk takes a minute, writing a 4 GiB buffer in a new virtual machine 10 s.
STARTUP_SECONDS = 300.0
CLOSE_SECONDS = 5.0
ENDS_SECONDS = 0.1  # from when a killed process has let go of its connections
TRIES = 2  # of a request whose worker was lost
ROOM = 0.95  # of what is free, for the workers that are asked: the rest is for this process, and for page tables
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MORE_FILES = "raise the limit on open files (ulimit -n)"
MORE_PROCESSES = "raise the limit on processes (ulimit -u), or give more memory"
# where tempfile finds no folder it does not say why: it opens a file in each
OTHER_TEMPORARY = f"name a folder with room for temporary files (TMPDIR), or {MORE_FILES}"

Serve = Callable[[Any], Any]
T = TypeVar("T")


class WorkerLost(MeasureError):
    """A worker died, hung, or failed with its state unknown. A new worker may succeed."""


def tried(ask: Callable[[], T]) -> T:
    """What `ask` returns, called up to TRIES times while workers are lost. Raises WorkerLost."""
    for _ in range(TRIES - 1):
        with suppress(WorkerLost):
            return ask()
    return ask()


class Worker:
    """One process that serves `target` ("module:function"). Its output goes to a file, for error messages.

    Raises MeasureError where the system allows no more processes or open files, or has no place for temporary files.
    """

    def __init__(self, target: str, arguments: tuple[Any, ...], environment: Mapping[str, str], room: int) -> None:
        self.stopped = False  # by us
        with ExitStack() as opened:
            with _system_errors(MORE_PROCESSES):
                self.connection, theirs = map(opened.enter_context, Pipe())
            with _system_errors(OTHER_TEMPORARY):
                self.output = opened.enter_context(tempfile.TemporaryFile())
            with _system_errors(MORE_PROCESSES):
                self.process = _start(target, theirs.fileno(), self.output, environment)
            opened.pop_all()  # closed with the worker
        theirs.close()
        try:
            self.send(arguments, room)
        except WorkerLost:
            self.close()
            raise

    def send(self, message: Any, room: int) -> None:
        """Send a message, for which the worker may take `room` bytes more than it holds."""
        try:
            self.connection.send((room, message))
        except OSError:
            raise WorkerLost(self.death()) from None

    def receive(self) -> Any:
        """The next answer. Raises WorkerLost, or MeasureError if the worker reports that it cannot serve at all."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise WorkerLost(self.death()) from None
        except Exception as error:  # a broken process may write anything
            raise WorkerLost(f"worker gave an answer that cannot be read ({first_line(error)})") from None
        if kind == "refused":
            raise MeasureError(value)
        if kind == "failed":
            raise WorkerLost(value)
        return value

    def death(self) -> str:
        """How the process ended, and the last line it wrote."""
        try:
            code = self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "worker closed its pipe"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - 4096))
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        died = f"worker died ({how})" + (f": {lines[-1].strip():.200}" if lines else "")
        return f"out of memory: {died}" if self.killed(0) or "bad_alloc" in died else died

    def killed(self, seconds: float) -> bool:
        """Whether the process was killed, and not by us, so by the kernel, where memory ran out. Waits for its end that long."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds) == -signal.SIGKILL and not self.stopped
        return False

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self.output.close()

    def stop(self) -> None:
        self.stopped = True
        self.process.kill()

    def kill(self) -> None:
        self.stop()
        self.process.wait()


@contextmanager
def _system_errors(way_out: str) -> Iterator[None]:
    """Turn an OSError while a worker starts into a MeasureError with the way out: that of open files where these ran out."""
    try:
        yield
    except OSError as error:
        way_out = MORE_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else way_out
        raise MeasureError(f"no worker process can be started here: {error.strerror or error}; {way_out}") from None


def _start(target: str, pipe: int, output: IO[bytes], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """The process of a worker that answers over the file descriptor `pipe`."""
    module = "neuroshard.measure.workers.processes"
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", module, str(os.getpid()), str(pipe), target],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        pass_fds=[pipe],
        start_new_session=True,  # so that Ctrl-C reaches the parent only, which then closes its workers
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


class WorkerPool:
    """Workers that answer requests together. They start at the first request, and again after one of them was lost.

    `arguments` is called at every start and returns one tuple for each worker. No request takes longer than `timeout_seconds`,
    and no start longer than `startup_seconds`.
    """

    def __init__(
        self,
        target: str,
        arguments: Callable[[], Sequence[tuple[Any, ...]]],
        timeout_seconds: float,
        environment: Mapping[str, str] | None = None,
        startup_seconds: float = STARTUP_SECONDS,
    ) -> None:
        self.startup_seconds = startup_seconds
        self.target, self.arguments, self.environment = target, arguments, environment or {}
        self.timeout_seconds = timeout_seconds
        self.workers: list[Worker] = []

    def start(self) -> None:
        """Start the workers if they are not running, and wait until all are ready. Raises MeasureError, WorkerLost."""
        if self.workers:
            return
        try:
            started = self.arguments()
            room = _room(len(started))
            for arguments in started:
                self.workers.append(Worker(self.target, arguments, self.environment, room))
            gather(self.workers, self.startup_seconds)
        except BaseException:
            self.kill()
            raise

    def ask(self, message: Any, count: int | None = None) -> list[Any]:
        """Send a message to the first `count` workers (default: all), and gather their answers in order. Raises as `ask_each`."""
        self.start()
        return self.ask_each([message] * len(self.workers[:count]))

    def ask_each(self, messages: Sequence[Any]) -> list[Any]:
        """Send each message to another worker, and gather the answers in order.

        Raises WorkerLost if one died or the time is up. All workers are then replaced at the next request.
        """
        self.start()
        asked = self.workers[: len(messages)]
        try:
            room = _room(len(asked))
            for worker, message in zip(asked, messages, strict=True):
                worker.send(message, room)
            return gather(asked, self.timeout_seconds)
        except BaseException:
            self.kill()  # the others may still answer this request, so none of them can be used again
            raise

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.close()


def _room(workers: int) -> int:
    """Bytes for each of so many workers, of what is free now."""
    return int(system.available_bytes() * ROOM) // max(workers, 1)


def gather(workers: Sequence[Worker], timeout_seconds: float) -> list[Any]:
    """One answer of each worker, in order. The death of any worker is noticed at once."""
    deadline = time.monotonic() + timeout_seconds
    awaited: dict[Any, int] = {worker.connection: index for index, worker in enumerate(workers)}
    answers: list[Any] = [None] * len(workers)
    while awaited:
        ready = wait(list(awaited), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerLost(f"no answer within {timeout_seconds:g} s, so the worker was killed")
        for connection in ready:
            worker = workers[index := awaited.pop(connection)]
            # a worker may hang in the middle of an answer
            stop = threading.Timer(max(deadline - time.monotonic(), CLOSE_SECONDS), worker.stop)
            stop.start()
            try:
                answers[index] = worker.receive()
            except WorkerLost:
                # a rank says that it lost another before the end of that one shows
                if other := next((one for one in workers if one.killed(ENDS_SECONDS)), None):
                    raise WorkerLost(other.death()) from None
                raise
            finally:
                stop.cancel()
    return answers


def main(parent: int, descriptor: int, target: str) -> None:
    """The worker's side: make the callable that serves, report that it is ready, and answer until the pipe closes."""
    connection: Connection[Any, Any] = Connection(descriptor)
    _die_with(parent)

    def received() -> Any:
        room, message = connection.recv()
        system.take_no_more(room)
        return message

    try:
        module, _, function = target.partition(":")
        # importing torch and FBGEMM makes a million objects that stay: not to look for garbage among them, now and while
        # steps are timed, is an eighth of the start
        gc.disable()
        serve: Serve = getattr(importlib.import_module(module), function)(*received())
        gc.freeze()
        gc.enable()
        connection.send(("answer", None))
        while True:
            connection.send(("answer", serve(received())))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except NeuroshardError as error:
        connection.send(("refused", str(error)))
    except Exception as error:
        line = first_line(error)
        connection.send(("failed", f"out of memory ({line})" if out_of_memory(error) else line))
    # sys.exit could wait for ever for ranks of the process group that are gone
    os._exit(0)


def _die_with(parent: int) -> None:
    """Die with a killed parent, even while stuck in a collective, and at once if it was killed while this process started.

    Linux only; elsewhere the closed pipe ends the worker.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)


def first_line(error: BaseException) -> str:
    """Type and first line of an exception: `RuntimeError: CUDA error: an illegal memory access was encountered`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__


def out_of_memory(error: Exception) -> bool:
    """Whether this error of torch, CUDA or Python means that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text or "bad_alloc" in text
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
