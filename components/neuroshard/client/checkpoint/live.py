"""A new plan for a model that trains, without a restart. Needs torch and torchrec.

    reshard(model, plan, step=step, batch_size=65536)  # on every rank, between two steps

Collections that the new plan holds otherwise are sharded anew, and their weights and optimizer state go from the old shards to
the new ones through host memory, by the planner that reads checkpoints of other plans (client/checkpoint/load.py). The old
collections stay whole until all ranks have the new ones, so an error leaves the model as it was.

TorchRec's own DistributedModelParallel.reshard (1.8) moves one moment of whole and column-wise tables of an
EmbeddingBagCollection, drops column boundaries that move on the same ranks, and leaves other ranks half way where one fails.
"""

import gc
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.train_pipeline.gradient_accumulation import GradientAccumulationWrapper
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from neuroshard.client.checkpoint.in_memory import InMemory, leaving
from neuroshard.client.checkpoint.load import is_key_of_table, load_resharded
from neuroshard.client.checkpoint.unsharded import copies_in, sharded_collections, unsharded
from neuroshard.client.model.order import SHARDED_MAPPED, inner_of, keep_output_order, output_order
from neuroshard.client.model.tables import HOOKS, collections_of, places_of
from neuroshard.client.model.warn import sharded_tensors_allowed, warn
from neuroshard.client.ranks import TIMEOUT_SECONDS, Channel, Sharing, Words, gathered, parts_of, prefix_of
from neuroshard.client.torchrec import to_torchrec
from neuroshard.client.torchrec.pipelines import check_pipeline
from neuroshard.core.errors import InvalidInput, NeuroshardError, Unreachable, UsageError
from neuroshard.core.plan import Plan, check_plan, shard_memory
from neuroshard.core.text import one_line
from neuroshard.core.units import format_bytes
from neuroshard.core.value import canonical_json
from neuroshard.system import available_bytes

__all__ = ["reshard"]

# By the group of a model. One that a call has failed in is of no use. It is not destroyed: torch would give its name to the next,
# which would then find the addresses of this one in the key-value store.
_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()
Parameters = Mapping[str, nn.Parameter]  # by key in the state of the model
_AGAIN = "start again by the plan from a checkpoint"


def reshard(
    model: DistributedModelParallel,
    plan: Plan,
    *,
    step: int | None = None,
    optimizer_of_copies: torch.optim.Optimizer | None = None,
    pipelines: Sequence[Any] = (),
    any_output_order: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **how: Any,
) -> tuple[str, ...]:
    """Let a sharded model be held by another plan from now on. Every rank must call it, between two steps: after the backward and
    the optimizer's step, before the next forward.

    `plan` and `step` (any number that says where the trainer is) must be the same on all ranks. `how` are the keyword arguments
    of `to_torchrec`, whose sharders and device are the model's: what it refuses is refused here, before anything changes. The
    model, its dense parameters and `model.fused_optimizer` stay the same objects. Collections that the plan holds as before are
    left alone. The others are new modules at their paths, with the hooks of the old ones; their outputs come in the same order
    as before, unless `any_output_order` says that the dense layers read by key. Learning rates and steps of the fused optimizer
    stay.

    Tables that every rank has a copy of (data-parallel) are the dense optimizer's. Where one is in a collection that changes,
    give that optimizer as `optimizer_of_copies`: the new parameters take the place of the old ones in it, with their state. State
    of a table that only one of the plans copies starts anew. `pipelines` are those of TorchRec that have run the model, for
    training or evaluation, and that hold no batch any more; those that the plan is not for are warned of (`check_pipeline`).

    Returns the tables of this rank whose moments are not exactly the old ones, as `load_resharded` does. Besides the model a rank
    on CPUs needs host memory for its new shards, one on GPUs for its old ones, and both for the largest new shard.

    Raises UsageError or InvalidInput for what cannot be done, and a NeuroshardError for ranks that do not come within
    `timeout_seconds`, by number, and for one that fails half way: the same on all ranks, and the model is as it was.
    """
    if not isinstance(model, DistributedModelParallel) or isinstance(model, DMPCollection):
        raise UsageError(
            f"reshard needs what DistributedModelParallel returned, and the model is a {type(model).__name__}; save a "
            "checkpoint, and start again by the new plan"
        )
    if own := {"sharders", "device_type", "world_size", "sharding_group_size"} & how.keys():
        raise UsageError(f"{min(own)} is the model's own for reshard; leave out {min(own)}=")
    check_plan(plan)
    job = _Job(model, plan, step, CopiesOptimizer(optimizer_of_copies), pipelines, timeout_seconds)
    job.agree("", partial(job.prepare, how))
    if not job.old:
        return ()
    before = output_order(model)
    inexact = job.move()
    job.take()
    if not any_output_order:
        keep_output_order(model, before)
    return inexact


