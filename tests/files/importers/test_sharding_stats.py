"""Printouts of TorchRec's own planner, made here, read back."""

import logging
import re
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.costmodel.given import GivenCosts
from neuroshard.files.importers.sharding_stats import read_stats
from neuroshard.files.importers.sharding_stats_plan import given_costs, stats_plan
from neuroshard.files.importers.sharding_stats_tables import stats_entries
from neuroshard.files.importers.tables_source import from_stats

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrec and FBGEMM, while they are imported
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.stats import EmbeddingStats
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    from neuroshard.client.torchrec import from_torchrec, to_torchrec

META = torch.device("meta")
GIB = 2**30
HOSTILE = [
    "",
    "0",
    "-1",
    "nan",
    "inf",
    "1e400",
    "99999999999",
    "0-99999999999",
    "128 (0)",
    "None",
    "(",
    "#",
    "é",
    "   ",
    "CW",
]


def planned(module, ranks, constraints, path):
    """TorchRec's plan for a module, its printout in `path`."""
    stats = EmbeddingStats()
    logging.disable(logging.WARNING)
    try:
        topology = Topology(world_size=ranks, compute_device="cuda", hbm_cap=40 * GIB, local_world_size=4)
        plan = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=512,
            constraints=constraints,
            stats=[stats],
            debug=True,
            storage_reservation=FixedPercentageStorageReservation(0.15),
        ).plan(module, [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()])
    finally:
        logging.disable(logging.NOTSET)
    path.write_text("\n".join(f"INFO:torchrec.planner:{line}" for line in stats._stats_table) + "\n")
    return plan


def bags(name, rows, dim, features=1, dtype=DataType.FP32):
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=[f"{name}_{i}" for i in range(features)],
        data_type=dtype,
    )


