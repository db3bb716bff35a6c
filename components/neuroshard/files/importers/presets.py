"""Built-in table sets. `preset("mlperf-dlrm-dcnv2")` -> tables."""

from collections.abc import Callable

from neuroshard.core.errors import UsageError
from neuroshard.core.table import Table
from neuroshard.files.importers.imported import Defaults, table_defaults

_MLPERF_DIM = 128
# (rows, lookups a sample) of categorical features 0 to 25
_MLPERF = (
    (40_000_000, 3),
    (39_060, 2),
    (17_295, 1),
    (7_424, 2),
    (20_265, 6),
    (3, 1),
    (7_122, 1),
    (1_543, 1),
    (63, 1),
    (40_000_000, 7),
    (3_067_956, 3),
    (405_282, 8),
    (10, 1),
    (2_209, 6),
    (11_938, 9),
    (155, 5),
    (4, 1),
    (976, 1),
    (14, 1),
    (40_000_000, 12),
    (40_000_000, 100),
    (40_000_000, 27),
    (590_152, 10),
    (12_973, 3),
    (108, 1),
    (36, 1),
)


def mlperf_dlrm_dcnv2(defaults: Defaults) -> tuple[Table, ...]:
    """MLPerf Training's recommender, DLRM-DCNv2: the 26 tables of Criteo 1TB, rows capped at 40 M, dim 128, 97 GiB in fp32.

    Source: README of torchrec_dlrm in facebookresearch/dlrm (`--num_embeddings_per_feature`, `--multi_hot_sizes`), which
    MLPerf Training's recommendation_v2 uses. The multi-hot lookups are synthetic and drawn uniformly by default.
    """
    return tuple(
        defaults.table(
            {"name": f"cat_{i}", "rows": rows, "dim": _MLPERF_DIM, "pooling_factor": float(lookups)}, f"cat_{i}"
        )
        for i, (rows, lookups) in enumerate(_MLPERF)
    )


PRESETS: dict[str, Callable[[Defaults], tuple[Table, ...]]] = {"mlperf-dlrm-dcnv2": mlperf_dlrm_dcnv2}


def preset(
    name: str, *, access: str = "uniform", dtype: str = "fp32", optimizer: str = "rowwise_adagrad"
) -> tuple[Table, ...]:
    """The tables of a preset. Raises UsageError that lists the known ones."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name](table_defaults(access=access, dtype=dtype, optimizer=optimizer))
