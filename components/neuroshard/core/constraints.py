"""What a plan must respect beyond memory: pins, tables kept together, how far a table may be cut, and whether row-wise."""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, ValidationError, model_validator

from neuroshard.core.errors import UsageError
from neuroshard.core.holding import FIELDS, Holding
from neuroshard.core.parts import RowsByAccess, part_names
from neuroshard.core.sharding import SHARDINGS, TABLE_ROW_WISE, ShardingName, ShardingTypeName
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.text import counted
from neuroshard.core.tiers import TIERS
from neuroshard.core.units import format_bytes
from neuroshard.core.value import SparseValue, Whole, explain

LeastDim = Annotated[Whole, Field(ge=DIM_STEP, le=2**31, multiple_of=DIM_STEP)]
MostShards = Annotated[Whole, Field(ge=1, le=2**31)]
DeviceNumber = Annotated[Whole, Field(ge=0)]

SIMPLICITY = 0.005  # default share that a plan may cost above the cheapest to have fewer cuts
OF_ROWS = tuple(one for one in SHARDINGS if one.splits_rows)
MOST_SIMPLICITY = 0.1  # a larger share is a mistaken unit


def check_simplicity(share: float) -> float:
    """The share that a plan may cost above the cheapest to have fewer cuts. Raises UsageError for an invalid one."""
    if not 0 <= share <= MOST_SIMPLICITY:
        raise UsageError(
            f"simplicity must be 0% to {MOST_SIMPLICITY:.0%} of the cost, not {100 * share:.6g}%; 0 takes the cheapest plan "
            "whatever its cuts"
        )
    return share


class TableRule(Holding):
    """What a plan is to hold of one table, and what else is asked of it: the devices that may hold it, how far it may be cut, and
    whether a search may split it row-wise instead. None means no rule of its own. A `data_parallel` table is neither pinned nor
    cut: every device has a copy. `cached_rows` are over all its row blocks. Of a table held in two parts, each may have a rule of
    its own, by the name of the part (core/parts.py), which comes before that of the table."""

    UNSAID: ClassVar[Collection[str]] = ("row_wise", *FIELDS)

    devices: tuple[DeviceNumber, ...] | None = None
    min_dim: LeastDim | None = None
    max_shards: MostShards | None = None
    row_wise: bool | None = None

    def naming(self, holding: Holding) -> Self:
        """This rule, which says too what the holding does."""
        said = {name: value for name in FIELDS if (value := getattr(holding, name)) is not None}
        return self.model_copy(update=said)

    @property
    def says_more(self) -> bool:
        """Whether it says anything but what is made of the table's row order."""
        return any(getattr(self, name) is not None for name in type(self).model_fields if name not in _OF_TABLES)

    def holds_otherwise(self, devices: int) -> bool:
        """Whether it keeps a table from being row-wise over all of so many devices, and whole in its columns."""
        few = self.max_shards is not None and self.max_shards < devices
        pinned = self.devices is not None and len(self.devices) < devices
        return few or pinned or self.row_wise is False or bool(self.data_parallel) or self.rows_by_access is not None

    def over(self, other: "TableRule") -> Self:
        """This rule of a part, and where it says nothing what the rule of its table says. A tier comes with its cached rows.
        Whether both together contradict each other is not checked."""
        unsaid = {name for name in type(self).model_fields if getattr(self, name) is None}
        unsaid -= {*_OF_TABLES, "cached_rows"} if self.tier is not None else _OF_TABLES
        return self.model_copy(update={name: getattr(other, name) for name in unsaid})

    @model_validator(mode="after")
    def _some_tier(self) -> Self:
        if self.in_tier.cached != (self.cached_rows is not None):
            said = "no tier" if self.tier is None else f"tier {self.tier!r}"
            cached = " or ".join(repr(name) for name, tier in TIERS.items() if tier.cached)
            raise ValueError(
                f"table {self.table!r} has {said} and "
                f"{'no cached_rows' if self.cached_rows is None else f'{self.cached_rows:,} cached_rows'}; tier {cached} and "
                "cached_rows are said together"
            )
        if self.data_parallel and self.tier not in (None, "hbm"):
            raise ValueError(f"table {self.table!r} is data-parallel: copies lie in HBM, not in tier {self.tier!r}")
        return self

    @model_validator(mode="after")
    def _some_device(self) -> Self:
        if self.devices is not None and not self.devices:
            raise ValueError(f"table {self.table!r} is pinned to no device")
        if self.devices is not None and len(set(self.devices)) < len(self.devices):
            raise ValueError(f"table {self.table!r} is pinned to a device twice")
        others = {"pinned": self.devices, "split row-wise": self.row_wise}
        if self.data_parallel and (what := next((name for name, said in others.items() if said), None)):
            raise ValueError(f"table {self.table!r} is data-parallel, a copy on every device, and cannot be {what}")
        return self

    @model_validator(mode="after")
    def _of_parts(self) -> Self:
        if self.rows_by_access is None:
            return self
        if self.data_parallel:
            what = "dealt over row blocks" if self.rows_by_access.dealt else "held in two parts"
            raise ValueError(
                f"table {self.table!r} is data-parallel, a copy on every device, and cannot be {what}; say data_parallel of its "
                f"hot part, {part_names(self.table)[0]!r}, or leave one of them out"
            )
        if self.rows_by_access.hot_rows is not None and self.cached_rows is not None:
            raise ValueError(
                f"table {self.table!r} is held in two parts, and {self.cached_rows:,} of its rows are cached; say of which part, "
                f"{' or '.join(map(repr, part_names(self.table)))}"
            )
        return self


