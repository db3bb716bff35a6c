"""Costs from datasheets: what they must be whatever the rates are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.costs import random_model
from helpers.parts import cut_to, wholes
from helpers.refusals import refused
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import UsageError
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import (
    DATASHEETS,
    SPREAD,
    UNKNOWN_GPU,
    Analytic,
    analytic_for,
    analytic_model,
    memory_of,
)
from neuroshard.measure.formula import Formula
from neuroshard.models.open import open_cost_model
from neuroshard.search.run import search

NAMES = sorted(DATASHEETS)
BATCH = 65536


def table(name: str = "t", **fields: Any) -> Table:
    return Table.parse({"name": name, "rows": 1_000_000, "dim": 64, "pooling_factor": 10.0} | fields, "test")


def ms(model: Analytic, *tables: Table) -> float:
    return float(model.compute_ms(model.part_vectors(wholes(tables)).sum(axis=0)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "larger",
    [{"dim": 128}, {"rows": 50_000_000}, {"pooling_factor": 20.0}, {"optimizer_bytes_per_element": 8}],
)
def test_a_bigger_table_costs_more(name: str, larger: dict[str, Any]) -> None:
    model = analytic_model(name, BATCH)
    assert ms(model, table(**larger)) > ms(model, table())


@pytest.mark.parametrize("name", NAMES)
def test_compute_is_convex_and_its_slope_is_a_subgradient(name: str) -> None:
    model = analytic_model(name, BATCH)
    rng = np.random.default_rng(0)
    one, other = rng.exponential(1.0, (2, 500, 5))
    share = rng.random((500, 1))
    between = model.compute_ms(share * one + (1 - share) * other)
    assert (between <= share[:, 0] * model.compute_ms(one) + (1 - share[:, 0]) * model.compute_ms(other) + 1e-12).all()
    tangent = model.compute_ms(one) + (model.compute_slope(one) * (other - one)).sum(axis=-1)
    assert (tangent <= model.compute_ms(other) + 1e-12).all()


@pytest.mark.parametrize("devices", [2, 8, 12, 96])
def test_an_all_to_all_is_shortest_where_all_send_alike(devices: int) -> None:
    model = analytic_model("h100", BATCH)
    dims = np.random.default_rng(0).integers(0, 4000, (200, devices)).astype(float)
    alike = np.broadcast_to(dims.mean(axis=-1, keepdims=True), dims.shape)
    assert (
        model.backward_collective_ms(alike).mean(axis=-1) <= model.backward_collective_ms(dims).mean(axis=-1) + 1e-12
    ).all()


def test_who_starts_first_waits_for_the_last() -> None:
    model = analytic_model("a100", BATCH)
    dims, delays = np.full(4, 500.0), np.array([0.0, 1.0, 2.0, 5.0])
    forward = model.forward_collective_ms(dims, delays)
    assert np.allclose(forward - model.forward_collective_ms(dims, np.zeros(4)), [5.0, 4.0, 3.0, 0.0])


def test_beyond_a_node_an_all_to_all_takes_the_network() -> None:
    model = analytic_model("h100", BATCH)
    within, beyond = (model.backward_collective_ms(np.full(devices, 8000.0 / devices)).max() for devices in (8, 16))
    assert beyond > 2 * within


def test_narrow_shards_cost_more_than_their_share() -> None:
    model = analytic_model("h100", BATCH)
    assert 4 * ms(model, table(dim=32)) > 1.5 * ms(model, table(dim=128))


def test_rows_that_outgrow_the_cache_are_read_again() -> None:
    """100,000 rows of 128 columns are as large as the L2 of an H100, and smaller than that of a B200."""
    small, large = (table(rows=rows, dim=128, pooling_factor=10.0) for rows in (10_000, 100_000))

    def again(name: str, table: Table) -> float:  # of the bytes of all lookups, those read from memory beyond the first
        model = analytic_model(name, BATCH)
        model.sheet = sheet = replace(DATASHEETS[name], memory_wait_ms=0.0, cache_wait_ms=0.0)
        (vector,) = model.part_vectors(cut_to([table], [128]))
        moved = vector[0] * sheet.memory * sheet.memory_share - BATCH * (10 * 8 + 512)
        return float((moved - table.rows * 512) / (BATCH * 10 * 512))

    assert again("h100", small) < 0.15 < again("h100", large)
    assert again("b200", large) < 0.6 * again("h100", large)


def test_what_moves_through_the_cache_is_every_lookup_forward_and_gradients_and_distinct_rows_backward() -> None:
    """A thousand hot rows of 128 columns: forward, the cache and not the memory decides."""
    model, row_bytes = analytic_model("h100", BATCH), 128 * 4
    (vector,) = model.part_vectors(cut_to([table(rows=1000, dim=128)], [128]))
    moved = np.array([10 * BATCH, 10 * BATCH + 2 * 1000]) * row_bytes
    assert vector[[1, 3]] == pytest.approx(moved / model.sheet.cache, rel=1e-3)
    assert model.parts_ms(vector)[0] == vector[1] + model.sheet.forward_launch_ms


def test_more_memory_bandwidth_makes_a_table_that_never_repeats_a_row_faster() -> None:
    once = table(rows=2**30, pooling_factor=1.0)
    a100, h100, h200 = (ms(analytic_model(name, BATCH), once) for name in ("a100", "h100", "h200"))
    assert a100 > h100 > h200


def test_loads_wait_so_faster_memory_alone_helps_less_than_its_bandwidth() -> None:
    """An H200 is an H100 with 1.43 times the bandwidth. A B200 has 2.39 times, and its loads wait longer."""
    once = table(rows=2**30, dim=128, pooling_factor=20.0)
    h100, h200, b200 = (ms(analytic_model(name, BATCH), once) for name in ("h100", "h200", "b200"))
    assert 1.1 < h100 / h200 < 1.3
    assert 1.4 < h100 / b200 < 1.9


def test_newer_gpus_of_a_maker_train_faster() -> None:
    of = table(rows=10**7, dim=512, pooling_factor=2627.0, pooling="none")
    for kinds in (("a100", "h100", "h200", "b200", "b300"), ("mi300x", "mi325x", "mi350x", "mi450")):
        models = [analytic_model(name, BATCH) for name in kinds]
        for took in (
            [ms(one, of) for one in models],
            [one.backward_collective_ms(np.full(8, 9.0))[0] for one in models],
        ):
            assert took == sorted(took, reverse=True)


def test_without_nvlink_the_spread_is_wider_and_of_a_cpu_it_is_not_known() -> None:
    for name, sheet in DATASHEETS.items():
        if name == "cpu":
            assert sheet.spread is None
        else:
            assert sheet.spread is not None
            assert (sheet.spread > SPREAD) == (name in {"h100-pcie", "l40", "l40s", "a40"} or name.startswith("mi"))
        assert analytic_model(name, BATCH).error_on_unseen_tables == sheet.spread


def test_its_spread_is_about_what_it_is_off_beside_the_formula() -> None:
    """0.27 in the logarithm on random sets, once the mean ratio is taken out."""
    model, truth = analytic_model("h100", BATCH), Formula(BATCH)
    rng = np.random.default_rng(0)
    logs = []
    for _ in range(200):
        tables = [
            table(f"t{i}", rows=int(10 ** rng.uniform(3, 8)), pooling_factor=float(10 ** rng.uniform(0, 2)))
            for i in range(rng.integers(1, 16))
        ]
        dims = rng.choice([4, 16, 32, 64, 128], len(tables))
        predicted, true = (m.compute_ms(m.part_vectors(cut_to(tables, dims)).sum(axis=0)) for m in (model, truth))
        logs.append(np.log(predicted / true))
    assert 0.5 * SPREAD < np.std(logs) < 1.5 * SPREAD


def test_a_plan_without_any_measurement() -> None:
    tables = tuple(table(f"t{i}", rows=10_000 * (i + 1), pooling_factor=1.0 + i) for i in range(12))
    task = ShardingTask(tables=tables, device_memory_bytes=(2**30,) * 3, batch_size=BATCH)
    plan = search(task, analytic_model("h100", BATCH))
    assert plan.provenance.cost_model == "analytic:h100"
    costs = [cost.compute_ms for cost in plan.predicted]
    assert max(costs) < 1.3 * min(costs)


def test_memory_is_that_of_the_device_which_was_measured_or_of_its_datasheet() -> None:
    trained = random_model(2)
    assert memory_of(trained) == trained.manifest.bench.hardware.memory_bytes
    assert memory_of(analytic_model("h100", BATCH)) == DATASHEETS["h100"].memory_mib * 2**20 > 79 * 2**30
    assert memory_of(analytic_model("cpu", BATCH)) is None


def test_it_needs_a_name_that_is_known_and_a_batch_size() -> None:
    with refused(UsageError, "'v100'", *(f"analytic:{name}" for name in NAMES)):
        analytic_model("v100", BATCH)
    with refused(UsageError, "--batch-size"):
        analytic_model("h100", None)


def test_hardware_gets_its_own_datasheet_or_a_common_one_of_its_kind() -> None:
    def hardware(kind: str, name: str) -> Hardware:
        return Hardware.parse({"kind": kind, "name": name, "memory_bytes": 2**30}, "hardware")

    assert analytic_for(hardware("cuda", "NVIDIA A100-SXM4-80GB")) == ("a100", True)
    for name, device in {
        "h100": "NVIDIA H100 80GB HBM3",
        "h100-pcie": "NVIDIA H100 PCIe",
        "b200": "NVIDIA B200",
        "gb200": "NVIDIA GB200",
        "b300": "NVIDIA B300 SXM6 AC",
        "gb300": "NVIDIA GB300",
        "l40s": "NVIDIA L40S",
        "l40": "NVIDIA L40",
        "a40": "NVIDIA A40",
        "mi300x": "AMD Instinct MI300X OAM",
        "mi455x": "AMD Instinct MI455X",
    }.items():
        assert analytic_for(hardware("cuda", device)) == (name, True)
    for other, name in {
        "NVIDIA A100-SXM4-40GB": "a100",
        "NVIDIA A100 80GB PCIe": "a100",
        "NVIDIA A100-PCIE-40GB": "a100",
        "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb": "a100",
        "NVIDIA H100 NVL": "h100",
        "NVIDIA H200 NVL": "h200",
        "NVIDIA GH200 480GB": UNKNOWN_GPU,
        "NVIDIA RTX A4000": UNKNOWN_GPU,
        "NVIDIA L4": UNKNOWN_GPU,
        "Tesla V100-SXM2-32GB": UNKNOWN_GPU,
    }.items():
        assert analytic_for(hardware("cuda", other)) == (name, False)
    assert analytic_for(hardware("cpu", "AMD EPYC 9554")) == ("cpu", False)
    assert analytic_for(hardware("cpu", "Intel(R) Xeon(R) CPU @ 2.20GHz, 8 cores")) == ("cpu", False)
    assert analytic_for(hardware("synthetic", "NVIDIA-H200, by a formula")) == ("h200", True)
    assert analytic_for(None, "H200 SXM") == ("h200", True)
    assert analytic_for(None) == (UNKNOWN_GPU, False)


@pytest.mark.parametrize("name", NAMES)
def test_a_corrected_datasheet_takes_so_many_times_longer(name: str) -> None:
    plain, corrected = (open_cost_model(f"analytic:{name}{by}", BATCH) for by in ("", "*1.5*0.25"))
    assert isinstance(plain, Analytic)
    assert isinstance(corrected, Analytic)
    assert ms(corrected, table()) == pytest.approx(1.5 * ms(plain, table()))
    dims = np.array([640.0, 128.0, 0.0, 64.0] * 4)  # of more than a node's devices
    assert corrected.backward_collective_ms(dims) == pytest.approx(0.25 * plain.backward_collective_ms(dims))
    assert (corrected.name, memory_of(corrected)) == (f"analytic:{name}*1.5*0.25", memory_of(plain))
