"""What a verb returns is what its file gives back, whatever the options: nothing is made in memory that no reader would take."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import neuroshard as ns
from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.costmodel.pricing import price_shards
from neuroshard.files.plan import write_plan
from neuroshard.files.tables import read_tables
from neuroshard.files.traces import Lookups, Traces, write_traces
from neuroshard.models.open import open_cost_model

REFUSALS = Infeasible, InvalidInput, UsageError
NAMES = "abcde"
EXAMPLES = 25  # of about a second


@st.composite
def drawn_tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    return [drawn_table(draw, name) for name in NAMES[: draw(st.integers(2, len(NAMES)))]]


def drawn_table(draw: st.DrawFn, name: str) -> dict[str, Any]:
    rows = draw(st.sampled_from([10_000, 1_000_000, 1000, 90_001, 3]))
    table: dict[str, Any] = {
        "name": name,
        "rows": rows,
        "dim": draw(st.sampled_from([16, 64, 4, 128])),
        "pooling_factor": draw(st.sampled_from([7.3, 40.0, 1.0, 0.0])),
        "pooling": draw(st.sampled_from(["sum", "sum", "mean", "none"])),
        "module": draw(st.sampled_from(["", "m"])),
        "optimizer_bytes_per_row": draw(st.sampled_from([4, 0])),
        "optimizer_bytes_per_element": draw(st.sampled_from([0, 8])),
        "access": draw(st.sampled_from(["uniform", "zipf:1.1"])),
    }
    if draw(st.booleans()):
        order = {"ids_digest": draw(st.sampled_from(["", "0" * 64])), "rows": rows, "hot_rows": max(rows // 3, 1)}
        table["row_order"] = {**order, "lookup_share": 0.9, "time": "2026-01-01T00:00:00Z"}
        if rows > 4:
            table["lookups_by_id"] = draw(st.sampled_from([[], [0.7, 0.1, 0.1, 0.1], [0.333333] * 3]))
    elif draw(st.integers(0, 4)) == 0 and rows > 4:
        table["id_map"] = {"kind": draw(st.sampled_from(["mch", "mpzch"])), "bytes_per_row": 16}
    return table


@st.composite
def drawn_constraints(draw: st.DrawFn, tables: list[dict[str, Any]]) -> dict[str, Any]:
    """Rules of a few tables, and of parts of those that are in two."""
    rules = []
    for table in draw(st.lists(st.sampled_from(tables), max_size=2, unique_by=lambda one: str(one["name"]))):
        held: list[dict[str, Any]] = [{}, *[{"rows_by_access": {"hot_rows": 300}}] * 3]
        sequence = table.get("row_order") and table["pooling"] == "none"
        by_access = draw(st.sampled_from(held)) if sequence else {}
        rules.append({"match": table["name"], **by_access, **draw(st.sampled_from(RULES))})
        if by_access:
            rules += [{"match": f"{table['name']}/{part}", **draw(st.sampled_from(RULES))} for part in ("hot", "cold")]
    return {"tables": rules}


RULES: list[dict[str, Any]] = [
    {},
    {"devices": [0]},
    {"devices": [0, 1]},
    {"split": False},
    {"min_dim": 16},
    {"max_shards": 2},
    {"row_wise": True},
    {"row_wise": False},
    {"data_parallel": True},
    {"tier": "host"},
    {"tier": "hbm"},
    {"tier": "cached", "cached_rows": 200},
]


SOME: dict[str, list[Any]] = {
    "algorithm": ["size", "neuroshard-2023"],
    "host_memory": ["3MiB", "1TiB"],
    "pipeline": ["none", "sparse-dist", "prefetch"],
    "domain": [1, 2],
    "group_size": [2, "auto"],
    "collective_precision": ["fp16", "int8", "bf16:fp16"],
    "dense_optimizer": ["sgd", "adam"],
    "reserve": ["1MiB", "15%"],
    "min_dim": [8, 64],
    "max_shards": [1, 2, 4],
    "never_split": [["a"]],
    "row_wise": [["*"], ["a"], ["b"]],
    "data_parallel": [["auto"], ["a"], ["auto", "b"]],
    "rows_by_access": ["auto"],
    "sharding_types": ["column-wise", "row-wise,table-row-wise", "column-wise,row-wise,grid"],
    "pin": [["a=0"], ["b=0,1"]],
    "together": [["a,b"], ["b,c"]],
    "simplicity": [0.0, 0.05],
    "seed": [1],
}


@st.composite
def drawn_options(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = {
        "devices": draw(st.sampled_from([2, 4, 1])),
        "memory": draw(st.sampled_from(["1GiB", "40MiB", "2MiB"])),
        "batch_size": draw(st.sampled_from([64, 4096])),
        "rounds": draw(st.sampled_from([0, 1])),
    }
    for name in draw(st.lists(st.sampled_from(sorted(SOME)), max_size=4, unique=True)):
        options[name] = draw(st.sampled_from(SOME[name]))
    if "group_size" in options:
        options = {**options, "devices": 4, "domain": 2}
    return options


def is_what_its_file_says(plan: Plan, folder: Path) -> None:
    write_plan(folder / "plan.json", plan)
    assert (folder / "plan.json").read_bytes() == plan.canonical_json()
    read = ns.load_plan(folder / "plan.json")
    assert read == plan
    assert read.digest() == plan.digest()


def says_what_is_true_of_it(plan: Plan, rounds: int) -> None:
    """What a plan says of itself are numbers of this plan, not of one that was searched before it."""
    for note in plan.provenance.notes:
        assert "two racks" not in note or note.endswith(f"not {plan.cost_ms:.3f}")
    assert plan.provenance.rounds == (rounds if plan.provenance.algorithm == "local-search" else None)
    assert plan.cost_ms is not None
    assert plan.lower_bound_ms is None or plan.lower_bound_ms <= plan.cost_ms
    prices = price_shards(open_cost_model("analytic:h100", plan.task.batch_size), plan.held, plan.shards)
    assert prices is not None
    assert prices.total_ms.max() == pytest.approx(plan.cost_ms)


@settings(max_examples=EXAMPLES)
@given(drawn_tables(), drawn_options(), st.data())
def test_a_plan_that_a_search_returns_is_what_its_file_says(
    tables: list[dict[str, Any]], options: dict[str, Any], data: st.DataObject
) -> None:
    constraints = data.draw(drawn_constraints(tables))
    if any("tier" in rule for rule in constraints["tables"]):
        options.setdefault("host_memory", "1TiB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "constraints.json").write_text(json.dumps(constraints))
        options |= {"constraints": folder / "constraints.json", "quiet": True}

        def found(tables: Any, **more: Any) -> Plan | None:
            try:
                return ns.search(tables, "analytic:h100", **options, **more)
            except REFUSALS as error:
                if "the plan found" in str(error):  # a rule is refused before the search, not by a reader of its plan
                    raise
                event(f"refused: {re.sub('[0-9.]+', '#', str(error))[:90]}")
                return None

        listed = ns.tables(tables, quiet=True)
        listed.save(folder / "tables.json")
        plan = found(listed)
        if plan is None:
            return
        event("a plan")
        is_what_its_file_says(plan, folder)
        says_what_is_true_of_it(plan, options["rounds"])
        assert found(folder / "tables.json") == plan  # tables in memory are those of their file
        if options.get("group_size") == "auto" or options.get("algorithm"):
            return
        more: dict[str, Any] = data.draw(
            st.sampled_from([{}, {"move_budget": "10MiB"}, {"keep_optimizer_state": True}])
        )
        if (again := found(listed, previous=plan, **more)) is not None:
            is_what_its_file_says(again, folder)
            says_what_is_true_of_it(again, options["rounds"])


def counted(folder: Path, seed: int) -> ns.Tables:
    """As traces of ids say, whose shares of lookups by id are rounded where they are counted."""
    ids = np.random.default_rng(seed).zipf(1.3, 4 * 40_000) * 7919 % 1_000_000
    write_traces(folder / "traces", Traces({"user": Lookups(ids, np.full(40_000, 4))}))
    table = {"name": "user", "rows": 1_000_000, "dim": 64, "pooling_factor": 4, "pooling": "none"}
    return ns.tables([table], traces=folder / "traces", batch_size=4096, row_orders=folder / "rows", quiet=True)


def from_batches(folder: Path, seed: int) -> ns.Tables:
    torchrec = pytest.importorskip("torchrec")
    ids = torch.from_numpy(np.random.default_rng(seed).zipf(1.3, 8 * 2048) * 7919 % 100_000)
    kjt = torchrec.KeyedJaggedTensor(["f"], ids, lengths=torch.full((8192,), 2))
    config = torchrec.EmbeddingConfig(name="t", embedding_dim=64, num_embeddings=100_000, feature_names=["f"])
    model = torchrec.EmbeddingCollection(tables=[config], device=torch.device("meta"))
    return ns.tables(model, batches=[kjt] * 4, row_orders=folder / "rows", quiet=True)


def in_words(folder: Path, seed: int) -> ns.Tables:
    tables = [{"name": f"t{n}", "rows": 10**n, "dim": 64, "pooling_factor": 0.1 * n} for n in range(1, 9)]
    return ns.tables(tables, access={"*": f"zipf:1.{seed}"}, dtype="fp16", optimizer="adam", quiet=True)


def of_a_frame(folder: Path, seed: int) -> ns.Tables:
    rows = [{"name": "é", "num_embeddings": 10, "embedding_dim": 8, "pooling_factor": 0.3, "num_features": 3}]
    return ns.tables(pd.DataFrame([*rows, {**rows[0], "num_embeddings": 11 + seed}]), quiet=True)


def of_a_preset(folder: Path, seed: int) -> ns.Tables:
    return ns.tables("mlperf-dlrm-dcnv2", access=f"zipf:1.{seed}", quiet=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("made", [counted, from_batches, in_words, of_a_frame, of_a_preset])
def test_tables_that_a_verb_returns_are_what_their_file_says(made: Any, seed: int, tmp_path: Path) -> None:
    tables = made(tmp_path, seed)
    tables.save(tmp_path / "tables.json")
    assert read_tables(tmp_path / "tables.json") == (tables, ())
    assert ns.tables(tmp_path / "tables.json", quiet=True) == tables
    usual: Any = {"devices": 2, "memory": "200GiB", "batch_size": 4096, "rounds": 0, "quiet": True}
    plan = ns.search(tables, "analytic:h100", **usual)
    assert plan.task.tables == tables
    is_what_its_file_says(plan, tmp_path)
    ns.deploy(plan, tmp_path / "store", "m")
    assert (
        ns.load_plan(tmp_path / "store", "m") == plan == ns.search(tmp_path / "tables.json", "analytic:h100", **usual)
    )


def test_tables_that_were_changed_in_memory_are_those_of_their_file_or_refused(tmp_path: Path) -> None:
    usual: Any = {"devices": 2, "memory": "1GiB", "batch_size": 4096, "rounds": 0, "quiet": True}
    table = Table(name="t", rows=1000, dim=64, pooling_factor=3.0)
    rounded = table.model_copy(update={"lookups_by_id": (0.333333,) * 3})
    is_what_its_file_says(ns.search(ns.Tables.of((rounded,)), "analytic:h100", **usual), tmp_path)
    for changed in ({"dim": 6}, {"pooling_factor": float("nan")}, {"lookups_by_id": (0.5,)}, {"reuse_bins": (1.0,)}):
        wrong = ns.Tables.of((table.model_copy(update=changed),))
        with pytest.raises(InvalidInput, match=next(iter(changed))):
            ns.search(wrong, "analytic:h100", **usual)
        with pytest.raises(InvalidInput, match=next(iter(changed))):
            wrong.save(tmp_path / "tables.json")
    assert not (tmp_path / "tables.json").exists()


def test_a_plan_that_was_changed_in_memory_and_no_reader_takes_is_written_nowhere(tmp_path: Path) -> None:
    usual: Any = {"devices": 2, "memory": "1GiB", "batch_size": 4096, "rounds": 0, "quiet": True}
    plan = ns.search([{"name": "t", "rows": 1000, "dim": 64, "pooling_factor": 3.0}], "analytic:h100", **usual)
    for changed in ({"shards": ()}, {"task_digest": "0" * 64}, {"predicted_ms": (1.0,)}):
        wrong = plan.model_copy(update=changed)
        with pytest.raises(InvalidInput):
            write_plan(tmp_path / "plan.json", wrong)
        with pytest.raises(InvalidInput):
            ns.deploy(wrong, tmp_path / "store", "m")
    assert not (tmp_path / "plan.json").exists()
    assert not [*tmp_path.rglob("live.json")]
