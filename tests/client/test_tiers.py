"""Plans with tables beyond HBM, with the real TorchRec: operators, caches, bytes, training, checkpoints and what is refused.

TorchRec groups tables on CPUs as on GPUs, but its operators then have no cache; FBGEMM's bytes are those of its operator on the
meta device.
"""

import inspect
import random
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from helpers.fbgemm_bytes import allocated
from helpers.gloo import on_ranks
from helpers.plans import NOW
from helpers.refusals import names, refused
from helpers.sharded import OPTIMIZERS, local_parts, sharded, sharders_of, table_of
from helpers.torchrec_models import module_of, random_shards, random_tables
from helpers.trainers import Saved, cut_plan
from neuroshard.client.checkpoint import load_resharded
from neuroshard.client.torchrec import NeuroShardPlanner, from_torchrec, to_torchrec
from neuroshard.core import plan as plans
from neuroshard.core.errors import InvalidInput, NewerFormat, UsageError
from neuroshard.core.launches import launches
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import BY_KERNEL, WAYS, Cache, Tier, TierBytes, load_factor
from neuroshard.core.topology import Topology
from neuroshard.core.value import canonical_json
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.optim.apply_optimizer_in_backward import (
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )

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
        sharders = sharders_of("rowwise_adagrad", 0.1, **sharder_params)
        held = sharded(whole, to_torchrec(plan, whole, sharders=sharders), sharders)
        configs = [
            emb._config
            for one in held.module.values()
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
    parts = [
        (Part(tables[name], rows, columns).as_table(), BY_KERNEL[kernel].name)
        for name, rows, columns, kernel in operator.shards
    ]
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
        rules, copied = plan.held.constraints.beyond_hbm, plan.held.constraints.data_parallel
        cached = {name: rule.cached_rows for name, rule in rules.items() if rule.cached_rows is not None}
        shards, tables = plan.by_table(), {table.name: table for table in plan.task.tables}
        memory, host = plan.device_memory(), [0] * (ranks // 2)
        slots = dict.fromkeys(cached, 0)
        all_rows = set()  # tables of which all rows are cached, by several shards of one operator, which rounds up once
        for rank, operators in enumerate(of_ranks):
            counted = launches(plan.held, plan.shards).operators[rank]
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
        sharders = sharders_of(optimizer)
        self.model = sharded(whole, to_torchrec(plan, whole, sharders=sharders), sharders)
        generator = torch.Generator().manual_seed(7)
        first = {table.name: torch.rand(table.rows, table.dim, generator=generator) for table in LEARNED}
        for key, place, part in local_parts(self.model.state_dict()):
            part.copy_(first[table_of(key)][place])

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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
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


def said(plan: Plan, **how: Any) -> list[str]:
    """What `to_torchrec` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_torchrec(plan, model(), **{"device_type": "cuda", "any_output_order": True, "optimizer": "sgd", **how})
    return [str(warning.message) for warning in caught]


def test_a_compute_kernel_given_for_a_plan_with_tiers_is_refused() -> None:
    for kernel in ("fused", "fused_uvm", "fused_uvm_caching"):
        with refused(UsageError, "compute_kernel", kernel, "3 tables", "user", "leave"), warnings.catch_warnings():
            warnings.simplefilter("error")
            to_torchrec(TIERED, model(), device_type="cuda", compute_kernel=kernel)


def test_ranks_on_cpus_are_warned_that_they_have_no_caches() -> None:
    [message] = said(TIERED, device_type="cpu")
    assert all(names(message, fact) for fact in ("3 tables", "user", "CPUs", "GPUs", "--host-memory"))
    assert said(TIERED) == []
    assert said(ALL_IN_HBM, device_type="cpu") == []


def test_a_trainer_that_prefetches_is_warned_of_caches_for_one_batch() -> None:
    searched_for = in_tiers(TIERED, {}, pipeline="sparse-dist")
    [message] = said(searched_for, pipeline="prefetch")
    assert all(names(message, fact) for fact in ("2 tables", "user", "two", "--pipeline prefetch"))
    [message] = said(in_tiers(TIERED, {}, pipeline="prefetch"), pipeline="sparse-dist")
    assert not names(message, "two")


@pytest.mark.parametrize("pipeline", ["none", "sparse-dist"])
def test_a_trainer_that_does_not_prefetch_is_warned_of_ms_that_are_hidden_no_more(pipeline: Any) -> None:
    hiding = in_tiers(TIERED, {}, pipeline="prefetch", dense_ms=12.5)
    [message] = said(hiding, pipeline=pipeline)
    assert all(names(message, fact) for fact in ("12.5 ms", "dense layers", f"--pipeline {pipeline}"))
    assert said(hiding, pipeline="prefetch") == []
    without = in_tiers(TIERED, {}, pipeline="prefetch")
    assert not any(names(message, "dense layers") for message in said(without, pipeline=pipeline))


@pytest.mark.parametrize("pipeline", [None, "none", "prefetch"])
def test_the_flag_of_prefetching_is_that_of_the_trainer(pipeline: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = to_torchrec(TIERED, model(), device_type="cuda", pipeline=pipeline).plan["sparse"]["user"]
    assert given.cache_params.prefetch_pipeline is (True if pipeline == "prefetch" else None)


def test_locks_of_prefetching_that_do_not_fit_are_refused() -> None:
    prefetching = in_tiers(TIERED, {}, pipeline="prefetch")
    for locked, plain in zip(prefetching.device_memory(), TIERED.device_memory(), strict=True):
        assert locked.weights - plain.weights == 4 * (96 + 32)  # rows of user's columns, and of a half of shop's rows
    need = prefetching.memory_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank_0 in (need[0], need[0] - 1):
            searched_for = in_tiers(TIERED, {}, pipeline="sparse-dist", device_memory_bytes=(rank_0, *need[1:]))
            with refused(InvalidInput, "rank 0", "search") if rank_0 < need[0] else nullcontext():
                to_torchrec(searched_for, model(), device_type="cuda", pipeline="prefetch")


def test_state_of_another_optimizer_that_the_host_does_not_hold_is_refused() -> None:
    """Adam's moments of tables beyond HBM are in host memory, and those of others in HBM."""
    elements = {table.name: table.rows * table.dim * 4 for table in LEARNED}
    beyond = elements["user"] + elements["shop"] + elements["page"]
    assert TIERED.host_memory() == (beyond,)
    most_of_word = max(TIERED.memory_bytes()) + 2 * elements["word"] + 1000
    enough = in_tiers(TIERED, {}, host_memory_bytes=3 * beyond, device_memory_bytes=(most_of_word,) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        to_torchrec(enough, model(), device_type="cuda", optimizer="adam")
    with refused(InvalidInput, "host 0", "adam", "--host-memory"):
        to_torchrec(
            in_tiers(enough, {}, host_memory_bytes=3 * beyond - 1), model(), device_type="cuda", optimizer="adam"
        )


def test_tables_with_other_optimizers_share_no_operator_if_they_are_cached() -> None:
    def with_two_rates(plan: Plan) -> list[str]:
        whole: Any = model()
        for name, rate in (("user", 0.1), ("shop", 0.2)):
            weight = whole["sparse"].embedding_bags[name].weight
            apply_optimizer_in_backward(RowWiseAdagrad, [weight], {"lr": rate})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            to_torchrec(plan, whole, device_type="cuda", any_output_order=True)
        return [str(w.message) for w in caught if "an operator for each" in str(w.message)]

    cuts: Any = {table.name: [(table.dim, 0)] for table in LEARNED}
    plan = cut_plan(LEARNED, 2, cuts, batch_size=12)
    assert len(with_two_rates(plan)) == 1
    others: Tiers = {"page": ("cached", 32), "word": ("cached", 32)}
    assert len(with_two_rates(in_tiers(plan, others))) == 1
    assert with_two_rates(in_tiers(plan, {**others, "user": ("cached", 32), "shop": ("cached", 32)})) == []


def test_one_operator_for_each_table_is_no_more_operators_for_cached_ones() -> None:
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params={"use_one_tbe_per_table": True})]
    plan = cut_plan(LEARNED, 2, {table.name: [(table.dim, 0)] for table in LEARNED}, batch_size=12)
    [message] = said(plan, sharders=sharders)
    assert names(message, "3 operators")
    [message] = said(in_tiers(plan, {"user": ("cached", 32), "shop": ("host", None)}), sharders=sharders)
    assert names(message, "2 operators")
    assert said(in_tiers(plan, {table.name: ("cached", 32) for table in LEARNED}), sharders=sharders) == []


def taken_over(host_memory_bytes: int | None = 2**30, pipeline: str | None = None, **fields: Any) -> Plan:
    """A plan of TorchRec's with one cached table that has other fields."""
    theirs: Any = to_torchrec(ALL_IN_HBM, model(), device_type="cuda", any_output_order=True)
    user = theirs.plan["sparse"]["user"]
    user.compute_kernel, user.cache_params = "fused_uvm_caching", CacheParams(load_factor=0.2)
    for field, value in fields.items():
        setattr(user, field, value)
    return from_torchrec(
        theirs,
        model(),
        device_memory_bytes=[2**20] * 2,
        host_memory_bytes=host_memory_bytes,
        batch_size=12,
        tables=LEARNED,
        pipeline=pipeline,
    )


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"cache_params": CacheParams(load_factor=0.0)}, ["0", "above 0"]),
        ({"cache_params": CacheParams(load_factor=1.5)}, ["1.5", "at most 1"]),
        ({"cache_params": CacheParams(load_factor=cast(Any, "0.2"))}, ["'0.2'", "a number above 0"]),
        ({"cache_params": CacheParams(load_factor=True)}, ["True", "a number above 0"]),
        ({"cache_params": CacheParams(load_factor=0.2, algorithm=CacheAlgorithm.LFU)}, ["LFU", "LRU"]),
        ({"cache_params": CacheParams(load_factor=0.2, precision=DataType.FP16)}, ["FP16", "32 bits"]),
        ({"cache_params": CacheParams(load_factor=0.2, prefetch_pipeline=True)}, ["prefetch_pipeline", "None"]),
        ({"pipeline": "prefetch"}, ["prefetch_pipeline", "prefetch"]),
        ({"enforce_hbm": True}, ["enforce_hbm", "fused"]),
        ({"host_memory_bytes": None}, ["fused_uvm_caching", "host_memory_bytes="]),
    ],
)  # fmt: skip
def test_a_cache_of_torchrec_s_that_is_no_plan_s_is_refused(fields: dict[str, Any], facts: list[str]) -> None:
    with refused(InvalidInput, "user", *facts):
        taken_over(**fields)


