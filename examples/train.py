"""A TorchRec trainer that follows the live plan: load it, shard with it, check the first forward, train.

    python examples/train.py --store runs/store --name ads-ranker --steps 20 --batch-size 512 --summary train.json
    python examples/train.py --store runs/store --name ads-ranker --model my_package.model:make_model
    python examples/train.py --store runs/store --name ads-ranker --checkpoints ckpt/    and again, after a crash
    python examples/train.py --store runs/store --name ads-ranker --steps 100000 --watch 60    takes new plans as they go live

It starts one gloo process for each device of the plan on this machine's CPU. Under torchrun, which sets RANK, it is one of
the ranks and starts none. What a trainer of your own needs is in `train` and `shard`; the rest is a model, made-up batches
(ids are uniform, as many a sample and table as its pooling factor says), and the starting of processes. With --model the
collections are those of your model, feature processors included, under one linear layer that reads them by key; without it they
are made after the plan's tables. Your dense part is left out, so what it makes of a plan's order of outputs is not seen here:
docs/replan.md says how it stays right.

Embedding tables of a real model do not fit a laptop, so tables are cut to fewer rows until all ranks together stay within
--memory, and within what is free here. The shards, their columns and their ranks are those of the live plan; rows that are
split stay split over their ranks.
"""

import argparse
import copy
import ctypes
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import save
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from neuroshard.client import Plan, load_plan, load_plan_on_all_ranks, watch
from neuroshard.client.checkpoint import PLAN, load_resharded, reshard, saved_plan
from neuroshard.client.model.tables import collections_of as collections_in
from neuroshard.client.model.tables import match_tables
from neuroshard.client.seen.watch import watch_plan
from neuroshard.client.torchrec import check_batches, qcomms, to_torchrec
from neuroshard.client.torchrec.shards import shards_by_table
from neuroshard.core.clean import accept_all_characters
from neuroshard.core.errors import InvalidInput, NeuroshardError, NotFound, UsageError
from neuroshard.core.table import Table
from neuroshard.core.text import agreeing, counted
from neuroshard.core.units import format_bytes, parse_bytes
from neuroshard.core.value import canonical_json
from neuroshard.files.disk import write_bytes
from neuroshard.files.importers.torchrec_model import make_on_meta
from neuroshard.progress import progress
from neuroshard.system import available_bytes, cores, fbgemm_lacks, loopback_address

# FBGEMM's fused optimizers that run on a CPU, under the names of core/table.py
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
MAX_LOCAL_RANKS = 16
RANK_BYTES = 64 * 2**20  # a rank's own memory without tables; what is imported is shared
SHARE_OF_AVAILABLE = 0.8  # others on this machine want some, too
PR_SET_PDEATHSIG = 1  # linux/prctl.h
Features = dict[str, KeyedJaggedTensor]  # by the path of the collection that looks them up
TOLERANCE = 1e-6  # a lookup, of pooled embeddings between sharded and not; 0 is what one sees where rows are whole
ROUNDING = {
    "fp32": 0.0,
    "fp16": 2**-9,
    "bf16": 2**-6,
    "int8": 2**-6,
}  # of an all-to-all, as a share of the largest value


def main() -> int:
    accept_all_characters()
    for library in ("torch", "torchrec"):  # they warn about their own workings
        logging.getLogger(library).setLevel(logging.ERROR)
    arguments = parse_arguments(sys.argv[1:])
    if "RANK" in os.environ:
        return one_line_errors(lambda: train(arguments, "env://"), f"rank {os.environ['RANK']}: ")
    return one_line_errors(lambda: launch(arguments))


def one_line_errors(work: Callable[[], None], who: str = "") -> int:
    """Do the work; an error that is not a fault of this program becomes one line, and its exit code is returned."""
    try:
        work()
    except NeuroshardError as error:
        print(f"error: {who}{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:  # gloo's are not DistErrors
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        print(f"error: {who}lost the other ranks: {reason.partition('] ')[2] or reason}", file=sys.stderr)
        return 1
    return 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="s3://bucket/prefix, or a folder")
    parser.add_argument("--name", required=True, help="the model whose live plan to follow")
    parser.add_argument("--digest", help="the published plan to follow, instead of the live one")
    parser.add_argument("--model", help="package.module:function that returns your model, to train its collections")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step over all ranks")
    parser.add_argument(
        "--memory", default="2GiB", help="most for the tables of all ranks together; more rows are cut off"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seen",
        type=int,
        metavar="STEPS",
        help="write to the store what steps took: five of so many, for `neuroshard releases --seen`",
    )
    parser.add_argument(
        "--checkpoints", type=Path, help="folder to save in, and to go on from under the plan that was saved with"
    )
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="look for a new live plan so often, and take it between two steps",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank waits for the others")
    parser.add_argument("--summary", type=Path, help="JSON file to write at the end")
    parser.set_defaults(memory_bytes=0)  # of all ranks together; 0 where each is to see for itself
    return parser.parse_args(argv)


