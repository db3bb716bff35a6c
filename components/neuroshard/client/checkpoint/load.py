"""A checkpoint of one plan for a trainer of another: weights, and the fused optimizers' moments. Needs torch and torchrec.

What torch.distributed.checkpoint holds of a DistributedModelParallel (seen with torchrec 1.8, torch 2.13):
- weights, and moments of the element (Adagrad, Adam): rectangles of the whole table, which it reads into any others;
- moments of the row (row-wise Adagrad) of whole tables and split rows: one number for each row of the table;
- moments of the row of column shards: one number for each row **and shard**, shard by shard from the left. So their number
  changes with the number of shards, and loading ends with `Size mismatch … momentum1`; with as many shards of other widths it
  succeeds, but the moments are those of other columns.

Row-wise Adagrad's moment of a row is the sum over steps of the mean of its squared gradients over the shard's columns. So a new
shard gets the mean of the old shards' moments, weighted by the columns that it has of each:
- the same columns: the same moments, exactly;
- whole old shards joined: exactly what the joined shard would have added up from the same gradients;
- a part of an old shard: that shard's moments, an estimate, since the columns' own share is in no checkpoint.

Tables of which every rank has a copy (data-parallel) are dense parameters, trained by the dense optimizer: they have no fused
moments. Where only one of the plans copies a table, its moments start anew.

Not covered: state in DTensors, and row-wise state of other optimizers, if it is not a mean over the row.
"""

import io
import math
import os
import pickle  # nosec B403
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from neuroshard.client.checkpoint.saved import METADATA_FILE, SavedMaps, SavedOrders, Together, is_there, parts_of
from neuroshard.client.load import check_world_size
from neuroshard.client.model.warn import and_more, sharded_tensors_allowed, warn
from neuroshard.client.ranks import gathered
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.moves import joined
from neuroshard.core.plan import Plan, check_plan
from neuroshard.core.table import Table
from neuroshard.core.text import counted, first_few, one_line, spanned
from neuroshard.core.value import shown
from neuroshard.files.importers.torchrec_tables import INSIDE, INSIDE_MAPPED

__all__ = ["load_resharded", "saved_plan"]

PARTS = re.compile(r"/(hot|cold|dealt)-(sorted|[0-9a-f]{8})-\d+(\.weight)?$")  # as client/rows/ names them
PLAN = "plan"  # key of a checkpoint, under which a trainer puts its plan's digest


