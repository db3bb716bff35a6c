"""What a checkpoint has of tables held by access: their own names, rows in the order of their ids. Needs torch and torchrec.

The state dict of a sharded CollectionByAccess has its parts as they are held, by names that say the order and the blocks
(`t/hot-3fa9c1d2-4`): no other plan has such a table, so nothing can be loaded wrongly, but neither can it go to another plan.
`model_state` has the tables instead: ranks send rows to each other, so that each has rows of a table without an order in the
rectangles of the plan (dealt tables), or in equal blocks over all ranks (tables in two parts), cut at the columns where either
part is. `load_model_state` sends them back.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding

from neuroshard.client.rows import Rows, TableRows
from neuroshard.client.rows_map import Part
from neuroshard.client.rows_sharded import ShardedCollectionByAccess
from neuroshard.client.torchrec_order import collections_in
from neuroshard.core.errors import InvalidInput, UsageError

__all__ = ["load_model_state", "model_state"]

State = dict[str, Any]
WEIGHT = "weight"


def model_state(model: nn.Module) -> State:
    """{"model": …, "optimizer": …} of what DistributedModelParallel returned, as checkpoints of any plan have them. Every rank
    must call it.

    Tables held by access are copies, which take as much memory as their shards until they are let go; all other tensors are the
    model's own. State by row that a part has once for several of these columns is repeated. Raises InvalidInput, which names the
    table, for state of an optimizer that is neither by row nor by element.
    """
    state = _as_held(model, "model_state")
    moments: dict[str, dict[str, Any]] = dict(state["optimizer"]["state"])
    state["optimizer"]["state"] = moments
    for path, collection in _by_access(model):
        tables = _Tables(path, collection, state)
        for key in list(state["model"]):
            if (name := tables.name_of(key)) is None:
                continue
            value, moment = state["model"].pop(key), moments.pop(key, None)
            if name not in tables.parts:  # as ever
                state["model"][tables.key(name)] = value
                if moment is not None:
                    moments[tables.key(name)] = moment
        for table in collection.rows.held:
            moved = _Moving(collection, table)
            for kind, held in tables.by_kind(table).items():
                if (whole := moved.to_ids(kind, held)) is not None:
                    if kind == WEIGHT:
                        state["model"][tables.key(table)] = whole
                    else:
                        moments.setdefault(tables.key(table), {})[f"{table}.{kind}"] = whole
    return state


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a model the weights and moments of a `state` that `model_state` made of it, and that was loaded since. Every rank must
    call it. Raises InvalidInput, on all ranks, for a state that lacks rows of a table; then nothing was changed."""
    own, jobs = _as_held(model, "load_model_state"), list[tuple[_Moving, str, dict[str, Any], Any]]()
    weights, moments = state.get("model", {}), state.get("optimizer", {}).get("state", {})
    for path, collection in _by_access(model):
        tables = _Tables(path, collection, own)
        for table in collection.rows.held:
            key, moved = tables.key(table), _Moving(collection, table)
            given = {f"{table}.{WEIGHT}": weights.get(key), **moments.get(key, {})}
            jobs += [(moved, kind, held, given.get(f"{table}.{kind}")) for kind, held in tables.by_kind(table).items()]
    for moved, *what in jobs:
        moved.check_whole(*what)
    for moved, *what in jobs:
        moved.from_ids(*what)


def _as_held(model: nn.Module, whose: str) -> State:
    """The state of a sharded model, parts as they are held. Raises UsageError for another model."""
    if not isinstance(model, DistributedModelParallel):
        raise UsageError(
            f"{whose} needs what DistributedModelParallel returned, and the model is a {type(model).__name__}"
        )
    return {"model": dict(model.state_dict()), "optimizer": dict(model.fused_optimizer.state_dict())}


def _by_access(model: nn.Module) -> Iterator[tuple[str, ShardedCollectionByAccess]]:
    for path, collection in collections_in(model):
        if isinstance(collection, ShardedCollectionByAccess):
            yield path, collection


