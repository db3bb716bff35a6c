"""Tables from JSON, CSV and Parquet that other people wrote."""

import csv
import dataclasses
import json
import warnings
from decimal import Decimal
from enum import Enum

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.part import Part
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.files.importers.tables_source import Asked, from_frame, from_list, import_tables
from neuroshard.files.importers.torchrec_tables import tables_of
from neuroshard.files.tables import read_tables, write_tables

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrec and FBGEMM, while they are imported
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

ROW = {"name": "a", "rows": 1000, "dim": 2048, "pooling_factor": 2.5}
SHARED = ({"name": "viewed", "pooling_factor": 1.25}, {"name": "bought", "pooling_factor": 1.25})
BINS = [0.5, 0.25, 0.25, *[0.0] * 14]


def as_json(path, rows):
    path.write_text(json.dumps(rows))
    return path


def as_csv(path, rows):
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cell = {list: lambda value: json.dumps(value) if isinstance(value[0], dict) else " ".join(map(str, value))}
    lines = [["" if (v := row.get(c)) is None else cell.get(type(v), str)(v) for c in columns] for row in rows]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *lines])
    return path


def as_parquet(path, rows):
    columns = dict.fromkeys(key for row in rows for key in row)
    pq.write_table(pa.table({column: [row.get(column) for row in rows] for column in columns}), path)
    return path


WRITERS = {"json": as_json, "csv": as_csv, "parquet": as_parquet}
every_format = pytest.mark.parametrize("suffix", WRITERS)


def imported(tmp_path, suffix, rows, **options):
    return import_tables(WRITERS[suffix](tmp_path / f"t.{suffix}", rows), **options)


def fault(tmp_path, suffix, rows, error=InvalidInput) -> str:
    with pytest.raises(error) as caught:
        imported(tmp_path, suffix, rows)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/t.{suffix}: ")
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path}/t.{suffix}: ")


@every_format
def test_a_table_is_read_with_all_that_the_file_says(tmp_path, suffix):
    said = {**ROW, "reuse_bins": BINS, "reuse_batch_size": 512, "element_bytes": 2, "optimizer_bytes_per_row": 0}
    one = imported(tmp_path, suffix, [said], optimizer="adagrad", access="zipf:2")
    assert one.tables == (Table(**said, optimizer_bytes_per_element=4),)
    assert (one.traces, one.notes) == (None, ())


@every_format
def test_options_fill_in_what_the_file_does_not_say(tmp_path, suffix):
    rows = [ROW, {**ROW, "name": "b", "element_bytes": 4}]
    first, second = imported(tmp_path, suffix, rows, dtype="fp16", optimizer="adam", access="zipf:1.05").tables
    assert (first.element_bytes, second.element_bytes) == (2, 4)
    assert (first.optimizer_bytes_per_row, first.optimizer_bytes_per_element) == (0, 8)
    assert first.reuse_bins == second.reuse_bins == zipf_bins(1000, 2.5, 1.05)


@every_format
def test_torch_s_words_are_understood(tmp_path, suffix):
    rows = [{"name": "a", "num_embeddings": 1000, "embedding_dim": 2048, "pooling_factor": 2.5}]
    assert imported(tmp_path, suffix, rows).tables == (Table(**ROW),)


@every_format
def test_pooling_and_weights_are_read(tmp_path, suffix):
    rows = [
        {**ROW, "pooling": "MEAN", "weighted": False},
        {**ROW, "name": "b", "pooling": "sum", "weighted": True},
    ]
    one, other = imported(tmp_path, suffix, rows).tables
    assert (one.pooling, one.weighted, other.pooling, other.weighted) == ("mean", False, "sum", True)
    with refused(InvalidInput, "pooling", "'sum'", "'mean'", "'max'"):
        imported(tmp_path, suffix, [{**ROW, "pooling": "max"}])


@every_format
def test_switches_are_true_or_false_or_1_or_0(tmp_path, suffix):
    rows = [{**ROW, "is_weighted": 0}, {**ROW, "name": "b", "is_weighted": 1}, {**ROW, "name": "c"}]
    assert [table.weighted for table in imported(tmp_path, suffix, rows).tables] == [False, True, False]
    for key in ("weighted", "is_weighted", "sequence"):
        message = fault(tmp_path, suffix, [{**ROW, key: "yes"}])
        assert key.removeprefix("is_") in message
        assert message.endswith("must be true or false, not 'yes'")


