"""Row blocks of tables whose access is known in shape: any block may be the hot one, in price, memory, bound and notes."""

from typing import Any

import numpy as np
import pytest

from helpers.refusals import names
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.plan import Plan, shardings_of
from neuroshard.core.reuse import uniform_bins
from neuroshard.core.skew import largest_block
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.pricing import price_shards
from neuroshard.models.open import open_cost_model
from neuroshard.search.problem.problem import Problem
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

BATCH, DEVICES = 65_536, 4
MODEL = open_cost_model("analytic:h100", BATCH)
ONLY_ROWS = Constraints(row_wise=True, sharding_types=("row-wise", "table-row-wise", "grid"))


def task(access: str | None, pooling: str = "sum", **more: Any) -> ShardingTask:
    """One table that fits no device whole, and small ones."""
    large = Table(
        name="large",
        rows=4_000_003,
        dim=64,
        pooling_factor=40.0,
        pooling=pooling,
        module=pooling,
        access=access,
        reuse_bins=uniform_bins(4_000_003, 40.0),  # so that only skew differs, and no caches
    )
    small = tuple(Table(name=f"small{n}", rows=1000 * n, dim=32, pooling_factor=10.0 * n) for n in range(1, 7))
    memory = 2**40 if pooling == "none" else 700_000_000
    given = {"constraints": ONLY_ROWS, "pipeline": "sparse-dist" if pooling == "none" else None, "step_ledger": 1}
    size = {"tables": (large, *small), "device_memory_bytes": (memory,) * DEVICES, "batch_size": BATCH}
    return ShardingTask.model_validate({**size, **given, **more})


def found(of: ShardingTask) -> Plan:
    return search(of, MODEL, SearchSettings(rounds=3, simplicity=0.0))


def price_ms(plan: Plan, of: ShardingTask) -> float:
    prices = price_shards(MODEL, of, plan.shards)
    assert prices is not None
    return float(prices.total_ms.max())


def said(plan: Plan, *facts: str) -> list[str]:
    return [note for note in plan.provenance.notes if all(names(note, fact) for fact in facts)]


@pytest.mark.parametrize("pooling", ["sum", "none"])
@pytest.mark.parametrize("domain", [None, 2])
def test_a_plan_with_hot_blocks_costs_what_the_search_saw(pooling: str, domain: int | None) -> None:
    topology = None if domain is None else Topology(local_world_size=domain, domain=domain)
    even, skewed = (
        found(task(access, pooling, topology=topology, device_memory_bytes=(700_000_000,) * 4, pipeline=None))
        for access in (None, "zipf:1.2")
    )
    assert shardings_of(skewed)["large"].splits_rows
    assert skewed.cost_ms is not None
    assert even.cost_ms is not None
    assert skewed.cost_ms > 1.02 * even.cost_ms
    assert price_ms(skewed, skewed.task) == pytest.approx(skewed.cost_ms)
    assert even.lower_bound_ms is not None
    assert skewed.lower_bound_ms is not None
    assert even.lower_bound_ms < skewed.lower_bound_ms <= skewed.cost_ms


def test_every_block_has_the_vector_of_the_largest() -> None:
    of = task("zipf:1.2")
    large, options = of.tables[0], Problem(of, MODEL).options
    at = [table.name for table in options.tables].index("large")
    assert [part.lookup_share for part in options.parts[at][0]] == [of.lookup_share(large, 0, 1, DEVICES)] * 2
    load = options.load(options.groups[at : at + 1], np.array([options.place_of(0)]))
    assert load.vectors[0] == pytest.approx(load.vectors[1])


def test_a_search_leaves_row_wise_where_hot_blocks_are_dear() -> None:
    sequences = [
        Table(name=f"s{n}", rows=5_000_000, dim=128, pooling_factor=200.0, pooling="none") for n in range(DEVICES - 1)
    ]

    def of(access: str | None, **more: Any) -> ShardingTask:
        tables = [{**table.model_dump(), "access": access} for table in sequences]
        return task(None, tables=tables, device_memory_bytes=(2**40,) * DEVICES, **{"constraints": {}, **more})

    plan, in_blocks = found(of("zipf:1.3")), found(of(None, constraints=ONLY_ROWS))
    assert all(kind.splits_rows for kind in shardings_of(in_blocks).values())
    assert not any(kind.splits_rows for kind in shardings_of(plan).values())
    assert plan.cost_ms is not None
    assert price_ms(in_blocks, in_blocks.task) < 1.1 * plan.cost_ms < price_ms(in_blocks, plan.task)


@pytest.mark.parametrize("access", [None, "uniform"])
def test_even_lookups_cost_what_they_did_before_skew_counted(access: str | None) -> None:
    now, before = task(access), task(access, step_ledger=None)
    plan = found(now)
    assert price_ms(plan, now) == pytest.approx(price_ms(plan, before), rel=1e-5)


def test_plans_without_a_ledger_keep_their_price() -> None:
    plan = found(task("zipf:1.2"))
    assert price_ms(plan, task("zipf:1.2", step_ledger=None)) == price_ms(plan, task(None, step_ledger=None))


def test_a_plan_of_sequences_in_row_blocks_says_that_it_bets_on_even_lookups() -> None:
    plan = found(task(None, "none"))
    (note,) = said(plan, "bet", "large", "zipf:1", "--access-from")
    skewed = task("zipf:1", "none")
    assert names(
        note, f"{price_ms(plan, skewed):.3f} ms ({price_ms(plan, skewed) / plan.cost_ms - 1:+.0%}) and the fullest"
    )


def test_a_bet_that_would_not_fit_says_so() -> None:
    free = found(task(None, "none"))
    most = max(free.memory_bytes())
    plan = found(task(None, "none", device_memory_bytes=(most + 2**20,) * DEVICES))
    assert said(plan, "bet", "more than there is")


def test_pooled_row_blocks_are_a_bet_only_where_that_matters() -> None:
    plan = found(task(None))
    assert said(plan, "bet", "large")
    rule = TableRule(table="large", row_wise=True)
    alone = ONLY_ROWS.model_copy(update={"row_wise": False, "tables": (rule,)})
    rarely = Table(name="large", rows=4_000_003, dim=64, pooling_factor=0.01)
    plan = found(task(None, tables=(rarely, *task(None).tables[1:]), constraints=alone))
    assert shardings_of(plan)["large"].splits_rows
    assert not said(plan, "bet")


@pytest.mark.parametrize(("access", "notable"), [("zipf:1.2", True), ("uniform", False)])
def test_a_plan_says_how_hot_a_block_is_taken_to_be_where_that_is_notable(access: str, notable: bool) -> None:
    plan = found(task(access))
    loads = plan.task.tables[0].loads
    assert loads is not None
    largest = largest_block((loads,), DEVICES)
    notes = said(plan, "hot row blocks", "large")
    assert bool(notes) == notable
    assert all(names(note, f"{of * DEVICES:.2f}") for of in largest for note in notes)
    assert not said(plan, "bet")
