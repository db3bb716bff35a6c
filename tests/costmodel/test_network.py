"""All-to-alls inside a domain and between domains, by hand; and what data-parallel tables take."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.costs import random_model
from helpers.parts import cut_to
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.all_to_all_net import all_to_all_inputs, near_inputs
from neuroshard.costmodel.network import Network
from neuroshard.costmodel.pricing import copies_ms

BATCH = 65536
BYTES = np.array([40.0, 0.0, 8.0, 0.0])


def task_of(tables: tuple[Table, ...], topology: Topology | None = None) -> ShardingTask:
    return ShardingTask(tables=tables, device_memory_bytes=(2**30,) * 4, batch_size=BATCH, topology=topology)


def test_a_device_sends_its_columns_to_the_others_and_receives_theirs_for_its_samples() -> None:
    own, shared = all_to_all_inputs(BYTES)
    assert own.tolist() == [[30, 2, 30], [0, 12, 12], [6, 10, 10], [0, 12, 12]]
    assert shared.tolist() == [[30, 12, 30, 9]]


def test_half_of_what_devices_send_in_two_domains_of_two_stays_near() -> None:
    network = Network(domain=2, bytes_per_ms=4.0, latency_ms=1.0)
    own, shared = near_inputs(BYTES, network)
    assert own.tolist() == [[10, 3, 10], [0, 3, 3], [2, 3, 3], [0, 3, 3]]
    assert shared.tolist() == [[10, 3, 10, 3]]
    assert network.far_ms(BYTES).tolist() == [1 + 20 / 4]


def test_a_slow_network_decides_between_domains_and_not_inside_one() -> None:
    """The nets' own all-to-alls are made to take next to nothing."""
    drawn, dims = random_model(2, 4), np.array([64.0, 32.0, 128.0, 0.0])
    model = replace(drawn, nets=replace(drawn.nets, backward=replace(drawn.nets.backward, unit_ms=1e-9)))
    table = Table(name="t", rows=1000, dim=64, pooling_factor=1.0)

    def ms(domain: int) -> list[float]:
        topology = Topology(domain=domain, local_world_size=2, network_bytes_per_s=1e6, network_latency_ms=50_000.0)
        return model.for_task(task_of((table,), topology), waiting=False).backward_collective_ms(dims).tolist()

    assert ms(2) == pytest.approx([50_000 + 128 * BATCH * 4 / 2 / 1e3] * 4)
    assert ms(4) == pytest.approx(model.backward_collective_ms(dims).tolist())
    topology = Topology(domain=2, local_world_size=2, network_bytes_per_s=1e6)
    assert model.for_task(task_of((table,), topology), waiting=False).network_bytes_per_ms == 1e3
    assert model.network_bytes_per_ms == 0


def test_a_copy_looks_its_own_samples_up_and_sends_all_its_gradients_around_twice() -> None:
    model, table = AnalyticModel(), Table(name="t", rows=10_000, dim=64, pooling_factor=8.0)
    quarter = table.model_copy(update={"pooling_factor": 2.0})
    compute, forward, backward = copies_ms(model, [table], task_of((table,)))
    assert compute == pytest.approx(float(model.compute_ms(model.part_vectors(cut_to([quarter], [64]))[0])))
    assert forward == 0
    assert backward == model.backward_collective_ms(np.full(4, 2 * 10_000 * 64 / BATCH)).max()
