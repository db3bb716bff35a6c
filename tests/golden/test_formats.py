"""Every format of ours that a release wrote: today's code reads the golden file and writes the same canonical JSON again.

A golden file is never changed. A new format version gets a new file beside the old one, which must stay readable.
"""

from pathlib import Path
from typing import Any

import pytest

import neuroshard as ns
from neuroshard.core.release import ModelRelease, Release, Sealed
from neuroshard.core.value import decode_json
from neuroshard.costmodel.bundle import load_cost_model, save_cost_model
from neuroshard.costmodel.given import GivenCosts, load_given
from neuroshard.costmodel.manifest import Manifest
from neuroshard.files.cases import CasesManifest, read_cases, write_cases
from neuroshard.files.constraints import ConstraintsFile, read_constraints
from neuroshard.files.costs import read_costs
from neuroshard.files.plan import read_plan, write_plan
from neuroshard.files.tables import read_tables, write_tables
from neuroshard.report.text import plan_text

GOLDEN = Path(__file__).parent


def content(path: Path) -> object:
    return decode_json(path.read_bytes(), path.name)


def test_tables(tmp_path: Path) -> None:
    tables, notes = read_tables(GOLDEN / "tables-1.json")
    write_tables(tmp_path / "tables.json", tables)

    assert notes == ()
    assert read_tables(tmp_path / "tables.json") == (tables, ())
    assert [table.name for table in tables] == ["user", "item"]


def test_plan(tmp_path: Path) -> None:
    plan = read_plan(GOLDEN / "plan-1.json")
    write_plan(tmp_path / "plan.json", plan)

    assert (tmp_path / "plan.json").read_bytes() == (GOLDEN / "plan-1.json").read_bytes()
    assert (plan.cost_ms, plan.lower_bound_ms, len(plan.shards)) == (1.875, 1.25, 5)


def test_a_plan_with_holdings(tmp_path: Path) -> None:
    plan = read_plan(GOLDEN / "plan-7.json")
    write_plan(tmp_path / "plan.json", plan)

    assert (tmp_path / "plan.json").read_bytes() == (GOLDEN / "plan-7.json").read_bytes()
    assert plan.task.constraints.tables == ()
    held = plan.held.constraints
    assert (held.beyond_hbm.keys(), len(held.data_parallel)) == ({"user"}, 8)
    assert max(plan.memory_bytes()) == 2_265_152


def test_a_plan_of_pooled_parts_and_dealt_rows_is_shown_priced_and_replaced(tmp_path: Path) -> None:
    plan = read_plan(GOLDEN / "plan-6-rows.json")
    write_plan(tmp_path / "plan.json", plan)

    assert (tmp_path / "plan.json").read_bytes() == (GOLDEN / "plan-6-rows.json").read_bytes()
    assert "clicks: rows dealt over its blocks by access" in plan_text(plan)
    priced = ns.price(plan, "analytic:h100").total_ms  # also the copy that puts a sequence's lookups into order
    assert plan.cost_ms is not None
    assert plan.cost_ms < max(priced) < 1.002 * plan.cost_ms
    usual: Any = {"devices": 2, "memory": "64MiB", "batch_size": 4096, "rounds": 1, "quiet": True}
    seen = [{"match": "seen", "rows_by_access": {"hot_rows": 100}}, {"match": "seen/hot", "data_parallel": True}]
    new = ns.search(plan.task.tables, "analytic:h100", previous=plan, constraints={"tables": seen}, **usual)
    assert new.held.constraints.rows_by_access == {"seen": plan.task.constraints.rows_by_access["seen"]}
    assert any("2 tables held by access" in note and "(clicks, ads)" in note for note in new.provenance.notes)
    assert 0 < ns.diff(plan, new).moved_bytes < 90_000 * (16 * 4 + 4)


def test_cases(tmp_path: Path) -> None:
    cases = read_cases(GOLDEN / "cases-1")
    write_cases(tmp_path, cases)

    assert (tmp_path / "cases.json").read_bytes() == (GOLDEN / "cases-1" / "cases.json").read_bytes()
    assert read_cases(tmp_path) == cases
    assert (len(cases.compute), len(cases.collective), cases.compute[1].batch_size) == (2, 2, 512)
    assert CasesManifest.parse(content(GOLDEN / "cases-1" / "cases.json"), "").tables == cases.tables


def test_cost_model(tmp_path: Path) -> None:
    model = load_cost_model(GOLDEN / "model-1")
    save_cost_model(tmp_path, model)

    for name in ("model.json", "nets.safetensors"):
        assert (tmp_path / name).read_bytes() == (GOLDEN / "model-1" / name).read_bytes()
    assert model.manifest.device_counts == (2, 4)
    assert model.error_on_unseen_tables == 0.3  # a part stands in


def test_constraints() -> None:
    path = GOLDEN / "constraints-1.json"
    given, notes = read_constraints(path)

    assert notes == ()
    assert ConstraintsFile.parse(decode_json(given.canonical_json(), ""), "") == given
    assert (given.reserve, given.min_dim, given.max_shards) == (2 * 2**30, 16, 8)
    assert [rule.match for rule in given.tables] == ["user_*", "item_*"]
    assert given.together == (("user_id", "user_history"),)


def test_given_costs() -> None:
    path = GOLDEN / "given-1.json"
    model = load_given(path)

    assert GivenCosts.parse(decode_json(model.costs.canonical_json(), ""), "") == model.costs
    assert (model.batch_size, model.costs.fixed_ms) == (4096, 0.25)
    assert [cost.total_ms for cost in model.costs.tables] == [1.5, 0.875]


@pytest.mark.parametrize(("name", "kind"), [("live-1.json", Release), ("model-live-1.json", ModelRelease)])
def test_pointers(name: str, kind: type[Sealed]) -> None:
    data = (GOLDEN / name).read_bytes()

    assert kind.from_json(data, name).canonical_json() == data


def test_cases_and_costs_beyond_hbm(tmp_path: Path) -> None:
    cases = read_cases(GOLDEN / "cases-tiers-1")
    write_cases(tmp_path, cases)

    assert (tmp_path / "cases.json").read_bytes() == (GOLDEN / "cases-tiers-1" / "cases.json").read_bytes()
    assert read_cases(tmp_path) == cases
    assert [(case.tier, case.missed_share, case.split, case.batch_size) for case in cases.tiers] == [
        ("cached", 0.2, "test_sets", None),
        ("host", 0.0, "train", 512),
    ]
    (one, cost), (other, failed) = read_costs(GOLDEN / "costs-tiers-1").tiers
    assert (one, other) == cases.tiers
    assert cost.times_ms == (3.5, 2.25, 0.5, 1.75)
    assert (cost.distinct_rows, cost.missed_rows, cost.disturbed) == ((800.0, 4000.5), (160.0, 800.25), True)
    assert failed.error == "out of memory"


def test_a_cost_model_with_constants_beyond_hbm() -> None:
    data = (GOLDEN / "model-tiers-1.json").read_bytes()
    manifest = Manifest.parse(decode_json(data, ""), "")

    assert manifest.canonical_json() == data
    assert manifest.tiers is not None
    assert (manifest.tiers.cases, manifest.tiers.cached_forward.table_ms) == (36, 0.08)
    assert {tier: errors.mape for tier, errors in manifest.report.tiers.items()} == {"cached": 0.03125, "host": None}
