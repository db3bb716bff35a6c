"""Tiny tasks with copies, pins, rows, hosts and modules in every mixture: what holds of their plans, whatever they are."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.analytic import AnalyticModel
from helpers.exhaustive import optimum_ms, pipelines
from neuroshard.core.moves import moved_bytes, moves
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import DENSE_STATE
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

FEW = SearchSettings(rounds=1, simplicity=0.0)
TIGHTLY = 1e-9


class Reordering(AnalyticModel):
    """Reordered outputs cost something."""

    reorder_ms = 0.05


MODELS: dict[str, CostModel] = {"test": Reordering(1024), "h100": Analytic("h100", 1024)}


@st.composite
def tasks(draw: st.DrawFn) -> ShardingTask:
    """One to three tables to place beside one or two copies, on one to four devices, the four in one or two domains."""
    devices = draw(st.sampled_from([1, 2, 2, 3, 4]))
    domains = devices == 4 and draw(st.booleans())
    row_wise = draw(st.booleans())
    tables: list[dict[str, object]] = []
    rules: list[dict[str, object]] = []
    for number in range(draw(st.integers(2, 4 if devices < 4 else 3))):
        copied = number == 0 or (number == 1 and draw(st.booleans()) and len(tables) < 3)
        pooling = draw(st.sampled_from(["sum", "sum", "mean"] if copied else ["sum", "sum", "mean", "none"]))
        dim = 4 * draw(st.integers(1, 2 if devices == 4 else 3))
        tables.append(
            {
                "name": f"t{number}",
                "rows": draw(st.integers(1, 1000)),
                "dim": dim,
                "pooling_factor": draw(st.floats(0.1, 200)),
                "pooling": pooling,
                "optimizer_bytes_per_row": draw(st.sampled_from([0, 4])),
                "element_bytes": draw(st.sampled_from([2, 4])),
                "module": draw(st.sampled_from(["", "", "other"])),
            }
        )
        if copied:
            rules.append({"table": f"t{number}", "data_parallel": True})
        elif draw(st.integers(0, 3)) == 0 and not row_wise:
            rules.append({"table": f"t{number}", "devices": [draw(st.integers(0, devices - 1))]})
    assume(len(tables) > sum("data_parallel" in rule for rule in rules))
    return ShardingTask.parse(
        {
            "tables": tables,
            "device_memory_bytes": [2**24] * devices,
            "batch_size": 1024,
            "pipeline": draw(pipelines),
            "topology": {"domain": 2, "local_world_size": 2, "network_bytes_per_s": 1e10} if domains else None,
            "dense_optimizer": draw(st.sampled_from(sorted(DENSE_STATE))),
            "constraints": {"tables": rules, "row_wise": row_wise},
        },
        "the test",
    )


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@settings(max_examples=20, deadline=None)
@given(task=tasks())
def test_a_plan_beside_copies_is_priced_bounded_written_and_kept_as_it_is(model: CostModel, task: ShardingTask) -> None:
    plan = search(task, model, FEW)

    prices = price_shards(model, plan.held, plan.shards)
    assert prices is not None
    np.testing.assert_allclose(plan.predicted_ms, prices.total_ms, rtol=TIGHTLY)
    assert plan.lower_bound_ms is not None
    assert plan.cost_ms is not None
    optimum = optimum_ms(task, model)
    assert plan.lower_bound_ms <= optimum * (1 + TIGHTLY) <= plan.cost_ms * (1 + 2 * TIGHTLY)

    assert Plan.from_json(plan.canonical_json(), "written") == plan
    assert moves(plan, plan) == ()
    again = search(plan.task, model, replace(FEW, move_budget_bytes=0), previous=plan)
    assert moves(plan, again) == ()
    assert again.cost_ms is not None
    assert again.cost_ms <= plan.cost_ms * (1 + TIGHTLY)


@settings(max_examples=20, deadline=None)
@given(task=tasks(), other=tasks())
def test_of_tables_that_either_plan_copies_only_weights_move_that_a_device_lacks(
    task: ShardingTask, other: ShardingTask
) -> None:
    """And a search with a budget of these bytes moves no more."""
    model = MODELS["test"]
    other = other.model_copy(update={"tables": task.tables}).with_copies({"t0"} & other.constraints.data_parallel)
    old, new = search(task, model, FEW), search(other, model, FEW)
    found, tables = moves(old, new), {table.name: table for table in task.tables}
    for name in old.held.constraints.data_parallel | new.held.constraints.data_parallel:
        moved = sum(move.nbytes for move in found if move.table == name and move.from_device is not None)
        assert moved == tables[name].element_bytes * sum(
            _lacks(one, old.by_table()[name]) for one in new.by_table()[name]
        )
    budget = moved_bytes(old, new)
    again = search(new.task, model, replace(FEW, move_budget_bytes=budget), previous=old)
    assert moved_bytes(old, again) <= budget


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@settings(max_examples=20, deadline=None)
@given(task=tasks())
def test_where_copies_may_be_chosen_no_plan_is_dearer(model: CostModel, task: ShardingTask) -> None:
    without, auto = (search(task, model, replace(FEW, try_data_parallel=so)) for so in (False, True))
    assert max(auto.predicted_ms) <= max(without.predicted_ms) * (1 + TIGHTLY)


def _lacks(shard: Shard, before: Sequence[Shard]) -> int:
    """Elements of a shard that its device does not have before."""

    def common(first: int, count: int, other: int, others: int) -> int:
        return max(min(first + count, other + others) - max(first, other), 0)

    return shard.rows * shard.dim - sum(
        common(shard.row_offset, shard.rows, one.row_offset, one.rows)
        * common(shard.column_offset, shard.dim, one.column_offset, one.dim)
        for one in before
        if one.device == shard.device
    )
