"""The tables that a text names, as a nightly model does: a preset, a file, or an object in a store.

mlperf-dlrm-dcnv2        tables.csv        s3://bucket/folder/tables.json
"""

import tempfile
from pathlib import Path

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import Table
from neuroshard.files.disk import MAX_JSON_BYTES
from neuroshard.files.importers.presets import PRESETS, preset
from neuroshard.files.importers.tables_source import import_tables
from neuroshard.files.tables import write_tables
from neuroshard.store.open import open_store


def load_tables(source: str) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables of `source`, and notes on what was left out or renamed. Raises UsageError, InvalidInput, StoreError."""
    if source in PRESETS:
        return preset(source), ()
    if "://" in source:
        return _from_store(source)
    if not Path(source).exists():
        raise UsageError(f"{source!r} is neither a file nor a preset; the presets are {', '.join(PRESETS)}")
    imported = import_tables(Path(source))
    return imported.tables, imported.notes


def fetch_tables(source: str, out: Path) -> None:
    """Write the tables of `source` as tables.json. stderr says what was left out or renamed. Raises as `load_tables`."""
    tables, notes = load_tables(source)
    write_tables(out, tables)
    log(*(f"note: {note}" for note in notes))


def _from_store(url: str) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    folder, _, name = url.rpartition("/")
    if not name or folder.endswith(":/"):
        raise UsageError(f"{url!r} is not the URL of a file; write s3://bucket/folder/tables.json")
    data = open_store(folder).read(name, MAX_JSON_BYTES)  # as much as a file of tables may have
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, name)
        path.write_bytes(data)
        try:
            imported = import_tables(path)
        except (InvalidInput, UsageError) as error:
            raise type(error)(str(error).replace(str(path), url)) from None
        return imported.tables, tuple(note.replace(str(path), url) for note in imported.notes)
