"""The fused optimizers of a model's tables, and what they mean for a plan. Needs torch and torchrec.

TorchRec takes a table's optimizer from its parameter, where apply_optimizer_in_backward has put it, else from the sharders'
`fused_params`, which no plan sees: a trainer says that one by name.

Tables that give rows to ids as they train (managed collisions), seen with torchrec 1.8 on gloo: sharded at the wrapper's path
each id has one row, whatever rank looks it up, and losses are those of the whole table with these rows. What differs from a table
without an id map:
- ids go to ranks in blocks of the hash space. Without a hash function small ids are all in the first block: other ranks' rows
  are never used;
- the state of a row that goes to another id is set back for SGD, which has none, and row-wise Adagrad only;
- on CPUs FBGEMM (1.8) cannot set back row-wise Adagrad's (`reset_weight_momentum`), nor give rows to new ids in
  HashZchManagedCollisionModule (`zero_collision_hash`): the first step that needs it fails.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from neuroshard.client.model.tables import Collection, TablePlace
from neuroshard.client.model.warn import warn, warn_of
from neuroshard.client.torchrec.priced import InBackward, Priced
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.id_map import SORTED
from neuroshard.core.plan import Plan, Shard, device_memory, host_memory, shard_memory
from neuroshard.core.table import OPTIMIZER_BYTES, DenseOptimizer
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.tiers import BY_KERNEL, IN_HBM
from neuroshard.core.units import format_bytes
from neuroshard.files.importers.torchrec_collections import NAMES, name_of, weight_of
from neuroshard.files.importers.torchrec_collections import in_backward as applied_in_backward
from neuroshard.files.importers.torchrec_tables import id_map

# What these compute of the whole row, FBGEMM computes of the columns of a shard (codegen/genscript/optimizers.py).
OF_THE_ROW = {
    "rowwise_adagrad": "one moment",
    "partial_rowwise_adam": "one second moment",
    "lamb": "one norm",
    "partial_rowwise_lamb": "one second moment and norm",
    "lars_sgd": "one norm",
}


def in_backward(
    collections: Mapping[str, Collection], places: Mapping[str, TablePlace], optimizer: str | None
) -> dict[str, InBackward]:
    """What is on the parameters of a plan's tables, by table, for those that have any.

    Raises InvalidInput for one that TorchRec cannot fuse, or that we do not know, and UsageError where `optimizer` is another.
    """
    found = {}
    for name, place in places.items():
        weight = weight_of(collections[place.path], place.config.name)
        classes, given = applied_in_backward(weight)
        where = place.where
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
    task = plan.held.model_copy(update={"tables": tuple(tables), "dense_optimizer": dense})
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
            nbytes, largest = max((memory.total, shard.table) for memory, shard in shards if shard.device == rank)
            what = "a step" if needed.step > nbytes else f"table {largest!r}"
            raise InvalidInput(
                f"{whose}: rank {rank} needs {format_bytes(needed.total)} of {format_bytes(limit)}{trained}, most of it for "
                f"{what}; {way_out}"
            )
    of_host = task.host_memory_bytes or 0
    for host, used in enumerate(host_memory(task, plan.shards)):
        if used > of_host:
            raise InvalidInput(
                f"{whose}: host {host} needs {format_bytes(used)} of {format_bytes(of_host)}{trained}, for tables beyond HBM; "
                f"{way_out}, or for more --host-memory"
            )


def check_optimizers(priced: Priced, compute_kernel: str | None) -> None:
    """Raise InvalidInput for tables that TorchRec cannot train with their optimizers, and warn of those that it trains otherwise.
    Raises UsageError for a kernel that it cannot train them with."""
    _check_trained(priced)
    _check_id_maps(priced, compute_kernel)
    _check_averaged(priced)
    _warn_of_split_state(priced)
    _warn_of_id_maps(priced)


def _check_trained(priced: Priced) -> None:
    """Raise InvalidInput for a table that TorchRec cannot train with its optimizer. Of tables without a known one the plan says
    what state they have."""
    task, whose = priced.plan.task, priced.whose
    topology = task.topology
    if topology is None or topology.domains(task.devices) == 1:  # then a grid is over hosts
        return
    for table in task.tables:
        kind, optimizer = priced.kinds[table.name], priced.optimizers.get(table.name)
        per_row = OPTIMIZER_BYTES[optimizer][0] if optimizer else table.optimizer_bytes_per_row
        if not kind.trains(per_row, topology):
            state = f"{optimizer} has" if optimizer else f"by {whose} its optimizer has"
            raise InvalidInput(
                f"table {table.name!r} is {kind.words} over domains of {topology.domain} ranks, on hosts of "
                f"{topology.local_world_size}, and {state} state per row, which TorchRec cannot split so (every rank fails: "
                "`Total volume of shards …`); search without grids (--sharding-types column-wise,row-wise,table-row-wise), or "
                "train with an optimizer without such state, as adagrad, and say it (optimizer=)"
            )


def _warn_of_split_state(priced: Priced) -> None:
    """Warn of column splits with optimizers, by table, that compute something of the row: its parts learn at different rates. Of
    tables without a known one the plan says whether it has state per row."""
    kinds, optimizers = priced.kinds, priced.optimizers
    split = {name: parts for name, parts in priced.shards.items() if kinds[name].splits_columns and len(parts) > 1}
    per_row = {table.name for table in priced.plan.task.tables if table.optimizer_bytes_per_row}
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


def warn_of_several(priced: Priced) -> None:
    """Warn where tables that would share an operator have other optimizers or settings: TorchRec then runs one for each. Cached
    tables share none."""
    kinds, applied = priced.kinds, priced.applied
    first: dict[tuple[object, ...], str] = {}
    apart: dict[str, list[str]] = {}  # by module
    for name, place in priced.places.items():
        if kinds[name].copied or name in priced.own_operator:
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


def warn_of_copies(priced: Priced) -> None:
    """Warn of copied tables with an optimizer of their own, which TorchRec 1.8 drops."""
    if dropped := [name for name in priced.copied if name in priced.applied]:
        warn_of(
            [priced.places[name].where for name in dropped],
            f" is copied to every rank, for which TorchRec drops {priced.applied[dropped[0]]} of apply_optimizer_in_backward: "
            "your dense optimizer trains it; give the table its own settings there, or search without --data-parallel",
        )


def warn_of_dense_optimizer(plan: Plan, dense_optimizer: DenseOptimizer | None) -> None:
    """Warn of a trainer's dense optimizer other than that for which the plan counts the memory of copies."""
    counted_for = plan.task.dense_optimizer
    if plan.held.constraints.data_parallel and dense_optimizer and counted_for not in (None, dense_optimizer):
        warn(
            f"dense_optimizer is {dense_optimizer}, and the plan counts its copies as trained by {counted_for}: they fit with "
            f"{dense_optimizer} too, but leave other memory than the plan says (search with --dense-optimizer {dense_optimizer})"
        )


