"""What all importers share: a table as a source states it, defaults for what it leaves out, and the result of an import."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from neuroshard.core.access import access_law
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import ELEMENT_BYTES, MAX_NAME, MOST_FEATURES, OPTIMIZER_BYTES, Table, read_back
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import parse_number
from neuroshard.core.value import check_format, decode_json, shown
from neuroshard.files.disk import read_bytes
from neuroshard.files.tables import TABLES_FORMAT, parse_table

if TYPE_CHECKING:  # traces need safetensors; to_torchrec imports this file in trainers, which may lack it
    from neuroshard.files.traces import Traces

REQUIRED = ("name", "rows", "dim", "pooling_factor")  # the last not where `features` have theirs
WIDTH = "bytes_per_element"  # key of some published table sets, of a table or of all at once
ALIASES = {"num_embeddings": "rows", "embedding_dim": "dim", "is_weighted": "weighted", WIDTH: "element_bytes"}
DATA_TYPES = ("data_type", "dtype")
_WIDTHS = {"fp32": 4, "float32": 4, "float": 4, "fp16": 2, "float16": 2, "half": 2}
FAILS_SHARDED = {  # fields of TorchRec's configs with which sharding fails in torchrec 1.8, and what they are for
    "num_embeddings_post_pruning": "pruned tables, which TorchRec has for inference",
    "use_virtual_table": "virtual tables, whose key-value stores no public FBGEMM package has (managed collisions are planned)",
}
OWN_OPERATOR = ("stash_weights", "enable_embedding_update")  # fields that put a table into another operator
APART = (
    "stash_weights or enable_embedding_update, which TorchRec runs apart; costs count neither these nor what they copy"
)
OF_CONFIGS = "need_pos"  # which every config of TorchRec has, and an EmbeddingConfig has no pooling beside it
KNOWN = Table.model_fields.keys() | {"sequence", "num_features", "feature_names", OF_CONFIGS}
KNOWN |= {*DATA_TYPES, *FAILS_SHARDED, *OWN_OPERATOR}
_NOTHING = ("", "none", "nan", "null", "<na>")  # how text says that a config has no such field
_QUOTED = re.compile(r"""'([^'\\]*)'|"([^"\\]*)\"""")
_ARRAY = re.compile(r"^array\((.*?)(,\s*dtype=[^()]{0,40})?\)$", re.DOTALL)  # as NumPy writes one
_LIST = re.compile(r"(\[\]|\(\)|[\[(]?'((\s*,\s*|\s+)')*(\s*,)?\s*[\])]?)")  # where ' is a quoted name
_NOT_PLAIN = re.compile(r"[\s;|\[\](){}<>'\"`]")
_WRAPPED = re.compile(r"[\[({<'\"`].*|.*['\"`]|[^\[({<]*[\])}>]", re.DOTALL)


@dataclass(frozen=True)
class Imported:
    """Tables with distinct names, as their file gives them back, their lookups if the source has them, and notes for the user."""

    tables: tuple[Table, ...]
    traces: Traces | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", read_back(self.tables))


