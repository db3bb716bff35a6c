"""The tiers of a plan's tables as TorchRec's compute kernels and cache parameters, and back. Needs torch and torchrec.

TorchRec runs cached tables in one operator, with one cache for all, unless their cache parameters differ (torchrec 1.8, `group_tables`;
the load factor alone does not count). A plan gives every cached table a cache of its own. So each gets another `reserved_memory`, a few
bytes of HBM that its cache leaves free, and with it an operator of its own.
"""

from collections.abc import Mapping
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torchrec.distributed.types import CacheParams, ParameterSharding

from neuroshard.client.torchrec_warnings import warn
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.text import counted, first_few
from neuroshard.core.tiers import KERNELS, WAYS, Cache, Tier, load_factor

TIERS: Mapping[str, Tier] = {kernel: tier for tier, kernel in KERNELS.items()}


def kernels(plan: Plan, compute_kernel: str, device_type: str) -> dict[str, tuple[str, CacheParams | None]]:
    """The compute kernel and the cache parameters of each table: those of its tier, or `compute_kernel` in a plan without tiers.

    Raises UsageError where `compute_kernel` is not fused and the plan has tiers. Warns of tiers on ranks without GPUs.
    """
    rules, found = plan.task.constraints.beyond_hbm, dict[str, tuple[str, CacheParams | None]]()
    if rules and compute_kernel != KERNELS["hbm"]:
        raise UsageError(
            f"compute_kernel is {compute_kernel!r}, but the plan says of each table where it lies, and {counted(len(rules), 'table')} "
            f"({first_few(list(rules))}) beyond HBM; leave compute_kernel out"
        )
    if rules and device_type == "cpu":
        warn(
            f"the plan has {counted(len(rules), 'table')} ({first_few(list(rules))}) beyond HBM, and on CPUs TorchRec trains them in "
            "host memory without a cache: it learns the same, but takes other time and memory than planned; train on GPUs, or search "
            "without --host-memory"
        )
    for number, table in enumerate(plan.task.tables):
        rule = rules.get(table.name)
        if rule is None or rule.tier is None:
            found[table.name] = compute_kernel, None
            continue
        params = None
        if rule.cached_rows is not None:
            params = CacheParams(
                algorithm=CacheAlgorithm.LRU,
                load_factor=load_factor(rule.cached_rows, table.rows),
                reserved_memory=float(number + 1),
                prefetch_pipeline=True if plan.task.pipeline == "prefetch" else None,
            )
        found[table.name] = KERNELS[rule.tier], params
    return found


def tier_of(table: Table, parameter: ParameterSharding) -> dict[str, Any]:
    """The fields of a TableRule that say where a table of a TorchRec plan lies; none for HBM.

    Raises InvalidInput for a cache without a load factor: TorchRec then gives it that of other tables of its operator.
    """
    tier = TIERS.get(parameter.compute_kernel, "hbm")
    if tier != "cached":
        return {} if tier == "hbm" else {"tier": tier}
    params = parameter.cache_params
    if params is None or params.load_factor is None:
        raise InvalidInput(
            f"table {table.name!r} has kernel {parameter.compute_kernel} and no load factor: TorchRec gives it the one of other tables "
            "of its operator; set CacheParams(load_factor=…)"
        )
    if not 0 < params.load_factor <= 1:
        raise InvalidInput(
            f"table {table.name!r} has load factor {params.load_factor:g}; it must be above 0 and at most 1"
        )
    if params.algorithm not in (None, CacheAlgorithm.LRU):
        raise InvalidInput(
            f"table {table.name!r} has an {params.algorithm.name} cache, and plans have LRU caches; set LRU"
        )
    rows = min(Cache(params.load_factor).slots(table.rows), table.rows)
    return {"tier": tier, "cached_rows": max(rows // WAYS * WAYS, min(WAYS, table.rows))}
