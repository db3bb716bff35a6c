"""Plans with tables beyond HBM, with the real TorchRec: operators, caches, bytes, training, checkpoints and what is refused.

TorchRec groups tables on CPUs as on GPUs, but its operators then have no cache; FBGEMM's bytes are those of its operator on the
meta device.
"""

import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from helpers.fbgemm_bytes import allocated
from helpers.gloo import on_ranks
from helpers.plans import NOW
from helpers.torchrec_models import module_of, random_shards, random_tables
from helpers.trainers import Saved, cut_plan
from neuroshard.client.torchrec import NeuroShardPlanner, to_torchrec
from neuroshard.client.torchrec_optimizer import load_resharded
from neuroshard.core.launches import launches
from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import KERNELS, WAYS, Cache, Tier, TierBytes, load_factor
from neuroshard.core.topology import Topology
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore

TIERS: dict[str, Tier] = {kernel: tier for tier, kernel in KERNELS.items()}
BEYOND: tuple[Tier | None, ...] = (None, "cached", "cached", "host")
PLANS = 16
Tiers = Mapping[str, tuple[Tier | None, int | None]]


def in_tiers(plan: Plan, tiers: Tiers, **task: Any) -> Plan:
    """The same shards, of tables in these tiers."""
    held = plan.task.model_copy(update={"host_memory_bytes": 2**40, **task}).with_tiers(tiers)
    return Plan(task=ShardingTask.model_validate(held.model_dump()), shards=plan.shards, provenance=plan.provenance)


class Operator(NamedTuple):
    """One that TorchRec makes on a rank: of each shard its table, rows, columns and kernel; and the parameters of its cache."""

    shards: tuple[tuple[str, int, int, str], ...]
    load_factor: float | None
    algorithm: CacheAlgorithm | None
    prefetch: bool


def operators_of(_: int, plans: list[Plan], sharder_params: dict[str, Any]) -> list[list[Operator]]:
    """The operators that TorchRec makes on this rank for each plan."""
    warnings.simplefilter("ignore")
    found = []
    for plan in plans:
        whole = module_of(plan.task.tables)
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, **sharder_params}
        sharders: list[Any] = [
            EmbeddingBagCollectionSharder(fused_params=fused),
            EmbeddingCollectionSharder(fused_params=fused),
        ]
        sharded = DistributedModelParallel(
            whole,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=to_torchrec(plan, whole, sharders=sharders),
            sharders=sharders,
        )
        configs = [
            emb._config
            for one in sharded.module.values()
            for lookup in one._lookups
            for emb in getattr(lookup, "module", lookup)._emb_modules  # copies are in a DistributedDataParallel
        ]
        found.append(
            [
                Operator(
                    tuple(
                        (table.name, table.local_rows, table.local_cols, table.compute_kernel.value)
                        for table in config.embedding_tables
                    ),
                    config.fused_params.get("cache_load_factor"),
                    config.fused_params.get("cache_algorithm"),
                    bool(config.fused_params.get("prefetch_pipeline")),
                )
                for config in configs
            ]
        )
    return found


def drawn_plan(rng: random.Random, ranks: int) -> Plan:
    """Tables of several modules, kinds and tiers, held in any way that TorchRec has, but copied."""
    optimizer_bytes = dict(
        zip(("optimizer_bytes_per_row", "optimizer_bytes_per_element"), OPTIMIZER_BYTES["rowwise_adagrad"], strict=True)
    )
    tables = tuple(
        table.model_copy(update=optimizer_bytes)
        for table in random_tables(rng, rows=range(300, 3000), dims=(8, 16, 32))
    )
    shards, copied = random_shards(tables, ranks, 2, rng)
    task = ShardingTask(
        tables=tables,
        device_memory_bytes=(2**30,) * ranks,
        batch_size=8,
        pipeline=rng.choice([None, "sparse-dist", "prefetch"]),
        topology=Topology(domain=2, local_world_size=2),
        host_memory_bytes=2**30,
    ).with_copies(copied)
    tiers: dict[str, tuple[Tier | None, int | None]] = {}
    for table in tables:
        tier: Tier | None = None if table.name in copied else rng.choice(BEYOND)
        tiers[table.name] = tier, rng.randint(1, table.rows) if tier == "cached" else None
    plan = Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    return in_tiers(plan, tiers, host_memory_bytes=2**30)


