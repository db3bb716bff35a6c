"""A small run whose every part the page can show: trained cost model, its costs, a plan, and the plan that was live before."""

from typing import Any

import pytest

from helpers.costs import formula_costs, random_tables
from helpers.hostile import HOSTILE
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.pretrain.run import pretrain
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings, Trust


def renamed(tables: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first tables under names that try to become code."""
    return tuple(
        table.model_copy(update={"name": HOSTILE[i]}) if i < len(HOSTILE) else table for i, table in enumerate(tables)
    )


@pytest.fixture(scope="session")
def parts() -> dict[str, Any]:
    """What `report` takes."""
    tables = renamed(random_tables(24))
    costs = formula_costs(tables, compute_cases=120, collective_cases=40)
    model = pretrain(costs, epochs=3)
    task = ShardingTask(tables=tables, device_memory_bytes=(2 * 2**30,) * 4, batch_size=65536)
    plan = search(task, model, SearchSettings(rounds=3), trust=Trust(error=model.error_on_unseen_tables))
    live = search(task, model, SearchSettings(algorithm="size"))
    assert isinstance(plan, Plan)
    return {"plan": plan, "model": model, "costs": costs, "live": live}
