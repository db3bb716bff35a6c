"""KFP: the cases to measure."""

from typing import List, NamedTuple  # noqa: UP035 # kfp reads the annotations as text, and knows List

from neuroshard.component import component


@component
def augment(night: str, store: str, single_writer: bool, training_runtime: str) -> NamedTuple(  # type: ignore[valid-type]
    "Augment",
    [("jobs", List[str]), ("train_jobs", List[str])],  # noqa: UP006
):
    """Draw the cases that a kind of hardware lacks into the store, and return the jobs that measure what is left.

    With a training runtime, all pods of a kind are one train job; without, each pod is a job.
    """
    from neuroshard.augment.night import run
    from neuroshard.core.nightly import Survey, told

    jobs = run(told(Survey, night), store, single_writer=single_writer)
    if training_runtime:
        works = {job.work.folder: job.work.canonical_json().decode() for job in jobs}
        return [], list(works.values())
    return [job.canonical_json().decode() for job in jobs], []
