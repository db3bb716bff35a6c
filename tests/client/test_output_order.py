"""The order of outputs of real sharded modules (gloo): for drawn plans as core/output_order.py says, and kept."""

import copy
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward
from torchrec.distributed.train_pipeline.tracing import Tracer
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from helpers.gloo import on_ranks
from helpers.plans import row_wise
from helpers.refusals import refused
from helpers.sharded import local_parts, sharders_of
from helpers.sharded import sharded as sharded_by
from helpers.step_cases import Batch
from neuroshard.client.model.order import keep_output_order, output_order
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.output_order import output_orders
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.files.importers.torchrec_tables import tables_of

pytestmark = pytest.mark.slow

STEPS, LEARNING_RATE = 4, 0.5
ROWS, DIM, LOCAL_BATCH, LONGEST, HOST = 16, 16, 3, 4, 2
KINDS = ("pooled", "pooled", "weighted", "sequences", "processed")
OF_POOLED = ("whole", "whole", "columns", "uneven", "rows", "copies", "host rows", "grid")
OF_SEQUENCES = ("whole", "whole", "halves", "rows")
PLANS = {2: 20, 4: 20}  # by number of ranks


class Model(nn.Module):
    """Collections, and what they return of a batch."""

    def __init__(self, kinds: dict[str, str], configs: dict[str, list[Any]], device: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.parts = nn.ModuleDict({name: self.collection(kinds[name], configs[name], device) for name in kinds})

    @staticmethod
    def collection(kind: str, configs: list[Any], device: str) -> nn.Module:
        if kind == "sequences":
            return EmbeddingCollection(tables=configs, device=torch.device(device))
        weighted = kind in ("weighted", "processed")
        bags = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device(device))
        if kind != "processed":
            return bags
        features = {name: PositionWeightedModule(LONGEST) for config in configs for name in config.feature_names}
        return FeatureProcessedEmbeddingBagCollection(bags, features)

    def forward(self, features: dict[str, KeyedJaggedTensor]) -> dict[str, Any]:
        return {name: part(features[name]) for name, part in self.parts.items()}


def drawn_model(rng: random.Random) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """The kinds and configs of some collections. Tables have one feature or several, and may share some."""
    kinds = {f"m{module}": rng.choice(KINDS) for module in range(rng.randint(1, 3))}
    configs: dict[str, list[Any]] = {}
    for module, kind in kinds.items():
        names = [f"{module}f{number}" for number in range(8)]
        count = rng.randint(2, 6)
        for number in rng.sample(range(10), count):
            shape = {
                "name": f"{module}t{number}",
                "num_embeddings": ROWS,
                "embedding_dim": DIM,
                "feature_names": rng.sample(names, rng.choice([1, 1, 2, 3])),
                "data_type": rng.choice([DataType.FP32, DataType.FP16]) if kind == "pooled" else DataType.FP32,
            }
            if kind == "sequences":
                configs.setdefault(module, []).append(EmbeddingConfig(**shape))
            else:
                pooling = PoolingType.SUM if kind != "pooled" else rng.choice([PoolingType.SUM, PoolingType.MEAN])
                configs.setdefault(module, []).append(EmbeddingBagConfig(**shape, pooling=pooling))
    return kinds, configs


