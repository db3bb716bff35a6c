"""The live plan where TorchRec wants a planner."""

import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs, ShardingPlan, ShardingPlanner
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from helpers.drawn_plans import model_of, random_plan
from helpers.gloo import on_ranks
from helpers.plans import NOW, TABLES, make_plan
from helpers.refusals import names, refused
from helpers.sharded import sharded
from neuroshard.client.torchrec import NeuroShardPlanner, ShardingWarning, qcomms, to_torchrec
from neuroshard.client.torchrec.planner import rank_storage
from neuroshard.core.errors import InvalidInput, NotFound, UsageError
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
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
    held = sharded(whole, planner.collective_plan(whole, sharders, dist.group.WORLD), sharders)
    features = KeyedJaggedTensor(
        keys=[t.name for t in TABLES], values=torch.zeros(6, dtype=torch.long), lengths=torch.ones(6, dtype=torch.long)
    )
    pooled = held.module["sparse"](features).values()
    return planner.loaded.digest(), tuple(pooled.shape)


def test_all_ranks_shard_by_the_plan_that_rank_0_loaded(store, tmp_path):
    digest, columns = make_plan().digest(), sum(table.dim for table in TABLES)
    assert on_ranks(2, tmp_path, train, store) == [(digest, (2, columns))] * 2


def ranks_of(plan: ShardingPlan) -> dict[str, list[int] | None]:
    return {name: parameter.ranks for name, parameter in plan.plan["sparse"].items()}


def shard_in_groups(rank: int, store: str) -> dict[str, list[int] | None]:
    """Ranks 0 and 1 train one model, rank 2 another."""
    warnings.simplefilter("ignore")
    two, one = dist.new_group([0, 1]), dist.new_group([2])
    name, group = ("m", two) if rank < 2 else ("alone", one)
    return ranks_of(NeuroShardPlanner(store, name).collective_plan(model(), [Ebc()], group))


def test_a_plan_is_for_the_ranks_of_the_process_group_that_was_given_not_of_the_world(store, tmp_path):
    plans = make_plan(), make_plan(devices=1)
    deploy(plans[1], FolderStore(Path(store)), "alone", now=NOW)
    two, one = (ranks_of(to_torchrec(plan, model())) for plan in plans)
    assert on_ranks(3, tmp_path, shard_in_groups, store) == [two, two, one]


def shard_in_a_world_of_one(_: int, store: str) -> dict[str, list[int] | None]:
    warnings.simplefilter("ignore")
    return ranks_of(NeuroShardPlanner(store, "m", world_size=2).collective_plan(model(), [Ebc()]))


def test_a_plan_is_for_as_many_ranks_as_the_user_says_whatever_the_process_group_has(store, tmp_path):
    assert on_ranks(1, tmp_path, shard_in_a_world_of_one, store) == [ranks_of(to_torchrec(make_plan(), model()))]


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("ignore::neuroshard.client.torchrec.ShardingWarning")
def test_its_options_have_the_memory_that_the_plan_counts_on_every_rank(tmp_path, seed, device_type):
    plan = random_plan(random.Random(seed), ["sgd", "adam", "rowwise_adagrad"][seed % 3], 4, "sparse-dist")
    deploy(plan, FolderStore(tmp_path), "m", now=NOW)
    planner = NeuroShardPlanner(str(tmp_path), "m", device_type=device_type, local_world_size=4)
    planned = model_of(plan.task.tables)
    given = planner.plan(planned, get_default_sharders())

    options = planner.get_selected_options()
    used = rank_storage(options, 4)
    assert [one.hbm if device_type == "cuda" else one.ddr for one in used] == list(plan.memory_bytes())
    assert [one.ddr if device_type == "cuda" else one.hbm for one in used] == [0] * 4
    assert {(one.path, one.name): (one.sharding_type, [shard.rank for shard in one.shards]) for one in options} == {
        (path, name): (one.sharding_type, one.ranks) for path, of in given.plan.items() for name, one in of.items()
    }


