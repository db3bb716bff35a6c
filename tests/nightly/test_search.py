"""The search of a nightly run: constraints and a move budget of the model's spec, the live plan as the start."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.costs import random_model, random_tables
from helpers.plans import NOW
from helpers.recorded import record
from helpers.refusals import refused
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.moves import changed_state, moved_bytes, moves
from neuroshard.core.plan import Plan, Shard
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.topology import Topology
from neuroshard.core.value import sha256
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.deploy.bundles import PublishRule, publish_model
from neuroshard.deploy.run import deploy
from neuroshard.files.row_orders import bytes_of_ids
from neuroshard.files.tables import write_tables
from neuroshard.nightly import search as night_search
from neuroshard.nightly.search import search_plan
from neuroshard.orders.nightly import ModelSpec, Request, Survey, read_specs
from neuroshard.search.run import run as search
from neuroshard.store.folder import FolderStore
from neuroshard.store.row_orders import put_ids, read_ids
from neuroshard.store.traces import pointer_key


@pytest.fixture
def plan_of(tmp_path):
    store, model = FolderStore(tmp_path / "store"), random_model(2, 4)

    def publish(other):
        nonlocal model
        model = other
        save_cost_model(tmp_path / model.manifest.hardware_fingerprint, model)
        publish_model(tmp_path / model.manifest.hardware_fingerprint, store, now=NOW, asked=PublishRule(max_error=None))

    publish(model)
    write_tables(tmp_path / "tables.json", random_tables(9))

    def made(seed: int = 0, nodes: Topology | None = None, margin: float = 0.0, **asked):
        spec = ModelSpec(**{"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", **asked})
        request = Request(compute_cases=1, collective_cases=0, batch_size=65536, seed=seed, backend="synthetic")
        hardware = {"ads": model.manifest.hardware_fingerprint}
        topologies = {hardware["ads"]: nodes} if nodes else {}
        parameters = {"algorithm": "local-search", "memory_margin": margin}
        survey = Survey(
            request=request,
            models=(spec,),
            hardware=hardware,
            campaigns=(),
            topologies=topologies,
            parameters=parameters,
        )
        found, searched = search_plan(survey, "ads", store, tmp_path / "tables.json", tmp_path / "plan.json")
        assert searched.instead == ""
        return found

    plan: Any = made
    plan.publish = publish
    plan.store = store
    plan.write_tables = lambda tables: write_tables(tmp_path / "tables.json", tables)
    plan.deploy = lambda found: deploy(found, store, "ads", now=NOW)
    return plan


def test_an_order_may_have_constraints(plan_of):
    found = plan_of(constraints={"tables": [{"match": "t*", "devices": [1, 3]}]})
    assert {shard.device for shard in found.shards} == {1, 3}
    with refused(InvalidInput, "'ads'", "min_dim"):
        plan_of(constraints={"min_dim": 6})


def test_the_gates_margin_is_left_on_each_device_by_its_own_memory(plan_of):
    found = plan_of(memory="80GiB,8GiB,8GiB,8GiB", margin=0.1)
    assert found.task.usable_bytes == tuple(
        memory - math.ceil(0.1 * memory) for memory in found.task.device_memory_bytes
    )


def test_an_order_may_name_its_trainers_pipeline(plan_of):
    found, usual = plan_of(pipeline="prefetch"), plan_of()
    assert (found.task.pipeline, usual.task.pipeline) == ("prefetch", "sparse-dist")
    assert sum(memory.step for memory in found.device_memory()) != sum(memory.step for memory in usual.device_memory())
    with refused(InvalidInput, "models[0]", "pipeline", "not 'x'"):
        read_specs('[{"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", "pipeline": "x"}]')


def test_an_order_may_keep_the_optimizer_state_of_the_live_plan(plan_of):
    first = plan_of(keep_optimizer_state=True, constraints={"max_shards": 2})  # nothing is live yet
    plan_of.deploy(first)
    assert not changed_state(first, plan_of(seed=1, keep_optimizer_state=True))
    assert changed_state(first, plan_of(seed=1, constraints={"max_shards": 1}))


@pytest.mark.parametrize(
    ("asked", "nodes", "found"),
    [
        ({}, (2, 2), (2, 2)),
        ({}, (4, 2), None),  # one domain
        ({}, (3, 3), None),  # not whole nodes
        ({"domain": 1}, (2, 2), (1, 1)),
        ({"local_world_size": 2, "network": "1GB/s"}, None, (2, 2)),
    ],
)
def test_an_order_is_planned_for_the_domains_that_it_names_or_its_nodes_have(plan_of, asked, nodes, found):
    there = nodes and Topology(domain=nodes[0], local_world_size=nodes[1])
    topology = plan_of(nodes=there, **asked).task.topology
    assert (topology and (topology.domain, topology.local_world_size)) == found
    with refused(UsageError, "4 devices", "3 ranks"):
        read_specs('[{"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", "domain": 3}]')


def test_an_order_may_take_the_cheapest_plan_whatever_its_cuts(plan_of):
    simple, cheapest = plan_of(simplicity="10%"), plan_of(simplicity="0")
    assert simple.cost_ms > cheapest.cost_ms
    assert len(simple.shards) < len(cheapest.shards)
    with refused(UsageError, "simplicity", "60%"):
        read_specs('[{"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", "simplicity": "60%"}]')


def test_an_order_is_planned_for_the_collective_precision_that_its_trainer_has(plan_of):
    with refused(UsageError, "'fp4'", "fp16"):
        read_specs('[{"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", "collective_precision": "fp4"}]')
    assert plan_of(collective_precision="fp16:bf16").task.collective_precision.text == "fp16:bf16"


def test_a_night_that_may_move_nothing_keeps_the_live_plans_copies(plan_of):
    rule = {"constraints": {"tables": [{"match": "t3", "data_parallel": True}]}}
    first = plan_of(**rule)
    plan_of.deploy(first)
    again = plan_of(seed=1, move_budget="0", **rule)
    assert (moves(first, again), again.shards) == ((), first.shards)
    unruled = plan_of(seed=1, move_budget="0", data_parallel="auto")
    assert moves(first, unruled) == ()
    assert unruled.cost_ms <= first.cost_ms * (1 + 1e-9)


def test_a_live_plan_that_the_operator_cannot_hold_binds_no_night(plan_of: Any) -> None:
    wide = Table(name="wide", rows=1000, dim=2048, pooling_factor=2.0)
    plan_of.write_tables([wide, *random_tables(3)])
    first = plan_of()
    whole = [Shard(table=table.name, rows=table.rows, dim=table.dim, device=0) for table in first.task.tables]
    plan_of.deploy(Plan(task=first.task, shards=tuple(whole), provenance=first.provenance))

    for asked in ({"move_budget": "0"}, {"keep_optimizer_state": True}):
        assert max(shard.dim for shard in plan_of(**asked).shards) <= 1024


def test_a_live_plan_of_groups_binds_no_night(plan_of: Any) -> None:
    first = plan_of()
    of = Groups(ranks=8, contiguous=True, domain=8, local_world_size=8)
    grouped = first.task.model_copy(update={"groups": of, "topology": of.topology(4, None)})
    plan_of.deploy(Plan(task=grouped, shards=first.shards, provenance=first.provenance))
    for asked in ({"move_budget": "0"}, {"keep_optimizer_state": True}):
        assert plan_of(seed=1, **asked).task.groups is None


def test_an_order_may_let_the_search_copy_tables_and_names_its_dense_optimizer(plan_of):
    small = [table.model_copy(update={"rows": 10_000}) for table in random_tables(3)]
    plan_of.write_tables([*small, Table(name="hot", rows=1000, dim=64, pooling_factor=700.0)])
    asked = {"memory": "350MiB", "constraints": {"row_wise": False}, "pipeline": "none", "allocator_share": "0"}
    with refused(Infeasible, "no device can hold", "'hot'"):
        plan_of(**asked)
    plan = plan_of(data_parallel="auto", dense_optimizer="adagrad", **asked)
    assert "hot" in plan.held.constraints.data_parallel
    assert plan.task.dense_optimizer == "adagrad"
    for wrong in ("'always'", "'shampoo'"):
        field = "data_parallel" if wrong == "'always'" else "dense_optimizer"
        spec = {"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", field: wrong.strip("'")}
        with refused(InvalidInput, "models[0]", field, wrong):
            read_specs(json.dumps([spec]))


@pytest.mark.parametrize(
    ("asked", "starts"), [({}, False), ({"move_budget": "1GiB"}, True), ({"keep_optimizer_state": True}, True)]
)
def test_the_search_starts_from_the_live_plan_where_the_model_asks_for_less_change(plan_of, monkeypatch, asked, starts):
    live = plan_of()
    plan_of.deploy(live)
    orders = []
    monkeypatch.setattr(
        night_search, "search", lambda *given, **more: orders.append(given[3]) or search(*given, **more)
    )
    plan_of(**asked)
    assert [order.previous for order in orders] == [live if starts else None]


def test_with_a_move_budget_the_search_starts_from_the_live_plan(plan_of):
    first = plan_of(
        move_budget="1KiB", constraints={"tables": [{"match": "t*", "devices": [0]}]}
    )  # nothing is live yet
    plan_of.deploy(first)
    assert moved_bytes(first, plan_of(seed=1)) > 0
    kept = plan_of(seed=1, move_budget="1KiB")
    assert moved_bytes(first, kept) == 0
    assert kept.shards == first.shards


def test_nets_of_gpus_plan_a_night_beyond_hbm_from_the_live_plan(plan_of, tmp_path):
    """A live plan in HBM, today room for half of its tables, and nothing that may move: tables change tiers where they are."""
    nets = random_model(2, 4)
    h100 = Hardware(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=2**36)
    bench = nets.manifest.bench.model_copy(update={"backend": "cuda", "hardware": h100})
    plan_of.publish(
        replace(
            nets, manifest=nets.manifest.model_copy(update={"bench": bench, "hardware_fingerprint": h100.fingerprint})
        )
    )
    live = plan_of()
    plan_of.deploy(live)
    most = max(one.total - one.weights // 2 for one in live.device_memory())
    for asked in ({"move_budget": "0"}, {"keep_optimizer_state": True}):
        plan = plan_of(memory=str(most), host_memory="1TiB", **asked)
        assert plan.held.constraints.beyond_hbm
        assert not changed_state(live, plan)
        assert moved_bytes(live, plan) == 0 or "move_budget" not in asked


def test_a_model_may_have_host_memory(plan_of):
    spec = read_specs('[{"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", "host_memory": "1TiB"}]')[0]
    assert spec.order.task["host_memory_bytes"] == 2**40
    fits = plan_of(host_memory="1TiB")  # into HBM, so nets that know no tiers do
    assert fits.task.host_memory_bytes == 2**40
    assert plan_of().task.host_memory_bytes is None
    with refused(UsageError, "knows no memory beyond HBM", "--host-memory"):
        plan_of(memory="20MiB", host_memory="1TiB")
    with refused(UsageError, "host_memory", "'much'"):
        read_specs('[{"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", "host_memory": "much"}]')


def test_tables_are_read_as_the_models_trainer_recorded_unless_the_model_says_no(plan_of, capfd):
    sequence, *pooled = random_tables(9)
    tables = [sequence.model_copy(update={"pooling": "none"}), *pooled]
    plan_of.write_tables(tables)
    before = plan_of()
    assert "no trainer of 'ads' has recorded how its tables are read" in capfd.readouterr().err
    record(plan_of.store, [*tables[:8], Table(name="gone", rows=10, dim=4, pooling_factor=1.0)])
    found = plan_of()
    for table in found.task.tables[:8]:
        assert table.pooling_factor == 4.0
        assert "100 of 300 steps" in table.access.source
    assert found.task.tables[8] == before.task.tables[8]
    (order,) = [table.row_order for table in found.task.tables if table.row_order is not None]
    assert len(read_ids(plan_of.store, "ads", order)) == order.hot_rows
    notes = found.provenance.notes
    for fact in ("how 8 tables are read: 100 of 300 steps of a trainer up to 2026-01-05", f"a trace: {tables[8].name}"):
        assert any(fact in note for note in notes), fact
    plan_of.write_tables(tables)
    assert plan_of(counted_access=False).task == before.task
    with refused(InvalidInput, "models[0]", "counted_access", "true or false"):
        read_specs('[{"name": "ads", "tables": "-", "devices": 4, "memory": "8GiB", "counted_access": "maybe"}]')


def test_a_trace_that_cannot_be_read_or_is_of_other_tables_leaves_the_tables_as_they_were(plan_of):
    before = plan_of()
    record(plan_of.store, [Table(name="other", rows=10, dim=4, pooling_factor=1.0)])
    found = plan_of()
    assert found.task == before.task
    assert any("is not used" in note and "none of the tables" in note for note in found.provenance.notes)
    (plan_of.store.root / pointer_key("ads")).write_bytes(b"{")
    found = plan_of()
    assert found.task == before.task
    assert any("is not used" in note and "not JSON" in note for note in found.provenance.notes)


def test_a_new_row_order_is_taken_only_where_access_has_drifted_so_far_that_rows_are_worth_moving(plan_of):
    first, *others = random_tables(9)
    first = first.model_copy(update={"pooling": "none"})
    lists = [np.arange(20) * 3, np.arange(20)[::-1] * 3, np.arange(20) * 3 + 1]

    def night(day: int, ids: Any) -> Plan:
        data = bytes_of_ids(ids)
        put_ids(plan_of.store, "ads", data)
        time = f"2026-01-0{day}T00:00:00Z"
        order = RowOrder(ids_digest=sha256(data), rows=first.rows, hot_rows=20, lookup_share=0.8, time=time)
        plan_of.write_tables([first.model_copy(update={"row_order": order}), *others])
        rule = {"match": first.name, "rows_by_access": {"hot_rows": 20}}
        found = plan_of(constraints={"tables": [rule]})
        plan_of.deploy(found)
        return found

    made, alike, drifted = (night(day, ids) for day, ids in enumerate(lists, 1))
    assert alike.held.orders == made.held.orders
    assert drifted.held.orders[first.name].time == "2026-01-03T00:00:00Z"
    note = f"table '{first.name}' has a new row order, and its rows move: row order of table '{first.name}': its hottest 20 rows"
    assert any(each.startswith(note) for each in drifted.provenance.notes)
