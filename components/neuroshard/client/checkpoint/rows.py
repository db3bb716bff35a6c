"""What a checkpoint has of tables held by access: their own names, rows in the order of their ids. Needs torch and torchrec.

The state dict of a sharded CollectionByAccess has its parts as they are held, by names that say the order and the blocks
(`t/hot-3fa9c1d2-4`): no other plan has such a table, so nothing can be loaded wrongly, but neither can it go to another plan.
`model_state` has the tables instead: ranks send rows to each other, so that each has an equal block of a table's ids, cut at the
columns where a part is. `load_model_state` sends them back.
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

from neuroshard.client.model.order import collections_in
from neuroshard.client.ranks import gathered
from neuroshard.client.rows.collection import TableRows
from neuroshard.client.rows.sharded import ShardedCollectionByAccess
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
        every: list[list[str]] = gathered(self.collection.group, kinds)
        return {
            kind: {name: self.found[name][kind] for name in names if kind in self.found.get(name, {})}
            for kind in sorted({kind for of_rank in every for kind in of_rank})
        }


class _Shard(NamedTuple):
    """A rectangle of a part that a rank holds."""

    rank: int
    first: int
    rows: int
    column: int
    columns: int


class _Held(NamedTuple):
    """What this rank has of some columns of a part: the rows of these ids, a view. Where it is state by row, of more columns than
    these, `weight` is the share of these in all up to them."""

    ids: Tensor
    tensor: Tensor
    weight: float
    copied: bool

    def put(self, values: Tensor) -> None:
        """Take these values; state by row as the mean over the columns so far."""
        values = values.view_as(self.tensor)
        self.tensor.copy_(values) if self.weight == 1 else self.tensor.lerp_(values, self.weight)


class _Moving:
    """Rows of one table on their ways between the parts that hold them, and equal blocks of ids, one on each rank."""

    def __init__(self, collection: ShardedCollectionByAccess, table: str) -> None:
        self.rows, self.table, self.held, self.group = (
            collection.rows,
            table,
            collection.rows.held[table],
            collection.group,
        )
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.size, self.device = self.rows.configs[table].num_embeddings, collection.device
        self.height = -(-self.size // self.ranks)
        self.shards = {
            part: _shards(collection.params[self.held.name_of(table, part)])
            for part in self.held.parts
            if not part.copied
        }
        every = [shard for of_part in self.shards.values() for shard in of_part]
        cuts = sorted({at for shard in every for at in (shard.column, shard.column + shard.columns)})
        self.columns = [(column, end - column) for column, end in pairwise(cuts)]

    def to_ids(self, kind: str, held: Mapping[str, Any]) -> ShardedTensor | None:
        """The table's own tensor, rows in the order of their ids, where this rank has any."""
        by_row, dtype = self._like(kind, held)
        first, rows = self._block(self.rank)
        shards = []
        for number, (column, columns) in enumerate(self.columns):
            width = 1 if by_row else columns
            here = list(self._here(held, column, columns))
            mine = [each.ids // self.height == self.rank if each.copied else slice(None) for each in here]
            ids = self._joined([each.ids[some] for each, some in zip(here, mine, strict=True)])
            values = [each.tensor.reshape(-1, width)[some] for each, some in zip(here, mine, strict=True)]
            by_rank, leaving, coming = self._ways(ids)
            came = self._exchange(ids[by_rank], leaving, coming) - first
            tensor = torch.empty(rows, width, dtype=dtype, device=self.device)
            tensor[came] = self._exchange(self._joined(values, width, dtype)[by_rank], leaving, coming)
            if rows:
                whole = tensor[:, 0].clone() if by_row else tensor
                shards.append(TensorShard(whole, self._metadata(number, self.rank, by_row)))
        if not shards:
            return None
        size = [self.size * len(self.columns)] if by_row else [self.size, sum(columns for _, columns in self.columns)]
        every = [
            (number, rank) for number in range(len(self.columns)) for rank in range(self.ranks) if self._block(rank)[1]
        ]
        metadata = ShardedTensorMetadata(
            [self._metadata(*each, by_row) for each in every], torch.Size(size), TensorProperties(dtype=dtype)
        )
        return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=self.group)

    def check_whole(self, kind: str, held: Mapping[str, Any], whole: ShardedTensor | None) -> None:
        """Raise InvalidInput, on all ranks, unless every rank has what `from_ids` brings back."""
        by_row, _ = self._like(kind, held)
        given = _by_offsets(whole)
        lacks = any(self._at(number, by_row) not in given for number in range(len(self.columns)))
        every = gathered(self.group, lacks and self._block(self.rank)[1] > 0)
        if any(every):
            raise InvalidInput(
                f"the state lacks {kind} of table {self.table!r} on rank {every.index(True)}; give what model_state(model) "
                "returned, after load_resharded"
            )

    def from_ids(self, kind: str, held: Mapping[str, Any], whole: ShardedTensor | None) -> None:
        """Bring what `to_ids` made back to the parts: each rank asks for the ids that it holds, of copies all."""
        by_row, dtype = self._like(kind, held)
        given, (first, rows) = _by_offsets(whole), self._block(self.rank)
        for number, (column, columns) in enumerate(self.columns):
            width = 1 if by_row else columns
            here = list(self._here(held, column, columns))
            ids = self._joined([each.ids for each in here])
            by_rank, asking, asked = self._ways(ids)
            wanted = self._exchange(ids[by_rank], asking, asked) - first
            own = given[self._at(number, by_row)].detach().view(-1, width) if rows else self._joined([], width, dtype)
            found = torch.empty(len(ids), width, dtype=dtype, device=self.device)
            found[by_rank] = self._exchange(own[wanted], asked, asking)
            for each, values in zip(here, torch.split(found, [len(each.ids) for each in here]), strict=True):
                each.put(values)

    def _like(self, kind: str, held: Mapping[str, Any]) -> tuple[bool, torch.dtype]:
        """Whether the tensors of this kind have one number for each row, and their type, as the ranks that have one say."""
        mine = next(((tensor.dim(), tensor.dtype) for value in held.values() for tensor in _locals(value)), None)
        dimensions, dtype = next(each for each in gathered(self.group, mine) if each is not None)
        if dimensions not in (1, 2):
            raise InvalidInput(
                f"table {self.table!r} is held by access, and its optimizer's {kind} is neither by row nor by element; use "
                "SGD, Adagrad, row-wise Adagrad or Adam"
            )
        return dimensions == 1, dtype

    def _here(self, held: Mapping[str, Any], column: int, columns: int) -> Iterator[_Held]:
        """What this rank has of these columns."""
        for part in self.held.parts:
            value = held.get(self.held.name_of(self.table, part))
            if value is None:
                continue
            whole = _Shard(self.rank, 0, part.rows, 0, sum(width for _, width in self.columns))
            here = [whole] if part.copied else [shard for shard in self.shards[part] if shard.rank == self.rank]
            for shard, tensor in zip(here, [each.detach() for each in _locals(value) if len(each)], strict=True):
                at = column - shard.column
                if not 0 <= at < shard.columns:
                    continue
                rows = torch.arange(shard.first, shard.first + shard.rows, device=self.device)
                by_row = tensor.dim() == 1
                of_columns = tensor if by_row else tensor[:, at : at + columns]
                weight = columns / (at + columns) if by_row else 1.0
                yield _Held(self.rows.ids_of(self.table, part, rows), of_columns, weight, part.copied)

    def _joined(self, some: Sequence[Tensor], width: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        """One tensor of some, which may be none."""
        return torch.cat([torch.empty(0, *[width] * (width > 0), dtype=dtype, device=self.device), *some])

    def _ways(self, ids: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """The order by the ranks whose blocks have these ids, how many each has, and how many of this rank's each names."""
        owners = ids // self.height
        leaving = torch.bincount(owners, minlength=self.ranks)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.group)
        return owners.argsort(), leaving.tolist(), coming.tolist()

    def _exchange(self, values: Tensor, leaving: list[int], coming: list[int]) -> Tensor:
        came = torch.empty(sum(coming), *values.shape[1:], dtype=values.dtype, device=values.device)
        dist.all_to_all_single(came, values.contiguous(), coming, leaving, group=self.group)
        return came

    def _block(self, rank: int) -> tuple[int, int]:
        """The first id of a rank's block, and how many it has."""
        first = min(rank * self.height, self.size)
        return first, min(self.height, self.size - first)

    def _at(self, number: int, by_row: bool) -> tuple[int, ...]:
        return tuple(self._metadata(number, self.rank, by_row).shard_offsets)

    def _metadata(self, number: int, rank: int, by_row: bool) -> ShardMetadata:
        """Of a rank's block of ids. State by row of the n-th columns comes after that of all rows of the columns before."""
        (first, rows), (column, columns) = self._block(rank), self.columns[number]
        placement = f"rank:{rank}/{self.device}"
        if by_row:
            return ShardMetadata([number * self.size + first], [rows], placement)
        return ShardMetadata([first, column], [rows, columns], placement)


def _shards(parameter: ParameterSharding) -> list[_Shard]:
    return [
        _Shard(shard.placement.rank(), row, rows, column, columns)
        for shard in parameter.sharding_spec.shards
        for (row, column), (rows, columns) in [(shard.shard_offsets, shard.shard_sizes)]
        if rows
    ]


def _by_offsets(whole: ShardedTensor | None) -> dict[tuple[int, ...], Tensor]:
    """The shards of this rank, by where they begin."""
    shards = whole.local_shards() if isinstance(whole, ShardedTensor) else []
    return {tuple(shard.metadata.shard_offsets): shard.tensor for shard in shards}


def _locals(value: ShardedTensor | Tensor) -> list[Tensor]:
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
