"""Terms of the price of a plan, each by hand on a task that is all that term."""

from typing import Any

import numpy as np
import pytest

from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.network import DomainMs
from neuroshard.costmodel.pricing import (
    HostColumns,
    LaunchMs,
    block_columns,
    launch_ms,
    price_shards,
)
from neuroshard.costmodel.tiers import CacheSizes

BATCH = 4096
TABLE = Table(name="t", rows=2**20, dim=64, pooling_factor=1.0)
BLOCK = Part(TABLE, 2**18, 64, row_blocks=4)
SLOW = Topology(domain=4, local_world_size=4, network_bytes_per_s=1e6, network_latency_ms=0.0)


def task(devices: int, topology: Topology | None = None, table: Table = TABLE, **more: Any) -> ShardingTask:
    fields = {"device_memory_bytes": (2**31,) * devices, "batch_size": BATCH, "topology": topology, **more}
    return ShardingTask.parse({"tables": (table,), **fields}, "a task")


def blocks_on(devices: int) -> list[Shard]:
    """The table's rows in equal blocks on the first devices."""
    rows = TABLE.rows // devices
    return [Shard(table="t", row_offset=d * rows, rows=rows, dim=64, device=d) for d in range(devices)]


@pytest.mark.parametrize(("prefetch", "rows"), [(False, 6144), (True, 12288)])
def test_a_roomy_cache_has_half_as_much_again_as_the_batches_in_it_read(prefetch: bool, rows: int) -> None:
    """4,096 lookups of a million equal rows read 4,088: 1.5 times those of one batch, or of two, in whole sets of 32."""
    sizes = CacheSizes.of(TABLE, BATCH, prefetch=prefetch)
    roomy = int(np.flatnonzero(sizes.spilt == 0)[0])
    assert sizes.rows[roomy] == rows
    assert sizes.at(rows / 2).spilt == pytest.approx([0.5])


def test_launches_cost_what_each_takes_and_half_of_what_is_reordered_each_way() -> None:
    model = Analytic("h100", BATCH)
    forward, backward = (
        float(ms.max())
        for ms in (model.forward_collective_ms(np.zeros(4), np.zeros(4)), model.backward_collective_ms(np.zeros(4)))
    )
    assert (forward, backward) == (0.02, 0.02)
    found = launch_ms(model, 4, operators=3, outputs=2, inputs=1, reordered=80.0)
    half = 80.0 * model.reorder_ms / 4 / 2
    assert found == pytest.approx(LaunchMs(3 * 0.06, 3 * 0.02 + half, 2 * 0.02 + half))
    assert launch_ms(model, 1, operators=3, outputs=2, inputs=1) == pytest.approx(LaunchMs(0.18, 0.0, 0.0))


@pytest.mark.parametrize(
    ("name", "columns"), [pytest.param("h100", 64.0, id="nccl"), pytest.param("cpu", 96.0, id="gloo: three for two")]
)
def test_a_block_of_a_pooled_table_sends_its_sums_as_collectives_do(name: str, columns: float) -> None:
    assert block_columns(Analytic(name, BATCH), BLOCK) == columns
    sequence = Part(TABLE.model_copy(update={"pooling": "none"}), 2**18, 64, row_blocks=4)
    assert block_columns(Analytic(name, BATCH), sequence) == sequence.sent_columns


def test_blocks_over_a_domain_send_sums_for_all_domains_inside_and_their_share_of_samples_out() -> None:
    """Of 64 columns, 8 devices in domains of 4: 128 columns inside, as sums are for the samples of both domains; 64 / 4 out, and
    as many more as take as long as the 128 inside, where a column inside takes an eighth of one out; both are encoded."""
    rates = DomainMs(near=0.5, far=4.0)
    found = HostColumns.of(Analytic("h100", BATCH), [BLOCK], 8, 4, rates)
    assert [each.tolist() for each in found] == [[128.0], [16.0 + 128 / 8], [16.0], [80.0]]
    assert HostColumns.of(Analytic("h100", BATCH), [BLOCK], 8, 4, DomainMs(0.5, 0.0)).out.tolist() == [16.0]


def slow_ms(devices: int, **more: Any) -> np.ndarray:
    """Backward all-to-all ms of the table's rows on the first devices of 8, over a network so slow that nothing else counts."""
    prices = price_shards(Analytic("h100", BATCH), task(8, SLOW, **more), blocks_on(devices))
    assert prices is not None
    return prices.backward_collective_ms


def test_a_table_over_a_domain_waits_for_the_network_by_what_leaves_its_domain() -> None:
    """In two domains of 4, the table on the first: each of its devices sends 64 / 4 columns in fp32, for half of all samples."""
    assert slow_ms(4) == pytest.approx(np.full(8, 16 * BATCH * 4 / 2 / 1e3), rel=0.01)


def test_row_wise_on_all_devices_sends_whole_sums_to_the_other_domain() -> None:
    assert slow_ms(8) == pytest.approx(np.full(8, 64 * BATCH * 4 / 2 / 1e3), rel=0.01)


def test_encoded_sums_send_half_of_the_bytes() -> None:
    fp16 = CollectivePrecision(forward="fp16", backward="fp16")
    assert slow_ms(4, collective_precision=fp16) == pytest.approx(slow_ms(4) / 2, rel=0.01)
