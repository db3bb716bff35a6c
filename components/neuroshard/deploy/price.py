"""What another plan would cost today: the live plan, priced with the cost model that the new plan was searched with."""

from collections.abc import Callable

from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.costmodel.open import open_cost_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.costmodel.protocol import CostModel


def pricer(spec: str, plan: Plan) -> Callable[[Plan, Plan], float | None]:
    """`price` of the gate by the cost model that `spec` names. Raises InvalidInput unless `plan` was searched with that one."""
    model = open_cost_model(spec, plan.task.batch_size)
    if plan.provenance.cost_model != model.name:
        has = f"cost model {plan.provenance.cost_model[:12]}" if plan.provenance.cost_model else "no cost model"
        raise InvalidInput(f"{spec}: is cost model {model.name[:12]}, but the plan was searched with {has}")
    return lambda other, today: price(other, today, model)


def price(other: Plan, today: Plan, model: CostModel) -> float | None:
    """Predicted ms of the slowest device if `other`'s shards held `today`'s tables; None where it splits rows."""
    tables = {table.name: table for table in today.task.tables}
    prices = price_shards(model, tables, other.shards, today.task.devices)
    return None if prices is None else float(prices.total_ms.max())