# What a trainer of your own does


def train(arguments: argparse.Namespace, rendezvous: str) -> None:
    """One rank, from the live plan to the summary."""
    warnings.simplefilter("ignore", FutureWarning)  # torchrec's use of torch
    warnings.filterwarnings(
        "ignore", "fbgemm::dense_"
    )  # of data-parallel tables; their gradients are tested to be right
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_arguments(arguments, world_size)  # torchrun's ranks have no `launch` before them
    dist.init_process_group(
        "gloo",
        rendezvous,
        timeout=timedelta(seconds=arguments.timeout),
        rank=rank,
        world_size=world_size,
    )
    plan = plan_to_go_on(arguments, partial(load_plan_on_all_ranks, timeout_seconds=arguments.timeout))
    digest = plan.digest()
    memory = lowest_of_ranks(arguments.memory_bytes or memory_for_tables(arguments, world_size))
    whole, (plan, capped) = plan, cap_rows(plan, table_budget(memory, plan))
    collections = collections_of(arguments.model, whole, plan.task.tables)
    if rank == 0:
        print(describe(plan, digest, capped, memory, arguments), file=sys.stderr)

    torch.manual_seed(arguments.seed)
    unsharded = Model(collections, torch.device("cpu")).float()  # fused kernels sum fp16 rows in fp32
    model = shard(Model(collections, torch.device("meta")), plan, arguments)
    load_weights(model, unsharded)

    local_batch = arguments.batch_size // world_size
    features, _ = make_batch(collections, local_batch, generator_of(arguments, rank, -1))
    difference = compare_first_forward(model, unsharded, features, plan)
    del unsharded

    dense = dict(in_backward_optimizer_filter(model.named_parameters()))  # tables are updated by their own backward
    optimizer = torch.optim.SGD(dense.values(), lr=arguments.learning_rate)
    saved = latest(arguments.checkpoints)
    done = 0 if saved is None else go_on(model, saved, plan)
    if done >= arguments.steps:
        raise UsageError(f"{saved}: {done} steps are done already; give more --steps")
    losses, step_ms = [], []
    went_live = watched(arguments, digest)
    with ExitStack() as using:
        bar = using.enter_context(progress("train", arguments.steps - done, "steps")) if rank == 0 else None
        watching = None
        if arguments.seen:
            given = {"every": arguments.seen, "batch_size": arguments.batch_size}
            watching = using.enter_context(watch_plan(model, whole, arguments.store, arguments.name, **given))
        for step in range(done, arguments.steps):
            new = new_plan(arguments, went_live) if arguments.watch else None
            if new is not None and (taken := take(new, model, optimizer, memory, step, arguments)):
                whole, digest, (plan, capped) = new, new.digest(), taken
                if watching:
                    watching.now_by(whole)
            features, labels = make_batch(collections, local_batch, generator_of(arguments, rank, step))
            dist.barrier()
            began = time.perf_counter()
            logits, _ = model(features)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            dist.barrier()  # a step ends when the slowest rank is done
            step_ms.append(1000 * (time.perf_counter() - began))
            losses.append(mean_over_ranks(loss.detach()))
            if bar:
                bar.advance(1, f"loss {losses[-1]:.4f}, {step_ms[-1]:.0f} ms a step")
            if arguments.checkpoints and (step + 1) % arguments.save_every == 0:
                save(state_of(model, digest, step + 1), checkpoint_id=arguments.checkpoints / f"step-{step + 1:06}")

    embedding_ms = time_embeddings(model, features, arguments.steps)
    if rank == 0:
        summary = summarize(plan, digest, capped, arguments, difference, losses, step_ms)
        summary["embeddings"] = {
            "measured_ms": embedding_ms,
            "predicted_ms": list(whole.predicted_ms or ()),
            "predicted_batch": whole.task.global_batch_size,
            "batch": arguments.batch_size,
            "predicted_for": whole.provenance.cost_model_device or whole.provenance.cost_model,
            "ranks_here": int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            "cores_here": cores(),
        }
        print(report(summary))
        if arguments.summary:
            write_bytes(arguments.summary, canonical_json(summary))
    dist.barrier()  # over a slow network another rank may still receive
    dist.destroy_process_group()