@every_format
@pytest.mark.parametrize("value", ["many", 0, 2.5, 4097])
def test_a_number_of_features_that_no_table_has_is_refused(tmp_path, suffix, value):
    message = fault(tmp_path, suffix, [{**ROW, "num_features": value}])
    assert "num_features must be a whole number from 1 to 4,096, not " in message
    assert str(value) in message


@every_format
def test_a_sequence_is_a_table_that_is_not_pooled(tmp_path, suffix):
    rows = [{**ROW, "sequence": False}, {**ROW, "name": "s", "sequence": True}, {**ROW, "name": "n", "pooling": "NONE"}]
    one = imported(tmp_path, suffix, rows)
    assert [(table.name, table.pooling) for table in one.tables] == [(ROW["name"], "sum"), ("s", "none"), ("n", "none")]
    assert one.notes == ()


@every_format
def test_a_number_of_features_shares_the_lookups_equally(tmp_path, suffix):
    (table,) = imported(tmp_path, suffix, [{**ROW, "num_features": 4}]).tables
    assert [feature.pooling_factor for feature in table.features] == [table.pooling_factor / 4] * 4
    assert Part.of(table).sent_columns == 4 * table.dim


@every_format
def test_repeated_names_are_numbered_around_those_that_exist(tmp_path, suffix):
    one = imported(tmp_path, suffix, [{**ROW, "name": name} for name in ("a", "a", "a_2", "b", "a")])
    assert [table.name for table in one.tables] == ["a", "a_3", "a_2", "b", "a_4"]
    assert one.notes == (f"{tmp_path}/t.{suffix}: repeated names were numbered: 'a' became 'a_3' and 1 more",)


@every_format
def test_a_repeated_name_as_long_as_can_be_keeps_within_that_with_its_number(tmp_path, suffix):
    tables = imported(tmp_path, suffix, [{**ROW, "name": "x" * 500}] * 11).tables
    assert [table.name for table in tables[:2]] == ["x" * 500, "x" * 498 + "_2"]
    assert tables[-1].name == "x" * 497 + "_11"
    write_tables(tmp_path / "tables.json", tables)
    assert read_tables(tmp_path / "tables.json") == (tables, ())


def test_a_column_that_nobody_reads_may_hold_what_cannot_be_read(tmp_path):
    path = as_parquet(tmp_path / "t.parquet", [ROW])
    strange = pa.array([b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pq.read_table(path).append_column("owner", strange), path)
    assert import_tables(path).tables == (Table(**ROW),)


def test_text_of_parquet_that_is_no_text_is_reported_in_one_line(tmp_path):
    path = as_parquet(tmp_path / "t.parquet", [ROW])
    table = pq.read_table(path)
    strange = pa.array([b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(table.set_column(table.column_names.index("name"), "name", strange), path)
    with refused(InvalidInput, "t.parquet", "Parquet"):
        import_tables(path)


@every_format
def test_unknown_keys_are_ignored_with_one_note(tmp_path, suffix):
    one = imported(tmp_path, suffix, [{**ROW, "team": "ads", "age": 3}])
    assert one.tables == (Table(**ROW),)
    assert one.notes == (f"{tmp_path}/t.{suffix}: unknown keys were ignored: age, team",)


@every_format
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 6}, "dim: must be a positive multiple of 4 (FBGEMM's fused kernels need it), not 6"),
        ({"rows": 0}, "rows: must be between 1 and 2^40, not 0"),
        ({"rows": -5}, "rows: must be between 1 and 2^40, not -5"),
        ({"pooling_factor": -1.0}, "pooling_factor: must be between 0 and 1e9 lookups a sample, not -1.0"),
        ({"element_bytes": 8}, "element_bytes: must be 4 (fp32) or 2 (fp16), not 8"),
        ({"reuse_bins": [1.0]}, "reuse_bins: must be 17 shares, not 1"),
    ],
)
def test_a_table_at_fault_is_named_by_place_and_name(tmp_path, suffix, change, message):
    place = {"json": "tables[1]", "csv": "line 3", "parquet": "row 1"}[suffix]
    assert fault(tmp_path, suffix, [ROW, {**ROW, "name": "bad", **change}]) == f"{place} (bad): {message}"


