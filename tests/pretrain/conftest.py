"""Costs and a cost model that all tests of pretrain share."""

import pytest

from helpers.costs import formula_costs, random_tables
from helpers.shared import made_once
from neuroshard.core.cost import Costs
from neuroshard.costmodel.bundle import TrainedCostModel, load_cost_model, save_cost_model
from neuroshard.pretrain.run import pretrain


@pytest.fixture(scope="session")
def costs() -> Costs:
    """700 sets of 60 tables and 260 all-to-alls, by the formula with 1 % noise."""
    return formula_costs(random_tables(60), compute_cases=700, collective_cases=260, devices=(2, 4))


@pytest.fixture(scope="session")
def model(costs, tmp_path_factory) -> TrainedCostModel:
    return load_cost_model(
        made_once(tmp_path_factory, "model", lambda folder: save_cost_model(folder, pretrain(costs, epochs=60)))
    )
