"""A checkpoint that stays in the host memory of the ranks: what one saved there, any of them loads. Needs torch.

`save(state, storage_writer=saved)` of torch.distributed.checkpoint, then `saved.share_metadata()`, keeps what each rank saves;
with `storage_reader=saved` the ranks send each other what they read. So a state goes from one plan to another by the planner that
reads a checkpoint in files (client/torchrec_optimizer.py), and no file is written.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from neuroshard.core.errors import InvalidInput


class InMemory(StorageWriter, StorageReader):
    """What the ranks of a gloo `group` save in their host memory. Tensors there are kept as they are; of others, copies."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.moved = Moved()
        self.pieces: dict[MetadataIndex, Tensor] = {}
        self.metadata: Metadata | None = None

    def share_metadata(self) -> None:
        """Let all ranks know what each of them saved, which torch gathers on one."""
        metadata = [self.metadata]
        dist.broadcast_object_list(metadata, group=self.group, group_src=0)
        self.metadata = metadata[0]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            value = planner.resolve_data(item)
            if not isinstance(value, Tensor):
                raise InvalidInput(f"{item.index.fqn!r} is no tensor, and only tensors go from one plan to another")
            self.pieces[item.index] = piece = self.moved.on_host(value.detach())
            results.append(WriteResult(item.index, piece.nbytes, self.rank))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        assert self.metadata is not None
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every rank asks for its pieces, one at a time, and sends those that are asked of it: all call it together."""
        assert self.metadata is not None
        ranks = dist.get_world_size(self.group)
        asked: list[Any] = [None] * ranks
        mine = [(item.storage_index, item.storage_offsets, item.lengths) for item in plan.items]
        dist.all_gather_object(asked, mine, group=self.group)
        for turn in range(max(map(len, asked))):
            sending = []  # with what is sent, which must stay until it has been
            for rank, (index, offsets, lengths) in (
                (r, items[turn]) for r, items in enumerate(asked) if turn < len(items)
            ):
                if self.metadata.storage_data[index] == self.rank != rank:
                    part = self._part(index, offsets, lengths).contiguous()
                    sending.append((part, dist.isend(part, group=self.group, group_dst=rank, tag=turn)))
            if turn < len(mine):
                index, offsets, lengths = mine[turn]
                holder = self.metadata.storage_data[index]
                into = planner.resolve_tensor(plan.items[turn]).detach()
                if holder == self.rank:
                    part = self._part(index, offsets, lengths)
                else:
                    part = torch.empty(lengths, dtype=self._dtype(index))
                    dist.recv(part, group=self.group, group_src=holder, tag=turn)
                into.copy_(part)
                planner.commit_tensor(plan.items[turn], into)
            for _, work in sending:
                if work is not None:
                    work.wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, index: MetadataIndex, offsets: Iterable[int], lengths: Iterable[int]) -> Tensor:
        return narrow_tensor_by_index(self.pieces[index], tuple(offsets), tuple(lengths))

    def _dtype(self, index: MetadataIndex) -> torch.dtype:
        assert self.metadata is not None
        found: torch.dtype = self.metadata.state_dict_metadata[index.fqn].properties.dtype  # type: ignore[union-attr]
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Moved:
    """Tensors of a device on their way to host memory, by the storages that they are views of."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # there, and here

    def on_host(self, tensor: Tensor) -> Tensor:
        """The same tensor where it is in host memory, else a view of a copy of all its storage."""
        there = tensor.untyped_storage()
        if not is_elsewhere(there):
            return tensor
        if there.data_ptr() not in self.storages:
            self.storages[there.data_ptr()] = (
                there,
                torch.empty(there.nbytes(), dtype=torch.uint8).untyped_storage().copy_(there),
            )
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


def is_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is in the memory of a device."""
    return storage.device.type != "cpu"
