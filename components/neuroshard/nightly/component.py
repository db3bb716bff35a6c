"""KFP: the steps of the nightly run that several rooms have a part in."""

from typing import List, NamedTuple  # noqa: UP035 # kfp reads the annotations as text, and knows List

from kfp.dsl import HTML, Artifact, Dataset, Input, Metrics, Model, Output

from neuroshard.component import component


@component
def survey(
    models: str,
    store: str,
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
    [("night", str), ("works", List[str]), ("names", List[str]), ("later", List[str]), ("renew", str)],  # noqa: UP006
):
    """The fleet and the store against what the models need: which to plan at once, and what to measure before the others.

    All parameters of the run are checked here, before anything is measured.
    """
    given = dict(locals())

    from neuroshard.core.nightly import Request
    from neuroshard.core.parameters import check_parameters
    from neuroshard.core.units import parse_duration
    from neuroshard.fleet.run import json_option
    from neuroshard.nightly.survey import planned_after, planned_at_once, run

    check_parameters(given)
    request = {
        "compute_cases": compute_cases,
        "collective_cases": collective_cases,
        "batch_size": batch_size,
        "seed": seed,
        "backend": backend,
    }
    found = run(
        models,
        store,
        request=Request.parse(request, "the parameters"),
        recorded=nodes,
        node_selector=json_option(node_selector, dict, "node_selector"),
        tolerations=json_option(tolerations, list, "tolerations"),
        most_pods=pods,
        max_age_seconds=parse_duration(max_age) if max_age else None,
        max_error=max_error or None,
    )
    return (
        found.canonical_json().decode(),
        [work.canonical_json().decode() for work in found.works],
        planned_at_once(found, store),
        planned_after(found),
        "yes" if found.works else "no",
    )


@component
def pretrain(
    night: str,
    work: str,
    store: str,
    single_writer: bool,
    costs: Output[Dataset],
    cost_model: Output[Model],
    errors: Output[Metrics],
) -> None:
    """The costs of all shares of a kind of hardware -> its cost model, live unless its error is too high."""
    from pathlib import Path

    from neuroshard.core.nightly import Survey, Work, told
    from neuroshard.nightly.learn import run

    paths = Path(costs.path), Path(cost_model.path)
    learned = run(told(Survey, night), told(Work, work), store, *paths, single_writer=single_writer)
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    for net in learned.report.nets if learned else ():
        for split, found in net.splits.items():
            if found is not None:
                errors.log_metric(f"{net.name}, {split}: MAPE", found.mape)


@component
def search(
    night: str,
    name: str,
    store: str,
    algorithm: str,
    memory_margin: float,
    tables: Output[Artifact],
    plan: Output[Artifact],
    predicted: Output[Metrics],
) -> str:
    """Search a model's plan for its tables of today, by the best cost model that there is."""
    from pathlib import Path

    from neuroshard.core.nightly import Survey, told
    from neuroshard.nightly.plan import run

    found, searched = run(
        told(Survey, night),
        name,
        store,
        Path(tables.path),
        Path(plan.path),
        algorithm=algorithm,
        memory_margin=memory_margin,
    )
    if found is not None:
        costs = {algorithm: found.cost_ms, **{b.algorithm: b.cost_ms for b in found.baselines}}
        for by, milliseconds in costs.items():
            if milliseconds is not None:
                predicted.log_metric(f"{by}_ms", milliseconds)
    return searched.canonical_json().decode()


@component
def deploy(
    night: str,
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
    """Make the plan the model's live one, or keep the one that is predicted better; and a page that shows it."""
    from pathlib import Path

    from neuroshard.core.nightly import Searched, Survey, told
    from neuroshard.nightly.release import check_red, run

    survey = told(Survey, night)
    verdict = run(
        survey,
        name,
        told(Searched, searched),
        Path(plan.path),
        Path(tables.path),
        store,
        Path(release.path),
        Path(page.path),
        min_gain=min_gain if min_gain >= 0 else None,
        memory_margin=memory_margin,
        single_writer=single_writer,
    )
    check_red(survey, verdict)


@component
def conclude(night: str, store: str) -> None:
    """Say which models have no new plan and why, and fail where one has none at all."""
    from neuroshard.core.nightly import Survey, told
    from neuroshard.nightly.release import conclude

    conclude(told(Survey, night), store)
