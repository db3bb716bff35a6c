"""Tables that are cut into equal column shards: those wider than the operator of the plan's device holds in one shard
(core/operator_limits.py), and sequences.

TorchRec takes all column shards of a table on a rank to be equally wide (client/torchrec/shards.py), and those of a collection's
sequences on all ranks (1.8: `_local_embedding_dim`). So such a table is searched in equal shards, of which a device may have any
number: each is a unit of its table group. Few wide tables have no equal shards that are wide enough, as 1,028 = 4 x 257: these
are cut anywhere, with one shard a device, if there are devices enough. Sequences are cut into halves, and then all into another
number of equal shards (`cut_sequences.py`).
"""

from dataclasses import dataclass

from neuroshard.core.constraints import Constraints
from neuroshard.core.operator_limits import NARROW_DIM, Device, equal_shards, held, widest_shard
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.costmodel.protocol import CostModel, trains_on

USUAL_DIM = 128  # columns of equal shards, at least, if memory needs no narrower ones
EVEN = 1.1  # the fullest device's shards of a table, as times the mean: more shards, each with its input, gain little below
HALVES = 2
SHARDS_A_DEVICE = 4  # by bytes, at least: with coarser shards, tables that fit together would not find room


def equal_sequence(tables: tuple[Table, ...], task: ShardingTask, most: int) -> int:
    """The equal shards of a table group where sequences are cut into as many as their width has, up to `most`: 1 if it may not be
    cut so; 0 if it is no sequence, or cut into halves."""
    table, constraints = tables[0], task.constraints
    count = max(n for n in range(1, most + 1) if table.dim % (n * DIM_STEP) == 0)
    if table.pooling != "none" or count <= HALVES:
        return 0
    rule = constraints.rules().get(table.name)
    least, allowed = constraints.allowed(rule, table.dim)
    devices = task.devices if rule is None or rule.devices is None else len(rule.devices)
    may_be = table.dim // count >= least and count <= min(devices, allowed or count) and len(tables) == 1
    return count if may_be and constraints.may_use("column-wise") else 1


@dataclass(frozen=True)
class WideTable:
    """How a table wider than `widest` columns is cut: into `shards` equal ones; or, if that is 0, anywhere into shards of at most
    `widest`; or not at all, for the reason `why`."""

    widest: int
    shards: int = 0
    why: str = ""

    @classmethod
    def of(cls, tables: tuple[Table, ...], task: ShardingTask, model: CostModel, *, devices: int) -> "WideTable | None":
        """Of a table group that may be on so many devices; None where the operator holds it whole."""
        device = trains_on(model)
        for table in tables:
            widest = widest_shard(table, device)
            if widest is not None and table.dim > widest:
                return _cut(table, widest, device, task, devices, together=len(tables) > 1)
        return None


def _cut(table: Table, widest: int, device: Device, task: ShardingTask, devices: int, *, together: bool) -> WideTable:
    constraints = task.constraints
    least, most = constraints.allowed(constraints.rules().get(table.name), table.dim)
    fewest = -(-table.dim // widest)
    if together or not constraints.may_use("column-wise") or (most or fewest) < fewest or least * fewest > table.dim:
        why = _why(table, widest, device, together, constraints)
        return WideTable(widest, why=why)
    counts = [count for count in equal_shards(table.dim, widest, least) if count <= (most or count)]
    if shards := _equal_shards(table, counts, task, devices):
        return WideTable(widest, shards=shards)
    held_one_each = min(devices, most or devices) * widest >= table.dim
    if table.pooling != "none" and held_one_each:
        return WideTable(widest)
    return WideTable(widest, why=_why_unequal(table, widest, device, fewest, least, most))


def _equal_shards(table: Table, counts: list[int], task: ShardingTask, devices: int) -> int:
    """Into how many equal shards the table is cut, one of these numbers; 0 if only into very narrow ones.

    The fewest that leave all devices about as much, small enough for memory, and of the usual width if they can be.
    """
    room = max(task.placeable_bytes) // SHARDS_A_DEVICE
    for_memory = -(-table.memory_bytes // max(room, 1))
    enough = [n for n in counts if n >= for_memory] or counts[-1:]
    usual = [n for n in enough if table.dim // n >= USUAL_DIM] or enough[:1]
    if not usual or (table.dim // usual[0] < NARROW_DIM and usual[0] > 2 * for_memory):
        return 0

    def uneven(count: int) -> float:
        """Of as many devices, the shards of the fullest, as times the mean."""
        return -(-count // devices) * devices / count

    return min(usual, key=lambda count: (max(uneven(count), EVEN), count))


def _why(table: Table, widest: int, device: Device, together: bool, constraints: Constraints) -> str:
    """Why no rule lets the table be cut enough, and the way out."""
    rule = constraints.rules().get(table.name)
    least, most = constraints.allowed(rule, table.dim)
    fewest = -(-table.dim // widest)
    if together:
        fault, out = "is kept together with others", "leave it out of that set"
    elif not constraints.may_use("column-wise"):
        fault, out = "may not be cut column-wise", "allow column-wise among the sharding types"
    elif most is not None and most < fewest:
        fault = "may not be cut" if most == 1 else f"may have {counted(most, 'shard')} at most"
        out = f"allow {fewest} shards (leave it out of --never-split, or --max-shards {fewest})"
    else:
        fault, out = f"may have no shard of fewer than {least} columns", f"allow shards of {widest // 2} (--min-dim)"
    return f"{_has(table, widest, device)}, and it {fault}: {out}; {_ROWS}"


def _why_unequal(table: Table, widest: int, device: Device, fewest: int, least: int, most: int | None) -> str:
    """Why it has no equal shards that could be on one device, and the way out."""
    unit = fewest * DIM_STEP
    what = "a sequence's shards" if table.pooling == "none" else "shards of a table on one device"
    ruled = f" in at most {counted(most, 'shard')}" if most is not None else ""
    more = "" if table.pooling == "none" else f", or allow it on {fewest} devices and in as many shards"
    return (
        f"{_has(table, widest, device)}, {what} must be equally wide, and {table.dim:,} columns are no multiple of "
        f"{max(least, NARROW_DIM)} to {widest:,}{ruled}: give it {unit * -(-table.dim // unit):,} columns{more}"
    )


_ROWS = "row-wise shards keep all columns, so they do not help"


def _has(table: Table, widest: int, device: Device) -> str:
    return f"table {table.name!r} has {table.dim:,} columns; {held(widest, device)}"