class TableEntry(NamedTuple):
    """A table as a source states it: its place, for messages, and its fields under our names."""

    where: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, where: str, raw: Mapping[str, Any], of_all: Iterable[tuple[str, Any]] = ()) -> Self:
        """Null fields are left out; the table wins over `of_all`. Raises InvalidInput for an alias that says nothing, for
        words that say different things, and for what TorchRec could not shard."""
        name = raw.get("name")
        place = f"{where} ({name})" if isinstance(name, str) and name else where
        fields = dict(of_all) | _under_our_names(raw, place)
        check_sharded({name: _switch(fields[name]) for name in FAILS_SHARDED if name in fields}, place)
        first = "element_bytes"
        for word in DATA_TYPES:
            if word in fields:
                width = width_of(fields[word], place, word)
                if fields.setdefault("element_bytes", width) != width:
                    raise _unlike(place, word, fields[word], first, fields[first])
                first = word
        if isinstance(fields.get("pooling", 0), str) or hasattr(fields.get("pooling"), "name"):
            fields["pooling"] = word_of(fields["pooling"])
        for name in ("weighted", *OWN_OPERATOR):
            if name in fields:
                fields[name] = _switch(fields[name])
        pooling = fields.get("pooling", "none" if OF_CONFIGS in fields else None)
        sequence = _switch(fields.pop("sequence", pooling == "none"))
        if not isinstance(sequence, bool):
            raise InvalidInput(f"{where}: sequence must be true or false, not {shown(sequence)}")
        if "pooling" in fields and sequence != (pooling == "none"):
            raise _unlike(place, "sequence", sequence, "pooling", pooling)
        if sequence:
            fields["pooling"] = "none"
        names = _feature_names(fields.pop("feature_names", ()), place)
        own = fields.get("features") or ()
        listed: list[Any] = (
            [one.get("name") for one in own if isinstance(one, Mapping)] if isinstance(own, list | tuple) else []
        )
        if names and listed and names != listed:
            raise _unlike(place, "feature_names", names, "features", listed)
        features = fields.pop("num_features", len(names or listed) or 1)
        count = parse_number(str(features))
        if count is None or count % 1 or not 1 <= count <= MOST_FEATURES:
            raise InvalidInput(
                f"{where}: num_features must be a whole number from 1 to {MOST_FEATURES:,}, not {shown(features)}"
            )
        names = names or listed or [str(number) for number in range(1, int(count) + 1)]
        if len(names) != count:
            said = "features" if own else "feature_names"
            raise InvalidInput(f"{place}: has {len(names)} {said}, but num_features {shown(features)}; say one")
        if count > 1 and not own and "pooling_factor" in fields:
            fields["features"] = equal_features(names, fields["pooling_factor"])
        return cls(where, fields)

    @property
    def is_sequence(self) -> bool:
        return self.fields.get("pooling") == "none"


@dataclass(frozen=True)
class Defaults:
    """Defaults for what a source does not say: byte sizes by field of Table, and the access distribution, as `zipf:1.05`."""

    sizes: Mapping[str, int]
    access: str

    def table(self, fields: Mapping[str, Any], where: str) -> Table:
        """A table of these fields and the defaults. Raises InvalidInput that starts with `where`."""
        if "pooling_factor" not in fields and not fields.get("features"):
            raise InvalidInput(
                f"{where} ({fields.get('name')}): pooling_factor: is missing, which TorchRec's configs do not have: add the mean "
                'lookups of a sample to each, as in dataclasses.asdict(config) | {"pooling_factor": 20.0}, or use --from-torchrec'
            )
        said = {"reuse_bins", "access"} & fields.keys()
        # bins alone say that rows are read uniformly, and keep files as small as they were
        stated = {} if said or self.access == "uniform" else {"access": self.access}
        return parse_table({**self.sizes, **stated, **fields}, where)


def checked_tables(
    entries: Sequence[TableEntry], defaults: Defaults, where: str, notes: Sequence[str] = (), *, sequences: bool = True
) -> Imported:
    """The tables of the entries, and `notes` plus what was changed: repeated names become those of module and table where the
    source says modules, and are numbered where it does not. Without `sequences`, those are left out.

    Raises InvalidInput if an entry breaks a rule, or if no table is left.
    """
    kept = [entry for entry in entries if sequences or not entry.is_sequence]
    left_out = len(entries) - len(kept)
    if not kept:
        why = f" ({counted(left_out, 'sequence table')} left out)" if left_out else ""
        raise InvalidInput(f"{where}: the list of tables is empty{why}")
    tables = [defaults.table(entry.fields, entry.where) for entry in kept]
    tables, more = with_modules_in_repeated_names(tables)
    names, numbered = number_repeats([table.name for table in tables])
    more += numbered
    if left_out:
        more.append(f"{counted(left_out, 'sequence table')} left out: their printed cost is a fixed cost of all ranks")
    return Imported(
        tuple(table.model_copy(update={"name": name}) for table, name in zip(tables, names, strict=True)),
        notes=tuple(f"{where}: {note}" for note in (*more, *notes)),
    )


def with_modules_in_repeated_names(tables: Sequence[Table]) -> tuple[list[Table], list[str]]:
    """Tables whose names repeat, and that say their modules, by the names `module.name`; and a note if there are any."""
    times = Counter(table.name for table in tables)
    named = [
        table.model_copy(update={"name": f"{table.module}.{table.name}"})
        if times[table.name] > 1 and table.module
        else table
        for table in tables
    ]
    changed = [new.name for old, new in zip(tables, named, strict=True) if old is not new]
    return named, [f"names that two modules use got the module's path: {first_few(changed)}"] if changed else []