@every_format
def test_a_list_without_tables_is_refused(tmp_path, suffix):
    assert fault(tmp_path, suffix, []) in ("the list of tables is empty", "column 'name' is missing; there are ''")


def test_json_is_a_list_or_an_object_with_one(tmp_path):
    one = imported(tmp_path, "json", {"format_version": 1, "source": "me", "tables": [ROW]})
    assert one.tables == imported(tmp_path, "json", [ROW]).tables == (Table(**ROW),)
    assert one.notes == (f"{tmp_path}/t.json: unknown keys were ignored: source",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the list of tables is empty"),
        ({"tables": []}, "the list of tables is empty"),
        ({"tabels": []}, 'expected {"tables": [...]} or a list, found tables = None'),
        (3, "expected a JSON object, found int"),
        ([3], "tables[0]: expected an object with name, rows, dim, pooling_factor, not 3"),
        ([{**ROW, "pooling_factor": float("nan")}], "tables[0] (a): pooling_factor: must be a finite number, not nan"),
        ([{**ROW, "rows": "many"}], "tables[0] (a): rows: must be a whole number, not 'many'"),
        ({"format_version": 2, "tables": [ROW]}, "format_version 2 is from a newer neuroshard; this one reads up to 1: "
         "upgrade it"),
    ],
)  # fmt: skip
def test_json_of_another_shape_is_refused(tmp_path, data, message):
    assert fault(tmp_path, "json", data) == message


def test_csv_may_have_quotes_spaces_a_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "t.CSV"
    path.write_bytes('\ufeffname, rows ,dim,pooling_factor\r\n"a, b", 1e3 ,8,.5\r\n,,,\r\n'.encode())
    assert import_tables(path).tables == (Table(name="a, b", rows=1000, dim=8, pooling_factor=0.5),)
    path.write_bytes(b"\xff\xfe")
    with refused(InvalidInput, "UTF-8"):
        import_tables(path)


def test_pandas_writes_what_we_read(tmp_path):
    frame = pd.DataFrame([ROW, {**ROW, "name": "b", "element_bytes": 2}])
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    wanted = (Table(**ROW), Table(**{**ROW, "name": "b", "element_bytes": 2}))
    assert import_tables(tmp_path / "t.csv").tables == import_tables(tmp_path / "t.parquet").tables == wanted


def test_decimals_of_parquet_are_numbers(tmp_path):
    table = pa.Table.from_pylist([{**ROW, "rows": Decimal(40), "pooling_factor": Decimal("2.5")}])
    pq.write_table(table, tmp_path / "t.parquet")
    (read,) = import_tables(tmp_path / "t.parquet").tables
    assert (read.rows, read.pooling_factor) == (40, 2.5)
    features = [
        {"name": "viewed", "pooling_factor": Decimal("2.5")},
        {"name": "bought", "pooling_factor": Decimal("0.5")},
    ]
    table = pa.Table.from_pylist([{"name": "a", "rows": 40, "dim": 8, "features": features}])
    pq.write_table(table, tmp_path / "t.parquet")
    (read,) = import_tables(tmp_path / "t.parquet").tables
    assert (read.pooling_factor, [feature.pooling_factor for feature in read.features]) == (3.0, [2.5, 0.5])


def test_text_in_a_number_column_of_parquet_is_named(tmp_path):
    message = fault(tmp_path, "parquet", [{**ROW, "rows": "12"}])
    assert message == "row 0 (a): rows: must be a whole number, not '12'"
    assert fault(tmp_path, "parquet", [{"name": "a"}]) == "column 'rows' is missing; there are 'name'"


DELTAS = {"name": "DELTA_BYTE_ARRAY", "rows": "DELTA_BINARY_PACKED", "features.list.element.name": "DELTA_BYTE_ARRAY"}
LENGTHS = {"name": "DELTA_LENGTH_BYTE_ARRAY", "rows": "BYTE_STREAM_SPLIT"}