def load_resharded(
    state: dict[str, Any],
    checkpoint: str | os.PathLike[str],
    *,
    old_plan: Plan | None = None,
    new_plan: Plan | None = None,
    storage_reader: StorageReader | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[str, ...]:
    """Read a checkpoint that was saved under any plan into the `state` of a sharded model. Every rank must call it.

    `state` is what was saved, of the new model: {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict(),
    "output_order": output_order(model)} and what else there was. Its tensors are the model's own, so the model has the weights
    and moments afterwards. What has a state_dict may be given itself, as torch allows: {"model": model}. Where `checkpoint` is a
    folder with a checkpoint in each of its folders, `model/` and `optimizer/`, they are read as these keys. Returns the tables of
    this rank whose moments are not exactly the old ones, in order, as plans name them: a row's moment under other column cuts is
    estimated, and moments start anew where only one of the plans copies the table.

    `old_plan` is checked against the checkpoint, and `new_plan` against the state and the ranks of `group`. Without `old_plan`,
    a table is taken to have been copied if the checkpoint has moments of others and none of it. A `storage_reader` reads what
    is not in a folder (S3 by fsspec's reader). Ranks read only what their shards overlap. Besides the model, a rank needs memory
    for the largest piece that one rank saved of one table, on the CPU, as every load does, and for the moments of the rows of
    one shard, on the model's device.

    A ShardingWarning is issued where a module of the model returns its outputs in another order than the
    checkpoint was trained in: as both `output_order`s say, or, of a checkpoint that has none, `old_plan` and `new_plan`. The
    state then has the checkpoint's order, which `keep_output_order(model, state["output_order"])` gives the model. Another names
    dense layers of the checkpoint that the model lacks, and state of its dense optimizers that no state was given for.

    Raises UsageError for a state that is no dict, and InvalidInput, the same on every rank, for no checkpoint, one of another
    model, plan or optimizer, and for a plan for other ranks; then the state is as it was. A file that breaks later leaves it half
    read, and raises InvalidInput too.
    """
    for plan in (old_plan, new_plan):
        if plan is not None:
            check_plan(plan)
    if not isinstance(state, dict):
        raise UsageError(
            f'the state is {shown(state)}; give what was saved, of this model: {{"model": model.state_dict(), "optimizer": '
            "model.fused_optimizer.state_dict()}"
        )
    # a module's tensors are its own, and TorchRec's load_state_dict fails where a rank has two shards of a table
    read = {key: value.state_dict() if isinstance(value, nn.Module) else value for key, value in state.items()}
    try:
        storage_reader = _reader(checkpoint, storage_reader, read, group)
        orders = SavedOrders(f"checkpoint {checkpoint}", old_plan, new_plan)
        planner = _Resharding(f"checkpoint {checkpoint}", old_plan, new_plan, group, orders)
        planner.parts = getattr(storage_reader, "parts", ())
        planner.with_moments = getattr(storage_reader, "with_moments", False)
        with sharded_tensors_allowed():
            load(read, checkpoint_id=checkpoint, storage_reader=storage_reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise InvalidInput(fault_of(f"checkpoint {checkpoint}", error)) from None
    planner.maps.join()
    orders.put_into(read)
    state.update((key, value) for key, value in read.items() if not isinstance(state.get(key), nn.Module))
    if other := orders.difference():
        warn(other)
    for left, so in planner.left.items():
        warn(f"checkpoint {checkpoint} has {left[0]!r}{and_more(left)}, which the state lacks: {so}")
    return tuple(sorted(planner.inexact_tables()))


def saved_plan(checkpoint: str | os.PathLike[str], *, storage_reader: StorageReader | None = None) -> str | None:
    """The digest of the plan that a checkpoint was trained under: what its trainer saved as "plan" beside "model", or one level
    down, as in {"app": {"plan": …}} or in a folder of its own. None where it saved none.

    It needs no process group, and is for `load_plan_on_all_ranks(digest=…)`: a job that starts again goes on under the plan of
    its checkpoint, whatever is live by then. Raises InvalidInput where there is no checkpoint, where "plan" is no digest, and
    where there are several.
    """
    whose, reader = f"checkpoint {checkpoint}", storage_reader or FileSystemReader(checkpoint)
    if isinstance(reader, FileSystemReader) and not is_there(reader):
        if not (parts := parts_of(reader)):
            raise InvalidInput(f"{checkpoint}: there is no checkpoint here ({METADATA_FILE} is missing)")
        reader = Together(reader, parts)
    found = _Digests()
    try:
        metadata = reader.read_metadata()
        paths = dict(metadata.planner_data or {})
        inside = {str(path[0]) for path in paths.values()} if type(reader) is not Together else ()
        if isinstance(reader, FileSystemReader) and (again := parts_of(reader, inside)):
            raise _twice(checkpoint, again)
        where = {key: paths.get(key, (key,)) for key in metadata.state_dict_metadata}
        asked = [
            key for key, path in where.items() if path[-1] == PLAN and len(path) <= 3
        ]  # a folder, and a level down
        if not asked:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of no process group
            load(dict.fromkeys(asked, ""), storage_reader=reader, planner=found, no_dist=True)
    except CheckpointException as error:
        raise InvalidInput(fault_of(whose, error)) from None
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise InvalidInput(f"{whose} cannot be read: {one_line(error)}") from None
    plans = {key: value for key, value in found.values.items() if _is_digest(value) or key == PLAN}
    for key, value in plans.items():
        if not _is_digest(value):
            raise InvalidInput(f"{whose}: {key!r} is {shown(value)}, not a plan's digest; save plan.digest()")
        if value != (other := next(iter(plans.values()))):
            raise InvalidInput(
                f"{whose}: {next(iter(plans))!r} is plan {str(other)[:12]}, and {key!r} plan {str(value)[:12]}; give the "
                "folder of one checkpoint"
            )
    return str(next(iter(plans.values()))) if plans else None


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


class _Digests(DefaultLoadPlanner):
    """Reads values, and runs no code that a file may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, object] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _reader(
    checkpoint: str | os.PathLike[str],
    reader: StorageReader | None,
    state: Mapping[str, object],
    group: dist.ProcessGroup | None,
) -> StorageReader:
    """The reader of a checkpoint, or of those in its folders, of which one has a name that the state has too. Raises InvalidInput
    on all ranks where some see no checkpoint: torch would log a traceback for each of them."""
    if reader is None:
        reader = FileSystemReader(checkpoint)
    elif not isinstance(reader, FileSystemReader):
        return reader
    else:
        reader.reset(checkpoint)  # as torch's load does
    try:
        mine = [METADATA_FILE, *parts_of(reader, state)] if is_there(reader) else parts_of(reader)
    except Exception:  # of a store, which reading names again; no rank must wait for this one
        mine = [METADATA_FILE]
    every = gathered(group, mine)
    for rank, found in enumerate(every):
        if found == every[0] and METADATA_FILE in found[:1] and found[1:]:
            raise _twice(checkpoint, found[1:])
        if found != every[0] or (METADATA_FILE not in found and not state.keys() & set(found)):
            beside = (
                f", but in {first_few([f'{name}/' for name in found])}: give the state under these names"
                if found
                else ""
            )
            beside = "; the ranks see different ones" if found != every[0] else beside
            raise InvalidInput(
                f"{checkpoint}: rank {rank} finds no checkpoint here ({METADATA_FILE} is missing){beside}; give the folder that "
                "torch.distributed.checkpoint.save wrote, or the one that model/ and optimizer/ are in, which all ranks must see"
            )
    return reader if mine == [METADATA_FILE] else Together(reader, mine)


def _twice(checkpoint: object, parts: Sequence[str]) -> InvalidInput:
    return InvalidInput(
        f"{checkpoint} has a checkpoint of its own ({METADATA_FILE}) and others in {' and '.join(f'{one}/' for one in parts)}, "
        f"and nothing says which is right: keep one of them, and remove the other's files ({METADATA_FILE} too)"
    )


def fault_of(whose: str, error: CheckpointException) -> str:
    """What the first rank that failed says, in one line."""
    rank, (fault, _) = min(error.failures.items())
    if isinstance(fault, NeuroshardError):
        return str(fault)
    return f"{whose} cannot be loaded: rank {rank}: {type(fault).__name__}: {fault}"


class _Rectangle(NamedTuple):
    row: int
    rows: int
    column: int
    columns: int

    def __str__(self) -> str:
        return f"rows {spanned(self.row, self.rows)} of columns {spanned(self.column, self.columns)}"


def _rectangle(offsets: Sequence[int], sizes: Sequence[int]) -> _Rectangle:
    return _Rectangle(offsets[0], sizes[0], offsets[1], sizes[1])


def _rectangles(shards: Iterable[ShardMetadata]) -> list[_Rectangle]:
    return [_rectangle(shard.shard_offsets, shard.shard_sizes) for shard in shards]


class _Resharding(DefaultLoadPlanner):
    """Torch's planner, which reads the moments of rows from the shards that have them, with their weights.

    A moment that comes from one old shard is read in place. One that is a mean is read into a tensor of its own, for one old
    shard at a time, and added.
    """

    def __init__(
        self,
        whose: str,
        old_plan: Plan | None,
        new_plan: Plan | None,
        group: dist.ProcessGroup | None,
        orders: SavedOrders,
    ) -> None:
        super().__init__()
        self.left: dict[tuple[str, ...], str] = {}  # on one rank: keys that no rank reads, and what that means
        self.orders, self.maps = orders, SavedMaps(whose)
        self.whose, self.new_plan, self.group = whose, new_plan, group
        self.old, self.new = (_Tables(plan) if plan else None for plan in (old_plan, new_plan))
        self.weights_of: dict[ReadItem, float] = {}  # of what is added up
        self.parts: Sequence[str] = ()  # folders that are read together
        self.with_moments = False  # as the reader knows, also where no table has any
        self.anew: list[str] = []  # keys of moments that start at 0
        self.inexact: set[str] = set()  # keys of weights

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads, and with it, for the plan of all ranks, which shards it has."""
        saved = self._saved()
        for key, path in self.mappings.items():
            _check_goes_on(str(path[-1]), self.state_dict[key])
        orders = self.orders.of_state(self.state_dict, self.mappings)
        tables = self._tables(saved)
        self._check_with_weights(tables)
        weights = {name: key for name, key in tables.items() if isinstance(self.state_dict[key], ShardedTensor)}
        copies = set(tables.values()) - set(weights.values())
        self._check_groups(weights)
        self._start_anew(saved, tables, copies)
        self._check(saved, tables.values(), orders)
        moments = {key: weight for key, weight in self._moments(weights) if key not in self.anew}
        by_row = {key: weight for key, weight in moments.items() if self._is_by_row(key, weight)}
        for key in (key for key in moments if key not in by_row):
            if saved.shape(key) != (here := tuple(self.state_dict[key].size())):
                raise InvalidInput(
                    f"{self.whose} has {_by(saved.shape(key))} values of {key!r}, and the state {_by(here)}: it is of another "
                    "optimizer"
                )
        self.maps.check(self.state_dict, saved.metadata)
        apart = {*by_row, *self.anew, *orders, *self.maps.of_ranks(self.state_dict)}
        rest = {key: value for key, value in self.state_dict.items() if key not in apart}
        items = list(create_default_local_load_plan(rest, saved.metadata).items)
        items += self.orders.items(saved.metadata, self.state_dict, orders)
        for key, weight in by_row.items():
            items += self._moment_items(saved, key, weight)
        shards = {
            key: _rectangles(shard.metadata for shard in self.state_dict[key].local_shards())
            for key in weights.values()
        }
        return LoadPlan(items, planner_data=(tuple(self.state_dict), shards, copies))

    def _tables(self, saved: "_Saved") -> dict[str, str]:
        """The keys of the state's tables, by the last part of their path. Raises InvalidInput where two models have a table of
        one path, and hold it differently: which one has which moments is not said anywhere."""

        def held(key: str) -> object:
            here = self.state_dict[key]
            shards = _rectangles(here.metadata().shards_metadata) if isinstance(here, ShardedTensor) else []
            return sorted(shards), sorted(saved.rectangles(key)) if saved.has(key) else []

        found: dict[str, str] = {}
        for key, path in self.mappings.items():
            if _is_table(key, self.state_dict[key]):
                other = found.setdefault(str(path[-1]), key)
                if other != key and held(other) != held(key):
                    raise InvalidInput(
                        f"the state has table {_table_of(key)!r} twice, as {other!r} and {key!r}, in different shards, and their "
                        "moments cannot be told apart; load each model, with its optimizer, by a call of its own"
                    )
        return found

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On one rank, for all: a rank's state may lack the tables of others. Raises InvalidInput, which all ranks get."""
        saved, keys, shards, copies = self._saved(), set[str](), dict[str, list[_Rectangle]](), set[str]()
        for keys_there, shards_there, copies_there in (plan.planner_data for plan in global_plan):
            keys |= set(keys_there)
            copies |= copies_there
            for key, rectangles in shards_there.items():
                shards.setdefault(key, []).extend(rectangles)
        if not shards and not copies:
            raise InvalidInput("the state has no weights of sharded tables; give it model.state_dict()")
        _check_nothing_left(saved, keys, shards, copies, self.old)
        self.left = _left(saved, keys, (*shards, *copies))
        if self.old is not None:
            _check_plan(self.old, {key: saved.rectangles(key) for key in (*shards, *copies)}, copies, self.whose)
        if self.new is not None:
            _check_copies(self.new, shards, copies)
            whole = {key: [_rectangle((0, 0), saved.shape(key))] for key in copies}
            _check_plan(self.new, shards | whole, copies, "the model")
        return [replace(plan, planner_data=None) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """All ranks agree by now. Moments that start anew, or are added up, start at 0."""
        for key in self.anew:
            _zero(self.state_dict[key])
        for item in new_plan.items:
            if item in self.weights_of:
                self.transform_tensor(item, self.lookup_tensor(item.dest_index)).detach().zero_()
        return new_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        into: Tensor = super().resolve_tensor(read_item)
        return torch.empty_like(into) if read_item in self.weights_of else into

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if not self.orders.take(read_item, value):
            super().load_bytes(read_item, value)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if read_item in self.weights_of:
            into = self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index)).detach()
            into.add_(tensor, alpha=self.weights_of[read_item])

    def _start_anew(self, saved: "_Saved", tables: Mapping[str, str], copies: Collection[str]) -> None:
        """Find the moments of this rank that the checkpoint cannot have, and the tables whose moments it has in vain: those of
        which only one of the plans has a copy on every rank."""
        missing = defaultdict[str, list[str]](list)  # by table
        for key, path in self.mappings.items():
            if len(path) > 1 and not saved.has(key) and (name := _weight_of(path[-2], tables)):
                missing[name].append(key)
        for name, weight in tables.items():
            copied = saved.copied(name, weight, self.old)
            if copied is None or copied == (weight in copies):
                continue
            self.anew += missing[name]
            left = [key for key in saved.state_of[name] if key not in self.state_dict]
            if left if weight in copies else any(self._has_rows(key) for key in missing[name]):
                self.inexact.add(weight)

    def _has_rows(self, key: str) -> bool:
        value = self.state_dict[key]
        return not isinstance(value, ShardedTensor) or any(math.prod(s.tensor.size()) for s in value.local_shards())

    def inexact_tables(self) -> Iterator[str]:
        """Their names, as plans have them: with the module where two modules have a table of that name."""
        paths = self._saved().paths
        times = Counter(_table_of(key) for key in paths if is_key_of_table(key))
        for weight in self.inexact:
            name, table = _table_of(weight), self.new.of(weight) if self.new else None
            module = [part for part in str(paths[weight][-1]).split(".")[:-3] if part not in (INSIDE, INSIDE_MAPPED)]
            yield table.name if table else name if times[name] < 2 else ".".join([*module, name])

    def _moments(self, weights: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """The keys of a weight's optimizer state, each with the key of the weight."""
        for key, path in self.mappings.items():
            if len(path) > 1 and _has_size(self.state_dict[key]) and (name := _weight_of(path[-2], weights)):
                yield key, weights[name]

    def _is_by_row(self, key: str, weight: str) -> bool:
        """Whether a moment is one number per row and shard. Raises InvalidInput for state in DTensors."""
        state, table = self.state_dict[key], _table_of(weight)
        if not isinstance(state, ShardedTensor):
            raise InvalidInput(
                f"the optimizer state of table {table!r} is a {type(state).__name__}; only ShardedTensors are supported: do "
                "not set output_dtensor in the ShardingEnv"
            )
        shards = self.state_dict[weight].metadata().shards_metadata
        return len(state.size()) == 1 and sorted(s.shard_sizes[0] for s in state.metadata().shards_metadata) == sorted(
            shard.shard_sizes[0] for shard in shards
        )

    def _moment_items(self, saved: "_Saved", key: str, weight: str) -> Iterator[ReadItem]:
        """What to read for this rank's shards of one moment."""
        old = saved.moments(key, weight)
        table_rows = self.state_dict[weight].size()[0]
        new = _by_offset(_rectangles(self.state_dict[weight].metadata().shards_metadata), table_rows)
        for shard in self.state_dict[key].local_shards():
            if not shard.metadata.shard_sizes[0]:
                continue
            mine = new[shard.metadata.shard_offsets[0]]
            for offset, theirs in old.items():
                first, end = max(mine.row, theirs.row), min(mine.row + mine.rows, theirs.row + theirs.rows)
                left = max(mine.column, theirs.column)
                columns = min(mine.column + mine.columns, theirs.column + theirs.columns) - left
                if first >= end or columns <= 0:
                    continue
                item = ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(key, shard.metadata.shard_offsets),
                    dest_offsets=torch.Size([first - mine.row]),
                    storage_index=MetadataIndex(key, [offset]),
                    storage_offsets=torch.Size([first - theirs.row]),
                    lengths=torch.Size([end - first]),
                )
                if columns < mine.columns:
                    self.weights_of[item] = columns / mine.columns
                if (mine.column, mine.columns) != (theirs.column, theirs.columns):
                    self.inexact.add(weight)
                yield item

    def _check_with_weights(self, tables: Collection[str]) -> None:
        """Raise InvalidInput for moments without the weights of their table: only the weights say which shards they are of."""
        for key, path in self.mappings.items():
            if len(path) > 1 and _is_fused_moment(str(path[-2]), str(path[-1])) and not _weight_of(path[-2], tables):
                raise InvalidInput(
                    f"the state has {key!r} without the weights of table {_table_of(str(path[-2]))!r}, whose shards say what "
                    'moments are of: give both together, as {"model": model.state_dict(), "optimizer": '
                    "model.fused_optimizer.state_dict()}, and of checkpoints in folders (model/, optimizer/) the folder that "
                    "these are in"
                )

    def _check_groups(self, weights: Collection[str]) -> None:
        """Raise InvalidInput where the state has groups of fused parameters, by name: a checkpoint has those of rank 0 alone."""
        for key, path in self.mappings.items():
            grouped = self.state_dict[key] if "param_groups" in path and path[-1] == "params" else ()
            if named := next((one for one in grouped if str(one).endswith(tuple(weights))), None):
                raise InvalidInput(
                    f"the state has {key!r}, a group of the fused optimizer with {named!r}, and groups are those of one rank "
                    "under one plan: call model.fused_optimizer.save_param_groups(False) before its state_dict(), and set "
                    "learning rates afterwards"
                )

    def _check(self, saved: "_Saved", weights: Iterable[str], orders: Collection[str]) -> None:
        """Raise InvalidInput unless the checkpoint has all that this rank's state has, but for `orders` of outputs, and the new
        plan is for as many ranks."""
        for key in self.state_dict:
            if not saved.has(key) and key not in self.anew and key not in orders:
                known = self.old is not None or is_key_of_table(key)
                or_copied = "" if known else ", or of a plan that copied the table to every rank (then give old_plan)"
                so = f"it is of another model or optimizer{or_copied}"
                name = str(self.mappings[key][-1])
                if "." in name and (at := next((k for k, p in saved.paths.items() if str(p[-1]).endswith(name)), None)):
                    so = f"it has {at!r}; give the state under the keys that it was saved under"
                elif self.parts and (part := str(self.mappings[key][0])) not in self.parts:
                    so = f"folder {part}/ is missing or unfinished (no {METADATA_FILE}); give a checkpoint that was saved whole"
                raise InvalidInput(f"{self.whose} has no {key!r}, which the state has: {so}")
        for key in weights:
            if (there := saved.shape(key)) != (here := tuple(self.state_dict[key].size())):
                raise InvalidInput(
                    f"table {_table_of(key)!r} is {_by(there)} in {self.whose}, but {_by(here)} in the model: it is of another "
                    "model"
                )
        if self.new_plan is not None and dist.is_available() and dist.is_initialized():
            check_world_size(self.new_plan, dist.get_world_size(self.group), f"plan {self.new_plan.digest()[:12]}")

    def _saved(self) -> "_Saved":
        assert self.metadata is not None
        return _Saved(self.metadata, self.whose, self.with_moments)


class _Saved:
    """What a checkpoint's metadata says of tables."""

    def __init__(self, metadata: Metadata, whose: str, with_moments: bool = False) -> None:
        self.metadata, self.whose = metadata, whose
        self.paths: dict[str, tuple[Any, ...]] = dict(metadata.planner_data or {})
        self.weights = {str(path[-1]) for key, path in self.paths.items() if is_key_of_table(key)}
        self.state_of = defaultdict[str, list[str]](list)  # keys of fused moments, by the last part of a weight's path
        for key, path in self.paths.items():
            if (
                len(path) > 1
                and _is_fused_moment(str(path[-2]), str(path[-1]))
                and (name := _weight_of(path[-2], self.weights))
            ):
                self.state_of[name].append(key)
        self.has_moments = with_moments or bool(self.state_of)

    def has(self, key: str) -> bool:
        return key in self.metadata.state_dict_metadata

    def copied(self, name: str, weight: str, old: "_Tables | None") -> bool | None:
        """Whether every rank had a copy of a table, as the `old` plan says. Without one, a table without moments among others
        with moments is taken to have been copied; None where none has any."""
        if old is not None:
            return old.copies(weight)
        return name not in self.state_of if self.has_moments else None

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensor(key).size)

    def rectangles(self, key: str) -> list[_Rectangle]:
        return [_rectangle(chunk.offsets, chunk.sizes) for chunk in self._tensor(key).chunks]

    def moments(self, key: str, weight: str) -> dict[int, _Rectangle]:
        """The rectangles whose rows' moments begin at an offset. Raises InvalidInput where there are other moments."""
        found = _by_offset(self.rectangles(weight), self.shape(weight)[0])
        chunks = {chunk.offsets[0]: chunk.sizes[0] for chunk in self._tensor(key).chunks if math.prod(chunk.sizes)}
        if {offset: held.rows for offset, held in found.items()} != chunks:
            raise InvalidInput(
                f"{self.whose} has {self.shape(key)[0]:,} values of {key!r}, which are not one a row and shard of table "
                f"{_table_of(weight)!r}: it is of another optimizer"
            )
        return found

    def _tensor(self, key: str) -> TensorStorageMetadata:
        found = self.metadata.state_dict_metadata[key]
        if not isinstance(found, TensorStorageMetadata):
            raise InvalidInput(f"{self.whose} has no tensor at {key!r}: it is of another model")
        return found


