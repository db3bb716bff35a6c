"""TorchRec's planner with its `EmbeddingOffloadScaleupProposer`, whose cache statistics are filled from our miss curves."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType

from bench.searching.peers_torchrec import _quiet
from neuroshard.client.torchrec import from_torchrec
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.cache import miss_curve

BINS = 1000  # of a histogram: it gives a cache the whole of its bin
STARTS = (0.1, 0.02, 0.002)  # load factors that caches have at first: the proposer only gives them more
TYPES = ("table_wise", "column_wise", "row_wise")
GIB_MS = 1024**3 / 1000
HBM_BANDWIDTH, BUS_BANDWIDTH = 3120 * GIB_MS, 51.6 * GIB_MS  # an H100's, in TorchRec's bytes a ms
NO_LIMIT = 2**50


def stats_of(table: Table, batch_size: int) -> EmbeddingOffloadStats:
    """Its statistics of a table, from our curve."""
    curve = miss_curve(table, batch_size)
    missed = curve.missed(np.linspace(0.0, table.rows, BINS + 1))
    hits = np.maximum(-np.diff(missed), 0.0)
    ratio = missed / max(curve.distinct_rows, 1e-12)
    area = float(np.trapezoid(ratio, dx=1 / BINS))
    return EmbeddingOffloadStats(area, max(round(curve.distinct_rows), 1), torch.tensor(hits), table.rows)


def plans(task: ShardingTask) -> Sequence[Plan]:
    """Its plans, one for each load factor to start from, without our check of memory. Empty where it finds none."""
    found = []
    for start in STARTS:
        plan = _plan(task, start)
        found += [] if plan is None else [plan]
    return found


def _plan(task: ShardingTask, start: float) -> Plan | None:
    names = [f"table_{index}" for index in range(len(task.tables))]
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[name], data_type=DataType.FP16
            )
            for name, t in zip(names, task.tables, strict=True)
        ],
    )
    constraints = {
        name: ParameterConstraints(
            sharding_types=list(TYPES),
            compute_kernels=["fused_uvm_caching"],
            pooling_factors=[t.pooling_factor],
            cache_params=CacheParams(load_factor=start, stats=stats_of(t, task.batch_size)),
        )
        for name, t in zip(names, task.tables, strict=True)
    }
    with _quiet():
        topology = Topology(
            world_size=task.devices,
            compute_device="cuda",
            hbm_cap=min(task.device_memory_bytes),
            ddr_cap=task.host_memory_bytes,
            hbm_mem_bw=HBM_BANDWIDTH,
            hbm_to_ddr_mem_bw=BUS_BANDWIDTH,
        )
        batch_size = task.batch_size // task.devices
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            enumerator=EmbeddingEnumerator(topology, batch_size, constraints),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            proposer=EmbeddingOffloadScaleupProposer(),
            constraints=constraints,
            debug=False,
        )
        try:
            sharding = planner.plan(module, [EmbeddingBagCollectionSharder()])
        except PlannerError:
            return None
    tables = [t.model_copy(update={"name": name, "module": ""}) for name, t in zip(names, task.tables, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_torchrec(
            sharding,
            module,
            device_memory_bytes=(NO_LIMIT,) * task.devices,
            batch_size=task.batch_size,
            tables=tables,
            host_memory_bytes=NO_LIMIT,
        )