def equal_features(names: Sequence[str], pooling_factor: Any) -> list[dict[str, Any]]:
    """Features, each with its share of a table's lookups."""
    total = parse_number(str(pooling_factor)) or 0.0
    return [{"name": name, "pooling_factor": total / len(names)} for name in names]


def our_name(word: Any) -> Any:
    """A key or a column under our name, in whatever case; what we do not know as it is."""
    name = str(word).lower()
    return ALIASES.get(name, name if name in KNOWN else word)


def _under_our_names(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a source says, without nulls. Raises InvalidInput for two words for one field that say different things."""
    fields, words = dict[str, Any](), dict[str, str]()
    for word, value in raw.items():
        name = our_name(word)
        if value is None or (name in (*FAILS_SHARDED, *OWN_OPERATOR) and str(value).lower() in _NOTHING):
            continue
        if name in fields and fields[name] != value:
            raise _unlike(where, words[name], fields[name], word, value)
        fields[name], words[name] = value, word
    return fields


def _unlike(where: str, word: str, value: Any, other: str, others: Any) -> InvalidInput:
    return InvalidInput(f"{where}: {word} is {shown(value)}, but {other} {shown(others)}; say one")


def _feature_names(said: Any, where: str) -> list[str]:
    """Names from a list, or from text that is one: as JSON, Python or NumPy write it, or with commas. Raises InvalidInput."""
    names: list[Any] = list(said) if isinstance(said, list | tuple) else [None]
    if isinstance(said, str):
        text = _ARRAY.sub(r"\1", said.strip())
        if _LIST.fullmatch(_QUOTED.sub("'", text)):
            names = [one or other for one, other in _QUOTED.findall(text)]
        else:
            names = [None if _NOT_PLAIN.search(name.strip()) else name.strip() for name in text.split(",")]
    if all(isinstance(name, str) and not _WRAPPED.fullmatch(name) for name in names):
        return names
    raise InvalidInput(
        f'{where}: feature_names must be a list, as in ["viewed", "bought"], without more brackets or quotes, not {shown(said)}'
    )


def plain(value: Any) -> Any:
    """A value without decimals and bytes, and without NumPy's arrays and numbers, in lists and structs too."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    value = value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value
    value = value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
    value = float(value) if isinstance(value, Decimal) else value
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


def word_of(value: Any) -> str:
    """The lower-case name of an enum's member, a type, or what either is written as: `fp16` of DataType.FP16."""
    text = str(getattr(value, "name", value)).strip("<>'")
    return text.partition(":")[0].rpartition(".")[2].lower()


def width_of(data_type: Any, where: str, word: str = "data_type") -> int:
    """Bytes of an element of this type. Raises InvalidInput for one that plans do not have."""
    found = _WIDTHS.get(word_of(data_type))
    if found is None:
        known = word_of(data_type).upper() or shown(data_type)
        raise InvalidInput(f"{where}: {word} {shown(known)[1:-1]} is neither FP32 nor FP16")
    return found


def check_sharded(fields: Mapping[str, Any], where: str) -> None:
    """Raise InvalidInput for a field of a config with which TorchRec's sharding fails."""
    for name, what in FAILS_SHARDED.items():
        value = fields.get(name)
        if value is not None and value is not False:
            raise InvalidInput(
                f"{where} has {name}={shown(value)}, for {what}, and fails in TorchRec's sharding; leave it out"
            )


def notes_of(entries: Sequence[TableEntry], unknown: Collection[str]) -> tuple[str, ...]:
    """Notes on what was ignored, and on what a table says that is not counted."""
    notes = [f"unknown keys were ignored: {', '.join(sorted(map(str, unknown)))}"] if unknown else []
    apart = [str(e.fields.get("name")) for e in entries if any(e.fields.get(name) is True for name in OWN_OPERATOR)]
    unpooled = [str(e.fields.get("name")) for e in entries if OF_CONFIGS in e.fields and e.is_sequence]
    notes += [f"{first_few(apart)}: {APART}"] if apart else []
    notes += [f"{first_few(unpooled)}: no pooling, as of an EmbeddingConfig, so read as sequences"] if unpooled else []
    return tuple(notes)


def _switch(value: Any) -> Any:
    """True or false where a source says it as text or as 1 or 0, as CSV files and databases do; else the value as it is."""
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower(), value)