def _check_goes_on(name: str, value: object) -> None:
    """Raise InvalidInput for a value of the state that goes to no other plan."""
    if PARTS.search(name):
        raise InvalidInput(
            f"the state has {name!r}, a part of a table that is held by access: such parts go to no other plan; give "
            "model_state(model), and load_model_state(model, state) afterwards (client/checkpoint/rows.py)"
        )
    if is_key_of_table(name) and isinstance(value, DTensor):
        raise InvalidInput(
            f"the state has table {_table_of(name)!r} in a DTensor, as DMPCollection and output_dtensor give it, and only "
            "ShardedTensors go to another plan; read it by torch.distributed.checkpoint.load, which under another plan is "
            "right for the model's state alone"
        )


def _by_offset(rectangles: Iterable[_Rectangle], table_rows: int) -> dict[int, _Rectangle]:
    """Where TorchRec puts the moments of the rows of each shard: shards from the left, then from the first row down."""
    held = [rectangle for rectangle in rectangles if rectangle.rows and rectangle.columns]
    columns = sorted({rectangle.column for rectangle in held})
    return {columns.index(rectangle.column) * table_rows + rectangle.row: rectangle for rectangle in held}


def _check_nothing_left(
    saved: _Saved, keys: Collection[str], weights: Collection[str], copies: Collection[str], old: "_Tables | None"
) -> None:
    """Raise InvalidInput where the checkpoint has tables, or moments, that no rank's state has. Moments of a table that only one
    of the plans copies are left."""
    modules = {_module_of(key) for key in (*weights, *copies)}
    for key, path in saved.paths.items():
        if key in keys:
            continue
        if key.endswith(".weight") and _module_of(key) in modules:
            raise InvalidInput(
                f"{saved.whose} has table {_table_of(key)!r}, which the model lacks: it is of another model"
            )
        if len(path) < 2 or not _is_fused_moment(str(path[-2]), str(path[-1])):
            continue
        name = _weight_of(path[-2], saved.weights)
        weight = next((w for w in weights if name and w.endswith(name)), None)
        if weight is not None and not (old and old.copies(weight)):
            raise InvalidInput(
                f"{saved.whose} has optimizer state {path[-1]!r}, which the state lacks: it is of another optimizer, or "
                "model.fused_optimizer.state_dict() was not given"
            )


