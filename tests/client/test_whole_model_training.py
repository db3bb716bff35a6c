"""A model of several modules on gloo: tables of one name, position weights that are learned, sequences, a copied table."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from helpers.gloo import on_ranks
from helpers.plans import row_wise as row_wise_shards
from helpers.sharded import local_parts, sharded, sharders_of
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Feature, Table
from neuroshard.core.task import ShardingTask

pytestmark = pytest.mark.slow

STEPS, LOCAL_BATCH, LEARNING_RATE, LONGEST = 4, 5, 0.05, 4
ROWS, DIM = 40, 16
MODULES = {"a": ("user", "ad", "tiny"), "b.c": ("ad",), "e": ("page", "query", "shop")}  # the tables of each, and
SEQUENCES = {
    "past": ("viewed", "bought"),
    "pair": ("left",),
    "tall": ("deep",),
    "path": ("step",),
}  # of "s", with their features
READ = tuple(feature for features in SEQUENCES.values() for feature in features)


def bags(names: tuple[str, ...], weighted: bool, device: str) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]) for name in names
    ]
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device(device))


def sequences(device: str) -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=list(features))
        for name, features in SEQUENCES.items()
    ]
    return EmbeddingCollection(tables=configs, device=torch.device(device))


class Model(nn.Module):
    """Everything that is pooled, by module and table, and the sums of sequences by feature, through one dense layer that all
    ranks train together."""

    def __init__(self, device: str, as_collection: bool) -> None:
        super().__init__()
        self.a = bags(MODULES["a"], False, device)
        self.b = nn.ModuleDict({"c": bags(MODULES["b.c"], False, device)})
        positions: dict[str, PositionWeightedModule] | PositionWeightedModuleCollection = (
            PositionWeightedModuleCollection(dict.fromkeys(MODULES["e"], LONGEST))
            if as_collection
            else {name: PositionWeightedModule(LONGEST) for name in MODULES["e"]}
        )
        self.e = FeatureProcessedEmbeddingBagCollection(bags(MODULES["e"], True, device), positions)
        self.s = EmbeddingTower(sequences(device), nn.Identity())  # a container of torchrec's
        self.also_b = nn.ModuleDict({"c": self.b["c"]})  # a second name, in another module
        self.dense = nn.Linear(DIM, 1)

    def forward(self, features: dict[str, KeyedJaggedTensor]) -> Tensor:
        pooled = [
            (self.a(features["a"]), "a"),
            (self.b["c"](features["b.c"]), "b.c"),
            (self.e(features["e"]), "e"),
            (self.also_b["c"](features["b.c"]), "b.c"),
        ]
        values = [
            each[name] for each, module in pooled for name in MODULES[module]
        ]  # the plan decides the order of keys
        looked_up = self.s(features["s"])
        for jagged in (looked_up[feature] for feature in READ):
            place = (1 + torch.arange(len(jagged.values())) % 3).unsqueeze(
                1
            ) / 3  # so that the order of lookups matters
            values.append(torch.segment_reduce(jagged.values() * place, "sum", lengths=jagged.lengths()))
        return torch.cat([self.dense(value) for value in values], dim=1)


def plan(devices: int) -> Plan:
    """Whole, cut and row-wise tables; `ad` of the two modules lies in two places."""

    def table(module: str, name: str) -> Table:
        full = f"{module}.{name}" if name == "ad" else name
        return Table(name=full, module=module, rows=ROWS, dim=DIM, pooling_factor=2.0, weighted=module == "e")

    def whole(name: str, device: int) -> list[Shard]:
        return [Shard(table=name, rows=ROWS, dim=DIM, device=device % devices)]

    def cut(name: str, parts: int = 2) -> list[Shard]:
        dim = DIM // parts
        return [Shard(table=name, rows=ROWS, column_offset=n * dim, dim=dim, device=n % devices) for n in range(parts)]

    def sequence(name: str) -> Table:
        features = tuple(Feature(name=feature, pooling_factor=2.0) for feature in SEQUENCES[name])
        return Table.model_validate(
            {"name": name, "module": "s", "rows": ROWS, "dim": DIM, "pooling": "none", "features": features}
        )

    tables = {(module, name): table(module, name) for module, names in MODULES.items() for name in names}
    tables |= {("s", name): sequence(name) for name in SEQUENCES}
    shards = [
        *cut("user"),
        *(Shard(table="tiny", rows=ROWS, dim=DIM, device=device) for device in range(devices)),
        *whole("a.ad", 1),
        *row_wise_shards(tables["b.c", "ad"], devices),
        *whole("page", 1),
        *cut("query"),
        *row_wise_shards(tables["e", "shop"], devices),
        *whole("past", 1),
        *cut("pair", 4),
        *row_wise_shards(tables["s", "tall"], devices),
        *cut("path", 4),
    ]
    return Plan(
        task=ShardingTask(
            tables=tuple(tables.values()),
            device_memory_bytes=(2**20,) * devices,
            batch_size=LOCAL_BATCH * devices,
            constraints=Constraints(tables=(TableRule(table="tiny", data_parallel=True),)),
        ),
        shards=tuple(shards),
        provenance=Provenance(neuroshard_version="0", algorithm="by hand"),
    )


def batch(rank: int, step: int) -> dict[str, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)

    def jagged(names: tuple[str, ...], weighted: bool) -> KeyedJaggedTensor:
        lengths = torch.randint(LONGEST + 1, (len(names) * LOCAL_BATCH,), generator=generator)
        ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor(
            keys=list(names), values=ids, lengths=lengths, weights=torch.ones(len(ids)) if weighted else None
        )

    return {"s": jagged(READ, False)} | {module: jagged(names, module == "e") for module, names in MODULES.items()}


def train(rank: int, ranks: int, as_collection: bool) -> dict[str, float]:
    """The largest differences from the unsharded model, of outputs and of what was trained, by name."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    reference = Model("cpu", as_collection)
    for value in reference.parameters():
        nn.init.uniform_(value, 0.2, 1.0)
    unsharded = Model("meta", as_collection)
    model = sharded(unsharded, to_torchrec(plan(ranks), unsharded), sharders_of("sgd", LEARNING_RATE))
    whole = {name: value.clone() for name, value in reference.state_dict().items()}
    for name, place, part in local_parts(model.state_dict()):
        part.copy_(whole[name][place])

    def dense() -> list[nn.Parameter]:
        return [
            value
            for name, value in model.named_parameters()
            if "tiny" in name or not name.startswith(("a.", "b.", "also_b.", "e._embedding_bag", "s."))
        ]

    found: dict[str, float] = {"outputs": 0.0}
    for step in range(STEPS):
        output, wanted = model(batch(rank, step)), [reference(batch(other, step)) for other in range(ranks)]
        found["outputs"] = max(found["outputs"], float((output - wanted[rank]).abs().max()))
        for value in dense():
            value.grad = None
        output.square().mean().backward()
        reference.zero_grad()
        (sum(each.square().mean() for each in wanted) / ranks).backward()
        with torch.no_grad():
            for value in (*dense(), *reference.parameters()):
                value.sub_(LEARNING_RATE * value.grad)
    trained = reference.state_dict()
    for name, place, part in local_parts(model.state_dict()):
        if part.numel():
            found[name] = max(found.get(name, 0.0), float((part - trained[name][place]).abs().max()))
    moved = {name: float((trained[name] - whole[name]).abs().max()) for name in trained}
    assert all(moved.values()), moved  # else equal weights would show nothing
    return found


@pytest.mark.parametrize("as_collection", [True, False])
def test_a_model_of_several_modules_trains_as_the_unsharded_one(tmp_path, as_collection):
    for found in on_ranks(2, tmp_path, train, 2, as_collection):
        assert len(found) > len(MODULES), found
        assert max(found.values()) < 1e-5, found


def test_tables_of_one_name_are_distinguished_by_their_modules():
    got = to_torchrec(plan(2), Model("meta", True))

    assert {path: {name: p.sharding_type for name, p in tables.items()} for path, tables in got.plan.items()} == {
        "a": {"user": "column_wise", "ad": "column_wise", "tiny": "data_parallel"},
        "b.c": {"ad": "row_wise"},
        "e": {"page": "column_wise", "query": "column_wise", "shop": "row_wise"},
        "s.embedding": {"past": "table_wise", "pair": "column_wise", "tall": "row_wise", "path": "column_wise"},
    }
