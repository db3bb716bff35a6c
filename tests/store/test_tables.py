"""What a text may name as tables: a preset, a file, an object in a store."""

import json
from pathlib import Path

import pytest

from neuroshard.core.errors import InvalidInput, NotFound, UsageError
from neuroshard.files.importers.presets import preset
from neuroshard.files.tables import read_tables
from neuroshard.store.protocol import MAX_BYTES
from neuroshard.store.tables import fetch_tables, load_tables

CSV = "name,rows,dim,pooling_factor,colour\nusers,1000,64,1,red\nusers,50,16,2.5,blue\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tables.csv").write_text(CSV)
    (tmp_path / "broken.csv").write_text("name,rows,dim,pooling_factor\nusers,1000,63,1\n")
    return tmp_path


def test_a_preset() -> None:
    assert load_tables("mlperf-dlrm-dcnv2") == (preset("mlperf-dlrm-dcnv2"), ())


def test_a_file_and_the_same_file_in_a_store_are_the_same_tables(folder: Path) -> None:
    tables, notes = load_tables(str(folder / "tables.csv"))
    url = f"file://{folder}/tables.csv"
    stored, stored_notes = load_tables(url)
    assert [(table.rows, table.dim) for table in tables] == [(1000, 64), (50, 16)]
    assert stored == tables
    assert stored_notes == tuple(note.replace(str(folder / "tables.csv"), url) for note in notes)


def test_a_file_in_a_store_may_be_as_large_as_one_outside(tmp_path: Path) -> None:
    """Larger than what else a store holds, which is read whole by every trainer."""
    table = {"name": "a", "rows": 9, "dim": 4, "pooling_factor": 1}
    (tmp_path / "t.json").write_text(json.dumps({"tables": [table]}).ljust(MAX_BYTES + 1))
    assert load_tables(f"file://{tmp_path}/t.json")[0] == load_tables(str(tmp_path / "t.json"))[0]


def test_notes_go_to_stderr_and_tables_into_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch_tables(str(folder / "tables.csv"), folder / "out" / "tables")
    assert read_tables(folder / "out" / "tables")[0] == load_tables(str(folder / "tables.csv"))[0]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "colour" in printed.err


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("nowhere", UsageError, "'nowhere' is neither a file nor a preset; the presets are mlperf-dlrm-dcnv2"),
        ("s3://tables.json", UsageError, "'s3://tables.json' is not the URL of a file"),
        ("file://{folder}/", UsageError, "'file://{folder}/' is not the URL of a file"),
        ("file://{folder}/nothing.csv", NotFound, "{folder}/nothing.csv: does not exist"),
        ("file://{folder}/broken.csv", InvalidInput, "file://{folder}/broken.csv: line 2"),
    ],
)
def test_what_cannot_be_is_reported_by_the_name_that_was_given(
    folder: Path, source: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        load_tables(source.format(folder=folder))
    assert str(caught.value).startswith(message.format(folder=folder))
