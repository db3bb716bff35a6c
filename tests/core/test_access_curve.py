"""The access curve of a table: what it says, and what is refused."""

import json
import math

import pytest

from neuroshard.core.access import AccessCurve, stated_curve
from neuroshard.core.errors import InvalidInput
from neuroshard.core.part import Part
from neuroshard.core.reuse import uniform_bins, zipf_bins
from neuroshard.core.table import Table

TABLE = {"name": "user", "rows": 1000, "dim": 16, "pooling_factor": 3.0}
STREAM = {
    "order": "time", "batches": 10, "distinct_rows": 20.0, "first_touches": 1.0,
    "cached_rows": [0, 50, 100], "missed_rows": [19.0, 5.0, 0.0],
}  # fmt: skip
CURVE = {"batch_size": 10, "group_rows": [1, 9], "lookups_per_row": [12, 2], "stream": STREAM}


def table(**fields: object) -> Table:
    return Table.parse({**TABLE, **fields}, "t")


def test_a_table_without_a_curve_is_written_as_before() -> None:
    assert "access" not in json.loads(table().canonical_json())
    assert table().digest() == table(access=None).digest()


def test_a_curve_is_read_back_as_it_was_written() -> None:
    made = table(access=CURVE)
    assert Table.parse(json.loads(made.canonical_json()), "t") == made
    assert "stream" not in json.loads(table(access="zipf:1.05").canonical_json())["access"]


def test_a_word_is_short_for_the_curve_of_a_distribution() -> None:
    made = table(access="zipf:1.05")
    assert made.access == stated_curve("zipf:1.05", 1000, 3.0, 65536)
    assert made.reuse_bins == zipf_bins(1000, 3.0, 1.05)
    assert made.access.rows == 1000
    assert made.access.lookups == pytest.approx(3.0 * 65536)
    assert table(access="uniform").reuse_bins == uniform_bins(1000, 3.0)
    assert table(access="uniform").access.group_rows == (1000,)


def test_groups_of_a_distribution_hold_its_lookups() -> None:
    curve = stated_curve("zipf:1.2", 10_000, 1.0, 1000)
    exact = [rank**-1.2 for rank in range(1, 10_001)]
    hottest = sum(1 for n in curve.group_rows[:20] for _ in range(int(n)))
    ours = math.fsum(n * each for n, each in list(zip(curve.group_rows, curve.lookups_per_row, strict=True))[:20])
    assert ours / curve.lookups == pytest.approx(math.fsum(exact[:hottest]) / math.fsum(exact), rel=0.002)


def test_reuse_bins_follow_from_the_curve_where_there_are_none() -> None:
    twice = table(access={"batch_size": 100, "group_rows": [1000], "lookups_per_row": [0.3]}, reuse_batch_size=200)
    assert twice.reuse_bins == uniform_bins(1000, 3.0, 200)
    stated = [1.0] + [0.0] * 16
    assert table(access=CURVE, reuse_bins=stated).reuse_bins == tuple(stated)


def test_a_row_block_has_its_share_of_the_curve() -> None:
    half = Part(table(access=CURVE), 500, 16).as_table()
    assert half.access.model_dump() == {
        "source": "", "batch_size": 10, "group_rows": (0.5, 4.5), "lookups_per_row": (12, 2), "stream": {
            "order": "time", "batches": 10, "distinct_rows": 10.0, "first_touches": 0.5, "cached_rows": (0, 25, 50),
            "missed_rows": (9.5, 2.5, 0.0), "sampled": 1.0, "error": 0.0, "varies": 0.0,
        },
    }  # fmt: skip
    assert half.access.lookups / 10 == half.pooling_factor
    assert Part(table(access=CURVE), 1000, 8).as_table().access == table(access=CURVE).access


def changed(**fields: object) -> dict[str, object]:
    return {**CURVE, **fields}


def stream(**fields: object) -> dict[str, object]:
    return {**CURVE, "stream": {**STREAM, **fields}}


@pytest.mark.parametrize(
    ("access", "said"),
    [
        ("zipf", "'zipf' is not an access distribution; write uniform, or zipf:EXPONENT"),
        ("zipf:11", "exponent from 0 to 10"),
        (7, "access: must be an object, not 7"),
        (changed(group_rows=[1]), "has 1 group_rows, but 2 lookups_per_row"),
        (changed(lookups_per_row=[2, 12]), r"lookups_per_row\[1\] is 12 after 2; it must never rise: hottest rows"),
        (changed(lookups_per_row=[12, -1]), "lookups_per_row must be at least 0, not -1"),
        (changed(lookups_per_row=[12, float("nan")]), "must be a finite number, not nan"),
        (changed(lookups_per_row=[2e18, 1]), "at most 1e18"),
        (changed(group_rows=[0, 9]), "group_rows must be above 0, not 0; leave such a group out"),
        (changed(group_rows=[1, -9]), "must be greater than or equal to 0, not -9"),
        (changed(group_rows=[1, 1000]), "1,001 rows that are read, but the table has 1,000"),
        (changed(group_rows=[1, 12]), "counts 3.6 lookups a sample, but pooling_factor is 3; make them agree"),
        (changed(batch_size=0), "batch_size: must be greater than or equal to 1, not 0"),
        (changed(source="a\nb"), "must be one line"),
        (stream(cached_rows=[0, 50]), "has 2 cached_rows, but 3 missed_rows"),
        (stream(cached_rows=[0, 50, 50]), r"cached_rows\[2\] is 50 after 50; it must rise"),
        (stream(cached_rows=[0, 50, 1001]), "counts 1,001 cached rows, but the table has 1,000"),
        (stream(missed_rows=[19, 5, 6]), r"missed_rows\[2\] is 6 after 5; it must never rise"),
        (stream(cached_rows=[0, 3, 100]), "has 14 hits a batch in a cache of 3 rows, which has one a row at most"),
        (stream(cached_rows=[5], missed_rows=[0]), "has 19 hits a batch in a cache of 5 rows"),
        (
            {
                "batch_size": 1000,
                "group_rows": [1000],
                "lookups_per_row": [3],
                "stream": STREAM | {"distinct_rows": 2000, "first_touches": 1981},
            },
            "counts 2,000 distinct rows, but the table has 1,000 rows",
        ),
        (stream(missed_rows=[20, 5, 0]), "misses 21 rows a batch, but a batch has 20 distinct rows"),
        (stream(distinct_rows=31, missed_rows=[30, 5, 0]), "31 distinct rows a batch, but a batch has 30 lookups"),
        (stream(order="random"), "must be 'time' or 'shuffled', not 'random'"),
        (stream(sampled=0), "sampled: must be greater than 0, not 0"),
    ],
)
def test_a_curve_that_cannot_be_is_refused_in_one_line(access: object, said: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^[^\n]*{said}[^\n]*$"):
        table(access=access)


def test_a_sampled_stream_may_have_more_hits_than_rows_since_both_are_estimates() -> None:
    assert b'"sampled":0.5' in table(access=stream(cached_rows=[0, 3, 100], sampled=0.5)).canonical_json()


def test_a_curve_counts_all_rows_that_are_read() -> None:
    assert AccessCurve.parse(CURVE, "c").rows == 10


def test_a_table_with_other_lookups_and_the_same_rows_has_as_many_on_its_curve() -> None:
    table = Table(name="a", rows=1000, dim=8, pooling_factor=2.0, access="zipf:1.05")

    often = table.resized(1000, 8, 6.0)

    assert Table.model_validate(often.model_dump()) == often
    assert often.access.lookups == pytest.approx(3 * table.access.lookups)
