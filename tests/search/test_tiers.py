"""Tables that HBM does not hold: how a device divides its HBM, the search and its bound against exact optima, and what a search
tells while it runs and has when it must stop."""

import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from bench.searching.peers_tiers import WithoutCollectives, least_ms, recshard
from helpers.costs import random_model
from helpers.tier_costs import TRUTH
from neuroshard.core.access import AccessCurve, StreamMisses
from neuroshard.core.constraints import Constraints
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import UsageError
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard, device_memory
from neuroshard.core.plan import parts_of as parts_of_shards
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.cache import miss_curve
from neuroshard.costmodel.compute_net import THRESHOLDS
from neuroshard.costmodel.network import for_task
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import Ints
from neuroshard.costmodel.report import TierErrors
from neuroshard.costmodel.tiers import CacheSizes, with_tiers
from neuroshard.report.facts import Fact, model_facts
from neuroshard.search import run
from neuroshard.search.algorithms import find
from neuroshard.search.asked import Asked
from neuroshard.search.problem.state import State
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tiers.choice import Estimates, first_choice
from neuroshard.search.tiers.divided import Divided
from neuroshard.search.tiers.division import divided
from neuroshard.search.tiers.options import DIVIDED, InTierPlan, TierProblems, linear_ms
from neuroshard.search.tiers.points import PartPoints, Points, refined
from neuroshard.search.tiers.search import search_tiers
from neuroshard.search.tiers.toggle import toggled
from neuroshard.search.watch import Watch

FEW = SearchSettings(rounds=6)
ONE = SearchSettings(rounds=1, simplicity=0.0)


def drawn(seed: int, count: int, devices: int, share: float) -> ShardingTask:
    """Zipf tables on devices whose HBM is such a share of what they need."""
    rng = np.random.default_rng(seed)
    tables = tuple(
        Table(
            name=f"t{number}",
            rows=int(10 ** rng.uniform(4, 6.3)),
            dim=int(rng.choice([16, 32, 64, 128])),
            pooling_factor=float(rng.integers(1, 30)),
            access=f"zipf:{rng.uniform(0.6, 1.3):.2f}",
        )
        for number in range(count)
    )
    roomy = ShardingTask(tables=tables, device_memory_bytes=(2**50,) * devices, batch_size=2048 * devices)
    memory = int(share * roomy.need_bytes / devices)
    return roomy.model_copy(update={"device_memory_bytes": (memory,) * devices, "host_memory_bytes": 2**44})


def parts_of(task: ShardingTask) -> tuple[PartPoints, list[Points]]:
    points = PartPoints(task, with_tiers(for_task(analytic_model("h100", task.batch_size), task)))
    return points, points(list(map(Part.of, task.placed)))


def whole_on_the_first(task: ShardingTask) -> list[Shard]:
    return [Shard(table=t.name, column_offset=0, dim=t.dim, device=0, row_offset=0, rows=t.rows) for t in task.placed]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_hbm_is_divided_at_most_1_percent_above_the_linear_programme(seed, share):
    task = drawn(seed, 30, 1, share)
    points, each = parts_of(task)
    tiers, _ = divided(task, whole_on_the_first(task), [table.name for table in task.placed], points, np.zeros(1))
    chosen = [part.at(tiers[table.name][1] or 0) for table, part in zip(task.placed, each, strict=True)]
    least = sum(float(part.nbytes[-1]) for part in each)
    assert sum(float(one.nbytes[0]) for one in chosen) <= task.placeable_bytes[0]
    assert sum(float(one.ms[0]) for one in chosen) <= 1.01 * least_ms(each, task.placeable_bytes[0] - least)


