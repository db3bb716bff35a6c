"""How a night begins: the fleet, the store and every model's tables -> what is to be measured, and which plans are to be sought.

Nothing that concerns one model or one kind of hardware alone keeps the others from going on.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from neuroshard import __version__
from neuroshard.augment.night import finished, lacking, read_draws, renamed, tables_of
from neuroshard.core.clean import log
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.nightly import Order, Request, Survey, Work, read_orders
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.fleet.cluster import in_cluster
from neuroshard.fleet.coverage import Coverage
from neuroshard.fleet.kinds import Fleet
from neuroshard.fleet.run import fleet_text, kubernetes_fleet, local_fleet
from neuroshard.fleet.survey import backends_view, survey
from neuroshard.models.serving import known_models
from neuroshard.store.folders import patiently
from neuroshard.store.measuring import FAILED, LEARNED, costs_digest, measuring, read_record
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of
from neuroshard.store.track import live_or_none

LEARN_AGAIN = {"dated in the future", "unreadable"}  # publishing alone mends these


def run(
    models: str,
    store_url: str,
    *,
    request: Request,
    recorded: str = "",
    node_selector: Mapping[str, str],
    tolerations: Sequence[Mapping[str, Any]],
    most_pods: int,
    max_age_seconds: float | None,
    max_error: float | None,
) -> Survey:
    """Survey the fleet for the orders in `models` (a JSON list), and say on stderr how each kind of hardware stands.

    GPUs are asked for at the cluster's API, or taken from the NodeList in the file `recorded`; CPUs, and whatever there is
    where no cluster is, are this machine's. Raises UsageError and InvalidInput for what concerns all models, StoreError, and
    NeuroshardError where no model can get a plan and none has one.
    """
    orders, store = read_orders(models), open_store(store_url)
    fleet, notes = _fleet(request.backend, recorded, node_selector, tolerations)
    tables, faults = tables_of(orders)
    known, unreadable = patiently(lambda: known_models(store))
    found = survey(
        fleet,
        known,
        orders,
        request=request,
        columns={order.name: _columns(order, tables.get(order.name, ())) for order in orders},
        most_pods=most_pods,
        now=datetime.now(UTC),
        max_age_seconds=max_age_seconds,
        max_error=max_error,
    )
    lost = {**found.lost, **{name: f"its tables cannot be read: {why}" for name, why in faults.items()}}
    _check_any_left(store, orders, lost)
    stands = {one.kind.fingerprint: one for one in found.stands}
    everything = [table for some in tables.values() for table in some]
    works, said = [], []
    for work in found.works:
        todo, why = _pending(store, work, request, everything, stands[work.hardware.fingerprint], max_error)
        works += [] if todo is None else [todo]
        said += [f"{work.hardware.name}: {why}"] if why else []

    log(*fleet_text(fleet, found.stands).splitlines(), *(f"note: {note}" for note in fleet.notes))
    log(f"to measure: {len(works)} of {len(found.stands)} kinds of hardware")
    said = [*notes, *unreadable, *said, *_misspelt(orders, found.hardware, fleet)]
    log(*(f"note: {note}" for note in said))
    log(*(f"note: model {name!r} gets no plan: {why}" for name, why in lost.items()))
    return Survey(
        owner=uuid4().hex[:12],
        request=request,
        orders=orders,
        hardware=found.hardware,
        kinds={kind.fingerprint: kind.hardware for kind in fleet.kinds},
        works=tuple(works),
        lost=lost,
        notes=tuple(notes),
        max_error=max_error,
        max_age_seconds=max_age_seconds,
    )


def planned_at_once(night: Survey, store_url: str) -> list[str]:
    """The models that need not wait: nothing is measured for them tonight, or what was measured before came to nothing."""
    store = open_store(store_url)
    failed = set()
    for work in night.works:
        now = measuring(store, work.folder)
        if FAILED in now.others or now.leases:
            failed.add(work.hardware.fingerprint)
    waiting = set(planned_after(night))
    names = [order.name for order in night.orders]
    return [name for name in names if name not in waiting or night.hardware.get(name) in failed]


def planned_after(night: Survey) -> list[str]:
    """The models whose kind of hardware is measured or learned tonight."""
    kinds = {work.hardware.fingerprint for work in night.works}
    return [one.name for one in night.orders if night.hardware.get(one.name) in kinds and one.name not in night.lost]


def _fleet(
    backend: str, recorded: str, node_selector: Mapping[str, str], tolerations: Sequence[Mapping[str, Any]]
) -> tuple[Fleet, list[str]]:
    """What the backend measures; none, with a note, where the cluster cannot be asked: then what is live plans the models."""
    try:
        if backend != "cpu" and (recorded or in_cluster()):
            path = Path(recorded) if recorded else None
            there = kubernetes_fleet(recorded=path, node_selector=node_selector, tolerations=tolerations)
        else:
            there = local_fleet()
    except UsageError:
        raise
    except NeuroshardError as error:
        there = Fleet(source=recorded or "the cluster", kinds=())
        return backends_view(there, backend), [f"no hardware can be measured tonight: {error}"]
    return backends_view(there, backend), []


def _pending(
    store: Store,
    work: Work,
    request: Request,
    tables: Sequence[Table],
    stands: Coverage,
    max_error: float | None,
) -> tuple[Work | None, str]:
    """The work as far as there is anything to do; or None, and why nothing more can be had from measuring."""
    if work.oldest_seconds is not None:
        return work, ""
    there = read_draws(store, work.folder)
    now = measuring(store, work.folder)
    named = renamed(tables, there.values())
    unfinished = any(not finished(store, work.folder, draw) for draw in now.draws)
    if unfinished or not now.draws or lacking(work, request, named, list(there.values())):
        return work, ""
    learned = read_record(store, f"{work.folder}/{LEARNED}")
    current = learned is not None and learned.get("costs") == costs_digest(store, work.folder)
    if learned is None or not current or learned.get("version") != __version__:
        return work, ""
    if LEARN_AGAIN & set(stands.lacks):
        return work, ""
    refused = str(learned.get("refused") or "")
    if not stands.bundle and (not refused or learned.get("max_error") != max_error):
        return work, ""  # it was live, and is not any more; or another error is allowed now
    more = work.model_copy(update={"more": True})
    if (refused or "error too high" in stands.lacks) and lacking(more, request, named, list(there.values())):
        return more, ""
    why = refused or stands.why
    return None, f"all that was asked for is measured and learned, and still: {why}; ask for more cases"


def _check_any_left(store: Store, orders: Sequence[Order], lost: Mapping[str, str]) -> None:
    """Raise NeuroshardError where no model can get a plan tonight and one has none: nothing is then worth measuring."""
    if any(order.name not in lost for order in orders):
        return
    first = orders[0].name
    for order in orders:
        try:
            if patiently(lambda order=order: live_or_none(store, plans_of(order.name))) is None:  # type: ignore[misc]
                raise NeuroshardError(f"model {order.name!r} gets no plan, and none is live: {lost[order.name]}")
        except UsageError:
            raise
    log(f"note: no model can get a plan tonight, the first for: {lost[first]}")


def _columns(order: Order, tables: Sequence[Table]) -> int:
    """The widest shard that a plan cannot avoid: the widest table, split over all devices."""
    widest = max((table.dim for table in tables), default=0)
    return -(-widest // (DIM_STEP * order.devices)) * DIM_STEP


def _misspelt(orders: Sequence[Order], hardware: Mapping[str, str], fleet: Fleet) -> list[str]:
    there = "; ".join(kind.hardware.name for kind in fleet.kinds) or "no kind of hardware that this backend measures"
    return [
        f"model {order.name!r}: no hardware {order.hardware!r} in the fleet or the store, which has {there}; is it misspelt?"
        for order in orders
        if hardware.get(order.name) == ""
    ]
