"""What a trainer's settings change of what a plan was priced for, row by row; docs/trainer.md shows some of the rows.

Tried with torchrec 1.8 and 1.9 on gloo. client/torchrec/trainer.py is what gives the answers.
"""

from typing import NamedTuple

from neuroshard.core.sharding import DATA_PARALLEL
from neuroshard.core.tiers import BY_KERNEL, IN_HBM

# Bytes more of state that row-wise Adagrad (of the last one Adam) keeps for each row of a shard: counted on the operator
STATE_OF_A_ROW = {
    "counter_based_regularization": 8,
    "cowclip_regularization": 8,
    "global_weight_decay": 4,
    "extra_optimizer_config": 4,
}


# Settings that FBGEMM's operator reads with these optimizers only (split_embedding_codegen_lookup_invokers), and others ignore
READ_BY = {
    "weight_decay": ("rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd"),
    "momentum": ("lars_sgd",),
    "max_norm": ("rowwise_adagrad",),
}
# What the operator for CPUs does not read with row-wise Adagrad either (weights after 3 steps are the same to the bit)
NOT_READ_ON_CPUS = ("weight_decay", "max_norm", "counter_based_regularization")


class Setting(NamedTuple):
    """Settings with one answer, in one place of a trainer."""

    where: str
    named: str
    changes: str
    answer: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.named.split(", "))