def watched(arguments: argparse.Namespace, digest: str) -> list[str]:
    """The digests of plans that go live from now on, on rank 0, where a thread adds to them."""
    went_live: list[str] = []

    def look() -> None:
        for plan in watch(
            arguments.store,
            arguments.name,
            seen=digest,
            every_seconds=arguments.watch,
            world_size=dist.get_world_size(),
        ):
            went_live.append(plan.digest())

    if arguments.watch and dist.get_rank() == 0:
        threading.Thread(target=look, daemon=True).start()
    return went_live


def new_plan(arguments: argparse.Namespace, went_live: list[str]) -> Plan | None:
    """The plan that rank 0 has seen go live, on all ranks at the same step; None where it has seen none."""
    digest = [went_live.pop(0) if went_live else None]
    dist.broadcast_object_list(digest)
    if digest[0] is None:
        return None
    return load_plan_on_all_ranks(arguments.store, arguments.name, digest=digest[0], timeout_seconds=arguments.timeout)


def take(
    new: Plan,
    model: DistributedModelParallel,
    optimizer: torch.optim.Optimizer,
    memory: int,
    step: int,
    arguments: argparse.Namespace,
) -> tuple[Plan, tuple[str, ...]] | None:
    """Let the model be held by a new plan from this step on: the plan, and the tables that were cut. None where it cannot be."""
    plan, capped = cap_rows(new, table_budget(memory, new))
    try:
        reshard(
            model,
            plan,
            step=step,
            optimizer_of_copies=optimizer,
            batch_size=arguments.batch_size,
            any_output_order=True,  # the model reads by key
            timeout_seconds=arguments.timeout,
        )
    except InvalidInput as error:  # on all ranks alike, and nothing has changed
        said, found = f"the plan that is live now is not taken: {error}", None
    else:
        said, found = describe(plan, new.digest(), capped, memory, arguments), (plan, capped)
    if dist.get_rank() == 0:
        print(f"step {step}: {said}", file=sys.stderr)
    return found


def plan_to_go_on(arguments: argparse.Namespace, load: Callable[..., Plan]) -> Plan:
    """The plan of the latest checkpoint, so that a job that starts again trains as it did, whatever is live by now; where there
    is none, or its plan is gone from the store, the live plan. On ranks, rank 0 decides for all. Raises InvalidInput for a plan
    of groups of ranks, and what `load` raises."""
    saved = latest(arguments.checkpoints)
    digest = arguments.digest or (saved_plan(saved) if saved else None)
    try:
        plan = load(arguments.store, arguments.name, digest=digest)
    except NotFound:
        if digest is None or arguments.digest:
            raise
        plan = load(arguments.store, arguments.name)
    if plan.task.groups is not None:
        raise InvalidInput(
            f"plan {plan.digest()[:12]} of {arguments.name} is for {plan.task.groups.text(plan.task.devices)}, and this example "
            "trains one group on CPUs, where TorchRec has no DMPCollection; docs/trainer.md says how to train groups"
        )
    return plan


def latest(folder: Path | None) -> Path | None:
    """The newest checkpoint that was saved to its end; None where there is none."""
    return max((path.parent for path in folder.glob("step-*/.metadata")), default=None) if folder else None


def state_of(model: DistributedModelParallel, digest: str, step: int) -> dict[str, Any]:
    """What a checkpoint holds: weights, the optimizer of the tables, the plan's digest, and the steps done."""
    return {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
        PLAN: digest,
        "step": torch.tensor(step),
    }


def go_on(model: DistributedModelParallel, saved: Path, plan: Plan) -> int:
    """Read a checkpoint into the model, of this plan or another; the steps that were done."""
    state = state_of(model, "", 0)
    load_resharded(state, saved, new_plan=plan)
    model.fused_optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def generator_of(arguments: argparse.Namespace, rank: int, step: int) -> torch.Generator:
    """Of a rank's batch of a step, the same whether the job was started again or not."""
    return torch.Generator().manual_seed((arguments.seed * 4096 + rank) * 10**6 + step + 1)


