"""Does a plan that is predicted to be faster train faster? A TorchRec trainer's steps under several planners' plans, in turns.

    make bench-release            (or: .venv/bin/python tests/bench/trainer.py --quick)

The whole chain on this CPU: tables are made up, measured with FBGEMM and gloo, a cost model is trained, and plans are searched
of several of its table sets. Then gloo processes, each with a core of its own, train by all plans of a table set at once: each
holds one model a plan, made and checked by the code of examples/train.py, and all models take their steps in turns, on the same
batches, in rounds that begin with another plan each. Ids are sent ahead of a step, as TorchRec's pipelines do. Tables are read a
lot and the dense part is one layer, so embeddings are most of a step.
"""

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_day.stages import Gain, gain
from bench.publishing import page
from helpers.gloo import on_ranks
from helpers.restart import restart_with
from neuroshard.core.table import Table
from neuroshard.core.value import decode_json
from neuroshard.costmodel.protocol import Floats
from neuroshard.files.plan import read_plan, write_plan
from neuroshard.files.tables import write_tables
from neuroshard.measure.real_devices import kept_memory

ROOT = Path(__file__).resolve().parents[2]
MEMORY, BATCH_SIZE = "256MiB", 8192
OURS, TORCHREC = "local-search", "TorchRec's planner"
HEURISTICS = ("size", "dim", "lookup", "size-lookup", "random")
APART = 0.1  # plans predicted to differ by so much, of any two planners, must be told apart
BATCHES = 4  # of a table set, in turns


class Effort(NamedTuple):
    """How much of everything. Cases are measured until `budget`; each plan takes `steps` in each round."""

    budget: str
    compute_cases: int
    collective_cases: int
    table_sets: int
    rounds: int
    steps: int


FULL, QUICK = Effort("240s", 1500, 60, 6, 10, 5), Effort("20s", 100, 20, 1, 3, 5)


class Trained(NamedTuple):
    """Plans of a table set in the trainer: ms by round of a step, and of its embeddings alone on the slowest rank."""

    step_ms: dict[str, Floats]
    embeddings_ms: dict[str, Floats]


class Raced(NamedTuple):
    """A table set's plans, what they are predicted to take, what they took, and what `evaluate` says of ours."""

    predicted_ms: dict[str, float]
    trained: Trained
    evaluated_ms: float


def main() -> None:
    parser = page.parser(__doc__, "a tenth of it or so, to see that it runs")
    parser.add_argument("--processes", type=int, default=2, help="ranks that train, each a gloo process [2]")
    parser.add_argument("--seed", type=int, default=0, help="of the table sets [0]")
    options = page.asked(parser)
    # As `neuroshard measure` does, and as a GPU's allocator: by default half of a step on a CPU goes into new pages of memory.
    # glibc reads it when a process starts. The planner's plan is the same in every run (bench/searching/peers_torchrec.py).
    restart_with({**kept_memory(os.environ), "PYTHONHASHSEED": "0"})
    effort = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        pool = make_tables(60, options.seed)
        learn(folder, pool, effort, options.processes)
        raced = []
        for index in range(effort.table_sets):
            raced.append(race(folder / str(index), pool, index, effort, options.processes))
            print(told(index, raced[-1]), flush=True)
    report(raced, effort, options.processes, publishing=options.publish)


def report(raced: Sequence[Raced], effort: Effort, processes: int, *, publishing: bool) -> None:
    """The two tables: plans of each planner against ours, and what is predicted against what trains."""
    cores = len(os.sched_getaffinity(0))
    where = f"{len(raced)} sets of 24 tables, {processes} gloo processes on {cores} cores, batch {BATCH_SIZE:,}"
    columns = ["plans of", "table sets", "a step: mean and interval", "embeddings alone", "predicted, of embeddings"]
    rows: list[Sequence[str]] = [row for name in planners(raced) if (row := against_ours(raced, name))]
    apart = far_apart(raced)
    if apart is not None:
        rows.append(apart)
    question = (
        f"Does the plan that is predicted to be faster train faster? Time over that of our plan, {where}, "
        f"{effort.rounds} rounds of {effort.steps} steps in turns; 95 % intervals by bootstrap."
    )
    page.show("trainer-steps", question, columns, rows, "measured", published=publishing)
    share = [float(np.median(one.trained.embeddings_ms[OURS]) / np.median(one.trained.step_ms[OURS])) for one in raced]
    ratios = {
        "predicted / embeddings": [
            one.predicted_ms[OURS] / float(np.median(one.trained.embeddings_ms[OURS])) for one in raced
        ],
        "run by `evaluate` / embeddings": [
            one.evaluated_ms / float(np.median(one.trained.embeddings_ms[OURS])) for one in raced
        ],
    }
    seen: list[Sequence[str]] = [
        (name, f"{statistics.mean(each):.2f}", f"{min(each):.2f}", f"{max(each):.2f}") for name, each in ratios.items()
    ]
    seen.append(("embeddings / whole step", *(f"{of(share):.2f}" for of in (statistics.mean, min, max))))
    question = f"Is what is predicted, and what `evaluate` runs, what the trainer sees? Our plans of {where}."
    columns = ["ratio of the slowest ranks' ms", "mean", "least", "most"]
    page.show("trainer-agreement", question, columns, seen, "measured", published=publishing)


