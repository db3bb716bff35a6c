"""Whether a plan is for the pipeline that a trainer has built. Needs torch and torchrec.

    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    check_pipeline(plan, pipeline)

A plan counts memory and costs for one pipeline (core/step_memory.py). What TorchRec (1.8, 1.9) builds is known by its class, or
by its stages. Not covered: batches that stages before the sparse all-to-all hold.
"""

from typing import Any, get_args

from torchrec.distributed.train_pipeline.gradient_accumulation import GradientAccumulationWrapper
from torchrec.distributed.train_pipeline.pipeline_stage import SparseDataDistUtil
from torchrec.distributed.train_pipeline.train_pipelines import StagedTrainPipeline

from neuroshard.client.model.warn import warn
from neuroshard.client.torchrec.fused import check_memory, of_step
from neuroshard.client.torchrec.trainer import as_trained
from neuroshard.core.errors import UsageError
from neuroshard.core.groups import every
from neuroshard.core.plan import Plan, check_plan
from neuroshard.core.step_memory import Pipeline, PipelineOption

__all__ = ["check_pipeline"]

# By class; StagedTrainPipeline is by its stages.
PIPELINES: dict[str, Pipeline] = {
    "TrainPipelineBase": "base",
    "TrainPipelinePT2": "base",
    "TrainPipelineSparseDistLite": "sparse-dist-lite",
    "TrainPipelineSparseDist": "sparse-dist",
    "TrainPipelineSparseDistCompAutograd": "sparse-dist",
    "TrainPipelineSparseDistT": "sparse-dist",
    "TrainPipelineSparseDistBwdOpt": "sparse-dist",
    "TrainPipelineFusedSparseDist": "fused-sparse-dist",
    "TrainPipelineSemiSync": "semi-sync",
    "PrefetchTrainPipelineSparseDist": "prefetch",
}
EVALUATING = ("EvalPipelineSparseDist", "EvalPipelineFusedSparseDist", "EvalPipelineCPUSparse")
_STASHES = "moves embeddings or optimizer state away and back within a step"
# Of experimental_pipelines.py and pec_train_pipeline.py of TorchRec 1.8 and 1.9.
UNKNOWN = {
    "TrainPipelineSparseDistEmbStash": _STASHES,
    "TrainPipelineSparseDistOptStash": _STASHES,
    "TrainPipelinePrefetchEMS": _STASHES,
    "TrainEvalHybridPipelineBase": "trains and evaluates by turns",
    "TrainPipelinePEC": "looks up rows of the next batch before this one has trained them",
}
# Those that average the replicas of DMPCollection. Others have the interval that they inherit, and average nothing.
AVERAGING = ("TrainPipelineSparseDist", "TrainPipelineSemiSync")


def check_pipeline(plan: Plan, pipeline: Any) -> None:
    """Warn, in a line each, where memory or costs of the plan are for another pipeline than this one of TorchRec, and where it
    averages the replicas of groups of ranks otherwise than planned. Pipelines that evaluate are not looked at.

    A class of yours counts as the one of TorchRec that it inherits from, and a GradientAccumulationWrapper as what is in it.
    Raises InvalidInput where a rank lacks memory for what the pipeline keeps of the plan's batch, and UsageError for what is no
    pipeline.
    """
    check_plan(plan)
    if isinstance(pipeline, GradientAccumulationWrapper):
        pipeline = pipeline._pipeline
    name, whose = type(pipeline).__name__, f"plan {plan.digest()[:12]}"
    if not hasattr(pipeline, "progress"):
        raise UsageError(f"check_pipeline needs a pipeline, whose progress trains a batch, and got a {name}")
    kind = next((one.__name__ for one in type(pipeline).__mro__ if one.__module__.startswith("torchrec.")), "")
    if kind in EVALUATING:
        return
    if kind in UNKNOWN:
        raise UsageError(
            f"a {name} {UNKNOWN[kind]}: nobody measured what it keeps of its batches, and {whose} cannot promise that it fits; "
            f"train with one of {', '.join(PIPELINES)}"
        )
    trained = _of_stages(pipeline) if isinstance(pipeline, StagedTrainPipeline) else PIPELINES.get(kind)
    if trained is None:
        counted = "no memory of steps" if plan.task.pipeline is None else f"pipeline {plan.task.pipeline}"
        warn(
            f"a {name} is none of the pipelines whose memory is counted ({', '.join(PIPELINES)}), and {whose} counts {counted}: "
            "reserve what it takes more (--reserve)"
        )
    else:
        options = [option for option in get_args(PipelineOption) if getattr(pipeline, f"_{option}", False)]
        known = options if trained == "sparse-dist" else None
        now = as_trained(plan, None, trained, whose, name, options=known)
        if now is not plan:
            parted = plan.parted.model_copy(update=of_step(now.task))
            check_memory(plan.named.model_copy(update={"task": parted}), {}, whose)
    _check_averaging(plan, kind, name, getattr(pipeline, "_dmp_collection_sync_interval_batches", None), whose)


def _of_stages(pipeline: Any) -> Pipeline:
    """What stages are like: they send ids ahead, and fetch rows for caches, or not."""
    owners = [getattr(stage.runnable, "__self__", None) for stage in pipeline._pipeline_stages]
    senders = [one for one in owners if isinstance(one, SparseDataDistUtil)]
    if not senders:
        return "none"
    return "prefetch" if any(one.prefetch_stream is not None for one in senders) else "sparse-dist"


def _check_averaging(plan: Plan, kind: str, name: str, interval: int | None, whose: str) -> None:
    """Warn of a pipeline that averages replicas in other steps than planned. One without an interval leaves it to the trainer."""
    groups = plan.task.groups
    if groups is None or interval is None:
        return
    planned = every(groups.sync_every)
    if kind not in AVERAGING:
        warn(
            f"a {name} averages no replicas, though it has an interval for that, and {whose} is for replicas averaged {planned}: "
            "call sync() of the model yourself"
        )
    elif interval != groups.sync_every:
        warn(
            f"a {name} averages replicas {every(interval)}, and {whose} is for replicas averaged {planned}: give it "
            f"dmp_collection_sync_interval_batches={groups.sync_every}"
        )
