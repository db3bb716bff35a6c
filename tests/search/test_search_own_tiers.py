"""Tiers that constraints name are obeyed; and host memory changes nothing where HBM holds all tables."""

from typing import Any

import pytest

from helpers.refusals import refused
from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import Infeasible
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import Tier
from neuroshard.costmodel.analytic import Analytic
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

MIB = 2**20
TABLES = tuple(
    Table(name=f"t{n}", rows=100_000 * (n + 1), dim=64, pooling_factor=5.0) for n in range(5)
)  # 24 to 122 MiB


def task(memory: int = 256 * MIB, devices: int = 2, host: int | None = 2**40, **fields: Any) -> ShardingTask:
    return ShardingTask(
        tables=TABLES, device_memory_bytes=(memory,) * devices, batch_size=4096, host_memory_bytes=host, **fields
    )


def planned(asked: ShardingTask, **settings: Any) -> Plan:
    return search(asked, Analytic("h100", asked.batch_size), SearchSettings(rounds=2, **settings))


def tiers(plan: Plan) -> dict[str, tuple[Any, Any]]:
    return {name: (rule.tier, rule.cached_rows) for name, rule in plan.held.constraints.beyond_hbm.items()}


def test_host_memory_changes_no_plan_of_tables_that_hbm_holds() -> None:
    without, with_host = planned(task(host=None)), planned(task())
    same = with_host.model_dump(exclude={"task", "task_digest", "format_version"})
    assert same == without.model_dump(exclude={"task", "task_digest", "format_version"})
    assert with_host.task.model_copy(update={"host_memory_bytes": None}) == without.task
    assert not tiers(with_host)


@pytest.mark.parametrize("algorithm", ["local-search", "size", "neuroshard-2023"])
def test_a_tier_that_a_rule_names_is_obeyed(algorithm: str) -> None:
    named: dict[str, tuple[Tier | None, int | None]] = {
        "t4": ("host", None),
        "t3": ("cached", 4096),
        "t0": ("hbm", None),
    }
    plan = planned(task().with_tiers(named), algorithm=algorithm)
    assert tiers(plan) == {"t4": ("host", None), "t3": ("cached", 4096)}
    assert any("2 tables of 5 beyond HBM: 1 cached, 1 in host memory" in note for note in plan.provenance.notes)
    assert plan.format_version == 2


def test_hosts_without_room_for_named_tiers_are_refused() -> None:
    with refused(Infeasible, "host 0", "has 1.0 MiB", "--host-memory"):
        planned(task(host=MIB).with_tiers({"t4": ("host", None)}))


def test_tables_that_hbm_has_bytes_for_but_no_packing_are_planned_in_tiers() -> None:
    whole = Constraints(max_shards=1)
    asked = task(memory=186 * MIB, constraints=whole)  # 366 MiB of 372, and no two tables of the five make half of it
    plan = planned(asked)
    assert tiers(plan)
    with refused(Infeasible, "no packing exists"):
        planned(asked.model_copy(update={"host_memory_bytes": None}))


def test_host_memory_is_a_hint_where_it_would_help() -> None:
    hint = "or let tables lie in host memory (--host-memory SIZE)"
    with refused(Infeasible, "short", hint):
        planned(task(memory=64 * MIB, host=None))
    assert tiers(planned(task(memory=64 * MIB)))
    state = tuple(table.model_copy(update={"optimizer_bytes_per_row": 1000}) for table in TABLES)  # stays in HBM
    for asked in (task(memory=64 * MIB, host=None).model_copy(update={"tables": state}), task(memory=MIB)):
        with pytest.raises(Infeasible) as caught:
            planned(asked)
        assert hint not in str(caught.value)


def test_what_tables_need_of_hbm_in_host_memory_is_said_to_be_that() -> None:
    with refused(Infeasible, "tables, all of them beyond HBM, need", "short"):
        planned(task(memory=MIB))
