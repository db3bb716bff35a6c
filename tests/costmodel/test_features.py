"""Features of tables cut to widths: their order, what a width changes, and how much work they are."""

import numpy as np
import pytest

from helpers.parts import cut_to
from helpers.work import python_steps
from neuroshard.core.part import Part
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.costmodel.features import FEATURES, SHARE_COLUMNS, distinct_rows, part_features

ONCE = (1.0, *[0.0] * 16)  # every touched row is touched once


def by_name(tables, dims, batch_size=65536):
    features = part_features(cut_to(tables, np.array(dims)), batch_size)
    return [dict(zip(FEATURES, row.tolist(), strict=True)) for row in features]


def test_every_feature_of_a_table_by_hand():
    table = Table(name="a", rows=2**20, dim=64, pooling_factor=3, reuse_bins=ONCE, element_bytes=2)

    (features,) = by_name([table], [32], batch_size=2**16)

    lookups = 3 * 2**16
    assert features == pytest.approx(
        {
            "log2_dim": 5,
            "log2_rows": 20,
            "log2_pooling_factor": 2,
            **{f"lookups_of_rows_touched_up_to_2^{i}": 1 for i in range(17)},
            "log2_weight_bytes": 26,
            "log2_distinct_rows": np.log2(1 + lookups),
            "million_lookups": lookups / 1e6,
            "million_distinct_rows": lookups / 1e6,
            "gib_looked_up": lookups * 64 / 2**30,
            "gib_distinct": lookups * 64 / 2**30,
            "gib_pooled": 2**16 * 32 * 4 / 2**30,
            "log2_batch_size": 16,
            "log2_element_bytes": 1,
            "mean_pooling": 0,
            "weighted": 0,
            "shared": 0,
        }
    )


def test_a_width_changes_only_what_is_made_of_columns():
    table = Table(name="a", rows=1000, dim=64, pooling_factor=3)

    narrow, wide = by_name([table, table], [8, 16])

    changed = {name for name in FEATURES if narrow[name] != wide[name]}
    assert changed == {"log2_dim", "log2_weight_bytes", "gib_looked_up", "gib_distinct", "gib_pooled"}
    assert wide["gib_looked_up"] == 2 * narrow["gib_looked_up"]


def test_rows_touched_more_often_move_their_lookups_to_later_shares():
    rarely = Table(name="a", rows=10**6, dim=4, pooling_factor=1, reuse_bins=ONCE)
    often = Table(name="a", rows=10**6, dim=4, pooling_factor=1, reuse_bins=zipf_bins(10**6, 1, 1.2))

    shares = part_features(cut_to([rarely, often], [4, 4]), 65536)[:, SHARE_COLUMNS]

    assert (shares[0] >= shares[1] - 1e-9).all()
    assert shares[1, 0] < 0.2
    assert (np.diff(shares, axis=1) >= 0).all()
    assert shares[:, -1].tolist() == pytest.approx([1, 1])


def test_each_set_has_features_of_its_own_batch_size():
    tables = [Table(name="a", rows=10**6, dim=4, pooling_factor=3)] * 2 + [
        Table(name="b", rows=10, dim=8, pooling_factor=1)
    ]
    dims, batches = np.array([4, 4, 8]), np.array([512, 65536, 512])

    together = part_features(cut_to(tables, dims), batches)

    for row, table, dim, batch in zip(together, tables, dims, batches, strict=True):
        assert (row == part_features(cut_to([table], [dim]), int(batch))[0]).all()


def test_pooling_mode_and_weights_of_lookups_are_reported():
    table = Table(name="a", rows=10, dim=4, pooling_factor=1)
    plain, other = by_name([table, table.model_copy(update={"pooling": "mean", "weighted": True})], [4, 4])

    assert {name for name in FEATURES if plain[name] != other[name]} == {"mean_pooling", "weighted"}


def test_a_table_never_read_has_no_lookups_and_no_shares():
    (features,) = by_name([Table(name="a", rows=10, dim=4, pooling_factor=0)], [4])

    assert [features[name] for name in FEATURES[2:20]] == [0] * 18
    assert features["million_distinct_rows"] == features["gib_looked_up"] == 0


@pytest.mark.parametrize("rows", [100, 10**4, 10**6, 10**8])
@pytest.mark.parametrize("batch_size", [512, 32768, 55296, 65536, 131072, 262144])
def test_distinct_rows_come_near_the_truth_where_rows_are_read_alike(rows, batch_size):
    table = Table(name="a", rows=rows, dim=4, pooling_factor=5)
    columns = [np.array([value], dtype=float) for value in (rows, 5, table.reuse_bins, table.reuse_batch_size)]

    (touched,) = distinct_rows(columns[0], columns[1], columns[2], columns[3], batch_size)

    lookups = 5 * batch_size
    assert touched == pytest.approx(rows * -np.expm1(-lookups / rows), rel=0.12)
    assert touched <= min(rows, lookups)


def test_no_tables_have_no_features():
    assert part_features([], 512).shape == (0, len(FEATURES))


def test_widths_of_a_table_are_no_loop_of_python():
    tables = [Table(name=f"t{i}", rows=1000 + i, dim=128, pooling_factor=2, reuse_bins=ONCE) for i in range(2000)]
    narrow = cut_to(tables, np.tile(np.arange(4, 132, 4), len(tables))[:2000])
    every = [Part(table, table.rows, dim) for table in tables for dim in range(4, 132, 4)]
    found = []
    part_features(narrow, 65536)  # numpy runs some lines of its own the first time

    every_width = python_steps(lambda: found.append(part_features(every, 65536)))
    one_width = python_steps(lambda: found.append(part_features(narrow, 65536)))

    assert every_width < 1.01 * one_width
    assert [features.shape for features in found] == [(64000, len(FEATURES)), (2000, len(FEATURES))]
