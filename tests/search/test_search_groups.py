"""Plans of groups of ranks: what averaging adds to them, which size and numbering is taken, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import neuroshard as ns
from helpers.costs import random_model
from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, device_memory
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.averaging import averaged_bytes, averaging, averaging_ms
from neuroshard.costmodel.pricing import copies_ms, price_shards
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.evaluate import evaluate
from neuroshard.report.run import report_of
from neuroshard.report.text import plan_json, plan_text
from neuroshard.search.groups import task_of_group
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

pytestmark = pytest.mark.slow

BATCH = 8192
TABLES = [
    {
        "name": f"t{i}",
        "rows": 100_000 * (1 + i % 4),
        "dim": 32,
        "pooling_factor": 4.0 + 3 * i,
        "optimizer_bytes_per_row": 4,
    }
    for i in range(10)
]
FEW = {"rounds": 2, "quiet": True, "batch_size": BATCH, "memory": "2GiB"}


def found(**options: Any) -> Plan:
    return ns.search(options.pop("tables", TABLES), options.pop("model", "analytic:h100"), **{**FEW, **options})


def refused(says: str, kind: type[Exception] = UsageError, **options: Any) -> None:
    with pytest.raises(kind, match=says) as error:
        found(**options)
    assert "\n" not in str(error.value)


def task(ranks: int, size: int, contiguous: bool, *, domain: int = 8, every: int = 1, **more: object) -> ShardingTask:
    of = Groups(ranks=ranks, contiguous=contiguous, sync_every=every, domain=domain, local_world_size=domain)
    fields = {
        "tables": ns.tables(TABLES),
        "device_memory_bytes": (2**31,) * size,
        "batch_size": BATCH * size // ranks,
        "topology": of.topology(size, None),
        "groups": of,
    }
    return ShardingTask.parse({**fields, **more}, "a task")


def test_averaging_has_the_rates_of_a_trained_model_too():
    model = random_model(2, 4, 8, seed=3)
    grouped = task(16, 4, True, batch_size=model.batch_size)
    some, more = (averaging(model, grouped, nbytes).ms for nbytes in (1e6, 2e6))
    assert 0 < some < more
    plan = search(grouped, model, SearchSettings(rounds=0))
    prices = price_shards(model, grouped, plan.shards)
    assert prices is not None
    assert prices.total_ms == pytest.approx(plan.predicted_ms)


def test_averaging_is_in_the_cost_of_every_device_each_so_many_steps():
    plan = found(devices=16, domain=8, group_size=4, sync_every=10)
    assert plan.task.groups is not None
    fullest = max(memory.weights + memory.optimizer for memory in device_memory(plan.held, plan.shards))
    ms = averaging(Analytic("h100", plan.task.batch_size), plan.task, fullest).ms / 10
    assert plan.predicted is not None
    assert plan.predicted_ms is not None
    assert [cost.averaging_ms for cost in plan.predicted] == pytest.approx([ms] * 4)
    assert plan.predicted_ms == tuple(cost.total_ms for cost in plan.predicted)
    assert ns.price(plan, "analytic:h100").total_ms == pytest.approx(plan.predicted_ms)
    assert ms <= (plan.lower_bound_ms or 0.0) <= (plan.cost_ms or 0.0)
    assert any(f"{10 * ms:.3f} ms, {ms:.3f} ms a step" in note for note in plan.provenance.notes)


def test_a_group_is_priced_as_its_ranks_alone_are():
    """Without averaging, a plan of a group costs what it costs a trainer of as many ranks with the group's batch."""
    grouped = task(16, 8, True, every=10**9)
    model = Analytic("h100", grouped.batch_size)
    alone = grouped.model_copy(update={"groups": None})
    one, other = (search(each, model, SearchSettings(rounds=2)) for each in (grouped, alone))
    assert one.shards == other.shards
    assert one.cost_ms == pytest.approx(other.cost_ms, rel=1e-6)


def test_heuristics_are_priced_with_what_they_average():
    """Equal tables have equal plans, whoever makes them: then what is averaged is the same too."""
    equal = [{**TABLES[0], "name": f"t{i}"} for i in range(8)]
    plan = found(tables=equal, devices=16, domain=8, group_size=8, no_row_wise=True, max_shards=1)
    assert [one.cost_ms for one in plan.baselines if one.algorithm == "size"] == [pytest.approx(plan.cost_ms)]


