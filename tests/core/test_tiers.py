"""Bytes of tiers, held against what FBGEMM's real operator allocates on the meta device."""

import math
import random

import pytest

from helpers.fbgemm_bytes import OPTIMIZERS, allocated
from neuroshard.core.launches import launches
from neuroshard.core.moves import changed_tiers
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import OPTIMIZER_BYTES, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import BY_KERNEL, TIERS, WAYS, Cache, Tier, TierFacts, load_factor, operator_bytes
from neuroshard.report.text import plan_text


@pytest.mark.parametrize("seed", range(40))
def test_an_operator_takes_what_fbgemm_allocates(seed: int) -> None:
    """Drawn tiers, optimizers, widths, element types and caches."""
    rng = random.Random(seed)
    optimizer = rng.choice(list(OPTIMIZERS))
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    element_bytes = rng.choice([2, 4])
    tables: list[tuple[Table, Tier]] = []
    for number in range(rng.randint(1, 4)):
        table = Table(
            name=f"t{number}",
            rows=rng.randint(1_000, 200_000),
            dim=4 * rng.randint(8, 64),
            pooling_factor=1.0,
            element_bytes=element_bytes,
            optimizer_bytes_per_row=per_row,
            optimizer_bytes_per_element=per_element,
        )
        tables.append((table, rng.choice(["hbm", "cached", "cached", "host"])))
    prefetch = rng.random() < 0.3
    cache = Cache(rng.uniform(0.001, 1.0), lfu=not prefetch and rng.random() < 0.3, prefetch=prefetch)
    some_cached = any(tier == "cached" for _, tier in tables)
    assert operator_bytes([(Part.of(table), tier) for table, tier in tables], cache) == allocated(
        tables, optimizer, cache if some_cached else None
    )


@pytest.mark.parametrize("seed", range(200))
def test_a_load_factor_makes_a_cache_of_the_rows_asked_for(seed: int) -> None:
    """FBGEMM rounds down to rows and up to sets; a cache has the rows asked for, and less than a set more, also where column
    shards on one device share it."""
    rng = random.Random(seed)
    rows = rng.randint(WAYS, 2 ** rng.randint(6, 40))
    asked, shards = rng.randint(1, rows), rng.randint(1, 16)
    factor = load_factor(asked, rows)
    slots = Cache(factor).slots(rows)
    assert asked <= slots < asked + WAYS
    assert 0 < factor <= 1.0
    assert slots == -(-asked // WAYS) * WAYS
    shared = Cache(factor * rows / rows).slots(shards * rows)
    assert shared == (shards * slots if factor < 1 else -(-shards * rows // WAYS) * WAYS)


@pytest.mark.parametrize("seed", range(200))
def test_row_blocks_have_as_many_sets_each_and_the_rows_asked_for_together(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.randint(2, 31)
    rows = rng.randint(100 * blocks, 10**7)
    asked = rng.randint(1, rows)
    factor = load_factor(asked, rows)
    block = -(-rows // blocks)
    slots = [Cache(factor).slots(min(block, rows - first)) for first in range(0, rows, block)]
    assert asked <= sum(slots) < asked + WAYS * blocks
    assert slots[0] <= -(-asked // (WAYS * blocks)) * WAYS


def test_caches_of_a_trainer_that_fetches_ahead_count_the_locks_of_their_rows() -> None:
    table = Table(name="clicks", rows=1000, dim=8, pooling_factor=1.0)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**20,), batch_size=1, host_memory_bytes=2**20)
    cached = task.with_tiers({"clicks": ("cached", 320)})
    ahead = cached.model_copy(update={"pipeline": "prefetch"})
    locks = ahead.memory(Part.of(table)).weights - cached.memory(Part.of(table)).weights
    assert locks == 320 * 4


def test_a_cached_table_without_a_cache_is_refused() -> None:
    table = Table(name="clicks", rows=100, dim=4, pooling_factor=1.0)
    with pytest.raises(ValueError, match="'clicks' is cached, but nothing says how many"):
        operator_bytes([(Part.of(table), "cached")])
    assert math.isclose(Cache(0.5).slots(100), 64)


@pytest.mark.parametrize("tier", [tier for tier in TIERS.values() if tier.beyond_hbm], ids=lambda tier: tier.name)
def test_what_is_said_of_a_tier_is_what_its_record_says(tier: TierFacts) -> None:
    """Bytes, formats, launches, moves and words: whoever adds a tier adds no test here."""
    rows, dim, cached_rows = 10_000, 8, WAYS if tier.cached else None
    table = Table(name="clicks", rows=rows, dim=dim, pooling_factor=1.0, optimizer_bytes_per_row=4)
    other = table.model_copy(update={"name": "ads"})
    task = ShardingTask(
        tables=(table, other), device_memory_bytes=(2**30,), batch_size=4, host_memory_bytes=2**30, pipeline="none"
    )
    shards = tuple(Shard(table=one.name, rows=rows, dim=dim, device=0) for one in (table, other))
    said = Provenance(neuroshard_version="0", algorithm="by hand")
    in_hbm = Plan(task=task, shards=shards, provenance=said)
    plan = Plan(task=task.with_tiers({"clicks": (tier.name, cached_rows)}), shards=shards, provenance=said)

    elements = rows * dim * 4
    assert plan.host_memory(tier.elements) == (elements,)
    cache = 0 if cached_rows is None else WAYS * (dim * 4 + 8 + 8) + rows * 4
    assert in_hbm.memory_bytes()[0] - plan.memory_bytes()[0] == elements - cache
    assert plan.format_version == max(2, tier.since)
    assert launches(plan.task, shards).operators == (1 + tier.cached,)
    assert changed_tiers(in_hbm, plan) == changed_tiers(plan, in_hbm) == {"clicks": elements}
    assert changed_tiers(plan, plan) == {}
    assert f"clicks: {tier.words}" in plan_text(plan)
    assert f"1 {tier.words}" in plan_text(plan)
    assert BY_KERNEL[tier.kernel] is tier
