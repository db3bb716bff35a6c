"""A plan that exists is valid: its shards tile every table exactly once, and no device is over its memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from helpers.plans import TABLES, make_plan
from helpers.refusals import refused
from neuroshard.core.access import AccessCurve, StreamMisses, stated_curve
from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import InvalidInput
from neuroshard.core.part import Part
from neuroshard.core.plan import DeviceCost, Plan, Provenance, Shard, check_tiles
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import canonical_json, sha256

BY_HAND = Provenance(neuroshard_version="0", algorithm="by hand")


def table(name: str = "a", rows: int = 10, dim: int = 16) -> Table:
    return Table(name=name, rows=rows, dim=dim, pooling_factor=1.0)


@st.composite
def rectangles(draw, rows: int, dim: int, depth: int = 4):
    """(row_offset, rows, column_offset, dim) of pieces that tile rows x dim, by cutting again and again."""
    pieces = [(0, rows, 0, dim)]
    for _ in range(draw(st.integers(0, depth))):
        row, height, column, width = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        if draw(st.booleans()) and width > 4:
            cut = 4 * draw(st.integers(1, width // 4 - 1))
            pieces += [(row, height, column, cut), (row, height, column + cut, width - cut)]
        elif height > 1:
            cut = draw(st.integers(1, height - 1))
            pieces += [(row, cut, column, width), (row + cut, height - cut, column, width)]
        else:
            pieces.append((row, height, column, width))
    return pieces


@st.composite
def plans(draw):
    """Tables cut at random, dealt out at random, on devices with exactly the memory that this needs."""
    tables = tuple(
        table(f"t{i}", draw(st.integers(1, 50)), 4 * draw(st.integers(1, 16))) for i in range(draw(st.integers(1, 4)))
    )
    devices = draw(st.integers(1, 4))
    shards, used = [], [1] * devices
    for one in tables:
        for row, height, column, width in draw(rectangles(one.rows, one.dim)):
            device = draw(st.integers(0, devices - 1))
            used[device] += Part(one, height, width).memory().total
            shards.append(
                Shard(table=one.name, row_offset=row, rows=height, column_offset=column, dim=width, device=device)
            )
    task = ShardingTask(tables=tables, device_memory_bytes=tuple(used), batch_size=64)
    return Plan(task=task, shards=tuple(draw(st.permutations(shards))), provenance=BY_HAND)


def rebuilt(plan: Plan, shards) -> Plan:
    return Plan(task=plan.task, shards=tuple(shards), provenance=BY_HAND)


def test_the_larger_of_two_reserves_counts():
    both = Constraints(reserve_bytes=4, reserve_share=0.5)
    assert [both.reserved(nbytes) for nbytes in (6, 9)] == [4, 5]


@given(plans())
def test_shards_tile_every_table(plan):
    for one in plan.task.tables:
        own = [shard for shard in plan.shards if shard.table == one.name]
        for row, column in {(s.row_offset, s.column_offset) for s in own} | {(one.rows - 1, one.dim - 1)}:
            holders = [
                s
                for s in own
                if s.row_offset <= row < s.row_offset + s.rows and s.column_offset <= column < s.column_offset + s.dim
            ]
            assert len(holders) == 1


@given(plans())
def test_no_device_is_over_its_memory(plan):
    by_name = {one.name: one for one in plan.task.tables}
    for device, limit in enumerate(plan.task.device_memory_bytes):
        own = [shard for shard in plan.shards if shard.device == device]
        assert (
            sum(Part(by_name[s.table], s.rows, s.dim).memory().total for s in own)
            == plan.memory_bytes()[device]
            <= limit
        )


@given(plans(), st.data())
def test_a_plan_without_one_of_its_shards_has_a_gap(plan, data):
    missing = data.draw(st.integers(0, len(plan.shards) - 1))
    with refused(ValidationError, f"'{plan.shards[missing].table}'", "gap"):
        rebuilt(plan, plan.shards[:missing] + plan.shards[missing + 1 :])


@given(plans(), st.data())
def test_a_shard_that_is_there_twice_overlaps(plan, data):
    twice = data.draw(st.sampled_from(plan.shards))
    with refused(ValidationError, "overlapping", f"device {twice.device}"):
        rebuilt(plan, (*plan.shards, twice))


@given(plans(), st.data())
def test_a_byte_too_little_on_one_device_is_too_little(plan, data):
    device = data.draw(st.sampled_from([shard.device for shard in plan.shards]))
    memory = [used + (other != device) for other, used in enumerate(plan.memory_bytes())]
    memory[device] -= 1
    task = plan.task.model_copy(update={"device_memory_bytes": tuple(memory)})
    with refused(ValidationError, f"device {device}", "1 bytes"):
        Plan(task=task, shards=plan.shards, provenance=BY_HAND)


@given(plans())
def test_a_plan_read_back_is_the_plan_that_was_written(plan):
    assert Plan.from_json(plan.canonical_json(), "plan.json") == plan


@given(plans(), st.data())
def test_a_moved_shard_leaves_a_gap_or_overlaps(plan, data):
    index = data.draw(st.integers(0, len(plan.shards) - 1))
    field = data.draw(st.sampled_from(["row_offset", "column_offset"]))
    shard = plan.shards[index]
    moved = shard.model_copy(update={field: getattr(shard, field) + 4})
    with refused(ValidationError, repr(shard.table)):
        rebuilt(plan, (*plan.shards[:index], moved, *plan.shards[index + 1 :]))


def test_uneven_column_shards_and_a_grid_tile_a_table():
    check_tiles(
        table(dim=20),
        [Shard(table="a", rows=10, dim=12, device=0), Shard(table="a", rows=10, column_offset=12, dim=8, device=0)],
    )
    grid = [
        Shard(table="a", row_offset=row, rows=5, column_offset=column, dim=8, device=0)
        for row in (0, 5)
        for column in (0, 8)
    ]
    check_tiles(table(), grid)


@pytest.mark.parametrize(
    ("shard", "facts"),
    [
        ({"dim": 6}, ["6 columns", "column 0", "multiples of 4"]),
        ({"dim": 8, "column_offset": 2}, ["8 columns", "column 2"]),
        ({"dim": 16, "device": 7}, ["device 7", 2]),
        ({"dim": 16, "table": "ghost"}, ["'ghost'"]),
        ({"dim": 20}, ["10 x 16", "row 10", "column 20"]),
        ({"dim": 16, "rows": 11}, ["row 11"]),
        ({"dim": 16, "rows": 0}, ["rows", "greater than 0"]),
    ],
)
def test_a_shard_that_cannot_be_is_refused(shard, facts):
    task = ShardingTask(tables=(table(),), device_memory_bytes=(2**20, 2**20), batch_size=1)
    with refused(ValidationError, *facts):
        Plan(task=task, shards=(Shard(**{"table": "a", "rows": 10, "device": 0, **shard}),), provenance=BY_HAND)


def whole_plan(**fields) -> Plan:
    task = ShardingTask(tables=(table(),), device_memory_bytes=(2**20, 2**20), batch_size=1)
    return Plan(task=task, shards=(Shard(table="a", rows=10, dim=16, device=1),), provenance=BY_HAND, **fields)


def test_a_plan_costs_what_its_slowest_device_costs():
    assert whole_plan(predicted_ms=(1.5, 2.5)).cost_ms == 2.5
    assert whole_plan().cost_ms is None


def test_predictions_are_one_for_each_device():
    with refused(ValidationError, "predicted_ms", "1 value", "2 devices"):
        whole_plan(predicted_ms=(1.5,))


def test_the_parts_of_a_prediction_add_up_to_it():
    parts = (DeviceCost(compute_ms=1.0, forward_collective_ms=0.25, backward_collective_ms=0.25),) * 2
    assert whole_plan(predicted_ms=(1.5, 1.5), predicted=parts).cost_ms == 1.5
    with refused(ValidationError, "device 1", "1 ms", "predicted_ms", "1.5 ms", "predicted"):
        whole_plan(predicted_ms=(1.5, 1.0), predicted=parts)


def test_a_plan_of_another_task_is_found_out():
    raw = whole_plan().model_dump(mode="json")
    raw["task"]["batch_size"] = 2
    with refused(InvalidInput, "plan.json", "task_digest"):
        Plan.from_json(canonical_json(raw), "plan.json")
    del raw["task_digest"]
    with refused(InvalidInput, "plan.json", "task_digest"):
        Plan.from_json(canonical_json(raw), "plan.json")


@pytest.mark.parametrize("place", [("task",), ("task", "tables", 0), ("task", "constraints"), (), ("provenance",)])
def test_a_key_from_a_newer_version_is_ignored_and_a_changed_task_is_not(place):
    plan = make_plan()
    raw = plan.model_dump(mode="json")
    raw["task"]["constraints"] = {}
    at = raw
    for step in place:
        at = at[step]
    at["of_a_newer_version"] = {"more": [1.5, "é"]}
    raw["task_digest"] = sha256(canonical_json(raw["task"]))
    read = Plan.from_json(canonical_json(raw), "plan.json")
    assert (read.task, read.shards, read.task_digest) == (plan.task, plan.shards, plan.task.digest())
    assert Plan.from_json(read.canonical_json(), "plan.json") == read
    raw["task"]["batch_size"] += 1
    with refused(InvalidInput, "plan.json", "task_digest"):
        Plan.from_json(canonical_json(raw), "plan.json")


@pytest.mark.parametrize(
    "named",
    [
        {"pipeline": "none"},
        {"dense_optimizer": "adam"},
        {"topology": {"domain": 2, "local_world_size": 2}},
        {"collective_precision": {"forward": "fp16"}},
        {},
    ],
)
def test_no_plan_is_of_the_format_whose_readers_do_not_know_its_keys(named):
    """Readers of format 1 are there that know few of today's keys, and take a task with others for damaged."""
    plan = make_plan(devices=4)
    task = ShardingTask.parse(plan.task.model_dump(mode="json") | named, "task")
    written = Plan(task=task, shards=plan.shards, provenance=plan.provenance)
    assert written.format_version == 2
    old = written.model_dump(mode="json") | {"format_version": 1}  # as it was written before
    assert Plan.from_json(canonical_json(old), "plan.json").format_version == 1


