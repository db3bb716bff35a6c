"""What a search that chooses tiers tells while it runs, and what it has when it must stop."""

import threading
from itertools import pairwise

import pytest

from neuroshard.core.plan import Plan
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.watch import Watch
from search.test_tiers import drawn

FEW = SearchSettings(rounds=4)


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
