"""KFP: the plan, and what it and the baselines are predicted to cost as metrics."""

from kfp.dsl import Artifact, Input, Metrics, Output

from neuroshard.component import component


@component
def search(
    night: str,
    name: str,
    tables: Input[Artifact],
    store: str,
    batch_size: int,
    algorithm: str,
    seed: int,
    plan: Output[Artifact],
    predicted: Output[Metrics],
) -> None:
    """Search a model's plan by the live cost model of its hardware; milliseconds of it and of the baselines."""
    from pathlib import Path

    from neuroshard.core.nightly import Survey, told
    from neuroshard.search.night import run
    from neuroshard.store.folders import patiently

    found = patiently(
        lambda: run(
            told(Survey, night),
            name,
            Path(tables.path),
            store,
            Path(plan.path),
            batch_size=batch_size,
            algorithm=algorithm,
            seed=seed,
        )
    )
    for name_, milliseconds in {
        algorithm: found.cost_ms,
        **{b.algorithm: b.cost_ms for b in found.baselines},
    }.items():
        if milliseconds is not None:
            predicted.log_metric(f"{name_}_ms", milliseconds)
