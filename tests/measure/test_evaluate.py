"""Plans run for real, or by the formula: measured against predicted, device by device."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.limits import HANGS
from helpers.refusals import names, refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import DeviceCost, Plan, Provenance, Shard
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.files.disk import write_bytes
from neuroshard.measure import formula
from neuroshard.measure.backends import BACKENDS, Backend, MeasureSettings, open_backend
from neuroshard.measure.evaluate import device_tables, evaluate
from neuroshard.measure.formula import Synthetic

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]


MIB = 2**20
TABLES = (
    Table(name="a", rows=2000, dim=64, pooling_factor=8.0, pooling="mean"),
    Table(name="b", rows=300_000, dim=32, pooling_factor=2.0),
    Table(name="c", rows=1, dim=4, pooling_factor=0.25, element_bytes=2),
)
# device 0: half of a, and c; device 1: the other half and b; device 2: nothing
SHARDS = (
    Shard(table="a", rows=2000, dim=32, device=0),
    Shard(table="c", rows=1, dim=4, device=0),
    Shard(table="a", rows=2000, column_offset=32, dim=32, device=1),
    Shard(table="b", rows=300_000, dim=32, device=1),
)


def plan_of(
    tables: tuple[Table, ...] = TABLES, shards: tuple[Shard, ...] = SHARDS, devices: int = 3, **of_task: Any
) -> Plan:
    cost = DeviceCost(compute_ms=1.0, forward_collective_ms=0.5, backward_collective_ms=0.5)
    return Plan(
        task=ShardingTask(tables=tables, device_memory_bytes=(2**42,) * devices, batch_size=256, **of_task),
        shards=shards,
        predicted=(cost,) * devices,
        predicted_ms=(2.0,) * devices,
        provenance=Provenance(
            neuroshard_version="0",
            algorithm="by hand",
            cost_model_backend="synthetic",
            cost_model_device=formula.DEVICE_NAME,
        ),
    )


def copied_plan(**of_task: Any) -> Plan:
    """Table a is data-parallel on two devices, and b is whole on device 0."""
    shards = (
        *(Shard(table="a", rows=2000, dim=64, device=device) for device in range(2)),
        Shard(table="b", rows=300_000, dim=32, device=0),
    )
    copies = Constraints(tables=(TableRule(table="a", data_parallel=True),))
    return plan_of(TABLES[:2], shards, devices=2, constraints=copies, **of_task)


def settings(**changes: object) -> MeasureSettings:
    return MeasureSettings(**{"batch_size": 256, "repeats": 3, "timeout_seconds": HANGS, **changes})  # type: ignore[arg-type]


def test_a_device_holds_its_shards_and_of_rows_a_share_of_the_lookups() -> None:
    rows = (
        Shard(table="b", rows=100_000, dim=32, device=0),
        Shard(table="b", row_offset=100_000, rows=200_000, dim=32, device=1),
    )
    (whole, _), (other, *_), nothing = device_tables(plan_of())
    assert (whole.name, whole.dim, other.dim, nothing) == ("a", 32, 32, [])
    one, two, _ = device_tables(plan_of((TABLES[1],), rows))
    assert [(t.rows, t.pooling_factor) for t in (*one, *two)] == [
        (100_000, pytest.approx(2 / 3)),
        (200_000, pytest.approx(4 / 3)),
    ]


def test_on_the_formula_it_is_exact() -> None:
    plan = plan_of()
    one = evaluate(plan, "synthetic", settings())
    compute = [d.measured.compute_ms for d in one.devices if d.measured]
    expected = [formula.compute_ms(tables, 256) for tables in device_tables(plan)[:2]]
    assert compute == pytest.approx([*expected, 0.0])
    ready = np.array(compute) + [d.measured.backward_collective_ms for d in one.devices if d.measured]
    forward = formula.forward_collective_ms(np.array([36.0, 64.0, 0.0]), ready - ready.min(), 256)
    # one table is cut, so all columns are put into order: on three devices, each way
    in_order = 100 * formula.reorder_ms(256) / 3 / 2
    assert [d.measured.forward_collective_ms for d in one.devices if d.measured] == pytest.approx(forward + in_order)
    assert (one.exact, one.all_to_all_measured, one.foreign, one.errors) == (True, True, False, 0)
    assert one == evaluate(plan, "synthetic", settings())
    assert one.rounds_differ is None


def test_an_evaluation_says_what_it_assumes_of_row_wise_tables() -> None:
    rows = (
        Shard(table="b", rows=150_000, dim=32, device=0),
        Shard(table="b", row_offset=150_000, rows=150_000, dim=32, device=1),
    )
    one = evaluate(plan_of((TABLES[1],), rows, devices=2), "synthetic", settings())
    assert [device.dim for device in one.devices] == [32, 32]
    assert (one.row_wise_tables, evaluate(plan_of(), "synthetic", settings()).row_wise_tables) == (1, 0)
    assert names(str(one), "1 table split row-wise")


def test_by_the_formula_a_device_with_nothing_but_copies_looks_them_up() -> None:
    """And starts its all-to-all when that is done."""
    plan = copied_plan()
    costs = [device.measured for device in evaluate(plan, "synthetic", settings()).devices]
    compute = np.array([formula.compute_ms(tables, 256) for tables in device_tables(plan)])
    assert [cost.compute_ms for cost in costs if cost] == pytest.approx(compute)
    assert compute[1] > 0
    dims = np.array([32.0, 0.0])
    ready = compute + formula.backward_collective_ms(dims, 256)
    forward = formula.forward_collective_ms(dims, ready - ready.min(), 256)
    taken = [cost.forward_collective_ms for cost in costs if cost]
    # what both take besides is putting the outputs of two sharding types into one order
    assert taken[1] - taken[0] == pytest.approx(forward[1] - forward[0])
    assert taken[1] >= forward[1]


def test_an_evaluation_says_what_is_only_predicted() -> None:
    """Not where the plan has nothing of it, nor where no all-to-all is compared with a prediction."""
    precision = CollectivePrecision(forward="fp16", backward="bf16")
    hosts = Topology(domain=1, local_world_size=1, network_bytes_per_s=1e9)
    plan = copied_plan(pipeline="none", collective_precision=precision, topology=hosts)
    one = evaluate(plan, "synthetic", settings())
    facts = (
        "between 2 domains is predicted over their network, and measured without",
        "1 table data-parallel: the all-reduce",
        "fp32, and predicted in the plan's precision, fp16:bf16",
        "wait for input",
    )
    text = " ".join(str(one).split())
    assert [fact in text for fact in facts] == [True] * 4
    assert max(map(len, str(one).splitlines())) <= 80
    for silent in (
        evaluate(plan_of(), "synthetic", settings()),
        one.model_copy(update={"all_to_all_measured": False}),
        one.model_copy(update={"devices": tuple(d.model_copy(update={"predicted": None}) for d in one.devices)}),
    ):
        assert "is predicted, and not measured" not in " ".join(str(silent).split())
        assert "fp32" not in str(silent)
        assert "domains" not in str(silent)


def test_given_costs_have_no_wait_for_input_in_them() -> None:
    plan = copied_plan(pipeline="none")
    given = plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"cost_model_backend": "given"})})
    assert [evaluate(one, "synthetic", settings()).waits_for_input for one in (plan, given)] == [True, False]


def test_on_one_core_every_device_and_then_the_all_to_all_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuroshard.system.cores", lambda: 1)
    one = evaluate(plan_of(), "cpu", settings(memory_limit_bytes=16 * MIB), rounds=2)
    first, second, empty = (device.measured for device in one.devices)
    assert first is not None
    assert second is not None
    assert empty is not None
    assert first.compute_ms > 0
    assert empty.compute_ms == 0
    assert min(cost.backward_collective_ms for cost in (first, second, empty)) > 0
    assert (one.at_once, one.all_to_all_measured) == (False, True)
    assert one.rounds_differ is not None
    assert len(one.bench.capped_tables) == 1
    assert one.foreign
    text = " ".join(str(one).split())
    assert all(names(text, fact) for fact in (f"{one.rounds_differ:.1%}", "1 table", one.predicted_for))
    assert max(map(len, str(one).splitlines())) <= 80


def test_with_a_core_each_all_devices_take_steps_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    two = tuple(shard.model_copy(update={"device": shard.device % 2}) for shard in SHARDS)
    monkeypatch.setattr("neuroshard.system.cores", lambda: 2)
    one = evaluate(plan_of(shards=two, devices=2), "cpu", settings(), rounds=2)
    assert one.at_once
    assert one.rounds_differ is not None
    costs = [device.measured for device in one.devices]
    assert all(
        cost and min(cost.compute_ms, cost.forward_collective_ms, cost.backward_collective_ms) > 0 for cost in costs
    )


def test_more_devices_than_processes_are_measured_without_their_all_to_all() -> None:
    one = evaluate(plan_of(), "cpu", settings(), rounds=1, most_processes=2)
    assert not one.all_to_all_measured
    assert [d.measured.backward_collective_ms for d in one.devices if d.measured] == [0.0] * 3
    assert one.slowest("predicted") == (0, 1.0)
    assert all(names(one.all_to_all_left_out, fact) for fact in ("2 devices", "--processes 3"))
    assert one.all_to_all_left_out in " ".join(str(one).split())


@pytest.mark.parametrize("gpus", [2, 16])
def test_on_gpus_the_all_to_all_is_measured_where_there_are_enough(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """By the formula, in place of GPUs. The limit of processes is for CPUs."""
    monkeypatch.setitem(BACKENDS, "cuda", BACKENDS["synthetic"])
    monkeypatch.setattr(Synthetic, "most_devices", gpus)
    one = evaluate(plan_of(), "cuda", settings(), rounds=1, most_processes=2)
    assert one.all_to_all_measured == (gpus == 16)
    assert [names(one.all_to_all_left_out, fact) for fact in ("2 devices", 3)] == [gpus == 2] * 2


def test_the_batch_is_the_plan_s() -> None:
    plan = plan_of()
    assert evaluate(plan, "synthetic", settings(batch_size=1)) == evaluate(plan, "synthetic", settings())


def test_what_does_not_fit_is_that_device_s_error() -> None:
    """The device after it is run."""
    endless = TABLES[2].model_copy(update={"pooling_factor": 1e9})
    one = evaluate(plan_of((*TABLES[:2], endless), devices=2), "cpu", settings(), rounds=1)
    assert [(d.error or "")[:13] for d in one.devices] == ["out of memory", ""]
    assert one.devices[1].measured is not None
    assert one.errors == 1
    assert names(str(one), one.devices[0].error)
    assert not one.all_to_all_measured


def test_one_device_has_no_all_to_all() -> None:
    shards = tuple(Shard(table=t.name, rows=t.rows, dim=t.dim, device=0) for t in TABLES)
    (device,) = evaluate(plan_of(TABLES, shards, devices=1), "synthetic", settings()).devices
    assert device.measured is not None
    assert device.measured.total_ms == device.measured.compute_ms
    assert device.measured.compute_ms == pytest.approx(formula.compute_ms(TABLES, 256))


def test_notes_of_the_plan_on_its_predictions_are_printed() -> None:
    plan = plan_of()
    doubt = "costs are predicted for the cost model's batch size 512, not for the task's 256"
    plan = plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"notes": (doubt,)})})
    assert f"note: the plan says: {doubt}" in " ".join(str(evaluate(plan, "synthetic", settings())).split())


def test_costs_measured_under_other_versions_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_here(*given: Any) -> Backend:
        opened = open_backend(*given)
        versions = {"neuroshard": "0", "torch": "2.14.1+cu130", "fbgemm-gpu": "1.9.0"}
        opened.bench = opened.bench.model_copy(update={"versions": versions})
        return opened

    monkeypatch.setattr("neuroshard.measure.evaluate.open_backend", open_here)
    plan = plan_of()
    for fbgemm, said in (("1.8.0", "torch 2.14 and FBGEMM 1.8, and here are torch 2.14 and FBGEMM 1.9"), ("1.9.1", "")):
        versions = {"torch": "2.14.0", "fbgemm-gpu-cpu": fbgemm}
        provenance = plan.provenance.model_copy(update={"cost_model_versions": versions})
        one = evaluate(plan.model_copy(update={"provenance": provenance}), "synthetic", settings())
        assert one.other_versions == said
        assert ("costs measured under" in " ".join(str(one).split())) == bool(said)


def test_no_rounds_are_refused() -> None:
    with refused(UsageError, "rounds", 1, 0):
        evaluate(plan_of(), "synthetic", settings(), rounds=0)


def test_the_command_line_prints_a_table_or_json(
    neuroshard: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    plan = plan_of()
    write_bytes(tmp_path / "plan.json", plan.canonical_json())
    table = neuroshard("evaluate", tmp_path / "plan.json", "--backend", "synthetic", "-o", tmp_path / "e.json")
    assert (table.returncode, table.stderr) == (0, "")
    assert table.stdout.startswith(f"plan {plan.digest()[:12]} by the formula, exact, batch 256\n")
    printed = neuroshard("evaluate", tmp_path / "plan.json", "--backend", "synthetic", "--json")
    assert json.loads(printed.stdout) == json.loads((tmp_path / "e.json").read_text())
    broken = neuroshard("evaluate", tmp_path / "none.json", "--backend", "synthetic")
    assert (broken.returncode, broken.stderr.count("\n")) == (1, 1)
