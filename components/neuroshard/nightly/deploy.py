"""A model's new plan -> what is live for the model, a page that shows the plan, and a verdict on the model in the store; then a
page of sizes, if the model asks for one: how many devices it would take, of which kind. That sweep comes last and has a time
budget of its own. It may fail in any way without harm to the model's plan.

A model without any plan makes the run fail (`check_red`); what else a night ended with less than it should have, who submits
reads in the store.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.errors import (
    Conflict,
    InvalidInput,
    NeuroshardError,
    NewerFormat,
    Refused,
    StoreError,
    Unreachable,
    Unsafe,
)
from neuroshard.core.plan import Plan
from neuroshard.core.text import one_line
from neuroshard.core.value import canonical_json, timestamp
from neuroshard.deploy.gate import Gate, why_it_cannot_serve
from neuroshard.deploy.golive import delete_damaged, mended_or_why_not
from neuroshard.deploy.run import Deployed, DeploySettings
from neuroshard.deploy.run import run as deploy
from neuroshard.files.plan import read_plan
from neuroshard.files.tables import read_tables
from neuroshard.models.open import open_cost_model
from neuroshard.nightly.fallbacks import Searched
from neuroshard.nightly.search import todays_order
from neuroshard.nightly.survey import planned_after
from neuroshard.orders.nightly import VERDICTS_FOLDER, End, ModelSpec, Survey, Verdict
from neuroshard.orders.sizes import Kind, SizeOrder
from neuroshard.report.run import run as report
from neuroshard.search.run import task_of
from neuroshard.seen.stored import said_of_live
from neuroshard.size.run import run as size
from neuroshard.size.shown import sizes_page
from neuroshard.store.measuring import read_record, write_over, write_record
from neuroshard.store.patience import open_patiently, patiently
from neuroshard.store.protocol import Store
from neuroshard.store.releases import live_plan, plans_of, size_keys
from neuroshard.store.releases import read_plan as read_live_plan
from neuroshard.store.track import live_or_none

UNSERVED = "what is live does not serve today's task"


class ReleaseFiles(NamedTuple):
    """What the step reads (`plan` and its `tables`) and what it writes (`release` and `page`)."""

    plan: Path
    tables: Path
    release: Path
    page: Path


def run(
    survey: Survey, name: str, searched: Searched, files: ReleaseFiles, store_url: str, *, single_writer: bool = False
) -> Verdict:
    """Deploy the plan of the model `name` by the run's `min_gain` and `memory_margin`, draw its page, and record the verdict in
    the store. Then put the model's page of sizes there, if it asks for one: whatever happens to that, the release and its verdict
    are there.

    Raises Unreachable where the store does not answer, and StoreError where a red verdict cannot be recorded.
    """
    store = open_patiently(store_url, single_writer=single_writer)
    min_gain, memory_margin = (survey.parameters[name] for name in ("min_gain", "memory_margin"))
    settings = DeploySettings(
        min_gain=min_gain if min_gain >= 0 else None, memory_margin=memory_margin, single_writer=single_writer
    )
    try:
        mended = mended_or_why_not(store, plans_of(name))
        doubts = [*survey.notes, *([mended] if mended else [])]
        if seen := said_of_live(store, name):
            log(f"note: {name}: {seen}")
        verdict = _verdict(survey, name, searched, files, store, settings, doubts)
    except (Unreachable, Unsafe):
        raise
    except StoreError as error:  # a full disk, or a key that may not be read
        verdict = _without_plan(store, survey, name, str(error), survey.notes, files)
    verdict = verdict.model_copy(update=_hardware_of(survey, name, store))
    _draw(files, searched, f"{store_url}#{name}", verdict)
    if not files.release.exists():
        files.release.write_bytes(verdict.canonical_json())
    log(*verdict.text.splitlines())
    _record(store, verdict)
    if why := put_sizes(survey, verdict, files.tables, store, memory_margin):
        log(f"note: {name}: no page of sizes: {why}")
        verdict = verdict.model_copy(update={"no_sizes": why})
        _record(store, verdict)
    return verdict


def _hardware_of(survey: Survey, name: str, store: Store) -> dict[str, str]:
    """The kind of hardware of a model tonight, and that of the last night where it was another one."""
    before = str((read_record(store, f"{VERDICTS_FOLDER}/{name}.json") or {}).get("hardware") or "")
    kind = survey.kinds.get(survey.hardware.get(name, ""))
    now = kind.name if kind else before
    return {"hardware": now, "before": before if before != now else ""}


def check_red(survey: Survey, verdict: Verdict, *, at_once: bool) -> None:
    """Raise NeuroshardError for a model without any plan, unless it is planned `at_once` and once more after measuring."""
    if verdict.end == "red" and not (at_once and verdict.model in planned_after(survey)):
        raise NeuroshardError(verdict.text)


def _record(store: Store, verdict: Verdict) -> None:
    try:
        write_record(store, f"{VERDICTS_FOLDER}/{verdict.model}.json", verdict.model_dump(mode="json"))
    except (Unreachable, Unsafe):
        raise
    except StoreError as error:
        if verdict.end == "red":  # who reads the record would not know
            raise StoreError(f"{verdict.text}; {error}") from None
        log(f"note: the verdict could not be recorded: {error}")


def _verdict(
    survey: Survey,
    name: str,
    searched: Searched,
    files: ReleaseFiles,
    store: Store,
    settings: DeploySettings,
    doubts: Sequence[str],
) -> Verdict:
    """Deploy the plan, if there is one; returns the verdict."""
    if searched.no_plan:
        return _without_plan(store, survey, name, searched.no_plan, doubts, files)
    instead = searched.instead or read_plan(files.plan).provenance.instead
    damaged = delete_damaged(store, plans_of(name), read_plan(files.plan).digest())
    doubts = [*(one for one in doubts if one not in instead), *(one for one in (instead, damaged) if one)]
    gated = replace(
        settings,
        tables=read_tables(files.tables)[0],
        cost_model=searched.model,
        max_error=survey.max_error,
        nightly=True,
    )

    def attempt() -> Deployed:
        return deploy(files.plan, store.url, name, gated)

    try:
        try:
            deployed = patiently(attempt)
        except Conflict as error:  # another run was first: the gate now compares with the plan that it put live
            log(f"note: {error}")
            deployed = patiently(attempt)
    except (Refused, InvalidInput, Conflict) as error:
        return _without_plan(store, survey, name, str(error), doubts, files)
    decision, release = deployed.decision, deployed.release
    if decision and not decision.goes_live and live_plan(live_or_none(store, plans_of(name)), store) is None:
        return _without_plan(store, survey, name, decision.finding, doubts, files)
    end: End = "kept" if decision and not decision.goes_live else "live"
    why = decision.finding if decision else "this plan is live already"
    if decision and decision.unserved:
        doubts = [*doubts, UNSERVED]
    files.release.write_bytes(release.canonical_json())
    return Verdict(run=survey.owner, model=name, end=end, why=why, doubts=tuple(doubts), release=release.number)


def _without_plan(
    store: Store, survey: Survey, name: str, why: str, doubts: Sequence[str], files: ReleaseFiles
) -> Verdict:
    """The verdict on a model without a new plan: the live plan stays, if there is one that trainers can read."""
    end: End = "no plan"
    number: int | None = None
    try:
        live = live_or_none(store, plans_of(name))
        number = live.release.number if live else 0
        end = "no plan" if live else "red"
        if live:
            there = read_live_plan(store, name, live.release.plan_digest)
            unserved = _why_it_cannot_serve(there, survey, name, files.tables)
            doubts = [*doubts, *([f"{UNSERVED}: {unserved}"] if unserved not in why else [])]
    except NewerFormat as error:  # newer trainers can read it
        doubts = [*doubts, str(error)]
    except Unreachable:
        raise
    except (InvalidInput, StoreError) as error:
        said = "" if str(error) == why else f": {error}"
        end, why = "red", f"{why}; and the live plan cannot be loaded{said}"
    return Verdict(run=survey.owner, model=name, end=end, why=why, doubts=(*doubts, why), release=number)


def _why_it_cannot_serve(live: Plan, survey: Survey, name: str, tables: Path) -> str:
    """Why the live plan does not serve what the model asks for today; empty where it does, and where that is not known."""
    with suppress(NeuroshardError):
        listed, order = read_tables(tables)[0], todays_order(survey, survey.spec(name), 0.0)
        gate = Gate(listed, nightly=True)
        if live.task.groups is None:  # no night plans groups
            return why_it_cannot_serve(live, task_of(order, listed, None), gate)
    return ""


def _draw(files: ReleaseFiles, searched: Searched, live: str, verdict: Verdict) -> None:
    """Write the page. Where it cannot be drawn, write the reason in its place: a missing picture is no failure of a plan."""
    why = searched.no_plan
    if not why:
        try:
            patiently(lambda: report(files.plan, files.page, model=searched.model, live=live))
            return
        except NeuroshardError as error:
            why = str(error)
            log(f"note: no page: {error}")
    title = f"<!doctype html><title>{escape(verdict.model)}</title>"
    files.page.write_text(f"{title}<p>{escape(verdict.text)}</p><p>{escape(why)}</p>")


def put_sizes(survey: Survey, verdict: Verdict, tables: Path, store: Store, memory_margin: float) -> str:
    """Sweep the sizes that the model of a verdict asks for, and put the page and its JSON into the store. Returns why there are
    none; empty where there are, or where none are asked for. What an earlier night put there then stays, with its date.

    Raises Unreachable where the store does not answer.
    """
    spec = survey.spec(verdict.model)
    if spec.size is None:
        return ""
    try:
        page, data = _swept(survey, spec, verdict, tables, store, memory_margin)
    except NeuroshardError as error:
        return str(error)
    except Exception as error:  # a fault of ours in an extra must not fail the step of a plan that is live
        return f"the sweep failed: {type(error).__name__}: {one_line(error)}"
    keys = size_keys(spec.name)
    try:
        for key, written in zip(keys, (page, data), strict=True):
            write_over(store, key, written)
    except (Unreachable, Unsafe):
        raise
    except StoreError as error:  # a full disk, or a key that may not be written
        return str(error)
    log(f"{spec.name}: sizes are in {store.url}/{keys[0]}")
    return ""


def _swept(
    survey: Survey, spec: ModelSpec, verdict: Verdict, tables: Path, store: Store, memory_margin: float
) -> tuple[bytes, bytes]:
    """The page and the JSON. Raises NeuroshardError where no size fits, or none was searched in time."""
    asked = spec.sizes(survey.request.batch_size, store.url)
    assert asked is not None
    try:
        read_tables(tables)
    except InvalidInput:  # `search` had none, and wrote why in their place
        raise NeuroshardError(f"its tables are not known: {verdict.why}") from None
    order, left_out = _known(asked)
    rules = spec.rules
    # the gate refuses a plan that leaves less of any device
    rules = rules.model_copy(update={"reserve_share": max(rules.reserve_share, memory_margin)})
    with TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.json")
        constraints.write_bytes(rules.canonical_json())
        options = {**order.search, "constraints": constraints, "seed": survey.request.seed}
        found = size(tables, replace(order, search=options))
        if not any(row.fits for row in found.rows):
            raise NeuroshardError(f"no size was found to fit: {'; '.join(found.notes)}")
        time = timestamp(store.clock())
        release = f", release {verdict.release}" if verdict.release else ""
        found = replace(found, notes=(f"of {spec.name}{release}, {time}", *left_out, *found.notes))
        of = {"model": spec.name, "run": survey.owner, "release": verdict.release, "time": time}
        return sizes_page(found).encode(errors="replace"), canonical_json({**found.data, **of})


def _known(order: SizeOrder) -> tuple[SizeOrder, list[str]]:
    """The order of those kinds whose cost models can be opened, and a line for each of the others. Raises NeuroshardError where
    none can."""
    kinds, left_out = list[Kind](), list[str]()
    batch_size = order.batch_size(order.devices[0])
    for kind in order.kinds:
        try:
            patiently(lambda name=kind.name: open_cost_model(name, batch_size))  # type: ignore[misc]
        except NeuroshardError as error:
            left_out.append(f"{kind.name} is left out: {error}")
        else:
            kinds.append(kind)
    if not kinds:
        raise NeuroshardError("; ".join(left_out))
    log(*(f"note: {line}" for line in left_out))
    return replace(order, kinds=tuple(kinds)), left_out
