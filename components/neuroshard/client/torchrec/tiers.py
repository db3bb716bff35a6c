"""The tiers of a plan's tables as TorchRec's compute kernels and cache parameters, and back. Needs torch and torchrec.

TorchRec runs cached tables in one operator, with one cache for all, unless their cache parameters differ (torchrec 1.8,
`group_tables`; the load factor alone does not count). A plan gives every cached table a cache of its own. So each gets another
`reserved_memory`, a few bytes of HBM that its cache leaves free, and with it an operator of its own.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.modules.embedding_configs import DataType

from neuroshard.client.model.warn import warn
from neuroshard.client.torchrec.priced import Priced, cached
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import Table
from neuroshard.core.text import counted, first_few
from neuroshard.core.tiers import BY_KERNEL, IN_HBM, RESOURCES, Cache, load_factor
from neuroshard.core.value import shown

DEFAULT_LOAD_FACTOR = 0.2  # of FBGEMM's caches (`cache_load_factor` of SplitTableBatchedEmbeddingBagsCodegen, 1.8)


def check_kernel(plan: Plan, kernel: str | None) -> None:
    """Raise UsageError for a `compute_kernel` that does not train as planned, and warn of one that does, at another cost."""
    rules, in_hbm = plan.held.constraints.beyond_hbm, IN_HBM.kernel
    if kernel is None:
        return
    if rules:
        raise UsageError(
            f"compute_kernel is {kernel!r}, but the plan says of each table where it lies, and has "
            f"{counted(len(rules), 'table')} ({first_few(list(rules))}) beyond HBM; leave compute_kernel out"
        )
    # Of TorchRec's others, dense has a gradient as large as the table, quant is for inference, and those of key-value and virtual
    # tables need stores that FBGEMM's public packages lack (FBGEMM#5666).
    if kernel not in BY_KERNEL:
        raise UsageError(
            f"compute_kernel {kernel!r} is none of {', '.join(BY_KERNEL)}, which train a plan's tables with a fused optimizer"
        )
    keeps = f"compute_kernel {kernel!r} keeps tables in {RESOURCES[BY_KERNEL[kernel].elements]}"
    if kernel != in_hbm and plan.task.groups is not None:
        raise UsageError(
            f"{keeps}, and the plan is for groups of ranks: DMPCollection averages "
            "replicas without writing back what caches hold; leave it out"
        )
    if kernel != in_hbm:
        warn(f"{keeps}, but the plan's costs and memory are those of device memory ({in_hbm})")


def kernels(plan: Plan, compute_kernel: str, device_type: str) -> dict[str, tuple[str, CacheParams | None]]:
    """The compute kernel and the cache parameters of each table: those of its tier, or `compute_kernel` in a plan without tiers.
    Warns of tiers on ranks without GPUs."""
    rules, found = plan.held.constraints.beyond_hbm, dict[str, tuple[str, CacheParams | None]]()
    if rules and device_type == "cpu":
        warn(
            f"the plan has {counted(len(rules), 'table')} ({first_few(list(rules))}) beyond HBM, and on CPUs TorchRec "
            "trains them in host memory without a cache: it learns the same, but takes other time and memory than planned; train "
            "on GPUs, or search without --host-memory"
        )
    for number, table in enumerate(plan.task.tables):
        rule = rules.get(table.name)
        # TorchRec prefetches for all operators of a sharding type that has cached tables, and logs errors of others
        params = CacheParams(algorithm=CacheAlgorithm.LRU, prefetch_pipeline=True) if _prefetches_rows(plan) else None
        if rule is not None and rule.cached_rows is not None:
            params = CacheParams(
                algorithm=CacheAlgorithm.LRU,
                load_factor=load_factor(rule.cached_rows, table.rows),
                reserved_memory=float(number + 1),
                prefetch_pipeline=True if _prefetches_rows(plan) else None,
            )
        found[table.name] = compute_kernel if rule is None else rule.in_tier.kernel, params
    return found


def _prefetches_rows(plan: Plan) -> bool:
    return plan.task.pipeline == "prefetch" and bool(cached(plan))


def check_caches(priced: Priced) -> None:
    """Raise UsageError for a setting of an operator, by table, that gives it another cache than the plan's."""
    task = priced.plan.task
    tables = {table.name: table for table in task.tables}
    for name in priced.own_operator:
        for key, value in priced.settings[name].items():
            if why := _other_cache(key, value, tables[name], task.pipeline):
                raise UsageError(
                    f"table {name!r} is cached by the plan, and the sharders' fused_params have {key}={shown(value)}, {why}; "
                    "leave it out"
                )


