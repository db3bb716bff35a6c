"""Local search: moves, swaps and perturbing; packing, and the heuristics' keys."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.states import whole
from neuroshard.core.constraints import Constraints
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search import watch
from neuroshard.search.improve import local_search
from neuroshard.search.improve.descent import candidates, descend, step
from neuroshard.search.improve.local_search import LocalSearch
from neuroshard.search.improve.moves import Moves, changes, price
from neuroshard.search.improve.neighborhood import Neighborhood
from neuroshard.search.improve.perturb import perturbed
from neuroshard.search.improve.swaps import Takes
from neuroshard.search.infeasible.packing import deals, pack
from neuroshard.search.problem.filling import Shares
from neuroshard.search.problem.layout import lay_out
from neuroshard.search.problem.objective import Objective, SoftMaximum
from neuroshard.search.problem.plans import Plans
from neuroshard.search.problem.problem import Problem
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.baselines import KEYS, baseline
from neuroshard.search.proposers.splits import halves
from neuroshard.search.tuning import TUNING, Tuning
from neuroshard.search.watch import Watch

MANY = TUNING.receivers + 4


def improved(state: State, rounds: int = 0) -> State:
    return LocalSearch([state], np.random.default_rng(0), Watch()).run(rounds)


def test_what_is_guessed_to_be_very_many_times_the_slowest_counts_as_infinite(make_task, model):
    objective = Objective.of(Problem(make_task([(1000, 8, 1.0)] * 2, [8] * 2), model))
    assert objective.power(np.array([-1.0, 0.5, 1.0, 1e6])).tolist() == [0.0, 0.5**64, 1.0, np.inf]


class ByTheWidest(AnalyticModel):
    """Forward, a device takes 3 us a column of its own; backward 2, and 1 more a column of the widest."""

    def forward_collective_ms(self, device_dims, start_delays_ms):
        return start_delays_ms + 0.003 * device_dims

    def backward_collective_ms(self, device_dims):
        return 0.002 * device_dims + 0.001 * device_dims.max(axis=-1, keepdims=True)


def test_a_column_costs_its_own_device_and_if_that_is_the_widest_all(make_task):
    """The forward all-to-alls of all end with that of the widest."""
    objective = Objective.of(Problem(make_task([(1000, 64, 1.0)] * 4, [8] * 4), ByTheWidest()))
    assert (objective.own_ms, objective.all_ms) == pytest.approx((0.002, 0.001 + 0.003))


def test_improvement_balances_what_lies_all_on_one_device(make_task, model):
    problem = Problem(make_task([(1000, 64, 20.0)] * 8, [1, 1]), model)
    assert improved(whole(problem, [0] * 8)).cost == pytest.approx(whole(problem, [0, 1] * 4).cost)


def test_improvement_never_makes_a_plan_worse_nor_overfills_a_device(make_task, model):
    rng = np.random.default_rng(0)
    shapes = [(int(rng.integers(1, 1000)) * 100, int(rng.integers(1, 33)) * 4, rng.uniform(0, 100)) for _ in range(12)]
    for _ in range(20):
        devices = [0, 1, 2, *rng.integers(0, 3, 9).tolist()]
        used = 2**30 - whole(Problem(make_task(shapes, [1] * 3), model), devices).free
        problem = Problem(make_task(shapes, (used * 1.05 / 2**30).tolist()), model)
        start = whole(problem, devices)
        better = improved(start, rounds=3)
        assert better.cost <= start.cost
        assert (better.free >= 0).all()
        assert better.widths.sum(axis=1).tolist() == problem.all_units.tolist()


def test_more_rounds_are_never_worse(make_task, model):
    rng = np.random.default_rng(4)
    shapes = [(1000, int(rng.integers(1, 33)) * 4, rng.uniform(0, 100)) for _ in range(20)]
    problem = Problem(make_task(shapes, [1] * 4), model)
    start = whole(problem, rng.integers(0, 4, 20).tolist())
    costs = [improved(start, rounds).cost for rounds in (0, 2, 10)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] < start.cost


def test_the_search_goes_on_from_what_costs_little_more_and_keeps_the_cheapest(make_task, model):
    problem = Problem(make_task([(1000, 64, 20.0)] * 8, [1, 1]), model)
    one = LocalSearch([whole(problem, [0, 1] * 4)], np.random.default_rng(0), Watch())
    first = one.best
    little, much, less = (
        cast(State, SimpleNamespace(cost=first.cost * more))
        for more in (1 + 0.9 * TUNING.worse, 1 + 1.1 * TUNING.worse, 0.5)
    )
    one._met(much)
    assert (one.at, one.best) == (first, first)
    one._met(little)
    assert (one.at, one.best) == (little, first)
    one._met(less)
    assert (one.at, one.best) == (less, less)


@pytest.mark.parametrize(("toggle", "finds"), [(True, True), (True, False), (False, True)])
def test_every_other_round_toggles_a_table_where_tables_may_be_spread(make_task, model, monkeypatch, toggle, finds):
    asked = []

    def told(name: str, found: State | None) -> None:
        monkeypatch.setattr(local_search, name, lambda *_: asked.append(name) or found)

    start = whole(Problem(make_task([(1000, 64, 20.0)] * 8, [1, 1]), model), [0, 1] * 4)
    told("perturbed", start)
    told("toggled", start if finds else None)
    LocalSearch([start], np.random.default_rng(0), Watch(), toggle=toggle).run(6)
    either = ["toggled"] if finds else ["toggled", "perturbed"]
    assert asked == ([*either, "perturbed"] * 3 if toggle else ["perturbed"] * 6)


@pytest.mark.parametrize(
    ("devices", "rounds", "expected"), [(MANY, 40, 10), (MANY, 100, 25), (MANY, 8, 8), (4, 40, 40)]
)
def test_on_many_devices_rounds_that_gain_nothing_are_the_last(
    make_task, model, monkeypatch, devices, rounds, expected
):
    start = whole(Problem(make_task([(1000, 64, 20.0)] * devices, [1] * devices), model), list(range(devices)))
    one, met = LocalSearch([start], np.random.default_rng(0), Watch()), list[State]()
    monkeypatch.setattr(local_search, "perturbed", lambda *_: start)
    monkeypatch.setattr(one, "_met", met.append)
    one.run(rounds)
    assert len(met) == expected


def test_on_many_devices_rounds_go_on_while_they_gain(make_task, model, monkeypatch):
    start = whole(Problem(make_task([(1000, 64, 20.0)] * MANY, [1] * MANY), model), list(range(MANY)))
    one, met = LocalSearch([start], np.random.default_rng(0), Watch()), list[State]()

    def meets(found: State) -> None:
        met.append(found)
        gain = 1 - 2 * TUNING.least_gain * (len(met) == TUNING.patience)
        one.best = cast(State, SimpleNamespace(cost=one.best.cost * gain))

    monkeypatch.setattr(local_search, "perturbed", lambda *_: start)
    monkeypatch.setattr(one, "_met", meets)
    one.run(40)
    assert len(met) == 2 * TUNING.patience


def crowd(make_task, model, seed: int, count: int, devices: int = 4, tuning: Tuning = TUNING) -> Plans:
    """Some plans of one task, at random."""
    rng, tables = np.random.default_rng(seed), max(15, 3 * devices)
    shapes = [(int(10 ** rng.uniform(3, 6)), int(rng.integers(1, 33)) * 4, rng.uniform(0, 100)) for _ in range(tables)]
    problem = Problem(make_task(shapes, [1] * devices), model, tuning)
    return Plans([whole(problem, rng.integers(0, devices, tables).tolist()) for _ in range(count)])


@pytest.mark.parametrize("devices", [4, MANY])
def test_what_plans_count_after_many_steps_is_what_they_would_count_anew(make_task, model, devices):
    plans = crowd(make_task, model, 2, 3, devices)
    rounds = 0
    for changed in descend(plans, Objective.of(plans.problem), np.random.default_rng(0)):
        assert set(changed) <= {0, 1, 2}
        rounds += 1
        for plan, widths in enumerate(plans.widths):
            anew = State(plans.problem, widths)
            for name in ("sums", "dims", "free", "shards", "compute", "cost"):
                np.testing.assert_allclose(getattr(plans, name)[plan], getattr(anew, name), rtol=1e-9, err_msg=name)
            assert ((widths.T > 0) == plans.held[plan]).all()
            assert (anew.free >= 0).all()
            prices = price_shards(model, plans.problem.task, lay_out(anew))
            assert plans.cost[plan] == pytest.approx(prices.total_ms.max(), rel=1e-9)
    assert rounds > 5


@pytest.mark.parametrize("all_priced", [True, False])
def test_what_a_shard_adds_to_a_device_is_estimated_from_what_the_device_holds(make_task, model, all_priced):
    few_priced = replace(TUNING, price_all_up_to=0, price_at_once=1)
    plans = crowd(make_task, model, 4, 2, tuning=TUNING if all_priced else few_priced)
    assert bool(plans.slot_ms.size) == all_priced
    next(descend(plans, Objective.of(plans.problem), np.random.default_rng(0)))
    problem, plan, group = plans.problem, np.array([0, 1, 1]), np.array([3, 0, 7])
    devices = np.array([[0, 1], [2, 3], [1, 0]])
    slope = model.compute_slope(plans.sums)[plan[:, None], devices]  # (3, 2, K)
    flat, begins = plans.added(plan, devices, group, np.array([2, 2, 2]))
    assert not flat[begins].any()
    for units in (1, 2):
        vectors = problem.vectors[problem.first[group] + units]
        expected = np.einsum("nrk,nk->nr", slope, vectors)
        assert (expected > 0).all()
        np.testing.assert_allclose(flat[begins + units], expected, rtol=1e-12)
        of_each, so_many = np.repeat(group[:, None], 2, axis=1), np.full((3, 2), units)
        np.testing.assert_allclose(plans.added_each(plan[:, None], devices, of_each, so_many), expected, rtol=1e-12)
        np.testing.assert_allclose(
            plans.added_each(plan[:, None], devices[:, :1], of_each, so_many)[:, 0], expected[:, 0], rtol=1e-12
        )


def test_a_plan_in_place_of_another_is_as_if_it_had_been_there_from_the_start(make_task, model):
    plans = crowd(make_task, model, 5, 3)
    problem, other = plans.problem, State(plans.problem, crowd(make_task, model, 5, 4).widths[3])
    plans.replace(1, other)
    anew = Plans([State(problem, plans.widths[0]), other, State(problem, plans.widths[2])])
    for name, array in vars(anew).items():
        if isinstance(array, np.ndarray):
            np.testing.assert_allclose(getattr(plans, name), array, rtol=1e-12, err_msg=name)


def test_as_many_plans_as_may_be_are_in_lockstep_until_no_more_rounds_are_left(make_task, model, monkeypatch):
    in_lockstep = []

    def counted(plans, objective, rng, moving, *more):
        in_lockstep.append(int(moving.sum()))
        return step(plans, objective, rng, moving, *more)

    plans = crowd(make_task, model, 5, 1)
    start = State(plans.problem, plans.widths[0])
    one = LocalSearch([start], np.random.default_rng(0), Watch())
    monkeypatch.setattr(local_search, "step", counted)
    one.run(20)
    assert one.tried == 20
    assert in_lockstep == sorted(in_lockstep, reverse=True)
    assert in_lockstep[0] == in_lockstep[len(in_lockstep) // 2] == TUNING.lockstep_plans
    assert in_lockstep[-1] == 1


def test_plans_in_lockstep_end_where_each_would_alone(make_task, model):
    together = crowd(make_task, model, 5, 3)
    apart = crowd(make_task, model, 5, 3)
    objective = Objective.of(together.problem)
    alone = [Plans([State(apart.problem, widths)]) for widths in apart.widths]
    for plans in (together, *alone):
        for _ in descend(plans, objective, np.random.default_rng(0)):
            pass
    assert [one.cost[0] for one in alone] == pytest.approx(together.cost.tolist(), rel=1e-9)
    assert all((one.widths[0] == widths).all() for one, widths in zip(alone, together.widths, strict=True))


def test_on_many_devices_those_with_more_load_take_what_the_least_loaded_have_no_room_for(make_task, model):
    """30 devices with less load are full; only nine that hold more have room."""
    shapes = [*[(1000, 4, 100.0)] * 30, *[(10**6, 4, 1800.0)] * 30, *[(1000, 4, 2000.0)] * 9]
    devices = [0] * 30 + list(range(1, 40))
    full = whole(Problem(make_task(shapes, [1] * 40), model), devices)
    used = 2**30 - full.free
    start = whole(Problem(make_task(shapes, [*(used[:31] / 2**30), *[1] * 9]), model), devices)
    better = improved(start)
    assert start.compute.argmax() == 0
    assert start.compute[1:31].max() < start.compute[31:].min()
    assert better.compute.max() < 0.7 * start.compute[0]


def test_where_devices_hold_very_many_shards_some_that_fit_are_offered_for_swaps(make_task, model):
    problem = Problem(make_task([(1000, 64, float(pooling)) for pooling in range(1, 61)], [1] * 2), model)
    start = whole(problem, [0] * 30 + [1] * 30)
    of_all = improved(start).cost
    problem.tuning = replace(TUNING, offers_seen=10)
    plans, zero = Plans([start]), np.zeros(1, dtype=np.int64)
    soft = SoftMaximum(Objective.of(problem), plans.compute, plans.dims)

    def seen() -> Neighborhood:
        return Neighborhood(plans, soft, zero, zero + 1, zero[:, None], np.random.default_rng(0))

    weighed = Takes.of(seen())
    assert weighed is not None
    assert weighed.fits.all()
    assert 5 <= len(set(weighed.take[0].tolist())) == weighed.take.size <= 15
    assert improved(start).cost == pytest.approx(of_all, rel=1e-3)


def test_where_a_device_holds_very_many_shards_steps_are_sought_for_some_of_them_drawn_anew(make_task, model):
    problem = Problem(make_task([(1000, 64, float(pooling)) for pooling in range(1, 61)], [1] * 2), model)
    start = whole(problem, [0] * 58 + [1] * 2)
    of_all = improved(start).cost
    problem.tuning = replace(TUNING, shards_seen=10)
    plans, zero, rng = Plans([start]), np.zeros(1, dtype=np.int64), np.random.default_rng(0)
    soft = SoftMaximum(Objective.of(problem), plans.compute, plans.dims)
    drawn = [set(Neighborhood(plans, soft, zero, zero, zero[:, None] + 1, rng).give.tolist()) for _ in range(60)]
    assert set.union(*drawn) == set(range(58))
    assert 8 <= np.mean([len(some) for some in drawn]) <= 12
    assert improved(start).cost == pytest.approx(of_all, rel=1e-3)


def test_progress_is_reported_within_a_round_and_counts_rounds_alone(make_task, model, monkeypatch):
    class Told:
        def __init__(self):
            self.steps = []

        def advance(self, steps=1, figure=""):
            self.steps.append((steps, figure))

    monkeypatch.setattr(watch, "SHOWN_EVERY_S", 0.0)
    bar, told = Told(), Watch()
    told.bar = bar
    problem = Problem(make_task([(1000, 64, 20.0)] * 8, [1, 1]), model)
    best = LocalSearch([whole(problem, [0] * 8)], np.random.default_rng(0), told).run(2)
    steps = [steps for steps, _ in bar.steps]
    assert steps[:2] == [0.0, 0.0]
    assert sum(steps) == 2
    assert bar.steps[-1][1] == f"best {best.cost:.3f} ms"


def test_a_step_changes_the_objective_by_what_was_priced(make_task, model):
    plans = crowd(make_task, model, 3, 2)
    objective = Objective.of(plans.problem)
    soft = SoftMaximum(objective, plans.compute, plans.dims)

    def measure(one: State, plan: int) -> float:
        load = objective.power(objective.load(one.compute, one.dims) / soft.slowest[plan])
        wide = objective.power(one.dims / soft.widest[plan])
        return float(soft.weights[0, plan] * load.sum() + soft.weights[1, plan] * wide.sum())

    of, devices = np.nonzero(soft.worst_devices)
    steps = candidates(plans, soft, of, devices, np.random.default_rng(0))
    assert (steps.take >= 0).any()
    assert (steps.take < 0).any()
    assert set(steps.plan.tolist()) == {0, 1}
    for index, change in enumerate(price(plans, soft, steps).change):
        plan = int(steps.plan[index])
        items, devices, units = changes(steps, index)
        widths = plans.widths[plan].copy()
        before = State(plans.problem, widths.copy())
        widths[items, devices] += units
        after = State(plans.problem, widths)
        assert (after.free >= 0).all()
        assert measure(after, plan) - measure(before, plan) == pytest.approx(change, rel=1e-9, abs=1e-12)


def test_no_move_nor_swap_makes_more_shards_of_a_table_than_it_may_have(make_task, model):
    rng, count = np.random.default_rng(0), 12
    shapes = [(1000, 8 * int(rng.integers(4, 17)), rng.uniform(1, 100)) for _ in range(count)]
    two = make_task(shapes, [1] * 4).model_copy(update={"constraints": Constraints(max_shards=2)})
    problem = Problem(two, model, replace(TUNING, nearly_full=0.0))  # so parts of shards are taken too
    widths = np.zeros((count, 4), dtype=np.int64)
    for group in range(count):
        widths[group, rng.choice(4, size=1 + group % 2, replace=False)] = problem.all_units[group] // (1 + group % 2)
    plans = Plans([State(problem, widths)])
    soft = SoftMaximum(Objective.of(problem), plans.compute, plans.dims)
    of, devices = np.nonzero(np.ones((1, 4), dtype=bool))
    steps = candidates(plans, soft, of, devices, rng)
    assert len(steps)
    for index in range(len(steps)):
        groups, devices, units = changes(steps, index)
        after = widths.copy()
        after[groups, devices] += units
        assert np.count_nonzero(after, axis=1).max() <= 2


def test_a_table_wider_than_any_shard_weighs_as_much_as_the_shards_that_it_is_cut_into(make_task, model):
    """The net has seen 128 columns."""
    other = (1000, 128, 2.0)
    wide, cut = (
        Problem(make_task([*of, other], [1] * 4), model) for of in ([(1000, 512, 1.0)], [(1000, 128, 1.0)] * 4)
    )
    weights, expected = Shares.of(wide).ms, Shares.of(cut).ms
    assert weights.tolist() == pytest.approx([expected[:4].sum(), expected[4]])


def test_a_table_wider_than_any_shard_is_placed_anew_by_the_weight_of_all_of_it(make_task, model):
    """Only one shard of it weighs less than the other table."""
    problem = Problem(make_task([(1000, 512, 1.0), (1000, 128, 2.0)], [1] * 4), model)
    problem.tuning = replace(TUNING, perturb_share=(1.0, 1.0), perturb_order=(1.0, 1.0))
    state = State(problem, np.array([[32] * 4, [32, 0, 0, 0]]))
    placed, price_them = [], problem.price

    def priced(shards: np.ndarray) -> None:
        if len(shards) == 1:
            placed.append(int(problem.group[shards[0]]))
        price_them(shards)

    problem.price = priced
    perturbed(state, Objective.of(problem), np.random.default_rng(0))
    assert placed[0] == 0


def test_where_the_slowest_device_cannot_be_eased_the_columns_of_the_others_are_levelled(make_task, model):
    """One table that is not to be cut outweighs all others; what an all-to-all takes goes by the most columns on any device."""
    task = make_task([(1000, 4, 1000.0)] + [(1000, 64, 0.1)] * 6, [1] * 4)
    problem = Problem(task, model)
    better = improved(whole(problem, [0, 1, 1, 1, 1, 2, 3]))
    assert better.dims.max() == 128


def test_a_move_cuts_a_table_into_shards_as_narrow_as_may_be(make_task, model):
    task = make_task([(1000, 64, 50.0), (1000, 4, 0.1)], [1] * 2)
    ruled = task.model_copy(update={"constraints": Constraints(min_dim=32)})
    assert improved(whole(Problem(ruled, model), [0, 0])).widths[0].tolist() == [8, 8]


def test_a_move_of_the_first_table_changes_it_on_two_devices():
    of = np.array([0])
    groups, devices, units = changes(Moves(of, of, of, of + 3, of + 1, of - 1, of), 0)
    assert [groups.tolist(), devices.tolist(), units.tolist()] == [[0, 0], [0, 1], [-3, 3]]


def test_tables_that_can_only_lie_as_they_do_are_not_perturbed(make_task, model):
    tables = [(1000, 64, 20.0)] * 3
    one, two = (Problem(make_task(tables, [1] * devices), model) for devices in (1, 2))
    rng = np.random.default_rng(0)
    alone, beside = whole(one, [0] * 3), whole(two, [0] * 3)
    assert all(perturbed(alone, Objective.of(one), rng) is alone for _ in range(5))
    assert any(perturbed(beside, Objective.of(two), rng) is not beside for _ in range(5))


def test_a_packing_cuts_shards_as_narrow_as_may_be(make_task, model):
    """The widest room is for three of the four units, the other for one."""
    task = make_task([(1000, 16, 1.0)], [1] * 2).model_copy(update={"pipeline": "none"})
    problem = Problem(task, model)
    of = problem.nbytes[problem.first[0] + np.arange(5)]
    problem.memory = np.array([of[3], of[1]])
    dealt = [list(units) for units in deals(problem, 0, problem.memory)]
    assert dealt == [[3, 1]]


@pytest.mark.parametrize(("units", "expected"), [(1, (4, 0)), (3, (8, 4)), (5, (12, 8)), (9, (20, 16)), (32, (64, 64))])
def test_halves_are_as_even_as_steps_of_4_allow(make_task, model, units, expected):
    problem = Problem(make_task([(10, 4 * units, 1.0)], [1]), model)
    left, right = halves(problem, problem.whole)
    assert (problem.dims[left][0], problem.dims[right][0]) == expected


def test_packing_falls_back_to_trying_all(make_task, model):
    task = make_task([(3000, 4, 1.0), (3000, 4, 1.0)] + [(2000, 4, 1.0)] * 3, [1, 1])
    full = task.model_copy(update={"device_memory_bytes": (120_000, 120_000)})
    widths = pack(Problem(full, model))
    assert widths is not None
    assert sorted(widths.sum(axis=0).tolist()) == [2, 3]


@pytest.mark.parametrize(("name", "first"), [("size", "t0"), ("dim", "t1"), ("lookup", "t2"), ("size-lookup", "t3")])
def test_a_heuristic_places_the_table_of_the_largest_key_first(make_task, model, name, first):
    tables = [(900_000, 16, 1.0), (10, 64, 1.0), (10, 32, 40.0), (100_000, 32, 15.0)]
    problem = Problem(make_task(tables, [1, 1]), model)
    shard = baseline(problem, name, np.random.default_rng(0)).shards[0]
    assert problem.tables[problem.group[shard]][0].name == first


def test_the_heuristics_keys_are_those_of_the_paper(make_task, model):
    problem = Problem(make_task([(1000, 16, 3.0), (10, 64, 0.5)], [1]), model)
    rng = np.random.default_rng(0)
    keys = {name: key(problem, problem.whole, rng).tolist() for name, key in KEYS.items() if name != "random"}
    assert keys == {
        "size": [1000 * (16 * 4 + 4), 10 * (64 * 4 + 4)],
        "dim": [16, 64],
        "lookup": [48, 32],
        "size-lookup": [48 * 3, 32],
    }


def test_with_hardly_any_memory_to_spare_most_perturbations_still_find_room(make_task, model):
    """Giant tables of which a unit of columns is 3 to 5 % of a device."""
    giants = [(1_700_000, 128, 0.5), (1_000_000, 128, 5.0), (800_000, 128, 40.0)]
    small = [(1000 * (i + 1), 4 * (i % 8 + 1), float(i)) for i in range(20)]
    needed = sum(table.memory_bytes for table in make_task([*giants, *small], [80]).tables)
    problem = Problem(make_task([*giants, *small], [1.01 * needed / 4 / 2**30] * 4), model)
    widths = pack(problem)
    assert widths is not None
    state, rng, objective = State(problem, widths), np.random.default_rng(0), Objective.of(problem)
    found = [perturbed(state, objective, rng) for _ in range(40)]
    assert all(one.free.min() >= 0 for one in found)
    assert sum(one is not state for one in found) >= 30
