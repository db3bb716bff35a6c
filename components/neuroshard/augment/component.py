"""KFP: where a model's tables come from, and the cases to measure."""

from typing import List  # noqa: UP035 # kfp reads the annotations as text, and knows List

from kfp.dsl import Artifact, Output

from neuroshard.component import component


@component
def load(night: str, name: str, tables: Output[Artifact]) -> None:
    """A model's tables (a preset, a file or an object in S3) as tables.json."""
    from pathlib import Path

    from neuroshard.augment.source import run
    from neuroshard.core.nightly import Survey, told

    run(told(Survey, night).order(name).tables, Path(tables.path))


@component
def draw(night: str, store: str, compute_cases: int, comm_cases: int, seed: int, single_writer: bool) -> List[str]:  # noqa: UP006
    """Draw the cases of every kind of hardware that is to be measured into the store; the jobs that measure them."""
    from neuroshard.augment.night import run
    from neuroshard.core.nightly import Survey, told

    jobs = run(
        told(Survey, night),
        store,
        compute_cases=compute_cases,
        comm_cases=comm_cases,
        seed=seed,
        single_writer=single_writer,
    )
    return [job.canonical_json().decode() for job in jobs]
