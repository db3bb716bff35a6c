"""Tables that give rows to ids as they train, which a plan has in one way only: row-wise over all devices."""

from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.operator_limits import Device, held, widest_shard
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.protocol import CostModel


def check_mapped(task: ShardingTask, model: CostModel, device: Device) -> None:
    """Raise Infeasible where the blocks of such tables do not fit a device, or its operator, UsageError if the model prices no
    rows."""
    if not task.mapped:
        return
    if not model.prices_rows:
        raise UsageError(
            f"table {task.mapped[0].name!r} gives rows to ids as it trains, so it is row-wise over all devices, and given costs "
            "are of whole tables; take a cost model that prices rows (measured, or analytic:DEVICE)"
        )
    for table in task.mapped:
        most = widest_shard(table, device)
        if most is not None and table.dim > most:
            raise Infeasible(
                f"table {table.name!r} gives rows to ids as it trains and has {table.dim:,} columns, all of them in each block "
                f"of rows; {held(most, device)}: give it fewer"
            )
    for place, (taken, usable) in enumerate(zip(task.mapped_bytes, task.usable_bytes, strict=True)):
        if taken > usable - task.by_access.map_bytes:
            raise Infeasible(
                f"the blocks of {counted(len(task.mapped), 'table')} that give rows to ids as they train need "
                f"{format_bytes(taken, 'up')} on device {place}, which has {format_bytes(usable)}; give them fewer rows, or take "
                "more devices"
            )


def check_room(task: ShardingTask) -> None:
    """Raise Infeasible where the blocks and copies of such a task do not fit a device."""
    copies = task.copies_bytes
    for place, (blocks, usable) in enumerate(zip(task.mapped_bytes, task.usable_bytes, strict=True)):
        if blocks + copies > usable - task.by_access.map_bytes:
            raise Infeasible(
                f"the blocks of {counted(len(task.mapped), 'table')} that give rows to ids as they train need "
                f"{format_bytes(blocks, 'up')} on device {place}, and the copies of "
                f"{counted(len(task.copied), 'data-parallel table')} {format_bytes(copies, 'up')}, but it has "
                f"{format_bytes(usable)}; let fewer be data-parallel, or take more devices"
            )