@pytest.mark.parametrize(
    "written",
    [
        {"data_page_version": "2.0"},
        {
            "data_page_version": "2.0",
            "use_dictionary": False,
            "column_encoding": DELTAS,
        },  # as parquet-mr and parquet-rs
        {"use_dictionary": False, "column_encoding": LENGTHS, "compression": "snappy"},  # as DuckDB
        {"use_dictionary": ["pooling"], "column_encoding": DELTAS, "row_group_size": 7, "compression": "brotli"},
    ],
)
def test_parquet_of_other_writers_is_read(tmp_path, written):
    features = [{"name": "viewed", "pooling_factor": 2.0}, {"name": "bought", "pooling_factor": 0.5}]
    rows = [{**ROW, "name": f"table_{i}", "rows": 1000 + i, "pooling": "mean", "features": features} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet", **written)
    assert import_tables(tmp_path / "t.parquet").tables == tuple(Table(**row) for row in rows)


def test_what_is_not_read_of_parquet_is_said_as_that(tmp_path, monkeypatch):
    path = as_parquet(tmp_path / "t.parquet", [ROW])
    whole = path.read_bytes()
    for damaged, words in ((b"PARE" + whole[4:-4] + b"PARE", "encrypted"), (b"name,rows\n", "not a Parquet file")):
        path.write_bytes(damaged)
        with pytest.raises(InvalidInput, match=words):
            import_tables(path)
    path.write_bytes(whole)

    def unwritten(*_, **__):
        raise OSError("Not yet implemented: a new encoding")

    monkeypatch.setattr(pq, "ParquetFile", unwritten)
    with refused(InvalidInput, "t.parquet", "new encoding", "version 1") as caught:
        import_tables(path)
    assert "whole" not in str(caught.value)
    (tmp_path / "folder.parquet").mkdir()
    with refused(InvalidInput, "folder.parquet", "folder"):
        import_tables(tmp_path / "folder.parquet")


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_parquet_is_reported_in_one_line(tmp_path, kept):
    path = as_parquet(tmp_path / "t.parquet", [ROW])
    path.write_bytes(path.read_bytes()[:kept])
    with refused(InvalidInput, "Parquet") as caught:
        import_tables(path)
    assert "\n" not in str(caught.value)


@every_format
def test_a_missing_file_is_named(tmp_path, suffix):
    with refused(InvalidInput, f"ghost.{suffix}"):
        import_tables(tmp_path / f"ghost.{suffix}")


@pytest.mark.parametrize("option", [{"dtype": "int8"}, {"optimizer": "lion"}, {"access": "zipf"}])
def test_an_unknown_option_is_a_usage_error(tmp_path, option):
    with pytest.raises(UsageError):
        import_tables(as_json(tmp_path / "t.json", [ROW]), **option)


def test_what_a_published_set_says_of_all_tables_is_read(tmp_path):
    path = tmp_path / "set.json"
    tables = [{**ROW, "name": "a", "num_features": 3}, {**ROW, "name": "b", "num_features": 1, "bytes_per_element": 4}]
    for key in ("bytes_per_element", "Bytes_Per_Element"):
        path.write_text(json.dumps({key: 2, "tables": tables}))
        found = import_tables(path)
        assert [table.element_bytes for table in found.tables] == [2, 4]
        assert [len(table.features) for table in found.tables] == [3, 0]
        assert found.notes == ()


def configs(path, tables):
    """TorchRec's own configs as people dump them, with lookups beside: a frame of dataclasses.asdict, and its files."""
    rows = [{**dataclasses.asdict(config), "pooling_factor": 20.0} for config in tables]
    text = [{key: str(value) if isinstance(value, Enum) else value for key, value in row.items()} for row in rows]
    text = [row | {"init_fn": str(row["init_fn"])} for row in text]
    values = [row | {name: row[name].value for name in ("data_type", "pooling") if name in row} for row in rows]
    values = [{key: value for key, value in row.items() if key != "init_fn"} for row in values]
    (path / "text.json").write_text(json.dumps(text))
    (path / "values.json").write_text(json.dumps(values))
    for name, frame in (("text", pd.DataFrame(text)), ("values", pd.DataFrame(values))):
        frame.to_csv(path / f"{name}.csv", index=False)
        frame.to_parquet(path / f"{name}.parquet")
    pd.read_parquet(path / "text.parquet").to_csv(path / "numpy.csv", index=False)  # lists without commas
    yield from (import_tables(one) for one in sorted(path.iterdir()))
    for given in (pd.DataFrame(rows), pd.read_parquet(path / "text.parquet")):
        yield from_frame(given, Asked()).tables()
    yield from_list(rows, Asked()).tables()


def test_configs_of_torchrec_are_the_tables_of_their_model_in_any_form(tmp_path):
    tables = [
        EmbeddingBagConfig(
            name="user",
            num_embeddings=400,
            embedding_dim=128,
            feature_names=["viewed", "bought"],
            data_type=DataType.FP16,
        ),
        EmbeddingBagConfig(
            name="item", num_embeddings=200, embedding_dim=64, feature_names=["shown"], pooling=PoolingType.MEAN
        ),
        EmbeddingConfig(name="words", num_embeddings=100, embedding_dim=32, feature_names=["a", "b", "c"]),
    ]
    wanted = tables_of(tables, {config.name: 20.0 for config in tables})
    forms = list(configs(tmp_path, tables))
    assert len(forms) == 10
    for found in forms:
        assert found.tables == wanted
        assert any("words" in note and "sequences" in note for note in found.notes)


@every_format
@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ({"data_type": "FP16"}, {"element_bytes": 2}),
        ({"data_type": "DataType.FP32"}, {"element_bytes": 4}),
        ({"data_type": "<DataType.FP16: 'FP16'>"}, {"element_bytes": 2}),
        ({"dtype": "torch.float16"}, {"element_bytes": 2}),
        ({"dtype": "float32", "element_bytes": 4}, {"element_bytes": 4}),
        ({"pooling": "PoolingType.MEAN"}, {"pooling": "mean"}),
        ({"feature_names": "viewed"}, {"features": ()}),
        ({"feature_names": "viewed, bought"}, {"features": SHARED}),
        *(
            ({"feature_names": names}, {"features": SHARED})
            for names in (
                "array(['viewed', 'bought'], dtype=object)",
                "array(['viewed'\n 'bought'])",
                "'viewed', \"bought\"",
            )
        ),
        ({"feature_names": "viewed,bought", "features": [{**one} for one in SHARED]}, {"features": SHARED}),
        ({"use_virtual_table": False, "stash_weights": False}, {}),
        *(({"num_embeddings_post_pruning": none, "use_virtual_table": none}, {}) for none in ("None", "nan", "<NA>")),
        ({"Data_Type": "FP16", "POOLING": "mean"}, {"element_bytes": 2, "pooling": "mean"}),
        ({"num_embeddings": ROW["rows"], "sequence": True, "pooling": "NONE"}, {"pooling": "none"}),
    ],
)
def test_words_of_torchrec_s_configs_are_read(tmp_path, suffix, said, fields):
    found = imported(tmp_path, suffix, [{**ROW, **said}])
    assert found.tables == (Table(**{**ROW, **fields}),)
    assert found.notes == ()


