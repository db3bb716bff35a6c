"""Rows by access in a plan: a table dealt over its row blocks, or held in two parts, by the order of its rows (row_order.py). New
plans hold sequences in two parts, and older ones all else that is here too.

A table held in two parts stands in a plan's shards as two tables, `<table>/hot` and `<table>/cold`: its hottest rows and the
others. Each has a sharding type and a tier of its own. `ShardingTask.parted` is the task in which these two stand for it, so what
weighs and prices tables knows nothing of parts. How the lookups are shared out: `hot_and_cold`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from neuroshard.core.access import AccessCurve
from neuroshard.core.part import Part
from neuroshard.core.reuse import BIN_TOUCHES, REUSE_BINS, expected_touches
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import MAX_ROWS, Table
from neuroshard.core.value import SparseValue, Whole

HOT, COLD = "hot", "cold"
# Of a listed id on every rank: the id, in order, and its place in the list; of int32 up to so many rows (client/rows/map.py)
LISTED_BYTES, LONG_LISTED_BYTES = 2 * 4, 2 * 8
MOST_INT32_ROWS = 2**31 - 1
# Kernels that map the ids of one feature, where ids are in order; more of them where they are not, and where a table is in two
# parts (counted in tests/client/test_rows_map.py)
MAP_KERNELS, LIST_KERNELS, SPLIT_KERNELS = 10, 12, 21
SINCE = "neuroshard 0.1.0"  # only hot rows of sequences are apart in new plans
NEAR_IDS = 2**15  # of a list, so many of which a CPU's nearest caches hold: a search among more goes beyond them


class RowsByAccess(SparseValue):
    """What a plan makes of a table's row order, one of two: `dealt`, its row blocks hold rows that were dealt out by the order,
    or `hot_rows`, so many of its hottest rows are a table of their own."""

    UNSAID: ClassVar = ("dealt", "hot_rows")

    dealt: Literal[True] | None = None
    hot_rows: Annotated[Whole, Field(ge=1, le=MAX_ROWS)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.dealt is None) == (self.hot_rows is None):
            raise ValueError(
                "rows_by_access says either dealt (true) or hot_rows (a number of rows), not "
                f"{'both' if self.dealt else 'neither'}"
            )
        return self

    def went(self, table: Table) -> str:
        """Why no new plan holds a table so, as words after its name; empty where one may. Trainers still run plans that do."""
        if self.dealt:
            what = "is dealt over its row blocks"
        elif table.pooling != "none":
            what = "is pooled, and held in two parts"
        else:
            return ""
        return (
            f"{what} (rows_by_access), as no new plan is since {SINCE}; leave rows_by_access and rules of its parts out: a cache "
            "holds the hot rows of a table beyond HBM (--host-memory)"
        )

    def fault(self, table: Table) -> str | None:
        """Why a table cannot be held so, as words after its name; None where it can."""
        order = table.row_order
        if order is None:
            return "has no row order, which says which rows are hot; count its access, or leave rows_by_access out"
        if table.pooling == "mean" and table.weighted:
            return "is pooled by mean with weights, which no trainer holds by access; leave rows_by_access out"
        if self.hot_rows is None:
            return None
        if self.hot_rows >= table.rows:
            return f"has {table.rows:,} rows, of which {self.hot_rows:,} cannot be apart as the hot ones; say fewer hot_rows"
        if self.hot_rows > order.hot_rows:
            return (
                f"has a row order that lists {order.hot_rows:,} rows, fewer than the {self.hot_rows:,} hot_rows; say at most as "
                "many, or count its access again"
            )
        return None


class ByAccess(NamedTuple):
    """What a trainer's wrapper (client/rows/) takes of every rank for tables that are dealt or in two parts: bytes of its maps,
    and in a step `kernels`, which pass over so many lookups of a sample (`passed`), such as are `compared` with so many ids of a
    list in a binary search, and with more of a long list (`far`), and `columns` of a sample that it copies to join outputs: of a
    collection of pooled tables all, of sequences those in two parts. `hot` are the names of hot parts, `dealt` those of tables
    and parts whose row blocks are dealt, if there are any."""

    map_bytes: int = 0
    passed: float = 0.0
    compared: float = 0.0
    far: float = 0.0
    kernels: int = 0
    columns: float = 0.0
    hot: frozenset[str] = frozenset()
    dealt: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tables: Sequence[Table], held: Mapping[str, RowsByAccess]) -> Self:
        """Of these tables, of which some are `held` so."""
        some = [table for table in tables if table.name in held]
        in_two = {table.name for table in some if held[table.name].hot_rows is not None}
        pooled = {(table.module, table.weighted) for table in some if table.pooling != "none"}
        joined = (
            table
            for table in tables
            if (table.name in in_two if table.pooling == "none" else (table.module, table.weighted) in pooled)
        )
        listed = {table.name: listed_rows(table.row_order, held[table.name]) for table in some}
        of_feature = {
            table.name: MAP_KERNELS + LIST_KERNELS * (listed[table.name] > 0) + SPLIT_KERNELS * (table.name in in_two)
            for table in some
        }
        return cls(
            sum(map_bytes(listed[table.name], table.rows) for table in some),
            math.fsum(table.pooling_factor * of_feature[table.name] for table in some),
            math.fsum(table.pooling_factor * math.log2(1 + min(listed[table.name], NEAR_IDS)) for table in some),
            math.fsum(table.pooling_factor * math.log2(max(listed[table.name] / NEAR_IDS, 1)) for table in some),
            sum(of_feature[table.name] * max(len(table.features), 1) for table in some),
            math.fsum(Part.of(table).sent_columns for table in joined),
            frozenset(part_names(name)[0] for name in in_two),
            frozenset(
                name for table in some for name in (part_names(table.name) if table.name in in_two else [table.name])
            ),
        )


def listed_rows(order: RowOrder | None, held: RowsByAccess) -> int:
    """How many ids of an order a trainer keeps for a table that is held so: none where they are in order already; all where it
    is dealt; in two parts the hot ones, since the cold ones are in the order of their ids then."""
    if order is None or not order.ids_digest:
        return 0
    return held.hot_rows or order.hot_rows


def map_bytes(listed: int, rows: int) -> int:
    """Bytes of the map of so many listed ids that every rank keeps, of a table with so many rows."""
    return listed * (LISTED_BYTES if rows <= MOST_INT32_ROWS else LONG_LISTED_BYTES)


def part_names(table: str) -> tuple[str, str]:
    """The names of the hot and the cold part of a table."""
    return f"{table}/{HOT}", f"{table}/{COLD}"


def hot_and_cold(table: Table, hot_rows: int) -> tuple[Table, Table]:
    """The two tables that stand for one held in two parts, of which `hot_rows` rows are hot; it has a row order.

    Lookups and distinct rows of a batch, by their reuse bins, are those of the table together. The hottest rows of its access
    curve go to the hot part, read less often where those of the order have fewer lookups; counts of a stream go to neither, since
    they say nothing of parts. Rows pooled by mean are sums in both, which the trainer divides.
    """
    share = table.ordered_share(hot_rows) if table.row_order else table.hottest_share(hot_rows)
    curves: tuple[AccessCurve | None, AccessCurve | None] = None, None
    if table.access is not None:
        curves = _curves(table.access, hot_rows, table.rows - hot_rows, share)
    shared_bins = _shared_bins(table, share, curves)
    parts = []
    sizes = zip(part_names(table.name), (hot_rows, table.rows - hot_rows), (share, 1 - share), strict=True)
    for (name, rows, lookups), bins, curve in zip(sizes, shared_bins, curves, strict=True):
        part = table.resized(rows, table.dim, table.pooling_factor * lookups)
        same = {"name": name, "reuse_bins": bins, "access": curve, "lookups_by_id": ()}
        parts.append(part.model_copy(update={**same, "pooling": "sum" if table.pooling == "mean" else table.pooling}))
    return parts[0], parts[1]


def _curves(access: AccessCurve, hot_rows: int, cold_rows: int, share: float) -> tuple[AccessCurve, AccessCurve]:
    """The curves of both parts, of which the hot one has this share of the lookups."""
    hot, cold = access.split(hot_rows)
    if not access.lookups or math.isclose(hot.lookups, share * access.lookups, rel_tol=1e-6):
        return hot, cold
    left = (1 - share) * access.lookups
    if not cold.lookups:  # all rows that are read could be hot ones; which of the others are, is not known
        cold = access.model_copy(update={"group_rows": (float(cold_rows),), "lookups_per_row": (1.0,), "stream": None})
    return hot.times(share * access.lookups / hot.lookups), cold.times(left / cold.lookups)


def _shared_bins(
    table: Table, share: float, curves: tuple[AccessCurve | None, AccessCurve | None]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The reuse bins of the rows that have `share` of the lookups, and of the others.

    Rows of a bin are shared out as by the access curves, else those touched most are hot; and then so many more or less that the
    lookups of either are its share.
    """
    touched_rows = sum(bin_ * touches for bin_, touches in zip(table.reuse_bins, BIN_TOUCHES, strict=True))
    if not touched_rows:
        return table.reuse_bins, table.reuse_bins
    rows = [bin_ / touched_rows for bin_ in table.reuse_bins]  # of each bin, in all lookups
    if None not in curves:
        of_curves = [expected_touches(curve.rates(table.reuse_batch_size)) for curve in curves if curve is not None]
        hot = [
            each * (ours / (ours + others) if ours + others else share)
            for each, ours, others in zip(rows, *of_curves, strict=True)
        ]
    else:
        hot, left = [0.0] * REUSE_BINS, share
        for place in reversed(range(REUSE_BINS)):
            hot[place] = min(rows[place], left / BIN_TOUCHES[place])
            left = max(left - hot[place] * BIN_TOUCHES[place], 0.0)
    lookups = math.fsum(each * touches for each, touches in zip(hot, BIN_TOUCHES, strict=True))
    if lookups > share:
        hot = [each * share / lookups for each in hot]
    elif lookups < 1:
        kept = min((1 - share) / (1 - lookups), 1.0)
        hot = [each - (each - ours) * kept for each, ours in zip(rows, hot, strict=True)]
    return _as_shares(hot), _as_shares([max(each - ours, 0.0) for each, ours in zip(rows, hot, strict=True)])


def _as_shares(rows: list[float]) -> tuple[float, ...]:
    total = math.fsum(rows)
    return tuple(each / total for each in rows) if total > 0 else tuple(rows)
