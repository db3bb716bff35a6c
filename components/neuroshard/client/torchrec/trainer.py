"""What a trainer runs against what a plan was priced for (client/torchrec/settings.py). Needs torch and torchrec.

TorchRec gives FBGEMM's operator the sharders' `fused_params`, over them what apply_optimizer_in_backward has put on a table, and
over both what the sharding plan holds (`merge_fused_params`, `add_params_from_parameter_sharding`).
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, get_args, get_type_hints

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec.distributed import memory_stashing
from torchrec.distributed.embedding import get_ec_index_dedup
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType

from neuroshard.client.model.warn import warn, warn_of
from neuroshard.client.torchrec.priced import Priced, cached
from neuroshard.client.torchrec.settings import (
    CHANGES_A_STEP,
    GIVEN_BY_TORCHREC,
    KNOWN,
    NOT_READ_ON_CPUS,
    READ_BY,
    STATE_OF_A_ROW,
    TAKEN_OUT,
)
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.extras import install_pair
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan
from neuroshard.core.step_memory import BATCHES, LOOKUP_BYTES, WAIT_FOR_INPUT, Pipeline
from neuroshard.core.table import OPTIMIZER_BYTES
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.core.value import shown, whole_number
from neuroshard.core.versions import Installed, measured_elsewhere
from neuroshard.files.importers.torchrec_collections import NAMES, in_backward, weight_of

_OPERATOR = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
# settings that are members of an enum, which FBGEMM asks for their value or number: of text or a number it has none
_ENUMS = {
    key: kind
    for key, said in get_type_hints(SplitTableBatchedEmbeddingBagsCodegen.__init__).items()
    for kind in (said, *get_args(said))
    if isinstance(kind, type) and issubclass(kind, Enum)
}

# of feature processors and of managed collisions: the one of the collection inside
_INSIDE = ("_ebc_sharder", "_e_sharder")


def sharders_by_path(
    sharders: Sequence[ModuleSharder[nn.Module]], paths: Iterable[str], module: nn.Module
) -> dict[str, ModuleSharder[nn.Module]]:
    """The sharder of each module of a plan, as DistributedModelParallel picks it; of feature processors the one of the collection
    inside. Raises InvalidInput for a module that none is for."""
    if not isinstance(sharders, Sequence) or (wrong := [one for one in sharders if not isinstance(one, ModuleSharder)]):
        given = shown(wrong[0]) if isinstance(sharders, Sequence) else shown(sharders)
        raise UsageError(
            f"sharders is a list of TorchRec's sharders, as [EmbeddingBagCollectionSharder(…)], not {given}"
        )
    by_kind = {sharder.module_type: sharder for sharder in sharders}
    found = {}
    for path in paths:
        if (kind := type(module.get_submodule(path))) not in by_kind:
            raise InvalidInput(
                f"module {path!r} is a {kind.__name__}, and none of the sharders is for it; add {kind.__name__}Sharder"
            )
        inside = getattr(by_kind[kind], "sharder_of", None)  # of tables held by access (client/rows/sharded.py)
        found[path] = (
            inside(module.get_submodule(path))
            if inside
            else next((getattr(by_kind[kind], name) for name in _INSIDE if hasattr(by_kind[kind], name)), by_kind[kind])
        )
    return found


def settings_of(priced: Priced) -> dict[str, dict[str, Any]]:
    """The settings of each table's fused operator. Raises InvalidInput for one that it does not have, or cannot be given."""
    found, by_path = {}, priced.by_path
    for name in priced.fused:
        place = priced.places[name]
        of_sharder = getattr(by_path.get(place.path), "fused_params", None) or {}
        _, of_table = in_backward(weight_of(priced.collections[place.path], place.config.name))
        if "lr" in of_table:
            of_table["learning_rate"] = of_table.pop("lr")
        found[name] = {**of_sharder, **of_table}
        for key, value in found[name].items():
            said = (
                "apply_optimizer_in_backward"
                if key in of_table
                else f"fused_params of {type(by_path[place.path]).__name__}"
            )
            if why := _fault(key, value):
                raise InvalidInput(f"{place.where}: {key} in the {said} {why}")
    return found


