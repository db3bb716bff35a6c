"""Costs given a table at a time: what shards cost, and what is said of files that are wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.parts import cut_to
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, NeuroshardError
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.given import Given, load_given
from neuroshard.costmodel.protocol import device_costs
from neuroshard.models.open import open_cost_model
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings


def tables(*dims: int) -> tuple[Table, ...]:
    return tuple(
        Table.parse({"name": f"t{i}", "rows": 1000, "dim": d, "pooling_factor": 1.0}, "") for i, d in enumerate(dims)
    )


def given(folder: Path, **top: Any) -> Given:
    costs = {
        "batch_size": 2560,
        "tables": [
            {"name": "t0", "cost_ms": 8.0},
            {"name": "t1", "compute_ms": 1.0, "forward_collective_ms": 2.0, "backward_collective_ms": 3.0},
        ],
    }
    (folder / "costs.json").write_text(json.dumps(costs | top))
    return load_given(folder / "costs.json")


def test_half_a_table_costs_half_and_costs_add_up(tmp_path: Path) -> None:
    model = given(tmp_path, fixed_ms=100.0)
    vectors = model.part_vectors(cut_to(tables(128, 64), [64, 64]))
    assert model.compute_ms(vectors).tolist() == [104.0, 106.0]
    assert model.compute_ms(vectors.sum(axis=0)) == 110.0


def test_narrow_shards_cost_their_factor_beside_that_of_the_whole(tmp_path: Path) -> None:
    """A table that is narrow as a whole costs what is given: whoever gave it knew its width."""
    model = given(tmp_path, narrow=[{"below": 64, "factor": 1.75}, {"below": 128, "factor": 1.15}])
    wide, narrow = tables(128, 64)
    vectors = model.part_vectors(cut_to([wide, wide, wide, narrow, narrow], [128, 64, 32, 64, 32]))
    assert np.allclose(vectors[:, 0], [8.0, 4.0 * 1.15, 2.0 * 1.75, 6.0, 3.0 * 1.75 / 1.15])


def test_a_cost_for_another_width_is_scaled(tmp_path: Path) -> None:
    model = given(tmp_path, tables=[{"name": "t0", "cost_ms": 8.0, "dim": 64}])
    assert model.part_vectors(cut_to(tables(128), [128]))[0, 0] == 16.0


def test_a_device_waits_but_all_to_alls_nothing(tmp_path: Path) -> None:
    model = given(tmp_path)
    compute, forward, backward = device_costs(model, np.array([[5.0], [8.0]]), np.array([4.0, 4.0]))
    assert (compute.tolist(), forward.tolist(), backward.tolist()) == ([5.0, 8.0], [3.0, 0.0], [0.0, 0.0])


def test_a_csv_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "costs.csv").write_text("name,cost_ms,compute_ms,forward_collective_ms\nt0, 8.0,,\nt1,,1.0,5\n")
    model = open_cost_model(f"given:{tmp_path / 'costs.csv'}", 2560)
    assert np.allclose(model.part_vectors(cut_to(tables(128, 64), [128, 32]))[:, 0], [8.0, 3.0])


def test_a_plan_under_given_costs(tmp_path: Path) -> None:
    model = given(tmp_path, fixed_ms=1.0)
    task = ShardingTask(tables=tables(128, 64), device_memory_bytes=(2**20,) * 2, batch_size=2560)
    plan = search(task, model)
    assert plan.cost_ms == pytest.approx(8.0, abs=0.3)  # (8 + 6) / 2 + 1, as far as steps of 4 columns allow


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("c.json", "{", ["JSON"]),
        ("c.json", '{"tables": []}', ["tables"]),
        ("c.json", '{"tables": [{"name": "t0"}]}', ["'t0'"]),
        ("c.json", '{"tables": [{"name": "t0", "cost_ms": 1, "compute_ms": 1}]}', ["'t0'"]),
        ("c.json", '{"tables": [{"name": "t0", "cost_ms": -1}]}', ["tables[0].cost_ms", "not -1"]),
        ("c.json", '{"tables": [{"name": "t0", "cost_ms": "1"}]}', ["tables[0].cost_ms", "'1'"]),
        ("c.json", '{"tables": [{"name": "t0", "cost_ms": 1, "dim": 18446744073709551616}]}', ["tables[0].dim", 65536]),
        ("c.json", '{"tables": [{"name": "t0", "cost_ms": 1}, {"name": "t0", "cost_ms": 2}]}', ["'t0'", "two costs"]),
        ("c.json", '{"tables": [{"name": "t0", "cost_ms": 1}], "narrow": [{"below": 64, "factor": 0.5}]}', ["narrow[0].factor"]),
        ("c.json", '{"tables": [{"name": "t0", "cost_ms": 1}], "format_version": 2}', ["format_version 2"]),
        ("c.json", '{"tables": [{"name": "t0", "cost_ms": 1}]}', ["batch_size"]),
        ("costs.csv", "name,cost_ms\nt0\n", ["line 2"]),
        ("costs.csv", "name,cost_ms\nt0,1,2\n", ["line 2"]),
        ("costs.csv", "name,cost_ms\nt0,many\n", ["line 2", "'cost_ms'", "'many'"]),
        ("costs.csv", "name,cost_ms\n", ["tables", "empty"]),
        ("costs.csv", "name,cost_ms,cost_ms\nt0,1,2\n", ["'cost_ms'", "2 times"]),
        ("costs.txt", "", [".json", ".csv"]),
        ("missing.json", None, ["no such file"]),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_gets_one_line_that_names_it(
    tmp_path: Path, name: str, text: str | None, facts: list[object]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with refused(NeuroshardError, tmp_path / name, *facts):
        open_cost_model(f"given:{tmp_path / name}", None if name == "c.json" else 512)


def test_a_table_without_a_cost_is_named(tmp_path: Path) -> None:
    with refused(InvalidInput, "'t2'"):
        given(tmp_path).part_vectors(cut_to(tables(4, 4, 4), [4, 4, 4]))


def test_tables_that_cost_nothing_are_placed_all_the_same(tmp_path: Path) -> None:
    free = [{"name": "t0", "cost_ms": 0.0}, {"name": "t1", "cost_ms": 0.0}]
    task = ShardingTask(tables=tables(64, 32), device_memory_bytes=(10**9, 10**9), batch_size=2560)
    plan = search(task, given(tmp_path, tables=free), SearchSettings(rounds=3))
    assert (plan.cost_ms, plan.lower_bound_ms) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("top", "field"),
    [
        ({"tables": [{"name": "t0", "cost_ms": 1e308}]}, "tables[0].cost_ms"),
        ({"narrow": [{"below": 64, "factor": 1e300}]}, "narrow[0].factor"),
    ],
)
def test_costs_beyond_all_reason_are_refused(tmp_path: Path, top: dict[str, Any], field: str) -> None:
    with refused(InvalidInput, field):
        given(tmp_path, **top)
