"""KFP: the plan goes live, past the gate."""

from kfp.dsl import Artifact, Input, Model, Output

from neuroshard.component import component


@component
def deploy(
    plan: Input[Artifact],
    tables: Input[Artifact],
    cost_model: Input[Model],
    store: str,
    model: str,
    single_writer: bool,
    release: Output[Artifact],
) -> None:
    """Publish the plan under its digest, then make it `model`'s live one, or keep the one that is predicted better."""
    from pathlib import Path

    from neuroshard.deploy.run import run

    outcome = run(
        Path(plan.path),
        store,
        model,
        tables=Path(tables.path),
        cost_model=cost_model.path,
        single_writer=single_writer,
    )
    print(outcome.decision.why if outcome.decision else "this plan is live already")
    Path(release.path).write_bytes(outcome.release.canonical_json())