def _fault(key: str, value: object) -> str:
    """Why FBGEMM's operator cannot be given a setting; empty if it can."""
    if key in GIVEN_BY_TORCHREC:
        return "is what TorchRec gives the operator itself; leave it out"
    if key not in _OPERATOR and key not in TAKEN_OUT:
        return "is no setting of FBGEMM's fused operator, where TorchRec raises a TypeError; leave it out"
    try:
        hash(value)
    except TypeError:
        return f"is a {type(value).__name__}, which TorchRec cannot group tables by (a TypeError); leave it out"
    if (kind := _ENUMS.get(key)) is None:
        return ""
    taken = (kind, DataType) if kind is SparseType else kind  # TorchRec makes one of the other
    if not isinstance(value, taken) and value is not _OPERATOR[key].default:
        return f"is {shown(value)}, where FBGEMM's operator takes a {kind.__name__}, such as {next(iter(kind))}; give it one"
    return ""


def optimizers_of(priced: Priced, optimizer: str | None) -> dict[str, str]:
    """The optimizer of each table whose optimizer is known: what is applied in backward, else what the sharders' `fused_params`
    say, else the trainer's `optimizer`.

    Raises UsageError where `optimizer` is another. Warns of one whose state we do not know.
    """
    found, by_path = {} if optimizer is None else dict.fromkeys(priced.places, optimizer), priced.by_path
    unknown: dict[str, object] = {}
    for name in priced.fused:
        place = priced.places[name]
        if name in priced.applied:
            found[name] = priced.applied[name].optimizer
        if name in priced.applied or place.path not in by_path:
            continue
        given, sharder = _optimizer(priced.settings[name]), type(by_path[place.path]).__name__
        known = NAMES.get(given)
        if optimizer not in (None, known):
            default = "" if "optimizer" in priced.settings[name] else " (FBGEMM's default)"
            raise UsageError(
                f"optimizer is {optimizer!r}, but the {sharder} of module {place.path!r} has {known or given}{default} in its "
                "fused_params, which is what trains; leave out optimizer=, or give the sharder that one"
            )
        if known is None:
            unknown[place.path] = given
        else:
            found[name] = known
    for path, given in unknown.items():
        warn(
            f"module {path!r}: the {type(by_path[path]).__name__} has optimizer {given} in its fused_params, which is none of "
            f"{', '.join(NAMES.values())}: memory counts the state that the plan's tables say, and no column split is checked"
        )
    return found


def batch_of_group(batch_size: int, task: ShardingTask) -> int:
    """Of so many samples over all ranks of a trainer those that a group of them has, which a task counts."""
    return math.ceil(batch_size * task.devices / task.ranks)


def dedups(priced: Priced) -> dict[str, bool]:
    """Of each sequence whose sharder is known, whether that runs with use_index_dedup."""
    sequences = {name: place.path for name, place in priced.places.items() if place.pooling == "none"}
    return {name: _dedups(priced.by_path[path]) for name, path in sequences.items() if path in priced.by_path}


def sent_once(task: ShardingTask) -> frozenset[str]:
    """Names of the sequences, or of their cold parts, whose ids the task sends once."""
    return frozenset(table.name for table in task.parted.tables if table.sent_once)


def _dedups(sharder: ModuleSharder[nn.Module]) -> bool:
    return bool(getattr(sharder, "_use_index_dedup", False) or get_ec_index_dedup())


