"""Meta's dlrm_datasets: rows, pooling factors, reuse bins and the lookups themselves."""

import gzip
import json
import tempfile

import numpy as np
import pytest
import torch

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, NeuroshardError
from neuroshard.core.table import Table
from neuroshard.files.importers.tables_source import Asked, from_file, import_tables

# three tables, batch 4: the first reads row 7 four times and row 2 once, the second nothing, the third 0, 1, 0
INDICES = [7, 7, 2, 7, 7, 0, 1, 0]
LENGTHS = [[2, 1, 0, 2], [0, 0, 0, 0], [1, 0, 1, 1]]
OFFSETS = [0, 2, 3, 3, 5, 5, 5, 5, 5, 6, 6, 7, 8]


def tensors(indices=INDICES, offsets=OFFSETS, lengths=LENGTHS, dtype=torch.int64):
    return tuple(torch.tensor(values, dtype=dtype) for values in (indices, offsets, lengths))


@pytest.fixture
def path(tmp_path):
    torch.save(tensors(), tmp_path / "data.pt")
    return tmp_path / "data.pt"


def fault(path) -> str:
    with pytest.raises(InvalidInput) as caught:
        import_tables(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def test_tables_are_counted_from_their_lookups(path):
    def bins(*first):
        return (*first, *[0.0] * (17 - len(first)))

    one = import_tables(path, dim=64, optimizer="sgd")
    common = {"dim": 64, "reuse_batch_size": 4, "optimizer_bytes_per_row": 0}
    assert one.tables == (
        Table(name="table_0", rows=8, pooling_factor=1.25, reuse_bins=bins(0.5, 0.0, 0.5), **common),
        Table(name="table_1", rows=1, pooling_factor=0.0, reuse_bins=bins(), **common),
        Table(name="table_2", rows=2, pooling_factor=0.75, reuse_bins=bins(0.5, 0.5), **common),
    )
    assert one.notes == (
        f"{path}: the file has no rows: 3 tables took the highest row looked up, plus one",
        f"{path}: the file has no dim: 3 tables took 64 (--dim)",
    )


def test_the_lookups_come_along(path):
    traces = import_tables(path).traces
    assert {name: (one.indices.tolist(), one.lengths.tolist()) for name, one in traces.tables.items()} == {
        "table_0": ([7, 7, 2, 7, 7], [2, 1, 0, 2]),
        "table_1": ([], [0, 0, 0, 0]),
        "table_2": ([0, 1, 0], [1, 0, 1, 1]),
    }


def test_packed_files_old_files_and_32_bit_files_are_the_same(path, tmp_path):
    packed, old, short = (tmp_path / name for name in ("packed.pt.gz", "old.pt", "short.PT"))
    packed.write_bytes(gzip.compress(path.read_bytes()))
    torch.save(list(tensors()), old, _use_new_zipfile_serialization=False)
    torch.save(tensors(dtype=torch.int32), short)
    wanted = import_tables(path)
    for other in map(import_tables, (packed, old, short)):
        assert other.tables == wanted.tables
        for name, lookups in other.traces.tables.items():
            assert lookups.indices.dtype == np.int64
            assert lookups.indices.tolist() == wanted.traces.tables[name].indices.tolist()


def test_a_packed_file_leaves_nothing_behind(path, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    packed = tmp_path / "data.pt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    kept = import_tables(packed).traces
    assert kept.tables["table_0"].indices.tolist() == INDICES[:5]
    for broken in (b"", b"not gzip", packed.read_bytes()[:-20], gzip.compress(b"not torch")):
        packed.write_bytes(broken)
        assert fault(packed).startswith("no file of tensors alone, or cut off (")
    assert list(scratch.iterdir()) == []


def test_no_room_to_unpack_is_reported_in_one_line(path, tmp_path, full_disk):
    packed = tmp_path / "data.pt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with full_disk(), refused(NeuroshardError, f"{path}.gz", "File too large"):
        import_tables(packed)


def test_a_sidecar_gives_names_rows_and_dims(path):
    sidecar = path.with_suffix(".json")
    entries = [
        {"name": "user", "num_embeddings": 1000, "dim": 32, "element_bytes": 2},
        {"name": "user", "dim": 16},
        {},
    ]
    sidecar.write_text(json.dumps(entries))
    one = import_tables(path)
    assert [(t.name, t.rows, t.dim, t.element_bytes) for t in one.tables] == [
        ("user", 1000, 32, 2),
        ("user_2", 1, 16, 4),
        ("table_2", 2, 128, 4),
    ]
    assert list(one.traces.tables) == ["user", "user_2", "table_2"]
    assert one.notes == (
        f"{path}: repeated names were numbered: 'user' became 'user_2'",
        f"{path}: the file has no rows: 2 tables took the highest row looked up, plus one",
        f"{path}: the file has no dim: 1 table took 128 (--dim)",
    )


def test_a_sidecar_that_does_not_fit_is_refused(path):
    sidecar = path.with_suffix(".json")
    sidecar.write_text("[{}]")
    with refused(InvalidInput, "data.json", 1, "data.pt", 3):
        import_tables(path)
    sidecar.write_text('{"tables": [{"rows": 7}, {}, {}]}')
    assert fault(path) == "table 0: row 7 is looked up, but the sidecar gives it 7 rows"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 1}, "found 'dict'"),
        (tensors()[:2], "found 'tuple'"),
        ((*tensors()[:2], 3), "found ['torch.int64', 'torch.int64', 'int']"),
        ((*tensors()[:2], torch.ones(3, 4)), "'torch.float32']"),
        (
            (*tensors()[:2], torch.ones(3, 4, dtype=torch.int64).to_sparse()),
            "found one that is torch.sparse_coo on cpu",
        ),
        (
            (*tensors()[:2], torch.ones(3, 4, dtype=torch.int64, device="meta")),
            "found one that is torch.strided on meta",
        ),
        ((*tensors()[:2], torch.tensor([1])), "found shapes (8,), (13,), (1,)"),
        (tensors(offsets=OFFSETS[:-1]), "12 offsets for 12 samples; there must be one more"),
        (tensors(indices=INDICES[:-1]), "the offsets go from 0 to 8, but there are 7 indices"),
        (tensors(offsets=[0, 1, *OFFSETS[2:]]), "table 0: the offsets do not agree with the lengths"),
        (tensors(lengths=[LENGTHS[0], LENGTHS[2], LENGTHS[1]]), "table 1: the offsets do not agree with the lengths"),
        (tensors(indices=[7, -1, *INDICES[2:]]), "table 0: indices[1] is -1, below 0"),
        (
            tensors(offsets=[0, 3, 2, *OFFSETS[3:]], lengths=[[3, -1, 1, 2], *LENGTHS[1:]]),
            "table 0: lengths[1] is -1, below 0",
        ),
    ],
)
def test_tensors_that_do_not_agree_are_refused(tmp_path, content, message):
    path = tmp_path / "data.pt"
    torch.save(content, path)
    assert message in fault(path)


