"""A sharding plan: which device holds which rectangle of which table."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from neuroshard.core.clean import log
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.holding import Holding
from neuroshard.core.notebook import frame, html_table
from neuroshard.core.part import Memory, Part
from neuroshard.core.sharding import COLUMN_WISE, DATA_PARALLEL, GRID, ROW_WISE, TABLE_ROW_WISE, TABLE_WISE, Sharding
from neuroshard.core.step_ledger import Piece, StepPeak, step_peaks
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted, short_name, spanned
from neuroshard.core.tiers import Resource
from neuroshard.core.units import format_bytes
from neuroshard.core.value import SparseValue, Value, canonical_json, check_format, decode_json, sha256, shown

if TYPE_CHECKING:
    import pandas as pd

PLAN_FORMAT: Literal[7] = 7  # written is the oldest whose readers know what the plan names


class Shard(Value):
    """A rectangle of a table, `rows` x `dim` at (`row_offset`, `column_offset`), and the device that holds it."""

    table: str
    row_offset: Annotated[int, Field(ge=0)] = 0
    rows: Annotated[int, Field(gt=0)]
    column_offset: Annotated[int, Field(ge=0)] = 0
    dim: Annotated[int, Field(gt=0)]
    device: Annotated[int, Field(ge=0)]


OF_A_TASK = {"format_version", "task", "task_digest", "holdings"}  # what a plan of the same shards has otherwise
MOST_PREDICTED_MS = 1e24  # given costs of a table may be 1e9 ms, times a factor of a million where it is narrow
PredictedMs = Annotated[float, Field(ge=0, le=MOST_PREDICTED_MS)]


class DeviceCost(SparseValue):
    """Milliseconds of one device in a step, predicted or measured.

    `forward_collective_ms` includes waiting for the slowest device. `averaging_ms` is of replicas, where ranks train in groups.
    """

    UNSAID: ClassVar = ("averaging_ms",)

    compute_ms: PredictedMs
    forward_collective_ms: PredictedMs
    backward_collective_ms: PredictedMs
    averaging_ms: PredictedMs = 0.0

    @property
    def total_ms(self) -> float:
        return self.compute_ms + self.forward_collective_ms + self.backward_collective_ms + self.averaging_ms


class CostRanges(Value):
    """Ms of the slowest device, from and to, that 68 % and 95 % of measured plans should take: `one` and `two` deviations."""

    one: tuple[PredictedMs, PredictedMs]
    two: tuple[PredictedMs, PredictedMs]

    def fault(self, cost_ms: float) -> str:
        """Why these are no ranges of a plan of that cost, in words; empty if they are."""
        least = cost_ms * (1 - 1e-6)  # a plan may be rounded
        most = cost_ms * (1 + 1e-6)
        if self.two[0] <= self.one[0] <= most and least <= self.one[1] <= self.two[1]:
            return ""
        said = " to ".join(f"{ms:g}" for ms in self.one), " to ".join(f"{ms:g}" for ms in self.two)
        return f"cost_ranges of {said[0]} and {said[1]} ms are not of a plan that costs {cost_ms:g} ms; leave them out"


class Baseline(Value):
    """What another algorithm reached on the same task and cost model: ms of each device, or why it found no plan.

    `cuts` is how many column splits it needed to fit at all.
    """

    algorithm: str
    predicted_ms: tuple[PredictedMs, ...] | None = None
    cuts: int = 0
    error: str | None = None

    @property
    def cost_ms(self) -> float | None:
        """Predicted milliseconds of the slowest device, or None where it found no plan."""
        return max(self.predicted_ms) if self.predicted_ms else None


class Improvement(Value):
    """The cost of a plan that was better than all before it, and the step of the search (changes made) at which it was found."""

    step: Annotated[int, Field(ge=0)]
    cost_ms: PredictedMs


class Provenance(SparseValue):
    """Where a plan comes from. No clock: the same inputs give the same plan, byte for byte.

    A search was asked to improve its plan for `rounds` rounds, or for as many as fit into `time_budget_s` seconds.
    """

    UNSAID: ClassVar = ("rounds", "time_budget_s", "cost_ranges", "cost_model_versions", "instead")

    neuroshard_version: str
    algorithm: str
    seed: int | None = None
    rounds: Annotated[int, Field(ge=0)] | None = None
    time_budget_s: Annotated[float, Field(gt=0)] | None = None
    cost_model: str | None = None  # digest of the bundle, or the name of a model without one
    cost_model_backend: str | None = None  # synthetic, cpu, cuda: what the model's costs were measured on
    cost_model_device: str | None = None
    # mean |predicted / measured - 1| of compute on tables it never saw
    cost_model_error: Annotated[float, Field(ge=0)] | None = None
    # what a step may take when measured; None where the cost model's deviations were not calibrated
    cost_ranges: CostRanges | None = None
    # of torch and FBGEMM, that the model's costs were measured under
    cost_model_versions: dict[str, str] = Field(default_factory=dict)
    # why the plan is less certain than it could be: what answered in place of a cost model of its hardware
    instead: str = ""
    notes: tuple[str, ...] = ()


class Plan(Value):
    """Shards that tile every table of the task exactly once and fit every device. Of a data-parallel table, every device has one
    whole shard. Of a table held in two parts, shards are of its parts, as if these were tables (`parted`).

    The `task` is the one that was asked, and `holdings` say how tables are held beyond what its rules name: `held` is the task
    with rules for all of it, by which shards are weighed and priced.

    A Plan that exists is valid: building one checks bounds, widths, gaps, overlaps, devices and memory, and raises
    pydantic's ValidationError that names table or device, the value and the limit. `predicted_ms[d]` is the predicted
    cost of device `d` in milliseconds; the plan's cost is the largest. By the same cost model no plan costs less than
    `lower_bound_ms`, under the `bound_assumptions`. `improvements` are the costs on the way to it.
    """

    format_version: Literal[1, 2, 3, 4, 5, 6, 7] = 1
    task: ShardingTask
    task_digest: str = ""
    holdings: tuple[Holding, ...] = ()
    shards: tuple[Shard, ...]
    predicted_ms: tuple[PredictedMs, ...] | None = None
    predicted: tuple[DeviceCost, ...] | None = None
    baselines: tuple[Baseline, ...] = ()
    lower_bound_ms: PredictedMs | None = None
    bound_assumptions: tuple[str, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    provenance: Provenance

    @model_validator(mode="before")
    @classmethod
    def _fill_task_digest(cls, data: Any) -> Any:
        if isinstance(data, dict) and "task_digest" not in data and isinstance(data.get("task"), ShardingTask):
            since = (getattr(one, "since", PLAN_FORMAT) for one in data.get("holdings") or ())
            known = max(data["task"].plan_format, 1, *since)
            return {"format_version": known, **data, "task_digest": data["task"].digest()}
        return data

    @model_serializer(mode="wrap")
    def _without_needless_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Holdings, bound and improvements are written only if there are any."""
        data: dict[str, Any] = handler(self)
        if not self.holdings:
            data.pop("holdings", None)
        if not self.improvements:
            data.pop("improvements", None)
        if self.lower_bound_ms is None and not self.bound_assumptions:
            data.pop("lower_bound_ms", None)
            data.pop("bound_assumptions", None)
        return data

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if self.task_digest != self.task.digest():
            raise ValueError(f"task_digest {shown(self.task_digest[:12])} does not match the plan's task")
        known, named = self.task.least_plan_format
        if known > self.format_version:
            raise ValueError(
                f"the plan's task names {named}, which format_version {self.format_version} lacks; it is {known}"
            )
        if self.holdings and self.format_version < (known := max(one.since for one in self.holdings)):
            raise ValueError(f"format_version {self.format_version} has no such holdings; it is {known}")
        self._check_holdings()
        for name, values in (("predicted_ms", self.predicted_ms), ("predicted", self.predicted)):
            if values is not None and len(values) != self.task.devices:
                raise ValueError(
                    f"{name} has {counted(len(values), 'value')} for {counted(self.task.devices, 'device')}"
                )
        for device, (whole, parts) in enumerate(zip(self.predicted_ms or (), self.predicted or (), strict=False)):
            if not math.isclose(whole, parts.total_ms, rel_tol=1e-6, abs_tol=1e-9):
                raise ValueError(
                    f"device {device} is predicted to take {whole:g} ms in predicted_ms, and {parts.total_ms:g} ms in predicted"
                )
        ranges = self.provenance.cost_ranges
        if ranges is not None and self.cost_ms is not None and (fault := ranges.fault(self.cost_ms)):
            raise ValueError(f"provenance: {fault}")
        self._check_tiling()
        self._check_memory()
        self._check_constraints()
        return self

    @property
    def held(self) -> ShardingTask:
        """The task whose rules name all that the plan holds: what shards are weighed and priced by."""
        return self.task.holding(self.holdings)

    @property
    def named(self) -> Self:
        """The same shards as a plan of the task `held`, for who changes that task; not checked, nor to be written."""
        if not self.holdings:
            return self
        held = self.held
        return self.model_copy(update={"task": held, "task_digest": held.digest(), "holdings": ()})

    def answering(self, asked: ShardingTask) -> Self:
        """This plan, whose task's rules name all that it holds, as one of a task with the rules that were `asked` for. Raises
        ValidationError where these do not allow what it holds."""
        task = self.task.model_copy(update={"constraints": asked.constraints})
        return self.of_task(task, holdings=task.holdings_of(self.task))

    def of_task(self, task: ShardingTask, **other: Any) -> Self:
        """The same shards as a plan of this task, whose rules name all that they hold, with `other` fields in place of this
        plan's. Raises ValidationError where the shards are no plan of it."""
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in OF_A_TASK}
        return type(self)(task=task, **fields | other)

    @property
    def parted(self) -> ShardingTask:
        """The task that the shards are of: with its parts in place of a table held in two."""
        return self.held.parted

    def _check_holdings(self) -> None:
        """Raise ValueError for a table with two holdings, or one that a rule does not allow."""
        if not self.holdings:
            return
        held, rules, seen = self.held, self.task.constraints.rules(), set[str]()
        known = {table.name for task in (held, held.parted) for table in task.tables}
        for one in self.holdings:
            if one.table in seen:
                raise ValueError(f"table {one.table!r} has two holdings")
            seen.add(one.table)
            if one.table not in known:
                raise ValueError(f"a holding is of table {shown(one.table)}, which is not in the task")
            if fault := one.fault(rules.get(one.table)):
                raise ValueError(f"table {one.table!r} {fault}")
        ShardingTask.model_validate(dict(held))  # which checks what rules name

    def _check_tiling(self) -> None:
        task = self.parted
        tables = {table.name: table for table in task.tables}
        shards: dict[str, list[Shard]] = {name: [] for name in tables}
        for shard in self.shards:
            if shard.table not in tables:
                in_two = shard.table in self.held.constraints.in_two_parts
                what = "held in two parts, of which shards are" if in_two else "not in the task"
                raise ValueError(f"a shard is of table {shown(shard.table)}, which is {what}")
            if shard.device >= self.task.devices:
                raise ValueError(
                    f"table {shard.table!r} has a shard on device {shard.device}, but there are {self.task.devices}"
                )
            if shard.dim % DIM_STEP or shard.column_offset % DIM_STEP:
                raise ValueError(
                    f"table {shard.table!r} has a shard of {shard.dim} columns at column {shard.column_offset}; "
                    f"both must be multiples of {DIM_STEP}"
                )
            shards[shard.table].append(shard)
        copied = task.constraints.data_parallel
        for name, table in tables.items():
            if name in copied:
                check_copies(table, shards[name], self.task.devices)
            else:
                check_tiles(table, shards[name])

    def _check_memory(self) -> None:
        for device, (used, limit) in enumerate(zip(self.memory_bytes(), self.task.usable_bytes, strict=True)):
            if used > limit:
                raise ValueError(
                    f"device {device} needs {format_bytes(used)} of {format_bytes(limit)} "
                    f"({used - limit:,} bytes too many); raise its memory or add devices"
                )
        of_host = self.task.host_memory_bytes or 0
        for host, used in enumerate(self.host_memory()):
            if used > of_host:
                raise ValueError(
                    f"host {host} needs {format_bytes(used)} of {format_bytes(of_host)} for tables beyond HBM "
                    f"({used - of_host:,} bytes too many); raise its memory or add hosts"
                )

    def _check_constraints(self) -> None:
        task, shards = self.parted, self.by_table()
        constraints = task.constraints
        rules = constraints.rules()
        rows = {table.name: table.rows for table in task.tables}
        for name, by_access in self.held.constraints.rows_by_access.items():
            if by_access.dealt and all(shard.rows == rows[name] for shard in shards[name]):
                raise ValueError(
                    f"table {name!r} is dealt by access, but none of its shards is a block of its rows; leave out the rule"
                )
        for table in task.tables:
            if table.name in constraints.data_parallel:
                continue
            rule, held = rules.get(table.name), shards[table.name]
            if table.id_map is not None:
                check_mapped(table, held, task.devices)
                continue
            least, most = constraints.allowed(rule, table.dim)
            if narrow := [shard.dim for shard in held if shard.dim < least]:
                raise ValueError(f"table {table.name!r} has a shard of {narrow[0]} columns; its least width is {least}")
            if most is not None and len(held) > most:
                raise ValueError(f"table {table.name!r} is in {len(held)} shards; at most {most} are allowed")
            for shard in held:
                if rule is not None and rule.devices is not None and shard.device not in rule.devices:
                    where = f"table {table.name!r} has a shard on device {shard.device}"
                    raise ValueError(f"{where}, to which it is not pinned")
        for group in constraints.together:
            devices = {shard.device for name in group for shard in shards[name]}
            if len(devices) > 1:
                raise ValueError(
                    f"tables {group[0]!r} and {group[1]!r} are kept together, but are on {len(devices)} devices"
                )

    def by_table(self) -> dict[str, list[Shard]]:
        """The shards of each table, and of the parts of one held in two."""
        shards: dict[str, list[Shard]] = {table.name: [] for table in self.parted.tables}
        for shard in self.shards:
            shards[shard.table].append(shard)
        return shards

    def shards_by_device(self) -> tuple[int, ...]:
        """How many shards are on each device."""
        counts = Counter(shard.device for shard in self.shards)
        return tuple(counts[device] for device in range(self.task.devices))

    def memory_bytes(self) -> tuple[int, ...]:
        """Weights, optimizer state, maps of ids and what a step needs on each device, in bytes."""
        return tuple(memory.total for memory in self.device_memory())

    @property
    def fullest(self) -> tuple[int, int, int]:
        """The device that takes the largest share of its memory that is not reserved, what it takes, and that memory: bytes."""
        each = zip(range(self.task.devices), self.memory_bytes(), self.task.usable_bytes, strict=True)
        return max(each, key=lambda one: one[1] / max(one[2], 1))

    def device_memory(self) -> tuple[Memory, ...]:
        """What takes the memory of each device."""
        return device_memory(self.held, self.shards)

    def step_peaks(self) -> tuple[StepPeak, ...]:
        """What lives on each device at the peak of a step, beside weights and optimizer state, by moment and cause."""
        return peaks_of(self.held, self.shards)

    def host_memory(self, of: Resource = "host") -> tuple[int, ...]:
        """Bytes of host memory, or `of` another resource, on each host, for the tables that are in it."""
        return host_memory(self.held, self.shards, of)

    @property
    def cost_ms(self) -> float | None:
        """Predicted milliseconds of the slowest device, or None where the plan carries no prediction."""
        return max(self.predicted_ms) if self.predicted_ms else None

    @property
    def gap(self) -> float | None:
        """How much of the cost, as a share, a better plan could save at most; None where nothing is proven."""
        if self.lower_bound_ms is None or not self.cost_ms:
            return None
        return max(1 - self.lower_bound_ms / self.cost_ms, 0.0)

    def to_frame(self, of: Literal["shards", "devices"] = "shards") -> "pd.DataFrame":
        """The plan as a pandas DataFrame: a row a shard (table, offsets, rows, dim, device, bytes), or a row a device (bytes, and
        predicted ms where the plan has any).

        Raises NeuroshardError where pandas is missing.
        """
        if of == "devices":
            return frame(self._device_columns())
        columns: dict[str, list[Any]] = {
            name: [getattr(shard, name) for shard in self.shards] for name in Shard.model_fields
        }
        columns["memory_bytes"] = [memory.total for memory in shard_memory(self.held, self.shards)]
        return frame(columns)

    def _device_columns(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"device": list(range(self.task.devices)), "shards": [*self.shards_by_device()]}
        if self.predicted:
            columns |= {name: [getattr(cost, name) for cost in self.predicted] for name in DeviceCost.model_fields}
            if not any(columns["averaging_ms"]):
                del columns["averaging_ms"]
        if self.predicted_ms:
            columns["total_ms"] = [*self.predicted_ms]
        limits = self.task.device_memory_bytes
        reserved = [*map(self.task.constraints.reserved, limits)]
        return columns | {
            "memory_bytes": [*self.memory_bytes()],
            "reserve_bytes": reserved,
            "memory_limit_bytes": [*limits],
        }

    def __repr__(self) -> str:
        return "\n".join(self._summary())

    def __str__(self) -> str:
        """Four lines: what it is, what it costs, how tables are held, and the fullest device; every shard: `to_frame()`."""
        what, cost = self._summary()
        kinds, beyond = Counter(shardings_of(self).values()), len(self.parted.constraints.beyond_hbm)
        held = ", ".join(f"{count:,} {kind.name}" for kind, count in kinds.most_common())
        fullest, used, usable = self.fullest
        model = self.provenance.cost_model
        by = f" (cost model {short_name(model)})" if model and self.predicted_ms else ""
        return "\n".join(
            [
                what,
                f"{cost}{by}",
                f"tables: {held}{f'; {beyond:,} beyond HBM' * bool(beyond)}",
                f"memory: device {fullest} is fullest, {format_bytes(used)} of {format_bytes(usable)}",
            ]
        )

    def _summary(self) -> tuple[str, str]:
        """What the plan is, and what it costs: a line each."""
        tables, shards = counted(len(self.task.tables), "table"), counted(len(self.shards), "shard")
        devices = counted(self.task.devices, "device")
        groups = "" if self.task.groups is None else f" in {self.task.groups.text(self.task.devices)}"
        what = f"Plan {self.digest()[:12]}: {tables} in {shards} on {devices}{groups}, batch {self.task.global_batch_size:,}"
        if self.cost_ms is None:
            return what, "no predicted cost"
        left = "" if self.gap is None else f", at most {self.gap:.1%} to gain"
        return what, f"predicted cost (slowest device): {self.cost_ms:.3f} ms a step{left}"

    def _repr_html_(self) -> str:
        what, cost = self._summary()
        columns = self._device_columns()
        for name in ("memory_bytes", "memory_limit_bytes"):
            columns[name.removesuffix("_bytes")] = list(map(format_bytes, columns.pop(name)))
        by = self.provenance
        less_certain = [f"less certain: {by.instead}"] if by.instead else []
        return html_table(what, columns, [cost, *less_certain, *(f"note: {note}" for note in by.notes)])

    def read_back(self, where: str = "the plan") -> Self:
        """The plan as its file gives it back. Raises InvalidInput where no reader would take it: a copy that was made in memory
        (model_copy) is not checked."""
        return type(self).from_json(self.canonical_json(), where)

    def save(self, path: "str | PathLike[str]") -> None:
        """Write plan.json, as `neuroshard search -o` does. Raises NeuroshardError for a path that cannot be written.

        The lists of hot rows that a plan names are not in it, which a note says: `neuroshard.search(..., out=)` writes both.
        """
        from neuroshard.files.plan import write_plan

        write_plan(Path(path), self)
        if self.held.orders:
            log(
                f"note: {path} names lists of hot rows, which are not in it: search with out=, or put their folder beside it"
            )

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """A plan from the bytes of a plan.json. Raises InvalidInput or NewerFormat in one line that names `where`."""
        decoded = decode_json(data, where)
        if isinstance(decoded, dict) and not decoded.keys() & {"task", "task_digest", "shards"}:
            raise InvalidInput(f"{where}: not a plan; a plan.json has task and shards, and this has {_keys(decoded)}")
        raw = check_format(decoded, PLAN_FORMAT, where)
        if "task_digest" not in raw:
            raise InvalidInput(f"{where}: task_digest is missing")
        return cls.parse(_as_known(raw), where)


