"""Every row of SETTINGS: what a trainer says that a plan was not priced for has no effect, is warned of or refused."""

import dataclasses
import inspect
import re
import tomllib
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, MultiPassPrefetchConfig, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    CowClipDefinition,
    GlobalWeightDecayDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    KeyValueParams,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from helpers.plans import TABLES
from helpers.refusals import names, refused
from helpers.trainers import cut_plan
from neuroshard.client.torchrec import ShardingWarning, from_torchrec, qcomms, to_torchrec
from neuroshard.client.torchrec.settings import GIVEN_BY_TORCHREC, KNOWN, NOT_READ_ON_CPUS, READ_BY, STATE_OF_A_ROW
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.precision import parse_precision
from neuroshard.core.table import Table
from neuroshard.files.importers.torchrec_collections import NAMES

FUSED, SHARDER, CONFIG = "`fused_params`", "a sharder", "a collection"
HELD, TRAINER = "a plan for `from_torchrec`", "the trainer"
NO_EFFECT = "no effect on a plan"


class Setting(NamedTuple):
    """Settings with one answer, in one place of a trainer."""

    where: str
    named: str
    changes: str
    answer: str

    @property
    def names(self) -> list[str]:
        return self.named.split(", ")


ROWS = tomllib.loads(Path(__file__).with_name("settings.toml").read_text())
SETTINGS = [Setting(**row) for row in ROWS["settings"]]
USER, ITEM, COUNTRY = TABLES
WHOLE = cut_plan(TABLES, 2, {"user": [(16, 0)], "item": [(8, 0)], "country": [(4, 1)]}, batch_size=64)
ON_ONE = cut_plan(TABLES, 2, {table.name: [(table.dim, 0)] for table in TABLES}, batch_size=64)
COPIED = cut_plan(TABLES, 2, {"user": [(16, 0)], "country": [(4, 1)]}, batch_size=64, copied={"item"})
SEQUENCE = Table(name="s", rows=100, dim=8, pooling_factor=5.0, pooling="none")
SEQUENCES = cut_plan([SEQUENCE], 2, {"s": [(8, 0)]}, batch_size=64)


ON_GPUS: dict[str, Any] = {"device_type": "cuda", "local_world_size": 2}
MEMBERS: dict[str, Any] = {  # of settings that take nothing else
    "weight_decay_mode": WeightDecayMode.L2,
    "bounds_check_mode": BoundsCheckMode.FATAL,
    "cache_algorithm": CacheAlgorithm.LFU,
    "cache_precision": SparseType.FP16,
}


def model(tables: Any = TABLES, *, weighted: bool = False, **config: Any) -> nn.Module:
    kind, collection = (
        (EmbeddingConfig, EmbeddingCollection)
        if tables[0].pooling == "none"
        else (EmbeddingBagConfig, EmbeddingBagCollection)
    )
    configs = [
        kind(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name], **config) for t in tables
    ]
    more = {"is_weighted": True} if weighted else {}
    return nn.ModuleDict({"sparse": collection(tables=configs, device=torch.device("meta"), **more)})


def in_precision(plan: Plan, words: str) -> Plan:
    task = plan.task.model_copy(update={"collective_precision": parse_precision(words)})
    return Plan(task=task, shards=plan.shards, provenance=plan.provenance)


