"""Tables of which every device has a copy: placed by rule, priced apart, and what cannot be copied refused."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import neuroshard as ns
from helpers.analytic import AnalyticModel
from helpers.drawn import drawn_tables
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.moves import moved_bytes
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, device_memory
from neuroshard.core.precision import parse_precision
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.given import Given, GivenCosts
from neuroshard.costmodel.pricing import copies_ms, price_shards
from neuroshard.search import algorithms
from neuroshard.search import watch as clock
from neuroshard.search.copies import with_dense_optimizer
from neuroshard.search.infeasible import feasibility
from neuroshard.search.notes import STOPPED
from neuroshard.search.problem.state import State
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

pytestmark = pytest.mark.slow

SHAPES = [(100_000, 16, 30.0), (50_000, 32, 5.0), (20, 8, 1.0), (7, 64, 2.0), (80_000, 8, 12.0)]
COPIED = ("t2", "t3")
FEW = SearchSettings(rounds=2)


def copied(task: ShardingTask, *names: str) -> ShardingTask:
    rules = tuple(TableRule(table=name, data_parallel=True) for name in names)
    return ShardingTask.parse({**task.model_dump(), "constraints": Constraints(tables=rules)}, "task")


@pytest.mark.parametrize("model", [AnalyticModel(), Analytic("h100", 65536)], ids=["test", "h100"])
def test_every_device_has_a_copy_and_the_plan_costs_what_its_shards_are_priced_at(make_task, model):
    task = copied(make_task(SHAPES, [1] * 3), *COPIED)
    plan = search(task, model, FEW)
    tables = {table.name: table for table in task.tables}
    prices = price_shards(model, task, plan.shards)

    for name in COPIED:
        assert sorted((s.device, s.rows, s.dim) for s in plan.by_table()[name]) == [
            (device, tables[name].rows, tables[name].dim) for device in range(3)
        ]
    np.testing.assert_allclose(plan.predicted_ms, prices.total_ms, rtol=1e-9)
    assert plan.lower_bound_ms <= plan.cost_ms
    assert Plan.from_json(plan.canonical_json(), "again") == plan


def test_the_other_tables_lie_as_without_the_copied_ones_and_all_costs_are_as_much_more(make_task):
    model = AnalyticModel()
    task = copied(make_task(SHAPES, [1] * 3), *COPIED)
    others = [shape for place, shape in enumerate(SHAPES) if f"t{place}" not in COPIED]
    alone, plan = search(make_task(others, [1] * 3), model, FEW), search(task, model, FEW)
    more = copies_ms(model, [table for table in task.tables if table.name in COPIED], task).total_ms

    assert more > 0
    assert plan.cost_ms == pytest.approx(alone.cost_ms + more)
    assert plan.lower_bound_ms == pytest.approx(alone.lower_bound_ms + more)
    assert [b.cost_ms for b in plan.baselines] == pytest.approx([b.cost_ms + more for b in alone.baselines])
    assert sorted(s.device for s in plan.shards if s.table not in COPIED) == sorted(s.device for s in alone.shards)


@pytest.mark.parametrize("model", [AnalyticModel(), Analytic("h100", 65536)], ids=["test", "h100"])
def test_copies_of_two_modules_have_an_operator_each(make_task, model):
    plain = copied(make_task(SHAPES, [1] * 3), *COPIED)
    modules = {"t2": "a", "t3": "b"}
    tables = tuple(table.model_copy(update={"module": modules.get(table.name, "")}) for table in plain.tables)
    task = plain.model_copy(update={"tables": tables})
    one, two = ([t for t in each.tables if t.name in COPIED] for each in (plain, task))
    assert copies_ms(model, two, task).compute_ms == pytest.approx(
        copies_ms(model, one, plain).compute_ms + model.operator_ms
    )
    plan = search(task, model, FEW)
    np.testing.assert_allclose(plan.predicted_ms, price_shards(model, task, plan.shards).total_ms, rtol=1e-9)


@pytest.mark.parametrize(("dense", "values"), [(None, 2), ("sgd", 0), ("adagrad", 1), ("adam", 2), ("amsgrad", 3)])
def test_a_copy_takes_weights_two_gradients_and_the_state_of_the_dense_optimizer(make_task, dense, values):
    task = copied(make_task([(1000, 16, 3.0), (1000, 8, 1.0)], [1, 1]), "t1")
    task = task.model_copy(update={"dense_optimizer": dense})
    plan, copy = search(task, AnalyticModel(), FEW), task.tables[1]
    others = sum(Part(task.tables[0], shard.rows, shard.dim).memory().total for shard in plan.by_table()["t0"])
    assert sum(plan.memory_bytes()) - others == 2 * copy.rows * copy.dim * 4 * (1 + 2 + values)
    (note,) = [note for note in plan.provenance.notes if "data-parallel" in note]
    assert f"the state of {dense or 'adam (assumed'}" in note


def test_a_plan_that_names_no_dense_optimizer_counts_what_its_tables_say(make_task):
    """As plans did before there was one to name."""
    task = copied(make_task([(1000, 16, 3.0), (1000, 8, 1.0)], [1, 1]), "t1")
    copy = task.tables[1]
    assert task.memory(Part.of(copy, copies=2)).total == copy.memory_bytes + copy.rows * copy.dim * 4


def test_a_search_may_start_from_a_plan_in_which_the_table_was_not_copied_yet(make_task):
    model = AnalyticModel()
    task = make_task(SHAPES, [1] * 3)
    before = search(task, model, FEW)
    after = search(copied(task, *COPIED), model, FEW, previous=before)
    back = search(task, model, FEW, previous=after)
    assert {s.table for s in after.shards} == {s.table for s in back.shards} == {t.name for t in task.tables}
    assert len(back.by_table()["t2"]) == 1


def test_copies_that_fit_no_device_or_leave_nothing_to_place_are_refused(make_task):
    task = make_task([(10_000_000, 64, 1.0), (1000, 8, 1.0)], [1, 1])
    with refused(Infeasible, "data-parallel", "1.0 GiB"):
        search(copied(task, "t0"), AnalyticModel(), FEW)
    nothing_else = copied(make_task([(1000, 8, 1.0)], [1, 1]), "t0")
    waiting = nothing_else.model_copy(update={"pipeline": "none"})  # for input, of which there is none then
    for task, model in ((nothing_else, AnalyticModel()), (waiting, Analytic("h100", 65536))):
        with refused(Infeasible, "every table"):
            search(task, model, FEW)


def test_a_sequence_a_pin_or_company_cannot_be_copied(make_task):
    task = make_task(SHAPES, [1] * 3)
    sequence = task.tables[2].model_copy(update={"pooling": "none"})
    with refused(InvalidInput, "'t2'", "sequence"):
        copied(task.model_copy(update={"tables": (*task.tables[:2], sequence)}), "t2")
    for rules in (
        {"tables": [{"table": "t0", "data_parallel": True, "devices": [0]}]},
        {"tables": [{"table": "t0", "data_parallel": True, "row_wise": True}]},
        {"tables": [{"table": "t0", "data_parallel": True}], "together": [["t0", "t1"]]},
    ):
        with refused(InvalidInput, "'t0'", "data-parallel"):
            ShardingTask.parse({**task.model_dump(), "constraints": rules}, "task")


def test_a_plan_with_too_few_copies_is_refused(make_task):
    plan = search(copied(make_task(SHAPES, [1] * 3), "t2"), AnalyticModel(), FEW)
    one = plan.by_table()["t2"][1]
    for shards in ([shard for shard in plan.shards if shard != one], (*plan.shards, one)):
        with refused(InvalidInput, "data-parallel"):
            Plan.parse({**plan.model_dump(), "shards": shards}, "plan")


def drawn(seed: int) -> tuple[Table, ...]:
    """Tables of all sizes, some of them tiny."""
    return drawn_tables(np.random.default_rng(seed), 30, rows=(1, 7))


def over_network(some: tuple[Table, ...], devices: int = 16, **rules: object) -> ShardingTask:
    topology = None if devices < 16 else Topology(domain=8, local_world_size=8, network_bytes_per_s=12.5e9)
    given = {"tables": some, "device_memory_bytes": (2**36,) * devices, "batch_size": 65536, "topology": topology}
    return ShardingTask.parse({**given, "constraints": Constraints(**rules)}, "task")


AUTO = SearchSettings(rounds=4, try_row_wise=True, try_data_parallel=True)


@pytest.mark.parametrize("seed", [0])
def test_small_tables_are_copied_where_that_pays(seed: int) -> None:
    model, task = Analytic("h100", 65536), over_network(drawn(seed))
    plan, plain = search(task, model, AUTO), search(task, model, replace(AUTO, try_data_parallel=False))
    copied = plan.held.constraints.data_parallel
    assert copied
    largest = max(table.rows for table in task.tables)
    assert all(table.rows < largest / 10 for table in task.tables if table.name in copied)
    assert plan.cost_ms is not None
    assert plain.cost_ms is not None
    assert plan.cost_ms < 0.95 * plain.cost_ms
    assert any("data-parallel" in note and "dense optimizer" in note for note in plan.provenance.notes)
    prices = price_shards(model, plan.held, plan.shards)
    assert prices is not None
    assert plan.predicted_ms == pytest.approx(prices.total_ms)


@pytest.mark.parametrize("seed", [9])
def test_as_many_tables_are_copied_as_is_cheapest(seed: int) -> None:
    """Copies may pay only together: each alone, or a few, make the plan dearer."""
    rng = np.random.default_rng(seed)
    small, large = drawn_tables(rng, 40, rows=(2, 4.5)), drawn_tables(rng, 3, rows=(6, 7))
    renamed = [table.model_copy(update={"name": f"large{i}"}) for i, table in enumerate(large)]
    task, model = over_network((*small, *renamed)), Analytic("h100", 65536)
    plan = search(task, model, AUTO)
    names = [table.name for table in sorted(task.tables, key=lambda table: table.rows)]
    plain = replace(AUTO, try_data_parallel=False)
    costs = {count: search(task.with_copies(names[:count]), model, plain).cost_ms for count in range(0, 41, 10)}
    assert min(costs, key=costs.__getitem__) > 10
    assert plan.cost_ms is not None
    assert plan.cost_ms < 1.02 * min(cost for cost in costs.values() if cost is not None)


def test_tables_whose_optimizer_state_is_to_stay_are_not_copied() -> None:
    """Copies are trained by the dense optimizer, which knows nothing of the state that the fused one kept."""
    model, task = Analytic("h100", 65536), over_network(drawn(0)[:16])
    once = replace(AUTO, rounds=1)
    first = search(over_network(drawn(0)[:12]), model, replace(once, try_data_parallel=False))
    loses, keeps = (
        search(task, model, replace(once, keep_optimizer_state=keep), previous=first) for keep in (False, True)
    )
    known = {table.name for table in first.task.tables}
    assert loses.held.constraints.data_parallel & known
    assert keeps.held.constraints.data_parallel.isdisjoint(known)


def test_where_links_are_fast_and_tables_large_nothing_is_copied() -> None:
    some = tuple(table.model_copy(update={"rows": 10**6}) for table in drawn(0))
    model = Analytic("h100", 65536)
    settings = replace(AUTO, try_data_parallel=False)
    assert search(over_network(some, 8), model, AUTO) == search(over_network(some, 8), model, settings)


def test_no_table_is_copied_that_a_rule_is_about_and_one_is_left() -> None:
    tiny = tuple(Table(name=f"t{i}", rows=10, dim=64, pooling_factor=1.0) for i in range(6))
    rules = (TableRule(table="t0", max_shards=1), TableRule(table="t1", data_parallel=True))
    task = over_network(tiny, tables=rules, together=(("t2", "t3"),))
    plan = search(task, Analytic("h100", 65536), AUTO)
    assert plan.held.constraints.data_parallel <= {"t1", "t4", "t5"}
    every = search(over_network(tiny), Analytic("h100", 65536), AUTO)
    assert len(every.held.constraints.data_parallel) < len(tiny)


def test_an_algorithm_that_chooses_no_copies_says_so() -> None:
    task = over_network(drawn(0), devices=4)
    for algorithm in ("size", "neuroshard-2023"):
        plan = search(task, Analytic("h100", 65536), replace(AUTO, algorithm=algorithm))
        assert not plan.held.copied
        assert plan.task.dense_optimizer is None
        assert [
            note
            for note in plan.provenance.notes
            if note.startswith(f"{algorithm} copies no tables by itself: name them")
        ]


def test_given_costs_do_not_tell_what_copies_cost() -> None:
    task = over_network(drawn(0))
    costs = GivenCosts.parse({"tables": [{"name": table.name, "cost_ms": 1.0} for table in task.tables]}, "here")
    with refused(UsageError, "given costs", "--data-parallel PATTERN"):
        search(task, Given(costs, 65536), AUTO)


@pytest.mark.parametrize(
    ("hot", "rules"),
    [
        ({"pooling": "mean", "pooling_factor": 500.0, "dim": 16}, {}),  # a row-wise one would be divided twice
        ({"pooling_factor": 500.0, "dim": 16}, {"row_wise": False}),
        ({"pooling_factor": 1.0, "dim": 1024}, {"row_wise": False, "max_shards": 1, "pipeline": "none"}),
    ],
)
def test_tables_are_copied_where_nothing_fits_without(hot: dict[str, object], rules: dict[str, object]) -> None:
    """On one device, or as column shards, a table has the inputs and outputs of all samples; a copy those of its device's."""
    tables = [{"name": "hot", "rows": 1000, **hot}, {"name": "other", "rows": 1000, "dim": 16, "pooling_factor": 1.0}]
    pipeline = rules.pop("pipeline", "sparse-dist")
    given = {"tables": tables, "device_memory_bytes": [400 * 2**20 if pipeline != "none" else 200 * 2**20] * 2}
    task = ShardingTask.parse({**given, "batch_size": 65536, "pipeline": pipeline, "constraints": rules}, "task")
    model, auto = Analytic("h100", 65536), replace(AUTO, try_row_wise="row_wise" not in rules)
    with refused(Infeasible, "'hot'", "no device can hold"):
        search(task, model, replace(auto, try_data_parallel=False))
    assert search(task, model, auto).held.constraints.data_parallel == {"hot"}

    less = task.model_copy(update={"device_memory_bytes": (2**26,) * 2})
    said = []
    for settings in (replace(auto, try_data_parallel=False), auto):
        with pytest.raises(Infeasible) as raised:
            search(less, model, settings)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_notes_are_of_the_whole_plan() -> None:
    rows = dict(zip("abc", (4_000_000, 1_000_000, 100_000), strict=True))
    tables = tuple(Table(name=name, rows=count, dim=64, pooling_factor=20.0) for name, count in rows.items())
    task = over_network(tables, 16).model_copy(update={"collective_precision": parse_precision("fp16")})
    model, task = Analytic("h100", 65536), task.with_copies("c")
    plan = search(task, model, replace(AUTO, try_data_parallel=False))
    fp32 = price_shards(model, plan.held.model_copy(update={"collective_precision": None}), plan.shards)
    assert fp32 is not None
    notes = "\n".join(plan.provenance.notes)
    assert f"in fp32 this plan takes {fp32.total_ms.max():.3f} ms" in notes
    assert "2 tables of 3 split row-wise" in notes


