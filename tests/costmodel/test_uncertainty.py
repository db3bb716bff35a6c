"""What a plan may take when it is measured: wider above than below, and unknown where nothing was calibrated."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.costs import random_model, random_tables
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.report import STAND_IN_ERROR, Deviations
from neuroshard.costmodel.uncertainty import _factors
from neuroshard.deploy.gate import Gate, decide
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings, Trust

TASK = ShardingTask(tables=tuple(random_tables(8)), device_memory_bytes=(2**36,) * 4, batch_size=65536)


def searched(two, trust=Trust(), task=TASK):  # noqa: B008
    model = random_model(2, 4)
    given = None if two is None else Deviations(least_ms=0.0, two=two)
    report = model.report.model_copy(update={"deviations": given})
    model = replace(model, manifest=model.manifest.model_copy(update={"report": report}))
    return search(task, model, SearchSettings(rounds=1), trust=trust)


@pytest.mark.parametrize("devices", [1, 2, 16])
def test_the_slowest_of_devices_with_independent_errors_is_within_the_range(devices):
    rng = np.random.default_rng(0)
    errors = rng.standard_normal((20_000, devices)) * 0.05

    low, high = _factors(np.full(devices, 3.0), np.full(devices, 0.05), 1.0)

    assert low == pytest.approx(np.exp(-0.05))  # as if all errors were the same
    assert (np.exp(errors.max(axis=1)) > high).mean() == pytest.approx(0.159, abs=0.01)


def test_a_device_that_others_wait_for_decides():
    alone, beside_light_ones = (_factors(np.array(own), np.full(len(own), 0.05), 1.0) for own in ([3.0], [3.0, 1, 1]))

    assert beside_light_ones == pytest.approx(alone)


def test_a_plan_carries_both_ranges_and_the_gate_asks_for_more_than_one_deviation():
    plan = searched(3.0)
    ranges = plan.provenance.cost_ranges

    assert ranges.two[0] < ranges.one[0] < plan.cost_ms < ranges.one[1] < ranges.two[1]
    decision = decide(plan, Gate(), None, None)
    assert decision.deviation == pytest.approx(1 - ranges.one[0] / plan.cost_ms)


@pytest.mark.parametrize(("two", "trust"), [(None, Trust()), (3.0, Trust(instead="a fallback"))])
def test_without_calibration_or_by_a_fallback_no_range_is_stated(two, trust):
    plan = searched(two, trust)

    assert plan.provenance.cost_ranges is None
    assert "cost_ranges" not in plan.provenance.model_dump()
    assert decide(plan, Gate(), None, None).deviation == (STAND_IN_ERROR if trust.instead else None)


def test_over_a_network_that_nothing_was_measured_of_no_range_is_stated():
    over_two = TASK.model_copy(update={"topology": Topology(local_world_size=2, domain=2)})

    assert searched(3.0, task=over_two).provenance.cost_ranges is None


def test_the_range_of_95_percent_holds_that_of_68():
    """Also where tails are so light that two deviations are hardly more than one."""
    ranges = searched(1.05).provenance.cost_ranges

    assert ranges.two[0] <= ranges.one[0]
    assert ranges.one[1] <= ranges.two[1]


@pytest.mark.parametrize("ranges", [{"one": [5, 1]}, {"one": [50, 60], "two": [40, 70]}, {"two": [1e-9, 2e-9]}])
def test_a_plan_with_ranges_of_another_is_refused(ranges):
    data = searched(3.0).model_dump(mode="json")
    data["provenance"]["cost_ranges"].update(ranges)

    with pytest.raises(ValueError, match=r"cost_ranges of .* are not of a plan that costs .*; leave them out"):
        Plan.model_validate(data)