def cliffs(name: str, rng: np.random.Generator) -> Table:
    """A table that loops read, each over its own number of rows: an LRU cache that holds a little less of them holds none."""
    rows, pooling = int(10 ** rng.uniform(5, 6.5)), float(rng.integers(2, 20))
    distinct = min(0.6 * pooling * 4096, 0.04 * rows)  # no cache has more hits than rows
    loops = np.unique((rows * rng.uniform(0.05, 0.9, size=3)).round())
    left = 0.95 * distinct * (1 - np.cumsum(rng.dirichlet(np.ones(4))[: len(loops)]))
    before = np.append(0.97 * distinct, left[:-1])
    stream = StreamMisses(
        order="time",
        batches=1000,
        distinct_rows=distinct,
        first_touches=0.01 * distinct,
        cached_rows=(0.0, *np.ravel(np.column_stack([loops - 1, loops])).tolist()),
        missed_rows=(0.99 * distinct, *np.ravel(np.column_stack([before, left])).tolist()),
    )
    access = AccessCurve(batch_size=4096, group_rows=(rows,), lookups_per_row=(pooling * 4096 / rows,), stream=stream)
    return Table(name=name, rows=rows, dim=int(rng.choice([16, 32, 64, 128])), pooling_factor=pooling, access=access)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_hbm_is_divided_among_tables_of_loops_as_well_as_an_integer_programme_does(seed, share):
    """Their misses fall in cliffs, which no mixture of two caches smooths."""
    rng = np.random.default_rng(seed)
    tables = tuple(cliffs(f"t{number}", rng) for number in range(12))
    roomy = ShardingTask(tables=tables, device_memory_bytes=(2**50,), batch_size=4096, host_memory_bytes=2**44)
    task = roomy.model_copy(update={"device_memory_bytes": (int(share * roomy.need_bytes),)})
    points, each = parts_of(task)
    tiers, _ = divided(task, whole_on_the_first(task), [table.name for table in task.placed], points, np.zeros(1))
    chosen = [part.at(tiers[table.name][1] or 0) for table, part in zip(task.placed, each, strict=True)]
    room = task.placeable_bytes[0]
    assert sum(float(one.nbytes[0]) for one in chosen) <= room
    assert sum(float(one.ms[0]) for one in chosen) <= 1.002 * best_points_ms(each, room)


def best_points_ms(parts: list[Points], hbm: float) -> float:
    """The least ms of parts beyond HBM, each at one of its points."""
    owner = np.repeat(np.arange(len(parts)), [len(part.ms) - 1 for part in parts])
    once = np.zeros((len(parts), len(owner)))
    once[owner, np.arange(len(owner))] = 1.0
    nbytes = np.concatenate([part.nbytes[1:] for part in parts]) / hbm
    found = milp(
        np.concatenate([part.ms[1:] for part in parts]),
        constraints=[LinearConstraint(nbytes[None], -np.inf, 1.0), LinearConstraint(once, 1.0, 1.0)],
        integrality=np.ones(len(owner)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-3},
    )
    assert found.status == 0
    return float(found.fun)


