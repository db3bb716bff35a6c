"""The built-in table sets."""

from neuroshard.core.part import Part
from neuroshard.core.reuse import uniform_bins, zipf_bins
from neuroshard.core.skew import largest_block
from neuroshard.files.importers.presets import preset

MLPERF = "mlperf-dlrm-dcnv2"


def test_mlperf_has_its_published_size():
    tables = preset(MLPERF)
    assert [table.name for table in tables] == [f"cat_{i}" for i in range(26)]
    assert {table.dim for table in tables} == {128}
    assert sum(table.rows for table in tables) == 204_184_588
    assert sum(table.pooling_factor for table in tables) == 214  # lookups a sample, as MLPerf counts them
    assert round(sum(table.rows * table.dim * table.element_bytes for table in tables) / 2**30, 3) == 97.363


def test_a_preset_takes_the_same_options_as_a_file():
    uniform, zipf = preset(MLPERF)[0], preset(MLPERF, access="zipf:1.05", dtype="fp16", optimizer="adam")[0]
    assert uniform.reuse_bins == uniform_bins(uniform.rows, uniform.pooling_factor)
    assert zipf.reuse_bins == zipf_bins(zipf.rows, zipf.pooling_factor, 1.05)
    assert (zipf.element_bytes, zipf.optimizer_bytes_per_row, zipf.optimizer_bytes_per_element) == (2, 0, 8)


def test_dlrmv4_repeats_its_ids_as_its_makers_counted():
    tables = {table.name: table for table in preset("mlperf-dlrmv4")}
    assert round(sum(table.rows * table.dim * table.element_bytes for table in tables.values()) / 2**30, 1) == 559.0
    for name, distinct, skew in (("item_id", 0.024, 1.1), ("album_id", 0.015, 2.8), ("artist_id", 0.006, 1.3)):
        of_rank = Part.of(tables[name]).distinct_rows(1024) / (1024 * 2628)
        assert (round(of_rank, 3), round(32 * largest_block((tables[name].loads,), 32).expected, 1)) == (distinct, skew)
