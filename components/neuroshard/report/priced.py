"""A plan and a cost model, not necessarily its own -> the predicted cost of each device."""

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import DeviceCost, Plan
from neuroshard.core.text import short_name
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel


def priced(plan: Plan, model: CostModel) -> tuple[DeviceCost, ...]:
    """Predicted ms of every device (D,). Raises InvalidInput where the plan splits rows and the model knows whole tables only."""
    prices = price_shards(model, plan.held, plan.shards)
    if prices is None:
        raise InvalidInput(
            f"cost model {short_name(model.name)} knows whole tables only, but plan {plan.digest()[:12]} splits some row-wise; "
            "price it by another cost model, or search with --no-row-wise"
        )
    return prices.of_devices
