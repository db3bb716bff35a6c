"""Which tables to copy to every device, where HBM does not hold all tables: chosen beside the tiers of a plan, with less cache.

Copies take HBM of every device, which a plan has given to its caches. So they are chosen where the caches of a plan have less,
and tiers are then searched anew beside them.
"""

from neuroshard.core.errors import Infeasible
from neuroshard.core.sharding import DATA_PARALLEL
from neuroshard.core.tiers import Tier
from neuroshard.costmodel.network import for_task
from neuroshard.search.algorithms import find
from neuroshard.search.asked import Asked
from neuroshard.search.infeasible.feasibility import feasible
from neuroshard.search.tiers.division import Tiers, tier_of

ROOM = 0.95  # share of HBM that tables in tiers may take, so that some is left for copies: a guess
SHRUNK = (1.0, 0.75, 0.5, 0.25, 0.0)  # caches of a plan, the first with that room


def worth_copying(asked: Asked, tiers: Tiers) -> frozenset[str]:
    """Those of the tables that may be copied that a search copies where the tables of `tiers` are in them. Others never."""
    task, model, names = asked.permitted, asked.cost_model, asked.may[DATA_PARALLEL]
    everything = {table.name: tiers.get(table.name, ("hbm", None)) for table in task.without_tier}
    hbm = ROOM * sum(task.placeable_bytes)
    shrunk = (task.with_tiers({name: _less(*tier, share) for name, tier in everything.items()}) for share in SHRUNK)
    held = next((one for one in shrunk if one.need_bytes <= hbm), None)
    some = [name for name in names if name in everything and name not in tiers]
    if held is None or not some:
        return frozenset()
    try:
        problem = feasible(held, for_task(model, held), may={DATA_PARALLEL: frozenset(some)})
        found = find(problem, asked).best
    except Infeasible:
        return frozenset()
    return frozenset(name for name, sharding in found.problem.spread_as.items() if sharding.copied)


def _less(tier: Tier, rows: int | None, share: float) -> tuple[Tier, int | None]:
    return (tier, None) if rows is None else tier_of(rows * share)
