"""KFP: the steps of a nightly run. `run` is the name that Kubeflow gave it: what it found, and how each of its steps ended,
is in the store under that name.
"""

from typing import List, NamedTuple  # noqa: UP035 # kfp reads the annotations as text, and knows List

from kfp.dsl import HTML, Artifact, Dataset, Input, Metrics, Model, Output

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
) -> NamedTuple("Survey", [("kinds", List[str]), ("at_once", List[str]), ("last", str)]):  # type: ignore[valid-type]  # noqa: UP006
    """Compare the fleet and the store with what the models need: which kinds of hardware to measure, which models to plan at
    once, and which after that. All parameters of the run are checked here, before anything is measured.
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
        found = night.run(models, store, settings, owner=run, single_writer=single_writer)
        kinds = [campaign.hardware.fingerprint for campaign in found.campaigns]
        return kinds, night.planned_at_once(found, store), night.planned_last(found)


@component
def augment(
    run: str,
    kind: str,
    store: str,
    single_writer: bool,
    training_runtime: str,
    measure_image: str,
    measure_cpus: str,
    measure_memory: str,
    step_image: str,
    step_cpus: str,
    step_memory: str,
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
    from neuroshard.nightly.measure import ALL, Pod, measuring_pod
    from neuroshard.nightly.survey import planned_after, planned_last
    from neuroshard.store.night import night_step

    with night_step(store, run, "augment", kind, single_writer=single_writer) as found:
        campaign, last = found.campaign(kind), planned_last(found)
        shares = [str(share) for share in night.run(found, campaign, store, single_writer=single_writer)]
        later = [name for name in planned_after(found, kind) if name != last]
        pod = measuring_pod(campaign, measure_image, measure_cpus, measure_memory)
        if training_runtime:
            shares, pod = [ALL] if shares else [], Pod(step_image, step_cpus, step_memory)
        *request, nodes, tolerations = pod
        return shares, later, *request, dict(nodes), list(tolerations)


@component
def measure(
    run: str,
    kind: str,
    share: str,
    store: str,
    single_writer: bool,
    budget: str,
    training_runtime: str,
    measure_image: str,
) -> None:
    """Measure a share of a kind's cases on this pod's devices, for at most `budget` (3m, 2h), into the store."""
    from neuroshard.core.units import parse_duration
    from neuroshard.nightly import measure as night
    from neuroshard.store.night import night_step

    with night_step(store, run, "measure", f"{kind}/{share}", single_writer=single_writer) as found:
        night.run(
            found,
            found.campaign(kind),
            share,
            store,
            budget_seconds=parse_duration(budget),
            single_writer=single_writer,
            training_runtime=training_runtime,
            image=measure_image,
        )


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
def search(
    run: str,
    model: str,
    store: str,
    single_writer: bool,
    algorithm: str,
    memory_margin: float,
    tables: Output[Artifact],
    plan: Output[Artifact],
    predicted: Output[Metrics],
) -> str:
    """Search a model's plan for today's tables, with the best cost model there is."""
    from pathlib import Path

    from neuroshard.nightly import search as night
    from neuroshard.store.night import night_step

    paths = Path(tables.path), Path(plan.path)
    with night_step(store, run, "search", model, single_writer=single_writer) as found:
        best, searched = night.run(found, model, store, *paths, algorithm=algorithm, memory_margin=memory_margin)
    if best is not None:
        costs = {algorithm: best.cost_ms, **{b.algorithm: b.cost_ms for b in best.baselines}}
        for by, milliseconds in costs.items():
            if milliseconds is not None:
                predicted.log_metric(f"{by}_ms", milliseconds)
    return searched.canonical_json().decode()


@component
def deploy(
    run: str,
    model: str,
    at_once: bool,
    searched: str,
    plan: Input[Artifact],
    tables: Input[Artifact],
    store: str,
    min_gain: float,
    memory_margin: float,
    single_writer: bool,
    release: Output[Artifact],
    page: Output[HTML],
) -> None:
    """Make the plan the model's live one, or keep the live one where that is predicted better; and draw a page of it."""
    from pathlib import Path

    from neuroshard.deploy.run import DeploySettings
    from neuroshard.nightly import deploy as night
    from neuroshard.orders.nightly import Searched, parse_message
    from neuroshard.store.night import night_step

    settings = DeploySettings(
        min_gain=min_gain if min_gain >= 0 else None, memory_margin=memory_margin, single_writer=single_writer
    )
    files = night.ReleaseFiles(Path(plan.path), Path(tables.path), Path(release.path), Path(page.path))
    with night_step(store, run, "deploy", model, single_writer=single_writer) as found:
        verdict = night.run(found, model, parse_message(Searched, searched), files, store, settings)
        night.check_red(found, verdict, at_once=at_once)