def _left(saved: _Saved, keys: Collection[str], weights: Iterable[str]) -> dict[tuple[str, ...], str]:
    """What a checkpoint has of dense optimizers and of dense layers and no rank's state has, by its keys, and what that means.
    The state of copied tables, which may be no copies any more, is left out."""
    models = {saved.paths[weight][:-1] for weight in weights}
    optimizers, layers = [], []
    for key, path in saved.paths.items():
        if key in keys:
            continue
        if "state" in path[1:-2] and not is_key_of_table(str(path[path.index("state", 1) + 1])):
            optimizers.append(key)
        elif path[:-1] in models and not is_key_of_table(key):
            layers.append(key)
    lost = (
        "what this optimizer has learned is lost; give its state_dict(), and before that call its init_state() (of TorchRec's "
        "KeyedOptimizerWrapper, and of wrappers around it)"
    )
    found = {
        tuple(optimizers): lost,
        tuple(layers): "it is not loaded; give the model these layers, if it is to have them",
    }
    return {names: what for names, what in found.items() if names}


class _Tables:
    """A plan's tables, by the keys of their weights."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.copied = plan, plan.held.constraints.data_parallel
        self.called = defaultdict[str, list[Table]](list)
        for each in plan.task.tables:
            for known_as in {each.name, each.name_in_module}:
                self.called[known_as].append(each)

    def of(self, key: str) -> Table | None:
        """The table of this weight; where several tables have its name, the one in its module."""
        called = self.called[_table_of(key)]
        inside = [t for t in called if t.module and f".{t.module}." in f".{key}"]
        return max(inside or called, key=lambda table: len(table.module or ""), default=None)

    def copies(self, key: str) -> bool:
        table = self.of(key)
        return table is not None and table.name in self.copied


def _check_plan(tables: _Tables, held: Mapping[str, Sequence[_Rectangle]], copies: Collection[str], whose: str) -> None:
    """Raise InvalidInput unless the tables are held, by key of their weights, in the shards that the plan gives TorchRec. Those
    of `copies` that the plan does not know may be dense embeddings."""
    name, shards, taken = f"plan {tables.plan.digest()[:12]}", tables.plan.by_table(), set[str]()
    for key, rectangles in held.items():
        if (table := tables.of(key)) is None:
            if key in copies:
                continue
            raise InvalidInput(f"{whose} has table {_table_of(key)!r}, which {name} lacks")
        taken.add(table.name)
        if table.name in tables.plan.held.constraints.rows_by_access:  # in blocks of ids (client/checkpoint/rows.py)
            continue
        there = sorted(rectangle for rectangle in rectangles if rectangle.rows and rectangle.columns)
        parts = shards[table.name][:1] if table.name in tables.copied else joined(shards[table.name])
        wanted = sorted(_Rectangle(s.row_offset, s.rows, s.column_offset, s.dim) for s in parts)
        if there != wanted:
            pairs = (pair for pair in zip(there, wanted, strict=False) if pair[0] != pair[1])
            other, planned = next(pairs, (there[-1], wanted[-1]))
            raise InvalidInput(
                f"table {table.name!r} is in {counted(len(there), 'shard')} ({other}) in {whose}, but in {len(wanted)} "
                f"({planned}) by {name}: give the plan that it was sharded by"
            )
    if missing := [table.name for table in tables.plan.task.tables if table.name not in taken]:
        raise InvalidInput(f"{name} has table {missing[0]!r}, which {whose} lacks")


def _check_copies(tables: _Tables, shards: Collection[str], copies: Collection[str]) -> None:
    """Raise InvalidInput unless the model has copies of the tables that the plan copies, and of no others."""
    for key in (*shards, *copies):
        if tables.of(key) is not None and tables.copies(key) != (key in copies):
            here, there = ("copied to every rank", "sharded") if key in copies else ("sharded", "copied to every rank")
            raise InvalidInput(
                f"table {_table_of(key)!r} is {here} in the model, but {there} by plan {tables.plan.digest()[:12]}: give the "
                "plan that it was sharded by"
            )


def _module_of(key: str) -> str:
    """The key of a weight, without the table: `….embedding_bags`."""
    return ".".join(key.split(".")[:-2])


def _table_of(key: str) -> str:
    """The table's name in the key of its weight, `….embedding_bags.NAME.weight`."""
    return key.split(".")[-2]


