"""Numbers as the page carries them: columns of plain floats, short enough for thousands of tables."""

from collections.abc import Iterable
from typing import Any

from neuroshard.core.plan import Plan
from neuroshard.core.text import counted

Columns = dict[str, list[Any]]
DIGITS = 7  # more than any chart or cell shows


def short(values: Iterable[float]) -> list[float]:
    """Floats to DIGITS digits."""
    return [float(f"{value:.{DIGITS}g}") for value in values]


def cut_tables(plan: Plan) -> str:
    """`26 tables in 31 shards (5 cuts)`."""
    tables, shards = len(plan.task.tables), len(plan.shards)
    return f"{counted(tables, 'table')} in {counted(shards, 'shard')} ({counted(shards - tables, 'cut')})"


def percent(share: float) -> str:
    """`0.0312` -> `3.1 %`."""
    return f"{share:.1%}".replace("%", " %")


def against(cost_ms: float, other_ms: float) -> str:
    """How a cost stands beside another one: `12.3 % lower`."""
    change = cost_ms / other_ms - 1 if other_ms else 0.0
    if abs(change) < 0.0005:
        return "equal"
    return f"{percent(abs(change))} {'lower' if change < 0 else 'higher'}"
