"""The live plan where TorchRec wants a planner."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlanner

from helpers.gloo import on_ranks
from helpers.plans import NOW, TABLES, make_plan
from helpers.refusals import refused
from neuroshard.client.torchrec import NeuroShardPlanner, to_torchrec
from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore


def model() -> nn.Module:
    configs = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
        for t in TABLES
    ]
    return nn.ModuleDict({"sparse": EmbeddingBagCollection(tables=configs, device=torch.device("meta"))})


@pytest.fixture
def store(store: FolderStore) -> str:
    deploy(make_plan(), store, "m", now=NOW)
    return store.url


def test_it_gives_what_to_torchrec_makes_of_the_live_plan(store):
    planner = NeuroShardPlanner(store, "m")

    assert isinstance(planner, ShardingPlanner)
    assert planner.plan(model(), [EmbeddingBagCollectionSharder()]) == to_torchrec(make_plan(), model())
    assert planner.loaded == make_plan()
    with pytest.raises(NotFound):
        NeuroShardPlanner(store, "nobody").plan(model(), [])


def test_a_module_without_a_sharder_is_refused_by_name(store):
    with refused(InvalidInput, "'sparse'", "EmbeddingBagCollection", "EmbeddingBagCollectionSharder"):
        NeuroShardPlanner(store, "m").plan(model(), [])


def train(rank: int, store: str) -> tuple[str, tuple[int, ...]]:
    warnings.simplefilter("ignore")
    planner, sharders = NeuroShardPlanner(store, "m"), [EmbeddingBagCollectionSharder()]
    whole = model()
    sharded = DistributedModelParallel(
        whole,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=planner.collective_plan(whole, sharders, dist.group.WORLD),
        sharders=sharders,
    )
    features = KeyedJaggedTensor(
        keys=[t.name for t in TABLES], values=torch.zeros(6, dtype=torch.long), lengths=torch.ones(6, dtype=torch.long)
    )
    pooled = sharded.module["sparse"](features).values()
    return planner.loaded.digest(), tuple(pooled.shape)


def test_all_ranks_shard_by_the_plan_that_rank_0_loaded(store, tmp_path):
    digest, columns = make_plan().digest(), sum(table.dim for table in TABLES)
    assert on_ranks(2, tmp_path, train, store) == [(digest, (2, columns))] * 2


@pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation:FutureWarning")  # TorchRec's own default
def test_torchrec_1_9_takes_it_from_a_provider(store):
    provider = pytest.importorskip("torchrec.distributed.planner.provider", reason="a part of TorchRec 1.9")
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.types import PlannerSessionContext, ShardingPlanRequest

    ours = {"build_planner": lambda self, sku, **given: NeuroShardPlanner(store, "m")}
    theirs = type("Provider", (provider.DefaultPlannerProvider,), ours)

    request = ShardingPlanRequest(
        model=model(),
        sharders=[EmbeddingBagCollectionSharder()],
        world_size=2,
        local_world_size=2,
        batch_size=8,
        compute_device="cpu",
    )
    context = PlannerSessionContext(request=request, results={})
    result = DefaultPlannerExecutor(provider=theirs()).run("any", context)
    assert result.success
    assert result.sharding_plan == to_torchrec(make_plan(), model())
