"""The order in which TorchRec returns the outputs of a module's tables. It follows the plan.

Keys and columns of a sharded collection's output come sharding type by sharding type, in the order in which the collection has
its first table of each; within a type device by device (of rows that are split over hosts, host by host); on a device operator
by operator, in the order of their first tables there; in an operator as the collection has its tables. A table whose columns are
cut comes where its first device does. All features of a table come together (torchrec 1.8: `create_grouped_sharding_infos`
and `_create_output_dist` of embeddingbag.py, `group_tables` of embedding_sharding.py, `_init_combined_embeddings` of
cw_sharding.py).

A module that has tables dealt or in two parts is wrapped (client/rows/): its outputs come as the module has its tables.
tests/client/test_output_order.py compares with real modules.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from neuroshard.core.plan import Plan, sharding_of
from neuroshard.core.sharding import Group
from neuroshard.core.table import Table
from neuroshard.core.text import first_few
from neuroshard.core.value import shown

WAYS_OUT = "read them by key, or call keep_output_order(model)"
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Held(NamedTuple):
    """What decides where a table's outputs come: its sharding type, the devices that hold it, and its operator."""

    table: str
    sharding_type: str
    devices: frozenset[int]
    operator: Hashable


class Reordered(NamedTuple):
    """A module ("" where the tables name none) whose outputs come in another order, and the first tables that differ."""

    module: str
    old: str
    new: str


def order_of(tables: Sequence[Held]) -> tuple[str, ...]:
    """The tables of one collection in the order of their outputs. They come in the order that the collection has them in."""
    found: dict[str, None] = {}
    for of_type in _grouped((held.sharding_type, held) for held in tables).values():
        on_device = _grouped((device, held) for held in of_type for device in held.devices)
        for device in sorted(on_device):
            for together in _grouped((held.operator, held) for held in on_device[device]).values():
                found |= dict.fromkeys(held.table for held in together)
    return tuple(found)


def output_orders(plan: Plan, tables: Sequence[Table] | None = None) -> dict[str, tuple[str, ...]]:
    """The tables of each module, all or these, in the order of their outputs, if the model has them in this order.

    Tables without a module count as one of pooled tables, one of weighted ones and one of sequences.
    """
    shards, task = plan.by_table(), plan.parted
    own, wrapped = {table.name: table for table in task.tables}, plan.held.constraints.rows_by_access

    def held(name: str) -> Held:
        devices = frozenset(shard.device for shard in shards[name])
        group = Group.of(own[name], sharding_of(task, own[name], shards[name]))
        return Held(name, group.sharding.name, devices, own[name].operator_key)

    every = plan.task.tables if tables is None else tables
    collections = _grouped(((t.module, t.module or (t.weighted, t.pooling == "none")), t.name) for t in every)
    found: dict[str, tuple[str, ...]] = {}
    for (module, *_), names in collections.items():
        order = names if wrapped.keys() & set(names) else order_of(list(map(held, names)))
        found[module] = (*found.get(module, ()), *order)
    return found


def reordered(old: Plan, new: Plan) -> tuple[Reordered, ...]:
    """The modules of `new` that return the outputs of the tables of both plans in another order than under `old`.

    Both orders are those of a model that has its tables as the task of `new` has them.
    """
    known = {table.name for table in old.task.tables}
    both = [table for table in new.task.tables if table.name in known]
    before, after = output_orders(old, both), output_orders(new, both)
    return tuple(
        Reordered(module, *next(pair for pair in zip(before[module], order, strict=True) if pair[0] != pair[1]))
        for module, order in after.items()
        if order != before[module]
    )


def said_reordered(modules: Sequence[str]) -> str:
    """Which modules `reordered` found, and what to do, for people."""
    named = [shown(module) for module in modules if module]
    whose = f"{'module' if len(named) == 1 else 'modules'} {first_few(named)}" if named else "the model"
    return f"the outputs of {whose} come in another order: {WAYS_OUT}"


def _grouped(pairs: Iterable[tuple[K, V]]) -> Mapping[K, list[V]]:
    """Values by key, in the order of the first of each."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
