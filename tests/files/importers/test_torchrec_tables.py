"""The tables of a real EmbeddingBagCollection."""

import warnings
from typing import Any

import torch

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.files.importers.torchrec_tables import tables_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrec and FBGEMM, while they are imported
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

USER = EmbeddingBagConfig(name="user", num_embeddings=10**9, embedding_dim=64, feature_names=["id", "friend"])
ITEM = EmbeddingBagConfig(
    name="item", num_embeddings=100, embedding_dim=8, feature_names=["item"], data_type=DataType.FP16
)
SMALL: dict[str, Any] = {"num_embeddings": 10, "embedding_dim": 8, "feature_names": ["f"]}


def test_tables_of_a_module_on_the_meta_device():
    module = EmbeddingBagCollection(tables=[USER, ITEM], device=torch.device("meta"))
    features = [{"name": name, "pooling_factor": 1.0} for name in ("id", "friend")]
    wanted = (
        Table.model_validate({"name": "user", "rows": 10**9, "dim": 64, "features": features}),
        Table(name="item", rows=100, dim=8, pooling_factor=7.5, element_bytes=2),
    )
    assert tables_of(module, {"item": 7.5}) == tables_of([USER, ITEM], {"item": 7.5}) == wanted
    both = tables_of([ITEM, EmbeddingBagConfig(name="f", **SMALL), EmbeddingBagConfig(name="g", **SMALL)])
    assert [[one.name for one in table.features] for table in both] == [[], ["f"], ["f"]]  # by which a batch is counted


def test_pooling_and_weights_are_the_collection_s():
    mean = EmbeddingBagConfig(name="m", pooling=PoolingType.MEAN, **SMALL)
    module = EmbeddingBagCollection(tables=[mean], is_weighted=True, device=torch.device("meta"))
    (table,) = tables_of(module)
    assert (table.pooling, table.weighted) == ("mean", True)
    assert [t.weighted for t in (*tables_of([mean]), *tables_of([mean], weighted=True))] == [False, True]


def test_access_and_optimizer_are_as_for_a_file():
    (item,) = tables_of([ITEM], access="zipf:1.2", optimizer="sgd")
    assert (item.reuse_bins, item.memory_bytes) == (zipf_bins(100, 1.0, 1.2), 1600)


def test_what_cannot_be_sharded_is_named():
    odd = EmbeddingBagConfig(name="odd", num_embeddings=10, embedding_dim=6, feature_names=["f"])
    quantized = EmbeddingBagConfig(name="q", data_type=DataType.INT8, **SMALL)
    with refused(InvalidInput, "'odd'", "dim", 4):
        tables_of([odd])
    with refused(InvalidInput, "'q'", "data_type", "INT8", "FP32", "FP16"):
        tables_of([quantized])
    with refused(InvalidInput, "pooling_factors", "'ghost'"):
        tables_of([ITEM], {"ghost": 1.0})
