"""Acquisition: of many candidates first those that the model is least sure of, and never a table kept to test on."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.costs import random_model, random_tables
from neuroshard.augment.acquire import acquire, relative_spread
from neuroshard.augment.run import augment

FACTS = {"compute_cases": 60, "comm_cases": 10, "devices": (4,), "memory_bytes": 2**40, "seed": 3}


class UnsureOfMany(AnalyticModel):
    """The more tables, the less sure: what a table is worth in this model's vectors is told by its third component."""

    name = "unsure of many"

    def spread_ms(self, vector_sums, device_dims):
        return self.compute_ms(vector_sums) * (vector_sums[..., 2] / 0.02 / 15) ** 2


@pytest.fixture
def tables():
    return random_tables(20)


def sizes(cases, split="train"):
    return [len(case.tables) for case in cases.compute if case.split == split]


def test_what_the_model_is_least_sure_of_is_measured_more(tables):
    plain, wanted = augment(tables, **FACTS), augment(tables, **FACTS, acquire_for=UnsureOfMany())

    assert np.mean(sizes(wanted)) > 11 > 9.5 > np.mean(sizes(plain))
    assert len(wanted.compute) == 60
    assert len({case.case_id for case in wanted.compute}) == 60


def test_the_same_tables_are_held_out_and_the_sets_are_others(tables):
    plain, wanted = augment(tables, **FACTS), augment(tables, **FACTS, acquire_for=UnsureOfMany())

    def names(cases, unseen):
        return {t.name for case in cases.compute if (case.split == "test_tables") == unseen for t in case.tables}

    assert not names(plain, True) & names(wanted, False)
    assert not names(wanted, True) & names(plain, False)
    assert not {case.case_id for case in plain.compute} & {case.case_id for case in wanted.compute}


def test_test_sets_stay_a_fair_sample(tables):
    facts = {**FACTS, "compute_cases": 600}
    wanted, drawn = augment(tables, **facts, acquire_for=UnsureOfMany()), augment(tables, **facts)

    assert np.mean(sizes(wanted, "test_tables")) == pytest.approx(np.mean(sizes(drawn, "test_tables")), abs=1.5)


def test_the_same_seed_and_model_choose_the_same(tables):
    model = random_model(2, 4)

    assert augment(tables, **FACTS, acquire_for=model) == augment(tables, **FACTS, acquire_for=model)


def test_a_model_without_a_spread_leaves_chance_to_choose(tables):
    cases = augment(tables, **FACTS).compute

    ordered = acquire(cases, AnalyticModel(), np.random.default_rng(0))

    assert sorted(case.case_id for case in ordered) == sorted(case.case_id for case in cases)
    assert ordered != list(cases)


def test_every_case_is_judged_at_its_own_batch_size(tables):
    model = random_model(2, 4)
    model = replace(model, manifest=model.manifest.model_copy(update={"batch_sizes": (1024, 65536)}))
    case = augment(tables, **FACTS).compute[0]
    small = case.model_copy(update={"batch_size": 1024})

    both = relative_spread([case, small], model)

    assert both[1] == pytest.approx(relative_spread([case], model.at_batch_size(1024))[0])
    assert both[0] != both[1]
