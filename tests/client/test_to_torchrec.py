"""A plan as TorchRec's, and every bad plan that DistributedModelParallel would let through or die of."""

import multiprocessing
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, grid_shard, row_wise, table_row_wise
from torchrec.distributed.types import CommOp, EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import neuroshard as ns
from helpers.limits import HANGS
from helpers.plans import TABLES, make_plan, row_plan
from helpers.plans import row_wise as row_wise_shards
from helpers.refusals import refused, warned
from neuroshard.client.torchrec import ShardingWarning, check_same_digest, from_torchrec, qcomms, to_torchrec
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan, Provenance, Shard, peaks_of
from neuroshard.core.precision import parse_precision
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology as Domains
from neuroshard.files.importers.torchrec_collections import weight_of
from neuroshard.files.plan import write_plan


def collection(*tables: Table, data_type: DataType = DataType.FP32) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=t.name,
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            feature_names=[t.name],
            data_type=data_type,
            pooling=PoolingType[t.pooling.upper()],
        )
        for t in tables
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def change(table: Table, **fields: object) -> Table:
    return table.model_copy(update=fields)


def test_a_table_that_the_module_pools_otherwise_is_a_warning_and_not_refused():
    configs = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name], pooling=PoolingType.MEAN
        )
        for t in TABLES
    ]
    module = EmbeddingBagCollection(tables=configs, is_weighted=True, device=torch.device("meta"))
    with warned(ShardingWarning, "'user'", "mean with weights", "sum", "2 more tables"):
        assert set(to_torchrec(make_plan(), module).plan[""]) == {t.name for t in TABLES}


def parameter(kind: str, shards: list[tuple[int, int, int]], rows: int, device: str = "cpu") -> ParameterSharding:
    """shards: (column, width, rank)."""
    return ParameterSharding(
        sharding_type=kind,
        compute_kernel="fused",
        ranks=[rank for _, _, rank in shards],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=[0, column], shard_sizes=[rows, width], placement=f"rank:{rank}/{device}")
                for column, width, rank in shards
            ]
        ),
    )


USER, ITEM, COUNTRY = TABLES
KERNELS = ("dense", "quant", "fused_triton", "fast")  # which train no plan
MEANS = (change(USER, pooling="mean"), ITEM, COUNTRY)


def test_a_table_in_one_piece_is_table_wise_unless_its_module_has_cut_ones():
    module = nn.ModuleDict({"a": collection(USER, ITEM), "b": collection(COUNTRY), "over": nn.Linear(28, 1)})

    assert to_torchrec(make_plan(), module) == ShardingPlan(
        plan={
            "a": EmbeddingModuleShardingPlan(
                {
                    "user": parameter("column_wise", [(0, 4, 1), (4, 4, 0), (8, 4, 1), (12, 4, 0)], 1000),
                    "item": parameter("column_wise", [(0, 8, 1)], 300),
                }
            ),
            "b": EmbeddingModuleShardingPlan({"country": parameter("table_wise", [(0, 4, 0)], 7)}),
        }
    )


def user_in(*shards: tuple[int, int, int]) -> Plan:
    """The user table cut into (column, width, rank)."""
    plan = make_plan(tables=(USER,))
    cut = tuple(Shard(table="user", rows=1000, column_offset=c, dim=d, device=r) for c, d, r in shards)
    return Plan(task=plan.task, shards=cut, provenance=plan.provenance)


@pytest.mark.parametrize(
    ("planned", "given"),
    [
        ([(0, 4, 1), (4, 4, 1), (8, 8, 0)], [(0, 4, 1), (4, 4, 1), (8, 8, 0)]),
        ([(4, 8, 1), (0, 4, 1), (12, 4, 0)], [(0, 12, 1), (12, 4, 0)]),
        ([(0, 4, 1), (4, 4, 1), (8, 4, 0), (12, 4, 1)], [(0, 4, 1), (4, 4, 1), (8, 4, 0), (12, 4, 1)]),
    ],
    ids=["equal widths", "unequal neighbours", "equal widths apart"],
)
def test_shards_on_one_rank_that_torchrec_would_mix_up_become_one(planned, given):
    got = to_torchrec(user_in(*planned), collection(USER))

    assert got.plan[""]["user"] == parameter("column_wise", given, 1000)


def test_tables_are_found_in_several_collections():
    module = nn.ModuleDict({"a": collection(USER, ITEM), "b": nn.ModuleDict({"c": collection(COUNTRY)})})
    got = to_torchrec(make_plan(), module)

    assert {path: set(tables) for path, tables in got.plan.items()} == {"a": {"user", "item"}, "b.c": {"country"}}


def twins(*modules: str) -> Plan:
    """A plan of user and of an item table in each of the modules, by the name of module and table, or both called item."""
    items = tuple(change(ITEM, name=f"{module}.item" if module else "item", module=module) for module in modules)
    tables = (USER, *items)
    whole = [Shard(table=table.name, rows=table.rows, dim=table.dim, device=i % 2) for i, table in enumerate(tables)]
    return Plan(task=make_plan(tables=tables).task, shards=tuple(whole), provenance=make_plan().provenance)


def test_tables_of_one_name_are_found_by_their_modules_also_below_a_wrapper():
    model = nn.ModuleDict({"a": collection(USER, ITEM), "b": nn.ModuleDict({"c": collection(ITEM)})})
    plan = twins("a", "b.c")

    for module, prefix in ((model, ""), (nn.ModuleDict({"wrapped": model}), "wrapped.")):
        got = to_torchrec(plan, module)
        ranks = {(path, name): p.ranks for path, tables in got.plan.items() for name, p in tables.items()}
        assert ranks == {(f"{prefix}a", "user"): [0], (f"{prefix}a", "item"): [1], (f"{prefix}b.c", "item"): [0]}
        back = from_torchrec(got, module, device_memory_bytes=[2**30] * 2, batch_size=64, tables=plan.task.tables)
        assert back.shards == plan.shards
        unnamed = from_torchrec(got, module, device_memory_bytes=[2**30] * 2, batch_size=64)
        assert [t.name for t in unnamed.task.tables] == ["user", f"{prefix}a.item", f"{prefix}b.c.item"]
        assert to_torchrec(unnamed, module) == got


def test_a_gpu_is_the_rank_within_its_host():
    plan = make_plan(devices=4)
    got = to_torchrec(plan, collection(*TABLES), device_type="cuda", local_world_size=2)

    placements = [str(s.placement) for s in got.plan[""]["user"].sharding_spec.shards]
    assert placements == ["rank:3/cuda:1", "rank:2/cuda:0", "rank:1/cuda:1", "rank:0/cuda:0"]