def _other_cache(key: str, value: Any, table: Table, pipeline: Pipeline | None) -> str:
    """What a setting makes of a table's cache; empty if nothing, or what the plan says."""
    if key == "cache_sets" and value:
        return "which TorchRec gives every cache, whatever the plan's load factors"
    if key == "enforce_hbm" and value:
        return "which puts the whole table into HBM"
    if key == "cache_precision" and value is not None and not same_precision(value, table.element_bytes):
        return f"and the plan counts caches of {8 * table.element_bytes} bits an element"
    if key in ("prefetch_pipeline", "multipass_prefetch_config") and value and pipeline != "prefetch":
        return (
            f"which keeps the rows of two batches in the cache, and the pipeline is {pipeline or 'not said'}; search with "
            "--pipeline prefetch and say pipeline='prefetch', or"
        )
    return ""


def tier_of(table: Table, parameter: ParameterSharding, pipeline: str | None) -> dict[str, Any]:
    """The fields of a TableRule that say where a table of a TorchRec plan lies beyond HBM, in a trainer with this pipeline.

    Raises InvalidInput for a cache that is no plan's: with a load factor out of range, not LRU, in another precision, or with
    other prefetching than the pipeline's.
    """
    tier = BY_KERNEL[parameter.compute_kernel]
    if parameter.enforce_hbm:
        raise InvalidInput(
            f"table {table.name!r} has kernel {parameter.compute_kernel} and enforce_hbm, which puts it into HBM all the same; "
            f"set enforce_hbm to None, or compute_kernel to {IN_HBM.kernel!r}"
        )
    if not tier.cached:
        return {"tier": tier.name}
    params = parameter.cache_params or CacheParams()
    # TorchRec checks no types
    factor: object = DEFAULT_LOAD_FACTOR if params.load_factor is None else params.load_factor
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise InvalidInput(
            f"table {table.name!r} has load factor {shown(factor)}; it must be a number above 0 and at most 1"
        )
    if params.algorithm not in (None, CacheAlgorithm.LRU):
        raise InvalidInput(
            f"table {table.name!r} has an {params.algorithm.name} cache, and plans have LRU caches; set LRU"
        )
    if params.precision is not None and not same_precision(params.precision, table.element_bytes):
        raise InvalidInput(
            f"table {table.name!r} has a cache in {params.precision.name}, and plans have caches in the precision of the "
            f"weights, {8 * table.element_bytes} bits; set precision to None"
        )
    if bool(params.prefetch_pipeline) != (pipeline == "prefetch"):
        raise InvalidInput(
            f"table {table.name!r} has prefetch_pipeline {params.prefetch_pipeline} in its cache_params, and the pipeline is "
            f"{pipeline}; say pipeline='prefetch' where the trainer prefetches, and set prefetch_pipeline accordingly"
        )
    return {"tier": tier.name, "cached_rows": min(Cache(factor).slots(table.rows), table.rows)}


def same_precision(said: object, element_bytes: int) -> bool:
    """Whether a cache in this type, FBGEMM's or TorchRec's, has elements of so many bytes."""
    name = said.name if isinstance(said, SparseType | DataType) else ""
    return name == {4: "FP32", 2: "FP16"}.get(element_bytes)


def sharing_caches(parameters: Mapping[str, tuple[object, ParameterSharding]]) -> list[str]:
    """Cached tables of a TorchRec plan that share one operator, and so one cache, with another. Of each table: what else tells
    its operator, and its parameters."""
    operators = _operators(parameters)
    tables = Counter(operators.values())
    return [name for name, operator in operators.items() if tables[operator] > 1]


def without_load_factor(parameters: Mapping[str, tuple[object, ParameterSharding]]) -> list[str]:
    """Cached tables of a TorchRec plan that have FBGEMM's load factor, as the plan says none.

    Raises InvalidInput where another table of the operator has one, which TorchRec then gives both (`group_tables`)."""
    operators = _operators(parameters)
    said = {name: (of.cache_params.load_factor if of.cache_params else None) for name, (_, of) in parameters.items()}
    stating = {operator: name for name, operator in operators.items() if said[name] is not None}
    found = [name for name in operators if said[name] is None]
    if mixed := next((name for name in found if operators[name] in stating), None):
        raise InvalidInput(
            f"table {mixed!r} has kernel {parameters[mixed][1].compute_kernel} and no load factor: TorchRec gives it the one of "
            f"other tables of its operator, as of {stating[operators[mixed]]!r}; set CacheParams(load_factor=…)"
        )
    return found


def _operators(parameters: Mapping[str, tuple[object, ParameterSharding]]) -> dict[str, object]:
    """The operator of each cached table."""
    return {
        name: (kind, parameter.compute_kernel, *_of_the_group(parameter.cache_params))
        for name, (kind, parameter) in parameters.items()
        if BY_KERNEL[parameter.compute_kernel].cached
    }


def _of_the_group(params: CacheParams | None) -> Collection[object]:
    """What TorchRec groups tables by, of cache parameters: all but the load factor, and statistics, which it does not read."""
    params = params or CacheParams()
    fields = dataclasses.fields(params)
    return tuple(str(getattr(params, field.name)) for field in fields if field.name not in ("load_factor", "stats"))
