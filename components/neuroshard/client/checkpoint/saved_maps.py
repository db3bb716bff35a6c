"""The id maps of managed collisions in a checkpoint: they stay with the rows, for any plan whose ranks can have them.

MCHManagedCollisionModule (torchrec 1.8, 1.9) keeps on each rank the ids of a block of the hash space, sorted, with the row and
the count or last step of each. Rows that have no id yet are at the end, and the last row is that of all ids without one. A
checkpoint has these lists one after the other. So where a rank's new block of rows is made of whole old ones, it has their lists
in turn, and they are sorted once more; the last rows of the other old blocks are free then. A part of an old block has no list of
its own: the ids of its rows are anywhere in the old one.

HashZchManagedCollisionModule keeps the id of each row at the place of the row, and any rank has them with its rows.

TorchRec has a check of its own, when load_state_dict is called (`validate_state`). It keeps the old bounds, though, so that a
second change of ranks passes it with wrong maps. Here the bounds are those of the checkpoint's shards. Needs torch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from neuroshard.core.errors import InvalidInput
from neuroshard.core.id_map import SORTED, IdMap
from neuroshard.core.text import counted

HOLDER = "._managed_collision_modules."
IDS = "_mch_sorted_raw_ids"
ROWS = "_mch_remapped_ids_mapping"
LISTS = "_mch_"  # what goes with each id
BOUNDS = "_output_segments_tensor"  # of the blocks of the ranks that wrote it


class SavedMaps:
    """Checks the id maps of a checkpoint against those of a state, and makes one list of several that a rank has read."""

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
