"""A checkpoint that stays in the host memory of the ranks: what one has, any of them loads. Needs torch.

So a state goes from one plan to another by the planner that reads a checkpoint in files (client/checkpoint/load.py), and no
file is written: `load_resharded(state, …, storage_reader=InMemory(group, old_state))`.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from neuroshard.client.ranks import gathered


class InMemory(BroadcastingTorchSaveReader):
    """What the ranks of a gloo `group` have of a state of tensors. Those in host memory are kept as they are; of others, copies
    of all their storage. All ranks make one together, and read from it together."""

    with_moments = True  # a table without moments has none

    def __init__(self, group: dist.ProcessGroup, state: dict[str, Any]) -> None:
        super().__init__(coordinator_rank=dist.get_global_rank(group, 0))
        self.group, self.rank = group, dist.get_rank(group)
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # on the device, and here
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, None, self.rank == 0)
        plans, self.metadata = planner.create_global_plan(gathered(group, planner.create_local_plan()))
        self.metadata.storage_data = {item.index: rank for rank, plan in enumerate(plans) for item in plan.items}
        self.pieces: dict[MetadataIndex, Tensor] = {
            item.index: self._on_host(cast(Tensor, planner.resolve_data(item))) for item in plans[self.rank].items
        }

    def _on_host(self, tensor: Tensor) -> Tensor:
        """The same tensor where it is in host memory, else a view of a copy of all its storage."""
        tensor, there = tensor.detach(), tensor.untyped_storage()
        if not is_elsewhere(there):
            return tensor
        if there.data_ptr() not in self.storages:
            copied = torch.empty(there.nbytes(), dtype=torch.uint8).untyped_storage().copy_(there)
            self.storages[there.data_ptr()] = (there, copied)
        _, here = self.storages[there.data_ptr()]
        return torch.empty(0, dtype=tensor.dtype).set_(here, tensor.storage_offset(), tensor.size(), tensor.stride())

    def free(self) -> None:
        """Give the device's memory back. Tensors that are views of it stay, and are not to be read before `bring_back`."""
        for there, _ in self.storages.values():
            if there.resizable():  # FBGEMM's in host memory are not
                there.resize_(0)

    def bring_back(self) -> None:
        for there, here in self.storages.values():
            if there.resizable():
                there.resize_(here.nbytes())
                there.copy_(here)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every rank asks for its pieces, one at a time, and sends those that are asked of it."""
        mine = [(item.storage_index, item.storage_offsets, item.lengths) for item in plan.items]
        asked, holders = gathered(self.group, mine), self.metadata.storage_data
        for turn in range(max(map(len, asked))):
            sending = []  # with what is sent, which must stay until it has been
            for rank, (index, *part) in ((rank, items[turn]) for rank, items in enumerate(asked) if turn < len(items)):
                if holders[index] == self.rank != rank:
                    piece = narrow_tensor_by_index(self.pieces[index], *part).contiguous()
                    sending.append((piece, dist.isend(piece, group=self.group, group_dst=rank, tag=turn)))
            if turn < len(mine):
                index, *part = mine[turn]
                into = planner.resolve_tensor(plan.items[turn]).detach()
                if holders[index] == self.rank:
                    piece = narrow_tensor_by_index(self.pieces[index], *part)
                else:
                    saved: Any = self.metadata.state_dict_metadata[index.fqn]
                    piece = torch.empty(mine[turn][2], dtype=saved.properties.dtype)
                    dist.recv(piece, group=self.group, group_src=holders[index], tag=turn)
                into.copy_(piece)
                planner.commit_tensor(plan.items[turn], into)
            for _, work in sending:
                if work is not None:
                    work.wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_metadata(self) -> Metadata:
        return self.metadata


def is_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is in the memory of a device."""
    return storage.device.type != "cpu"


def leaving(state: dict[str, Any]) -> int:
    """The bytes of a state {"model": …, "optimizer": {"state": …}} that this rank has on a device, and that go to host memory."""
    local = [v.local_shards() if isinstance(v, ShardedTensor) else [v] for v in tree_leaves(state)]
    tensors = [getattr(each, "tensor", each) for of_value in local for each in of_value]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages if is_elsewhere(each)}.values())
