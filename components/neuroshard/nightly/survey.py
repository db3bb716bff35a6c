"""The first step of a nightly run: fleet, store and the models' tables -> what to measure, and which models to plan.

A fault of one model, or of one kind of hardware, does not stop the others.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from neuroshard import __version__
from neuroshard.core.clean import log
from neuroshard.core.errors import NeuroshardError, StoreError, Unreachable, UsageError
from neuroshard.core.table import Table
from neuroshard.core.text import agreeing
from neuroshard.fleet.cluster import in_cluster
from neuroshard.fleet.coverage import KindCoverage
from neuroshard.fleet.labels import Fleet
from neuroshard.fleet.run import fleet_text, kubernetes_fleet, local_fleet, pods_fleet
from neuroshard.fleet.survey import SurveySettings, backends_view, survey
from neuroshard.models.serving import known_models
from neuroshard.nightly.augment import finished, lacking, left_over, read_draws, renamed, tables_of
from neuroshard.orders.nightly import Campaign, ModelSpec, Survey, read_specs
from neuroshard.store.measuring import AUGMENT_LEASE, FAILED, LEARNED, costs_digest, measuring, read_record
from neuroshard.store.night import read_survey, write_survey
from neuroshard.store.patience import open_patiently
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of
from neuroshard.store.track import live_or_none

# What is so of a kind of hardware that no live cost model covers (the first of these that is), and what is done for it
DECISIONS: Mapping[str, Literal["go on", "draw more", "leave"]] = {
    "too old": "go on",  # max_age allows no costs so old
    "not measured": "go on",  # cases are to be drawn, or drawn ones to be measured
    "not learned": "go on",  # costs have come since, or another version learned from them
    "not readable": "go on",  # what is live is damaged, or dated in the future: publishing it again repairs that
    "not live": "go on",  # it was live and is no more, or another error is allowed now
    "too far off": "draw more",  # what was learned, and more cases than asked for may be drawn
    "exhausted": "leave",
}


def run(
    models: str,
    store_url: str,
    settings: SurveySettings,
    *,
    owner: str = "",
    single_writer: bool = False,
    parameters: Mapping[str, Any] | None = None,
) -> Survey:
    """Survey the fleet for the `models` (a JSON list), and report on stderr how each kind of hardware is covered. What was found
    is put into the store, under the name of the run, `owner`, with the `parameters` that its other steps need.

    GPUs are found at the cluster's API, or in the file `settings.nodes`; CPUs in a cluster are those of measuring pods. Where
    there is no cluster, all hardware is this machine's. Raises UsageError and InvalidInput for a fault of all models, StoreError,
    and NeuroshardError where no model can be planned and one of them has no live plan.
    """
    specs, store = read_specs(models), open_patiently(store_url, single_writer=single_writer)
    fleet, notes = _fleet(settings)
    tables, faults = tables_of(specs)
    known, unreadable = known_models(store)
    found = survey(fleet, known, specs, tables, settings, now=datetime.now(UTC), unreadable=bool(unreadable))
    no_plan = {**found.no_plan, **{name: f"its tables cannot be read: {why}" for name, why in faults.items()}}
    _check_any_left(store, specs, no_plan)
    every_table = [table for some in tables.values() for table in some]
    campaigns, said_of_others = _pending_campaigns(store, found.campaigns, found.kinds, every_table, settings)

    log(*fleet_text(fleet, found.kinds).splitlines(), *(f"note: {note}" for note in fleet.notes))
    log(f"to measure: {len(campaigns)} of {len(found.kinds)} kinds of hardware")
    said = [*notes, *unreadable.values(), *said_of_others]
    log(*(f"note: {note}" for note in said))
    log(*(f"note: model {name!r} gets no plan: {why}" for name, why in no_plan.items()))
    surveyed = Survey(
        owner=owner or uuid4().hex[:12],
        request=settings.request,
        models=specs,
        hardware=found.hardware,
        kinds={kind.fingerprint: kind.hardware for kind in fleet.kinds},
        topologies={kind.fingerprint: kind.topology for kind in fleet.kinds if kind.topology is not None},
        campaigns=tuple(campaigns),
        no_plan=no_plan,
        notes=tuple(notes),
        max_error=settings.max_error,
        max_age_seconds=settings.max_age_seconds,
        parameters={name: value for name, value in (parameters or {}).items() if name != "models"},
    )
    surveyed = surveyed.model_copy(update={"at_once": planned_at_once(surveyed, store)})
    write_survey(store, surveyed)
    return surveyed


def planned_at_once(found: Survey, store: Store) -> tuple[str, ...]:
    """The models that need not wait: this run measures nothing for them; or an earlier attempt to measure failed, or left a lease
    behind or holds it still, so that nothing may come of waiting."""
    failed = set()
    for campaign in found.campaigns:
        now = measuring(store, campaign.folder)
        if not now.others.isdisjoint((FAILED, AUGMENT_LEASE)) or now.leases:
            failed.add(campaign.hardware.fingerprint)
    waiting = planned_after(found)
    names = [spec.name for spec in found.models]
    return tuple(name for name in names if name not in waiting or found.hardware.get(name) in failed)


def first_model(store_url: str, run: str) -> str:
    """The first model that a run plans at once; empty where all wait. Raises StoreError and InvalidInput."""
    return next(iter(read_survey(open_patiently(store_url), run).at_once), "")


def planned_after(found: Survey, kind: str = "") -> list[str]:
    """The models whose kind of hardware is measured or learned in this run, those of one kind where one is named."""
    kinds = {
        campaign.hardware.fingerprint for campaign in found.campaigns if kind in ("", campaign.hardware.fingerprint)
    }
    return [one.name for one in found.models if found.hardware.get(one.name) in kinds and one.name not in found.no_plan]


def _fleet(settings: SurveySettings) -> tuple[Fleet, list[str]]:
    """The hardware that the backend measures. Where the cluster does not answer: no hardware, and a note."""
    backend, recorded = settings.request.backend, settings.nodes
    try:
        if backend == "cpu" and in_cluster():
            there = pods_fleet(settings.pod_memory_bytes, settings.node_selector, settings.tolerations)
        elif backend != "cpu" and (recorded or in_cluster()):
            path = Path(recorded) if recorded else None
            there = kubernetes_fleet(
                recorded=path, node_selector=settings.node_selector, tolerations=settings.tolerations
            )
        else:
            there = local_fleet()
    except UsageError:
        raise
    except NeuroshardError as error:
        there = Fleet(source=recorded or "the cluster", kinds=())
        return backends_view(there, backend), [f"no hardware can be measured in this run: {error}"]
    return backends_view(there, backend), []


def _pending_campaigns(
    store: Store,
    campaigns: Sequence[Campaign],
    kinds: Sequence[KindCoverage],
    tables: Sequence[Table],
    settings: SurveySettings,
) -> tuple[list[Campaign], list[str]]:
    """The campaigns with anything left to measure or learn, and a note for each of the others."""
    covered = {one.kind.fingerprint: one for one in kinds}
    pending, notes = [], []
    for campaign in campaigns:
        try:
            kind = covered[campaign.hardware.fingerprint]
            row, refused = standing(store, campaign, tables, kind, settings)
            decision = DECISIONS[row]
            over = left_over(store, campaign.folder) if decision != "leave" else 0
        except Unreachable:
            raise
        except StoreError as error:  # access to it may be denied; the other kinds continue
            notes.append(f"{campaign.hardware.name}: nothing can be measured for it: {error}")
            continue
        if decision == "leave":
            why = (
                f"all that was asked for is measured and learned, and still: {refused or kind.why}; ask for more cases"
            )
            notes.append(f"{campaign.hardware.name}: {why}")
            continue
        said = f"{agreeing(over, 'case', 'is', 'are')} left over from earlier runs, whose budget ended before"
        log(*([f"{campaign.hardware.name}: {said}"] if over else []))
        changes = {"why": f"{kind.why}; {said}" if over else kind.why, "more": decision == "draw more"}
        pending.append(campaign.model_copy(update=changes))
    return pending, notes


def standing(
    store: Store, campaign: Campaign, tables: Sequence[Table], covered: KindCoverage, settings: SurveySettings
) -> tuple[str, str]:
    """The row of DECISIONS that a campaign is in, and why its last cost model did not go live, empty where it did. Raises
    StoreError."""
    if campaign.oldest_seconds is not None:
        return "too old", ""
    draws, now = read_draws(store, campaign.folder), measuring(store, campaign.folder)
    lacks = partial(
        lacking, request=settings.request, tables=renamed(tables, draws.values()), earlier=[*draws.values()]
    )
    learned = read_record(store, f"{campaign.folder}/{LEARNED}") or {}
    refused, by = str(learned.get("refused") or ""), (learned.get("costs"), learned.get("version"))
    measured = bool(now.draws) and all(finished(store, campaign.folder, now, draw) for draw in now.draws)
    is_so = {
        "not measured": not measured or lacks(campaign),
        "not learned": by != (costs_digest(store, campaign.folder), __version__),
        "not readable": bool({"dated in the future", "unreadable"} & set(covered.lacks)),
        "not live": not covered.bundle and (not refused or learned.get("max_error") != settings.max_error),
        "too far off": (refused or "error too high" in covered.lacks)
        and lacks(campaign.model_copy(update={"more": True})),
    }
    return next((row for row, holds in is_so.items() if holds), "exhausted"), refused


def _check_any_left(store: Store, specs: Sequence[ModelSpec], no_plan: Mapping[str, str]) -> None:
    """Raise NeuroshardError where no model can be planned and one has no live plan: then measuring is useless."""
    if any(spec.name not in no_plan for spec in specs):
        return
    for spec in specs:
        live = live_or_none(store, plans_of(spec.name))
        if live is None:
            raise NeuroshardError(f"model {spec.name!r} gets no plan, and none is live: {no_plan[spec.name]}")
    log(f"note: no model can get a plan, the first for: {no_plan[specs[0].name]}")