def drawn_plan(rng: random.Random, kinds: dict[str, str], configs: dict[str, list[Any]], ranks: int) -> Plan:
    """Tables of a model in every way that TorchRec knows; their means not row-wise, which it computes wrongly."""
    tables: list[Table] = []
    for module, kind in kinds.items():
        of_module = tables_of(configs[module], weighted=kind in ("weighted", "processed"))
        tables += [table.model_copy(update={"module": f"parts.{module}"}) for table in of_module]
    shards, copied = [], []
    for table in tables:
        how = rng.choice(OF_SEQUENCES if table.pooling == "none" else OF_POOLED[: 5 if rng.random() < 0.5 else None])
        if (how in ("host rows", "grid") and (ranks == HOST or table.pooling == "mean")) or (
            how == "rows" and table.pooling == "mean"
        ):
            how = "columns"
        shards += drawn_shards(rng, table, how, ranks)
        copied += [table.name] if how == "copies" else []
    task = ShardingTask(
        tables=tuple(tables),
        device_memory_bytes=(2**20,) * ranks,
        batch_size=LOCAL_BATCH * ranks,
        constraints=Constraints(tables=tuple(TableRule(table=name, data_parallel=True) for name in copied)),
    )
    return Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def drawn_shards(rng: random.Random, table: Table, how: str, ranks: int) -> list[Shard]:
    def blocks(first_rank: int, width: int, column: int) -> list[Shard]:
        return [
            Shard(
                table=table.name, row_offset=first, rows=rows, column_offset=column, dim=width, device=first_rank + rank
            )
            for rank, (first, rows) in enumerate(table.row_blocks(HOST))
        ]

    if how == "rows":
        return list(row_wise(table, ranks))
    if how == "copies":
        return [Shard(table=table.name, rows=ROWS, dim=DIM, device=rank) for rank in range(ranks)]
    if how == "host rows":
        return blocks(HOST * rng.randrange(ranks // HOST), DIM, 0)
    if how == "grid":
        hosts = rng.sample(range(ranks // HOST), 2)
        return [shard for place, host in enumerate(hosts) for shard in blocks(HOST * host, DIM // 2, place * DIM // 2)]
    widths = {"whole": [16], "halves": [8, 8], "columns": [4, 4, 4, 4], "uneven": [4, 12]}[how]
    on = rng.sample(range(ranks), 2) if how == "uneven" else [rng.randrange(ranks) for _ in widths]
    return [
        Shard(table=table.name, rows=ROWS, column_offset=sum(widths[:place]), dim=width, device=rank)
        for place, (width, rank) in enumerate(zip(widths, on, strict=True))
    ]


def drawn_batch(kinds: dict[str, str], configs: dict[str, list[Any]], seed: int) -> dict[str, KeyedJaggedTensor]:
    generator, features = torch.Generator().manual_seed(seed), {}
    for module, kind in kinds.items():
        keys = sorted({name for config in configs[module] for name in config.feature_names})
        lengths = torch.randint(1, LONGEST, (len(keys) * LOCAL_BATCH,), generator=generator)
        ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
        weights = 0.5 + torch.rand(len(ids), generator=generator) if kind in ("weighted", "processed") else None
        features[module] = KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, weights=weights)
    return features


def sharded(model: nn.Module, plan: Plan, learning_rate: float = 0.0) -> Any:
    return sharded_by(model, to_torchrec(plan, model, any_output_order=True), sharders_of("sgd", learning_rate))


def copy_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """This rank's part of every weight; by key, so that tables and dense layers alike."""
    for name, place, part in local_parts(model.state_dict()):
        part.copy_(weights[name][place])


def shown(output: Any) -> tuple[list[str], Tensor]:
    """An output's keys in order, and its values in that order."""
    output = LazyAwaitable._wait_async(output)
    if isinstance(output, dict):
        return list(output), torch.cat([jagged.values().flatten() for jagged in output.values()])
    return list(output.keys()), output.values()


def compare(rank: int, ranks: int) -> list[str]:
    """What is wrong with drawn plans, in words."""
    warnings.simplefilter("ignore")
    rng, faults, changed = random.Random(ranks), [], 0
    for number in range(PLANS[ranks]):
        kinds, configs = drawn_model(rng)
        plan = drawn_plan(rng, kinds, configs, ranks)
        torch.manual_seed(number)
        unsharded = Model(kinds, configs, "cpu")
        batch = drawn_batch(kinds, configs, rank)
        own = {name: shown(output) for name, output in unsharded(batch).items()}
        unsharded_order, weights = output_order(unsharded), copy.deepcopy(unsharded.state_dict())
        model = sharded(unsharded, plan)
        copy_weights(model, weights)
        before, recorded = list(model.state_dict()), output_order(model)
        found = {name: shown(output) for name, output in model(batch).items()}
        keep_output_order(model)
        lazy = model(drawn_batch(kinds, configs, rank))
        kept = {name: shown(output) for name, output in lazy.items()}
        for name in kinds:
            keys = dict(zip([c.name for c in configs[name]], get_embedding_names_by_table(configs[name]), strict=True))
            predicted = [key for table in output_orders(plan, plan.task.tables)[f"parts.{name}"] for key in keys[table]]
            what = f"plan {number}, {name} ({kinds[name]})"
            changed += found[name][0] != own[name][0]
            if predicted != found[name][0] or recorded[f"parts.{name}"] != found[name][0]:
                faults.append(f"{what}: {predicted} and {recorded} instead of {found[name][0]}")
            if kept[name][0] != own[name][0] or not torch.allclose(kept[name][1], own[name][1], atol=2e-3):
                faults.append(f"{what}: kept {kept[name][0]} of {own[name][0]}")
            if not isinstance(lazy[name], LazyAwaitable):
                faults.append(f"{what}: not lazy")
        if output_order(model) != unsharded_order or list(model.state_dict()) != before:
            faults.append(f"plan {number}: {output_order(model)} of {unsharded_order}, or other keys of the state")
    assert changed > PLANS[ranks] / 4
    return faults


@pytest.mark.parametrize("ranks", PLANS)
def test_the_order_is_known_from_the_plan_and_can_be_kept(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(HOST))
    for faults in on_ranks(ranks, tmp_path, compare, ranks):
        assert faults == []


@torch.fx.wrap
def sums_of(sequences: Any) -> Tensor:
    """The sums of sequences, one beside the other."""
    each = [torch.segment_reduce(of.values(), "sum", lengths=of.lengths()) for of in sequences.values()]
    return torch.cat(each, dim=1)


class ByPosition(nn.Module):
    """A model whose dense layer reads every output by position."""

    def __init__(self, configs: dict[str, list[Any]]) -> None:
        super().__init__()
        self.pooled = Model.collection("pooled", configs["pooled"], "cpu")
        self.past = Model.collection("sequences", configs["past"], "cpu")
        self.over = nn.Linear(DIM * sum(len(some) for some in configs.values()), 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sums = sums_of(self.past(batch.parts["past"]))
        logits = self.over(torch.cat([self.pooled(batch.parts["pooled"]).values(), sums], dim=1))
        return torch.nn.functional.softplus(logits).mean(), logits


def pipelined(rank: int, kept: bool) -> tuple[list[float], list[float], float]:
    """Losses of all ranks in a pipeline of a sharded model and of the unsharded model, and how far a traced forward is off."""
    warnings.simplefilter("ignore")
    shape = {"num_embeddings": ROWS, "embedding_dim": DIM}
    configs: dict[str, list[Any]] = {
        "pooled": [EmbeddingBagConfig(name=f"p{n}", feature_names=[f"p{n}"], **shape) for n in range(4)],
        "past": [EmbeddingConfig(name=f"s{n}", feature_names=[f"s{n}"], **shape) for n in range(3)],
    }
    tables = [table.model_copy(update={"module": module}) for module in configs for table in tables_of(configs[module])]
    hows = ("whole", "columns", "rows", "whole", "rows", "halves", "whole")
    shards = [
        shard
        for table, how in zip(tables, hows, strict=True)
        for shard in drawn_shards(random.Random(3), table, how, 2)
    ]
    task = ShardingTask(tables=tuple(tables), device_memory_bytes=(2**20,) * 2, batch_size=LOCAL_BATCH * 2)
    plan = Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))

    def batch(step: int, of_rank: int) -> Batch:
        return Batch(drawn_batch({"pooled": "pooled", "past": "sequences"}, configs, 2 * step + of_rank))

    unsharded = ByPosition(configs)
    trained, model = copy.deepcopy(unsharded), sharded(copy.deepcopy(unsharded), plan, LEARNING_RATE)
    dist.broadcast_object_list(weights := [unsharded.state_dict()])
    trained.load_state_dict(weights[0])
    copy_weights(model, weights[0])
    if kept:
        keep_output_order(model)
    graph = torch.fx.GraphModule(model.module, Tracer(leaf_modules=["pooled", "past"]).trace(model.module))
    off = float((graph(batch(0, rank))[1] - trained(batch(0, rank))[1]).abs().max())

    optimizer = torch.optim.SGD(model.module.over.parameters(), lr=LEARNING_RATE)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
    batches, losses, wanted = iter([batch(step, rank) for step in range(STEPS)]), [], []
    reference = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        logits = pipeline.progress(batches)
        assert isinstance(model.module.pooled.forward, PipelinedForward)
        mean = torch.nn.functional.softplus(logits.detach()).mean() / 2
        dist.all_reduce(mean)
        losses.append(float(mean))
        loss = torch.stack([trained(batch(step, each))[0] for each in range(2)]).mean()
        reference.zero_grad()
        loss.backward()
        reference.step()
        wanted.append(float(loss))
    return losses, wanted, off


@pytest.mark.parametrize("kept", [True, False])
def test_a_pipelined_model_trains_as_the_unsharded_one_if_its_order_is_kept(tmp_path: Path, kept: bool) -> None:
    for losses, wanted, off in on_ranks(2, tmp_path, pipelined, kept):
        assert (losses == pytest.approx(wanted, abs=1e-5)) == kept, (losses, wanted)
        assert (off < 1e-5) == kept
        assert wanted[-1] < wanted[0]


class Tower(ShardedEmbeddingTower):  # type: ignore[misc]
    """Not built, for TorchRec builds none on a CPU."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


def misused(rank: int) -> list[str]:
    """What is said of an order that does not fit, and of a module whose outputs are unknown."""
    warnings.simplefilter("ignore")
    bags = [EmbeddingBagConfig(name=n, feature_names=[n], num_embeddings=ROWS, embedding_dim=DIM) for n in "ab"]
    model = nn.ModuleDict({"m": Model.collection("pooled", bags, "cpu")})
    tables = tuple(table.model_copy(update={"module": "m"}) for table in tables_of(bags))
    task = ShardingTask(tables=tables, device_memory_bytes=(2**20,), batch_size=LOCAL_BATCH)
    whole = tuple(Shard(table=table.name, rows=ROWS, dim=DIM, device=0) for table in tables)
    plan = Plan(task=task, shards=whole, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    one = sharded(model, plan)
    faults = []
    for given, order in (
        (one, {"n": ["a", "b"]}),
        (one, {"m": ["a"]}),
        (one, {"m": ["a", "b", "c"]}),
        (nn.ModuleDict({"t": Tower()}), None),
    ):
        try:
            keep_output_order(given, order)
        except NeuroshardError as error:
            faults.append(f"{type(error).__name__}: {error}")
    keep_output_order(keep_output_order(one, {"m": ["b", "a"]}), {"m": ["a", "b"]})
    assert not one.module["m"]._forward_hooks  # the order that it has
    return faults


def test_an_order_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    (faults,) = on_ranks(1, tmp_path, misused)

    assert faults == [
        "InvalidInput: the order has no module 'm'; give output_order(model) of the same model",
        "InvalidInput: the order lacks 'b' of module 'm', which the model has; give output_order(model) of the same model",
        "InvalidInput: the order has 'c' of module 'm', which the model lacks; give output_order(model) of the same model",
        "UsageError: module 't' is a Tower, the order of whose outputs is not known; give "
        "DistributedModelParallel no sharder for it, so that the collections inside are sharded",
    ]


def test_a_model_that_is_not_sharded_yet_is_refused() -> None:
    bags = [EmbeddingBagConfig(name="a", feature_names=["a"], num_embeddings=ROWS, embedding_dim=DIM)]
    model = Model.collection("pooled", bags, "meta")

    assert output_order(model) == {"": ["a"]}
    with refused(UsageError, "EmbeddingBagCollection", "DistributedModelParallel"):
        keep_output_order(model)


@pytest.mark.parametrize("call", [keep_output_order, output_order])
@pytest.mark.parametrize("given", ["x", None])
def test_what_is_no_model_is_refused_in_one_line(call: Any, given: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{given!r} is no torch.nn.Module; give the model itself")):
        call(given)
