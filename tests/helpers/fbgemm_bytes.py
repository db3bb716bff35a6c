"""Bytes of FBGEMM's real operator, on the meta device."""

import pytest

from neuroshard.core.table import Table
from neuroshard.core.tiers import WAYS, Cache, Tier, TierBytes

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
