"""Which cost model a model's plan is searched with: the best of those that can be used.

1. the live cost model of the model's own hardware
2. another cost model of that hardware, those whose error is low enough to go live first
3. the live cost model of similar hardware (another driver, another device) at the same batch size
4. the analytic cost model

With any but the first, the plan says so; and where it guesses which hardware it is for.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput, StoreError, Unreachable
from neuroshard.core.hardware_names import is_part_of_name, is_same_name
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.analytic import DATASHEETS, analytic_for
from neuroshard.costmodel.protocol import predicts
from neuroshard.models.open import open_cost_model
from neuroshard.models.published import list_published
from neuroshard.models.serving import Known, Shortfall, Wanted, known_models, live_at, serves, usable
from neuroshard.orders.nightly import ModelSpec, Survey, campaign_folder
from neuroshard.seen.stored import correction_seen
from neuroshard.store.measuring import FAILED, read_record
from neuroshard.store.protocol import Store


class Candidate(NamedTuple):
    """A cost model, named as `--model` names it. `what` describes one that is not the hardware's own good one."""

    cost_model: str
    what: str = ""


class Searched(NamedTuple):
    """`model` names the cost model of a plan as `--model` does, and `instead` says why it is not the hardware's own. Where there
    is no plan, `no_plan` is the reason."""

    model: str = ""
    instead: str = ""
    no_plan: str = ""


def choose(survey: Survey, spec: ModelSpec, store: Store) -> Searched:
    """The best cost model that can be used for a model, and why it is not the hardware's own. Raises StoreError."""
    known, unreadable = known_models(store)
    live = live_at(known, survey.request.batch_size)
    why = _why_not_own(survey, spec, store, live, unreadable)
    for candidate in candidates(survey, spec, store, live):
        try:
            model = open_cost_model(candidate.cost_model, survey.request.batch_size)
        except Unreachable:
            raise
        except (InvalidInput, StoreError) as error:
            log(f"note: cost model {candidate.cost_model} cannot be used: {error}")
            continue
        if not predicts(model, _ranks(survey, spec)):
            continue
        said = [candidate.what, *([why] if why else [])]
        by = f"this plan is by {': '.join(said)}" if candidate.what else ""
        instead = "; ".join(filter(None, (by, _guessed(survey, spec))))
        if instead:
            log(f"note: {spec.name}: {instead}")
        return Searched(model=candidate.cost_model, instead=instead)
    raise AssertionError("the analytic model always answers")


def candidates(survey: Survey, spec: ModelSpec, store: Store, live: Mapping[str, Known]) -> Iterator[Candidate]:
    """Cost models for a model, the best first. The last one, the analytic cost model, can always be used."""
    fingerprint, backend = survey.hardware.get(spec.name, ""), survey.request.backend
    own = live.get(fingerprint)
    if own is not None and usable(lacks := _lacks(survey, spec, own)):
        said = [one for one in lacks if one.lack not in ("ranks missing", "partly learned")]
        what = f"a cost model that falls short: {'; '.join(one.why for one in said)}" if said else ""
        yield Candidate(_named(store, own.release.fingerprint, own.release.bundle_digest), what)
    yield from _not_live(survey, fingerprint, store)
    hardware = _hardware(survey, fingerprint, live)
    for neighbour in _neighbours(hardware, spec, live, fingerprint, backend):
        release, of = neighbour.release, _of(neighbour)
        what = f"the cost model of {release.device_name}" + (f", driver {of.driver}" if of and of.driver else "")
        yield Candidate(_named(store, release.fingerprint, release.bundle_digest), what)
    sheet, is_own = analytic_for(hardware, spec.hardware)
    called, spread = hardware.name if hardware else spec.hardware, DATASHEETS[sheet].spread
    guess = "" if is_own else f", as there is no datasheet of {called}" if called else ", as the hardware is not known"
    off = "far" if spread is None else f"{spread:.0%}"
    if by := correction_seen(store, f"analytic:{sheet}"):
        name = f"analytic:{sheet}{by.suffix}"
        yield Candidate(name, f"analytic:{sheet}, made from a datasheet, corrected {by}{guess}")
    yield Candidate(f"analytic:{sheet}", f"analytic:{sheet}, made from a datasheet, which may be {off} off{guess}")


