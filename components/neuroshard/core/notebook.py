"""How values show themselves in a notebook: as a small HTML table, or as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from neuroshard.core.clean import clean
from neuroshard.core.errors import NeuroshardError
from neuroshard.core.extras import install_command
from neuroshard.core.text import counted

if TYPE_CHECKING:
    import pandas as pd

ROWS_SHOWN = 32
Columns = Mapping[str, Sequence[Any]]


def html_table(title: str, columns: Columns, notes: Iterable[str] = ()) -> str:
    """A heading, the first ROWS_SHOWN rows of the columns, and a line a note, as HTML. All text is cleaned and escaped."""
    rows = list(zip(*columns.values(), strict=True))
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows[:ROWS_SHOWN])
    left = len(rows) - ROWS_SHOWN
    said = [*([f"{counted(left, 'more row')} (to_frame has all)"] if left > 0 else []), *notes]
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<p><b>{_text(title)}</b></p>{table}{''.join(f'<p>{_text(note)}</p>' for note in said)}"


def _text(value: Any) -> str:
    return "–" if value is None else escape(clean(f"{value:,.3f}" if isinstance(value, float) else value))


def frame(columns: Columns) -> pd.DataFrame:
    """The columns as a pandas DataFrame. Raises NeuroshardError, with the command that installs pandas, where it is missing."""
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise NeuroshardError(f"to_frame needs pandas: {install_command('files')}") from None
    return pd.DataFrame({name: list(values) for name, values in columns.items()})
