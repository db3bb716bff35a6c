"""The folder that `measure` fills and `pretrain` reads: costs.json and numbered Parquet parts.

costs.json holds the bench and the base tables and is written first. Each part holds whole rows, a case with its cost, and
appears by rename. So a run that is killed leaves only whole parts, and the next run measures the cases that they lack. The run
that writes holds `.lock`.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypeVar

import pyarrow as pa
from pydantic import Field

from neuroshard.core.case import Case, CollectiveCase, ComputeCase
from neuroshard.core.clean import log
from neuroshard.core.cost import COST_OF_KIND, Bench, CollectiveCost, ComputeCost, Cost, Costs, TierCost, slowness
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.label import teaches
from neuroshard.core.table import Table
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.value import Value, check_format, decode_json, shown
from neuroshard.files.cases import CASE_FIELDS, Fields, case_from_row, case_row, read_rows, write_rows
from neuroshard.files.disk import disk_errors, is_lock_of, read_bytes, take_lock, write_bytes, writing_folder

_Case = TypeVar("_Case")
_Cost = TypeVar("_Cost", ComputeCost, CollectiveCost, TierCost)

BROKEN = ".broken"  # suffix of a part that could not be read
FLUSH_SECONDS = 5.0  # the first row after so long is written, with those before it; a killed run loses what came after

_TIMES = ("forward_ms", "backward_ms")
_SPREADS = ("forward_spread_ms", "backward_spread_ms", "forward_median_ms", "backward_median_ms")
_HBM, _ROWS = ("hbm_forward_ms", "hbm_backward_ms"), ("distinct_rows", "missed_rows")


def _fields(kind: str, ms: Sequence[str] = (), lists: Sequence[str] = ()) -> Fields:
    """The columns of the parts of a kind: its cases', and its costs' numbers and lists of numbers."""
    numbers = [(name, pa.float64()) for name in ms] + [(name, pa.list_(pa.float64())) for name in lists]
    disturbed = [] if kind == "collective" else [("disturbed", pa.bool_())]
    return [*CASE_FIELDS[kind], ("round", pa.int32()), *numbers, ("error", pa.string()), *disturbed]


FIELDS = {
    "compute": _fields("compute", (*_TIMES, *_SPREADS)),
    "collective": _fields("collective", lists=(*_TIMES, *_SPREADS)),
    "tiers": _fields("tiers", (*_TIMES, *_HBM), _ROWS),
}
EMPTY = {"compute": (), "collective": _SPREADS, "tiers": _ROWS}  # lists that are empty where a row has none


class CostsManifest(Value):
    """costs.json: the bench, the base tables of the cases, and the numbers of ranks whose all-to-alls were requested, even if
    none was measured."""

    format_version: Literal[1] = 1
    bench: Bench
    tables: tuple[Table, ...]
    device_counts: tuple[Annotated[int, Field(ge=1, le=MAX_DEVICES)], ...] = ()


class CostWriter:
    """Appends costs to a folder: a part about every FLUSH_SECONDS and at the end. `done` holds the (case_id, round) it has, and
    `succeeded` those without an error.

    Costs of more tables and of more numbers of ranks may be added to a folder. Raises InvalidInput if the folder has costs of
    another bench (costs of two benches are never mixed), if another run is writing to it, or if a table of the same name differs.
    """

    def __init__(
        self, folder: Path, bench: Bench, tables: tuple[Table, ...], device_counts: tuple[int, ...] = ()
    ) -> None:
        self.folder = folder
        self.manifest = CostsManifest(bench=bench, tables=tables, device_counts=device_counts)
        self.rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in FIELDS}
        self.done: dict[str, set[tuple[str, int]]] = {kind: set() for kind in FIELDS}
        self.succeeded: dict[str, set[tuple[str, int]]] = {kind: set() for kind in FIELDS}
        self.disturbed: dict[str, list[bool]] = {}  # of the measurements of each table set
        self.flushed_at = time.monotonic()
        self.lock = _lock(folder)
        try:
            self._begin_or_continue()
        except BaseException:
            os.close(self.lock)
            raise

    def _begin_or_continue(self) -> None:
        path = self.folder / "costs.json"
        if not path.exists():
            if stray := [part for kind in FIELDS for part in _parts(self.folder, kind)]:
                raise InvalidInput(
                    f"{self.folder}: has {stray[0].name} of an unknown bench, and no costs.json; give another -o"
                )
            write_bytes(path, self.manifest.canonical_json())
            return
        begun = read_manifest(self.folder)
        extended = _extended(begun, self.manifest, path)
        if extended != begun:
            write_bytes(path, extended.canonical_json())
        self.manifest = extended
        for kind, fields in FIELDS.items():
            for part in _parts(self.folder, kind):
                try:
                    rows = list(read_rows(part, fields))
                except InvalidInput as error:
                    self._set_aside(part, error)
                    continue
                for row in rows:
                    self._note(kind, row)

    def _set_aside(self, part: Path, error: InvalidInput) -> None:
        """Rename a part that is unreadable, after a disk error say, so that its cases are measured again."""
        aside = part.with_name(part.name + BROKEN)
        with disk_errors(part, "set it aside"):
            part.replace(aside)
        log(f"note: {error}; set aside as {aside.name}, and its cases are measured again")

    def _note(self, kind: str, row: Mapping[str, Any]) -> None:
        self.done[kind].add((row["case_id"], row["round"]))
        if row["error"] is not None:
            return
        self.succeeded[kind].add((row["case_id"], row["round"]))
        if kind == "compute":
            self.disturbed.setdefault(row["case_id"], []).append(bool(row["disturbed"]))

    def add(self, case: Case, cost: Cost) -> None:
        row = {"disturbed": False, **case_row(case), **cost.model_dump(mode="json", exclude={"case_id"})}
        key, kind = (row["case_id"], row["round"]), case.kind
        if key not in self.done[kind]:
            self._note(kind, row)
            self.rows[kind].append(row)
        if time.monotonic() - self.flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last flush, as one new part of each kind.

        Raises NeuroshardError if the folder was deleted or replaced: a part without its costs.json is useless.
        """
        if not _holds(self.lock, self.folder):
            raise NeuroshardError(
                f"{self.folder}: was deleted or moved while costs were written to it; measure again, or, if it was moved, "
                "continue with -o and its new name"
            )
        for kind, fields in FIELDS.items():
            if self.rows[kind]:
                # a part's name is never used again
                taken = [*_parts(self.folder, kind), *_parts(self.folder, kind, BROKEN)]
                number = max(map(_number, taken), default=-1) + 1
                write_rows(self.folder / f"{kind}-{number:05d}.parquet", self.rows[kind], fields)
                self.rows[kind] = []
        self.flushed_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            os.close(self.lock)