def test_a_plan_that_averages_less_is_taken_where_averaging_costs_most():
    """Tables that are looked up much are small here, so the cheapest devices would hold unequal bytes."""
    some = [
        {"name": f"t{i}", "rows": 10_000 if i % 2 else 2_000_000, "dim": 64, "pooling_factor": 60.0 if i % 2 else 1.0}
        for i in range(12)
    ]
    plan = found(tables=some, devices=16, domain=8, group_size=8, no_row_wise=True)
    held = [memory.weights + memory.optimizer for memory in device_memory(plan.held, plan.shards)]
    rarely = found(tables=some, devices=16, domain=8, group_size=8, no_row_wise=True, sync_every=10_000)
    uneven = [memory.weights + memory.optimizer for memory in device_memory(rarely.held, rarely.shards)]
    assert max(held) < max(uneven)
    assert plan.cost_ms <= min(one.cost_ms for one in plan.baselines if one.cost_ms)


def test_auto_takes_the_cheapest_and_says_what_the_others_cost():
    plan = found(devices=16, domain=8, group_size="auto", sync_every=100)
    others = [found(devices=16, domain=8, group_size=size, sync_every=100) for size in (2, 4, 8)]
    others.append(found(devices=16, domain=8))
    assert plan.cost_ms == min(one.cost_ms for one in others)
    said = [note for note in plan.provenance.notes if "would take" in note]
    assert len(said) == 6  # two numberings of three sizes, and one group, but the best
    assert sum("one group of 16 ranks" in note for note in said) + (plan.task.groups is None) == 1


def test_one_group_is_taken_where_averaging_costs_more_than_it_saves():
    plan = found(devices=16, domain=16, group_size="auto")
    assert plan.task.groups is None
    assert plan.format_version == 6
    assert "one group of 16 ranks is the cheapest of 4 that were searched" in plan.provenance.notes


def test_sizes_without_room_are_said_and_not_taken():
    how = {"devices": 16, "domain": 8, "memory": "48MiB", "allocator_share": 0}
    notes = found(**how, group_size="auto").provenance.notes
    assert any(note.startswith("8 groups of 2 of 16 ranks") and "would have no plan" in note for note in notes)
    why = "8 groups of 2 of 16 ranks .* short; give each device .* more; 1 other choice of groups tried, without"
    refused(why, Infeasible, **how, group_size=2)


def test_copies_are_summed_up_over_all_ranks():
    """Twice the gradients in rings of 16 ranks, whatever the groups: as a trainer of 16 ranks has them."""
    copied: dict[str, Any] = {
        "constraints": {"tables": [{"table": "t0", "data_parallel": True}]},
        "dense_optimizer": "sgd",
    }
    grouped = task(16, 4, True, **copied)
    model, everyone = Analytic("h100", grouped.batch_size), grouped.of_all_ranks
    ours = copies_ms(model, grouped.copied, grouped)
    theirs = copies_ms(Analytic("h100", everyone.batch_size), everyone.copied, everyone)
    assert ours.backward_ms == pytest.approx(theirs.backward_ms)
    assert ours.compute_ms == pytest.approx(theirs.compute_ms, rel=0.02)  # reuse bins are of another batch
    plan = search(grouped, model, SearchSettings(rounds=1))
    kept = sum(Part.of(t).table.memory_bytes for t in grouped.placed)
    assert averaged_bytes(plan.held, plan.shards) <= kept  # copies are not averaged
    refilled = found(devices=16, domain=8, group_size=4, data_parallel=["t0"])
    assert len(refilled.by_table()["t0"]) == 4


def test_a_device_has_the_least_memory_of_its_replicas():
    of = Groups(ranks=4, contiguous=False, domain=4, local_world_size=4)
    whole = ShardingTask.parse(
        {
            "tables": ns.tables(TABLES),
            "device_memory_bytes": (5, 3, 4, 6),
            "batch_size": 8,
            "topology": of.of_all_ranks(None),
        },
        "t",
    )
    assert task_of_group(whole, of, 2).device_memory_bytes == (3, 4)  # ranks 0 and 1, 2 and 3
    assert task_of_group(whole, of.model_copy(update={"contiguous": True}), 2).device_memory_bytes == (4, 3)
    with pytest.raises(InvalidInput, match="a batch of 9 samples does not divide over 2 groups"):
        task_of_group(whole.model_copy(update={"batch_size": 9}), of, 2)