def test_a_cache_of_torchrec_s_is_taken_with_its_rows() -> None:
    plan = taken_over(cache_params=CacheParams(load_factor=0.2, precision=DataType.FP32))
    assert plan.held.constraints.beyond_hbm["user"].cached_rows == 96  # 80 of 400, in sets of 32
    assert plan.provenance.notes == ()
    full = taken_over(cache_params=CacheParams(load_factor=1.0))
    assert full.held.constraints.beyond_hbm["user"].cached_rows == 400


@pytest.mark.parametrize("params", [None, CacheParams(algorithm=CacheAlgorithm.LRU)])
def test_a_cache_without_a_load_factor_is_as_large_as_fbgemm_makes_it(params: CacheParams | None) -> None:
    default = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters["cache_load_factor"].default
    plan = taken_over(cache_params=params)
    said = taken_over(cache_params=CacheParams(load_factor=default, algorithm=CacheAlgorithm.LRU))
    assert plan.held.constraints.beyond_hbm == said.held.constraints.beyond_hbm
    [note] = plan.provenance.notes
    assert all(names(note, fact) for fact in ("user", default, "cache_load_factor"))


def test_tables_that_share_a_cache_in_torchrec_are_noted() -> None:
    def notes(*params: CacheParams) -> tuple[str, ...]:
        plan = cut_plan(LEARNED, 2, {table.name: [(table.dim, 0)] for table in LEARNED}, batch_size=12)
        theirs: Any = to_torchrec(plan, model(), device_type="cuda", any_output_order=True)
        for name, one in zip(("user", "shop"), params, strict=True):
            parameter = theirs.plan["sparse"][name]
            parameter.compute_kernel, parameter.cache_params = "fused_uvm_caching", one
        return from_torchrec(
            theirs, model(), device_memory_bytes=[2**20] * 2, host_memory_bytes=2**30, batch_size=12
        ).provenance.notes

    with refused(InvalidInput, "user", "shop", "no load factor"):
        notes(CacheParams(), CacheParams(load_factor=0.5))
    [note] = notes(CacheParams(load_factor=0.1), CacheParams(load_factor=0.5))
    assert all(names(note, fact) for fact in ("one cache", "user"))
    assert notes(CacheParams(load_factor=0.1, reserved_memory=1.0), CacheParams(load_factor=0.1)) == ()


