"""What core/launches.py counts for a plan, against what TorchRec launches for it on gloo."""

import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.permute_pooled_embedding_modules_split import PermutePooledEmbeddingsSplit
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import embeddingbag

from helpers.gloo import on_ranks
from helpers.sharded import sharded, sharders_of
from helpers.torchrec_models import DIM, ROWS, module_of, random_shards, random_tables
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.launches import joined_again, launches
from neuroshard.core.plan import Plan, Provenance, Shard, sharding_of
from neuroshard.core.sharding import COLUMN_WISE, DATA_PARALLEL, GRID, ROW_WISE, SHARDINGS, TABLE_ROW_WISE
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.timing.fbgemm import TableBatchedEmbedding, fused_groups

pytestmark = pytest.mark.slow

MODELS, LOCAL_BATCH = 12, 3
COLLECTIVES = ("all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce", "all_gather")


def counting(counts: Counter[str]) -> None:
    """From here on, count calls of collectives and of operators."""

    def count(owner: object, name: str, as_name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: object, **named: object) -> object:
            counts[as_name] += 1
            return real(*arguments, **named)

        setattr(owner, name, counted)

    for name in COLLECTIVES:
        count(dist, name, name)
    for kind in (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen):
        count(kind, "forward", "operators")
    permute, concatenate = PermutePooledEmbeddingsSplit.forward, embeddingbag.construct_output_kt

    def permuted(self: PermutePooledEmbeddingsSplit, outputs: torch.Tensor) -> torch.Tensor:
        counts["reordered"] += outputs.shape[1]
        return permute(self, outputs)

    def concatenated(embeddings: list[torch.Tensor], *arguments: object, **named: object) -> object:
        counts["reordered"] += sum(each.shape[1] for each in embeddings) if len(embeddings) > 1 else 0
        return concatenate(embeddings, *arguments, **named)

    PermutePooledEmbeddingsSplit.forward = permuted
    embeddingbag.construct_output_kt = concatenated


def bytes_held(model: nn.Module) -> dict[str, int]:
    """Bytes of weights that the operators of a rank hold, and of their fused optimizers' state."""
    sharded: list[Any] = list(model.children())
    parts = [part for one in sharded for lookup in one._lookups for part in lookup.modules()]
    fused = [one for one in parts if isinstance(one, SplitTableBatchedEmbeddingBagsCodegen)]
    dense = [one for one in parts if isinstance(one, DenseTableBatchedEmbeddingBagsCodegen)]
    weights = [each for one in (*fused, *dense) for each in one.split_embedding_weights()]
    state = [each for one in fused for of_table in one.split_optimizer_states() for each in of_table]
    return {name: sum(each.nbytes for each in of) for name, of in (("weights", weights), ("state", state))}


