"""What FBGEMM's operator holds: the facts on GPUs as read, those on a CPU as this machine's operator has them."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from helpers.refusals import refused, warned
from neuroshard.client.torchrec import ShardingWarning, from_torchrec, to_torchrec
from neuroshard.core.errors import InvalidInput
from neuroshard.core.operator_limits import (
    OPERATORS,
    device_of,
    equal_shards,
    fault_of_tables,
    widest_cut,
    widest_shard,
)
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.task import ShardingTask

ROWS, SAMPLES, LOOKUPS = 20, 8, 3
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "partial_rowwise_lamb": EmbOptimType.PARTIAL_ROWWISE_LAMB,
    "lars_sgd": EmbOptimType.LARS_SGD,
}


def table(dim: int, **fields: object) -> Table:
    return Table.model_validate({"name": "t", "rows": ROWS, "dim": dim, "pooling_factor": 1.0, **fields})


def operator(dim: int, pooling: PoolingMode, optimizer: EmbOptimType) -> SplitTableBatchedEmbeddingBagsCodegen:
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=optimizer,
        learning_rate=0.1,
        pooling_mode=pooling,
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        made.split_embedding_weights()[0].copy_(torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(0)))
    return made


@pytest.mark.parametrize("dim", [1028, 2052, 4096, 16_384])
@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.NONE], ids=["pooled", "sequence"])
def test_on_a_cpu_wide_tables_are_looked_up_and_trained_as_by_torch(dim: int, pooling: PoolingMode) -> None:
    made = operator(dim, pooling, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    before = made.split_embedding_weights()[0].clone()
    ids = torch.arange(SAMPLES * LOOKUPS) % (ROWS // 2)
    output = made(ids, torch.arange(0, len(ids) + 1, LOOKUPS))
    rows = before[ids]
    expected = rows if pooling == PoolingMode.NONE else rows.view(SAMPLES, LOOKUPS, dim).sum(1)
    assert torch.allclose(output, expected, atol=1e-5)
    output.sum().backward()
    changed = (made.split_embedding_weights()[0] != before).all(dim=1)
    assert changed.tolist() == [row < ROWS // 2 for row in range(ROWS)]
    assert not fault_of_tables([table(dim, pooling="none" if pooling == PoolingMode.NONE else "sum")], "cpu")


@pytest.mark.parametrize("optimizer", OPTIMIZER_BYTES)
def test_the_optimizers_of_a_cpu_are_those_that_its_operator_takes(optimizer: str) -> None:
    if optimizer in OPERATORS["cpu"].optimizers:
        operator(8, PoolingMode.SUM, OPTIMIZERS[optimizer])
    else:
        with pytest.raises(AssertionError, match="not supported in CPU mode"):
            operator(8, PoolingMode.SUM, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("fields", [{}, {"weighted": True}, {"pooling": "none"}])
def test_a_gpu_holds_1024_columns_of_every_kind(fields: dict[str, object]) -> None:
    assert widest_shard(table(64, **fields), "cuda") == widest_shard(table(64), "cuda", copied=True) == 1024
    assert "1,028 columns" in fault_of_tables([table(1024), table(1028, **fields)], "cuda")


def test_a_cpu_is_given_16384_columns_of_pooled_tables_and_any_of_sequences() -> None:
    assert "16,388 columns" in fault_of_tables([table(16_384), table(16_388)], "cpu")
    assert not fault_of_tables([table(16_384), table(16_388, pooling="none")], "cpu")


def test_only_costs_of_cpus_are_for_cpus() -> None:
    assert {device_of("cpu", "digest"), device_of("analytic", "analytic:cpu")} == {"cpu"}
    others = [
        ("cuda", "digest"),
        ("analytic", "analytic:h100"),
        ("given", "digest"),
        ("synthetic", "digest"),
        (None, None),
    ]
    assert {device_of(*one) for one in others} == {"cuda"}


def test_equal_shards_are_multiples_of_4_columns_and_no_wider_than_allowed() -> None:
    assert equal_shards(3000, 1024) == [3, 5, 6, 10, 15, 25, 30]
    assert equal_shards(1028, 1024) == []
    assert [widest_cut(table(dim), 1024) for dim in (512, 3000, 1028)] == [512, 1000, 516]
    assert widest_cut(table(1028, pooling="none"), 1024) is None


def plan_of(*cut: tuple[int, int], copied: bool = False) -> Plan:
    """A plan of one table in shards of (width, rank), or as copies."""
    wide = table(cut[0][0] if copied else sum(width for width, _ in cut))
    offsets = [0 if copied else sum(width for width, _ in cut[:place]) for place in range(len(cut))]
    rules = [{"table": "t", "data_parallel": True}] if copied else []
    return Plan(
        task=ShardingTask.model_validate(
            {"tables": (wide,), "device_memory_bytes": (2**30,) * 2, "batch_size": 8, "constraints": {"tables": rules}}
        ),
        shards=tuple(
            Shard(table="t", rows=ROWS, column_offset=at, dim=width, device=rank)
            for at, (width, rank) in zip(offsets, cut, strict=True)
        ),
        provenance=Provenance(neuroshard_version="0", algorithm="by hand"),
    )


def module_of(plan: Plan) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=plan.task.tables[0].dim, feature_names=["t"]
    )
    return EmbeddingBagCollection(tables=[config], device=torch.device("meta"))


@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        (plan_of((1500, 0), (1500, 1)), "1,500 columns on rank 0"),
        (plan_of((1028, 0), (1028, 1), copied=True), "1,028 columns on rank 0"),
        (plan_of((512, 0), (1024, 1), (4, 1)), "1,028 columns on rank 1"),  # unequal neighbours, which become one
    ],
    ids=["column-wise", "data-parallel", "joined"],
)
def test_a_trainer_on_gpus_gets_no_shard_that_its_operator_cannot_hold(plan: Plan, columns: str) -> None:
    with refused(InvalidInput, "'t'", columns, "holds 1,024", "search again"):
        to_torchrec(plan, module_of(plan), device_type="cuda")
    on_cpus = to_torchrec(plan, module_of(plan), device_type="cpu")
    if plan.held.constraints.data_parallel:
        return
    with warned(ShardingWarning, "'t'", columns.split()[0], "on GPUs"):
        from_torchrec(on_cpus, module_of(plan), device_memory_bytes=(2**30,) * 2, batch_size=8)


def test_shards_of_1024_columns_go_to_gpus_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    plan = plan_of((1024, 0), (1024, 0), (1024, 1))
    given = to_torchrec(plan, module_of(plan), device_type="cuda", optimizer="sgd")
    from_torchrec(given, module_of(plan), device_memory_bytes=(2**30,) * 2, batch_size=8)
    assert not [one for one in recwarn if issubclass(one.category, ShardingWarning)]
