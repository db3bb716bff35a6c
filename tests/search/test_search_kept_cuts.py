"""Re-planning so that a trainer can load its optimizer state: columns stay cut as they are, and shards move whole."""

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.parts import cut_to
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.moves import changed_state, moved_bytes
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import first_few
from neuroshard.costmodel.protocol import device_costs
from neuroshard.search.problem.kept_cuts import KeptCuts
from neuroshard.search.problem.layout import lay_out
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

KEEP = SearchSettings(rounds=4, keep_optimizer_state=True)
THREE = [(0, 8), (8, 4), (12, 12)]  # first column and width of three shards
CUT_BY_SIZE = [(1000 * (7 * i % 11 + 1), 4 * (i % 8 + 1) * 4, float(3 * i % 17)) for i in range(16)]


@pytest.fixture
def task(make_task) -> ShardingTask:
    return make_task(CUT_BY_SIZE, [0.02] * 4)


def split(task: ShardingTask, *, every: int = 3, device: int = 0) -> Plan:
    """Every third table cut in two uneven shards on devices 0 and 1, all others whole, in turns."""
    shards: list[Shard] = []
    for place, table in enumerate(task.tables):
        if place % every == 0 and table.dim >= 12:
            left = Shard(table=table.name, rows=table.rows, dim=4, device=device)
            shards += [left, left.model_copy(update={"column_offset": 4, "dim": table.dim - 4, "device": device + 1})]
        else:
            shards.append(Shard(table=table.name, rows=table.rows, dim=table.dim, device=place % task.devices))
    provenance = search(task, AnalyticModel(), SearchSettings(algorithm="size")).provenance
    return Plan(task=task, shards=tuple(shards), provenance=provenance)


