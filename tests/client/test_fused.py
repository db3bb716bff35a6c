"""The optimizers that a trainer fuses into its tables: by name, or by apply_optimizer_in_backward on the parameters."""

import random
import warnings
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.optimizers import SGD, PartialRowWiseAdam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from helpers.plans import TABLES, make_plan
from helpers.refusals import refused, warned
from helpers.trainers import cut_plan
from neuroshard.client.torchrec import ShardingWarning, to_torchrec
from neuroshard.client.torchrec.fused import OF_THE_ROW
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.part import Memory, Part
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.files.importers.torchrec_collections import NAMES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's jit, while it is imported
    from torch.distributed.optim.apply_optimizer_in_backward import (
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )

WHOLE = cut_plan(TABLES, 2, {"user": [(16, 0)], "item": [(8, 0)], "country": [(4, 1)]}, batch_size=64)
COPIED = cut_plan(TABLES, 2, {"user": [(16, 0)], "country": [(4, 1)]}, batch_size=64, copied={"item"})


def model(**optimizers: tuple[Any, dict[str, Any]]) -> nn.Module:
    """The tables in one collection, each with an optimizer of its class and settings where one is given."""
    configs = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
        for t in TABLES
    ]
    ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    for name, (kind, settings) in optimizers.items():
        apply_optimizer_in_backward(kind, [ebc.embedding_bags[name].weight], settings)
    return nn.ModuleDict({"sparse": ebc})


def all_by(kind: Any) -> nn.Module:
    return model(**{table.name: (kind, {"lr": 0.1}) for table in TABLES})


@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.FP16])
@pytest.mark.parametrize("kind", NAMES)
def test_a_part_of_a_table_takes_what_fbgemm_allocates(kind: EmbOptimType, precision: SparseType) -> None:
    rng = random.Random(0)
    for rows, dim in [(rng.randint(1, 10**6), 4 * rng.randint(1, 64)) for _ in range(3)]:
        operator = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
            optimizer=kind,
            weights_precision=precision,
            device=torch.device("meta"),
        )
        moments = [part for name, part in operator.named_buffers() if name in ("momentum1_dev", "momentum2_dev")]
        state = sum(part.nbytes for part in moments if part.dtype is torch.float32)  # of others there are no elements
        per_row, per_element = OPTIMIZER_BYTES[NAMES[kind]]
        table = Table(
            name="t",
            rows=2 * rows,
            dim=2 * dim,
            pooling_factor=1,
            element_bytes=precision.bit_rate() // 8,
            optimizer_bytes_per_row=per_row,
            optimizer_bytes_per_element=per_element,
        )
        assert Part(table, rows, dim, row_blocks=2).memory() == Memory(operator.weights_dev.nbytes, state, 0)


def test_every_optimizer_has_bytes_and_may_be_named() -> None:
    assert set(NAMES.values()) == set(OPTIMIZER_BYTES)
    for name in OPTIMIZER_BYTES:
        to_torchrec(WHOLE, model(), optimizer=name)


@pytest.mark.parametrize("optimizer", OF_THE_ROW)
def test_what_an_optimizer_computes_of_the_row_is_another_for_cut_columns(optimizer: str) -> None:
    with warned(ShardingWarning, "1 table", "'user' into 4", optimizer):
        to_torchrec(make_plan(), model(), optimizer=optimizer)


def test_an_optimizer_on_the_parameters_is_found_there() -> None:
    with warned(ShardingWarning, "1 table", "'user' into 4", "rowwise_adagrad"):
        to_torchrec(make_plan(), all_by(RowWiseAdagrad))
    to_torchrec(make_plan(), all_by(torch.optim.SGD))
    for kind, name in ((torch.optim.Adam, "adam"), (PartialRowWiseAdam, "partial_rowwise_adam")):
        with refused(InvalidInput, "rank 0", name, "'user'"):
            to_torchrec(make_plan(memory_bytes=60_000), all_by(kind))


def test_an_optimizer_that_is_given_must_be_that_on_the_parameters() -> None:
    to_torchrec(WHOLE, all_by(SGD), optimizer="sgd")
    with refused(UsageError, "'adam'", "'user'", "'sparse'", "sgd"):
        to_torchrec(WHOLE, all_by(SGD), optimizer="adam")


def test_optimizers_that_torchrec_cannot_fuse_are_refused_by_table() -> None:
    with refused(InvalidInput, "'item'", "'sparse'", "RMSprop"):
        to_torchrec(WHOLE, model(item=(torch.optim.RMSprop, {"lr": 0.1})))
    twice = all_by(SGD)
    apply_optimizer_in_backward(SGD, [twice.get_parameter("sparse.embedding_bags.item.weight")], {"lr": 0.2})
    with refused(InvalidInput, "'item'", "2 optimizers"):
        to_torchrec(WHOLE, twice)


@pytest.mark.parametrize(
    ("item", "said"),
    [((SGD, {"lr": 0.2}), "sgd (lr=0.2)"), ((RowWiseAdagrad, {"lr": 0.1}), "rowwise_adagrad (lr=0.1)")],
)
def test_tables_with_two_optimizers_are_two_operators(item: tuple[Any, dict[str, Any]], said: str) -> None:
    sgd = (SGD, {"lr": 0.1})
    with warned(ShardingWarning, "'user'", "'item'", "'sparse'", "sgd (lr=0.1)", said):
        to_torchrec(WHOLE, model(user=sgd, item=item, country=sgd))
    with warned(ShardingWarning, "'user'", "'item'", "'sparse'", "no optimizer"):
        to_torchrec(WHOLE, model(item=item))


def test_the_optimizer_of_a_copied_table_is_dropped_and_the_dense_one_trains_it() -> None:
    with warned(ShardingWarning, "'item'", "'sparse'", "sgd (lr=0.1)"):
        to_torchrec(COPIED, all_by(SGD))
    to_torchrec(COPIED, model())
