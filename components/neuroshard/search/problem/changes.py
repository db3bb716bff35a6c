"""What changed in the task since the plan that a search starts from, in words."""

from neuroshard.core.errors import InvalidInput
from neuroshard.core.moves import said_ids_lost
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, first_few


def compare(task_now: ShardingTask, old: Plan) -> tuple[str, ...]:
    """A line for each change since the old plan. Raises InvalidInput where it is for other tables altogether."""
    now, then = ({table.name: table for table in task.tables} for task in (task_now, old.task))
    common = now.keys() & then.keys()
    if not common:
        raise InvalidInput(
            f"the plan to start from is for other tables: it has {next(iter(then))!r}, and not {next(iter(now))!r} nor any other "
            "of these"
        )
    changed = [name for name in now if name in common and now[name].rows != then[name].rows]
    other = [name for name in now if name in common and now[name].dim != then[name].dim]
    new, gone = [name for name in now if name not in then], [name for name in then if name not in now]
    said = (
        (new, "new since the plan to start from, and placed"),
        (gone, "of the plan to start from no longer there, and dropped"),
        (changed, "with other numbers of rows than in the plan to start from"),
        (other, "with other columns than in the plan to start from, and placed anew"),
    )
    notes = [f"{counted(len(names), 'table')} {what} ({first_few(names)})" for names, what in said if names]
    if old.task.devices != task_now.devices:
        notes.append(
            f"the plan to start from is for {counted(old.task.devices, 'device')}, this one for {task_now.devices}"
        )
    if lost := said_ids_lost(old, task_now):
        notes.append(lost)
    return tuple(notes)
