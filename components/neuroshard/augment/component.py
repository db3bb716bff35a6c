"""KFP: where a model's tables come from, and the cases to measure."""

from typing import List, NamedTuple  # noqa: UP035 # kfp reads the annotations as text, and knows List

from kfp.dsl import Artifact, Output

from neuroshard.component import component


@component
def load(night: str, name: str, tables: Output[Artifact]) -> None:
    """A model's tables (a preset, a file or an object in S3) as tables.json."""
    from pathlib import Path

    from neuroshard.augment.source import run
    from neuroshard.core.nightly import Survey, told
    from neuroshard.store.folders import patiently

    patiently(lambda: run(told(Survey, night).order(name).tables, Path(tables.path)))


@component
def draw(
    night: str, store: str, compute_cases: int, comm_cases: int, seed: int, single_writer: bool, training_runtime: str
) -> NamedTuple("Draw", [("jobs", List[str]), ("gangs", List[str])]):  # type: ignore[valid-type] # noqa: UP006
    """Draw the cases of every kind of hardware that is to be measured into the store; who measures them.

    With a training runtime all pods of a kind are one TrainJob, a gang; without, each is a job.
    """
    from neuroshard.augment.night import run
    from neuroshard.core.nightly import Survey, told

    survey = told(Survey, night)
    jobs = run(
        survey,
        store,
        compute_cases=compute_cases,
        comm_cases=comm_cases,
        seed=seed,
        single_writer=single_writer,
    )
    if training_runtime:
        return [], [work.canonical_json().decode() for work in survey.works]
    return [job.canonical_json().decode() for job in jobs], []