def said(plan: Plan = WHOLE, module: nn.Module | None = None, **how: Any) -> list[str]:
    """What `to_torchrec` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_torchrec(plan, module or model(), **{"device_type": "cpu", "any_output_order": True, **how})
    assert all(warning.category is ShardingWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def of(fused: dict[str, Any], plan: Plan = WHOLE, **how: Any) -> list[str]:
    """What it says of a sharder with these fused_params."""
    return said(plan, sharders=[EmbeddingBagCollectionSharder(fused_params=fused)], **how)


def has(messages: list[str], *facts: object) -> None:
    """One warning, which names the facts."""
    (message,) = messages
    missing = [fact for fact in facts if not names(message, fact)]
    assert not missing, f"{missing} in: {message}"


def of_the_optimizer() -> None:
    adagrad = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
    assert of(adagrad, optimizer="adagrad") == []
    with refused(UsageError, "adagrad", "sgd", "sparse", "EmbeddingBagCollectionSharder"):
        of({}, optimizer="adagrad")  # FBGEMM's default
    has(of({"optimizer": EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD}), "sparse", "ensemble_row_wise_adagrad")
    tight = Plan(
        task=WHOLE.task.model_copy(update={"device_memory_bytes": WHOLE.memory_bytes()}),
        shards=WHOLE.shards,
        provenance=WHOLE.provenance,
    )
    with refused(InvalidInput, "rank 0", "adagrad", "user"):
        of(adagrad, tight)
    cut = cut_plan(TABLES, 2, {"user": [(8, 0), (8, 1)], "item": [(8, 0)], "country": [(4, 1)]}, batch_size=64)
    has(of({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, cut), "user", "rowwise_adagrad")


def of_output_dtype() -> None:
    half = {"output_dtype": SparseType.FP16}
    # rank 0 has 24 columns of outputs for 64 samples
    has(of(half), "sparse", "fp16", "fp32", "3.0 KiB", "6.0 KiB", "--collective-precision fp16")
    assert of(half, in_precision(WHOLE, "fp16")) == []
    assert of({"output_dtype": SparseType.FP32}) == []
    with refused(InvalidInput, "rank 1", "sparse", "fp16", "table_wise"):
        of(half, ON_ONE)
    with refused(InvalidInput, "sparse", "bf16", "CPU"):
        of({"output_dtype": DataType.BF16})
    with refused(InvalidInput, "sparse", "int8"):
        of({"output_dtype": SparseType.INT8}, device_type="cuda")
    weighted = Plan(
        task=WHOLE.task.model_copy(update={"tables": tuple(t.model_copy(update={"weighted": True}) for t in TABLES)}),
        shards=WHOLE.shards,
        provenance=WHOLE.provenance,
    )
    means = {"module": model(pooling=PoolingType.MEAN, weighted=True)}
    with refused(InvalidInput, "sparse", "user", "mean with weights", "fp16", "does not divide"):
        of(half, weighted, **means)
    assert any("fp16" in each for each in of(half, weighted, **means, **ON_GPUS))
    assert not any("divide;" in each for each in of(half, weighted, module=model(weighted=True)))
    coded = in_precision(ON_ONE, "fp16")
    sharder = EmbeddingBagCollectionSharder(fused_params=half, qcomm_codecs_registry=qcomms(coded, "cpu"))
    assert said(coded, sharders=[sharder]) == []


def of_state_of_rows() -> None:
    adagrad = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    definition = CounterBasedRegularizationDefinition()
    counting = {**adagrad, "counter_based_regularization": definition, "weight_decay_mode": WeightDecayMode.COUNTER}
    has(of(counting, **ON_GPUS), "user", "counter_based_regularization", "8 bytes", "rank 0", "--reserve")
    ignored, more = of(counting)
    has([ignored], "user", "counter_based_regularization", "no effect", "CPUs")
    has([more], "8 bytes")


def of_elements_in_host_memory() -> None:
    uvm = {"uvm_non_rowwise_momentum": True}
    assert of(uvm) == []  # SGD has none
    has(of({**uvm, "optimizer": EmbOptimType.ADAM}), "uvm_non_rowwise_momentum", "rank 0", "host memory")


def of_what_torchrec_gives() -> None:
    for name in GIVEN_BY_TORCHREC:
        with refused(InvalidInput, "user", "sparse", name, "EmbeddingBagCollectionSharder"):
            of({name: 1})


def of_what_has_no_hash() -> None:
    for name in ("optimizer_state_dtypes", "preallocated_host_buffers"):
        with refused(InvalidInput, "user", "sparse", name, "dict"):
            of({name: {}})


def of_ignored() -> None:
    rowwise = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    has(of({"momentum": 0.9}), "'user'", "2 more", "momentum", "no effect", "sgd", "lars_sgd")
    has(of({"weight_decay": 0.1}), "'user'", "weight_decay", "sgd")
    has(of(rowwise | {"weight_decay": 0.1}, **ON_GPUS), "weight_decay", "weight_decay_mode")
    for mode in (WeightDecayMode.L2, WeightDecayMode.DECOUPLE):
        decays = rowwise | {"weight_decay": 0.1, "weight_decay_mode": mode}
        assert of(decays, **ON_GPUS) == []
        has(of(decays), "weight_decay", "no effect", "CPUs", "rowwise_adagrad")
    assert of(rowwise | {"max_norm": 0.1}, **ON_GPUS) == of({"optimizer": EmbOptimType.ADAM, "weight_decay": 0.1}) == []
    has(of(rowwise | {"max_norm": 0.1}), "max_norm", "no effect", "CPUs")
    has(of({"max_norm": 0.1}), "max_norm", "rowwise_adagrad")
    has(of({"max_gradient": 0.1}), "max_gradient", "gradient_clipping")
    has(of({"max_gradient": 0.1, "gradient_clipping": True}), "gradient_clipping makes")


def of_any_other() -> None:
    with refused(InvalidInput, "user", "sparse", "gradient_cliping", "fused_params"):
        of({"gradient_cliping": True})
    has(of({"is_qr_tbe": True}), "user", "is_qr_tbe")


def of_dedup() -> None:
    once = EmbeddingCollectionSharder(use_index_dedup=True)
    # 5 lookups of 8 columns for 64 samples
    has(said(SEQUENCES, model([SEQUENCE]), sharders=[once]), "sparse", "use_index_dedup", "10.0 KiB", "rank 0")
    assert said(SEQUENCES, model([SEQUENCE]), sharders=[EmbeddingCollectionSharder()]) == []
    counts = {"pipeline": "none", "step_ledger": 1, "index_dedup": True}
    task = SEQUENCES.task.model_copy(update=counts)
    planned = Plan.model_validate({**dict(SEQUENCES), "format_version": 6, "task": task, "task_digest": task.digest()})
    assert said(planned, model([SEQUENCE]), sharders=[once]) == []
    has(
        said(planned, model([SEQUENCE]), sharders=[EmbeddingCollectionSharder()]),
        "use_index_dedup=True",
        "--index-dedup",
    )


def of_codecs() -> None:
    has(of({}, in_precision(WHOLE, "fp16")), "sparse", "fp32", "fp16", "qcomm_codecs_registry=qcomms(plan)")


def of_order() -> None:
    assert said(sharders=[EmbeddingBagCollectionSharder(sharded_module_order_overwrite=["row_wise"])]) == []


def of_no_sharder() -> None:
    with refused(InvalidInput, "sparse", "EmbeddingBagCollection", "EmbeddingBagCollectionSharder"):
        said(sharders=[EmbeddingCollectionSharder()])


def of_data_type() -> None:
    with refused(InvalidInput, "user", "sparse", "BF16"):
        said(module=model(data_type=DataType.BF16))


def of_lookups() -> None:
    has(said(module=model(pooling=PoolingType.MEAN)), "user", "mean", "sum")


def of_stashed_weights() -> None:
    nbytes = USER.rows * USER.dim * 4 + ITEM.rows * ITEM.dim * 4
    has(said(module=model(stash_weights=True)), "user", "stash_weights", f"{nbytes / 1024:.1f} KiB", "rank 0")


def of_updates() -> None:
    has(said(module=model(enable_embedding_update=True)), "user", "enable_embedding_update")


def of_failing_configs() -> None:
    for config in ({"use_virtual_table": True}, {"num_embeddings_post_pruning": 10}):
        with refused(InvalidInput, "user", "sparse", next(iter(config))):
            said(module=model(**config))


def of_idle_configs() -> None:
    idle: dict[str, Any] = {
        "weight_init_min": -0.1,
        "weight_init_max": 0.1,
        "need_pos": True,
        "input_dim": 9,
        "total_num_buckets": 5,
    }
    assert said(module=model(init_fn=nn.init.zeros_, **idle)) == []


def of_copies_without_a_sum() -> None:
    module: Any = model()
    assert said(COPIED, module, any_output_order=True) == []
    module["sparse"]._torchrec_data_parallel_skip_grad_sync = True  # what mark_data_parallel_skip_grad_sync does
    has(said(COPIED, module, any_output_order=True), "item", "sparse", "mark_data_parallel_skip_grad_sync")
    assert said(WHOLE, module) == []


def taken_over(plan: Plan = WHOLE, table: str = "user", **fields: Any) -> Plan:
    """What is made of a plan of TorchRec's of which one table has other fields."""
    theirs: Any = to_torchrec(plan, model(), device_type="cpu")
    for field, value in fields.items():
        setattr(theirs.plan["sparse"][table], field, value)
    return from_torchrec(theirs, model(), device_memory_bytes=[2**20] * 2, batch_size=64, tables=plan.task.tables)


