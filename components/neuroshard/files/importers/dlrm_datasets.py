"""Meta's dlrm_datasets: a .pt or .pt.gz of (indices, offsets, lengths) -> tables with counted reuse bins, and the lookups.

`lengths` is (tables, batch); `indices` holds the rows looked up, table after table and in each sample after sample;
`offsets` (tables * batch + 1) is where each sample's begin. The 2021 file has 856 tables, batch 65,536 and 887,017,990 lookups.

The file has neither names, rows nor dims. A sidecar, `X.json` next to `X.pt`, may give them: a tables.json or a list with
one object a table, of which name, rows, dim and bytes count. Otherwise rows is the highest row looked up, plus one.
"""

import gzip
import os
import re
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from neuroshard.core.errors import InvalidInput, NeuroshardError
from neuroshard.core.extras import install_command
from neuroshard.core.text import counted
from neuroshard.core.value import shown
from neuroshard.files.access import Ints, count_bins
from neuroshard.files.disk import check_unpacked, disk_errors
from neuroshard.files.importers.imported import Defaults, Imported, number_repeats, read_json
from neuroshard.files.traces import Lookups, Traces, check_lookups
from neuroshard.progress import progress


def read_dlrm_dataset(path: Path, *, dim: int, defaults: Defaults) -> Imported:
    """Tables, their lookups as traces, and notes. `dim` is that of tables for which no sidecar says one.

    The lookups stay in the mapped file (a .gz is unpacked to a temporary one first), so it takes memory for one table
    at a time. Raises InvalidInput in one line.
    """
    indices, offsets, lengths = _load(path)
    entries = _sidecar(path, len(lengths))
    names, notes = number_repeats([str(entry.get("name", f"table_{i}")) for i, entry in enumerate(entries)])

    tables = []
    lookups: dict[str, Lookups] = {}
    with progress("count reuse", total=len(lengths), unit="tables") as bar:
        for number, (name, entry) in enumerate(zip(names, entries, strict=True)):
            where = f"{path}: table {number}"
            lookups[name] = _table_lookups(indices, offsets, lengths, number, where)
            read = lookups[name].indices
            rows = int(read.max()) + 1 if len(read) else 1
            found = {
                "name": name,
                "pooling_factor": len(read) / lengths.shape[1],
                "reuse_bins": count_bins(read),
                "reuse_batch_size": lengths.shape[1],
            }
            table = defaults.table({"rows": rows, "dim": dim, **entry, **found}, where)
            if table.rows < rows:
                raise InvalidInput(f"{where}: row {rows - 1} is looked up, but the sidecar gives it {table.rows} rows")
            tables.append(table)
            bar.advance()
    for key, took in (("rows", "the highest row looked up, plus one"), ("dim", f"{dim} (--dim)")):
        guessed = sum(key not in entry for entry in entries)
        if guessed:
            notes.append(f"the file has no {key}: {counted(guessed, 'table')} took {took}")
    return Imported(tuple(tables), Traces(lookups), tuple(f"{path}: {note}" for note in notes))


def _table_lookups(indices: Ints, offsets: Ints, lengths: Ints, number: int, where: str) -> Lookups:
    """The lookups of one table, checked. Raises InvalidInput."""
    batch = lengths.shape[1]
    borders = offsets[number * batch : (number + 1) * batch + 1]
    if not np.array_equal(np.diff(borders), lengths[number]):
        raise InvalidInput(f"{where}: the offsets do not agree with the lengths")
    lookups = Lookups(
        indices[borders[0] : borders[-1]].astype(np.int64, copy=False), lengths[number].astype(np.int64, copy=False)
    )
    check_lookups(lookups, where)
    return lookups


