"""Hosts and domains: what they may be, and what they make an all-to-all cost."""

import numpy as np
import pytest

from helpers.costs import random_model, random_tables
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology, topology_of
from neuroshard.core.units import parse_rate
from neuroshard.core.value import decode_json
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.bundle import TrainedCostModel


@pytest.mark.parametrize(
    ("domain", "local_world_size", "found"),
    [(None, None, None), (8, None, (8, 8)), (None, 8, (8, 8)), (32, 8, (32, 8)), (64, 4, (64, 4))],
)
def test_a_domain_is_a_host_where_only_one_is_given(domain, local_world_size, found) -> None:
    got = topology_of(64, domain, local_world_size)
    assert (got and (got.domain, got.local_world_size)) == found


def test_a_task_checks_its_topology_and_writes_none_where_there_is_none() -> None:
    task = ShardingTask(tables=random_tables(4), device_memory_bytes=(2**30,) * 4, batch_size=64)
    assert b"topology" not in task.canonical_json()
    with refused(InvalidInput, "3 ranks"):
        ShardingTask.parse({**task.model_dump(), "topology": Topology(domain=3, local_world_size=3)}, "the task")
    two = ShardingTask.parse({**task.model_dump(), "topology": Topology(domain=2, local_world_size=2)}, "the task")
    assert ShardingTask.parse(decode_json(two.canonical_json(), "again"), "again") == two


@pytest.mark.parametrize(
    ("text", "rate"), [("50GB/s", 5e10), ("400Gb/s", 5e10), ("400 Gbit/s", 5e10), ("1 GiB / s", 2.0**30), ("8b/s", 1.0)]
)
def test_rates(text, rate) -> None:
    assert parse_rate(text) == rate


def over(model: TrainedCostModel, devices: int, domain: int, network: float | None = None) -> TrainedCostModel:
    """The model for devices in domains that such a network joins."""
    topology = Topology(domain=domain, local_world_size=domain, network_bytes_per_s=network)
    task = ShardingTask(
        tables=random_tables(2), device_memory_bytes=(2**40,) * devices, batch_size=model.batch_size, topology=topology
    )
    return model.for_task(task, waiting=False)


def test_the_far_part_of_an_all_to_all_takes_the_network_and_the_near_part_what_a_domain_takes() -> None:
    model = random_model(2, 4)
    dims = np.array([40.0, 80.0, 20.0, 60.0, 0.0, 10.0, 90.0, 50.0])
    slow = over(model, 8, 4, 1.0)
    fast = over(model, 8, 4, 1e15)
    far_ms = 90 * 4 * model.batch_size * (4 / 8) * 1e3  # at a byte a second

    assert slow.network is not None
    assert slow.backward_collective_ms(dims) == pytest.approx(np.full(8, far_ms + slow.network.latency_ms))
    even = np.full(8, 50.0)
    assert fast.backward_collective_ms(even) == pytest.approx(model.backward_collective_ms(np.full(4, 25.0)).repeat(2))
    assert over(model, 8, 8).backward_collective_ms(dims) == pytest.approx(model.backward_collective_ms(dims))


@pytest.mark.parametrize("domain", [1, 2, 4])
def test_over_a_network_costs_stay_what_bounds_rely_on(domain: int) -> None:
    model = over(random_model(2, 4), 8, domain, 1e12)
    rng = np.random.default_rng(domain)
    for _ in range(50):
        one, other = rng.uniform(0, 2000, (2, 8))
        share, order = rng.random(), rng.permutation(8)
        for ms in (model.backward_collective_ms, lambda dims: model.forward_collective_ms(dims, np.zeros(8))):
            most = share * ms(one) + (1 - share) * ms(other)
            assert (ms(share * one + (1 - share) * other) <= most * (1 + 1e-9)).all()
            assert (ms(one + other) >= ms(one) * (1 - 1e-9)).all()
            assert ms(one[order]) == pytest.approx(ms(one)[order])
        both = model.transfers_ms(one)
        assert both[0] == pytest.approx(model.forward_collective_ms(one, np.zeros(8)))
        assert both[1] == pytest.approx(model.backward_collective_ms(one))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("50GB/s", (5e10, None)),
        ("50GB/s,0.06ms", (5e10, 0.06)),
        ("400Gb/s, 60us", (5e10, 0.06)),
        ("50GB/s,0ms", (5e10, 0.0)),
    ],
)
def test_a_network_is_a_rate_and_perhaps_a_latency(text: str, found: tuple[float, float | None]) -> None:
    rate, latency_ms = found
    topology = topology_of(16, 8, None, text)
    assert topology is not None
    assert topology.network_bytes_per_s == rate
    assert topology.network_latency_ms == (None if latency_ms is None else pytest.approx(latency_ms))


def test_all_to_alls_take_the_latency_that_is_given_and_the_plan_says_so() -> None:
    model, tables = random_model(8), random_tables(4)
    given = [topology_of(16, 8, None, text) for text in ("50GB/s", "50GB/s,70ms")]
    tasks = [
        ShardingTask(tables=tables, device_memory_bytes=(2**30,) * 16, batch_size=65536, topology=one) for one in given
    ]
    for own in (model, Analytic("h100", 65536)):
        some = [own.for_task(task, waiting=False) for task in tasks]
        sheet, given_ms = (float(one.backward_collective_ms(np.zeros(16)).max()) for one in some)
        assert sheet < 70
        assert given_ms == pytest.approx(70.0)
    said = [model.for_task(task, waiting=False).caveats(16)[0] for task in tasks]
    assert "was not measured" in said[0]
    assert "as given" in said[1]
    assert "70 ms" in said[1]