def column_cuts(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    return {name: sorted({(s.column_offset, s.dim) for s in shards}) for name, shards in plan.by_table().items()}


@pytest.mark.parametrize("budget", [None, 2**20, 2**24])
@pytest.mark.parametrize("seed", [0, 1])
def test_shards_move_and_cuts_stay(task, seed, budget):
    old = split(task)
    settings = SearchSettings(rounds=4, seed=seed, move_budget_bytes=budget, keep_optimizer_state=True)
    plan = search(task, AnalyticModel(), settings, previous=old)
    assert column_cuts(plan) == column_cuts(old)
    assert plan.task == task
    moved = moved_bytes(old, plan)
    assert 0 < moved <= (budget or moved)
    before = old.model_copy(update={"predicted_ms": priced(old)}).cost_ms
    assert plan.cost_ms < before
    assert plan.lower_bound_ms <= plan.cost_ms
    cut = sum(len(cuts) > 1 for cuts in column_cuts(old).values())
    assert cut > 2
    kept = "16 tables with optimizer state by the row cut into columns as in the"
    (note,) = (note for note in plan.provenance.notes if note.startswith(kept))
    assert f"({cut} of them cut)" in note
    changed = changed_state(old, plan)
    assert any(f"({first_few(changed)})" in note for note in plan.provenance.notes) == bool(changed)


def priced(plan: Plan) -> tuple[float, ...]:
    """Ms of each device of a plan without row shards."""
    model, tables = AnalyticModel(), {table.name: table for table in plan.task.tables}
    vectors = model.part_vectors(cut_to([tables[s.table] for s in plan.shards], [s.dim for s in plan.shards]))
    sums, dims = np.zeros((plan.task.devices, vectors.shape[1])), np.zeros(plan.task.devices)
    for shard, vector in zip(plan.shards, vectors, strict=True):
        sums[shard.device] += vector
        dims[shard.device] += shard.dim
    return tuple(np.sum(device_costs(model, sums, dims), axis=0).tolist())


def test_the_plan_is_priced_as_the_shards_that_it_has(task):
    plan = search(task, AnalyticModel(), KEEP, previous=split(task))
    assert plan.predicted_ms == pytest.approx(priced(plan))


def test_without_the_option_the_search_cuts_anew(task):
    old = split(task)
    assert column_cuts(search(task, AnalyticModel(), SearchSettings(rounds=4), previous=old)) != column_cuts(old)


def test_tables_without_state_by_the_row_are_cut_as_is_cheapest(task):
    tables = tuple(t.model_copy(update={"optimizer_bytes_per_row": 4 * (i % 2)}) for i, t in enumerate(task.tables))
    mixed = task.model_copy(update={"tables": tables})
    old = split(mixed)
    plan = search(mixed, AnalyticModel(), KEEP, previous=old)
    before, after = column_cuts(old), column_cuts(plan)
    assert {t.name for t in tables if t.optimizer_bytes_per_row} <= {n for n in before if before[n] == after[n]}
    assert before != after


def test_new_tables_and_those_of_another_width_are_free(task, make_task):
    old = split(task)
    grown = make_task([(1000, 200, 90.0), *CUT_BY_SIZE[1:], (1000, 200, 90.0)], [0.02] * 4)
    plan = search(grown, AnalyticModel(), KEEP, previous=old)
    before, after = column_cuts(old), column_cuts(plan)
    assert all(before[name] == after[name] for name in before if name != "t0")
    assert len(after["t0"]) > 1
    assert len(after["t16"]) > 1


def test_fewer_devices_than_shards_hold_several_of_a_table(make_task):
    task = make_task([(1000, 64, 5.0)] * 3, [1] * 8)
    shards = tuple(
        Shard(table=t.name, rows=t.rows, column_offset=8 * device, dim=8, device=device)
        for t in task.tables
        for device in range(8)
    )
    provenance = search(task, AnalyticModel(), SearchSettings(rounds=0)).provenance
    old = Plan(task=task, shards=shards, provenance=provenance)
    small = task.model_copy(update={"device_memory_bytes": task.device_memory_bytes[:2]})
    plan = search(small, AnalyticModel(), KEEP, previous=old)
    assert column_cuts(plan) == column_cuts(old)
    assert plan.shards_by_device() == (12, 12)
    assert plan.predicted_ms == pytest.approx(priced(plan))


def test_whole_tables_may_become_row_wise_and_row_wise_ones_whole(make_task):
    """Both have one moment a row."""
    task = make_task([(10_000, 16, 900.0), (10_000, 64, 0.1), (1000, 32, 5.0), (1000, 32, 5.0)], [1] * 4)
    allowed = task.model_copy(update={"constraints": Constraints(row_wise=True)})
    rows = [
        Shard(table="t1", row_offset=first, rows=count, dim=64, device=device)
        for device, (first, count) in enumerate(task.tables[1].row_blocks(4))
    ]
    others = [Shard(table=t.name, rows=t.rows, dim=t.dim, device=0) for t in task.tables if t.name != "t1"]
    provenance = search(task, AnalyticModel(), SearchSettings(rounds=0)).provenance
    old = Plan(task=allowed, shards=(*others, *rows), provenance=provenance)
    plan = search(allowed, AnalyticModel(), KEEP, previous=old)
    shards = plan.by_table()
    assert [len(shards[name]) for name in ("t0", "t1")] == [4, 1]
    assert column_cuts(plan) == column_cuts(old)


def test_pins_and_tables_kept_together_hold(task):
    old = split(task)
    rules = tuple(TableRule(table=name, devices=(3,)) for name in ("t0", "t3", "t6", "t7"))
    ruled = task.model_copy(update={"constraints": Constraints(tables=rules, together=(("t1", "t2"),))})
    plan = search(ruled, AnalyticModel(), KEEP, previous=old)
    shards = plan.by_table()
    assert column_cuts(plan) == column_cuts(old)
    assert {shard.device for name in ("t0", "t3", "t6", "t7") for shard in shards[name]} == {3}
    assert len({shard.device for name in ("t1", "t2") for shard in shards[name]}) == 1


def test_a_piece_has_a_name_that_no_table_has(make_task):
    task = make_task([(1000, 16, 5.0)] * 3, [1] * 2)
    named = task.model_copy(
        update={"tables": (*task.tables[:2], task.tables[2].model_copy(update={"name": "t0[0:4]"}))}
    )
    kept = KeptCuts(named, split(named, every=2), AnalyticModel())
    assert [table.name for table in kept.task.tables] == ["t0[0:4]'", "t0[4:16]", "t1", "t0[0:4][0:4]", "t0[0:4][4:16]"]
    there = Problem(kept.task, AnalyticModel())
    state = State(there, np.eye(5, 2, dtype=np.int64) * there.all_units[:, None])
    assert [shard.dim for shard in kept.shards(lay_out(state)) if shard.table == "t0"] == [4, 12]


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (Constraints(max_shards=1), "may have 1 shard at most today"),
        (Constraints(min_dim=8), "may have no shard of fewer than 8 columns today"),
        (Constraints(together=(("t0", "t1"),)), "is kept together with others today"),
    ],
)
def test_rules_that_forbid_todays_cuts_are_named(make_task, constraints, words):
    task = make_task([(1000, 16, 5.0), (1000, 16, 5.0)], [1] * 2)
    old = split(task)
    ruled = task.model_copy(update={"constraints": constraints})
    with pytest.raises(Infeasible) as caught:
        search(ruled, AnalyticModel(), KEEP, previous=old)
    assert str(caught.value) == (
        f"table 't0' is cut into 2 shards, the narrowest of 4 columns, in the plan to start from, and {words}; leave out "
        "--keep-optimizer-state, or loosen that rule"
    )


