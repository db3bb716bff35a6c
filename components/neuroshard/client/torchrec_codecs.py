"""Whether a trainer's sharders send what a plan was priced for: the codecs of the quantised collectives. Needs torchrec."""

import warnings
from collections.abc import Mapping, Sequence

from torch import nn
from torchrec.distributed.types import (
    CommOp,
    ModuleSharder,
    NoOpQuantizedCommCodec,
    QuantizedCommCodecs,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection

from neuroshard.client.torchrec_module import ShardingWarning

_BOTH = (CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER, CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL)
_OPERATIONS = {  # of pooled outputs; row blocks inside a host are added up there, and sent on
    ShardingType.TABLE_WISE.value: _BOTH[1:],
    ShardingType.COLUMN_WISE.value: _BOTH[1:],
    ShardingType.ROW_WISE.value: _BOTH[:1],
    ShardingType.TABLE_ROW_WISE.value: _BOTH,
    ShardingType.GRID_SHARD.value: _BOTH,
    ShardingType.DATA_PARALLEL.value: (),
}

Registry = Mapping[str, QuantizedCommCodecs]


def warn_of_codecs(
    sharding_plan: ShardingPlan,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    wanted: Registry | None,
) -> None:
    """Warn where the sharder of one of the plan's modules sends in another precision than the `wanted` codecs do."""
    by_kind = {sharder.module_type: sharder for sharder in sharders}
    for path, tables in sharding_plan.plan.items():
        kind = type(module.get_submodule(path))
        sharder = by_kind[kind]
        # that of feature processors shards the collection inside with a sharder of its own, whose codecs count
        codecs = getattr(sharder, "_ebc_sharder", sharder).qcomm_codecs_registry
        kinds = {table.sharding_type for table in tables.values()}
        for operation in _operations(kind, kinds):
            sends, planned = _precision(codecs, operation), _precision(wanted, operation)
            if sends != planned:
                warnings.warn(
                    f"module {path!r}: the {type(getattr(sharder, '_ebc_sharder', sharder)).__name__} sends {sends} "
                    f"({operation.value}), but the plan was priced for {planned}; give it qcomm_codecs_registry=qcomms(plan)",
                    ShardingWarning,
                    stacklevel=4,
                )
                break


def _operations(kind: type[nn.Module], sharding_types: set[str]) -> list[CommOp]:
    """Collectives of the outputs of a module, in a fixed order."""
    if kind is EmbeddingCollection:
        return [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL]
    return [operation for operation in CommOp if any(operation in _OPERATIONS[each] for each in sharding_types)]


def _precision(registry: Registry | None, operation: CommOp) -> str:
    """`fp16`, or `fp16:bf16` where outputs and gradients differ."""
    codecs = (registry or {}).get(operation.name) or QuantizedCommCodecs()
    forward, backward = (_of(codec) for codec in (codecs.forward, codecs.backward))
    return forward if forward == backward else f"{forward}:{backward}"


def _of(codec: object) -> str:
    if isinstance(codec, NoOpQuantizedCommCodec):
        return "fp32"
    precision = getattr(codec, "_comm_precision", None)  # of FBGEMM's QuantizedCommCodec, which keeps it nowhere else
    return type(codec).__name__ if precision is None else str(precision.value)