def _load(path: Path) -> tuple[Ints, Ints, Ints]:
    """The three arrays, with shapes and ends that agree. Raises InvalidInput."""
    try:
        import torch
    except ImportError:
        raise NeuroshardError(f"{path}: reading it needs PyTorch; {install_command('measure')}") from None
    tensors = _torch_load(path)
    kind = f"{path}: expected three integer tensors (indices, offsets, lengths of shape (tables, batch))"
    if not isinstance(tensors, tuple | list) or len(tensors) != 3:
        raise InvalidInput(f"{kind}, found {shown(type(tensors).__name__)}")
    if not all(isinstance(t, torch.Tensor) and t.dtype in (torch.int64, torch.int32) for t in tensors):
        raise InvalidInput(f"{kind}, found {shown([str(getattr(t, 'dtype', type(t).__name__)) for t in tensors])}")
    if odd := [t for t in tensors if t.layout is not torch.strided or t.device.type != "cpu"]:
        raise InvalidInput(f"{kind}, found one that is {odd[0].layout} on {odd[0].device}; save them dense, on the CPU")
    if any(t.numel() * t.element_size() > t.untyped_storage().nbytes() for t in tensors):
        raise InvalidInput(f"{kind}, found one whose values share their memory (an expanded one); save contiguous ones")
    indices, offsets, lengths = (t.contiguous().numpy() for t in tensors)
    if (indices.ndim, offsets.ndim, lengths.ndim) != (1, 1, 2) or not lengths.size:
        raise InvalidInput(f"{kind}, found shapes {indices.shape}, {offsets.shape}, {lengths.shape}")
    if len(offsets) != lengths.size + 1:
        raise InvalidInput(f"{path}: {len(offsets):,} offsets for {lengths.size:,} samples; there must be one more")
    if (int(offsets[0]), int(offsets[-1])) != (0, len(indices)):
        raise InvalidInput(
            f"{path}: the offsets go from {offsets[0]} to {offsets[-1]}, but there are {len(indices):,} indices"
        )
    return indices, offsets, lengths


def _torch_load(path: Path) -> Any:
    """What torch.save put into the file, plain data only, mapped rather than read where its format allows."""
    import torch

    if not path.exists():
        raise InvalidInput(f"{path}: no such file")
    plain = _unpack(path) if path.name.lower().endswith(".gz") else path
    try:
        with disk_errors(path, "read it"):
            if zipfile.is_zipfile(plain):  # its parts may be compressed too, to any size
                with zipfile.ZipFile(plain) as parts:
                    check_unpacked(sum(part.file_size for part in parts.infolist()), plain.stat().st_size, path)
            return torch.load(plain, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(plain))
    except NeuroshardError:
        raise
    except Exception as error:  # its unpickler raises struct.error, IndexError, KeyError … for what is not a pickle
        raise _broken(path, error) from None
    finally:
        if plain != path:
            plain.unlink()  # what is mapped stays readable


def _unpack(path: Path) -> Path:
    """The unpacked file, in the folder for temporary files. Raises InvalidInput, or NeuroshardError for a full disk."""
    handle, name = tempfile.mkstemp(suffix=".pt")
    try:
        with disk_errors(Path(name), f"unpack {path} there"), os.fdopen(handle, "wb") as unpacked:
            try:
                with gzip.open(path) as packed:
                    while chunk := packed.read(2**24):
                        check_unpacked(unpacked.tell() + len(chunk), path.stat().st_size, path)
                        unpacked.write(chunk)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise _broken(path, error) from None
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)


def _broken(path: Path, error: Exception) -> InvalidInput:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return InvalidInput(
        f"{path}: no file of tensors alone, or cut off ({reason:.120}); torch.save (indices, offsets, lengths)"
    )


def _sidecar(path: Path, tables: int) -> list[dict[str, Any]]:
    """What `X.json` says of each table of `X.pt` or `X.pt.gz`; empty objects where there is no such file."""
    sidecar = path.with_name(re.sub(r"\.pt(\.gz)?$", "", path.name, flags=re.IGNORECASE) + ".json")
    if not sidecar.exists():
        return [{} for _ in range(tables)]
    entries, _ = read_json(sidecar)
    if len(entries) != tables:
        raise InvalidInput(f"{sidecar}: describes {len(entries)} tables, but {path.name} has {tables}")
    return [entry.fields for entry in entries]