def shard(model: nn.Module, plan: Plan, arguments: argparse.Namespace) -> DistributedModelParallel:
    """The model, each table where the plan says. Its tables may be on the meta device: only this rank's shards are made."""
    fused = {"optimizer": OPTIMIZERS[arguments.optimizer], "learning_rate": arguments.learning_rate}
    codecs = qcomms(plan, device_type="cpu")  # where the plan's all-to-alls are not in fp32
    of_bags = EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs)
    sharders: list[ModuleSharder[Any]] = [
        of_bags,
        FeatureProcessedEmbeddingBagCollectionSharder(of_bags, qcomm_codecs_registry=codecs),
        EmbeddingCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs),
    ]
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=to_torchrec(
            plan, model, device_type="cpu", sharders=sharders, batch_size=arguments.batch_size, any_output_order=True
        ),
        sharders=sharders,
    )
    return check_batches(sharded)


def load_weights(model: DistributedModelParallel, unsharded: nn.Module) -> None:
    """Copy this rank's part of every weight, as from a checkpoint."""
    weights = unsharded.state_dict()
    for name, target in model.state_dict().items():
        if not isinstance(target, ShardedTensor):
            target.copy_(weights[name])
            continue
        for part in target.local_shards():
            (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
            part.tensor.detach().copy_(weights[name][row : row + rows, column : column + columns])


def compare_first_forward(model: nn.Module, unsharded: nn.Module, features: Features, plan: Plan) -> float:
    """Largest difference of pooled embeddings between the sharded and the unsharded model, over all ranks' batches.

    Raises InvalidInput above TOLERANCE for each of a sample's lookups. Where rows are whole, the sums are the same ones in the
    same order, so it is 0 as a rule; where they are split, each rank sums up its own first. An all-to-all in another precision
    than fp32 rounds values, by a share of the largest.
    """
    with torch.no_grad():
        wanted = unsharded(features)[1]
        largest, difference = wanted.abs().max(), (model(features)[1] - wanted).abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    precision = plan.task.collective_precision
    rounding = 0.0 if precision is None else ROUNDING[precision.forward] * float(largest)
    if not difference <= TOLERANCE * max(1.0, *(table.pooling_factor for table in plan.task.tables)) + rounding:
        raise InvalidInput(
            f"the first sharded forward differs by {difference:g} from the unsharded one: shards are misplaced"
        )
    return float(difference)


def time_embeddings(model: DistributedModelParallel, features: Features, steps: int) -> list[float]:
    """Median ms of each rank, from barrier to its own end: lookups with their all-to-alls, forward and backward."""
    taken = []
    for _ in range(max(min(steps, 10), 3)):
        lookups = send_ids(model, features)
        dist.barrier()
        began = time.perf_counter()
        outputs = [values for look_up in lookups for values in look_up()]
        forward = time.perf_counter() - began
        # gradients of zeros cost as much, and change nothing; in a step they come from the dense layers
        gradients = [torch.zeros_like(each) for each in outputs]
        began = time.perf_counter()
        torch.autograd.backward(outputs, gradients)
        taken.append(1000 * (forward + time.perf_counter() - began))
    of_ranks = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, torch.tensor([statistics.median(taken)]))
    return [float(of_rank) for of_rank in of_ranks]


def send_ids(model: DistributedModelParallel, features: Features) -> list[Callable[[], list[Tensor]]]:
    """Send the ids to the ranks of their tables, as TorchRec's pipelines do while the step before runs; and what then looks them
    up, of each collection: its pooled embeddings, or the sequences of each feature."""

    def of_one(sharded: Any, ids: KeyedJaggedTensor) -> Callable[[], list[Tensor]]:
        context = sharded.create_context()
        sent = sharded.input_dist(context, ids).wait().wait()

        def look_up() -> list[Tensor]:
            found = sharded.compute_and_output_dist(context, sent).wait()
            return [each.values() for each in (found.values() if isinstance(found, dict) else [found])]

        return look_up

    return [of_one(model.module.sparse.get_submodule(path or "whole"), ids) for path, ids in features.items()]


def lowest_of_ranks(count: int) -> int:
    """The least of what the ranks say: they must cut the same tables."""
    value = torch.tensor(count, dtype=torch.int64)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


# A model, and batches for it


