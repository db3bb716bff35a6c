"""Files that people write, and what is refused of them: the text, the error, and the facts that its line names."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.refusals import refused
from neuroshard.core.access import access_law
from neuroshard.core.errors import InvalidInput, NewerFormat, UsageError
from neuroshard.files.constraints import ConstraintsFile, read_constraints, with_flags
from neuroshard.files.importers.presets import PRESETS, preset
from neuroshard.files.importers.tables_source import import_tables, pooling_factors
from neuroshard.files.tables import read_tables

Row = tuple[Any, ...]
TABLE = {"name": "a", "rows": 10, "dim": 8, "pooling_factor": 2.0}
MLPERF = "mlperf-dlrm-dcnv2"
CSV = "name,rows,dim,pooling_factor\n"
AMOUNT = "must be bytes or a text with a unit, as in 2GiB, or a percentage, as in 15%, not"
NO_NAN = '{"tables": [{"name": "a", "rows": NaN, "dim": 4, "pooling_factor": 1}]}'
OBJECT_A_LINE = f"{json.dumps(TABLE)}\n{json.dumps(TABLE)}\n"


def factors(path: Path) -> object:
    return pooling_factors(path, [])


def each(
    read: Callable[[Path], object], name: str, *rows: tuple[Any, ...], kind: type[Exception] = InvalidInput
) -> Iterator[Row]:
    return ((read, name, text, kind, facts) for text, *facts in rows)


def rule(fault: str, **fields: Any) -> Row:
    return {"tables": [{"match": "a", **fields}]}, f"tables[0].{fault}"


FILES: list[Row] = [
    *each(
        import_tables,
        "t.csv",
        ("", "the list of tables is empty"),
        (CSV, "the list of tables is empty"),
        ("name;rows;dim;pooling_factor\n", "column 'name' is missing; there are 'name;rows;dim;pooling_factor'"),
        ("name,rows,dim,dim,pooling_factor\n", "column 'dim' occurs 2 times"),
        (CSV + "a,1,4,1\nb,1,4\n", "line 3: has 3 cells for 4 columns"),
        (CSV + "a,1,4,1\n\nb,many,4,1\n", "line 4: column 'rows' is 'many', not a number"),
        (CSV + "a,1_000,4,1\n", "line 2: column 'rows' is '1_000', not a number"),
        (CSV + "a,1,4,nan\n", "line 2: column 'pooling_factor' is 'nan', not a number"),
        (CSV + "a,12.5,4,1\n", "line 2 (a): rows: must be a whole number, not 12.5"),
        (CSV + "a,1,4,1e999\n", "line 2 (a): pooling_factor: must be a finite number, not inf"),
        (CSV + '"a,1,4,1\n', "line 2: not CSV: unexpected end of data"),
        (CSV.encode("utf-16"), "UTF-8"),
    ),
    *each(import_tables, "t.json", (json.dumps([TABLE]).encode("utf-16"), "UTF-8"), (OBJECT_A_LINE, "line 2", "list")),
    *each(
        read_tables,
        "tables.json",
        ("", "JSON"),
        ("[]", "JSON object", "list"),
        ({}, "tables", "None"),
        ({"tables": []}, "tables", "empty"),
        ({"tables": [3]}, "tables[0]", "object"),
        ('{"tables": [{"name": "a", "rows": 1, "dim": 4', "cut off"),
        (NO_NAN, "tables[0] (a)", "rows", "nan"),
        *(
            ({"tables": [TABLE | {"weighted": value}]}, "tables[0] (a): weighted: must be true or false", repr(value))
            for value in ("yes", "true", 1, 0)
        ),
    ),
    *each(read_tables, "tables.json", ({"format_version": 2, "tables": []}, "format_version", 2), kind=NewerFormat),
    *each(
        factors,
        "f.json",
        ("[1]", '{"user_id": 3.0}'),
        ({"a": "many"}, "a", "'many'"),
        ({"a": "2"}, "a", "'2'"),
        (f'{{"a": 1{"0" * 400}}}', "a"),
        ({"a": True}, "a", True),
        ('{"a": 1, "a": 2}', "'a'", 1, 2),
    ),
    *each(
        factors,
        "f.csv",
        ("name,pooling_factor\na,many\n", "a", "'many'"),
        ("table,lookups\n", "name,pooling_factor", "['table', 'lookups']"),
        ("name,pooling_factor\na\n", "line 2", "1 cell"),
        ("name,pooling_factor\na,1\na,2\n", "a"),
        ("name,pooling_factor\na,-1\n", "a", -1),
        ("name,pooling_factor\na,1_000\n", "a", "'1_000'"),
    ),
    *each(
        read_constraints,
        "constraints.json",
        *(
            rule(f"devices[0]: must be a whole number, not {json.dumps(value).replace(chr(34), chr(39))}", devices=[value])
            for value in (1.5, True, "x", "1")
        ),
        rule("devices: must be a list, not 1", devices=1),
        rule("match: must be text, not 3", match=3),
        rule("split: must be true or false, not 'maybe'", split="maybe"),
        rule("tier: must be 'hbm', 'cached'", tier="tape"),
        rule("cached_rows: must be greater than or equal to 1, not 0", cached_rows=0),
        ({"tables": ["a"]}, "tables[0]: must be an object, not 'a'"),
        ({"together": "a,b"}, "together: must be a list, not 'a,b'"),
        ({"min_dim": "8"}, "min_dim: must be a whole number, not '8'"),
        ({"min_dim": 6}, "min_dim: must be a multiple of 4, not 6"),
        ({"max_shards": 2**63}, "max_shards: must be less than or equal to 2147483648, not 9223372036854775808"),
        ({"max_shards": True}, "max_shards: must be a whole number, not true"),
        *(({"reserve": value}, f"reserve: {AMOUNT} {value}") for value in (True, -1, 1.5)),
        ({"reserve": "100%"}, "reserve: '100%' leaves nothing; write a share below 100%, as in 15%"),
        ({"reserve": "2 gigs"}, "reserve: '2 gigs' is not an amount of memory; write bytes or a unit, as in 32GiB or 80GB"),
    ),
]  # fmt: skip

ARGUMENTS: list[Row] = [
    (lambda: import_tables(Path("t.yaml")), UsageError, "t.yaml", "known: .json, .csv, .parquet, .pt"),
    (lambda: with_flags(ConstraintsFile(), reserve="much"), UsageError, "constraints", "reserve", "'much'"),
    (lambda: pooling_factors(None, ["3.0"]), UsageError, "NAME=LOOKUPS"),
    (lambda: preset("mlperf"), UsageError, "'mlperf'", *PRESETS),
    (lambda: preset(MLPERF, dtype="int8"), UsageError, "'int8'", "fp32", "fp16"),
    (lambda: preset(MLPERF, optimizer="lion"), UsageError, "'lion'", "sgd", "rowwise_adagrad", "adagrad", "adam"),
    (lambda: preset(MLPERF, access="normal"), UsageError, "'normal'", "uniform", "zipf:EXPONENT"),
    *(
        (lambda number=number: pooling_factors(None, [f"a={number}"]), InvalidInput, "a", number)
        for number in ("1_000", "nan", "inf", "١")
    ),
    *(
        (lambda access=access: access_law(access), UsageError, "uniform", "zipf:EXPONENT")
        for access in ("", "zipf", "zipf:", "zipf:-1", "zipf:nan", "zipf:1e9", "zipf:11", "normal")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("read", "name", "held", "kind", "facts"), FILES)
def test_a_file_with_a_fault_is_named_with_the_fault(
    tmp_path: Path, read: Callable[[Path], object], name: str, held: Any, kind: type[Exception], facts: list[object]
) -> None:
    text = held if isinstance(held, str | bytes) else json.dumps(held)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(kind, tmp_path / name, *facts):
        read(tmp_path / name)


@pytest.mark.parametrize("row", ARGUMENTS)
def test_an_argument_is_refused(row: Row) -> None:
    call, kind, *facts = row
    with refused(kind, *facts):
        call()