def of_kernels() -> None:
    assert taken_over(COPIED).shards == COPIED.shards  # fused, and dense of copies
    for kernel in ("fused_uvm", "fused_uvm_caching", "key_value", "ssd_virtual_table", "quant", "dense", "new_in_2027"):
        with refused(InvalidInput, "user", kernel, "fused"):
            taken_over(compute_kernel=kernel)
    with refused(InvalidInput, "item", "fused", "dense"):
        taken_over(COPIED, "item", compute_kernel="fused")


def of_caches() -> None:
    plan = taken_over(cache_params=CacheParams(load_factor=0.1), enforce_hbm=True)
    assert [note.split()[0:3] for note in plan.provenance.notes] == [
        ["cache_params", "of", "'user'"],
        ["enforce_hbm", "of", "'user'"],
    ]


def of_other_fields() -> None:
    fields = {
        "key_value_params": KeyValueParams(),
        "output_dtype": DataType.FP16,
        "stochastic_rounding": False,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    for name, value in fields.items():
        with refused(InvalidInput, "user", name):
            taken_over(**{name: value})


def of_other_caches() -> None:
    plain = {"cache_sets": 5, "cache_precision": SparseType.FP16, "enforce_hbm": True, "prefetch_pipeline": True}
    assert [name for name, value in plain.items() if of({name: value}) != []] == []
    task = WHOLE.task.model_copy(update={"host_memory_bytes": 2**30}).with_tiers({"user": ("cached", 32)})
    tiers = Plan(task=task, shards=WHOLE.shards, provenance=WHOLE.provenance)
    multipass = {"multipass_prefetch_config": MultiPassPrefetchConfig(num_passes=2)}
    for name, value in (plain | multipass).items():
        with refused(UsageError, "user", name):
            of({name: value}, tiers)
    own = {"cache_sets": 0, "cache_precision": SparseType.FP32, "enforce_hbm": False, "prefetch_pipeline": False}
    with_prefetch = Plan(
        task=task.model_copy(update={"pipeline": "prefetch"}), shards=WHOLE.shards, provenance=WHOLE.provenance
    )
    assert len(of(own, tiers)) == 1  # that ranks on CPUs have no caches
    assert len(of({"prefetch_pipeline": True}, with_prefetch)) == 1


def of_batch_size() -> None:
    assert said(batch_size=64) == []
    has(said(batch_size=128), 64, 128, "--batch-size 128")
    counted = Plan(
        task=WHOLE.task.model_copy(update={"pipeline": "none"}), shards=WHOLE.shards, provenance=WHOLE.provenance
    )
    with refused(InvalidInput, "rank 0", "a step"):
        said(counted, batch_size=2**20)
    with refused(UsageError, "batch_size", 1, 2):
        said(batch_size=1)
    with refused(InvalidInput, "int8"):
        said(in_precision(WHOLE, "int8"), batch_size=8)


def of_pipelines() -> None:
    has(said(pipeline="prefetch"), "prefetch", "--pipeline prefetch")
    large = cut_plan(TABLES, 2, {table.name: [(table.dim, 0)] for table in TABLES}, batch_size=2**20)
    with refused(InvalidInput, "rank 0", "a step"):
        said(large, pipeline="sparse-dist")
    with refused(UsageError, "pipeline", "stashing", "sparse-dist"):
        said(pipeline="stashing")


def warned_of(setting: str, value: Any, *facts: object) -> Callable[[], None]:
    def check() -> None:
        has(of({setting: value}), "user", "sparse", setting, *facts)
        assert of({setting: False}) == []

    return check


ANSWERS: dict[tuple[str, str], Callable[[], None]] = {
    (FUSED, "optimizer"): of_the_optimizer,
    (FUSED, "output_dtype"): of_output_dtype,
    (FUSED, "gradient_clipping"): warned_of("gradient_clipping", True, "6.0 KiB", "rank 0", "--reserve"),
    (FUSED, "use_one_tbe_per_table"): warned_of("use_one_tbe_per_table", True, "1 operator", "rank 0"),
    (FUSED, "counter_based_regularization"): of_state_of_rows,
    (FUSED, "uvm_non_rowwise_momentum"): of_elements_in_host_memory,
    (FUSED, "use_experimental_tbe"): warned_of("use_experimental_tbe", True),
    (FUSED, "embedding_table_index_type"): lambda: has(
        of({"embedding_table_index_type": torch.int32}) + of({"embedding_table_index_type": torch.int64}),
        "embedding_table_index_type",
        "torch.int32",
        "8 bytes",
    ),
    (FUSED, "enable_raw_embedding_streaming"): warned_of("enable_raw_embedding_streaming", True),
    (FUSED, "cache_sets"): of_other_caches,
    (FUSED, "embedding_specs"): of_what_torchrec_gives,
    (FUSED, "optimizer_state_dtypes"): of_what_has_no_hash,
    (FUSED, "weight_decay"): of_ignored,
    (FUSED, "any other"): of_any_other,
    (SHARDER, "qcomm_codecs_registry"): of_codecs,
    (SHARDER, "use_index_dedup"): of_dedup,
    (SHARDER, "sharded_module_order_overwrite"): of_order,
    (SHARDER, "none for a module"): of_no_sharder,
    (CONFIG, "data_type"): of_data_type,
    (CONFIG, "pooling"): of_lookups,
    (CONFIG, "stash_weights"): of_stashed_weights,
    (CONFIG, "enable_embedding_update"): of_updates,
    (CONFIG, "use_virtual_table"): of_failing_configs,
    (CONFIG, "init_fn"): of_idle_configs,
    (CONFIG, "mark_data_parallel_skip_grad_sync"): of_copies_without_a_sum,
    (HELD, "compute_kernel"): of_kernels,
    (HELD, "cache_params"): of_caches,
    (HELD, "key_value_params"): of_other_fields,
    (TRAINER, "batch_size="): of_batch_size,
    (TRAINER, "pipeline="): of_pipelines,
}


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.names[0])
def test_every_row_is_answered_as_it_says(row: Setting) -> None:
    if row.where == FUSED and row.answer.startswith(NO_EFFECT):
        known = [name for name in row.names if name not in ("ar_alpha", "ema_beta", "min_shrinkage")]  # FBGEMM 1.9's
        assert [name for name in known if of({name: MEMBERS.get(name, 3)}) != []] == []
    else:
        ANSWERS[row.where, row.names[0]]()