def bytes_of(operator: Operator, plan: Plan) -> TierBytes:
    """What FBGEMM allocates for an operator on the meta device."""
    tables = {table.name: table for table in plan.task.tables}
    parts = [(tables[name].part(rows, columns), TIERS[kernel]) for name, rows, columns, kernel in operator.shards]
    cache = None
    if any(tier == "cached" for _, tier in parts):
        assert operator.load_factor is not None
        cache = Cache(operator.load_factor, prefetch=operator.prefetch)
    return allocated(parts, "rowwise_adagrad", cache)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_operators_caches_and_bytes_are_those_of_the_plan(ranks: int, tmp_path: Path, monkeypatch) -> None:
    """TorchRec groups tables into the operators that are counted, with the plan's load factors, whatever caches the sharders say;
    and FBGEMM allocates for them the bytes that the plan says, and caches of the plan's rows."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    rng = random.Random(ranks)
    plans = [drawn_plan(rng, ranks) for _ in range(PLANS)]
    sharders = {"cache_load_factor": 0.9, "cache_algorithm": CacheAlgorithm.LFU, "cache_reserved_memory": 7.0}

    made = on_ranks(ranks, tmp_path, operators_of, plans, sharders)

    seen = set()
    for plan, *of_ranks in zip(plans, *made, strict=True):
        rules, copied = plan.task.constraints.beyond_hbm, plan.task.constraints.data_parallel
        cached = {name: rule.cached_rows for name, rule in rules.items() if rule.cached_rows is not None}
        shards, tables = plan.by_table(), {table.name: table for table in plan.task.tables}
        memory, host = plan.device_memory(), [0] * (ranks // 2)
        slots = dict.fromkeys(cached, 0)
        all_rows = set()  # tables of which all rows are cached, by several shards of one operator, which rounds up once
        for rank, operators in enumerate(of_ranks):
            counted = launches(plan.task, plan.shards).operators[rank]
            fused = [one for one in operators if one.shards[0][3] != "dense"]
            assert len(operators) == counted, (operators, plan.shards)
            hbm = 0
            for one in fused:
                nbytes = bytes_of(one, plan)
                hbm += nbytes.hbm
                host[rank // 2] += nbytes.host
                names = {name for name, *_ in one.shards}
                if not names & cached.keys():
                    continue
                [name] = names
                wanted = load_factor(cached[name], tables[name].rows)
                assert one.load_factor == pytest.approx(wanted, rel=1e-12)
                assert one.algorithm is CacheAlgorithm.LRU
                assert one.prefetch == (plan.task.pipeline == "prefetch")
                assert {kernel for *_, kernel in one.shards} == {"fused_uvm_caching"}
                slots[name] += Cache(one.load_factor or 0).slots(sum(rows for _, rows, *_ in one.shards))
                if wanted == 1.0 and len(one.shards) > 1:
                    all_rows.add(name)
                in_blocks = any(shard.row_offset for shard in shards[name])
                seen.add((plan.task.pipeline, in_blocks, tables[name].pooling, tables[name].element_bytes))
            said = memory[rank].weights + memory[rank].optimizer - sum(tables[name].memory_bytes for name in copied)
            if all_rows:
                assert 0 <= said - hbm < WAYS * 200 * len(shards)
            else:
                assert said == hbm
        assert tuple(host) == plan.host_memory()
        for name, found in slots.items():
            columns = sum(shard.row_offset == 0 for shard in shards[name])  # each has the rows
            asked = cached[name] * columns
            parts = len(shards[name])
            if name not in all_rows:
                assert asked <= found < asked + WAYS * parts
    assert {pipeline for pipeline, *_ in seen} == {None, "sparse-dist", "prefetch"}
    assert {(rows, size) for _, rows, _, size in seen} == {(False, 4), (False, 2), (True, 4), (True, 2)}
    assert {pooling for *_, pooling, _ in seen} == {"sum", "mean", "none"}


LEARNED = tuple(
    Table(name=name, rows=rows, dim=dim, pooling_factor=2.0)
    for name, rows, dim in (("user", 400, 16), ("shop", 230, 8), ("page", 110, 8), ("word", 90, 16))
)
CUTS = {"user": [(8, 1), (8, 0)], "shop": [], "page": [(8, 0)], "word": [(16, 1)]}
OTHER_CUTS = {"user": [], "shop": [(4, 0), (4, 1)], "page": [(8, 1)], "word": [(16, 0)]}
ALL_IN_HBM = cut_plan(LEARNED, 2, CUTS, batch_size=12)
TIERED = in_tiers(
    ALL_IN_HBM, {"user": ("cached", 96), "shop": ("cached", 64), "page": ("host", None), "word": ("hbm", None)}
)
OTHER_TIERS = in_tiers(
    cut_plan(LEARNED, 2, OTHER_CUTS, batch_size=12),
    {"user": ("host", None), "shop": ("host", None), "page": ("cached", 32), "word": ("cached", 64)},
)
STEPS = 6
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def model() -> nn.Module:
    configs = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
        for t in LEARNED
    ]
    return nn.ModuleDict({"sparse": EmbeddingBagCollection(tables=configs, device=torch.device("meta"))})


class Trainer(Saved):
    """Trains the tables of a plan on a rank, from the same weights under every plan."""

    def __init__(self, plan: Plan, optimizer: str) -> None:
        whole = model()
        sharders: list[Any] = [
            EmbeddingBagCollectionSharder(fused_params={"optimizer": OPTIMIZERS[optimizer], "learning_rate": 0.05})
        ]
        self.model = DistributedModelParallel(
            whole,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=to_torchrec(plan, whole, sharders=sharders),
            sharders=sharders,
        )
        generator = torch.Generator().manual_seed(7)
        first = {table.name: torch.rand(table.rows, table.dim, generator=generator) for table in LEARNED}
        for name, value in self.model.state_dict().items():
            for part in value.local_shards():
                (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
                part.tensor.detach().copy_(first[name.split(".")[-2]][row : row + rows, column : column + columns])

    def train(self, first: int, end: int) -> list[float]:
        """The losses of both ranks together, step by step."""
        losses = []
        for step in range(first, end):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            ids = [torch.randint(table.rows, (12,), generator=generator) for table in LEARNED]
            lengths = torch.full((len(LEARNED) * 6,), 2)
            features = KeyedJaggedTensor(keys=[t.name for t in LEARNED], values=torch.cat(ids), lengths=lengths)
            pooled: dict[str, Tensor] = self.model.module["sparse"](features).to_dict()
            wanted = {t.name: torch.randn(6, t.dim, generator=generator) for t in LEARNED}
            loss = torch.stack([(pooled[name] - wanted[name]).square().mean() for name in wanted]).sum()
            loss.backward()
            mean = loss.detach() / 2
            dist.all_reduce(mean)
            losses.append(float(mean))
        return losses


def train_under(_: int, plans: list[Plan], optimizer: str) -> list[list[float]]:
    warnings.simplefilter("ignore")
    return [Trainer(plan, optimizer).train(0, STEPS) for plan in plans]


def go_on(_: int, old: Plan, new: Plan, optimizer: str, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of training that goes on under the old plan, and from its checkpoint under the new one."""
    warnings.simplefilter("ignore")
    trainer = Trainer(old, optimizer)
    trainer.train(0, STEPS)
    save(trainer.state(), checkpoint_id=folder)
    changed = Trainer(new, optimizer)
    changed.train(0, 1)  # what a model had before must not stay
    state = changed.state()
    load_resharded(state, folder, old_plan=old, new_plan=new)
    changed.model.fused_optimizer.load_state_dict(state["optimizer"])
    return trainer.train(STEPS, 2 * STEPS), changed.train(STEPS, 2 * STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_plan_with_tiers_trains_as_one_with_all_tables_in_hbm(optimizer: str, tmp_path: Path) -> None:
    for in_hbm, tiered, *_ in on_ranks(2, tmp_path, train_under, [ALL_IN_HBM, TIERED], optimizer):
        assert tiered == pytest.approx(in_hbm, rel=1e-6)
        assert len(set(tiered)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(TIERED, ALL_IN_HBM), (ALL_IN_HBM, TIERED), (TIERED, OTHER_TIERS)])
