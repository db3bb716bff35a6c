"""Spread sharding options: a table has a piece on every device of a set, and is placed by choosing the set.

An enumerator makes each kind (`kinds.py`). Row blocks are dealt out as by TorchRec's ROW_WISE, TABLE_ROW_WISE and GRID_SHARD;
the last has what is left. All others are alike, unless it is known how a table's lookups fall over its ids
(`Table.lookup_share`): then each is a piece of its own. Of a pooled table each block has sums for all samples, so it sends all
columns, or more (`pricing.block_columns`); of a sequence what it looked up. Over a domain, sums are added up inside it, and each
device sends its share of them on (`pricing.HostColumns`). In a grid each domain has as many of the columns, and their rows are
split over its devices. A copy looks its device's own samples up and sends nothing; its gradients are dense, and summed up over
all devices.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.errors import InvalidInput
from neuroshard.core.part import Part
from neuroshard.core.plan import Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.network import DomainMs, MoreColumns
from neuroshard.costmodel.pricing import HostColumns, columns_sent
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.search.problem.kinds import MayHold, Spread, enumerated, over_all
from neuroshard.search.problem.room import searched_bytes


class Load(NamedTuple):
    """What spread tables are on each device: sums of `vectors` (D, K), columns by `dims` (D,), those sent beyond these (`more`),
    and bytes (D,)."""

    vectors: Floats
    dims: Floats
    more: MoreColumns
    nbytes: Ints


class SpreadOptions:
    """The spread options of P tables on the D devices of a task, of W `kinds`. `groups` (P,), in order, are the numbers of their
    table groups in the problem. A place is a kind with a set of devices. Places are numbered; `way_of` says the kind of each.

    Of each table and kind:
    `allowed` (P, W);
    `rows`, `nbytes`, `dims` (P, W, M) and `vectors` (P, W, M, K): of M pieces, of which the last is the last row block of a
    domain. M is 2, and the other piece any other block, unless some table's blocks differ: then the others are the blocks in
    order, and of kinds with fewer the first again. `dims` are how many columns take as long to send as what a device with the
    piece sends. Copies are priced apart, and have no vectors;
    `fullest` (P, W): the piece with most lookups;
    `widths` (P, W): columns of a piece;
    `more` (P, W): columns that a device sends beyond those of the whole table, in the mean of all devices;
    `least` (P, W): columns that a device with a piece sends at least, both near and far;
    `near`, `far`, `encoded` (P, W): columns beyond `dims` that such a device sends inside its domain, sends out of it, and
    encodes (`pricing.HostColumns`).
    """

    def __init__(
        self, groups: Sequence[int], tables: Sequence[Table], task: ShardingTask, model: CostModel, may: MayHold
    ) -> None:
        """Of those of the table groups that have any."""
        self.devices, self.model, self.kinds = task.devices, model, enumerated(task, may)
        self.over_domains = len(self.kinds) > 1 and self.kinds[1].sharding.over_domains
        self.domain = self.kinds[1].blocks if self.over_domains else task.devices
        self.places = [(way, start) for way, kind in enumerate(self.kinds) for start in kind.starts]
        self.way_of: Ints = np.array([way for way, _ in self.places])
        allowed = [[kind.allows(table, task, model, may) for kind in self.kinds] for table in tables]
        some = [number for number, of_table in enumerate(allowed) if any(of_table)]
        self.groups: Ints = np.array([groups[number] for number in some], dtype=np.int64)
        tables = self.tables = [tables[number] for number in some]
        shape = len(tables), len(self.kinds)
        self.allowed = np.array([allowed[number] for number in some], dtype=bool).reshape(shape)
        blocks = np.array([kind.blocks for kind in self.kinds])
        rows = np.array([table.rows for table in tables], dtype=np.int64)[:, None]
        block = np.minimum(-(-rows // blocks), rows)
        last = rows - block * (blocks - 1)
        differ = any(table.knows_ids for table in tables)
        self.pieces = max(int(blocks.max()), 2) if differ else 2
        pieces = [block] * (self.pieces - 1)
        # no kind is allowed where none are left
        self.rows: Ints = np.stack([*pieces, np.maximum(last, 1)], axis=-1)
        widths = [[kind.width(table) for kind in self.kinds] for table in tables]
        self.parts = [
            [self._parts(task, kind, table, counts) for counts, kind in zip(of_table, self.kinds, strict=True)]
            for table, of_table in zip(tables, self.rows.tolist(), strict=True)
        ]
        shares = [[[part.share_of_lookups for part in some] for some in of_table] for of_table in self.parts]
        self.fullest: Ints = np.array(shares, dtype=np.float64).reshape(self.rows.shape).argmax(axis=-1)
        self.widths: Ints = np.array(widths, dtype=np.int64).reshape(shape)
        self.dims: Floats = np.zeros(self.rows.shape)
        self.least, self.near, self.far, self.encoded = np.zeros((4, *shape))
        self._columns_sent(task)
        sent = np.array([Part.of(table).sent_columns for table in tables], dtype=np.float64)
        self.more: Floats = (self.of_all_pieces(self.dims[..., None])[..., 0] - sent[:, None]) / task.devices
        self.nbytes = self._count_bytes(task)
        self._vectors: Floats | None = None

    def _parts(self, task: ShardingTask, kind: Spread, table: Table, counts: Sequence[int]) -> list[Part]:
        """The M pieces of a table held in one kind, which have so many rows."""
        last = kind.blocks - 1
        places = [number if number < last else 0 for number in range(self.pieces - 1)]
        blocks = zip(counts, [*places, last], strict=True)
        return [kind.part(task, table, rows, block * counts[0]) for rows, block in blocks]

    def _count_bytes(self, task: ShardingTask) -> Ints:
        sizes = searched_bytes(task, [part for of in self.parts for pair in of for part in pair])
        return np.array(sizes, dtype=np.int64).reshape(self.rows.shape)

    def counted_for(self, task: ShardingTask) -> "SpreadOptions":
        """The same options, of which pieces take what a search counts for this task, the same but for what it keeps free."""
        new = copy.copy(self)
        new.nbytes = self._count_bytes(task)
        return new

    def of_fullest(self, of_pieces: Floats, positions: Ints, ways: Ints) -> Floats:
        """Of these tables, held in these kinds (C,), what the piece with most lookups has: (P, W, M, …) -> (C, …)."""
        return np.asarray(of_pieces[positions, ways, self.fullest[positions, ways]])

    def _columns_sent(self, task: ShardingTask) -> None:
        """Fill in what pieces send."""
        rates = DomainMs.of(self.model, task) if self.over_domains else None
        for way, kind in enumerate(self.kinds):
            if kind.sharding.over_domains:
                assert rates is not None
                blocks = [of_table[way][0] for of_table in self.parts]
                over = HostColumns.of(self.model, blocks, task.devices, self.domain, rates)
                longest = np.maximum(over.inside * rates.near, over.out * rates.far)
                felt = longest / max(rates) if max(rates) > 0 else over.inside
                self.dims[:, way], self.least[:, way] = felt[:, None], np.minimum(over.inside, over.out)
                self.near[:, way], self.far[:, way] = over.inside - felt, over.out - felt
                self.encoded[:, way] = over.encoded - felt
            elif not kind.sharding.copied and self.tables:
                pairs = [of_table[way] for of_table in self.parts]
                self.dims[:, way] = [[columns_sent(self.model, part) for part in pair] for pair in pairs]
                self.least[:, way] = self.dims[:, way].min(axis=-1)

    @property
    def copied(self) -> int:
        """The kind whose pieces are copies; -1 where no table may be one."""
        return len(self.kinds) - 1 if self.kinds[-1].sharding.copied else -1

    @property
    def vectors(self) -> Floats:
        """Priced in one batch when first needed. Raises InvalidInput where the cost model predicts no finite cost."""
        if self._vectors is None:
            ways = [way for way, kind in enumerate(self.kinds) if not kind.sharding.copied]
            parts = [part for of_table in self.parts for way in ways for part in of_table[way]]
            vectors = finite_vectors(self.model, parts)
            self._vectors = np.zeros((*self.rows.shape, vectors.shape[-1]))
            self._vectors[:, ways] = vectors.reshape(len(self.tables), len(ways), self.pieces, vectors.shape[-1])
        return self._vectors

    def with_tables_of(self, other: "SpreadOptions", tables: NDArray[np.bool_]) -> "SpreadOptions":
        """The same options, of which these tables (P,) take the bytes and have the vectors of `other`."""
        if not len(tables):
            return self
        new = copy.copy(self)
        new.nbytes = np.where(tables[:, None, None], other.nbytes, self.nbytes)
        new._vectors = np.where(tables[:, None, None, None], other.vectors, self.vectors)
        return new

    @property
    def all_pieces(self) -> Floats:
        """The vectors of all pieces of each table, summed: (P, W, K)."""
        return self.of_all_pieces(self.vectors)

    @property
    def all_bytes(self) -> Floats:
        """The bytes of all pieces of each table: (P, W)."""
        return self.of_all_pieces(self.nbytes[..., None].astype(np.float64))[..., 0]

    def of_all_pieces(self, of_each: Floats) -> Floats:
        """The sum over all pieces on all devices: (P, W, M, K) -> (P, W, K)."""
        blocks = np.array([kind.blocks for kind in self.kinds])
        times = np.array([kind.devices for kind in self.kinds]) // blocks
        total: Floats = of_each[:, :, 0] * (blocks - 1 if self.pieces == 2 else blocks > 1)[:, None]
        for number in range(1, self.pieces - 1):
            total = total + of_each[:, :, number] * (number < blocks - 1)[:, None]
        return np.asarray((total + of_each[:, :, -1]) * times[:, None])

    def saved_bytes(self, whole: Ints) -> int:
        """Bytes of all devices together that tables, of so many bytes each where they are whole (P,), need less if they are
        spread otherwise than by their rows, at most."""
        some = [way for way, kind in enumerate(self.kinds) if not kind.sharding.splits_rows]
        needs = np.where(self.allowed, self.all_bytes, np.inf)[:, some]
        return int((whole - needs.min(axis=1, initial=np.inf)).clip(0).sum())

    def positions(self, groups: Ints) -> Ints:
        """Where these table groups stand among the P."""
        return np.searchsorted(self.groups, groups)

    def place_of(self, way: int, start: int = 0) -> int:
        """The place of a kind on the devices from `start` on."""
        return self.places.index((way, start))

    def shards(self, table: Table, place: int) -> list[Shard]:
        """The shards of a table at a place."""
        way, start = self.places[place]
        return self.kinds[way].shards(table, start)

    def _devices_of(self, place: int) -> tuple[slice, Ints]:
        """The devices of a place, and which of the M pieces each has."""
        way, start = self.places[place]
        kind = self.kinds[way]
        block = np.arange(start, start + kind.devices) % kind.blocks
        is_last = block == kind.blocks - 1
        return slice(start, start + kind.devices), np.where(is_last, self.pieces - 1, block if self.pieces > 2 else 0)

    def load(self, groups: Ints, places: Ints) -> Load:
        """What these table groups, each at its place, add to each device."""
        positions = self.positions(groups)
        dims, near, far, encoded = np.zeros((4, self.devices))
        found = Load(
            np.zeros((self.devices, self.vectors.shape[-1])),
            dims,
            MoreColumns(near, far, encoded),
            np.zeros(self.devices, dtype=np.int64),
        )
        for place in np.unique(places).tolist():
            way, (there, which) = int(self.way_of[place]), self._devices_of(place)
            chosen = positions[places == place]
            found.vectors[there] += self.vectors[chosen, way].sum(axis=0)[which]
            found.nbytes[there] += self.nbytes[chosen, way].sum(axis=0)[which]
            dims[there] += self.dims[chosen, way].sum(axis=0)[which]
            for more, of_piece in ((near, self.near), (far, self.far), (encoded, self.encoded)):
                more[there] += of_piece[chosen, way].sum()
        return found

    def ms(self, groups: Ints, places: Ints, slope: Floats) -> Floats:
        """What the piece of each group, at its place, takes on each device by a linear estimate of `slope` (D, K): (C, D). NaN
        where the device has none of it."""
        positions, ways = self.positions(groups), self.way_of[places]
        of_pieces = [np.einsum("pk,dk->pd", self.vectors[positions, ways, part], slope) for part in range(self.pieces)]
        found: Floats = np.full(of_pieces[0].shape, np.nan)
        for place in np.unique(places).tolist():
            there, which = self._devices_of(place)
            rows = np.flatnonzero(places == place)
            for part in np.unique(which).tolist():
                devices = np.arange(there.start, there.stop)[which == part]
                found[np.ix_(rows, devices)] = of_pieces[part][np.ix_(rows, devices)]
        return found


def blocks_of_mapped(task: ShardingTask, model: CostModel) -> tuple[Floats, Floats]:
    """What the tables that give rows to ids as they train are on each device: sums of vectors (D, K), or (1, 1) where there are
    none, and columns sent (D,)."""
    tables, devices = task.mapped, task.devices
    if not tables:
        return np.zeros((1, 1)), np.zeros(devices)
    kind, parts = over_all(devices), list[Part]()
    for table in tables:
        blocks = table.row_blocks(devices)
        parts += [kind.part(task, table, rows, first) for first, rows in (blocks[0], blocks[-1])]
    vectors = finite_vectors(model, parts).reshape(len(tables), 2, -1).sum(axis=0)
    dims = np.array([columns_sent(model, part) for part in parts]).reshape(-1, 2).sum(axis=0)
    of_device = np.minimum(np.arange(devices) // max(devices - 1, 1), 1)  # only the last may have fewer rows
    return vectors[of_device], dims[of_device]


def finite_vectors(model: CostModel, parts: Sequence[Part]) -> Floats:
    """The cost model's vectors of parts: (N, K). Raises InvalidInput where one is not finite."""
    vectors = model.part_vectors(parts)
    finite = np.isfinite(vectors).all(axis=-1)
    if not finite.all():
        part = parts[int(finite.argmin())]
        what = f"{part.dim} columns" if part.rows == part.table.rows else f"{part.rows:,} rows"
        raise InvalidInput(
            f"cost model {model.name} knows no finite cost of {what} of table {part.table.name!r}; train it again"
        )
    return vectors