def _as_known(raw: dict[str, Any]) -> dict[str, Any]:
    """A decoded plan whose task_digest is that of the task as it stands there, with what this version knows of that task and its
    digest: keys from a newer version are ignored. Any other as it is."""
    with suppress(ValueError, RecursionError):  # what is wrong with the task is said by the plan's own check
        if raw["task_digest"] == sha256(canonical_json(raw.get("task"))):
            task = ShardingTask.model_validate(raw.get("task"))
            return {**raw, "task": task, "task_digest": task.digest()}
    return raw


def check_plan(plan: object) -> None:
    """Raise UsageError for what is no plan, such as the path or the digest of one."""
    if not isinstance(plan, Plan):
        raise UsageError(f"{shown(plan)} is no plan; give what load_plan returns, or read_plan of a file")


def sharding_of(task: ShardingTask, table: Table, shards: Sequence[Shard]) -> Sharding:
    """What these shards of a table of a (parted) task are. The task says whether they are copies."""
    if table.name in task.constraints.data_parallel:
        return DATA_PARALLEL
    if table.id_map is not None:
        return ROW_WISE  # also where all rows are on one device
    rows, columns = any(s.rows < table.rows for s in shards), any(s.dim < table.dim for s in shards)
    if not rows:
        return COLUMN_WISE if columns else TABLE_WISE
    if columns:
        return GRID
    return ROW_WISE if len(shards) == task.devices else TABLE_ROW_WISE


