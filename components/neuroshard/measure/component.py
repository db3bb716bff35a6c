"""KFP: what the cases cost, measured in the pod that this runs in."""

from kfp.dsl import Dataset, Input, Output

from neuroshard.component import component


@component
def measure(
    cases: Input[Dataset], backend: str, batch_size: int, budget: str, seed: int, costs: Output[Dataset]
) -> None:
    """Measure the cases on this pod's devices, for at most `budget` (3m, 2h)."""
    from pathlib import Path

    from neuroshard.core.units import parse_duration
    from neuroshard.measure.run import run

    run(
        Path(cases.path),
        Path(costs.path),
        backend=backend,
        batch_size=batch_size,
        budget_seconds=parse_duration(budget),
        seed=seed,
    )
