"""Lookups of a batch: read from a trace of real ones, or drawn so that they have a table's pooling factor and reuse bins.

A traces file is one safetensors file with two tensors a table, `NAME.indices` (int64, sample after sample) and
`NAME.lengths` (int64, lookups of each sample), and `format_version` in its metadata. One that a trainer recorded also says in
its metadata how (`recorded`, the JSON of a Recorded).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save, save_file

from neuroshard.core.errors import InvalidInput, NeuroshardError
from neuroshard.core.table import Table
from neuroshard.core.value import Moment, Value, Whole, check_format, decode_json
from neuroshard.files.access import Floats, Ints, row_groups, spreading_step
from neuroshard.files.disk import disk_errors, writing

TRACES_FORMAT = 1
_DRAWN_AT_ONCE = 2**22  # lookups; the temporary arrays of a step then take 100 MB


class Lookups(NamedTuple):
    """Row numbers of all lookups, sample after sample (N,), and how many each sample has (batch,); both int64."""

    indices: Ints
    lengths: Ints


@dataclass(frozen=True)
class Traces:
    """Recorded lookups by table name. The arrays may be views of a mapped file: do not write to them."""

    tables: Mapping[str, Lookups]


class Recorded(Value):
    """How a trainer recorded a trace: `batch_size` samples of each of `batches` batches, of `steps` steps up to `time` (UTC, ISO
    8601). `rows` are those of each table."""

    batch_size: Annotated[Whole, Field(ge=1, le=2**31)]
    rows: dict[str, Annotated[Whole, Field(ge=1)]]
    batches: Annotated[Whole, Field(ge=1, le=2**31)]
    steps: Annotated[Whole, Field(ge=1, le=2**53)]
    time: Moment

    @property
    def said(self) -> str:
        """In a few words, for notes on tables and plans."""
        return f"{self.batches:,} of {self.steps:,} steps of a trainer up to {self.time}, {self.batch_size:,} samples of each"


def bytes_of_traces(traces: Traces, recorded: Recorded) -> bytes:
    """The file of recorded traces, all arrays of int64."""
    tensors = dict(_arrays(traces))
    about = {"format_version": str(TRACES_FORMAT), "recorded": recorded.canonical_json().decode()}
    data: bytes = save(tensors, metadata=about)
    return data


def recorded_in(path: Path) -> Recorded | None:
    """How a trainer recorded a traces file; None of others. Raises InvalidInput or NewerFormat in one line."""
    with _opened(path) as file:
        about = file.metadata().get("recorded")
    return None if about is None else Recorded.parse(decode_json(about.encode(), str(path)), f"{path}: recorded")


def write_traces(path: Path, traces: Traces) -> None:
    """Write the traces, whole or not at all, without copying them. Raises InvalidInput for what are no whole numbers."""
    for key, array in _arrays(traces):
        if not np.issubdtype(np.asarray(array).dtype, np.integer):
            name, _, kind = key.rpartition(".")
            raise InvalidInput(
                f"{path}: {kind} of table {name!r} are {np.asarray(array).dtype}; row numbers and lengths are whole numbers"
            )
    tensors = {name: np.ascontiguousarray(array, dtype=np.int64) for name, array in _arrays(traces)}
    with writing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format_version": str(TRACES_FORMAT)})
        except SafetensorError as error:  # a full disk
            raise NeuroshardError(f"{path}: cannot write it: {str(error).splitlines()[0]}") from None


def _arrays(traces: Traces) -> Iterator[tuple[str, Ints]]:
    """All arrays, by their names in a file."""
    for name, lookups in traces.tables.items():
        yield from ((f"{name}.{kind}", array) for kind, array in lookups._asdict().items())


def read_traces(path: Path) -> Traces:
    """Traces, checked whole; they take as much memory as the file. Raises InvalidInput or NewerFormat in one line."""
    where = str(path)
    try:
        with _opened(path) as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dict
    except (AttributeError, KeyError, TypeError) as error:  # an element type that NumPy lacks
        raise InvalidInput(f"{where}: lookups and lengths must be int64 ({error})") from None
    names = [key.removesuffix(".indices") for key in arrays if key.endswith(".indices")]
    if sorted(arrays) != sorted(f"{name}.{kind}" for name in names for kind in Lookups._fields):
        raise InvalidInput(f"{where}: expected the tensors NAME.indices and NAME.lengths of each table")
    tables = {name: Lookups(arrays[f"{name}.indices"], arrays[f"{name}.lengths"]) for name in names}
    for name, lookups in tables.items():
        check_lookups(lookups, f"{where}: table {name!r}")
    return Traces(tables)


def _check_version(metadata: Mapping[str, str] | None, where: str) -> None:
    version = (metadata or {}).get("format_version", "")
    if not version.isdecimal() or len(version) > 9:
        raise InvalidInput(f"{where}: not a traces file: its metadata has no format_version")
    check_format({"format_version": int(version)}, TRACES_FORMAT, where)


def trace_tables(path: Path) -> tuple[str, ...]:
    """Names of the tables in a traces file, of which nothing else is read. Raises InvalidInput or NewerFormat in one line."""
    with _opened(path) as file:
        return tuple(key.removesuffix(".indices") for key in file.keys() if key.endswith(".indices"))  # noqa: SIM118


def trace_batches(path: Path, name: str, batch_size: int) -> Iterator[Ints]:
    """Row numbers of each batch of a table's trace, in order; samples that are too few for a batch at the end are left out.

    Memory is that of a batch. Raises InvalidInput where the file is no traces file, or holds no lookups of such a table.
    """
    where = f"{path}: table {name!r}"
    with _opened(path) as file:
        if not {f"{name}.indices", f"{name}.lengths"} <= {*file.keys()}:
            raise InvalidInput(f"{where}: it has no trace of it")
        indices, lengths = (file.get_slice(f"{name}.{kind}") for kind in Lookups._fields)
        for kind, one in (("indices", indices), ("lengths", lengths)):
            if len(one.get_shape()) != 1 or one.get_dtype() != "I64":
                raise InvalidInput(
                    f"{where}: {kind} must be a vector of int64, not {one.get_dtype()} of {one.get_shape()}"
                )
        samples, every, done = lengths.get_shape()[0], indices.get_shape()[0], 0
        for first in range(0, samples, batch_size):
            of_samples = lengths[first : min(first + batch_size, samples)]
            if of_samples.min() < 0 or of_samples.max() > every:
                raise InvalidInput(
                    f"{where}: a sample of {first} to {first + len(of_samples) - 1} has an impossible length"
                )
            begin, done = done, done + int(of_samples.sum())
            if done > every or (first + batch_size >= samples and done < every):
                than = "more" if done > every else "fewer"
                raise InvalidInput(f"{where}: the lengths add up to {than} lookups than its {every:,} indices")
            if len(of_samples) == batch_size:
                # safetensors cannot slice where nothing is left
                yield indices[begin:done] if done > begin else np.empty(0, dtype=np.int64)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A traces file, open. Raises InvalidInput or NewerFormat in one line."""
    if not path.exists():
        raise InvalidInput(f"{path}: no such file")
    try:
        with disk_errors(path, "read it"), safe_open(path, framework="numpy") as file:
            _check_version(file.metadata(), str(path))
            yield file
    except SafetensorError as error:
        said = f"cut off, or no safetensors that are read here ({str(error).splitlines()[0]:.120})"
        raise InvalidInput(f"{path}: {said}; write it as `neuroshard tables --traces` does") from None


