"""The tables of a TorchRec model: `tables_of(ebc)`, also where the module is on the meta device. Needs no torchrec itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import ELEMENT_BYTES, Table
from neuroshard.files.importers.imported import table_defaults

_DTYPES = {"FP32": "fp32", "FP16": "fp16"}  # TorchRec's DataType -> ours


def tables_of(
    module_or_configs: Any,
    pooling_factors: Mapping[str, float] | None = None,
    *,
    weighted: bool | None = None,
    access: str = "uniform",
    optimizer: str = "rowwise_adagrad",
) -> tuple[Table, ...]:
    """Tables of an EmbeddingBagCollection, or of a sequence of its EmbeddingBagConfigs.

    `pooling_factors` are lookups a sample by table name, over all features of the table; by default one lookup a feature, as in
    TorchRec's planner. `weighted` is by default the collection's own; configs do not say, so for them it is False. Raises
    InvalidInput for a data type other than FP32 and FP16, and for a pooling factor of an unknown table; UsageError for an unknown
    access or optimizer.
    """
    configs: Sequence[Any] = (
        module_or_configs.embedding_bag_configs()
        if hasattr(module_or_configs, "embedding_bag_configs")
        else module_or_configs
    )
    given = dict(pooling_factors or {})
    unknown = given.keys() - {config.name for config in configs}
    if unknown:
        raise InvalidInput(f"pooling_factors: there is no table {min(unknown)!r}")
    if weighted is None:
        weighted = bool(module_or_configs.is_weighted()) if hasattr(module_or_configs, "is_weighted") else False
    return tuple(
        table_defaults(access=access, optimizer=optimizer).table(
            config_fields(config, given.get(config.name), weighted), f"table {config.name!r}"
        )
        for config in configs
    )


def config_fields(config: Any, pooling_factor: float | None, weighted: bool) -> dict[str, Any]:
    """Fields of Table as an EmbeddingBagConfig has them. Raises InvalidInput for a data type that we do not know."""
    dtype = _DTYPES.get(config.data_type.name)
    if dtype is None:
        raise InvalidInput(f"table {config.name!r}: data_type {config.data_type.name} is neither FP32 nor FP16")
    return {
        "name": config.name,
        "rows": config.num_embeddings,
        "dim": config.embedding_dim,
        "pooling_factor": float(len(config.feature_names) if pooling_factor is None else pooling_factor),
        "pooling": config.pooling.name.lower(),
        "weighted": weighted,
        "element_bytes": ELEMENT_BYTES[dtype],
    }