def test_dense_time_and_varying_streams_are_of_format_3():
    task = make_plan().task.model_copy(update={"host_memory_bytes": 2**30, "pipeline": "prefetch"})
    assert (task.plan_format, task.model_copy(update={"dense_ms": 1.0}).plan_format) == (2, 3)
    for varies, written in ((0.0, 2), (0.1, 3)):
        stream = StreamMisses(
            order="time",
            batches=4,
            distinct_rows=150,
            first_touches=10,
            cached_rows=(10,),
            missed_rows=(140,),
            varies=varies,
        )
        curve = AccessCurve(batch_size=64, group_rows=(100, 50), lookups_per_row=(2.4, 1.6), stream=stream)
        tables = (TABLES[0].model_copy(update={"access": curve}),)
        assert task.model_copy(update={"tables": tables}).plan_format == written


def test_plans_that_name_tiers_or_access_are_never_of_format_1():
    plan = whole_plan()
    read = plan.task.tables[0].model_copy(
        update={"access": stated_curve("zipf:1.1", plan.task.tables[0].rows, 1.0, 64)}
    )
    for task in (
        plan.task.model_copy(update={"host_memory_bytes": 2**40}),
        plan.task.with_tiers({"a": ("hbm", None)}),
        plan.task.model_copy(update={"tables": (read, *plan.task.tables[1:])}),
    ):
        newer = Plan(task=task, shards=plan.shards, provenance=plan.provenance)
        assert newer.format_version == 2
        assert Plan.from_json(canonical_json(newer.model_dump(mode="json")), "plan.json") == newer
        with refused(InvalidInput, "plan.json", "tiers", "format_version 1", "2"):
            Plan.from_json(canonical_json({**newer.model_dump(mode="json"), "format_version": 1}), "plan.json")


