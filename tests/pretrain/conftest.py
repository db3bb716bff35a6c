"""Costs and a cost model that all tests of pretrain share."""

import pytest

from helpers.costs import formula_costs, random_tables
from neuroshard.core.cost import Costs
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.pretrain.run import pretrain


@pytest.fixture(scope="session")
def costs() -> Costs:
    """700 sets of 60 tables and 260 all-to-alls, by the formula with 1 % noise."""
    return formula_costs(random_tables(60), compute_cases=700, collective_cases=260, devices=(2, 4))


@pytest.fixture(scope="session")
def model(costs) -> TrainedCostModel:
    return pretrain(costs, epochs=120)
