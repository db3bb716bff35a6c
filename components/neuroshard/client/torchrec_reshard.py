"""A new plan for a model that trains, without a restart. Needs torch and torchrec.

    reshard(model, plan, step=step, batch_size=65536)  # on every rank, between two steps

Collections that the new plan holds otherwise are sharded anew, and their weights and optimizer state go from the old shards to
the new ones through host memory, by the planner that reads checkpoints of other plans (client/torchrec_optimizer.py). The old
collections stay whole until all ranks have the new ones, so an error leaves the model as it was.

TorchRec's own DistributedModelParallel.reshard (1.8) is not used. Read and tried: it is for EmbeddingBagCollection only, for
whole and column-wise tables whose sharding type stays, and moves one moment; column boundaries that move on the same ranks are
dropped, and a rank that fails leaves the others half way. On gloo its messages have Python's hashes of table names as tags,
which differ from process to process unless PYTHONHASHSEED is set.
"""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.train_pipeline.gradient_accumulation import GradientAccumulationWrapper
from torchrec.distributed.types import ShardingType
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper

from neuroshard.client.ranks import TIMEOUT_SECONDS, Words, parts_of, prefix_of, share
from neuroshard.client.torchrec import to_torchrec
from neuroshard.client.torchrec_between import Held, NewTable, held, local_tensors, shortage
from neuroshard.client.torchrec_copies import CopiesOptimizer, Parameters
from neuroshard.client.torchrec_in_memory import InMemory
from neuroshard.client.torchrec_module import HOOKS, collections_of, match_tables
from neuroshard.client.torchrec_optimizer import fault_of, is_key_of_table, load_resharded
from neuroshard.client.torchrec_order import SHARDED_MAPPED, inner_of, keep_output_order, output_order
from neuroshard.client.torchrec_pipelines import check_pipeline
from neuroshard.client.torchrec_unsharded import holders_of, sharded_collections, unsharded
from neuroshard.client.torchrec_warnings import sharded_tensors_allowed, warn
from neuroshard.core.errors import InvalidInput, NeuroshardError, Unreachable, UsageError
from neuroshard.core.plan import Plan, check_plan
from neuroshard.core.text import one_line
from neuroshard.core.value import canonical_json

__all__ = ["reshard"]

# By the group of a model. One that a call has failed in is of no use. It is not destroyed: torch would give its name to the next,
# which would then find the addresses of this one in the key-value store.
_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()
State = dict[str, Any]
Place = tuple[str, str]  # of a table: the path of its collection, and its name there


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
    job.agree("", lambda: job.prepare(how))
    if not job.old:
        return ()
    before = output_order(model)
    inexact = job.move()
    job.take()
    if not any_output_order:
        keep_output_order(model, before)
    return inexact


class _Settings(NamedTuple):
    """What an operator has beside the state of its rows."""

    group: dict[str, Any]  # of the fused optimizer
    learning_rate: float
    steps: int