def test_the_hosts_size_is_what_torchrun_says(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    got = to_torchrec(make_plan(), collection(*TABLES), device_type="cuda")

    assert [str(s.placement) for s in got.plan[""]["item"].sharding_spec.shards] == ["rank:1/cuda:0"]


@pytest.mark.parametrize(
    ("backends", "has_gpu", "kind"),
    [
        ("cpu:gloo,cuda:nccl", False, "cuda:1"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
        (None, True, "cuda:1"),
        (None, False, "cpu"),
    ],
)
def test_tables_are_by_default_on_what_the_ranks_train_on(monkeypatch, backends, has_gpu, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if backends:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    got = to_torchrec(make_plan(), collection(*TABLES))

    assert [str(s.placement) for s in got.plan[""]["item"].sharding_spec.shards] == [f"rank:1/{kind}"]


def test_the_compute_kernel_is_the_callers():
    for kernel in ("fused_uvm", "fused_uvm_caching"):
        with warned(ShardingWarning, repr(kernel), "host memory"):
            got = to_torchrec(make_plan(), collection(*TABLES), compute_kernel=kernel)
        assert {p.compute_kernel for p in got.plan[""].values()} == {kernel}


def test_a_copied_table_is_one_on_one_rank_too():
    shards = tuple(Shard(table=t.name, rows=t.rows, dim=t.dim, device=0) for t in (ITEM, COUNTRY))
    constraints = Constraints(tables=(TableRule(table="item", data_parallel=True),))
    task = ShardingTask(tables=(ITEM, COUNTRY), device_memory_bytes=(2**20,), batch_size=64, constraints=constraints)
    plan = Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))

    got = to_torchrec(plan, collection(ITEM, COUNTRY)).plan[""]
    assert {name: (p.sharding_type, p.compute_kernel) for name, p in got.items()} == {
        "item": ("data_parallel", "dense"),
        "country": ("table_wise", "fused"),
    }


def with_shard(index: int, **fields: object) -> Plan:
    """The plan with one shard changed behind its back, as model_copy allows."""
    plan = make_plan()
    shards = list(plan.shards)
    shards[index] = shards[index].model_copy(update=fields)
    return plan.model_copy(update={"shards": tuple(shards)})


def item_in(
    *shards: tuple[int, int, int], devices: int = 2, table: Table = ITEM, topology: Domains | None = None
) -> Plan:
    """The item table cut into (first row, rows, rank)."""
    cut = tuple(
        Shard(table=table.name, row_offset=first, rows=n, dim=table.dim, device=rank) for first, n, rank in shards
    )
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**20,) * devices, batch_size=64, topology=topology)
    return Plan(task=task, shards=cut, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def rows_parameter(*shards: tuple[int, int, int], dim: int = 8, kind: str = "row_wise") -> ParameterSharding:
    """shards: (first row, rows, rank)."""
    return ParameterSharding(
        sharding_type=kind,
        compute_kernel="fused",
        ranks=[rank for _, _, rank in shards],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=[first, 0], shard_sizes=[rows, dim], placement=f"rank:{rank}/cpu")
                for first, rows, rank in shards
            ]
        ),
    )


@pytest.mark.parametrize(
    ("rows", "shards"),
    [
        (300, [(0, 75, 0), (75, 75, 1), (150, 75, 2), (225, 75, 3)]),
        (301, [(0, 76, 0), (76, 76, 1), (152, 76, 2), (228, 73, 3)]),
        (4, [(0, 1, 0), (1, 1, 1), (2, 1, 2), (3, 1, 3)]),
    ],
)
def test_rows_over_all_ranks_are_row_wise_as_torchrecs_own_planner_makes_it(rows, shards):
    table = change(ITEM, rows=rows)
    module = collection(table)
    plan = item_in(*reversed(shards), devices=4, table=table)
    got = to_torchrec(plan, module).plan[""]

    assert got["item"] == rows_parameter(*shards)
    theirs = construct_module_sharding_plan(module, {"item": row_wise()}, world_size=4, local_size=4, device_type="cpu")
    assert got["item"].sharding_spec == theirs["item"].sharding_spec
    assert taken_over(ShardingPlan(plan={"": theirs}), module, devices=4).shards == tuple(
        Shard(table="item", row_offset=first, rows=n, dim=8, device=rank) for first, n, rank in shards
    )


def test_fewer_blocks_than_ranks_are_neither_taken_over_nor_given_to_trainers():
    """FBGEMM's operator fails on a rank that has no row of any table (`weights[0] must be a GPU or MTIA tensor`, on the CPU)."""
    table = change(ITEM, rows=5)
    module = collection(table)
    theirs = construct_module_sharding_plan(module, {"item": row_wise()}, world_size=4, local_size=4, device_type="cpu")
    with refused(InvalidInput, "item", "5 rows", "rank 3"):
        taken_over(ShardingPlan(plan={"": theirs}), module, devices=4)
    with refused(InvalidInput, "item", "5 rows", "rank 3"):
        to_torchrec(item_in((0, 2, 0), (2, 2, 1), (4, 1, 2), devices=4, table=table), module)


def test_means_of_split_rows_beside_a_table_whose_rows_are_whole_are_refused_in_torchrecs_own_plan_too():
    plan = row_plan().model_copy(update={"task": row_plan().task.model_copy(update={"tables": MEANS})})
    plan = plan.model_copy(update={"task_digest": plan.task.digest()})
    configs = collection(*MEANS).embedding_bag_configs()
    together, apart = (
        nn.ModuleDict(
            {str(i): EmbeddingBagCollection(tables=some, device=torch.device("meta")) for i, some in enumerate(groups)}
        )
        for groups in ([configs], [configs[:1], configs[1:]])
    )
    with refused(InvalidInput, "'user'", "module '0'", "mean", "row-wise", "'item'"):
        to_torchrec(plan, together)
    given = to_torchrec(plan, apart)
    assert given.plan["0"]["user"].sharding_type == "row_wise"
    assert set(taken_over(given, apart).shards) == set(plan.shards)
    theirs = ShardingPlan(plan={"0": EmbeddingModuleShardingPlan({**given.plan["0"], **given.plan["1"]})})
    with refused(InvalidInput, "'user'", "module '0'", "mean", "row-wise", "'item'"):
        taken_over(theirs, together)


def all_row_wise(*tables: tuple[str, str, str], weighted: bool = False) -> tuple[Plan, EmbeddingBagCollection]:
    """A plan with all rows split over two ranks, and its collection. tables: (name, pooling, its features, one letter each)."""
    some = tuple(change(ITEM, name=name, pooling=pooling, weighted=weighted) for name, pooling, _ in tables)
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=ITEM.rows,
            embedding_dim=ITEM.dim,
            feature_names=list(features),
            pooling=PoolingType[pooling.upper()],
        )
        for name, pooling, features in tables
    ]
    shards = [shard for table in some for shard in row_wise_shards(table, 2)]
    plan = Plan(task=make_plan(tables=some).task, shards=tuple(shards), provenance=make_plan().provenance)
    return plan, EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))


@pytest.mark.filterwarnings("ignore:table .* is read by 2 features:neuroshard.client.torchrec.ShardingWarning")
@pytest.mark.parametrize(
    "tables",
    [
        [("a", "sum", "x"), ("b", "sum", "x"), ("c", "mean", "z")],
        [("c", "mean", "z"), ("a", "sum", "xy"), ("b", "sum", "y")],
        [("a", "mean", "xy"), ("b", "sum", "x")],
    ],
    ids=["sums", "sums, the mean first", "a mean and a sum"],
)
def test_sums_that_share_a_feature_beside_means_of_split_rows_are_refused_in_torchrecs_own_plan_too(tables):
    plan, module = all_row_wise(*tables)
    with refused(InvalidInput, "module ''", "mean", "row-wise", "'a'", "'b'", "feature"):
        to_torchrec(plan, module)
    theirs = construct_module_sharding_plan(
        module, {name: row_wise() for name, *_ in tables}, world_size=2, local_size=2, device_type="cpu"
    )
    with refused(InvalidInput, "module ''", "mean", "row-wise", "'a'", "'b'", "feature"):
        taken_over(ShardingPlan(plan={"": theirs}), module)


