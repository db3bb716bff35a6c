"""The pipeline that a trainer builds, and the one that its plan is for. Each test builds pipelines of TorchRec's own."""

import importlib
import inspect
import pkgutil
import warnings
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torchrec.distributed import train_pipeline
from torchrec.distributed.train_pipeline import experimental_pipelines, train_pipelines
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil

from helpers.plans import make_plan
from helpers.refusals import names, refused
from neuroshard.client.torchrec import ShardingWarning
from neuroshard.client.torchrec.pipelines import AVERAGING, EVALUATING, PIPELINES, UNKNOWN, check_pipeline
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.plan import Plan
from neuroshard.core.step_memory import Pipeline, PipelineOption

CPU = torch.device("cpu")
STREAM: Any = SimpleNamespace(device=CPU)


def built(name: str, **how: Any) -> Any:
    model, among = nn.Linear(2, 2), train_pipelines if hasattr(train_pipelines, name) else experimental_pipelines
    how |= {"site_fqn": "e"} if name == "TrainPipelineSparseDistBwdOpt" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own settings
        return getattr(among, name)(model, torch.optim.SGD(model.parameters()), CPU, **how)


def staged(sends_ids: bool, prefetches: bool = False) -> Any:
    stages = [PipelineStage("copy", runnable=lambda batch: batch, stream=STREAM)]
    if sends_ids:
        sender = SparseDataDistUtil(nn.Linear(2, 2), STREAM, prefetch_stream=STREAM if prefetches else None)
        stages.append(PipelineStage("send", runnable=sender.start_sparse_data_dist, stream=STREAM))
    return train_pipelines.StagedTrainPipeline(stages, compute_stream=STREAM)


def accumulating() -> Any:
    inside = built("TrainPipelineSparseDist")
    return GradientAccumulationWrapper(
        inside, inside._optimizer, inside._model, GradientAccumulationConfig(num_steps=4)
    )


def plan_of(pipeline: Pipeline | None, **changed: Any) -> Plan:
    plan, ledger = make_plan(), None if pipeline is None else 1
    task = plan.task.model_copy(update={"pipeline": pipeline, "step_ledger": ledger, **changed})
    return plan.model_copy(update={"task": task})