class Evil:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return print, ("pwned",)


def test_a_file_that_would_run_code_is_refused(tmp_path, capsys):
    for old in (True, False):
        path = tmp_path / f"{old}.pt"
        torch.save(Evil(), path, _use_new_zipfile_serialization=not old)
        assert fault(path).startswith("no file of tensors alone, or cut off (Weights only load failed")
    assert "pwned" not in capsys.readouterr().out


@pytest.mark.parametrize("kept", [0, 3, 500, -1])
def test_a_truncated_file_is_reported_in_one_line(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    assert fault(path).startswith("no file of tensors alone, or cut off (")


@pytest.mark.parametrize("data", [b"junk", b"\x80\x02h", b"\x80\x02]", b"not a pickle at all", bytes(range(256))])
def test_what_is_no_file_of_tensors_is_reported_in_one_line(path, data):
    path.write_bytes(data)
    assert fault(path).startswith("no file of tensors alone, or cut off (")


def test_of_tables_and_traces_both_are_written_or_neither(path, tmp_path, neuroshard):
    (tmp_path / "file").write_bytes(b"")
    done = neuroshard("tables", "--from", path, "--traces", tmp_path / "t.safetensors", "-o", tmp_path / "file" / "x")
    assert (done.returncode, done.stderr.splitlines()[-1][:7]) == (1, "error: ")
    assert not (tmp_path / "t.safetensors").exists()


def test_a_missing_file_is_named(tmp_path):
    assert fault(tmp_path / "ghost.pt.gz") == "no such file"


def test_what_the_command_says_of_it_names_the_file_once(path):
    source = from_file(path, Asked(optimizer="sgd", dim=64))
    assert source.tables().notes == import_tables(path, dim=64).notes