@pytest.mark.filterwarnings("ignore:table .* is read by 2 features:neuroshard.client.torchrec.ShardingWarning")
def test_means_of_split_rows_may_share_a_feature():
    plan, module = all_row_wise(("a", "mean", "x"), ("b", "mean", "xy"), ("c", "sum", "z"))
    assert {of.sharding_type for of in to_torchrec(plan, module).plan[""].values()} == {"row_wise"}


def test_weighted_means_are_warned_of_and_of_split_rows_refused():
    plan, module = all_row_wise(("a", "mean", "x"), weighted=True)
    with (
        warned(ShardingWarning, "'a'", "mean with weights"),
        refused(InvalidInput, "'a'", "mean", "row-wise", "weights"),
    ):
        to_torchrec(plan, module)
    theirs = construct_module_sharding_plan(module, {"a": row_wise()}, world_size=2, local_size=2, device_type="cpu")
    with refused(InvalidInput, "'a'", "mean", "row-wise", "weights"):
        taken_over(ShardingPlan(plan={"": theirs}), module)


class ByLength(nn.Module):
    """A feature processor of a user's own, which looks at whole bags, and has no pre_process_input."""


@pytest.mark.filterwarnings("ignore:table .* is pooled by sum with weights:neuroshard.client.torchrec.ShardingWarning")
def test_feature_processors_that_row_splits_change_are_warned_of_and_those_that_fail_refused():
    split, inner = all_row_wise(("a", "sum", "x"), ("b", "sum", "y"), weighted=True)
    whole = Plan(
        task=split.task,
        shards=tuple(Shard(table=n, rows=300, dim=8, device=0) for n in "ab"),
        provenance=split.provenance,
    )
    own = FeatureProcessedEmbeddingBagCollection(inner, {"x": PositionWeightedModule(3), "y": ByLength()})
    with warned(ShardingWarning, "'b'", "ByLength", "pre_process_input", "--no-row-wise"):
        to_torchrec(split, own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_torchrec(whole, own)

    def both_read(feature: str, rows: int, processors: Any) -> None:
        tables = (change(ITEM, name="a", weighted=True), change(ITEM, name="b", weighted=True, rows=rows))
        configs = [
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=8, feature_names=[feature])
            for t in tables
        ]
        bags = EmbeddingBagCollection(tables=configs, is_weighted=True, device=torch.device("meta"))
        shards = tuple(shard for table in tables for shard in row_wise_shards(table, 2))
        plan = Plan(task=make_plan(tables=tables).task, shards=shards, provenance=split.provenance)
        to_torchrec(plan, FeatureProcessedEmbeddingBagCollection(bags, processors))

    both_read("x", 300, {"x": PositionWeightedModule(3)})
    both_read("x", 200, PositionWeightedModuleCollection({"x": 3}))
    with refused(InvalidInput, "'a'", "'b'", "feature 'x'", "rank 0", "PositionWeightedModuleCollection"):
        both_read("x", 200, {"x": PositionWeightedModule(3)})


def test_all_rows_on_the_first_of_several_ranks_are_a_whole_table():
    table = change(ITEM, rows=1)
    module = collection(table)
    theirs = construct_module_sharding_plan(module, {"item": row_wise()}, world_size=4, local_size=4, device_type="cpu")
    plan = taken_over(ShardingPlan(plan={"": theirs}), module, devices=4)

    assert plan.shards == (Shard(table="item", rows=1, dim=8, device=0),)
    assert to_torchrec(plan, module).plan[""]["item"] == parameter("table_wise", [(0, 8, 0)], 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_split_of_rows_is_torchrecs_own_or_refused_in_one_line(data):
    devices, rows = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 40))
    table = change(ITEM, rows=rows)
    blocks = [block for block in table.row_blocks(devices) if block[1]]
    cuts = {first for first, _ in blocks} ^ data.draw(st.sets(st.integers(1, rows - 1), max_size=1))
    ranks = list(range(len(cuts)))
    if data.draw(st.booleans()):
        ranks = data.draw(st.lists(st.integers(0, devices - 1), min_size=len(cuts), max_size=len(cuts)))
    assume(len(cuts) > 1)
    firsts = sorted(cuts)
    ends = [*firsts[1:], rows]
    shards = [(a, b - a, min(rank, devices - 1)) for a, b, rank in zip(firsts, ends, ranks, strict=True)]
    plan, module = item_in(*data.draw(st.permutations(shards)), devices=devices, table=table), collection(table)
    theirs = construct_module_sharding_plan(
        module, {"item": row_wise()}, world_size=devices, local_size=devices, device_type="cpu"
    )
    as_theirs = [(first, n, rank) for rank, (first, n) in enumerate(blocks)]
    if shards != as_theirs or len(blocks) < devices:
        with refused(InvalidInput, "table 'item'"):
            to_torchrec(plan, module)
    else:
        assert to_torchrec(plan, module).plan[""]["item"].sharding_spec == theirs["item"].sharding_spec


def test_numpy_s_numbers_are_numbers() -> None:
    how: dict[str, Any] = {"world_size": np.int64(2), "batch_size": np.int32(64)}
    to_torchrec(make_plan(), collection(*TABLES), **how)


def test_a_planner_s_plan_and_the_memory_of_each_rank_are_asked_for_by_name() -> None:
    with refused(UsageError, "None", "ShardingPlan"):
        from_torchrec(None, collection(*TABLES), device_memory_bytes=[1], batch_size=1)
    with refused(UsageError, "device_memory_bytes", "64"):
        from_torchrec(ShardingPlan(plan={}), collection(*TABLES), device_memory_bytes=64, batch_size=1)  # type: ignore[arg-type]


