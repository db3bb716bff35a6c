"""Whether a trainer's sharders send what a plan was priced for: the codecs of the quantised collectives, and without them the
`output_dtype` of the operators. Needs torchrec."""

from collections.abc import Mapping, Sequence

from torch import nn
from torchrec.distributed.types import CommOp, NoOpQuantizedCommCodec, QuantizedCommCodecs
from torchrec.modules.embedding_modules import EmbeddingCollection

from neuroshard.client.model.warn import warn
from neuroshard.client.torchrec.priced import Priced
from neuroshard.core.errors import InvalidInput
from neuroshard.core.sharding import Collective, Sharding
from neuroshard.core.units import format_bytes

OUTPUT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # of an element, by output_dtype
ON_CPUS = ("fp32", "fp16")  # what FBGEMM's CPU operator has of them

_OPERATIONS: dict[CommOp, Collective] = {  # of pooled outputs
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL: "all-to-all",
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER: "reduce-scatter",
}

Registry = Mapping[str, QuantizedCommCodecs]


def outputs_of(priced: Priced) -> dict[str, str]:
    """The output_dtype of the operators of each module that has another one than fp32: fp16, bf16.

    Raises InvalidInput where the device's operator has no such outputs, and for what TorchRec cannot send without codecs: a rank
    without a table of one of the module's sharding types receives fp32 of every other (1.8 and 1.9, `_dummy_embs_tensor`).
    """
    found, device_type, by_path = {}, priced.device_type, priced.by_path
    for path in dict.fromkeys(priced.places[name].path for name in priced.fused):
        names = [name for name in priced.fused if priced.places[name].path == path]
        types = {
            name: str(getattr(priced.settings[name].get("output_dtype"), "value", "fp32")).lower() for name in names
        }
        where, one = f"module {path!r}: output_dtype {types[names[0]]}", types[names[0]]
        if other := next((name for name in names if types[name] != one), None):
            raise InvalidInput(
                f"{where} of table {names[0]!r} and {types[other]} of {other!r} would share collectives; give both one"
            )
        if one == "fp32":
            continue
        if one not in OUTPUT_BYTES or (device_type == "cpu" and one not in ON_CPUS):
            of = "FBGEMM's CPU operator has none" if one in OUTPUT_BYTES else "TorchRec's collectives send none of it"
            raise InvalidInput(f"{where}: {of}; use {' or '.join(ON_CPUS)}")
        weighted = [priced.places[name] for name in names if priced.places[name].weighted]
        if device_type == "cpu" and (mean := next((place for place in weighted if place.pooling == "mean"), None)):
            raise InvalidInput(
                f"{where}, and table {mean.config.name!r} is pooled by mean with weights, whose outputs of {one} FBGEMM's CPU "
                "operator does not divide; leave output_dtype out, or pool by sum and divide the weights"
            )
        for kind in dict.fromkeys(priced.kinds[name] for name in names):
            here = [name for name in names if priced.kinds[name] == kind]
            holders = {shard.device for name in here for shard in priced.shards[name]}
            empty = [rank for rank in range(priced.plan.task.devices) if rank not in holders]
            operations = _operations(type(priced.module.get_submodule(path)), {kind})
            codecs = by_path[path].qcomm_codecs_registry if path in by_path else None
            if empty and any(_precision(codecs, operation) == "fp32" for operation in operations):
                raise InvalidInput(
                    f"{where}, but rank {empty[0]} has none of its {kind.torchrec} tables (such as {here[0]!r}) and would "
                    "receive fp32 of the others, so that ranks fail or wait for each other; leave output_dtype out, and search "
                    f"with --collective-precision {one} for what is sent in as many bytes (qcomms)"
                )
        found[path] = one
    return found


def warn_of_codecs(priced: Priced, outputs: Mapping[str, str], wanted: Registry | None) -> None:
    """Warn where the sharder of one of the plan's modules sends in another precision than the `wanted` codecs do."""
    for path, sharder in priced.by_path.items():
        names = [name for name, place in priced.places.items() if place.path == path]
        for operation in _operations(type(priced.module.get_submodule(path)), {priced.kinds[name] for name in names}):
            coded, planned = _precision(sharder.qcomm_codecs_registry, operation), _precision(wanted, operation)
            sends = outputs.get(path, "fp32") if coded == "fp32" else coded
            if sends != planned:
                what = f"module {path!r}: the {type(sharder).__name__} sends {sends} ({operation.value})"
                if coded != sends and planned == "fp32":
                    way_out = _of_outputs(names, sends, priced)
                else:
                    way_out = f"but the plan was priced for {planned}; give it qcomm_codecs_registry=qcomms(plan)"
                warn(f"{what}, {way_out}")
                break


def _of_outputs(names: Sequence[str], sends: str, priced: Priced) -> str:
    """What an output_dtype of these tables makes of the plan's costs."""
    sharded = [name for name in priced.fused if name in names]
    rank, most = priced.busiest(sharded, priced.output_bytes)
    return (
        f"for its output_dtype is that, but the plan was priced for fp32: {format_bytes(most * OUTPUT_BYTES[sends] // 4)} of "
        f"outputs of rank {rank} in a step instead of {format_bytes(most)}, and as much of gradients; search with "
        f"--collective-precision {sends}, which prices as many bytes, or leave output_dtype out"
    )


def _operations(kind: type[nn.Module], shardings: set[Sharding]) -> list[CommOp]:
    """Collectives of the outputs of a module, in a fixed order."""
    if kind is EmbeddingCollection:
        return [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL]
    launched = {collective for sharding in shardings for collective in sharding.collectives}
    return [operation for operation in CommOp if _OPERATIONS.get(operation) in launched]


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
