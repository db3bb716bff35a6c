"""DLRMv4's tables on 8, 16 and 32 ranks: our plans beside those of TorchRec's planner and of the benchmark's makers.

    make bench-sequences                          three minutes; --quick for 8 ranks of B200

Every plan is priced by the same datasheet and weighed by the same ledger, with the skew that the makers saw (`--preset
mlperf-dlrmv4`), whatever its planner knew of it; with use_index_dedup off, and switched on by hand.
"""

import sys
import time
import warnings
from collections.abc import Sequence
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
from neuroshard.client.torchrec import from_torchrec  # noqa: E402
from neuroshard.core.plan import Shard, device_memory  # noqa: E402
from neuroshard.core.precision import CollectivePrecision  # noqa: E402
from neuroshard.core.table import Table  # noqa: E402
from neuroshard.core.task import ShardingTask  # noqa: E402
from neuroshard.core.topology import topology_of  # noqa: E402
from neuroshard.costmodel.analytic import DATASHEETS, analytic_model  # noqa: E402
from neuroshard.costmodel.pricing import price_shards  # noqa: E402

SAMPLES, COLUMNS, A_HOST, CURED = 1024, 512, 8, ("album_id", "artist_id")
KINDS = {"B200": "b200", "MI350X": "mi350x"}


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


def of_torchrec(tables: Sequence[Table], ranks: int, hbm_bytes: int, *, told: bool) -> list[Shard]:
    """The shards of TorchRec's planner, told the lookups of each feature or not."""
    of, local = model(tables), min(ranks, A_HOST)
    kernels = ["fused"]  # in HBM, as ours
    constraints = {
        table.name: ParameterConstraints(
            compute_kernels=kernels,
            pooling_factors=[f.pooling_factor for f in table.features] or [table.pooling_factor],
        )
        if told
        else ParameterConstraints(compute_kernels=kernels)
        for table in tables
    }
    topology = Topology(ranks, "cuda", hbm_cap=hbm_bytes, local_world_size=local)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=SAMPLES, constraints=constraints)
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
    found, width = list[Shard](), COLUMNS // A_HOST
    for table in tables:
        if table.name not in CURED:
            found += in_rows(table, ranks)
            continue
        first = CURED.index(table.name) * A_HOST % ranks
        found += [
            Shard(table=table.name, rows=table.rows, column_offset=n * width, dim=width, device=first + n)
            for n in range(A_HOST)
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


def contenders(known: ShardingTask, sheet: str) -> dict[str, tuple[ShardingTask, Sequence[Shard], float]]:
    """By name: the task that says which ids are sent once, shards, and seconds of CPU that they took."""
    tables, ranks, hbm = known.tables, known.devices, known.device_memory_bytes[0]
    plans = {
        "TorchRec's planner": lambda: of_torchrec(tables, ranks, hbm, told=False),
        "TorchRec's planner, told pooling factors": lambda: of_torchrec(tables, ranks, hbm, told=True),
        "all row-wise": lambda: [shard for table in tables for shard in in_rows(table, ranks)],
        "the makers' cure": lambda: cured(tables, ranks),
    }
    found, names = dict[str, tuple[ShardingTask, Sequence[Shard], float]](), [table.name for table in tables]
    for name, made in plans.items():
        began = time.process_time()
        try:
            shards = made()
        except PlannerError:
            continue
        took = time.process_time() - began
        found[name] = known, shards, took
        found[f"{name}, dedup by hand"] = known.with_dedup(names), shards, took
    for name, access in (("ours, not told of access", None), ("ours", "said")):
        some = (
            tables
            if access
            else [Table.parse({**t.model_dump(exclude={"access", "reuse_bins"})}, t.name) for t in tables]
        )
        hosts: dict[str, Any] = {} if ranks <= A_HOST else {"domain": A_HOST, "local_world_size": A_HOST}
        began = time.process_time()
        plan = ns.search(
            some,
            f"analytic:{sheet}",
            devices=ranks,
            memory=f"{hbm}B",
            batch_size=known.batch_size,
            collective_precision="fp16",
            quiet=True,
            **hosts,
        )
        took = time.process_time() - began
        found[name] = known.with_dedup(plan.held.sent_once), plan.shards, took
    return found


def main() -> None:
    parser = page.parser(__doc__, "8 ranks of B200")
    options = page.asked(parser)
    tables = ns.tables("mlperf-dlrmv4", quiet=True)
    rows = []
    for label, sheet in list(KINDS.items())[: 1 if options.quick else None]:
        for ranks in (8,) if options.quick else (8, 16, 32):
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
    columns = "kind", "ranks", "plan", "ms", "GB sent", "fullest rank, GiB", "fits", "CPU s"
    page.print_table(columns, rows)
    if options.publish:
        question = (
            "DLRMv4's tables (`--preset mlperf-dlrmv4`, 1,024 samples a rank, fp16 collectives, sparse-dist): what do the plans "
            "of TorchRec 1.8's planner and of the benchmark's makers cost, and ours? Priced with the makers' skew."
        )
        page.publish("search-dlrmv4", question, columns, rows, "formula")


if __name__ == "__main__":
    main()
