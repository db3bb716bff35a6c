"""Plans of trainers that fetch missed rows while dense layers compute: their price, their bound, and where HBM goes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

FEW = SearchSettings(rounds=6)


def drawn(seed: int, count: int, devices: int, share: float, dense_ms: float | None) -> ShardingTask:
    """Zipf tables on devices whose HBM is such a share of what they need, in a trainer that prefetches."""
    rng = np.random.default_rng(seed)
    tables = tuple(
        Table(
            name=f"t{number}",
            rows=int(10 ** rng.uniform(5, 6.3)),
            dim=int(rng.choice([32, 64, 128])),
            pooling_factor=float(rng.integers(5, 30)),
            access=f"zipf:{rng.uniform(0.8, 1.3):.2f}",
        )
        for number in range(count)
    )
    roomy = ShardingTask(
        tables=tables, device_memory_bytes=(2**50,) * devices, batch_size=2048 * devices, pipeline="prefetch"
    )
    memory = int(share * roomy.need_bytes / devices)
    return roomy.model_copy(
        update={"device_memory_bytes": (memory,) * devices, "host_memory_bytes": 2**44, "dense_ms": dense_ms}
    )


def planned(task: ShardingTask) -> Plan:
    return search(task, analytic_model("h100", task.batch_size), FEW)


def fetched_ms(plan: Plan) -> float:
    """Most that a device fetches ahead, hidden or not."""
    task = plan.held.model_copy(update={"dense_ms": 1e-9})
    shards = plan.shards
    model = analytic_model("h100", task.batch_size)
    waited, hidden = (price_shards(model, task.model_copy(update={"dense_ms": ms}), shards) for ms in (1e-9, 1e6))
    assert waited is not None
    assert hidden is not None
    return float((waited.compute_ms - hidden.compute_ms).max())


@pytest.mark.parametrize(("seed", "share"), [(0, 0.1), (1, 0.2)])
def test_plans_are_above_their_bound_and_a_longer_dense_time_costs_no_more(seed: int, share: float) -> None:
    waiting = planned(drawn(seed, 8, 2, share, None))
    fetched = fetched_ms(waiting)
    assert fetched > 0
    costs = [waiting.cost_ms]
    for dense_ms in (0.3 * fetched, fetched, 4 * fetched):
        task = drawn(seed, 8, 2, share, dense_ms)
        plan = planned(task)
        again = price_shards(analytic_model("h100", task.batch_size), plan.held, plan.shards)
        assert again is not None
        assert again.total_ms.max() == pytest.approx(plan.cost_ms)
        assert plan.lower_bound_ms <= plan.cost_ms
        costs.append(plan.cost_ms)
    assert all(later <= 1.01 * before for before, later in pairwise(costs)), costs
    assert costs[-1] < 0.95 * costs[0]


def test_no_plan_for_less_dense_time_is_below_the_bound_of_one_for_more() -> None:
    """A plan costs no more with more dense time, so each bound is below the plans of all shorter ones."""
    plans = [planned(drawn(4, 10, 2, 0.2, dense_ms)) for dense_ms in (0.1, 0.4, 1.6)]
    for number, plan in enumerate(plans):
        for other in plans[number:]:
            assert other.lower_bound_ms <= plan.cost_ms


def test_where_all_is_hidden_caches_are_smaller() -> None:
    """HBM goes to what is waited for: to whole tables, whose other ms no dense layer hides."""
    waiting, hidden = (planned(drawn(3, 16, 2, 0.2, dense_ms)) for dense_ms in (None, 1000.0))

    def in_caches(plan: Plan) -> int:
        tables = {table.name: table for table in plan.task.tables}
        beyond = plan.held.constraints.beyond_hbm
        return sum((rule.cached_rows or 0) * 4 * tables[name].dim for name, rule in beyond.items())

    assert in_caches(hidden) < in_caches(waiting)
    assert hidden.cost_ms < waiting.cost_ms


def test_a_plan_says_what_is_hidden_under_what() -> None:
    task = drawn(0, 12, 2, 0.2, None)
    waiting, hidden = planned(task), planned(task.model_copy(update={"dense_ms": 0.25}))
    [said] = [note for note in waiting.provenance.notes if "dense time" in note]
    assert "--dense-time" in said
    [said] = [note for note in hidden.provenance.notes if "dense layers" in note]
    assert "0.250 ms are hidden under dense layers of 0.25 ms" in said
    assert hidden.task.dense_ms == 0.25
    assert hidden.format_version == 7


def test_where_no_time_is_hidden_a_search_is_as_without_prefetching() -> None:
    """But for the memory that prefetching takes, which these devices have."""
    task = drawn(1, 8, 2, 0.2, None)
    waits = replace(FEW, rounds=2)
    one = search(task, analytic_model("h100", task.batch_size), waits)
    two = search(task.model_copy(update={"dense_ms": 1e-9}), analytic_model("h100", task.batch_size), waits)
    assert two.cost_ms == pytest.approx(one.cost_ms, rel=0.01)
