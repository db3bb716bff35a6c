"""Where HBM does not hold all tables: a problem for each way in which table groups may be held, and plans in tiers.

A search places tables whose options were chosen (`TierProblems.of`). What it finds becomes a plan once each device has divided
its HBM among its caches (`TierProblems.found`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.search.asked import Asked
from neuroshard.search.infeasible.feasibility import feasible
from neuroshard.search.problem.layout import lay_out
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.division import Tiers, divided, tier_of
from neuroshard.search.tiers.hosts import HostPrices, InShares, bytes_over
from neuroshard.search.tiers.points import PartPoints
from neuroshard.search.tuning import TUNING
from neuroshard.search.watch import Watch

Flags = NDArray[np.bool_]

# The first options of a table group: in HBM; beyond it, with as many cached rows as its device has room for
WHOLE, DIVIDED = 0, 1
LEVELS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)  # shares of cached rows of large tables, an option each: a guess
# Searches in tiers have few rounds, each to its end: else plans of 8 tasks of 500 tables on 64 devices cost 1.7 % more
TO_THE_END = replace(TUNING, finish_within=np.inf)
CUT_FROM = 0.5  # share of a device's mean ms from which a table beyond HBM may be cut: a guess


@dataclass(frozen=True)
class InTierPlan:
    """A plan of table groups with these options (G,), its shards, the tiers of its tables, and what it costs in ms, without end
    where HBM has no room for it. It needs `over` bytes more of hosts than there are."""

    state: State
    choice: Ints
    shards: tuple[Shard, ...]
    tiers: Tiers
    cost: float
    over: int = 0

    @property
    def rank(self) -> tuple[int, float]:
        """By which plans are compared: first they must fit."""
        return self.over, self.cost


class TierProblems:
    """A task as problems that share all but bytes and prices: in `anywhere` a table may be in any tier; in `options` all are in
    HBM (WHOLE), all beyond it and not cut (DIVIDED), or have one share of their rows cached, of LEVELS.

    Tables whose tier a rule names are there in all of them; of table groups with others the tier is `chosen` (G,).

    A table beyond HBM has one load factor, for which the fullest of its devices must have room, and each of its column shards
    has all of its lookups. So only `large` (G,) ones may be cut, and then what they cache is chosen beforehand: one of LEVELS.
    Those `wide` (G,) are cut whatever the plan, so beyond HBM they are never DIVIDED. Those `in_level_only` (G,) are wide, or cut
    in the plan to start from, and so not DIVIDED there.
    """

    def __init__(self, asked: Asked, prices: Floats, points: PartPoints, hosts: HostPrices | None = None) -> None:
        task, may = asked.permitted, asked.may
        self.task, self.cost_model, self.prices, self.points = task, asked.cost_model, prices, points
        self._may, self._hosts, self.kept = may, hosts, asked.kept
        searched, self._pieces = (task, ()) if self.kept is None else (self.kept.task, self.kept.pieces)
        # of whole tables, where those of `points` are of the pieces between kept cuts
        self.of_tables = points if self.kept is None else PartPoints(task, points.model, points.weight)
        names = [table.name for table in searched.without_tier]
        in_host = searched.with_tiers(dict.fromkeys(names, ("host", None)))

        self.anywhere = feasible(in_host, self._dividing(searched), TO_THE_END, may=may, pieces=self._pieces)
        self.anywhere.price(np.arange(len(self.anywhere.group)))
        self.current = asked.placement(self.anywhere)
        self.options = [self._problem(searched, whole=names), self._problem(in_host, beyond=names)]
        self.owner = self._owners()
        self.chosen = np.array([any(t.name in points.tables for t in tables) for tables in self.anywhere.tables])
        self.wide, self.in_level_only, self.large = self._cut()
        self.options += self._in_levels(in_host, names) if self.large.any() else []
        for number, problem in enumerate(self.options):
            wanted = self.large[problem.group] | (number <= DIVIDED)  # only large groups have levels
            problem.price(np.flatnonzero(wanted))
        if self.current is not None and (reserved := self.current.reserved_bytes).any():
            self.anywhere, *self.options = (one.with_less_memory(reserved) for one in (self.anywhere, *self.options))
        hbm = task.placeable_bytes
        if len(set(hbm)) > 1:  # a device with less holds, as it were, what it lacks
            lacks = np.zeros((task.devices, self.anywhere.vectors.shape[1]))
            lacks[:, -len(prices) :] = np.subtract(max(hbm), hbm)[:, None] * prices
            self.anywhere, *self.options = (one.with_base(lacks) for one in (self.anywhere, *self.options))

    def _problem(self, task: ShardingTask, **given: Any) -> Problem:
        return Problem(task, self._dividing(task, **given), TO_THE_END, may=self._may, pieces=self._pieces)

    def _dividing(self, task: ShardingTask, **given: Any) -> CostModel:
        """The model of devices that divide their HBM, with what is `given` of tables to `Divided`."""
        inner: CostModel = self.points.model
        if self._hosts is not None:
            inner = cast(CostModel, InShares(inner, task, self._hosts))
        hbm = max(self.task.placeable_bytes)
        return cast(CostModel, Divided(inner, hbm, self.prices, self.points, **given))

    def _cut(self) -> tuple[Flags, Flags, Flags]:
        """`wide`, `in_level_only` and `large`: see the class."""
        outside = self.options[DIVIDED]
        wide = (outside.operator_units < outside.all_units) | outside.in_equal_shards
        wide |= np.bincount(self.owner)[self.owner] > 1
        in_level_only = wide.copy()
        if self.current is not None:
            in_level_only |= np.count_nonzero(self.current.widths(), axis=1) > 1
        large = outside.alone_ms(outside.whole) >= CUT_FROM * self.mean_ms
        return wide, in_level_only, (large | in_level_only) & self.chosen

    def _in_levels(self, in_host: ShardingTask, names: Sequence[str]) -> list[Problem]:
        """The problems in which large tables have one of the LEVELS of their rows cached."""
        groups = (tables for tables, large in zip(self.anywhere.tables, self.large, strict=True) if large)
        some = [table for tables in groups for table in tables if table.name in self.points.tables]
        found = []
        for share in LEVELS:
            tiers = {table.name: tier_of(share * table.rows) for table in some}
            cached = {name: rows or 0 for name, (_, rows) in tiers.items()}
            found.append(self._problem(in_host.with_tiers(tiers), beyond=names, cached=cached))
        return found

    def _owners(self) -> Ints:
        """A number for each table group (G,), the same for pieces of a table whose cuts are kept: a table has one tier."""
        owners = [self.table_of(tables[0].name) for tables in self.anywhere.tables]
        return np.unique(owners, return_inverse=True)[1]

    def table_of(self, name: str) -> str:
        """The task's table of this name; where cuts are kept, the one whose piece has it."""
        return name if self.kept is None else self.kept.table_of(name)

    def of_owner(self, of_groups: Floats) -> Floats:
        """What is of each table group, summed up over all that have its owner: (O, G)."""
        if len(self.owner) > self.owner.max(initial=0) + 1:
            of_groups = np.stack([np.bincount(self.owner, one)[self.owner] for one in of_groups])
        return of_groups

    @property
    def notes(self) -> tuple[str, ...]:
        """What changed since the plan to start from, and what is kept of it."""
        changed = () if self.current is None else self.current.notes
        return changed if self.kept is None else (*changed, self.kept.note)

    @property
    def sides(self) -> tuple[Problem, ...]:
        """Those of which the bound is made."""
        return self.anywhere, self.options[WHOLE], self.options[DIVIDED]

    def of(self, choice: Ints) -> Problem:
        """The problem in which each table group has its choice of the options (G,)."""
        problem = self.options[DIVIDED]
        for number in np.unique(choice).tolist():
            if number != DIVIDED:
                problem = problem.with_options_of(self.options[number], choice == number)
        return problem.uncut_groups(choice == DIVIDED)

    @cached_property
    def mean_ms(self) -> float:
        """What a device takes if all tables are spread evenly over all, in any tier."""
        vectors = self.anywhere.vectors[self.anywhere.whole]
        return float(self.anywhere.model.compute_ms(vectors.sum(axis=0) / self.anywhere.devices))

    def in_tiers(self, state: State, choice: Ints) -> InTierPlan:
        """A plan with its HBM divided, as it is then priced."""
        shards = lay_out(state, self.current)
        if self.kept is not None:
            shards = self.kept.shards(shards)
        groups = zip(self.anywhere.tables, choice.tolist(), strict=True)
        some = [(t.name, number) for tables, number in groups for t in tables if t.name in self.points.tables]
        beyond = {self.table_of(name) for name, number in some if number != WHOLE}
        model = cast(Divided, state.problem.model)
        busy_ms = state.ready - model.terms_ms(state.sums[:, -model.terms :])
        names = [table.name for table in self.task.tables if table.name in beyond]
        tiers, fits = divided(self.task, shards, names, self.of_tables, busy_ms)
        planned = self.task.with_tiers(tiers)
        prices = price_shards(self.cost_model, planned, shards)
        assert prices is not None
        over = bytes_over(planned, shards) if self.hosts_are_short else 0
        cost = float(prices.total_ms.max()) if fits else np.inf
        return InTierPlan(state, choice, shards, tiers, cost, over)

    def found(self, state: State, choice: Ints, watch: Watch, within: Watch) -> InTierPlan:
        """`in_tiers` of what a search `within` found, which the `watch` notes."""
        plan = self.in_tiers(state, choice)
        if not plan.over:
            watch.note(plan.cost, within.steps)
        return plan

    @property
    def hosts_are_short(self) -> bool:
        """Whether a host has too little memory for all tables."""
        return float(self.host_bytes.max(axis=0).sum()) > (self.task.host_memory_bytes or 0)

    @cached_property
    def host_bytes(self) -> Floats:
        """Host memory that each table group needs, by option: (O, G)."""

        def of_tables(task: ShardingTask, tables: Sequence[Table]) -> int:
            return sum(memory.host for memory in task.memories(list(map(Part.of, tables))))

        found = [[of_tables(problem.task, tables) for tables in problem.tables] for problem in self.options]
        return np.array(found, dtype=np.float64)

    @cached_property
    def need_bytes(self) -> Floats:
        """HBM that each table group needs, uncut, by option: (O, G)."""
        return np.array([problem.nbytes[problem.whole] for problem in self.options], dtype=np.float64)


def linear_ms(problems: TierProblems, state: State, slope: Floats) -> Floats:
    """What each table group of a plan takes by the slopes of its devices (D, K), in every option: (O, G)."""
    groups, devices = np.nonzero(state.widths)
    shards = state.problem.first[groups] + state.widths[groups, devices]
    found = np.zeros((len(problems.options), len(state.widths)))
    spread = list(zip(state.problem.spread, state.problem.places, strict=True))
    for number, problem in enumerate(problems.options):
        np.add.at(found[number], groups, np.einsum("sk,sk->s", problem.vectors[shards], slope[devices]))
        for group, place in spread:
            vectors = problem.options.load(np.array([group]), np.array([place])).vectors
            found[number, group] = float((vectors * slope).sum())
    return problems.of_owner(found)
