"""The end of a nightly run: which models and kinds of hardware ended with less than they should have, and why.

A run that measures nothing has no such step: `check_red` then fails the deploy step itself.
"""

from contextlib import suppress

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, NeuroshardError
from neuroshard.orders.nightly import VERDICTS_FOLDER, Survey, Verdict
from neuroshard.store.measuring import FAILED, read_record
from neuroshard.store.patience import open_patiently


def run(survey: Survey, store_url: str) -> tuple[str, ...]:
    """How the nightly run ended: a line for each model with a doubt, and for each kind of hardware that was not learned.

    Raises NeuroshardError where a model has no plan at all, and StoreError.
    """
    store = open_patiently(store_url)
    lines, red = [], []
    for spec in survey.models:
        raw = read_record(store, f"{VERDICTS_FOLDER}/{spec.name}.json")
        verdict = None
        if raw and raw.get("run") == survey.owner:
            with suppress(InvalidInput):  # a record that cannot be read is as one that is not there
                verdict = Verdict.parse(raw, spec.name)
        if verdict is None:
            lines.append(
                f"{spec.name}: this run's verdict is not in the store; another nightly run may have planned it since"
            )
        elif verdict.end == "red":
            red.append(verdict.text)
        elif verdict.doubts or verdict.no_sizes or verdict.end == "no plan":
            lines.append(verdict.text)
    for campaign in survey.campaigns:
        failed = read_record(store, f"{campaign.folder}/{FAILED}")
        lines += [f"{campaign.hardware.name}: {failed.get('step')}: {failed.get('why')}"] if failed else []
    log(*(f"degraded: {line}" for line in lines))
    if red:
        raise NeuroshardError("; ".join(red))
    return tuple(lines)


def check_red(survey: Survey, verdict: Verdict) -> None:
    """Raise NeuroshardError for a model without any plan. A run that measures afterwards leaves that to `run`."""
    if verdict.end == "red" and not survey.campaigns:
        raise NeuroshardError(verdict.text)
