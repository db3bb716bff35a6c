"""Tables: their rules, and what they occupy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from helpers.refusals import refused
from neuroshard.core.reuse import REUSE_BINS, uniform_bins
from neuroshard.core.table import MAX_ROWS, OPTIMIZER_BYTES, Table, check_distinct

GOOD = {"name": "a", "rows": 1000, "dim": 64, "pooling_factor": 2.0}


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"dim": 6}, "multiple of 4"),
        ({"dim": 0}, "multiple of 4"),
        ({"dim": -4}, "multiple of 4"),
        ({"dim": 2**16 + 4}, "at most 65536"),
        ({"rows": 0}, "between 1"),
        ({"rows": -1}, "between 1"),
        ({"rows": MAX_ROWS + 1}, "between 1"),
        ({"rows": 1.5}, "fractional"),
        ({"rows": "1000"}, "not '1000'"),
        ({"pooling_factor": "2"}, "not '2'"),
        ({"pooling_factor": True}, "not true"),
        ({"element_bytes": "4"}, "not '4'"),
        ({"optimizer_bytes_per_row": True}, "not true"),
        ({"reuse_batch_size": "64"}, "not '64'"),
        ({"pooling_factor": -0.1}, "between 0"),
        ({"pooling_factor": math.inf}, "finite"),
        ({"pooling_factor": math.nan}, "finite"),
        ({"name": ""}, "at least 1 character"),
        ({"name": "a\nb"}, "line breaks"),
        ({"name": "a\x9b31mb"}, "control characters"),
        ({"name": "a\u2028b"}, "line breaks"),
        ({"element_bytes": 3}, "4 (fp32)"),
        ({"reuse_bins": [1.0]}, "17 shares, not 1"),
        ({"reuse_bins": [0.5] * REUSE_BINS}, "sum to 1"),
        ({"reuse_bins": [-1.0, 2.0] + [0.0] * 15}, "-1.0"),
        ({"reuse_bins": [math.nan] * REUSE_BINS}, "finite"),
        ({"reuse_batch_size": 0}, "greater than 0"),
        ({"pooling": "max"}, "'sum', 'mean' or 'none'"),
        ({"weighted": "sometimes"}, "valid boolean"),
        ({"pooling": "none", "weighted": True}, "no weighted lookups"),
        ({"features": [{"name": "x", "pooling_factor": 1.5}]}, "sum up to 1.5"),
        ({"features": [{"name": "x", "pooling_factor": 1.0}] * 2}, "'x' is there twice"),
        ({"features": [{"name": "x", "pooling_factor": -1.0}]}, "greater than or equal to 0"),
        ({"features": [{"name": "x"}]}, "required"),
        ({"features": 3}, "valid tuple"),
        ({"optimizer_bytes_per_row": -4}, "greater than or equal to 0"),
    ],
)
def test_a_broken_rule_is_refused(change, fact):
    with refused(ValidationError, *({*change} - {"features", "weighted"}), fact):
        Table(**{**GOOD, **change})


def test_a_sequence_is_cut_into_halves_at_most() -> None:
    table = Table(**{**GOOD, "dim": 64, "pooling_factor": 12.5, "pooling": "none"})
    assert (table.narrowest_cut, table.with_dim(12).narrowest_cut) == (32, 12)


def test_a_table_without_reuse_bins_is_read_uniformly():
    assert Table(**GOOD).reuse_bins == Table(**GOOD, reuse_bins=None).reuse_bins == uniform_bins(1000, 2.0)
    assert Table(**GOOD, reuse_batch_size=64).reuse_bins == uniform_bins(1000, 2.0, 64)


def test_how_a_table_is_pooled_is_written_only_where_it_is_not_the_default():
    """So the digests of tables, tasks and plans from before it could be said are what they were."""
    plain, said = Table(**GOOD), Table(**GOOD, pooling="mean", weighted=True)
    assert plain.model_dump().keys() & {"pooling", "weighted"} == set()
    assert plain.digest()[:16] == "7e7d20d5868133ab"
    assert (said.model_dump()["pooling"], said.model_dump()["weighted"]) == ("mean", True)
    assert Table.parse(said.model_dump(mode="json"), "back") == said


def test_a_table_is_dumped_without_defaults_too() -> None:
    said = {"name": "t", "rows": 10, "dim": 8, "pooling_factor": 1.0}
    assert Table(**said).model_dump(exclude_defaults=True, exclude={"reuse_bins"}) == said


def test_reuse_bins_that_are_rounded_are_made_to_sum_to_one():
    bins = Table(**GOOD, reuse_bins=[0.5, 0.49, *[0.0] * 15]).reuse_bins
    assert bins[:2] == (0.5 / 0.99, 0.49 / 0.99)


@given(st.lists(st.floats(0, 1), min_size=REUSE_BINS, max_size=REUSE_BINS).filter(lambda bins: sum(bins) > 0.01))
def test_a_table_read_back_is_the_table_that_was_written(bins):
    table = Table(**GOOD, reuse_bins=[b / math.fsum(bins) for b in bins])
    assert Table.parse(table.model_dump(mode="json"), "back") == table


def test_a_table_never_read_has_bins_of_zeros():
    assert Table(**{**GOOD, "pooling_factor": 0.0}).reuse_bins == (0.0,) * REUSE_BINS


@pytest.mark.parametrize(
    ("optimizer", "bytes_"), [("sgd", 256_000), ("rowwise_adagrad", 260_000), ("adagrad", 512_000), ("adam", 768_000)]
)
def test_memory_counts_weights_and_optimizer_state(optimizer, bytes_):
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    table = Table(**GOOD, optimizer_bytes_per_row=per_row, optimizer_bytes_per_element=per_element)
    assert table.memory_bytes == bytes_


def test_every_column_shard_keeps_the_row_wise_state():
    table = Table(**GOOD)
    assert table.with_dim(16).memory_bytes * 4 == table.memory_bytes + 3 * 4 * table.rows


def test_half_precision_halves_the_weights_only():
    table = Table(**GOOD, element_bytes=2)
    assert table.memory_bytes == 132_000


def test_a_set_of_tables_has_distinct_names_and_is_not_empty():
    one, other = Table(**GOOD), Table(**{**GOOD, "name": "b"})
    assert check_distinct((one, other)) == (one, other)
    with refused(ValueError, "tables[2]", "tables[0]", "'a'"):
        check_distinct((one, other, one))
    with refused(ValueError, "empty"):
        check_distinct(())


@pytest.mark.parametrize(
    ("rows", "devices", "blocks"),
    [
        (10, 4, [(0, 3), (3, 3), (6, 3), (9, 1)]),
        (12, 4, [(0, 3), (3, 3), (6, 3), (9, 3)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (1, 3, [(0, 1), (1, 0), (1, 0)]),
        (7, 1, [(0, 7)]),
    ],
)
def test_rows_are_dealt_out_in_blocks_as_torchrec_does(rows, devices, blocks):
    assert Table(**{**GOOD, "rows": rows}).row_blocks(devices) == blocks
