"""NeuroShard where TorchRec 1.9 makes its planners: a PlannerProvider, for production and for dry runs. Needs TorchRec 1.9.

from torchrec.distributed.planner.executor import DefaultPlannerExecutor

executor = DefaultPlannerExecutor(NeuroShardPlannerProvider("s3://bucket/prefix", "ads-ranker"))
results = DryRunOrchestrator(executor).plan(request, PlannerSessionContext(request=request, results={}))
"""

from typing import Any

from torch import nn

try:
    from torchrec.distributed.planner.provider import DefaultPlannerProvider
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "planner providers came with TorchRec 1.9, and an older one is installed here: give it NeuroShardPlanner as a planner, "
        "or upgrade (docs/trainer.md: Versions)",
        name=error.name,
    ) from None
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    PlannerSessionContext,
    PlannerVariant,
    ShardingPlanRequest,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import PipelineType, ShardingPlan

from neuroshard.client.model.warn import warn
from neuroshard.client.torchrec.planner import NeuroShardPlanner, Sharders, rank_storage
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.store_url import StoreUrl
from neuroshard.core.text import first_few
from neuroshard.core.units import format_bytes

PIPELINES: dict[str, Pipeline] = {
    PipelineType.NONE.value: "none",
    PipelineType.TRAIN_BASE.value: "base",
    PipelineType.TRAIN_SPARSE_DIST.value: "sparse-dist",
    PipelineType.TRAIN_PREFETCH_SPARSE_DIST.value: "prefetch",
}


class NeuroShardPlannerProvider(DefaultPlannerProvider):
    """Gives a request the live plan of a store; arguments are as in NeuroShardPlanner.

    Ranks, batch size, hosts, devices and pipeline are the request's, and checked as `to_torchrec` does. Where the request says
    `hbm_gb` (on CPUs `ddr_gb`), a rank that needs more than that, less what the request reserves, is a PlannerError.
    """

    def __init__(self, store_url: StoreUrl, name: str, *, digest: str | None = None, **how: Any) -> None:
        self.store_url, self.name, self.digest, self.how = store_url, name, digest, how

    def build_planner(
        self, sku: str, *, topology: Topology, storage_reservation: StorageReservation, ctx: PlannerSessionContext
    ) -> NeuroShardPlanner:
        """Raises InvalidInput for a planner that the request asks for by name. Warns of its constraints, which are the search's
        to keep: the plan is there already."""
        request: ShardingPlanRequest = ctx.request
        variant = request.planner_config.planner_variant
        if variant is not PlannerVariant.UNSET:
            raise InvalidInput(
                f"the request asks for planner_variant {variant.value!r}, and gets NeuroShard's; leave it out"
            )
        if request.constraints:
            warn(
                f"the request has constraints ({first_few(sorted(request.constraints))}), which change nothing of a plan "
                "that was searched before; give them to the search (neuroshard search --constraints)"
            )
        said = {
            "world_size": request.world_size,
            "local_world_size": request.local_world_size,
            "batch_size": request.batch_size * request.world_size,
            "device_type": topology.compute_device,
        }
        if request.planner_config.pipeline_type is not None:
            said["pipeline"] = PIPELINES[request.planner_config.pipeline_type]
        planner = _PlannerOfRequest(self.store_url, self.name, digest=self.digest, **{**said, **self.how})
        planner.topology, planner.reservation, planner.request = topology, storage_reservation, request
        return planner


class _PlannerOfRequest(NeuroShardPlanner):
    """A planner that keeps to the memory that a request says."""

    topology: Topology
    reservation: StorageReservation
    request: ShardingPlanRequest

    def _sharding_plan(
        self, loaded: Plan, module: nn.Module, sharders: Sharders, world_size: int | None
    ) -> ShardingPlan:
        given = super()._sharding_plan(loaded, module, sharders, world_size)
        request, on_gpus = self.request, self.topology.compute_device != "cpu"
        kind, said = ("hbm", request.hbm_gb) if on_gpus else ("ddr", request.ddr_gb)
        if said is not None:
            left = self.reservation.reserve(
                self.topology, request.batch_size, module, list(sharders), request.constraints
            )
            needed = [getattr(one, kind) for one in rank_storage(self.get_selected_options(), loaded.task.devices)]
            rank = needed.index(max(needed))
            if needed[rank] > (room := getattr(left.devices[rank].storage, kind)):
                raise PlannerError(
                    f"rank {rank} needs {format_bytes(needed[rank])} by plan {loaded.digest()[:12]}, and of {kind}_gb={said:g} "
                    f"{type(self.reservation).__name__} leaves {format_bytes(max(room, 0))}; search a plan for so much memory",
                    PlannerErrorType.INSUFFICIENT_STORAGE,
                )
        return given
