"""A run that is killed, by whatever signal, ends its steps, and leaves nothing that the next run does not clean up."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from helpers.limits import HANGS
from helpers.processes import MARK, alive, needs_proc, new_mark, wait_until
from pipelines.run_local import make_folder, scratch

pytestmark = [needs_proc, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
# few cases, so that measuring soon begins, of so large a batch that it lasts more than an hour on an idle core: whatever
# lives on is at work
LONG = ["--compute-cases=600", "--collective-cases=400", "--batch-size=65536", "--budget=10h", "--steps=0"]
ENDS = HANGS / 3  # seconds


def as_at_a_terminal() -> None:
    """Heed the signals that a script or nohup, where one runs the tests, lets its children ignore."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """A run that measures this CPU with three workers and more, in folders of its own."""

    def __init__(self, folder: Path, command: list[str], options: list[str]) -> None:
        self.mark, self.out, self.temporary = new_mark(), folder / "out", folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.stderr = folder / f"stderr-{self.mark[MARK]}"
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, *options],
                cwd=ROOT,
                env={**os.environ, **self.mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                preexec_fn=as_at_a_terminal,
            )

    def wait_for_workers(self, count: int) -> None:
        assert wait_until(lambda: len([line for line in alive(self.mark) if "measure.worker" in line]) >= count, HANGS)

    def is_over(self) -> bool:
        return wait_until(lambda: not alive(self.mark), ENDS)

    def scratch(self) -> list[Path]:
        """What a run has left of its temporary files."""
        return [*self.temporary.iterdir(), *self.out.glob("*/.*")]


def options(out: Path) -> list[str]:
    return ["--out", str(out), *LONG]


PYTHON = [sys.executable, "-m", "pipelines.run_local"]
Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts runs in the test's folder, and kills those that are left at its end."""
    runs = []

    def start_one(command: Sequence[str] = PYTHON, arguments: Sequence[str] = ()) -> Run:
        runs.append(Run(tmp_path, [*command], [*arguments] or options(tmp_path / "out")))
        return runs[-1]

    yield start_one
    for run in runs:
        run.process.kill()
        run.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_run_alone_ends_its_step_and_all_workers(start: Start, number: signal.Signals) -> None:
    run = start()
    run.wait_for_workers(3)
    run.process.send_signal(number)
    assert run.is_over(), alive(run.mark)
    assert run.process.wait() == 128 + number
    lines = run.stderr.read_text().splitlines()
    assert lines[-1] == (f"stopped by {number.name}: its steps are ended; the next run goes on with what is measured")
    assert "Traceback" not in " ".join(lines)
    assert run.scratch() == []


def test_a_killed_run_takes_everything_with_it_and_the_next_cleans_up_after_it_alone(start: Start) -> None:
    run = start()
    run.wait_for_workers(3)
    [left] = run.out.glob("*/.scratch")
    with scratch(run.out, make_folder(run.out)):  # another run of the living one's folder
        assert left.exists()

    run.process.kill()
    run.process.wait()
    assert run.is_over(), alive(run.mark)
    assert run.scratch() == [left]
    with scratch(run.out, make_folder(run.out)):
        assert not left.exists()
    assert run.scratch() == []
    assert (left.parent / "log.txt").exists()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_make_alone_ends_the_run(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    installed = [f"BIN={Path(sys.executable).parent}", "-o", ".venv/run.done", "-o", ".venv/bin/python"]
    run = start(["make", "run", *installed], [f"ARGS={' '.join(options(tmp_path / 'out'))}"])
    run.wait_for_workers(3)
    run.process.send_signal(number)
    assert run.is_over(), alive(run.mark)
    run.process.wait()
    assert run.scratch() == []


def test_two_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.run_local.datetime", Noon)
        folders = [make_folder(tmp_path / "out") for _ in range(3)]
    assert [folder.name for folder in folders] == ["2025-11-23-120000", "2025-11-23-120000-2", "2025-11-23-120000-3"]


class Noon(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Noon":
        return cls(2025, 11, 23, 12, tzinfo=tz)