def test_the_world_size_is_that_of_torch_distributed(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with refused(InvalidInput, "2 ranks", 1):
            to_torchrec(make_plan(), collection(*TABLES))
    finally:
        torch.distributed.destroy_process_group()


def test_memory_counts_what_a_step_needs_beside_that_state_and_a_reserve():
    """Rank 1 holds as much of user, and item: 41,600 bytes of weights, 83,200 of Adam's moments, and for two batches of 64 the
    lookups of two shards of user and one of item: 6,144 bytes."""
    used = 41_600 + 83_200 + 2 * 64 * 8 * (2.5 * 2 + 1)
    plan = make_plan(memory_bytes=int(used) + 1000)

    def with_step(reserve_bytes: int) -> Plan:
        update = {"pipeline": "sparse-dist", "constraints": Constraints(reserve_bytes=reserve_bytes)}
        return Plan(task=plan.task.model_copy(update=update), shards=plan.shards, provenance=plan.provenance)

    to_torchrec(with_step(1000), collection(*TABLES), optimizer="adam")
    with refused(InvalidInput, "rank 1"):
        to_torchrec(with_step(1001), collection(*TABLES), optimizer="adam")


def test_from_torchrec_counts_what_a_step_needs_where_it_is_given_a_pipeline():
    sharding, module = to_torchrec(make_plan(), collection(*TABLES)), collection(*TABLES)
    memory: dict[str, Any] = {"device_memory_bytes": [2**20] * 2, "batch_size": 64, "tables": TABLES}
    counted = from_torchrec(sharding, module, pipeline="prefetch", **memory)
    task = make_plan().task.model_copy(
        update={"pipeline": "prefetch", "step_ledger": 1, "device_memory_bytes": (2**20,) * 2}
    )
    assert [used.step for used in counted.device_memory()] == [
        peak.nbytes for peak in peaks_of(task, make_plan().shards)
    ]
    assert from_torchrec(sharding, module, **memory).device_memory()[0].step == 0
    with refused(InvalidInput, "pipeline", "'none'", "'sparse-dist'", "'prefetch'", "'x'"):
        from_torchrec(sharding, module, pipeline="x", **memory)


def test_memory_counts_the_state_of_the_trainers_optimizer():
    """Rank 0 holds 1000 x 8 of user and 7 x 4 of country: 32,112 bytes of weights, 64,224 of Adam's moments."""
    plan = make_plan(memory_bytes=60_000)
    module = collection(*TABLES)
    to_torchrec(plan, module, optimizer="sgd")

    with refused(InvalidInput, "rank 0", "94.1 KiB of 58.6 KiB", "'user'", "(`neuroshard tables … --optimizer adam`)"):
        to_torchrec(plan, module, optimizer="adam")


def test_row_wise_adagrad_on_split_columns_is_warned_of():
    with warned(ShardingWarning, "1 table", "'user' into 4"):
        to_torchrec(make_plan(), collection(*TABLES), optimizer="rowwise_adagrad")


def test_row_wise_adagrad_on_split_rows_is_not_warned_of():
    to_torchrec(item_in((0, 150, 0), (150, 150, 1)), collection(ITEM), optimizer="rowwise_adagrad")


def test_where_the_trainer_names_no_optimizer_the_one_that_the_plan_counts_is_warned_of():
    with warned(ShardingWarning, "'user' into 4", "row-wise Adagrad", "sharders=", "optimizer="):
        to_torchrec(make_plan(), collection(*TABLES))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_other_optimizers_are_not_warned_of(optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_torchrec(make_plan(), collection(*TABLES), optimizer=optimizer, any_output_order=True)


def sequences(*names: str) -> EmbeddingCollection:
    configs = [EmbeddingConfig(name=n, num_embeddings=8, embedding_dim=16, feature_names=[n]) for n in names]
    return EmbeddingCollection(tables=configs, device=torch.device("meta"))


def plan_of_sequences(devices: int, *shards: tuple[str, int, int, int, int, int]) -> Plan:
    """shards: (table, first row, rows, column, columns, rank), of sequences of 8 rows and 16 columns."""
    tables = (
        Table(name=n, rows=8, dim=16, pooling_factor=2.0, pooling="none") for n in sorted({n for n, *_ in shards})
    )
    cut = (
        Shard(table=n, row_offset=row, rows=rows, column_offset=at, dim=dim, device=rank)
        for n, row, rows, at, dim, rank in shards
    )
    task = ShardingTask(tables=tuple(tables), device_memory_bytes=(10**6,) * devices, batch_size=8)
    return Plan(task=task, shards=tuple(cut), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


A_SEQUENCE = Table(name="a", rows=8, dim=16, pooling_factor=2.0)  # or pooled
FEW_ROWS = change(ITEM, rows=5)
TWO_ITEMS = nn.ModuleDict({"a": collection(USER, ITEM), "b": collection(ITEM)})
HALVES = item_in((0, 150, 0), (150, 150, 1))
CUT_BOTH_WAYS = [one.model_copy(update={"dim": 4, "column_offset": at}) for one in HALVES.shards for at in (0, 4)]
MEANS_IN_A_HOST = Plan(
    task=ShardingTask(tables=(change(ITEM, pooling="mean"), COUNTRY), device_memory_bytes=(2**20,) * 4, batch_size=64),
    shards=(
        *item_in((0, 150, 2), (150, 150, 3), devices=4).shards,
        Shard(table="country", rows=COUNTRY.rows, dim=COUNTRY.dim, device=0),
    ),
    provenance=make_plan().provenance,
)


def in_sequences(devices: int, *shards: tuple[str, int, int, int, int, int]) -> tuple[Plan, nn.Module]:
    plan = plan_of_sequences(devices, *shards)
    return plan, sequences(*(table.name for table in plan.task.tables))


# What a plan, or its module, is that to_torchrec refuses with InvalidInput, and the facts that are named
OF_TWO_WIDTHS: Any = {
    "on one rank": (
        [("a", 0, 8, 8 * i, 8, i) for i in (0, 1)] + [("b", 0, 8, 0, 4, 0), ("b", 0, 8, 4, 12, 1)],
        "'b'",
        8,
        4,
    ),
    "of one table": ([("a", 0, 8, 0, 4, 0), ("a", 0, 8, 4, 12, 1)], "rank 0", "rank 1", 4, 12),
    "of two tables": (
        [("a", 0, 8, 4 * i, 4, i % 2) for i in range(4)] + [("b", 0, 8, 8 * i, 8, 2 + i) for i in (0, 1)],
        *("'b'", "rank 0", "rank 2", 4, 8),
    ),
}
OVER_RANKS: dict[Any, list[str]] = {  # rows that TorchRec would look for elsewhere
    (2, (0, 150, 1), (150, 150, 0)): ["rows 0-149 of 300 on rank 1", "rows 0-149 on rank 0", "2 ranks", "150 each"],
    (2, (0, 151, 0), (151, 149, 1)): ["rows 0-150 of 300 on rank 0", "has rows 0-149 on rank 0"],
    (2, (0, 100, 0), (100, 200, 1)): ["rows 0-99 of 300 on rank 0", "has rows 0-149 on rank 0"],
    (4, (0, 150, 0), (150, 150, 1)): ["rows 0-149 of 300 on rank 0", "rows 0-74 on rank 0", "all 4 ranks"],
    (4, (0, 75, 0), (75, 75, 1), (150, 150, 2)): ["rows 150-299 of 300 on rank 2", "rows 150-224 on rank 2"],
    (2, (0, 75, 0), (75, 75, 0), (150, 150, 1)): ["rows 0-74 of 300 on rank 0", "rows 0-149 on rank 0"],
    (1, (0, 150, 0), (150, 150, 0)): ["rows 0-149 of 300 on rank 0", "rows 0-299 on rank 0"],
}
OVER_HOSTS = {  # of two ranks, of four
    ((0, 150, 1), (150, 150, 2)): ["rows 0-149 of 300 on rank 1", "row-wise sharding has rows 0-74 on rank 0"],
    ((0, 150, 3), (150, 150, 2)): ["rows 0-149 of 300 on rank 3", "table-row-wise sharding has rows 0-149 on rank 2"],
    ((0, 151, 2), (151, 149, 3)): ["rows 0-150 of 300 on rank 2", "table-row-wise sharding has rows 0-149 on rank 2"],
    ((0, 150, 2), (150, 75, 3), (225, 75, 3)): ["rows 150-224 of 300 on rank 3", "has rows 150-299 on rank 3"],
    ((0, 100, 0), (100, 100, 1), (200, 100, 2)): ["rows 0-99 of 300 on rank 0", "or over the 2 of a domain", "grid"],
}
ON_TWO, ON_FOUR = {"local_world_size": 2}, {"local_world_size": 4}
REFUSED: Any = [
    (user_in((0, 4, 1), (4, 4, 0), (8, 8, 1)), collection(USER), {}, ["'user'", "rank 1", "0 to 4, 8 to 16"]),
    (make_plan(), TWO_ITEMS, {}, ["'item' is in module 'a' and in 'b'", "without a module"]),
    (twins("a", "c"), TWO_ITEMS, {}, ["'item' is in module 'a' and in 'b'", "in module 'c'"]),
    (twins("a"), TWO_ITEMS, {}, ["lacks table 'b.item'"]),
    (twins("a", "b", ""), TWO_ITEMS, {}, ["'item' is in module 'a' and in 'b'", "without a module"]),
    (
        twins("a", "b"),
        nn.ModuleDict({"a": collection(USER, ITEM)}),
        {},
        ["'a.item'", "'b.item'", "'item'", "module 'a'"],
    ),
    (make_plan(), nn.Linear(4, 4), {}, ["Linear has no EmbeddingBagCollection"]),
    (make_plan(), collection(USER, ITEM), {}, ["has table 'country', which the model lacks"]),
    (make_plan(), collection(*TABLES, change(ITEM, name="new")), {}, ["lacks table 'new', which the model has"]),
    (make_plan(), collection(change(USER, rows=999), ITEM, COUNTRY), {}, ["'user'", "1,000 rows", "999 rows"]),
    (make_plan(), collection(USER, ITEM.with_dim(12), COUNTRY), {}, ["'item'", "dim 8", "dim 12"]),
    (
        make_plan(),
        collection(*TABLES, data_type=DataType.FP16),
        {},
        ["'user' is FP16 in module ''", "4 bytes an element"],
    ),
    (make_plan(), nn.ModuleDict({"a": collection(*TABLES), "s": sequences("seq")}), {}, ["'seq'", "lacks"]),
    (with_shard(0, device=2), collection(*TABLES), {}, ["'user'", "device 2", "there are 2"]),
    (with_shard(0, dim=6), collection(*TABLES), {}, ["'user'", "6 columns", "multiples of 4"]),
    (with_shard(0, dim=8), collection(*TABLES), {}, ["'user'", "overlapping", "columns 0-7"]),
    (with_shard(4, dim=4), collection(*TABLES), {}, ["'item'", "gap", "1,200 of 2,400"]),
    (with_shard(4, rows=301), collection(*TABLES), {}, ["'item'", "row 301"]),
    (with_shard(4, table="nobody"), collection(*TABLES), {}, ["'nobody'"]),
    (make_plan().model_copy(update={"shards": make_plan().shards[1:]}), collection(*TABLES), {}, ["'user'", "gap"]),
    (make_plan().model_copy(update={"task_digest": "0" * 64}), collection(*TABLES), {}, ["task_digest"]),
    *(
        (item_in(*rows, devices=n), collection(ITEM), {}, ["'item'", *facts])
        for (n, *rows), facts in OVER_RANKS.items()
    ),
    *((item_in(*rows, devices=4), collection(ITEM), ON_TWO, ["'item'", *facts]) for rows, facts in OVER_HOSTS.items()),
    (
        item_in((0, 2, 4), (2, 2, 5), (4, 1, 6), devices=8, table=FEW_ROWS),
        *(collection(FEW_ROWS), ON_FOUR, ["item", "5 rows", "rank 7"]),
    ),
    (
        HALVES.model_copy(update={"shards": tuple(CUT_BOTH_WAYS)}),
        *(collection(ITEM), {}, ["'item'", "rank 0", "rows 0-149", "columns 0-3"]),
    ),
    (MEANS_IN_A_HOST, collection(*MEANS_IN_A_HOST.task.tables), ON_TWO, ["'item'", "mean", "row-wise", "'country'"]),
    *((*in_sequences(4, *cut), {}, ["'a'", "module ''", *facts]) for cut, *facts in OF_TWO_WIDTHS.values()),
    (*in_sequences(4, *(("a", 4 * i, 4, 0, 16, i) for i in (0, 1))), ON_TWO, ["'a'", "sequence", "table_row_wise"]),
    (
        *in_sequences(4, *(("a", 4 * (i % 2), 4, 8 * (i // 2), 8, i) for i in range(4))),
        *(ON_TWO, ["'a'", "module ''", "sequence", "grid_shard"]),
    ),
    (make_plan(tables=(A_SEQUENCE,)), sequences("a"), {}, ["'a'", "module ''", "a sequence", "pooled", "sum"]),
    (
        plan_of_sequences(2, ("a", 0, 8, 0, 16, 0)),
        *(collection(A_SEQUENCE), {}, ["'a'", "module ''", "a sequence", "pooled", "none"]),
    ),
    *((make_plan(), collection(*TABLES), {"world_size": ranks}, ["2 ranks", ranks]) for ranks in (1, 4)),
]
WRONG_ARGUMENTS: Any = [
    *(({"compute_kernel": kernel}, [repr(kernel), "fused"]) for kernel in KERNELS),
    *(({"local_world_size": ranks}, ["local_world_size", repr(ranks)]) for ranks in (0, -2, "2")),
    ({"world_size": "2"}, ["world_size", "'2'", "int(…)"]),
    ({"batch_size": 64.0}, ["batch_size", "64.0"]),
    ({"sharders": EmbeddingBagCollectionSharder()}, ["sharders", "list"]),
    ({"sharders": [EmbeddingBagCollectionSharder]}, ["sharders", "list", "class"]),
    ({"device_type": "tpu"}, ["tpu"]),
    ({"optimizer": "lion"}, ["lion"]),
]


@pytest.mark.parametrize(("plan", "module", "how", "facts"), REFUSED)
def test_what_torchrec_would_get_wrong_is_refused(plan: Plan, module: nn.Module, how: Any, facts: list[object]) -> None:
    with refused(InvalidInput, *facts):
        to_torchrec(plan, module, **how)


@pytest.mark.parametrize(("how", "facts"), WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named(how: dict[str, Any], facts: list[object]) -> None:
    with refused(UsageError, *facts):
        to_torchrec(make_plan(), collection(*TABLES), **how)


def test_a_frozen_table_is_warned_of():
    bags = collection(*TABLES)
    weight_of(bags, "item").requires_grad_(False)
    with warned(ShardingWarning, "'item'", "module 'm'", "frozen", "learning rate of 0"):
        to_torchrec(make_plan(), nn.ModuleDict({"m": bags}))


def _frozen_rows(bags: EmbeddingBagCollection) -> None:
    weight_of(bags, "item").register_hook(torch.zeros_like)


def _normed(bags: EmbeddingBagCollection) -> None:
    bags.embedding_bags["item"].register_forward_pre_hook(lambda module, inputs: None)


def _logged(bags: EmbeddingBagCollection) -> None:
    bags.register_forward_hook(lambda module, inputs, output: None)


@pytest.mark.parametrize("hang", [_frozen_rows, _normed, _logged])
def test_hooks_that_torchrec_drops_are_warned_of(hang):
    bags = collection(*TABLES)
    hang(bags)
    with warned(ShardingWarning, "module 'm'", "hooks", "after DistributedModelParallel"):
        to_torchrec(make_plan(), nn.ModuleDict({"m": bags}))


def test_a_compiled_collection_is_refused_and_one_in_a_compiled_module_is_not():
    """The call that torch.compile has made is that of the unsharded collection, wherever TorchRec puts a sharded one."""
    compiled: Any = torch.compile(collection(*TABLES), backend="eager")
    model = nn.ModuleDict({"m": compiled})
    for use in (lambda: to_torchrec(make_plan(), model), lambda: ns.tables(model, quiet=True)):
        with refused(InvalidInput, "'m'", "EmbeddingBagCollection", "torch.compile", "after DistributedModelParallel"):
            use()
    around: Any = torch.compile(nn.ModuleDict({"m": collection(*TABLES)}), backend="eager")
    assert list(to_torchrec(make_plan(), around).plan) == ["_orig_mod.m"]


def test_a_collection_that_only_a_plain_list_holds_is_warned_of_and_noted_at_import():
    """TorchRec puts sharded modules in place of a module's attributes, and leaves a list as it is."""
    model, hidden = nn.ModuleDict({"m": collection(*TABLES)}), collection(ITEM)
    vars(model)["towers"] = [hidden, nn.Linear(2, 2)]
    with warned(ShardingWarning, "EmbeddingBagCollection of 'towers'", "nn.ModuleList"):
        to_torchrec(make_plan(), model)
    assert any("of 'towers'" in note for note in ns.tables(model, quiet=True).notes)
    del vars(model)["towers"]
    vars(model)["also"] = [model["m"]]
    with warned(ShardingWarning, "EmbeddingBagCollection of 'also'", "unsharded"):
        to_torchrec(make_plan(), model)


def test_a_table_without_weights_whose_collection_says_another_device_is_warned_of():
    bags = collection(*TABLES)
    bags._device = torch.device("cpu")  # as that of sequences made under `with torch.device("meta")`
    with warned(ShardingWarning, "module 'm' (and 2 more)", "on the meta device", "device=torch.device('meta')"):
        to_torchrec(make_plan(), nn.ModuleDict({"m": bags}))


def test_a_table_that_several_features_read_is_placed_and_another_number_of_them_warned_of():
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=features)
            for t, features in zip(TABLES, (["viewer", "author"], ["item"], ["country"]), strict=True)
        ],
        device=torch.device("meta"),
    )
    with warned(ShardingWarning, "'user'", "2 features", 1):
        got = to_torchrec(make_plan(), module)

    assert got == to_torchrec(make_plan(), collection(*TABLES))


def test_a_plan_taken_over_is_shown_and_deployed_and_ours_is_weighed_against_it(tmp_path, neuroshard):
    tables = tuple(Table(name=f"t{i}", rows=1000 * (i + 1), dim=32, pooling_factor=3.0 + i) for i in range(6))
    module = collection(*tables)
    lopsided = {
        table.name: parameter("table_wise", [(0, 32, 0 if index else 1)], table.rows)
        for index, table in enumerate(tables)
    }
    found = ns.tables(module, pooling_factors={table.name: table.pooling_factor for table in tables})
    theirs = from_torchrec(
        ShardingPlan(plan={"": EmbeddingModuleShardingPlan(lopsided)}),
        module,
        device_memory_bytes=(2**28,) * 2,
        batch_size=65536,
        tables=found,
    )
    write_plan(tmp_path / "theirs.json", theirs)
    found.save(tmp_path / "tables.json")

    def step(*arguments: object) -> str:
        done = neuroshard(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = ("--store", "store", "--name", "m", "--tables", "tables.json")
    assert "by torchrec" in step("show", "theirs.json")
    assert "m release 1 is live" in step("deploy", "theirs.json", *place)
    step("search", "tables.json", "--model", "analytic:h100", "--devices", 2, "--memory", "256MiB", "--batch-size", 65536,
        "--allocator-share", 0, "-o", "ours.json")  # fmt: skip
    said = step("deploy", "ours.json", *place, "--model", "analytic:h100")
    assert "m release 2 is live" in said
    assert "lower than the live plan's" in said
    assert f"plan {theirs.digest()[:12]} (rolled back)" in step("rollback", *place[:4])


def taken_over(sharding_plan: ShardingPlan, module: nn.Module, devices: int = 2) -> Plan:
    given = fused(sharding_plan)
    return from_torchrec(given, module, device_memory_bytes=(2**20,) * devices, batch_size=64)


def fused(sharding_plan: ShardingPlan) -> ShardingPlan:
    """The plan with kernels that plans of ours hold: TorchRec calls tables without an optimizer in backward dense."""
    for table in (table for tables in sharding_plan.plan.values() for table in tables.values()):
        if table.sharding_type != "data_parallel":
            table.compute_kernel = "fused"
    return sharding_plan


def test_a_grid_of_a_table_pooled_by_mean_is_refused():
    """TorchRec adds up the means of its row blocks."""
    config = EmbeddingBagConfig(
        name="a", embedding_dim=256, num_embeddings=1001, feature_names=["a"], pooling=PoolingType.MEAN
    )
    module = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    makers = {"a": grid_shard([0, 1])}
    theirs = construct_module_sharding_plan(module, makers, world_size=8, local_size=4, device_type="cpu")
    with refused(InvalidInput, "'a'", "mean", "grid"):
        from_torchrec(fused(ShardingPlan(plan={"": theirs})), module, device_memory_bytes=(2**40,) * 8, batch_size=4)


def test_a_grid_is_taken_over_and_said_and_given_back():
    big = Table(name="a", rows=1001, dim=256, pooling_factor=1)
    module = collection(big, ITEM)
    makers = {"a": grid_shard([0, 1]), "item": table_row_wise(1)}
    theirs = construct_module_sharding_plan(module, makers, world_size=8, local_size=4, device_type="cpu")
    plan = taken_over(ShardingPlan(plan={"": theirs}), module, devices=8)

    held = {(s.table, s.row_offset, s.rows, s.column_offset, s.dim, s.device) for s in plan.shards}
    assert len(held) == 12
    assert {("a", 0, 251, 0, 128, 0), ("a", 753, 248, 128, 128, 7), ("item", 225, 75, 0, 8, 7)} <= held
    rows, grid = plan.provenance.notes
    assert rows.startswith("row-wise over the ranks of a host (table-row-wise): 'item'; to_torchrec accepts")
    assert grid.startswith("column-wise over hosts and row-wise over their ranks (grid): 'a'; to_torchrec accepts")
    back = to_torchrec(plan, module, local_world_size=4).plan[""]
    assert back["a"].sharding_type == "grid_shard"
    assert back["a"].ranks == theirs["a"].ranks
    assert [(s.shard_offsets, s.shard_sizes) for s in back["a"].sharding_spec.shards] == [
        (s.shard_offsets, s.shard_sizes) for s in theirs["a"].sharding_spec.shards
    ]
    with refused(InvalidInput, "'a'", "grid", "2 ranks"):
        to_torchrec(plan, module, local_world_size=2)


@pytest.mark.parametrize("rows", [300, 301, 2])
def test_what_torchrecs_planner_splits_over_the_ranks_of_a_host_comes_back_as_it_was(rows):
    module = collection(change(ITEM, rows=rows), USER, COUNTRY)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=2**30),
        constraints={"country": ParameterConstraints(sharding_types=["row_wise"])}
        | {name: ParameterConstraints(sharding_types=["table_row_wise"]) for name in ("user", "item")},
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    theirs = planner.plan(module, [EmbeddingBagCollectionSharder()])
    plan = taken_over(theirs, module, devices=4)
    given = to_torchrec(plan, module, device_type="cuda", local_world_size=2)

    assert {name: of.sharding_type for name, of in given.plan[""].items()} == {
        "item": "table_row_wise",
        "user": "table_row_wise",
        "country": "row_wise",
    }
    assert {of.ranks[0] for of in given.plan[""].values()} == {0, 2}
    for name, of in theirs.plan[""].items():
        assert (given.plan[""][name].ranks, given.plan[""][name].sharding_spec) == (of.ranks, of.sharding_spec)


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("full", [0.6, 0.9, 0.98, 0.995])
def test_what_is_taken_over_of_a_nearly_full_fleet_is_given_back(ranks, full):
    """By TorchRec's planner with its defaults; a table of 177 rows has blocks of 12 on 16 ranks, which leave one without rows."""
    rows = (177, 90_000, 700_000, 2_000_000, 9_000_000)
    tables = [Table(name=f"t{n}", rows=rows, dim=64, pooling_factor=1) for n, rows in enumerate(rows)]
    module, memory = collection(*tables), round(sum(table.memory_bytes for table in tables) / full / ranks)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, local_world_size=8, compute_device="cuda", hbm_cap=memory, ddr_cap=2**33),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        batch_size=64,
    )
    theirs = planner.plan(module, [EmbeddingBagCollectionSharder()])
    options: dict[str, Any] = {"device_memory_bytes": [memory * 2] * ranks, "batch_size": 64 * ranks}
    options |= {"host_memory_bytes": 2**36, "local_world_size": 8}
    if theirs.plan[""]["t0"].sharding_type == "row_wise" and ranks == 16:
        with refused(InvalidInput, "'t0'", 177, "rank 15", "whole"):
            from_torchrec(theirs, module, **options)
        return
    plan = from_torchrec(theirs, module, **options)
    given = to_torchrec(plan, module, device_type="cuda", local_world_size=8, any_output_order=True)
    for name, of in theirs.plan[""].items():
        assert (given.plan[""][name].compute_kernel, given.plan[""][name].sharding_spec) == (
            of.compute_kernel,
            of.sharding_spec,
        )


def test_hosts_of_a_torchrec_plan_are_those_that_it_is_priced_for():
    module = collection(*TABLES)
    theirs = to_torchrec(row_plan(4), module, device_type="cuda", local_world_size=4)

    def taken(**hosts: Any) -> Plan:
        return from_torchrec(theirs, module, device_memory_bytes=[2**30] * 4, batch_size=64, **hosts)

    assert taken().task.topology is None
    plan = taken(local_world_size=2, network="1GB/s")
    assert plan.task.topology == Domains(domain=2, local_world_size=2, network_bytes_per_s=1e9)
    assert ns.price(plan, "analytic:h100").cost_ms > ns.price(taken(), "analytic:h100").cost_ms
    with refused(UsageError, 4, 3):
        taken(local_world_size=3)


def grid_of(table: Table, domain: int, local: int) -> Plan:
    """The table in a grid over two domains."""
    shards = [
        one.model_copy(
            update={"dim": table.dim // 2, "column_offset": part * table.dim // 2, "device": at + one.device}
        )
        for part, at in enumerate((0, domain))
        for one in row_wise_shards(table, domain)
    ]
    topology = Domains(domain=domain, local_world_size=local)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**20,) * 2 * domain, batch_size=64, topology=topology)
    return Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


@pytest.mark.parametrize("optimizer", [None, "rowwise_adagrad", "partial_rowwise_adam", "partial_rowwise_lamb"])
def test_a_grid_over_several_hosts_is_refused_for_an_optimizer_with_state_per_row(optimizer):
    """tests/client/test_row_wise_training.py shows what TorchRec does."""
    facts = ("'item'", "domains of 2 ranks", "hosts of 1", optimizer or "plan", "state per row", "--sharding-types")
    with refused(InvalidInput, *facts):
        to_torchrec(grid_of(ITEM, 2, 1), collection(ITEM), optimizer=optimizer)
    over_hosts = grid_of(ITEM, 2, 2)
    one_domain = over_hosts.task.model_copy(update={"topology": Domains(domain=4, local_world_size=2)})
    in_one = Plan(task=one_domain, shards=over_hosts.shards, provenance=over_hosts.provenance)
    for plan in (over_hosts, in_one):
        given = to_torchrec(plan, collection(ITEM), local_world_size=2)
        assert given.plan[""]["item"].sharding_type == "grid_shard"


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", None])
def test_a_grid_over_several_hosts_is_given_to_a_trainer_without_such_state(optimizer):
    table = ITEM if optimizer else change(ITEM, optimizer_bytes_per_row=0)
    given = to_torchrec(grid_of(table, 2, 1), collection(ITEM), optimizer=optimizer)
    assert given.plan[""]["item"].ranks == [0, 1, 2, 3]


REDUCE_SCATTER, ALL_TO_ALL = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER, CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL


@pytest.mark.parametrize(
    ("plan", "launched"),
    [
        (item_in((0, 300, 0), devices=4), {ALL_TO_ALL}),
        (item_in(*((75 * rank, 75, rank) for rank in range(4)), devices=4), {REDUCE_SCATTER}),
        (item_in((0, 150, 2), (150, 150, 3), devices=4), {REDUCE_SCATTER, ALL_TO_ALL}),
        (grid_of(ITEM, 2, 2), {REDUCE_SCATTER, ALL_TO_ALL}),
    ],
    ids=["whole", "row-wise", "table-row-wise", "grid"],
)
def test_a_sharder_needs_codecs_for_the_collectives_of_its_tables_alone(plan, launched):
    task = plan.task.model_copy(update={"collective_precision": parse_precision("fp16")})
    coded = Plan(task=task, shards=plan.shards, provenance=plan.provenance)
    all_codecs = qcomms(coded, "cpu") or {}

    def given(*operations: CommOp) -> None:
        registry = {name: codecs for name, codecs in all_codecs.items() if name in {one.name for one in operations}}
        sharder = EmbeddingBagCollectionSharder(fused_params={}, qcomm_codecs_registry=registry)
        to_torchrec(coded, collection(ITEM), local_world_size=2, sharders=[sharder])

    given(*launched)
    for operation in launched:
        with warned(ShardingWarning, operation.value, "fp32", "fp16"):
            given(*launched - {operation})


def test_the_rows_of_a_host_s_ranks_are_not_taken_where_ranks_make_no_whole_hosts():
    shards = [(0, 75, 0), (75, 75, 1), (150, 75, 2), (225, 75, 3)]
    with refused(
        InvalidInput, "'item'", "rows 0-74 of 300 on rank 0", "row-wise sharding has rows 0-49", "all 6 ranks"
    ):
        to_torchrec(item_in(*shards, devices=6), collection(ITEM), local_world_size=4)
    with refused(InvalidInput, "'item'", "rows 0-74 of 300 on rank 0", "row-wise sharding has rows 0-49"):
        of = rows_parameter(*shards, kind="table_row_wise")
        taken_over(ShardingPlan(plan={"": EmbeddingModuleShardingPlan(item=of)}), collection(ITEM), devices=6)


def test_a_host_is_by_default_what_torchrun_says_and_must_be_where_torchrec_runs(tmp_path, monkeypatch):
    plan, module = item_in((0, 150, 2), (150, 150, 3), devices=4), collection(ITEM)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    given = to_torchrec(plan, module)
    assert given.plan[""]["item"] == rows_parameter((0, 150, 2), (150, 150, 3), kind="table_row_wise")

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert to_torchrec(plan, module, local_world_size=2) == given
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with refused(InvalidInput, "'item'", "2 ranks", "rank 2", 4):
            to_torchrec(plan, module, local_world_size=2, world_size=4)
    finally:
        torch.distributed.destroy_process_group()


def test_a_trainer_has_the_hosts_and_domains_that_the_plan_was_searched_for(tmp_path, monkeypatch):
    module = collection(ITEM)
    plan = item_in((0, 300, 2), devices=4, topology=Domains(domain=2, local_world_size=1))
    with refused(InvalidInput, "hosts of 1 rank", "has 2", "--local-world-size 2"):
        to_torchrec(plan, module, local_world_size=2)

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        with refused(InvalidInput, "domains of 2 ranks", "have 1", "TORCHREC_RESOLVED_POD_SIZE=2", "--domain 1"):
            to_torchrec(plan, module, world_size=4)
        monkeypatch.setenv("TORCHREC_RESOLVED_POD_SIZE", "two")
        with refused(InvalidInput, "TORCHREC_RESOLVED_POD_SIZE"):
            to_torchrec(plan, module, world_size=4)
        monkeypatch.setenv("TORCHREC_RESOLVED_POD_SIZE", "2")
        assert to_torchrec(plan, module, world_size=4).plan[""]["item"].ranks == [2]
        one = item_in((0, 300, 2), devices=4, topology=Domains(domain=4, local_world_size=4))  # all links are equal
        assert to_torchrec(one, module, world_size=4).plan[""]["item"].ranks == [2]
    finally:
        torch.distributed.destroy_process_group()


def test_what_torchrecs_planner_plans_is_taken_over():
    module = collection(Table(name="a", rows=1000, dim=128, pooling_factor=1), USER, ITEM)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=4, compute_device="cuda", hbm_cap=2**30),
        constraints={"a": ParameterConstraints(min_partition=32, sharding_types=["column_wise"])}
        | {name: ParameterConstraints(sharding_types=["table_wise"]) for name in ("user", "item")},
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    theirs = planner.plan(module, [EmbeddingBagCollectionSharder()])
    plan = taken_over(theirs, module, devices=4)

    assert {table.name for table in plan.task.tables} == {"a", "user", "item"}
    assert to_torchrec(plan, module).plan[""]["a"].ranks == theirs.plan[""]["a"].ranks


ITEM_COPIES = ParameterSharding(sharding_type="data_parallel", compute_kernel="dense", ranks=[0, 1], sharding_spec=None)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {"item": rows_parameter((0, 150, 1), (150, 150, 0))},
            ["'item' is sharded row_wise with rows 150-299 on rank 0 after rank 1"],
        ),
        ({"item": rows_parameter((0, 100, 0), (100, 200, 1))}, ["rows 0-99 of 300 on rank 0", "rows 0-149 on rank 0"]),
        (
            {"item": rows_parameter((150, 150, 1), (0, 150, 0), kind="table_row_wise")},
            ["'item' is sharded table_row_wise with rows 0-149 on rank 0 after rank 1"],
        ),
        (
            {"item": rows_parameter((0, 100, 0), (100, 200, 1), kind="table_row_wise")},
            ["rows 0-99 of 300 on rank 0", "rows 0-149 on rank 0"],
        ),
        ({"item": rows_parameter((0, 150, 0))}, ["'item'", "gap"]),
        ({}, ["lacks table 'item' of module ''"]),
        ({"item": parameter("table_wise", [(0, 8, 5)], 300)}, ["'item'", "device 5", "there are 2"]),
        ({"item": parameter("table_wise", [(0, 4, 0)], 300)}, ["'item'", "gap"]),
        (
            {"item": replace(parameter("table_wise", [(0, 8, 1)], 300), ranks=[0])},
            ["'item' is sharded table_wise on ranks [0], but its shards are placed on ranks [1]"],
        ),
        (
            {"item": parameter("table_wise", [(0, 8, 0)], 300), "x": parameter("table_wise", [(0, 8, 0)], 300)},
            ["has table 'x'"],
        ),
    ],
)
def test_what_a_plan_cannot_hold_is_refused_by_name(parameters, words):
    with refused(InvalidInput, *words):
        taken_over(ShardingPlan(plan={"": EmbeddingModuleShardingPlan(parameters)}), collection(ITEM))


