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
    [("found", str), ("works", List[str]), ("names", List[str]), ("later", List[str]), ("renew", str)],  # noqa: UP006
):
    """Compare the fleet and the store with what the models need: which models to plan at once, and what to measure.

    All parameters of the run are checked here, before anything is measured.
    """
    given = dict(locals())

    from neuroshard.core.nightly import Request
    from neuroshard.core.parameters import check_parameters
    from neuroshard.core.units import parse_duration
    from neuroshard.fleet.run import json_option
    from neuroshard.fleet.survey import SurveySettings
    from neuroshard.nightly.survey import planned_after, planned_at_once, run

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
        [work.canonical_json().decode() for work in found.works],
        planned_at_once(found, store),
        planned_after(found),
        "yes" if found.works else "no",
    )


@component
def augment(found: str, store: str, single_writer: bool, training_runtime: str) -> NamedTuple(  # type: ignore[valid-type]
    "Augment",
    [("jobs", List[str]), ("train_jobs", List[str])],  # noqa: UP006
):
    """Draw the missing cases of every kind of hardware into the store; the jobs that measure them.

    With a training runtime, all pods of a kind are one TrainJob; without, each pod is a job of its own.
    """
    from neuroshard.core.nightly import Survey, parse_message
    from neuroshard.nightly.draw import run

    jobs = run(parse_message(Survey, found), store, single_writer=single_writer)
    if training_runtime:
        works = {job.work.folder: job.work.canonical_json().decode() for job in jobs}
        return [], list(works.values())
    return [job.canonical_json().decode() for job in jobs], []


@component
def pretrain(
    found: str,
    work: str,
    store: str,
    single_writer: bool,
    costs: Output[Dataset],
    cost_model: Output[Model],
    errors: Output[Metrics],
) -> None:
    """The costs of all shares of a kind of hardware -> its cost model, live unless its error is too high."""
    from pathlib import Path

    from neuroshard.core.nightly import Survey, Work, parse_message
    from neuroshard.nightly.learn import run

    paths = Path(costs.path), Path(cost_model.path)
    survey, asked = parse_message(Survey, found), parse_message(Work, work)
    learned = run(survey, asked, store, *paths, single_writer=single_writer)
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    for net in learned.report.nets if learned else ():
        for split, error in net.splits.items():
            if error is not None:
                errors.log_metric(f"{net.name}, {split}: MAPE", error.mape)


@component
def search(
    found: str,
    name: str,
    store: str,
    algorithm: str,
    memory_margin: float,
    tables: Output[Artifact],
    plan: Output[Artifact],
    predicted: Output[Metrics],
) -> str:
    """Search a model's plan for today's tables, with the best cost model there is."""
    from pathlib import Path

    from neuroshard.core.nightly import Survey, parse_message
    from neuroshard.nightly.search import run

    best, searched = run(
        parse_message(Survey, found),
        name,
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
    found: str,
    name: str,
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

    from neuroshard.core.nightly import Searched, Survey, parse_message
    from neuroshard.deploy.run import DeploySettings
    from neuroshard.nightly.release import ReleaseFiles, check_red, run

    survey = parse_message(Survey, found)
    settings = DeploySettings(
        min_gain=min_gain if min_gain >= 0 else None, memory_margin=memory_margin, single_writer=single_writer
    )
    files = ReleaseFiles(Path(plan.path), Path(tables.path), Path(release.path), Path(page.path))
    check_red(survey, run(survey, name, parse_message(Searched, searched), files, store, settings))


@component
def conclude(found: str, store: str) -> None:
    """Report which models have no new plan and why. Fails where a model has no plan at all."""
    from neuroshard.core.nightly import Survey, parse_message
    from neuroshard.nightly.release import conclude

    conclude(parse_message(Survey, found), store)
