"""DLRMv4's tables on 8, 16 and 32 ranks: our plans beside those of TorchRec's planner and of the benchmark's makers.

    make bench-sequences                          ten minutes; --quick for 8 ranks of B200 and a few steps

Every plan is priced by the same datasheet and weighed by the same ledger, with the skew that the makers saw (`--preset
mlperf-dlrmv4`), whatever its planner knew of it; with use_index_dedup off, and switched on by hand. Where `make test-next` made
.venv-next, TorchRec 1.9's planner is asked too. Then a scaled copy trains on gloo ranks (bench/training/sequences.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

with warnings.catch_warnings():  # FBGEMM warns about itself while it is imported
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.types import PlannerError

import neuroshard as ns  # noqa: E402
from bench.publishing import page  # noqa: E402
from bench.training import sequences  # noqa: E402
from helpers.restart import restart_with  # noqa: E402
from neuroshard.client.torchrec import from_torchrec  # noqa: E402
from neuroshard.core.plan import Shard, device_memory  # noqa: E402
from neuroshard.core.precision import CollectivePrecision  # noqa: E402
from neuroshard.core.table import Table  # noqa: E402
from neuroshard.core.task import ShardingTask  # noqa: E402
from neuroshard.core.topology import topology_of  # noqa: E402
from neuroshard.costmodel.analytic import DATASHEETS, analytic_model  # noqa: E402
from neuroshard.costmodel.pricing import price_shards  # noqa: E402

SAMPLES, A_HOST, CURED = 1024, 8, ("album_id", "artist_id")
KINDS = {"B200": "b200", "MI350X": "mi350x"}
NEXT = ROOT / ".venv-next" / "bin" / "python"
ASKED = "import sys; from bench import dlrmv4 as it; print(it.planned(*sys.argv[1:]))"
STEPS = 60
UNTOLD, OURS, WITHOUT = "ours, not told of access", "ours", "ours, without dedup"
Contenders = dict[str, tuple[ShardingTask, Sequence[Shard], float]]


class Priced(NamedTuple):
    """Of a plan: ms of the slowest rank, GB that the busiest sends and gets a step each way, GiB of the fullest, and of it."""

    ms: float
    sent_gb: float
    fullest_gib: float
    limit_gib: float

    @property
    def fits(self) -> str:
        return "yes" if self.fullest_gib <= self.limit_gib else "no"


def model(tables: Sequence[Table]) -> nn.Module:
    """The collection, on the meta device."""
    configs = [
        EmbeddingConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[feature.name for feature in table.features] or [f"{table.name}_ids"],
        )
        for table in tables
    ]
    return nn.ModuleDict({"sequences": EmbeddingCollection(tables=configs, device=torch.device("meta"))})


def planned(ranks: str, hbm_bytes: str, told: str) -> str:
    """The shards of TorchRec's planner as JSON, for another process."""
    shards = of_torchrec(ns.tables("mlperf-dlrmv4", quiet=True), int(ranks), int(hbm_bytes), told=bool(int(told)))
    return json.dumps([shard.model_dump() for shard in shards])


