"""TorchRec's planner on a task, without a GPU and without a process group.

Its storage estimator is replaced by the one memory accounting that all methods share (weights and optimizer state); it is given
the true pooling factors, and table-wise + column-wise + fused only, or row-wise as well. A column split is into blocks of one
width, `min_partition`, so it is asked at four widths, and the best of its plans counts.

Up to TorchRec 1.9.1 it walks through sets of strings, so that its plan differs between processes: whoever asks it has
PYTHONHASHSEED=0 (`helpers.restart`).

Left out of "all types": data-parallel, of which a plan has no shards, and, without domains, what differs only between hosts.
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Sequence

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardEstimator, Storage

from bench.searching.scoring import Row
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask

COLUMN_TYPES = ("table_wise", "column_wise")
ALL_TYPES = (*COLUMN_TYPES, "row_wise")
HOST_TYPES = (*ALL_TYPES, "table_row_wise", "table_column_wise", "grid_shard")
WIDTHS = (64, 32, 16, 8)


class SameMemory(ShardEstimator):  # type: ignore[misc] # TorchRec is not typed
    """Weights and optimizer state, as core.Table counts them."""

    def __init__(self, task: ShardingTask) -> None:
        self.tables = dict(zip(_names(task), task.tables, strict=True))

    def estimate(self, sharding_options, sharder_data_map=None, **_) -> None:
        for option in sharding_options:
            for shard in option.shards:
                rows, dim = shard.size
                shard.storage = Storage(hbm=Part(self.tables[option.name], rows, dim).memory().total, ddr=0)


def plan(task: ShardingTask, width: int, types: Sequence[str] = COLUMN_TYPES) -> tuple[list[Row] | None, float | None]:
    """Rows of its plan and its own figure in ms; both None where it finds no plan."""
    names = _names(task)
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[name])
            for name, t in zip(names, task.tables, strict=True)
        ],
    )
    constraints = {
        name: ParameterConstraints(
            sharding_types=list(types),
            compute_kernels=["fused"],
            min_partition=min(width, t.dim),
            pooling_factors=[t.pooling_factor],
        )
        for name, t in zip(names, task.tables, strict=True)
    }
    with _quiet():
        topology = Topology(
            world_size=task.devices, compute_device="cuda", hbm_cap=min(task.device_memory_bytes), **_hosts(task)
        )
        batch_size = max(1, task.batch_size // task.devices)  # TorchRec's is a rank's
        estimators = [EmbeddingPerfEstimator(topology, constraints), SameMemory(task)]
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            enumerator=EmbeddingEnumerator(topology, batch_size, constraints, estimator=estimators),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            constraints=constraints,
            debug=False,
        )
        try:
            sharding = planner.plan(module, [EmbeddingBagCollectionSharder()])
        except PlannerError:
            return None, None
    own_ms = _own_ms(planner, task.devices)
    place = {name: index for index, name in enumerate(names)}
    rows: list[Row] = []
    for parameters in sharding.plan.values():
        for name, parameter in parameters.items():
            for shard in parameter.sharding_spec.shards:
                count, dim = shard.shard_sizes
                if count:  # few rows leave the last ranks without any
                    rows.append((place[name], dim, shard.placement.rank(), count))
    return rows, own_ms


def _hosts(task: ShardingTask) -> dict[str, float]:
    """Its words for the task's domains and network, in bytes a millisecond."""
    if task.topology is None:
        return {}
    rate = task.topology.network_bytes_per_s
    return {"local_world_size": task.topology.domain, **({} if rate is None else {"inter_host_bw": rate / 1000})}


def _names(task: ShardingTask) -> list[str]:
    """Names that a torch module may have: no dots."""
    return [f"table_{index}" for index in range(len(task.tables))]


def _own_ms(planner: EmbeddingShardingPlanner, devices: int) -> float:
    """Its objective: the summed perf of the slowest rank."""
    load = [0.0] * devices
    for option in planner._best_plan or []:
        for shard in option.shards:
            load[shard.rank] += shard.perf.total
    return max(load)


@contextlib.contextmanager
def _quiet():
    """It prints a report of hundreds of lines and warns of what is not used here."""
    assert not sys.flags.hash_randomization, (
        "TorchRec's planner, as a peer, is asked in processes with PYTHONHASHSEED=0"
    )
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