@pytest.mark.parametrize("optimizer", [*NAMES.values()])
def test_fbgemm_ignores_what_is_said_to_have_no_effect(optimizer: str) -> None:
    """By what the operator's lookup hands on to the kernel of each optimizer."""
    lookup = import_module(f"fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_{optimizer}")
    read = set(re.findall(r"optimizer_args\.(\w+)", inspect.getsource(lookup)))
    assert {key for key, optimizers in READ_BY.items() if optimizer in optimizers} == read & READ_BY.keys()


def on_the_cpu(weights: torch.Tensor | None = None, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The first outputs, and the rows after three steps, of FBGEMM's operator with one bag of three lookups."""
    given = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5, **settings}
    where = (10, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)
    operator = SplitTableBatchedEmbeddingBagsCodegen([where], device=torch.device("cpu"), **given)
    (rows,) = operator.split_embedding_weights()
    rows.detach().copy_(torch.arange(80).view(10, 8) / 10)
    ids, offsets, outputs = torch.tensor([1, 2, 3]), torch.tensor([0, 3]), []
    for _ in range(3):
        outputs.append(operator(ids, offsets, weights))
        outputs[-1].float().sum().backward()
    return outputs[0].detach().float(), rows.detach()


def test_fbgemm_on_cpus_ignores_what_is_said_to_have_no_effect_there() -> None:
    """Where this fails, FBGEMM reads it, and the setting can leave NOT_READ_ON_CPUS."""
    counter = {"counter_based_regularization": CounterBasedRegularizationDefinition()}
    for settings in (
        *({"weight_decay": 0.3, "weight_decay_mode": mode} for mode in (WeightDecayMode.L2, WeightDecayMode.DECOUPLE)),
        {"max_norm": 0.01},
        {"weight_decay": 0.3, "weight_decay_mode": WeightDecayMode.COUNTER, **counter},
    ):
        assert settings.keys() & {*NOT_READ_ON_CPUS}
        assert torch.equal(on_the_cpu(**settings)[1], on_the_cpu()[1])
    assert not torch.equal(on_the_cpu(eps=10.0)[1], on_the_cpu()[1])


