"""A TorchRec trainer's step time under our plan, under those of TorchRec's own planner, of the best heuristic, and of chance.

    make bench-release ARGS="--only trainer"            (or: .venv/bin/python tests/bench/trainer.py --quick)

The whole chain on this CPU: tables are made up, measured with FBGEMM and gloo, cost models trained, plans searched and put
live in a folder store. Then examples/train.py trains four gloo processes (--processes) by each plan in turn, several times, in
rounds that begin with another plan each. Every plan is of the same tables, batch, devices and memory. On fewer cores than
processes a step takes what all of them do, not what the slowest does: the most even plan gains nothing, and it is said.
"""

import argparse
import importlib.util
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.publishing.page import publish
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.value import decode_json
from neuroshard.files.plan import read_plan, write_plan
from neuroshard.files.tables import write_tables

ROOT = Path(__file__).resolve().parents[2]
MEMORY, BATCH_SIZE = "256MiB", 2048


class Effort(NamedTuple):
    """How much of everything. Cases are measured until `budget`."""

    budget: str
    compute_cases: int
    collective_cases: int
    rounds: int
    steps: int


FULL, QUICK = Effort("180s", 1200, 120, 5, 20), Effort("90s", 100, 40, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of it or so, to see that it runs")
    parser.add_argument("--only", default="", help="nothing is done unless this is in the word trainer")
    parser.add_argument("--processes", type=int, default=4, help="ranks that train, each a gloo process [4]")
    parser.add_argument("--publish", action="store_true", help="write the table into docs/benchmarks/, and the page")
    options = parser.parse_args()
    if options.publish and options.quick:
        parser.error("--publish is for whole runs, not for --quick")
    if options.only not in "trainer":
        return
    with tempfile.TemporaryDirectory() as folder:
        race(Path(folder), QUICK if options.quick else FULL, options.processes, publishing=options.publish)


def race(folder: Path, effort: Effort, processes: int, *, publishing: bool = False) -> None:
    began = time.monotonic()
    tables = make_tables()
    write_tables(folder / "tables.json", tables)
    measure(folder, effort, processes)
    plans = make_plans(folder, processes)
    heuristic = next(name for name in plans if name.startswith("best heuristic"))
    prepared = time.monotonic() - began

    steps: dict[str, list[float]] = {name: [] for name in plans}
    train = trainer(folder, effort)
    names = list(plans)
    for round_ in range(effort.rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            steps[name].append(train(name))

    ours, cores = statistics.median(steps["local-search"]), len(os.sched_getaffinity(0))
    print(f"| trainer, {processes} gloo processes on {cores} cores | median step, spread | predicted | against ours |")
    print("|---|---|---|---|")
    rows = []
    for name, measured in sorted(steps.items(), key=lambda item: statistics.median(item[1])):
        median, cost = statistics.median(measured), plans[name].cost_ms
        step, predicted = f"{median:.1f} ms ± {spread(measured):.1f}", "-" if cost is None else f"{cost:.2f} ms"
        rows.append((name, step, predicted))
        print(
            f"| {name} | {step} ({min(measured):.1f} to {max(measured):.1f}) | {predicted} | {median / ours - 1:+.1%} |"
        )
    if publishing:
        publish(
            "trainer-steps",
            f"Is a training step faster? {len(tables)} tables, {processes} gloo processes on {cores} cores, "
            f"batch {BATCH_SIZE:,}, {effort.rounds} times {effort.steps} steps a plan.",
            ["plan", "median step, spread of the runs", "predicted embedding cost"],
            rows,
            costs="measured",
        )
    print(
        f"\n{len(tables)} tables, batch {BATCH_SIZE:,}, each plan {effort.rounds} times {effort.steps} steps, in turn; a run's "
        f"figure is the median of its steps, the spread half the range between the quartiles of the runs. {heuristic} is the "
        f"best of five by the cost model. {prepared:.0f} s to measure, train and search, "
        f"{time.monotonic() - began:.0f} s in all."
        + (
            f" {processes} processes share {cores} cores: the sum of their work counts, not the slowest."
            * (processes > cores)
        ),
        flush=True,
    )


def spread(values: list[float]) -> float:
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return (quarters[2] - quarters[0]) / 2


def make_tables() -> tuple[Table, ...]:
    """24 tables as unlike as real ones: a few wide and often read, many small. 160 MiB, so that no row is cut off."""
    rng = np.random.default_rng(5)
    tables = []
    for index in range(24):
        dim = int(rng.choice([16, 32, 64, 128], p=[0.35, 0.3, 0.25, 0.1]))
        rows = int(min(10 ** rng.uniform(2, 5.3), 12 * 2**20 / (4 * dim)))
        pooling = round(float(min(rng.lognormal(1.0, 1.2), 60.0)), 1)
        tables.append(Table(name=f"t{index}", rows=rows, dim=dim, pooling_factor=max(pooling, 1.0)))
    return tuple(tables)


def measure(folder: Path, effort: Effort, processes: int) -> None:
    """tables.json -> cases -> costs -> model, as typed."""
    neuroshard(folder, "augment", "tables.json", "-o", "cases", "--devices", processes, "--memory", MEMORY, "--max-dim", 128,
        "--compute-cases", effort.compute_cases, "--collective-cases", effort.collective_cases)  # fmt: skip
    neuroshard(folder, "measure", "cases", "-o", "costs", "--backend", "cpu", "--batch-size", BATCH_SIZE, "--optimizer", "sgd",
        "--budget", effort.budget)  # fmt: skip
    neuroshard(folder, "pretrain", "costs", "-o", "model")


def make_plans(folder: Path, processes: int) -> dict[str, Plan]:
    """Each planner's plan, live under a name of its own in the folder's store."""

    def searched(algorithm: str) -> Path:
        out = folder / f"{algorithm}.json"
        neuroshard(folder, "search", "tables.json", "--model", "model", "--devices", processes, "--memory", MEMORY, "-o", out,
            "--algorithm", algorithm)  # fmt: skip
        return out

    files = {
        "local-search": searched("local-search"),
        "random": searched("random"),
        "torchrec": folder / "torchrec.json",
    }
    ours = read_plan(files["local-search"])
    costs = {b.algorithm: b.cost_ms for b in ours.baselines if b.cost_ms is not None and b.algorithm != "random"}
    best = min(costs, key=lambda name: costs[name])
    files[f"best heuristic ({best})"] = searched(best)
    # what is forked to train must not have run torch
    context = multiprocessing.get_context("spawn")
    planner = context.Process(
        target=plan_with_torchrec, args=(files["local-search"], folder / "model", files["torchrec"])
    )
    planner.start()
    planner.join()
    assert planner.exitcode == 0, "TorchRec's planner failed"
    for name, file in files.items():
        neuroshard(folder, "deploy", file, "--store", "store", "--name", model_name(name))
    return {name: read_plan(file) for name, file in files.items()}


def model_name(name: str) -> str:
    return re.sub(r"\W+", "-", name).strip("-")


def plan_with_torchrec(ours: Path, model: Path, out: Path) -> None:
    """The plan of TorchRec's planner for the task of our plan: told the true pooling factors, free to cut columns."""
    warnings.simplefilter("ignore")
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    from neuroshard.client.torchrec import from_torchrec
    from neuroshard.costmodel.bundle import load_cost_model
    from neuroshard.deploy.price import price

    task = read_plan(ours).task
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in task.tables
        ],
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=task.devices,
            local_world_size=task.devices,
            compute_device="cpu",
            ddr_cap=min(task.device_memory_bytes),
        ),
        batch_size=task.batch_size // task.devices,
        constraints={
            table.name: ParameterConstraints(
                sharding_types=["table_wise", "column_wise"],
                compute_kernels=["fused"],
                min_partition=16,
                pooling_factors=[table.pooling_factor],
            )
            for table in task.tables
        },
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    plan = from_torchrec(
        planner.plan(module, [EmbeddingBagCollectionSharder()]),
        module,
        device_memory_bytes=task.device_memory_bytes,
        batch_size=task.batch_size,
        tables=task.tables,
    )
    cost = price(plan, plan, load_cost_model(model))
    # of the slowest device only, which is all that is printed
    write_plan(out, plan.model_copy(update={"predicted_ms": None if cost is None else (cost,) * task.devices}))


def trainer(folder: Path, effort: Effort) -> Callable[[str], float]:
    """`train(name)`: examples/train.py by the live plan of that name; its median step in ms."""
    example = load_example()

    def train(name: str) -> float:
        summary, said = folder / "summary.json", folder / "train.txt"
        sys.argv = ["train.py", "--store", str(folder / "store"), "--name", model_name(name), "--steps", str(effort.steps),
            "--batch-size", str(BATCH_SIZE), "--summary", str(summary)]  # fmt: skip
        with said.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            code = example.main()
        assert code == 0, f"the trainer failed with {name}: {said.read_text()}"
        written = decode_json(summary.read_bytes(), "summary")
        assert written["first_forward_max_abs_difference"] == 0
        assert not written["capped_tables"], "a table was cut to fewer rows"
        return float(written["step_ms_median"])

    return train


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_example", ROOT / "examples" / "train.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrec and FBGEMM, while they are imported
        spec.loader.exec_module(module)
    return module


def neuroshard(folder: Path, *arguments: object) -> None:
    """The real command, in `folder`; what it says is shown only where it fails."""
    command = [sys.executable, "-m", "neuroshard", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"neuroshard {arguments[0]}: {done.stderr}"


if __name__ == "__main__":
    main()
