"""Tables wider than FBGEMM's CUDA operator holds (core/operator_limits.py): no plan has a shard that may come back as zeros."""

import random
from dataclasses import replace
from typing import Any

import pytest

from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.moves import changed_state, joined
from neuroshard.core.operator_limits import fault_of_plan
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.orders.options import ALGORITHMS, LOCAL_SEARCH
from neuroshard.search.problem.kept_cuts import KeptCuts
from neuroshard.search.problem.problem import Problem
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

BATCH = 65_536
H100, CPU = analytic_model("h100", BATCH), analytic_model("cpu", BATCH)
FEW = SearchSettings(rounds=4)
WIDE = (1028, 1040, 1500, 2048, 3000, 4096)


def table(name: str, dim: int, **fields: object) -> Table:
    return Table.model_validate({"name": name, "rows": 10_000, "dim": dim, "pooling_factor": 5.0, **fields})


def task(of: tuple[Table, ...], devices: int, gib: float = 80.0, **constraints: Any) -> ShardingTask:
    return ShardingTask(
        tables=of,
        device_memory_bytes=(int(gib * 2**30),) * devices,
        batch_size=BATCH,
        pipeline="sparse-dist",
        constraints=Constraints.model_validate(constraints),
    )


def widths(plan: Plan, name: str) -> list[int]:
    return [shard.dim for shard in plan.by_table()[name]]


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_tables_of_3000_and_4096_columns_are_in_shards_that_the_operator_holds(devices: int, pooling: str) -> None:
    tables = (table("a", 3000, pooling=pooling), table("b", 4096, pooling=pooling), table("c", 64))
    plan = search(task(tables, devices), H100, FEW)
    for name in "ab":
        assert max(widths(plan, name)) <= 1024
        assert len(set(widths(plan, name))) == 1  # several are on one device, where TorchRec takes them to be so
    assert plan.cost_ms == pytest.approx(price_shards(H100, plan.held, plan.shards).total_ms.max())
    assert (plan.lower_bound_ms or 0.0) <= (plan.cost_ms or 0.0) * (1 + 1e-9)
    assert any("FBGEMM's operator holds" in line for line in plan.bound_assumptions)


def test_a_plan_by_costs_of_a_cpu_may_have_wide_shards() -> None:
    assert widths(search(task((table("a", 3000), table("c", 64)), 1), CPU, FEW), "a") == [3000]
    tables = (table("a", 20_000), table("c", 64))  # wider than the limit for CPUs
    assert widths(search(task(tables, 1), CPU, FEW), "a") == [10_000, 10_000]


def test_columns_without_equal_shards_are_one_shard_a_device() -> None:
    for algorithm in (one for one in ALGORITHMS if one != "random"):
        plan = search(task((table("a", 1028), table("c", 64)), 2), H100, replace(FEW, algorithm=algorithm))
        assert sorted(shard.device for shard in plan.by_table()["a"]) == [0, 1]
        assert max(widths(plan, "a")) <= 1024
    with refused(Infeasible, "516 columns", "on one device with others of it"):
        search(task((table("a", 1028), table("c", 64)), 2), H100, replace(FEW, algorithm="random"))


@pytest.mark.parametrize(
    ("fields", "constraints", "words"),
    [
        (
            {},
            {"max_shards": 1},
            ("may not be cut", "allow 2 shards", "--never-split", "row-wise shards keep all columns"),
        ),
        ({"dim": 3000}, {"max_shards": 2}, ("may have 2 shards at most", "--max-shards 3")),
        ({}, {"min_dim": 800}, ("no shard of fewer than 800 columns", "--min-dim")),
        ({}, {"together": (("a", "c"),)}, ("kept together", "leave it out of that set")),
        ({}, {"sharding_types": ("row-wise",)}, ("not be cut column-wise", "allow column-wise")),
        ({"dim": 1028, "pooling": "none"}, {}, ("equally wide", "give it 1,032 columns")),
        (
            {},
            {"tables": (TableRule(table="a", data_parallel=True),)},
            ("data-parallel", "leave it out of the data-parallel"),
        ),
        ({"dim": 1028}, {"tables": (TableRule(table="a", devices=(1,)),)}, ("allow it on 2 devices",)),
        (
            {},
            {"max_shards": 1, "tables": (TableRule(table="a", max_shards=4, row_wise=True),), "min_dim": 1500},
            ("1500",),
        ),
    ],
)
def test_what_needs_a_wider_shard_is_refused_by_name_with_a_way_out(
    fields: dict[str, object], constraints: dict[str, Any], words: tuple[str, ...]
) -> None:
    wide = table("a", **{"dim": 1500, **fields})  # type: ignore[arg-type]
    with refused(Infeasible, "'a'", f"{wide.dim:,} columns", "holds 1,024", *words):
        search(task((wide, table("c", 64)), 4, **constraints), H100, FEW)


def test_a_grid_holds_what_row_wise_shards_cannot() -> None:
    asked = task((table("a", 2048), table("c", 64)), 4, row_wise=True)
    asked = asked.model_copy(update={"topology": Topology(domain=2, local_world_size=2)})
    options = Problem(asked, H100).options
    assert options.allowed.tolist() == [[False, False, True], [True, True, True]]
    assert [kind.parts for kind in options.kinds] == [1, 1, 2]


