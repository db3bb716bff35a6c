"""Cases are known by what they measure; a cost is both times or an error."""

import pytest

from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import CollectiveCost, ComputeCost, Hardware
from neuroshard.core.plan import DeviceCost
from neuroshard.core.table import Table

TABLE = Table(name="a", rows=10, dim=8, pooling_factor=1.0)


def test_the_split_does_not_change_a_case_id_but_the_shape_does():
    case = ComputeCase(tables=(TABLE,))
    assert case.case_id == ComputeCase(tables=(TABLE,), split="valid").case_id
    assert case.case_id != ComputeCase(tables=(TABLE.with_dim(4),)).case_id
    assert case.case_id != ComputeCase(tables=(TABLE, TABLE)).case_id


def test_scaling_an_all_to_all_leaves_the_waiting_and_what_was_timed_as_they_are():
    case = CollectiveCase(device_dims=(4, 4, 4), start_delays_ms=(0.0, 0.0, 10.0))
    assert case.waiting_ms == (10.0, 10.0, 0.0)
    cost = CollectiveCost(
        case_id=case.case_id,
        forward_ms=(13.0, 9.0, 3.0),  # the second one waited for less than it should have
        backward_ms=(3.0, 3.0, 3.0),
        forward_spread_ms=(1.0, 1.0, 1.0),
        forward_median_ms=(14.0, 9.5, 4.0),
    )
    scaled = cost.scaled(0.5, case.waiting_ms)
    assert scaled.forward_ms == (11.5, 9.0, 1.5)
    assert scaled.backward_ms == (1.5, 1.5, 1.5)
    assert (scaled.forward_spread_ms, scaled.forward_median_ms) == ((0.5, 0.5, 0.5), cost.forward_median_ms)
    failed = CollectiveCost(case_id=case.case_id, error="out of memory")
    assert failed.scaled(0.5, case.waiting_ms) == failed


def test_batch_size_pooling_and_weights_change_a_case_id():
    variants = [
        ComputeCase(tables=(TABLE,)),
        ComputeCase(tables=(TABLE,), batch_size=64),
        ComputeCase(tables=(TABLE.model_copy(update={"pooling": "mean"}),)),
        ComputeCase(tables=(TABLE.model_copy(update={"weighted": True}),)),
    ]
    assert len({case.case_id for case in variants}) == 4
    assert variants[0].case_id == "de1107403d760ef0"  # as it was before there were others


def test_start_delays_change_a_case_id():
    one, other = (CollectiveCase(device_dims=(8, 4), start_delays_ms=(0, delay)) for delay in (0, 1.5))
    assert one.case_id != other.case_id


def test_a_total_is_forward_and_backward():
    assert ComputeCost(case_id="c", forward_ms=1.0, backward_ms=2.5).total_ms == 3.5
    assert DeviceCost(compute_ms=1.0, forward_collective_ms=0.25, backward_collective_ms=0.5).total_ms == 1.75


H200 = Hardware(
    kind="cuda",
    name="NVIDIA H200",
    memory_bytes=140 * 2**30,
    driver="570.86.15",
    compute_capability="9.0",
    machine="HGX",
)


def test_the_fingerprint_is_the_same_for_what_does_not_change_speed_or_is_only_seen_from_nearby():
    same = H200.model_copy(update={"driver": "570.195.03", "name": "NVIDIA-H200", "interconnect": "NCCL"})
    assert same.fingerprint == H200.fingerprint
    assert len(H200.fingerprint) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "synthetic"},
        {"name": "NVIDIA H200 NVL"},
        {"memory_bytes": 141 * 2**30},
        {"driver": "580.65.06"},
        {"compute_capability": "10.0"},
        {"machine": "p5en.48xlarge"},
        {"sharing": "time-slicing, 4"},
    ],
)
def test_the_fingerprint_differs_by_whatever_changes_speed(change):
    assert H200.model_copy(update=change).fingerprint != H200.fingerprint
