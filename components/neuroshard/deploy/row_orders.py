"""The lists of hot rows of the tables that a plan holds by access, put into the store before the plan; and how far access has
drifted from them."""

from pathlib import Path
from typing import TYPE_CHECKING

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.plan import Plan
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.text import first_few
from neuroshard.deploy.golive import put
from neuroshard.store.protocol import Store
from neuroshard.store.row_orders import rows_of
from neuroshard.store.track import read_artifact

if TYPE_CHECKING:
    from neuroshard.files.row_orders import ReadIds


def with_drift(live: Plan | None, plan: Plan, read: "ReadIds") -> tuple[Plan | None, tuple[str, ...]]:
    """The live plan with what the hottest rows of its row orders have of the lookups now, by the newer orders of a plan; and
    lines on those that access has drifted from. A note says where that is not known."""
    if live is None or not live.task.orders:
        return live, ()
    from neuroshard.files.row_orders import as_now  # NumPy, which other plans do not need

    try:
        task, found = as_now(live.task, plan.task, read)
    except (NotFound, InvalidInput) as error:
        log(f"note: whether access has drifted from the live plan's row orders is not known: {error}")
        return live, ()
    lines = tuple(f"the live plan's {drift.text}" for drift in found if drift.is_large)
    return live.model_copy(update={"task": task}), lines


def hot_in_both(live: Plan | None, plan: Plan, read: "ReadIds") -> dict[str, int]:
    """How many rows are hot by both plans' orders, where those differ and the store has both lists (files/row_orders.py)."""
    if live is None or not live.task.orders:
        return {}
    from neuroshard.files import row_orders

    return row_orders.hot_in_both(live.task, plan.task, read)


def put_lists(plan: Plan, store: Store, model: str, folder: Path | None = None) -> None:
    """Put the lists of the tables that the plan holds by access into the store from the folder, and keep those that are there
    from `gc`. Raises InvalidInput for a damaged list and for one that is in neither, and StoreError."""
    orders = {name: order for name, order in plan.task.orders.items() if order.ids_digest}
    if not orders:
        return
    from neuroshard.files.row_orders import files_of, ids_in  # NumPy, which other plans do not need

    track, files, missing = rows_of(model), files_of(folder, orders.values()), []
    for name, order in orders.items():
        if order.ids_digest not in files:
            try:
                there = read_artifact(store, track, order.ids_digest)
            except NotFound:
                missing.append(name)
                continue
            (key,) = there.files
            ids_in(there.value, order, f"{store.url}/{key}")
            files[order.ids_digest] = there.value
    if missing:
        where = f"neither in {folder} nor in" if folder else "not in"
        raise InvalidInput(
            f"the plan holds tables by access, and the lists of hot rows of {first_few(missing)} are {where} {store.url}: no "
            f"trainer could load it; deploy it with the folder {LISTS_FOLDER} of the tables.json beside its plan.json"
        )
    for digest, data in files.items():
        put(store, track, digest, {track.keys(digest)[0]: data})