def as_trained(
    plan: Plan,
    batch_size: int | None,
    pipeline: str | None,
    whose: str,
    built: str = "",
    *,
    index_dedup: Mapping[str, bool] | None = None,
    options: Sequence[str] | None = None,
) -> Plan:
    """The plan with the trainer's batch size, pipeline, its options and use_index_dedup, where they are known, not checked; the
    plan itself where they are its own. Warns of others, and names the class that was `built` as the pipeline, where it is known.

    Raises UsageError for wrong ones, and InvalidInput for a batch that the plan's collectives cannot send.
    """
    batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
    ranks = plan.task.ranks
    if batch_size is not None and batch_size < ranks:
        raise UsageError(f"batch_size is {batch_size}, the samples of all {ranks} ranks; each needs one or more")
    if pipeline not in (None, *get_args(Pipeline)):
        raise UsageError(f"pipeline {pipeline!r} is none of {', '.join(get_args(Pipeline))}")
    task, changed = plan.task, dict[str, Any]()
    if task.pipeline is not None and not task.counts_steps and pipeline in WAIT_FOR_INPUT:
        pipeline = "none"  # TorchRec's estimate, which the plan has, is the same for all of these
    if batch_size is not None and batch_size != task.global_batch_size:
        changed["batch_size"] = batch_of_group(batch_size, task)
        warn(
            f"{whose} was searched for {task.global_batch_size:,} samples a step over all ranks, and the trainer has "
            f"{batch_size:,}: costs are those of the former, and another plan may be better; search with --batch-size "
            f"{batch_size}"
        )
    if pipeline not in (None, task.pipeline):
        changed |= {"pipeline": pipeline, "pipeline_options": None}
        if pipeline not in BATCHES:
            changed["step_ledger"] = 1
        counted_for = "counts no memory of steps" if task.pipeline is None else f"is for pipeline {task.pipeline}"
        rows = ""
        if task.hidden_ms and cached(plan):
            rows = (
                f" (its ms take missed rows to be fetched under {task.hidden_ms:g} ms of dense layers: without prefetching they "
                "are waited for)"
            )
        changed["dense_ms"] = None
        if pipeline == "prefetch" and (names := cached(plan)):
            rows = (
                f" (its caches of {counted(len(names), 'table')} ({first_few(names)}) are for the rows of a batch at a time, and "
                "prefetching keeps those of two: rows without room are read from host memory)"
            )
        warn(
            f"{whose} {counted_for}{rows}, and the trainer's pipeline is {pipeline}{built and f' ({built})'}; search with "
            f"--pipeline {pipeline}"
        )
    planned = changed.get("pipeline_options", task.pipeline_options) or ()
    if options is not None and task.counts_steps and {*options} != {*planned}:
        changed["pipeline_options"] = tuple(options) or None
        said = f"--pipeline-options {','.join(options)}" if options else "without --pipeline-options"
        warn(
            f"{whose} counts what a pipeline frees with {', '.join(planned) or 'none of its options'}, and the trainer's has "
            f"{', '.join(options) or 'none'}; search {said}"
        )
    known, planned = index_dedup or {}, sent_once(task)
    runs = (planned - known.keys()) | {name for name, once in known.items() if once}
    if planned != runs:
        changed |= {"constraints": task.with_dedup(runs).constraints, "index_dedup": None}
    if not changed:
        return plan
    task = task.model_copy(update=changed)
    precision = task.collective_precision
    if precision is not None and (fault := precision.fault(task.tables, task.batch_size, task.devices)):
        raise InvalidInput(f"{whose}: {fault}")
    return plan.model_copy(update={"task": task})


def warn_of_trainer(priced: Priced) -> None:
    """Warn of what a trainer's sharders and the configs of its model make of a plan that was not priced for it."""
    _warn_of_settings(priced)
    _warn_of_configs(priced)


def _warn_of_settings(priced: Priced) -> None:
    """Warn of settings of the operators that a plan was not priced for; `output_dtype` is in torchrec/collectives.py."""
    by_key: dict[str, list[str]] = {}
    ignored: dict[tuple[str, str], list[str]] = {}  # by setting, and by why
    for name in priced.fused:
        for key, value in priced.settings[name].items():
            if value or key not in KNOWN:
                by_key.setdefault(key, []).append(name)
            if value and (why := _ignored(key, priced.settings[name], priced.device_type)):
                ignored.setdefault((key, why), []).append(name)
    for (key, why), names in ignored.items():
        warn_of(priced.where(names), f": {key} has no effect, since FBGEMM's operator {why}")
    for key, names in by_key.items():
        if what := _consequence(key, names, priced):
            warn_of(priced.where(names), f": {key} {what}")