def count_steps(rank: int, plans: list[Plan], optimizer: str) -> list[Counter[str]]:
    """What this rank launches in a step of each plan, and the bytes that it holds."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    counting(counts)
    found = []
    for plan in plans:
        unsharded = module_of(plan.task.tables)
        given = to_torchrec(plan, unsharded, optimizer="sgd" if optimizer == "sgd" else None)
        model = sharded(unsharded, given, sharders_of(optimizer, 0.1))
        counts.clear()
        total = torch.zeros(())
        for path, module in model.module.items():
            held = [table for table in plan.task.tables if table.module == path]
            names = [feature.name for table in held for feature in table.features]
            ids = torch.zeros(len(names) * LOCAL_BATCH * 2, dtype=torch.int64)
            weights = torch.ones(len(ids)) if held[0].weighted else None
            lengths = torch.full((len(names) * LOCAL_BATCH,), 2)
            output = module(KeyedJaggedTensor(keys=names, values=ids, lengths=lengths, weights=weights))
            total = total + sum(
                one.values().sum() for one in (output.values() if held[0].pooling == "none" else [output])
            )
        total.backward()
        found.append(Counter({**counts, **bytes_held(model.module)}))
    return found


# Rows over the two ranks of a domain: a host, or two hosts
@pytest.mark.parametrize(("ranks", "local_world_size", "pod"), [(2, 2, 1), (4, 2, 1), (4, 1, 2)])
def test_a_plan_launches_and_holds_what_was_counted_for_it(ranks, local_world_size, pod, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    monkeypatch.setenv("TORCHREC_RESOLVED_POD_SIZE", str(pod))
    rng = random.Random(7)
    plans = []
    for _ in range(MODELS):
        tables = random_tables(rng)
        shards, copied = random_shards(tables, ranks, 2, rng)
        task = ShardingTask(
            tables=tables,
            device_memory_bytes=(2**20,) * ranks,
            batch_size=LOCAL_BATCH * ranks,
            topology=Topology(domain=2, local_world_size=local_world_size),
        ).with_copies(copied)
        provenance = Provenance(neuroshard_version="0", algorithm="by hand")
        plans.append(Plan(task=task, shards=tuple(shards), provenance=provenance))

    # where a domain is several hosts, TorchRec cannot train a grid with state per row (core.sharding.Sharding.trains)
    optimizer = "rowwise_adagrad" if pod == 1 else "sgd"
    found = on_ranks(ranks, tmp_path, count_steps, plans, optimizer)

    in_order: list[float] = []  # columns that need not be put into order, since the ranks happen to hold them so
    for plan, *of_ranks in zip(plans, *found, strict=True):
        counted, memory, copied = (
            launches(plan.held, plan.shards),
            plan.device_memory(),
            plan.held.constraints.data_parallel,
        )
        copies = sum(table.rows * table.optimizer_bytes_per_row for table in plan.task.tables if table.name in copied)
        again = [joined_again(t, sharding_of(plan.held, t, plan.by_table()[t.name])) for t in plan.task.tables]
        sequences = plan.held.joined_columns + sum(again)
        for rank, counts in enumerate(of_ranks):
            assert counts.pop("weights") == memory[rank].weights
            assert counts.pop("state") == (memory[rank].optimizer - copies) * (pod == 1)
            assert counts.pop("operators", 0) == counted.operators[rank]
            in_order.append(counted.reordered - sequences - counts.pop("reordered", 0))
            assert counts.total() == counted.inputs + 2 * counted.outputs, (counts, plan.shards)
    assert len({plan.digest() for plan in plans}) == MODELS
    assert min(in_order) == 0
    assert in_order.count(0) >= MODELS * ranks / 2
    held = {sharding_of(p.held, t, p.by_table()[t.name]) for p in plans for t in p.task.tables}
    assert held == set(SHARDINGS) - ({TABLE_ROW_WISE, GRID} if ranks == 2 else set())


def test_of_a_sequence_row_blocks_and_column_shards_are_copied_once_more() -> None:
    table = Table(name="t", rows=8, dim=8, pooling_factor=3.0, pooling="none")
    again = [joined_again(table, held) for held in (ROW_WISE, COLUMN_WISE, DATA_PARALLEL)]
    assert again == [3 * 8, 3 * 8, 0]


OF_AN_OPERATOR = (
    "bounds_check_mode_int", "feature_table_map", "optimizer", "output_dtype", "pooling_mode", "stochastic_rounding", "use_cpu",
    "weights_precision",
)  # fmt: skip


def facts_of(operator: SplitTableBatchedEmbeddingBagsCodegen) -> dict[str, object]:
    return {name: getattr(operator, name) for name in OF_AN_OPERATOR}


def compare_operators(_: int, held: tuple[Table, ...], optimizer: str) -> tuple[list[object], list[object]]:
    """Facts of the operators that TorchRec makes of these tables of one collection, and of those that are measured."""
    task = ShardingTask(tables=held, device_memory_bytes=(2**20,), batch_size=8)
    shards = tuple(
        Shard(table=table.name, row_offset=0, rows=ROWS, column_offset=0, dim=DIM, device=0) for table in held
    )
    plan = to_torchrec(
        Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand")),
        whole := module_of(held),
    )
    made = sharded(whole, plan, sharders_of(optimizer, 0.01))
    lookups = [part for one in made.module.values() for lookup in one._lookups for part in lookup.modules()]
    theirs = [one for one in lookups if isinstance(one, SplitTableBatchedEmbeddingBagsCodegen)]
    sets = TableBatchedEmbedding("cpu", 0, MeasureSettings(batch_size=8, optimizer=optimizer), None, 2**20, 2**20)
    ours = [sets.operator(group, [table.rows for table in group]) for group in fused_groups(held)]
    return [facts_of(one) for one in theirs], [facts_of(one) for one in ours]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_what_is_measured_is_the_operator_that_torchrec_makes(pooling: str, optimizer: str, tmp_path: Path) -> None:
    """Checks of ids, types, pooling and the fused optimizer: what a plan is priced by is what its trainer runs."""
    held = tuple(
        Table(
            name=f"t{place}", module="m", rows=ROWS, dim=DIM, pooling_factor=2.0, pooling=pooling, element_bytes=width
        )
        for place, width in enumerate((4, 4, 2))
    )
    ((theirs, ours),) = on_ranks(1, tmp_path, compare_operators, held, optimizer)
    assert len(theirs) == 2
    assert sorted(map(str, theirs)) == sorted(map(str, ours))
