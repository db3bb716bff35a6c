"""What core/launches.py counts for a plan, against what TorchRec launches for it on gloo."""

import random
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.permute_pooled_embedding_modules_split import PermutePooledEmbeddingsSplit
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, ShardingEnv, embeddingbag
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import DataType, PoolingType

from helpers.gloo import on_ranks
from helpers.plans import row_wise
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.launches import launches
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.timing.fbgemm import TableBatchedEmbedding, fused_groups

pytestmark = pytest.mark.slow

MODELS, RANKS, LOCAL_BATCH, ROWS, DIM = 20, 2, 3, 16, 8
COLLECTIVES = ("all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce", "all_gather")


def random_tables(rng: random.Random) -> tuple[Table, ...]:
    """Of up to four collections: pooled ones, weighted or not, and sequences."""
    tables = []
    for module in range(rng.randint(1, 4)):
        sequences = rng.random() < 0.3
        weighted = not sequences and rng.random() < 0.3
        for place in range(rng.randint(1, 4)):
            features = rng.choice([1, 1, 2])
            tables.append(
                Table.model_validate(
                    {
                        "name": f"m{module}t{place}",
                        "module": f"m{module}",
                        "rows": ROWS,
                        "dim": DIM,
                        "pooling": "none" if sequences else rng.choice(["sum", "sum", "mean"]),
                        "weighted": weighted,
                        "element_bytes": 4 if sequences else rng.choice([4, 2]),
                        "features": [
                            {"name": f"m{module}t{place}f{f}", "pooling_factor": 2.0} for f in range(features)
                        ],
                    }
                )
            )
    return tuple(tables)


