"""What a checkpoint has beside weights and moments, and in several folders: the order of outputs that it was trained in, the id
maps of managed collisions, and checkpoints in folders beside each other. Needs torch.

`{"output_order": output_order(model)}` in a checkpoint of torch.distributed.checkpoint is a value for each module, at the path
`(…, "output_order", module)`: its keys in order. What was saved in FOLDER/model is at the key "model", as if
{"model": …, "optimizer": …} had been saved in FOLDER.
"""

import io
import pickle  # nosec B403
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from neuroshard.client.model.warn import and_more
from neuroshard.core.errors import InvalidInput
from neuroshard.core.id_map import SORTED, IdMap
from neuroshard.core.output_order import reordered
from neuroshard.core.plan import Plan
from neuroshard.core.text import counted

NAME = "output_order"
Path = tuple[Any, ...]
WRONG = "dense layers that read them by position (values()) read other columns"


class SavedOrders:
    """The orders of a checkpoint and of a state, by path, gathered while the checkpoint is read."""

    def __init__(self, whose: str, old_plan: Plan | None, new_plan: Plan | None) -> None:
        self.whose, self.plans = whose, (old_plan, new_plan)
        self.saved: dict[Path, list[str]] = {}
        self.own: dict[Path, list[str]] = {}
        self.asked: dict[str, Path] = {}

    def of_state(self, state: Mapping[str, object], paths: Mapping[str, Path]) -> set[str]:
        """Take the orders of a flat state with its paths; their keys. They are not to be read over."""
        found = {key: value for key, value in state.items() if _is_path(paths[key]) and _is_order(value)}
        self.own = {paths[key]: list(value) for key, value in found.items() if isinstance(value, list)}
        return set(found)

    def items(self, metadata: Metadata, state: Mapping[str, object], orders: set[str]) -> list[ReadItem]:
        """What to read of a checkpoint: its orders, but nothing that the `state` has under such a key and is none."""
        self.asked = {
            key: path
            for key, path in (metadata.planner_data or {}).items()
            if _is_path(path)
            and isinstance(metadata.state_dict_metadata.get(key), BytesStorageMetadata)
            and (key in orders or key not in state)
        }
        at, none = MetadataIndex, torch.Size((0,))
        return [ReadItem(LoadItemType.BYTE_IO, at(key), none, at(key), none, none) for key in self.asked]

    def take(self, item: ReadItem, value: io.BytesIO) -> bool:
        """Take what was read, if it was asked for here."""
        path = self.asked.get(item.dest_index.fqn)
        if path is None:
            return False
        with suppress(pickle.UnpicklingError):  # something else of that name
            order = torch.load(value, weights_only=True)
            if _is_order(order):
                self.saved[path] = order
        return True

    def put_into(self, state: dict[str, Any]) -> None:
        """Let a state that has orders have those of the checkpoint, as every value that is loaded."""
        for path, order in self.saved.items() if self.own else ():
            inner = state
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = order

    def difference(self) -> str | None:
        """In which order else the dense layers were trained, and what to do, for people; None where it is the same or unknown."""
        if not self.saved:
            return self._of_plans()
        if not self.own:
            return (
                f"{self.whose} says the order of outputs that it was trained in, and the state does not: if it is another one, "
                f'{WRONG}; put output_order(model) into the state as "{NAME}"'
            )
        changed = [
            (str(path[-1]), *pair)
            for path, order in self.saved.items()
            for pair in _first_difference(order, self.own.get(path, order))
        ]
        if not changed:
            return None
        module, old, new = changed[0]
        return (
            f"{self.whose} was trained with the outputs of module {module!r}{and_more(changed)} in another order, {old!r} "
            f'where the model has {new!r}: {WRONG}; keep that order by keep_output_order(model, state["{NAME}"]), or read by key'
        )

    def _of_plans(self) -> str | None:
        old, new = self.plans
        if old is None or new is None or not (changed := reordered(old, new)):
            return None
        module = f"module {changed[0].module!r}" if changed[0].module else "the model"
        return (
            f"plan {new.digest()[:12]} returns the outputs of {module}{and_more(changed)} in another order than plan "
            f"{old.digest()[:12]}, table {changed[0].new!r} where that had {changed[0].old!r}: {WRONG}; read by key, or "
            "keep_output_order(model, order) with output_order(model) of a job by the old plan"
        )


def _first_difference(old: list[str], new: list[str]) -> list[tuple[str, str]]:
    """The first keys that differ; "nothing" where one has fewer."""
    length = max(len(old), len(new))
    padded = ([*order, *["nothing"] * (length - len(order))] for order in (old, new))
    return [pair for pair in zip(*padded, strict=True) if pair[0] != pair[1]][:1]


def _is_path(path: Path) -> bool:
    return len(path) > 1 and path[-2] == NAME


