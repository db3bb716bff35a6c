"""The live plan of a model, out of a store, checked."""

from collections.abc import Iterable, Mapping

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.store.open import open_store
from neuroshard.store.releases import read_live, read_plan


def load_plan(
    store_url: str, model: str, *, tables: Iterable[Table] | None = None, world_size: int | None = None
) -> Plan:
    """The plan of `model` that is live now in the store at `store_url` (`s3://bucket/prefix`, or a folder). Two reads.

    Its digest, format and every rule of a valid plan are checked; also that it is for exactly `tables` (names, rows, dims)
    and for `world_size` ranks where these are given. Raises NotFound, StoreError, InvalidInput or NewerFormat in one line.
    """
    store = open_store(store_url)
    release = read_live(store, model).release
    plan = read_plan(store, model, release.plan_digest)
    whose = f"plan {release.plan_digest[:12]} of {model!r}"
    if tables is not None:
        check_shapes(plan, {table.name: (table.rows, table.dim) for table in tables}, whose)
    if world_size is not None:
        check_world_size(plan, world_size, whose)
    return plan


def check_shapes(plan: Plan, shapes: Mapping[str, tuple[int, int]], whose: str) -> None:
    """Raise InvalidInput unless the plan is for exactly the tables with these (rows, dim)."""
    planned = {table.name: (table.rows, table.dim) for table in plan.task.tables}
    missing, unknown = (
        [name for name in shapes if name not in planned],
        [name for name in planned if name not in shapes],
    )
    if missing:
        raise InvalidInput(
            f"{whose} lacks table {_some(missing)}, which the model has; search a plan for today's tables"
        )
    if unknown:
        raise InvalidInput(
            f"{whose} has table {_some(unknown)}, which the model lacks; search a plan for today's tables"
        )
    for name, (rows, dim) in shapes.items():
        if planned[name] != (rows, dim):
            raise InvalidInput(
                f"{whose} has table {name!r} with {planned[name][0]:,} rows and dim {planned[name][1]}, but the model has "
                f"{rows:,} rows and dim {dim}; search a plan for today's tables"
            )


def check_world_size(plan: Plan, world_size: int, whose: str) -> None:
    """Raise InvalidInput unless the plan is for `world_size` ranks."""
    if plan.task.devices != world_size:
        raise InvalidInput(
            f"{whose} is for {plan.task.devices} ranks, but the trainer has {world_size}; start {plan.task.devices}, or "
            f"search a plan with --devices {world_size}"
        )


def _some(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
