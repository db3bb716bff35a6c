"""Processes that are forked: they share what this one has imported. A new interpreter imports torch and TorchRec for 7 s."""

import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import IO, Any

from helpers.commands import Done
from helpers.limits import HANGS
from neuroshard.measure.workers import processes


def run_script(main: Callable[[], int], *arguments: object, cwd: Path, environment: Mapping[str, str]) -> "Done[str]":
    """A script by its `main`, with these arguments, as `python SCRIPT ...` runs it."""
    return run_scripts([main], *arguments, cwd=cwd, environments=[environment])[0]


def run_scripts(
    mains: Sequence[Callable[[], int]], *arguments: object, cwd: Path, environments: Sequence[Mapping[str, str]]
) -> "list[Done[str]]":
    """Such scripts at the same time, each in an environment of its own."""
    typed = ["script", *map(str, arguments)]
    with ExitStack() as files:
        streams = [[files.enter_context(tempfile.TemporaryFile("w+")) for _ in ("out", "err")] for _ in mains]
        processes = [
            _started(_run, main, typed, cwd, environment, *(file.fileno() for file in of), daemon=False)
            for main, environment, of in zip(mains, environments, streams, strict=True)
        ]
        try:
            for process in processes:
                process.join(HANGS)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            Done(typed, process.exitcode or 0, *map(_read, of)) for process, of in zip(processes, streams, strict=True)
        ]


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _run(main: Callable[[], int], typed: list[str], cwd: Path, environment: Mapping[str, str], *streams: int) -> None:
    _speak_to(*streams)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = typed
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)  # as Python has them outside pytest
    warnings.showwarning = lambda *said: print(warnings.formatwarning(*said[:4]), file=sys.stderr)
    sys.exit(main())


class ForkedWorker:
    """What a pool asks of a worker's process, as subprocess.Popen has it."""

    def __init__(self, target: str, pipe: int, output: IO[bytes], environment: Mapping[str, str]) -> None:
        serving = (os.getpid(), target, pipe, output.fileno(), environment)
        self.process = _started(_serve, *serving, daemon=True)

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def _serve(parent: int, target: str, pipe: int, output: int, environment: Mapping[str, str]) -> None:
    """As `python -W ignore -m neuroshard.measure.workers.processes` in a session of its own, with no file but the pipe."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _speak_to(output, output)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    processes.main(parent, pipe, target)


def _started(work: Callable[..., None], *arguments: Any, daemon: bool) -> ForkProcess:
    process = ForkContext().Process(target=work, args=arguments, daemon=daemon)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that other tests left: Python 3.12
        process.start()
    return process


def _speak_to(out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
