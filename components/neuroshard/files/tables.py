"""tables.json: the list of tables that users write by hand. `{"tables": [{"name", "rows", "dim", "pooling_factor", …}]}`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import Table, check_distinct, read_back
from neuroshard.core.value import canonical_json, check_format, decode_json, shown
from neuroshard.files.disk import read_bytes, write_bytes

TABLES_FORMAT = 1
# Keys that say how a table is read in words of other programs, and what they say where they change nothing
IMPORTS_ONLY: dict[str, tuple[object, ...]] = {
    "num_embeddings": (),
    "embedding_dim": (),
    "sequence": (False, 0),
    "num_features": (1,),
    "feature_names": ([],),
    "is_weighted": (False, 0),
    "data_type": ("FP32", "fp32"),
    "dtype": ("fp32", "float32"),
    "bytes_per_element": (4,),
    "num_embeddings_post_pruning": (),
    "use_virtual_table": (False, 0),
}


def read_tables(path: Path) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables of a tables.json, and notes on what was ignored. Raises InvalidInput in one line."""
    where = str(path)
    raw = check_format(decode_json(read_bytes(path), where), TABLES_FORMAT, where)
    if raw.keys() >= {"task", "shards"}:
        raise InvalidInput(f"{where}: is a plan, not tables; give the tables.json that it was searched for")
    if not isinstance(raw.get("tables"), list):
        raise InvalidInput(f'{where}: expected {{"tables": [...]}}, found tables = {shown(raw.get("tables"))}')
    for index, entry in enumerate(raw["tables"]):
        _refuse_imports(entry, f"{where}: tables[{index}]", where)
    tables = tuple(parse_table(entry, f"{where}: tables[{index}]") for index, entry in enumerate(raw["tables"]))
    try:
        check_distinct(tables)
    except ValueError as error:
        raise InvalidInput(f"{where}: {error}") from None
    unknown = sorted({key for entry in raw["tables"] for key in entry} - Table.model_fields.keys())
    unknown_top = sorted(raw.keys() - {"tables", "format_version"})
    notes = [f"{where}: ignored unknown keys of tables: {', '.join(unknown)}"] if unknown else []
    notes += [f"{where}: ignored unknown keys: {', '.join(unknown_top)}"] if unknown_top else []
    return tables, tuple(notes)


def parse_table(entry: Any, where: str) -> Table:
    """One entry of the list as a Table. Raises InvalidInput that says which table by place and name."""
    if not isinstance(entry, dict):
        raise InvalidInput(f"{where}: expected an object with name, rows, dim, pooling_factor, found {shown(entry)}")
    name = entry.get("name")
    return Table.parse(entry, f"{where} ({name})" if isinstance(name, str) and name else where)


def _refuse_imports(entry: Any, where: str, path: str) -> None:
    """Raise InvalidInput for a table that says what only an import understands: without that it is another table."""
    if not isinstance(entry, Mapping):
        return
    known = Table.model_fields.keys() | IMPORTS_ONLY.keys()
    cases = {key: () for key in entry if key not in known and key.lower() in known}
    for key, usual in {**IMPORTS_ONLY, **cases}.items():
        one_feature = key == "feature_names" and isinstance(entry.get(key), list) and len(entry[key]) == 1
        if entry.get(key) is not None and entry[key] not in usual and not one_feature:
            raise InvalidInput(
                f"{where}: {key} = {shown(entry[key])} is read by an import only: neuroshard tables --from {path} -o tables.json"
            )


def write_tables(path: Path, tables: tuple[Table, ...]) -> None:
    """Write tables.json, whole or not at all. Raises InvalidInput for tables that it would not give back."""
    data = {"format_version": TABLES_FORMAT, "tables": [table.model_dump(mode="json") for table in read_back(tables)]}
    write_bytes(path, canonical_json(data))