def fused(kind, *lookups, width=None):
    return ParameterConstraints(
        sharding_types=[kind], compute_kernels=["fused"], min_partition=width, pooling_factors=list(lookups)
    )


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """Table-wise and column-wise, uneven widths among them: the module, TorchRec's plan, its printout."""
    path = tmp_path_factory.mktemp("columns") / "stats.txt"
    tables = [
        bags("user", 10**7, 128, features=2),
        bags("item", 2 * 10**6, 80),
        bags("geo", 5000, 16),
        bags("tiny", 3, 4),
    ]
    module = nn.ModuleDict({"sparse": EmbeddingBagCollection(tables=tables, device=META)})
    constraints = {
        "user": fused("column_wise", 3.0, 20.0, width=32),
        "item": fused("column_wise", 7.5, width=32),
        "geo": fused("table_wise", 1.5),
        "tiny": fused("table_wise", 1.0),
    }
    return module, planned(module, 4, constraints, path), path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Data-parallel, row-wise and grid-sharded tables, halves, weights of lookups, a sequence."""
    path = tmp_path_factory.mktemp("mixed") / "stats.txt"
    half = DataType.FP16
    module = nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(
                tables=[bags("copied", 100, 16), bags("grid", 10**6, 64, dtype=half)], device=META
            ),
            "weighted": EmbeddingBagCollection(tables=[bags("tall", 10**6 + 1, 64)], is_weighted=True, device=META),
            "sequence": EmbeddingCollection(
                tables=[EmbeddingConfig(name="seq", num_embeddings=10**5, embedding_dim=32, feature_names=["s"])],
                device=META,
            ),
        }
    )
    constraints = {
        "copied": ParameterConstraints(sharding_types=["data_parallel"]),
        "grid": ParameterConstraints(sharding_types=["grid_shard"], min_partition=32),
        "tall": ParameterConstraints(sharding_types=["table_row_wise"]),
        "seq": ParameterConstraints(sharding_types=["row_wise"]),
    }
    planned(module, 8, constraints, path)
    return path


def read(path, dtype=None):
    return from_stats(path, access="uniform", dtype=dtype, optimizer="sgd").tables()


def test_the_printed_tables_and_plan_are_the_module_s_own(columns):
    module, sharding_plan, path = columns
    tables = read(path).tables
    plan = stats_plan(read_stats(path), tables, str(path))
    theirs = from_torchrec(
        sharding_plan, module, device_memory_bytes=plan.task.device_memory_bytes, batch_size=2048, tables=tables
    )

    assert {(t.name, t.rows, t.dim, t.pooling_factor, t.element_bytes) for t in tables} == {
        ("user", 10**7, 128, 23.0, 4),
        ("item", 2 * 10**6, 80, 7.5, 4),
        ("geo", 5000, 16, 1.5, 4),
        ("tiny", 3, 4, 1.0, 4),
    }
    # which of a table's columns lie on which of its ranks is not printed
    held = [
        sorted((s.table, s.dim) for s in p.shards) + sorted((s.table, s.device) for s in p.shards)
        for p in (plan, theirs)
    ]
    assert held[0] == held[1]
    assert plan.task.batch_size == 4 * 512
    assert plan.task.device_memory_bytes == (34 * GIB,) * 4


def test_the_plan_costs_what_the_planner_printed(columns):
    path = columns[2]
    printed = read_stats(path)
    plan = stats_plan(printed, read(path).tables, str(path))
    maximum = next(line for line in path.read_text().splitlines() if "Maximum of Total Perf" in line)

    assert plan.cost_ms == pytest.approx(float(maximum.split(": ")[1].split()[0]), abs=0.0006)
    assert plan.provenance.cost_model_device == "TorchRec's planner"
    assert sum(plan.predicted_ms) == pytest.approx(sum(table.perf_ms for table in printed.tables), abs=0.004)


def test_the_printed_costs_are_given_costs_of_every_pooled_table(mixed):
    printed = read_stats(mixed)
    costs = GivenCosts.parse(given_costs(printed, read(mixed).tables, str(mixed)), "costs")

    assert {cost.name for cost in costs.tables} == {"copied", "grid", "tall"}
    assert costs.fixed_ms == pytest.approx(next(t.perf_ms for t in printed.tables if t.name == "seq") / 8)
    assert costs.batch_size == 8 * 512


def test_rows_that_are_split_become_rectangles_and_copies_lie_on_every_device(mixed):
    plan = stats_plan(read_stats(mixed), read(mixed).tables, str(mixed))
    grid, tall = ([s for s in plan.shards if s.table == name] for name in ("grid", "tall"))

    assert {(s.rows, s.dim) for s in grid} == {(250_000, 32)}
    assert sorted(s.device for s in grid) == list(range(8))
    assert [s.rows for s in tall] == [250_001, 250_001, 250_001, 249_998]
    assert len({s.device // 4 for s in tall}) == 1
    assert {table.name for table in plan.task.tables} == {"copied", "grid", "tall", "seq"}
    assert [shard.rows for shard in plan.shards if shard.table == "seq"] == [12_500] * 8
    assert plan.task.constraints.data_parallel == {"copied"}
    assert [(s.rows, s.device) for s in plan.by_table()["copied"]] == [(100, device) for device in range(8)]


def test_a_printed_row_wise_table_is_what_torchrec_shards_and_what_a_trainer_gets_back(tmp_path):
    module = EmbeddingBagCollection(tables=[bags("tall", 10**6 + 1, 64), bags("geo", 5000, 16)], device=META)
    constraints = {"tall": fused("row_wise", 4.0), "geo": fused("table_wise", 1.0)}
    sharding_plan = planned(module, 4, constraints, tmp_path / "stats.txt")
    tables = read(tmp_path / "stats.txt").tables
    plan = stats_plan(read_stats(tmp_path / "stats.txt"), tables, "stats.txt")
    memory = plan.task.device_memory_bytes
    theirs = from_torchrec(sharding_plan, module, device_memory_bytes=memory, batch_size=2048, tables=tables)

    assert [(s.row_offset, s.rows, s.device) for s in plan.by_table()["tall"]] == [
        (0, 250_001, 0), (250_001, 250_001, 1), (500_002, 250_001, 2), (750_003, 249_998, 3)
    ]  # fmt: skip
    assert set(plan.shards) == set(theirs.shards)
    given = to_torchrec(plan, module, device_type="cuda", local_world_size=4).plan[""]
    assert given["tall"].sharding_spec == sharding_plan.plan[""]["tall"].sharding_spec


def test_tables_that_their_plan_keeps_in_host_memory_are_named_and_refused_of_the_plan_itself(tmp_path):
    module = EmbeddingBagCollection(tables=[bags("tall", 10**6, 64), bags("geo", 5000, 16)], device=META)
    cached = ParameterConstraints(
        sharding_types=["table_wise"],
        compute_kernels=["fused_uvm_caching"],
        cache_params=CacheParams(load_factor=0.2),
        pooling_factors=[1.0],
    )
    path = tmp_path / "stats.txt"
    sharding_plan = planned(module, 2, {"tall": cached, "geo": fused("table_wise", 1.0)}, path)
    found = read(path)
    plan = stats_plan(read_stats(path), found.tables, str(path), memory_bytes=2 * GIB)

    for notes in (found.notes, plan.provenance.notes):
        (note,) = (note for note in notes if "host memory" in note)
        assert [word for word in ("1 table of", "fused_uvm_caching", "tall", "geo") if word not in note] == ["geo"]
    with refused(InvalidInput, "tall", "fused_uvm_caching", "fused"):
        from_torchrec(sharding_plan, module, device_memory_bytes=[2 * GIB] * 2, batch_size=1024, tables=found.tables)


def test_element_types_are_inferred_from_what_is_stored(mixed):
    found = read(mixed)
    assert {t.name: (t.element_bytes, t.weighted) for t in found.tables} == {
        "copied": (4, False),
        "grid": (2, False),
        "tall": (4, True),
        "seq": (4, False),
    }
    assert any("elements of 2 bytes" in note for note in found.notes)
    assert {table.element_bytes for table in read(mixed, dtype="fp16").tables} == {2}


def test_the_last_of_several_printouts_counts(columns, mixed, tmp_path):
    both = tmp_path / "both.log"
    both.write_text(columns[2].read_text() + "step 1: loss 0.7\n" + mixed.read_text())
    printed = read_stats(both)
    assert {table.name for table in printed.tables} == {"copied", "grid", "tall", "seq"}
    assert any(note.startswith("2 printouts") for note in stats_entries(printed)[1])


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (lambda text: "", ("Parameter Info",)),
        (
            lambda text: "\n".join(line for line in text.splitlines() if "sparse." not in line),
            ("Parameter Info",),
        ),
        (lambda text: text.replace("Batch Size: 512", "Batch Size:"), ("'Batch Size'",)),
        (lambda text: text.replace("Batch Size: 512", f"Batch Size: {'9' * 5000}"), ("'Batch Size'",)),
        (lambda text: text.replace(" 5000 ", " many "), ("Parameter Info", "'many'")),
        (lambda text: text.replace("   unweighted   ", "   ", 1), ("15 cells", "16 columns")),
        (lambda text: text.replace("      0-3   ", "      0-2   "), ("sparse.user", "4 shards", "3 ranks")),
        (lambda text: text.replace("      0-3   ", "      4-7   "), ("sparse.user", "rank 7", 4)),
        (lambda text: text.replace("      0-3   ", "   0-9999999   "), ("0-9999999",)),
        (lambda text: text.replace("128 (32)", " 128 (0)"), ("0 columns", 128)),
        (lambda text: text.replace("    23.0   ", "     inf   "), ("inf",)),
    ],
)
def test_a_spoiled_printout_is_reported_in_one_line(columns, tmp_path, spoil, facts):
    path = tmp_path / "stats.txt"
    path.write_text(spoil(columns[2].read_text()))
    with refused(InvalidInput, path, *facts):
        stats_plan(read_stats(path), read(path).tables, str(path))


def test_without_printed_memory_it_is_asked_for_and_with_too_little_the_rank_is_named(columns, tmp_path):
    path = tmp_path / "stats.txt"
    path.write_text(columns[2].read_text().replace("Planning Memory", "Some Memory"))
    printed, tables = read_stats(path), read(path).tables

    with refused(UsageError, "--memory"):
        stats_plan(printed, tables, str(path))
    with refused(InvalidInput, "device 0", "1.0 GiB"):
        stats_plan(printed, tables, str(path), memory_bytes=GIB)


def test_a_printout_of_no_plan_still_has_tables(columns, tmp_path):
    path = tmp_path / "stats.txt"
    lines = columns[2].read_text().splitlines()
    kept = [line[: line.rindex("0-3")] + "None   #" if "sparse.user" in line else line for line in lines]
    path.write_text("\n".join(kept))
    assert "user" in [table.name for table in read(path).tables]
    with refused(InvalidInput, path):
        stats_plan(read_stats(path), read(path).tables, str(path))


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_printout_with_other_words_in_it_is_read_or_refused_in_one_line(columns, mixed, tmp_path, data):
    text = data.draw(st.sampled_from([columns[2], mixed])).read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        words = [found.span() for found in re.finditer(r"[^\s#]+", text)]
        begin, end = data.draw(st.sampled_from(words))
        text = text[:begin] + data.draw(st.sampled_from(HOSTILE)) + text[end:]
    path = tmp_path / "stats.txt"
    path.write_text(text)
    error = None
    try:
        printed = read_stats(path)
        tables = read(path).tables
        given_costs(printed, tables, str(path))
        stats_plan(printed, tables, str(path))
    except NeuroshardError as caught:
        error = caught
    assert "\n" not in str(error)
