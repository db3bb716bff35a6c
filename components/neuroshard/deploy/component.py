"""KFP: a cost model goes live for its hardware; a plan goes live for its model, past the gate."""

from kfp.dsl import Artifact, Input, Model, Output

from neuroshard.component import component


@component
def publish(work: str, cost_model: Input[Model], store: str, max_error: float, single_writer: bool) -> None:
    """Make the cost model its hardware's live one, unless its error is too high; the work behind it is then done."""
    from pathlib import Path

    from neuroshard.core.nightly import Work, told
    from neuroshard.deploy.night import publish

    publish(told(Work, work), Path(cost_model.path), store, max_error=max_error, single_writer=single_writer)


@component
def deploy(
    night: str,
    name: str,
    plan: Input[Artifact],
    tables: Input[Artifact],
    store: str,
    min_gain: float,
    max_error: float,
    memory_margin: float,
    single_writer: bool,
    release: Output[Artifact],
) -> None:
    """Publish the plan under its digest, then make it the model's live one, or keep the one that is predicted better."""
    from pathlib import Path

    from neuroshard.core.nightly import Survey, told
    from neuroshard.deploy.run import run
    from neuroshard.store.folders import patiently

    outcome = patiently(
        lambda: run(
            Path(plan.path),
            store,
            name,
            tables=Path(tables.path),
            cost_model=f"{store}#{told(Survey, night).hardware[name]}",
            min_gain=min_gain if min_gain >= 0 else None,
            max_error=max_error or None,
            memory_margin=memory_margin,
            single_writer=single_writer,
        )
    )
    print(outcome.decision.why if outcome.decision else "this plan is live already")
    Path(release.path).write_bytes(outcome.release.canonical_json())