def shardings_in(task: ShardingTask, shards: Sequence[Shard]) -> dict[str, Sharding]:
    """What each table of a (parted) task is, of which there are shards."""
    tables, held = {table.name: table for table in task.tables}, dict[str, list[Shard]]()
    for shard in shards:
        held.setdefault(shard.table, []).append(shard)
    return {name: sharding_of(task, tables[name], some) for name, some in held.items()}


def shardings_of(plan: Plan) -> dict[str, Sharding]:
    """What each table of a plan, or part of one held in two, is, in the order of the task."""
    shards, task = plan.by_table(), plan.parted
    return {table.name: sharding_of(task, table, shards[table.name]) for table in task.tables}


def parts_of(task: ShardingTask, shards: Sequence[Shard]) -> list[Part]:
    """The part of its table that each of a plan's shards is."""
    task = task.parted
    tables, copied = {table.name: table for table in task.tables}, task.constraints.data_parallel
    row_blocks = Counter((shard.table, shard.column_offset, shard.dim) for shard in shards)

    @cache  # hundreds of devices hold blocks of equally many rows
    def share(name: str, first: int, rows: int, blocks: int) -> float | None:
        return task.lookup_share(tables[name], first, rows, blocks)

    found = list[Part]()
    for shard in shards:
        table, blocks = tables[shard.table], row_blocks[shard.table, shard.column_offset, shard.dim]
        if shard.table in copied:
            found.append(Part.of(table, copies=task.devices))
            continue
        of_ids = share(table.name, shard.row_offset * table.knows_ids, shard.rows, blocks)
        found.append(Part(table, shard.rows, shard.dim, blocks, lookup_share=of_ids))
    return found


