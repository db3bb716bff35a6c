"""What `make bench-search` rests on: peers that are what they say, one scorer, figures beside targets."""

import json
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from bench.searching import methods, production, published
from bench.searching.peers_hugectr import plans
from bench.searching.peers_paper import Predictor, PublishedSearch
from bench.searching.scoring import cost_ms, fault, rows_of
from helpers.analytic import AnalyticModel
from helpers.costs import random_model, random_tables
from helpers.parts import cut_to
from neuroshard.core.constraints import Constraints
from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.table import Feature, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tuning import BeamWidth

pytestmark = pytest.mark.slow


def read_by(table: Table, features: int) -> Table:
    """The table, read by so many features, which each send an output."""
    each = table.pooling_factor / features
    named = tuple(Feature(name=f"{table.name}{n}", pooling_factor=each) for n in range(features))
    return table.model_copy(update={"features": named if features > 1 else ()})


@pytest.fixture(scope="module")
def task() -> ShardingTask:
    some = random_tables(9)
    memory = int(1.2 * sum(t.memory_bytes for t in some) / 4)
    return ShardingTask(tables=some, device_memory_bytes=(memory,) * 4, batch_size=65536)


def test_the_peer_that_asks_one_set_at_a_time_finds_the_plan_of_neuroshard_2023(task, monkeypatch):
    """Also of tables that two features read."""
    monkeypatch.setattr("bench.searching.peers_paper.DEPTH", 3)
    some = tuple(read_by(table, 1 + (place % 3 == 0)) for place, table in enumerate(task.tables))
    task = task.model_copy(update={"tables": some})
    model = random_model(4)
    found = PublishedSearch(task, Predictor(task, model)).search()
    assert found is not None
    plan = search(task, model, SearchSettings(algorithm="neuroshard-2023", width=BeamWidth(depth=3)))
    assert found[0] == pytest.approx(plan.cost_ms, rel=1e-9)
    assert cost_ms(model, task, found[1]) == pytest.approx(found[0], rel=1e-9)
    assert cost_ms(model, task, rows_of(plan)) == pytest.approx(plan.cost_ms, rel=1e-12)
    assert fault(task, found[1]) is None


