"""Shares of one case set, measured on several machines of a kind -> one folder of costs.

neuroshard measure cases/ --share 1/2 -o costs-1/       neuroshard measure cases/ --share 2/2 -o costs-2/
neuroshard merge costs-1/ costs-2/ -o costs/
"""

from collections.abc import Sequence
from pathlib import Path

from neuroshard.core.cost import Costs
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import Table
from neuroshard.files.costs import CostWriter, read_costs, read_manifest
from neuroshard.files.disk import writing_folder


def run(folders: Sequence[Path], out: Path) -> Costs:
    """Write the costs of `folders` into `out`, completely or not at all, and return them.

    As in `read_costs`, all folders have one bench, and a case measured twice gets a further round. Raises UsageError without
    folders, and InvalidInput if benches differ, if one table name means two tables, or if `out` exists already.
    """
    if not folders:
        raise UsageError("name at least one folder of costs")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"{out}: exists already; give another -o")
    tables = _one_of_each_name(folders)
    costs = read_costs(*folders)
    with writing_folder(out) as unfinished, CostWriter(unfinished, costs.bench, tables, costs.device_counts) as writer:
        for compute_case, compute_cost in costs.compute:
            writer.add_compute(compute_case, compute_cost)
        for collective_case, collective_cost in costs.collective:
            writer.add_collective(collective_case, collective_cost)
        for tier_case, tier_cost in costs.tiers:
            writer.add_tier(tier_case, tier_cost)
    return costs


def _one_of_each_name(folders: Sequence[Path]) -> tuple[Table, ...]:
    """The base tables of all folders. Raises InvalidInput if two of one name differ, as rows of costs hold only the name."""
    tables: dict[str, tuple[Table, Path]] = {}
    for folder in folders:
        for table in read_manifest(folder).tables:
            known, where = tables.setdefault(table.name, (table, folder))
            if known != table:
                raise InvalidInput(
                    f"{folder}: its table {table.name!r} differs from that of {where}; merge costs of one tables.json only"
                )
    return tuple(table for table, _ in tables.values())
