import ast
from pathlib import Path

import neuroshard
from neuroshard.core.part import GRADIENT_BYTES, GRADIENTS, Memory, Part
from neuroshard.core.table import Table


def test_a_table_of_several_features_sends_its_columns_once_for_each() -> None:
    features = [{"name": "x", "pooling_factor": 1.5}, {"name": "y", "pooling_factor": 0.5}]
    table = Table.model_validate({"name": "t", "rows": 100, "dim": 8, "features": features})
    assert (table.pooling_factor, Part.of(table).vectors, Part.of(table).sent_columns) == (2.0, 2.0, 16.0)
    half = Part(table, 50, 4).as_table()
    assert [feature.pooling_factor for feature in half.features] == [0.75, 0.25]
    assert Table.model_validate(half.model_dump()) == half


def test_a_sequence_sends_its_columns_once_for_each_lookup() -> None:
    table = Table(name="a", rows=1000, dim=64, pooling_factor=12.5, pooling="none")
    assert (Part.of(table).sent_columns, Part(table, 500, 64).sent_columns) == (800.0, 400.0)
    assert Part.of(table.model_copy(update={"pooling_factor": 0.0})).sent_columns > 0


def test_parts_row_wise_share_rows_lookups_and_memory() -> None:
    table = Table(name="t", rows=1000, dim=64, pooling_factor=8.0)
    parts = [Part(table, rows, 32) for rows in (250, 750)]
    assert [part.pooling_factor for part in parts] == [2.0, 6.0]
    assert sum(part.memory().total for part in parts) == Part(table, 1000, 32).memory().total
    assert Part(table, 1000, 32).as_table() == table.with_dim(32)


def test_a_copy_looks_its_own_samples_up_and_keeps_gradients_of_all_elements() -> None:
    table = Table(name="t", rows=100, dim=8, pooling_factor=6.0, element_bytes=2)
    copy, elements = Part.of(table, copies=3), 100 * 8
    assert (copy.pooling_factor, copy.sent_columns) == (2.0, 8.0)
    assert copy.memory() == Memory(2 * elements, 4 * 100, GRADIENT_BYTES * elements)
    # of 10 samples a device has 4, in two batches at a time, each lookup of 8 bytes
    assert copy.memory(10, "sparse-dist", "adam") == Memory(
        2 * elements, 2 * 2 * elements, GRADIENTS * 2 * elements + 2 * 24 * 8
    )


def test_the_bytes_of_rows_are_computed_in_one_module() -> None:
    """What multiplies rows by the bytes of an element weighs a part by itself."""
    package, found = Path(neuroshard.__file__).parent, set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                names = {getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(node)}
                if {"rows", "element_bytes"} <= names:
                    found.add(path.relative_to(package).as_posix())
    assert found == {"core/part.py"}
