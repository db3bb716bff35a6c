"""A scaled copy of DLRMv4's tables on gloo ranks of this CPU, trained by plans of the real ones: steps in turns, and live bytes.

Rows and samples are a 128th of the real ones, columns an eighth, so that a rank's batch has the same share of repeats. Shards are
those of the real tables, scaled. Dense layers keep nothing: a step is that of embeddings. FBGEMM has no kernel of
`use_index_dedup` for CPUs; torch.unique stands for it.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from helpers.gloo import on_ranks
from helpers.step_cases import StepCase, batches, sharded_model
from neuroshard.client.peak_memory import peak_memory
from neuroshard.core.plan import Plan, Provenance, Shard, device_memory, peaks_of
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

RANKS, ROWS, COLUMNS = 4, 128, 8  # a copy has so many times fewer
LAWS = {"item_id": "zipf:4+96", "artist_id": "zipf:4.5+19.5", "album_id": "zipf:1.63+12.4"}
WARM_UP, PEAK_STEPS = 3, 3
COLUMNS_SHOWN = (
    "plan",
    "step, beside the first plan's",
    "CPU time of all ranks, beside it",
    "peak with weights, MiB",
    "beside it",
    "peak of a step, MiB",
    "by the ledger",
    "priced on B200, ms",
)


class Ran(NamedTuple):
    """Of a plan: ms of each step and of CPU of all ranks in it; and of each rank the bytes of its weights, and the most that
    lived beside them, measured and by the ledger."""

    steps_ms: list[float]
    cpu_ms: list[float]
    weights: list[int]
    measured: list[int]
    said: list[int]


def small(table: Table) -> Table:
    """The copy of a table. Laws whose hot rows are many have as many fewer; where few rows are hot, as few are."""
    fields = {
        "name": table.name,
        "rows": table.rows // ROWS,
        "dim": table.dim // COLUMNS,
        "pooling": "none",
        "module": "m",
    }
    features = [{"name": name, "pooling_factor": lookups} for name, lookups in lookups_of(table).items()]
    stateless = {"optimizer_bytes_per_row": 0, "optimizer_bytes_per_element": 0}
    return Table.parse({**fields, **stateless, "features": features, "access": LAWS.get(table.name)}, table.name)


def lookups_of(table: Table) -> dict[str, float]:
    return {one.name: one.pooling_factor for one in table.features} or {f"{table.name}_ids": table.pooling_factor}


def copied(task: ShardingTask, shards: Sequence[Shard]) -> StepCase:
    """A plan of the real tables, of their copies."""
    tables = {table.name: small(table) for table in task.tables}
    found = list[Shard]()
    for shard in shards:
        table, real = tables[shard.table], next(one for one in task.tables if one.name == shard.table)
        blocks = table.row_blocks(1 if shard.rows == real.rows else task.devices)
        first, rows = blocks[round(shard.row_offset * len(blocks) / real.rows)]
        sizes = {"row_offset": first, "rows": rows, "dim": shard.dim // COLUMNS}
        found.append(shard.model_copy(update={**sizes, "column_offset": shard.column_offset // COLUMNS}))
    ranks = task.devices
    of = ShardingTask(
        tables=tuple(tables.values()),
        device_memory_bytes=(2**40,) * ranks,
        batch_size=task.batch_size // ROWS,
        pipeline="none",
        step_ledger=1,
    ).with_dedup(task.sent_once)
    plan = Plan(task=of, shards=tuple(found), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    return StepCase(plan, "none", ranks)


def run(cases: Mapping[str, StepCase], folder: Path, steps: int) -> dict[str, Ran]:
    """Each case's steps, taken in turns on the same batches."""
    by_rank = on_ranks(RANKS, folder, _in_turns, dict(cases), steps, timeout=1800)
    return {
        name: Ran(
            [max(each) for each in zip(*(found[name][0] for found in by_rank), strict=True)],
            [sum(each) for each in zip(*(found[name][1] for found in by_rank), strict=True)],
            [memory.weights for memory in device_memory(case.plan.held, case.plan.shards)],
            [found[name][2] for found in by_rank],
            [one.nbytes for one in peaks_of(case.plan.held, case.plan.shards, "none", gloo=True)],
        )
        for name, case in cases.items()
    }


def _in_turns(rank: int, cases: Mapping[str, StepCase], steps: int) -> Any:
    models = {name: sharded_model(case) for name, case in cases.items()}
    task = next(iter(cases.values())).plan.task
    made = list(batches(task.tables, task.batch_size // RANKS, rank, WARM_UP + steps))
    names, times = list(cases), {name: (list[float](), list[float]()) for name in cases}
    for number, batch in enumerate(made):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            models[name](batch)[0].backward()
            spent = time.process_time() - cpu
            dist.barrier()
            if number >= WARM_UP:
                times[name][0].append((time.perf_counter() - began) * 1e3)
                times[name][1].append(spent * 1e3)
    peaks = {}
    for name, model in models.items():
        dist.barrier()
        with peak_memory() as peak:
            for batch in made[:PEAK_STEPS]:
                model(batch)[0].backward()
        peaks[name] = peak.nbytes
    return {name: (*times[name], peaks[name]) for name in names}


def rows_of(ran: Mapping[str, Ran], base: str) -> list[tuple[str, ...]]:
    """A row for each plan, beside that of `base`: ratios of steps of the same batch."""
    found, first = [], ran[base]
    for name, one in ran.items():
        step, cpu = (
            statistics.quantiles((a / b for a, b in zip(mine, its, strict=True)), n=4)
            for mine, its in ((one.steps_ms, first.steps_ms), (one.cpu_ms, first.cpu_ms))
        )
        whole, its = (max(map(sum, zip(of.weights, of.measured, strict=True))) for of in (one, first))
        peaks = [f"{max(each) / 2**20:.1f}" for each in (one.measured, one.said)]
        spread = f"{step[1]:.2f} ({step[0]:.2f} to {step[2]:.2f})"
        found.append((name, spread, f"{cpu[1]:.2f}", f"{whole / 2**20:.0f}", f"{whole / its:.2f}", *peaks))
    return found