def _lock(folder: Path) -> int:
    """Lock the folder, until the file descriptor is closed or the process ends. Removes unfinished files of a killed run."""
    lock = take_lock(folder, "costs")
    with disk_errors(folder, "write to it"):
        for unfinished in folder.glob(".*.parquet.*"):
            unfinished.unlink()
    return lock


def _extended(begun: CostsManifest, now: CostsManifest, path: Path) -> CostsManifest:
    """The manifest after costs of `now` are added to those of `begun`. Raises InvalidInput if they do not fit."""
    bench, other = _joined_benches(begun.bench, now.bench)
    # all labels of a folder are scaled to the same calm machine, and measured with the same flush and limit
    if begun.bench.calm_compute_ms:
        kept = ("memory_limit_bytes", "flush_bytes", "calm_compute_ms")
        bench, other = (
            joined.model_copy(update={name: getattr(one, name) for name in kept})
            for joined, one in ((bench, begun.bench), (other, now.bench))
        )
    if bench != other:
        raise InvalidInput(f"{path}: was measured on another bench ({difference(bench, other)}); give another -o")
    tables = {table.name: table for table in begun.tables}
    for table in now.tables:
        if tables.setdefault(table.name, table) != table:
            raise InvalidInput(
                f"{path}: was measured for another table {shown(table.name)} ({difference(tables[table.name], table)}); give "
                "another -o"
            )
    return CostsManifest(
        bench=bench,
        tables=tuple(tables.values()),
        device_counts=tuple(sorted({*begun.device_counts, *now.device_counts})),
    )


def _holds(lock: int, folder: Path) -> bool:
    """Whether this is still the folder that was locked, with its costs.json."""
    return is_lock_of(lock, folder) and (folder / "costs.json").exists()


def read_manifest(folder: Path) -> CostsManifest:
    """costs.json alone. Raises InvalidInput."""
    path = folder / "costs.json"
    if not path.exists():
        raise InvalidInput(f"{folder}: no costs.json here; measure with `neuroshard measure cases/ -o {folder}`")
    return CostsManifest.parse(check_format(decode_json(read_bytes(path), str(path)), 1, str(path)), str(path))


def read_costs(folder: Path, *more: Path) -> Costs:
    """A whole cost set, errors included. Raises InvalidInput that names file and row; also if a row occurs twice.

    Several folders are read as one set and must be of the same bench, else InvalidInput. Fields of the bench that follow from the
    cases (which tables were capped, and how far) or from the load of the machine may differ and are joined; costs are scaled to
    the calmer machine. A case measured in several folders gets more rounds. A measurement that was copied between folders counts
    once.
    """
    costs = _read_folder(folder)
    for other in more:
        costs = _joined(costs, _read_folder(other), f"{other}: was measured on another bench than {folder}")
    return costs