def _ignored(key: str, settings: Mapping[str, Any], device_type: str) -> str:
    """Why the operator does not read a setting of a table; empty if it does."""
    optimizer = NAMES.get(_optimizer(settings))
    if device_type == "cpu" and key in NOT_READ_ON_CPUS and optimizer == "rowwise_adagrad":
        return (
            "for CPUs does not read it with rowwise_adagrad, in any weight_decay_mode; leave it out, or train on GPUs"
        )
    if key in READ_BY and optimizer and optimizer not in READ_BY[key]:
        return f"does not read it with {optimizer}; leave it out, or take {' or '.join(READ_BY[key])}"
    no_mode = settings.get("weight_decay_mode") in (None, WeightDecayMode.NONE)
    if key == "weight_decay" and optimizer == "rowwise_adagrad" and no_mode:
        return "reads it with a weight_decay_mode only (L2, DECOUPLE); give it one too"
    if key == "max_gradient" and not settings.get("gradient_clipping"):
        return "reads it with gradient_clipping=True only; give it that too"
    return ""


def _consequence(key: str, names: Sequence[str], priced: Priced) -> str:
    """What a setting of these tables makes of the plan's costs and memory; empty if nothing."""
    if key == "gradient_clipping":
        rank, most = priced.busiest(names, priced.output_bytes)
        return (
            f"makes a clipped copy of the outputs' gradients, up to {format_bytes(most)} on rank {rank} in a step, which memory "
            "and costs do not count; reserve it with --reserve"
        )
    if key == "use_one_tbe_per_table":
        rank, more = _operators_apart(names, priced)
        return (
            f"runs {counted(more, 'operator')} more on rank {rank} than the plan was priced for; leave it out"
            if more
            else ""
        )
    if key in STATE_OF_A_ROW:
        rank, most = priced.busiest(names, lambda _, shard: shard.rows * STATE_OF_A_ROW[key])
        return (
            f"keeps up to {STATE_OF_A_ROW[key]} bytes more for each row of a shard, {format_bytes(most)} on rank {rank}, which "
            "memory does not count; reserve it with --reserve"
        )
    if key == "uvm_non_rowwise_momentum":
        beyond = priced.plan.held.constraints.beyond_hbm  # there it is anyway
        element = {
            name: OPTIMIZER_BYTES[NAMES[given]][1]
            for name in names
            if (given := _optimizer(priced.settings[name])) in NAMES and name not in beyond
        }
        rank, most = priced.busiest(element, lambda table, shard: shard.rows * shard.dim * element[table.name])
        return (
            f"keeps {format_bytes(most)} of optimizer state of rank {rank} in host memory, which the plan counts, and prices, as "
            "device memory; leave it out"
            if most
            else ""
        )
    if key == "embedding_table_index_type" and priced.settings[names[0]][key] != torch.int64:
        return f"makes lookups of {priced.settings[names[0]][key]}, and the plan counts {LOOKUP_BYTES} bytes each; leave it out"
    if key in CHANGES_A_STEP:
        return f"changes what a step runs ({CHANGES_A_STEP[key]}), and the plan was priced without; leave it out"
    if key not in KNOWN:
        return (
            "is a setting that this version of NeuroShard does not know, and the plan was priced without; leave it out"
        )
    return ""


def _optimizer(settings: Mapping[str, Any]) -> Any:
    return settings.get("optimizer", EmbOptimType.EXACT_SGD)