FUSED, SHARDER, CONFIG = "`fused_params`", "a sharder", "a collection"
HELD, TRAINER = "a plan for `from_torchrec`", "the trainer"
NO_EFFECT = "no effect on a plan"
_ROWS = {
    FUSED: (
        (
            "optimizer",
            "the state of a row; FBGEMM's default is SGD",
            "memory counts its state, and column splits are warned of as below; another one than `optimizer=` is refused; one "
            "that the table below lacks is warned of",
        ),
        (
            "learning_rate, eps, weight_decay_mode, eta, beta1, beta2, ar_alpha, ema_beta, min_shrinkage, "
            "ensemble_mode, emainplace_mode",
            "what is learned",
            NO_EFFECT,
        ),
        (
            "weight_decay, momentum, max_norm, max_gradient",
            "what is learned, if FBGEMM reads it: no decay with SGD, Adagrad, and row-wise Adagrad without a "
            "`weight_decay_mode`; momentum with LARS alone, `max_norm` with row-wise Adagrad; on CPUs neither decay nor "
            "`max_norm`; `max_gradient` with `gradient_clipping`",
            "warned of where FBGEMM ignores it",
        ),
        (
            "stochastic_rounding, bounds_check_mode, embedding_table_offset_type",
            "how fp16 rows are rounded, and ids checked",
            f"{NO_EFFECT}: costs are measured with FBGEMM's defaults",
        ),
        (
            "output_dtype",
            "FP16 and BF16 halve outputs, their gradients and what is sent of them; the operator's own reads of rows stay",
            "what is sent is priced, with `--collective-precision` of the same name and without codecs; else warned of in "
            "bytes. Refused on CPUs (BF16, and FP16 of weighted means, which FBGEMM does not divide), and where a rank has no "
            "table of a sharding type of the module: it receives fp32, and ranks fail or wait for each other; codecs cure that",
        ),
        ("gradient_clipping", "a clipped copy of the outputs' gradients", "warned of in bytes"),
        ("use_one_tbe_per_table", "an operator for each table", "warned of, with the operators that are not priced"),
        (
            ", ".join(STATE_OF_A_ROW),
            "more state for each row of a shard",
            "warned of in bytes; reserve them with `--reserve`",
        ),
        (
            "uvm_non_rowwise_momentum",
            "state of elements moves to host memory",
            "warned of in bytes, if the optimizer has any",
        ),
        ("use_experimental_tbe", "other kernels on a GPU", "warned of"),
        ("embedding_table_index_type", "int32: 4 bytes a lookup instead of 8", "warned of"),
        (
            "enable_raw_embedding_streaming, tbe_input_multiplexer_config",
            "copies of rows or inputs leave the device in every step",
            "warned of",
        ),
        (
            "cache_algorithm, cache_load_factor, cache_reserved_memory",
            "caches over tables in host memory",
            f"{NO_EFFECT}, which says them of each table that it caches, and wins",
        ),
        (
            "cache_sets, cache_precision, enforce_hbm, prefetch_pipeline, multipass_prefetch_config",
            "how large caches over tables in host memory are, and what they hold",
            "refused for plans with cached tables where it is not theirs; no effect on others",
        ),
        (
            "gather_uvm_cache_stats, record_cache_metrics, stats_reporter_config, uvm_host_mapped",
            "what is counted of caches; how host memory is mapped",
            f"{NO_EFFECT}: costs are those without counters",
        ),
        (
            "res_store_shards, res_enabled_tables, _batch_key, __register_ssd_table_list",
            "nothing in training by themselves",
            NO_EFFECT,
        ),
        (
            "embedding_specs, feature_table_map, weights_precision, pooling_mode, device, table_names, "
            "embedding_shard_info, res_params",
            "TorchRec gives them itself: a bare `TypeError`",
            "refused",
        ),
        (
            "optimizer_state_dtypes, preallocated_host_buffers",
            "dicts, which TorchRec cannot group tables by: a bare `TypeError`",
            "refused, as every value without a hash",
        ),
        (
            "any other",
            "a bare `TypeError` where FBGEMM does not know it",
            "refused; warned of where a newer FBGEMM knows it",
        ),
    ),
    SHARDER: (
        (
            "qcomm_codecs_registry",
            "the precision of collectives",
            "priced with `--collective-precision`; another one is warned of",
        ),
        (
            "use_index_dedup",
            "sequences: each id of a rank's batch is looked up and sent once",
            "its memory is counted with `--index-dedup`, and what differs from the plan is warned of; give these tables distinct "
            "ids a sample as pooling factors to price it",
        ),
        (
            "sharded_module_order_overwrite",
            "the order of launches and of output columns",
            f"{NO_EFFECT}; read outputs by key",
        ),
        ("none for a module", "a bare `KeyError`", "refused"),
    ),
    CONFIG: (
        ("data_type", "bytes of an element", "FP32 and FP16 are priced, others refused"),
        (
            "pooling, is_weighted, feature_names",
            "lookups and outputs",
            "priced; others than the plan's are warned of, a sequence for a pooled table refused",
        ),
        (
            "stash_weights",
            "weights leave the device and come back in every step",
            "warned of in bytes, and noted at import; in TorchRec 1.9 also what `set_stashed_tables` names",
        ),
        ("enable_embedding_update", "an operator apart, and updates", "warned of, and noted at import"),
        ("use_virtual_table, num_embeddings_post_pruning", "TorchRec's sharding fails", "refused"),
        (
            "init_fn, weight_init_min, weight_init_max, need_pos, input_dim, total_num_buckets, "
            "virtual_table_eviction_policy, need_indices, use_gather_select",
            "first values; tables of other kinds; how sequences are returned",
            NO_EFFECT,
        ),
        (
            "mark_data_parallel_skip_grad_sync",
            "TorchRec 1.9: gradients of copied tables are not summed up, so each rank's copy learns from its own samples",
            "warned of where the plan has copies in the module",
        ),
    ),
    HELD: (
        (
            "compute_kernel",
            "where a table lies, and who trains it",
            f"`{IN_HBM.kernel}` and, of data-parallel tables, `{DATA_PARALLEL.kernel}` are kept; with `host_memory_bytes=` also "
            f"{' and '.join(f'`{kernel}`' for kernel in BY_KERNEL if kernel != IN_HBM.kernel)}; all others refused",
        ),
        (
            "cache_params, enforce_hbm",
            "nothing for tables in device memory",
            "left out, with a note in the plan; of cached tables the load factor is kept, and what no plan's cache has is "
            "refused",
        ),
        (
            "key_value_params, output_dtype, stochastic_rounding, bounds_check_mode, any other",
            "the operator",
            "refused; the last ones can be said in the sharders' `fused_params`",
        ),
    ),
    TRAINER: (
        (
            "batch_size=",
            "lookups, bytes and step memory, about in proportion",
            "another one than the plan's is warned of; refused where a rank lacks the memory",
        ),
        (
            "pipeline=",
            "batches on the device at a time, and whether steps wait for input and for rows that caches miss",
            "another one than the plan's is warned of; refused where a rank lacks the memory",
        ),
    ),
}
SETTINGS = tuple(Setting(where, *row) for where, rows in _ROWS.items() for row in rows)