class _Job:
    """One call of `reshard` on one rank: what the new plan holds otherwise, and the way there."""

    def __init__(
        self,
        model: DistributedModelParallel,
        plan: Plan,
        step: int | None,
        copies: CopiesOptimizer,
        pipelines: Sequence[Any],
        timeout_seconds: float,
    ) -> None:
        self.model: Any = model
        self.plan, self.step, self.copies = plan, step, copies
        self.pipelines, self.timeout_seconds = pipelines, timeout_seconds
        self.group, self.key_value, self.rank, self.ranks = parts_of(self.model._env.process_group, "reshard")
        self.old: dict[str, Any] = {}  # collections that change, by path
        self.new: dict[str, Any] = {}

    def agree(self, work: str, check: Callable[[], None], work_seconds: float = 0.0) -> None:
        """Return once all ranks are here with the same plan and step, after the same `work`, and `check` has passed on each.
        Raises the same error on all. Other ranks wait for rank 0 `work_seconds` longer."""
        value = {"plan": self.plan.digest(), "step": self.step, "work": work}
        name = f"the state of {_said(value)}" if work else _said(value)

        def compare(of_first: Mapping[str, object], data: bytes) -> None:
            if data != mine:
                raise InvalidInput(
                    f"reshard is called for {_said(value)}, and on rank 0 for {_said(of_first)}; call it on all ranks after "
                    "the same step, with the same plan"
                )
            try:
                check()
            except NeuroshardError:
                raise
            except Exception as error:  # no rank must wait for this one
                raise NeuroshardError(f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")) from error

        mine = canonical_json(value)
        share(
            self.key_value,
            self.rank,
            self.ranks,
            lambda: (value, mine),
            _parsed,
            compare,
            prefix=prefix_of(self.group, "reshard"),
            words=Words("new plan", lambda _: name, "reshard", "has"),
            load_seconds=work_seconds,
            timeout_seconds=self.timeout_seconds,
        )

    # Before anything changes

    def prepare(self, how: Mapping[str, Any]) -> None:
        """Find the collections that the plan holds otherwise. Raises InvalidInput or UsageError for what cannot be done."""
        whose = f"plan {self.plan.digest()[:12]}"
        if self.plan.task.groups is not None:
            raise InvalidInput(
                f"{whose} is for {self.plan.task.groups.text(self.plan.task.devices)}, and the model is one group; start again "
                "by the plan, with DMPCollection"
            )
        if by_access := self.plan.held.constraints.rows_by_access:
            raise InvalidInput(
                f"table {next(iter(by_access))!r} is held by access in {whose}, and reshard cannot move such tables; start "
                "again by the plan from a checkpoint"
            )
        if self.model.model_trackers or self.model._env.output_dtensor:
            what = (
                "trackers (model_tracker_configs)"
                if self.model.model_trackers
                else "state in DTensors (output_dtensor)"
            )
            raise InvalidInput(
                f"the model has {what}, which reshard cannot keep; start again by the plan from a checkpoint"
            )
        collections = sharded_collections(self.model)
        for pipeline in self.pipelines:
            self._check_empty(pipeline)
        for path, collection in collections.items():
            self._check_idle(path, collection)
        self.unsharded = unsharded(self.model, collections)
        given = {"device_type": self.model.device.type, "world_size": self.ranks, **how, "any_output_order": True}
        self.after = to_torchrec(self.plan, self.unsharded, **{**given, "sharders": self.model.sharders}).plan
        self.before = {path: inner_of(collection).module_sharding_plan for path, collection in collections.items()}
        self.old = {path: each for path, each in collections.items() if self.before[path] != dict(self.after[path])}
        if mapped := [path for path, each in self.old.items() if isinstance(each, SHARDED_MAPPED)]:
            raise InvalidInput(
                f"{whose} holds module {mapped[0]!r} with another kernel than now, and reshard leaves tables that give rows to "
                "ids as they train (managed collisions) where they are; start again by the plan from a checkpoint"
            )
        self.places = {
            (place.path, place.config.name): (name, place.config)
            for name, place in match_tables(self.plan.task.tables, collections_of(self.unsharded), whose).items()
            if place.path in self.old
        }
        self.copies.check(_copied_parameters(self.old), self._copied(self.after))
        for pipeline in self.pipelines:
            check_pipeline(self.plan, pipeline)

    @staticmethod
    def _check_empty(pipeline: Any) -> None:
        """Raise UsageError for a pipeline that holds batches, or that cannot be taken off the model."""
        kind = type(pipeline).__name__
        if not all(hasattr(pipeline, name) for name in ("detach", "attach", "batches", "_pipelined_modules")):
            raise UsageError(
                f"a {kind} cannot be taken off the model (detach); leave it out if it sends no ids ahead, as "
                "TrainPipelineBase, or start again by the plan from a checkpoint"
            )
        if pipeline.batches:
            raise UsageError(
                f"the {kind} holds {len(pipeline.batches)} batches, on their way by the old plan; let it finish them: give "
                "`progress` an iterator that ends, until it raises StopIteration"
            )
        accumulates = pipeline._config.num_steps if isinstance(pipeline, GradientAccumulationWrapper) else 1
        if after := getattr(pipeline, "current_step", 0) % accumulates:
            warn(
                f"the {kind} has ended after {after} of the {accumulates} batches whose gradients it adds up: unless the last "
                "one was given with is_last_batch=True, TorchRec has then stepped by gradients that are each rank's own, and "
                f"dense layers differ between ranks from now on; end iterators at multiples of {accumulates}"
            )

    def _check_idle(self, path: str, collection: Any) -> None:
        """Raise UsageError where a collection has work at hand: a step, or batches of a pipeline."""
        for operator in (each for lookup in inner_of(collection)._lookups for each in lookup.modules()):
            needed = getattr(operator, "D_offsets", None)  # by FBGEMM's backward, which keeps it from the forward on
            if isinstance(needed, torch.Tensor) and cast(Any, needed)._use_count() > 1:
                raise UsageError(
                    f"reshard is called inside a step: module {path!r} has run forward, and the backward is still to come; call "
                    "it after the backward, and make outputs that have none under torch.no_grad, or let go of them"
                )
        if not collection.is_pipelined:
            return
        known = {id(module) for pipeline in self.pipelines for module in pipeline._pipelined_modules}
        running = type(vars(collection).get("forward")).__module__.startswith("torchrec.")
        if not self.pipelines or (running and id(collection) not in known):
            raise UsageError(
                f"module {path!r} has run in a pipeline of TorchRec, which may hold batches of the old plan; give reshard "
                "pipelines=[…], all of them"
            )

    def _copied(self, plans: Mapping[str, Any]) -> set[Place]:
        """The tables of collections that change of which every rank has a copy."""
        return {
            (path, name)
            for path in self.old
            for name, parameter in plans[path].items()
            if parameter.sharding_type == ShardingType.DATA_PARALLEL.value
        }

    # The new collections, beside the old ones

    def move(self) -> tuple[str, ...]:
        """Make the new collections, with the state of the old ones, on all ranks or on none. The model has the old ones still."""
        turned = self._copied(self.before) ^ self._copied(self.after)
        memory: InMemory | None = None
        inexact: set[str] = set()

        # what only this rank can fail in comes before what ranks wait for each other in
        def look() -> None:
            for pipeline in self.pipelines:
                pipeline.detach()
            self.state = self._state(self.old)
            self.taken = self._take_out(self.state, turned)
            self.settings = self._settings()
            self.held = held(self.model.device, self.state)

        def read() -> None:
            nonlocal memory
            memory = InMemory(_gloo(self.group, self.timeout_seconds))
            every = _gathered((self.taken, self.settings, self.held), memory)
            for taken, settings, _ in every:
                inexact.update(taken)  # of copies from now on, which every rank has
                self.settings |= settings
            self._check_memory([held for _, _, held in every], turned)
            with sharded_tensors_allowed():
                save(self.state, storage_writer=memory, process_group=memory.group)
            memory.share_metadata()

        def make() -> None:
            assert memory is not None
            memory.moved.free()
            self._make()

        def write() -> None:
            assert memory is not None
            state = self._state(self.new)
            inexact.update(self._take_out(state, turned))
            inexact.update(
                load_resharded(
                    state, "in memory", new_plan=self._plan_of_old(), storage_reader=memory, group=memory.group
                )
            )
            self._set(self.settings)
            self._warn_of_wrappers()
            self.copies.prepare(_copied_parameters(self.new), {place: self._key(place) for place in self.places})

        try:
            for work in (look, read, make, write):
                failed = _caught(work)
                self.agree(work.__name__, partial(_raise, failed), work_seconds=self.timeout_seconds)
        except BaseException as error:
            self.new = {}
            state = self._restored(memory)
            if isinstance(error, NeuroshardError):
                raise type(error)(f"{error}; {state}") from None
            raise
        return tuple(sorted(inexact))

    def _restored(self, memory: InMemory | None) -> str:
        """Bring the old shards back to the device; what the model is then, for people."""
        self._attach()
        _groups.pop(self.group, None)
        try:
            if memory is not None:
                memory.moved.bring_back()
        except Exception as lost:
            return (
                f"and the old shards cannot be brought back on rank {self.rank} ({one_line(lost)}), so this model is of no use; "
                "start all ranks again from a checkpoint"
            )
        return "the model is as it was"

    def _make(self) -> None:
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
        options = self.group._get_backend(self.model.device).options
        before = options._timeout
        distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_seconds), self.group)
        try:
            yield
        finally:
            distributed_c10d._set_pg_timeout(before, self.group)

    def _state(self, collections: Mapping[str, Any]) -> State:
        """Weights and moments of these collections on this rank, as a checkpoint has them."""
        weights: State = {}
        for path, collection in collections.items():
            whole = collection.state_dict(prefix=f"{path}." if path else "")
            weights |= {key: value for key, value in whole.items() if is_key_of_table(key)}
        moments = self._fused(collections).state_dict()["state"]
        return {"model": weights, "optimizer": {"state": {key: each for key, each in moments.items() if each}}}

    def _fused(self, collections: Mapping[str, Any]) -> CombinedOptimizer:
        found: list[Any] = []
        for path, collection in collections.items():
            self.model._fused_optim_impl(collection, found, path)
        return CombinedOptimizer(found)

    def _take_out(self, state: State, tables: set[Place]) -> set[str]:
        """Take the moments of these tables out of a state; the names, in the plan, of those that have any here."""
        found, moments = set(), state["optimizer"]["state"]
        for place in tables:
            taken = moments.pop(self._key(place), {})
            if any(tensor.numel() for value in taken.values() for tensor in local_tensors(value)):
                found.add(self.places[place][0])
        return found

    def _key(self, place: Place) -> str:
        """The key of a table's weight in the state of the model."""
        path, name = place
        return ".".join(part for part in (path, *holders_of(self.old[path])[0], name, "weight") if part)

    def _settings(self) -> dict[str, _Settings]:
        """Of the operator of each table of this rank, by the key of the table's weight."""
        return {
            key: _Settings(
                {name: value for name, value in leaf.param_groups[0].items() if name != "params"},
                leaf._emb_module.get_learning_rate(),
                int(leaf._emb_module.iter),
            )
            for leaf, keys in self._operators(self.old)
            for key in keys
        }

    def _operators(self, collections: Mapping[str, Any]) -> Iterator[tuple[Any, list[str]]]:
        """The optimizer of each fused operator of this rank, and the keys of its tables' weights."""
        for path, optimizer in self._fused(collections).optimizers:
            for _, leaf in optimizer.optimizers:
                yield leaf, [f"{path}.{key}" if path else key for key in leaf.params]

    def _set(self, settings: Mapping[str, _Settings]) -> None:
        """Give the new operators the learning rates and steps of their tables. Raises InvalidInput where tables of one operator
        have several rates."""
        groups = 0
        for leaf, keys in self._operators(self.new):
            groups += 1
            given = {key: settings[key] for key in keys if key in settings}
            if not given:  # they were copies
                continue
            first, one = next(iter(given.items()))
            for key, other in given.items():
                if one[:2] != other[:2]:
                    raise InvalidInput(
                        f"{first!r} and {key!r} would be in one operator, and the fused optimizer has {one.group} for the one "
                        f"and {other.group} for the other; give both one learning rate"
                    )
            leaf.param_groups[0].update(one.group)
            leaf._emb_module.set_learning_rate(one.learning_rate)
            leaf._emb_module.set_optimizer_step(max(each.steps for each in given.values()))
        before = sum(1 for _ in self._operators(self.old))
        if groups != before and any("initial_lr" in each.group for each in settings.values()):
            warn(
                f"a schedule of learning rates holds the fused optimizer, whose collections that changed have {groups} groups "
                f"instead of {before}: it would leave some groups as they are; make it anew, with its last_epoch"
            )

    def _warn_of_wrappers(self) -> None:
        """Warn of wrappers of the fused optimizer, which TorchRec gives no way to find: they keep the groups that it had."""
        groups = {id(group) for leaf, _ in self._operators(self.old) for group in leaf.param_groups}
        for each in gc.get_objects():
            if issubclass(type(each), OptimizerWrapper) and any(id(group) in groups for group in each.param_groups):
                kind = type(each).__name__
                warn(
                    f"a {kind} wraps the fused optimizer and keeps its groups of the old plan: what it does to their learning "
                    "rates no longer reaches the collections that changed; make it anew"
                )

    def _plan_of_old(self) -> Plan:
        """The plan of the tables in collections that change alone, which the new shards are compared with."""
        names = {name for name, _ in self.places.values()}
        task, shards = self.plan.held, tuple(shard for shard in self.plan.shards if shard.table in names)
        task = task.model_copy(update={"tables": tuple(table for table in task.tables if table.name in names)})
        return self.plan.named.model_copy(update={"task": task, "shards": shards})

    def _check_memory(self, ranks: Sequence[Held], turned: set[Place]) -> None:
        """Raise InvalidInput, the same on all ranks, where memory is short for what is needed in between."""
        was_copied = turned & self._copied(self.before)
        new = {
            self._key((path, name)): NewTable(
                self.after[path][name], config.num_embeddings, config.embedding_dim, (path, name) in was_copied
            )
            for (path, name), (_, config) in self.places.items()
        }
        if short := shortage(ranks, new):
            raise InvalidInput(short)

    # From now on

    def take(self) -> None:
        """Put the new collections where the old ones are. All ranks have them, and nothing here is expected to fail."""
        for path, old in self.old.items():
            new = self.new[path]
            for name in HOOKS:
                setattr(new, name, getattr(old, name))
            for module in old.modules():
                if hasattr(
                    module, "_pre_processed"
                ):  # position weights: whether row-wise sharding made places into weights
                    module._pre_processed = False  # it does so before each use
            for module in [*self.model.modules()]:
                for child in [name for name, each in module._modules.items() if each is old]:
                    module._modules[child] = new
            self.model.plan.plan[path] = self.after[path]
        changed = {id(old): new for old, new in zip(self.old.values(), self.new.values(), strict=True)}
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


