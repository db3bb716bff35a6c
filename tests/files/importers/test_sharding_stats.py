"""Printouts of TorchRec's own planner, made here, read back."""

import json
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
from neuroshard.core.topology import Topology as Hosts
from neuroshard.core.topology import topology_of
from neuroshard.costmodel.given import GivenCosts
from neuroshard.files.importers.sharding_stats import read_stats, stats_entries
from neuroshard.files.importers.sharding_stats_plan import given_costs, stats_plan
from neuroshard.files.importers.tables_source import Asked, from_stats

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


FQN = ["FQN", "Sharding", "Compute Kernel", "Perf (ms)"]
DIMS = ["Emb Dim (CW Dim)", "Hash Size", "Ranks"]
STORED = ["Storage (HBM, DDR)", "Cache Load Factor"]
# the headings that versions of TorchRec print, and the column of 1.8 below each that has another name there
VERSIONS = {
    "0.3": [*FQN, "Pooling Factor", "Output", "Features", "Emb Dim", "Hash Size", "Ranks"],
    "0.4": [*FQN, "Pooling Factor", "Number of Poolings", "Output", "Features", "Emb Dim", "Hash Size", "Ranks"],
    "0.5": [*FQN, "Pooling Factor", "Num Poolings", "Output", "Weighing", "Sharder", "Features", *DIMS],
    "0.6": [*FQN, *STORED, "Pooling Factor", "Num Poolings", "Output", "Weighing", "Sharder", "Features", *DIMS],
    "1.1": [
        *FQN, *STORED, "Sum Pooling Factor", "Sum Num Poolings", "Num Indices", "Output", "Weighted", "Sharder", "Features", *DIMS
    ],
}  # fmt: skip
NOW = {
    "Pooling Factor": "Sum Pooling Factor",
    "Number of Poolings": "Sum Num Poolings",
    "Num Poolings": "Sum Num Poolings",
    "Weighing": "Weighted",
    "Emb Dim": "Emb Dim (CW Dim)",
    "Storage (HBM, DDR)": "Storage (HBM, DDR, SSD)",
}
ROW = "INFO:torchrec.planner:"


def as_printed_by(version, text):
    """A printout of 1.8 with the headings and words of another version."""
    lines = text.splitlines()
    begin = next(index for index, line in enumerate(lines) if "Parameter Info:" in line) + 1
    end = next(index for index in range(begin, len(lines)) if not lines[index].strip(ROW + "# "))
    rows = [re.split(r" {2,}", line.removeprefix(ROW).strip("# ")) for line in lines[begin:end]]
    columns = [rows[0].index(NOW.get(head, head)) for head in VERSIONS[version]]
    old = version in ("0.3", "0.4")  # neither parts of costs nor widths of shards
    cells = [[row[at] for at in columns] for row in rows[2:]]
    cells = [[re.sub(r" \(\S*\)$", "", cell) for cell in row] if old else row for row in cells]
    table = [VERSIONS[version], ["-----" for _ in columns], *cells]
    printed = [f"{ROW}# {''.join(f'{cell:>55}' for cell in row)}   #" for row in table]
    text = "\n".join([*lines[:begin], *printed, *lines[end:]])
    if old:
        text = re.sub(r"^(.*?#\s+\d+ .*%\).*%\)\s+[\d.]+) \(\S+\)", r"\1", text, flags=re.M)
    if version < "0.8":
        text = text.replace("Planning Memory:", "Usable Memory:").replace("Compute Kernels Count:", "Compute Kernels:")
    return text.replace("Compute Kernels Embedding Weights:", "Other:")


def glued(text):
    return text.replace("\n", "")


def folded(width):
    def fold(text):
        return "\n".join(line[at : at + width] for line in text.splitlines() for at in range(0, len(line), width))

    return fold


def parts(text):
    """As the runtime of a container writes lines that are longer than it takes: P for a part, F for the last."""
    lines = []
    for line in text.splitlines():
        cut = [line[at : at + 100] for at in range(0, len(line), 100)]
        lines += [f"2026-01-02T03:04:05.678901234Z stderr {'F' if part is cut[-1] else 'P'} {part}" for part in cut]
    return "\n".join(lines)


def alternating(*texts):
    """Logs of several processes in one, a line of each in turn."""
    return "\n".join(line for lines in zip(*(text.splitlines() for text in texts), strict=True) for line in lines)


def marked(mark, text):
    return "\n".join(f"{mark}{line}" for line in text.splitlines())


def read(path, dtype=None):
    return from_stats(path, Asked(dtype=dtype, optimizer="sgd")).tables()


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
    assert plan.held.constraints.data_parallel == {"copied"}
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


