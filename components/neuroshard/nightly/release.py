"""A model's plan of tonight -> what is live, a page that shows it, and a word in the store on how the model's night ended.

live       the plan of tonight went live
kept       it is valid, and the live one stays
no plan    none could be had, or it broke a rule: what was live stays
red        none could be had, and nothing is live
"""

from pathlib import Path
from typing import Literal

from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, InvalidInput, NeuroshardError, NewerFormat, NotFound, Refused
from neuroshard.core.nightly import NIGHTS_FOLDER, Searched, Survey
from neuroshard.core.value import Value
from neuroshard.deploy.golive import mend_pointer, take_away_damaged
from neuroshard.deploy.run import Outcome
from neuroshard.deploy.run import run as deploy
from neuroshard.files.plan import read_plan
from neuroshard.report.run import run as report
from neuroshard.store.folders import patiently
from neuroshard.store.measuring import FAILED, read_record, write_record
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of
from neuroshard.store.releases import read_plan as load_live
from neuroshard.store.track import live_or_none

End = Literal["live", "kept", "no plan", "red"]


class Verdict(Value):
    """How the night `night` ended for a model, and why. `doubts` say why it is degraded, if it is; `release` is live now."""

    night: str
    model: str
    end: End
    why: str
    doubts: tuple[str, ...] = ()
    release: int = 0

    @property
    def text(self) -> str:
        """In one line, what is wrong first."""
        said = {"live": "has today's plan", "kept": "keeps its live plan"}.get(self.end, "has no new plan")
        live = f"release {self.release} is live" if self.release else "nothing is live"
        degraded = f"degraded: {'; '.join(self.doubts)}; " if self.doubts else ""
        return f"{self.model} {said} ({live}): {degraded}{self.why}"


def run(
    night: Survey,
    name: str,
    searched: Searched,
    plan: Path,
    tables: Path,
    store_url: str,
    release: Path,
    page: Path,
    *,
    min_gain: float | None,
    memory_margin: float,
    single_writer: bool = False,
) -> Verdict:
    """Deploy the plan, draw its page, and write down how the model's night ended. Raises StoreError."""
    store = open_store(store_url, single_writer=single_writer)
    mended = patiently(lambda: mend_pointer(store, plans_of(name)))
    doubts = [*night.notes, *([mended] if mended else [])]
    if searched.lost:
        verdict = _without_plan(store, night, name, searched.lost, doubts)
    else:
        doubts += [searched.instead] if searched.instead else _doubts(plan)

        damaged = patiently(lambda: take_away_damaged(store, plans_of(name), read_plan(plan).digest()))
        doubts += [damaged] if damaged else []

        def attempt() -> Outcome:
            return deploy(
                plan,
                store_url,
                name,
                tables=tables,
                cost_model=searched.model,
                min_gain=min_gain,
                max_error=night.max_error,
                memory_margin=memory_margin,
                nightly=True,
                single_writer=single_writer,
            )

        try:
            try:
                outcome = patiently(attempt)
            except Conflict as error:  # another night was faster: the gate decides anew, against what it put live
                log(f"note: {error}")
                outcome = patiently(attempt)
            decision, now = outcome.decision, outcome.release
            end: End = "kept" if decision and not decision.goes_live else "live"
            why = decision.finding if decision else "this plan is live already"
            release.write_bytes(now.canonical_json())
            verdict = Verdict(night=night.owner, model=name, end=end, why=why, doubts=tuple(doubts), release=now.number)
        except (Refused, InvalidInput, Conflict) as error:
            verdict = _without_plan(store, night, name, str(error), doubts)
    _show(plan, page, searched, store_url, name, verdict)
    if not release.exists():
        release.write_bytes(verdict.canonical_json())
    write_record(store, f"{NIGHTS_FOLDER}/{name}.json", verdict.model_dump(mode="json"))
    log(*verdict.text.splitlines())
    return verdict


def conclude(night: Survey, store_url: str) -> tuple[str, ...]:
    """How a night ended, a line a model that is not simply well and a line a kind that was not learned.

    Raises NeuroshardError where a model got no plan though nothing is live for it, StoreError.
    """
    store = open_store(store_url)
    lines, red = [], []
    for order in night.orders:
        raw = read_record(store, f"{NIGHTS_FOLDER}/{order.name}.json")
        verdict = Verdict.parse(raw, order.name) if raw and raw.get("night") == night.owner else None
        if verdict is None:
            lines.append(f"{order.name}: another night has planned it since")
        elif verdict.end == "red":
            red.append(verdict.text)
        elif verdict.doubts or verdict.end == "no plan":
            lines.append(verdict.text)
    for work in night.works:
        failed = read_record(store, f"{work.folder}/{FAILED}")
        lines += [f"{work.hardware.name}: {failed.get('step')}: {failed.get('why')}"] if failed else []
    log(*(f"degraded: {line}" for line in lines))
    if red:
        raise NeuroshardError("; ".join(red))
    return tuple(lines)


def check_red(night: Survey, verdict: Verdict) -> None:
    """Raise NeuroshardError for a model without any plan, unless the night goes on: then `conclude` does."""
    if verdict.end == "red" and not night.works:
        raise NeuroshardError(verdict.text)


def _doubts(plan: Path) -> list[str]:
    instead = read_plan(plan).provenance.instead
    return [instead] if instead else []


def _without_plan(store: Store, night: Survey, name: str, why: str, doubts: list[str]) -> Verdict:
    """The live plan stays, if there is one that trainers can load."""
    end: End = "no plan"
    number = 0
    try:
        live = patiently(lambda: live_or_none(store, plans_of(name)))
        number = live.release.number if live else 0
        end = "no plan" if live else "red"
        if live:
            patiently(lambda: load_live(store, name, live.release.plan_digest))
    except NewerFormat as error:  # which newer trainers follow
        doubts = [*doubts, str(error)]
    except (InvalidInput, NotFound) as error:
        end, why = "red", f"{why}; and the live plan cannot be loaded: {error}"
    return Verdict(night=night.owner, model=name, end=end, why=why, doubts=(*doubts, why), release=number)


def _show(plan: Path, page: Path, searched: Searched, store_url: str, name: str, verdict: Verdict) -> None:
    """The page, or in its place why there is none: a picture that fails stops no plan."""
    why = searched.lost
    if not why:
        try:
            patiently(lambda: report(plan, page, model=searched.model, live=f"{store_url}#{name}"))
            return
        except NeuroshardError as error:
            why = str(error)
            log(f"note: no page: {error}")
    from html import escape

    page.write_text(f"<!doctype html><title>{escape(name)}</title><p>{escape(verdict.text)}</p><p>{escape(why)}</p>")