class CopiesOptimizer:
    """A trainer's dense optimizer, plain or in TorchRec's wrappers; None where it gave none.

    It holds the parameter that TorchRec makes for each table of which every rank has a copy (data-parallel). In a collection that
    is sharded anew these are new parameters, which take the place of the old ones.
    """

    def __init__(self, optimizer: Any) -> None:
        self.leaves = list(_leaves(optimizer))
        self.old: Parameters = {}
        self.new: Parameters = {}
        self.fresh: dict[str, dict[Any, Any]] = {}  # state of parameters that are new to the optimizer

    def check(self, old: Parameters, new: Collection[str]) -> None:
        """Raise UsageError where there is no optimizer for copies before or after, and InvalidInput where it does not train one,
        or has several groups in which a table that becomes a copy could be."""
        self.old = old
        trained = {id(each) for leaf in self.leaves for group in leaf.param_groups for each in group["params"]}
        groups = sum(len(leaf.param_groups) for leaf in self.leaves)
        for key in sorted({*old, *new}):
            if not self.leaves:
                raise UsageError(
                    f"{key!r} is copied to every rank before or after, and a dense optimizer trains such tables; give it to "
                    "reshard as optimizer_of_copies="
                )
            if key in old and id(old[key]) not in trained:
                raise InvalidInput(
                    f"{key!r} is copied to every rank, and optimizer_of_copies does not train it; give the optimizer that does"
                )
            if key not in old and groups != 1:
                raise InvalidInput(
                    f"{key!r} becomes a copy on every rank, and optimizer_of_copies has {groups} groups that it could be in; "
                    "start again by the new plan from a checkpoint"
                )

    def prepare(self, new: Parameters) -> None:
        """Make the state of parameters that were no copies before, as their class of optimizer does, and change nothing yet."""
        self.new = new
        for key in new.keys() - self.old.keys():
            (leaf,) = self.leaves
            inner = leaf._optimizer if isinstance(leaf, KeyedOptimizerWrapper) else leaf
            options = {name: value for name, value in leaf.param_groups[0].items() if name in inner.defaults}
            self.fresh[key] = type(inner)([new[key]], **options).state.get(new[key], {})

    def take(self) -> None:
        """Put the new parameters where the old ones are, with their state."""
        for leaf in self.leaves:
            for key, old in self.old.items():
                new = [self.new[key]] if key in self.new else []
                for group in leaf.param_groups:
                    group["params"][:] = [one for each in group["params"] for one in (new if each is old else [each])]
                if old in leaf.state:
                    leaf.state.update(zip(new, [leaf.state.pop(old)], strict=False))
                if isinstance(leaf, KeyedOptimizer):
                    for name in [name for name, each in leaf.params.items() if each is old]:
                        del leaf.params[name]
                        leaf.params.update(zip([name], new, strict=False))
            for key, state in self.fresh.items():  # then there is one leaf, of one group
                leaf.param_groups[0]["params"].append(self.new[key])
                if state:
                    leaf.state[self.new[key]] = state
                if isinstance(leaf, KeyedOptimizer):
                    leaf.params[key] = self.new[key]


