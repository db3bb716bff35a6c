"""The order of measuring."""

from collections import Counter
from itertools import pairwise

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.table import Table
from neuroshard.measure.schedule import DRIFT, schedule

TABLE = Table.model_validate({"name": "a", "rows": 10, "dim": 4, "pooling_factor": 1.0})


def many(compute: int, collective: int) -> Cases:
    return Cases(
        tables=(TABLE,),
        compute=tuple(ComputeCase(tables=(TABLE.with_dim(4 + 4 * i),)) for i in range(compute)),
        collective=tuple(CollectiveCase(device_dims=(4, i), start_delays_ms=(0, 0)) for i in range(collective)),
        max_dim=128,
        seed=0,
    )


def test_every_case_is_measured_once_and_three_per_cent_again() -> None:
    cases = many(660, 330)
    steps = schedule(cases, seed=0).steps
    labels = [step.case.case_id for step in steps if step.round_ == 0]
    again = [step.case.case_id for step in steps if step.round_ == 1]
    assert sorted(labels) == sorted(case.case_id for case in cases.compute + cases.collective)
    assert len(again) == len(set(again)) == 20 + 10


def test_a_case_is_measured_again_only_after_its_label() -> None:
    steps = schedule(many(400, 40), seed=0).steps
    places = {(step.case.case_id, step.round_): place for place, step in enumerate(steps)}
    assert all(places[case, 0] < place for (case, round_), place in places.items() if round_ == 1)


def test_rounds_are_all_cases_each_one_round_after_another() -> None:
    cases = many(90, 30)
    steps = [step for step in schedule(cases, seed=0, rounds=3).steps if step.round_ != DRIFT]
    for kind, count in (("compute", 90), ("collective", 30)):
        of_kind = [step for step in steps if step.kind == kind]
        assert [step.round_ for step in of_kind] == [0] * count + [1] * count + [2] * count
        assert [step.case for step in of_kind[:count]] == [step.case for step in of_kind[-count:]]
    assert [step.kind for step in steps].index("collective") < 60


def test_a_run_cut_short_has_measured_both_kinds_in_proportion() -> None:
    steps = schedule(many(1000, 200), seed=0).steps
    kinds = Counter(step.kind for step in steps[: len(steps) // 3] if step.round_ == 0)
    assert abs(kinds["collective"] / kinds["compute"] - 0.2) < 0.02


def test_the_order_is_random_but_the_same_for_a_seed() -> None:
    cases = many(50, 10)
    assert schedule(cases, 1) == schedule(cases, 1) != schedule(cases, 2)


def test_one_case_looks_for_drift_throughout_the_run() -> None:
    steps = schedule(many(400, 0), seed=0).steps
    places = [place for place, step in enumerate(steps) if step.round_ == DRIFT]
    assert len({step.case.case_id for step in steps if step.round_ == DRIFT}) == 1
    assert len(places) >= 10
    assert max(b - a for a, b in pairwise(places)) < 50


def test_small_and_lopsided_sets_have_a_schedule_too() -> None:
    assert [step.round_ for step in schedule(many(1, 0), 0).steps] == [DRIFT, 0, DRIFT, 1]
    assert [step.kind for step in schedule(many(0, 1), 0).steps] == ["collective", "collective"]
    assert schedule(many(0, 0), 0).steps == ()