@every_format
@pytest.mark.parametrize(
    ("said", "facts"),
    [
        ({"data_type": "BF16"}, ["data_type", "BF16"]),
        ({"dtype": "int8"}, ["dtype", "INT8"]),
        ({"data_type": "FP16", "element_bytes": 4}, ["data_type", "element_bytes"]),
        ({"use_virtual_table": True}, ["use_virtual_table"]),
        ({"num_embeddings_post_pruning": 500}, ["num_embeddings_post_pruning"]),
        ({"feature_names": "viewed bought"}, ["feature_names"]),
        *(
            ({"feature_names": names}, ["feature_names", names.replace("\n", " ")])
            for names in (
                "{viewed,bought}",
                "(viewed,bought)",
                "<viewed>,<bought>",
                "[viewed, bought]",
                "viewed],[bought",
            )
        ),
        *(
            ({"feature_names": names}, ["feature_names"])
            for names in (
                "{'viewed', 'bought'}",
                "frozenset({'a', 'b'})",
                "['it''s', 'b']",
                "[['a', 'b']]",
                '""a"",""b""',
            )
        ),
        ({"feature_names": "viewed,bought", "num_features": 3}, ["feature_names", "num_features"]),
        ({"features": [{**one} for one in SHARED], "num_features": 3}, ["features", "num_features"]),
        (
            {"features": [{**one} for one in SHARED], "feature_names": "p,q"},
            ["feature_names", "'q'", "features", "'bought'"],
        ),
        ({"num_embeddings": 5}, ["num_embeddings", 5, "rows", 1000]),
        ({"Embedding_Dim": 64}, ["Embedding_Dim", 64, "dim", 2048]),
        ({"data_type": "FP16", "dtype": "fp32"}, ["data_type", "FP16", "dtype", "fp32"]),
        ({"sequence": True, "pooling": "MEAN"}, ["sequence", True, "pooling", "mean"]),
        ({"sequence": False, "pooling": "NONE"}, ["sequence", False, "pooling", "none"]),
        ({"pooling_factor": None}, ["pooling_factor", "missing", '| {"pooling_factor"', "--from-torchrec"]),
    ],
)
def test_what_a_model_would_be_refused_for_is_refused_of_a_file(tmp_path, suffix, said, facts):
    with refused(InvalidInput, f"t.{suffix}", ROW["name"], *facts):
        imported(tmp_path, suffix, [{**ROW, **said}])


