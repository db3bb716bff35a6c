"""`make run` on machines that this one is not: does it end well, what did it measure, is a plan live?

    make bench-machines                                  half an hour; --quick for the two that .ci/run tries
    make bench-machines ARGS="--only 'cache of 480 MiB' '1 core' --budget 3m"

Each row is a real run, `python -m pipelines.run_local`, in a folder of its own, on a simulated machine (tests/bench/simulating).
A row ends well when the run exits with 0, its plan is live and, where it trains, the trainer has trained. What cannot be
simulated here is skipped with the reason. Exits with 1 where a row did not end well.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from bench.publishing import page  # noqa: E402
from bench.simulating.machines import MACHINES, Launch, Machine, Skip  # noqa: E402
from neuroshard.client import load_plan  # noqa: E402
from neuroshard.core.errors import NeuroshardError  # noqa: E402
from neuroshard.costmodel.bundle import load_cost_model  # noqa: E402
from neuroshard.files.costs import read_costs  # noqa: E402
from neuroshard.files.plan import read_plan  # noqa: E402

MODEL = "mlperf-dlrm-dcnv2"
TIMEOUT_SECONDS = 1800.0


class Row(NamedTuple):
    """One simulated machine. `compute` and `all_to_all` count cases that were measured without an error."""

    machine: str
    ended: str
    seconds: float | None = None
    compute: str = "-"
    all_to_all: str = "-"
    error: str = "-"
    stands_in: str = "-"
    live: str = "no"


def main() -> None:
    parser = page.parser(__doc__, "two cheap ones, one of them by a formula")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[machine.name for machine in MACHINES])
    parser.add_argument("--budget", help="to measure for [default: 40s, quick 20s]")
    parser.add_argument("--backend", help="cpu or synthetic [default: cpu, quick what each says]")
    parser.add_argument("--steps", type=int, default=5, help="of the trainer")
    parser.add_argument("--folder", type=Path, help="keep the runs there")
    options = page.asked(parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # control groups and busy loops go first
    options.budget = options.budget or ("20s" if options.quick else "40s")
    chosen = [
        machine
        for machine in MACHINES
        if (not options.only or machine.name in options.only) and (not options.quick or machine.quick)
    ]
    print(f"budget {options.budget}, trainer {options.steps} steps; times are of this machine\n")
    rows = []
    for machine in chosen:
        rows.append(tried(machine, options))
        if len(rows) == 1:
            print(line(Row._fields, heading=True), flush=True)
        print(line(cells(rows[-1])), flush=True)
    if options.publish:
        page.publish(
            "machines-runs",
            f"Does `make run` end well on machines that this one is not? {options.budget} to measure.",
            ["machine", "ended", "table sets measured", "error on unseen tables", "stands in"],
            [(row.machine, row.ended, row.compute, row.error, row.stands_in.replace("nothing", "-")) for row in rows],
            costs="measured",
        )
    sys.exit(any(row.ended != "well" and not row.ended.startswith("skipped") for row in rows))


def tried(machine: Machine, options: argparse.Namespace) -> Row:
    """One run on a simulated machine."""
    backend = options.backend or (machine.quick if options.quick else "cpu")
    with ExitStack() as stack:
        if options.folder:
            folder = options.folder.absolute() / re.sub(r"\W+", "-", machine.name)
            folder.mkdir(parents=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neuroshard-machines-")))
        launch = Launch(folder, stack)
        try:
            machine.prepare(launch)
        except Skip as skipped:
            return Row(machine.name, f"skipped: {skipped}")
        return finished(machine.name, launch, backend, options)


def finished(name: str, launch: Launch, backend: str, options: argparse.Namespace) -> Row:
    """What the run made, and how it ended."""
    out = launch.clone / "run" if launch.clone != ROOT else launch.folder / "run"
    arguments = ["--out", out, "--backend", backend, "--budget", options.budget, "--steps", options.steps]
    if options.quick or backend == "synthetic":
        arguments += ["--compute-cases", 120, "--collective-cases", 60]
    # what Python finds first is the clone's own, whatever is installed
    paths = [launch.environment.get("PYTHONPATH", ""), str(launch.clone / "components")]
    environment = {**os.environ, **launch.environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["NEUROSHARD_END_WITH_PARENT"] = str(os.getpid())
    python = launch.clone / ".venv" / "bin" / "python" if launch.clone != ROOT else Path(sys.executable)
    command = [*launch.prefix, str(python), "-m", "pipelines.run_local", *map(str, arguments)]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command,
            cwd=launch.clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Row(name, f"not within {TIMEOUT_SECONDS:.0f} s")
    seconds = time.monotonic() - began
    (launch.folder / "output.txt").write_text(ended.stdout + ended.stderr)
    row = Row(name, how(ended), seconds, **measured(out), live="yes" if is_live(out) else "no")
    if row.ended == "well" and (row.live == "no" or not list(out.glob("2*/train.json"))):
        row = row._replace(ended="well, but without a live plan or a trainer's summary")
    if any(launch.folder.rglob("executed")):
        row = row._replace(ended="a path was executed")
    return row


def how(ended: "subprocess.CompletedProcess[str]") -> str:
    if ended.returncode == 0:
        return "well"
    last = (ended.stderr.strip().splitlines() or ["(no output)"])[-1]
    code = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit {ended.returncode}"
    return f"{code}: {last.removeprefix('error: '):.160}"


def is_live(out: Path) -> bool:
    try:
        return bool(load_plan(str(out / "store"), MODEL).shards)
    except NeuroshardError:
        return False


def measured(out: Path) -> dict[str, str]:
    """The columns that a run's costs, cost model and plan fill."""
    found: dict[str, str] = {}
    for manifest in out.glob("2*/costs/costs.json"):  # none where the start took the whole budget
        costs = read_costs(manifest.parent)
        for column, rows in (("compute", costs.compute), ("all_to_all", costs.collective)):
            found[column] = str(len({case.case_id for case, cost in rows if cost.error is None}))
    for manifest in out.glob("2*/cost_model/model.json"):
        report = load_cost_model(manifest.parent).report
        error = report.unseen_tables_error
        found["error"] = "-" if error is None else f"{error:.1%}"
        found["stands_in"] = ", ".join(part.partition(" are those of ")[0] for part in report.stand_ins) or "nothing"
    for path in out.glob("2*/plan.json"):
        plan = read_plan(path)
        if plan.provenance.cost_model_backend == "analytic":
            found["stands_in"] = f"all of it: {plan.provenance.cost_model}"
    return found


def cells(row: Row) -> Sequence[str]:
    seconds = "-" if row.seconds is None else f"{row.seconds:.0f}"
    return (*row[:2], seconds, *row[3:])


def line(cells: Sequence[str], *, heading: bool = False) -> str:
    text = "| " + " | ".join(cell.replace("_", "-") if heading else cell for cell in cells) + " |"
    return f"{text}\n|{'---|' * len(cells)}" if heading else text


if __name__ == "__main__":
    main()
