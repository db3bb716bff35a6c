"""Which live plans still serve today's task. One that does not is replaced, whatever the new plan costs."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.drawn import drawn_tables
from helpers.plans import NOW, TABLES, make_plan, row_plan
from helpers.row_wise import HEAVY, split
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.groups import Groups
from neuroshard.core.id_map import IdMap
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.release import Decision, Release
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import Tier
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import Analytic
from neuroshard.deploy.gate import Gate, decide
from neuroshard.deploy.run import deploy, price
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.store.folder import FolderStore

FP16 = CollectivePrecision(forward="fp16", backward="fp16")


def planned(of: Plan, shards: tuple[Shard, ...] | None = None, **task: Any) -> Plan:
    """The plan's shards, or others, on its task with other fields."""
    return Plan(task=of.task.model_copy(update=task), shards=shards or of.shards, provenance=of.provenance)


def with_rules(*rules: TableRule, **others: Any) -> dict[str, Any]:
    return {"constraints": Constraints(tables=rules, **others)}


def reading(pooling: str) -> dict[str, Any]:
    return {"tables": (TABLES[0].model_copy(update={"pooling": pooling}), *TABLES[1:])}


def joined_by(domain: int, host: int, rate: float | None = None) -> dict[str, Any]:
    return {"topology": Topology(domain=domain, local_world_size=host, network_bytes_per_s=rate)}


def in_groups(sync_every: int) -> dict[str, Any]:
    """Two groups of two ranks."""
    groups = Groups(ranks=4, contiguous=False, sync_every=sync_every, domain=4, local_world_size=4)
    return {"groups": groups, "topology": groups.topology(2, None)}


COLUMNS, HOSTS = make_plan(), make_plan(devices=16)
WHOLE = tuple(Shard(table=table.name, rows=table.rows, dim=table.dim, device=0) for table in TABLES)
COPIES = (*WHOLE, Shard(table="country", rows=7, dim=4, device=1))
COPIED = TableRule(table="country", data_parallel=True)


def decided(new: Plan, live: Plan, store: FolderStore, *, nightly: bool = True) -> Decision:
    """The gate's decision where by today's prices both plans cost the same."""
    release: Release = deploy(live, store, "m", now=NOW)
    costs = new.model_copy(update={"predicted_ms": (10.0,) * new.task.devices})
    return decide(costs, Gate(nightly=nightly, price=lambda live, today: 10.0), release, live)


