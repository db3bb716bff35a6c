"""Creates or updates KFP's own recurring run: `neuroshard schedule`. Where nothing differs, nothing is changed."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from neuroshard import __version__
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.units import format_duration
from neuroshard.core.value import shown
from neuroshard.submit.kubeflow import Kubeflow, Recurring, Run, Server
from neuroshard.submit.package import RunSettings

POLL_SECONDS = 15.0
TERMINATE_SECONDS = 120.0  # for pods to stop, and for that to be recorded
CHANGING = ("make ", "recreate ", "delete ")  # how the lines begin that say what is done; the others say what is there


class Change(NamedTuple):
    """What `neuroshard schedule` does: lines for a person, whether to make a recurring run, and which ones to delete."""

    lines: tuple[str, ...]
    make: Recurring | None = None
    delete: tuple[str, ...] = ()


class Nightly(NamedTuple):
    """A cron expression of five fields, or six with seconds first, and the settings of each run."""

    cron: str
    settings: RunSettings


def run(
    server: Server,
    name: str,
    nightly: Nightly | None,
    *,
    dry_run: bool = False,
    wait_seconds: float = 0.0,
    now: bool = False,
) -> Iterator[str]:
    """Create, update or (with None) delete the recurring run `name`; lines to print, as they come. Raises NeuroshardError.

    Deleting a recurring run deletes its run under way. So this waits for that run, for `wait_seconds`, or terminates it with
    `now`.
    """
    want = wanted(nightly) if nightly else None
    kubeflow = Kubeflow(server)
    todo = change(name, kubeflow.recurring(name), want)
    if dry_run:
        yield from (f"would {line}" if line.startswith(CHANGING) else line for line in todo.lines)
        for one in endangered(kubeflow, todo):
            yield f"would wait for run {one.run_id} ({one.name}), or end it with --now"
        return
    yield from spared(kubeflow, todo, wait_seconds, now)
    # create first: if killed in between there are two, and the next call deletes one; there is never none
    if todo.make is not None and nightly is not None:
        kubeflow.start_recurring(name, todo.make, nightly.settings)
    for key in todo.delete:
        kubeflow.delete_recurring(key)
    yield from todo.lines  # only now: until here it may be refused, and then nothing is changed


def endangered(kubeflow: Kubeflow, todo: Change) -> list[Run]:
    """Runs under way that belong to the recurring runs to delete: their Workflows would be deleted too."""
    runs = kubeflow.runs() if todo.delete else ()
    return [run for run in runs if run.recurring_run_id in todo.delete and not run.ended]


def spared(kubeflow: Kubeflow, todo: Change, wait_seconds: float, now: bool) -> Iterator[str]:
    """Wait until no run under way would be deleted, or with `now` terminate it, so that its end is recorded.

    Raises NeuroshardError, before anything is changed, where a run does not end in `wait_seconds`.
    """
    under_way = endangered(kubeflow, todo)
    if not under_way:
        return
    if now:
        yield from terminated(kubeflow, under_way)
        wait_seconds = TERMINATE_SECONDS
    elif wait_seconds:
        yield f"wait for {_runs(under_way)}"
    deadline = time.monotonic() + wait_seconds
    while under_way and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, wait_seconds))
        under_way = endangered(kubeflow, todo)
    if under_way and now:  # an orphan has nothing left to terminate
        yield f"after {format_duration(wait_seconds)} Kubeflow still records {_runs(under_way)}"
    elif under_way:
        raise NeuroshardError(
            f"{_runs(under_way)} is under way, and would be deleted with its recurring run; nothing was changed: --wait 3h waits "
            "for its end, --now terminates it"
        )


def terminated(kubeflow: Kubeflow, runs: Sequence[Run]) -> Iterator[str]:
    """Terminate each of these; skip those that cannot be terminated."""
    for run in runs:
        try:
            kubeflow.terminate(run.run_id)
            yield f"terminate run {run.run_id} ({run.name})"
        except NeuroshardError as error:
            yield f"run {run.run_id} ({run.name}) cannot be terminated: {error}"


def _runs(runs: Sequence[Run]) -> str:
    return ", ".join(f"run {run.run_id} ({run.name}, {run.state})" for run in runs)


def wanted(nightly: Nightly) -> Recurring:
    """The recurring run to have. Raises UsageError where the cron expression has neither five fields nor six."""
    fields, settings = nightly.cron.split(), nightly.settings
    if len(fields) not in (5, 6):
        raise UsageError(
            f"--cron {shown(nightly.cron)} has {len(fields)} fields; give five, as in '0 2 * * *': minute, hour, day, month, "
            "weekday"
        )
    made = f"neuroshard {__version__}, package and parameters {settings.digest()}"
    # KFP's cron counts seconds first
    cron = " ".join(fields if len(fields) == 6 else ["0", *fields])
    return Recurring(cron, made, settings.parameters, settings.service_account or "")


def change(name: str, found: Mapping[str, Recurring], want: Recurring | None) -> Change:
    """The change from the recurring runs `found`, the newest first, to `want` alone, or to none if that is None.

    KFP cannot change a recurring run: a new one is created, and the old one deleted.
    """
    if want is None:
        lines = tuple(f"delete {name} ({key})" for key in found) or (f"{name} is not there; nothing to do",)
        return Change(lines, delete=tuple(found))
    kept = next((key for key, one in found.items() if not list(_differences(one, want))), None)
    others = tuple(key for key in found if key != kept)
    if kept is not None:
        lines = (f"{name} ({kept}) is up to date", *(f"delete {name} ({key}), of the same name" for key in others))
        return Change(lines, delete=others)
    if not found:
        return Change((f"make {name}: {_line(want)}",), make=want)
    newest = next(iter(found))
    changes = tuple(f"  {line}" for line in _differences(found[newest], want))
    deleted = tuple(f"delete {name} ({key})" for key in others)
    return Change((f"recreate {name} with", *changes, *deleted), make=want, delete=others)


def _differences(one: Recurring, other: Recurring) -> Iterable[str]:
    for field, before, after in zip(Recurring._fields, one, other, strict=True):
        if field == "service_account" and not after:
            continue  # the server fills in its own; an earlier choice shows in the description
        if field != "parameters" and before != after:
            yield f"{field}: {before or '(none)'} -> {after or '(none)'}"
    for key in sorted({*one.parameters, *other.parameters}):
        before, after = (values.get(key, "(the default)") for values in (one.parameters, other.parameters))
        if before != after:
            yield f"{key}: {before} -> {after}"


def _line(want: Recurring) -> str:
    given = ", ".join(f"{key}={value}" for key, value in sorted(want.parameters.items()))
    return f"cron {want.cron}; {given or 'every parameter by default'}"
