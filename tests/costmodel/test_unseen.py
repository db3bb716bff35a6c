"""Tables far from all that a cost model was trained on are reported, and no others."""

import numpy as np
import pytest

from helpers.parts import cut_to, wholes
from helpers.refusals import names
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.costmodel.bundle import unlike_in_kind, unlike_trained
from neuroshard.costmodel.compute_net import FeatureScale
from neuroshard.costmodel.features import part_features


def table(name: str = "t", rows: int = 10_000, pooling_factor: float = 10.0, **more) -> Table:
    return Table(name=name, rows=rows, dim=64, pooling_factor=pooling_factor, **more)


@pytest.fixture
def scale() -> FeatureScale:
    """Of tables of 1,000 to 100,000 rows, 5 to 20 lookups, read uniformly."""
    seen = [table(rows=rows, pooling_factor=lookups) for rows in (1_000, 100_000) for lookups in (5.0, 20.0)]
    return FeatureScale.of(part_features(cut_to(seen, np.full(len(seen), 64)), 65536))


def test_tables_such_as_were_measured_need_no_word(scale):
    assert (
        unlike_trained(scale, wholes([table(), table(rows=1_500, pooling_factor=6.0), table(pooling_factor=30.0)]))
        == ()
    )


def test_sizes_beyond_the_measured_range_are_reported_with_both(scale):
    lines = unlike_trained(scale, wholes([table(), table("huge", rows=10**9), table("many", pooling_factor=500.0)]))

    for facts in (
        ("1 of 3", "1,000,000,000 rows", "1,000 to 100,000 rows"),
        ("1 of 3", "500 lookups a sample", "5 to 20 lookups a sample"),
    ):
        assert any(all(names(line, fact) for fact in facts) for line in lines)


def test_the_farthest_of_several_is_reported_on_either_side(scale):
    small = [table(f"t{rows}", rows=rows) for rows in (3, 7, 600)]

    assert all(
        names(unlike_trained(scale, wholes(small))[0], fact) for fact in ("2 of 3", "3 rows", "1,000 to 100,000 rows")
    )


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ({"element_bytes": 2}, ("fp16 elements", "fp32 elements")),
        ({"pooling": "mean"}, ("mean pooling", "sum pooling")),
        ({"weighted": True}, ("weighted lookups", "lookups without weights")),
    ],
)
def test_a_kind_of_table_that_was_not_measured_is_reported(scale, kind, facts):
    parts = wholes([table(), table("other", **kind)])

    for unlike in (unlike_trained, unlike_in_kind):
        (line,) = unlike(scale, parts)
        assert all(names(line, fact) for fact in ("1 of 2", *facts))
    assert unlike_in_kind(scale, wholes([table(rows=10**9)])) == ()


def test_rows_read_again_more_often_are_reported_and_a_table_never_read_is_not(scale):
    skewed = table("skewed", rows=100_000, pooling_factor=5.0, reuse_bins=zipf_bins(100_000, 5.0, 1.5))
    unread = table("unread", pooling_factor=0.0)

    repeat = "1 of 2 tables has rows that repeat"
    assert any(line.startswith(repeat) for line in unlike_trained(scale, wholes([table(), skewed])))
    assert not any(line.startswith(repeat) for line in unlike_trained(scale, wholes([table(), unread])))
