"""Bytes of tiers, held against what FBGEMM's real operator allocates on the meta device."""

import math
import random

import pytest

from neuroshard.core.part import Part
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import WAYS, Cache, Tier, TierBytes, load_factor, operator_bytes

torch = pytest.importorskip("torch")
common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")

PLACES = {"hbm": "DEVICE", "cached": "MANAGED_CACHING", "host": "MANAGED"}
OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adagrad": "EXACT_ADAGRAD",
    "adam": "ADAM",
    "partial_rowwise_adam": "PARTIAL_ROWWISE_ADAM",
    "lamb": "LAMB",
    "partial_rowwise_lamb": "PARTIAL_ROWWISE_LAMB",
    "lars_sgd": "LARS_SGD",
}
GROWS = 100  # bytes that a buffer has at least if it grows with rows; the others have a number a table


def allocated(tables: list[tuple[Table, Tier]], optimizer: str, cache: Cache | None) -> TierBytes:
    """What FBGEMM allocates for an operator of these tables."""
    places = [(table, common.EmbeddingLocation[PLACES[tier]]) for table, tier in tables]
    rows = sum(table.rows for table, tier in tables if tier == "cached")
    more = {}
    if cache is not None:
        # FBGEMM would ask a CUDA device for its free memory, so it is told what it makes of the load factor otherwise
        algorithm = common.CacheAlgorithm.LFU if cache.lfu else common.CacheAlgorithm.LRU
        sets = max((int(rows * cache.load_factor) + WAYS - 1) // WAYS, 1)
        more = {"cache_sets": sets, "cache_algorithm": algorithm, "prefetch_pipeline": cache.prefetch}
    operator = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(table.rows, table.dim, place, training.ComputeDevice.CUDA) for table, place in places],
        optimizer=configs.EmbOptimType[OPTIMIZERS[optimizer]],
        weights_precision=configs.SparseType.FP32 if tables[0][0].element_bytes == 4 else configs.SparseType.FP16,
        device=torch.device("meta"),
        **more,
    )
    found = {"hbm": 0, "host": 0}
    for name, tensor in [*operator.named_parameters(), *operator.named_buffers()]:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes >= GROWS:
            found["host" if name in operator._uvm_tensors_log else "hbm"] += nbytes
    return TierBytes(**found)


@pytest.mark.parametrize("seed", range(40))
def test_an_operator_takes_what_fbgemm_allocates(seed: int) -> None:
    """Drawn tiers, optimizers, widths, element types and caches."""
    rng = random.Random(seed)
    optimizer = rng.choice(list(OPTIMIZERS))
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    element_bytes = rng.choice([2, 4])
    tables: list[tuple[Table, Tier]] = []
    for number in range(rng.randint(1, 4)):
        table = Table(
            name=f"t{number}",
            rows=rng.randint(1_000, 200_000),
            dim=4 * rng.randint(8, 64),
            pooling_factor=1.0,
            element_bytes=element_bytes,
            optimizer_bytes_per_row=per_row,
            optimizer_bytes_per_element=per_element,
        )
        tables.append((table, rng.choice(["hbm", "cached", "cached", "host"])))
    prefetch = rng.random() < 0.3
    cache = Cache(rng.uniform(0.001, 1.0), lfu=not prefetch and rng.random() < 0.3, prefetch=prefetch)
    some_cached = any(tier == "cached" for _, tier in tables)
    assert operator_bytes([(Part.of(table), tier) for table, tier in tables], cache) == allocated(
        tables, optimizer, cache if some_cached else None
    )


@pytest.mark.parametrize("seed", range(200))
def test_a_load_factor_makes_a_cache_of_the_rows_asked_for(seed: int) -> None:
    """FBGEMM rounds down to rows and up to sets; a cache has the rows asked for, and less than a set more."""
    rng = random.Random(seed)
    rows = rng.randint(WAYS, 2 ** rng.randint(6, 40))
    asked = rng.randint(1, rows)
    slots = Cache(load_factor(asked, rows)).slots(rows)
    assert asked <= slots < asked + WAYS
    assert 0 < load_factor(asked, rows) <= 1.0


def test_caches_of_a_trainer_that_fetches_ahead_count_the_locks_of_their_rows() -> None:
    table = Table(name="clicks", rows=1000, dim=8, pooling_factor=1.0)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**20,), batch_size=1, host_memory_bytes=2**20)
    cached = task.with_tiers({"clicks": ("cached", 320)})
    ahead = cached.model_copy(update={"pipeline": "prefetch"})
    locks = ahead.memory(Part.of(table)).weights - cached.memory(Part.of(table)).weights
    assert locks == 320 * 4


def test_a_cached_table_without_a_cache_is_refused() -> None:
    table = Table(name="clicks", rows=100, dim=4, pooling_factor=1.0)
    with pytest.raises(ValueError, match="'clicks' is cached, but nothing says how many"):
        operator_bytes([(Part.of(table), "cached")])
    assert math.isclose(Cache(0.5).slots(100), 64)
