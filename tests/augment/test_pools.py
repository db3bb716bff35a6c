"""What sets are drawn from: every table at every width that fits, some tables held out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.augment.pools import Pool, hold_out, widths
from neuroshard.core.table import Feature, Table


def table(name: str, rows: int = 1000, dim: int = 64, pooling: float = 2.0) -> Table:
    return Table(name=name, rows=rows, dim=dim, pooling_factor=pooling)


@pytest.mark.parametrize(
    ("dim", "max_dim", "wanted"),
    [
        (8, 16, [4, 8, 12, 16]),
        (16, 16, [4, 8, 12, 16]),
        (20, 16, [4, 8, 12, 16, 20]),
        (96, 16, [4, 8, 12, 16, 24, 48, 96]),
        (2048, 8, [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]),
    ],
)
def test_a_table_comes_at_all_widths_and_at_its_own_and_its_halves(dim, max_dim, wanted):
    assert widths(table("t", dim=dim), max_dim) == wanted


@pytest.mark.parametrize(("dim", "wanted"), [(128, [4, 8, 16, 32, 64, 128]), (24, [4, 8, 12, 24]), (20, [4, 20])])
def test_a_sequence_comes_at_its_own_width_and_in_equal_shards(dim, wanted):
    assert widths(table("t", dim=dim).model_copy(update={"pooling": "none"}), 16) == wanted


@settings(deadline=None)
@given(st.integers(1, 2**14), st.integers(1, 64))
def test_widths_are_multiples_of_4_and_the_own_one_is_among_them(quarter, max_quarter):
    made = widths(table("t", dim=4 * quarter), 4 * max_quarter)
    assert all(width % 4 == 0 for width in made)
    assert 4 * quarter in made
    assert len(set(made)) == len(made)


def test_a_pool_holds_what_fits_the_smallest_first():
    small, large = table("small", rows=10), table("large", rows=1000)
    pool = Pool.of([large, small], max_dim=16, memory_bytes=large.with_dim(8).memory_bytes)
    assert [(c.shard.name, c.shard.dim) for c in pool.choices] == [
        ("small", 4), ("small", 8), ("small", 12), ("small", 16), ("small", 32), ("small", 64), ("large", 4), ("large", 8)
    ]  # fmt: skip
    assert pool.memory_bytes.tolist() == [c.shard.memory_bytes for c in pool.choices]
    assert pool.max_dim == 64


def test_held_out_tables_are_of_all_sizes():
    tables = [table(f"t{i:02}", rows=10 * 2**i) for i in range(25)]
    train, test = hold_out(tables, 0.2, np.random.default_rng(0))
    assert sorted(train + test, key=lambda t: t.name) == tables
    assert [int(t.name[1:]) // 5 for t in test] == [0, 1, 2, 3, 4]


def test_which_tables_are_held_out_depends_on_the_seed():
    tables = [table(f"t{i:02}", rows=10 * 2**i) for i in range(25)]
    assert len({hold_out(tables, 0.2, np.random.default_rng(seed))[1] for seed in range(10)}) > 5


def test_the_only_table_with_a_trait_is_trained_on():
    tables = [table(f"t{i}", rows=10 + i) for i in range(4)]
    traits: list[dict[str, Any]] = [{"pooling": "none"}, {"weighted": True}, {"element_bytes": 2}, {"pooling": "mean"}]
    tables += [table(f"x{i}", rows=20 + i).model_copy(update=one) for i, one in enumerate(traits)]
    for seed in range(20):
        train, test = hold_out(tables, 0.5, np.random.default_rng(seed))
        assert {t.name for t in train} >= {"x0", "x1", "x2", "x3"}
        assert 0 < len(test) < 4


def test_tables_of_one_shape_stay_together():
    tables = [table(f"{i}-{copy}", rows=10 + i, dim=4 * copy) for i in range(10) for copy in (1, 2, 3)]
    train, test = hold_out(tables, 0.2, np.random.default_rng(0))
    assert len(test) == 6
    assert not {t.rows for t in train} & {t.rows for t in test}


def test_sequences_of_one_shape_stay_together_at_all_widths():
    sequences = [table(f"{i}-{dim}", rows=10 + i, dim=dim) for i in range(10) for dim in (64, 128)]
    sequences = [one.model_copy(update={"pooling": "none"}) for one in sequences]
    for seed in range(20):
        train, test = hold_out(sequences, 0.2, np.random.default_rng(seed))
        assert len(test) == 4
        assert not {t.rows for t in train} & {t.rows for t in test}


def test_the_only_table_of_several_features_is_trained_on_where_another_has_its_shape():
    tables = [table(f"t{i}", rows=10 + i, pooling=2.0) for i in range(4)]
    features = tuple(Feature(name=name, pooling_factor=1.0) for name in "ab")
    tables.append(tables[0].model_copy(update={"name": "several", "features": features}))
    for seed in range(20):
        train, _ = hold_out(tables, 0.5, np.random.default_rng(seed))
        assert "several" in {t.name for t in train}


@pytest.mark.parametrize(
    ("count", "share", "held_out"), [(2, 0.5, 0), (3, 0.1, 1), (26, 0.2, 5), (26, 0.0, 0), (3, 0.99, 2)]
)
def test_of_three_tables_one_is_held_out_and_one_is_left(count, share, held_out):
    tables = [table(f"t{i}", rows=10 + i) for i in range(count)]
    train, test = hold_out(tables, share, np.random.default_rng(0))
    assert (len(train), len(test)) == (count - held_out, held_out)


def test_a_table_that_no_gpu_holds_uncut_is_drawn_in_shards_that_it_holds():
    tables = [table("a", dim=3000), table("b", dim=1028), table("s", dim=1028).model_copy(update={"pooling": "none"})]
    pool = Pool.of(tables, max_dim=16, memory_bytes=2**40)
    assert [(one.shard.name, one.shard.dim) for one in pool.tables] == [("a", 1000), ("b", 516)]
    assert pool.max_dim == 1000
    assert Pool.of(tables[:1], max_dim=2048, memory_bytes=2**40).max_dim == 2048  # asked for, as on CPUs