def shard_memory(task: ShardingTask, shards: Sequence[Shard]) -> list[Memory]:
    """What each of a plan's shards takes of its device. A step with a ledger is a device's, and no sum over its shards."""
    task = task.parted
    found = task.memories(parts_of(task, shards))
    return found if not task.counts_steps else [memory._replace(step=0) for memory in found]


def device_memory(task: ShardingTask, shards: Sequence[Shard]) -> tuple[Memory, ...]:
    """What takes the memory of each device that holds these shards, beside what is reserved."""
    used = [[0] * len(Memory._fields) for _ in range(task.devices)]
    for shard, memory in zip(shards, shard_memory(task, shards), strict=True):
        used[shard.device] = [sum(pair) for pair in zip(used[shard.device], memory, strict=True)]
    found = tuple(Memory(*parts)._replace(row_maps=task.by_access.map_bytes) for parts in used)
    if not task.counts_steps:
        return found
    return tuple(memory._replace(step=peak.nbytes) for memory, peak in zip(found, peaks_of(task, shards), strict=True))


def peaks_of(
    task: ShardingTask, shards: Sequence[Shard], pipeline: Pipeline | None = None, *, gloo: bool = False
) -> tuple[StepPeak, ...]:
    """What lives on each device at the peak of a step, beside weights and optimizer state, by moment and cause."""
    task = task.parted
    shardings = shardings_in(task, shards)
    pieces = [
        Piece(part, shardings[shard.table], shard.column_offset, shard.device)
        for shard, part in zip(shards, parts_of(task, shards), strict=True)
    ]
    return step_peaks(task, pieces, pipeline, gloo=gloo)


