"""Lookups: drawn ones have the bins they should have, recorded ones come back as they were."""

import json
import struct
import tracemalloc

import numpy as np
import pytest

from helpers.refusals import refused
from helpers.work import python_steps
from neuroshard.core.errors import InvalidInput, NeuroshardError, NewerFormat
from neuroshard.core.part import Part
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.files.access import count_bins
from neuroshard.files.traces import (
    Lookups,
    Traces,
    draw_lookups,
    read_traces,
    trace_batches,
    trace_lookups,
    write_traces,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def table(rows: int = 1000, pooling: float = 2.0, name: str = "a", **fields) -> Table:
    return Table(name=name, rows=rows, dim=4, pooling_factor=pooling, **fields)


def lookups(indices, lengths) -> Lookups:
    return Lookups(np.array(indices, dtype=np.int64), np.array(lengths, dtype=np.int64))


@pytest.fixture
def traces() -> Traces:
    return Traces({"a": lookups([10, 11, 20, 30, 31, 32], [2, 1, 0, 3]), "never": lookups([], [0, 0, 0, 0])})


def equal(one: Lookups, other: Lookups) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("rows", "pooling", "exponent"),
    [
        (40_000_000, 3, 0.0),
        (39_060, 2, 0.0),
        (100_000, 1, 0.0),
        (1000, 0.01, 0.0),
        (100, 1, 0.0),
        (1_000_000, 20, 1.05),
        (10_000_000, 1, 1.05),
        (10_000, 2, 1.2),
        (100_000_000, 5, 0.8),
        (100, 1, 1.05),
    ],
)
def test_drawn_lookups_have_the_bins_that_were_asked_for(rows, pooling, exponent):
    asked = table(rows, pooling, reuse_bins=zipf_bins(rows, pooling, exponent))
    drawn = draw_lookups(asked, asked.reuse_batch_size, rng())
    apart = np.abs(np.subtract(count_bins(drawn.indices), asked.reuse_bins)).sum() / 2  # total variation
    assert apart < (0.05 if rows > 100 else 0.1)
    assert len(drawn.indices) == round(65536 * pooling)


@pytest.mark.parametrize(("rows", "pooling", "exponent"), [(1_000_000, 20, 1.05), (200_000, 1, 0.0), (50_000, 4, 0.9)])
def test_a_smaller_batch_touches_as_many_rows_as_it_would(rows, pooling, exponent):
    """Against lookups drawn from the distribution itself, at 1/128 of the batch that the bins are of."""
    weights = np.cumsum(np.arange(1, rows + 1) ** -exponent)
    real = np.searchsorted(weights / weights[-1], rng(1).random(512 * pooling))
    drawn = draw_lookups(table(rows, pooling, reuse_bins=zipf_bins(rows, pooling, exponent)), 512, rng(2))
    assert len(np.unique(drawn.indices)) == pytest.approx(len(np.unique(real)), rel=0.06)


@pytest.mark.parametrize("pooling", [0.0, 0.25, 1.0, 2.5, 7.999, 1 / 3])
def test_lengths_have_the_pooling_factor_as_their_mean(pooling):
    drawn = draw_lookups(table(pooling=pooling), 1000, rng())
    assert set(drawn.lengths.tolist()) <= {int(pooling), int(pooling) + 1}
    assert abs(drawn.lengths.sum() - 1000 * pooling) < 1
    assert drawn.lengths.sum() == len(drawn.indices)
    assert drawn.lengths.dtype == drawn.indices.dtype == np.int64


def test_longer_samples_are_spread_over_the_batch():
    lengths = draw_lookups(table(pooling=0.5), 1000, rng()).lengths
    assert 150 < lengths[:500].sum() < 350


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 100, 65_537, 2**31, 2**40 - 1, 2**40])
def test_rows_are_within_the_table_and_all_over_it(rows):
    indices = draw_lookups(table(rows, 20.0), 512, rng()).indices
    assert 0 <= indices.min() <= rows * 0.01
    assert rows * 0.99 - 1 <= indices.max() < rows


def test_a_table_of_fewer_rows_than_its_bins_ask_for_is_read_in_all_its_rows():
    capped = table(40_000_000, 3.0).model_copy(update={"rows": 500})
    assert len(np.unique(draw_lookups(capped, 65536, rng()).indices)) == 500