@pytest.mark.parametrize("seed", ["0", "random"])
def test_torchrecs_planner_gives_a_plan_that_counts_memory_as_everybody_does(task, seed, monkeypatch):
    """In a process whose sets have an order: with any other its plan would differ from run to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrec's, as it is imported
        from bench.searching import peers_torchrec
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    kinds = (peers_torchrec.COLUMN_TYPES, ("row_wise",))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        asked = [pool.submit(peers_torchrec.plan, task, 16, types) for types in kinds]
        if seed != "0":
            with pytest.raises(AssertionError, match="PYTHONHASHSEED=0"):
                asked[0].result()
            return
        answers = [one.result() for one in asked]
    for rows, own_ms in answers:
        assert rows is not None
        assert own_ms > 0
        assert fault(task, rows) is None
    assert len(rows) == 4 * len(task.tables)


def test_a_plan_with_a_fault_is_none(task):
    rows = rows_of(search(task, random_model(4)))
    assert "columns" in fault(task, rows[1:])
    assert "bytes" in fault(task, [(table, dim, 0, count) for table, dim, _, count in rows])
    table, dim, device, count = rows[0]
    assert "row-wise and column-wise" in fault(task, [(table, dim // 2, device, count // 2), *rows[1:]])


def test_a_plan_row_wise_is_scored_as_the_search_prices_it(task):
    model = AnalyticModel()
    heavy = task.tables[0].model_copy(update={"pooling_factor": 3000.0, "dim": 8})
    task = ShardingTask(
        tables=(heavy, *task.tables[1:]), device_memory_bytes=task.device_memory_bytes, batch_size=task.batch_size
    )
    allowed = ShardingTask(**{**dict(task), "constraints": Constraints(row_wise=True)})
    plan = search(allowed, model, SearchSettings(rounds=5))
    rows = rows_of(plan)
    assert any(count < task.tables[table].rows for table, _, _, count in rows)
    assert fault(task, rows) is None
    assert "rows in blocks" in fault(task, [row for row in rows if row[3] == task.tables[row[0]].rows])
    assert cost_ms(model, task, rows) == pytest.approx(plan.cost_ms, rel=1e-12)


def test_a_printed_plan_is_read_with_its_fixed_and_its_repeated_tables(tmp_path):
    def printed(name: str, sharding: str, ranks: str, ms: float) -> dict:
        return {
            "name": name,
            "rows": 10,
            "dim": 256,
            "pooling_factor": 1.0,
            "meta_sharding": sharding,
            "meta_ranks": ranks,
            "meta_perf_ms": ms,
            "meta_storage_hbm_gb": 1.92,
        }

    entries = [printed("a", "CW", "3,3,5", 30.0), printed("a", "CW", "7", 5.0), printed("s", "RW", "0-95", 960.0)]
    path = tmp_path / "printed.json"
    path.write_text(json.dumps({"batch_size": 2560, "tables": entries}))
    plan = production.read_printed(path)
    assert plan.rank_ms[[3, 5, 7, 0]].tolist() == [30.0, 20.0, 15.0, 10.0]
    assert [t.name for t in plan.task.tables] == ["a", "a_2"]
    model = plan.model(narrow=True)
    assert model.compute_ms(model.part_vectors(cut_to(plan.task.tables, [256, 128]))).tolist() == [40.0, 12.5]
    assert plan.task.device_memory_bytes[0] == pytest.approx(
        1.92e9, rel=1e-6
    )  # the fullest has 1.94 GB, 0.02 of it fixed


def test_the_time_to_a_cost_is_that_of_the_first_plan_as_good():
    figures = {"trace": [(0.1, 9.0), (0.2, 5.0), (0.9, 4.0)]}
    assert published.reached(figures, 5.0) == 0.2
    assert published.reached(figures, 3.0) == float("inf")


def test_every_switch_of_the_tuning_is_a_search_that_the_ablation_runs(task):
    model = AnalyticModel()
    for switch in methods.SWITCHES:
        found = methods.run(f"without {switch}", task, model)
        assert found["error"] is None, switch
    assert {"greedy", "swaps", "perturb"} <= set(methods.SWITCHES)


def test_the_ablation_over_hosts_leaves_a_part_out(task):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrec's, as it is imported
        from bench.searching import domains
    joined = task.model_copy(update={"topology": Topology(domain=2, local_world_size=2, network_bytes_per_s=1e9)})
    whole, without = (domains.without(joined, switch)[0] for switch in (None, "row_wise"))
    assert 0 < whole < without


def test_hugectrs_rule_deals_tables_to_hosts_and_splits_the_heaviest_further():
    tables = tuple(
        Table(name=f"t{i}", rows=rows, dim=32, pooling_factor=pooling)
        for i, (rows, pooling) in enumerate([(50_000, 60.0), (40_000, 10.0), (30_000, 9.0), (20_000, 8.0), (500, 9.0)])
    )
    topology = Topology(domain=2, local_world_size=2, network_bytes_per_s=1e9)
    task = ShardingTask(tables=tables, device_memory_bytes=(2**28,) * 8, batch_size=4096, topology=topology)
    found = list(plans(task, 1e10, 500 * 32 * 4 + 1))
    first, second = (
        {name: [s for s in shards if s.table == name] for name in ("t0", "t1", "t4")} for _, shards in found[:2]
    )
    assert len(first["t0"]) == len(first["t1"]) == 2
    assert {s.device // 2 for s in first["t0"]}.isdisjoint({s.device // 2 for s in first["t1"]})
    assert [(len(second["t0"]), s.dim) for s in second["t0"]] == [(4, 16)] * 4
    assert [s.device for s in second["t4"]] == list(range(8))
    assert max(len([s for s in shards if s.table == "t0"]) for _, shards in found) == 8
    for of, shards in found:
        ordered = tuple(sorted(shards, key=lambda s: s.table))
        assert Plan(task=of, shards=ordered, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    assert all(s.rows < 500 for _, shards in plans(task, 1e10, 0) for s in shards if s.table == "t4")
