"""Parses what TorchRec's planner prints (`EmbeddingStats`, debug=True): `neuroshard tables --from-stats FILE`.

The printout may be part of a log, with a logger's prefix on each line. It lacks element types, which
files/importers/sharding_stats_tables.py infers, and which columns of a table are on which of its ranks, which does not change the
cost.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from neuroshard.core.errors import InvalidInput
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.text import counted, first_few
from neuroshard.core.units import format_bytes
from neuroshard.core.value import shown
from neuroshard.files.disk import read_bytes

GIB = 2**30  # its "GB"
IN_DEVICE_MEMORY = (
    "fused",
    "dense",
    "batched_fused",
    "batched_dense",
    "quant",
    "batched_quant",
)  # kernels of all versions
_LINE = re.compile(r"#(.*)#\s*$")
_HBM = re.compile(r"HBM: ([0-9]+(?:\.[0-9]+)?) GB, DDR")


class PrintedTable(NamedTuple):
    """One line of its Parameter Info. `perf_ms` and `storage_gib` are estimates over all shards."""

    where: str
    path: str
    sharding: str  # TW, CW, RW, DP, TWRW, TWCW, GS
    kernel: str
    perf_ms: float
    storage_gib: float
    lookups: float
    pooled: bool
    weighted: bool
    features: int
    dim: int
    shard_dim: int
    rows: int
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Without the path of its module, as trainers know it: a module's parameter has no dot in its name."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Printed:
    """The last printout of a file. `rank_ms` is (compute, forward all-to-all, backward all-to-all), as printed."""

    tables: tuple[PrintedTable, ...]
    rank_ms: tuple[tuple[float, float, float], ...]
    batch_size: int  # of a rank
    weights_gib: float | None
    memory_gib: float | None  # of a rank, for sharded tables and their features
    printouts: int

    @property
    def ranks(self) -> int:
        return len(self.rank_ms)


def read_stats(path: Path) -> Printed:
    """The printout in a file, the last of several. Raises InvalidInput that names the line, or says what is missing."""
    lines = list(_lines(path))
    starts = [index for index, (_, text) in enumerate(lines) if "--- Planner Statistics ---" in text]
    lines = lines[starts[-1] :] if starts else lines
    texts = [text for _, text in lines]

    tables = [_table(where, cells) for where, cells in _rows(path, lines, "FQN", "Hash Size", "Ranks")]
    if not tables:
        raise InvalidInput(
            f"{path}: holds no Parameter Info of TorchRec's planner; let it print with EmbeddingShardingPlanner(debug=True) and "
            "keep its lines unwrapped"
        )
    ranks = [_rank_ms(where, cells) for where, cells in _rows(path, lines, "Rank", "Perf (ms)")]
    batch_size = re.search(r"^Batch Size: ([0-9]{1,10})$", "\n".join(texts), re.M)
    if batch_size is None:
        raise InvalidInput(f"{path}: the printout has no line 'Batch Size'; is it complete?")
    return Printed(
        tables=tuple(tables),
        rank_ms=tuple(ranks),
        batch_size=int(batch_size.group(1)),
        weights_gib=_sum_of(texts, "Compute Kernels Embedding Weights:"),
        memory_gib=_after(texts, "Planning Memory:"),
        printouts=max(1, len(starts)),
    )


def host_notes(tables: Iterable[tuple[PrintedTable, int]]) -> list[str]:
    """A note that names the printed tables, of so many bytes each, that their plan does not keep in device memory."""
    held = [(table, nbytes) for table, nbytes in tables if table.kernel not in IN_DEVICE_MEMORY]
    if not held:
        return []
    kernels = " and ".join(sorted({table.kernel for table, _ in held}))
    return [
        f"{counted(len(held), 'table')} of {format_bytes(sum(nbytes for _, nbytes in held))} in host memory or on disk "
        f"({kernels}: {first_few([table.path for table, _ in held])}), counted here as device memory"
    ]


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The place of each line, and its text between the two #."""
    text = read_bytes(path).decode("utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        found = _LINE.search(line)
        if found:
            yield f"{path}: line {number}", found.group(1).strip().strip("#").strip()


def _rows(
    path: Path, lines: Sequence[tuple[str, str]], first: str, *needed: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of the table whose header begins with `first`, cells by their header. Columns are 3 spaces apart."""
    header: list[str] = []
    for where, text in lines:
        cells = re.split(r" {2,}", text)
        if not header:
            if cells[0] == first and set(needed) <= set(cells):
                header = cells
        elif not set(text) <= set("- "):
            if len(cells) != len(header):
                if len(cells) < 3:  # the table has ended
                    return
                raise InvalidInput(
                    f"{where}: has {len(cells)} cells, but the planner's table has {len(header)} columns"
                )
            yield where, dict(zip(header, cells, strict=True))
        elif not text:
            return


def _table(where: str, cells: dict[str, str]) -> PrintedTable:
    try:
        dim, _, shard_dim = cells["Emb Dim (CW Dim)"].partition(" (")
        width = int(shard_dim.rstrip(")") or dim)
        if not 0 < width <= int(dim):
            raise ValueError(f"shards of {width} columns of {dim}")
        return PrintedTable(
            where=where,
            path=cells["FQN"],
            sharding=cells["Sharding"],
            kernel=cells["Compute Kernel"],
            perf_ms=_number(cells["Perf (ms)"].split()[0]),
            storage_gib=_number(
                next(text for head, text in cells.items() if head.startswith("Storage")).strip("(").split()[0]
            ),
            lookups=_number(cells.get("Num Indices") or cells["Sum Pooling Factor"]),
            pooled=cells["Output"] == "pooled",
            weighted=cells["Weighted"] == "weighted",
            features=int(cells["Features"]),
            dim=int(dim),
            shard_dim=width,
            rows=int(cells["Hash Size"]),
            ranks=_ranks(cells["Ranks"]),
        )
    except (KeyError, ValueError, StopIteration) as error:
        what = f"no column {error}" if isinstance(error, KeyError) else str(error) or "no column Storage"
        raise InvalidInput(f"{where}: not a line of the planner's Parameter Info: {what}") from None


def _number(text: str) -> float:
    """A number that may be an amount of something. Raises ValueError."""
    number = float(text)
    if not 0 <= number < 1e15:  # not NaN either
        raise ValueError(f"{text} is not an amount")
    return number


def _ranks(text: str) -> tuple[int, ...]:
    """`3`, `1,5,9`, `0-95`, or `None` where it found no plan."""
    ranks: list[int] = []
    for part in text.split(",") if text != "None" else ():
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end < MAX_DEVICES:
            raise ValueError(f"ranks {part}")
        ranks += range(begin, end + 1)
    return tuple(ranks)


def _rank_ms(where: str, cells: dict[str, str]) -> tuple[float, float, float]:
    """Parts are printed with one digit below 1 ms and none above, the total with three: parts are scaled to the total."""
    try:
        total, _, rest = cells["Perf (ms)"].partition(" (")
        forward, forward_collective, backward, backward_collective, *prefetch = (
            _number(part) for part in rest.rstrip(")").split(",")
        )
        parts = (forward + backward + sum(prefetch), forward_collective, backward_collective)
        scale = _number(total) / sum(parts) if sum(parts) else 0.0
    except ValueError as error:
        raise InvalidInput(f"{where}: not a line of the planner's ranks: {shown(str(error))}") from None
    return parts[0] * scale, parts[1] * scale, parts[2] * scale


def _after(texts: Sequence[str], heading: str) -> float | None:
    """The GB of HBM on the line after a heading."""
    for text, following in itertools.pairwise(texts):
        found = _HBM.match(following)
        if text == heading and found:
            return float(found.group(1))
    return None


def _sum_of(texts: Sequence[str], heading: str) -> float | None:
    """The GB of the lines `kernel: 1.5 GB` below a heading, together."""
    if heading not in texts:
        return None
    total = 0.0
    for text in texts[texts.index(heading) + 1 :]:
        found = re.fullmatch(r"\S+: ([0-9]+(?:\.[0-9]+)?) GB", text)
        if not found:
            break
        total += float(found.group(1))
    return total
