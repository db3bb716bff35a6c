"""The result of a check, and the results of all checks as text or JSON."""

import json
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from neuroshard.core.text import wrapped

Verdict = Literal["ok", "none", "warn", "fail"]


class Check(NamedTuple):
    """`none`: absent, and not asked for. `warn`: works in part. `fail`: asked for, and does not work. `mend` is how to fix it."""

    name: str
    verdict: Verdict
    says: str
    mend: str = ""


def check_lines(check: Check) -> list[str]:
    """A check in lines of 80 columns; how to fix it has lines of its own."""
    lines = wrapped(f"{check.verdict:<5} {check.name:<12} {check.says}", indent=19)
    return lines + (wrapped(f"{'':<19}-> {check.mend}", indent=22) if check.mend else [])


def last_line(checks: Sequence[Check]) -> str:
    """The verdict over all checks, in one line."""
    failed, warned = ([check.name for check in checks if check.verdict == verdict] for verdict in ("fail", "warn"))
    if not failed and not warned:
        return "all well"
    parts = {"failed": failed, "to look at": warned}
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in parts.items() if names)


def checks_json(checks: Iterable[Check]) -> str:
    """A list of objects with name, verdict, says and mend."""
    return json.dumps([check._asdict() for check in checks], indent=2)
