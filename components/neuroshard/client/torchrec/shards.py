"""The shards of one table as TorchRec's ParameterSharding, and back. Needs torch and torchrec.

A plan may hold any rectangles; TorchRec may not. What it would place wrongly without an error (seen with torchrec 1.8) is
refused here, by table, rank and value:
- all column shards of a table on a rank are assumed to be as wide as the first;
- the n-th row shard goes to rank n (table-row-wise to rank n of the first one's host), whatever its placement says, and ids
  go to these ranks in blocks of ceil(rows / ranks): rows elsewhere are looked up in row 0 of another block;
- the ranks of a host are as many as LOCAL_WORLD_SIZE says; if a table-row-wise table has another number of shards, ranks fail
  with an IndexError or wait for each other;
- if a table pooled by mean is split row-wise, all tables of its collection that are not split row-wise are divided by their
  numbers of lookups too.
"""

import dataclasses

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan

from neuroshard.client.torchrec.hosts import hosts_of
from neuroshard.client.torchrec.priced import Priced
from neuroshard.core.errors import InvalidInput
from neuroshard.core.moves import joined
from neuroshard.core.operator_limits import Device, fault_of_shards
from neuroshard.core.plan import Plan, Shard, shardings_of
from neuroshard.core.sharding import COLUMN_WISE, SHARDINGS, Sharding
from neuroshard.core.table import Table
from neuroshard.core.text import spanned
from neuroshard.core.tiers import BY_KERNEL, IN_HBM
from neuroshard.core.value import shown

BY_TORCHREC = {one.torchrec: one for one in SHARDINGS} | {"table_column_wise": COLUMN_WISE}  # columns on a host's ranks
# fields of a ParameterSharding: the ones that shards are made of, of caches over host memory, and of the operator
GEOMETRY = ("sharding_type", "ranks", "sharding_spec")
OF_CACHES = ("cache_params", "enforce_hbm")
OF_THE_OPERATOR = ("output_dtype", "stochastic_rounding", "bounds_check_mode")


def shards_by_table(plan: Plan, whose: str, local_world_size: int | None = None) -> dict[str, list[Shard]]:
    """The shards of each table in TorchRec's order: from left to right, or from the first row down.

    Rows may be split over the ranks of a domain, as the plan's topology has it. Without one a domain is a host: of
    `local_world_size` ranks, by default as many as the launcher says (client/torchrec/hosts.py). Raises InvalidInput
    for what TorchRec cannot hold.
    """
    tables, devices, topology = {table.name: table for table in plan.task.tables}, plan.task.devices, plan.task.topology
    found, kinds = {}, shardings_of(plan)
    if topology is not None and topology.domains(devices) > 1:
        local_world_size = topology.domain
    for name, given in plan.by_table().items():
        kind, shards = (
            kinds[name],
            sorted(given, key=lambda shard: (shard.column_offset, shard.row_offset, shard.device)),
        )
        found[name] = shards
        if kind.over_domains and local_world_size is None:
            local_world_size = hosts_of(devices).ranks
        local = local_world_size or devices
        if kind.splits_rows and kind.splits_columns:
            check_grid(tables[name], shards, local, whose)
        elif kind.splits_rows:
            check_row_wise(tables[name], shards, devices, local, whose)
            ranks = ranks_of_rows(shards, devices, local)
            if len(shards) < len(ranks):
                raise InvalidInput(
                    f"table {name!r} has {tables[name].rows:,} rows, in blocks that leave rank {ranks[len(shards)]} without any, "
                    f"where FBGEMM's operator can fail; {whose} must keep it whole"
                )
        elif not kind.copied:
            found[name] = as_torchrec_can_hold(shards, whose)
    return found


def check_widths(priced: Priced) -> None:
    """Raise InvalidInput for a shard, as TorchRec gets it, that the operator of these devices cannot hold."""
    device: Device = "cuda" if priced.device_type == "cuda" else "cpu"
    given, task = [shard for of_table in priced.shards.values() for shard in of_table], priced.plan.task
    if wide := fault_of_shards(task.tables, given, device, priced.plan.held.constraints.data_parallel):
        raise InvalidInput(f"{wide}; {priced.whose} must cut it: search again, with costs of this kind of device")