def test_a_grid_is_refused_by_name(make_task):
    task = make_task([(1000, 16, 5.0)], [1] * 4)
    corners = tuple(
        Shard(table="t0", row_offset=row, rows=500, column_offset=column, dim=8, device=2 * (row > 0) + (column > 0))
        for row in (0, 500)
        for column in (0, 8)
    )
    old = Plan(task=task, shards=corners, provenance=split(task).provenance)
    with refused(Infeasible, "'t0'", "by rows", "by columns", "--keep-optimizer-state"):
        search(task, AnalyticModel(), KEEP, previous=old)


def test_where_only_the_cuts_are_in_the_way_the_message_says_so(make_task):
    task = make_task([(1_000_000, 64, 5.0), (1000, 16, 5.0)], [1] * 2)
    old = split(task, every=9)
    tight = task.model_copy(update={"device_memory_bytes": (2**27 + 2**24,) * 2})
    whole = Plan(
        task=task,
        shards=tuple(Shard(table=t.name, rows=t.rows, dim=t.dim, device=0) for t in task.tables),
        provenance=old.provenance,
    )
    with pytest.raises(Infeasible) as caught:
        search(tight, AnalyticModel(), KEEP, previous=whole)
    assert str(caught.value) == (
        "no plan was found that keeps the column cuts of the plan to start from, those of 2 tables (t0, t1); leave out "
        "--keep-optimizer-state, without which tables fit"
    )
    assert search(tight, AnalyticModel(), SearchSettings(rounds=0), previous=whole).shards
    short = task.model_copy(update={"device_memory_bytes": (2**26,) * 2})
    with refused(Infeasible, "128.0 MiB together"):
        search(short, AnalyticModel(), KEEP, previous=whole)


def test_cuts_that_the_sharding_types_of_today_forbid_are_not_kept(task):
    ruled = task.model_copy(update={"constraints": Constraints(sharding_types=("row-wise",))})
    with refused(Infeasible, "'t0'", "may not be cut column-wise", "--keep-optimizer-state"):
        search(ruled, AnalyticModel(), KEEP, previous=split(task))


def test_there_is_a_plan_to_start_from(task):
    with refused(UsageError, "--keep-optimizer-state", "--from"):
        search(task, AnalyticModel(), KEEP)


def test_neighbours_of_unequal_widths_on_one_device_are_named(make_task):
    """TorchRec joins them, and then their moments are means."""
    task = make_task([(1000, 16, 5.0), (1000, 8, 1.0)], [1])
    two = task.model_copy(update={"device_memory_bytes": (2**30,) * 2})
    shards = [
        Shard(table="t0", rows=1000, dim=4, device=0),
        Shard(table="t0", rows=1000, column_offset=4, dim=12, device=1),
        Shard(table="t1", rows=1000, dim=8, device=0),
    ]
    before = Plan(task=two, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    plan = search(task, AnalyticModel(), SearchSettings(keep_optimizer_state=True), previous=before)
    assert any("1 table (t0) does not carry over exactly" in note for note in plan.provenance.notes)


def test_state_that_copies_do_not_have_is_named(task):
    live = search(task.with_copies(["t0", "t5"]), AnalyticModel(), SearchSettings(rounds=2))
    plan = search(task.with_copies(["t5"]), AnalyticModel(), KEEP, previous=live)
    assert any("the optimizer state of 1 table (t0) starts anew" in note for note in plan.provenance.notes)
    plan = search(live.task, AnalyticModel(), KEEP, previous=live)
    assert not any("starts anew" in note for note in plan.provenance.notes)


def test_putting_the_outputs_of_kept_cuts_into_order_counts_in_every_plan_of_a_search(task):
    model = AnalyticModel()
    model.reorder_ms = 0.01
    plan = search(task, model, KEEP, previous=split(task))
    assert plan.improvements[-1].cost_ms == pytest.approx(plan.cost_ms)


def test_shards_that_torchrec_would_mix_up_on_one_device_are_found(make_task):
    task = make_task([(1000, 24, 5.0)], [1] * 3)
    cut = [Shard(table="t0", rows=1000, column_offset=at, dim=dim, device=d) for d, (at, dim) in enumerate(THREE)]
    old = Plan(task=task, shards=tuple(cut), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    kept = KeptCuts(task, old, AnalyticModel())

    def on(*devices: int) -> list[Shard]:
        return [shard.model_copy(update={"device": d}) for shard, d in zip(cut, devices, strict=True)]

    assert kept.mixed_up(on(0, 1, 0)) == {"t0"}
    assert kept.mixed_up(on(0, 0, 1)) == frozenset()  # neighbours become one