def _is_table(key: str, value: object) -> bool:
    """Whether a value of the state is a table's weights: shards, or a copy, which only its place tells from dense parameters."""
    if not key.endswith(".weight") or not _has_size(value) or len(value.size()) != 2:
        return False
    return isinstance(value, ShardedTensor) or is_key_of_table(key)


def is_key_of_table(key: str) -> bool:
    """Whether a key is that of the weights of a table of a collection, `….embedding_bags.NAME.weight`."""
    return key.endswith(".weight") and key.split(".")[-3:-2] in (["embedding_bags"], ["embeddings"])


def _weight_of(key: object, weights: Container[str]) -> str | None:
    """Which of these weights a key of an optimizer's state is of: a CombinedOptimizer puts the names of its optimizers before."""
    name = str(key)
    while name not in weights:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return name


def _is_fused_moment(weight: str, name: str) -> bool:
    """Whether a value of a weight's state is a fused optimizer's, `TABLE.momentum1`; a dense one's, of a copy, is `exp_avg` or
    the like."""
    return is_key_of_table(weight) and name.startswith(f"{_table_of(weight)}.")


def _zero(state: object) -> None:
    tensors = [part.tensor for part in state.local_shards()] if isinstance(state, ShardedTensor) else [state]
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            tensor.detach().zero_()


def _has_size(value: object) -> TypeGuard[Tensor | ShardedTensor]:
    return isinstance(value, Tensor | ShardedTensor)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
