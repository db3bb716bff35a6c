"""Every plan of a tiny task, priced: the exact optimum."""

import itertools

import numpy as np

from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import CostModel, device_costs


def optimum_ms(task: ShardingTask, model: CostModel) -> float:
    """The least cost of any plan that is allowed, from every way to deal tables' columns to devices. Infinite where none is."""
    constraints = task.constraints
    rules, together = constraints.rules(), {name: group for group in constraints.together for name in group}
    deals = []
    for table in task.tables:
        least, most = constraints.allowed(rules.get(table.name), table.dim)
        most = 1 if table.name in together else most or task.devices
        rule = rules.get(table.name)
        pinned = range(task.devices) if rule is None or rule.devices is None else rule.devices
        steps = range(table.dim // 4 + 1)
        widths = (4 * np.array(w) for w in itertools.product(steps, repeat=task.devices) if sum(w) * 4 == table.dim)
        deals.append(
            [
                w
                for w in widths
                if (w[w > 0] >= least).all() and (w > 0).sum() <= most and set(np.flatnonzero(w)) <= set(pinned)
            ]
        )
    widths = np.array(list(itertools.product(*deals)), dtype=np.int64)  # plans, tables, devices
    if not len(widths):
        return float("inf")
    names = [table.name for table in task.tables]
    for group in constraints.together:
        at = widths[:, [names.index(name) for name in group]] > 0
        widths = widths[(at == at[:, :1]).all(axis=(1, 2))]
    flat = [table for table in task.tables for _ in range(task.devices)]
    if not len(widths):
        return float("inf")
    vectors = np.stack([model.table_vectors(flat, w.ravel()) * (w.ravel() > 0)[:, None] for w in widths])
    element = np.array([[table.element_bytes + table.optimizer_bytes_per_element] for table in task.tables])
    row = np.array([[table.optimizer_bytes_per_row] for table in task.tables])
    rows = np.array([[table.rows] for table in task.tables])
    used = (rows * (widths * element + row * (widths > 0))).sum(axis=1)
    sums = vectors.reshape(*widths.shape, -1).sum(axis=1)
    cost = np.sum(device_costs(model, sums, widths.sum(axis=1).astype(float)), axis=0).max(axis=-1)
    return float(cost[(used <= task.usable_bytes).all(axis=-1)].min(initial=np.inf))