def test_a_table_with_bins_of_zeros_is_read_uniformly():
    drawn = draw_lookups(table(1000, 2.0, reuse_bins=(0.0,) * 17), 65536, rng())
    np.testing.assert_allclose(count_bins(drawn.indices), table(1000, 2.0).reuse_bins, atol=0.03)


def test_the_same_seed_draws_the_same_lookups():
    assert equal(draw_lookups(table(), 64, rng(5)), draw_lookups(table(), 64, rng(5)))
    assert not equal(draw_lookups(table(), 64, rng(5)), draw_lookups(table(), 64, rng(6)))


def test_no_row_of_a_table_costs_a_step_or_memory():
    random = rng()
    tables = [table(int(10 ** random.uniform(1, 8)), random.uniform(1, 20)) for _ in range(200)]
    assert max(one.rows for one in tables) > 5e7

    def draw() -> None:
        for one in tables:
            draw_lookups(one, 512, random)

    assert python_steps(draw) < 5_000 * len(tables)  # 600 today
    tracemalloc.start()
    try:
        draw()
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20  # the lookups of one batch; 0.2 MiB today
    finally:
        tracemalloc.stop()


def test_traces_read_back_are_the_traces_that_were_written(tmp_path, traces):
    write_traces(tmp_path / "traces.safetensors", traces)
    back = read_traces(tmp_path / "traces.safetensors")
    assert back.tables.keys() == traces.tables.keys()
    assert all(equal(back.tables[name], traces.tables[name]) for name in traces.tables)


def test_a_full_disk_is_reported_in_one_line(tmp_path, traces, full_disk):
    with full_disk(), refused(NeuroshardError, tmp_path / "t.safetensors") as caught:
        write_traces(tmp_path / "t.safetensors", traces)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 4, 30, -1])
def test_a_truncated_file_is_reported_in_one_line(tmp_path, traces, kept):
    path = tmp_path / "t.safetensors"
    write_traces(path, traces)
    path.write_bytes(path.read_bytes()[:kept])
    with refused(InvalidInput, path) as caught:
        read_traces(path)
    assert "\n" not in str(caught.value)


def save(path, arrays, metadata, kind=None) -> None:
    """A safetensors file by hand: length of the header, header, data. `kind` is another element type, of bytes."""
    header, data = {"__metadata__": metadata}, b""
    for name, array in arrays.items():
        header[name] = {
            "dtype": kind or {"int64": "I64", "int32": "I32"}[str(array.dtype)],
            "shape": [array.nbytes] if kind else list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("indices", "lengths", "facts"),
    [
        ([1, -2, 3], [1, 2], ["indices[1]", -2]),
        ([1, 2, 3], [4, -1], ["lengths[1]", -1]),
        ([1, 2, 3], [1, 1], ["2 lookups", "3 indices"]),
        ([[1, 2, 3]], [1, 2], ["indices", "int64", "(1, 3)"]),
        ([], [], ["no samples"]),
    ],
)
def test_traces_are_checked_when_they_are_read(tmp_path, indices, lengths, facts):
    path = tmp_path / "t.safetensors"
    arrays = {"a.indices": np.array(indices, dtype=np.int64), "a.lengths": np.array(lengths, dtype=np.int64)}
    save(path, arrays, {"format_version": "1"})
    with refused(InvalidInput, path, "'a'", *facts):
        read_traces(path)


@pytest.mark.parametrize("indices", [[float("nan"), 1.0, 2.0], [0.5, 1.0, 2.0], ["1", "2", "3"]])
def test_traces_of_what_are_no_whole_numbers_are_not_written(tmp_path, indices):
    with refused(InvalidInput, "indices of table 'a'", str(np.array(indices).dtype)):
        write_traces(tmp_path / "t.safetensors", Traces({"a": Lookups(np.array(indices), np.array([1, 2]))}))
    assert list(tmp_path.iterdir()) == []


def test_batches_without_lookups_are_batches_too_and_samples_left_at_the_end_are_none(tmp_path):
    path, lengths = tmp_path / "t.safetensors", np.array([0, 0, 2, 1, 0, 0, 0])
    write_traces(
        path, Traces({"a": Lookups(np.array([3, 4, 5]), lengths), "never": Lookups(np.array([], int), lengths * 0)})
    )
    assert [batch.tolist() for batch in trace_batches(path, "a", 2)] == [[], [3, 4, 5], []]
    assert [batch.tolist() for batch in trace_batches(path, "never", 3)] == [[], []]
    assert [batch.tolist() for batch in trace_batches(path, "a", 8)] == []