def test_device_memory_may_differ_between_devices():
    tables = (table("a"), table("b"))
    need = tables[0].memory_bytes
    task = ShardingTask(tables=tables, device_memory_bytes=(need, 2 * need), batch_size=1)
    shards = tuple(Shard(table=t.name, rows=10, dim=16, device=1) for t in tables)
    assert Plan(task=task, shards=shards, provenance=BY_HAND).memory_bytes() == (0, 2 * need)


@pytest.mark.parametrize(
    ("cost_ms", "bound_ms", "gap"),
    [(2.0, 1.5, 0.25), (2.0, 2.5, 0.0), (2.0, None, None), (0.0, 0.0, None), (None, 1.0, None)],
)
def test_the_gap_is_what_the_bound_leaves_of_the_cost(cost_ms, bound_ms, gap):
    task = ShardingTask(tables=(table(),), device_memory_bytes=(2**20,), batch_size=64)
    shard = Shard(table="a", rows=10, dim=16, device=0)
    costs = None if cost_ms is None else (cost_ms,)
    plan = Plan(task=task, shards=(shard,), provenance=BY_HAND, predicted_ms=costs, lower_bound_ms=bound_ms)
    assert plan.gap == gap


def test_a_shard_needs_its_lookups_once_and_its_outputs_for_each_column():
    """Of 64 samples: two lookups of 8 bytes each, and an output of 4 bytes a column."""
    wide = Table(name="a", rows=10, dim=16, pooling_factor=2.0)
    assert [Part(wide, 10, dim).memory(64, "none").step for dim in (4, 16)] == [
        64 * 2 * 8 + 64 * 4 * dim for dim in (4, 16)
    ]
