"""Trainers on gloo, of tables held by access and of the same tables as ever: what they return, and what they learn."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

from helpers.sharded import local_parts, sharders_of, table_of
from helpers.sharded import sharded as sharded_by
from neuroshard.client.checkpoint import load_model_state, model_state
from neuroshard.client.rows import CollectionByAccessSharder
from neuroshard.client.rows.collection import CollectionByAccess, TableRows
from neuroshard.client.rows.map import Part
from neuroshard.files.importers.torchrec_tables import configs_of

SAMPLES, LEARNING_RATE, EPS = 16, 0.05, 1e-8


@dataclass(frozen=True)
class Case:
    """Three tables, of which the first has two features, and the second reads one of them too."""

    kind: str = "pooled"  # or sequences
    pooling: PoolingType = PoolingType.SUM
    weighted: bool = False
    data_type: DataType = DataType.FP32
    optimizer: str = "sgd"
    rows: Mapping[str, int] = field(default_factory=lambda: {"a": 41, "b": 17, "c": 29})
    dim: int = 8
    fused: Mapping[str, Any] = field(default_factory=dict)

    def collection(self) -> EmbeddingBagCollection | EmbeddingCollection:
        reads = {"a": ["f", "g"], "b": ["g"], "c": ["h"]}
        sizes = [
            {"name": name, "num_embeddings": rows, "embedding_dim": self.dim, "feature_names": reads[name]}
            for name, rows in self.rows.items()
        ]
        torch.manual_seed(5)
        if self.kind == "sequences":
            return EmbeddingCollection([EmbeddingConfig(data_type=self.data_type, **of) for of in sizes])
        configs = [EmbeddingBagConfig(data_type=self.data_type, pooling=self.pooling, **of) for of in sizes]
        return EmbeddingBagCollection(configs, is_weighted=self.weighted)

    def start(self) -> dict[str, Tensor]:
        """The weights that every trainer begins with, by table."""
        return {key.split(".")[-2]: value for key, value in self.collection().state_dict().items()}

    def batch(self, step: int, rank: int) -> KeyedJaggedTensor:
        """Samples of no to seven lookups, of ids that are skewed; keys in another order than the tables', and one more."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        keys, most = ["h", "unused", "g", "f"], {"h": 29, "unused": 5, "g": 17, "f": 41}
        lengths = torch.randint(0, 8, (len(keys) * SAMPLES,), generator=generator)
        counts = lengths.view(len(keys), -1).sum(1).tolist()
        ids = [
            (torch.rand(count, generator=generator) ** 3 * most[key]).long() * 7 % most[key]
            for key, count in zip(keys, counts, strict=True)
        ]
        weights = torch.rand(sum(counts), generator=generator) if self.weighted else None
        return KeyedJaggedTensor(keys, torch.cat(ids), lengths=lengths, weights=weights)


def hot_ids(rows: int, count: int) -> Tensor:
    """Ids as `batch` likes them best, in no order of their own."""
    return (torch.arange(count) * 7) % rows


def dealt(rows: int, blocks: int, count: int = 9) -> TableRows:
    return TableRows((Part("dealt", 0, rows, blocks),), hot_ids(rows, count), "0123456789")


def in_parts(
    rows: int, hot: int, *, copied: bool = False, blocks: tuple[int, int] = (1, 1), count: int = 9
) -> TableRows:
    parts = Part("hot", 0, hot, blocks[0], copied=copied), Part("cold", hot, rows - hot, blocks[1])
    return TableRows(parts, hot_ids(rows, count), "0123456789")