def test_programs_that_know_no_tiers_refuse_a_plan_that_has_some_by_its_format(monkeypatch) -> None:
    monkeypatch.setattr(plans, "PLAN_FORMAT", 1)
    with refused(NewerFormat, "plan.json", "2", "upgrade"):
        Plan.from_json(canonical_json(TIERED.model_dump(mode="json")), "plan.json")


@pytest.mark.parametrize(
    ("tiers", "task", "facts"),
    [
        ({"user": ("cached", 401)}, {}, ["user", "400", "401"]),
        ({"user": ("host", None)}, {"host_memory_bytes": None}, ["user", "host", "--host-memory"]),
        ({"user": ("host", None)}, {"host_memory_bytes": 400 * 16 * 4 - 1}, ["host 0", "1", "hosts"]),
        ({"user": ("cached", None)}, {}, ["user", "cached_rows"]),
        ({"user": ("host", 32)}, {}, ["user", "32 cached_rows"]),
    ],
)  # fmt: skip
def test_a_plan_file_whose_tiers_cannot_be_is_refused(tiers: Tiers, task: dict[str, Any], facts: list[str]) -> None:
    held = ALL_IN_HBM.task.model_copy(update={"host_memory_bytes": 2**30, **task}).with_tiers(tiers)
    written = {**ALL_IN_HBM.model_dump(mode="json"), "task": held.model_dump(mode="json"), "task_digest": held.digest()}
    written["format_version"] = 2
    with refused(InvalidInput, "plan.json", *facts):
        Plan.from_json(canonical_json(written), "plan.json")