def test_fbgemm_on_cpus_still_does_not_divide_weighted_means_of_fp16() -> None:
    for output, divided in ((SparseType.FP32, True), (SparseType.FP16, False)):
        of_mean, of_sum = (
            on_the_cpu(torch.ones(3), output_dtype=output, pooling_mode=mode)[0]
            for mode in (PoolingMode.MEAN, PoolingMode.SUM)
        )
        assert torch.allclose(of_mean, of_sum / 3 if divided else of_sum)


@pytest.mark.parametrize("tables", [TABLES, [SEQUENCE]])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_a_type_that_sharding_undoes_is_warned_of(tables: Any, kind: torch.dtype) -> None:
    plan = WHOLE if tables is TABLES else SEQUENCES
    has(said(plan, model(tables).to(kind)), tables[0].name, "sparse", "data_type", ".half()")
    half = Plan(
        task=plan.task.model_copy(update={"tables": tuple(t.model_copy(update={"element_bytes": 2}) for t in tables)}),
        shards=plan.shards,
        provenance=plan.provenance,
    )
    assert said(half, model(tables, data_type=DataType.FP16)) == []


def test_every_setting_of_this_fbgemm_s_operator_is_in_a_row() -> None:
    rows = {name for row in SETTINGS if row.where == FUSED for name in row.names}
    assert rows - {"any other"} == KNOWN
    assert inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters.keys() - rows == {
        "self",
        "is_qr_tbe",
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "counter_based_regularization",
            {
                "counter_based_regularization": CounterBasedRegularizationDefinition(),
                "weight_decay_mode": WeightDecayMode.COUNTER,
            },
        ),
        (
            "cowclip_regularization",
            {"cowclip_regularization": CowClipDefinition(), "weight_decay_mode": WeightDecayMode.COWCLIP},
        ),
        (
            "global_weight_decay",
            {
                "global_weight_decay": GlobalWeightDecayDefinition(),
                "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL,
            },
        ),
    ],
)
def test_fbgemm_keeps_as_much_more_state_for_a_row_as_is_warned_of(name: str, settings: dict[str, Any]) -> None:
    def state(**settings: Any) -> int:
        operator = SplitTableBatchedEmbeddingBagsCodegen(
            [(100, 16, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            device=torch.device("cpu"),
            **settings,
        )
        held = [part for parts in operator.split_optimizer_states() for part in parts]
        return sum(part.numel() * part.element_size() for part in held)

    assert state(**settings) - state() == 100 * STATE_OF_A_ROW[name]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("output_dtype", "fp16", "SparseType"),
        ("output_dtype", torch.float16, "SparseType"),
        ("output_dtype", None, "SparseType"),
        ("optimizer", "adagrad", "EmbOptimType"),
        ("bounds_check_mode", 2, "BoundsCheckMode"),
        ("cache_precision", "fp16", "SparseType"),
    ],
)
def test_a_setting_that_is_no_member_of_its_enum_is_refused_by_name(key: str, value: object, wanted: str) -> None:
    with refused(InvalidInput, key, "user", "sparse", wanted):
        of({key: value})  # FBGEMM raises an AttributeError or AssertionError without the table