def test_a_checkpoint_goes_on_under_a_plan_of_other_tiers(old: Plan, new: Plan, tmp_path: Path) -> None:
    for uninterrupted, losses in on_ranks(2, tmp_path, go_on, old, new, "adagrad", tmp_path / "saved"):
        assert losses == pytest.approx(uninterrupted, rel=1e-5)


def train_the_live_plan(_: int, store: str) -> tuple[str, list[tuple[str, float | None]]]:
    warnings.simplefilter("ignore")
    planner = NeuroShardPlanner(store, "m")
    sharding_plan = planner.collective_plan(model(), [EmbeddingBagCollectionSharder()], dist.group.WORLD)
    assert planner.loaded is not None
    given = sharding_plan.plan["sparse"].values()
    return planner.loaded.digest(), [
        (one.compute_kernel, one.cache_params.load_factor if one.cache_params else None) for one in given
    ]


@pytest.mark.slow
def test_all_ranks_get_the_tiers_of_the_live_plan(store: FolderStore, tmp_path: Path) -> None:
    deploy(TIERED, store, "m", now=NOW)
    wanted = [
        ("fused_uvm_caching", load_factor(96, 400)),
        ("fused_uvm_caching", load_factor(64, 230)),
        ("fused_uvm", None),
        ("fused", None),
    ]
    assert on_ranks(2, tmp_path, train_the_live_plan, store.url) == [(TIERED.digest(), wanted)] * 2