@dataclass(frozen=True)
class Collection:
    """One collection of the model, and the lookups that it is given."""

    path: str  # of its module
    configs: tuple[EmbeddingBagConfig | EmbeddingConfig, ...]
    weighted: bool
    lookups: dict[str, float]  # a sample, by feature
    processors: nn.Module | None = None  # of a FeatureProcessedEmbeddingBagCollection, on the meta device

    @property
    def is_of_sequences(self) -> bool:
        return not isinstance(self.configs[0], EmbeddingBagConfig)

    def module(self, device: torch.device) -> nn.Module:
        if self.is_of_sequences:
            return EmbeddingCollection(tables=list(self.configs), device=device)
        bags = EmbeddingBagCollection(tables=list(self.configs), is_weighted=self.weighted, device=device)
        if self.processors is None:
            return bags
        processors = copy.deepcopy(self.processors).to_empty(device=device)
        if device.type != "meta":
            for module in processors.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        given = dict(processors.items()) if isinstance(processors, nn.ModuleDict) else processors
        return FeatureProcessedEmbeddingBagCollection(bags, given)

    @property
    def rows(self) -> dict[str, int]:
        """Of the table that each feature looks up, the smallest where several tables are read by it."""
        rows: dict[str, int] = {}
        for config in self.configs:
            for feature in config.feature_names:
                rows[feature] = min(config.num_embeddings, rows.get(feature, config.num_embeddings))
        return rows

    @property
    def outputs(self) -> list[str]:
        """Their keys: `FEATURE@TABLE` where two tables are read by one feature."""
        return [name for names in get_embedding_names_by_table(list(self.configs)) for name in names]


def collections_of(spec: str | None, plan: Plan, tables: Sequence[Table]) -> list[Collection]:
    """Those of the model that `spec` makes, or, without one, a collection for each module that the tables name.

    The plan must be for the model; rows are those of `tables`, which may have fewer. Raises InvalidInput, UsageError.
    """
    if spec is None:
        return [
            Collection(
                path=module or ("sequences" if group[0].pooling == "none" else "weighted" if weighted else "plain"),
                configs=tuple(config_of(table) for table in group),
                weighted=weighted,
                lookups={feature: lookups for table in group for feature, lookups in lookups_of(table).items()},
            )
            for (module, weighted, _), group in grouped(tables).items()
        ]
    model = make_on_meta(spec)
    found = collections_in(model)
    places = match_tables(plan.task.tables, found, f"plan {plan.digest()[:12]}")
    of_path: dict[str, list[tuple[EmbeddingBagConfig | EmbeddingConfig, dict[str, float]]]] = {p: [] for p in found}
    for table in tables:
        path, config, _ = places[table.name]
        known = {feature.name: feature.pooling_factor for feature in table.features}
        each = table.pooling_factor / len(config.feature_names)
        lookups = {name: known.get(name, each) for name in config.feature_names}
        of_path[path].append((replace(config, num_embeddings=table.rows), lookups))
    return [
        Collection(
            path=path,
            configs=tuple(config for config, _ in of_path[path]),
            weighted=isinstance(collection, EmbeddingBagCollection) and collection.is_weighted(),
            lookups={feature: one for _, lookups in of_path[path] for feature, one in lookups.items()},
            processors=getattr(model.get_submodule(path), "_feature_processors", None),
        )
        for path, collection in found.items()
    ]


def grouped(tables: Sequence[Table]) -> dict[tuple[str, bool, bool], list[Table]]:
    """Tables by module, which takes weights or not, and those that name none by whether their lookups have weights; sequences by
    themselves."""
    takes_weights = {table.module for table in tables if table.module and table.weighted}
    groups: dict[tuple[str, bool, bool], list[Table]] = {}
    for table in tables:
        weighted = table.module in takes_weights if table.module else table.weighted
        groups.setdefault((table.module, weighted, table.pooling == "none"), []).append(table)
    return groups


def lookups_of(table: Table) -> dict[str, float]:
    """Lookups of a sample by feature. The name of a table's only feature is the table's."""
    if len(table.features) < 2:
        return {table.name: table.pooling_factor}
    return {f"{table.name}:{feature.name}": feature.pooling_factor for feature in table.features}


def config_of(table: Table) -> EmbeddingBagConfig | EmbeddingConfig:
    """Raises InvalidInput for a name that torch has no module of."""
    if "." in table.name_in_module:
        raise InvalidInput(
            f"table {table.name!r} cannot be made here: torch wants no dot in its name; give your --model"
        )
    data_types = {2: DataType.FP16, 4: DataType.FP32}
    shape = {
        "name": table.name_in_module,
        "num_embeddings": table.rows,
        "embedding_dim": table.dim,
        "feature_names": list(lookups_of(table)),
        "data_type": data_types[table.element_bytes],
    }
    if table.pooling == "none":
        return EmbeddingConfig(**shape)
    return EmbeddingBagConfig(**shape, pooling=PoolingType[table.pooling.upper()])


