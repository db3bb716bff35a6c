"""Backend `synthetic`: the formula, noisy, and the same for the same seed."""

from collections.abc import Callable
from typing import Any

import numpy as np

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import ComputeCost
from neuroshard.core.table import Table
from neuroshard.measure import formula
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.formula import NOISE, Synthetic


def costs(cases: Cases, seed: int = 0, round_: int = 0, backwards: bool = False) -> dict[str, Any]:
    backend = Synthetic(cases, MeasureSettings(batch_size=512, seed=seed), None)
    order = cases.compute + cases.collective
    return {
        case.case_id: backend.compute(case, round_)
        if isinstance(case, ComputeCase)
        else backend.all_to_all(case, round_)
        for case in (order[::-1] if backwards else order)
    }


def test_costs_depend_on_seed_and_case_but_not_on_the_order(cases: Cases) -> None:
    assert costs(cases) == costs(cases, backwards=True)


def test_another_seed_and_another_round_give_other_noise(cases: Cases) -> None:
    first, seeded, again = costs(cases), costs(cases, seed=1), costs(cases, round_=1)
    assert all(first[case] != seeded[case] != again[case] for case in first)


def test_noise_is_around_the_formula(cases: Cases) -> None:
    measured = costs(cases)
    ratios = [measured[c.case_id].total_ms / formula.compute_ms(c.tables, 512) for c in cases.compute]
    assert abs(np.mean(ratios) - 1) < NOISE / 2
    assert 0 < np.std(ratios) < NOISE


def test_an_all_to_all_has_a_time_for_each_device(cases: Cases) -> None:
    case = CollectiveCase(device_dims=(64,) * 16, start_delays_ms=(0.0,) * 16)
    cost = Synthetic(cases, MeasureSettings(batch_size=512), None).all_to_all(case, 0)
    assert (len(cost.forward_ms or ()), len(cost.backward_ms or ())) == (16, 16)


def test_tables_that_do_not_fit_are_an_error_row(cases: Cases, table: Callable[..., Table]) -> None:
    case = ComputeCase(tables=(table("huge", rows=10**9, dim=128),))
    cost = Synthetic(cases, MeasureSettings(batch_size=512), None).compute(case, 0)
    assert cost == ComputeCost(case_id=case.case_id, error="out of memory: the tables need 480.6 GiB of 80.0 GiB")