@pytest.mark.parametrize(
    ("live", "new", "why"),
    [
        (
            planned(HOSTS, **joined_by(8, 8)),
            planned(HOSTS, **joined_by(4, 4)),
            "is for 2 hosts of 8 ranks, 2 domains of 8, not for 4 hosts of 4 ranks, 4 domains of 4",
        ),
        (
            planned(HOSTS, **joined_by(8, 8)),
            planned(HOSTS, **joined_by(8, 4)),
            "is for 2 hosts of 8 ranks, 2 domains of 8, not for 4 hosts of 4 ranks, 2 domains of 8",
        ),
        (
            HOSTS,
            planned(HOSTS, **joined_by(8, 8)),
            "is for one domain, not for 2 hosts of 8 ranks, 2 domains of 8",
        ),
        (
            planned(COLUMNS, **in_groups(1)),
            planned(COLUMNS, **in_groups(20)),
            "is for replicas averaged every step, not every 20 steps",
        ),
        (COLUMNS, planned(COLUMNS, collective_precision=FP16), "is for collectives in fp32, not in fp16"),
        (
            COLUMNS,
            planned(COLUMNS, WHOLE, **with_rules(TableRule(table="user", devices=(0,)))),
            "breaks today's task: table 'user' has a shard on device 1, to which it is not pinned",
        ),
        (
            COLUMNS,
            planned(COLUMNS, WHOLE, **with_rules(max_shards=1)),
            "breaks today's task: table 'user' is in 4 shards; at most 1 are allowed",
        ),
        (
            COLUMNS,
            planned(COLUMNS, WHOLE, **with_rules(together=(("user", "item"),))),
            "breaks today's task: tables 'user' and 'item' are kept together, but are on 2 devices",
        ),
        (
            COLUMNS,
            planned(COLUMNS, WHOLE, **with_rules(min_dim=8)),
            "breaks today's task: table 'user' has a shard of 4 columns; its least width is 8",
        ),
        (
            COLUMNS,
            planned(COLUMNS, COPIES, **with_rules(COPIED)),
            "breaks today's task: table 'country' is data-parallel, but device 1 has 0 copies of it",
        ),
        (
            planned(COLUMNS, COPIES, **with_rules(COPIED)),
            planned(COLUMNS, WHOLE, **with_rules(TableRule(table="country", data_parallel=False))),
            "breaks today's task: table 'country' is held with data_parallel",
        ),
        (
            planned(COLUMNS, COPIES, **with_rules(COPIED)),
            planned(COLUMNS, WHOLE, **with_rules(together=(("user", "country"),))),
            "breaks today's task: table 'country' is data-parallel, and cannot be kept together with others",
        ),
        (
            COLUMNS,
            planned(COLUMNS, **reading("none")),
            "has table 'user' at 4 bytes an element with pooling 'sum', and today's task has it at 4 bytes an element with "
            "pooling 'none'",
        ),
        (
            row_plan(),
            planned(COLUMNS, **reading("mean")),
            "has table 'user' at 4 bytes an element with pooling 'sum', and today's task has it at 4 bytes an element with "
            "pooling 'mean'",
        ),
        (
            row_plan(),
            planned(
                row_plan(),
                tables=(TABLES[0].model_copy(update={"id_map": IdMap(kind="mch", bytes_per_row=24)}), *TABLES[1:]),
            ),
            "has table 'user' at 4 bytes an element with pooling 'sum' and ids that are its rows, and today's task has it at 4 "
            "bytes an element with pooling 'sum' and an id map of kind mch, bytes_per_row 24",
        ),
    ],
)
def test_a_night_replaces_a_live_plan_that_breaks_todays_task_or_that_trainers_refuse(store, live, new, why):
    decision = decided(new, live, store)

    assert (decision.verdict, decision.gain) == ("passed", None)
    assert decision.comparison.startswith(f"the live plan {why}")


@pytest.mark.parametrize(
    ("live", "new"),
    [
        (
            planned(HOSTS, **joined_by(8, 8, 1e9)),
            planned(HOSTS, **joined_by(8, 8, 2e9)),
        ),  # the network is measured anew
        (planned(HOSTS, **joined_by(16, 8)), planned(HOSTS, **joined_by(16, 4))),  # in one domain any hosts do
        (planned(HOSTS, **joined_by(16, 8)), HOSTS),
        (COLUMNS, planned(COLUMNS, collective_precision=CollectivePrecision())),
        (COLUMNS, planned(COLUMNS, **with_rules(TableRule(table="user", max_shards=4), together=(("country",),)))),
        (planned(COLUMNS, COPIES, **with_rules(COPIED)), COLUMNS),  # copies are demanded no more, and are not forbidden
        (
            planned(COLUMNS, COPIES, **with_rules(COPIED)),
            planned(COLUMNS, **with_rules(TableRule(table="country", max_shards=1))),
        ),
    ],
)
def test_a_live_plan_that_still_serves_stays_if_the_new_one_is_no_better(store, live, new):
    decision = decided(new, live, store)

    assert (decision.verdict, decision.gain) == ("kept", 0.0)


def test_copies_that_the_search_may_have_chosen_by_itself_need_not_be_in_the_live_plan(store):
    new = planned(COLUMNS, COPIES, **with_rules(COPIED)).answering(COLUMNS.task)
    decision = decided(new, COLUMNS, store, nightly=False)

    assert (decision.verdict, decision.gain) == ("kept", 0.0)


def test_no_night_takes_a_plan_of_groups_from_its_trainers(store):
    """They would refuse the night's plan, which is of none. A person may leave groups, and so do other ranks or tables."""
    live, new = planned(COLUMNS, **in_groups(1)), make_plan(devices=4)
    decision = decided(new, live, store)
    assert (decision.verdict, decision.moved_bytes) == ("kept", None)
    assert decision.comparison.startswith(
        "the live plan is for 2 groups of 2 of 4 ranks (strided), averaged every step, whose "
    )
    assert decision.comparison.endswith("deploy the next one by hand; the live plan stays")
    assert decided(new, live, store, nightly=False).verdict == "passed"
    assert decided(make_plan(devices=8), live, store).verdict == "passed"
    assert decided(make_plan(devices=4, tables=TABLES[:2]), live, store).verdict == "passed"