def check_lookups(lookups: Lookups, where: str) -> None:
    """Raise InvalidInput unless both arrays are int64 vectors that agree, with neither negative rows nor lengths."""
    for name, array in lookups._asdict().items():
        if array.ndim != 1 or array.dtype != np.int64:
            raise InvalidInput(f"{where}: {name} must be a vector of int64, not {array.dtype} of shape {array.shape}")
        if len(array) and int(array.min()) < 0:
            raise InvalidInput(f"{where}: {name}[{int(array.argmin())}] is {int(array.min())}, below 0")
    if not len(lookups.lengths):
        raise InvalidInput(f"{where}: it has no samples")
    if int(lookups.lengths.max()) > len(lookups.indices):  # before they are added up, which might overflow
        raise InvalidInput(
            f"{where}: lengths[{int(lookups.lengths.argmax())}] is {int(lookups.lengths.max()):,} lookups, but there are "
            f"{len(lookups.indices):,} indices"
        )
    if int(lookups.lengths.sum()) != len(lookups.indices):
        raise InvalidInput(
            f"{where}: the lengths add up to {int(lookups.lengths.sum()):,} lookups, but there are "
            f"{len(lookups.indices):,} indices"
        )


def trace_lookups(traces: Traces, table: Table, batch_size: int, rng: np.random.Generator) -> Lookups:
    """A batch of consecutive samples of the table's trace, from a random one on, beginning again after the last.

    Where the table's pooling factor is less than the trace's, as that of a row block is, only lookups of a span of rows are
    kept. Each row in it is read as often as before; the span begins anywhere, and its length gives the right mean. Where the
    factor is more, a sample joins several of the trace, and each lookup is kept with the probability that gives the mean. Row
    numbers are taken modulo the table's rows, which matters only for a table that was measured with fewer rows. Raises
    InvalidInput where there is no trace of the table's name.
    """
    if table.name not in traces.tables:
        raise InvalidInput(f"the traces have no table {table.name!r}; they have {len(traces.tables)} others")
    trace = traces.tables[table.name]
    recorded = len(trace.indices) / len(trace.lengths)
    scale = table.pooling_factor / recorded if recorded else 0.0
    joined = max(math.ceil(scale), 1)

    samples = (rng.integers(len(trace.lengths)) + np.arange(batch_size * joined)) % len(trace.lengths)
    ends = np.cumsum(trace.lengths)
    lengths = trace.lengths[samples]
    before = np.cumsum(lengths) - lengths
    positions = np.repeat(ends[samples] - lengths - before, lengths) + np.arange(lengths.sum())
    owner = np.repeat(np.arange(batch_size * joined) // joined, lengths)
    rows = trace.indices[positions]
    if scale < joined and len(rows):
        likely = _in_a_span(rows, scale, rng) if scale < 1 else scale / joined
        kept = rng.random(len(rows)) < likely
        rows, owner = rows[kept], owner[kept]
    return Lookups(rows % table.rows, np.bincount(owner, minlength=batch_size))


def _in_a_span(rows: Ints, share: float, rng: np.random.Generator) -> Floats:
    """1 for lookups of rows in a span of row numbers that has a share of all lookups, else 0, and of its last row between: (N,).

    After the highest row number the span continues with the lowest.
    """
    _, row, counts = np.unique(rows, return_inverse=True, return_counts=True)
    first = int(rng.integers(len(counts)))
    before = np.roll(np.cumsum(np.roll(counts, -first)), first) - counts
    return np.clip((share * len(rows) - before) / counts, 0.0, 1.0)[row]


def draw_lookups(table: Table, batch_size: int, rng: np.random.Generator) -> Lookups:
    """A batch of lookups as the table's pooling factor and reuse bins say, whatever the batch size. Deterministic for `rng`.

    Every sample has `pooling_factor` lookups, rounded up or down at random where it is a fraction; over the batch their mean
    is as near to it as whole lookups allow. Rows come from the groups of `row_groups`, each row independent of the others,
    and are spread over the table as hashed rows are. Counted again at `reuse_batch_size`, the bins differ from the
    table's by at most 0.05 in total variation for tables of 1,000 rows or more, 0.1 from 100 on. The bins say too little
    where a row is looked up more than 2^17 times: then more rows are touched than were. Nothing is allocated per row.
    """
    lengths = _draw_lengths(table.pooling_factor, batch_size, rng)
    groups = row_groups(table)
    shares = np.concatenate([[0.0], np.cumsum(groups.lookup_shares)])
    places = np.concatenate([[0.0], np.cumsum(groups.rows)])
    step = spreading_step(table.rows)

    indices = np.empty(int(lengths.sum()), dtype=np.int64)
    for start in range(0, len(indices), _DRAWN_AT_ONCE):
        part = indices[start : start + _DRAWN_AT_ONCE]
        part[:] = np.interp(rng.random(len(part)), shares, places)  # the inverse of the distribution of rows
        np.minimum(part, table.rows - 1, out=part)
        part *= step
        part %= table.rows
    return Lookups(indices, lengths)


def _draw_lengths(pooling_factor: float, batch_size: int, rng: np.random.Generator) -> Ints:
    whole = math.floor(pooling_factor)
    longer = batch_size * (pooling_factor - whole)
    lengths = np.full(batch_size, whole, dtype=np.int64)
    lengths[rng.permutation(batch_size)[: math.floor(longer + rng.random())]] += 1
    return lengths