@pytest.mark.parametrize("second", [EmbeddingBagCollection, EmbeddingCollection])
def test_a_name_in_two_modules_is_trained_as_printed(tmp_path, second):
    """The printout has the paths."""
    sequence = EmbeddingConfig(name="id", num_embeddings=7000, embedding_dim=64, feature_names=["i"])
    item = bags("id", 7000, 64) if second is EmbeddingBagCollection else sequence
    module = nn.ModuleDict(
        {
            "user": EmbeddingBagCollection(tables=[bags("id", 90_000, 64), bags("geo", 500, 16)], device=META),
            "deep": nn.ModuleDict({"item": second(tables=[item], device=META)}),
        }
    )
    path = tmp_path / "stats.txt"
    kinds = {"id": fused("table_wise", 2.0), "geo": fused("row_wise", 1.0)}
    theirs = planned(module, 4, kinds, path)
    found = read(path)
    plan = stats_plan(read_stats(path), found.tables, str(path), memory_bytes=2 * GIB)

    assert {(table.name, table.module) for table in found.tables} == {
        ("user.id", "user"), ("geo", "user"), ("deep.item.id", "deep.item")
    }  # fmt: skip
    given = to_torchrec(plan, module, device_type="cuda", local_world_size=4, any_output_order=True)
    for at, tables in theirs.plan.items():
        assert {name: one.sharding_spec for name, one in tables.items()} == {
            name: one.sharding_spec for name, one in given.plan[at].items()
        }


def test_a_printed_plan_has_the_hosts_that_are_said_and_names_tables_that_leave_ranks_without_rows(tmp_path):
    module = EmbeddingBagCollection(tables=[bags("tall", 10**6, 64), bags("tiny", 5, 16)], device=META)
    path = tmp_path / "stats.txt"
    planned(module, 4, {"tall": fused("row_wise", 1.0), "tiny": fused("row_wise", 1.0)}, path)
    plan = stats_plan(
        read_stats(path), read(path).tables, str(path), None, lambda ranks: topology_of(ranks, None, ranks // 2)
    )
    assert plan.task.topology == Hosts(domain=2, local_world_size=2)
    (note,) = (note for note in plan.provenance.notes if "without rows" in note)
    assert "tiny" in note
    assert "tall" not in note


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


@pytest.mark.parametrize("version", VERSIONS)
def test_the_printout_of_each_version_is_read_by_its_headings(columns, mixed, tmp_path, version):
    path = tmp_path / "stats.txt"
    path.write_text(as_printed_by(version, columns[2].read_text()))
    printed, now = read_stats(path), read_stats(columns[2])
    tables = read(path).tables

    assert tables == read(columns[2]).tables
    assert [(t.sharding, t.ranks, t.perf_ms) for t in printed.tables] == [
        (t.sharding, t.ranks, t.perf_ms) for t in now.tables
    ]
    plan, theirs = (stats_plan(read_stats(file), tables, "stats.txt") for file in (path, columns[2]))
    assert plan.cost_ms == theirs.cost_ms
    assert plan.task.device_memory_bytes == theirs.task.device_memory_bytes
    assert {(s.table, s.dim) for s in plan.shards if s.table != "item"} == {
        (s.table, s.dim) for s in theirs.shards if s.table != "item"
    }


def test_what_a_version_does_not_print_is_assumed_with_a_note(columns, mixed, tmp_path):
    path = tmp_path / "stats.txt"
    found = {}
    for version in VERSIONS:
        path.write_text(as_printed_by(version, mixed.read_text()))
        found[version] = read(path)
    notes = {version: "; ".join(read.notes) for version, read in found.items()}

    weighted = {version: [t.weighted for t in read.tables if t.name == "tall"] for version, read in found.items()}
    assert weighted == {"0.3": [False], "0.4": [False], "0.5": [True], "0.6": [True], "1.1": [True]}
    assert [version for version in VERSIONS if "assumed to have none" in notes[version]] == ["0.3", "0.4"]
    assert [version for version in VERSIONS if "counts as compute" in notes[version]] == ["0.3", "0.4"]
    halves = {version: [t.element_bytes for t in read.tables if t.name == "grid"] for version, read in found.items()}
    assert halves == {"0.3": [4], "0.4": [4], "0.5": [4], "0.6": [2], "1.1": [2]}
    assert all("--dtype" in notes[version] for version in ("0.3", "0.4", "0.5"))
    path.write_text(as_printed_by("0.4", columns[2].read_text()))
    assert any("equal ones are assumed" in note for note in read(path).notes)


def test_a_printout_without_rows_says_that_its_version_prints_none(columns, tmp_path):
    path = tmp_path / "stats.txt"
    path.write_text(
        as_printed_by("0.3", columns[2].read_text()).replace("Emb Dim", "Some Dim").replace("Hash Size", "Size")
    )
    with refused(InvalidInput, path, "0.2", "--from-torchrec"):
        read(path)


def test_older_versions_lookups_are_pooling_factors_times_poolings(tmp_path):
    module = EmbeddingBagCollection(tables=[bags("user", 1000, 16, features=2), bags("geo", 500, 16)], device=META)
    twice = ParameterConstraints(pooling_factors=[3.0, 3.0], num_poolings=[2.0, 2.0], sharding_types=["table_wise"])
    planned(module, 2, {"user": twice}, tmp_path / "now.txt")
    (tmp_path / "old.txt").write_text(as_printed_by("0.5", (tmp_path / "now.txt").read_text()))

    found = read(tmp_path / "old.txt")
    assert [t.pooling_factor for t in found.tables if t.name == "user"] == [12.0]
    assert found.tables == read(tmp_path / "now.txt").tables
    assert any("several poolings" in note for note in found.notes)


def test_a_table_in_host_memory_is_not_taken_for_one_of_halves(tmp_path):
    module = EmbeddingBagCollection(tables=[bags("huge", 10**7, 64), bags("geo", 5000, 16)], device=META)
    cached = ParameterConstraints(compute_kernels=["fused_uvm_caching"], sharding_types=["table_wise"])
    planned(module, 2, {"huge": cached}, tmp_path / "now.txt")
    (tmp_path / "old.txt").write_text(as_printed_by("1.1", (tmp_path / "now.txt").read_text()))
    assert {table.element_bytes for table in read(tmp_path / "old.txt").tables} == {4}


@pytest.mark.parametrize(
    "log",
    [
        lambda text: text.replace(ROW, ""),
        lambda text: text.replace(ROW, "2026-01-02 03:04:05,678 [INFO] torchrec.planner: "),
        lambda text: text.replace(ROW, "[rank0]:[I102 03:04:05.678 stats.py:600] "),
        glued,
        lambda text: glued(text.replace(ROW, "")),
        lambda text: text.replace("\n", " "),
        lambda text: "\n".join(json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in text.splitlines()),
        lambda text: json.dumps({"message": text}),
        lambda text: "".join(f"\x1b[32m{line}\x1b[0m\n" for line in text.splitlines()),
        lambda text: json.dumps({"message": "".join(f"\x1b[1;32m{line}\x1b[0m\n" for line in text.splitlines())}),
        lambda text: "".join(f"#033[32m{line}#033[0m\n" for line in text.splitlines()),
        folded(80),
        folded(200),
        lambda text: folded(79)(text.replace(ROW, "")),
        parts,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "\nstep 1: loss 0.7 (#1 of # 9)\n"),
        lambda text: alternating(marked("[rank1]:", text), marked("[rank0]:", text)),
        lambda text: alternating(marked("3: ", text), marked("0: ", text)),
        lambda text: alternating(marked("[1,0]<stderr>:", text), marked("[1,1]<stderr>:", text)),
    ],
)  # fmt: skip
def test_a_printout_is_read_out_of_any_log(columns, tmp_path, log):
    path = tmp_path / "some.log"
    path.write_text(log(columns[2].read_text()))
    printed, alone = read_stats(path), read_stats(columns[2])

    assert read(path).tables == read(columns[2]).tables
    assert printed.rank_ms == alone.rank_ms
    assert (printed.batch_size, printed.memory_gib, printed.weights_gib) == (512, 34.0, alone.weights_gib)
    assert [t._replace(where="") for t in printed.tables] == [t._replace(where="") for t in alone.tables]


