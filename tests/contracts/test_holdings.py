"""What a search chose is in the plan's holdings and not in its task, and says the same to whoever reads the plan as a rule of the
task does, as plans of formats 1 to 6 have it."""

from typing import Any

import pytest
from pydantic import ValidationError

import neuroshard as ns
from helpers.refusals import refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput, NewerFormat
from neuroshard.core.holding import Holding
from neuroshard.core.moves import moves
from neuroshard.core.plan import Plan, shardings_of
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.pricing import price_shards
from neuroshard.deploy.gate import Gate, why_it_cannot_serve
from neuroshard.report.text import plan_json, plan_text

ORDER = {"ids_digest": "", "rows": 200_000, "hot_rows": 20_000, "lookup_share": 0.9, "time": "2026-01-01T00:00:00Z"}
TABLES = (
    *(
        {"name": f"t{i}", "rows": 200_000 * (i + 1), "dim": 32, "pooling_factor": 20.0, "access": "zipf:1.1"}
        for i in range(3)
    ),
    *({"name": f"tiny{i}", "rows": 50, "dim": 64, "pooling_factor": 2.0} for i in range(12)),
    {"name": "clicks", "rows": 200_000, "dim": 32, "pooling_factor": 60.0, "pooling": "none", "row_order": ORDER},
)
HOSTS: dict[str, Any] = {"domain": 1, "local_world_size": 1, "network": "10Gb/s"}
OPTIONS: dict[str, dict[str, Any]] = {
    "tiers and copies": {"memory": "192MiB", "host_memory": "4GiB", "data_parallel": ["auto"], **HOSTS},
    "hot rows": {"memory": "4GiB", "rows_by_access": "auto", **HOSTS},
}


def searched(**options: Any) -> Plan:
    return ns.search(list(TABLES), "analytic:h100", devices=2, batch_size=4096, rounds=0, quiet=True, **options)


@pytest.fixture(scope="module", params=OPTIONS)
def plan(request: pytest.FixtureRequest) -> Plan:
    found = searched(**OPTIONS[request.param])
    assert any(holding.data_parallel for holding in found.holdings)
    assert any(holding.tier for holding in found.holdings) == ("host_memory" in OPTIONS[request.param])
    return found


def named(plan: Plan) -> Plan:
    """The same plan as earlier versions wrote it."""
    task = plan.held
    fields = {name: getattr(plan, name) for name in ("shards", "predicted", "predicted_ms", "provenance")}
    return Plan(task=task, **fields)


def test_the_task_is_the_one_that_was_asked(plan: Plan) -> None:
    assert plan.task.constraints == Constraints()
    assert plan.format_version == 7
    assert Plan.from_json(plan.canonical_json(), "the plan") == plan


def test_every_reader_says_of_holdings_what_it_says_of_rules(plan: Plan) -> None:
    as_rules, model = named(plan), Analytic("h100", 4096)
    assert as_rules.format_version < 7
    bare = Plan(
        task=plan.task,
        holdings=plan.holdings,
        **{n: getattr(as_rules, n) for n in ("shards", "predicted", "predicted_ms", "provenance")},
    )
    assert plan_text(bare).replace(bare.digest()[:12], "") == plan_text(as_rules).replace(as_rules.digest()[:12], "")
    assert {k: v for k, v in plan_json(bare).items() if "digest" not in k} == {
        k: v for k, v in plan_json(as_rules).items() if "digest" not in k
    }
    assert str(bare).splitlines()[1:] == str(as_rules).splitlines()[1:]
    assert (bare.device_memory(), bare.host_memory()) == (as_rules.device_memory(), as_rules.host_memory())
    assert shardings_of(bare) == shardings_of(as_rules)
    assert not moves(bare, as_rules)
    assert not moves(as_rules, bare)
    prices = [price_shards(model, one.held, one.shards).total_ms.tolist() for one in (bare, as_rules)]
    assert prices[0] == prices[1]
    for live in (bare, as_rules):
        assert why_it_cannot_serve(live, plan.task, Gate()) == ""


def test_a_search_from_a_plan_with_holdings_goes_on_from_them(plan: Plan, request: pytest.FixtureRequest) -> None:
    options = OPTIONS[request.node.callspec.params["plan"]]
    for previous in (plan, named(plan)):
        again = searched(**options, previous=previous, move_budget="0B")
        assert (set(again.shards), again.holdings) == (set(plan.shards), plan.holdings)


TASK = ShardingTask(
    tables=tuple(Table(name=name, rows=1000, dim=16, pooling_factor=3.0) for name in "ab"),
    device_memory_bytes=(2**30,) * 2,
    batch_size=64,
)
WHOLE = [{"table": name, "rows": 1000, "dim": 16, "device": device} for name, device in (("a", 0), ("a", 1), ("b", 0))]


@pytest.mark.parametrize(
    ("holdings", "rules", "facts"),
    [
        ([{"table": "c", "data_parallel": True}], (), ["'c'", "not in the task"]),
        ([{"table": "a", "data_parallel": True}] * 2, (), ["'a'", "two holdings"]),
        (
            [{"table": "a", "data_parallel": True}],
            (TableRule(table="a", data_parallel=False),),
            ["'a'", "data_parallel", "False"],
        ),
        (
            [{"table": "a", "data_parallel": True}],
            (TableRule(table="a", devices=(1,)),),
            ["'a'", "data-parallel", "pinned"],
        ),
        ([{"table": "a", "data_parallel": True}, {"table": "b", "tier": "host"}], (), ["'b'", "host memory"]),
        ([{"table": "a", "data_parallel": True}, {"table": "b", "tier": "cached"}], (), ["'b'", "cached_rows"]),
        ([], (), ["'a'", "overlapping"]),
    ],
)
def test_a_holding_that_is_none_is_refused_by_name(
    holdings: list[Any], rules: tuple[TableRule, ...], facts: list[str]
) -> None:
    task = TASK.model_copy(update={"constraints": Constraints(tables=rules)})
    written = {"task": task, "shards": WHOLE, "provenance": {"neuroshard_version": "0", "algorithm": "by hand"}}
    with refused(ValidationError, *facts):
        Plan.model_validate({**written, "holdings": holdings})


def test_a_reader_that_knows_no_holdings_refuses_them() -> None:
    written = {"task": TASK, "shards": WHOLE, "provenance": {"neuroshard_version": "0", "algorithm": "by hand"}}
    plan = Plan.model_validate({**written, "holdings": [Holding(table="a", data_parallel=True)]})
    with refused(InvalidInput, "format_version 6", "holdings"):
        Plan.from_json(plan.canonical_json().replace(b'"format_version":7', b'"format_version":6'), "plan.json")
    with refused(NewerFormat, "format_version 8"):
        Plan.from_json(plan.canonical_json().replace(b'"format_version":7', b'"format_version":8'), "plan.json")