def check_grid(table: Table, shards: list[Shard], local_world_size: int, whose: str) -> None:
    """Raise InvalidInput unless the shards, column by column, are those of TorchRec's GRID_SHARD: columns in parts of one width,
    the rows of each part over the ranks of a host of its own."""
    width, local = shards[0].dim, local_world_size
    hosts = [shard.device // local for shard in shards[::local]]
    wanted = [
        (width, place * width, first, rows, host * local + rank)
        for place, host in enumerate(hosts)
        for rank, (first, rows) in enumerate(table.row_blocks(local))
    ]
    given = [(shard.dim, shard.column_offset, shard.row_offset, shard.rows, shard.device) for shard in shards]
    whole = width * len(hosts) == table.dim and table.has_rows_for(local)
    if given != wanted or len(set(hosts)) < len(hosts) or not whole:
        raise InvalidInput(
            f"table {table.name!r} is split row-wise and column-wise (rank {shards[0].device} has rows {_rows(shards[0])} and "
            f"columns {spanned(shards[0].column_offset, width)}), and not in a grid as TorchRec has it: equal parts of columns, "
            f"the rows of each over the {local} ranks of a host of its own, in order; {whose} must split it so, or by one of them"
        )


def ranks_of_rows(shards: list[Shard], devices: int, local_world_size: int) -> range:
    """The ranks that TorchRec deals a table's rows out to: those of the one host that has them, or all."""
    hosts = {shard.device // local_world_size for shard in shards}
    if len(hosts) != 1 or not _several_hosts(devices, local_world_size):
        return range(devices)
    first = hosts.pop() * local_world_size
    return range(first, first + local_world_size)


def _several_hosts(devices: int, local_world_size: int) -> bool:
    """Whether the ranks make several whole hosts, or domains, of several ranks each."""
    return 1 < local_world_size < devices and devices % local_world_size == 0


def check_row_wise(table: Table, shards: list[Shard], devices: int, local_world_size: int, whose: str) -> None:
    """Raise InvalidInput unless the shards, in the order of their rows, are those of TorchRec's ROW_WISE, over all ranks, or
    of its TABLE_ROW_WISE, over those of a domain, which without a topology is a host."""
    ranks = ranks_of_rows(shards, devices, local_world_size)
    kind = "row-wise" if len(ranks) == devices else "table-row-wise"
    in_domains = ""
    if _several_hosts(devices, local_world_size):
        in_domains = (
            f", or over the {local_world_size} of a domain (a host where it has no topology), or in a grid over domains"
        )
    blocks = [(rank, *block) for rank, block in zip(ranks, table.row_blocks(len(ranks)), strict=True) if block[1]]
    for (rank, first, rows), shard in zip(blocks, shards, strict=False):
        if (shard.device, shard.row_offset, shard.rows) != (rank, first, rows):
            raise InvalidInput(
                f"table {table.name!r} has rows {_rows(shard)} of {table.rows:,} on rank {shard.device}, where TorchRec's "
                f"{kind} sharding has rows {spanned(first, rows)} on rank {rank}; {whose} must split rows over all {devices} "
                f"ranks in order, {table.block_rows(devices):,} each{in_domains}"
            )


def _rows(shard: Shard) -> str:
    return spanned(shard.row_offset, shard.rows)


def as_torchrec_can_hold(shards: list[Shard], whose: str) -> list[Shard]:
    """The column shards of one table, where a rank has several of unequal widths with neighbours on that rank made one.

    TorchRec takes all shards of a table on a rank to be as wide as the first (1.8, `_gen_named_parameters_by_table_fused`):
    others make it fail, or show a neighbour's weights as theirs. Raises InvalidInput for unequal ones that are not neighbours.
    """
    found = joined(shards)
    for rank in dict.fromkeys(shard.device for shard in found):
        on_rank = [shard for shard in found if shard.device == rank]
        if len({shard.dim for shard in on_rank}) > 1:
            columns = ", ".join(f"{s.column_offset} to {s.column_offset + s.dim}" for s in on_rank)
            raise InvalidInput(
                f"table {on_rank[0].table!r} has shards of unequal widths on rank {rank} (columns {columns}), which TorchRec "
                f"mixes up; {whose} must keep them together or equally wide"
            )
    return found


def parameter_sharding(
    kind: Sharding,
    shards: list[Shard],
    device_type: str,
    compute_kernel: str,
    cache_params: CacheParams | None,
    local_size: int,
) -> ParameterSharding:
    """TorchRec's record of one table, of `shards_by_table`. Copies have no shards there, and the kernel of their kind."""
    if kind.copied:
        return ParameterSharding(kind.torchrec, kind.kernel, ranks=[shard.device for shard in shards])
    return ParameterSharding(
        sharding_type=kind.torchrec,
        compute_kernel=compute_kernel,
        cache_params=cache_params,
        ranks=[shard.device for shard in shards],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.row_offset, shard.column_offset],
                    shard_sizes=[shard.rows, shard.dim],
                    placement=placement(device_type, shard.device, local_size),
                )
                for shard in shards
            ]
        ),
    )


def sharding_named(parameter: ParameterSharding) -> Sharding:
    """The sharding type that a TorchRec plan says of a table. Raises InvalidInput for one that plans do not know."""
    if parameter.sharding_type not in BY_TORCHREC:
        raise InvalidInput(f"a table is sharded {parameter.sharding_type!r}, which is none of {', '.join(BY_TORCHREC)}")
    return BY_TORCHREC[parameter.sharding_type]


