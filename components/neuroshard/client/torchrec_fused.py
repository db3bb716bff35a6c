"""The fused optimizers of a model's tables, and what they mean for a plan. Needs torch and torchrec.

TorchRec takes a table's optimizer from its parameter, where apply_optimizer_in_backward has put it, else from the sharders'
`fused_params`, which no plan sees: a trainer says that one by name.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from neuroshard.client.torchrec_module import Collection as Embeddings
from neuroshard.client.torchrec_module import TablePlace
from neuroshard.client.torchrec_warnings import warn
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan, Shard, device_memory, host_memory, shard_memory
from neuroshard.core.sharding import Sharding
from neuroshard.core.table import OPTIMIZER_BYTES, DenseOptimizer
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.files.importers.torchrec_collections import NAMES, name_of, weight_of
from neuroshard.files.importers.torchrec_collections import in_backward as applied_in_backward

# What these compute of the whole row, FBGEMM computes of the columns of a shard (codegen/genscript/optimizers.py).
OF_THE_ROW = {
    "rowwise_adagrad": "one moment",
    "partial_rowwise_adam": "one second moment",
    "lamb": "one norm",
    "partial_rowwise_lamb": "one second moment and norm",
    "lars_sgd": "one norm",
}


class InBackward(NamedTuple):
    """What apply_optimizer_in_backward has put on a parameter."""

    optimizer: str
    settings: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        settings = ", ".join(map("=".join, self.settings))
        return f"{self.optimizer} ({settings})" if settings else self.optimizer


def in_backward(
    collections: Mapping[str, Embeddings], places: Mapping[str, TablePlace], optimizer: str | None
) -> dict[str, InBackward]:
    """What is on the parameters of a plan's tables, by table, for those that have any.

    Raises InvalidInput for one that TorchRec cannot fuse, or that we do not know, and UsageError where `optimizer` is another.
    """
    found = {}
    for name, place in places.items():
        weight = weight_of(collections[place.path], place.config.name)
        classes, given = applied_in_backward(weight)
        where = f"table {place.config.name!r} of module {place.path!r}"
        if not classes:
            continue
        if len(classes) > 1:
            raise InvalidInput(
                f"{where} has {len(classes)} optimizers by apply_optimizer_in_backward, and TorchRec fuses one; apply one"
            )
        known = name_of(classes[0], given)
        if known is None:
            raise InvalidInput(
                f"{where} has {classes[0].__name__} by apply_optimizer_in_backward, which is none of "
                f"{', '.join(NAMES.values())}; apply one of torchrec.optim"
            )
        if optimizer not in (None, known):
            raise UsageError(
                f"optimizer is {optimizer!r}, but {where} has {known} by apply_optimizer_in_backward, which TorchRec takes; "
                "leave out optimizer="
            )
        settings = sorted((key, repr(value)) for key, value in given.items() if key != "optimizer")
        found[name] = InBackward(known, tuple(settings))
    return found


def of_step(task: ShardingTask) -> dict[str, Any]:
    """What a task says of how a trainer runs a step, by field."""
    return {name: getattr(task, name) for name in ("pipeline", "step_ledger", "pipeline_options", "index_dedup")}


def check_memory(
    plan: Plan, optimizers: Mapping[str, str], whose: str, dense_optimizer: DenseOptimizer | None = None
) -> None:
    """Raise InvalidInput if a rank lacks memory for the weights, the state of these optimizers, by table, and what a step needs,
    or a host for tables beyond HBM and the state that they keep there. Of other tables the plan says what state they have, and of
    copies the `dense_optimizer`, by default the plan's."""
    dense = dense_optimizer or plan.task.dense_optimizer
    tables = []
    for table in plan.task.tables:
        if table.name in optimizers:
            per_row, per_element = OPTIMIZER_BYTES[optimizers[table.name]]
            table = table.model_copy(
                update={"optimizer_bytes_per_row": per_row, "optimizer_bytes_per_element": per_element}
            )
        tables.append(table)
    task = plan.task.model_copy(update={"tables": tuple(tables), "dense_optimizer": dense})
    names = {*optimizers.values(), *([f"dense {dense}"] if dense and task.constraints.data_parallel else [])}
    step = [f"{task.global_batch_size:,} samples a step", *([f"pipeline {task.pipeline}"] if task.pipeline else [])]
    trained = f" with the trainer's {', '.join([*sorted(names), *step])}"
    otherwise = {optimizers[b.name] for a, b in zip(plan.task.tables, tables, strict=True) if a != b}
    by_command = f" (`neuroshard tables … --optimizer {min(otherwise)}`)" if len(otherwise) == 1 else ""
    way_out = f"search a plan for these{by_command}"
    ranks = zip(device_memory(task, plan.shards), plan.task.usable_bytes, strict=True)
    for rank, (needed, limit) in enumerate(ranks):
        if needed.total > limit:
            shards = zip(shard_memory(task, plan.shards), plan.shards, strict=True)
            _, largest = max((memory.total, shard.table) for memory, shard in shards if shard.device == rank)
            raise InvalidInput(
                f"{whose}: rank {rank} needs {format_bytes(needed.total)} of {format_bytes(limit)}{trained}, most of it for "
                f"table {largest!r}; {way_out}"
            )
    of_host = task.host_memory_bytes or 0
    for host, used in enumerate(host_memory(task, plan.shards)):
        if used > of_host:
            raise InvalidInput(
                f"{whose}: host {host} needs {format_bytes(used)} of {format_bytes(of_host)}{trained}, for tables beyond HBM; "
                f"{way_out}, or for more --host-memory"
            )


