"""KFP: a model's new plan as a page that KFP's UI shows."""

from kfp.dsl import HTML, Artifact, Input, Output

from neuroshard.component import component


@component
def report(night: str, name: str, plan: Input[Artifact], store: str, page: Output[HTML]) -> None:
    """The plan beside the one that is live, or that it replaced; with the live cost model of its hardware."""
    from pathlib import Path

    from neuroshard.core.nightly import Survey, told
    from neuroshard.report.run import run
    from neuroshard.store.folders import patiently

    hardware = told(Survey, night).hardware[name]
    patiently(lambda: run(Path(plan.path), Path(page.path), model=f"{store}#{hardware}", live=f"{store}#{name}"))
