"""Which modules of a model are planned, at which path, and which are refused by name."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrec and FBGEMM, while they are imported
    import torchrec.distributed.itep_embeddingbag
    import torchrec.distributed.pec_embedding
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import get_module_to_default_sharders
    from torchrec.models.dlrm import SparseArch
    from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
    from torchrec.modules.feature_processor_ import PositionWeightedModule
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.modules.mc_embedding_modules import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    from neuroshard.files.importers.torchrec_collections import COVERED, find_collections, weight_of
    from neuroshard.files.importers.torchrec_tables import tables_of

META = torch.device("meta")
BAGS = [EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=16, feature_names=["f"])]
ROWS = [EmbeddingConfig(name="t", num_embeddings=100, embedding_dim=16, feature_names=["f"])]


def bags(weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=BAGS, is_weighted=weighted, device=META)


def sequences() -> EmbeddingCollection:
    return EmbeddingCollection(tables=ROWS, device=META)


def remap(configs: list[EmbeddingBagConfig] | list[EmbeddingConfig]) -> ManagedCollisionCollection:
    module = MCHManagedCollisionModule(
        zch_size=100,
        device=torch.device("cpu"),
        input_hash_size=1000,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=2,
    )
    return ManagedCollisionCollection({"t": module}, configs)


def processed() -> FeatureProcessedEmbeddingBagCollection:
    return FeatureProcessedEmbeddingBagCollection(bags(weighted=True), {"f": PositionWeightedModule(8, META)})


REFUSED = {
    "managed collisions that drop weights": lambda: ManagedCollisionEmbeddingBagCollection(
        bags(weighted=True), remap(BAGS)
    ),
    "a map of ids alone": lambda: remap(BAGS),
    "fused": lambda: FusedEmbeddingBagCollection(
        tables=BAGS, optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}, device=META
    ),
    "pruned": lambda: torchrec.modules.itep_embedding_modules.ITEPEmbeddingBagCollection(bags(), nn.Identity()),
    "permuted": lambda: torchrec.modules.pec_embedding_modules.PECEmbeddingCollection(sequences()),
    "inherited": lambda: type("MyBags", (EmbeddingBagCollection,), {})(tables=BAGS, device=META),
    "inherited, processed": lambda: type("MyProcessed", (FeatureProcessedEmbeddingBagCollection,), {})(
        bags(weighted=True), {"f": PositionWeightedModule(8, META)}
    ),
    "processed, inherited inside": lambda: FeatureProcessedEmbeddingBagCollection(
        type("MyBags", (EmbeddingBagCollection,), {})(tables=BAGS, is_weighted=True, device=META),
        {"f": PositionWeightedModule(8, META)},
    ),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_module_that_torchrec_shards_otherwise_is_refused_with_its_path_and_class(make):
    model = nn.ModuleDict({"fine": bags(), "over": nn.ModuleDict({"odd": make()})})

    with pytest.raises(InvalidInput) as refused:
        find_collections(model)

    message = str(refused.value)
    assert "'over.odd" in message
    assert "\n" not in message
    assert type(make()).__name__ in message or "MyBags" in message or "ManagedCollision" in message


def test_every_class_with_a_default_sharder_is_planned_or_refused():
    """A new one in a later TorchRec fails here until somebody has decided."""
    kinds = set(get_module_to_default_sharders())
    kinds |= {FusedEmbeddingCollectionSharder.module_type.fget(None)}
    for kind in kinds - {*COVERED, EmbeddingTower, EmbeddingTowerCollection}:
        odd = kind.__new__(kind)  # what it is made of depends on the class: only that it holds tables counts here
        nn.Module.__init__(odd)
        odd._embedding_bag_collection = bags()
        with refused(InvalidInput, "odd", kind.__name__):
            find_collections(nn.ModuleDict({"odd": odd}))


def test_containers_of_torchrec_and_of_users_only_hold():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([SparseArch(bags())])
            self.sequence = sequences()
            self.tower = EmbeddingTower(processed(), nn.Identity())
            self.towers = EmbeddingTowerCollection([EmbeddingTower(sequences(), nn.Identity())])
            self.mapped = ManagedCollisionEmbeddingCollection(sequences(), remap(ROWS))

    found = find_collections(Wrapper())

    assert list(found.pooled) == ["inner.0.embedding_bag_collection", "tower.embedding"]
    assert list(found.sequences) == ["sequence", "towers.towers.0.embedding", "mapped"]


def test_a_feature_processed_collection_is_planned_at_its_wrapper():
    model = nn.ModuleDict({"e": processed()})
    assert find_collections(model).pooled == {"e": model["e"]._embedding_bag_collection}
    assert list(find_collections(model["e"]).pooled) == [""]


def test_a_collection_with_two_names_in_one_module_is_refused_and_in_two_modules_is_one():
    shared = bags()
    with refused(InvalidInput, "'a'", "'b'", "EmbeddingBagCollection"):
        find_collections(nn.ModuleDict({"a": shared, "b": shared}))

    apart = nn.ModuleDict({"a": nn.ModuleDict({"x": shared}), "b": nn.ModuleDict({"x": shared})})
    assert list(find_collections(apart).pooled) == ["a.x"]


def tied(second: nn.Module, holder: str) -> nn.ModuleDict:
    """Two modules; what is at `holder` in the second has the weight of the first one's table."""
    first = bags()
    second.get_submodule(holder).register_parameter("weight", weight_of(first, "t"))
    return nn.ModuleDict({"a": first, "b": second})


def in_two_places(first: str, second: str) -> nn.ModuleDict:
    """One collection, alone and in a wrapper that weighs lookups by position."""
    inner = bags(weighted=True)
    wrapper = FeatureProcessedEmbeddingBagCollection(inner, {"f": PositionWeightedModule(8, META)})
    return nn.ModuleDict({name: wrapper if name == "b" else inner for name in (first, second)})


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: tied(bags(), "embedding_bags.t"), ["'t'", "module 'a'", "module 'b'"]),
        (lambda: tied(sequences(), "embeddings.t"), ["'t'", "module 'a'", "module 'b'"]),
        (lambda: tied(nn.Linear(16, 100, bias=False, device=META), ""), ["'t'", "module 'a'", "'b'", "Linear"]),
        (lambda: in_two_places("a", "b"), ["'t'", "module 'a'", "module 'b'"]),
        (lambda: in_two_places("b", "a"), ["'t'", "module 'a'", "module 'b'"]),
    ],
    ids=["two collections", "a sequence", "a dense layer", "alone, then processed", "processed, then alone"],
)
def test_a_weight_that_is_a_table_s_and_another_s_is_refused(make, facts):
    with refused(InvalidInput, "one Parameter", *facts):
        find_collections(make())


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_embeddings_post_pruning", 50), ("num_embeddings_post_pruning", 0), ("use_virtual_table", True)],
)
def test_a_config_with_which_sharding_fails_is_refused(field, value):
    config = replace(BAGS[0], **{field: value})
    module = nn.ModuleDict({"a": EmbeddingBagCollection(tables=[config], device=META)})
    with refused(InvalidInput, "'t'", "'a'", f"{field}={value}"):
        find_collections(module)
    with refused(InvalidInput, "'t'", f"{field}={value}"):
        tables_of([config])


@pytest.mark.parametrize("store", ["EmbeddingRocksDBWrapper", "DramKVEmbeddingCacheWrapper"])
def test_fbgemm_has_no_store_of_virtual_tables(store):
    """Why they are refused: an FBGEMM with a store is a reason to plan them."""
    with pytest.raises(RuntimeError, match="does not exist"):
        getattr(torch.classes.fbgemm, store)
