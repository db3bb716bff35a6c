"""The lists of hot rows that a plan's tables name, put into the store before the plan; and how far access has drifted from
them."""

from functools import partial
from pathlib import Path

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.plan import Plan
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.core.text import first_few
from neuroshard.deploy.golive import claim, put
from neuroshard.store.protocol import Store
from neuroshard.store.row_orders import read_ids, row_orders_of, rows_of
from neuroshard.store.track import read_artifact


def note_drift(live: Plan | None, plan: Plan, store: Store, model: str) -> None:
    """Note which row orders of the live plan access has drifted from, by the newer ones of a plan."""
    if live is None or not any(table.row_order for table in live.task.tables):
        return
    from neuroshard.files.row_orders import drifts  # NumPy, which other plans do not need

    try:
        found = drifts(live.task.tables, plan.task.tables, partial(read_ids, store, model), {})
    except (NotFound, InvalidInput) as error:
        log(f"note: whether access has drifted from the live plan's row orders is not known: {error}")
        return
    log(*(f"note: the live plan's {drift.text}" for drift in found))


def put_lists(plan: Plan, store: Store, model: str, folder: Path | None) -> None:
    """Put the lists that are in the folder into the store, and keep those that are there from `gc`. A list that is in neither is
    noted. Raises InvalidInput for a damaged list, and StoreError."""
    orders = row_orders_of(plan.task.tables)
    if not orders:
        return
    from neuroshard.files.row_orders import ids_of, ids_path  # NumPy, which other plans do not need

    track, missing = rows_of(model), set()
    for digest, order in orders.items():
        path = None if folder is None else ids_path(folder, order)
        if path is not None and path.exists():
            ids_of(path.parent, order)
            put(store, track, digest, {track.keys(digest)[0]: path.read_bytes()})
            continue
        try:
            claim(store, track, read_artifact(store, track, digest))
        except NotFound:
            missing.add(digest)
    if missing:
        names = [table.name for table in plan.task.tables if table.row_order and table.row_order.ids_digest in missing]
        there = f"in {folder} nor in" if folder else "given nor in"
        log(
            f"note: the lists of hot rows of {first_few(names)} are neither {there} {store.url}; trainers of a plan that needs "
            f"them could not load it: deploy a plan.json that has the folder {LISTS_FOLDER} beside it"
        )
