"""Tables split row-wise over the devices of one domain: where they pay, what stays, and what a rule keeps."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers.costs import random_model
from helpers.drawn import drawn_tables
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.files.constraints import ConstraintsFile, resolve, with_flags
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

pytestmark = pytest.mark.slow

BATCH_SIZE, DEVICES, DOMAIN = 65536, 16, 8
TRY = SearchSettings(rounds=20, try_row_wise=True)


def hot_tables(seed: int, **changes: Any) -> tuple[Table, ...]:
    """Some tables of all sizes, and four with so many rows and lookups that none should lie on one device."""
    rng = np.random.default_rng(seed)
    usual = drawn_tables(rng, 12, rows=(3, 7))
    hot = [
        Table(name=f"hot{i}", rows=10**7, dim=128, pooling_factor=float(rng.uniform(50, 200)), **changes)
        for i in range(4)
    ]
    return (*usual, *hot)


def task_of(
    some: Sequence[Table], types: tuple[str, ...] | None = None, network: float = 25e9, **more: Any
) -> ShardingTask:
    given = {
        "tables": some,
        "device_memory_bytes": (80 * 2**30,) * DEVICES,
        "batch_size": BATCH_SIZE,
        "topology": Topology(domain=DOMAIN, local_world_size=DOMAIN, network_bytes_per_s=network),
        "constraints": Constraints(sharding_types=types, **more),
    }
    return ShardingTask.parse(given, "task")


def split(plan: Plan) -> dict[str, set[int]]:
    """The devices of each table whose rows are split."""
    rows = {table.name: table.rows for table in plan.task.tables}
    found: dict[str, set[int]] = {}
    for shard in plan.shards:
        if shard.rows < rows[shard.table]:
            found.setdefault(shard.table, set()).add(shard.device)
    return found


DOMAINS = [set(range(first, first + DOMAIN)) for first in range(0, DEVICES, DOMAIN)]


@pytest.mark.parametrize("seed", range(3))
def test_over_a_slow_network_hot_tables_are_split_inside_a_domain_and_it_pays(seed: int) -> None:
    model, some = Analytic("h100", BATCH_SIZE), hot_tables(seed)
    plan = search(task_of(some), model, TRY)
    others = search(task_of(some, ("column-wise", "row-wise")), model, TRY)
    assert {f"hot{i}" for i in range(4)} <= set(split(plan))
    assert all(devices in DOMAINS for devices in split(plan).values())
    assert len({min(devices) for devices in split(plan).values()}) == 2  # not all in one domain
    assert plan.cost_ms is not None
    assert others.cost_ms is not None
    assert plan.lower_bound_ms is not None
    assert plan.lower_bound_ms <= plan.cost_ms < 0.9 * others.cost_ms
    assert any("over the devices of a domain" in note for note in plan.provenance.notes)


@pytest.mark.parametrize("model", [Analytic("h100", BATCH_SIZE), random_model(2, 4, 8, seed=1)], ids=["sheet", "nets"])
def test_a_plan_costs_what_its_shards_are_priced_at(model: CostModel) -> None:
    """Of all ways to split rows at once."""
    some = hot_tables(3)
    for types in (None, ("table-row-wise",), ("row-wise", "table-row-wise")):
        plan = search(task_of(some, types, row_wise=True), model, SearchSettings(rounds=6))
        prices = price_shards(model, plan.held, plan.shards)
        assert prices is not None
        assert plan.predicted is not None
        assert plan.predicted_ms == pytest.approx(prices.total_ms)
        assert [cost.backward_collective_ms for cost in plan.predicted] == pytest.approx(prices.backward_collective_ms)


def test_what_a_domain_sends_is_counted_as_torchrec_sends_it() -> None:
    """A table on one domain of two: each of its devices sends all columns of all samples' sums inside, and its share out."""
    rate = 1e6  # slow: so the network is what takes the time
    model = Analytic("h100", BATCH_SIZE)
    topology = Topology(domain=2, local_world_size=2, network_bytes_per_s=rate)
    table = Table(name="t", rows=1000, dim=32, pooling_factor=4.0)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**30,) * 4, batch_size=BATCH_SIZE, topology=topology)
    half = [Shard(table="t", row_offset=500 * i, rows=500, dim=32, device=2 + i) for i in range(2)]
    whole = [Shard(table="t", rows=1000, dim=32, device=2)]
    ms = []
    for shards in (half, whole):
        prices = price_shards(model, task, shards)
        assert prices is not None
        ms.append(prices.backward_collective_ms.max())
    far_bytes = BATCH_SIZE * 32 * 4 / 2  # half of the samples are the other domain's
    assert ms[1] == pytest.approx(far_bytes / rate * 1000, rel=0.01)
    assert ms[0] == pytest.approx(ms[1] / 2, rel=0.01)