def test_no_wide_table_becomes_data_parallel_by_itself() -> None:
    tables = (table("a", 1500, rows=10), table("b", 64, rows=10), *(table(f"c{i}", 64) for i in range(4)))
    plan = search(task(tables, 4), H100, replace(FEW, try_data_parallel=True))
    assert "a" not in plan.held.constraints.data_parallel


def test_a_current_plan_with_wider_shards_is_cut_and_its_cuts_are_not_kept() -> None:
    asked = task((table("a", 3000), table("b", 128), table("c", 64)), 2)
    before = search(asked, CPU, FEW)
    assert max(widths(before, "a")) > 1024
    assert max(widths(search(asked, H100, FEW, previous=before), "a")) <= 1024
    with refused(Infeasible, "'a'", "in the plan to start from", "holds 1,024", "--keep-optimizer-state"):
        search(asked, H100, replace(FEW, keep_optimizer_state=True), previous=before)


def test_equal_shards_stay_where_they_are() -> None:
    asked = task((table("a", 3000), table("b", 128), table("c", 64)), 2)
    before = search(asked, H100, FEW)
    stays = search(asked, H100, replace(FEW, move_budget_bytes=0), previous=before)
    assert stays.shards == before.shards
    kept = search(asked, H100, replace(FEW, keep_optimizer_state=True), previous=before)
    assert {(s.column_offset, s.dim) for s in kept.by_table()["a"]} == {
        (s.column_offset, s.dim) for s in before.by_table()["a"]
    }
    assert kept.cost_ms == pytest.approx(price_shards(H100, asked, kept.shards).total_ms.max())


@pytest.mark.parametrize("seed", range(12))
def test_in_drawn_tasks_every_algorithm_obeys(seed: int) -> None:
    draw = random.Random(seed)
    devices = draw.choice([1, 2, 3, 4, 8])
    tables = tuple(
        table(
            f"t{i}",
            draw.choice([64, 128, 1024, *WIDE, 4 * draw.randint(257, 1200)]),
            rows=draw.choice([50, 10_000, 10**6]),
            pooling=draw.choice(["sum", "sum", "mean", "none"]),
            element_bytes=draw.choice([4, 2]),
        )
        for i in range(draw.randint(2, 6))
    )
    gib = sum(one.memory_bytes for one in tables) / devices * draw.choice([2, 10]) / 2**30 + 1
    rules = (TableRule(table="t0", max_shards=draw.randint(2, 8)),) if draw.random() < 0.3 else ()
    asked = task(tables, devices, gib, tables=rules, row_wise=draw.random() < 0.5, min_dim=draw.choice([4, 64]))
    for algorithm in ALGORITHMS:
        try:
            plan = search(asked, H100, replace(FEW, algorithm=algorithm))
        except Infeasible:
            continue
        assert not fault_of_plan(plan, "cuda")
        for shards in plan.by_table().values():
            if len({shard.rows for shard in shards}) == 1:
                assert max(shard.dim for shard in joined(shards)) <= 1024  # as TorchRec gets them
        assert plan.cost_ms == pytest.approx(price_shards(H100, asked, plan.shards).total_ms.max())
        if algorithm == LOCAL_SEARCH and plan.lower_bound_ms is not None:
            assert plan.lower_bound_ms <= (plan.cost_ms or 0.0) * (1 + 1e-9)


def test_on_one_device_heuristics_are_priced_in_equal_shards_too() -> None:
    sequences = (table("a", 3000, pooling="none"), table("c", 64, pooling="none"))
    plan = search(task(sequences, 1), H100, FEW)
    costs = [baseline.cost_ms for baseline in plan.baselines]
    assert costs == pytest.approx([plan.cost_ms] * len(costs))


def test_equal_shards_of_a_sequence_narrower_than_halves_are_kept_with_their_state() -> None:
    of = (table("a", 2048, rows=180_000, pooling="none", optimizer_bytes_per_row=4), table("c", 64))
    tight = task(of, 4, 0.55)
    before = search(tight, H100, FEW)
    assert max(widths(before, "a")) < 1024
    after = search(tight, H100, replace(FEW, keep_optimizer_state=True, move_budget_bytes=0), previous=before)
    assert after.shards == before.shards
    assert after.cost_ms == pytest.approx(before.cost_ms)


def test_kept_shards_of_unequal_widths_are_not_joined_to_one_that_is_too_wide() -> None:
    """TorchRec holds neighbours of unequal widths on one device as one."""
    wide = table("a", 1028, pooling_factor=20.0, optimizer_bytes_per_row=4)
    before = search(task((wide, table("c", 64)), 2), H100, FEW)
    assert len(set(widths(before, "a"))) == 2
    heavy = table("c", 64, rows=10_000_000, pooling_factor=200.0)
    pinned: dict[str, Any] = {"tables": [{"table": "c", "devices": [1]}]}
    after = search(
        task((wide, heavy), 2, **pinned), H100, replace(FEW, keep_optimizer_state=True, simplicity=0.0), previous=before
    )
    assert max(shard.dim for shard in joined(after.by_table()["a"])) <= 1024
    assert "a" not in changed_state(before, after)
    with refused(Infeasible, "'a'", "device 1 cannot keep its shard", "--keep-optimizer-state"):
        both: dict[str, Any] = {"tables": [{"table": "a", "devices": [0]}]}
        KeptCuts(task((wide, heavy), 2, **both), before, H100, stay={"a"})