def planners(raced: Sequence[Raced]) -> list[str]:
    """All but ours."""
    return [name for name in dict.fromkeys(name for one in raced for name in one.predicted_ms) if name != OURS]


def against_ours(raced: Sequence[Raced], name: str) -> tuple[str, ...] | None:
    """A row: how much longer plans of this planner take, as trained and as predicted."""
    both = [one for one in raced if name in one.predicted_ms]
    if not both:
        return None
    step, alone = (gain([getattr(one.trained, what) for one in both], OURS, name) for what in Trained._fields)
    predicted = statistics.mean(one.predicted_ms[name] / one.predicted_ms[OURS] - 1 for one in both)
    return name, f"{len(both)}", str(step), str(alone), f"{predicted:+.1%}"


def far_apart(raced: Sequence[Raced]) -> tuple[str, ...] | None:
    """A row of all pairs of plans of a table set that are predicted to differ by `APART` or more, slower over faster."""
    pairs = [
        (one, slow, fast)
        for one in raced
        for slow, ms in one.predicted_ms.items()
        for fast, least in one.predicted_ms.items()
        if ms >= (1 + APART) * least
    ]
    if not pairs:
        return None
    gains: list[Gain] = []
    for what in Trained._fields:
        sides = [
            {"slow": getattr(p.trained, what)[slow], "fast": getattr(p.trained, what)[fast]} for p, slow, fast in pairs
        ]
        gains.append(gain(sides, "fast", "slow"))
    won = sum(np.median(p.trained.step_ms[slow]) > np.median(p.trained.step_ms[fast]) for p, slow, fast in pairs)
    predicted = statistics.mean(p.predicted_ms[slow] / p.predicted_ms[fast] - 1 for p, slow, fast in pairs)
    what = f"any two predicted {APART:.0%} apart: the slower over the faster, slower in {won} of {len(pairs)} pairs"
    return what, f"{len({id(p) for p, _, _ in pairs})}", str(gains[0]), str(gains[1]), f"{predicted:+.1%}"


def told(index: int, one: Raced) -> str:
    """A table set's figures, as they come."""
    each = ", ".join(
        f"{name} {np.median(one.trained.step_ms[name]):.1f} ({np.median(one.trained.embeddings_ms[name]):.1f}; {ms:.1f})"
        for name, ms in one.predicted_ms.items()
    )
    return f"table set {index}, ms of a step (embeddings; predicted): {each}; evaluate: {one.evaluated_ms:.1f}"


def make_tables(count: int, seed: int) -> tuple[Table, ...]:
    """Tables as unlike as real ones: a few wide and often read, many small. None is so large that its rows would be cut off."""
    rng = np.random.default_rng([5, seed])
    tables = []
    for index in range(count):
        dim = int(rng.choice([16, 32, 64, 128], p=[0.35, 0.3, 0.25, 0.1]))
        rows = int(min(10 ** rng.uniform(2, 5.3), 12 * 2**20 / (4 * dim)))
        pooling = round(float(min(rng.lognormal(2.0, 1.2), 100.0)), 1)
        tables.append(Table(name=f"t{index}", rows=rows, dim=dim, pooling_factor=max(pooling, 1.0)))
    return tuple(tables)