class Model(nn.Module):
    """Pooled embeddings of every feature, sums of sequences among them, and one linear layer over all."""

    def __init__(self, collections: Sequence[Collection], device: torch.device) -> None:
        super().__init__()
        self.sparse = nn.Module()
        for collection in collections:
            *above, name = (collection.path or "whole").split(".")
            parent = self.sparse
            for part in above:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(name, collection.module(device))
        self.outputs = {collection.path: collection.outputs for collection in collections}
        self.over = nn.Linear(
            sum(c.embedding_dim * len(c.feature_names) for collection in collections for c in collection.configs), 1
        )

    def forward(self, features: Features) -> tuple[Tensor, Tensor]:
        """Logits (batch,) and pooled embeddings (batch, columns)."""
        columns = []
        for path, names in self.outputs.items():
            embeddings = self.sparse.get_submodule(path or "whole")(features[path])
            # by key: the order of the columns in `embeddings.values()` is the plan's, not the model's
            columns += [pooled_by_sample(embeddings[name]) for name in names]
        pooled = torch.cat(columns, dim=1).float()
        return self.over(pooled).squeeze(1), pooled


def pooled_by_sample(embeddings: Tensor | JaggedTensor) -> Tensor:
    """A feature's columns of each sample (batch, dim). A model of sequences would attend to them; here they are summed."""
    if isinstance(embeddings, JaggedTensor):
        return torch.segment_reduce(embeddings.values().float(), "sum", lengths=embeddings.lengths())
    return embeddings


def make_batch(
    collections: Sequence[Collection], batch_size: int, generator: torch.Generator
) -> tuple[Features, Tensor]:
    """Uniform ids, as many a sample as the pooling factor (a fraction is a chance of one more), and labels (batch,).

    The label says whether the ids in the smallest table are, on average, in its upper half: something to learn.
    """
    smallest = min((rows, path, name) for path, c in enumerate(collections) for name, rows in c.rows.items())
    features: Features = {}
    labels = torch.zeros(batch_size)
    for place, collection in enumerate(collections):
        values, lengths = [], []
        for name, lookups in collection.lookups.items():
            rows = collection.rows[name]
            length = int(lookups) + (torch.rand(batch_size, generator=generator) < lookups % 1).int()
            ids = torch.randint(rows, (int(length.sum()),), generator=generator)
            if (rows, place, name) == smallest:
                samples = torch.repeat_interleave(torch.arange(batch_size), length)
                upper = (2 * ids + 1 > rows).float()
                labels = (labels.index_add(0, samples, upper) > length / 2).float()
            values.append(ids)
            lengths.append(length)
        ids = torch.cat(values)
        weights = 0.5 + torch.rand(len(ids), generator=generator) if collection.weighted else None
        features[collection.path] = KeyedJaggedTensor(
            keys=list(collection.lookups), values=ids, lengths=torch.cat(lengths), weights=weights
        )
    return features, labels