def train_on_variable_batches(_: int, plans: list[Plan]) -> list[list[float]]:
    """Losses under each plan of batches that hold another number of distinct samples for each feature."""
    warnings.simplefilter("ignore")
    found = []
    for plan in plans:
        trainer, losses, samples = Trainer(plan, "rowwise_adagrad"), [], 6
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            strides = torch.randint(1, samples + 1, (len(LEARNED),), generator=generator).tolist()
            ids = [
                torch.randint(table.rows, (2 * stride,), generator=generator)
                for table, stride in zip(LEARNED, strides, strict=True)
            ]
            of_sample = [torch.randint(stride, (samples,), generator=generator) for stride in strides]
            features = KeyedJaggedTensor(
                keys=[table.name for table in LEARNED],
                values=torch.cat(ids),
                lengths=torch.full((sum(strides),), 2),
                stride_per_key_per_rank=[[stride] for stride in strides],
                inverse_indices=([table.name for table in LEARNED], torch.stack(of_sample)),
            )
            pooled = trainer.model.module["sparse"](features).to_dict()
            loss = torch.stack([(value - 0.5).square().mean() for value in pooled.values()]).sum()
            loss.backward()
            losses.append(float(loss.detach()))
        found.append(losses)
    return found


@pytest.mark.slow
def test_variable_batches_train_the_same_in_every_tier(tmp_path: Path) -> None:
    """On CPUs TorchRec trains them with one operator a rank only: FBGEMM's takes no output that several share."""
    cuts: Any = {"user": [(16, 1)], "shop": [(8, 0)], "page": [(8, 0)], "word": [(16, 0)]}
    in_hbm = cut_plan(LEARNED, 2, cuts, batch_size=12)
    tiered = in_tiers(in_hbm, {"user": ("cached", 96), "shop": ("host", None)})
    for one, other in on_ranks(2, tmp_path, train_on_variable_batches, [in_hbm, tiered]):
        assert other == pytest.approx(one, rel=1e-6)
        assert one[-1] < one[0]
