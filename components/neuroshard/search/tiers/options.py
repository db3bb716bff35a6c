"""The options of table groups where HBM does not hold all tables, as problems, and plans whose HBM is divided."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Shard
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import WAYS
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.search.infeasible.feasibility import feasible
from neuroshard.search.problem.kinds import MayHold
from neuroshard.search.problem.layout import lay_out
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.division import Tiers, divided
from neuroshard.search.tiers.points import PartPoints
from neuroshard.search.tiers.sides import ThreeProblems

# The first options of a table group: in HBM; beyond it, with as many cached rows as its device has room for
WHOLE, DIVIDED = 0, 1
LEVELS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)  # shares of cached rows of large tables, an option each: a guess
CUT_FROM = 0.5  # share of a device's mean ms from which a table beyond HBM may be cut: a guess


@dataclass(frozen=True)
class InTierPlan:
    """A plan of table groups with these options (G,), its shards, the tiers of its tables, and what it costs in ms."""

    state: State
    choice: Ints
    shards: tuple[Shard, ...]
    tiers: Tiers
    cost: float


class TierProblems:
    """A task as problems that share all but bytes and prices: in `anywhere` a table may be in any tier; in `options` all are in
    HBM (WHOLE), all beyond it and not cut (DIVIDED), or have one share of their rows cached, of LEVELS.

    A table beyond HBM has one load factor, for which the fullest of its devices must have room, and each of its column shards
    has all of its lookups. So only `large` ones may be cut, and then what they cache is chosen beforehand.
    """

    def __init__(self, task: ShardingTask, model: CostModel, prices: Floats, points: PartPoints, may: MayHold) -> None:
        hbm, names = task.placeable_bytes, [table.name for table in task.placed]
        if len(set(hbm)) > 1:
            raise UsageError(
                "devices have different memory for tables: beyond HBM all must have as much; say one --memory for all"
            )
        self.task, self.cost_model, self.prices, self.points = task, model, prices, points
        in_host = task.with_tiers(dict.fromkeys(names, ("host", None)))

        def dividing(**given: Any) -> CostModel:
            return cast(CostModel, Divided(model, hbm[0], prices, points, **given))

        self.anywhere = feasible(in_host, dividing(), may=may)
        self.anywhere.price(np.arange(len(self.anywhere.group)))
        whole = Problem(task, dividing(whole=names), may=may)
        outside = Problem(in_host, dividing(beyond=names), may=may)
        self.large = outside.alone_ms(outside.whole) >= CUT_FROM * self.mean_ms
        self.wide = (outside.operator_units < outside.all_units) | outside.in_equal_shards
        self.large |= self.wide
        self.options = [whole, outside]
        if self.large.any():
            some = [tables[0] for tables, is_large in zip(outside.tables, self.large, strict=True) if is_large]
            for share in LEVELS:
                rows = {table.name: int(share * table.rows) // WAYS * WAYS for table in some}
                held = {name: ("cached" if count else "host", count or None) for name, count in rows.items()}
                in_level = in_host.with_tiers(cast(Any, held))
                self.options.append(Problem(in_level, dividing(beyond=names, cached=rows), may=may))
        for number, problem in enumerate(self.options):
            wanted = self.large[problem.group] | (number <= DIVIDED)  # only large groups have levels
            problem.price(np.flatnonzero(wanted))

    @property
    def sides(self) -> ThreeProblems:
        """Those of which the bound is made."""
        return ThreeProblems(self.anywhere, self.options[WHOLE], self.options[DIVIDED])

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
        shards, groups = lay_out(state), zip(self.anywhere.tables, choice.tolist(), strict=True)
        held = {tables[0].name: number for tables, number in groups if number != WHOLE}
        cached = {}
        for name, number in held.items():
            if number != DIVIDED:
                rule = self.options[number].task.constraints.beyond_hbm[name]
                cached[name] = rule.tier, rule.cached_rows
        tiers = divided(self.task, shards, held, cached, self.points)
        prices = price_shards(self.cost_model, self.task.with_tiers(tiers), shards)
        assert prices is not None
        return InTierPlan(state, choice, shards, tiers, float(prices.total_ms.max()))

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
    return found
