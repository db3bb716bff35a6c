"""Nights: two simulated months of faults and damaged files, and runs of the pipeline.

    make bench-nights                        an hour and a half
    make bench-nights ARGS=--quick           a quarter of an hour: two simulated weeks, and few kills
    make bench-nights ARGS="--only simulation --seed 7"

The simulation is nights in this process, on a formula's costs (nightly/). The runs are each a run of
KFP's local runner: what was measured, and which plan is live after. Their costs are the formula's too, and their fleet is of
nodes that a real API server listed (tests/fleet/nodes-recorded.json), with labels changed where a driver is. Everything else is
what runs every night: pipelines/neuroshard.yaml with its steps in processes of their own, and a store in a folder, or on a real
S3 server (rclone) that goes away.
"""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from bench.nightly import simulation, steps  # noqa: E402
from bench.publishing import page  # noqa: E402
from helpers.loopback import NETLOC, url  # noqa: E402
from helpers.nightly import age  # noqa: E402
from helpers.servers import KEY, SECRET, free_port, serving  # noqa: E402
from neuroshard.client import load_plan  # noqa: E402
from neuroshard.core.errors import NotFound  # noqa: E402

LISTED = json.loads((ROOT / "tests" / "fleet" / "nodes-recorded.json").read_text())["items"]
RECORDED = {one["metadata"]["name"]: one for one in LISTED}
H200, H100, A100 = ([RECORDED[name] for name in names] for names in (("h200-0", "h200-1"), ("h100-0",), ("mig-mixed",)))


def relabelled(nodes: Sequence[dict[str, Any]], driver: str) -> list[dict[str, Any]]:
    """The nodes after an update of their driver."""
    told = {"nvidia.com/cuda.driver-version.full": driver, "nvidia.com/cuda.driver-version.major": driver.split(".")[0]}
    return [{**one, "metadata": {**one["metadata"], "labels": {**one["metadata"]["labels"], **told}}} for one in nodes]


NEW_DRIVER = relabelled(H200, "580.65.06")
STAGES = ("survey", "augment", "measure", "pretrain", "plan")


class Night(NamedTuple):
    """How a run ended, what its steps were, in order, and what it printed."""

    succeeded: bool
    steps: list[str]
    log: str
    seconds: float

    @property
    def measured(self) -> list[str]:
        """The kinds that the survey found to measure, as the jobs name them."""
        return sorted(set(re.findall(r"measure on (\S+), by a formula", self.log)))


class Place:
    """A folder for one chain of nights: its store, its fleet and its models."""

    def __init__(self, folder: Path, store: str | None = None, env: dict[str, str] | None = None) -> None:
        self.folder, self.env = folder, env or {}
        self.store = store or str(folder / "store")
        folder.mkdir(parents=True, exist_ok=True)
        self.fleet: Sequence[dict[str, Any]] = H200
        self.models = [model("ads", "h200")]

    def night(self, at: Sequence[str] = (), do: Callable[[int], None] | None = None) -> Night:
        """One run. When a step of `at` begins for the first time, `do` is called with the process group of the run."""
        (self.folder / "nodes.json").write_text(json.dumps({"items": list(self.fleet)}))
        parameters = {
            "models": json.dumps(self.models),
            "store": self.store,
            "backend": "synthetic",
            "nodes": str(self.folder / "nodes.json"),
            "batch_size": 512,
            "compute_cases": 60,
            "collective_cases": 40,
            "max_error": 5.0,
            "single_writer": True,
        }
        began, lines, names = time.monotonic(), list[str](), list[str]()
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.setsid(), os.dup2(writing, 1), os.dup2(writing, 2), os.chdir(ROOT)
            os.environ.update(self.env, OMP_NUM_THREADS="1")
            os._exit(steps.ended(parameters, str(self.folder / "out")))
        os.close(writing)
        with open(reading) as said:
            for line in said:
                lines.append(line)
                if begun := re.search(r"Executing task .*?'(?:\x1b\[\d+m)?([\w-]+)", re.sub(r"\x1b\[\d+m", "", line)):
                    names.append(begun[1])
                    if do is not None and begun[1] in at and begun[1] not in names[:-1]:
                        do(child)
        succeeded = os.waitpid(child, 0)[1] == 0
        return Night(succeeded, names, "".join(lines), time.monotonic() - began)

    def live(self, name: str = "ads") -> str:
        """The digest of the plan that a trainer gets, or a dash."""
        try:
            return load_plan(self.store, name).digest()[:12]
        except NotFound:
            return "-"


def model(name: str, hardware: str, memory: str = "40GiB") -> dict[str, object]:
    return {"name": name, "tables": "mlperf-dlrm-dcnv2", "devices": 4, "memory": memory, "hardware": hardware}


def kill(group: int) -> None:
    time.sleep(0.4)  # into the step
    os.killpg(group, signal.SIGKILL)


COLUMNS = ["night", "run", "took", "measured", "plans searched", "after it"]


