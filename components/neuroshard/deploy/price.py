"""Prices the live plan as it would cost today, with the cost model that the new plan was searched with."""

from collections.abc import Callable

from neuroshard.core.plan import Plan
from neuroshard.costmodel.pricing import check_searched_with, price_shards
from neuroshard.costmodel.protocol import CostModel
from neuroshard.models.open import open_cost_model


def pricer(spec: str, plan: Plan) -> Callable[[Plan, Plan], float | None]:
    """The gate's `price`, with the cost model that `spec` names. Raises InvalidInput unless `plan` was searched with it."""
    model = open_cost_model(spec, plan.task.batch_size)
    check_searched_with(plan, model, f"{spec}: is cost model")
    return lambda other, today: price(other, today, model)


def price(other: Plan, today: Plan, model: CostModel) -> float | None:
    """Predicted ms of the slowest device for the shards of `other` with the tables of `today`; None where it cannot be priced."""
    prices = price_shards(model, today.held.held_as(other.held), other.shards)
    return None if prices is None else float(prices.total_ms.max())