def _leaves(optimizer: Any) -> Iterator[Any]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, each in optimizer.optimizers:
            yield from _leaves(each)
    elif isinstance(optimizer, OptimizerWrapper):
        yield from _leaves(optimizer._optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, FusedOptimizer):
        yield optimizer


@dataclass
class _Job:
    """One call of `reshard` on one rank: what the new plan holds otherwise, and the way there."""

    model: Any
    plan: Plan
    step: int | None
    copies: CopiesOptimizer
    pipelines: Sequence[Any]
    timeout_seconds: float
    old: dict[str, Any] = field(default_factory=dict)  # collections that change, by path
    new: dict[str, Any] = field(default_factory=dict)
    memory: InMemory | None = None  # the state of the old collections

    def __post_init__(self) -> None:
        self.group, self.key_value, self.rank, self.ranks = parts_of(self.model._env.process_group, "reshard")

    def agree(self, name: str, work: Callable[[], None], work_seconds: float = 0.0) -> None:
        """Work, and return once all ranks have done so, for the same plan and step. Raises the same error on all. Other ranks
        wait for rank 0 `work_seconds` longer."""
        value = {"plan": self.plan.digest(), "step": self.step, "work": name}
        mine, failed = canonical_json(value), _caught(work)

        def compare(of_first: Mapping[str, object], data: bytes) -> None:
            if data != mine:
                raise InvalidInput(
                    f"reshard is called for {_said(value)}, and on rank 0 for {_said(of_first)}; call it on all ranks after "
                    "the same step, with the same plan"
                )
            if failed is not None:
                raise failed

        words = Words("new plan", lambda _: f"the state of {_said(value)}" if name else _said(value), "reshard", "has")
        channel = Channel(self.key_value, prefix_of(self.group, "reshard"), self.rank)
        sharing = Sharing(channel, self.ranks, words, work_seconds, self.timeout_seconds)
        sharing.of(lambda: (value, mine), json.loads, compare)

    # Before anything changes

    def prepare(self, how: Mapping[str, Any]) -> None:
        """Find the collections that the plan holds otherwise. Raises InvalidInput or UsageError for what cannot be done."""
        whose, task = f"plan {self.plan.digest()[:12]}", self.plan.task
        groups = "" if task.groups is None else task.groups.text(task.devices)
        held, model = next(iter(self.plan.held.constraints.rows_by_access), None), self.model
        faults = {
            f"{whose} is for {groups}, and the model is one group; {_AGAIN}, with DMPCollection": groups,
            f"table {held!r} is held by access in {whose}, and reshard cannot move such tables; {_AGAIN}": held,
            f"the model has trackers (model_tracker_configs), which reshard cannot keep; {_AGAIN}": model.model_trackers,
            f"the model has state in DTensors (output_dtensor), which reshard cannot keep; {_AGAIN}": model._env.output_dtensor,
        }
        if fault := next((fault for fault, is_so in faults.items() if is_so), None):
            raise InvalidInput(fault)
        collections = sharded_collections(self.model)
        for pipeline in self.pipelines:
            _check_empty(pipeline)
        for path, collection in collections.items():
            _check_idle(path, collection, self.pipelines)
        self.unsharded = unsharded(self.model, collections)
        given = {"device_type": self.model.device.type, "world_size": self.ranks, **how, "any_output_order": True}
        self.after = to_torchrec(self.plan, self.unsharded, **{**given, "sharders": self.model.sharders}).plan
        before = {path: inner_of(collection).module_sharding_plan for path, collection in collections.items()}
        self.old = {path: each for path, each in collections.items() if before[path] != dict(self.after[path])}
        if mapped := next((path for path, each in self.old.items() if isinstance(each, SHARDED_MAPPED)), None):
            raise InvalidInput(
                f"{whose} holds module {mapped!r} with another kernel than now, and reshard leaves tables that give rows to "
                f"ids as they train (managed collisions) where they are; {_AGAIN}"
            )
        places = places_of(task.tables, collections_of(self.unsharded), whose)
        self.tables = {name for name, place in places.items() if place.path in self.old}
        self.copies.check(copies_in(self.old, before), copies_in(self.old, self.after))
        for pipeline in self.pipelines:
            check_pipeline(self.plan, pipeline)

    # The new collections, beside the old ones

    def move(self) -> tuple[str, ...]:
        """Make the new collections, with the state of the old ones, on all ranks or on none. The model has the old ones still."""
        try:
            for work in (self._look, self._read, self._make, self._write):
                self.agree(work.__name__, work, work_seconds=self.timeout_seconds)
        except BaseException as error:
            self.new = {}
            state = self._restored()
            if isinstance(error, NeuroshardError):
                raise type(error)(f"{error}; {state}") from None
            raise
        return self.inexact

    def _look(self) -> None:
        """What only this rank can fail in, before what ranks wait for each other in."""
        for pipeline in self.pipelines:
            pipeline.detach()
        self.state = self._state(self.old)
        self.settings = {
            key: (
                {name: value for name, value in leaf.param_groups[0].items() if name != "params"},
                leaf._emb_module.get_learning_rate(),
                int(leaf._emb_module.iter),
            )
            for leaf, keys in self._operators(self.old)
            for key in keys
        }
        self.here = (socket.gethostname(), available_bytes(), leaving(self.state))

    def _read(self) -> None:
        if self.group not in _groups:  # what is sent is in host memory
            ranks, time = dist.get_process_group_ranks(self.group), timedelta(seconds=self.timeout_seconds)
            _groups[self.group] = dist.new_group(ranks, time, "gloo", use_local_synchronization=True)
        group = _groups[self.group]
        distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_seconds), group)
        every = gathered(group, (self.settings, self.here))
        self._check_memory([here for _, here in every])
        self.settings = {key: each for settings, _ in every for key, each in settings.items()}
        self.memory = InMemory(group, self.state)

    def _check_memory(self, ranks: Sequence[tuple[str, int, int]]) -> None:
        """Raise InvalidInput where a host lacks memory for what leaves devices, for new shards that are in it, as the plan counts
        them, and for the largest, which is received beside its place. A device that lacks memory says so itself."""
        shards = [shard for shard in self.plan.shards if shard.table in self.tables]
        needed, largest = defaultdict[str, int](int), [0] * len(ranks)
        for shard, memory in zip(shards, shard_memory(self.plan.held, shards), strict=True):
            state, rank = memory.weights + memory.optimizer, shard.device
            needed[ranks[rank][0]] += memory.host + state * (self.model.device.type == "cpu")
            largest[rank] = max(largest[rank], memory.host, state)
        for rank, (host, _, leaves) in enumerate(ranks):
            needed[host] += leaves + largest[rank]
        for host, size in needed.items():
            if size > (left := min(available for other, available, _ in ranks if other == host)):
                raise InvalidInput(
                    f"host {host} needs {format_bytes(size)} more of host memory while its ranks go from one plan to the other, "
                    f"and {format_bytes(left)} are available; {_AGAIN}"
                )

    def _make(self) -> None:
        assert self.memory is not None
        self.memory.free()
        devices = []
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            devices = [self.model.device]
        # first values are drawn in vain; ranks wait for each other where a collection has copies (DistributedDataParallel)
        with torch.random.fork_rng(devices), self._within_time():
            for path, old in self.old.items():
                module = self.unsharded.get_submodule(path)
                sharder = self.model._sharder_map[type(module)]
                new = sharder.shard(module, self.after[path], self.model._env, self.model.device, path)
                self.new[path] = new.train(old.training)

    @contextmanager
    def _within_time(self) -> Iterator[None]:
        """Let collectives of the trainer's group end within the time."""
        before = self.group._get_backend(self.model.device).options._timeout
        distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_seconds), self.group)
        try:
            yield
        finally:
            distributed_c10d._set_pg_timeout(before, self.group)

    def _write(self) -> None:
        assert self.memory is not None
        state = self._state(self.new)
        self.inexact = load_resharded(state, "in memory", storage_reader=self.memory, group=self.memory.group)
        self._set_operators()
        self.copies.prepare(copies_in(self.new, self.after))

    def _restored(self) -> str:
        """Bring the old shards back to the device; what the model is then, for people."""
        self._attach()
        _groups.pop(self.group, None)
        try:
            if self.memory is not None:
                self.memory.bring_back()
        except Exception as lost:
            return (
                f"and the old shards cannot be brought back on rank {self.rank} ({one_line(lost)}), so this model is of no use; "
                "start all ranks again from a checkpoint"
            )
        return "the model is as it was"

    def _state(self, collections: Mapping[str, Any]) -> dict[str, Any]:
        """Weights and moments of these collections on this rank, as a checkpoint has them."""
        weights: dict[str, Any] = {}
        with sharded_tensors_allowed():
            for path, collection in collections.items():
                weights |= collection.state_dict(prefix=f"{path}." if path else "")
            moments = self._fused(collections).state_dict()["state"]
        return {
            "model": {key: value for key, value in weights.items() if is_key_of_table(key)},
            "optimizer": {"state": {key: each for key, each in moments.items() if each}},
        }

    def _fused(self, collections: Mapping[str, Any]) -> CombinedOptimizer:
        found: list[Any] = []
        for path, collection in collections.items():
            self.model._fused_optim_impl(collection, found, path)
        return CombinedOptimizer(found)

    def _operators(self, collections: Mapping[str, Any]) -> list[tuple[Any, list[str]]]:
        """The optimizer of each fused operator of this rank, and the keys of its tables' weights."""
        return [
            (leaf, [f"{path}.{key}" if path else key for key in leaf.params])
            for path, optimizer in self._fused(collections).optimizers
            for _, leaf in optimizer.optimizers
        ]

    def _set_operators(self) -> None:
        """Give the new operators the learning rates and steps of their tables, and warn of what holds groups of the old ones.
        Raises InvalidInput where tables of one operator have several rates."""
        old, new = self._operators(self.old), self._operators(self.new)
        for leaf, keys in new:
            given = {key: self.settings[key] for key in keys if key in self.settings}  # others were copies
            for key, (group, rate, _) in given.items():
                first, (of_first, first_rate, _) = next(iter(given.items()))
                if (group, rate) != (of_first, first_rate):
                    raise InvalidInput(
                        f"{first!r} and {key!r} would be in one operator, and the fused optimizer has {of_first} for the one and "
                        f"{group} for the other; give both one learning rate"
                    )
                leaf.param_groups[0].update(group)
                leaf._emb_module.set_learning_rate(rate)
                leaf._emb_module.set_optimizer_step(max(steps for _, _, steps in given.values()))
        if len(old) != len(new) and any("initial_lr" in group for group, _, _ in self.settings.values()):
            warn(
                f"a schedule of learning rates holds the fused optimizer, whose collections that changed have {len(new)} groups "
                f"instead of {len(old)}: it would leave some groups as they are; make it anew, with its last_epoch"
            )
        groups = {id(group) for leaf, _ in old for group in leaf.param_groups}
        for each in gc.get_objects():  # TorchRec gives no way to find the wrappers of an optimizer
            if issubclass(type(each), OptimizerWrapper) and any(id(group) in groups for group in each.param_groups):
                warn(
                    f"a {type(each).__name__} wraps the fused optimizer and keeps its groups of the old plan: what it does to "
                    "their learning rates no longer reaches the collections that changed; make it anew"
                )

    # From now on

    def take(self) -> None:
        """Put the new collections where the old ones are. All ranks have them, and nothing here is expected to fail."""
        changed = {id(old): self.new[path] for path, old in self.old.items()}
        for path, old in self.old.items():
            for name in HOOKS:
                setattr(self.new[path], name, getattr(old, name))
            for module in old.modules():  # row-wise sharding makes places into position weights before each use
                if hasattr(module, "_pre_processed"):
                    module._pre_processed = False
            self.model.plan.plan[path] = self.after[path]
        for module in [*self.model.modules()]:
            for child, each in module._modules.items():
                module._modules[child] = changed.get(id(each), each)
        writable = self.model._writable_sharded_modules
        writable[:] = [changed.get(id(module), module) for module in writable]
        optimizer = self.model.fused_optimizer
        optimizer._optims[:] = self.model._init_optim(self.model.module)._optims
        optimizer.save_param_groups(optimizer.defaults["_save_param_groups"])
        self.copies.take()
        self._attach()

    def _attach(self) -> None:
        for pipeline in self.pipelines:
            pipeline.attach(self.model)
            if isinstance(pipeline, GradientAccumulationWrapper):
                pipeline._cached_ddp_modules = None  # found anew: copies have another


