"""What a device of a random plan holds: it fits, is as heavy as the others, and is cut and filled as plans are."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.table_strategies import some_tables
from neuroshard.augment.plans import draw_device
from neuroshard.augment.pools import Pool
from neuroshard.augment.run import augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.id_map import IdMap
from neuroshard.core.table import Table

ALIKE = [Table(name=f"t{i}", rows=10_000, dim=64, pooling_factor=4.0) for i in range(40)]
HEAVY = Table(name="heavy", rows=10_000, dim=64, pooling_factor=160.0)


def devices_of(pooled: list[Table], count: int, **changes) -> list[tuple[Table, ...]]:
    facts: dict[str, Any] = {
        "tables": len(pooled),
        "devices": 4,
        "memory_bytes": 2**40,
        "max_dim": 64,
        "vary_share": 0.0,
    }
    facts |= changes
    pool, rng = Pool.of(pooled, facts["max_dim"], facts["memory_bytes"]), np.random.default_rng(0)
    return [draw_device(pool, rng=rng, **facts) for _ in range(count)]


@settings(deadline=None)
@given(some_tables, st.floats(1, 30), st.integers(1, 12), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**32))
def test_what_a_device_holds_fits_it(tables, room, count, devices, vary_share, seed):
    memory = int(room * min(table.with_dim(4).memory_bytes for table in tables))
    pool, rng = Pool.of(tables, 32, memory), np.random.default_rng(seed)
    for _ in range(3):
        held = draw_device(
            pool, tables=count, devices=devices, memory_bytes=memory, max_dim=32, vary_share=vary_share, rng=rng
        )
        assert held
        assert sum(shard.memory_bytes for shard in held) <= memory
        assert all(shard.dim % 4 == 0 for shard in held)
        assert list(held) == sorted(held, key=lambda s: (s.name, s.dim, s.rows, s.pooling_factor))


def test_a_table_as_heavy_as_all_others_together_is_seldom_whole():
    held = devices_of([HEAVY, *ALIKE], 400)
    whole_heavy, whole_others = (
        np.mean([s.dim == 64 for device in held for s in device if (s.name == "heavy") == heavy])
        for heavy in (True, False)
    )
    assert whole_heavy < whole_others / 2


def test_plans_are_of_few_tables_or_of_all_and_cut_also_unevenly():
    held = devices_of(ALIKE, 400)
    assert 6 < np.mean([len(device) for device in held]) < 14
    assert min(map(len, held)) == 1
    dims = Counter(s.dim for device in held for s in device)
    assert dims.most_common(1)[0][0] == 64
    assert set(dims) == set(range(4, 68, 4))


def test_sequences_of_a_plan_are_whole_or_in_one_number_of_equal_shards():
    held = devices_of([one.model_copy(update={"pooling": "none", "dim": 96}) for one in ALIKE], 200)
    widths = [{s.dim for s in device} for device in held]
    assert max(len(some - {96}) for some in widths) == 1
    assert set().union(*widths) == {96, 48, 32, 24}


def test_in_some_plans_the_heaviest_tables_are_row_wise_on_all_devices():
    held = devices_of([HEAVY, *ALIKE], 600)
    parts = [s for device in held for s in device if s.rows != 10_000]
    assert {(s.rows, s.pooling_factor) for s in parts} == {(2_500, 40.0), (2_500, 1.0)}
    row_wise = [{s.name for s in device if s.rows != 10_000} for device in held]
    assert 0.15 < np.mean([bool(names) for names in row_wise]) < 0.3
    assert np.mean(["heavy" in names for names in row_wise if names]) > 0.5
    assert {len(names) for names in row_wise} >= {0, 1, 2, 5}
    assert max(map(len, row_wise)) <= 30
    assert Counter(s.dim for s in parts).most_common(1)[0][0] == 64  # whole rows


def test_the_last_block_of_rows_may_be_smaller_and_none_is_empty():
    few, fewer = (
        Table(name="few", rows=10, dim=64, pooling_factor=1.0),
        Table(name="fewer", rows=6, dim=64, pooling_factor=1.0),
    )
    assert {s.rows for device in devices_of([few], 300) for s in device} == {10, 3, 1}
    assert {s.rows for device in devices_of([fewer], 300) for s in device} == {6}


def test_a_pool_smaller_than_the_plan_gives_some_tables_twice():
    held = devices_of(ALIKE[:2], 100, tables=40)
    assert max(map(len, held)) > 8


@pytest.mark.slow
def test_as_many_cases_are_of_plans_as_wanted():
    """A set of one plan for 20 devices of 40 tables holds few of them, a random set up to 15."""
    facts: dict[str, Any] = {
        "compute_cases": 300,
        "collective_cases": 0,
        "devices": (20,),
        "memory_bytes": 2**40,
        "seed": 0,
    }
    means = [
        np.mean(
            [len(case.tables) for case in augment(tuple(ALIKE), AugmentSettings(plan_share=share, **facts)).compute]
        )
        for share in (0.0, 0.5, 1.0)
    ]
    assert means[0] > means[1] + 1 > means[2] + 2


def test_no_case_has_more_tables_than_wanted():
    tables = tuple(ALIKE)
    settings = AugmentSettings(
        compute_cases=200, collective_cases=0, devices=(1,), memory_bytes=2**40, max_tables=3, seed=0
    )
    cases = augment(tables, settings)
    assert max(len(case.tables) for case in cases.compute) == 3


def test_a_table_that_gives_rows_to_ids_is_drawn_as_any_other():
    """Its id map takes more than its rows, and what is measured has none."""
    tables = [Table(name=f"t{i}", rows=10_000, dim=64, pooling_factor=4.0) for i in range(3)]
    mapped = [table.model_copy(update={"id_map": IdMap(kind="mch", bytes_per_row=4096)}) for table in tables]
    with np.errstate(divide="raise"):
        drawn = devices_of(mapped, 40, memory_bytes=2_000_000)
    plain = devices_of(tables, 40, memory_bytes=2_000_000)
    assert [[shard.dim for shard in device] for device in drawn] == [
        [shard.dim for shard in device] for device in plain
    ]
