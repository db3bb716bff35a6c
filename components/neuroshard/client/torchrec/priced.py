"""A plan as a trainer runs it: what the checks and warnings of this room look at. Needs torch and torchrec."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torchrec.distributed.types import ModuleSharder

from neuroshard.client.model.tables import Collection, TablePlace
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.sharding import Sharding
from neuroshard.core.table import Table


def cached(plan: Plan) -> list[str]:
    """The tables of a plan that are cached."""
    return [name for name, rule in plan.held.constraints.beyond_hbm.items() if rule.in_tier.cached]


class InBackward(NamedTuple):
    """What apply_optimizer_in_backward has put on a parameter."""

    optimizer: str
    settings: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        settings = ", ".join(map("=".join, self.settings))
        return f"{self.optimizer} ({settings})" if settings else self.optimizer


class Priced(NamedTuple):
    """A plan as TorchRec will run it. What is not by path in the model is by table; the last four are what is known."""

    plan: Plan
    whose: str  # what messages call it
    module: nn.Module  # the whole model
    collections: Mapping[str, Collection]  # by path
    places: Mapping[str, TablePlace]
    shards: Mapping[str, list[Shard]]  # in TorchRec's order
    kinds: Mapping[str, Sharding]
    device_type: str
    by_path: Mapping[str, ModuleSharder[nn.Module]] = MappingProxyType({})
    applied: Mapping[str, InBackward] = MappingProxyType({})
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # of fused operators
    optimizers: Mapping[str, str] = MappingProxyType({})

    @property
    def fused(self) -> list[str]:
        """Tables that a fused operator trains."""
        return [name for name, kind in self.kinds.items() if not kind.copied]

    @property
    def copied(self) -> list[str]:
        """Tables of which every rank has a copy, which the dense optimizer trains."""
        return [name for name, kind in self.kinds.items() if kind.copied]

    def where(self, names: Iterable[str]) -> list[str]:
        """What messages call these tables."""
        return [self.places[name].where for name in names]

    @property
    def own_operator(self) -> list[str]:
        """Tables that share an operator with no other, since they are cached."""
        return cached(self.plan)

    def busiest(self, names: Iterable[str], amount: Callable[[Table, Shard], float]) -> tuple[int, int]:
        """The rank that has most of something, and how much, if each shard of the named tables has this amount of it."""
        of_rank, tables = [0.0] * self.plan.task.devices, {table.name: table for table in self.plan.task.tables}
        for name in names:
            for shard in self.shards[name]:
                of_rank[shard.device] += amount(tables[name], shard)
        most = max(of_rank)
        return of_rank.index(most), round(most)

    def output_bytes(self, table: Table, shard: Shard) -> float:
        """Bytes of a shard's outputs in a step, in fp32."""
        return self.plan.task.batch_size * Part(table, shard.rows, shard.dim).sent_columns * 4
