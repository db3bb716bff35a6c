"""Tables that give rows to ids as they train, on real gloo ranks: one row an id, checkpoints for other ranks, and refusals."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from helpers.gloo import on_ranks
from helpers.refusals import refused
from helpers.sharded import sharded
from neuroshard.client.checkpoint import load_resharded, reshard
from neuroshard.client.model.order import keep_output_order, output_order
from neuroshard.client.model.warn import ShardingWarning
from neuroshard.client.torchrec import from_torchrec, to_torchrec
from neuroshard.core.errors import InvalidInput, NeuroshardError
from neuroshard.core.plan import Plan
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.files.importers.table_access import with_batches
from neuroshard.files.importers.torchrec_collections import find_collections
from neuroshard.files.importers.torchrec_tables import tables_of
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05}
SHARDERS = (
    ManagedCollisionEmbeddingBagCollectionSharder(fused_params=FUSED),
    ManagedCollisionEmbeddingCollectionSharder(fused_params=FUSED),
    EmbeddingBagCollectionSharder(fused_params=FUSED),
)
SAMPLES, STEPS, ROWS, HASHED, INTERVAL = 8, 5, 40, 2**40, 2
FEATURES = {"ads": ["ad", "shown"], "users": ["user"], "clicks": ["click"], "plain": ["day"]}
IDS = 37_000_003 * torch.arange(14) + 11  # far beyond the rows


def spread(ids: Tensor, size: int) -> Tensor:
    """A hash of ids over [0, size)."""
    return (ids * 2_654_435_761) % size


def steady(weights: Tensor) -> Tensor:
    """The same first values for every row, whichever rank makes it."""
    with torch.no_grad():
        return weights.fill_(0.1)


def maps(configs: list[Any], device: torch.device, *, hashed: bool = True) -> ManagedCollisionCollection:
    policies = {"ads": LFU_EvictionPolicy, "users": DistanceLFU_EvictionPolicy}
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=device,
            eviction_policy=policies.get(config.name, LFU_EvictionPolicy)(),
            eviction_interval=INTERVAL,
            input_hash_size=HASHED,
            input_hash_func=spread if hashed else None,
        )
        for config in configs
    }
    return ManagedCollisionCollection(modules, configs)


class Model(nn.Module):
    """Pooled tables, of two features, and sequences that give rows to ids as they train, beside a plain collection."""

    def __init__(self, device: str = "cpu", rows: int = ROWS, *, hashed: bool = True, remapped: bool = False) -> None:
        super().__init__()
        where, tables = torch.device(device), {"num_embeddings": rows, "embedding_dim": 8, "init_fn": steady}
        bags: Any = [EmbeddingBagConfig(name=n, feature_names=FEATURES[n], **tables) for n in ("ads", "users")]
        lists: Any = [EmbeddingConfig(name="clicks", feature_names=FEATURES["clicks"], **tables)]
        plain: Any = [EmbeddingBagConfig(name="plain", feature_names=FEATURES["plain"], **tables)]
        self.bags = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=bags, device=where),
            maps(bags, where, hashed=hashed),
            return_remapped_features=remapped,
        )
        self.lists = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=lists, device=where), maps(lists, where, hashed=hashed)
        )
        self.plain = EmbeddingBagCollection(tables=plain, device=where)

    def forward(self, bags: KeyedJaggedTensor, lists: KeyedJaggedTensor, plain: KeyedJaggedTensor) -> Any:
        pooled, remapped = self.bags(bags)
        return pooled, self.lists(lists)[0], self.plain(plain), remapped


def batch(step: int, rank: int, samples: int = SAMPLES) -> list[KeyedJaggedTensor]:
    """A rank's samples of a step."""
    drawn = torch.Generator().manual_seed(1000 * step + rank)

    def of(*names: str, ids: Tensor = IDS) -> KeyedJaggedTensor:
        lengths = torch.randint(0, 4, (len(names) * samples,), generator=drawn, dtype=torch.int32)
        values = ids[torch.randint(0, len(ids), (int(lengths.sum()),), generator=drawn)]
        return KeyedJaggedTensor(keys=list(names), values=values, lengths=lengths)

    return [of("user", "ad", "shown"), of("click"), of("day", ids=torch.arange(ROWS))]


