"""Acquisition: devices of plans that a model learns most from are chosen, and never a table held out to test on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.costs import random_model, random_tables
from helpers.parts import wholes
from neuroshard.augment.acquire import acquire, most_informative, terms
from neuroshard.augment.run import augment
from neuroshard.augment.settings import AugmentSettings

FACTS: dict[str, Any] = {"compute_cases": 60, "collective_cases": 10, "devices": (4,), "memory_bytes": 2**40, "seed": 3}


@pytest.fixture
def tables():
    return random_tables(20)


@pytest.fixture
def model():
    return random_model(2, 4, rates=True)


def sizes(cases, split="train"):
    return [len(case.tables) for case in cases.compute if case.split == split]


def left_unsure(of_devices, of_sets, chosen, known, count):
    """The variance of what the terms of devices and sets say, on average over so many of the one as are chosen and all of the
    other, after `known` like them, the sets and the `chosen`, each off by 1."""
    usual = (count * of_devices.T @ of_devices / len(of_devices) + of_sets.T @ of_sets) / (count + len(of_sets))
    measured = np.concatenate([of_sets, of_devices[chosen]])
    return np.trace(np.linalg.inv((known + 0.1) * usual + measured.T @ measured) @ usual)


def random_terms(devices=200, sets=20):
    rng = np.random.default_rng(0)
    return rng.lognormal(size=(devices, 6)) * rng.random(6), rng.lognormal(sigma=0.5, size=(sets, 6))


@pytest.mark.parametrize("sets", [20, 0])
def test_each_device_reduces_the_average_variance_most(sets):
    of_devices, of_sets = random_terms(sets=sets)
    chosen = list(most_informative(of_devices, of_sets, 10, 8))

    for place, device in enumerate(chosen):
        before = chosen[:place]
        left = {
            other: left_unsure(of_devices, of_sets, [*before, other], 10, 8) for other in set(range(200)) - {*before}
        }
        assert left[device] == pytest.approx(min(left.values()), rel=1e-3)


def test_devices_are_chosen_for_what_sets_do_not_show():
    of_devices, of_sets = np.eye(2)[[0] * 50 + [1] * 50], np.eye(2)[[0] * 30]

    assert np.mean(np.array(list(most_informative(of_devices, of_sets, 10, 20))) >= 50) > 0.7


def test_rounding_does_not_add_up_over_many_choices():
    rng = np.random.default_rng(0)
    common = np.concatenate([rng.lognormal(sigma=2, size=(800, 1)), 1e-3 * rng.lognormal(size=(800, 30))], axis=1)
    of_all = np.concatenate([common @ rng.standard_normal((31, 31)), np.eye(800, 5)], axis=1)
    none = of_all[:0]
    chosen = list(most_informative(of_all, none, 5, 300))
    left = {
        other: left_unsure(of_all, none, [*chosen[:-1], other], 5, 300) for other in set(range(800)) - {*chosen[:-1]}
    }

    assert left[chosen[-1]] == pytest.approx(min(left.values()), rel=1e-2)


def test_none_is_chosen_twice_and_no_more_than_there_are():
    of_all = np.ones((5, 3))

    assert sorted(most_informative(of_all, of_all[:0], 0, 9)) == [0, 1, 2, 3, 4]


def test_many_devices_are_chosen_block_by_block(tables, model, monkeypatch):
    cases = augment(tables, AugmentSettings(**FACTS)).compute
    monkeypatch.setattr("neuroshard.augment.acquire._BLOCK", 4)

    chosen = list(acquire(cases[:48], cases[48:], model, 12))

    assert len({case.case_id for case in chosen}) == 12
    places = [[case.case_id for case in cases].index(case.case_id) for case in chosen]
    assert [place // 16 for place in places] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("plan_share", [0.0, 0.75, 1.0])
def test_devices_of_plans_are_chosen_and_random_sets_are_not(tables, model, plan_share, monkeypatch):
    asked = []

    def first(devices, sets, model, count):
        asked.append((len(devices), len(sets), count))
        return acquire(devices, sets, model, count)

    monkeypatch.setattr("neuroshard.augment.draw.acquire", first)
    wanted = augment(tables, AugmentSettings(**FACTS, plan_share=plan_share), acquire_for=model)
    train = [case for case in wanted.compute if case.split == "train"]

    ((devices, sets, count),) = asked
    assert devices == 4 * count
    assert sets + count == len(train)
    assert count == pytest.approx(plan_share * len(train), abs=8)


def test_as_many_cases_as_asked_none_twice(tables, model):
    wanted = augment(tables, AugmentSettings(**FACTS), acquire_for=model)

    assert len({case.case_id for case in wanted.compute}) == len(wanted.compute) == 60


def test_the_same_tables_are_held_out_and_the_sets_are_others(tables, model):
    plain, wanted = (
        augment(tables, AugmentSettings(**FACTS)),
        augment(tables, AugmentSettings(**FACTS), acquire_for=model),
    )

    def names(cases, unseen):
        return {t.name for case in cases.compute if (case.split == "test_tables") == unseen for t in case.tables}

    assert not names(plain, True) & names(wanted, False)
    assert not names(wanted, True) & names(plain, False)
    # of the few tables that are held out, two draws may make the same set
    learned = [{case.case_id for case in cases.compute if case.split != "test_tables"} for cases in (plain, wanted)]
    assert not learned[0] & learned[1]


@pytest.mark.slow
def test_test_sets_stay_a_fair_sample(tables, model):
    facts = {**FACTS, "compute_cases": 600}
    wanted, drawn = (
        augment(tables, AugmentSettings(**facts), acquire_for=model),
        augment(tables, AugmentSettings(**facts)),
    )

    assert np.mean(sizes(wanted, "test_tables")) == pytest.approx(np.mean(sizes(drawn, "test_tables")), abs=1.5)


def test_the_same_seed_and_model_choose_the_same(tables, model):
    assert augment(tables, AugmentSettings(**FACTS), acquire_for=model) == augment(
        tables, AugmentSettings(**FACTS), acquire_for=model
    )


def test_a_prediction_is_the_sum_of_its_terms_and_a_constant(tables, model):
    cases = augment(tables, AugmentSettings(**FACTS)).compute
    of_case = [model.part_vectors(wholes(case.tables)).sum(axis=0) for case in cases]
    ms = model.compute_ms(np.array(of_case))

    assert (ms - ms * terms(cases, model).sum(axis=1)) == pytest.approx(
        model.nets.compute.mean.above_ms + model.nets.compute.mean.floor_ms
    )


def test_every_case_is_judged_at_its_own_batch_size(tables, model):
    model = replace(model, manifest=model.manifest.model_copy(update={"batch_sizes": (1024, 65536)}))
    case = augment(tables, AugmentSettings(**FACTS)).compute[0]
    small = case.model_copy(update={"batch_size": 1024})

    both = terms([case, small], model)

    assert both[1] == pytest.approx(terms([case], model.at_batch_size(1024))[0])
    assert (both[0] != both[1]).any()
