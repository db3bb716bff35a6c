"""KFP's own recurring run, made what it shall be: `neuroshard schedule`. Where it already is, nothing is changed."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from neuroshard import __version__
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.units import format_duration
from neuroshard.core.value import shown
from neuroshard.submit.kubeflow import Kubeflow, Recurring, Run
from neuroshard.submit.package import DEADLINE_SECONDS, digest

POLL_SECONDS = 15.0
TERMINATE_SECONDS = 120.0  # for pods to stop, and for that to be recorded


class Change(NamedTuple):
    """What `neuroshard schedule` does: lines for a person, whether to make a recurring run, and which ones to delete."""

    lines: tuple[str, ...]
    make: Recurring | None = None
    delete: tuple[str, ...] = ()


def run(
    endpoint: str,
    name: str,
    want: Recurring | None,
    experiment: str = "neuroshard",
    namespace: str | None = None,
    *,
    dry_run: bool = False,
    deadline_seconds: float = DEADLINE_SECONDS,
    wait_seconds: float = 0.0,
    now: bool = False,
) -> Iterator[str]:
    """Make what is called `name` into `want`, or only say how. Raises NeuroshardError.

    Deleting a recurring run deletes its run under way. So that is waited for, for `wait_seconds`, or terminated with `now`.
    """
    kubeflow = Kubeflow(endpoint, experiment, namespace, deadline_seconds)
    todo = change(name, kubeflow.recurring(name), want)
    yield from (f"would {line}" if dry_run and line.startswith(("make", "delete")) else line for line in todo.lines)
    if dry_run:
        yield from (
            f"would wait for run {one.run_id} ({one.name}), or end it with --now" for one in endangered(kubeflow, todo)
        )
        return
    yield from spared(kubeflow, todo, wait_seconds, now)
    apply(kubeflow, name, todo)


def endangered(kubeflow: Kubeflow, todo: Change) -> list[Run]:
    """The runs under way of the recurring runs that are to be deleted: their Workflows are deleted with those."""
    runs = kubeflow.runs() if todo.delete else ()
    return [run for run in runs if run.recurring_run_id in todo.delete and not run.ended]


def spared(kubeflow: Kubeflow, todo: Change, wait_seconds: float, now: bool) -> Iterator[str]:
    """Until no run under way would be deleted: wait, or with `now` terminate it, so that its end is recorded.

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
    if under_way and now:  # of an orphan nothing is left to terminate
        yield f"after {format_duration(wait_seconds)} Kubeflow still records {_runs(under_way)}"
    elif under_way:
        raise NeuroshardError(
            f"{_runs(under_way)} is under way, and would be deleted with its recurring run; nothing was changed: --wait 3h waits "
            "for its end, --now terminates it"
        )


def terminated(kubeflow: Kubeflow, runs: Sequence[Run]) -> Iterator[str]:
    """Terminate each of these; one that cannot be is left as it is."""
    for run in runs:
        try:
            kubeflow.terminate(run.run_id)
            yield f"terminate run {run.run_id} ({run.name})"
        except NeuroshardError as error:
            yield f"run {run.run_id} ({run.name}) cannot be terminated: {error}"


def _runs(runs: Sequence[Run]) -> str:
    return ", ".join(f"run {run.run_id} ({run.name}, {run.state})" for run in runs)


def wanted(
    cron: str,
    parameters: Mapping[str, Any],
    service_account: str | None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Recurring:
    """The recurring run that these ask for. Raises UsageError where `cron` has neither five fields nor six."""
    fields = cron.split()
    if len(fields) not in (5, 6):
        raise UsageError(
            f"--cron {shown(cron)} has {len(fields)} fields; give five, as in '0 2 * * *': minute, hour, day, month, weekday"
        )
    made = f"neuroshard {__version__}, package and parameters {digest(parameters, service_account, deadline_seconds)}"
    # KFP's cron counts seconds first
    return Recurring(" ".join(fields if len(fields) == 6 else ["0", *fields]), made, parameters, service_account or "")


def change(name: str, found: Mapping[str, Recurring], want: Recurring | None) -> Change:
    """What makes `found`, the newest first, into `want` alone; None for no recurring run at all.

    KFP cannot change a recurring run: another is made, and the one before deleted.
    """
    if want is None:
        lines = tuple(f"delete {name} ({key})" for key in found) or (f"{name} is not there; nothing to do",)
        return Change(lines, delete=tuple(found))
    kept = next((key for key, one in found.items() if not list(_differences(one, want))), None)
    others = tuple(key for key in found if key != kept)
    if kept is not None:
        lines = (f"{name} ({kept}) is as it shall be", *(f"delete {name} ({key}), of the same name" for key in others))
        return Change(lines, delete=others)
    if not found:
        return Change((f"make {name}: {_line(want)}",), make=want)
    newest = next(iter(found))
    changes = tuple(f"  {line}" for line in _differences(found[newest], want))
    deleted = tuple(f"delete {name} ({key})" for key in others)
    return Change((f"make {name} anew, with", *changes, *deleted), make=want, delete=others)


def apply(kubeflow: Kubeflow, name: str, todo: Change) -> None:
    """Make first, then delete: killed in between there are two, and the next call deletes one; never none."""
    if todo.make is not None:
        kubeflow.start_recurring(name, todo.make)
    for key in todo.delete:
        kubeflow.delete_recurring(key)


def _differences(one: Recurring, other: Recurring) -> Iterable[str]:
    for field, before, after in zip(Recurring._fields, one, other, strict=True):
        if field == "service_account" and not after:
            continue  # the server puts its own in; that another was asked for before is in the description
        if field != "parameters" and before != after:
            yield f"{field}: {before or '(none)'} -> {after or '(none)'}"
    for key in sorted({*one.parameters, *other.parameters}):
        before, after = (values.get(key, "(the default)") for values in (one.parameters, other.parameters))
        if before != after:
            yield f"{key}: {before} -> {after}"


def _line(want: Recurring) -> str:
    given = ", ".join(f"{key}={value}" for key, value in sorted(want.parameters.items()))
    return f"cron {want.cron}; {given or 'every parameter by default'}"