def _check_empty(pipeline: Any) -> None:
    """Raise UsageError for a pipeline that holds batches, or that cannot be taken off the model."""
    kind = type(pipeline).__name__
    if not all(hasattr(pipeline, name) for name in ("detach", "attach", "batches", "_pipelined_modules")):
        raise UsageError(
            f"a {kind} cannot be taken off the model (detach); leave it out if it sends no ids ahead, as TrainPipelineBase, or "
            f"{_AGAIN}"
        )
    if pipeline.batches:
        raise UsageError(
            f"the {kind} holds {len(pipeline.batches)} batches, on their way by the old plan; let it finish them: give "
            "`progress` an iterator that ends, until it raises StopIteration"
        )
    accumulates = pipeline._config.num_steps if isinstance(pipeline, GradientAccumulationWrapper) else 1
    if after := getattr(pipeline, "current_step", 0) % accumulates:
        warn(
            f"the {kind} has ended after {after} of the {accumulates} batches whose gradients it adds up: unless the last was "
            "given with is_last_batch=True, TorchRec has then stepped by gradients that are each rank's own, and dense layers "
            f"differ between ranks from now on; end iterators at multiples of {accumulates}"
        )


def _check_idle(path: str, collection: Any, pipelines: Sequence[Any]) -> None:
    """Raise UsageError where a collection has work at hand: a step, or batches of a pipeline."""
    for operator in (each for lookup in inner_of(collection)._lookups for each in lookup.modules()):
        needed = getattr(operator, "D_offsets", None)  # by FBGEMM's backward, which keeps it from the forward on
        if isinstance(needed, torch.Tensor) and cast(Any, needed)._use_count() > 1:
            raise UsageError(
                f"reshard is called inside a step: module {path!r} has run forward, and the backward is still to come; call it "
                "after the backward, and make outputs that have none under torch.no_grad, or let go of them"
            )
    known = {id(module) for pipeline in pipelines for module in pipeline._pipelined_modules}
    running = type(vars(collection).get("forward")).__module__.startswith("torchrec.")
    if collection.is_pipelined and (not pipelines or (running and id(collection) not in known)):
        raise UsageError(
            f"module {path!r} has run in a pipeline of TorchRec, which may hold batches of the old plan; give reshard "
            "pipelines=[…], all of them"
        )


def _caught(work: Callable[[], None]) -> NeuroshardError | None:
    """What went wrong, to be told to the other ranks, without frames that would hold the new shards."""
    try:
        work()
    except NeuroshardError as error:
        return error.with_traceback(None)
    except Exception as error:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return Unreachable(f"the other ranks were lost: {one_line(error)}")
        return NeuroshardError(f"{type(error).__name__}: {one_line(error)}".removesuffix(": "))
    return None


def _said(value: Mapping[str, object]) -> str:
    at = "" if value["step"] is None else f" at step {value['step']}"
    return f"plan {str(value['plan'])[:12]}{at}"
