"""Constants of tables beyond HBM, learned from costs of a formula that has them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.costs import formula_costs, random_model
from helpers.tier_costs import TRUTH, gpu_bench, tables_beyond, tier_costs
from neuroshard.core.cost import Costs
from neuroshard.core.part import Part
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.bundle import TrainedCostModel, load_cost_model, save_cost_model
from neuroshard.costmodel.report import ModelReport
from neuroshard.pretrain.run import pretrain
from neuroshard.pretrain.tiers import FEWEST, learn_tiers

PASSES = ("cached_forward", "cached_backward", "host_forward", "host_backward")


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad"])
def test_without_noise_the_constants_are_found(optimizer: str) -> None:
    found = learn_tiers(tier_costs(noise=0.0, optimizer=optimizer))
    assert found.tiers is not None
    for name in PASSES:
        assert np.allclose(
            list(getattr(found.tiers, name).model_dump().values()), list(getattr(TRUTH, name).model_dump().values()),
            rtol=1e-4, atol=1e-12,
        )  # fmt: skip
    assert {tier: errors.mape for tier, errors in found.errors.items()} == pytest.approx(
        {"cached": 0, "host": 0}, abs=1e-4
    )
    assert found.gaps == ()


@pytest.mark.parametrize("seed", range(5))
def test_with_noise_cases_held_out_are_predicted_within_it(seed: int) -> None:
    """2 % noise on each time; the cases held out have it too. The datasheet is of another bus."""
    found = learn_tiers(tier_costs(seed=seed))
    for errors in found.errors.values():
        assert errors.mape is not None
        assert errors.datasheet_mape is not None
        assert errors.mape < 0.04
        assert errors.datasheet_mape > 3 * errors.mape
    assert found.tiers is not None
    assert found.tiers.cases == sum(errors.train_cases for errors in found.errors.values()) == 36
    assert sum(errors.values for errors in found.errors.values()) == 12
    assert found.tiers.cached_forward.byte_ms == pytest.approx(TRUTH.cached_forward.byte_ms, rel=0.2)
    assert found.tiers.cached_forward.lookup_ms == pytest.approx(TRUTH.cached_forward.lookup_ms, rel=0.2)
    assert found.tiers.host_backward.byte_ms == pytest.approx(TRUTH.host_backward.byte_ms, rel=0.2)


def test_a_few_disturbed_cases_move_the_constants_little() -> None:
    costs = tier_costs(noise=0.005)
    slow = tuple(
        (case, cost.model_copy(update={"forward_ms": 3 * (cost.forward_ms or 0)}) if place % 9 == 0 else cost)
        for place, (case, cost) in enumerate(costs.tiers)
    )
    found = learn_tiers(costs.model_copy(update={"tiers": slow})).tiers
    assert found is not None
    assert found.cached_forward.byte_ms == pytest.approx(TRUTH.cached_forward.byte_ms, rel=0.1)
    assert found.host_forward.byte_ms == pytest.approx(TRUTH.host_forward.byte_ms, rel=0.1)


def test_what_is_faster_than_hbm_by_noise_is_no_less_than_it() -> None:
    """Where a pass takes no more beyond HBM, noise must not give constants below 0."""
    nothing = TRUTH.model_copy(
        update={"cached_backward": TRUTH.cached_backward.model_copy(update={"table_ms": 0.0, "lookup_ms": 0.0})}
    )
    found = learn_tiers(tier_costs(truth=nothing, noise=0.05)).tiers
    assert found is not None
    assert found.cached_backward.table_ms < 0.01
    assert 0 <= found.cached_backward.lookup_ms < 1e-7


def test_too_few_cases_leave_the_datasheet_and_say_so() -> None:
    costs = tier_costs(count=9)
    found = learn_tiers(costs)
    assert (found.tiers, found.errors) == (None, {})
    assert "datasheet's bus" in found.gaps[0]
    assert f"of {FEWEST['cached']}" in found.gaps[0]
    failed = tuple(
        (case, cost.model_copy(update={"error": "out of memory (4 GiB)", **dict.fromkeys(
            ("forward_ms", "backward_ms", "hbm_forward_ms", "hbm_backward_ms"))}))
        for case, cost in tier_costs().tiers
    )  # fmt: skip
    gap = learn_tiers(costs.model_copy(update={"tiers": failed})).gaps[0]
    assert "48 of 48 failed, the first: 'out of memory (4 GiB)'" in gap


@pytest.mark.parametrize(
    ("backend", "gap"),
    [
        ("cuda", "nothing beyond HBM was measured: tables there are priced by the datasheet's bus"),
        ("cpu", "backend cpu has no tiers: plans by this cost model have no table beyond HBM"),
    ],
)
def test_a_model_of_no_such_cases_says_what_that_means(backend: str, gap: str) -> None:
    bench = gpu_bench().model_copy(update={"backend": backend})
    assert learn_tiers(Costs(bench=bench, compute=(), collective=())) == (None, {}, (gap,))


def of_gpu(costs: Costs, beyond: Costs) -> Costs:
    """Table sets of the formula, said to be of the GPU that measured `beyond`."""
    return costs.model_copy(update={"bench": beyond.bench, "tiers": beyond.tiers, "tables": beyond.tables})


@pytest.fixture(scope="module")
def with_tiers() -> TrainedCostModel:
    few = formula_costs(tables_beyond(), compute_cases=40, devices=(1,))
    return pretrain(of_gpu(few, tier_costs()), epochs=2)


def test_a_cost_model_has_them_and_says_so(with_tiers: TrainedCostModel, tmp_path: Path) -> None:
    save_cost_model(tmp_path, with_tiers)
    loaded = load_cost_model(tmp_path)
    assert loaded.name == with_tiers.name
    assert loaded.manifest.tiers == with_tiers.manifest.tiers is not None
    assert loaded.has_tiers
    assert loaded.tiers_from.startswith(
        "as measured beyond HBM on NVIDIA H100 80GB HBM3 (36 cases; off on cases held out: cached "
    )
    text = loaded.report.text()
    assert "beyond HBM, measured beside the same tables in HBM" in text
    assert "by the datasheet" in text
    assert max(map(len, text.splitlines())) <= 80
    assert {"beyond_hbm_cached_mape", "beyond_hbm_host_mape"} <= loaded.report.metrics().keys()


def test_a_cost_model_prices_tables_by_what_was_measured(with_tiers: TrainedCostModel) -> None:
    """By hand: a table of which every lookup is of another row."""
    table = tables_beyond(1)[0].resized(10**9, 64, 2.0).model_copy(update={"element_bytes": 4})
    constants = with_tiers.manifest.tiers
    assert constants is not None
    beyond = with_tiers.beyond_hbm([Part.of(table)])
    lookups, row = 2 * 65536, 64 * 4
    forward, back = constants.cached_forward, constants.cached_backward
    assert beyond.cached_forward[0] == pytest.approx(forward.table_ms + lookups * forward.lookup_ms)
    assert beyond.cached_backward[0] == pytest.approx(back.table_ms + lookups * back.lookup_ms)
    assert beyond.missed[0] == pytest.approx(forward.row_ms + row * forward.byte_ms)
    adam = table.model_copy(update={"optimizer_bytes_per_element": 8})
    more = with_tiers.beyond_hbm([Part.of(adam)]).cached_backward[0] - beyond.cached_backward[0]
    host = constants.host_backward
    distinct = (beyond.host_backward[0] - host.table_ms) / (host.row_ms + row * host.byte_ms)
    assert distinct == pytest.approx(lookups, rel=0.01)
    assert more == pytest.approx(distinct * (host.row_ms + 64 * 8 * host.byte_ms))
    assert math.isclose(beyond.host_forward[0], constants.host_forward.table_ms + distinct * (
        constants.host_forward.row_ms + row * constants.host_forward.byte_ms), rel_tol=0.01)  # fmt: skip


def test_a_bundle_without_them_is_as_it_was(with_tiers: TrainedCostModel) -> None:
    """Same bytes in model.json, and the datasheet's rates."""
    model = random_model(4)
    assert b"tiers" not in model.manifest.canonical_json()
    assert b"tiers" not in ModelReport(nets=()).canonical_json()
    gpu = replace(model, manifest=model.manifest.model_copy(update={"bench": gpu_bench()}))
    parts = [Part.of(table) for table in tables_beyond()]
    for ours, theirs in zip(gpu.beyond_hbm(parts), Analytic("h100", 65536).beyond_hbm(parts), strict=True):
        assert np.array_equal(ours, theirs)
    assert gpu.tiers_from == "by the rates of a datasheet's bus, not measured"
    assert not np.array_equal(with_tiers.beyond_hbm(parts).host_forward, gpu.beyond_hbm(parts).host_forward)
