"""The sources of tables (a preset, a file, a TorchRec model, its planner's printout) as one kind of value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import ELEMENT_BYTES, Table
from neuroshard.core.value import shown
from neuroshard.files.importers.check_tables import Finding, check_entries
from neuroshard.files.importers.import_tables import frame_entries, has_lookups, import_tables, read_entries
from neuroshard.files.importers.imported import (
    KNOWN,
    Defaults,
    Imported,
    TableEntry,
    checked_tables,
    notes_of,
    plain,
    table_defaults,
)
from neuroshard.files.importers.presets import preset
from neuroshard.files.importers.sharding_stats import Printed, read_stats, stats_entries
from neuroshard.files.traces import Traces

if TYPE_CHECKING:  # it takes seconds
    import pandas as pd
    from torch import nn


class Asked(NamedTuple):
    """What holds where a source does not say: access, element type (None: fp32, or as is printed), optimizer, columns of tables
    of a .pt; and lookups a sample of a model's tables or features."""

    access: str = "uniform"
    dtype: str | None = None
    optimizer: str = "rowwise_adagrad"
    dim: int = 128
    pooling_factors: Mapping[str, float] = MappingProxyType({})
    default_pooling_factor: float | None = None

    @property
    def as_text(self) -> dict[str, str]:
        return {"access": self.access, "dtype": self.dtype or "fp32", "optimizer": self.optimizer}

    @property
    def defaults(self) -> Defaults:
        """Raises UsageError."""
        return table_defaults(**self.as_text)


@dataclass(frozen=True)
class Source:
    """Tables as a source states them, not yet checked, and what else it holds: lookups, or a printed plan."""

    where: str
    entries: tuple[TableEntry, ...]
    defaults: Defaults
    notes: tuple[str, ...] = ()
    traces: Traces | None = None
    printed: Printed | None = None

    def tables(self, *, sequences: bool = True) -> Imported:
        """The tables, checked, with or without `sequences`. Repeated names are numbered. Raises InvalidInput."""
        return checked_tables(self.entries, self.defaults, self.where, self.notes, sequences=sequences)

    def findings(self) -> tuple[Finding, ...]:
        """What is odd about each table, faults included."""
        return check_entries(self.entries, self.defaults)


def from_preset(name: str, asked: Asked) -> Source:
    """A built-in table set. Raises UsageError."""
    return Source(name, _entries(name, preset(name, **asked.as_text)), asked.defaults)


def from_file(path: Path, asked: Asked) -> Source:
    """Any file that files/importers/import_tables.py reads; only a .pt has lookups. Raises UsageError and InvalidInput."""
    defaults = asked.defaults
    if has_lookups(path):
        imported = import_tables(path, dim=asked.dim, **asked.as_text)
        notes = tuple(note.removeprefix(f"{path}: ") for note in imported.notes)  # `tables` adds the path again
        return Source(str(path), _entries(str(path), imported.tables), defaults, notes, imported.traces)
    entries, notes = read_entries(path)
    return Source(str(path), tuple(entries), defaults, notes)


def from_list(items: Sequence[object], asked: Asked) -> Source:
    """Tables, or mappings with fields of Table, in Python. Raises UsageError and InvalidInput."""
    where = "the list of tables"
    entries = []
    for index, item in enumerate(items):
        place = f"tables[{index}]"
        if isinstance(item, Table):
            entries.append(TableEntry(place, item.model_dump()))
        elif isinstance(item, Mapping):
            entries.append(TableEntry.of(place, plain(item)))
        else:
            raise InvalidInput(f"{place}: is {shown(item)}, neither a Table nor a mapping with its fields")
    unknown = {key for entry in entries for key in entry.fields} - KNOWN
    return Source(where, tuple(entries), asked.defaults, notes_of(entries, unknown))


def from_frame(frame: pd.DataFrame, asked: Asked) -> Source:
    """A pandas DataFrame with a row a table, and the columns of a file. Raises UsageError and InvalidInput."""
    where = "the DataFrame"
    entries, unknown = frame_entries(list(map(str, frame.columns)), frame.to_numpy(object).tolist(), where)
    return Source(where, tuple(entries), asked.defaults, notes_of(entries, unknown))


def from_torchrec(spec: str | nn.Module, asked: Asked) -> Source:
    """The model that `spec` makes, or is (files/importers/torchrec_model.py). Raises UsageError and InvalidInput."""
    from neuroshard.files.importers.torchrec_model import entries_of, torchrec_entries  # imports torch

    lookups = asked.pooling_factors, asked.default_pooling_factor
    if isinstance(spec, str):
        where = spec
        entries, notes = torchrec_entries(spec, *lookups)
    else:
        where = type(spec).__name__
        entries, notes = entries_of(spec, where, *lookups)
    return Source(where, tuple(entries), asked._replace(dtype=None).defaults, tuple(notes))


def from_stats(path: Path, asked: Asked) -> Source:
    """What TorchRec's planner printed; without a dtype element types are inferred. Raises UsageError and InvalidInput."""
    defaults = asked.defaults
    printed = read_stats(path)
    entries, notes = stats_entries(printed, None if asked.dtype is None else ELEMENT_BYTES[asked.dtype])
    return Source(str(path), tuple(entries), defaults, tuple(notes), printed=printed)


def _entries(where: str, tables: Iterable[Table]) -> tuple[TableEntry, ...]:
    return tuple(TableEntry(f"{where}: {table.name}", table.model_dump()) for table in tables)