def test_a_batch_size_that_is_no_whole_number_is_refused() -> None:
    for wrong in ("64", 64.5, True):
        with refused(UsageError, "batch_size", wrong):
            said(batch_size=wrong)


def test_a_table_s_own_settings_win_over_its_sharder_s() -> None:
    """TorchRec gives the operator those that apply_optimizer_in_backward put on a table first."""
    module: Any = model()
    weight = module["sparse"].embedding_bags["user"].weight
    weight._optimizer_classes, weight._optimizer_kwargs = [torch.optim.SGD], [{"lr": 0.1, "gradient_clipping": True}]
    (several, clipped) = sorted(said(module=module), key=lambda message: "gradient_clipping makes" in message)
    assert "apply_optimizer_in_backward" in several
    has([clipped], "'user'", "4.0 KiB")
    weight._optimizer_kwargs = [{"lr": 0.1, "betas": (0.9, 0.99)}]
    with refused(InvalidInput, "user", "betas", "apply_optimizer_in_backward"):
        said(module=module)


def test_the_sharder_inside_that_of_feature_processors_counts() -> None:
    weighted = Table(name="w", rows=100, dim=8, pooling_factor=1.0, weighted=True)
    plan = cut_plan([weighted], 2, {"w": [(4, 0), (4, 1)]}, batch_size=64)
    config = EmbeddingBagConfig(name="w", num_embeddings=100, embedding_dim=8, feature_names=["w"])
    ebc = EmbeddingBagCollection(tables=[config], is_weighted=True, device=torch.device("meta"))
    module = FeatureProcessedEmbeddingBagCollection(
        ebc, PositionWeightedModuleCollection({"w": 4}, device=torch.device("meta"))
    )
    inside = EmbeddingBagCollectionSharder(fused_params={"gradient_clipping": True})
    has(
        said(plan, module, sharders=[FeatureProcessedEmbeddingBagCollectionSharder(inside)]), "'w'", "gradient_clipping"
    )


def test_tables_that_torchrec_1_9_is_told_to_stash_are_warned_of(monkeypatch) -> None:
    monkeypatch.setattr(
        MemoryStashingManager, "resolve_stash_weights", lambda name, config: name == "country", raising=False
    )
    has(said(), "country", "stash_weights", "rank 1")


def test_a_field_that_a_later_torchrec_adds_is_refused_by_name() -> None:
    later = dataclasses.make_dataclass("Later", [("tier", str | None, None)], bases=(ParameterSharding,))
    theirs: Any = to_torchrec(WHOLE, model(), device_type="cpu")
    of_user = theirs.plan["sparse"]["user"]
    theirs.plan["sparse"]["user"] = later(**vars(of_user), tier="hbm")
    with refused(InvalidInput, "user", "tier", "hbm"):
        from_torchrec(ShardingPlan(theirs.plan), model(), device_memory_bytes=[2**20] * 2, batch_size=64, tables=TABLES)
