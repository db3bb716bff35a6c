"""NeuroShard's plans where TorchRec 1.9 makes its own: production, and dry runs beside TorchRec's. `make test-next` runs it."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import PoolingType

from helpers.drawn_plans import OPTIMIZERS, PIPELINES, model_of
from helpers.gloo import on_ranks
from helpers.plans import NOW, TABLES, make_plan
from helpers.refusals import refused
from helpers.sharded import local_parts
from helpers.sharded import sharded as sharded_by
from neuroshard.client.torchrec import ShardingWarning, from_torchrec
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore

pytest.importorskip("torchrec.distributed.planner.provider", reason="a part of TorchRec 1.9")
from torchrec.distributed.planner.api import ProductionPlannerOrchestrator
from torchrec.distributed.planner.dry_run.api import DryRunOrchestrator
from torchrec.distributed.planner.dry_run.types import DryRunRequest, DryRunResult
from torchrec.distributed.planner.executor import DefaultPlannerExecutor
from torchrec.distributed.planner.provider import DefaultPlannerProvider
from torchrec.distributed.planner.types import (
    PlannerConfig,
    PlannerErrorType,
    PlannerSessionContext,
    PlannerVariant,
    ShardingPlanRequest,
    StorageReservationPolicy,
    TrainingFramework,
)

from neuroshard.client.torchrec.provider import NeuroShardPlannerProvider

pytestmark = pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation:FutureWarning")  # TorchRec's own default

RANKS, BATCH = 4, 512  # samples a rank
PIPELINE_TYPES = {name: given.value for name, given in PIPELINES.items()}


def tables(optimizer_bytes: tuple[int, int] = (0, 0)) -> tuple[Table, ...]:
    """Pooled tables and sequences of several sizes, with state by row and by element."""
    per_row, per_element = optimizer_bytes
    given = [
        # name, rows, columns, lookups, pooling
        ("user", 2_000_000, 128, [20.0], "sum"),
        ("item", 500_000, 64, [1.0, 3.5], "sum"),
        ("query", 300_000, 96, [7.0], "sum"),
        ("country", 200, 16, [1.0], "sum"),
        ("history", 800_000, 32, [50.0], "none"),
        ("clicks", 100_000, 32, [10.0], "none"),
    ]
    return tuple(
        Table.parse(
            {
                "name": name,
                "rows": rows,
                "dim": dim,
                "features": [{"name": f"{name}-{n}", "pooling_factor": each} for n, each in enumerate(lookups)],
                "pooling": pooling,
                "module": "sequences" if pooling == "none" else "pooled",
                "optimizer_bytes_per_row": per_row,
                "optimizer_bytes_per_element": per_element,
            },
            "the test",
        )
        for name, rows, dim, lookups, pooling in given
    )


def trained_by(optimizer: str, of: tuple[Table, ...]) -> nn.Module:
    """The model of these tables, whose weights say their optimizer where TorchRec's planner looks for it."""
    module = model_of(of)
    weight: Any
    for weight in module.parameters():
        weight._optimizer_classes = [OPTIMIZERS[optimizer]]
    return module


def request_of(module: nn.Module, **changed: Any) -> DryRunRequest:
    config = PlannerConfig(
        pipeline_type=PIPELINE_TYPES[changed.pop("pipeline", "sparse-dist")],
        storage_reservation_policy=StorageReservationPolicy.FIXED_PERCENTAGE,
        storage_reservation_percentage=0.1,
    )
    given = {
        "model": module,
        "sharders": get_default_sharders(),
        "world_size": RANKS,
        "local_world_size": RANKS,
        "batch_size": BATCH,
        "hbm_gb": 1.5,
        "compute_device": "cuda",
        "sku_list": ["any"],
        "training_framework": TrainingFramework("apf"),
        "planner_config": config,
    }
    return DryRunRequest(**{**given, **changed})


def dry_run(provider: DefaultPlannerProvider, request: DryRunRequest) -> DryRunResult:
    context = PlannerSessionContext(request=request, results={})
    return DryRunOrchestrator(DefaultPlannerExecutor(provider)).plan(request, context)["any"]


def hbm_of_ranks(result: DryRunResult) -> list[int]:
    used = [0] * RANKS
    for shard in (shard for option in result.sharding_options for shard in option.shards):
        used[shard.rank] += shard.hbm_bytes
    return used


APART = 0.2  # of a rank, by which our ledger of a step and the estimate of TorchRec differ at most here