def learn(folder: Path, tables: tuple[Table, ...], effort: Effort, processes: int) -> None:
    """tables.json -> cases -> costs -> model, as typed."""
    write_tables(folder / "tables.json", tables)
    neuroshard(folder, "augment", "tables.json", "-o", "cases", "--devices", processes, "--memory", MEMORY, "--max-dim", 128,
        "--compute-cases", effort.compute_cases, "--collective-cases", effort.collective_cases)  # fmt: skip
    neuroshard(folder, "measure", "cases", "-o", "costs", "--backend", "cpu", "--batch-size", BATCH_SIZE, "--optimizer", "sgd",
        "--budget", effort.budget)  # fmt: skip
    neuroshard(folder, "pretrain", "costs", "-o", "model")


def race(folder: Path, pool: tuple[Table, ...], index: int, effort: Effort, processes: int) -> Raced:
    """A table set's plans: searched, trained in turns, and ours run by `evaluate`."""
    folder.mkdir()
    chosen = np.random.default_rng([6, index]).choice(len(pool), size=24, replace=False)
    write_tables(folder / "tables.json", tuple(pool[i] for i in sorted(chosen)))
    files = make_plans(folder, processes)
    predicted = {name: float(ms) for name, file in files.items() if (ms := read_plan(file).cost_ms) is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_ranks = on_ranks(processes, folder, train, {name: files[name] for name in predicted}, effort, timeout=900)
    neuroshard(folder, "evaluate", files[OURS], "--backend", "cpu", "--optimizer", "sgd", "-o", "evaluation.json")
    evaluation = decode_json((folder / "evaluation.json").read_bytes(), "evaluation")
    evaluated = max(sum(device["measured"].values()) for device in evaluation["devices"] if device["measured"])
    return Raced(predicted, of_ranks[0], evaluated)


def train(rank: int, files: Mapping[str, Path], effort: Effort) -> Trained:
    """One rank: a model for each plan, and their steps in turns."""
    import torch
    import torch.distributed as dist
    from torch import nn

    example = load_example()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    plans = {name: read_plan(file) for name, file in files.items()}
    tables = next(iter(plans.values())).task.tables
    collections = example.collections_of(None, next(iter(plans.values())), tables)
    torch.manual_seed(0)
    unsharded = example.Model(collections, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    batches = [example.make_batch(collections, BATCH_SIZE // dist.get_world_size(), generator) for _ in range(BATCHES)]
    models, asked = {}, argparse.Namespace(optimizer="sgd", learning_rate=0.1, batch_size=BATCH_SIZE)
    dense = nn.parallel.DistributedDataParallel(nn.Linear(sum(t.dim for t in tables), 1))
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    for name, plan in plans.items():
        models[name] = example.shard(example.Model(collections, torch.device("meta")), plan, asked)
        example.load_weights(models[name], unsharded)
        example.compare_first_forward(models[name], unsharded, batches[0][0], plan)

    def step(name: str, at: int) -> float:
        features, labels = batches[at % BATCHES]
        (look_up,) = example.send_ids(models[name], features)
        dist.barrier()
        began = time.perf_counter()
        (pooled,) = look_up()
        loss = nn.functional.binary_cross_entropy_with_logits(dense(pooled).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.barrier()
        return 1e3 * (time.perf_counter() - began)

    steps: dict[str, list[float]] = {name: [] for name in plans}
    slowest: dict[str, list[float]] = {name: [] for name in plans}
    names = list(plans)
    for round_ in range(1 + effort.rounds):  # the first warms up
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            steps[name].append(statistics.median(step(name, at) for at in range(effort.steps)))
            slowest[name].append(max(example.time_embeddings(models[name], batches[round_ % BATCHES][0], effort.steps)))
    return Trained(*({name: np.array(each[1:]) for name, each in ms.items()} for ms in (steps, slowest)))


def make_plans(folder: Path, processes: int) -> dict[str, Path]:
    """Each planner's plan of tables.json in `folder`, by the cost model beside it."""
    model = folder.parent / "model"

    def searched(algorithm: str) -> Path:
        out = folder / f"{algorithm}.json"
        neuroshard(folder, "search", "tables.json", "--model", model, "--devices", processes, "--memory", MEMORY, "-o", out,
            "--algorithm", algorithm)  # fmt: skip
        return out

    files = {name: searched(name) for name in (OURS, "neuroshard-2023", *HEURISTICS)}
    files[TORCHREC] = folder / "torchrec.json"
    # what is forked to train must not have run torch
    context = multiprocessing.get_context("spawn")
    planner = context.Process(target=plan_with_torchrec, args=(files[OURS], model, files[TORCHREC]))
    planner.start()
    planner.join()
    assert planner.exitcode == 0, "TorchRec's planner failed"
    return files


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
    from neuroshard.deploy.run import price

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