def said(plan: Plan, pipeline: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_pipeline(plan, pipeline)
    assert all(issubclass(one.category, ShardingWarning) for one in caught)
    return [str(one.message) for one in caught]


CASES = [
    *((name, built, (name,), kind) for name, kind in PIPELINES.items()),
    ("StagedTrainPipeline", staged, (False,), "none"),
    ("StagedTrainPipeline", staged, (True,), "sparse-dist"),
    ("StagedTrainPipeline", staged, (True, True), "prefetch"),
    ("TrainPipelineSparseDist", accumulating, (), "sparse-dist"),
]


@pytest.mark.parametrize(("name", "build", "arguments", "kind"), CASES)
def test_a_plan_for_another_pipeline_than_the_one_that_is_built_is_warned_of_in_one_line(name, build, arguments, kind):
    pipeline = build(*arguments)
    assert said(plan_of(kind), pipeline) == []
    for planned in {None, *get_args(Pipeline)} - {kind}:
        plan = plan_of(planned)
        counted = f"is for pipeline {planned}" if planned else "counts no memory of steps"
        assert said(plan, pipeline) == [
            f"plan {plan.digest()[:12]} {counted}, and the trainer's pipeline is {kind} ({name}); search with --pipeline {kind}"
        ]


def test_a_class_of_the_trainers_own_counts_as_the_one_that_it_inherits_from():
    class Mine(train_pipelines.TrainPipelineSparseDist):  # type: ignore[misc]
        pass

    pipeline = Mine(nn.Linear(2, 2), None, CPU)
    assert said(plan_of("sparse-dist"), pipeline) == []
    assert "the trainer's pipeline is sparse-dist (Mine)" in said(plan_of("none"), pipeline)[0]


def test_a_pipeline_whose_memory_nobody_counts_is_named():
    class Stashing(train_pipelines.TrainPipelineSparseDist):  # type: ignore[misc]
        __module__ = "torchrec.distributed.train_pipeline"

    (line,) = said(plan_of("sparse-dist"), Stashing(nn.Linear(2, 2), None, CPU))
    assert line.startswith("a Stashing is none of the pipelines whose memory is counted (TrainPipelineBase, ")
    assert "counts pipeline sparse-dist: reserve what it takes more (--reserve)" in line


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_pipeline_that_stashes_or_looks_up_ahead_is_refused_by_name(name):
    made = type(name, (train_pipelines.TrainPipelineSparseDist,), {"__module__": "torchrec.distributed.train_pipeline"})
    with refused(UsageError, name, "TrainPipelineSparseDist"):
        check_pipeline(plan_of("sparse-dist"), made(nn.Linear(2, 2), None, CPU))


def test_every_training_pipeline_of_torchrec_is_counted_or_refused():
    classes = {
        name
        for found in pkgutil.iter_modules(train_pipeline.__path__, f"{train_pipeline.__name__}.")
        for name, one in vars(importlib.import_module(found.name)).items()
        if inspect.isclass(one) and issubclass(one, train_pipelines.TrainPipeline)
    }
    known = {*PIPELINES, *UNKNOWN, *EVALUATING, "TrainPipeline", "StagedTrainPipeline"}
    assert classes <= known


@pytest.mark.parametrize("option", get_args(PipelineOption))
def test_a_pipeline_that_frees_other_inputs_than_planned_is_warned_of(option):
    frees, keeps = built("TrainPipelineSparseDist", **{option: True}), built("TrainPipelineSparseDist")
    planned = plan_of("sparse-dist", pipeline_options=(option,))
    assert said(planned, frees) == []
    for plan, pipeline in ((planned, keeps), (plan_of("sparse-dist"), frees)):
        (line,) = said(plan, pipeline)
        assert names(line, option)
        assert names(line, "--pipeline-options")


def test_a_pipeline_that_keeps_what_a_plan_counts_as_freed_is_refused_where_memory_is_short():
    planned = plan_of(
        "sparse-dist", batch_size=4096, pipeline_options=("free_features_storage_early", "clear_data_dist_inputs")
    )
    needs = max(planned.memory_bytes())
    little = planned.task.model_copy(update={"device_memory_bytes": (needs,) * planned.task.devices})
    plan = planned.model_copy(update={"task": little})
    assert max(plan_of("sparse-dist", batch_size=4096).memory_bytes()) > needs
    with pytest.warns(ShardingWarning, match="--pipeline-options"), refused(InvalidInput, "rank"):
        check_pipeline(plan, built("TrainPipelineSparseDist"))


@pytest.mark.parametrize("name", ["TrainPipelineBase", "TrainPipelineSparseDistLite"])
def test_a_plan_without_a_ledger_takes_what_sends_no_ids_ahead_for_a_plain_loop(name):
    assert said(plan_of("none", step_ledger=None), built(name)) == []


def test_pipelines_that_evaluate_are_not_looked_at():
    for name in ("EvalPipelineSparseDist", "EvalPipelineFusedSparseDist"):
        assert said(plan_of("none"), built(name)) == []


def test_a_pipeline_for_which_a_rank_lacks_memory_is_refused():
    plan = plan_of("none", batch_size=4096)
    needs = plan.memory_bytes()[0]
    little = plan_of("none", batch_size=4096, device_memory_bytes=(needs,) * plan.task.devices)
    more = plan_of("prefetch", batch_size=4096).memory_bytes()[0]
    assert more > needs
    with pytest.warns(ShardingWarning, match="the trainer's pipeline is prefetch"), refused(InvalidInput, "rank 0"):
        check_pipeline(little, built("PrefetchTrainPipelineSparseDist"))


def test_what_is_no_pipeline_is_refused():
    with refused(UsageError, "Linear"):
        check_pipeline(plan_of("none"), nn.Linear(2, 2))


def in_groups(sync_every: int) -> Plan:
    groups = Groups(ranks=4, contiguous=False, sync_every=sync_every, domain=4, local_world_size=4)
    plan = plan_of("sparse-dist")
    return plan_of("sparse-dist", groups=groups, topology=groups.topology(plan.task.devices, None))


def test_replicas_that_a_pipeline_averages_in_other_steps_than_planned_are_warned_of():
    by_default = built("TrainPipelineSparseDist")
    assert said(in_groups(1), by_default) == []
    assert said(plan_of("sparse-dist"), by_default) == []
    plan = in_groups(20)
    assert said(plan, by_default) == [
        f"a TrainPipelineSparseDist averages replicas every step, and plan {plan.digest()[:12]} is for replicas averaged "
        "every 20 steps: give it dmp_collection_sync_interval_batches=20"
    ]
    for interval in (20, None):  # None leaves it to the trainer
        assert said(plan, built("TrainPipelineSparseDist", dmp_collection_sync_interval_batches=interval)) == []


def test_a_pipeline_that_averages_no_replicas_though_it_has_an_interval_is_warned_of():
    _, line = said(in_groups(20), built("PrefetchTrainPipelineSparseDist"))
    assert line.startswith("a PrefetchTrainPipelineSparseDist averages no replicas, though it has an interval for that")
    assert line.endswith("averaged every 20 steps: call sync() of the model yourself")


def test_the_pipelines_that_average_are_those_whose_steps_do_in_torchrec():
    classes: dict[str, Any] = {
        name: one
        for name, one in vars(train_pipelines).items()
        if isinstance(one, type)
        and issubclass(one, train_pipelines.TrainPipelineSparseDist)
        and one.__module__ == train_pipelines.__name__
    }
    averaging = {name for name, one in classes.items() if ".sync_embeddings(" in inspect.getsource(one.progress)}
    assert averaging == set(AVERAGING)
