"""KFP's own recurring run, made what it shall be: `neuroshard schedule`. Where it already is, nothing is changed."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from neuroshard import __version__
from neuroshard.core.errors import UsageError
from neuroshard.core.value import shown
from neuroshard.submit.kubeflow import Kubeflow, Recurring
from neuroshard.submit.package import digest


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
) -> Iterator[str]:
    """Make what is called `name` into `want`, or only say how. Raises NeuroshardError."""
    kubeflow = Kubeflow(endpoint, experiment, namespace)
    todo = change(name, kubeflow.recurring(name), want)
    yield from (f"would {line}" if dry_run and line.startswith(("make", "delete")) else line for line in todo.lines)
    if not dry_run:
        apply(kubeflow, name, todo)


def wanted(cron: str, parameters: Mapping[str, Any], service_account: str | None) -> Recurring:
    """The recurring run that these ask for. Raises UsageError where `cron` has neither five fields nor six."""
    fields = cron.split()
    if len(fields) not in (5, 6):
        raise UsageError(
            f"--cron {shown(cron)} has {len(fields)} fields; give five, as in '0 2 * * *': minute, hour, day, month, weekday"
        )
    made = f"neuroshard {__version__}, package and parameters {digest(parameters, service_account)}"
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