class Table:
    """The rows of the runs, printed as they come. `good` until a run that should end well does not."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.good = True
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")

    def row(self, what: str, night: Night, note: str, may_fail: bool = False) -> None:
        measured = ", ".join(night.measured) or "nothing"
        searched = sum(step.startswith("plan") for step in night.steps)  # of each model, and once where all wait
        self.good = self.good and (night.succeeded or may_fail)
        ended = "ended well" if night.succeeded else "killed" if may_fail else "FAILED"
        if ended == "FAILED" and (said := re.findall(r"neuroshard\.core\.errors\.(\w+: .{,100})", night.log)):
            note += f"; {said[-1]}"
        self.rows.append([what, ended, f"{night.seconds:.0f} s", measured, str(searched), note])
        print(f"| {' | '.join(self.rows[-1])} |", flush=True)


def main() -> None:
    parser = page.parser(__doc__, "two simulated weeks, and kills in measure and deploy only")
    parser.add_argument("--only", choices=("simulation", "runs"), help="one of the two")
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    options = page.asked(parser)
    with tempfile.TemporaryDirectory(prefix="neuroshard-nights-") as folder:
        scratch, good = Path(folder), True
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        if options.only in (None, "simulation"):
            weeks = 2 if options.quick else 9
            well, rows = quietly(lambda: simulation.show(scratch / "simulation", options.seed, weeks))
            good = good and well
            if options.publish:
                page.publish(
                    "nights-simulation",
                    "Is a night ever stuck or anything lost, in two simulated months of kills, clocks, fleets and versions?",
                    simulation.COLUMNS,
                    rows,
                    costs="formula",
                )
    if options.only in (None, "runs"):
        good = (table := runs(options.quick)).good and good
        if options.publish:
            page.publish(
                "nights-runs",
                "What do nights of the compiled pipeline do when the fleet changes, the store goes away, or they are killed?",
                ["night", "run", "measured", "after it"],
                [[row[0], row[1], row[3], row[5]] for row in table.rows if row[1] != "killed"],
                costs="formula",
            )
    sys.exit(None if good else "error: not every night could be gone on from")


def quietly(show: Callable[[], tuple[bool, list[list[str]]]]) -> tuple[bool, list[list[str]]]:
    """Without what the steps say on stderr, and without a disk's flushes, which take most of the time."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), patch("os.fsync"):
        return show()


def runs(quick: bool) -> Table:
    """Runs of the compiled pipeline."""
    table = Table()
    with tempfile.TemporaryDirectory(prefix="neuroshard-nights-") as scratch:
        changes(table, Path(scratch, "changes"))
        store_down(table, Path(scratch, "down"), seconds=60)
        two_at_once(table, Path(scratch, "two"))
        before = Place(Path(scratch, "before"))
        table.row("the night before the kills", before.night(), f"plan {before.live()}")
        for stage in ("measure", "plan") if quick else STAGES:
            killed(table, before, Path(scratch, f"killed-{stage}"), stage)
    return table


def changes(table: Table, folder: Path) -> None:
    """What a platform team sees over the months."""
    place = Place(folder)
    place.fleet = [*H200, *H100]
    table.row("the first", place.night(), f"plan {place.live()}")
    table.row("an unchanged fleet", place.night(), f"plan {place.live()}, searched anew")
    place.fleet = [*H200, *H100, *A100]
    table.row("a new kind of GPU, whole and as MIG slices", place.night(), f"plan {place.live()}")
    place.fleet = [*NEW_DRIVER, *H100, *A100]
    table.row("a driver update", place.night(), f"plan {place.live()}")
    place.fleet = [*NEW_DRIVER, *A100]
    place.models = [model("ads", "h200"), model("old", "h100")]
    table.row("a node pool removed", place.night(), f"plan {place.live()}; of that pool's model: {place.live('old')}")
    place.models += [model("feed", "A100-SXM4-80GB")]
    table.row("a model added", place.night(), f"plans {place.live()}, {place.live('old')}, {place.live('feed')}")


def store_down(table: Table, folder: Path, seconds: int = 7) -> None:
    """A real S3 server that is killed in the middle of a run, and comes back so many seconds later."""
    (folder / "buckets" / "plans").mkdir(parents=True)
    port = free_port()
    rclone = Path(sys.executable).with_name("rclone")
    command: list[object] = [rclone, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", f"{NETLOC}:{port}"]
    env = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": url(port), "AWS_REGION": "us"}
    with patch.dict(os.environ, env), ExitStack() as server:
        server.enter_context(serving([*command, folder / "buckets"], port))

        def away(_: int) -> None:
            server.close()
            time.sleep(seconds)
            server.enter_context(serving([*command, folder / "buckets"], port))

        place = Place(folder, "s3://plans/prefix", env)
        table.row(f"the store away for {seconds} s in each step", place.night(STAGES, away), f"plan {place.live()}")


def two_at_once(table: Table, folder: Path) -> None:
    """Two nights of one store begin together, as where a person starts one and the CronJob another."""
    places = [Place(folder / name, str(folder / "store")) for name in ("one", "other")]
    with ThreadPoolExecutor() as pool:
        for night in pool.map(Place.night, places):
            table.row("one of two nights at once", night, f"plan {places[0].live()}")
    table.row("after two nights at once", places[0].night(), f"plan {places[0].live()}")


def killed(table: Table, before: Place, folder: Path, stage: str) -> None:
    """A new driver is rolled out and less memory is asked for, the run is killed in `stage`, and run again."""
    shutil.copytree(before.folder, folder)
    place = Place(folder)
    place.fleet, place.models = NEW_DRIVER, [model("ads", "h200", "36GiB")]
    first, now = place.night([stage], kill), place.live()
    table.row(f"killed in {stage}", first, f"plan {now}{', as before' if now == before.live() else ''}", may_fail=True)
    age(Path(place.store), days=1)  # a killed run's leases last ten minutes
    table.row(f"killed in {stage}, and run again", place.night(), f"plan {place.live()}")


if __name__ == "__main__":
    main()