def test_auto_from_a_plan_with_copies_is_no_worse_than_it_where_nothing_may_move() -> None:
    """Also where it would choose other copies, if all might move."""
    model, task = Analytic("h100", 65536), over_network(drawn(0)[:10])
    smallest = [table.name for table in sorted(task.tables, key=lambda table: table.rows)][:3]
    before = search(task.with_copies(smallest), model, replace(AUTO, rounds=1, try_data_parallel=False))
    after = search(task, model, replace(AUTO, rounds=1, seed=1, move_budget_bytes=0), previous=before)
    assert moved_bytes(before, after) == 0
    assert after.cost_ms is not None
    assert before.cost_ms is not None
    assert after.cost_ms <= before.cost_ms * (1 + 1e-9)


def test_auto_is_a_word_of_the_command_line_not_a_pattern() -> None:
    tables = [{"name": f"t{i}", "rows": 10_000, "dim": 64, "pooling_factor": 10.0} for i in range(4)]
    plan = ns.search(
        tables,
        "analytic:h100",
        devices=2,
        memory="1GiB",
        batch_size=4096,
        rounds=1,
        data_parallel=["auto", "t3"],
        quiet=True,
    )
    assert "t3" in plan.held.constraints.data_parallel


def test_choosing_copies_leaves_most_of_a_time_budget_and_the_searches_use_it(ticking: None) -> None:
    task, told = over_network(drawn(0)[:10]), list[tuple[float, float]]()
    plan = search(
        task,
        Analytic("h100", 65536),
        replace(AUTO, rounds=None, time_budget_s=0.5),
        watch=clock.Watch(0.5, on_improvement=lambda seconds, ms: told.append((seconds, ms))),
    )
    assert plan.held.constraints.data_parallel
    assert plan.provenance.time_budget_s == 0.5
    assert 0.85 * 0.5 <= clock.Watch().began <= 1.02 * 0.5  # some of what is left for undoing cuts is not needed
    costs = [ms for _, ms in told]
    assert costs == sorted(costs, reverse=True)
    assert plan.cost_ms is not None
    assert plan.cost_ms <= costs[-1] * (1 + AUTO.simplicity)


