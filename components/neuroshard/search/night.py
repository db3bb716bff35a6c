"""A night's order for a model -> its plan: under the order's constraints, from the live plan where it says how much may move."""

from pathlib import Path

from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.nightly import Survey
from neuroshard.core.plan import Plan
from neuroshard.files.constraints import ConstraintsFile
from neuroshard.search.run import run as search_run
from neuroshard.store.open import open_store
from neuroshard.store.releases import read_live, read_plan


def run(
    night: Survey, name: str, tables_path: Path, store: str, out: Path, *, batch_size: int, algorithm: str, seed: int
) -> Plan:
    """Search the plan of the model called `name` by the live cost model of its hardware, and write it as plan.json.

    Raises what search/run.py raises, StoreError, and InvalidInput for constraints that are none.
    """
    order = night.order(name)
    live = _live_plan(store, name) if order.move_budget else None
    return search_run(
        tables_path,
        f"{store}#{night.hardware[name]}",
        out,
        devices=order.devices,
        memory_bytes=order.memory_bytes,
        batch_size=batch_size,
        algorithm=algorithm,
        seed=seed,
        constraints=ConstraintsFile.parse(order.constraints, f"constraints of model {name!r}"),
        previous=live,
        move_budget_bytes=order.move_budget_bytes if live else None,
    )


def _live_plan(store: str, model: str) -> Plan | None:
    """The plan that is live, or None where there is none that can be read: then all is placed anew."""
    source = open_store(store)
    try:
        return read_plan(source, model, read_live(source, model).release.plan_digest)
    except (NotFound, InvalidInput):
        return None