@pytest.mark.parametrize("nightly", [False, True])
def test_a_plan_whose_row_wise_tables_nobody_asked_for_stays_live_on_an_unchanged_task(store, nightly):
    model = AnalyticModel()
    tables = tuple(
        Table(name=f"t{i}", rows=rows, dim=dim, pooling_factor=pooling) for i, (rows, dim, pooling) in enumerate(HEAVY)
    )
    task = ShardingTask(tables=tables, device_memory_bytes=(2**30,) * 8, batch_size=65536)
    tried = SearchSettings(rounds=2, try_row_wise=True)
    live, columns = search(task, model, tried), search(task, model, replace(tried, algorithm="size"))
    assert split(live) == {"t0"}
    assert (live.task.constraints.row_wise, columns.task.constraints.row_wise) == (False, False)

    stays_live(live, columns, store, model, nightly=nightly)
    stays_live(live, search(task, model, replace(tried, seed=1)), store, model, nightly=nightly)


@pytest.mark.slow
@pytest.mark.parametrize("nightly", [False, True])
def test_a_plan_whose_copies_the_search_chose_stays_live_on_an_unchanged_task(store, nightly):
    model = Analytic("h100", 65536)
    task = ShardingTask(
        tables=drawn_tables(np.random.default_rng(0), 16, rows=(1, 7)),
        device_memory_bytes=(2**36,) * 16,
        batch_size=65536,
        **joined_by(8, 8, 12.5e9),
    )
    auto = SearchSettings(rounds=1, try_row_wise=True, try_data_parallel=True)
    live, plain = search(task, model, auto), search(task, model, replace(auto, try_data_parallel=False))
    assert live.held.constraints.data_parallel
    assert not plain.held.constraints.data_parallel

    stays_live(live, plain, store, model, nightly=nightly)
    stays_live(live, search(task, model, replace(auto, seed=1)), store, model, nightly=nightly)


def test_a_live_plan_must_have_the_copies_that_rules_ask_for_and_not_those_that_todays_plan_chose(store):
    asked = planned(COLUMNS, COPIES, **with_rules(COPIED))
    chosen = asked.answering(COLUMNS.task)
    assert [one.table for one in chosen.holdings] == ["country"]
    gate = Gate(nightly=True, price=lambda live, today: 10.0)
    release = deploy(COLUMNS, store, "m", now=NOW)
    for new, verdict in ((asked, "passed"), (chosen, "kept")):
        costs = new.model_copy(update={"predicted_ms": (10.0,) * 2})
        assert decide(costs, gate, release, COLUMNS).verdict == verdict


def test_a_live_plan_is_priced_with_its_own_copies(store):
    """Not with those of today's plan, and a copy on one device is one too."""
    model = Analytic("h100", 64)
    for devices in (1, 2):
        tables = tuple(Table(name=name, rows=1000, dim=16, pooling_factor=3.0) for name in "abc")
        task = ShardingTask(tables=tables, device_memory_bytes=(2**30,) * devices, batch_size=64)
        plans = [search(task.with_copies(names), model, SearchSettings(rounds=1)) for names in ("", "a", "ab")]
        for live in plans:
            for today in plans:
                assert price(live, today, model) == pytest.approx(live.cost_ms)


def stays_live(live: Plan, new: Plan, store: FolderStore, model: Any, *, nightly: bool) -> None:
    """The new plan, which is no better by much, is compared with the live one and kept back."""
    release = deploy(live, store, "m", now=NOW)
    gate = Gate(nightly=nightly, min_gain=0.1, price=lambda one, today: price(one, today, model))
    decision = decide(new, gate, release, live)
    assert (decision.verdict, decision.gain is not None) == ("kept", True), decision.why


