"""KFP: the steps of a nightly run. `run` is the name that Kubeflow gave it: what it found, and how each of its steps ended,
is in the store under that name.
"""

from typing import List, NamedTuple  # noqa: UP035 # kfp reads the annotations as text, and knows List

from kfp.dsl import HTML, Artifact, Dataset, Metrics, Model, Output

from neuroshard.component import component


@component
def survey(
    run: str,
    models: str,
    store: str,
    single_writer: bool,
    backend: str,
    nodes: str,
    node_selector: str,
    tolerations: str,
    compute_cases: int,
    collective_cases: int,
    batch_size: int,
    seed: int,
    pods: int,
    max_age: str,
    max_error: float,
    min_gain: float,
    memory_margin: float,
    algorithm: str,
    measure_budget: str,
    training_runtime: str,
    measure_cpus: str,
    measure_memory: str,
    measure_image: str,
    step_cpus: str,
    step_memory: str,
    step_image: str,
    store_secret: str,
) -> NamedTuple("Survey", [("kinds", List[str]), ("at_once", List[str])]):  # type: ignore[valid-type]  # noqa: UP006
    """Compare the fleet and the store with what the models need: which kinds of hardware to measure, and which models to plan at
    once beside the first. All parameters of the run are checked here, before anything is measured, and recorded for its steps.
    """
    given = dict(locals())
    del given["run"]

    from neuroshard.core.units import parse_duration
    from neuroshard.fleet.run import json_option
    from neuroshard.fleet.survey import SurveySettings
    from neuroshard.nightly import survey as night
    from neuroshard.orders.nightly import Request
    from neuroshard.orders.parameters import check_parameters, quantity
    from neuroshard.store.night import recorded

    with recorded(store, run, "survey", single_writer=single_writer):
        check_parameters(given)
        settings = SurveySettings(
            request=Request.parse(given, "the parameters"),
            nodes=nodes,
            node_selector=json_option(node_selector, dict, "node_selector"),
            tolerations=json_option(tolerations, list, "tolerations"),
            most_pods=pods,
            pod_memory_bytes=quantity(measure_memory),
            max_age_seconds=parse_duration(max_age) if max_age else None,
            max_error=max_error or None,
        )
        found = night.run(models, store, settings, owner=run, single_writer=single_writer, parameters=given)
        return [campaign.hardware.fingerprint for campaign in found.campaigns], list(found.at_once[1:])


@component
def augment(
    run: str,
    kind: str,
    store: str,
    single_writer: bool,
) -> NamedTuple(  # type: ignore[valid-type]
    "Augment",
    [
        ("shares", List[str]),  # noqa: UP006
        ("later", List[str]),  # noqa: UP006
        ("image", str),
        ("cpus", str),
        ("memory", str),
        ("gpus", str),
        ("resource", str),
        ("nodes", dict),
        ("tolerations", list),
    ],
):
    """Draw the missing cases of a kind of hardware into the store: the shares in which they are measured, the models that wait
    for it, and the pod of a share. With a training runtime all shares are one TrainJob, which a pod without GPUs starts.
    """
    from neuroshard.nightly import augment as night
    from neuroshard.nightly.measure import measuring_pods
    from neuroshard.nightly.survey import planned_after
    from neuroshard.store.night import night_step

    with night_step(store, run, "augment", kind, single_writer=single_writer) as found:
        left = night.run(found, found.campaign(kind), store, single_writer=single_writer)
        shares, pod = measuring_pods(found, found.campaign(kind), left)
        *request, nodes, tolerations = pod
        return shares, planned_after(found, kind), *request, dict(nodes), list(tolerations)


@component
def measure(run: str, kind: str, share: str, store: str, single_writer: bool) -> None:
    """Measure a share of a kind's cases on this pod's devices, for at most the run's `measure_budget`, into the store."""
    from neuroshard.nightly import measure as night
    from neuroshard.store.night import night_step

    with night_step(store, run, "measure", f"{kind}/{share}", single_writer=single_writer) as found:
        night.run(found, found.campaign(kind), share, store, single_writer=single_writer)


@component
def pretrain(
    run: str,
    kind: str,
    store: str,
    single_writer: bool,
    costs: Output[Dataset],
    cost_model: Output[Model],
    errors: Output[Metrics],
) -> None:
    """The costs of all shares of a kind of hardware -> its cost model, live unless its error is too high."""
    from pathlib import Path

    from neuroshard.nightly import pretrain as night
    from neuroshard.store.night import night_step

    paths = Path(costs.path), Path(cost_model.path)
    with night_step(store, run, "pretrain", kind, single_writer=single_writer) as found:
        learned = night.run(found, found.campaign(kind), store, *paths, single_writer=single_writer)
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    for net in learned.report.nets if learned else ():
        for split, error in net.splits.items():
            if error is not None:
                errors.log_metric(f"{net.name}, {split}: MAPE", error.mape)


@component
def plan(
    run: str,
    model: str,
    at_once: bool,
    store: str,
    single_writer: bool,
    tables: Output[Artifact],
    plan: Output[Artifact],
    release: Output[Artifact],
    page: Output[HTML],
    predicted: Output[Metrics],
) -> None:
    """Search a model's plan for today's tables, with the best cost model there is; make it the model's live one, or keep the live
    one where that is predicted better; and draw a page of it. Without a name, of the first model that need not wait.
    """
    from pathlib import Path

    from neuroshard.core.clean import log
    from neuroshard.nightly import deploy, search
    from neuroshard.nightly.survey import first_model
    from neuroshard.store.night import night_step

    model = model or first_model(store, run)
    if not model:
        log("every model waits for what is measured")
        return
    files = deploy.ReleaseFiles(Path(plan.path), Path(tables.path), Path(release.path), Path(page.path))
    with night_step(store, run, "plan", model, single_writer=single_writer) as found:
        best, searched = search.run(found, model, store, files.tables, files.plan)
        costs = (
            {best.provenance.algorithm: best.cost_ms, **{b.algorithm: b.cost_ms for b in best.baselines}}
            if best
            else {}
        )
        for by, cost_ms in costs.items():
            if cost_ms is not None:
                predicted.log_metric(f"{by}_ms", cost_ms)
        verdict = deploy.run(found, model, searched, files, store, single_writer=single_writer)
        deploy.check_red(found, verdict, at_once=at_once)
