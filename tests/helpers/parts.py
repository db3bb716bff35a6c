"""Parts of tables, for questions to cost models."""

from collections.abc import Iterable, Sequence

from neuroshard.core.part import Part
from neuroshard.core.table import Table


def cut_to(tables: Sequence[Table], dims: Iterable[int]) -> list[Part]:
    """All rows of each table, cut to so many columns."""
    return [Part(table, table.rows, int(dim)) for table, dim in zip(tables, dims, strict=True)]


def wholes(tables: Iterable[Table]) -> list[Part]:
    return list(map(Part.of, tables))
