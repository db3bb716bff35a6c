"""A model's tables as they are tonight -> its plan, by the best cost model that can be had."""

from pathlib import Path

from neuroshard.augment.source import run as load_tables
from neuroshard.core.clean import log
from neuroshard.core.errors import NeuroshardError, StoreError
from neuroshard.core.nightly import Searched, Survey
from neuroshard.core.plan import Plan
from neuroshard.search.night import run as search
from neuroshard.store.folders import patiently


def run(
    night: Survey, name: str, store_url: str, tables: Path, out: Path, *, algorithm: str, memory_margin: float = 0.0
) -> tuple[Plan | None, Searched]:
    """Write the tables as tables.json and the plan as plan.json. Where there is no plan, both hold why, as JSON.

    Raises StoreError where the store cannot be read.
    """
    lost = night.lost.get(name, "")
    try:
        if not lost:
            patiently(lambda: load_tables(night.order(name).tables, tables))
            how = {"algorithm": algorithm, "memory_margin": memory_margin}
            return patiently(lambda: search(night, name, tables, store_url, out, **how))  # type: ignore[arg-type]
    except StoreError:
        raise
    except NeuroshardError as error:
        lost = str(error)
    log(f"no plan for {name}: {lost}")
    searched = Searched(lost=lost)
    for path in (tables, out):
        if not path.exists():
            path.write_bytes(searched.canonical_json())
    return None, searched