def _copied_parameters(collections: Mapping[str, Any]) -> Parameters:
    """The parameters of copied tables, by place."""
    return {
        (path, name): cast(nn.Parameter, holders_of(collection)[1][name].weight)
        for path, collection in collections.items()
        for name, parameter in inner_of(collection).module_sharding_plan.items()
        if parameter.sharding_type == ShardingType.DATA_PARALLEL.value
    }


def _gloo(group: dist.ProcessGroup, seconds: float) -> dist.ProcessGroup:
    """A gloo group of the ranks of a group, since what is sent is in host memory. Its collectives end within the time."""
    if group not in _groups:
        ranks = dist.get_process_group_ranks(group)
        _groups[group] = dist.new_group(ranks, timedelta(seconds=seconds), "gloo", use_local_synchronization=True)
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), _groups[group])
    return _groups[group]


def _gathered(mine: Any, memory: InMemory) -> list[Any]:
    """What every rank has."""
    every: list[Any] = [None] * dist.get_world_size(memory.group)
    dist.all_gather_object(every, mine, group=memory.group)
    return every


def _caught(work: Callable[[], None]) -> Exception | None:
    """What went wrong, to be told to the other ranks."""
    try:
        work()
    except CheckpointException as error:
        return NeuroshardError(fault_of("the old state", error))
    except Exception as error:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return Unreachable(f"the other ranks were lost: {one_line(error)}")
        return error.with_traceback(None)  # whose frames would hold the new shards
    return None


def _raise(failed: Exception | None) -> None:
    if failed is not None:
        raise failed


def _said(value: Mapping[str, object]) -> str:
    at = "" if value["step"] is None else f" at step {value['step']}"
    return f"plan {str(value['plan'])[:12]}{at}"


def _parsed(data: bytes) -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads(data)
    return found
