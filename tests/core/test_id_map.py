"""Tables that give rows to ids as they train: what a task and a plan may say of them, and what memory counts."""

from collections.abc import Sequence
from typing import Any

import pytest

from helpers.plans import row_wise
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput
from neuroshard.core.groups import Groups
from neuroshard.core.id_map import IdMap
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

MAP = IdMap(kind="mch", bytes_per_row=24, bytes_per_lookup=20.0, bytes_per_rank=1000)
TABLE = Table(name="t", rows=10, dim=8, pooling_factor=3.0, id_map=MAP)


def task(devices: int = 4, table: Table = TABLE, **more: Any) -> dict[str, Any]:
    return {"tables": [table.model_dump()], "device_memory_bytes": [2**20] * devices, "batch_size": 8, **more}


def plan(shards: Sequence[Shard], **more: Any) -> Plan:
    parsed = ShardingTask.parse(task(**more), "the task")
    by = Provenance(neuroshard_version="0", algorithm="by hand")
    return Plan.parse({"task": parsed, "shards": shards, "provenance": by}, "the plan")


def test_a_plan_has_its_rows_on_all_devices_and_counts_the_map_there():
    found = plan(row_wise(TABLE, 4))
    assert found.format_version == 5
    assert Plan.from_json(found.model_dump_json().encode(), "plan.json") == found
    assert [memory.id_map for memory in found.device_memory()] == [
        r * 24 + 3 * 8 // 4 * 20 + 1000 for r in (3, 3, 3, 1)
    ]
    assert Part(TABLE, 3, 8).as_table().id_map is None  # what is measured
    assert plan([Shard(table="t", rows=10, dim=8, device=0)], devices=1).task.mapped == (TABLE,)


@pytest.mark.parametrize(
    ("shards", "devices"),
    [
        ([Shard(table="t", rows=10, dim=8, device=0)], 2),
        ([Shard(table="t", rows=10, dim=4, column_offset=4 * d, device=d) for d in (0, 1)], 2),
        ([Shard(table="t", rows=5, row_offset=5 * d, dim=8, device=1 - d) for d in (0, 1)], 2),
        ([Shard(table="t", rows=r, row_offset=o, dim=8, device=d) for d, (o, r) in enumerate([(0, 4), (4, 6)])], 2),
    ],
)
def test_a_plan_with_its_rows_elsewhere_is_refused(shards, devices):
    with refused(InvalidInput, "'t'", "id_map", "over all 2 devices", "5 each"):
        plan(shards, devices=devices)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        (
            {"devices": 3, "table": {"id_map": {"kind": "mpzch", "bytes_per_row": 8, "buckets": 10}}},
            ["10 buckets", "take 2"],
        ),
        ({"devices": 8}, ["'t'", "too few", "8 devices"]),
        ({"constraints": Constraints(tables=(TableRule(table="t", devices=(0,)),))}, ["'t'", "leave out its rules"]),
        (
            {"constraints": Constraints(tables=(TableRule(table="t", data_parallel=True),))},
            ["'t'", "leave out its rules"],
        ),
        ({"constraints": Constraints(tables=(TableRule(table="t", row_wise=False),))}, ["'t'", "leave out its rules"]),
        (
            {
                "constraints": Constraints(tables=(TableRule(table="t", tier="cached", cached_rows=4),)),
                "host_memory_bytes": 2**30,
            },
            ["'t'", "'host' or 'hbm'"],
        ),
        (
            {"groups": Groups(ranks=8, contiguous=True, domain=8, local_world_size=8)},
            ["groups of ranks", "'t'", "averages rows"],
        ),
        ({"table": {"id_map": {"kind": "mch", "bytes_per_row": 8, "buckets": 3}}}, ["3 buckets", "10 rows"]),
        ({"table": {"lookups_by_id": [0.5, 0.5]}}, ["lookups_by_id", "leave"]),
    ],
)
def test_what_contradicts_an_id_map_is_refused(more, facts):
    fields = {**TABLE.model_dump(), **more.pop("table", {})}
    given = {**task(more.pop("devices", 4)), "tables": [fields], **more}
    with refused(InvalidInput, *facts):
        ShardingTask.parse(given, "the task")