def _is_order(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


HOLDER = "._managed_collision_modules."
IDS = "_mch_sorted_raw_ids"
ROWS = "_mch_remapped_ids_mapping"
LISTS = "_mch_"  # what goes with each id
BOUNDS = "_output_segments_tensor"  # of the blocks of the ranks that wrote it


class SavedMaps:
    """Checks the id maps of a checkpoint against those of a state, and makes one list of several that a rank has read: they stay
    with the rows, for any plan whose ranks can have them.

    MCHManagedCollisionModule (torchrec 1.8, 1.9) keeps on each rank the ids of a block of the hash space, sorted, with the row
    and the count or last step of each. Rows that have no id yet are at the end, and the last row is that of all ids without one.
    A checkpoint has these lists one after the other. So where a rank's new block of rows is made of whole old ones, it has their
    lists in turn, and they are sorted once more; the last rows of the other old blocks are free then. A part of an old block has
    no list of its own: the ids of its rows are anywhere in the old one.

    HashZchManagedCollisionModule keeps the id of each row at the place of the row, and any rank has them with its rows.

    TorchRec has a check of its own, when load_state_dict is called (`validate_state`). It keeps the old bounds, though, so that a
    second change of ranks passes it with wrong maps. Here the bounds are those of the checkpoint's shards.
    """

    def __init__(self, whose: str) -> None:
        self.whose = whose
        # of each module: the ends of the old blocks that this rank's new one is made of, and what is read
        self.read: list[tuple[list[int], dict[str, Tensor]]] = []

    @staticmethod
    def of_ranks(state: Mapping[str, Any]) -> list[str]:
        """Keys of what belongs to the ranks and not to the rows, which stays the model's own."""
        return [key for key in state if HOLDER in key and key.endswith(f".{BOUNDS}")]

    def check(self, state: Mapping[str, Any], saved: Metadata) -> None:
        """Raise InvalidInput where a rank would need a part of another's list of ids."""
        for key, value in state.items():
            if HOLDER not in key or not key.endswith(f".{IDS}") or not isinstance(value, ShardedTensor):
                continue
            there, table = saved.state_dict_metadata.get(key), key.split(".")[-2]
            if not isinstance(there, TensorStorageMetadata):
                continue  # said elsewhere
            if tuple(there.size) != (here := tuple(value.size())):
                raise InvalidInput(
                    f"{self.whose} gives {there.size[0]:,} rows of table {table!r} to ids, and the model {here[0]:,}: it is of "
                    "another model"
                )
            starts = sorted(chunk.offsets[0] for chunk in there.chunks if chunk.sizes[0])
            ends = [*starts[1:], there.size[0]]
            ranks = [shard.shard_offsets[0] for shard in value.metadata().shards_metadata if shard.shard_sizes[0]]
            if len(starts) % len(ranks) or not set(ranks) <= set(starts):
                one = IdMap(kind=SORTED, bytes_per_row=0)
                fit = [n for n in range(1, len(starts) + 1) if one.goes_to(there.size[0], len(starts), n)]
                raise InvalidInput(
                    f"{self.whose} has the ids of table {table!r} on {counted(len(starts), 'rank')}, each those of its rows, and "
                    f"{counted(len(ranks), 'rank')} cannot have them in whole blocks (managed collisions); go on with "
                    f"{' or '.join(map(str, fit))} ranks"
                )
            for shard in value.local_shards():
                first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                inside = [end - first for end in ends if first < end <= first + rows]
                self.read.append((inside, _lists(state, key.removesuffix(IDS))))

    def join(self) -> None:
        """Sort what was read of several old blocks into one list, in the state's tensors."""
        for ends, lists in self.read:
            if len(ends) < 2:
                continue
            with torch.no_grad():
                for name, values in lists.items():
                    if name not in (IDS, ROWS):
                        values[[end - 1 for end in ends[:-1]]] = 0  # these rows are free now, as others without an id
                order = torch.argsort(lists[IDS], stable=True)
                for values in lists.values():
                    values.copy_(values[order])


def _lists(state: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """What this rank has for each row of one module, by its name there."""
    found = {
        key.removeprefix(prefix): value.local_shards()
        for key, value in state.items()
        if key.startswith(f"{prefix}{LISTS}") and isinstance(value, ShardedTensor)
    }
    return {name: shards[0].tensor for name, shards in found.items()}


METADATA_FILE = ".metadata"  # that torch.distributed.checkpoint writes last


def is_there(reader: FileSystemReader) -> bool:
    """Whether a checkpoint is where the reader reads."""
    return reader.fs.exists(reader.fs.concat_path(reader.path, METADATA_FILE))


def parts_of(reader: FileSystemReader, among: Collection[str] | None = None) -> list[str]:
    """The folders in it that have a checkpoint each, by name, in order; only those `among` these names, if given."""
    try:
        listed = reader.fs.ls(reader.path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = {str(path).rstrip("/").rpartition("/")[2] for path in listed}
    return sorted(name for name in names if (among is None or name in among) and is_there(_of_part(reader, name)))


def _of_part(reader: FileSystemReader, name: str) -> FileSystemReader:
    part = copy(reader)
    part.path = reader.fs.concat_path(reader.path, name)
    return part


class Together(FileSystemReader):
    """What `reader` reads of checkpoints in these folders of its folder, `model/` and `optimizer/`, as one."""

    def __init__(self, reader: FileSystemReader, parts: list[str]) -> None:
        vars(self).update(vars(reader))  # of a class for S3, say, its file system
        self.parts = parts

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        whole = Metadata({}, {}, {})
        for name in self.parts:
            part = FileSystemReader.read_metadata(_of_part(self, name), *args, **kwargs)
            paths = dict(part.planner_data or {})
            for key, value in part.state_dict_metadata.items():
                whole.state_dict_metadata[f"{name}.{key}"] = value
                whole.planner_data[f"{name}.{key}"] = (name, *paths.get(key, (key,)))
            for index, info in part.storage_data.items():
                whole.storage_data[replace(index, fqn=f"{name}.{index.fqn}")] = replace(
                    info, relative_path=f"{name}/{info.relative_path}"
                )
            whole.storage_meta = part.storage_meta
        return whole