def in_tiers(tiers: Mapping[str, tuple[Tier, int | None]] = MappingProxyType({}), host: int | None = 2**30) -> Plan:
    """COLUMNS with tables in these tiers, on hosts of so much memory."""
    task = COLUMNS.task.with_tiers(tiers)
    return planned(COLUMNS, constraints=task.constraints, host_memory_bytes=host)


LARGE = max(TABLES, key=lambda table: table.memory_bytes)


def test_a_live_plan_in_tiers_serves_while_the_hosts_have_the_memory(store):
    live = in_tiers({LARGE.name: ("host", None)})
    assert decided(in_tiers(), live, store).verdict == "kept"
    for less, why in ((1, "host 0 needs"), (None, "the task has no host memory")):
        decision = decided(in_tiers(host=less), live, store)
        assert decision.verdict == "passed"
        assert why in decision.comparison


def test_a_live_plan_in_hbm_serves_a_task_whose_plan_is_in_tiers_if_it_fits(store):
    apart = joined_by(2, 1)  # a host for each device, and no host has memory for all of the table
    half = LARGE.rows * LARGE.dim * (LARGE.element_bytes + LARGE.optimizer_bytes_per_element) // 2
    new = planned(in_tiers({LARGE.name: ("host", None)}), **apart, host_memory_bytes=half).answering(COLUMNS.task)
    live = planned(COLUMNS, WHOLE, **apart)
    assert max(new.host_memory()) == half
    assert decided(new, live, store).verdict == "kept"


def test_a_live_plan_in_tiers_is_priced_as_it_is():
    model = Analytic("h100", COLUMNS.task.batch_size)
    live, today = in_tiers({LARGE.name: ("host", None)}), in_tiers()
    costs = [price(other, to, model) for other, to in ((live, today), (today, live), (live, live), (today, today))]
    assert costs[0] == costs[2]
    assert costs[1] == costs[3]
    assert (costs[0] or 0) > (costs[1] or 0) > 0


def test_tables_of_a_live_plan_that_are_gone_today_have_no_tier_today():
    live, today = in_tiers({LARGE.name: ("cached", LARGE.rows)}), in_tiers()
    fewer = tuple(table for table in TABLES if table.name != LARGE.name)
    assert not today.task.model_copy(update={"tables": fewer}).held_as(live.task).constraints.beyond_hbm
    shrunk = tuple(table.model_copy(update={"rows": max(table.rows // 2, 1)}) for table in TABLES)
    held = today.task.model_copy(update={"tables": shrunk}).held_as(live.task)
    assert held.constraints.beyond_hbm[LARGE.name].cached_rows == LARGE.rows // 2


TALLER = tuple(table.model_copy(update={"rows": 2 * table.rows}) for table in TABLES)


@pytest.mark.parametrize(
    ("live", "fact"),
    [
        (make_plan(tables=TALLER), "2,000 rows"),
        (make_plan(tables=TABLES[:2]), "country"),
        (planned(COLUMNS, **reading("mean")), "'mean'"),
        (make_plan(devices=4), "4 devices"),
        (planned(COLUMNS, device_memory_bytes=(2**21,) * 2), "other memory"),
        (planned(COLUMNS, collective_precision=FP16), "collectives in"),
    ],
)
def test_a_kept_live_plan_that_does_not_serve_is_said_beside_the_plan_that_stays_away(
    live: Plan, fact: str, store: FolderStore
) -> None:
    """A plan that was rolled back stays away, and a live plan that does not serve is replaced: the first of the two wins."""
    bad, release = COLUMNS, deploy(live, store, "m", now=NOW)
    decision = decide(bad, Gate(nightly=True), release, live, rolled_back=True)
    assert (decision.verdict, decision.goes_live) == ("kept", False)
    assert fact in decision.unserved
    assert decision.why.endswith(decision.unserved)
    assert "rolled back; the live plan stays until somebody promotes" in decision.why
    assert Decision.parse(decision.model_dump(mode="json"), "") == decision
    assert decide(bad, Gate(nightly=True), release, live).verdict == "passed"
    refused_too = decide(bad, Gate(nightly=True, memory_margin=0.999), release, live)
    assert (refused_too.verdict, fact in refused_too.why) == ("refused", True)
    assert decide(bad, Gate(nightly=True), release, bad, rolled_back=True).unserved == ""
