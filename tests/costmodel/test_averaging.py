"""Averaging the replicas of groups of ranks: bytes that rings send, and the ms of that, by hand."""

import pytest

from helpers.costs import random_model
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import DATASHEETS, Analytic
from neuroshard.costmodel.averaging import averaged_bytes, averaging, averaging_ms, least_averaging_ms
from neuroshard.costmodel.given import Given, GivenCosts, TableCost

GB = 1e9
SHEET = DATASHEETS["h100"]
ONE = Table(name="one", rows=1000, dim=32, pooling_factor=1.0, optimizer_bytes_per_row=4)  # 132 B a row
OTHER = ONE.model_copy(update={"name": "other", "rows": 3000})


def task(size: int, contiguous: bool, *, ranks: int = 16, every: int = 1, batch_size: int = 2048) -> ShardingTask:
    """A group of `size` of the ranks, in domains of 8."""
    groups = Groups(ranks=ranks, contiguous=contiguous, sync_every=every, domain=8, local_world_size=8)
    return ShardingTask(
        tables=(ONE, OTHER),
        device_memory_bytes=(2**31,) * size,
        batch_size=batch_size,
        topology=groups.topology(size, None),
        groups=groups,
    )


@pytest.mark.parametrize(
    ("size", "contiguous", "near", "far"),
    [
        pytest.param(4, False, 1.5, 0.0, id="the four replicas are neighbours: 2 x 3/4, all in their domain"),
        pytest.param(4, True, 0.75, 0.75, id="two of four in a domain: half of 2 x 3/4 leaves it"),
        pytest.param(8, True, 0.0, 1.0, id="two replicas in two domains: 2 x 1/2, all out"),
        pytest.param(2, False, 1.75, 0.0, id="eight neighbours: 2 x 7/8"),
        pytest.param(2, True, 1.3125, 0.4375, id="four of eight in a domain: a quarter of 2 x 7/8 leaves it"),
    ],
)
def test_a_rank_sends_what_rings_of_replicas_send(size: int, contiguous: bool, near: float, far: float) -> None:
    found = averaging(Analytic("h100", 2048), task(size, contiguous), GB)
    assert found[:3] == (GB, near * GB, far * GB)


def test_a_gigabyte_takes_what_the_links_take_for_it() -> None:
    near = averaging(Analytic("h100", 2048), task(4, False), GB)
    assert near.ms == pytest.approx(SHEET.latency_ms + 1.5 * GB / (SHEET.link * SHEET.link_share))
    far = averaging(Analytic("h100", 2048), task(4, True), GB)
    assert far.ms == pytest.approx(SHEET.latency_ms + SHEET.network_latency_ms + 0.75 * GB / SHEET.network_rate)


def test_averaging_has_the_rates_of_a_trained_model_too() -> None:
    model = random_model(2, 4, 8, seed=3)
    some, more = (averaging(model, task(4, True, batch_size=model.batch_size), nbytes).ms for nbytes in (1e6, 2e6))
    assert 0 < some < more


def test_a_step_takes_its_share_of_one_averaging_every_so_many() -> None:
    model = Analytic("h100", 2048)
    once = averaging(model, task(4, True), GB).ms
    assert averaging_ms(model, task(4, True, every=10), GB) == pytest.approx(once / 10)
    assert averaging_ms(model, task(4, True).model_copy(update={"groups": None}), GB) == 0


def test_the_fullest_device_counts_without_copies_and_no_plan_takes_less_than_its_share() -> None:
    asked = task(4, False)
    shards = [Shard(table=table.name, rows=table.rows, dim=32, device=d) for d, table in enumerate((ONE, OTHER))]
    assert averaged_bytes(asked, shards) == 3000 * 132
    rules = Constraints(tables=(TableRule(table="other", data_parallel=True),))
    copied = asked.model_copy(update={"constraints": rules})
    assert averaged_bytes(copied, shards) == 1000 * 132
    model = Analytic("h100", 2048)
    assert least_averaging_ms(model, asked) == pytest.approx(averaging_ms(model, asked, 4000 * 132 / 4))


def test_costs_with_all_to_alls_in_them_and_models_of_other_numbers_are_refused() -> None:
    with refused(UsageError, "--group-size"):
        averaging(Given(GivenCosts(tables=(TableCost(name="one", cost_ms=1.0),)), 2048), task(4, True), GB)
    model = random_model(4)
    with refused(UsageError, "16", "--domain"):
        averaging(model, task(4, True, batch_size=model.batch_size).model_copy(update={"topology": None}), GB)