def test_a_plan_costs_what_its_caches_miss_and_not_what_a_mixture_of_two_caches_would():
    table = cliffs("t", np.random.default_rng(0))
    rows = int(table.access.stream.cached_rows[1]) // 32 * 32  # just before a cliff
    curve, caches = miss_curve(table, 4096), CacheSizes.of(table, 4096)
    assert float(curve.hull().missed(rows)) < 0.9 * float(curve.missed(rows))
    assert float(caches.at(rows).missed[0]) == pytest.approx(float(curve.missed(rows)), rel=0.02)


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_the_cached_rows_of_a_table_on_two_devices_are_those_that_the_slowest_device_wants(seed, share):
    """Against all of its points, each with the best division of the rest; its row blocks are of unequal size."""
    task = drawn(seed, 13, 2, share)
    task = task.model_copy(update={"constraints": Constraints(row_wise=True)})
    points, _ = parts_of(task)
    first, *others = task.placed
    half = first.rows // 2 + 17
    blocks = [(0, half, 0), (half, first.rows - half, 1)]
    shards = [
        Shard(table=first.name, column_offset=0, dim=first.dim, device=device, row_offset=offset, rows=rows)
        for offset, rows, device in blocks
    ]
    shards += [
        Shard(table=t.name, column_offset=0, dim=t.dim, device=n % 2, row_offset=0, rows=t.rows)
        for n, t in enumerate(others)
    ]
    names, busy = [table.name for table in task.placed], np.array([0.3, 0.1])
    tiers, _ = divided(task, shards, names, points, busy)
    assert all(
        memory.total <= hbm
        for memory, hbm in zip(device_memory(task.with_tiers(tiers), shards), task.usable_bytes, strict=True)
    )

    def slowest_ms(of_first: int) -> float:
        parts = parts_of_shards(task, shards)
        on = [[part for shard, part in zip(shards, parts, strict=True) if shard.device == device] for device in (0, 1)]
        total = []
        for device, some in enumerate(on):
            own, *rest = points(some)
            at = own.at(of_first)
            room = task.usable_bytes[device] - float(at.nbytes[0]) - sum(float(one.nbytes[-1]) for one in rest)
            if room < 0:
                return np.inf
            total.append(busy[device] + float(at.ms[0]) + least_ms(rest, room))
        return max(total)

    rows = points([Part.of(first)])[0].rows[1::3].astype(int).tolist()
    assert slowest_ms(tiers[first.name][1] or 0) <= 1.02 * min(map(slowest_ms, rows))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_tables_on_the_same_devices_share_their_hbm_as_an_integer_programme_does(seed, share):
    """Each is split into equal row blocks over two devices, so what one of them has, the others lack on both."""
    task = drawn(seed, 4, 2, share)
    task = task.model_copy(
        update={
            "tables": tuple(t.model_copy(update={"rows": t.rows // 64 * 64}) for t in task.tables),
            "constraints": Constraints(row_wise=True),
        }
    )
    shards = [
        Shard(table=t.name, column_offset=0, dim=t.dim, device=n, row_offset=n * t.rows // 2, rows=t.rows // 2)
        for t in task.placed
        for n in (0, 1)
    ]
    points, _ = parts_of(task)
    tiers, _ = divided(task, shards, [table.name for table in task.placed], points, np.zeros(2))
    halves = points([part for n, part in enumerate(parts_of_shards(task, shards)) if n % 2 == 0])
    chosen = [half.at(tiers[t.name][1] or 0) for t, half in zip(task.placed, halves, strict=True)]
    room = task.usable_bytes[0] - sum(float(one.nbytes[-1]) for one in halves)
    assert sum(float(one.nbytes[0] - half.nbytes[-1]) for one, half in zip(chosen, halves, strict=True)) <= room
    assert sum(float(one.ms[0]) for one in chosen) <= 1.01 * least_ms(halves, room, whole=True)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_dual_of_a_device_is_never_above_its_optimum_and_within_2_percent(seed, share):
    task = drawn(seed, 12, 1, share)
    points, each = parts_of(task)
    parts = list(map(Part.of, task.placed))
    hbm, optimum = task.placeable_bytes[0], relaxed_ms(each, task.placeable_bytes[0])
    coarse = Divided(points.model, hbm, points.prices(), points)
    terms = coarse.of_parts(parts).sum(axis=0)
    assert float(coarse.terms_ms(terms)) <= optimum * (1 + 1e-6)
    fine = Divided(points.model, hbm, refined(coarse.prices, coarse.price_of(terms[None])), points)
    dual = float(fine.terms_ms(fine.of_parts(parts).sum(axis=0)))
    assert 0.98 * optimum <= dual <= optimum * (1 + 1e-6)


def relaxed_ms(parts: list[Points], hbm: float) -> float:
    """The least ms of parts that share so many bytes, each a mixture of its points: no choice of points takes less."""
    owner = np.repeat(np.arange(len(parts)), [len(part.ms) for part in parts])
    once = np.zeros((len(parts), len(owner)))
    once[owner, np.arange(len(owner))] = 1.0
    nbytes = np.concatenate([part.nbytes for part in parts]) / hbm
    found = linprog(np.concatenate([part.ms for part in parts]), nbytes[None], [1.0], once, np.ones(len(parts)))
    assert found.status == 0
    return float(found.fun)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_what_the_search_sees_of_a_plan_is_what_it_costs(share):
    task = drawn(5, 16, 4, share)
    found = search_tiers(Asked.of(task, model := for_task(analytic_model("h100", task.batch_size), task), FEW, Watch()))
    planned = task.with_tiers(found.plan.tiers)
    prices = price_shards(model, planned, found.plan.shards)
    assert prices is not None
    assert prices.total_ms.max() == pytest.approx(found.plan.cost)
    chosen = 1e-6 if found.plan.choice.max() <= DIVIDED else 0.02  # a share of cached rows, which a device betters
    assert 0.98 * found.plan.cost <= found.plan.state.cost <= found.plan.cost * (1 + chosen)


@pytest.mark.parametrize(("seed", "share"), [(0, 0.1), (1, 0.25), (2, 0.5)])
def test_whole_tables_are_planned_within_1_percent_of_the_optimum_and_the_bound_is_below_it(seed, share):
    task = drawn(seed, 10, 3, share).model_copy(update={"constraints": Constraints(max_shards=1)})
    model = WithoutCollectives("h100", task.batch_size)
    optimum = recshard(task, model, 120.0)
    assert optimum is not None
    plan = search(task, model, SearchSettings())
    assert plan.cost_ms <= 1.01 * optimum.cost_ms
    assert plan.lower_bound_ms <= optimum.cost_ms * (1 + 1e-3)


def problems_of(task: ShardingTask) -> tuple[Asked, TierProblems, State]:
    """What is asked, the task's problems, and a plan in which parts of tables may be in any tier."""
    model = for_task(analytic_model("h100", task.batch_size), task)
    asked, points = Asked.of(task, model, ONE, Watch()), PartPoints(task, with_tiers(model))
    problems = TierProblems(asked, points.prices(), points)
    return asked, problems, find(problems.anywhere, asked).best


def test_first_tiers_fill_the_hbm_that_they_are_given_and_take_fewer_ms_with_more_of_it():
    """A large table has one share of cached rows, so what is left of HBM must go to the next larger share."""
    _, problems, relaxed = problems_of(drawn(5, 8, 4, 0.25))
    assert problems.large.any()
    model = relaxed.problem.model
    assert isinstance(model, Divided)
    ms, nbytes = (linear_ms(problems, relaxed, slope) for slope in model.parts_of_slope(relaxed.sums))
    hbm, each, taken = sum(problems.task.placeable_bytes), np.arange(len(problems.large)), []
    for share in (0.4, 0.6, 0.8, 0.97):
        choice = first_choice(problems, Estimates.of(problems, relaxed), share)
        assert nbytes[choice, each].sum() <= share * hbm
        taken.append(ms[choice, each].sum())
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] < taken[0]


def test_from_a_plan_each_choice_of_tiers_is_tried_once(monkeypatch):
    asked, problems, relaxed = problems_of(drawn(5, 8, 4, 0.25))
    choice = first_choice(problems, Estimates.of(problems, relaxed), 0.9)
    plan, tried = problems.in_tiers(find(problems.of(choice), asked).best, choice), list[bytes]()

    def never_better(state: State, choice: Ints) -> InTierPlan:
        tried.append(choice.tobytes())
        return replace(plan, cost=np.inf)

    monkeypatch.setattr(problems, "in_tiers", never_better)
    assert toggled(problems, plan, asked, np.random.default_rng(0)) is plan
    assert 1 < len(tried) == len(set(tried))


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_is_below_the_bound(seed):
    """Cuts are allowed: the bound is of all plans, so the cheapest of two searches is not below either's."""
    task = drawn(seed, 10, 3, 0.25)
    model = analytic_model("h100", task.batch_size)
    plans = [search(task, model, SearchSettings(rounds=rounds, seed=rounds, try_row_wise=True)) for rounds in (1, 4)]
    assert max(plan.lower_bound_ms for plan in plans) <= min(plan.cost_ms for plan in plans)


def test_tables_that_fit_but_cannot_be_packed_go_to_host_memory():
    """Three tables of 0.6 of a device fill 0.9 of two devices, but only two of them can be there."""
    tables = tuple(
        Table(name=f"t{n}", rows=100_000, dim=64, pooling_factor=p) for n, p in enumerate((9.0, 8.0, 7.0, 0.1))
    )
    memory = int(tables[0].memory_bytes / 0.6)
    rules = Constraints(max_shards=1)
    task = ShardingTask(tables=tables, device_memory_bytes=(memory,) * 2, batch_size=8192, constraints=rules)
    task = task.model_copy(update={"host_memory_bytes": 2**40})
    plan = search(task, analytic_model("h100", task.batch_size), FEW)
    assert {"t3"} < set(plan.held.constraints.beyond_hbm)


def test_a_task_that_leaves_room_in_hbm_is_planned_as_without_host_memory(monkeypatch):
    task = drawn(0, 12, 4, 2.5)
    model = analytic_model("h100", task.batch_size)
    monkeypatch.setattr(run, "cheaper_beyond", None)  # nothing beyond HBM is sought
    plan, without = (search(one, model, FEW) for one in (task, task.model_copy(update={"host_memory_bytes": None})))
    assert (plan.shards, plan.predicted_ms, plan.lower_bound_ms) == (
        without.shards,
        without.predicted_ms,
        without.lower_bound_ms,
    )


def with_a_large_table(share: float, pooling: float) -> ShardingTask:
    """As `drawn`, and one table of two thirds of all bytes, larger than a device."""
    task = drawn(1, 12, 8, 1.0)
    rows = 2 * sum(table.rows * table.dim for table in task.tables) // 32
    large = Table(name="large", rows=rows, dim=32, pooling_factor=pooling, access="zipf:0.6")
    task = task.model_copy(update={"tables": (*task.tables, large)})
    memory = int(share * task.need_bytes / task.devices)
    return task.model_copy(update={"device_memory_bytes": (memory,) * task.devices})


def test_a_large_table_that_hbm_holds_only_in_costly_cuts_goes_to_host_memory():
    task = with_a_large_table(1.1, pooling=0.01)
    model, settings = analytic_model("h100", task.batch_size), SearchSettings(rounds=6, try_row_wise=True)
    plan, without = (
        search(one, model, settings) for one in (task, task.model_copy(update={"host_memory_bytes": None}))
    )
    assert set(plan.held.constraints.beyond_hbm) == {"large"}
    assert plan.cost_ms < 0.97 * without.cost_ms


@pytest.mark.parametrize("host_memory", [2**44, 1])
def test_a_table_that_is_read_too_often_for_host_memory_stays_in_tight_hbm(host_memory):
    task = with_a_large_table(1.1, pooling=200.0).model_copy(update={"host_memory_bytes": host_memory})
    model, settings = analytic_model("h100", task.batch_size), SearchSettings(rounds=6, try_row_wise=True)
    plan, without = (
        search(one, model, settings) for one in (task, task.model_copy(update={"host_memory_bytes": None}))
    )
    assert "large" not in plan.held.constraints.beyond_hbm
    assert plan.lower_bound_ms <= plan.cost_ms <= without.cost_ms


@pytest.mark.parametrize("rates", [0, len(THRESHOLDS)], ids=["convex", "bending"])
def test_a_trained_model_of_gpus_prices_tiers_by_the_bus_of_their_datasheet(rates):
    task = drawn(0, 12, 2, 0.3).model_copy(update={"batch_size": 65536})
    nets = random_model(2, rates=rates)
    bench = nets.manifest.bench.model_copy(
        update={"backend": "cuda", "hardware": Hardware(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=2**36)}
    )
    model = replace(nets, manifest=nets.manifest.model_copy(update={"bench": bench}))
    plan = search(task, model, FEW)
    prices = price_shards(model, plan.held, plan.shards)
    assert plan.held.constraints.beyond_hbm
    assert plan.cost_ms == pytest.approx(float(prices.total_ms.max()))
    assert plan.lower_bound_ms <= plan.cost_ms
    assert any("not measured" in note for note in plan.provenance.notes)
    with pytest.raises(UsageError, match=r"knows no memory beyond HBM.*: backend synthetic has no tiers"):
        search(task, nets, FEW)  # of no GPU


NO_CACHE_PAYS = TRUTH.model_copy(update={"cached_forward": TRUTH.cached_forward.model_copy(update={"table_ms": 50.0})})


@pytest.mark.parametrize("measured", [TRUTH, NO_CACHE_PAYS], ids=["usual", "no cache pays"])
def test_a_model_that_was_measured_beyond_hbm_prices_tiers_by_that(measured):
    """Plan, prices, bound and notes, also where the constants are unlike those of any datasheet."""
    task = drawn(0, 12, 2, 0.3).model_copy(update={"batch_size": 65536})
    nets = random_model(2)
    bench = nets.manifest.bench.model_copy(
        update={"backend": "cuda", "hardware": Hardware(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=2**36)}
    )
    report = nets.report.model_copy(update={"tiers": {"cached": TierErrors(train_cases=24, values=8, mape=0.031)}})
    fields = {"bench": bench, "tiers": measured.model_copy(update={"cases": 36}), "report": report}
    model = replace(nets, manifest=nets.manifest.model_copy(update=fields))
    plan = search(task, model, FEW)
    rules = plan.held.constraints.beyond_hbm
    assert plan.cost_ms == pytest.approx(float(price_shards(model, plan.held, plan.shards).total_ms.max()))
    assert 0 < plan.lower_bound_ms <= plan.cost_ms
    said = "as measured beyond HBM on NVIDIA H100 80GB HBM3 (36 cases; off on cases held out: cached 3.1%)"
    assert any(note.endswith(f"of a device's step, {said}") for note in plan.provenance.notes)
    assert not any("not measured" in note for note in plan.provenance.notes if "beyond HBM" in note)
    assert {rule.tier for rule in rules.values()} >= {"host"}
    if measured is NO_CACHE_PAYS:
        assert {rule.tier for rule in rules.values()} == {"host"}
    assert Fact("tables beyond HBM", said) in model_facts(model)


def planned(watch: Watch, settings: SearchSettings = FEW, seed: int = 1) -> Plan:
    task = drawn(seed, 16, 4, 0.25)
    plan = search(task, analytic_model("h100", task.batch_size), settings, watch=watch)
    assert plan.held.constraints.beyond_hbm
    return plan


@pytest.mark.parametrize("seed", range(3))
def test_every_better_plan_in_tiers_is_told_of_and_no_relaxation_is(seed):
    told: list[float] = []
    plan = planned(Watch(on_improvement=lambda _, ms: told.append(ms)), seed=seed)
    assert [improvement.cost_ms for improvement in plan.improvements] == told
    assert told[-1] == pytest.approx(plan.cost_ms)
    assert all(later < before for before, later in pairwise(told))
    steps = [improvement.step for improvement in plan.improvements]
    assert steps == sorted(steps)


def test_a_search_that_is_stopped_has_the_best_plan_so_far():
    stop = threading.Event()
    stop.set()
    at_once = planned(Watch(stop=stop))
    assert any("stopped by hand" in note for note in at_once.provenance.notes)
    assert at_once.improvements[-1].cost_ms == pytest.approx(at_once.cost_ms)

    stop, told = threading.Event(), list[float]()

    def enough(_: float, ms: float) -> None:
        told.append(ms)
        if len(told) == 2:
            stop.set()

    after_two = planned(Watch(stop=stop, on_improvement=enough))
    assert after_two.cost_ms == pytest.approx(min(told))
    assert planned(Watch()).cost_ms <= after_two.cost_ms <= at_once.cost_ms


@pytest.mark.usefixtures("ticking")
def test_a_time_budget_ends_a_search_with_the_best_plan_so_far():
    short = planned(Watch(0.001), SearchSettings(time_budget_s=0.001))
    longer = planned(Watch(1.0), SearchSettings(time_budget_s=1.0))
    assert longer.cost_ms <= short.cost_ms
    for plan in (short, longer):
        assert plan.improvements[-1].cost_ms == pytest.approx(plan.cost_ms)
        assert plan.lower_bound_ms <= plan.cost_ms