def random_shards(tables: tuple[Table, ...], rng: random.Random) -> list[Shard]:
    """Whole, cut, row-wise or copied; means not row-wise, which TorchRec computes wrongly, and no copies of sequences."""
    shards: list[Shard] = []
    for table in tables:
        how = rng.choice(["whole", "cut", "rows", "copies"])
        if how == "rows" and table.pooling != "mean":
            shards += row_wise(table, RANKS)
        elif how == "copies" and table.pooling != "none":
            shards += [Shard(table=table.name, rows=ROWS, dim=DIM, device=rank) for rank in range(RANKS)]
        elif how == "cut":
            shards += [
                Shard(table=table.name, rows=ROWS, column_offset=at, dim=DIM // 2, device=rng.randrange(RANKS))
                for at in (0, DIM // 2)
            ]
        else:
            shards.append(Shard(table=table.name, rows=ROWS, dim=DIM, device=rng.randrange(RANKS)))
    return shards


def module_of(tables: tuple[Table, ...]) -> nn.Module:
    made, meta = nn.ModuleDict(), torch.device("meta")
    for path in dict.fromkeys(table.module for table in tables):
        held = [table for table in tables if table.module == path]
        shape = [
            {
                "name": t.name,
                "num_embeddings": t.rows,
                "embedding_dim": t.dim,
                "feature_names": [f.name for f in t.features],
            }
            | {"data_type": DataType.FP16 if t.element_bytes == 2 else DataType.FP32}
            for t in held
        ]
        if held[0].pooling == "none":
            made[path] = EmbeddingCollection(tables=[EmbeddingConfig(**one) for one in shape], device=meta)
        else:
            configs = [
                EmbeddingBagConfig(**one, pooling=PoolingType[table.pooling.upper()])
                for one, table in zip(shape, held, strict=True)
            ]
            made[path] = EmbeddingBagCollection(tables=configs, is_weighted=held[0].weighted, device=meta)
    return made


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


def count_steps(rank: int, plans: list[Plan]) -> list[Counter[str]]:
    """What this rank launches in a step of each plan."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    counting(counts)
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    found = []
    for plan in plans:
        unsharded = module_of(plan.task.tables)
        model = DistributedModelParallel(
            unsharded,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=to_torchrec(plan, unsharded),
            sharders=[
                EmbeddingBagCollectionSharder(fused_params=fused),
                EmbeddingCollectionSharder(fused_params=fused),
            ],
        )
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
        found.append(Counter(counts))
    return found


@pytest.mark.parametrize(("local_world_size", "pod"), [(2, 1), (1, 2)])
def test_table_row_wise_tables_launch_what_was_counted_for_them(local_world_size, pod, tmp_path, monkeypatch) -> None:
    """Rows over the two ranks of a domain, which is a host, or two hosts."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    monkeypatch.setenv("TORCHREC_RESOLVED_POD_SIZE", str(pod))
    ranks, plans = 4, []
    for count in (1, 3, 4):
        each = ({"name": f"t{i}", "features": [{"name": f"t{i}f", "pooling_factor": 2.0}]} for i in range(count))
        tables = tuple(Table.model_validate({**one, "module": "m", "rows": ROWS, "dim": DIM}) for one in each)
        places = [("t0", (2, 3)), ("t1", (0,)), ("t2", (0, 1, 2, 3))][:count]
        shards = [
            Shard(table=name, row_offset=place * ROWS // len(on), rows=ROWS // len(on), dim=DIM, device=device)
            for name, on in places
            for place, device in enumerate(on)
        ]
        shards += [  # t3, in a grid
            Shard(
                table="t3", row_offset=ROWS // 2 * (r % 2), rows=ROWS // 2, column_offset=4 * (r // 2), dim=4, device=r
            )
            for r in range(ranks * (count > 3))
        ]
        task = ShardingTask(
            tables=tables,
            device_memory_bytes=(2**20,) * ranks,
            batch_size=LOCAL_BATCH * ranks,
            topology=Topology(domain=2, local_world_size=local_world_size),
        )
        plans.append(
            Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
        )

    found = on_ranks(ranks, tmp_path, count_steps, plans)

    for plan, *of_ranks in zip(plans, *found, strict=True):
        counted = launches(plan.task, plan.shards)
        for rank, counts in enumerate(of_ranks):
            assert counts.pop("operators", 0) == counted.operators[rank]
            # the only table of a grid is in order whoever holds it
            assert counted.reordered - counts.pop("reordered", 0) == (DIM if len(plan.task.tables) == 4 else 0)
            assert counts.total() == counted.inputs + 2 * counted.outputs, (counts, plan.shards)
    assert [launches(p.task, p.shards).outputs for p in plans] == [2, 4, 6]


def test_a_plan_launches_what_was_counted_for_it(tmp_path) -> None:
    rng = random.Random(7)
    plans = []
    for _ in range(MODELS):
        tables = random_tables(rng)
        shards = random_shards(tables, rng)
        whole = Counter(s.table for s in shards for t in tables if (s.table, s.rows, s.dim) == (t.name, t.rows, t.dim))
        copied = [name for name, count in whole.items() if count > 1]
        task = ShardingTask(
            tables=tables,
            device_memory_bytes=(2**20,) * RANKS,
            batch_size=LOCAL_BATCH * RANKS,
            constraints=Constraints(tables=tuple(TableRule(table=name, data_parallel=True) for name in copied)),
        )
        provenance = Provenance(neuroshard_version="0", algorithm="by hand")
        plans.append(Plan(task=task, shards=tuple(shards), provenance=provenance))

    found = on_ranks(RANKS, tmp_path, count_steps, plans)

    in_order: list[float] = []  # columns that need not be put into order, since the ranks happen to hold them so
    for plan, *of_ranks in zip(plans, *found, strict=True):
        counted = launches(plan.task, plan.shards)
        for rank, counts in enumerate(of_ranks):
            operators = counts.pop("operators", 0)
            assert operators == counted.operators[rank]
            in_order.append(counted.reordered - counts.pop("reordered", 0))
            assert counts.total() == counted.inputs + 2 * counted.outputs, (counts, plan.shards)
    assert len({plan.digest() for plan in plans}) == MODELS
    assert min(in_order) == 0
    assert in_order.count(0) >= MODELS * RANKS * 3 / 4


OF_AN_OPERATOR = (
    "bounds_check_mode_int", "feature_table_map", "optimizer", "output_dtype", "pooling_mode", "stochastic_rounding", "use_cpu",
    "weights_precision",
)  # fmt: skip


def facts_of(operator: SplitTableBatchedEmbeddingBagsCodegen) -> dict[str, object]:
    return {name: getattr(operator, name) for name in OF_AN_OPERATOR}


def compare_operators(_: int, held: tuple[Table, ...], optimizer: str) -> tuple[list[object], list[object]]:
    """Facts of the operators that TorchRec makes of these tables of one collection, and of those that are measured."""
    sharder: object
    fused = {
        "optimizer": {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}[optimizer]
    }
    sharder = (EmbeddingCollectionSharder if held[0].pooling == "none" else EmbeddingBagCollectionSharder)(
        fused_params=fused
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    task = ShardingTask(tables=held, device_memory_bytes=(2**20,), batch_size=8)
    shards = tuple(
        Shard(table=table.name, row_offset=0, rows=ROWS, column_offset=0, dim=DIM, device=0) for table in held
    )
    plan = to_torchrec(
        Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand")),
        whole := module_of(held),
    )
    made = DistributedModelParallel(whole, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    lookups = [part for sharded in made.module.values() for lookup in sharded._lookups for part in lookup.modules()]
    theirs = [one for one in lookups if isinstance(one, SplitTableBatchedEmbeddingBagsCodegen)]
    sets = TableBatchedEmbedding("cpu", 0, MeasureSettings(batch_size=8, optimizer=optimizer), None, 2**20, 2**20)
    ours = [sets._operator(group, [table.rows for table in group]) for group in fused_groups(held)]
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