@every_format
def test_operators_apart_are_noted_as_of_a_model(tmp_path, suffix):
    (note,) = imported(tmp_path, suffix, [{**ROW, "stash_weights": True}]).notes
    assert "stash_weights" in note


@every_format
def test_features_without_a_pooling_factor_of_their_table_are_read_and_a_number_of_features_needs_one(tmp_path, suffix):
    features = [{"name": "viewed", "pooling_factor": 3.0}, {"name": "bought", "pooling_factor": 0.5}]
    row = {key: value for key, value in ROW.items() if key != "pooling_factor"}
    said = json.dumps(features) if suffix == "csv" else features
    assert imported(tmp_path, suffix, [{**row, "features": said}]).tables == (Table(**row, features=features),)
    with refused(InvalidInput, "pooling_factor"):
        imported(tmp_path, suffix, [{**row, "num_features": 2}])


def test_names_in_a_list_have_no_brackets_or_quotes_around_them_but_may_have_some(tmp_path):
    for names in (["{p", "q}"], ["'p'", "'q'"], ["[p", "q"]):
        with refused(InvalidInput, "feature_names", names[0][:2]):
            imported(tmp_path, "json", [{**ROW, "feature_names": names}])
    (table,) = imported(tmp_path, "json", [{**ROW, "feature_names": ["user[0]", "log(x)", "a, b"]}]).tables
    assert [feature.name for feature in table.features] == ["user[0]", "log(x)", "a, b"]


def test_types_of_numpy_and_bytes_are_read_as_what_they_name(tmp_path):
    wanted = (Table(**ROW, element_bytes=2, features=SHARED),)
    bytes_ = {**ROW, "name": b"a", "data_type": b"FP16", "feature_names": [b"viewed", b"bought"]}
    assert imported(tmp_path, "parquet", [bytes_]).tables == wanted
    for type_ in (np.float16, np.dtype("float16"), torch.float16):
        row = {**ROW, "data_type": type_, "feature_names": np.array(["viewed", "bought"], dtype=object)}
        for source in (from_frame(pd.DataFrame([row]), Asked()), from_list([row], Asked())):
            assert source.tables().tables == wanted
    with refused(InvalidInput, "t.parquet", "name"):
        imported(tmp_path, "parquet", [{**ROW, "name": b"\xff"}])


def test_a_frame_of_tables_and_its_parquet_file_are_the_tables(tmp_path):
    whole = Table(
        name="a", rows=1000, dim=64, pooling_factor=2.5, access="zipf:1.1", lookups_by_id=(0.75, 0.25), module="sparse"
    )
    frame = pd.DataFrame([whole.model_dump(), Table(**ROW).model_dump() | {"name": "b"}])
    frame.to_parquet(tmp_path / "t.parquet")
    wanted = (whole, Table(**{**ROW, "name": "b"}))
    assert import_tables(tmp_path / "t.parquet").tables == wanted
    for given in (frame, pd.read_parquet(tmp_path / "t.parquet")):
        assert from_frame(given, Asked()).tables().tables == wanted