def constraints(of: tuple[Table, ...], *sharding_types: str) -> dict[str, ParameterConstraints]:
    return {
        table.name: ParameterConstraints(
            sharding_types=list(sharding_types),
            compute_kernels=["fused"],
            pooling_factors=[feature.pooling_factor for feature in table.features],
        )
        for table in of
    }


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(
    ("optimizer", "state", "types"),
    [
        ("sgd", (0, 0), ("table_wise", "column_wise", "row_wise")),
        ("adagrad", (0, 4), ("table_wise", "column_wise")),
        ("rowwise_adagrad", (4, 0), ("table_wise", "row_wise")),
    ],
)
def test_dry_runs_of_one_plan_say_the_same_memory_a_rank(tmp_path, optimizer, state, types, pipeline):
    """TorchRec's planner plans and estimates in its dry run; its plan, read and released as ours, goes through a dry run too."""
    of = tables(state)
    module = trained_by(optimizer, of)
    request = request_of(module, pipeline=pipeline, constraints=constraints(of, *types), hbm_gb=3)
    theirs = dry_run(DefaultPlannerProvider(), request)
    assert theirs.success, theirs.planner_failure_reason

    plan = from_torchrec(
        theirs.sharding_plan,
        module,
        tables=of,
        device_memory_bytes=(3 * 2**30,) * RANKS,
        batch_size=BATCH * RANKS,
        pipeline=pipeline,
    )
    deploy(plan, FolderStore(tmp_path), "m", now=NOW)
    ours = dry_run(
        NeuroShardPlannerProvider(str(tmp_path), "m", any_output_order=True, optimizer=optimizer),
        replace(request, constraints=None),
    )

    assert ours.success, ours.planner_failure_reason
    assert hbm_of_ranks(ours) == list(plan.memory_bytes())
    assert hbm_of_ranks(ours) == pytest.approx(hbm_of_ranks(theirs), rel=APART)
    assert ours.estimated_max_hbm_bytes == pytest.approx(theirs.estimated_max_hbm_bytes, rel=APART) != 0
    assert {one.fqn: one.sharding_type for one in ours.sharding_options} == {
        one.fqn: one.sharding_type for one in theirs.sharding_options
    }


@pytest.fixture
def released(tmp_path: Path) -> tuple[str, Plan, nn.Module]:
    """The address of a store, the plan for four ranks that is live in it, and its model."""
    pooled = tuple(table.model_copy(update={"module": "pooled"}) for table in TABLES)
    plan = make_plan(devices=RANKS, tables=pooled)
    deploy(plan, FolderStore(tmp_path), "m", now=NOW)
    configs = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
        for t in pooled
    ]
    return str(tmp_path), plan, nn.ModuleDict({"pooled": EmbeddingBagCollection(configs, device=torch.device("meta"))})


