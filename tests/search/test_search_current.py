"""Re-planning: from a plan on, moving no more than may be moved; and anytime search."""

import re

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.moves import moved_bytes, moves
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import parse_bytes
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tuning import TUNING
from neuroshard.search.watch import Watch

SHAPES = [(1000 * (7 * i % 11 + 1), 4 * (i % 8 + 1) * 4, float(3 * i % 17)) for i in range(24)]


@pytest.fixture
def task(make_task) -> ShardingTask:
    return make_task(SHAPES, [0.02] * 4)


@pytest.fixture
def old(task) -> Plan:
    """A plan that has room for improvement."""
    return search(task, AnalyticModel(), SearchSettings(algorithm="size"))


def test_with_more_to_move_the_plan_is_never_worse_and_the_budget_is_kept(task, old):
    costs = []
    for budget in (1, 2**20, 2**23, 2**26):
        plan = search(task, AnalyticModel(), SearchSettings(rounds=4, move_budget_bytes=budget), previous=old)
        assert moved_bytes(old, plan) <= budget
        costs.append(plan.cost_ms)
    assert costs[0] <= old.cost_ms * (1 + 1e-12)
    assert costs[-1] < costs[1] < old.cost_ms


def test_without_a_budget_the_plan_is_no_worse_than_the_old_one(task, old):
    assert search(task, AnalyticModel(), SearchSettings(rounds=0), previous=old).cost_ms <= old.cost_ms * (1 + 1e-12)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_for_next_to_no_gain_nothing_moves(task, seed):
    found = search(task, AnalyticModel(), SearchSettings(rounds=8))
    again = search(task, AnalyticModel(), SearchSettings(rounds=8, move_budget_bytes=2**30, seed=seed), previous=found)
    assert moves(found, again) == () or again.cost_ms <= found.cost_ms * (1 - TUNING.worth_moving)


def test_a_budget_of_one_byte_leaves_every_column_where_it_is(task, old):
    assert moves(old, search(task, AnalyticModel(), SearchSettings(rounds=4, move_budget_bytes=1), previous=old)) == ()


def test_new_tables_are_placed_and_removed_ones_dropped_without_moving_the_others(task, old, make_task):
    grown = make_task([*SHAPES, (5000, 32, 9.0)], [0.02] * 4)
    kept = grown.model_copy(update={"tables": grown.tables[2:]})
    plan = search(kept, AnalyticModel(), SearchSettings(rounds=2, move_budget_bytes=1), previous=old)
    assert {(move.table, move.from_device) for move in moves(old, plan)} == {("t24", None)}
    assert plan.provenance.notes == (
        "1 table new since the plan to start from, and placed (t24)",
        "2 tables of the plan to start from no longer there, and dropped (t0, t1)",
    )


def test_a_table_of_another_width_is_made_anew_for_the_budget_and_for_the_difference_alike(task, old):
    tables = tuple(t.model_copy(update={"dim": t.dim - 4 if t.dim > 4 else 8}) for t in task.tables[:12])
    changed = task.model_copy(update={"tables": (*tables, *task.tables[12:])})
    plan = search(changed, AnalyticModel(), SearchSettings(rounds=2, move_budget_bytes=1), previous=old)
    assert moved_bytes(old, plan) == 0
    assert {move.table for move in moves(old, plan)} == {table.name for table in tables}


def test_what_is_reported_as_the_least_to_move_is_enough(task, old):
    smaller = task.model_copy(update={"device_memory_bytes": task.device_memory_bytes[:3]})
    with pytest.raises(Infeasible) as caught:
        search(smaller, AnalyticModel(), SearchSettings(move_budget_bytes=1), previous=old)
    told = re.search(r"least found to move is ([0-9.]+ .iB)", str(caught.value))
    assert told is not None
    budget = parse_bytes(told[1])
    assert (
        0
        < moved_bytes(old, search(smaller, AnalyticModel(), SearchSettings(move_budget_bytes=budget), previous=old))
        <= budget
    )


