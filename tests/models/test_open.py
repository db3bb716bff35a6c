"""What `--model` names: a folder, a datasheet, given costs. tests/deploy/test_bundles.py opens what was published in a store."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.costs import BENCH, random_model
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.part import Part
from neuroshard.core.table import Table
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.bundle import TrainedCostModel, save_cost_model
from neuroshard.costmodel.faster import transfers_ms
from neuroshard.costmodel.given import Given
from neuroshard.models.open import at_batch_size, open_cost_model, open_trained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_cost_model(tmp_path / "model", random_model(2, 4))
    return tmp_path / "model"


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"batch_size": 512, "tables": [{"name": "a", "cost_ms": 1.0}]}))
    return path


def test_a_folder_a_datasheet_and_given_costs_have_names(folder: Path, given: Path) -> None:
    assert open_cost_model(folder).name == open_trained(str(folder), "--acquire").name == random_model(2, 4).name
    assert isinstance(open_cost_model("analytic:h100", 512), Analytic)
    assert isinstance(open_cost_model(f"given:{given}"), Given)


def test_no_name_is_refused_with_examples_and_what_was_not_trained_cannot_be_trained_on() -> None:
    with refused(UsageError, "STORE#HARDWARE", "analytic:h100", "given:costs.json"):
        open_cost_model(" ")
    for spec in ("analytic:h100", "given:costs.json"):
        with refused(UsageError, "--acquire", spec, "`neuroshard pretrain`"):
            open_trained(spec, "--acquire")


def test_only_a_trained_model_is_asked_for_another_batch_size(folder: Path) -> None:
    datasheet = open_cost_model("analytic:h100", 512)
    assert at_batch_size(datasheet, 1024) is datasheet
    assert at_batch_size(open_cost_model(folder), None).batch_size == BENCH.batch_size
    with refused(InvalidInput, f"{BENCH.batch_size:,}", "1,024"):
        open_cost_model(folder, 1024)


def test_a_corrected_model_takes_so_many_times_longer(folder: Path, given: Path) -> None:
    plain, corrected = open_cost_model(folder), open_cost_model(f"{folder}*1.5*0.25")
    assert isinstance(plain, TrainedCostModel)
    vectors = plain.part_vectors([Part.of(Table(name="a", rows=1000, dim=dim, pooling_factor=4.0)) for dim in (16, 64)])
    for summed in (vectors, vectors.sum(axis=0)):
        assert corrected.compute_ms(summed) == pytest.approx(1.5 * plain.compute_ms(summed))
        assert corrected.compute_slope(summed) == pytest.approx(1.5 * plain.compute_slope(summed))
    dims = np.array([64.0, 300.0])
    for way, of in zip(transfers_ms(corrected, dims), transfers_ms(plain, dims), strict=True):
        assert way == pytest.approx(0.25 * of)
    assert corrected.name == f"{plain.name}*1.5*0.25"
    for spec, says in (
        (f"given:{given}*2*2", "given costs"),
        (f"{folder}*0*1", "0.001"),
        (f"{folder}*1*2000", "1,000"),
    ):
        with refused(UsageError, "corrected", says):
            open_cost_model(spec)