def cap_rows(plan: Plan, budget_bytes: int) -> tuple[Plan, tuple[str, ...]]:
    """The same shards with fewer rows in the largest tables, so that all together fit; and the tables that were cut.

    No table keeps more than some number of bytes, the same for all: the largest number that fits. What is split row-wise stays
    so, as far as there are rows. Raises UsageError where even one row a table does not fit, InvalidInput where TorchRec cannot
    hold the shards.
    """
    tables = plan.task.tables
    placed = shards_by_table(plan, "the live plan")

    def capped(cap_bytes: int) -> list[Table]:
        rows = [min(t.rows, max(1, cap_bytes // sum(t.row_bytes(t.dim)))) for t in tables]
        return [t.model_copy(update={"rows": r}) for t, r in zip(tables, rows, strict=True)]

    def total(cap_bytes: int) -> int:
        return sum(t.memory_bytes for t in capped(cap_bytes))

    if total(0) > budget_bytes:
        raise UsageError(f"{len(tables)} tables of one row need {format_bytes(total(0))}; give more --memory")
    fits, too_much = 0, max(t.memory_bytes for t in tables) + 1
    while too_much - fits > 1:
        middle = (fits + too_much) // 2
        fits, too_much = (middle, too_much) if total(middle) <= budget_bytes else (fits, middle)

    whole, small = ({table.name: table for table in some} for some in (tables, capped(fits)))
    shards = []
    for shard in plan.shards:
        row_wise = shard.rows < whole[shard.table].rows
        kept = small[shard.table]
        # the rows of a grid's part of columns are split over its own host alone
        over = [other.device for other in placed[shard.table] if other.column_offset == shard.column_offset]
        first, rows = kept.row_blocks(len(over))[over.index(shard.device)] if row_wise else (0, kept.rows)
        shards += [shard.model_copy(update={"row_offset": first, "rows": rows})] if rows else []
    return (
        Plan(
            task=plan.held.model_copy(update={"tables": tuple(small.values())}),
            shards=tuple(shards),
            provenance=plan.provenance,
        ),
        tuple(table.name for table in tables if small[table.name].rows < table.rows),
    )


def memory_for_tables(arguments: argparse.Namespace, ranks: int) -> int:
    """Bytes that all tables of all ranks may have: --memory, or what is available here if that is less. Raises UsageError."""
    available = available_bytes()
    free = int(SHARE_OF_AVAILABLE * available) - ranks * RANK_BYTES
    if free <= 0:
        raise UsageError(
            f"{format_bytes(available)} of memory are available here, too little for {ranks} ranks of "
            f"{format_bytes(RANK_BYTES)} and their tables; free some, raise the container's limit, or plan for fewer devices"
        )
    return min(parse_bytes(arguments.memory), free)


def table_budget(memory_bytes: int, plan: Plan) -> int:
    """Bytes for the shards of all ranks, which must fit together with the unsharded fp32 tables that each rank has at first."""
    growth = max(4 // table.element_bytes for table in plan.task.tables)
    return memory_bytes // (plan.task.devices * growth + 1)


# What it says


def describe(plan: Plan, digest: str, capped: Sequence[str], memory: int, arguments: argparse.Namespace) -> str:
    tables = plan.task.tables
    size = format_bytes(sum(table.memory_bytes for table in tables))
    less = memory < parse_bytes(arguments.memory)
    within = f"{format_bytes(memory)}, what is free here" if less else arguments.memory
    cut = (
        f"; {agreeing(len(capped), 'larger table', 'was', 'were')} cut to fewer rows ({', '.join(capped)})"
        if capped
        else ""
    )
    return (
        f"plan {digest[:12]} of {arguments.name}: {counted(len(tables), 'table')} in {counted(len(plan.shards), 'shard')} on "
        f"{counted(plan.task.devices, 'gloo rank')} of this CPU, {size} of tables to stay within {within}{cut}"
    )


def summarize(
    plan: Plan,
    digest: str,
    capped: Sequence[str],
    arguments: argparse.Namespace,
    difference: float,
    losses: Sequence[float],
    step_ms: Sequence[float],
) -> dict[str, Any]:
    """What --summary writes. Times are measured on this machine's CPU, steps from barrier to barrier."""
    quarters = statistics.quantiles(step_ms, n=4) if len(step_ms) > 1 else [step_ms[0]] * 3
    return {
        "model": arguments.name,
        "plan_digest": digest,
        "backend": "cpu, gloo",
        "world_size": plan.task.devices,
        "tables": len(plan.task.tables),
        "shards": len(plan.shards),
        "table_bytes": sum(table.memory_bytes for table in plan.task.tables),
        "capped_tables": list(capped),
        "batch_size": arguments.batch_size,
        "optimizer": arguments.optimizer,
        "steps": arguments.steps,
        "first_forward_max_abs_difference": difference,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "step_ms_median": statistics.median(step_ms),
        "step_ms_spread": (quarters[2] - quarters[0]) / 2,
        "step_ms": list(step_ms),
    }


def report(summary: dict[str, Any]) -> str:
    return (
        f"first forward: differs by {summary['first_forward_max_abs_difference']:g} from the unsharded tables\n"
        f"loss: {summary['first_loss']:.4f} -> {summary['last_loss']:.4f} in {summary['steps']} steps of "
        f"{summary['batch_size']} samples, {summary['optimizer']}\n"
        f"step: median {summary['step_ms_median']:.1f} ms, spread {summary['step_ms_spread']:.1f} ms, measured on "
        f"{summary['world_size']} ranks ({summary['backend']})\n" + embeddings(**summary["embeddings"])
    )


def embeddings(
    measured_ms: Sequence[float],
    predicted_ms: Sequence[float],
    predicted_for: str | None,
    predicted_batch: int,
    batch: int,
    ranks_here: int,
    cores_here: int,
) -> str:
    """A line of each rank's milliseconds, as predicted and as measured here; and one on why they differ, if that is known.

    Predictions for another batch are of other work, and are left out.
    """
    measured = " ".join(f"{ms:.1f}" for ms in measured_ms)
    why = ""
    if not predicted_ms:
        predicted = "no prediction"
    elif predicted_batch != batch:
        predicted = f"the plan's predictions are for steps of {predicted_batch:,} samples, not {batch:,}"
    else:
        predicted = f"predicted {' '.join(f'{ms:.1f}' for ms in predicted_ms)} ms on {predicted_for}"
        if ranks_here > cores_here:
            why = f"\n  ({ranks_here} ranks share {cores_here} cores here; predictions are for ranks with cores of their own)"
    return f"embeddings by rank: measured {measured} ms here; {predicted}{why}"


# One process a rank


def launch(arguments: argparse.Namespace) -> None:
    """Start a process a rank and wait. One that fails ends them all. Raises UsageError, NeuroshardError."""
    plan = plan_to_go_on(arguments, load_plan)
    arguments.digest = plan.digest()  # for the ranks, whatever is live by the time that they load
    world_size = plan.task.devices
    arguments.memory_bytes = memory_for_tables(arguments, world_size)  # once for all: what is free changes
    cap_rows(plan, table_budget(arguments.memory_bytes, plan))  # an error is said once here, not by every rank
    if world_size > MAX_LOCAL_RANKS:
        raise UsageError(
            f"the plan is for {world_size} ranks, more than the {MAX_LOCAL_RANKS} to start here; use torchrun"
        )
    check_arguments(arguments, world_size)
    linux = sys.platform == "linux"
    if linux and "GLOO_SOCKET_IFNAME" not in os.environ and not loopback_address():
        raise NeuroshardError(
            "the loopback interface is down, and the ranks talk over it; bring it up (ip link set lo up), or name another "
            "one in GLOO_SOCKET_IFNAME"
        )
    # a fork shares what is imported, and nothing of torch has run yet; elsewhere than on Linux it is not safe
    start = multiprocessing.get_context("fork").Process if linux else multiprocessing.get_context("spawn").Process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            start(target=run_rank, args=(arguments, rank, world_size, f"file://{folder}/rendezvous", os.getpid()))
            for rank in range(world_size)
        ]
        try:
            start_all(ranks)
            wait_for_all(ranks)
        finally:
            for process in ranks:
                if process.pid is not None:  # it was started
                    process.kill()
                    process.join()


def check_arguments(arguments: argparse.Namespace, world_size: int) -> None:
    """Raise UsageError unless there are steps, and a batch that the ranks can share; NeuroshardError where FBGEMM cannot run."""
    if arguments.steps < 1 or arguments.batch_size < world_size or arguments.batch_size % world_size:
        raise UsageError(
            f"--steps {arguments.steps} --batch-size {arguments.batch_size}: give at least one step, and a batch that "
            f"{world_size} ranks can share evenly"
        )
    if lacks := fbgemm_lacks():
        raise NeuroshardError(lacks)


def start_all(ranks: Sequence[BaseProcess]) -> None:
    """Start the ranks. Raises NeuroshardError where the system allows no more processes."""
    try:
        for process in ranks:
            process.start()
    except OSError as error:
        raise NeuroshardError(
            f"no process can be started for one of {len(ranks)} ranks: {error.strerror}; raise the limit on processes "
            "(ulimit -u), or plan for fewer devices"
        ) from None


def run_rank(arguments: argparse.Namespace, rank: int, world_size: int, rendezvous: str, parent: int) -> None:
    """One rank, in its own process, in the environment that torchrun would give it."""
    end_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first ends the others
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.setdefault(
        "LOCAL_WORLD_SIZE", str(world_size)
    )  # a smaller one makes believe that there are several hosts
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sys.exit(one_line_errors(lambda: train(arguments, rendezvous), f"rank {rank}: "))


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent is killed: a rank that waits for others would stay (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def wait_for_all(ranks: Sequence[BaseProcess]) -> None:
    """Return when all ranks ended well. Raises NeuroshardError as soon as one did not."""
    running = dict(enumerate(ranks))
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running.values()])
        for rank, process in list(running.items()):
            code = process.exitcode
            if code:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise NeuroshardError(f"rank {rank} died ({how}); the run is ended")
            if code == 0:
                del running[rank]


if __name__ == "__main__":
    sys.exit(main())
