"""The steps of a local run as processes: started without a shell, and never outliving the run.

KFP's own runner starts a step by `sh -ec`, with the path of Python pasted into the script: a path with a space, a quote or `$()`
breaks it or is executed. It also leaves a folder in $TMPDIR for every step, and the step itself when the runner is killed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from kfp.local import status, subprocess_task_handler

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 6.0  # for a step to keep what it measured
PARENT_SECONDS = 0.5
TIED = Path(__file__).with_name("tied.py")


class Stopped(Exception):
    """The run was asked to end by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Children:
    """The processes of a run. The first signal asks them to end, the second, or GRACE_SECONDS, kills them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler may interrupt who holds it
        self.running: set[subprocess.Popen[Any]] = set()
        self.stopped_by = 0

    def run(self, command: Sequence[str | Path], environment: Mapping[str, str], output: Any) -> int:
        """Run a command, pass every line of its stdout and stderr to `output`, and return its exit code. Raises Stopped."""
        process = self.start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for line in process.stdout or ():
            output(line)
        return self.wait(process)

    def start(
        self, command: Sequence[str | Path], environment: Mapping[str, str], **streams: Any
    ) -> "subprocess.Popen[str]":
        """Start a command in a session of its own, so that Ctrl-C reaches it through us alone. Raises Stopped."""
        with self.lock:
            self.check()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(TIED), str(os.getpid()), *map(str, command)],
                env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
                **streams,
            )
            self.running.add(process)
        if self.stopped_by:  # in between
            self._send(signal.SIGINT)
        return process

    def wait(self, process: "subprocess.Popen[str]") -> int:
        """The exit code of a process of ours, once it has ended. Raises Stopped."""
        code = process.wait()
        if process.stdout:
            process.stdout.close()
        with self.lock:
            self.running.discard(process)
        self.check()
        return code

    def check(self) -> None:
        if self.stopped_by:
            raise Stopped(self.stopped_by)

    def stop(self, number: int, _frame: FrameType | None = None) -> None:
        """The handler of SIGNALS."""
        if self.stopped_by:
            self._send(signal.SIGKILL)
            return
        self.stopped_by = number
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\nstopping ({signal.Signals(number).name}); once more ends at once\n".encode())
        self._send(signal.SIGINT)
        last = threading.Timer(GRACE_SECONDS, self._send, [signal.SIGKILL])
        last.daemon = True
        last.start()

    def listen(self) -> None:
        """Stop by any of SIGNALS from now on; one that is ignored, as under nohup, stays so.

        SIGINT is heard also where a script has put us in the background, and ignores it: who sends it wants an end.
        """
        for number in SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.stop)

    def close(self) -> None:
        """Kill what still runs."""
        self._send(signal.SIGKILL)
        for process in list(self.running):
            process.wait()

    def _send(self, number: int) -> None:
        with self.lock:
            for process in self.running:
                process.send_signal(number)  # nothing where it has ended


def watch_parent(parent: int) -> None:
    """End when our parent ends, or is interrupted alone: `make` does not forward signals to its children."""
    caught = _caught(parent)

    def watch() -> None:
        while True:
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(PARENT_SECONDS)
            # make takes its handler away when the signal comes, then waits for us
            gone = caught & ~_caught(parent)
            for number in (signal.SIGINT, signal.SIGHUP):
                if gone & 1 << (number - 1):
                    os.kill(os.getpid(), number)
                    return

    threading.Thread(target=watch, daemon=True).start()


def _caught(process: int) -> int:
    """Bits of the signals that a process catches; 0 where /proc does not say."""
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return 0


class StepProcess(subprocess_task_handler.SubprocessTaskHandler):
    """Does what the command of a step's container does: writes its source into a file, and runs kfp's executor on it."""

    children = Children()

    def run(self) -> Any:
        """Run the step to its end. Its output goes to `print`, which kfp has replaced by one that indents."""
        shell, flags, _script, source, *arguments = self.full_command
        if (shell, flags) != ("sh", "-ec"):
            raise RuntimeError(f"a step that is run by {shell} {flags}, not by sh -ec: kfp has changed its command")
        with tempfile.TemporaryDirectory(prefix="step-") as folder:
            module = Path(folder, "ephemeral_component.py")
            module.write_text(source, "utf-8")
            executor = ["-m", "kfp.dsl.executor_main", "--component_module_path", module, *arguments]
            try:
                code = self.children.run(
                    [sys.executable, "-P", *executor],
                    {**self.env_vars, "_KFP_RUNTIME": "true"},
                    lambda line: print(line, end=""),
                )
            except Stopped:
                return status.Status.FAILURE
        print("\n")
        return status.Status.FAILURE if code else status.Status.SUCCESS


def use_own_steps(children: Children) -> None:
    """Let kfp's SubprocessRunner start its steps as StepProcess does: kfp has no place to say so."""
    StepProcess.children = children
    subprocess_task_handler.SubprocessTaskHandler = StepProcess
