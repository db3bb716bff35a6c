"""How a store holds a nightly run: what it found, and how each of its steps ended. Steps meet here, and who submits reads it.

_nightly/runs/<run>/
    found.json                      the Survey: models, hardware, what to measure
    <step>.json, <step>-<of>.json   an Outcome: of a model's name, of a kind's fingerprint, or of a share of it

So what a run says of itself does not depend on what Kubeflow's API lists, which is cut off in large runs.
"""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated, NamedTuple

from pydantic import Field

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NeuroshardError, StoreError
from neuroshard.core.text import one_line
from neuroshard.core.value import Value, decode_json
from neuroshard.orders.nightly import VERDICTS_FOLDER, Campaign, Survey, Verdict
from neuroshard.store.lease import expired
from neuroshard.store.measuring import FAILED, read_record, write_over
from neuroshard.store.open import open_store
from neuroshard.store.patience import open_patiently
from neuroshard.store.protocol import Store

RUNS_FOLDER, FOUND = f"{VERDICTS_FOLDER}/runs", "found.json"
KEPT_SECONDS = 30 * 86400.0  # records of older runs are deleted
Moment = Annotated[str, Field(max_length=40)]  # ISO 8601, of this machine's clock


class Outcome(Value):
    """How a step of a run ended: `error` is its line of error, empty where it ended well.

    `ended` is empty while it runs, and for ever where its pod was killed. `of` is a model, a kind of hardware, or a share of it.
    """

    step: str
    of: str = ""
    began: Moment
    ended: Moment = ""
    error: str = ""

    @property
    def failed(self) -> bool:
        """Of a run that has ended."""
        return bool(self.error) or not self.ended

    def text(self, kinds: Mapping[str, str]) -> str:
        """`search of model 'ads': tables need 40 GiB …`, `pretrain on NVIDIA H200: …`. `kinds` are names of hardware."""
        kind = kinds.get(self.of.partition("/")[0])
        on = f" on {kind}" if kind else f" of model {self.of!r}" if self.of else ""
        return f"{self.step}{on}: {self.error or f'it began at {self.began} and never ended: its pod was killed or deleted'}"


class NightRecords(NamedTuple):
    """What a run recorded: the outcomes of its steps, the first one first, and what it found; None where it found nothing."""

    outcomes: tuple[Outcome, ...]
    survey: Survey | None

    def texts(self, known: Container[str] = ()) -> tuple[str, ...]:
        """A line for each step that failed, of a run that has ended; not for one that never ended where that step is `known`."""
        kinds = {one.hardware.fingerprint: one.hardware.name for one in self.survey.campaigns} if self.survey else {}
        return tuple(one.text(kinds) for one in self.outcomes if one.error or (one.failed and one.step not in known))


def folder_of(run: str) -> str:
    return f"{RUNS_FOLDER}/{run}"


def write_survey(store: Store, survey: Survey) -> None:
    """Record what a run found, and delete the records of runs of more than KEPT_SECONDS ago. Raises StoreError."""
    write_over(store, f"{folder_of(survey.owner)}/{FOUND}", survey.canonical_json())
    with suppress(StoreError):  # they are deleted tomorrow
        for entry in store.list(f"{RUNS_FOLDER}/"):
            if expired(store, entry, KEPT_SECONDS):
                store.delete(entry.key)


def read_survey(store: Store, run: str) -> Survey:
    """What a run found. Raises StoreError and InvalidInput."""
    key = f"{folder_of(run)}/{FOUND}"
    found: Survey = Survey.parse(decode_json(store.read(key), f"{store.url}/{key}"), key)
    return found


def read_night(store: Store, run: str) -> NightRecords:
    """What a run recorded; what is damaged is left out. Raises StoreError where the records cannot be listed."""
    read = (_outcome(store, entry.key) for entry in store.list(f"{folder_of(run)}/"))
    outcomes = sorted((one for one in read if one is not None), key=lambda one: one.began)
    survey: Survey | None = None
    with suppress(StoreError, InvalidInput):
        survey = read_survey(store, run)
    return NightRecords(tuple(outcomes), survey)


def read_verdict(store: Store, survey: Survey, name: str) -> Verdict | None:
    """How a run ended for a model; None where it did not come so far, and where that cannot be read. Raises Unreachable."""
    raw = read_record(store, f"{VERDICTS_FOLDER}/{name}.json")
    with suppress(InvalidInput):
        return Verdict.parse(raw, name) if raw and raw.get("run") == survey.owner else None
    return None


def not_learned(store: Store, campaign: Campaign) -> str:
    """Why a kind of hardware was not measured or learned as it should have been; empty where it was. Raises Unreachable."""
    failed = read_record(store, f"{campaign.folder}/{FAILED}")
    return f"{campaign.hardware.name}: {failed.get('step')}: {failed.get('why')}" if failed else ""


def _outcome(store: Store, key: str) -> Outcome | None:
    if key.endswith(f"/{FOUND}"):
        return None
    raw = read_record(store, key)
    with suppress(InvalidInput):
        return None if raw is None else Outcome.parse(raw, key)
    return None


@contextmanager
def recorded(store_url: str, run: str, step: str, of: str = "", *, single_writer: bool) -> Iterator[None]:
    """Record that the block begins, and how it ends. A record that cannot be written is a note: the step's own end counts."""
    name = "-".join(filter(None, (step, of.replace("/", "-"))))
    outcome = Outcome(step=step, of=of, began=_now())

    def record() -> None:
        try:
            store = open_store(store_url, single_writer=single_writer)
            write_over(store, f"{folder_of(run)}/{name}.json", outcome.canonical_json())
        except NeuroshardError as failure:
            log(f"note: how this step ends cannot be recorded: {failure}")

    record()
    try:
        yield
    except NeuroshardError as raised:
        outcome = outcome.model_copy(update={"error": str(raised)})
        raise
    except BaseException as raised:
        outcome = outcome.model_copy(update={"error": one_line(f"{type(raised).__name__}: {raised}")})
        raise
    finally:
        outcome = outcome.model_copy(update={"ended": _now()})
        record()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def night_step(store_url: str, run: str, step: str, of: str, *, single_writer: bool) -> Iterator[Survey]:
    """A step of a run, whose end is recorded: yields what the run found."""
    with recorded(store_url, run, step, of, single_writer=single_writer):
        yield read_survey(open_patiently(store_url), run)