def merge_costs(folders: Sequence[Path], out: Path) -> Costs:
    """Write the costs of shares of one case set, measured on several machines of a kind, into `out`, whole or not at all, and
    return them.

    As in `read_costs`, all folders have one bench, and a case measured twice gets a further round. Raises UsageError without
    folders, and InvalidInput if benches differ, if one table name means two tables, or if `out` exists already.
    """
    if not folders:
        raise UsageError("name at least one folder of costs")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"{out}: exists already; give another -o")
    tables: dict[str, tuple[Table, Path]] = {}
    for folder in folders:
        for table in read_manifest(folder).tables:
            known, where = tables.setdefault(table.name, (table, folder))
            if known != table:  # rows of costs hold only the name
                raise InvalidInput(
                    f"{folder}: its table {table.name!r} differs from that of {where}; merge costs of one tables.json only"
                )
    costs, base = read_costs(*folders), tuple(table for table, _ in tables.values())
    with writing_folder(out) as unfinished, CostWriter(unfinished, costs.bench, base, costs.device_counts) as writer:
        for case, cost in costs.every:
            writer.add(case, cost)
    return costs


def _joined_benches(*benches: Bench) -> list[Bench]:
    """The benches, with the fields joined that follow from the cases or from the load of the machine; the rest must agree."""

    def known(values: Iterable[int | None]) -> list[int]:
        return [value for value in values if value is not None]

    alike = {
        "capped_tables": tuple(sorted({name for bench in benches for name in bench.capped_tables})),
        "row_cap_bytes": min(known(bench.row_cap_bytes for bench in benches), default=None),
        "memory_limit_bytes": min(known(bench.memory_limit_bytes for bench in benches), default=None),
        "flush_bytes": max(known(bench.flush_bytes for bench in benches), default=None),
        "calm_all_to_all_ms": _least(bench.calm_all_to_all_ms for bench in benches),
        "calm_compute_ms": _least(bench.calm_compute_ms for bench in benches),
        "reorder_ms": min((bench.reorder_ms for bench in benches if bench.reorder_ms is not None), default=None),
    }
    return [bench.model_copy(update=alike) for bench in benches]


def _joined(costs: Costs, more: Costs, where: str) -> Costs:
    bench, other = _joined_benches(costs.bench, more.bench)
    if bench != other:
        raise InvalidInput(f"{where} ({difference(bench, other)}); costs of two benches are never mixed")
    both = (costs, more)
    return Costs(
        bench=bench,
        compute=_labels_first(_with_rounds(*(_calmer_sets(bench.calm_compute_ms, each) for each in both))),
        collective=_labels_first(_with_rounds(*(_calmer_all_to_alls(bench.calm_all_to_all_ms, each) for each in both))),
        tables=tuple({table.name: table for table in (*more.tables, *costs.tables)}.values()),
        device_counts=tuple(sorted({*costs.device_counts, *more.device_counts})),
        tiers=_labels_first(_with_rounds(costs.tiers, more.tiers)),
    )


def _calmer_sets(calm_ms: Mapping[str, float], costs: Costs) -> tuple[tuple[ComputeCase, ComputeCost], ...]:
    """Table sets scaled to the reference times `calm_ms` instead of those of their own run."""
    was_ms = costs.bench.calm_compute_ms
    if not was_ms or was_ms == calm_ms:
        return costs.compute
    return tuple((case, cost.scaled(1 / slowness(was_ms, calm_ms))) for case, cost in costs.compute)


def _calmer_all_to_alls(
    calm_ms: Mapping[str, float], costs: Costs
) -> tuple[tuple[CollectiveCase, CollectiveCost], ...]:
    """All-to-alls scaled to the reference times `calm_ms` of as many devices, instead of those of their own run."""

    def scaled(case: CollectiveCase, cost: CollectiveCost) -> CollectiveCost:
        devices = str(len(case.device_dims))
        was_ms, now_ms = costs.bench.calm_all_to_all_ms.get(devices), calm_ms.get(devices)
        return cost.scaled(now_ms / was_ms, case.waiting_ms) if was_ms and now_ms and was_ms != now_ms else cost

    return tuple((case, scaled(case, cost)) for case, cost in costs.collective)


