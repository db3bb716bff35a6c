"""KFP: a cost model from measured costs, and its errors as metrics."""

from kfp.dsl import Dataset, Input, Metrics, Model, Output

from neuroshard.component import component


@component
def pretrain(costs: Input[Dataset], seed: int, cost_model: Output[Model], errors: Output[Metrics]) -> None:
    """Train the cost models; the step's metrics are their mean relative errors on cases that they never saw."""
    from pathlib import Path

    from neuroshard.pretrain.run import run

    for net in run(Path(costs.path), Path(cost_model.path), seed=seed).report.nets:
        for split, found in net.splits.items():
            if found is not None:
                errors.log_metric(f"{net.name}, {split}: MAPE", found.mape)
