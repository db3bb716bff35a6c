"""Pins, tables kept together, cuts that are not allowed: every algorithm honours them, and what cannot be is told."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.analytic import AnalyticModel
from helpers.exhaustive import check_against_optimum, memory_of_devices, pipelines, tiny_tables
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.orders.options import ALGORITHMS
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

SHAPES = [(100_000, 64, 20.0), (200_000, 32, 5.0), (50_000, 128, 9.0), (1000, 16, 1.0), (80_000, 64, 12.0)]


def constrained(task: ShardingTask, **rules: object) -> ShardingTask:
    return ShardingTask(**{**dict(task), "constraints": Constraints(**rules)})


def held(plan: Plan, table: str) -> list[tuple[int, int]]:
    """Device and width of each shard of a table."""
    return [(shard.device, shard.dim) for shard in plan.by_table()[table]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_honours_every_constraint(make_task, algorithm):
    rules = (
        TableRule(table="t0", devices=(2,)),
        TableRule(table="t1", max_shards=1),
        TableRule(table="t2", max_shards=2, min_dim=48),
    )
    task = constrained(
        make_task(SHAPES, [0.06, 0.06, 0.06]), tables=rules, together=(("t3", "t4"),), min_dim=16, reserve_bytes=2**20
    )
    plan = search(task, AnalyticModel(), SearchSettings(algorithm=algorithm, rounds=3))
    assert {device for device, _ in held(plan, "t0")} == {2}
    assert len(held(plan, "t1")) == 1
    assert len(held(plan, "t2")) <= 2
    assert min(dim for _, dim in held(plan, "t2")) >= 48
    assert held(plan, "t3")[0][0] == held(plan, "t4")[0][0]
    assert len(held(plan, "t4")) == 1
    assert max(plan.memory_bytes()) <= 0.06 * 2**30 - 2**20


@st.composite
def constrained_tasks(draw: st.DrawFn) -> ShardingTask:
    """Few tables on two or three devices with little memory to spare, or too little."""
    chosen = draw(st.lists(tiny_tables, min_size=1, max_size=3, unique_by=lambda table: table.name))
    shares = draw(st.lists(st.floats(0.3, 1), min_size=2, max_size=3))
    pipeline = draw(pipelines)
    devices = st.lists(st.integers(0, len(shares) - 1), min_size=1, unique=True).map(tuple)
    rules = tuple(
        TableRule(
            table=table.name,
            devices=draw(st.none() | devices),
            min_dim=draw(st.none() | st.sampled_from([4, 8])),
            max_shards=draw(st.none() | st.integers(1, 3)),
        )
        for table in chosen
    )
    pinned = [rule for rule in rules if rule.devices is not None]
    together = (
        (tuple(table.name for table in chosen[:2]),) if len(chosen) > 1 and not pinned and draw(st.booleans()) else ()
    )
    return ShardingTask(
        tables=tuple(chosen),
        device_memory_bytes=memory_of_devices(draw, chosen, shares, 1024, pipeline),
        batch_size=1024,
        pipeline=pipeline,
        constraints=Constraints(tables=rules, together=together, max_shards=draw(st.none() | st.integers(1, 2))),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(task=constrained_tasks())
def test_a_plan_is_found_wherever_there_is_one_and_the_bound_is_below_the_optimum(task):
    check_against_optimum(task)


@pytest.mark.parametrize(
    ("rules", "facts"),
    [
        ({"tables": [{"table": "nobody"}]}, ["'nobody'"]),
        ({"tables": [{"table": "t0", "devices": [3]}]}, ["'t0'", "device 3"]),
        ({"tables": [{"table": "t0", "devices": []}]}, ["'t0'", "no device"]),
        ({"tables": [{"table": "t0"}, {"table": "t0"}]}, ["'t0'", "two rules"]),
        ({"tables": [{"table": "t0", "min_dim": 6}]}, ["constraints.tables[0].min_dim", 6]),
        ({"tables": [{"table": "t0", "max_shards": 0}]}, ["constraints.tables[0].max_shards", 0]),
        ({"together": [["t0", "nobody"]]}, ["'nobody'"]),
        ({"together": [["t0", "t1"], ["t1", "t2"]]}, ["'t1'", "together"]),
        (
            {
                "together": [["t0", "t1"]],
                "tables": [{"table": "t0", "devices": [0]}, {"table": "t1", "devices": [1, 2]}],
            },
            ["'t0'", "'t1'", "together", "'t1' to 1, 2"],
        ),
        ({"reserve_bytes": 2**30}, ["1,073,741,824 bytes", "reserved"]),
    ],
)
def test_constraints_that_cannot_be_are_reported_in_one_line(make_task, rules, facts):
    data = {**make_task(SHAPES, [1, 1, 1]).model_dump(), "constraints": rules}
    with refused(InvalidInput, "here", *facts):
        ShardingTask.parse(data, "here")


def test_a_task_without_constraints_has_the_digest_that_it_had_before_there_were_any(make_task):
    task = make_task(SHAPES, [1, 1])
    assert json.loads(task.canonical_json()).keys() == {"tables", "device_memory_bytes", "batch_size"}
    assert constrained(task, min_dim=8).digest() != task.digest()


def test_a_plan_that_breaks_a_constraint_cannot_be_made(make_task, model):
    task = make_task(SHAPES, [1, 1])
    plan = search(task, model, SearchSettings(rounds=0))
    device = plan.shards[0].device
    other = constrained(task, tables=(TableRule(table="t0", devices=(1 - device,)),))
    data = {**plan.model_dump(), "task": other.model_dump(), "task_digest": other.digest()}
    with refused(InvalidInput, "here", "'t0'", f"device {device}", "pinned"):
        Plan.parse(data, "here")


def test_a_table_in_one_shard_more_than_allowed_is_no_plan(make_task):
    task = constrained(make_task([(1000, 16, 1.0)], [1, 1]), max_shards=2)
    thirds = [
        {"table": "t0", "rows": 1000, "column_offset": at, "dim": dim, "device": 0}
        for at, dim in ((0, 8), (8, 4), (12, 4))
    ]
    data = {
        "task": task.model_dump(),
        "task_digest": task.digest(),
        "provenance": {"neuroshard_version": "0", "algorithm": "by hand"},
    }

    with refused(InvalidInput, "here", "'t0'", "3 shards", 2):
        Plan.parse({**data, "shards": thirds}, "here")
    halves = [{**thirds[0]}, {**thirds[1], "dim": 8}]
    assert len(Plan.parse({**data, "shards": halves}, "here").shards) == 2
