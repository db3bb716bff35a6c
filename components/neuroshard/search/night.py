"""A night's order for a model -> its plan: under the order's constraints, from the live plan where it says how much may move.

The cost model is the first of these that can be used: the hardware's own live one; its own that was not good enough to go live;
that of a neighbouring driver or kind of hardware, at the same batch size; the analytic model. Of all but the first the plan
says so.
"""

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput, NotFound
from neuroshard.core.nightly import Order, Searched, Survey, work_folder
from neuroshard.core.plan import Plan
from neuroshard.costmodel.analytic import DATASHEETS, SPREAD
from neuroshard.costmodel.protocol import predicts
from neuroshard.files.constraints import ConstraintsFile
from neuroshard.models.open import open_cost_model
from neuroshard.models.published import list_published
from neuroshard.models.serving import Known, Wanted, known_models, live_at, serves, usable
from neuroshard.search.run import run as search_run
from neuroshard.store.measuring import FAILED, read_record
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import read_live, read_plan

UNKNOWN_GPU, UNKNOWN_CPU = "a100", "cpu"  # the datasheets that answer for hardware without one


class Candidate(NamedTuple):
    """A cost model as `--model` names it. `what` says in words what it is, where it is not the hardware's own that serves."""

    spec: str
    what: str = ""


def run(
    night: Survey,
    name: str,
    tables_path: Path,
    store_url: str,
    out: Path,
    *,
    algorithm: str,
    memory_margin: float = 0.0,
) -> tuple[Plan, Searched]:
    """Search the plan of the model called `name`, and write it as plan.json; and which cost model was used.

    `memory_margin` is the share of a device's memory that the plan leaves free, as the gate asks.

    Raises what search/run.py raises, StoreError, and InvalidInput for constraints that are none.
    """
    order, store = night.order(name), open_store(store_url)
    live = _live_plan(store_url, name) if order.move_budget else None
    used = choose(night, order, store)
    constraints = ConstraintsFile.parse(order.constraints, f"constraints of model {name!r}")
    margin_bytes = math.ceil(memory_margin * max(order.memory_bytes))
    plan = search_run(
        tables_path,
        used.model,
        out,
        devices=order.devices,
        memory_bytes=order.memory_bytes,
        batch_size=night.request.batch_size,
        algorithm=algorithm,
        seed=night.request.seed,
        constraints=constraints.model_copy(update={"reserve": max(constraints.reserve, margin_bytes)}),
        previous=live,
        move_budget_bytes=order.move_budget_bytes if live else None,
        instead=used.instead,
    )
    return plan, used


def choose(night: Survey, order: Order, store: Store) -> Searched:
    """The best cost model that can be used for an order, and why it is not the hardware's own. Raises StoreError."""
    known, notes = known_models(store)
    live = live_at(known, night.request.batch_size)
    why = _why_not_own(night, order, store, live, notes)
    for candidate in candidates(night, order, store, live):
        try:
            model = open_cost_model(candidate.spec, night.request.batch_size)
        except (InvalidInput, NotFound) as error:
            log(f"note: {candidate.spec} is passed over: {error}")
            continue
        if not predicts(model, order.devices):
            continue
        said = [candidate.what, *([why] if why else [])]
        instead = f"this plan is by {': '.join(said)}" if candidate.what else ""
        if instead:
            log(f"note: {order.name}: {instead}")
        return Searched(model=candidate.spec, instead=instead)
    raise AssertionError("the analytic model always answers")


def candidates(night: Survey, order: Order, store: Store, live: Mapping[str, Known]) -> Iterator[Candidate]:
    """Cost models for an order, the best first. The last one always answers."""
    fingerprint, wanted, now = night.hardware.get(order.name, ""), _wanted(night, order), datetime.now(UTC)
    own = live.get(fingerprint)
    if own is not None:
        found = serves(own, wanted, now)
        if usable(found):
            said = [one for one in found if one.lack not in ("ranks missing", "partly learned")]
            what = f"a cost model that falls short: {'; '.join(one.why for one in said)}" if said else ""
            yield Candidate(_spec(store, own.release.fingerprint, own.release.bundle_digest), what)
    for one in list_published(store):
        at_size = one.manifest is not None and one.manifest.batch_size == night.request.batch_size
        if one.fingerprint == fingerprint and not one.is_live and at_size and one.error is not None:
            what = f"a cost model that is {one.error:.1%} off on unseen tables, too far to go live"
            yield Candidate(_spec(store, one.fingerprint, one.digest), what)
    hardware = _hardware(night, fingerprint, live)
    for neighbour in _neighbours(hardware, order, live, fingerprint):
        release, of = neighbour.release, _of(neighbour)
        what = f"the cost model of {release.device_name}" + (f", driver {of.driver}" if of and of.driver else "")
        yield Candidate(_spec(store, release.fingerprint, release.bundle_digest), what)
    yield Candidate(*_analytic(hardware, order))