def test_it_keeps_no_model_and_says_so_where_options_are_asked_for(store):
    planner, planned = NeuroShardPlanner(store, "m"), model()
    with refused(UsageError, "there is none"):
        planner.get_selected_options()
    planner.plan(planned, [EmbeddingBagCollectionSharder()])
    assert [one.name for one in planner.get_selected_options()] == [table.name for table in TABLES]
    del planned
    with refused(UsageError, "keep it"):
        planner.get_selected_options()


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


F16, INT8 = (CollectivePrecision.model_validate({"forward": each, "backward": each}) for each in ("fp16", "int8"))


def of_two_modules(precision: CollectivePrecision | None) -> tuple[Plan, nn.Module]:
    """A pooled collection, and a feature-processed one, whose sharder has a sharder inside."""
    tables = tuple(Table(name=n, module=n, rows=40, dim=8, pooling_factor=1.0, weighted=n == "fp") for n in ("m", "fp"))
    task = ShardingTask(tables=tables, device_memory_bytes=(2**20,) * 2, batch_size=64, collective_precision=precision)
    shards = tuple(Shard(table=t.name, rows=40, dim=8, device=0) for t in tables)

    def bags(name: str, weighted: bool) -> EmbeddingBagCollection:
        config = EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=8, feature_names=[f"{name}_f"])
        return EmbeddingBagCollection(tables=[config], is_weighted=weighted, device=torch.device("meta"))

    processed = FeatureProcessedEmbeddingBagCollection(
        bags("fp", True), PositionWeightedModuleCollection({"fp_f": 4}, device=torch.device("meta"))
    )
    plan = Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    return plan, nn.ModuleDict({"m": bags("m", False), "fp": processed})


def codecs(precision: CollectivePrecision | None) -> dict[str, QuantizedCommCodecs] | None:
    return qcomms(of_two_modules(precision)[0], "cpu")


def warnings_of(url: str, planned: CollectivePrecision | None, sharders: list[ModuleSharder[nn.Module]]) -> list[str]:
    plan, module = of_two_modules(planned)
    deploy(plan, FolderStore(Path(url)), "m", now=NOW)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        NeuroShardPlanner(url, "m", device_type="cpu").plan(module, sharders)
    return [str(warning.message) for warning in caught if warning.category is ShardingWarning]


Ebc, Processed = EmbeddingBagCollectionSharder, FeatureProcessedEmbeddingBagCollectionSharder


@pytest.mark.parametrize("planned", [None, F16, INT8], ids=["fp32", "fp16", "int8"])
def test_codecs_of_the_plan_are_not_warned_of_wherever_a_sharder_has_them(tmp_path, planned):
    one = Ebc(qcomm_codecs_registry=codecs(planned))
    for processed in (Processed(one), Processed(qcomm_codecs_registry=codecs(planned))):
        # the idle sharder of sequences has none
        assert warnings_of(str(tmp_path), planned, [one, processed, EmbeddingCollectionSharder()]) == []


@pytest.mark.parametrize(
    ("planned", "given", "facts"),
    [(F16, None, ["fp32", "fp16"]), (None, F16, ["fp16", "fp32"]), (F16, INT8, ["int8", "fp16"])],
    ids=["none", "needless", "others"],
)
def test_other_codecs_than_the_plan_s_are_warned_of_by_module(tmp_path, planned, given, facts):
    ours, theirs = Ebc(qcomm_codecs_registry=codecs(planned)), Ebc(qcomm_codecs_registry=codecs(given))
    for path, sharders in {
        "'m'": [theirs, Processed(ours)],
        "'fp'": [ours, Processed(theirs, qcomm_codecs_registry=codecs(planned))],  # its own do not count
    }.items():
        (said,) = warnings_of(str(tmp_path), planned, sharders)
        assert all(names(said, fact) for fact in [path, "EmbeddingBagCollectionSharder", *facts]), said