def of_next(ranks: int, hbm_bytes: int, *, told: bool) -> list[Shard]:
    """Those of the planner of the newer TorchRec."""
    paths = os.pathsep.join(str(ROOT / one) for one in ("components", "tests"))
    command = [str(NEXT), "-c", ASKED, str(ranks), str(hbm_bytes), str(int(told))]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    return [Shard(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def of_both(tables: Sequence[Table], ranks: int, hbm_bytes: int, *, told: bool) -> dict[str, Sequence[Shard]]:
    """The plans of TorchRec's planners, by their versions: one where both make the same."""
    found = of_torchrec(tables, ranks, hbm_bytes, told=told)
    if not NEXT.exists():
        return {"1.8": found}
    newer = of_next(ranks, hbm_bytes, told=told)
    return {"1.8 and 1.9": found} if newer == found else {"1.8": found, "1.9": newer}


def of_torchrec(tables: Sequence[Table], ranks: int, hbm_bytes: int, *, told: bool) -> list[Shard]:
    """The shards of TorchRec's planner, told the batch and the lookups of each feature, or nothing, as the makers do."""
    of, local = model(tables), min(ranks, A_HOST)
    constraints = {
        table.name: ParameterConstraints(
            compute_kernels=["fused"],  # in HBM, as ours
            pooling_factors=[f.pooling_factor for f in table.features] or [table.pooling_factor],
        )
        for table in tables
    }
    topology = Topology(ranks, "cuda", hbm_cap=hbm_bytes, local_world_size=local)
    said: dict[str, Any] = {"batch_size": SAMPLES, "constraints": constraints} if told else {}
    planner = EmbeddingShardingPlanner(topology=topology, **said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = planner.plan(of, [EmbeddingCollectionSharder()])
        plan = from_torchrec(
            theirs, of, device_memory_bytes=[2**50] * ranks, batch_size=ranks * SAMPLES, local_world_size=local
        )
    return list(plan.shards)


def task_of(tables: Sequence[Table], ranks: int, sheet: str) -> ShardingTask:
    """The makers' step on so many ranks of a datasheet, on hosts of 8: fp16 collectives, and TorchRec's usual pipeline."""
    return ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=(DATASHEETS[sheet].memory_mib * 2**20,) * ranks,
        batch_size=ranks * SAMPLES,
        pipeline="sparse-dist",
        step_ledger=1,
        allocator_share=0.9,
        collective_precision=CollectivePrecision(forward="fp16", backward="fp16"),
        topology=topology_of(ranks, A_HOST, A_HOST, None) if ranks > A_HOST else None,
    )


def in_rows(table: Table, ranks: int) -> list[Shard]:
    blocks = enumerate(table.row_blocks(ranks))
    return [
        Shard(table=table.name, row_offset=first, rows=rows, dim=table.dim, device=d) for d, (first, rows) in blocks
    ]


def cured(tables: Sequence[Table], ranks: int) -> list[Shard]:
    """Row-wise, but for two tables in 8 column shards: on the first ranks, and on the next where there are more."""
    found, shards = list[Shard](), min(ranks, A_HOST)
    for table in tables:
        if table.name not in CURED:
            found += in_rows(table, ranks)
            continue
        first, width = CURED.index(table.name) * shards % ranks, table.dim // shards
        found += [
            Shard(table=table.name, rows=table.rows, column_offset=n * width, dim=width, device=first + n)
            for n in range(shards)
        ]
    return found


def priced(task: ShardingTask, shards: Sequence[Shard], sheet: str) -> Priced:
    """Of shards of the task's tables, however full their ranks are."""
    prices = price_shards(analytic_model(sheet, task.batch_size), task, shards)
    assert prices is not None
    memory, parted = [one.total for one in device_memory(task, shards)], task.parted
    sent, widths = [0.0] * task.devices, {table.name: table for table in parted.tables}
    blocks = {(s.table, s.row_offset): widths[s.table] for s in shards}
    for shard in shards:
        table = blocks[shard.table, shard.row_offset]
        count = -(-table.rows // shard.rows)
        share = parted.lookup_share(table, shard.row_offset, shard.rows, count)
        of_lookups = shard.rows / table.rows if share is None else share
        sent[shard.device] += table.pooling_factor * of_lookups * shard.dim
    width = 2 if task.collective_precision else 4
    busiest = max(sent) * task.batch_size * width * (task.devices - 1) / task.devices
    return Priced(float(prices.total_ms.max()), busiest / 1e9, max(memory) / 2**30, task.device_memory_bytes[0] / 2**30)


def contenders(known: ShardingTask, sheet: str) -> Contenders:
    """By name: the task that says which ids are sent once, shards, and seconds of CPU that they took."""
    tables, ranks, hbm = known.tables, known.devices, known.device_memory_bytes[0]
    plans: dict[str, Callable[[], Mapping[str, Sequence[Shard]]]] = {
        "TorchRec's planner": lambda: of_both(tables, ranks, hbm, told=False),
        "TorchRec's planner, told pooling factors": lambda: of_both(tables, ranks, hbm, told=True),
        "all row-wise": lambda: {"": [shard for table in tables for shard in in_rows(table, ranks)]},
        "the makers' cure": lambda: {"": cured(tables, ranks)},
    }
    found, names = Contenders(), [table.name for table in tables]
    for name, made in plans.items():
        began = time.process_time()
        try:
            by_version = made()
        except PlannerError:
            continue
        took = time.process_time() - began
        for version, shards in by_version.items():
            whole = f"{name} ({version})" if version else name
            found[whole] = known, shards, took
            found[f"{whole}, dedup by hand"] = known.with_dedup(names), shards, took
    unsaid = [Table.parse({**t.model_dump(exclude={"access", "reuse_bins"})}, t.name) for t in tables]
    options: dict[str, Any] = {"devices": ranks, "memory": f"{hbm}B", "batch_size": known.batch_size}
    options |= {} if ranks <= A_HOST else {"domain": A_HOST, "local_world_size": A_HOST}
    for name, some in ((UNTOLD, unsaid), (OURS, tables), (WITHOUT, tables)):
        began, dedup = time.process_time(), "off" if name == WITHOUT else "auto"
        plan = ns.search(
            some, f"analytic:{sheet}", collective_precision="fp16", quiet=True, index_dedup=dedup, **options
        )
        found[name] = known.with_dedup(plan.held.sent_once), plan.shards, time.process_time() - began
    return found


def of_datasheets(tables: Sequence[Table], *, quick: bool) -> list[tuple[str, ...]]:
    """A row for each kind, number of ranks and plan."""
    rows = list[tuple[str, ...]]()
    for label, sheet in list(KINDS.items())[: 1 if quick else None]:
        for ranks in (8,) if quick else (8, 16, 32):
            task = task_of(tables, ranks, sheet)
            for name, (of, shards, took) in contenders(task, sheet).items():
                one = priced(of, shards, sheet)
                figures = (
                    f"{one.ms:.1f}",
                    f"{one.sent_gb:.2f}",
                    f"{one.fullest_gib:.0f} of {one.limit_gib:.0f}",
                    one.fits,
                )
                rows.append((label, str(ranks), name, *figures, f"{took:.1f}"))
    return rows


def on_gloo(tables: Sequence[Table], steps: int) -> list[tuple[str, ...]]:
    """A row for each plan of half as many B200s with twice the memory, run by a scaled copy."""
    task = task_of(tables, sequences.RANKS, "b200")
    twice = tuple(A_HOST // sequences.RANKS * nbytes for nbytes in task.device_memory_bytes)
    plans = contenders(task.model_copy(update={"device_memory_bytes": twice}), "b200")
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: sequences.copied(of, shards) for name, (of, shards, _) in plans.items()}
        ran = sequences.run(cases, Path(folder), steps)
    by_price = {name: f"{priced(of, shards, 'b200').ms:.1f}" for name, (of, shards, _) in plans.items()}
    return [(*row, by_price[row[0]]) for row in sequences.rows_of(ran, next(iter(plans)))]


def main() -> None:
    parser = page.parser(__doc__, "8 ranks of B200, and 6 steps")
    parser.add_argument("--only", default="priced,measured", help="some of them, separated by commas")
    options = page.asked(parser)
    restart_with({"PYTHONHASHSEED": "0"})  # the planner's plan is the same in every run
    tables, only = ns.tables("mlperf-dlrmv4", quiet=True), options.only.split(",")
    if "priced" in only:
        question = (
            "DLRMv4's tables (`--preset mlperf-dlrmv4`, 1,024 samples a rank, fp16 collectives, sparse-dist): what do the plans "
            "of TorchRec's planners and of the benchmark's makers cost, and ours? Priced with the makers' skew."
        )
        columns = "kind", "ranks", "plan", "ms", "GB sent", "fullest rank, GiB", "fits", "CPU s"
        rows = of_datasheets(tables, quick=options.quick)
        page.show("search-dlrmv4", question, columns, rows, "formula", published=options.publish)
    if "measured" in only:
        steps = 6 if options.quick else STEPS
        question = (
            f"Plans of DLRMv4's tables for {sequences.RANKS} B200, run on as many gloo ranks: a copy with a {sequences.ROWS}th "
            f"of the rows and samples and an eighth of the columns, embeddings alone, {steps} steps in turns on a busy machine "
            "(medians and quartiles of ratios)."
        )
        rows = on_gloo(tables, steps)
        page.show("trainer-dlrmv4", question, sequences.COLUMNS_SHOWN, rows, "measured", published=options.publish)


if __name__ == "__main__":
    main()
