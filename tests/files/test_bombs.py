"""Small files that unpack to gigabytes: refused in one line, in little memory."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.limits import HANGS
from neuroshard.core.units import parse_bytes
from neuroshard.files.cases import CASE_FIELDS, write_rows

pytestmark = pytest.mark.slow


MANY = 16_000_000
# what the process takes beyond its imports; each of the files below would take 1 GiB at the least
MOST_BYTES = parse_bytes("600MiB")

READ = """
import json, re, sys
from pathlib import Path
import pyarrow.parquet
from neuroshard.core.errors import NeuroshardError
from neuroshard.files.cases import CASE_FIELDS, read_rows
from neuroshard.files.importers.tables_source import import_tables
if any(".pt" in path for path in sys.argv):
    import torch

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

before, said = peak(), []
for path in map(Path, sys.argv[1:]):
    try:
        read_rows(path, CASE_FIELDS["compute"]) if path.name.startswith("compute") else import_tables(path)
        said.append("taken")
    except NeuroshardError as error:
        said.append(str(error))
print(json.dumps([*said, peak() - before]))
"""


def read(*paths: Path) -> list[Any]:
    """What reading each file says, in a process of its own, and then the bytes that it took at most."""
    asked = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def constant_rows(path: Path) -> None:
    """Rows that are all alike: a few bytes say how often."""
    groups, rows = 10, MANY // 10
    column = {name: pa.array(np.full(rows, 4)) for name in ("name", "rows", "dim", "pooling_factor")}
    with pq.ParquetWriter(path, pa.table(column).schema, compression="zstd") as writer:
        for _ in range(groups):
            writer.write_table(pa.table(column))


def long_text(path: Path) -> None:
    """One long name, and 20,000 references to it."""
    name = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), ["x" * 200_000])
    numbers = {key: pa.array(np.full(20_000, 4)) for key in ("rows", "dim", "pooling_factor")}
    pq.write_table(pa.table({"name": name, **numbers}), path, compression="zstd", store_schema=False)


def delta_text(path: Path) -> None:
    """Long names that are each the one before it."""
    numbers = {key: pa.array(np.full(50, 4)) for key in ("rows", "dim", "pooling_factor")}
    table = pa.table({"name": ["x" * 2**20] * 50, **numbers})
    said = {"use_dictionary": False, "column_encoding": {"name": "DELTA_BYTE_ARRAY"}, "compression": "zstd"}
    with pq.ParquetWriter(path, table.schema, **said) as writer:
        for _ in range(20):
            writer.write_table(table)


def nested(path: Path) -> None:
    """One row whose list has all the values."""
    lists = pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), pa.array(np.zeros(MANY)))
    one = {"name": ["a"], "rows": [7], "dim": [4], "pooling_factor": [1.0]}
    pq.write_table(pa.table({**one, "reuse_bins": lists}), path, compression="zstd")


def nulls(path: Path) -> None:
    table = pa.table({name: pa.nulls(MANY, pa.int64()) for name in ("name", "rows", "dim", "pooling_factor")})
    pq.write_table(table, path, compression="zstd")


def zeros(path: Path) -> None:
    path.write_bytes(64 * gzip.compress(bytes(2**25)))


def expanded(path: Path) -> None:
    """Tensors of a billion values, all the same one in memory."""
    import torch

    one = torch.zeros(1, dtype=torch.int64)
    torch.save((one.expand(10**9), torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)), path)


def test_parquet_bombs_are_one_line_and_little_memory(tmp_path):
    """As tables of others, and as cases."""
    paths = []
    for make in (constant_rows, long_text, delta_text, nested, nulls):
        paths += [tmp_path / f"{name}-{make.__name__}.parquet" for name in ("tables", "compute")]
        make(paths[-1])
        paths[-2].hardlink_to(paths[-1])
        assert paths[-1].stat().st_size < 2**20
    *said, taken = read(*paths)

    for path, line in zip(paths, said, strict=True):
        assert line.startswith(f"{path}: ")
        assert "unpacks to" in line
        assert "\n" not in line
    assert taken < MOST_BYTES


def test_bombs_of_tensors_are_one_line_and_little_memory(tmp_path):
    zeros(tmp_path / "zeros.pt.gz")
    expanded(tmp_path / "expanded.pt")
    unpacked, shared, taken = read(tmp_path / "zeros.pt.gz", tmp_path / "expanded.pt")

    assert "unpacks to" in unpacked
    assert "share their memory" in shared
    assert taken < MOST_BYTES


def test_a_wide_file_with_much_beside_the_tables_is_read(tmp_path):
    """What is not read does not count."""
    rows = 3
    much = pa.ListArray.from_arrays(pa.array([0, *[MANY] * rows], pa.int32()), pa.array(np.zeros(MANY)))
    known = {"name": ["a", "b", "c"], "rows": [7] * rows, "dim": [4] * rows, "pooling_factor": [1.0] * rows}
    pq.write_table(pa.table({**known, "lookups": much}), tmp_path / "tables.parquet", compression="zstd")
    said, taken = read(tmp_path / "tables.parquet")

    assert said == "taken"
    assert taken < MOST_BYTES


def test_many_cases_that_are_much_alike_are_read(tmp_path):
    """A set of tables repeats itself: of own files nothing is refused."""
    row = {"split": "train", "table": ["user"] * 15, "rows": [7] * 15, "dim": [64] * 15, "pooling_factor": [2.5] * 15}
    rows = [{**row, "case_id": f"{number:032x}", "batch_size": 512} for number in range(20_000)]
    write_rows(tmp_path / "compute-00000.parquet", rows, CASE_FIELDS["compute"])
    said, _ = read(tmp_path / "compute-00000.parquet")

    assert said == "taken"
