"""The settings of fused operators, by what they make of what a plan was priced for. client/torchrec/trainer.py gives the answers.

Tried with torchrec 1.8 and 1.9 on gloo. docs/trainer.md says what becomes of some, and tests/client/settings.toml of each.
"""

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
# What changes what a step runs, in words
CHANGES_A_STEP = {
    "use_experimental_tbe": "other kernels on a GPU",
    "enable_raw_embedding_streaming": "copies of rows or inputs leave the device in every step",
    "tbe_input_multiplexer_config": "copies of rows or inputs leave the device in every step",
}
# Keys that TorchRec takes out before it makes the operator, those that it gives the operator itself, and all others whose answer
# is known; a newer FBGEMM may have more
_TAKEN_OUT = "use_one_tbe_per_table res_store_shards res_enabled_tables _batch_key __register_ssd_table_list"
_GIVEN = "embedding_specs feature_table_map weights_precision pooling_mode device table_names embedding_shard_info res_params"
_OTHERS = """
optimizer learning_rate eps weight_decay_mode eta beta1 beta2 ar_alpha ema_beta min_shrinkage ensemble_mode emainplace_mode
max_gradient gradient_clipping stochastic_rounding bounds_check_mode output_dtype embedding_table_offset_type
embedding_table_index_type uvm_non_rowwise_momentum uvm_host_mapped cache_algorithm cache_load_factor cache_reserved_memory
cache_sets cache_precision enforce_hbm prefetch_pipeline multipass_prefetch_config gather_uvm_cache_stats record_cache_metrics
stats_reporter_config optimizer_state_dtypes preallocated_host_buffers
"""
TAKEN_OUT, GIVEN_BY_TORCHREC = set(_TAKEN_OUT.split()), set(_GIVEN.split())
KNOWN = {*_OTHERS.split(), *STATE_OF_A_ROW, *READ_BY, *CHANGES_A_STEP, *TAKEN_OUT, *GIVEN_BY_TORCHREC}