def plan(ranks: int, rows: int = ROWS, *, seed: int = 0) -> Plan:
    tables = [
        table.model_copy(update={"module": path})
        for path, collection in find_collections(Model("meta", rows)).all.items()
        for table in tables_of(collection, optimizer="sgd")
    ]
    task = ShardingTask(
        tables=tuple(tables), device_memory_bytes=(2**21,) * ranks, batch_size=SAMPLES * ranks, pipeline="none"
    )
    return search(task, analytic_model("h100", SAMPLES * ranks), SearchSettings(seed=seed))


class Trainer:
    def __init__(self, given: Plan, *, rows: int = ROWS) -> None:
        warnings.simplefilter("ignore")
        module = Model(rows=rows, remapped=True)
        self.model = sharded(module, to_torchrec(given, module, sharders=SHARDERS), list(SHARDERS))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.model.fused_optimizer.state_dict()}

    def step(self, step: int, rank: int, samples: int = SAMPLES) -> tuple[dict[str, torch.Tensor], Any]:
        """Outputs by feature, of one step of training or evaluation, and the remapped features."""
        pooled, lists, plain, remapped = self.model(*batch(step, rank, samples))
        found = {**pooled.to_dict(), **plain.to_dict()}
        found |= {name: each.values() for name, each in lists.items()}
        if self.model.training:
            sum(((one - at) ** 2).sum() for at, one in enumerate(found.values())).backward()
        return {name: one.detach() for name, one in found.items()}, remapped.wait() if hasattr(
            remapped, "wait"
        ) else remapped


def rows_of(step: int, rank: int, remapped: Any) -> dict[tuple[str, int], int]:
    """The row of each id of a batch, by table."""
    given, found = batch(step, rank)[0], dict[tuple[str, int], int]()
    for table in ("ads", "users"):
        for name in FEATURES[table]:
            pairs = zip(given[name].values().tolist(), remapped[name].values().tolist(), strict=True)
            found |= {(table, id_): row for id_, row in pairs}
    return found


