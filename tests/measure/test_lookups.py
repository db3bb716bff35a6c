"""The lookups of a table that several features read."""

import numpy as np

from neuroshard.core.table import Table
from neuroshard.measure.timing.fbgemm import TableLookups, by_feature

FEATURES = [
    {"name": "x", "pooling_factor": 0.5},
    {"name": "y", "pooling_factor": 3.0},
    {"name": "z", "pooling_factor": 0.0},
]
SHARED = Table.model_validate({"name": "t", "rows": 1000, "dim": 8, "features": FEATURES})


def test_every_lookup_of_a_sample_goes_to_one_feature_of_that_sample_by_the_features_shares() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 8, 5000)
    sample = np.repeat(np.arange(5000), lengths)  # as the rows looked up, so that they say where they come from

    found, of_feature = by_feature(SHARED, sample, lengths, rng)

    assert (found == np.repeat(np.tile(np.arange(5000), 3), of_feature)).all()
    by_name = of_feature.reshape(3, -1)
    assert (by_name.sum(axis=0) == lengths).all()
    assert np.allclose(by_name.mean(axis=1), lengths.mean() * np.array([0.5, 3.0, 0.0]) / 3.5, atol=0.05)


def test_a_table_of_several_features_reads_the_rows_that_it_reads_with_one() -> None:
    lookups = TableLookups(0, None, 2**30)
    whole = SHARED.model_copy(update={"features": ()})
    rows, lengths = lookups.of(SHARED, 1000, 64)
    assert len(lengths) == 3 * 64
    assert len(rows) == lengths.sum() == len(lookups.of(whole, 1000, 64)[0])