def test_a_search_starts_from_a_plan_of_the_same_groups(tmp_path: Path):
    before = found(devices=16, domain=8, group_size=4, sync_every=5, out=tmp_path / "plan.json")
    again = found(devices=16, domain=8, group_size=4, sync_every=5, previous=before, move_budget=0)
    assert ns.diff(before, again).moved_bytes == 0 or before.task.groups != again.task.groups
    says = "devices of one are other ranks in the other"
    refused(says, devices=16, domain=8, group_size=8, previous=before)
    refused(says, devices=4, previous=before)
    refused("auto places all tables anew", devices=16, domain=8, group_size="auto", previous=before)


def test_plans_of_other_groups_are_priced_and_not_diffed():
    fours, eights = (found(devices=16, domain=8, group_size=size) for size in (4, 8))
    assert ns.price(fours, "analytic:h100").batch_size == ns.price(eights, "analytic:h100").batch_size == BATCH
    for model in (None, "analytic:h100"):
        with pytest.raises(InvalidInput, match="what moves between plans of other groups is not counted"):
            ns.diff(fours, eights, model)
    assert ns.diff(fours, fours, "analytic:h100").moved_bytes == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group_size": 3}, "groups of 3 do not divide 16 ranks .* groups of 2, 4, 8 do"),
        ({"group_size": 16}, "groups of 16 do not divide 16 ranks into several groups"),
        ({"group_size": 1}, "group_size is a whole number from 2"),
        ({"group_size": "some"}, "must be a number of ranks, or auto, not 'some'"),
        ({"sync_every": 2}, "sync_every is of replicas of groups"),
        ({"group_size": 4, "sync_every": 0}, "sync_every is a whole number from 1"),
        ({"group_size": 4, "domain": None}, "say how many share fast links"),
        ({"group_size": 4, "batch_size": None}, "each group sees its part of the batch"),
        ({"group_size": 4, "host_memory": "1TiB"}, "groups of ranks cannot have host_memory"),
        ({"group_size": 4, "rows_by_access": "auto"}, "groups of ranks cannot have rows_by_access"),
        ({"group_size": 4, "pin": ["t0=host:1"]}, "names a host, of which groups have parts"),
        (
            {"devices": 24, "group_size": 8, "domain": 12, "local_world_size": 2, "batch_size": 9216},
            "strided groups of 8 of 24 ranks cut hosts of 2 unevenly",
        ),
    ],
)
def test_what_makes_no_groups_is_refused_in_one_line(options, says):
    refused(says, **{"devices": 16, "domain": 8, **options})


def test_devices_that_a_group_lacks_are_refused():
    refused("device", InvalidInput, devices=16, domain=8, group_size=4, pin=["t0=9"])


def test_given_costs_do_not_say_what_averaging_takes(tmp_path: Path):
    costs = {
        "format_version": 1,
        "batch_size": BATCH // 4,
        "fixed_ms": 0.0,
        "device_name": "given",
        "tables": [{"name": t["name"], "cost_ms": 1.0} for t in TABLES],
    }
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs))
    refused("given costs have all-to-alls in them", devices=16, domain=8, group_size=4, model=f"given:{path}")


def test_bytes_of_row_wise_state_are_averaged_for_each_shard():
    table = Table(name="a", rows=1000, dim=8, pooling_factor=1.0, optimizer_bytes_per_row=4)
    one = task(16, 2, False, tables=[table])
    assert averaging_ms(Analytic("h100", one.batch_size), one.model_copy(update={"groups": None}), 1e9) == 0.0
    from neuroshard.core.plan import Shard

    halves = [Shard(table="a", rows=1000, dim=4, column_offset=4 * d, device=d) for d in (0, 1)]
    assert averaged_bytes(one, halves) == 1000 * (4 * 4 + 4)
    whole = [Shard(table="a", rows=1000, dim=8, device=1)]
    assert averaged_bytes(one, whole) == 1000 * (8 * 4 + 4)
    prices = price_shards(Analytic("h100", one.batch_size), one, whole)
    assert prices is not None
    assert np.all(prices.total_ms > prices.averaging_ms)