def test_once_stopped_no_more_copies_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, stop = list[str](), threading.Event()

    def stopping(name: str) -> None:
        propose = getattr(algorithms, name)

        def told(*asked: Any) -> list[State]:
            tried.append(name)
            stop.set()
            return propose(*asked)

        monkeypatch.setattr(algorithms, name, told)

    stopping("first_plans")
    stopping("plans_with_copies")
    plan = search(over_network(drawn(0)), Analytic("h100", 65536), AUTO, watch=clock.Watch(stop=stop))
    assert set(tried) == {"first_plans"}
    assert STOPPED in plan.provenance.notes


def test_of_a_plan_to_start_from_copies_are_as_large_as_its_own_task_says(make_task) -> None:
    """By the dense optimizer; their tables' own would need more than a device has."""
    task = make_task([(100_000, 64, 1.0), (100_000, 64, 1.0), (10, 8, 1.0), (100_000, 16, 9.0)], [1] * 2)
    tables = tuple(table.model_copy(update={"optimizer_bytes_per_element": 8}) for table in task.tables)
    task = task.model_copy(update={"tables": tables, "dense_optimizer": "sgd"})
    before = task.with_copies({"t0", "t1", "t2"})
    need = max(memory.total for memory in device_memory(before, search(before, AnalyticModel(), FEW).shards))
    before = before.model_copy(update={"device_memory_bytes": (need + 2**20,) * 2})
    plan = search(task.with_copies({"t2"}), AnalyticModel(), FEW, previous=search(before, AnalyticModel(), FEW))
    assert plan.held.constraints.data_parallel == {"t2"}


def test_copies_that_do_not_fit_are_passed_over_without_hints(make_task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hints take seconds, and nobody would read them."""
    monkeypatch.setattr(feasibility, "hints", lambda *_: pytest.fail("hints were looked for"))
    task = make_task([(100, 64, 1.0)] * 4 + [(2000, 64, 10.0)] * 6, [1] * 2)
    need = -(-task.need_bytes // 2)
    tight = task.model_copy(update={"device_memory_bytes": (need + need // 8,) * 2})
    with_copies = with_dense_optimizer(tight.with_copies([f"t{i}" for i in range(4)]))
    assert with_copies.need_bytes > sum(with_copies.placeable_bytes)
    assert 0 < len(search(tight, AnalyticModel(), AUTO).held.copied) < 4
