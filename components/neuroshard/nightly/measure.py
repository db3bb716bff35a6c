"""Measures a share of a kind of hardware in this pod, or all shares at once by a TrainJob; and where the pod of either runs."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from neuroshard.core.errors import NeuroshardError
from neuroshard.core.units import parse_duration
from neuroshard.measure.shares import job, train_job
from neuroshard.orders.nightly import Campaign, Job, Survey
from neuroshard.store.measuring import note_failure
from neuroshard.store.patience import open_patiently

ALL = "all"  # shares, of one TrainJob
START_SECONDS = 3600.0  # for a TrainJob's nodes to start and pull images


class Pod(NamedTuple):
    """What a measuring pod requests, and where it runs, as Kubernetes takes it. `gpus` is text: KFP drops a number silently."""

    image: str
    cpus: str
    memory: str
    gpus: str = "0"
    resource: str = "nvidia.com/gpu"
    nodes: Mapping[str, str] = MappingProxyType({})
    tolerations: Sequence[Mapping[str, Any]] = ()


def measuring_pods(survey: Survey, campaign: Campaign, shares: Sequence[int]) -> tuple[list[str], Pod]:
    """The shares that a pod each measures, and that pod: all devices of a node of its kind. A TrainJob measures ALL."""
    asked = survey.parameters
    if asked["training_runtime"]:
        pod = Pod(asked["step_image"], asked["step_cpus"], asked["step_memory"])
        return [ALL] if shares else [], pod
    gpus, resource = (str(campaign.devices), campaign.resource) if campaign.resource else ("0", "nvidia.com/gpu")
    request = asked["measure_image"], asked["measure_cpus"], asked["measure_memory"]
    return [*map(str, shares)], Pod(*request, gpus, resource, campaign.node_selector, campaign.tolerations)


def run(survey: Survey, campaign: Campaign, share: str, store_url: str, *, single_writer: bool) -> None:
    """Measure a share of a campaign, or ALL by a TrainJob, into the store, for as long as the run's `measure_budget`.

    Raises StoreError where the store cannot be listed, or does not answer.
    """
    budget_seconds = parse_duration(survey.parameters["measure_budget"])
    asked: dict[str, Any] = {
        "backend": survey.request.backend,
        "batch_size": survey.request.batch_size,
        "budget_seconds": budget_seconds,
        "seed": survey.request.seed,
        "single_writer": single_writer,
    }
    if share != ALL:
        job.run(Job(campaign=campaign, share=int(share), owner=survey.owner), store_url, **asked)
        return
    try:
        runtime, image = (str(survey.parameters[name]) for name in ("training_runtime", "measure_image"))
        body = train_job.train_job(campaign, runtime, image, {"store_url": store_url, **asked})
        train_job.run(body, 2 * budget_seconds + START_SECONDS)
    except NeuroshardError as error:  # concerns this kind alone: the others continue
        note_failure(open_patiently(store_url, single_writer=single_writer), campaign.folder, "train job", str(error))