def test_show_price_and_report_say_the_groups(tmp_path: Path):
    plan = found(devices=16, domain=8, group_size=4, sync_every=5)
    assert plan.predicted is not None
    ms, words = plan.predicted[0].averaging_ms, "4 groups of 4 of 16 ranks (strided), averaged every 5 steps"
    text, data = " ".join(plan_text(plan).split()), plan_json(plan)
    assert f"4 devices (2 hosts of 2 ranks, 2 domains of 2), {words}, batch 8,192" in text
    assert f"each total includes {ms:.3f} ms of averaging replicas" in text
    assert data["batch_size"] == BATCH
    assert data["groups"] == {
        "size": 4,
        "ranks": 16,
        "replicas": 4,
        "numbering": "strided",
        "sync_every": 5,
        "batch_size": BATCH // 4,
        "averaging_ms": ms,
    }
    assert all(one["averaging_ms"] == ms for one in data["devices"])
    assert f"{ms:.3f} ms of averaging replicas" in str(ns.price(plan, "analytic:h100"))
    assert words in repr(plan)
    ns.report(plan, model="analytic:h100").save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert words in page
    assert '"averaging replicas":[' in page
    alone = found(devices=4)
    assert plan_json(alone)["groups"] is None
    assert "averag" not in plan_text(alone)


def test_a_live_plan_of_other_groups_is_said_to_be_and_not_compared(tmp_path: Path):
    fours, eights = (found(devices=16, domain=8, group_size=size) for size in (4, 8))
    ns.deploy(fours, tmp_path / "store", "ads")
    deployed = ns.deploy(eights, tmp_path / "store", "ads", model="analytic:h100")
    assert "the live plan and today's are for 4 groups of 4 of 16 ranks" in deployed.release.decision.comparison
    assert deployed.release.decision.moved_bytes is None
    page = report_of(
        fours, model="analytic:h100", live=f"{tmp_path / 'store'}#ads", costs=[], fleet=None, evaluation=None, files={}
    )
    assert "neither ms nor moves are compared" in page
    assert ns.load_plan(tmp_path / "store", "ads") == eights


def test_an_evaluation_runs_one_group_and_no_averaging():
    plan = found(devices=4, domain=4, group_size=2)
    assert plan.predicted is not None
    assert plan.predicted[0].averaging_ms > 0
    evaluation = evaluate(plan, "synthetic", MeasureSettings(batch_size=1))
    for one, cost in zip(evaluation.devices, plan.predicted, strict=True):
        assert one.predicted is not None
        assert one.predicted.total_ms == pytest.approx(cost.total_ms - cost.averaging_ms)


def test_sizes_are_swept_in_groups():
    sizes = ns.size(
        ns.tables(TABLES),
        ["analytic:h100"],
        devices="4,8,16",
        domain=["4"],
        memory=["2GiB"],
        batch_size=BATCH,
        rounds=1,
        group_size=4,
        sync_every=9,
    )
    rows = {row["devices"]: row for row in sizes.data["rows"]}
    assert list(rows) == [8, 16]
    assert "analytic:h100 with 4 devices is left out: groups of 4 do not divide 4 ranks" in " ".join(
        sizes.data["notes"]
    )
    alone = found(devices=16, domain=4, group_size=4, sync_every=9, rounds=1)
    assert rows[16]["embeddings_ms"] == alone.cost_ms
    assert rows[16]["samples_per_s"] == pytest.approx(BATCH / alone.cost_ms * 1000)
    assert rows[8]["groups"] == "2 groups of 4 of 8 ranks (strided), averaged every 9 steps"
    assert f"trained in {rows[8]['groups']}" in " ".join(str(sizes).split())


@pytest.mark.parametrize("algorithm", ["size", "neuroshard-2023"])
def test_other_algorithms_place_a_group_too(algorithm):
    plan = found(devices=8, domain=4, group_size=4, algorithm=algorithm)
    assert plan.task.groups is not None
    assert plan.predicted is not None
    assert plan.predicted[0].averaging_ms > 0


def test_time_is_shared_by_the_sizes(ticking: None):
    plan = found(devices=16, domain=8, group_size="auto", sync_every=100, rounds=None, time_budget="2s")
    assert sum("would take" in note for note in plan.provenance.notes) == 6


def test_a_model_of_one_batch_size_prices_groups_that_have_it():
    model = Path(__file__).parents[1] / "golden" / "model-1"  # measured at 65,536 samples
    asked = {"model": str(model), "devices": 8, "domain": 4, "group_size": 4}
    plan = found(**asked, batch_size=2 * 65536)
    assert (plan.task.batch_size, plan.task.devices) == (65536, 4)
    refused(r"2 groups of 4 of 8 ranks .* not 32,768", InvalidInput, **asked, batch_size=65536)