_OF_TABLES = {"table", "rows_by_access"}  # what no part takes over from its table


class Constraints(SparseValue):
    """Rules of a sharding task, table by table.

    `reserve_bytes` of every device, or `reserve_share` of its memory if that is more, are not for tables. `min_dim` and
    `max_shards` hold for tables without a rule of their own; a table of fewer columns than `min_dim` stays whole. The tables of
    each set in `together` are whole on one device. `row_wise` lets a search split any table row-wise that no other rule keeps
    from it. `sharding_types` are those that a search may use, None for all; tables may always stay whole. Only searches obey
    these two: other planners' plans are valid without.
    """

    UNSAID: ClassVar[Collection[str]] = ("row_wise", "reserve_share", "sharding_types")

    reserve_bytes: Annotated[int, Field(ge=0, le=2**63)] = 0
    reserve_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_dim: LeastDim = DIM_STEP
    max_shards: MostShards | None = None
    tables: tuple[TableRule, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    row_wise: bool = False
    sharding_types: tuple[ShardingTypeName, ...] | None = None

    def may_use(self, sharding_type: ShardingName) -> bool:
        """Whether a search may make shards of this type."""
        return self.sharding_types is None or sharding_type in self.sharding_types

    @property
    def may_split_some_rows(self) -> bool:
        """Whether a search may split rows in any way."""
        return any(self.may_use(one.name) for one in OF_ROWS)

    def reserved(self, memory_bytes: int) -> int:
        """Bytes of a device of so much memory that are not for tables."""
        return max(self.reserve_bytes, math.ceil(self.reserve_share * memory_bytes))

    @property
    def reserve_in_words(self) -> str:
        """`2.0 GiB`, `15%`, or both; empty where nothing is reserved."""
        share = f"{100 * self.reserve_share:g}%" if self.reserve_share else ""
        return " or ".join(filter(None, [format_bytes(self.reserve_bytes) if self.reserve_bytes else "", share]))

    def check(self, names: Collection[str], device_memory_bytes: Collection[int], domain: int = 0) -> None:
        """Raise ValueError for an unknown table or device, and for rules that contradict each other. `domain` is the number of
        devices of a domain, where there are several."""
        known, devices = set(names), len(device_memory_bytes)
        smallest = min(device_memory_bytes)
        if self.reserved(smallest) >= smallest:
            raise ValueError(
                f"{self.reserved(smallest):,} bytes are reserved on every device, but the smallest has {smallest:,}; "
                "reserve less"
            )
        ruled: set[str] = set()
        for rule in self.tables:
            check_known(rule.table, known, "a rule")
            if rule.table in ruled:
                raise ValueError(f"table {rule.table!r} has two rules; write one")
            ruled.add(rule.table)
            try:
                TableRule(**dict(rule))
            except ValidationError as error:  # of a part, whose own rule was valid
                raise ValueError(
                    f"{explain(error)}; what the rule of a table says holds for both of its parts: say it of one, by its name"
                ) from None
            if rule.devices is not None and max(rule.devices) >= devices:
                raise ValueError(
                    f"table {rule.table!r} is pinned to device {max(rule.devices)}, but there are {devices}"
                )
            if rule.row_wise:
                self._check_row_wise(rule, devices, domain)
        fewest, over = self._fewest_row_blocks(devices, domain)
        if self.row_wise and self.max_shards is not None and self.max_shards < fewest:
            raise ValueError(
                f"all tables may be split row-wise, over {over}, and have "
                f"{counted(self.max_shards, 'shard')} at most; say one of them"
            )
        rows = "all tables" if self.row_wise else next((repr(rule.table) for rule in self.tables if rule.row_wise), "")
        if rows and not self.may_split_some_rows:
            raise ValueError(
                f"{rows} may be split row-wise, and sharding_types has none of {', '.join(map(repr, OF_ROWS))}; say one of them"
            )
        self._check_together(known)

    def _fewest_row_blocks(self, devices: int, domain: int) -> tuple[int, str]:
        """Into how many blocks of rows a table is split at least, and over which devices, in words."""
        if domain and self.may_use(TABLE_ROW_WISE.name):
            return domain, f"the {domain} devices of a domain"
        return devices, f"all {devices} devices"

    def _check_row_wise(self, rule: TableRule, devices: int, domain: int) -> None:
        fewest, over = self._fewest_row_blocks(devices, domain)
        most = self.max_shards if rule.max_shards is None else rule.max_shards
        for what, so in (
            (
                f"is pinned to {len(rule.devices or ())} of all {devices}",
                rule.devices is not None and len(rule.devices) < devices,
            ),
            (f"may have {counted(most or 0, 'shard')} at most", most is not None and most < fewest),
            ("is kept together with others", any(rule.table in group for group in self.together)),
        ):
            if so:
                raise ValueError(
                    f"table {rule.table!r} may be split row-wise, over {over}, but {what}; say one of them"
                )

    def _check_together(self, known: Collection[str]) -> None:
        pins = {rule.table: set(rule.devices) for rule in self.tables if rule.devices is not None}
        kept: set[str] = set()
        for group in self.together:
            for name in group:
                check_known(name, known, "a set kept together")
                if name in self.data_parallel:
                    raise ValueError(f"table {name!r} is data-parallel, and cannot be kept together with others")
                if name in kept:
                    raise ValueError(f"table {name!r} is twice among the tables kept together")
                kept.add(name)
            pinned = [name for name in group if name in pins]
            if pinned and not set.intersection(*(pins[name] for name in pinned)):
                each = "; ".join(f"{name!r} to {_listed(pins[name])}" for name in pinned)
                raise ValueError(f"no device may hold all of these tables, which are kept together and pinned: {each}")

    @property
    def data_parallel(self) -> frozenset[str]:
        """Names of the tables of which every device has a copy."""
        return frozenset(rule.table for rule in self.tables if rule.data_parallel)

    @property
    def beyond_hbm(self) -> dict[str, TableRule]:
        """The rules of the tables in tiers beyond HBM, by table."""
        return {rule.table: rule for rule in self.tables if rule.in_tier.beyond_hbm}

    @property
    def rows_by_access(self) -> dict[str, RowsByAccess]:
        """What is made of the row orders of tables, by table."""
        return {rule.table: rule.rows_by_access for rule in self.tables if rule.rows_by_access is not None}

    @property
    def index_dedup(self) -> frozenset[str]:
        return frozenset(rule.table for rule in self.tables if rule.index_dedup)

    @property
    def in_two_parts(self) -> list[str]:
        """Names of the tables held in two parts."""
        return [name for name, held in self.rows_by_access.items() if held.hot_rows is not None]

    @property
    def parted(self) -> Self:
        """The same rules of the tables that stand for those held in two parts. What the rule of such a table says holds for both
        parts, where theirs say nothing. Raises ValueError where such a table has two rules."""
        halves, whole = {name: part_names(name) for name in self.in_two_parts}, dict[str, TableRule]()
        own = list[TableRule]()
        for rule in self.tables:
            if rule.table not in halves:
                own.append(rule.model_copy(update={"rows_by_access": None}))
            elif rule.table in whole:
                raise ValueError(f"table {rule.table!r} has two rules; write one")
            else:
                whole[rule.table] = rule
        said = {rule.table for rule in own}
        above = {part: whole[name] for name, parts in halves.items() for part in parts}
        own += [TableRule(table=part) for part, rule in above.items() if part not in said and rule.says_more]
        together = (tuple(part for name in group for part in halves.get(name, (name,))) for group in self.together)
        return self.model_copy(
            update={
                "tables": tuple(rule.over(above[rule.table]) if rule.table in above else rule for rule in own),
                "together": tuple(together),
            }
        )

    def rules(self) -> Mapping[str, TableRule]:
        """The rules by table, for those that have one of their own."""
        return {rule.table: rule for rule in self.tables}

    def allowed(self, rule: TableRule | None, dim: int) -> tuple[int, int | None]:
        """Least columns and most shards of a table of `dim` columns."""
        least = rule.min_dim if rule and rule.min_dim is not None else self.min_dim
        most = rule.max_shards if rule and rule.max_shards is not None else self.max_shards
        return min(least, dim), most

    def may_split_rows(self, tables: Collection[Table], devices: int, domain: int = 0) -> list[str]:
        """Names of the tables that may be split row-wise over `devices` devices or, where there are domains, over the `domain`
        devices of one, and have rows for all of them.

        Not those whose rows are averaged: TorchRec (1.8) then divides what whole tables give as well (client/torchrec/shards.py).
        """
        rules, kept = self.rules(), {name for group in self.together for name in group}
        usable = [one for one in OF_ROWS if self.may_use(one.name)]

        def may(table: Table) -> bool:
            rule = rules.get(table.name)
            if table.id_map is not None or not (
                self.row_wise if rule is None or rule.row_wise is None else rule.row_wise
            ):
                return False
            most = self.allowed(rule, table.dim)[1]
            everywhere = rule is None or rule.devices is None or len(rule.devices) == devices
            in_domains = domain and table.pooling != "none"
            kinds = (one for one in usable if in_domains or not one.over_domains)
            over = {domain if one.over_domains else devices for one in kinds}
            enough = any((most is None or most >= count) and table.has_rows_for(count) for count in over)
            return everywhere and table.pooling != "mean" and enough

        if devices == 1 or not self.may_split_some_rows:
            return []
        kept |= self.data_parallel
        return [table.name for table in tables if table.name not in kept and may(table)]


def check_known(name: str, known: Collection[str], where: str) -> None:
    if name not in known:
        raise ValueError(f"{where} is about table {name!r}, which is not in the task")


def _listed(devices: Collection[int]) -> str:
    return ", ".join(map(str, sorted(devices)))
