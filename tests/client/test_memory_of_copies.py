"""What a data-parallel table takes of a rank of a real DistributedModelParallel, against what a plan counts."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from helpers.gloo import on_ranks
from helpers.refusals import refused
from helpers.sharded import sharded
from helpers.trainers import cut_plan
from neuroshard.client.torchrec import ShardingWarning, to_torchrec
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.part import GRADIENTS, Part
from neuroshard.core.plan import Plan
from neuroshard.core.table import DENSE_STATE, Table

ROWS, DIM, BATCH = 2000, 16, 8
OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "amsgrad": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, amsgrad=True),
}


def plan_of(element_bytes: int) -> Plan:
    """Two tables that both ranks copy, and one that is whole."""
    given = {"rows": ROWS, "dim": DIM, "pooling_factor": 1, "element_bytes": element_bytes}
    tables = [Table.parse({"name": name, **given}, "the test") for name in ("a", "b", "whole")]
    return cut_plan(tables, 2, {"whole": [(DIM, 0)]}, batch_size=2 * BATCH, copied=("a", "b"))


def collection(plan: Plan) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[f"f_{table.name}"],
            data_type=DataType.FP16 if table.element_bytes == 2 else DataType.FP32,
        )
        for table in plan.task.tables
    ]
    return EmbeddingBagCollection(configs, device=torch.device("cpu"))


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def trained(rank: int, plan: Plan) -> dict[str, tuple[int, int, int, int]]:
    """By dense optimizer: bytes of the copies' weights, of their gradients, of their state, and of the most of that size that one
    backward pass and step allocate beside them."""
    found = {}
    for name, make in OPTIMIZERS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = nn.ModuleDict({"sparse": collection(plan)})
            model = sharded(module, to_torchrec(plan, module, device_type="cpu"), [EmbeddingBagCollectionSharder()])
            copies = [
                parameter
                for key, parameter in model.named_parameters()
                if key.split(".")[-2] in plan.held.constraints.data_parallel
            ]
            optimizer = make(copies, lr=0.1)
            features = KeyedJaggedTensor(
                keys=["f_a", "f_b", "f_whole"],
                values=torch.arange(3 * BATCH),
                lengths=torch.ones(3 * BATCH, dtype=torch.int32),
            )
            for _ in range(3):
                optimizer.zero_grad()
                loss = torch.stack([t.float().sum() for t in model.module.sparse(features).to_dict().values()]).sum()
                with torch.profiler.profile(profile_memory=True) as profiled:
                    loss.backward()
                optimizer.step()
        state = [v for of in optimizer.state.values() for v in of.values() if isinstance(v, Tensor) and v.numel() > 1]
        gradients = [parameter.grad for parameter in copies if parameter.grad is not None]
        live = most = 0
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        found[name] = nbytes(copies), nbytes(gradients), nbytes(state), most
    return found


@pytest.mark.slow
@pytest.mark.parametrize("element_bytes", [4, 2])
def test_weights_gradients_and_state_of_copies_are_as_many_bytes_as_a_plan_counts(
    tmp_path: Path, element_bytes: int
) -> None:
    plan = plan_of(element_bytes)
    weights = 2 * ROWS * DIM * element_bytes
    for by_name in on_ranks(2, tmp_path, trained, plan):
        assert by_name.keys() == DENSE_STATE.keys()
        for name, (of_weights, of_gradients, of_state, most) in by_name.items():
            counted = [
                plan.task.model_copy(update={"dense_optimizer": name}).memory(Part.of(t, copies=2))
                for t in plan.task.tables[:2]
            ]
            assert (of_weights, of_gradients) == (weights, weights), name
            assert of_state == sum(memory.optimizer for memory in counted), name
            assert sum(memory.step for memory in counted) == GRADIENTS * weights
            if (
                element_bytes == 4
            ):  # of fp16 the CPU's operator makes one in fp32 first; CUDA's makes it of the weights' type
                # the backward pass makes one more of all copies, apart from what its outputs take
                assert weights <= most <= 1.02 * weights + 3 * 4 * ROWS, name


def with_dense(plan: Plan, dense: str | None, memory_bytes: int) -> Plan:
    update = {"dense_optimizer": dense, "device_memory_bytes": (memory_bytes,) * 2}
    return Plan.parse(
        {**plan.model_dump(exclude={"task", "task_digest"}), "task": plan.task.model_copy(update=update)}, "the test"
    )


def test_the_client_counts_the_trainers_dense_optimizer() -> None:
    plan = plan_of(4)
    weights = ROWS * DIM * 4
    whole = weights + 4 * ROWS
    fits = with_dense(plan, "adam", whole + 2 * weights * (1 + GRADIENTS + 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_torchrec(fits, collection(plan), device_type="cpu", dense_optimizer="adam")
    with pytest.warns(
        ShardingWarning, match="dense_optimizer is sgd, and the plan counts its copies as trained by adam"
    ):
        to_torchrec(fits, collection(plan), device_type="cpu", dense_optimizer="sgd")
    with refused(InvalidInput, "rank 0 needs", "dense amsgrad"):
        to_torchrec(fits, collection(plan), device_type="cpu", dense_optimizer="amsgrad")
    unnamed = with_dense(plan, None, fits.task.device_memory_bytes[0] - 1)
    with refused(InvalidInput, "rank 0 needs", "dense adam"):
        to_torchrec(unnamed, collection(plan), device_type="cpu", dense_optimizer="adam")
    with refused(UsageError, "'shampoo' is none of sgd, momentum"):
        to_torchrec(fits, collection(plan), device_type="cpu", dense_optimizer="shampoo")