def table_defaults(*, access: str = "uniform", dtype: str = "fp32", optimizer: str = "rowwise_adagrad") -> Defaults:
    """Defaults from option values. Raises UsageError that lists the known ones."""
    for what, value, known in (("dtype", dtype, ELEMENT_BYTES), ("optimizer", optimizer, OPTIMIZER_BYTES)):
        if value not in known:
            raise UsageError(f"unknown {what} {value!r}; known: {', '.join(known)}")
    per_row, per_element = OPTIMIZER_BYTES[optimizer]
    sizes = {
        "element_bytes": ELEMENT_BYTES[dtype],
        "optimizer_bytes_per_row": per_row,
        "optimizer_bytes_per_element": per_element,
    }
    access_law(access)
    return Defaults(sizes, access)


def number_repeats(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names made distinct (the second `x` becomes `x_2`, or the next free number), and a note if any changed.

    A name that would be too long is shortened at its end.
    """
    taken = set(names)
    seen: set[str] = set()
    numbers: dict[str, int] = {}  # the next number of each name: names may repeat a million times
    distinct: list[str] = []
    renamed: list[str] = []
    for name in names:
        new, number = name, numbers.get(name, 2)
        while new in seen or (new != name and new in taken):
            end = f"_{number}"
            new, number = name[: MAX_NAME - len(end)] + end, number + 1
        numbers[name] = number
        if new != name:
            renamed.append(f"{name!r} became {new!r}")
        seen.add(new)
        distinct.append(new)
    more = f" and {len(renamed) - 1} more" if len(renamed) > 1 else ""
    return distinct, [f"repeated names were numbered: {renamed[0]}{more}"] if renamed else []


def read_json(path: Path) -> tuple[list[TableEntry], set[str]]:
    """The objects of `{"tables": [...]}`, or of a bare list, and the unknown keys. Raises InvalidInput."""
    data = decode_json(read_bytes(path), str(path))
    tables, unknown, of_all = data, set[str](), list[tuple[str, Any]]()
    if not isinstance(data, list):
        tables = check_format(data, TABLES_FORMAT, str(path)).get("tables")
        of_all = [(ALIASES[WIDTH], data[key]) for key in data if key.lower() == WIDTH]
        unknown = {key for key in data.keys() - {"tables", "format_version"} if key.lower() != WIDTH}
    if not isinstance(tables, list):
        raise InvalidInput(f'{path}: expected {{"tables": [...]}} or a list, found tables = {shown(tables)}')
    for index, table in enumerate(tables):
        if not isinstance(table, dict):
            raise InvalidInput(
                f"{path}: tables[{index}]: expected an object with {', '.join(REQUIRED)}, not {shown(table)}"
            )
    entries = [TableEntry.of(f"{path}: tables[{index}]", table, of_all) for index, table in enumerate(tables)]
    return entries, unknown | {key for entry in entries for key in entry.fields} - KNOWN


def csv_rows(path: Path) -> tuple[list[str], list[tuple[str, dict[str, str]]]]:
    """The columns of a CSV file; and of each line below, its place and its cells by column, but for empty ones. Raises
    InvalidInput."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: not UTF-8 text (byte {error.start}); if it is CSV, save it as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    columns, rows = list[str](), list[tuple[str, dict[str, str]]]()
    try:
        for line in reader:
            where, cells = f"{path}: line {reader.line_num}", [cell.strip() for cell in line]
            if columns and any(cells) and len(cells) != len(columns):
                raise InvalidInput(f"{where}: has {counted(len(cells), 'cell')} for {counted(len(columns), 'column')}")
            if columns and any(cells):
                rows.append((where, {name: cell for name, cell in zip(columns, cells, strict=True) if cell}))
            columns = columns or (cells if any(cells) else [])
    except csv.Error as error:
        raise InvalidInput(f"{path}: line {reader.line_num}: not CSV: {error}") from None
    return columns, rows


def check_once(columns: Iterable[str], path: Path | str) -> None:
    """Raise InvalidInput if a column of a file occurs twice."""
    for name, times in Counter(columns).items():
        if times > 1:
            raise InvalidInput(f"{path}: column {name!r} occurs {times} times")


def read_number(column: str, cell: str, where: str) -> float:
    """A cell that is a number. Raises InvalidInput."""
    number = parse_number(cell)
    if number is None:
        raise InvalidInput(f"{where}: column {column!r} is {shown(cell)}, not a number")
    return number
