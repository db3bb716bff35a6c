"""A sharding task: which tables, on which devices, under which constraints."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.part import Memory, Part
from neuroshard.core.precision import CollectivePrecision
from neuroshard.core.step_memory import Pipeline
from neuroshard.core.table import DenseOptimizer, Table, check_distinct
from neuroshard.core.tiers import Cache, Tier, load_factor, operator_bytes
from neuroshard.core.topology import Topology
from neuroshard.core.value import Value, without_defaults

MAX_DEVICES = 4096
MAX_MEMORY_BYTES = 2**60  # an exbibyte
MOST_DENSE_MS = 1e6  # of a step: a quarter of an hour, beyond which a unit is wrong


def dense_time_fault(dense_ms: float | None, host_memory_bytes: int | None, pipeline: str | None) -> str | None:
    """Why a dense time would be ignored; None where it is not, or none is given."""
    if dense_ms is None:
        return None
    if host_memory_bytes is None:
        return (
            f"a dense time ({dense_ms:g} ms) counts only where rows are fetched from host memory, and there is none; say what "
            "each host has for tables (--host-memory 1TiB), or leave out --dense-time"
        )
    if pipeline != "prefetch":
        return (
            f"a dense time ({dense_ms:g} ms) counts only where rows are fetched meanwhile, and the pipeline is "
            f"{pipeline or 'not said'}; say --pipeline prefetch if the trainer prefetches, or leave out --dense-time"
        )
    return None


class ShardingTask(Value):
    """Tables to place on `len(device_memory_bytes)` devices; `batch_size` is the global batch of one training step.

    `pipeline` is the trainer's; memory then counts what a step needs (core/step_memory.py). Without one it is not counted.
    `topology` says which devices share a host and fast links; without one the cost model assumes its own.
    `collective_precision` is that of the collectives of outputs and gradients; without one they are fp32. `dense_optimizer` is
    the trainer's, which trains the data-parallel tables: see `Part.memory`. `host_memory_bytes` is what each host has for tables
    that are cached or in host memory; without it all tables are in HBM. `dense_ms` is what the dense layers of a step take,
    forward and backward: the trainer's pipeline `prefetch` fetches missed rows of the next batch meanwhile.
    """

    tables: tuple[Table, ...]
    device_memory_bytes: tuple[Annotated[int, Field(gt=0, le=MAX_MEMORY_BYTES)], ...]
    batch_size: Annotated[int, Field(gt=0, le=2**31)]
    constraints: Constraints = Field(default_factory=Constraints)  # built at its first use: see core/value.py
    pipeline: Pipeline | None = None
    topology: Topology | None = None
    collective_precision: CollectivePrecision | None = None
    dense_optimizer: DenseOptimizer | None = None
    host_memory_bytes: Annotated[int, Field(gt=0, le=MAX_MEMORY_BYTES)] | None = None
    dense_ms: Annotated[float, Field(gt=0, le=MOST_DENSE_MS)] | None = None

    @field_validator("tables")
    @classmethod
    def _distinct(cls, tables: tuple[Table, ...]) -> tuple[Table, ...]:
        return check_distinct(tables)

    @field_validator("device_memory_bytes")
    @classmethod
    def _devices(cls, memory: tuple[int, ...]) -> tuple[int, ...]:
        if not 1 <= len(memory) <= MAX_DEVICES:
            raise ValueError(f"must list between 1 and {MAX_DEVICES} devices, not {len(memory)}")
        return memory

    @model_validator(mode="after")
    def _constraints(self) -> Self:
        self._check_constraints()
        copied = self.constraints.data_parallel
        if name := next((t.name for t in self.tables if t.name in copied and t.pooling == "none"), None):
            raise ValueError(f"table {name!r} is a sequence, which TorchRec cannot train data-parallel")
        self._check_tiers()
        if fault := dense_time_fault(self.dense_ms, self.host_memory_bytes, self.pipeline):
            raise ValueError(fault)
        precision = self.collective_precision
        if precision is not None and (fault := precision.fault(self.tables, self.batch_size, self.devices)):
            raise ValueError(fault)
        if self.topology is not None and (fault := self.topology.fault(self.devices)):
            raise ValueError(fault)
        return self

    @model_serializer(mode="wrap")
    def _without_needless_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Constraints, and fields that are None by default, are written only if they are set."""
        data: dict[str, Any] = handler(self)
        if self.constraints == Constraints():
            data.pop("constraints", None)
        unsaid = ("pipeline", "topology", "collective_precision", "dense_optimizer", "host_memory_bytes", "dense_ms")
        return without_defaults(data, dict.fromkeys(unsaid))

    def _check_tiers(self) -> None:
        """Tables beyond HBM need a host's memory, and a cache of fewer rows than the table has."""
        beyond = self.constraints.beyond_hbm
        for table in self.tables if beyond else ():
            rule = beyond.get(table.name)
            if rule is None:
                continue
            if self.host_memory_bytes is None:
                raise ValueError(
                    f"table {table.name!r} lies in tier {rule.tier!r}, but the task has no host memory; say what each host has "
                    "for tables (--host-memory 1TiB), or leave the tier out"
                )
            if rule.cached_rows is not None and rule.cached_rows > table.rows:
                raise ValueError(
                    f"table {table.name!r} has {table.rows:,} rows, of which {rule.cached_rows:,} cannot be cached; say at most "
                    "its rows, or tier 'hbm'"
                )

    @property
    def hidden_ms(self) -> float:
        """Ms of a step in which missed rows of the next batch are fetched without waiting for them."""
        return (self.dense_ms or 0.0) if self.pipeline == "prefetch" else 0.0

    @property
    def is_of_format_2(self) -> bool:
        """Whether it names what readers of plans of format 1 drop: host memory, a tier, an access curve or a row order."""
        named = self.host_memory_bytes is not None or any(rule.tier is not None for rule in self.constraints.tables)
        return named or any((table.access, table.row_order) != (None, None) for table in self.tables)

    @property
    def devices(self) -> int:
        return len(self.device_memory_bytes)

    @property
    def devices_of_host(self) -> int:
        """Devices that share a host's memory; all, where no topology says how many."""
        return self.devices if self.topology is None else self.topology.local_world_size

    @property
    def may_split_rows(self) -> list[str]:
        """Names of the tables that may be split row-wise, over all devices or over those of a domain."""
        return self.constraints.may_split_rows(self.tables, self.devices, self._domain)

    @property
    def contradicts_itself(self) -> bool:
        """Whether its constraints contradict each other. A task that was parsed does not, but a changed copy of it may."""
        try:
            self._check_constraints()
        except ValueError:
            return True
        return False

    def _check_constraints(self) -> None:
        self.constraints.check({table.name for table in self.tables}, self.device_memory_bytes, self._domain)

    @property
    def _domain(self) -> int:
        """The devices of a domain, where there are several domains; else 0."""
        several = self.topology is not None and self.topology.domains(self.devices) > 1
        return self.topology.domain if self.topology is not None and several else 0

    @property
    def usable_bytes(self) -> tuple[int, ...]:
        """Memory of each device that is for tables."""
        return tuple(memory - self.constraints.reserved(memory) for memory in self.device_memory_bytes)

    def memory(self, part: Part) -> Memory:
        """What a part of one of its tables takes of a device, and of its host."""
        return self.memories([part])[0]

    def memories(self, parts: Sequence[Part]) -> list[Memory]:
        """What parts of its tables take, each in the tier of its table. A cached part is an operator of its own."""
        beyond, found = self.constraints.beyond_hbm, list[Memory]()
        for part in parts:
            memory = part.memory(self.batch_size, self.pipeline, self.dense_optimizer)
            rule = beyond.get(part.table.name)
            if rule is not None and rule.tier is not None:
                cache = None
                if rule.cached_rows is not None:
                    factor = load_factor(rule.cached_rows, part.table.rows)
                    cache = Cache(factor, prefetch=self.pipeline == "prefetch")
                held, by_row = (
                    operator_bytes([(part, rule.tier)], cache),
                    part.rows * part.table.optimizer_bytes_per_row,
                )
                memory = Memory(held.hbm - by_row, by_row, memory.step, held.host)
            found.append(memory)
        return found

    def with_tiers(self, tiers: Mapping[str, tuple[Tier | None, int | None]]) -> Self:
        """The same task with these tables in these tiers, with so many cached rows; other rules of theirs stay."""
        rules = dict(self.constraints.rules())
        for name, (tier, cached_rows) in tiers.items():
            rule = rules.get(name, TableRule(table=name))
            rules[name] = rule.model_copy(update={"tier": tier, "cached_rows": cached_rows})
        ordered = tuple(rules[table.name] for table in self.tables if table.name in rules)
        return self.model_copy(update={"constraints": self.constraints.model_copy(update={"tables": ordered})})

    def with_copies(self, names: Collection[str]) -> Self:
        """The same task, except that these tables and no others are data-parallel, without other rules of their own."""
        rules = dict(self.constraints.rules())
        for name in self.constraints.data_parallel.difference(names):
            rules[name] = rules[name].model_copy(update={"data_parallel": None})
        rules |= {name: TableRule(table=name, data_parallel=True) for name in names}
        ordered = tuple(rules[table.name] for table in self.tables if table.name in rules)
        return self.model_copy(update={"constraints": self.constraints.model_copy(update={"tables": ordered})})

    def held_as(self, other: "ShardingTask") -> Self:
        """The same task whose tables are data-parallel, cached or in host memory where those of `other` are, and else in HBM."""
        mine, theirs = self.constraints.beyond_hbm, other.constraints.beyond_hbm
        tiers: dict[str, tuple[Tier | None, int | None]] = dict.fromkeys(mine, (None, None))
        known = {table.name: table.rows for table in self.tables}
        for name, rule in theirs.items():
            if name in known:
                rows = rule.cached_rows and min(rule.cached_rows, known[name])
                tiers[name] = rule.tier, rows
        task = self.with_copies(other.constraints.data_parallel)
        if not tiers:
            return task
        memory = self.host_memory_bytes or other.host_memory_bytes
        return task.with_tiers(tiers).model_copy(update={"host_memory_bytes": memory})

    @property
    def waits_for_input(self) -> bool:
        """Whether a step waits for lookups to reach the devices that hold the rows. A pipeline sends them a step ahead, but over
        a network between domains they take time on the links that outputs use."""
        several_domains = self.topology is not None and self.topology.domains(self.devices) > 1
        return self.pipeline == "none" or several_domains

    @property
    def copied(self) -> tuple[Table, ...]:
        """The data-parallel tables."""
        names = self.constraints.data_parallel
        return tuple(table for table in self.tables if table.name in names)

    @property
    def placed(self) -> tuple[Table, ...]:
        """The other tables, which a search places."""
        names = self.constraints.data_parallel
        return tuple(table for table in self.tables if table.name not in names)

    @property
    def without_tier(self) -> tuple[Table, ...]:
        """Those of the placed tables whose tier no rule names."""
        named = {rule.table for rule in self.constraints.tables if rule.tier is not None}
        return tuple(table for table in self.placed if table.name not in named)

    @property
    def copies_bytes(self) -> int:
        """What the copies of data-parallel tables take of every device."""
        return sum(self.memory(Part.of(table, copies=self.devices)).total for table in self.copied)

    @property
    def placeable_bytes(self) -> tuple[int, ...]:
        """Memory of each device for the tables that are placed."""
        copies = self.copies_bytes
        return tuple(max(usable - copies, 0) for usable in self.usable_bytes)

    @property
    def uncut_step_bytes(self) -> int:
        """What a step needs for all placed tables uncut."""
        return sum(self.memory(Part.of(table)).step for table in self.placed)

    @property
    def need_bytes(self) -> int:
        """HBM that all placed tables need uncut. No plan needs less: cuts repeat what is kept for each shard."""
        return sum(memory.total for memory in self.memories(list(map(Part.of, self.placed))))
