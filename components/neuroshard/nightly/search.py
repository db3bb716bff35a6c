"""A model's order -> its plan for today's tables, with the best cost model there is.

The plan obeys the order's constraints. With a move budget it is searched from the live plan.
"""

import math
from contextlib import suppress
from pathlib import Path

from neuroshard.augment.source import run as load_tables
from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NeuroshardError, NotFound, StoreError
from neuroshard.core.nightly import Searched, Survey
from neuroshard.core.plan import Plan
from neuroshard.files.constraints import ConstraintsFile
from neuroshard.nightly.fallbacks import choose
from neuroshard.search.run import SearchSettings
from neuroshard.search.run import run as search
from neuroshard.store.folders import patiently
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import live_plan, read_live


def run(
    survey: Survey, name: str, store_url: str, tables: Path, out: Path, *, algorithm: str, memory_margin: float = 0.0
) -> tuple[Plan | None, Searched]:
    """Write the model's tables as tables.json, and its plan as plan.json; the plan, and the cost model it was searched with.

    `memory_margin` is the share of each device's memory that the plan leaves free. Where there is no plan, both files hold
    the reason, as JSON. Raises StoreError where the store cannot be read.
    """
    reason = survey.no_plan.get(name, "")
    try:
        if not reason:
            store = open_store(store_url)
            patiently(lambda: load_tables(survey.order(name).tables, tables))
            return patiently(lambda: search_plan(survey, name, store, tables, out, algorithm, memory_margin))
    except StoreError:
        raise
    except NeuroshardError as error:
        reason = str(error)
    log(f"no plan for {name}: {reason}")
    searched = Searched(no_plan=reason)
    for path in (tables, out):
        if not path.exists():
            path.write_bytes(searched.canonical_json())
    return None, searched


def search_plan(
    survey: Survey, name: str, store: Store, tables: Path, out: Path, algorithm: str, memory_margin: float = 0.0
) -> tuple[Plan, Searched]:
    """Search the plan of the model `name`, and write it as plan.json.

    Raises what search/run.py raises, StoreError, and InvalidInput for invalid constraints.
    """
    order = survey.order(name)
    live = None
    if order.move_budget:
        with suppress(NotFound, InvalidInput):  # without a readable live plan, every table may be placed anywhere
            live = live_plan(read_live(store, name), store)
    searched = choose(survey, order, store)
    constraints = ConstraintsFile.parse(order.constraints, f"constraints of model {name!r}")
    margin_bytes = math.ceil(memory_margin * max(order.memory_bytes))
    plan = search(
        tables,
        searched.model,
        out,
        SearchSettings(
            algorithm=algorithm,
            seed=survey.request.seed,
            move_budget_bytes=order.move_budget_bytes if live else None,
        ),
        memory_bytes=order.memory_bytes,
        batch_size=survey.request.batch_size,
        constraints=constraints.model_copy(update={"reserve": max(constraints.reserve, margin_bytes)}),
        previous=live,
        instead=searched.instead,
    )
    return plan, searched