def _operators_apart(names: Sequence[str], priced: Priced) -> tuple[int, int]:
    """The rank that runs most operators more if each of these tables has its own, and how many more."""
    more = []
    for rank in range(priced.plan.task.devices):
        together = set(names).difference(priced.own_operator)
        here = [name for name in together if any(shard.device == rank for shard in priced.shards[name])]
        shared = {
            (place.path, priced.kinds[name], place.config.data_type, place.pooling)
            for name, place in priced.places.items()
            if name in here
        }
        more.append(len(here) - len(shared))
    return more.index(max(more)), max(more)


def warn_of_dedup(priced: Priced) -> None:
    """Warn of sharders that send each id of a batch once where the plan sends all, or all where it does not."""
    planned, runs = sent_once(priced.plan.task), dedups(priced)
    if every := sorted(name for name in planned if not runs.get(name)):
        warn(
            f"{priced.whose} sends each distinct id of a rank's batch once of {counted(len(every), 'sequence')} "
            f"({first_few(every)}), and {'sharders send all' if runs else 'no sharders are given, to see whether they do'}: "
            "give EmbeddingCollectionSharder use_index_dedup=True, or search with --index-dedup off"
        )
    for path in priced.by_path:
        names = [name for name, once in runs.items() if once and priced.places[name].path == path]
        if names and not planned.intersection(names):
            rank, most = priced.busiest(names, priced.output_bytes)
            warn(
                f"module {path!r}: use_index_dedup sends each id of a rank's batch once, but the plan was priced for all lookups "
                f"({format_bytes(most)} of outputs on rank {rank} in a step); search with --index-dedup auto, or on"
            )


def _warn_of_configs(priced: Priced) -> None:
    """Warn of tables whose configs make TorchRec run more than the plan was priced for."""
    by_name = {name: priced.places[name].config for name in priced.fused}
    # TorchRec 1.9 lets the tables that a program names win over the configs
    resolve = getattr(memory_stashing.MemoryStashingManager, "resolve_stash_weights", _said_by_config)
    if stashed := [name for name, config in by_name.items() if resolve(config.name, config)]:
        rank, most = priced.busiest(stashed, lambda table, shard: Part(table, shard.rows, shard.dim).memory().weights)
        warn_of(
            priced.where(stashed),
            f" has stash_weights: up to {format_bytes(most)} of weights of rank {rank} leave the device "
            "and come back in every step, which the plan's costs do not count; leave it out where memory allows",
        )
    if updated := [name for name, config in by_name.items() if getattr(config, "enable_embedding_update", False)]:
        warn_of(
            priced.where(updated),
            " has enable_embedding_update: TorchRec runs an operator apart for such tables of a module, and their updates, which "
            "the plan's costs do not count",
        )
    for name, kind in priced.kinds.items():
        path = priced.places[name].path
        holders = (priced.module.get_submodule(path), priced.collections[path])
        if kind.copied and any(map(_skips_sum, holders)):
            warn(
                f"{priced.places[name].where} is copied to every rank, and its module is marked to skip the sum of gradients "
                "(mark_data_parallel_skip_grad_sync): each rank's copy learns from its own samples, and the plan was priced "
                "with the sum; search without --data-parallel"
            )


def warn_of_versions(plan: Plan, whose: str) -> None:
    """Warn of versions that are not tested with each other, and of others than the plan's costs were measured under."""
    here = Installed.here()
    if here.torch and here.fbgemm and here.untested:
        warn(f"{here}: {here.untested}; {install_pair(here)}")
    if elsewhere := measured_elsewhere(plan.provenance.cost_model_versions, here):
        warn(
            f"{whose} was priced by costs measured under {elsewhere}: its shards and memory are right, its milliseconds may not "
            "be; to know them, measure and pretrain under the trainer's versions"
        )


def _said_by_config(_: str, config: object) -> bool:
    return bool(getattr(config, "stash_weights", False))


def _skips_sum(module: nn.Module) -> bool:
    return bool(getattr(module, "_torchrec_data_parallel_skip_grad_sync", False))  # what TorchRec 1.9 marks