def _placed(plan: ShardingPlan) -> list[ParameterSharding]:
    """The tables of a TorchRec plan that have shards of their own."""
    every = [parameter for tables in plan.plan.values() for parameter in tables.values()]
    return [one for one in every if isinstance(one.sharding_spec, EnumerableShardingSpec)]


def ranks_of_host(plan: ShardingPlan) -> int | None:
    """The ranks of a host, or of a domain, as a TorchRec plan shows them; None where it splits no table over those."""
    found = [
        sum(shard.shard_offsets[1] == 0 for shard in parameter.sharding_spec.shards)
        for parameter in _placed(plan)
        if sharding_named(parameter).over_domains
    ]
    return max(found, default=None)


def on_gpus(plan: ShardingPlan) -> bool:
    """Whether a TorchRec plan places shards on GPUs."""
    shards = (shard for parameter in _placed(plan) for shard in parameter.sharding_spec.shards)
    devices = (shard.placement.device() for shard in shards if shard.placement)
    return any(device is not None and device.type == "cuda" for device in devices)


def shards_of(table: Table, parameter: ParameterSharding, devices: int) -> list[Shard]:
    """The shards of one table of a TorchRec plan for `devices` ranks. Shards without rows are left out.

    Raises InvalidInput where there are none on ranks, and where TorchRec would put them elsewhere than the plan says.
    """
    kind, sharding = parameter.sharding_type, sharding_named(parameter)
    if sharding.copied:
        return [Shard(table=table.name, rows=table.rows, dim=table.dim, device=rank) for rank in range(devices)]
    if not isinstance(parameter.sharding_spec, EnumerableShardingSpec):
        raise InvalidInput(
            f"table {table.name!r} is sharded {kind}, without shards on ranks of its own; plans hold each table once"
        )
    shards, placed = [], []
    before: dict[int, int] = {}  # the rank of the shard above in the same columns
    for shard in parameter.sharding_spec.shards:
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        rank = shard.placement.rank() if shard.placement else None
        if rank is None:
            raise InvalidInput(f"table {table.name!r} has a shard at column {column} that is on no rank")
        if column in before and rank != before[column] + 1:
            raise InvalidInput(
                f"table {table.name!r} is sharded {kind} with rows {spanned(row, rows)} on rank {rank} after rank "
                f"{before[column]}, but TorchRec puts row shards on ranks in order, whatever the plan says"
            )
        before[column] = rank
        placed.append(rank)
        if rows:
            shards.append(
                Shard(table=table.name, row_offset=row, rows=rows, column_offset=column, dim=columns, device=rank)
            )
    if parameter.ranks and parameter.ranks != placed:
        raise InvalidInput(
            f"table {table.name!r} is sharded {kind} on ranks {shown(parameter.ranks)}, but its shards are placed on ranks "
            f"{shown(placed)}: TorchRec uses one in some places and the other in others"
        )
    return shards


def is_beyond_hbm(parameter: ParameterSharding, host_memory_bytes: int | None) -> bool:
    """Whether a TorchRec plan keeps a table in a tier beyond HBM, for hosts with so much memory for tables; None for none."""
    tier = BY_KERNEL.get(parameter.compute_kernel, IN_HBM)
    return tier.beyond_hbm and (tier.elements != "host" or host_memory_bytes is not None)


def check_held(table: str, parameter: ParameterSharding, *, beyond_hbm: bool) -> list[str]:
    """What a TorchRec plan says of a table that has no effect on it, and is left out. Raises InvalidInput for what a plan of ours
    cannot keep."""
    kept = sharding_named(parameter).kernel
    if parameter.compute_kernel != kept and not beyond_hbm:
        raise InvalidInput(
            f"table {table!r} is {parameter.sharding_type} with compute kernel {parameter.compute_kernel}, and plans hold such "
            f"tables in device memory with {kept} only; set its compute_kernel to {kept!r} to count and train it so, or let "
            "TorchRec's planner choose it (ParameterConstraints, or apply_optimizer_in_backward for fused instead of dense)"
            + "; or say what a host has for tables (host_memory_bytes=)"
            * BY_KERNEL.get(parameter.compute_kernel, IN_HBM).beyond_hbm
        )
    left_out = []
    for field in dataclasses.fields(parameter):
        value = getattr(parameter, field.name)
        kept_fields = (*GEOMETRY, "compute_kernel", *(["cache_params"] if beyond_hbm else []))
        if field.name in kept_fields or value == field.default:
            continue
        if field.name not in OF_CACHES:
            elsewhere = ", and say it in the sharders' fused_params" if field.name in OF_THE_OPERATOR else ""
            raise InvalidInput(
                f"table {table!r} has {field.name}={shown(value)} in the sharding plan, which plans do not keep; set it to "
                f"None{elsewhere}"
            )
        left_out.append(field.name)
    return left_out
