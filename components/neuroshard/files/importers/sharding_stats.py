"""Parses what TorchRec's planner prints (`EmbeddingStats`, debug=True): `neuroshard tables --from-stats FILE`.

Columns are found by their headings, since versions of TorchRec print others:

| TorchRec | prints of each table |
|---|---|
| 0.2 and older | neither rows nor columns: refused |
| 0.3, 0.4 | `Pooling Factor`, `Emb Dim`, `Hash Size`; 0.4 also `Number of Poolings`; costs without their parts |
| 0.5 | also `Num Poolings`, `Weighing`, `Emb Dim (CW Dim)`; costs with their parts |
| 0.6 to 1.0 | also `Storage (HBM, DDR)` |
| 1.1 on | `Sum Pooling Factor`, `Sum Num Poolings`, `Num Indices`, `Weighted` |

What a version does not print is None here. No version prints element types, which `element_bytes_of` infers, nor
which columns of a table are on which of its ranks, which does not change the cost.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from neuroshard.core.errors import InvalidInput
from neuroshard.core.sharding import DATA_PARALLEL
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.text import counted, first_few
from neuroshard.core.tiers import IN_HBM
from neuroshard.core.units import format_bytes
from neuroshard.core.value import shown
from neuroshard.files.importers.imported import TableEntry, equal_features
from neuroshard.files.importers.planner_log import FRAME, Printout, last_printout

GIB = 2**30  # its "GB"
KERNELS = (IN_HBM.kernel, DATA_PARALLEL.kernel, "quant")
IN_DEVICE_MEMORY = (*KERNELS, *(f"batched_{kernel}" for kernel in KERNELS))  # of all versions
_MEMORY = re.compile(r"HBM: ([0-9]+(?:\.[0-9]+)?) GB, DDR: ([0-9]+(?:\.[0-9]+)?) GB")
_COUNT = re.compile(r"[a-z_]+: ([0-9]{1,9})")
_SEVERAL = "several processes wrote into the log at once; keep the lines of one"
_PARAMETERS = ("FQN", "Sharding", "Ranks")
_RANKS = ("Rank", "Perf (ms)")


class PrintedTable(NamedTuple):
    """One line of its Parameter Info. `perf_ms` and what is stored are estimates over all shards."""

    where: str
    path: str
    sharding: str  # TW, CW, RW, DP, TWRW, TWCW, GS
    kernel: str
    perf_ms: float
    hbm_gib: float | None
    stored_gib: float | None  # in HBM, host memory and on disk together
    lookups: float
    pooled: bool
    weighted: bool | None
    features: int
    dim: int
    shard_dim: int
    rows: int
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Without the path of its module, as trainers know it: a module's parameter has no dot in its name."""
        return self.path.rpartition(".")[2]

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]


@dataclass(frozen=True)
class Printed:
    """The last printout of a file. `rank_ms` is (compute, forward all-to-all, backward all-to-all), as printed."""

    tables: tuple[PrintedTable, ...]
    rank_ms: tuple[tuple[float, float, float], ...]
    batch_size: int  # of a rank
    weights_gib: float | None
    # of a rank, for sharded tables and their features: HBM, or host memory where there is none
    memory_gib: float | None
    notes: tuple[str, ...]  # which printout of several it is, and what this version does not print

    @property
    def ranks(self) -> int:
        return len(self.rank_ms)


