"""From tables.json and a cost model's folder to plan.json; where that cannot be, nothing is written."""

import json
from dataclasses import replace

import pytest

from helpers.costs import random_model
from helpers.refusals import refused
from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.files.plan import read_plan
from neuroshard.orders.search import SearchOrder
from neuroshard.search.run import run

TABLE = {"name": "a", "rows": 1000, "dim": 16, "pooling_factor": 2.0}


@pytest.fixture
def bundle(tmp_path):
    save_cost_model(tmp_path / "model", random_model(2, 4))
    return tmp_path / "model"


def write_tables(folder, *tables):
    path = folder / "tables.json"
    path.write_text(json.dumps({"tables": tables}))
    return path


def order(memory, **options):
    return SearchOrder.of({"devices": len(memory), "memory": memory, **options})


def test_the_plan_is_written_as_it_is_returned(tmp_path, bundle):
    tables = write_tables(tmp_path, TABLE, {**TABLE, "name": "b", "colour": "red"})
    plan = run(tables, bundle, tmp_path / "plan.json", order([2**25, 2**26], seed=3))

    model = random_model(2, 4)
    assert read_plan(tmp_path / "plan.json") == plan
    assert plan.task.device_memory_bytes == (2**25, 2**26)
    assert plan.task.batch_size == model.batch_size
    assert (plan.provenance.cost_model, plan.provenance.seed) == (model.name, 3)
    assert plan.provenance.cost_model_error == model.report.unseen_tables_error
    assert plan.provenance.notes == ("tables.json: ignored unknown keys of tables: colour",)


def test_the_plan_says_which_torch_and_fbgemm_its_costs_were_measured_under(tmp_path):
    model = random_model(2, 4)
    versions = {"neuroshard": "0", "torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0"}
    bench = model.manifest.bench.model_copy(update={"versions": versions})
    save_cost_model(tmp_path / "model", replace(model, manifest=model.manifest.model_copy(update={"bench": bench})))
    plan = run(write_tables(tmp_path, TABLE), tmp_path / "model", tmp_path / "plan.json", order([2**25] * 2))

    assert plan.provenance.cost_model_versions == {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0"}
    assert read_plan(tmp_path / "plan.json") == plan


def test_a_batch_size_that_was_not_measured_is_refused(tmp_path, bundle):
    tables = write_tables(tmp_path, TABLE)
    with refused(InvalidInput, "65,536", 77, "--batch-size"):
        run(tables, bundle, tmp_path / "plan.json", order([2**20] * 2, batch_size=77))
    assert not (tmp_path / "plan.json").exists()


def test_more_devices_than_were_measured_are_planned_for_and_noted(tmp_path, bundle):
    plan = run(write_tables(tmp_path, TABLE), bundle, tmp_path / "plan.json", order([2**25] * 6))

    assert "costs of an all-to-all between 6 devices are extrapolated: 2 to 4 were measured" in plan.provenance.notes


@pytest.mark.parametrize(
    ("change", "error", "facts"),
    [
        ({"memory": [2**25] * 3}, InvalidInput, ["2 devices", 3]),
        ({"memory": ["1000B"] * 2}, Infeasible, ["sparse-dist", "on each", "short"]),
        ({"algorithm": "guess"}, UsageError, ["algorithm", "'guess'"]),
        ({"pipeline": "fast"}, UsageError, ["pipeline", "'fast'"]),
        ({"batch_size": 0}, UsageError, ["batch_size", "not 0"]),
    ],
)
def test_where_there_is_no_plan_nothing_is_written(tmp_path, bundle, change, error, facts):
    save_cost_model(bundle, random_model(2))
    tables = write_tables(tmp_path, TABLE)
    with refused(error, *facts):
        run(tables, bundle, tmp_path / "plan.json", order(**{"memory": [2**25] * 2, **change}))
    assert not (tmp_path / "plan.json").exists()
