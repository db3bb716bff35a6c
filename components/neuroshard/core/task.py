"""A sharding task: which tables, on which devices, under which constraints."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from neuroshard.core.constraints import Constraints, TableRule, check_known
from neuroshard.core.dedup import sent_once
from neuroshard.core.groups import MAX_RANKS, Groups
from neuroshard.core.holding import Holding
from neuroshard.core.part import Memory, Part
from neuroshard.core.parts import ByAccess, RowsByAccess, hot_and_cold, part_names
from neuroshard.core.precision import SHARE_OF_FP32, CollectivePrecision
from neuroshard.core.row_order import RowOrder
from neuroshard.core.skew import Loads, largest_block
from neuroshard.core.step_memory import (
    BATCHES,
    MOST_ALLOCATOR_SHARE,
    OUTPUT_BYTES,
    WAIT_FOR_INPUT,
    Pipeline,
    PipelineOption,
    in_flight,
    output_bytes,
    own_input_bytes,
    pipeline_options_fault,
)
from neuroshard.core.table import DenseOptimizer, Table, Tables, check_distinct
from neuroshard.core.tiers import Cache, Tier, load_factor, operator_bytes
from neuroshard.core.topology import Topology
from neuroshard.core.units import MOST_STEP_MS
from neuroshard.core.value import SparseValue

MAX_DEVICES = MAX_RANKS
MAX_MEMORY_BYTES = 2**60  # an exbibyte


_OF_TRAINERS = ("collective_precision", "dense_optimizer", "host_memory_bytes", "dense_ms")
_OF_LEDGER = ("dense_memory_bytes", "allocator_share", "index_dedup", "pipeline_options")


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


class ShardingTask(SparseValue):
    """Tables to place on `len(device_memory_bytes)` devices; `batch_size` is the global batch of one training step.

    `pipeline` is the trainer's, with its `pipeline_options`; memory then counts what a step needs: with a `step_ledger` what was
    measured of real steps (core/step_ledger.py), `dense_memory_bytes` of the dense layers, and `allocator_share` of both; without
    it, in plans of formats 1 to 5, what TorchRec estimates (core/step_memory.py). Without a pipeline it is not counted. With
    `index_dedup`, EmbeddingCollections look up and send each distinct id of a rank's batch once.
    `topology` says which devices share a host and fast links; without one the cost model assumes its own.
    `collective_precision` is that of the collectives of outputs and gradients; without one they are fp32. `dense_optimizer` is
    the trainer's, which trains the data-parallel tables: see `Part.memory`. `host_memory_bytes` is what each host has for tables
    that are cached or in host memory; without it all tables are in HBM. `dense_ms` is what the dense layers of a step take,
    forward and backward: the trainer's pipeline `prefetch` fetches missed rows of the next batch meanwhile.

    With `groups` it is the task of each of several groups of ranks (core/groups.py): devices, batch and topology are a group's.
    Data-parallel tables have a copy on all ranks.

    Where the constraints have tables in two parts, or dealt over their row blocks, `parted` is the task that is weighed and
    priced, whose tables a plan's shards are of.
    """

    UNSAID: ClassVar = ("constraints", "pipeline", "step_ledger", *_OF_LEDGER, "topology", "groups", *_OF_TRAINERS)

    tables: Tables
    device_memory_bytes: tuple[Annotated[int, Field(gt=0, le=MAX_MEMORY_BYTES)], ...]
    batch_size: Annotated[int, Field(gt=0, le=2**31)]
    constraints: Constraints = Field(default_factory=Constraints)  # built at its first use: see core/value.py
    pipeline: Pipeline | None = None
    step_ledger: Literal[1] | None = None
    dense_memory_bytes: Annotated[int, Field(gt=0, le=MAX_MEMORY_BYTES)] | None = None
    allocator_share: Annotated[float, Field(ge=0, le=MOST_ALLOCATOR_SHARE)] | None = None
    index_dedup: Literal[True] | None = None
    pipeline_options: tuple[PipelineOption, ...] | None = None
    topology: Topology | None = None
    collective_precision: CollectivePrecision | None = None
    dense_optimizer: DenseOptimizer | None = None
    host_memory_bytes: Annotated[int, Field(gt=0, le=MAX_MEMORY_BYTES)] | None = None
    dense_ms: Annotated[float, Field(gt=0, le=MOST_STEP_MS)] | None = None
    groups: Groups | None = None
    _by_access: ByAccess = PrivateAttr(ByAccess())  # of a parted task
    _kept_free: tuple[int, ...] = PrivateAttr(())  # by a search, of each device, for what a step needs beyond its least
    _counts_sent: bool = PrivateAttr(False)  # whether a search counts the copies of lookups' outputs that are sent

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
        self.check_constraints()
        parted = self.parted
        check_distinct(parted.tables)
        copied = parted.constraints.data_parallel - parted.by_access.hot  # these are of a module of their own
        if name := next((t.name for t in parted.tables if t.name in copied and t.pooling == "none"), None):
            raise ValueError(f"table {name!r} is a sequence, which TorchRec cannot train data-parallel")
        self._check_mapped()
        parted._check_tiers()
        if fault := dense_time_fault(self.dense_ms, self.host_memory_bytes, self.pipeline):
            raise ValueError(fault)
        if self.step_ledger is None:
            self._check_without_ledger()
        if fault := pipeline_options_fault(self.pipeline_options, self.pipeline):
            raise ValueError(fault)
        sequence = next((table.name for table in self.tables if table.pooling == "none"), None)
        once = self.index_dedup or self.constraints.index_dedup
        if sequence is not None and not once and "clear_data_dist_inputs" in (self.pipeline_options or ()):
            raise ValueError(  # torchrec 1.8, construct_jagged_tensors
                f"table {sequence!r} is a sequence: TorchRec reads lengths of what was sent again, which clear_data_dist_inputs "
                "has freed, and every rank fails (`setStorage: … out of bounds`) unless it is row-wise; leave the option out of "
                "--pipeline-options, or train with use_index_dedup (--index-dedup on)"
            )
        if (copied := self.constraints.data_parallel) and not self.trains_copies:
            raise ValueError(
                f"table {min(copied)!r} is data-parallel, which TorchRec trains neither in its SemiSync pipeline, where the next "
                "batch is looked up before the dense optimizer changes the rows, nor with clear_data_dist_inputs, which frees "
                "its ids with those that are sent; leave out the copies, or take another --pipeline, or other --pipeline-options"
            )
        precision = self.collective_precision
        if precision is not None and (fault := precision.fault(self.tables, self.batch_size, self.devices)):
            raise ValueError(fault)
        if self.topology is not None and (fault := self.topology.fault(self.devices)):
            raise ValueError(fault)
        if self.groups is not None and (fault := self._groups_fault(self.groups)):
            raise ValueError(fault)
        return self

    def _check_without_ledger(self) -> None:
        """Only the ledger of a step knows all pipelines, and what `_OF_LEDGER` says."""
        if self.pipeline not in (None, *BATCHES):
            raise ValueError(
                f"pipeline {self.pipeline!r} has no memory of a step without a step_ledger; say step_ledger 1"
            )
        if said := next((name for name in _OF_LEDGER if getattr(self, name) is not None), None):
            raise ValueError(f"{said} counts in a ledger of the step's memory; say step_ledger 1, or leave it out")

    def _groups_fault(self, groups: Groups) -> str:
        """Why the task cannot be that of a group; empty if it can."""
        if fault := groups.fault(self.devices):
            return fault
        if mapped := self.mapped:
            return (
                f"groups of ranks cannot hold table {mapped[0].name!r}, which gives rows to ids as it trains: each group would "
                "give them others, and TorchRec averages rows"
            )
        if self.topology != groups.topology(self.devices, self.topology):
            return f"the topology is not that of {groups.numbering} groups of {self.devices} of {groups.ranks} ranks"
        if self.constraints.rows_by_access:
            return "groups of ranks cannot hold tables by access, whose hot rows all ranks would have to train alike"
        if self.host_memory_bytes is not None or self.constraints.beyond_hbm:
            why = "TorchRec averages what lies in host memory, and not what caches hold"
            return f"groups of ranks cannot hold tables beyond HBM: {why}"
        return ""

    def _check_mapped(self) -> None:
        """Tables with an id map are row-wise over all devices: no rule can hold them otherwise."""
        rules, together = self.constraints.rules(), {name for group in self.constraints.together for name in group}
        for table in self.mapped:
            assert table.id_map is not None
            if fault := table.id_map.fault(table.rows, self.devices):
                raise ValueError(f"table {table.name!r} {fault}")
            rule = rules.get(table.name)
            if table.name in together or (rule is not None and rule.holds_otherwise(self.devices)):
                raise ValueError(
                    f"table {table.name!r} gives rows to ids as it trains (id_map), and TorchRec holds it row-wise over all "
                    "devices only; leave out its rules and what it is kept together with"
                )
            if rule is not None and rule.in_tier.cached:
                raise ValueError(
                    f"table {table.name!r} gives rows to ids as it trains (id_map), and TorchRec sets the rows of new ids in "
                    "host memory, where a cache does not see it; say tier 'host' or 'hbm'"
                )

    def _check_tiers(self) -> None:
        """Tables in host memory need a host with some, and caches fewer rows than the table has."""
        beyond = self.constraints.beyond_hbm
        for table in self.tables if beyond else ():
            rule = beyond.get(table.name)
            if rule is None:
                continue
            if rule.in_tier.elements == "host" and self.host_memory_bytes is None:
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
    def plan_format(self) -> int:
        """The format in which plans of it are written: the oldest whose every reader knows all of its keys. Readers of format 1
        that are as old as that know tables, devices and batch alone, and refuse as damaged what names more."""
        misses = (table.access and table.access.stream for table in self.tables)
        if self.dense_ms is not None or any(stream and stream.varies for stream in misses):
            return max(3, self.least_plan_format[0])
        return max(2, self.least_plan_format[0])

    @property
    def least_plan_format(self) -> tuple[int, str]:
        """The oldest format of plans whose readers do not drop what it names, and what that is."""
        tiers = [rule.in_tier for rule in self.constraints.tables if rule.tier is not None]
        since = {
            6: (self.step_ledger, "a step_ledger"),
            5: (self.mapped, "id maps"),
            4: (self.groups, "groups of ranks"),
            3: (
                self.constraints.rows_by_access or any(t.row_order or t.lookups_by_id for t in self.tables),
                "row orders, lookups by id or rows by access",
            ),
            2: (
                self.host_memory_bytes or tiers or any(table.access for table in self.tables),
                "tiers, host memory or access curves",
            ),
        }
        named = [(known, words) for known, (says, words) in since.items() if says]
        named += [(tier.since, f"tier {tier.name!r}") for tier in tiers]
        return max(named, default=(1, ""))

    @property
    def parted(self) -> Self:
        """The task in which two tables stand for each that is held in two parts, with the rules of both, and of a table that is
        dealt over its row blocks all rows are looked up alike. Itself where there are none. Raises ValueError where a part
        contradicts its table."""
        held, once = self.constraints.rows_by_access, self.sent_once
        if not held and not once:
            return self
        tables = list[Table]()
        for table in self.tables:
            hot_rows = held[table.name].hot_rows if table.name in held else None
            if hot_rows is not None:
                tables += hot_and_cold(table, hot_rows)
            elif table.name in held:
                tables.append(table.model_copy(update={"row_order": None, "lookups_by_id": ()}))
            else:
                tables.append(table)
        parted = self.model_copy(update={"tables": tuple(tables), "constraints": self.constraints.parted})
        if once := parted.sent_once:
            tables = [sent_once(t, self.batch_size, self.devices) if t.name in once else t for t in tables]
            parted = parted.model_copy(update={"tables": tuple(tables)})
        parted._by_access = self.by_access
        return parted

    @property
    def sent_once(self) -> frozenset[str]:
        """Names of the sequences that send each distinct id of a rank's batch once, unless they stand so (`parted`)."""
        named, copied = self.constraints.index_dedup, self.constraints.data_parallel
        sequences = (table for table in self.tables if table.pooling == "none" and not table.sent_once)
        return frozenset(t.name for t in sequences if (self.index_dedup or t.name in named) and t.name not in copied)

    @property
    def joined_columns(self) -> float:
        """Columns of a sample that a rank of a (parted) task copies once more, whatever the plan: of tables by access to join
        outputs; of sequences in the order of ranks, and where ids are sent once to all places of these."""
        copied = self.constraints.data_parallel
        sequences = (table for table in self.tables if table.pooling == "none" and table.name not in copied)
        return self.by_access.columns + math.fsum(
            Part.of(table).sent_columns + table.sent_once * table.every_lookup * table.dim for table in sequences
        )

    def with_dedup(self, names: Collection[str]) -> Self:
        """The same task, in which the ids of these sequences, and of no others, are sent once. Itself where that is so."""
        if self.index_dedup is None and self.constraints.index_dedup == frozenset(names):
            return self
        rules, task = dict(self.constraints.rules()), self.model_copy(update={"index_dedup": None})
        for name in self.constraints.index_dedup.union(names):
            rule = rules.get(name, TableRule(table=name))
            rules[name] = rule.model_copy(update={"index_dedup": name in names or None})
        return task._with_rules(rules)

    def unparted(self, whole: "ShardingTask") -> Self:
        """The task of which this is the parted one, or that with other rules and settings, such as a search makes of it: with the
        tables of `whole`, and what its constraints say of rows by access and of tables kept together."""
        held, rules = whole.constraints.rows_by_access, dict(self.constraints.rules())
        for name, by_access in held.items():
            rules[name] = rules.get(name, TableRule(table=name)).model_copy(update={"rows_by_access": by_access})
        constraints = self.constraints.model_copy(update={"together": whole.constraints.together})
        task = self.model_copy(update={"tables": whole.tables, "constraints": constraints})._with_rules(rules)
        task._by_access = ByAccess()
        return task

    def holding(self, holdings: Sequence[Holding]) -> Self:
        """The same task, whose rules name these holdings too. Itself where there are none."""
        if not holdings:
            return self
        rules = dict(self.constraints.rules())
        return self._with_rules(
            rules | {one.table: rules.get(one.table, TableRule(table=one.table)).naming(one) for one in holdings}
        )

    def holdings_of(self, held: "ShardingTask") -> tuple[Holding, ...]:
        """What the rules of a task that is `held` name beyond those of this one."""
        rules = self.constraints.rules()
        return tuple(filter(None, (Holding.beyond(rules, rule) for rule in held.constraints.tables)))

    @property
    def orders(self) -> dict[str, RowOrder]:
        """The row orders of the tables that are held by access, by the tables' names. Those with a list need it in a trainer."""
        held = self.constraints.rows_by_access
        return {
            table.name: table.row_order for table in self.tables if table.name in held and table.row_order is not None
        }

    def with_rows_by_access(self, held: Mapping[str, RowsByAccess]) -> Self:
        """The same task with these tables, and no others, in two parts or dealt. Rules of other parts are left out."""
        parts = {part for name in self.constraints.in_two_parts for part in part_names(name)}
        kept = {part for name, how in held.items() if how.hot_rows is not None for part in part_names(name)}
        rules = {name: rule for name, rule in self.constraints.rules().items() if name not in parts - kept}
        for name in held.keys() | self.constraints.rows_by_access.keys():
            rule = rules.pop(name, TableRule(table=name)).model_copy(update={"rows_by_access": held.get(name)})
            if name in held or rule.says_more:
                rules[name] = rule
        return self._with_rules(rules)

    @property
    def by_access(self) -> ByAccess:
        """What tables that are dealt or in two parts take of every rank beside the tables of the parted task."""
        held = self.constraints.rows_by_access
        return ByAccess.of(self.tables, held) if held else self._by_access

    @property
    def trains_copies(self) -> bool:
        """Whether TorchRec can train data-parallel tables by the pipeline."""
        return self.pipeline != "semi-sync" and "clear_data_dist_inputs" not in (self.pipeline_options or ())

    def lookup_share(self, table: Table, first: int, rows: int, blocks: int) -> float | None:
        """The share of a table's lookups that `rows` ids from `first` on are taken to have, one of so many row blocks. Where only
        the shape of access is known, each block has what the largest is expected to have: any may be that. None where all rows
        are taken to be looked up alike."""
        loads = self.skewed(table) if rows < table.rows else None
        return table.lookup_share(first, rows) if loads is None else largest_block((loads,), blocks).expected

    def skewed(self, table: Table) -> Loads | None:
        """The loads of a table's rows, where any of its row blocks may be the hot one; None where it is known what each has, or
        taken to be alike, as plans of formats 1 to 5 did."""
        known = self.step_ledger is None or table.name in self.by_access.dealt or table.knows_ids
        return None if known else table.loads

    @property
    def devices(self) -> int:
        return len(self.device_memory_bytes)

    @property
    def ranks(self) -> int:
        """Those of the trainer: of all groups, where there are several."""
        return self.devices if self.groups is None else self.groups.ranks

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks."""
        return self.batch_size * (self.ranks // self.devices)

    @property
    def topology_of_all(self) -> Topology | None:
        """How all ranks of the trainer are joined."""
        return self.topology if self.groups is None else self.groups.of_all_ranks(self.topology)

    @property
    def of_all_ranks(self) -> Self:
        """The same tables on all ranks of the trainer, as if they were one group."""
        if self.groups is None:
            return self
        own = {
            "device_memory_bytes": self.device_memory_bytes * (self.ranks // self.devices),
            "batch_size": self.global_batch_size,
            "topology": self.topology_of_all,
            "groups": None,
        }
        return self.model_copy(update=own)

    @property
    def devices_of_host(self) -> int:
        """Devices that share a host's memory; all, where no topology says how many."""
        return self.devices if self.topology is None else self.topology.local_world_size

    @property
    def may_split_rows(self) -> list[str]:
        """Names of the tables that may be split row-wise, over all devices or over those of a domain."""
        return self.constraints.may_split_rows(self.tables, self.devices, self._domain)

    def check_constraints(self) -> None:
        """Raise ValueError where its constraints contradict each other: not of a parsed task, but perhaps of a changed copy."""
        tables = {table.name: table for table in self.tables}
        for name in self.constraints.index_dedup & tables.keys():
            if tables[name].pooling != "none":
                raise ValueError(f"table {name!r} is pooled, and only ids of sequences are sent once (index_dedup)")
        for name, held in self.constraints.rows_by_access.items():
            check_known(name, tables, "a rule")
            if fault := held.fault(tables[name]):
                raise ValueError(f"table {name!r} {fault}")
        parted = self.parted
        parted.constraints.check({table.name for table in parted.tables}, self.device_memory_bytes, self._domain)

    @property
    def _domain(self) -> int:
        """The devices of a domain, where there are several domains; else 0."""
        several = self.topology is not None and self.topology.domains(self.devices) > 1
        return self.topology.domain if self.topology is not None and several else 0

    @property
    def usable_bytes(self) -> tuple[int, ...]:
        """Memory of each device that is not reserved: for tables, and for maps of ids to rows by access."""
        return tuple(max(memory - self.constraints.reserved(memory), 0) for memory in self.device_memory_bytes)

    def memory(self, part: Part) -> Memory:
        """What a part of one of its tables takes of a device, and of its host."""
        return self.memories([part])[0]

    def memories(self, parts: Sequence[Part]) -> list[Memory]:
        """What parts of its tables take, each in the tier of its table. A cached part is an operator of its own. A copied hot
        part has the state of its table, and one gradient: it is trained as the rest of the table (client/rows/copies.py)."""
        beyond, hot, found = self.constraints.beyond_hbm, self.by_access.hot, list[Memory]()
        sent_bytes = self._sent_bytes
        for part in parts:
            dense_optimizer = None if part.table.name in hot else self.dense_optimizer
            counted = (OUTPUT_BYTES if part.copies else sent_bytes) * bool(self.step_ledger)
            memory = part.memory(self.batch_size, self.pipeline, dense_optimizer, sent_bytes=counted)
            if self.allocator_share and not part.copies:  # gradients of copies are few and large
                memory = memory._replace(step=int(memory.step * self.with_allocator))
            rule = beyond.get(part.table.name)
            if rule is not None and rule.tier is not None:
                factor = load_factor(rule.cached_rows or 0, part.table.rows)
                cache = Cache(factor, prefetch=self.pipeline == "prefetch") if rule.cached_rows else None
                held = operator_bytes([(part, rule.tier)], cache)
                by_row = part.rows * part.table.optimizer_bytes_per_row
                memory = memory._replace(weights=held.hbm - by_row, optimizer=by_row, **held.beyond_hbm)
            found.append(memory)
        return found

    def with_tiers(self, tiers: Mapping[str, tuple[Tier | None, int | None]]) -> Self:
        """The same task with these tables in these tiers, with so many cached rows; other rules of theirs stay."""
        rules = dict(self.constraints.rules())
        for name, (tier, cached_rows) in tiers.items():
            rule = rules.get(name, TableRule(table=name))
            rules[name] = rule.model_copy(update={"tier": tier, "cached_rows": cached_rows})
        return self._with_rules(rules)

    def with_copies(self, names: Collection[str]) -> Self:
        """The same task, except that these tables and no others are data-parallel, without other rules of their own."""
        rules = dict(self.constraints.rules())
        for name in self.constraints.data_parallel.difference(names):
            rules[name] = rules[name].model_copy(update={"data_parallel": None})
        rules |= {name: TableRule(table=name, data_parallel=True) for name in names}
        return self._with_rules(rules)

    def _with_rules(self, rules: Mapping[str, TableRule]) -> Self:
        """The same task with these rules of tables and of their parts, and no others, in the order of the tables."""
        names = (name for table in self.tables for name in (table.name, *part_names(table.name)))
        ordered = tuple(rules[name] for name in dict.fromkeys(names) if name in rules)  # a table may have a part's name
        return self.model_copy(update={"constraints": self.constraints.model_copy(update={"tables": ordered})})

    def held_as(self, other: "ShardingTask") -> Self:
        """The same task whose tables are held as those of `other`: dealt, in parts, sent once, copied, in tiers; or none."""
        task = self.parted_as(other)
        if not task.index_dedup:
            task = task.with_dedup(other.sent_once & {table.name for table in task.tables if table.pooling == "none"})
        mine, theirs = task.constraints.beyond_hbm, other.parted.constraints.beyond_hbm
        tiers: dict[str, tuple[Tier | None, int | None]] = dict.fromkeys(mine, (None, None))
        known = {table.name: table.rows for table in task.parted.tables}
        for name, rule in theirs.items():
            if name in known:
                rows = rule.cached_rows and min(rule.cached_rows, known[name])
                tiers[name] = rule.tier, rows
        task = task.with_copies(other.constraints.data_parallel)
        if not tiers:
            return task
        memory = self.host_memory_bytes or other.host_memory_bytes
        return task.with_tiers(tiers).model_copy(update={"host_memory_bytes": memory})

    def parted_as(self, other: "ShardingTask") -> Self:
        """The same task whose tables are dealt and in two parts as those of `other`, by their orders. Itself if none are."""
        if not (self.constraints.rows_by_access or other.constraints.rows_by_access):
            return self
        mine, orders = {table.name for table in self.tables}, {table.name: table.row_order for table in other.tables}
        held = {name: how for name, how in other.constraints.rows_by_access.items() if name in mine}
        tables = (t.model_copy(update={"row_order": orders[t.name]}) if t.name in held else t for t in self.tables)
        return self.model_copy(update={"tables": tuple(tables)}).with_rows_by_access(held)

    @property
    def waits_for_input(self) -> bool:
        """Whether a step waits for lookups to reach the devices that hold the rows. A pipeline sends them a step ahead, but over
        a network between domains they take time on the links that outputs use."""
        several_domains = self.topology is not None and self.topology.domains(self.devices) > 1
        return self.exchanges_input or several_domains

    @property
    def exchanges_input(self) -> bool:
        """Whether the trainer's pipeline sends lookups within the step that needs them."""
        return self.pipeline in WAIT_FOR_INPUT

    @property
    def copied(self) -> tuple[Table, ...]:
        """The data-parallel tables."""
        names = self.constraints.data_parallel
        return tuple(table for table in self.tables if table.name in names)

    @property
    def densely_trained(self) -> tuple[Table, ...]:
        """The data-parallel tables that the dense optimizer trains: all but copied hot parts."""
        return tuple(table for table in self.copied if table.name not in self.by_access.hot)

    @property
    def placed(self) -> tuple[Table, ...]:
        """The other tables, which a search places."""
        names = self.constraints.data_parallel
        return tuple(table for table in self.tables if table.name not in names and table.id_map is None)

    @property
    def mapped(self) -> tuple[Table, ...]:
        """The tables that give rows to ids as they train, each row-wise over all devices."""
        return tuple(table for table in self.tables if table.id_map is not None)

    @property
    def mapped_bytes(self) -> tuple[int, ...]:
        """What these take of each device."""
        taken = [0] * self.devices
        for table in self.mapped:
            blocks = [rows for _, rows in table.row_blocks(self.devices)]
            share = self.lookup_share(table, 0, blocks[0], self.devices)
            of_rows = {rows: self.memory(Part(table, rows, table.dim, self.devices, 0, share)) for rows in set(blocks)}
            taken = [so_far + of_rows[rows].total for so_far, rows in zip(taken, blocks, strict=True)]
        return tuple(taken)

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
    def searched_bytes(self) -> tuple[int, ...]:
        """Memory of each device that a search gives to tables: beside maps of ids, and what a step needs wherever tables lie."""
        return tuple(max(left, 0) for left in self.left_bytes)

    @property
    def left_bytes(self) -> tuple[int, ...]:
        """The same, below 0 where a step alone needs more."""
        taken = self.by_access.map_bytes + self.least_step_bytes
        kept = self._kept_free
        if len(kept) != self.devices:  # none, or of fewer devices than a hint tries
            kept = (max(kept, default=0),) * self.devices
        return tuple(usable - taken - own for usable, own in zip(self.usable_bytes, kept, strict=True))

    @property
    def placeable_bytes(self) -> tuple[int, ...]:
        """Memory of each device for the tables that are placed."""
        copies = self.copies_bytes
        return tuple(
            max(searched - copies - own, 0)
            for searched, own in zip(self.searched_bytes, self.mapped_bytes, strict=True)
        )

    @property
    def counts_steps(self) -> bool:
        """Whether memory counts the whole of a step, by the ledger."""
        return self.step_ledger is not None and self.pipeline is not None

    @property
    def with_allocator(self) -> float:
        """What CUDA's caching allocator holds for a step, in times what tensors take."""
        return 1 + (self.allocator_share or 0.0)

    @property
    def _sent_bytes(self) -> float:
        """Bytes of an element of outputs as they are sent: what those of several collections take at least at once."""
        return OUTPUT_BYTES * SHARE_OF_FP32[(self.collective_precision or CollectivePrecision()).forward]

    @property
    def least_step_bytes(self) -> int:
        """What a step needs of every device beyond what its parts take (`Part.memory`), whatever the plan, by the ledger: its own
        batches, the outputs that it gets, and the allocator's share of both."""
        if not self.counts_steps or self.pipeline is None:
            return 0
        samples, copied = self.batch_size / self.devices, self.constraints.data_parallel
        flight = in_flight(self.pipeline, self.pipeline_options or ())
        own = max(flight.outputs.own - flight.freed, 0) * sum(own_input_bytes(self.tables, samples).values())
        outputs = sum(output_bytes(table, samples) for table in self.parted.tables if table.name not in copied)
        return int((own + outputs * self._sent_bytes / OUTPUT_BYTES) * self.with_allocator)

    @property
    def keeps_free(self) -> bool:
        """Whether a search keeps room for a step: what does not fit then may fit otherwise."""
        return self._counts_sent or any(self._kept_free)

    @property
    def counts_sent(self) -> bool:
        """Whether a search counts the copies of lookups' outputs that are sent."""
        return self._counts_sent

    def keeping_free(self, nbytes: Sequence[int], *, counts_sent: bool = False) -> Self:
        """The same task, on whose devices a search leaves so many bytes free: (D,), or none."""
        task = self.model_copy()
        task._kept_free, task._counts_sent = tuple(nbytes), counts_sent
        return task

    @property
    def need_bytes(self) -> int:
        """HBM that all placed tables need uncut. No plan needs less: cuts repeat what is kept for each shard."""
        return sum(memory.total for memory in self.memories(list(map(Part.of, self.placed))))