def read_stats(path: Path) -> Printed:
    """The printout in a file, the last of several. Raises InvalidInput that names the line, or says what is missing."""
    printout = last_printout(path)
    texts = [line.text for line in printout.lines]
    rows = list(_rows(printout, _PARAMETERS))
    if not rows:
        raise InvalidInput(_no_tables(printout))
    tables = [_table(where, cells) for where, cells in rows]
    ranks = list(_rows(printout, _RANKS))
    batch_size = re.search(r"^Batch Size: ([0-9]{1,10})$", "\n".join(texts), re.M)
    if batch_size is None:
        raise InvalidInput(f"{printout.place} has no line 'Batch Size'; {_cut(printout)}")
    _check_whole(printout, tables, [cells["Rank"] for _, cells in ranks])
    return Printed(
        tables=tuple(tables),
        rank_ms=tuple(_rank_ms(where, cells) for where, cells in ranks),
        batch_size=int(batch_size.group(1)),
        weights_gib=_sum_of(texts, "Compute Kernels Embedding Weights:"),
        memory_gib=_memory(texts),
        notes=tuple(_notes(printout, rows, [cells for _, cells in ranks])),
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


def _no_tables(printout: Printout) -> str:
    """Why there are no tables to read: no printout, none of a table, columns that cannot be told apart, or it was cut off."""
    cells = [set(re.split(r" {2,}", line.text)) for line in printout.lines]
    if any({*_PARAMETERS, "Compute Kernel"} <= row for row in cells):
        return f"{printout.place} lists no table below Parameter Info; {_cut(printout)}"
    if any(line.text.startswith("FQN ") for line in printout.lines):
        return f"{printout.place}: the columns of Parameter Info are not two spaces apart; keep its spaces as they were printed"
    if any(line.text == "Parameter Info:" for line in printout.lines):
        return f"{printout.place} has no headings below Parameter Info; {_cut(printout)}"
    if printout.starts:
        return (
            f"{printout.place} holds no Parameter Info of TorchRec's planner: it was printed without "
            f"EmbeddingShardingPlanner(debug=True), or {_cut(printout)}"
        )
    return (
        f"{printout.path}: holds no Parameter Info of TorchRec's planner; let it print with "
        "EmbeddingShardingPlanner(debug=True)"
    )


def _cut(printout: Printout) -> str:
    """What to do about a printout that is not complete."""
    if len(printout.starts) > 1:
        return f"the log is cut off there; delete its lines from {printout.starts[-1]} on to read the printout before"
    return "the log is cut off; the printout is needed from its title to the row of # that ends it"


def _check_whole(printout: Printout, tables: Sequence[PrintedTable], ranks: Sequence[str]) -> None:
    """No line is missing and none came from another process: a table is listed once, ranks count up, kernels add up.

    Raises InvalidInput.
    """
    seen: set[str] = set()
    for table in tables:
        if table.path in seen:
            raise InvalidInput(f"{table.where}: {table.path} is listed a second time: {_SEVERAL}")
        seen.add(table.path)
    if not ranks and any(table.ranks for table in tables):
        raise InvalidInput(f"{printout.place} has no table of ranks, with headings from 'Rank' on; {_cut(printout)}")
    if list(ranks) != [str(rank) for rank in range(len(ranks))]:
        raise InvalidInput(
            f"{printout.place} lists ranks {shown(','.join(ranks))}, not 0 to {len(ranks) - 1}: lines are missing, or several "
            "processes wrote at once"
        )
    beyond = next((table for table in tables if max(table.ranks, default=0) >= max(1, len(ranks))), None)
    if beyond is not None:
        raise InvalidInput(
            f"{beyond.where}: {beyond.path} is on rank {max(beyond.ranks)}, but {counted(len(ranks), 'rank')} are printed"
        )
    kernels = _kernel_counts([line.text for line in printout.lines])
    if kernels and sum(kernels) != len(tables):
        raise InvalidInput(
            f"{printout.place} lists {counted(len(tables), 'table')}, but its kernels are those of {sum(kernels)}: lines are "
            "missing"
        )


def _kernel_counts(texts: Sequence[str]) -> list[int]:
    """Tables of each kernel, as printed below the tables; empty if the planner found no plan."""
    counts: list[int] = []
    for heading in ("Compute Kernels:", "Compute Kernels Count:"):  # up to 0.7, from 0.8
        for text in texts[texts.index(heading) + 1 :] if heading in texts else ():
            found = _COUNT.fullmatch(text)
            if not found:
                break
            counts.append(int(found.group(1)))
    return counts


def _notes(
    printout: Printout, rows: Sequence[tuple[str, dict[str, str]]], ranks: Sequence[dict[str, str]]
) -> Iterator[str]:
    if len(printout.starts) > 1:
        lines = ", ".join(str(start) for start in printout.starts[:-1][:3]) + (
            ", …" if len(printout.starts) > 4 else ""
        )
        yield (
            f"{len(printout.starts)} printouts are in the file; the last one counts (line {printout.starts[-1]}: "
            f"{counted(len(rows), 'table')} on {counted(len(ranks), 'rank')}), not those of lines {lines}"
        )
    first = rows[0][1]
    if "Weighted" not in first and "Weighing" not in first:
        yield "this version of TorchRec does not print whether lookups have weights: they are assumed to have none"
    poolings = _poolings(first)
    if poolings and "Num Indices" not in first:
        several = [cells for _, cells in rows if cells["Features"] not in ("1", cells[poolings].removesuffix(".0"))]
        if several:
            yield (
                f"several poolings of features that share a table: {counted(len(several), 'table')}; this version of TorchRec "
                "prints their sum only, so these features are assumed to have equal ones"
            )
    if "Emb Dim (CW Dim)" not in first and any("CW" in cells["Sharding"] for _, cells in rows):
        yield "this version of TorchRec does not print the width of column-wise shards: equal ones are assumed"
    if ranks and "(" not in ranks[0]["Perf (ms)"]:
        yield "this version of TorchRec does not print what part of a cost is all-to-alls: it counts as compute"


def _rows(printout: Printout, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of the table whose headings begin with the first of `needed`, cells by heading. Columns are 3 spaces apart."""
    header: list[str] = []
    for line in printout.lines:
        cells = re.split(r" {2,}", line.text)
        if not header:
            if cells[0] == needed[0] and set(needed) <= set(cells):
                header = cells
        elif not line.text or line.text == FRAME:  # the table has ended
            return
        elif cells == header:
            raise InvalidInput(f"{printout.where(line)}: the headings come a second time: {_SEVERAL}")
        elif not set(line.text) <= set("- ") and len(cells) > 2:  # other lines between are not the planner's
            if len(cells) != len(header):
                raise InvalidInput(
                    f"{printout.where(line)}: has {len(cells)} cells, but the planner's table has {len(header)} columns; is "
                    "the line broken or cut?"
                )
            yield printout.where(line), dict(zip(header, cells, strict=True))


def _table(where: str, cells: dict[str, str]) -> PrintedTable:
    if "Hash Size" not in cells:
        raise InvalidInput(
            f"{where}: TorchRec 0.2 and older do not print rows and columns of tables; read them from the model, with "
            "--from-torchrec"
        )
    try:
        ranks = _ranks(cells["Ranks"])
        dim, width = _widths(cells, len(ranks))
        stored = next((text for head, text in cells.items() if head.startswith("Storage")), None)
        gib = None if stored is None else [_number(part.split()[0]) for part in stored.strip("()").split(",")]
        weighted = cells.get("Weighted", cells.get("Weighing"))
        return PrintedTable(
            where=where,
            path=cells["FQN"],
            sharding=cells["Sharding"],
            kernel=cells["Compute Kernel"],
            perf_ms=_number(cells["Perf (ms)"].split()[0]),
            hbm_gib=None if gib is None else gib[0],
            stored_gib=None if gib is None else sum(gib),
            lookups=_lookups(cells),
            pooled=cells["Output"] == "pooled",
            weighted=None if weighted is None else weighted == "weighted",
            features=int(cells["Features"]),
            dim=dim,
            shard_dim=width,
            rows=int(cells["Hash Size"]),
            ranks=ranks,
        )
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        what = f"no column {error}" if isinstance(error, KeyError) else shown(str(error), 100)
        raise InvalidInput(f"{where}: not a line of the planner's Parameter Info: {what}") from None


def _widths(cells: dict[str, str], shards: int) -> tuple[int, int]:
    """Columns of a table, and of its first shard of columns: `128 (32)`, or 128 and as many equal shards as it has ranks."""
    text = cells["Emb Dim (CW Dim)"] if "Emb Dim (CW Dim)" in cells else cells["Emb Dim"]
    dim, _, printed = text.partition(" (")
    if printed:
        width = int(printed.rstrip(")"))
    elif "Emb Dim" in cells and "CW" in cells["Sharding"] and shards:
        width = -(-int(dim) // shards)
    else:
        width = int(dim)
    if not 0 < width <= int(dim):
        raise ValueError(f"shards of {width} columns of {dim}")
    return int(dim), width


def _lookups(cells: dict[str, str]) -> float:
    """Lookups a sample of all features of a table: pooling factors times poolings, which older versions do not multiply."""
    if "Num Indices" in cells:
        return _number(cells["Num Indices"])
    factors = _number(cells["Sum Pooling Factor"] if "Sum Pooling Factor" in cells else cells["Pooling Factor"])
    poolings = _poolings(cells)
    return factors * _number(cells[poolings]) / int(cells["Features"]) if poolings else factors


def _poolings(cells: dict[str, str]) -> str | None:
    """The column of the poolings: 0.3 has none."""
    return next((head for head in ("Sum Num Poolings", "Num Poolings", "Number of Poolings") if head in cells), None)


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
        if not rest:  # up to 0.4
            return _number(total), 0.0, 0.0
        forward, forward_collective, backward, backward_collective, *prefetch = (
            _number(part) for part in rest.rstrip(")").split(",")
        )
        parts = (forward + backward + sum(prefetch), forward_collective, backward_collective)
        scale = _number(total) / sum(parts) if sum(parts) else 0.0
    except ValueError as error:
        raise InvalidInput(f"{where}: not a line of the planner's ranks: {shown(str(error))}") from None
    return parts[0] * scale, parts[1] * scale, parts[2] * scale


def _memory(texts: Sequence[str]) -> float | None:
    """What a rank has for tables: its HBM, or its host memory where it has none."""
    for heading in ("Planning Memory:", "Usable Memory:"):  # from 0.8, up to 0.7
        found = _MEMORY.match(texts[texts.index(heading) + 1]) if heading in texts[:-1] else None
        if found:
            return float(found.group(1)) or float(found.group(2)) or None
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


ROUNDING_GIB = 0.0006  # three digits after the point


def stats_entries(printed: Printed, element_bytes: int | None = None) -> tuple[list[TableEntry], list[str]]:
    """The tables as entries, and notes. With `element_bytes` None they are inferred from the printed storage."""
    inferred, how = element_bytes_of(printed, element_bytes)
    entries = [
        TableEntry(
            table.where,
            {
                "name": table.name,
                "module": table.module,
                "rows": table.rows,
                "dim": table.dim,
                "pooling_factor": table.lookups,
                "weighted": bool(table.weighted),
                "element_bytes": size,
                "pooling": "sum" if table.pooled else "none",
                "features": equal_features(list(map(str, range(1, table.features + 1))), table.lookups)
                if table.features > 1
                else [],
            },
        )
        for table, size in zip(printed.tables, inferred, strict=True)
    ]
    shared = sum(table.features > 1 for table in printed.tables)
    notes = [how, "whether a table pools by sum or mean is not printed: sum is assumed", *printed.notes]
    sizes = (table.rows * table.dim * size for table, size in zip(printed.tables, inferred, strict=True))
    notes += host_notes(zip(printed.tables, sizes, strict=True))
    if shared:
        notes.append(
            f"read by several features: {counted(shared, 'table')}; each feature is given an equal share of the lookups"
        )
    if all(table.lookups == table.features for table in printed.tables):
        notes.append("every feature has 1 lookup, as if the planner got no pooling factors: costs grow with them")
    return entries, notes


def element_bytes_of(printed: Printed, given: int | None) -> tuple[list[int], str]:
    """Bytes of an element of each table (4 or 2), and a note on where they come from."""
    elements = [table.rows * table.dim / GIB for table in printed.tables]
    if given is not None:
        return [given] * len(elements), f"elements have {given} bytes, as --dtype says"
    if all(table.stored_gib is None for table in printed.tables):
        return [4] * len(elements), (
            "neither element types nor what a table stores are printed by this version of TorchRec: elements count as fp32; if "
            "they are not, say so with --dtype"
        )
    # a table that stores less than its weights take in fp32 must be fp16
    sizes = [
        2
        if table.stored_gib is not None and table.stored_gib + ROUNDING_GIB < 4 * count * _copies(table, printed)
        else 4
        for table, count in zip(printed.tables, elements, strict=True)
    ]
    weights = sum(size * count for size, count in zip(sizes, elements, strict=True))
    for size in (4, 2):
        if printed.weights_gib is not None and abs(size * sum(elements) - printed.weights_gib) <= 0.0005 * 8:
            return [size] * len(
                sizes
            ), f"elements have {size} bytes, by the printed {printed.weights_gib:,} GB of weights"
    if printed.weights_gib is not None and abs(weights - printed.weights_gib) <= 0.0005 * 8:
        halves = sizes.count(2)
        return (
            sizes,
            f"{halves} tables of {len(sizes)} have elements of 2 bytes, by what each stores (unknown for small ones)",
        )
    return sizes, (
        f"element types are not printed: {sizes.count(2)} of {counted(len(sizes), 'table')} too small for fp32 count as "
        "fp16, the others as fp32; if all have one type, give it with --dtype"
    )


def _copies(table: PrintedTable, printed: Printed) -> int:
    """Copies of a table in its printed storage: a data-parallel table is on every rank."""
    return max(1, printed.ranks) if table.sharding == "DP" and table.stored_gib else 1