def test_one_table_that_outweighs_a_domain_lies_in_a_grid_and_stays_there() -> None:
    giant = Table(name="giant", rows=10**7, dim=128, pooling_factor=700.0)
    model, some, slow = Analytic("h100", BATCH_SIZE), (*hot_tables(0)[:12], giant), 10e9
    plan = search(task_of(some, network=slow), model, TRY)
    without = search(task_of(some, ("column-wise", "row-wise", "table-row-wise"), slow), model, TRY)
    shards = plan.by_table()["giant"]
    assert {(shard.rows, shard.dim) for shard in shards} == {(10**7 // DOMAIN, 64)}
    assert split(plan)["giant"] == set(range(DEVICES))
    assert plan.cost_ms is not None
    assert without.cost_ms is not None
    assert plan.cost_ms < 0.95 * without.cost_ms
    assert any("in a grid" in note for note in plan.provenance.notes)
    stays = SearchSettings(rounds=5, move_budget_bytes=1)
    assert search(task_of(some, network=slow, row_wise=True), model, stays, previous=plan).by_table()["giant"] == shards


def test_sequences_and_means_are_never_split_inside_a_domain() -> None:
    model = Analytic("h100", BATCH_SIZE)
    sequences = search(task_of(hot_tables(0, pooling="none", optimizer_bytes_per_row=0)), model, TRY)
    means = search(task_of(hot_tables(0, pooling="mean")), model, TRY)
    assert not {name for name, devices in split(sequences).items() if name.startswith("hot") and devices in DOMAINS}
    assert not any(name.startswith("hot") for name in split(means))


@pytest.mark.parametrize(
    "types", [("column-wise",), ("row-wise",), ("column-wise", "row-wise"), ("table-row-wise",), ("table-wise",)]
)
def test_only_the_types_that_are_named_are_used(types: tuple[str, ...]) -> None:
    plan = search(task_of(hot_tables(1), types), Analytic("h100", BATCH_SIZE), TRY)
    dims = {table.name: table.dim for table in plan.task.tables}
    used = {"column-wise"} if any(shard.dim < dims[shard.table] for shard in plan.shards) else set()
    used |= {"table-row-wise" if devices in DOMAINS else "row-wise" for devices in split(plan).values()}
    assert used <= set(types)


def test_without_domains_there_are_no_table_row_wise_tables() -> None:
    task = task_of(hot_tables(0))
    for topology in (None, Topology(domain=DEVICES, local_world_size=DOMAIN)):
        plan = search(task.model_copy(update={"topology": topology}), Analytic("h100", BATCH_SIZE), TRY)
        assert all(len(devices) == DEVICES for devices in split(plan).values())


@pytest.mark.parametrize("types", [None, ("grid", "table-row-wise")])
def test_in_domains_of_one_device_no_rows_are_split_and_a_plan_costs_what_its_shards_do(
    types: tuple[str, ...] | None,
) -> None:
    """Column shards would else be priced as a grid, with its collectives."""
    model, alone = Analytic("h100", BATCH_SIZE), Topology(domain=1, local_world_size=1)
    task = task_of(hot_tables(0), types).model_copy(update={"topology": alone})
    plan = search(task, model, TRY)
    prices = price_shards(model, plan.held, plan.shards)
    assert prices is not None
    assert plan.predicted_ms == pytest.approx(prices.total_ms)
    assert all(len(devices) == DEVICES for devices in split(plan).values())
    if types is not None:
        assert not split(plan)
        assert any("table-row-wise: domains have one device each" in note for note in plan.provenance.notes)


def test_a_search_from_a_plan_keeps_tables_in_their_domain() -> None:
    model, task = Analytic("h100", BATCH_SIZE), task_of(hot_tables(2))
    first = search(task, model, TRY)
    allowed = task_of(hot_tables(2), row_wise=True)
    stays = SearchSettings(rounds=10, move_budget_bytes=0)
    assert split(search(allowed, model, stays, previous=first)) == split(first) != {}
    moved = [shard.model_copy(update={"device": (shard.device + DOMAIN) % DEVICES}) for shard in first.shards]
    other = Plan(task=first.task, shards=tuple(moved), provenance=first.provenance)
    assert split(search(allowed, model, stays, previous=other)) == split(other) != split(first)


def test_all_rows_in_domains_rescue_what_fits_no_device() -> None:
    table = Table(name="t", rows=10**7, dim=4, pooling_factor=1.0)
    others = tuple(Table(name=f"o{i}", rows=1000, dim=4, pooling_factor=1.0) for i in range(3))
    room = math.ceil(table.memory_bytes / 4)
    task = task_of((table, *others)).model_copy(update={"device_memory_bytes": (room,) * DEVICES})
    plan = search(task, Analytic("h100", BATCH_SIZE), TRY)
    assert "t" in split(plan)


def test_beside_a_table_that_fills_a_device_another_is_split_over_the_other_domain() -> None:
    """A block on every device would find no room on the full one."""
    fills = Table(name="fills", rows=10**7, dim=4, pooling_factor=1.0, pooling="mean")
    large = Table(name="large", rows=6 * 10**7, dim=4, pooling_factor=1.0)
    task = task_of((fills, large)).model_copy(update={"device_memory_bytes": (fills.memory_bytes + 1,) * DEVICES})
    plan = search(task, Analytic("h100", BATCH_SIZE), TRY)
    (full,) = (shard.device for shard in plan.shards if shard.table == "fills")
    assert full not in split(plan)["large"] in DOMAINS


def test_a_table_with_fewer_rows_than_devices_may_be_split_inside_a_domain() -> None:
    """What a step keeps for the lookups of a hot table fits no device, and its few rows are not enough for all."""
    few = Table(name="few", rows=DOMAIN, dim=4, pooling_factor=400.0)
    others = tuple(Table(name=f"o{i}", rows=1000, dim=4, pooling_factor=1.0) for i in range(3))
    task = task_of((few, *others)).model_copy(update={"pipeline": "sparse-dist"})
    room = task.memory(Part.of(few)).total // 2
    assert not few.has_rows_for(DEVICES)
    plan = search(task.model_copy(update={"device_memory_bytes": (room,) * DEVICES}), Analytic("h100", BATCH_SIZE), TRY)
    assert split(plan)["few"] in DOMAINS


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ("rows", ["--sharding-types", "'rows'", "table-row-wise"]),
        ("column-wise,data-parallel", ["--data-parallel PATTERN"]),
        ("", ["''", "column-wise"]),
        ("grid_shard", ["'grid_shard'"]),
    ],
)
def test_unknown_types_are_reported_in_one_line(given: str, facts: list[str]) -> None:
    with refused(UsageError, *facts):
        with_flags(ConstraintsFile(), sharding_types=given)


def test_types_from_a_flag_or_a_file_reach_the_task_and_change_no_other_digest() -> None:
    some = hot_tables(0)
    given = with_flags(ConstraintsFile(), sharding_types="column-wise, table-row-wise")
    assert resolve(given, some, "c").sharding_types == ("column-wise", "table-row-wise")
    assert "sharding_types" not in Constraints().model_dump(mode="json")


def test_types_that_contradict_a_permission_are_refused() -> None:
    with refused(InvalidInput, "all tables", "sharding_types"):
        task_of(hot_tables(0), ("column-wise",), row_wise=True)
    with refused(InvalidInput, "'hot0'", "sharding_types"):
        task_of(hot_tables(0), ("column-wise",), tables=(TableRule(table="hot0", row_wise=True),))


def test_a_plan_says_where_no_table_can_be_of_a_type_that_was_asked_for() -> None:
    task = task_of(hot_tables(0), ("column-wise", "table-row-wise"))
    model = Analytic("h100", BATCH_SIZE)
    for topology in (None, task.topology):
        plan = search(task.model_copy(update={"topology": topology}), model, SearchSettings(rounds=1))
        assert any("--domain" in note for note in plan.provenance.notes) == (topology is None)
