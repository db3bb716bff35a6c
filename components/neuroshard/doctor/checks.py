"""What a check finds, and how all findings are told."""

import json
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from neuroshard.core.text import wrapped

Verdict = Literal["ok", "none", "warn", "fail"]


class Check(NamedTuple):
    """`none`: not there, and nobody asked for it. `warn`: works, but look at it. `fail`: what was asked for does not work."""

    name: str
    verdict: Verdict
    says: str
    mend: str = ""


def check_lines(check: Check) -> list[str]:
    """A check in lines of 80 columns; what mends it on lines of its own."""
    lines = wrapped(f"{check.verdict:<5} {check.name:<12} {check.says}", indent=19)
    return lines + (wrapped(f"{'':<19}-> {check.mend}", indent=22) if check.mend else [])


def last_line(checks: Sequence[Check]) -> str:
    """How it ended, in one line."""
    failed, warned = ([check.name for check in checks if check.verdict == verdict] for verdict in ("fail", "warn"))
    if not failed and not warned:
        return "all well"
    told = [f"failed: {', '.join(failed)}"] if failed else []
    return "; ".join([*told, *([f"to look at: {', '.join(warned)}"] if warned else [])])


def checks_json(checks: Iterable[Check]) -> str:
    """A list of objects with name, verdict, says and mend."""
    return json.dumps([check._asdict() for check in checks], indent=2)