def host_memory(task: ShardingTask, shards: Sequence[Shard], of: Resource = "host") -> tuple[int, ...]:
    """Bytes that these shards take of the memory, or `of` another resource, of each host."""
    used = [0] * (task.devices // task.devices_of_host)
    for shard, memory in zip(shards, shard_memory(task, shards), strict=True):
        used[shard.device // task.devices_of_host] += getattr(memory, of)
    return tuple(used)


def _keys(data: dict[str, Any]) -> str:
    return ", ".join(shown(key) for key in sorted(data)[:3]) + (", …" if len(data) > 3 else "") if data else "nothing"


def check_tiles(table: Table, shards: list[Shard]) -> None:
    """Raise ValueError unless the shards cover the table exactly once.

    Rectangles inside the table that do not overlap and together have the table's area leave no gap.
    """
    for shard in shards:
        if shard.row_offset + shard.rows > table.rows or shard.column_offset + shard.dim > table.dim:
            raise ValueError(
                f"table {table.name!r} is {table.rows} x {table.dim}, but its shard on device {shard.device} reaches row "
                f"{shard.row_offset + shard.rows} and column {shard.column_offset + shard.dim}"
            )
    if pair := overlapping(shards):
        on = " and ".join(f"{_place(shard, table)} of device {shard.device}" for shard in pair)
        raise ValueError(f"table {table.name!r} has overlapping shards: {on}")
    covered = sum(shard.rows * shard.dim for shard in shards)
    if covered != table.rows * table.dim:
        on = ", ".join(str(device) for device in sorted({shard.device for shard in shards}))
        raise ValueError(
            f"table {table.name!r} has a gap: its shards (on devices {on}) cover {covered:,} of "
            f"{table.rows * table.dim:,} elements"
        )


def check_copies(table: Table, shards: list[Shard], devices: int) -> None:
    """Raise ValueError unless each device has the whole data-parallel table once."""
    cut = next((shard for shard in shards if (shard.rows, shard.dim) != (table.rows, table.dim)), None)
    if cut is not None:
        raise ValueError(f"table {table.name!r} is data-parallel, but its shard on device {cut.device} is not whole")
    held = Counter(shard.device for shard in shards)
    wrong = next((device for device in range(devices) if held[device] != 1), None)
    if wrong is not None:
        raise ValueError(f"table {table.name!r} is data-parallel, but device {wrong} has {held[wrong]} copies of it")


def check_mapped(table: Table, shards: list[Shard], devices: int) -> None:
    """Raise ValueError unless a table with an id map is row-wise over all devices, as TorchRec deals rows out."""
    blocks = [(first, rows, device) for device, (first, rows) in enumerate(table.row_blocks(devices))]
    held = sorted((shard.row_offset, shard.rows, shard.device) for shard in shards)
    if held != blocks or any(shard.dim != table.dim for shard in shards):
        raise ValueError(
            f"table {table.name!r} gives rows to ids as it trains (id_map): its rows must be split over all {devices} devices in "
            f"order, {table.block_rows(devices):,} each with all {table.dim} columns, and are not"
        )


def _place(shard: Shard, table: Table) -> str:
    rows = f"rows {spanned(shard.row_offset, shard.rows)}, " if shard.rows < table.rows else ""
    return f"{rows}columns {spanned(shard.column_offset, shard.dim)}"


def overlapping(shards: list[Shard]) -> tuple[Shard, Shard] | None:
    """Two shards of one table that overlap, or None. A line sweeps over the columns; what it cuts is kept sorted by row.

    So hundreds of thousands of shards take seconds, whatever file they come from.
    """
    ending = iter(sorted(shards, key=lambda s: s.column_offset + s.dim))
    next_end = next(ending, None)
    first_rows: list[int] = []
    cut: list[Shard] = []
    for shard in sorted(shards, key=lambda s: (s.column_offset, s.row_offset)):
        while next_end and next_end.column_offset + next_end.dim <= shard.column_offset:
            place = bisect_left(first_rows, next_end.row_offset)
            del first_rows[place], cut[place]
            next_end = next(ending, None)
        place = bisect_left(first_rows, shard.row_offset)
        for other in cut[max(place - 1, 0) : place + 1]:
            if other.row_offset < shard.row_offset + shard.rows and shard.row_offset < other.row_offset + other.rows:
                return other, shard
        first_rows.insert(place, shard.row_offset)
        cut.insert(place, shard)
    return None