@pytest.mark.parametrize(("lengths", "than"), [([1, 1, 1, 1], "more"), ([1, 1, 0, 0], "fewer")])
def test_batches_of_a_trace_whose_lengths_do_not_add_up_are_refused(tmp_path, lengths, than):
    path = tmp_path / "t.safetensors"
    save(path, {"a.indices": np.array([1, 2, 3]), "a.lengths": np.array(lengths)}, {"format_version": "1"})
    for batch_size in (1, 2, 3):
        with refused(InvalidInput, path, "'a'", f"{than} lookups", "3 indices"):
            list(trace_batches(path, "a", batch_size))


SAID = {"format_version": "1"}


@pytest.mark.parametrize(
    ("names", "metadata", "kind", "facts"),
    [
        (["indices", "lengths"], {}, None, ["format_version"]),
        (["indices"], SAID, None, ["NAME.indices", "NAME.lengths"]),
        (["indices", "lengths"], SAID, "I32", ["int64", "int32"]),
        (["indices"], {"format_version": "9" * 5000}, None, ["format_version"]),
        (["indices"], SAID, "F8_E8M0", ["int64"]),
        ([], {"format_version": "2"}, None, [2]),
    ],
)
def test_other_safetensors_files_are_no_traces(tmp_path, names, metadata, kind, facts):
    path = tmp_path / "t.safetensors"
    arrays = {f"a.{name}": np.zeros(1, dtype=np.int32 if kind == "I32" else np.int64) for name in names}
    save(path, arrays, metadata, kind=None if kind == "I32" else kind)
    with refused(NewerFormat if facts == [2] else InvalidInput, path, *facts):
        read_traces(path)
    with refused(InvalidInput, tmp_path / "ghost"):
        read_traces(tmp_path / "ghost")


def test_recorded_lookups_are_consecutive_samples_that_begin_again(traces):
    samples = [[10, 11], [20], [], [30, 31, 32]]
    starts = set()
    for seed in range(20):
        batch = trace_lookups(traces, table(pooling=1.5), 7, rng(seed))
        starts.add(start := next(s for s in range(4) if len(samples[s]) == batch.lengths[0]))
        wanted = [samples[(start + i) % 4] for i in range(7)]
        assert batch.lengths.tolist() == [len(sample) for sample in wanted]
        assert batch.indices.tolist() == [row for sample in wanted for row in sample]
    assert starts == {0, 1, 2, 3}


@pytest.mark.parametrize("pooling", [0.0, 0.4, 1.5, 3.0, 5.2])
def test_recorded_lookups_are_thinned_or_joined_to_the_pooling_factor(traces, pooling):
    batch = trace_lookups(traces, table(pooling=pooling), 4000, rng())
    assert batch.lengths.mean() == pytest.approx(pooling, rel=0.05)
    assert batch.lengths.sum() == len(batch.indices)
    assert set(batch.indices.tolist()) <= {10, 11, 20, 30, 31, 32}


def test_a_part_row_wise_reads_its_share_and_each_of_its_rows_as_often_as_the_whole():
    whole = table(rows=4_000, pooling=2.0, reuse_bins=zipf_bins(4_000, 2.0, 1.05))
    traces = Traces({whole.name: draw_lookups(whole, 20_000, rng())})
    part = Part(whole, 500, whole.dim).as_table()

    batch = trace_lookups(traces, part, 20_000, rng(1))

    assert len(batch.indices) == pytest.approx(5_000, rel=0.02)
    assert (batch.lengths == 0).mean() > 0.7
    assert batch.indices.max() < 500
    bins, expected = (np.array(count_bins(some.indices)) for some in (batch, traces.tables[whole.name]))
    assert np.abs(bins - expected).sum() / 2 < 0.15


def test_recorded_rows_are_folded_into_a_table_of_fewer_rows(traces):
    batch = trace_lookups(traces, table(rows=12, pooling=1.5), 4, rng())
    assert sorted(batch.indices.tolist()) == sorted(row % 12 for row in (10, 11, 20, 30, 31, 32))


def test_a_table_never_read_has_no_lookups(traces):
    batch = trace_lookups(traces, table(name="never", pooling=0.0), 3, rng())
    assert (batch.indices.tolist(), batch.lengths.tolist()) == ([], [0, 0, 0])


def test_a_table_without_a_trace_is_named(traces):
    with refused(InvalidInput, "'ghost'"):
        trace_lookups(traces, table(name="ghost"), 4, rng())
