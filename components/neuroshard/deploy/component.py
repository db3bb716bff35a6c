"""KFP: the plan goes live."""

from kfp.dsl import Artifact, Input, Output

from neuroshard.component import component


@component
def deploy(plan: Input[Artifact], store: str, model: str, single_writer: bool, release: Output[Artifact]) -> None:
    """Publish the plan under its digest, then make it `model`'s live one, or keep the one that is better."""
    from pathlib import Path

    from neuroshard.deploy.run import run

    live = run(Path(plan.path), store, model, single_writer=single_writer).release
    Path(release.path).write_bytes(live.canonical_json())
