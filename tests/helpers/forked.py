"""Workers that measure, forked: they share what this process has imported, where a new interpreter takes 5 s to import it."""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from multiprocessing.context import ForkContext
from typing import IO

from neuroshard.measure.workers import processes


class ForkedWorker:
    """What a pool asks of a worker's process, as subprocess.Popen has it."""

    def __init__(self, target: str, pipe: int, output: IO[bytes], environment: Mapping[str, str]) -> None:
        serving = (os.getpid(), target, pipe, output.fileno(), environment)
        self.process = ForkContext().Process(target=_serve, args=serving, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that other tests left: Python 3.12
            self.process.start()

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
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    os.closerange(3, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    processes.main(parent, pipe, target)
