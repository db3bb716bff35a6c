"""Which modules of a model are planned, at which path, and which are refused by name."""

import warnings

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
    from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
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

    from neuroshard.files.importers.torchrec_collections import COVERED, find_collections

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
    "managed collisions": lambda: ManagedCollisionEmbeddingBagCollection(bags(), remap(BAGS)),
    "managed collisions of sequences": lambda: ManagedCollisionEmbeddingCollection(sequences(), remap(ROWS)),
    "a map of ids alone": lambda: remap(BAGS),
    "tower": lambda: EmbeddingTower(bags(), nn.Identity()),
    "towers": lambda: EmbeddingTowerCollection([EmbeddingTower(bags(), nn.Identity())]),
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
    assert type(make()).__name__ in message or "MyBags" in message


def test_every_class_with_a_default_sharder_is_planned_or_refused():
    """A new one in a later TorchRec fails here until somebody has decided."""
    kinds = set(get_module_to_default_sharders())
    kinds |= {EmbeddingTowerSharder.module_type.fget(None), EmbeddingTowerCollectionSharder.module_type.fget(None)}
    kinds |= {FusedEmbeddingCollectionSharder.module_type.fget(None)}
    for kind in kinds - {*COVERED, EmbeddingCollection}:
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

    found = find_collections(Wrapper())

    assert list(found.pooled) == ["inner.0.embedding_bag_collection"]
    assert list(found.sequences) == ["sequence"]


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
