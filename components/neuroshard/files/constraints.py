"""constraints.json and command-line flags -> the constraints of a task. Patterns name tables, as in a shell.

{"reserve": "2GiB", "min_dim": 16, "tables": [{"match": "user_*", "devices": [0, 1], "split": false},
 {"match": "item_*", "row_wise": true}, {"match": "ads", "tier": "cached", "cached_rows": 100000}],
 "together": [["user_id", "user_history"]]}
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError, field_serializer, field_validator, model_validator

from neuroshard.core.constraints import Constraints, DeviceNumber, LeastDim, MostShards, TableRule
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.parts import RowsByAccess, part_names
from neuroshard.core.sharding import ShardingTypeName
from neuroshard.core.table import DIM_STEP, MAX_ROWS, Table
from neuroshard.core.text import counted
from neuroshard.core.tiers import Tier
from neuroshard.core.units import FEWEST_BARE, parse_bytes, parse_percent
from neuroshard.core.value import Switch, Value, Whole, check_format, decode_json, explain, shown
from neuroshard.files.disk import read_bytes

CONSTRAINTS_FORMAT = 1
_HOST = "host:"  # of a pin
Pattern = Annotated[str, Field(min_length=1)]


class MatchedRule(Value):
    """Rules for all tables whose names match. `split: false` allows one shard; `row_wise: true` lets a search split them row-wise
    over all devices or in domains; `data_parallel: true` copies them to every device. `tier` says where they lie, with
    `cached_rows` of each if that is behind a cache. `rows_by_access` holds each, a sequence, in two parts,
    `<table>/hot` and `<table>/cold`, which rules of their own may match.
    """

    match: Pattern
    devices: tuple[DeviceNumber, ...] | None = None
    split: Switch = True
    min_dim: LeastDim | None = None
    max_shards: MostShards | None = None
    row_wise: Switch | None = None
    data_parallel: Switch | None = None
    tier: Tier | None = None
    cached_rows: Annotated[Whole, Field(ge=1, le=MAX_ROWS)] | None = None
    rows_by_access: RowsByAccess | None = None

    @model_validator(mode="after")
    def _whole_is_one_shard(self) -> Self:
        if not self.split and (self.max_shards or 1) > 1:
            raise ValueError(
                f"{self.match!r} is never to be split, and may have {self.max_shards} shards; say one of them"
            )
        if not self.split and self.row_wise:
            raise ValueError(f"{self.match!r} is never to be split, and may be split row-wise; say one of them")
        return self


class ConstraintsFile(Value):
    """constraints.json, with patterns in place of tables. A `reserve` of 15% becomes the `reserve_share` 0.15. Where neither
    `row_wise` nor a rule says which tables may be split row-wise, search tries all."""

    format_version: Literal[1] = 1
    reserve: int = 0
    reserve_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_dim: LeastDim = DIM_STEP
    max_shards: MostShards | None = None
    row_wise: Switch | None = None
    sharding_types: tuple[ShardingTypeName, ...] | None = None
    tables: tuple[MatchedRule, ...] = ()
    together: tuple[tuple[Pattern, ...], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _reserve_in_percent(cls, data: Any) -> Any:
        reserve = data.get("reserve") if isinstance(data, dict) else None
        try:
            share = parse_percent(reserve) if isinstance(reserve, str) else None
        except UsageError as error:
            raise ValueError(f"reserve: {error}") from None
        return data if share is None else {**data, "reserve": 0, "reserve_share": share}

    @property
    def says_nothing_of_rows(self) -> bool:
        """Whether it neither allows tables to be split row-wise nor forbids it for all."""
        return self.row_wise is None and not any(rule.row_wise for rule in self.tables)

    @field_validator("reserve", mode="before")
    @classmethod
    def _reserve(cls, reserve: Any) -> Any:
        number = isinstance(reserve, int | float) and not isinstance(reserve, bool)
        if not isinstance(reserve, str) and not (number and reserve >= 0 and reserve % 1 == 0):
            raise ValueError(
                f"must be bytes or a text with a unit, as in 2GiB, or a percentage, as in 15%, not {shown(reserve)}"
            )
        try:
            return parse_bytes(reserve) if isinstance(reserve, str) else parse_bytes(str(int(reserve)), least=0)
        except UsageError as error:
            raise ValueError(str(error)) from None

    @field_serializer("reserve")
    def _reserve_that_is_read(self, reserve: int) -> int | str:
        return f"{reserve}B" if 0 < reserve < FEWEST_BARE else reserve


def read_constraints(path: Path) -> tuple[ConstraintsFile, tuple[str, ...]]:
    """The constraints of a constraints.json, and a note on unknown keys. Raises InvalidInput or NewerFormat in one line."""
    where = str(path)
    return constraints_of(decode_json(read_bytes(path), where), where)


def constraints_of(data: object, where: str) -> tuple[ConstraintsFile, tuple[str, ...]]:
    """The same of what is in a constraints.json."""
    raw = check_format(data, CONSTRAINTS_FORMAT, where)
    given = ConstraintsFile.parse(raw, where)
    of_rules = {key for rule in raw.get("tables", ()) for key in rule} - MatchedRule.model_fields.keys()
    unknown = sorted(raw.keys() - ConstraintsFile.model_fields.keys()) + [
        f"{key} of tables" for key in sorted(of_rules)
    ]
    return given, (f"{where}: ignored unknown keys, which constrain nothing: {', '.join(unknown)}",) if unknown else ()


def with_flags(given: ConstraintsFile, ranks_a_host: int | None = None, /, **flags: Any) -> ConstraintsFile:
    """The file's constraints plus flags of the command line, by name. Pins are `PATTERN=0,1`, tables kept together
    `PATTERN,PATTERN`.

    `PATTERN=host:2` pins to all devices of a host, of which each has `ranks_a_host`.

    `row_wise` with `*` applies to all tables that no other rule excludes; with another pattern it contradicts such rules.
    """
    row_wise, no_row_wise = flags.pop("row_wise", ()), flags.pop("no_row_wise", False)
    if no_row_wise and row_wise:
        raise UsageError(f"--row-wise {row_wise[0]!r} and --no-row-wise contradict each other; give one of them")
    rules = [{"match": pattern, "split": False} for pattern in flags.pop("never_split", ())]
    rules += [{"match": pattern, "row_wise": True} for pattern in row_wise if pattern != "*"]
    rules += [{"match": pattern, "data_parallel": True} for pattern in flags.pop("data_parallel", ())]
    pins = [_pin(text, ranks_a_host) for text in flags.pop("pin", ())]
    rules += [{"match": pattern, "devices": devices} for pattern, devices in pins]
    together = [tuple(names.split(",")) for names in flags.pop("together", ())]
    if unknown := flags.keys() - ConstraintsFile.model_fields:
        raise TypeError(f"constraints have no flag {min(unknown)}")
    changed = {name: value for name, value in flags.items() if value is not None}
    if "sharding_types" in changed:
        changed["sharding_types"] = _sharding_types(changed["sharding_types"])
    if "reserve" in changed:
        changed["reserve_share"] = 0.0  # the flag replaces the file's reserve, whatever its form
    if no_row_wise or "*" in row_wise:
        changed["row_wise"] = not no_row_wise
    lists = {"tables": [*given.tables, *rules], "together": [*given.together, *together]}
    try:
        return ConstraintsFile.model_validate({**given.model_dump(), **lists, **changed})
    except ValidationError as error:
        raise UsageError(f"constraints: {explain(error)}") from None


def resolve(given: ConstraintsFile, tables: Sequence[Table], where: str) -> Constraints:
    """The constraints table by table. Raises InvalidInput for a pattern that matches nothing, and for contradictions."""
    names = [table.name for table in tables]
    in_two = {
        name
        for rule in given.tables
        if rule.rows_by_access is not None and rule.rows_by_access.hot_rows is not None
        for name in _matching(rule.match, names, where)
    }
    parts = {part: name for name in names if name in in_two for part in part_names(name)}
    rules: dict[str, dict[str, Any]] = {}
    said: dict[tuple[str, str], str] = {}
    for rule in given.tables:
        shards = rule.max_shards if rule.split else 1
        fields: dict[str, Any] = {
            "devices": rule.devices,
            "min_dim": rule.min_dim,
            "max_shards": shards,
            "row_wise": rule.row_wise,
        }
        fields |= {"data_parallel": rule.data_parallel, "tier": rule.tier, "cached_rows": rule.cached_rows}
        fields["rows_by_access"] = rule.rows_by_access
        for name in _matching(rule.match, names, where, parts):
            for field, value in fields.items():
                if value is None:
                    continue
                own = rules.setdefault(name, {})
                if own.get(field, value) != value:
                    raise InvalidInput(
                        f"{where}: {said[name, field]!r} and {rule.match!r} contradict each other for table {name!r}: {field} "
                        f"{own[field]} and {value}"
                    )
                own[field], said[name, field] = value, rule.match
    for table in tables:
        how: RowsByAccess | None = rules.get(table.name, {}).get("rows_by_access")
        if how is not None and (why := how.went(table)):
            raise InvalidInput(f"{where}: table {table.name!r} {why}")
    groups = (
        tuple(dict.fromkeys(name for pattern in group for name in _matching(pattern, names, where)))
        for group in given.together
    )
    try:
        return Constraints(
            reserve_bytes=given.reserve,
            reserve_share=given.reserve_share,
            min_dim=given.min_dim,
            max_shards=given.max_shards,
            row_wise=bool(given.row_wise),
            sharding_types=given.sharding_types,
            tables=tuple(TableRule(table=name, **rules[name]) for name in [*names, *parts] if name in rules),
            together=tuple(group for group in groups if len(group) > 1),
        )
    except ValidationError as error:
        raise InvalidInput(f"{where}: {explain(error)}") from None


def _sharding_types(text: str) -> list[str]:
    """The names in `table-wise,row-wise`. Raises UsageError for others, with what to do for those that no search makes."""
    names, known = [name.strip() for name in text.split(",")], get_args(ShardingTypeName)
    unknown = next((name for name in names if name not in known), None)
    if unknown == "data-parallel":
        raise UsageError("--sharding-types: data-parallel tables are named by --data-parallel PATTERN")
    if unknown is not None:
        raise UsageError(f"--sharding-types: {unknown!r} is not one of {', '.join(known)}, which a search can use")
    return names


def _matching(
    pattern: str, names: Sequence[str], where: str, parts: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The table with this exact name, or else all that match; and those of the `parts` whose table does not, since what holds for
    a table holds for its parts."""
    found = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
    found += [part for part, name in parts.items() if name not in found and fnmatchcase(part, pattern)]
    if not found:
        raise InvalidInput(
            f"{where}: no table matches {pattern!r}; the first of {counted(len(names), 'table')} is {names[0]!r}"
        )
    return found


def _pin(text: str, ranks_a_host: int | None) -> tuple[str, tuple[int, ...]]:
    pattern, equals, places = text.rpartition("=")
    parts = [part.strip() for part in places.split(",")]
    numbers = [part.removeprefix(_HOST) for part in parts]
    if not (equals and pattern and all(part.isascii() and part.isdigit() and len(part) < 6 for part in numbers)):
        raise UsageError(f"--pin {text!r} is not TABLE=DEVICE,DEVICE…, as in user_id=0, 'user_*=0,1' or user_id=host:2")
    devices: list[int] = []
    for part, number in zip(parts, map(int, numbers), strict=True):
        if not part.startswith(_HOST):
            devices.append(number)
        elif ranks_a_host is None:
            raise UsageError(
                f"--pin {text!r} names a host: say how many ranks a host has, --local-world-size or --domain"
            )
        else:
            devices += range(number * ranks_a_host, (number + 1) * ranks_a_host)
    return pattern, tuple(devices)