def check_trained(plan: Plan, kinds: Mapping[str, Sharding], optimizers: Mapping[str, str], whose: str) -> None:
    """Raise InvalidInput for a table that TorchRec cannot train with its optimizer. Of tables without a known one the plan says
    what state they have."""
    topology = plan.task.topology
    if topology is None or topology.domains(plan.task.devices) == 1:  # then a grid is over hosts
        return
    for table in plan.task.tables:
        kind, optimizer = kinds[table.name], optimizers.get(table.name)
        per_row = OPTIMIZER_BYTES[optimizer][0] if optimizer else table.optimizer_bytes_per_row
        if not kind.trains(per_row, topology):
            state = f"{optimizer} has" if optimizer else f"by {whose} its optimizer has"
            raise InvalidInput(
                f"table {table.name!r} is {kind.words} over domains of {topology.domain} ranks, on hosts of "
                f"{topology.local_world_size}, and {state} state per row, which TorchRec cannot split so (every rank fails: "
                "`Total volume of shards …`); search without grids (--sharding-types column-wise,row-wise,table-row-wise), or "
                "train with an optimizer without such state, as adagrad, and say it (optimizer=)"
            )


def warn_of_split_state(
    plan: Plan,
    shards: Mapping[str, list[Shard]],
    kinds: Mapping[str, Sharding],
    optimizers: Mapping[str, str],
) -> None:
    """Warn of column splits with optimizers, by table, that compute something of the row: its parts learn at different rates. Of
    tables without a known one the plan says whether it has state per row."""
    split = {name: parts for name, parts in shards.items() if kinds[name].splits_columns and len(parts) > 1}
    per_row = {table.name for table in plan.task.tables if table.optimizer_bytes_per_row}
    way_out = "row-wise splits do not change training (search with --row-wise '*' --min-dim 65536)"
    for optimizer, what in OF_THE_ROW.items():
        if names := [name for name in split if optimizers.get(name) == optimizer]:
            warn(
                f"{_split(names, split)}: {optimizer} has {what} per row and shard, so training differs from that of the unsplit "
                f"tables; {way_out}"
            )
    if names := [name for name in split if name not in optimizers and name in per_row]:
        warn(
            f"{_split(names, split)}: the plan counts an optimizer with state per row, as row-wise Adagrad, which has it per row "
            f"and shard, so training differs from that of the unsplit tables; {way_out}. If the trainer's is another, give "
            "sharders= or optimizer="
        )


def _split(names: Sequence[str], parts: Mapping[str, Sequence[Shard]]) -> str:
    return f"{counted(len(names), 'table')} split column-wise ({names[0]!r} into {len(parts[names[0]])})"


def warn_of_several(
    applied: Mapping[str, InBackward],
    kinds: Mapping[str, Sharding],
    places: Mapping[str, TablePlace],
    own_operator: Collection[str] = (),
) -> None:
    """Warn where tables that would share an operator have other optimizers or settings: TorchRec then runs one for each. Tables
    with an `own_operator` share none."""
    first: dict[tuple[object, ...], str] = {}
    apart: dict[str, list[str]] = {}  # by module
    for name, place in places.items():
        if kinds[name].copied or name in own_operator:
            continue
        other = first.setdefault((place.path, kinds[name], place.config.data_type, place.pooling), name)
        if applied.get(name) != applied.get(other):
            apart.setdefault(place.path, [other, name])
    for path, (one, other) in apart.items():
        warn(
            f"tables {one!r} and {other!r} of module {path!r} have {_said(applied.get(one))} and {_said(applied.get(other))} by "
            "apply_optimizer_in_backward: TorchRec runs an operator for each, and the plan was priced for one"
        )


def _said(one: InBackward | None) -> str:
    return "no optimizer" if one is None else str(one)


def warn_of_copies(applied: Mapping[str, InBackward], copied: Sequence[str], places: Mapping[str, TablePlace]) -> None:
    """Warn of copied tables with an optimizer of their own, which TorchRec 1.8 drops."""
    dropped = [name for name in copied if name in applied]
    if dropped:
        place, more = places[dropped[0]], f" (and {len(dropped) - 1} more)" if len(dropped) > 1 else ""
        warn(
            f"table {place.config.name!r} of module {place.path!r}{more} is copied to every rank, for which TorchRec drops "
            f"{applied[dropped[0]]} of apply_optimizer_in_backward: your dense optimizer trains it; give the table its own "
            "settings there, or search without --data-parallel"
        )


def warn_of_dense_optimizer(plan: Plan, dense_optimizer: DenseOptimizer | None) -> None:
    """Warn of a trainer's dense optimizer other than that for which the plan counts the memory of copies."""
    counted_for = plan.task.dense_optimizer
    if plan.task.constraints.data_parallel and dense_optimizer and counted_for not in (None, dense_optimizer):
        warn(
            f"dense_optimizer is {dense_optimizer}, and the plan counts its copies as trained by {counted_for}: they fit with "
            f"{dense_optimizer} too, but leave other memory than the plan says (search with --dense-optimizer {dense_optimizer})"
        )
