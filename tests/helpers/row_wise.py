"""A task for which row-wise tables are worth it, and which tables of a plan are split so."""

from neuroshard.core.plan import Plan

HEAVY = [(100_000, 16, 2000.0), *[(1000, 16, 5.0)] * 12]  # the first outweighs all else, however its columns are cut


def split(plan: Plan) -> set[str]:
    """Tables with shards of some rows."""
    rows = {table.name: table.rows for table in plan.task.tables}
    return {shard.table for shard in plan.shards if shard.rows < rows[shard.table]}