def _wanted(night: Survey, order: Order) -> Wanted:
    return Wanted(
        night.request.batch_size,
        ranks=(order.devices,),
        max_error=night.max_error,
        max_age_seconds=night.max_age_seconds,
    )


def _why_not_own(night: Survey, order: Order, store: Store, live: Mapping[str, Known], notes: tuple[str, ...]) -> str:
    """Why the hardware has no cost model that serves: what falls short, and what came of measuring."""
    fingerprint = night.hardware.get(order.name, "")
    own = live.get(fingerprint)
    if own is not None:
        why = "; ".join(one.why for one in serves(own, _wanted(night, order), datetime.now(UTC)) if not one.usable)
        whys = [f"the live one of its hardware cannot be used, as {why}"] if why else []
    else:
        called = order.hardware or "its hardware"
        whys = [f"no cost model of {called} is live for {night.request.batch_size:,} samples a step"]
    whys += [note for note in notes if fingerprint and fingerprint in note]
    if fingerprint:
        failed = read_record(store, f"{work_folder(fingerprint, night.request)}/{FAILED}")
        whys += [f"{failed.get('step')}: {failed.get('why')}"] if failed else []
    return "; ".join(whys)


def _spec(store: Store, fingerprint: str, digest: str) -> str:
    return f"{store.url}#{fingerprint}@{digest}"


def _of(known: Known) -> Hardware | None:
    return known.model.manifest.bench.hardware if known.model else None


def _hardware(night: Survey, fingerprint: str, live: Mapping[str, Known]) -> Hardware | None:
    """The hardware that an order's devices are, as far as this night knows it."""
    kinds = [work.hardware for work in night.works if work.hardware.fingerprint == fingerprint]
    kinds += [of for one in live.values() if one.release.fingerprint == fingerprint and (of := _of(one))]
    return night.kinds.get(fingerprint) or next(iter(kinds), None)


def _neighbours(hardware: Hardware | None, order: Order, live: Mapping[str, Known], fingerprint: str) -> list[Known]:
    """Live cost models of other hardware of the same kind, the most alike first; newer before older."""
    plain = order.hardware.lower().replace("-", "").replace(" ", "")

    def alike(one: Known) -> tuple[bool, bool, str]:
        of = _of(one)
        assert of is not None
        name = of.name.lower().replace("-", "").replace(" ", "")
        same = (
            name == hardware.name.lower().replace("-", "").replace(" ", "")
            if hardware
            else bool(plain) and plain in name
        )
        driver = hardware is not None and of.driver_major == hardware.driver_major
        return same, driver, one.release.time

    others = [one for one in live.values() if one.release.fingerprint != fingerprint and (of := _of(one))
              and (hardware is None or of.kind == hardware.kind)]  # fmt: skip
    return sorted(others, key=alike, reverse=True)


def _analytic(hardware: Hardware | None, order: Order) -> Candidate:
    """The analytic model of the datasheet that is called as the hardware, or of the one that answers for the unknown."""
    called = (hardware.name if hardware else order.hardware).lower()
    name = next((sheet for sheet in sorted(DATASHEETS, reverse=True) if sheet in called), "")
    is_cpu = (hardware is not None and hardware.kind == "cpu") or "cpu" in called
    sheet = name or (UNKNOWN_CPU if is_cpu else UNKNOWN_GPU)
    guess = "" if name else f", whose datasheet answers for {called or 'unknown hardware'}"
    return Candidate(f"analytic:{sheet}", f"analytic:{sheet}, of datasheets, which may be {SPREAD:.0%} off{guess}")


def _live_plan(store: str, model: str) -> Plan | None:
    """The plan that is live, or None where there is none that can be read: then all is placed anew."""
    source = open_store(store)
    try:
        return read_plan(source, model, read_live(source, model).release.plan_digest)
    except (NotFound, InvalidInput):
        return None
