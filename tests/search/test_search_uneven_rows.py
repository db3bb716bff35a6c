"""Tables whose lookups fall unevenly over their ids: each block of their rows is priced by its own."""

import numpy as np
import pytest

from neuroshard.core.constraints import Constraints
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan
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
SHARES = (0.85, 0.1, 0.03, 0.02)


def task(shares: tuple[float, ...], pooling: str = "sum", domain: int | None = None) -> ShardingTask:
    """One table that fits no device whole, and small ones."""
    large = Table(name="large", rows=4_000_003, dim=64, pooling_factor=40.0, lookups_by_id=shares, pooling=pooling)
    small = tuple(Table(name=f"small{n}", rows=1000 * n, dim=32, pooling_factor=10.0 * n) for n in range(1, 7))
    return ShardingTask(
        tables=(large, *small),
        device_memory_bytes=(700_000_000,) * DEVICES,
        batch_size=BATCH,
        constraints=Constraints(row_wise=True, sharding_types=("row-wise", "table-row-wise", "grid")),
        topology=None if domain is None else Topology(local_world_size=domain, domain=domain),
    )


def found(of: ShardingTask) -> Plan:
    return search(of, MODEL, SearchSettings(rounds=3))


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_a_plan_costs_what_its_blocks_do_and_small_tables_keep_off_the_full_one(pooling: str) -> None:
    even, uneven = found(task((), pooling)), found(task(SHARES, pooling))
    assert sum(shard.table == "large" for shard in uneven.shards) == DEVICES
    assert even.cost_ms is not None
    assert uneven.cost_ms is not None
    assert uneven.cost_ms > 1.1 * even.cost_ms
    prices = price_shards(MODEL, uneven.held, uneven.shards)
    assert prices is not None
    assert uneven.predicted_ms == pytest.approx(prices.total_ms.tolist())
    assert uneven.lower_bound_ms is not None
    assert uneven.lower_bound_ms <= uneven.cost_ms
    assert [shard.table for shard in uneven.shards if shard.device == 0] == ["large"]


@pytest.mark.parametrize("domain", [None, 2])
def test_each_block_has_the_vector_of_its_lookups_and_all_together_those_of_the_table(domain: int | None) -> None:
    of = task(SHARES, domain=domain)
    options = Problem(of, MODEL).options
    large = of.tables[0]
    at = [table.name for table in options.tables].index("large")
    for place, (way, start) in enumerate(options.places):
        kind = options.kinds[way]
        if not options.allowed[at, way]:
            continue
        load = options.load(options.groups[at : at + 1], np.array([place]))
        for number, (first, rows) in enumerate(large.row_blocks(kind.blocks)):
            share = large.lookup_share(first, rows)
            part = Part(large, rows, kind.width(large), kind.blocks, lookup_share=share)
            assert load.vectors[start + number] == pytest.approx(options.model.part_vectors([part])[0])
            assert load.nbytes[start + number] == of.memory(part).total
        slope = np.ones((DEVICES, load.vectors.shape[1]))
        ms = options.ms(options.groups[at : at + 1], np.array([place]), slope)[0]
        assert np.nan_to_num(ms) == pytest.approx(load.vectors.sum(axis=1))
        assert load.vectors.sum(axis=0) == pytest.approx(options.all_pieces[at, way])
        assert options.parts[at][way][options.fullest[at, way]].share_of_lookups == max(
            part.share_of_lookups for part in options.parts[at][way]
        )
