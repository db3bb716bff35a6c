"""tables.json: read, written, and kept readable."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.core.table import MAX_ROWS, Table
from neuroshard.files.tables import read_tables, write_tables

GOLDEN = Path(__file__).parents[1] / "golden" / "tables-1.json"

some_tables = st.lists(
    st.builds(
        Table,
        name=st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1),
        rows=st.integers(1, MAX_ROWS),
        dim=st.integers(1, 2**14).map(lambda d: 4 * d),
        pooling_factor=st.floats(0, 1e4),
        reuse_bins=st.none(),
        reuse_batch_size=st.integers(1, 2**31),
        element_bytes=st.sampled_from([2, 4]),
        optimizer_bytes_per_row=st.integers(0, 64),
        optimizer_bytes_per_element=st.integers(0, 64),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda table: table.name,
).map(tuple)


@settings(deadline=None)
@given(some_tables)
def test_tables_read_back_are_the_tables_that_were_written(tmp_path_factory, tables):
    path = tmp_path_factory.mktemp("tables") / "tables.json"
    write_tables(path, tables)
    assert read_tables(path) == (tables, ())


def test_a_file_of_format_1_stays_readable():
    tables, notes = read_tables(GOLDEN)
    assert notes == ()
    assert tables == (
        Table(name="user", rows=1000, dim=64, pooling_factor=2.5),
        Table(
            name="item",
            rows=40_000_000,
            dim=128,
            pooling_factor=0.5,
            reuse_bins=(0.5, 0.25, 0.125, 0.125, *[0.0] * 13),
            reuse_batch_size=512,
            element_bytes=2,
            optimizer_bytes_per_row=0,
            optimizer_bytes_per_element=8,
        ),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sequence", True),
        ("num_features", 4),
        ("is_weighted", True),
        ("num_embeddings", 10),
        ("Data_Type", "FP16"),
        ("Element_Bytes", 2),
        ("data_type", "FP16"),
        ("bytes_per_element", 2),
        ("use_virtual_table", True),
        ("feature_names", ["u", "v"]),
    ],
)
def test_words_of_other_programs_that_change_a_table_are_refused(tmp_path, key, value):
    path = tmp_path / "tables.json"
    table = {"name": "a", "rows": 10, "dim": 8, "pooling_factor": 2.0}
    path.write_text(json.dumps({"tables": [table | {"name": "b"}, table | {key: value}]}))
    with refused(InvalidInput, "tables[1]", f"{key} = {value!r}", "neuroshard tables --from"):
        read_tables(path)
    usual = {"sequence": False, "num_features": 1, "is_weighted": None, "data_type": "FP32", "feature_names": ["u"]}
    path.write_text(json.dumps({"tables": [table | usual]}))
    assert len(read_tables(path)[0]) == 1


def test_unknown_keys_are_ignored_with_a_note(tmp_path):
    path = tmp_path / "tables.json"
    good = {"name": "a", "rows": 1, "dim": 4, "pooling_factor": 1}
    path.write_text(json.dumps({"by": "me", "tables": [{**good, "colour": "red", "age": 3}]}))
    tables, notes = read_tables(path)
    assert tables == (Table(**good),)
    assert [note.removeprefix(f"{path}: ") for note in notes] == [
        "ignored unknown keys of tables: age, colour",
        "ignored unknown keys: by",
    ]