AVERAGED = ("sgd", "adagrad", "rowwise_adagrad")  # optimizers that DMPCollection can average
# optimizers whose state `reset_embedding_weight_momentum` of FBGEMM sets back, or that have none
SET_BACK = ("sgd", "rowwise_adagrad")


def _check_id_maps(priced: Priced, compute_kernel: str | None) -> None:
    """Raise InvalidInput for what FBGEMM's CPU operators lack, and UsageError for a kernel that caches such tables."""
    on_cpus = priced.device_type == "cpu"
    for name, place in priced.places.items():
        if (known := id_map(priced.collections[place.path], place.config)) is None:
            continue
        where = f"{place.where} gives rows to ids as it trains"
        if BY_KERNEL.get(compute_kernel or "", IN_HBM).cached:
            raise UsageError(
                f"{where}, and TorchRec sets the rows of new ids in host memory, where the cache of compute_kernel "
                f"{compute_kernel!r} does not see it; leave it out"
            )
        if on_cpus and known.kind != SORTED:
            raise InvalidInput(
                f"{where} with HashZchManagedCollisionModule, and FBGEMM's CPU operator finds rows but gives none to new ids; "
                "train on GPUs, or take MCHManagedCollisionModule"
            )
        if on_cpus and priced.optimizers.get(name) == "rowwise_adagrad":
            raise InvalidInput(
                f"{where}, and FBGEMM cannot set back rowwise_adagrad's state of a row on CPUs; train on GPUs, or with sgd"
            )


def _warn_of_id_maps(priced: Priced) -> None:
    """Warn, in a line each, of id maps that leave ranks without ids, of rows whose new ids get moments of others, and of what no
    plan is priced for."""
    optimizers, collections, ranks = priced.optimizers, priced.collections, priced.plan.task.devices
    unhashed, kept = [], dict[str, list[str]]()
    for name, place in priced.places.items():
        if (known := id_map(collections[place.path], place.config)) is None:
            continue
        collection: Any = collections[place.path]
        module = collection._managed_collision_collection._managed_collision_modules[place.config.name]
        hashed = module._input_hash_func is not None if known.kind == SORTED else module.input_size() == 0
        unhashed += [] if hashed else [place.where]
        if optimizers.get(name, "sgd") not in SET_BACK:
            kept.setdefault(optimizers[name], []).append(place.where)
    for path in dict.fromkeys(place.path for place in priced.places.values()):
        if getattr(collections[path], "_return_remapped_features", False):
            warn(
                f"module {path!r} has return_remapped_features, for which TorchRec runs an all-to-all more in a step than the "
                "plan was priced for; leave it out where nothing reads them"
            )
    if ranks > 1:
        warn_of(
            unhashed,
            f": its ids go to {ranks} ranks in blocks of input_hash_size, and are not hashed: small ids all go "
            "to rank 0, and other ranks' rows are never used; give it an input_hash_func that spreads ids over input_hash_size",
        )
    for optimizer, tables in kept.items():
        warn_of(
            tables,
            ": where a row goes to another id, TorchRec sets the row's weights back, but not its state of "
            f"{optimizer}, so the new id begins with moments of the old one; with rowwise_adagrad it sets back both",
        )


def _check_averaged(priced: Priced) -> None:
    """Raise InvalidInput for a table whose replicas DMPCollection cannot average."""
    optimizers = priced.optimizers
    other = next((name for name, one in optimizers.items() if one not in AVERAGED), None)
    if priced.plan.task.groups is not None and other is not None:
        raise InvalidInput(
            f"table {other!r} is trained by {optimizers[other]}, whose state DMPCollection cannot average (a KeyError: 'sum'), "
            f"and {priced.whose} is for groups of ranks; train with {', '.join(AVERAGED)}, or search a plan without groups"
        )
