"""A plan as a TorchRec ShardingPlan, and a ShardingPlan as a plan. Needs torch and torchrec.

TorchRec's DistributedModelParallel shards nothing if a module's path is wrong, ignores tables that it does not know, and dies
inside a collective if shapes or ranks do not match (seen with torchrec 1.8). So all of that is checked here.
client/model/tables.py compares a plan with the model; client/torchrec/shards.py converts the shards of a table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import (
    CommOp,
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingPlan,
)

from neuroshard import __version__
from neuroshard.client.load import check_world_size
from neuroshard.client.model.tables import TablePlace, collections_of, match_tables, warn_of_training
from neuroshard.client.model.warn import warn, warn_of
from neuroshard.client.ranks import gathered
from neuroshard.client.rows.held import check_by_access
from neuroshard.client.torchrec.collectives import outputs_of, warn_of_codecs
from neuroshard.client.torchrec.fused import (
    check_memory,
    check_optimizers,
    in_backward,
    of_step,
    warn_of_copies,
    warn_of_dense_optimizer,
    warn_of_several,
)
from neuroshard.client.torchrec.hosts import check_groups, check_hosts, check_topology, gpus_of_host
from neuroshard.client.torchrec.priced import InBackward, Priced
from neuroshard.client.torchrec.shards import (
    GEOMETRY,
    check_held,
    check_widths,
    is_beyond_hbm,
    on_gpus,
    parameter_sharding,
    ranks_of_host,
    sharding_named,
    shards_by_table,
    shards_of,
)
from neuroshard.client.torchrec.splits import check_processors, check_sequences, wrong_means
from neuroshard.client.torchrec.tiers import (
    DEFAULT_LOAD_FACTOR,
    check_caches,
    check_kernel,
    kernels,
    sharing_caches,
    tier_of,
    without_load_factor,
)
from neuroshard.client.torchrec.trainer import (
    as_trained,
    dedups,
    optimizers_of,
    sent_once,
    settings_of,
    sharders_by_path,
    warn_of_dedup,
    warn_of_trainer,
    warn_of_versions,
)
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.operator_limits import fault_of_plan
from neuroshard.core.output_order import WAYS_OUT, Held, order_of
from neuroshard.core.parts import part_names
from neuroshard.core.plan import Plan, Provenance, Shard, check_plan, shardings_in
from neuroshard.core.precision import ADDED_UP_AS, ROW, Precision
from neuroshard.core.sharding import COLUMN_WISE, SHARDINGS, Sharding
from neuroshard.core.table import OPTIMIZER_BYTES, Table, check_dense_optimizer
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import agreeing
from neuroshard.core.tiers import IN_HBM
from neuroshard.core.topology import topology_of
from neuroshard.core.value import shown, whole_number
from neuroshard.files.importers.imported import with_modules_in_repeated_names
from neuroshard.files.importers.torchrec_tables import configs_of, has_own_operator, tables_of

DEVICE_TYPES = ("cpu", "cuda")


def to_torchrec(
    plan: Plan,
    module: nn.Module,
    *,
    device_type: str | None = None,
    compute_kernel: str | None = None,
    local_world_size: int | None = None,
    world_size: int | None = None,
    optimizer: str | None = None,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    batch_size: int | None = None,
    pipeline: str | None = None,
    dense_optimizer: str | None = None,
    any_output_order: bool = False,
    sharding_group_size: int | None = None,
) -> ShardingPlan:
    """The `plan` for DistributedModelParallel, for the embedding collections in `module` (the whole model); for DMPCollection
    where ranks train in groups.

    Device d of the plan is rank d, on host d // `local_world_size` (by default as the launcher says: LOCAL_WORLD_SIZE, or
    variables of MPI or SLURM); with `device_type` cuda it is GPU d % `local_world_size`. `world_size` is by default
    torch.distributed's, if initialised. `device_type` (cpu, cuda) is by default cuda if torch.distributed has NCCL or, where it
    is not initialised, torch finds a GPU.
    `optimizer` (sgd, rowwise_adagrad, adagrad, adam, partial_rowwise_adam, lamb, partial_rowwise_lamb, lars_sgd) is the fused one
    of the sharders' `fused_params`; what apply_optimizer_in_backward has put on a table is found there. The memory check then
    counts its state instead of what the plan's tables say, and a ShardingWarning is issued if a column split changes the
    training. `dense_optimizer` (sgd, momentum, adagrad, adam and others) is the one that trains tables of which every rank has a
    copy: the memory check counts its state, by default that of the plan's. Other warnings are issued for optimizers that
    TorchRec drops or runs apart, and for a `compute_kernel` (fused, fused_uvm, fused_uvm_caching) whose tables are not in device
    memory, as the plan's costs are; without one it is fused. A plan that has tables beyond HBM says the kernel of each, and its
    cache parameters (client/torchrec/tiers.py); no `compute_kernel` can be given with it. A warning is issued for modules whose
    outputs come in another order than in the model, unless `any_output_order` says that the dense layers are right in any order:
    they read by key, or `keep_output_order` follows.

    A plan for groups of ranks is for DMPCollection, with the arguments that `dmp_collection` gives, and is refused unless the
    trainer says the `sharding_group_size` of its groups. It has ranks 0 to `sharding_group_size` - 1, which DMPCollection
    replaces by those of the rank's own group; `world_size` is that of all ranks.

    Give the trainer's `sharders`, `batch_size` (samples over all ranks) and `pipeline` (none, sparse-dist, prefetch) too: what
    they say that the plan was not priced for is warned of or refused (client/torchrec/settings.py), memory is checked for what
    the trainer runs, and the optimizer is found in the sharders' `fused_params`.

    Raises InvalidInput, which names table, rank and value, unless the collections hold exactly the plan's tables with the same
    rows, dims and element size, the number of ranks is the same, every rank has enough memory, every table is held as TorchRec
    can train it (whole or copied; column-wise; row-wise over all ranks or over those of one domain, which without a topology is a
    host; in a grid, column-wise over domains and row-wise in each), and the device's operator holds every shard
    (core/operator_limits.py). Raises UsageError for a wrong argument.
    """
    check_plan(plan)
    device_type = device_type_of(device_type)
    check_kernel(plan, compute_kernel)
    if local_world_size is not None and (local_world_size := whole_number("local_world_size", local_world_size)) < 1:
        raise UsageError(
            f"local_world_size is {local_world_size}, but a host has 1 rank or more; leave it out for torchrun's"
        )
    if optimizer is not None and optimizer not in OPTIMIZER_BYTES:
        raise UsageError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZER_BYTES)}")
    dense = None if dense_optimizer is None else check_dense_optimizer(dense_optimizer)

    whose = f"plan {plan.digest()[:12]}"
    warn_of_versions(plan, whose)
    plan = Plan.parse(plan.model_dump(), whose)  # pydantic's model_copy and model_construct check nothing
    whole, plan = plan, check_by_access(module, plan, whose)
    collections = collections_of(module, by_access=True)
    places = match_tables(plan.task.tables, collections, whose)
    applied = in_backward(collections, places, optimizer)
    by_path = {} if sharders is None else sharders_by_path(sharders, (place.path for place in places.values()), module)
    warn_of_training(module, collections)
    if world_size is None and dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    if world_size is not None:
        check_world_size(plan, world_size, whose)
    check_groups(plan, sharding_group_size, whose)
    check_topology(plan, local_world_size, whose)
    shards = shards_by_table(plan, whose, local_world_size)
    kinds = _sharding_types(plan, shards, places)
    priced = Priced(plan, whose, module, collections, places, shards, kinds, device_type, by_path, applied)
    check_widths(priced)
    if plan.task.groups is None and dist.is_available() and dist.is_initialized():
        check_hosts(priced)
    check_sequences(priced)
    check_processors(priced)
    priced = priced._replace(settings=settings_of(priced))
    optimizers = optimizers_of(priced, optimizer)
    trained = as_trained(plan, batch_size, pipeline, whose, index_dedup=dedups(priced))
    warn_of_dedup(priced)
    if optimizers or dense or trained is not plan:
        now, own = trained.task, {"batch_size": trained.task.batch_size, **of_step(trained.task)}
        some = [t.name for t in whole.task.tables if sent_once(now) & {t.name, *part_names(t.name)}]
        with_copies = whole.held.model_copy(update=own).with_dedup(some).parted
        check_memory(
            trained.named.model_copy(update={"task": with_copies, "shards": whole.shards}), optimizers, whose, dense
        )
    priced = priced._replace(plan=trained, optimizers=optimizers)
    check_optimizers(priced, compute_kernel)
    check_caches(priced)
    warn_of_trainer(priced)
    warn_of_codecs(priced, outputs_of(priced), qcomms(plan, device_type))
    warn_of_dense_optimizer(plan, dense)
    warn_of_several(priced)
    warn_of_copies(priced)
    if wrong := wrong_means(priced):
        what, or_else = wrong
        raise InvalidInput(f"{what}; {whose} must not split its rows{or_else}")

    held = kernels(trained, compute_kernel or IN_HBM.kernel, device_type)
    local = gpus_of_host(plan, local_world_size) if device_type == "cuda" else 1
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for name, kind in kinds.items():
        module_plan = modules.setdefault(places[name].path, EmbeddingModuleShardingPlan())
        module_plan[places[name].config.name] = parameter_sharding(kind, shards[name], device_type, *held[name], local)
    if not any_output_order:
        warn_of_order(modules, priced)
    return ShardingPlan(plan=dict(modules))


def device_type_of(given: str | None) -> str:
    """`given`, or what the ranks train on. Raises UsageError if it is neither cpu nor cuda."""
    if given is None:
        initialised = dist.is_available() and dist.is_initialized()
        on_gpus = "nccl" in dist.get_backend_config() if initialised else torch.cuda.is_available()
        return "cuda" if on_gpus else "cpu"
    if given not in DEVICE_TYPES:
        raise UsageError(f"device_type {given!r} is none of {', '.join(DEVICE_TYPES)}")
    return given


def _sharding_types(
    plan: Plan, shards: Mapping[str, list[Shard]], places: Mapping[str, TablePlace]
) -> dict[str, Sharding]:
    """The sharding type of each table, as TorchRec gets it.

    TorchRec runs an operator and its all-to-alls for each sharding type of a module. So whole tables of a module that has cut
    ones are called column-wise, in one shard: the same bytes in half as many launches (torchrec 1.8, 4 gloo ranks, 8 small
    tables: 17 instead of 22 ms a step). Sequences are an exception: their operators have rows of one width.
    """
    kinds = shardings_in(plan.held, [shard for held in shards.values() for shard in held])
    cut = {places[name].path for name, kind in kinds.items() if kind is COLUMN_WISE}
    return {
        name: kind.runs_as(sequences=places[name].pooling == "none") if places[name].path in cut else kind
        for name, kind in kinds.items()
    }


def qcomms(plan: Plan, device_type: str | None = None) -> dict[str, QuantizedCommCodecs] | None:
    """The `qcomm_codecs_registry` for TorchRec's sharders, so that outputs and gradients travel in the plan's precision; None for
    fp32. `device_type` is as in `to_torchrec`.

    A reduce-scatter sums what it receives, so it sends int8 and fp8 as fp16. On CPUs TorchRec uses fp16 instead of bf16, and
    warns. Raises InvalidInput for fp8 on CPUs, for which FBGEMM has none.

    >>> sharder = EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=qcomms(plan))  # doctest: +SKIP
    """
    check_plan(plan)
    device_type = device_type_of(device_type)
    precision = plan.task.collective_precision
    if precision is None:
        return None
    if device_type == "cpu" and "fp8" in (precision.forward, precision.backward):
        raise InvalidInput(
            f"plan {plan.digest()[:12]} sends {precision.text}, and FBGEMM has no fp8 on CPUs; search with "
            "--collective-precision int8, of as many bytes, or fp16"
        )
    registry: dict[str, QuantizedCommCodecs] = {}
    for operation in CommOp:
        ways: tuple[Precision, Precision] = (precision.forward, precision.backward)
        if operation is CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER:
            ways = ADDED_UP_AS[ways[0]], ADDED_UP_AS[ways[1]]
        row, back = (ROW if way == "fp8" else None for way in ways)  # without it FBGEMM takes other codes, of no scale
        forward, backward = map(CommType, ways)
        config = QCommsConfig(forward, backward, fp8_quantize_dim=row, fp8_quantize_dim_bwd=back)
        registry |= get_qcomm_codecs_registry(config, [operation], torch.device(device_type)) or {}
    return registry


def from_torchrec(
    sharding_plan: ShardingPlan,
    module: nn.Module,
    *,
    device_memory_bytes: Sequence[int],
    batch_size: int,
    tables: Iterable[Table] | None = None,
    pipeline: str | None = None,
    host_memory_bytes: int | None = None,
    local_world_size: int | None = None,
    domain: int | None = None,
    network: str | None = None,
) -> Plan:
    """A TorchRec plan for the embedding collections in `module` (which may be on the meta device), as a Plan.

    Rank r is device r, with `device_memory_bytes[r]`; `batch_size` is the global one. `local_world_size` ranks are on a host,
    and `domain` share fast links, by default those of a host; between domains is a `network` ("50GB/s,0.06ms"). Without any,
    all ranks are taken to be on one host. With the trainer's `pipeline` (docs/search.md has the words) memory counts what the
    tensors of a step need where all ids are sent and exchanged in fp32, as TorchRec's plan says nothing of that, and nothing
    that CUDA's allocator holds beyond them; without a pipeline none of a step.
    With `host_memory_bytes`, what each host has for tables, tables may be cached or in host memory. TorchRec's plan says
    nothing about lookups: give `tables` (from a tables.json, say) for the pooling factors; by default a table has one uniform
    lookup a feature. The plan carries no predicted cost. Its notes name table-row-wise and grid tables, cached ones that
    share a cache, and those that have FBGEMM's load factor, since the plan says none. A ShardingWarning names a shard on CPUs
    that is wider than the operator of GPUs holds.

    Raises InvalidInput, which names table, rank and value, for missing or unknown tables, for other kernels and whatever else a
    plan cannot keep of a ParameterSharding, for what `to_torchrec` would not give back (row blocks on other ranks or without
    rows, means that TorchRec computes wrongly), and for anything that makes a plan invalid: a gap, an overlap, a rank beyond the
    devices, too little memory. Raises UsageError for hosts, domains or a network that cannot be.
    """
    if not isinstance(sharding_plan, ShardingPlan):
        raise UsageError(f"{shown(sharding_plan)} is no ShardingPlan of TorchRec; give what its planner returned")
    try:
        device_memory_bytes = tuple(device_memory_bytes)
    except TypeError:
        raise UsageError(
            f"device_memory_bytes is {shown(device_memory_bytes)}; give the bytes of each rank, as [80 * 2**30] * 8"
        ) from None
    collections = collections_of(module)
    found = {path: name for path in collections for name in (path, f"module.{path}") if name in sharding_plan.plan}
    unknown = sharding_plan.plan.keys() - set(found.values())
    if unknown:
        inside = next((path for path in collections if min(unknown).startswith(f"{path}.".lstrip("."))), None)
        what = (
            "which is no embedding collection of the model"
            if inside is None
            else f"inside of {inside!r}, a {type(module.get_submodule(inside)).__name__} that must be sharded at its own path"
        )
        raise InvalidInput(f"the sharding plan shards module {min(unknown)!r}, {what}")
    own = [table.model_copy(update={"module": path}) for path, ebc in collections.items() for table in tables_of(ebc)]
    known = tuple(with_modules_in_repeated_names(own)[0] if tables is None else tables)
    places = match_tables(known, collections, "the sharding plan")
    shards: list[Shard] = []
    kinds: dict[str, Sharding] = {}
    tiers: list[dict[str, object]] = []
    in_tiers: dict[str, tuple[object, ParameterSharding]] = {}
    left_out: dict[str, list[str]] = {}  # by field of a ParameterSharding
    for table in known:
        path, config, _ = places[table.name]
        parameters = sharding_plan.plan[found[path]] if path in found else {}
        if config.name not in parameters:
            raise InvalidInput(f"the sharding plan lacks table {config.name!r} of module {path!r}")
        parameter = parameters[config.name]
        beyond_hbm = is_beyond_hbm(parameter, host_memory_bytes)
        for field in check_held(table.name, parameter, beyond_hbm=beyond_hbm):
            left_out.setdefault(field, []).append(table.name)
        shards += shards_of(table, parameter, len(device_memory_bytes))
        if beyond_hbm:
            tiers.append({"table": table.name, **tier_of(table, parameter, pipeline)})
            operator = path, parameter.sharding_type, table.element_bytes, table.pooling
            in_tiers[table.name] = operator, parameter
        kinds[table.name] = sharding_named(parameters[config.name])
    for path, name in found.items():
        in_module = {place.config.name for place in places.values() if place.path == path}
        if extra := set(sharding_plan.plan[name]) - in_module:
            raise InvalidInput(f"the sharding plan has table {min(extra)!r} in module {path!r}, which the model lacks")
    copied = [name for name, kind in kinds.items() if kind.copied]
    task = {
        "tables": [table.model_dump() for table in known],
        "device_memory_bytes": device_memory_bytes,
        "batch_size": batch_size,
        "constraints": {"tables": [*({"table": name, "data_parallel": True} for name in copied), *tiers]},
        "pipeline": pipeline,
        "step_ledger": None if pipeline is None else 1,
        "host_memory_bytes": host_memory_bytes,
        "topology": topology_of(len(device_memory_bytes), domain, local_world_size, network),
    }
    parsed = ShardingTask.parse(task, "the sharding plan's task")
    plan = Plan.parse(
        {
            "task": parsed,
            "shards": shards,
            "provenance": Provenance(
                neuroshard_version=__version__,
                algorithm="torchrec",
                notes=tuple(_notes(kinds, left_out, sharing_caches(in_tiers), without_load_factor(in_tiers))),
            ),
        },
        "the sharding plan",
    )
    _check_comes_back(plan, module, places, ranks_of_host(sharding_plan), on_gpus(sharding_plan))
    return plan


def _check_comes_back(
    plan: Plan, module: nn.Module, places: Mapping[str, TablePlace], host: int | None, on_gpus: bool
) -> None:
    """Raise InvalidInput for what `to_torchrec` would not give back of a TorchRec plan on hosts of so many ranks."""
    whose = "the sharding plan"
    shards = shards_by_table(plan, whose, host or plan.task.devices)
    kinds = _sharding_types(plan, shards, places)
    priced = Priced(plan, whose, module, {}, places, shards, kinds, "cuda" if on_gpus else "cpu")
    check_sequences(priced)
    check_processors(priced)
    if wrong := wrong_means(priced):
        raise InvalidInput(f"{wrong[0]}: a trainer with this plan computes other values than the model")
    if on_gpus:
        check_widths(priced)
    elif wide := fault_of_plan(plan, "cuda"):
        warn(f"{wide}: on GPUs a trainer with this plan may learn nothing of these columns; on CPUs it is right")


def _notes(
    kinds: Mapping[str, Sharding],
    left_out: Mapping[str, Sequence[str]],
    sharing: Sequence[str],
    by_default: Sequence[str],
) -> list[str]:
    notes: dict[str, Sequence[str]] = {
        f"{one.on_hosts} ({one}): {{}}; to_torchrec accepts such tables for trainers whose hosts have as many ranks": [
            name for name, kind in kinds.items() if kind is one
        ]
        for one in SHARDINGS
        if one.over_domains
    }
    notes["one cache for several tables, among them {}: the plan has a cache of its own for each, and is priced so"] = (
        sharing
    )
    notes[
        f"no load factor said of {{}}: {DEFAULT_LOAD_FACTOR}, which FBGEMM takes where the sharders' fused_params have no "
        "cache_load_factor; if they do, set CacheParams(load_factor=…)"
    ] = by_default
    notes |= {
        f"{field} of {{}} left out: it has no effect on tables in device memory": of for field, of in left_out.items()
    }
    return [
        note.format(f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
        for note, names in notes.items()
        if names
    ]


def check_same_digest(plan: Plan) -> str:
    """The plan's digest, if every rank of torch.distributed's world holds the same. Every rank must call it.

    Two ranks can read different plans if a deploy happens in between. Raises InvalidInput on every rank, which names the ranks
    that differ from rank 0.
    """
    plans: list[str] = gathered(None, plan.digest())
    others = [rank for rank, digest in enumerate(plans) if digest != plans[0]]
    if others:
        more = f" (and {agreeing(len(others) - 1, 'more rank', 'differs', 'differ')})" if len(others) > 1 else ""
        raise InvalidInput(
            f"rank {others[0]} holds plan {plans[others[0]][:12]}, rank 0 plan {plans[0][:12]}{more}: a deploy came in between; "
            "load again on every rank"
        )
    return plans[0]


def warn_of_order(sharding_plan: Mapping[str, EmbeddingModuleShardingPlan], priced: Priced) -> None:
    """Warn of modules that a sharding plan makes return their outputs in another order than the model has them in."""
    in_plan = {(place.path, place.config.name): name for name, place in priced.places.items()}
    changed = []
    for path, parameters in sharding_plan.items():
        held = [
            _held(config, parameters[config.name], priced.applied.get(in_plan[path, config.name]))
            for config in configs_of(priced.collections[path])
        ]
        own = [table.table for table in held]
        changed += [(path, *pair) for pair in zip(own, order_of(held), strict=True) if pair[0] != pair[1]][:1]
    if changed:
        path, first, other = changed[0]
        warn_of(
            [f"module {path!r}" for path, *_ in changed],
            f" returns its outputs in another order by this plan than in the model, {other!r} where the model has {first!r}: "
            f"dense layers that read them by position (values()) are right by this plan alone; {WAYS_OUT} after "
            "DistributedModelParallel, and say any_output_order=True here",
        )


def _held(config: Any, parameter: ParameterSharding, applied: InBackward | None) -> Held:
    """What decides where a table's outputs come. Tables of one operator have the same settings of a ParameterSharding."""
    settings = [getattr(parameter, field.name) for field in fields(parameter) if field.name not in GEOMETRY]
    return Held(
        config.name,
        parameter.sharding_type,
        frozenset(parameter.ranks or ()),
        (config.data_type, getattr(config, "pooling", None), applied, repr(settings), has_own_operator(config)),
    )
