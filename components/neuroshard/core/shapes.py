"""Whether a plan is for the tables of a model: the check that the gate and the trainers share."""

from collections.abc import Iterable, Mapping

from neuroshard.core.plan import Plan
from neuroshard.core.table import Table

Shapes = Mapping[str, tuple[int, int]]  # name -> rows, dim


def shapes_of(tables: Iterable[Table]) -> dict[str, tuple[int, int]]:
    return {table.name: (table.rows, table.dim) for table in tables}


def shape_fault(plan: Plan, shapes: Shapes) -> str | None:
    """Why the plan is not for exactly these tables: "lacks table 'a', which the model has"; None if it is."""
    return difference(shapes_of(plan.task.tables), shapes)


def difference(planned: Shapes, shapes: Shapes) -> str | None:
    """The same of a plan's tables by their shapes."""
    missing = [name for name in shapes if name not in planned]
    unknown = [name for name in planned if name not in shapes]
    if missing:
        return f"lacks table {_some(missing)}, which the model has"
    if unknown:
        return f"has table {_some(unknown)}, which the model lacks"
    for name, (rows, dim) in shapes.items():
        if planned[name] != (rows, dim):
            return (
                f"has table {name!r} with {planned[name][0]:,} rows and dim {planned[name][1]}, but the model has "
                f"{rows:,} rows and dim {dim}"
            )
    return None


def _some(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
