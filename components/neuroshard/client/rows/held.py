"""A model whose tables are held by access as a plan says. Needs torch and torchrec."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from neuroshard.client.model.tables import check_module, collections_of, match_tables
from neuroshard.client.rows.collection import CollectionByAccess, TableRows
from neuroshard.client.rows.map import Part
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.parts import COLD, HOT, part_names
from neuroshard.core.plan import Plan, check_plan
from neuroshard.core.table import Table
from neuroshard.core.value import sha256, shown
from neuroshard.files.row_orders import bytes_of_ids

__all__ = ["by_access"]

M = TypeVar("M", bound=nn.Module)


def by_access(model: M, plan: Plan, hot_ids: Mapping[str, "np.ndarray[Any, Any] | Tensor"]) -> M:
    """The model with a CollectionByAccess in place of each collection that has tables which the plan deals, or holds in two
    parts. Call it before `to_torchrec`, and give DistributedModelParallel a CollectionByAccessSharder.

    `hot_ids` are the listed ids of the row order of each such table, by its name in the plan (client/rows/lists.py reads them
    from the store); none are needed where the order lists 0, 1, 2, …. Without such tables the model is returned as it is.

    Raises InvalidInput for a model that by_access has returned before, and, with the table's name, for a list that is missing or
    another's, and for a table whose collection a feature processor feeds: it makes weights of places in the whole list of a
    sample, which parts do not have.
    """
    check_plan(plan)
    check_module(model)
    if not isinstance(hot_ids or {}, Mapping):
        raise UsageError(
            f"hot_ids is {shown(hot_ids)}; give a dict of lists by the names of tables, as hot_ids(plan, …) returns"
        )
    whose = f"plan {plan.digest()[:12]}"
    for path, module in model.named_modules():
        if isinstance(module, CollectionByAccess):
            raise InvalidInput(
                f"module {path!r} has tables held by access already; call by_access once, with the model as it was, for {whose}"
            )
    held = rows_of(plan, hot_ids or {}, whose)
    if not held:
        return model
    places = match_tables(plan.task.tables, collections_of(model), whose)
    by_path: dict[str, dict[str, TableRows]] = {}
    for name, rows in held.items():
        by_path.setdefault(places[name].path, {})[places[name].config.name] = rows
    wrapped: dict[str, Any] = {}
    for path, tables in by_path.items():
        collection: Any = model.get_submodule(path)
        if hasattr(collection, "_feature_processors"):
            raise InvalidInput(
                f"table {next(iter(tables))!r} of module {path!r} has feature processors, which weigh a sample's lookups by "
                f"their places in all of them: it cannot be held by access, as {whose} has it"
            )
        wrapped[path] = CollectionByAccess(collection, tables)
    for path, module in wrapped.items():  # once nothing can be refused any more
        if not path:
            return cast(M, module)
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = module
    return model


def rows_of(
    plan: Plan, hot_ids: Mapping[str, "np.ndarray[Any, Any] | Tensor"] | None, whose: str
) -> dict[str, TableRows]:
    """How the plan holds each table that it holds by access; without `hot_ids`, no lists are asked for."""
    tables = {table.name: table for table in plan.task.tables}
    held = {}
    for name, by in plan.held.constraints.rows_by_access.items():
        table = tables[name]
        if by.hot_rows is None:
            parts: tuple[Part, ...] = (Part("dealt", 0, table.rows, _blocks(plan, name)),)
        else:
            hot, cold = part_names(name)
            copied = hot in plan.parted.constraints.data_parallel
            parts = (
                Part(HOT, 0, by.hot_rows, 1 if copied else _blocks(plan, hot), copied),
                Part(COLD, by.hot_rows, table.rows - by.hot_rows, _blocks(plan, cold)),
            )
        digest = table.row_order.ids_digest if table.row_order else ""
        ids = None if hot_ids is None else _ids(table, hot_ids, whose)
        held[name] = TableRows(parts, None if ids is None else ids[: by.hot_rows], digest)
    return held


def check_by_access(model: nn.Module, plan: Plan, whose: str) -> Plan:
    """The plan of the tables that TorchRec shards: parts in place of tables held in two, without hot parts that are copied.

    Raises InvalidInput, which names the table, where the model's tables are held otherwise than the plan says.
    """
    check_module(model)
    there = {
        (path, table): rows
        for path, module in model.named_modules()
        if isinstance(module, CollectionByAccess)
        for table, rows in module.rows.held.items()
    }
    held, tables = rows_of(plan, None, whose), {table.name: table for table in plan.task.tables}
    for name, rows in held.items():
        table, module = tables[name].name_in_module, tables[name].module
        same = [key for key in there if key[1] == table]
        own = there.pop(same[0] if len(same) == 1 else (module or "", table), None)
        if own is None or (own.parts, own.ids_digest) != (rows.parts, rows.ids_digest):
            how = "not" if own is None else f"in {own.parts} by order {own.ids_digest[:8] or 'sorted'}"
            raise InvalidInput(
                f"table {name!r} is held by access in {whose}, and in the model {how}; give to_torchrec what "
                "by_access(model, plan, hot_ids) returns (client/rows/held.py)"
            )
    if there:
        path, table = next(iter(there))
        raise InvalidInput(
            f"table {table!r} of module {path!r} is held by access in the model, and not in {whose}; give the model as it was"
        )
    if not held:
        return plan.named
    task = plan.parted
    copied = plan.held.by_access.hot & task.constraints.data_parallel
    task = task.model_copy(update={"tables": tuple(table for table in task.tables if table.name not in copied)})
    return plan.named.model_copy(
        update={"task": task, "shards": tuple(s for s in plan.shards if s.table not in copied)}
    )


def _blocks(plan: Plan, name: str) -> int:
    return len({shard.row_offset for shard in plan.by_table()[name]})


def _ids(table: Table, hot_ids: Mapping[str, "np.ndarray[Any, Any] | Tensor"], whose: str) -> Tensor | None:
    order = table.row_order
    if order is None or not order.ids_digest:
        return None
    if (given := hot_ids.get(table.name)) is None:
        raise InvalidInput(
            f"table {table.name!r} is held by access in {whose}, and there is no list of its hot ids; give "
            f"hot_ids[{table.name!r}]"
        )
    on_meta = isinstance(given, Tensor) and given.is_meta
    ids = (
        given.numpy(force=True) if isinstance(given, Tensor) and not on_meta else np.asarray(None if on_meta else given)
    )
    is_list = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) == order.hot_rows
    if not is_list or sha256(bytes_of_ids(ids)) != order.ids_digest:
        raise InvalidInput(
            f"table {table.name!r} has the row order {order.ids_digest[:12]} of {order.hot_rows:,} ids in {whose}, which "
            f"hot_ids[{table.name!r}] is not: {shown(given)}; give what hot_ids(plan, …) reads (client/rows/lists.py)"
        )
    return torch.from_numpy(ids.astype(np.int64))