def test_lines_of_several_processes_without_a_mark_are_refused(columns, tmp_path):
    path = tmp_path / "both.log"
    path.write_text(alternating(columns[2].read_text(), columns[2].read_text()))
    with refused(InvalidInput, path, "several processes"):
        read(path)
    text = columns[2].read_text()
    row = next(line for line in text.splitlines() if "sparse.user" in line)
    path.write_text(text.replace(row, f"{row}\n{row}"))
    with refused(InvalidInput, path, "sparse.user", "several processes"):
        read(path)


def test_a_log_that_ends_or_has_a_gap_anywhere_is_read_whole_or_refused(columns, tmp_path):
    path = tmp_path / "cut.log"
    lines = columns[2].read_text().splitlines()
    whole = read(columns[2]).tables
    refusals = []
    for cut in range(len(lines)):
        for kept in (lines[:cut], lines[:cut] + lines[cut + 1 :], [*lines[:cut], lines[cut][:70], *lines[cut + 1 :]]):
            path.write_text("\n".join(kept))
            try:
                assert (read(path).tables, read_stats(path).ranks) == (whole, 4), (cut, kept[-1])
            except InvalidInput as error:
                refusals.append(str(error))
    assert any("cut off" in said for said in refusals)
    assert any("lines are missing" in said for said in refusals)
    assert all("\n" not in said and said.startswith(str(path)) for said in refusals)


def test_the_last_of_several_printouts_counts_and_is_named(columns, mixed, tmp_path):
    both = tmp_path / "both.log"
    first = columns[2].read_text()
    both.write_text(first + "step 1: loss 0.7\n" + mixed.read_text())
    printed = read_stats(both)
    begins = first.count("\n") + 3
    assert {table.name for table in printed.tables} == {"copied", "grid", "tall", "seq"}
    said = next(note for note in stats_entries(printed)[1] if note.startswith("2 printouts"))
    assert f"line {begins}: 4 tables on 8 ranks" in said
    assert said.endswith("lines 2")

    both.write_text(first + mixed.read_text()[:3000])
    with refused(InvalidInput, both, begins - 1, "cut off"):
        read(both)


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
