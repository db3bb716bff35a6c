"""KFP: the steps of a nightly run that involve several stages."""

from typing import List, NamedTuple  # noqa: UP035 # kfp reads the annotations as text, and knows List

from kfp.dsl import HTML, Artifact, Dataset, Input, Metrics, Model, Output

from neuroshard.component import component


@component
def survey(
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
) -> NamedTuple(  # type: ignore[valid-type]
    "Survey",
    [("survey", str), ("campaigns", List[str]), ("at_once", List[str]), ("later", List[str]), ("measures", str)],  # noqa: UP006
):
    """Compare the fleet and the store with what the models need: which models to plan at once, and what to measure.

    All parameters of the run are checked here, before anything is measured.
    """
    given = dict(locals())

    from neuroshard.core.units import parse_duration
    from neuroshard.fleet.run import json_option
    from neuroshard.fleet.survey import SurveySettings
    from neuroshard.nightly.survey import planned_after, planned_at_once, run
    from neuroshard.orders.nightly import Request
    from neuroshard.orders.parameters import check_parameters

    check_parameters(given)
    request = {
        "compute_cases": compute_cases,
        "collective_cases": collective_cases,
        "batch_size": batch_size,
        "seed": seed,
        "backend": backend,
    }
    settings = SurveySettings(
        request=Request.parse(request, "the parameters"),
        nodes=nodes,
        node_selector=json_option(node_selector, dict, "node_selector"),
        tolerations=json_option(tolerations, list, "tolerations"),
        most_pods=pods,
        max_age_seconds=parse_duration(max_age) if max_age else None,
        max_error=max_error or None,
    )
    found = run(models, store, settings, single_writer=single_writer)
    return (
        found.canonical_json().decode(),
        [campaign.canonical_json().decode() for campaign in found.campaigns],
        [found.of(name).canonical_json().decode() for name in planned_at_once(found, store)],
        [found.of(name).canonical_json().decode() for name in planned_after(found)],
        "yes" if found.campaigns else "no",
    )


@component
def augment(survey: str, store: str, single_writer: bool, training_runtime: str) -> NamedTuple(  # type: ignore[valid-type]
    "Augment",
    [("jobs", List[str]), ("train_jobs", List[str])],  # noqa: UP006
):
    """Draw the missing cases of every kind of hardware into the store; the jobs that measure them.

    With a training runtime, all pods of a kind are one TrainJob; without, each pod is a job of its own.
    """
    from neuroshard.nightly.augment import run
    from neuroshard.orders.nightly import Survey, parse_message

    jobs = run(parse_message(Survey, survey), store, single_writer=single_writer)
    if training_runtime:
        campaigns = {job.campaign.folder: job.campaign.canonical_json().decode() for job in jobs}
        return [], list(campaigns.values())
    return [job.canonical_json().decode() for job in jobs], []


@component
def pretrain(
    survey: str,
    campaign: str,
    store: str,
    single_writer: bool,
    costs: Output[Dataset],
    cost_model: Output[Model],
    errors: Output[Metrics],
) -> None:
    """The costs of all shares of a kind of hardware -> its cost model, live unless its error is too high."""
    from pathlib import Path

    from neuroshard.nightly.pretrain import run
    from neuroshard.orders.nightly import Campaign, Survey, parse_message

    paths = Path(costs.path), Path(cost_model.path)
    found, asked = parse_message(Survey, survey), parse_message(Campaign, campaign)
    learned = run(found, asked, store, *paths, single_writer=single_writer)
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    for net in learned.report.nets if learned else ():
        for split, error in net.splits.items():
            if error is not None:
                errors.log_metric(f"{net.name}, {split}: MAPE", error.mape)


@component
def search(
    model: str,
    store: str,
    algorithm: str,
    memory_margin: float,
    tables: Output[Artifact],
    plan: Output[Artifact],
    predicted: Output[Metrics],
) -> str:
    """Search a model's plan for today's tables, with the best cost model there is. `model` is the survey of it alone."""
    from pathlib import Path

    from neuroshard.nightly.search import run
    from neuroshard.orders.nightly import Survey, parse_message

    found = parse_message(Survey, model)
    best, searched = run(
        found,
        found.models[0].name,
        store,
        Path(tables.path),
        Path(plan.path),
        algorithm=algorithm,
        memory_margin=memory_margin,
    )
    if best is not None:
        costs = {algorithm: best.cost_ms, **{b.algorithm: b.cost_ms for b in best.baselines}}
        for by, milliseconds in costs.items():
            if milliseconds is not None:
                predicted.log_metric(f"{by}_ms", milliseconds)
    return searched.canonical_json().decode()


@component
def deploy(
    model: str,
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
    from neuroshard.nightly.conclude import check_red
    from neuroshard.nightly.deploy import ReleaseFiles, run
    from neuroshard.orders.nightly import Searched, Survey, parse_message

    found = parse_message(Survey, model)
    settings = DeploySettings(
        min_gain=min_gain if min_gain >= 0 else None, memory_margin=memory_margin, single_writer=single_writer
    )
    files = ReleaseFiles(Path(plan.path), Path(tables.path), Path(release.path), Path(page.path))
    check_red(found, run(found, found.models[0].name, parse_message(Searched, searched), files, store, settings))


@component
def conclude(survey: str, store: str) -> None:
    """Report which models have no new plan and why. Fails where a model has no plan at all."""
    from neuroshard.nightly.conclude import run
    from neuroshard.orders.nightly import Survey, parse_message

    run(parse_message(Survey, survey), store)