def quietly(provider: NeuroShardPlannerProvider, request: DryRunRequest) -> tuple[DryRunResult, list[str]]:
    """The result, and the client's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = dry_run(provider, request)
    return result, [str(one.message) for one in caught if issubclass(one.category, ShardingWarning)]


def test_a_plan_that_is_too_large_for_the_request_fails_and_says_which_rank_lacks_how_much(released):
    store, plan, module = released
    provider = NeuroShardPlannerProvider(store, "m", any_output_order=True, batch_size=64, pipeline="none")
    whole, _ = quietly(provider, request_of(module, pipeline="none"))
    needed = max(hbm_of_ranks(whole))

    # nine tenths of what is said are left
    enough, _ = quietly(provider, request_of(module, pipeline="none", hbm_gb=needed / 0.89 / 2**30))
    little, _ = quietly(provider, request_of(module, pipeline="none", hbm_gb=needed / 0.91 / 2**30))
    assert (enough.success, little.success) == (True, False)
    assert little.planner_error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert f"by plan {plan.digest()[:12]}, and of hbm_gb=" in little.planner_failure_reason
    assert "\n" not in little.planner_failure_reason


def test_what_a_plan_that_is_there_cannot_heed_is_said(released):
    store, _, module = released
    provider = NeuroShardPlannerProvider(store, "m", any_output_order=True)

    _, usual = quietly(provider, request_of(module))
    _, said = quietly(provider, request_of(module, constraints={"user": ParameterConstraints()}))
    (more,) = set(said) - set(usual)
    assert more.startswith("the request has constraints (user), which change nothing")

    request = request_of(module, planner_config=PlannerConfig(planner_variant=PlannerVariant.OSS))
    context = PlannerSessionContext(request=request, results={})
    topology = provider.build_topology("any", request, context)
    with refused(InvalidInput, "planner_variant", "'oss'"):
        provider.build_planner("any", topology=topology, storage_reservation=None, ctx=context)


def test_the_hosts_are_those_of_the_request(released):
    store, _, module = released
    provider = NeuroShardPlannerProvider(store, "m", any_output_order=True)

    result, _ = quietly(provider, request_of(module, local_world_size=2))
    spec = result.sharding_plan.plan["pooled"]["user"].sharding_spec
    placed = {str(shard.placement) for shard in spec.shards}
    assert placed == {"rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:3/cuda:1"}


def test_another_number_of_ranks_is_refused_by_name_and_another_batch_is_warned_of(released):
    store, _, module = released
    provider = NeuroShardPlannerProvider(store, "m", any_output_order=True)

    result, _ = quietly(provider, request_of(module, world_size=8, local_world_size=8))
    assert not result.success
    assert "8" in result.planner_failure_reason
    _, said = quietly(provider, request_of(module))
    assert any(f"the trainer has {BATCH * RANKS:,}" in one for one in said)
    assert any("the trainer's pipeline is sparse-dist" in one for one in said)


class Ranker(nn.Module):
    """Pooled tables, read by key, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [
            EmbeddingBagConfig(
                name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name], pooling=PoolingType.SUM
            )
            for t in TABLES
        ]
        self.pooled = EmbeddingBagCollection(configs)
        self.dense = nn.Linear(sum(t.dim for t in TABLES), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.pooled(features)
        return self.dense(torch.cat([found[t.name] for t in TABLES], dim=1)).squeeze(1)


STEPS, SAMPLES, RATE = 6, 8, 0.1


def batch(step: int, rank: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(TABLES) * SAMPLES,), generator=drawn)
    counts = lengths.view(len(TABLES), SAMPLES).sum(1).tolist()
    ids = [torch.randint(0, t.rows, (n,), generator=drawn) for t, n in zip(TABLES, counts, strict=True)]
    features = KeyedJaggedTensor(keys=[t.name for t in TABLES], values=torch.cat(ids), lengths=lengths)
    return features, torch.randn(SAMPLES, generator=drawn)


def losses_of_one_process(ranks: int) -> list[float]:
    model = Ranker()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        each = [
            nn.functional.mse_loss(model(features), wanted)
            for features, wanted in (batch(step, r) for r in range(ranks))
        ]
        loss = torch.stack(each).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank: int, store: str) -> tuple[list[float], dict[str, list[int]], int]:
    """Plan through TorchRec's production path with our provider, and train: the losses, the ranks of tables, peak bytes."""
    warnings.simplefilter("ignore")
    ranks, model = dist.get_world_size(), Ranker()
    sharders = [EmbeddingBagCollectionSharder(fused_params={"learning_rate": RATE})]
    request = ShardingPlanRequest(
        model=model,
        sharders=sharders,
        world_size=ranks,
        local_world_size=ranks,
        batch_size=SAMPLES,
        compute_device="cpu",
    )
    context = PlannerSessionContext(request=request, results={})
    orchestrator = ProductionPlannerOrchestrator(DefaultPlannerExecutor(NeuroShardPlannerProvider(store, "m")), "any")
    planned = orchestrator.plan(request, context)["any"]
    sharded = sharded_by(model, planned.sharding_plan, sharders)
    begun = Ranker().state_dict()
    for key, place, part in local_parts(sharded.state_dict()):  # tables were drawn anew as they were sharded
        if key in begun:
            part.copy_(begun[key][place])
    optimizer = torch.optim.SGD(sharded.module.dense.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        features, wanted = batch(step, rank)
        loss = nn.functional.mse_loss(sharded(features), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    held = {name: one.ranks for name, one in planned.sharding_plan.plan["pooled"].items()}
    return losses, held, planned.estimated_max_ddr_bytes


@pytest.mark.slow
def test_a_trainer_planned_through_torchrecs_production_path_trains_as_an_unsharded_model(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    plan = make_plan(tables=tuple(table.model_copy(update={"module": "pooled"}) for table in TABLES))
    deploy(plan, FolderStore(store), "m", now=NOW)

    ranks = on_ranks(2, tmp_path, train, str(store))
    wanted = losses_of_one_process(2)
    assert wanted[-1] < wanted[0]
    for losses, held, peak in ranks:
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert held == {"user": [1, 0, 1, 0], "item": [1], "country": [0]}
        assert peak == max(plan.memory_bytes())
