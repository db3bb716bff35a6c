"""From measured rows to labels."""

from operator import attrgetter

import numpy as np
import pytest

from helpers.refusals import refused
from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import CollectiveCost, ComputeCost
from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import Table
from neuroshard.pretrain.labels import check_one_time_a_device, check_unseen, collect


def case(name, split="train"):
    return ComputeCase(tables=(Table(name=name, rows=10, dim=4, pooling_factor=1),), split=split)


def cost(of, ms, round_=0):
    return ComputeCost(case_id=of.case_id, round=round_, forward_ms=ms, backward_ms=0)


def test_only_the_first_round_is_a_label_and_the_second_stands_beside_it():
    a, b = case("a"), case("b", "valid")
    rows = [(a, cost(a, 5.0, 1)), (b, cost(b, 2.0)), (a, cost(a, 4.0))]

    labels = collect(rows, lambda cost: cost.total_ms)

    assert labels.cases == (b, a)
    assert labels.ms.tolist() == [2, 4]
    assert labels.twice.tolist() == [[4], [5]]
    assert labels.of_split("train").tolist() == [1]


def test_a_label_of_a_set_of_tables_is_the_sum_of_its_parts():
    a, b = case("a"), case("b")
    apart = [
        ComputeCost(case_id=of.case_id, forward_ms=of_forward, backward_ms=3.0) for of, of_forward in ((a, 1), (b, 2))
    ]

    labels = collect([(a, apart[0]), (a, cost(a, 9.0, 1)), (b, apart[1])], lambda cost: cost.total_ms)

    assert labels.parts.tolist() == [[1, 3], [2, 3]]
    assert labels.ms.tolist() == [4, 5]


def test_the_label_of_several_rounds_is_the_mean_of_each_part():
    a = case("a")
    rows = [
        (a, ComputeCost(case_id=a.case_id, round=round_, forward_ms=forward, backward_ms=backward))
        for round_, (forward, backward) in enumerate(((1.0, 8.0), (2.0, 5.0), (6.0, 2.0)))
    ]

    labels = collect(rows, lambda cost: cost.total_ms)

    assert labels.parts.tolist() == [[3, 5]]
    assert labels.ms.tolist() == [8]


def test_few_that_were_measured_again_tell_of_noise_alone():
    cases = [case(name) for name in "abc"]
    rows = [*((one, cost(one, 4.0)) for one in cases), (cases[0], cost(cases[0], 6.0, 1))]

    labels = collect(rows, lambda cost: cost.total_ms)

    assert labels.ms.tolist() == [4, 4, 4]
    assert labels.twice.tolist() == [[4], [6]]


def test_a_disturbed_round_is_not_in_the_label():
    a = case("a")
    rows = [(a, cost(a, ms, round_)) for round_, ms in enumerate((4.0, 5.0))]
    rows += [(a, cost(a, ms, round_).model_copy(update={"disturbed": True})) for round_, ms in ((2, 40.0), (3, 50.0))]

    assert collect(rows, lambda cost: cost.total_ms).ms.tolist() == [4.5]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_labels_of_several_rounds_scatter_less_by_as_much_as_they_are_said_to(rounds):
    rng = np.random.default_rng(0)
    cases = [case(str(place)) for place in range(4000)]

    def measured():
        rows = [(one, cost(one, 10 * np.exp(0.05 * rng.normal()), r)) for one in cases for r in range(rounds)]
        return collect(rows, lambda cost: cost.total_ms)

    one, other = measured(), measured()
    said = np.abs(np.log(one.twice[1] / one.twice[0])).mean()

    assert said == pytest.approx(np.abs(np.log(one.ms / other.ms)).mean(), rel=0.05)


def test_rows_with_an_error_are_left_out():
    a, b = case("a"), case("b")
    rows = [(a, ComputeCost(case_id=a.case_id, error="out of memory")), (a, cost(a, 3.0, 1)), (b, cost(b, 2.0))]

    labels = collect(rows, lambda cost: cost.total_ms)

    assert labels.cases == (b,)
    assert labels.twice.size == 0


def test_labels_of_no_time_are_left_out():
    a, b, two = case("a"), case("b"), CollectiveCase(device_dims=(4, 8), start_delays_ms=(0, 0))
    good, stuck = ((1.0, 2.0), (3.0, 4.0)), ((1.0, 2.0), (0.0, 4.0))
    all_to_alls = [CollectiveCost(case_id=two.case_id, forward_ms=f, backward_ms=b) for f, b in (good, stuck)]

    assert collect([(a, cost(a, 0.0)), (b, cost(b, 2.0))], lambda cost: cost.total_ms).cases == (b,)
    assert [len(collect([(two, one)], attrgetter("forward_ms")).cases) for one in all_to_alls] == [1, 0]


def test_a_test_table_that_was_trained_on_is_refused():
    check_unseen([case("a"), case("b", "test_tables"), case("a", "test_sets")])

    with refused(InvalidInput, "'a'", "1 in all", "test_tables"):
        check_unseen([case("a"), case("a", "test_tables")])


def test_an_all_to_all_with_too_few_times_is_named():
    two = CollectiveCase(device_dims=(4, 8), start_delays_ms=(0, 0))
    short = CollectiveCost(case_id=two.case_id, forward_ms=(1.0,), backward_ms=(1.0, 1.0))

    with refused(InvalidInput, two.case_id, "1 forward_ms", "2 devices"):
        check_one_time_a_device([(two, short)])