def gathered(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def trains_as_whole(rank: int, given: Plan) -> dict[str, Any]:
    """A rank's outputs less those of whole tables with the same rows, the rows that ids have, and bytes of its id maps."""
    trainer, whole, worst, rows = Trainer(given), Model().bags._embedding_module, 0.0, dict[tuple[str, int], int]()
    for step in range(STEPS):
        outputs, remapped = trainer.step(step, rank)
        every = gathered((remapped.keys(), remapped.values(), remapped.lengths()))
        rows |= rows_of(step, rank, remapped)
        loss = torch.zeros(())
        for other, (keys, values, lengths) in enumerate(every):
            pooled = whole(type(remapped)(keys=keys, values=values, lengths=lengths))
            features = [name for name in outputs if name in keys]
            loss = loss + sum(((pooled[name] - at) ** 2).sum() for at, name in enumerate(features))
            if other == rank:
                worst = max(worst, *(float((pooled[name] - outputs[name]).abs().max().detach()) for name in features))
        (loss / len(every)).backward()
        with torch.no_grad():
            for weight in whole.parameters():
                weight -= FUSED["learning_rate"] * weight.grad
                weight.grad = None
    held = {}
    for path in ("bags", "lists"):
        maps = getattr(trainer.model.module, path)._managed_collision_collection._managed_collision_modules
        for name, module in maps.items():
            history = [module._history_accumulator] if hasattr(module, "_history_accumulator") else []
            buffers = [*dict(module.named_buffers()).values(), *history]
            first = len(module._history_accumulator)  # of the lookups of the first step
            held[name] = sum(one.numel() * one.element_size() for one in buffers), first
    return {"worst": worst, "rows": rows, "bytes": held, "order": output_order(trainer.model)}


def test_an_id_has_one_row_and_trains_as_in_whole_tables(tmp_path: Path) -> None:
    given = plan(2)
    found = on_ranks(2, tmp_path, trains_as_whole, given)
    assert max(each["worst"] for each in found) < 1e-4
    mine, theirs = (each["rows"] for each in found)
    assert {mine[key] for key in mine.keys() & theirs.keys()} == {theirs[key] for key in mine.keys() & theirs.keys()}
    assert all(theirs[key] == row for key, row in mine.items() if key in theirs)
    assert {row // (ROWS // 2) for row in mine.values()} == {0, 1}  # rows of both ranks
    tables = {table.name: table for table in given.task.tables}
    for each in found:
        for name, (nbytes, first) in each["bytes"].items():
            id_map = tables[name].id_map
            assert id_map is not None
            lookups = first / 1.25 / 2  # eviction interval 2
            assert abs(id_map.nbytes(ROWS // 2, lookups) - nbytes) <= 16


def _saved(rank: int, given: Plan, folder: str) -> dict[tuple[str, int], int]:
    trainer = Trainer(given)
    for step in range(STEPS):
        trainer.step(step, rank)
    trainer.model.eval()
    _, remapped = trainer.step(9, rank)
    save(trainer.state(), checkpoint_id=folder)
    return rows_of(9, rank, remapped)


def _loaded(rank: int, given: Plan, folder: str, per_rank: int) -> Any:
    trainer = Trainer(given)
    state = trainer.state()
    try:
        inexact = load_resharded(state, folder, new_plan=given)
    except Exception as error:
        return str(error)
    trainer.model.eval()
    found = []
    for old in range(rank * per_rank, (rank + 1) * per_rank):
        found.append(rows_of(9, old, trainer.step(9, old)[1]))
    trainer.model.train()
    trainer.step(10, rank)
    lists = [
        bool(module._mch_sorted_raw_ids.diff().ge(0).all())
        for module in trainer.model.module.bags._managed_collision_collection._managed_collision_modules.values()
    ]
    return {"found": found, "inexact": inexact, "sorted": all(lists)}


def test_id_maps_stay_with_their_rows_on_fewer_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    for name in ("four", "two", "back"):
        (tmp_path / name).mkdir()
    saved = on_ranks(4, tmp_path / "four", _saved, plan(4), folder)
    loaded = on_ranks(2, tmp_path / "two", _loaded, plan(2), folder, 2)
    now = [each for of_rank in loaded for each in of_rank["found"]]
    rows: dict[tuple[str, int], int] = {}
    for seen, after in zip(saved, now, strict=True):
        known = {key for key, row in seen.items() if row % 10 != 9}  # ids without a row get the last row of a block
        assert {key: after[key] for key in known} == {key: seen[key] for key in known}
        rows |= seen
    assert len(rows) > 20
    assert all(each["sorted"] for each in loaded)


def test_a_part_of_a_ranks_ids_goes_to_no_other(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    (tmp_path / "two").mkdir()
    on_ranks(2, tmp_path / "two", _saved, plan(2), folder)
    (tmp_path / "four").mkdir()
    refused = on_ranks(4, tmp_path / "four", _loaded, plan(4), folder, 1)
    assert len(set(refused)) == 1
    assert "'ads' on 2 ranks" in refused[0]
    assert "go on with 1 or 2 ranks" in refused[0]


def _resharded(rank: int, given: Plan, new: Plan) -> Any:
    trainer = Trainer(given)
    keep_output_order(trainer.model)
    trainer.step(0, rank)
    before = {path: getattr(trainer.model.module, path) for path in ("bags", "lists", "plain")}
    reshard(trainer.model, new)
    trainer.step(1, rank)
    return [path for path, module in before.items() if getattr(trainer.model.module, path) is not module]


def test_a_new_plan_moves_the_other_tables(tmp_path: Path) -> None:
    given = plan(2)
    (there,) = given.by_table()["plain"]
    moved = there.model_copy(update={"device": 1 - there.device})
    new = given.model_copy(update={"shards": tuple(moved if shard == there else shard for shard in given.shards)})
    assert on_ranks(2, tmp_path, _resharded, given, new) == [["plain"]] * 2


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(NeuroshardError) as error:
        work()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_torchrec_would_map_or_train_wrongly_is_refused_or_warned_of() -> None:
    given, model = plan(2), Model()
    with pytest.warns(ShardingWarning, match="'ads' of module 'bags' .*not hashed.*go to rank 0.*input_hash_func"):
        to_torchrec(given, Model(hashed=False), world_size=2, optimizer="sgd")
    with pytest.warns(ShardingWarning, match="'bags' has return_remapped_features, .* an all-to-all more"):
        to_torchrec(given, Model(remapped=True), world_size=2, optimizer="sgd")
    with pytest.warns(ShardingWarning, match="'ads' of module 'bags' .*state of adagrad"):
        to_torchrec(given, model, world_size=2, optimizer="adagrad")
    assert "rowwise_adagrad's state" in refusal(lambda: to_torchrec(given, model, optimizer="rowwise_adagrad"))
    to_torchrec(
        given, model, optimizer="rowwise_adagrad", device_type="cuda", local_world_size=2, any_output_order=True
    )
    with pytest.warns(ShardingWarning, match="keeps tables in host memory"):
        fault = refusal(lambda: to_torchrec(given, model, compute_kernel="fused_uvm_caching"))
    assert "where the cache of compute_kernel 'fused_uvm_caching'" in fault

    bare = [table.model_copy(update={"id_map": None}) for table in given.task.tables]
    task = given.task.model_copy(update={"tables": tuple(bare)})
    unmapped = search(task, analytic_model("h100", 16), SearchSettings())
    assert "'ads' of module 'bags' gives rows to ids" in refusal(lambda: to_torchrec(unmapped, model))

    found = to_torchrec(given, model, optimizer="sgd")
    again = from_torchrec(found, model, device_memory_bytes=(2**21,) * 2, batch_size=16)
    assert set(again.shards) == set(given.shards)
    inside = ShardingPlan({**found.plan, "bags._embedding_module": found.plan["bags"]})
    del inside.plan["bags"]
    how: Any = {"device_memory_bytes": (2**21,) * 2, "batch_size": 16}
    assert "must be sharded at its own path" in refusal(lambda: from_torchrec(inside, model, **how))
    any_type = ManagedCollisionEmbeddingBagCollectionSharder()
    any_type.sharding_types = lambda _: [
        "column_wise",
        "row_wise",
    ]  # its own are refused here, but not in a plan by hand
    columns = construct_module_sharding_plan(
        model.bags,
        {"ads": column_wise([0, 1]), "users": row_wise(compute_kernel="fused")},
        sharder=any_type,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    columns["ads"].compute_kernel = "fused"
    by_hand = ShardingPlan({**found.plan, "bags": columns})
    assert "'ads' gives rows to ids as it trains" in refusal(lambda: from_torchrec(by_hand, model, **how))


def test_lookups_of_ids_are_counted_as_no_rows() -> None:
    tables = [each for one in find_collections(Model("meta")).all.values() for each in tables_of(one)]
    found, notes = with_batches(tables, FEATURES, [batch(step, 0) for step in range(4)])
    assert [table.name for table in found if table.access is not None] == ["plain"]
    assert any("3 tables that give rows to ids" in note for note in notes)
    mapped = [table for table in tables if table.id_map is not None]
    assert "give --pooling-factor" in refusal(lambda: with_batches(mapped, FEATURES, []))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # TorchRec does
@pytest.mark.parametrize("counts", [False, True])
def test_an_id_map_in_buckets_has_the_bytes_of_its_module_and_needs_gpus(counts) -> None:
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule  # it warns where it is imported first

    def hashed(device: torch.device) -> nn.ModuleDict:
        configs = [EmbeddingBagConfig(name="ads", num_embeddings=64, embedding_dim=8, feature_names=["ad"])]
        module = HashZchManagedCollisionModule(zch_size=64, device=device, total_num_buckets=8, track_id_freq=counts)
        maps = ManagedCollisionCollection({"ads": module}, configs)
        bags = EmbeddingBagCollection(tables=configs, device=device)
        return nn.ModuleDict({"bags": ManagedCollisionEmbeddingBagCollection(bags, maps)})

    model = hashed(torch.device("meta"))
    (table,) = tables_of(model["bags"], optimizer="sgd")
    bags: Any = model["bags"]
    module = bags._managed_collision_collection._managed_collision_modules["ads"]
    part = module.rebuild_with_output_id_range((32, 64), device=torch.device("meta"))
    held = {**dict(part.named_buffers()), **dict(part.named_parameters())}
    assert table.id_map is not None
    assert table.id_map.nbytes(32, 0) == sum(one.numel() * one.element_size() for one in held.values())

    fields = {"tables": (table,), "batch_size": 8}
    with refused(InvalidInput, "'ads'", "8 buckets", "3 devices", "take 2, 4, 1"):
        ShardingTask.parse({**fields, "device_memory_bytes": (2**20,) * 3}, "the task")
    given = search(
        ShardingTask(**fields, device_memory_bytes=(2**20,) * 2), analytic_model("h100", 8), SearchSettings()
    )
    assert "gives none to new ids" in refusal(lambda: to_torchrec(given, model, optimizer="sgd", device_type="cpu"))
    found = to_torchrec(given, model, optimizer="sgd", device_type="cuda", local_world_size=2)
    assert [shard.shard_offsets for shard in found.plan["bags"]["ads"].sharding_spec.shards] == [[0, 0], [32, 0]]
