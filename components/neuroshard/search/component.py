"""KFP: the plan, and what it and the baselines are predicted to cost as metrics."""

from kfp.dsl import Artifact, Input, Metrics, Model, Output

from neuroshard.component import component


@component
def search(
    tables: Input[Artifact],
    cost_model: Input[Model],
    devices: int,
    memory: str,
    batch_size: int,
    algorithm: str,
    seed: int,
    plan: Output[Artifact],
    predicted: Output[Metrics],
) -> None:
    """Search the plan whose slowest device is fastest, by the cost model; milliseconds of it and of the baselines."""
    from pathlib import Path

    from neuroshard.core.units import parse_memory
    from neuroshard.search.run import run

    found = run(
        Path(tables.path),
        cost_model.path,
        Path(plan.path),
        devices=devices,
        memory_bytes=parse_memory(memory, devices),
        batch_size=batch_size,
        algorithm=algorithm,
        seed=seed,
    )
    for name, milliseconds in {
        algorithm: found.cost_ms,
        **{b.algorithm: b.cost_ms for b in found.baselines},
    }.items():
        if milliseconds is not None:
            predicted.log_metric(f"{name}_ms", milliseconds)