def _least(calm_ms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The least value of each name."""
    known = list(calm_ms)
    names = sorted({name for one in known for name in one})
    return {name: min(one[name] for one in known if name in one) for name in names}


def _with_rounds(
    rows: tuple[tuple[_Case, _Cost], ...], more: tuple[tuple[_Case, _Cost], ...]
) -> tuple[tuple[_Case, _Cost], ...]:
    """Rows of both. Rows of `more` get the next free round of their case; copies of a row are left out."""
    rounds: dict[str, dict[int, _Cost]] = {}
    for _, cost in rows:
        rounds.setdefault(cost.case_id, {})[cost.round] = cost
    joined = list(rows)
    for case, cost in sorted(more, key=lambda row: row[1].round):
        taken = rounds.setdefault(cost.case_id, {})
        if any(cost == one.model_copy(update={"round": cost.round}) for one in taken.values()):
            continue
        free = cost.round if cost.round not in taken else next(n for n in range(len(taken) + 1) if n not in taken)
        taken[free] = cost.model_copy(update={"round": free})
        joined.append((case, taken[free]))
    return tuple(joined)


def _read_folder(folder: Path) -> Costs:
    manifest = read_manifest(folder)
    base = {table.name: table for table in manifest.tables}
    seen: set[tuple[str, int]] = set()
    found: dict[str, Any] = {
        kind: _labels_first(_case_and_cost(kind, row, base, where) for row, where in _rows(folder, kind, seen))
        for kind in FIELDS
    }
    return Costs(bench=manifest.bench, tables=manifest.tables, device_counts=manifest.device_counts, **found)


def _case_and_cost(kind: str, row: Mapping[str, Any], base: Mapping[str, Table], where: str) -> tuple[Case, Cost]:
    case = case_from_row(kind, row, base, where)
    cost = COST_OF_KIND[kind].parse({**row, **{name: row[name] or () for name in EMPTY[kind]}}, where)
    if isinstance(cost, TierCost) and cost.error is None and len(cost.distinct_rows) != len(row["table"]):
        raise InvalidInput(
            f"{where}: distinct_rows of {len(cost.distinct_rows)} tables, but the case has {len(row['table'])}; measure it again"
        )
    return case, cost


def _labels_first(rows: Iterable[tuple[_Case, _Cost]]) -> tuple[tuple[_Case, _Cost], ...]:
    """The rows; if round 0 of a case has no usable time or is disturbed, it swaps rounds with the first of the better rows."""
    ordered = list(rows)
    places: dict[str, dict[int, int]] = {}
    for place, (_, cost) in enumerate(ordered):
        places.setdefault(cost.case_id, {})[cost.round] = place
    for rounds in places.values():
        worth = {round_: _worth(ordered[place][1]) for round_, place in sorted(rounds.items())}
        best = max(worth, key=lambda round_: worth[round_])  # the first of equals
        if 0 in rounds and worth[best] > worth[0]:
            for round_, other in ((0, best), (best, 0)):
                case, cost = ordered[rounds[round_]]
                ordered[rounds[round_]] = (case, cost.model_copy(update={"round": other}))
    return tuple(ordered)


def _worth(cost: Cost) -> int:
    """How good a row is as a label: 0 nothing that a net learns from, 1 a disturbed measurement, 2 any other."""
    return 0 if not teaches(cost) else 1 if not isinstance(cost, CollectiveCost) and cost.disturbed else 2


def _rows(folder: Path, kind: str, seen: set[tuple[str, int]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    for part in _parts(folder, kind):
        for index, row in enumerate(read_rows(part, FIELDS[kind])):
            where = f"{part} row {index}"
            key = (row["case_id"], row["round"])
            if key in seen:
                raise InvalidInput(f"{where}: case {row['case_id']} round {row['round']} occurs twice")
            seen.add(key)
            yield row, where


def _parts(folder: Path, kind: str, end: str = "") -> list[Path]:
    # 5 digits are six days of measuring, at a part every 5 s
    whole_name = re.compile(rf"{kind}-[0-9]{{5,9}}\.parquet{re.escape(end)}")
    return sorted((part for part in folder.glob(f"{kind}-*") if whole_name.fullmatch(part.name)), key=_number)


def _number(part: Path) -> int:
    return int(part.name.partition(".")[0].rpartition("-")[2])


def difference(one: Value, other: Value) -> str:
    """The first field in which two benches differ, with both values: `batch_size: 512 there, 1024 now`."""
    for name in type(one).model_fields:
        before, now = getattr(one, name), getattr(other, name)
        if before == now:
            continue
        if isinstance(before, Value):
            return f"{name}.{difference(before, now)}"
        if isinstance(before, dict):
            key = min(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
            return f"{name}.{key}: {before.get(key)} there, {now.get(key)} now"
        if isinstance(before, tuple):
            before, now = next((pair for pair in zip_longest(before, now) if pair[0] != pair[1]), (before, now))
        return f"{name}: {' there, '.join(_where_they_differ(str(before), str(now)))} now"
    return "no difference"


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """At most 80 characters of each; of long texts, from a little before the first difference."""
    alike = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, alike - 20) if max(len(one), len(other)) > 80 else 0
    mark = "…" if begin else ""
    return mark + one[begin : begin + 80], mark + other[begin : begin + 80]