class _Tables:
    """The tables of one collection in a state: what each part has, by kind (weight, momentum1, …)."""

    def __init__(self, path: str, collection: ShardedCollectionByAccess, state: State) -> None:
        self.collection = collection
        self.holder = "embedding_bags" if collection.rows.pooled else "embeddings"
        self.prefix = f"{path}." if path else ""
        self.parts = {
            held.name_of(table, part): (table, part)
            for table, held in collection.rows.held.items()
            for part in held.parts
        }
        self.found: dict[str, dict[str, Any]] = {}
        for key, value in state["model"].items():
            if (name := self.name_of(key)) in self.parts:
                self.found.setdefault(name, {})[WEIGHT] = value
        for key, moments in state["optimizer"]["state"].items():
            if (name := self.name_of(key)) in self.parts:
                for moment, value in moments.items():
                    self.found.setdefault(name, {})[moment.removeprefix(f"{name}.")] = value

    def key(self, table: str) -> str:
        """The key of a table's weight in a model without orders."""
        return f"{self.prefix}{self.holder}.{table}.weight"

    def name_of(self, key: str) -> str | None:
        """The name of the table, or part, whose weight has this key."""
        inner, copied = f"{self.prefix}inner.{self.holder}.", f"{self.prefix}copies."
        if key.startswith(inner):
            return key.removeprefix(inner).removesuffix(".weight")
        return key.removeprefix(copied) if key.startswith(copied) else None

    def by_kind(self, table: str) -> dict[str, dict[str, Any]]:
        """What the parts of a table have here, by kind; the same kinds on every rank, which may have no shard."""
        held: TableRows = self.collection.rows.held[table]
        names = [held.name_of(table, part) for part in held.parts]
        kinds = sorted({kind for name in names for kind in self.found.get(name, {})})
        every: list[list[str]] = [[] for _ in range(dist.get_world_size(self.collection.group))]
        dist.all_gather_object(every, kinds, group=self.collection.group)
        return {
            kind: {name: self.found[name][kind] for name in names if kind in self.found.get(name, {})}
            for kind in sorted({kind for of_rank in every for kind in of_rank})
        }


class _Block(NamedTuple):
    first: int
    rows: int
    column: int
    columns: int
    rank: int

    def has(self, column: int) -> bool:
        return self.column <= column < self.column + self.columns


class _Held(NamedTuple):
    """What this rank has of some columns of a part: from row `first` on, a view. Where it is state by row, of more columns than
    these, `weight` is the share of these in all up to them."""

    part: Part
    first: int
    tensor: Tensor
    weight: float

    @classmethod
    def of(cls, part: Part, block: _Block, tensor: Tensor, column: int, columns: int) -> "_Held":
        tensor, at = tensor.detach(), column - block.column
        if tensor.dim() == 1:
            return cls(part, block.first, tensor, columns / (at + columns))
        return cls(part, block.first, tensor[:, at : at + columns], 1.0)

    def put(self, values: Tensor) -> None:
        """Take these values; state by row as the mean over the columns so far."""
        values = values.view_as(self.tensor)
        self.tensor.copy_(values) if self.weight == 1 else self.tensor.lerp_(values, self.weight)