def sharding(rows: int, dim: int, blocks: int, rank: int, parts: int = 1) -> ParameterSharding:
    """Whole on a rank, or its rows in blocks: over all ranks, or over those of a host, which has so many. Or so each of `parts`
    of the columns, from the first rank on."""
    ranks, height, width = dist.get_world_size(), -(-rows // blocks), dim // parts
    first = 0 if parts > 1 else rank // blocks * blocks
    shards = [
        ShardMetadata(
            [height * block, width * part],
            [max(min(height, rows - height * block), 0), width],
            placement=f"rank:{first + part * blocks + block}/cpu",
        )
        for part in range(parts)
        for block in range(blocks)
    ]
    kind = {1: "table_wise", ranks: "row_wise"}.get(blocks, "table_row_wise")
    kind = ("column_wise" if blocks == 1 else "grid_shard") if parts > 1 else kind
    placed = [shard.placement.rank() for shard in shards]
    return ParameterSharding(kind, "fused", ranks=placed, sharding_spec=EnumerableShardingSpec(shards))


def sharders_by_access(optimizer: str, **fused: object) -> list[Any]:
    """As of tables held as ever, and one of collections by access."""
    bags, _, sequences = sharders_of(optimizer, LEARNING_RATE, **fused)
    return [bags, sequences, CollectionByAccessSharder(bags, sequences)]


class Trainer:
    """One rank's, of a `case` whose tables are held as `held` says, the others whole (or row-wise: `split`). Tables whose
    names begin as one of `cut` are cut into two parts of the columns."""

    def __init__(
        self,
        case: Case,
        held: Mapping[str, TableRows] | None = None,
        split: Sequence[str] = (),
        cut: Sequence[str] = (),
    ) -> None:
        warnings.simplefilter("ignore")
        self.case, ranks = case, dist.get_world_size()
        collection: Any = case.collection()
        given = collection if held is None else CollectionByAccess(collection, held)
        blocks = {rows.name_of(table, part): part.blocks for table, rows in (held or {}).items() for part in rows.parts}
        tables = configs_of(collection if held is None else given.inner)
        plan = EmbeddingModuleShardingPlan()
        for place, config in enumerate(tables):
            parts = 2 if config.name.startswith(tuple(cut)) else 1
            over = blocks.get(config.name, ranks // parts if config.name in {*split, *cut} else 1)
            plan[config.name] = sharding(config.num_embeddings, case.dim, over, place % ranks, parts)
        sharders = sharders_by_access(case.optimizer, eps=EPS, **case.fused)
        self.model = sharded_by(nn.ModuleDict({"e": given}), ShardingPlan({"e": plan}), sharders)
        state = model_state(self.model)  # TorchRec draws the weights of pooled tables anew
        for key, inside, part in local_parts(state["model"]):
            part.copy_(case.start()[table_of(key)][inside])
        load_model_state(self.model, state)

    @property
    def sharded(self) -> Any:
        return self.model.module["e"]

    def outputs(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        found = self.sharded(features).wait()
        return found.to_dict() if isinstance(found, KeyedTensor) else {key: of.values() for key, of in found.items()}

    def step(self, number: int) -> tuple[dict[str, Tensor], float]:
        """What a step returns, and its loss over all ranks."""
        found = self.outputs(self.case.batch(number, dist.get_rank()))
        loss = torch.stack([(value - wanted(key, value)).square().mean() for key, value in sorted(found.items())])
        loss.sum().backward()
        total = loss.sum().detach().clone()
        dist.all_reduce(total)
        return {key: value.detach() for key, value in found.items()}, float(total)

    def weights(self) -> dict[str, Tensor]:
        """Whole tables, rows in the order of their ids, of all ranks."""
        return {key.split(".")[-2]: _whole(of) for key, of in self._all(model_state(self.model)["model"]).items()}

    def moments(self) -> dict[str, Tensor]:
        every = model_state(self.model)["optimizer"]["state"]
        return {
            name: _whole(of) for name, of in self._all({k: v for of in every.values() for k, v in of.items()}).items()
        }

    def _all(self, own: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The shards of all ranks, by key."""
        mine = {
            key: [(shard.metadata.shard_offsets, shard.tensor.detach().float()) for shard in value.local_shards()]
            for key, value in own.items()
        }
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        return {
            key: [shard for of in every for shard in of.get(key, [])] for key in sorted({k for of in every for k in of})
        }


def _whole(shards: list[Any]) -> Tensor:
    """A tensor of its row blocks, or of those of each part of the columns."""
    blocks = sorted(shards, key=lambda shard: shard[0][::-1])
    by_column = {tuple(at[1:]): [tensor for other, tensor in blocks if other[1:] == at[1:]] for at, _ in blocks}
    return torch.cat([torch.cat(of_columns) for of_columns in by_column.values()], -1)


def wanted(key: str, value: Tensor) -> Tensor:
    """What an output shall be: anything that does not change from run to run."""
    return torch.sin(torch.arange(value.numel(), dtype=torch.float32) + sum(key.encode())).view(value.shape)


def differences(
    rank: int, case: Case, held: Mapping[str, TableRows], cut: Sequence[str] = (), steps: int = 6
) -> dict[str, float]:
    """How far tables held by access are from the same tables as ever: outputs of the first step, losses, weights after all."""
    by_part = case.optimizer == "rowwise_adagrad"  # it has a moment for each part of a row, so a grid learns otherwise
    ours, theirs = Trainer(case, held, cut=cut), Trainer(case, cut=cut if by_part else ())
    found = {"outputs": 0.0, "losses": 0.0}
    for step in range(steps):
        (out, loss), (other, their_loss) = ours.step(step), theirs.step(step)
        assert (
            list(out) == list(Case.collection(case)._embedding_names)
            if case.kind == "pooled"
            else sorted(out) == sorted(other)
        )
        assert {key: value.shape for key, value in out.items()} == {key: value.shape for key, value in other.items()}
        if step == 0:
            found["outputs"] = max(float((out[key] - other[key]).abs().max()) for key in out)
        found["losses"] = max(found["losses"], abs(loss - their_loss) / their_loss)
    weights, other_weights = ours.weights(), theirs.weights()
    found["weights"] = max(float((weights[table] - other_weights[table]).abs().max()) for table in weights)
    moments, other_moments = ours.moments(), theirs.moments()
    assert moments.keys() == other_moments.keys()
    found["moments"] = max((float((of - other_moments[name]).abs().max()) for name, of in moments.items()), default=0.0)
    found["learned"] = min(float((weights[table] - value).abs().max()) for table, value in case.start().items())
    return found
