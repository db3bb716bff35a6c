"""The folder of cases: read back whole, and every fault named by file and row."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.refusals import refused
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.errors import InvalidInput, NeuroshardError, NewerFormat
from neuroshard.core.part import Part
from neuroshard.core.table import Table
from neuroshard.files.cases import CASE_FIELDS, read_cases, read_rows, write_cases, write_rows
from neuroshard.files.disk import only_writer


@pytest.fixture
def cases(tables) -> Cases:
    user, item, *_ = tables
    return Cases(
        tables=tables,
        compute=(
            ComputeCase(tables=tables),
            ComputeCase(tables=(user.with_dim(4), user.with_dim(8), user), split="test_sets"),
            ComputeCase(tables=(item.model_copy(update={"rows": 17, "pooling_factor": 1 / 3}),), split="test_tables"),
        ),
        collective=(
            CollectiveCase(device_dims=(0, 128), start_delays_ms=(0.0, 1.25)),
            CollectiveCase(device_dims=(4, 8, 12, 16), start_delays_ms=(0.0, 0.0, 0.0, 0.1), split="valid"),
        ),
        max_dim=2048,
        seed=7,
    )


def test_cases_read_back_are_the_cases_that_were_written(tmp_path, cases):
    write_cases(tmp_path, cases)
    assert read_cases(tmp_path) == cases


def test_a_case_of_sequences_and_of_tables_with_several_features_is_found_by_its_id(tmp_path, cases):
    """Also where its lookups were changed twice: varied, and then a block of the rows."""
    features = [{"name": name, "pooling_factor": share} for name, share in (("x", 0.1), ("y", 7 / 3))]
    shared = Table.model_validate({"name": "shared", "rows": 9000, "dim": 8, "features": features})
    sequence = Table(name="sequence", rows=9000, dim=8, pooling_factor=3.0, pooling="none")
    varied = [table.resized(8191, 8, table.pooling_factor * 1.7) for table in (shared, sequence)]
    made = [Part(table, 1237, 4).as_table() for table in varied]
    own = ComputeCase(tables=tuple(made))
    written = cases.model_copy(update={"tables": (*cases.tables, shared, sequence), "compute": (*cases.compute, own)})
    write_cases(tmp_path, written)
    assert read_cases(tmp_path).compute[-1].case_id == own.case_id


def test_a_device_may_send_more_columns_than_32_bits_count(tmp_path, cases):
    wide = CollectiveCase(device_dims=(2**31, 4), start_delays_ms=(0.0, 0.0))
    write_cases(tmp_path, cases.model_copy(update={"collective": (wide,)}))
    assert read_cases(tmp_path).collective == (wide,)


def test_a_case_keeps_its_batch_size(tmp_path, cases, tables):
    own = ComputeCase(tables=tables[:2], batch_size=256)
    cases = cases.model_copy(update={"compute": (*cases.compute, own)})
    write_cases(tmp_path, cases)
    assert read_cases(tmp_path) == cases


def test_no_collective_cases_are_read_back_as_none(tmp_path, cases):
    alone = cases.model_copy(update={"collective": ()})
    write_cases(tmp_path, alone)
    assert read_cases(tmp_path) == alone


def test_a_full_disk_leaves_no_folder_that_looks_whole(tmp_path, cases, full_disk):
    write_cases(tmp_path, cases)
    with full_disk(), refused(NeuroshardError, "compute.parquet", "File too large"):
        write_cases(tmp_path, cases)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["collective.parquet", "compute.parquet"]
    with refused(InvalidInput, "cases.json", "`neuroshard augment"):
        read_cases(tmp_path)


def test_two_runs_never_write_cases_into_one_folder_at_once(tmp_path, cases):
    with only_writer(tmp_path / "cases", "cases"), refused(InvalidInput, tmp_path / "cases", "another run"):
        write_cases(tmp_path / "cases", cases)
    write_cases(tmp_path / "cases", cases)
    assert sorted(path.name for path in (tmp_path / "cases").iterdir()) == [
        "cases.json",
        "collective.parquet",
        "compute.parquet",
    ]


def test_a_file_in_place_of_the_folder_is_reported_in_one_line(tmp_path, cases):
    (tmp_path / "cases").write_text("")
    with refused(NeuroshardError, tmp_path / "cases", "Not a directory"):
        write_cases(tmp_path / "cases", cases)


def changed(folder, column: str, values: list[object]) -> None:
    path = folder / "compute.parquet"
    table = pq.read_table(path)
    index = table.column_names.index(column)
    pq.write_table(table.set_column(index, column, pa.array(values, table.schema.field(column).type)), path)


@pytest.mark.parametrize(
    ("column", "values", "facts"),
    [
        ("table", [["user", "item", "x", "y"], ["user"] * 3, ["ghost"]], ["row 0", "'x'"]),
        ("dim", [[64, 32, 4, 2048], [4, 8, 6], [32]], ["row 1", "'user'", "dim 6"]),
        ("rows", [[1000, 40000, 7, 2**40], [1000] * 3, [0]], ["row 2", "'item'", "0 rows"]),
        ("rows", [[1000, 40000, 7, 2**40], [1000] * 2, [17]], ["row 1", "rows", "lists"]),
        ("rows", [[1000, 40000, 7, 2**40], [1000, None, 1000], [17]], ["row 1", "rows", "lists"]),
        ("case_id", ["x\x1b[31m" * 300] * 3, ["row 0", "case_id"]),
        ("split", ["train", "test_sets", "holiday"], ["row 2", "split", "'holiday'"]),
        ("pooling_factor", [[2.5, 1, 0.25, 0], [2.5, 2.5, 9.0], [1 / 3]], ["row 1", "case_id"]),
        ("table", [["user", "item", 'ünïcode, "quoted"', "never"], None, ["item"]], ["row 1", "table", "lists"]),
    ],
)
def test_a_row_at_fault_is_named(tmp_path, cases, column, values, facts):
    write_cases(tmp_path, cases)
    changed(tmp_path, column, values)
    with refused(InvalidInput, *facts) as caught:
        read_cases(tmp_path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200
    assert "\x1b" not in str(caught.value)


def test_columns_must_be_there_and_of_their_type(tmp_path):
    path = tmp_path / "x.parquet"
    write_rows(path, [], CASE_FIELDS["compute"][1:])
    with refused(InvalidInput, "'case_id'", "missing"):
        read_rows(path, CASE_FIELDS["compute"])
    write_rows(path, [{"case_id": 3}], [("case_id", pa.int64()), *CASE_FIELDS["compute"][1:]])
    with refused(InvalidInput, "'case_id'", "int64", "string"):
        read_rows(path, CASE_FIELDS["compute"])


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("case_id", pa.large_string()),
        ("case_id", pa.string_view()),
        ("split", pa.dictionary(pa.int32(), pa.string())),
        ("table", pa.large_list(pa.large_string())),
        ("rows", pa.list_(pa.float64())),
        ("dim", pa.list_(pa.int64())),
        ("pooling_factor", pa.list_(pa.decimal128(38, 20))),
        ("batch_size", pa.null()),
    ],
)
def test_types_with_which_other_programs_write_the_same_are_read(tmp_path, cases, column, kind):
    cases = cases.model_copy(update={"compute": cases.compute[:2]})  # whose pooling factors are decimals of 20 digits
    write_cases(tmp_path, cases)
    path = tmp_path / "compute.parquet"
    table = pq.read_table(path)
    place = table.column_names.index(column)
    values = table.column(column)
    other = values.dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values.to_pylist()).cast(kind)
    pq.write_table(table.set_column(place, column, other), path)
    assert pq.read_table(path).schema.field(column).type == kind
    assert read_cases(tmp_path) == cases


def other_table(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], object]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


def other_column(column: str, values: pa.Array) -> Callable[[Path], object]:
    return other_table(lambda table: table.set_column(table.column_names.index(column), column, values))


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def shorten(kept: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:kept])


OF_TOMORROW = {"format_version": 2}
SPOILED: list[tuple[str, Callable[[Path], object], Sequence[object]]] = [
    *[("compute.parquet", partial(shorten, kept), ["Parquet"]) for kept in (0, 3, 100, -1)],
    ("collective.parquet", Path.unlink, []),
    ("compute.parquet", become_a_folder, []),
    ("cases.json", lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **OF_TOMORROW})), [2]),
    ("collective.parquet", other_table(lambda table: table.slice(0, 1)), ["2 cases", 1]),
    ("compute.parquet", other_table(lambda table: table.append_column("rows", table.column("rows"))), ["'rows'", 2]),
    ("compute.parquet", other_column("case_id", pa.array([b"a"] * 3)), ["'case_id'"]),
    ("compute.parquet", other_column("batch_size", pa.array([0.5, 1, 2])), ["'batch_size'"]),
    ("compute.parquet", other_column("batch_size", pa.array(["8"] * 3)), ["'batch_size'"]),
    ("compute.parquet", other_column("rows", pa.array([1, 2, 3])), ["'rows'"]),
    ("compute.parquet", other_column("dim", pa.array([[2**40]] * 3)), ["'dim'"]),
    ("compute.parquet", other_column("table", pa.array([[[1]]] * 3)), ["'table'"]),
]


@pytest.mark.parametrize(("name", "spoil", "facts"), SPOILED)
def test_a_spoiled_file_is_named_with_its_fault(tmp_path, cases, name, spoil, facts):
    write_cases(tmp_path, cases)
    spoil(tmp_path / name)
    with refused(NewerFormat if facts == [2] else InvalidInput, name, *facts) as caught:
        read_cases(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