class _Moving:
    """Rows of one table on their ways between the parts that hold them, and blocks of ids."""

    def __init__(self, collection: ShardedCollectionByAccess, table: str) -> None:
        rows: Rows = collection.rows
        self.rows, self.table, self.held, self.group = rows, table, rows.held[table], collection.group
        self.rank, self.size = dist.get_rank(self.group), rows.configs[table].num_embeddings
        self.device = collection.device
        self.blocks = {
            part: _blocks(collection.params[self.held.name_of(table, part)])
            for part in self.held.parts
            if not part.copied
        }
        every = [block for of_part in self.blocks.values() for block in of_part]
        cuts = sorted({at for block in every for at in (block.column, block.column + block.columns)})
        self.columns = [(column, end - column) for column, end in pairwise(cuts)]
        if len(self.held.parts) == 1:  # in the plan's rectangles
            self.wanted = self.blocks[self.held.parts[0]]
        else:
            ranks = dist.get_world_size(self.group)
            height = -(-self.size // ranks)
            self.wanted = [
                _Block(first, min(height, self.size - first), column, columns, rank)
                for column, columns in self.columns
                for rank, first in enumerate(range(0, self.size, height))
            ]

    def to_ids(self, kind: str, held: Mapping[str, Any]) -> ShardedTensor | None:
        """The table's own tensor, rows in the order of their ids, where this rank has any."""
        by_row, dtype = self._like(kind, held)
        shards = []
        for number, (column, columns) in enumerate(self.columns):
            width = 1 if by_row else columns
            ids, values = self._of_parts(held, column, columns, width, dtype)
            into = self._into(number)
            ours = self._ids(into)
            moved = self._exchange(values, ids, self._wanted_by(ids, column), ours, self._holder(ours, column))
            for block, tensor in zip(into, torch.split(moved, [block.rows for block in into]), strict=True):
                shards.append(
                    TensorShard(tensor[:, 0].clone() if by_row else tensor, self._metadata(block, number, by_row))
                )
        if not shards:
            return None
        size = [self.size * len(self.columns)] if by_row else [self.size, sum(columns for _, columns in self.columns)]
        metadata = ShardedTensorMetadata(
            [self._metadata(block, [c for c, _ in self.columns].index(block.column), by_row) for block in self.wanted],
            torch.Size(size),
            TensorProperties(dtype=dtype),
        )
        return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=self.group)

    def check_whole(self, kind: str, held: Mapping[str, Any], whole: ShardedTensor | None) -> None:
        """Raise InvalidInput, on all ranks, unless every rank has what `from_ids` brings back."""
        by_row, _ = self._like(kind, held)
        given = _by_offsets(whole)
        lacks = any(
            at not in given
            for number in range(len(self.columns))
            for at in self._offsets(self._into(number), number, by_row)
        )
        every = [False] * dist.get_world_size(self.group)
        dist.all_gather_object(every, lacks, group=self.group)
        if any(every):
            raise InvalidInput(
                f"the state lacks {kind} of table {self.table!r} on rank {every.index(True)}; give what model_state(model) "
                "returned, after load_resharded"
            )

    def from_ids(self, kind: str, held: Mapping[str, Any], whole: ShardedTensor | None) -> None:
        """Bring what `to_ids` made back to the parts."""
        by_row, dtype = self._like(kind, held)
        given = _by_offsets(whole)
        for number, (column, columns) in enumerate(self.columns):
            width, into = 1 if by_row else columns, self._into(number)
            tensors = [given[at].detach().view(-1, width) for at in self._offsets(into, number, by_row)]
            values = torch.cat(tensors or [self._none(width, dtype)])
            ids, (ours, _) = self._ids(into), self._of_parts(held, column, columns, width, dtype)
            moved = self._exchange(values, ids, self._holder(ids, column), ours, self._wanted_by(ours, column))
            self._put(held, column, columns, moved)

    def _into(self, number: int) -> list[_Block]:
        """The blocks of ids of this rank in the n-th columns."""
        return [block for block in self.wanted if (block.column, block.rank) == (self.columns[number][0], self.rank)]

    def _offsets(self, blocks: Sequence[_Block], number: int, by_row: bool) -> list[tuple[int, ...]]:
        return [tuple(self._metadata(block, number, by_row).shard_offsets) for block in blocks]

    def _like(self, kind: str, held: Mapping[str, Any]) -> tuple[bool, torch.dtype]:
        """Whether the tensors of this kind have one number for each row, and their type, as the ranks that have one say."""
        mine = next(((tensor.dim(), tensor.dtype) for value in held.values() for tensor in _locals(value)), None)
        every: list[tuple[int, torch.dtype] | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, mine, group=self.group)
        dimensions, dtype = next(each for each in every if each is not None)
        if dimensions not in (1, 2):
            raise InvalidInput(
                f"table {self.table!r} is held by access, and its optimizer's {kind} is neither by row nor by element; use "
                "SGD, Adagrad, row-wise Adagrad or Adam"
            )
        return dimensions == 1, dtype

    def _parts_here(self, held: Mapping[str, Any], column: int, columns: int) -> Iterator[_Held]:
        """What this rank has of these columns."""
        for part in self.held.parts:
            value = held.get(self.held.name_of(self.table, part))
            if value is None:
                continue
            whole = _Block(0, part.rows, 0, sum(width for _, width in self.columns), self.rank)
            here = [whole] if part.copied else [block for block in self.blocks[part] if block.rank == self.rank]
            for block, tensor in zip(here, [each for each in _locals(value) if len(each)], strict=True):
                if block.has(column):
                    yield _Held.of(part, block, tensor, column, columns)

    def _of_parts(
        self, held: Mapping[str, Any], column: int, columns: int, width: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The ids that this rank holds in these columns, and their values; of copies those in its blocks of ids."""
        all_ids, all_values = [self._none(1, torch.int64)[:, 0]], [self._none(width, dtype)]
        for part, first, tensor, _ in self._parts_here(held, column, columns):
            ids = self.rows.ids_of(self.table, part, torch.arange(first, first + len(tensor), device=self.device))
            values = tensor.reshape(len(tensor), -1)
            if part.copied:
                mine = self._wanted_by(ids, column) == self.rank
                ids, values = ids[mine], values[mine]
            all_ids.append(ids)
            all_values.append(values)
        return torch.cat(all_ids), torch.cat(all_values)

    def _put(self, held: Mapping[str, Any], column: int, columns: int, moved: Tensor) -> None:
        """Let this rank's tensors in these columns have what came, in the order of `_of_parts`."""
        done = 0
        for each in self._parts_here(held, column, columns):
            part, first, rows = each.part, each.first, len(each.tensor)
            if not part.copied:
                each.put(moved[done : done + rows])
                done += rows
                continue
            ids = self.rows.ids_of(self.table, part, torch.arange(first, first + rows, device=self.device))
            mine = self._wanted_by(ids, column) == self.rank
            count = int(mine.sum())
            found = torch.zeros(rows, moved.shape[1], dtype=torch.float32, device=self.device)
            found[mine] = moved[done : done + count].float()
            dist.all_reduce(found, group=self.group)  # each rank has its own rows of the copies, and 0 elsewhere
            each.put(found.to(each.tensor.dtype))
            done += count

    def _ids(self, blocks: Sequence[_Block]) -> Tensor:
        found = [torch.arange(block.first, block.first + block.rows, device=self.device) for block in blocks]
        return torch.cat([self._none(1, torch.int64)[:, 0], *found])

    def _none(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, width, dtype=dtype, device=self.device)

    def _wanted_by(self, ids: Tensor, column: int) -> Tensor:
        """The rank whose block of ids has each of these."""
        return _ranks(ids, [block for block in self.wanted if block.column == column])

    def _holder(self, ids: Tensor, column: int) -> Tensor:
        """The rank that holds the row of each of these ids: of copies, this one."""
        ranks, _ = self.rows.map_of(self.table).ranks(ids)
        found = torch.full_like(ids, self.rank)
        for part, blocks in self.blocks.items():
            mine = (ranks >= part.first) & (ranks < part.first + part.rows)
            found[mine] = _ranks(part.held_in(ranks[mine]), [block for block in blocks if block.has(column)])
        return found

    def _exchange(self, values: Tensor, ids: Tensor, to: Tensor, wanted: Tensor, of: Tensor) -> Tensor:
        """The values of the `wanted` ids, each of which rank `of` sends; this rank sends `values` of `ids` to ranks `to`."""
        ranks = dist.get_world_size(self.group)
        send, take = _by_rank(ids, to), _by_rank(wanted, of)
        out = values[send].contiguous()
        came = torch.empty(len(wanted), values.shape[1], dtype=values.dtype, device=values.device)
        dist.all_to_all_single(
            came,
            out,
            torch.bincount(of, minlength=ranks).tolist(),
            torch.bincount(to, minlength=ranks).tolist(),
            group=self.group,
        )
        found = torch.empty_like(came)
        found[take] = came
        return found

    def _metadata(self, block: _Block, number: int, by_row: bool) -> ShardMetadata:
        """Of a block of ids. State by row of the n-th columns comes after that of all rows of the columns before."""
        placement = f"rank:{block.rank}/{self.device}"
        if by_row:
            return ShardMetadata([number * self.size + block.first], [block.rows], placement)
        return ShardMetadata([block.first, block.column], [block.rows, block.columns], placement)


def _blocks(parameter: ParameterSharding) -> list[_Block]:
    return [
        _Block(row, rows, column, columns, shard.placement.rank())
        for shard in parameter.sharding_spec.shards
        for (row, column), (rows, columns) in [(shard.shard_offsets, shard.shard_sizes)]
        if rows
    ]


def _ranks(rows: Tensor, blocks: Sequence[_Block]) -> Tensor:
    """The rank of the block that has each of these rows."""
    in_order = sorted(blocks)
    firsts = torch.tensor([block.first for block in in_order], device=rows.device)
    ranks = torch.tensor([block.rank for block in in_order], device=rows.device)
    return ranks[torch.searchsorted(firsts, rows, right=True) - 1]


def _by_rank(ids: Tensor, ranks: Tensor) -> Tensor:
    """The order by rank and, of one rank, by id, which both sides of an exchange know."""
    by_id = ids.argsort()
    return by_id[ranks[by_id].argsort(stable=True)]


def _by_offsets(whole: ShardedTensor | None) -> dict[tuple[int, ...], Tensor]:
    """The shards of this rank, by where they begin."""
    shards = whole.local_shards() if isinstance(whole, ShardedTensor) else []
    return {tuple(shard.metadata.shard_offsets): shard.tensor for shard in shards}


def _locals(value: ShardedTensor | Tensor) -> list[Tensor]:
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