def _not_live(survey: Survey, fingerprint: str, store: Store) -> list[Candidate]:
    """The other cost models of the hardware: those whose error may go live, then those that are too far off, the newest first."""
    good, bad = [], []
    for one in list_published(store):
        at_size = one.manifest is not None and one.manifest.batch_size == survey.request.batch_size
        if one.fingerprint != fingerprint or one.is_live or not at_size or one.error is None:
            continue
        name, off = _named(store, one.fingerprint, one.digest), f"{one.error:.1%} off on unseen tables"
        if survey.max_error is not None and one.error > survey.max_error:
            bad.append(Candidate(name, f"a cost model that is {off}, too far to go live"))
        else:
            good.append(Candidate(name, f"another cost model of its hardware, {off}"))
    return [*good, *bad]


def _lacks(survey: Survey, spec: ModelSpec, own: Known) -> tuple[Shortfall, ...]:
    """In what the live cost model of a model's hardware falls short of what its plans need now."""
    request, ranks = survey.request, (_ranks(survey, spec),)
    wanted = Wanted(request.batch_size, ranks, max_error=survey.max_error, max_age_seconds=survey.max_age_seconds)
    return serves(own, wanted, datetime.now(UTC))


def _ranks(survey: Survey, spec: ModelSpec) -> int:
    return spec.order.near_ranks(survey.topologies.get(survey.hardware.get(spec.name, "")))


def _why_not_own(
    survey: Survey, spec: ModelSpec, store: Store, live: Mapping[str, Known], unreadable: Mapping[str, str]
) -> str:
    """Why the hardware's own live cost model cannot be used: its shortfalls, and the failure of the last measuring."""
    fingerprint = survey.hardware.get(spec.name, "")
    own = live.get(fingerprint)
    if own is not None:
        why = "; ".join(one.why for one in _lacks(survey, spec, own) if not one.usable)
        whys = [f"the live one of its hardware cannot be used, as {why}"] if why else []
    elif fingerprint or spec.hardware:
        called = spec.hardware or "its hardware"
        whys = [f"no cost model of {called} is live for {survey.request.batch_size:,} samples a step"]
    else:
        whys = [f"the model names no hardware, and the fleet shows none that backend {survey.request.backend} measures"]
    whys += survey.notes
    whys += [unreadable[fingerprint]] if fingerprint in unreadable else []
    if fingerprint:
        failed = read_record(store, f"{campaign_folder(fingerprint, survey.request)}/{FAILED}")
        whys += [f"{failed.get('step')}: {failed.get('why')}"] if failed else []
    return "; ".join(whys)


def _guessed(survey: Survey, spec: ModelSpec) -> str:
    """What a plan takes for granted of the devices that it is for; "" if nothing."""
    hardware = survey.kinds.get(survey.hardware.get(spec.name, ""))
    if hardware is None or hardware.kind == "cpu":
        return ""
    names, said = sorted({kind.name for kind in survey.kinds.values()}), []
    if not spec.hardware and len(names) > 1:
        said.append(
            f"the model names no hardware, and of {', '.join(names)} this plan is for {hardware.name}: name it (hardware)"
        )
    if spec.most_memory > hardware.memory_bytes:
        asked, has = format_bytes(spec.most_memory), format_bytes(hardware.memory_bytes)
        said.append(
            f"this plan may take {asked} of a device, and {hardware.name} has {has}: correct the model's memory"
        )
    return "; ".join(said)


def _named(store: Store, fingerprint: str, digest: str) -> str:
    return f"{store.url}#{fingerprint}@{digest}"


def _of(known: Known) -> Hardware | None:
    return known.model.manifest.bench.hardware if known.model else None


def _hardware(survey: Survey, fingerprint: str, live: Mapping[str, Known]) -> Hardware | None:
    """The hardware with this fingerprint, from the fleet, the campaigns, or a live cost model; None where none of them has it."""
    kinds = [campaign.hardware for campaign in survey.campaigns if campaign.hardware.fingerprint == fingerprint]
    kinds += [of for one in live.values() if one.release.fingerprint == fingerprint and (of := _of(one))]
    return survey.kinds.get(fingerprint) or next(iter(kinds), None)


def _neighbours(
    hardware: Hardware | None, spec: ModelSpec, live: Mapping[str, Known], fingerprint: str, backend: str
) -> list[Known]:
    """Live cost models of other hardware of the same kind, or of that which the `backend` measures, the most similar first, and
    of equals the newest first."""

    def similarity(one: Known) -> tuple[bool, bool, str]:
        of = _of(one)
        assert of is not None
        same = is_same_name(of.name, hardware.name) if hardware else is_part_of_name(spec.hardware, of.name)
        driver = hardware is not None and of.driver_major == hardware.driver_major
        return same, driver, one.release.time

    others = [one for one in live.values() if one.release.fingerprint != fingerprint and (of := _of(one))
              and of.kind == (hardware.kind if hardware else backend)]  # fmt: skip
    return sorted(others, key=similarity, reverse=True)
