"""Tables that every device holds: copies, and row blocks of tables that give rows to ids as they train. Which may be copies, what
they need, and what a plan says of them."""

from collections.abc import Collection

from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.operator_limits import Device, held, widest_shard
from neuroshard.core.plan import Plan
from neuroshard.core.table import DenseOptimizer
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.pricing import copies_ms
from neuroshard.costmodel.protocol import CostModel

STAY = "data-parallel tables stay so, and no others become so"
ASSUMED: DenseOptimizer = "adam"  # of the usual dense optimizers the one with most state


def with_dense_optimizer(task: ShardingTask) -> ShardingTask:
    """The task with a dense optimizer: the ASSUMED one where it names none."""
    return task.model_copy(update={"dense_optimizer": task.dense_optimizer or ASSUMED})


def check_copies(task: ShardingTask, device: Device, *, assumed: bool) -> None:
    """Raise Infeasible where the data-parallel tables of a task, whose dense optimizer may be `assumed`, need more than a device
    has, are all tables, or are wider than the operator of the device holds, which has all columns of a copy."""
    tables, taken = task.copied, task.copies_bytes
    for table in tables:
        most = widest_shard(table, device, copied=True)
        if most is not None and table.dim > most:
            raise Infeasible(
                f"table {table.name!r} is data-parallel and has {table.dim:,} columns, all of them in a copy; "
                f"{held(most, device)}: leave it out of the data-parallel tables, so that it is cut"
            )
    left = [usable - task.by_access.map_bytes for usable in task.usable_bytes]
    short = next((d for d, usable in enumerate(left) if tables and usable <= taken), None)
    if short is not None:
        raise Infeasible(
            f"the copies of {counted(len(tables), 'data-parallel table')} need {format_bytes(taken, 'up')} on every device, "
            f"{_memory_as(task, assumed=assumed)}, and device {short} has {format_bytes(max(left[short], 0))}; let fewer be "
            "data-parallel"
        )
    if len(tables) == len(task.tables):
        raise Infeasible("every table is data-parallel: there is nothing to place; leave one out")


def _memory_as(task: ShardingTask, *, assumed: bool) -> str:
    said = " (assumed; --dense-optimizer says another)" * assumed
    return f"with gradients and the state of {task.dense_optimizer}{said}"


def may_be_copied(task: ShardingTask, stay: Collection[str], device: Device) -> frozenset[str]:
    """Names of tables without a rule that are no sequences, need not `stay` sharded and are not too wide; none if the pipeline
    cannot train them."""
    if not task.trains_copies:
        return frozenset()
    constraints = task.constraints
    ruled = {*stay, *constraints.rules(), *(name for group in constraints.together for name in group)}
    return frozenset(
        table.name
        for table in task.tables
        if table.name not in ruled
        and table.pooling != "none"
        and table.id_map is None
        and table.dim <= (widest_shard(table, device, copied=True) or table.dim)
    )


def copies_note(plan: Plan, model: CostModel, *, assumed: bool) -> str:
    """A line about the data-parallel tables of a plan that a dense optimizer, which may be `assumed`, trains."""
    task, tables = plan.task, plan.task.densely_trained
    names = first_few([table.name for table in tables])
    return (
        f"{counted(len(tables), 'table')} data-parallel ({names}): their gradients are dense and summed up over all "
        f"devices ({copies_ms(model, tables, task).backward_ms:.3g} ms), and the trainer's dense optimizer trains them; they "
        f"take {format_bytes(task.copies_bytes, 'up')} of every device, {_memory_as(task, assumed=assumed)}"
    )


def check_mapped(task: ShardingTask, model: CostModel, device: Device) -> None:
    """Raise Infeasible where the blocks of such tables do not fit a device, or its operator, and UsageError where the cost model
    prices no rows."""
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
    check_room(task)


def check_room(task: ShardingTask, copies: int = 0) -> None:
    """Raise Infeasible where the blocks of such tables, and so many bytes of copies, do not fit a device."""
    for place, (blocks, usable) in enumerate(zip(task.mapped_bytes, task.usable_bytes, strict=True)):
        if blocks + copies > usable - task.by_access.map_bytes:
            tables = counted(len(task.copied), "data-parallel table")
            beside = f", and the copies of {tables} {format_bytes(copies, 'up')}" if copies else ""
            raise Infeasible(
                f"the blocks of {counted(len(task.mapped), 'table')} that give rows to ids as they train need "
                f"{format_bytes(blocks, 'up')} on device {place}{beside}, and it has {format_bytes(usable)}; "
                f"{'let fewer be data-parallel' if copies else 'give them fewer rows'}, or take more devices"
            )