def test_of_a_shard_that_has_grown_out_of_its_device_only_what_is_too_much_needs_to_move(make_task):
    was = make_task([(1000, 64, 5.0), (1000, 64, 5.0)], [1, 1])
    old = search(was, AnalyticModel(), SearchSettings(rounds=0, algorithm="size"))
    assert len(old.shards) == 2
    grown = make_task([(1100, 64, 5.0), (1000, 64, 5.0)], [1, 1])
    roomy = grown.model_copy(update={"device_memory_bytes": (1000 * 65 * 4, 2**30)})
    plan = search(roomy, AnalyticModel(), SearchSettings(move_budget_bytes=64 * 1000 * 4 // 4), previous=old)
    assert 0 < moved_bytes(old, plan) <= 64 * 1000 * 4 // 4


def test_within_a_budget_for_everything_a_plan_is_as_good_as_one_from_nowhere(task, old):
    budget = sum(table.memory_bytes for table in task.tables)
    from_old = search(task, AnalyticModel(), SearchSettings(rounds=0, move_budget_bytes=budget), previous=old)
    assert from_old.cost_ms <= search(task, AnalyticModel(), SearchSettings(rounds=0)).cost_ms * (
        1 + TUNING.worth_moving
    )


def test_fewer_devices_than_before_need_a_budget_for_what_lay_on_the_others(task, old):
    smaller = task.model_copy(update={"device_memory_bytes": task.device_memory_bytes[:3]})
    with refused(Infeasible, "1 B"):
        search(smaller, AnalyticModel(), SearchSettings(move_budget_bytes=1), previous=old)
    plan = search(smaller, AnalyticModel(), SearchSettings(rounds=1, move_budget_bytes=2**30), previous=old)
    assert plan.provenance.notes[0] == "the plan to start from is for 4 devices, this one for 3"


def test_tables_kept_together_stay_where_they_lie_though_other_devices_have_less_load(task):
    together = task.model_copy(update={"constraints": Constraints(together=(("t1", "t2", "t5"),))})
    rules = tuple(TableRule(table=f"t{i}", devices=(3,)) for i in range(8))
    pinned = task.model_copy(update={"constraints": together.constraints.model_copy(update={"tables": rules})})
    old = search(pinned, AnalyticModel(), SearchSettings(algorithm="size"))
    settings = SearchSettings(rounds=4, move_budget_bytes=1)
    assert moves(old, search(together, AnalyticModel(), settings, previous=old)) == ()


def test_a_table_on_many_devices_keeps_the_order_of_its_columns(make_task):
    """Nine shards or more have too many orders to try each."""
    task = make_task([(100_000, 256, 200.0), *[(1000, 16, 1.0)] * 6], [1] * 16)
    old = search(task, AnalyticModel(), SearchSettings(rounds=4))
    assert len(old.by_table()["t0"]) > 8
    settings = SearchSettings(rounds=4, move_budget_bytes=1)
    assert moves(old, search(task, AnalyticModel(), settings, previous=old)) == ()


def test_columns_stay_where_they_are_as_far_as_one_shard_a_device_allows(make_task):
    task = make_task([(1000, 64, 50.0), (1000, 4, 0.1)], [1] * 3)
    old = search(task, AnalyticModel(), SearchSettings(algorithm="size"))
    plan = search(task, AnalyticModel(), SearchSettings(rounds=3), previous=old)
    there = next(shard for shard in old.shards if shard.table == "t0")
    kept = [shard for shard in plan.shards if shard.table == "t0" and shard.device == there.device]
    stays = sum(shard.dim for shard in kept)
    moved = sum(move.nbytes for move in moves(old, plan) if move.table == "t0")
    strange = sum(shard.table == "t0" and shard.device != there.device for shard in plan.shards)
    assert moved == 1000 * ((64 - stays) * 4 + strange * 4)


def test_a_table_that_lies_in_pieces_on_a_device_stays_in_them_within_a_budget(task, old):
    """As TorchRec's planner deals columns out: in turns."""
    dealt = [
        Shard(table=table.name, rows=table.rows, column_offset=at, dim=16, device=at // 16 % 4)
        for table in task.tables
        for at in range(0, table.dim, 16)
    ]
    theirs = Plan(task=task, shards=tuple(dealt), provenance=old.provenance)
    assert any(shard.column_offset == 64 for shard in dealt)
    same = search(task, AnalyticModel(), SearchSettings(rounds=2, move_budget_bytes=1), previous=theirs)
    assert moves(theirs, same) == ()
    assert sorted(same.shards, key=str) == sorted(theirs.shards, key=str)

    prices = price_shards(AnalyticModel(), task, same.shards)
    assert same.cost_ms == pytest.approx(prices.total_ms.max())  # priced as the pieces that it has

    freed = search(task, AnalyticModel(), SearchSettings(rounds=2, move_budget_bytes=2**40), previous=theirs)
    assert freed.cost_ms < same.cost_ms


def test_pieces_on_a_device_each_take_what_a_step_needs(task, old):
    """A new table finds room beside them to the byte, or none."""
    pieces = [
        Shard(table=table.name, rows=table.rows, column_offset=at, dim=16, device=at // 16 % 4)
        for table in task.tables
        for at in range(0, table.dim, 16)
    ]
    counted = task.model_copy(update={"pipeline": "none", "device_memory_bytes": (2**40,) * 4})
    theirs = Plan(task=counted, shards=tuple(pieces), provenance=old.provenance)
    new = Table(name="new", rows=10, dim=4, pooling_factor=1)
    need = counted.memory(Part.of(new)).total

    def with_new(memory: int) -> ShardingTask:
        update = {
            "tables": (*task.tables, new),
            "device_memory_bytes": (memory, *theirs.memory_bytes()[1:]),
            "constraints": Constraints(tables=(TableRule(table="new", devices=(0,)),)),
        }
        return counted.model_copy(update=update)

    settings = SearchSettings(rounds=2, move_budget_bytes=1)
    enough = theirs.memory_bytes()[0] + need
    plan = search(with_new(enough), AnalyticModel(), settings, previous=theirs)
    assert plan.memory_bytes() == (enough, *theirs.memory_bytes()[1:])
    with refused(Infeasible, "1 B"):
        search(with_new(enough - 1), AnalyticModel(), settings, previous=theirs)


def test_a_plan_for_other_tables_is_reported_in_one_line(task, make_task):
    other = make_task([(10, 4, 1.0)], [1])
    renamed = other.model_copy(update={"tables": (other.tables[0].model_copy(update={"name": "else"}),)})
    old = search(renamed, AnalyticModel())
    with refused(InvalidInput, "'else'", "'t0'"):
        search(task, AnalyticModel(), previous=old)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"settings": SearchSettings(move_budget_bytes=5)}, ["move budget"]),
        (
            {"settings": SearchSettings(algorithm="neuroshard-2023"), "previous": True},
            ["neuroshard-2023", "local-search"],
        ),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(task, old, change, facts):
    if "previous" in change:
        change = {**change, "previous": old}
    with refused(UsageError, *facts):
        search(task, AnalyticModel(), **change)


def test_every_improvement_is_reported_with_its_time_and_the_last_is_the_plan(task):
    told: list[tuple[float, float]] = []
    watch = Watch(on_improvement=lambda seconds, ms: told.append((seconds, ms)))
    plan = search(task, AnalyticModel(), SearchSettings(rounds=5), watch=watch)
    seconds, ms = zip(*told, strict=True)
    assert list(seconds) == sorted(seconds)
    assert list(ms) == sorted(ms, reverse=True)
    assert len(set(ms)) == len(ms)
    assert plan.cost_ms == pytest.approx(ms[-1], rel=1e-12)
    assert [improvement.cost_ms for improvement in plan.improvements] == list(ms)


def test_a_plan_tells_of_a_hundred_improvements_the_first_and_the_last_among_them():
    watch = Watch()
    for cost_ms in range(500, 0, -1):
        watch.note(float(cost_ms), steps=1)
    told = watch.improvements
    assert (len(told), told[0].cost_ms, told[-1].cost_ms) == (100, 500.0, 1.0)
    assert [one.step for one in told] == [501 - one.cost_ms for one in told]


def test_a_time_budget_cuts_the_search_short_with_the_best_so_far(task):
    told: list[float] = []
    watch = Watch(1e-9, on_improvement=lambda _, ms: told.append(ms))
    plan = search(task, AnalyticModel(), SearchSettings(time_budget_s=1e-9), watch=watch)
    assert plan.cost_ms <= told[0] * (1 + 1e-12)
    assert search(task, AnalyticModel(), SearchSettings(rounds=5)).cost_ms <= plan.cost_ms


@pytest.mark.parametrize("seed", [2, 3])
def test_a_budget_that_is_enough_for_blocks_of_rows_is_used_for_them(seed):
    """Several light tables row-wise at once, which a change of one at a time does not lead to."""
    rng = np.random.default_rng(seed)
    tables = [
        Table(
            name=f"t{i}",
            rows=int(10 ** rng.uniform(1, 4)),
            dim=int(rng.choice([8, 16, 32, 64])),
            pooling_factor=float(rng.choice([100, 200, 400, 20])),
        )
        for i in range(5)
    ]
    tables.append(Table(name="large", rows=10**7, dim=64, pooling_factor=2.0))
    nbytes = sum(table.memory_bytes for table in tables)
    # only the light ones may move
    there = Constraints(tables=(TableRule(table="large", devices=(0,), max_shards=1, row_wise=False),))
    task = ShardingTask(tables=tuple(tables), device_memory_bytes=(nbytes,) * 4, batch_size=65536, constraints=there)
    allowed = task.model_copy(update={"constraints": there.model_copy(update={"row_wise": True})})
    model = analytic_model("h100", 65536)
    old, anew = search(task, model, SearchSettings(rounds=4)), search(allowed, model, SearchSettings(rounds=4))
    assert moved_bytes(old, anew) <= nbytes // 50
    plan = search(allowed, model, SearchSettings(rounds=4, move_budget_bytes=nbytes // 50), previous=old)
    assert moved_bytes(old, plan) <= nbytes // 50
    assert plan.cost_ms <= anew.cost_ms * 1.001