def test_a_sharding_plan_of_a_module_that_is_not_there_is_refused():
    plan = ShardingPlan(plan={"elsewhere": EmbeddingModuleShardingPlan({"item": ITEM_COPIES})})

    with refused(InvalidInput, "elsewhere"):
        taken_over(plan, collection(ITEM))


def test_tables_of_another_shape_than_the_modules_are_refused():
    sharding_plan = ShardingPlan(
        plan={"": EmbeddingModuleShardingPlan({"item": parameter("table_wise", [(0, 8, 0)], 300)})}
    )
    with refused(InvalidInput, "item"):
        from_torchrec(
            sharding_plan,
            collection(ITEM),
            device_memory_bytes=(2**20,),
            batch_size=64,
            tables=[change(ITEM, rows=301)],
        )


def rank_with(rank: int, notes: list[str], rendezvous: str, results) -> None:
    torch.distributed.init_process_group("gloo", rendezvous, rank=rank, world_size=len(notes))
    try:
        results.put((rank, check_same_digest(make_plan(notes[rank]))))
    except InvalidInput as error:
        results.put((rank, str(error)))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("notes", "same"), [(["", "", ""], True), (["", "", "other"], False)])
def test_every_rank_learns_whether_all_hold_the_same_plan(tmp_path, notes, same):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=rank_with, args=(rank, notes, f"file://{tmp_path}/rendezvous", results))
        for rank in range(len(notes))
    ]
    for process in ranks:
        process.start()
    answers = dict(results.get(timeout=HANGS) for _ in ranks)
    for process in ranks:
        process.join()

    other = f"rank 2 holds plan {make_plan('other').digest()[:12]}, rank 0 plan {make_plan().digest()[:12]}"
    for rank in range(len(notes)):
        assert answers[rank] == make_plan().digest() if same else answers[rank].startswith(other)
