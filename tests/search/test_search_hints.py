"""Where no plan fits, what is told as a way out is one, as it is told, and a little less is none."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from helpers.analytic import AnalyticModel
from helpers.refusals import refused
from neuroshard.core.constraints import TableRule
from neuroshard.core.errors import Infeasible
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.core.units import parse_bytes
from neuroshard.costmodel.given import Given, GivenCosts
from neuroshard.models.open import open_cost_model
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

MIB = 2**20
BIG, SMALL = (2_000_000, 64, 20.0), (10, 4, 1.0)  # 496 MiB and hardly anything


def changed(task: ShardingTask, memory: Mapping[int, int] | None = None, **rules: Any) -> ShardingTask:
    """The task with so many bytes more on some devices, and with other rules."""
    bytes_ = tuple(one + (memory or {}).get(device, 0) for device, one in enumerate(task.device_memory_bytes))
    constraints = task.constraints.model_copy(update=rules)
    return task.model_copy(update={"device_memory_bytes": bytes_, "constraints": constraints})


def each(amount: str) -> Callable[[ShardingTask], ShardingTask]:
    return lambda task: changed(task, dict.fromkeys(range(task.devices), parse_bytes(amount)))


def one(device: int, amount: str) -> Callable[[ShardingTask], ShardingTask]:
    return lambda task: changed(task, {device: parse_bytes(amount)})


def rules(**say: Any) -> Callable[[ShardingTask], ShardingTask]:
    return lambda task: changed(task, **say)


def rule(**say: Any) -> tuple[TableRule, ...]:
    return (TableRule(table="t0", **say),)


def devices(count: int) -> Callable[[ShardingTask], ShardingTask]:
    return lambda task: task.model_copy(
        update={"device_memory_bytes": (*task.device_memory_bytes, *(min(task.device_memory_bytes),) * 9)[:count]}
    )


@pytest.mark.parametrize(
    ("shapes", "memory_mib", "constraints", "outs", "less"),
    [
        pytest.param(
            [BIG, SMALL],
            [400, 400],
            {"tables": rule(max_shards=1)},
            {
                "give each device 96.0 MiB more": each("96MiB"),
                "allow 2 shards of table 't0' instead of 1": rules(tables=rule(max_shards=2)),
            },
            each("95MiB"),
            id="never split",
        ),
        pytest.param(
            [BIG, BIG],
            [200] * 6,
            {"max_shards": 2},
            {
                "allow 3 shards a table instead of 2 (--max-shards)": rules(max_shards=3),
                "give each device 51.8 MiB more": each("51.8MiB"),
            },
            each("51MiB"),
            id="most shards of all",
        ),
        pytest.param(  # no device holds more than 17 of the 128 units: what deals them out to 7 ends in nothing, late
            [(82_000, 512, 5.0), SMALL],
            [22] * 8,
            {"max_shards": 2, "tables": (TableRule(table="t1", devices=(1, 2, 3, 5, 6)),)},
            {"allow 8 shards a table instead of 2 (--max-shards)": rules(max_shards=8)},
            rules(max_shards=7),
            id="a wide table in few shards",
        ),
        pytest.param(
            [BIG, SMALL],
            [200] * 4,
            {"min_dim": 64},
            {
                "allow shards of 20 columns instead of at least 64 (--min-dim)": rules(min_dim=20),
                "give each device 296.1 MiB more": each("296.1MiB"),
            },
            rules(min_dim=24),
            id="least width of all",
        ),
        pytest.param(
            [BIG, SMALL],
            [200] * 4,
            {"tables": rule(min_dim=128)},
            {"allow shards of 20 columns of table 't0' instead of at least 128": rules(tables=rule(min_dim=20))},
            rules(tables=rule(min_dim=24)),
            id="least width of one",
        ),
        pytest.param(
            [BIG, SMALL],
            [1000, 400, 1000],
            {"tables": rule(devices=(1,))},
            {
                "give device 1 96.0 MiB more": one(1, "96MiB"),
                "allow table 't0' on device 0 too": rules(tables=rule(devices=(1, 0))),
            },
            one(1, "95MiB"),
            id="pinned to a small device",
        ),
        pytest.param(
            [BIG, SMALL],
            [600, 600],
            {"reserve_bytes": 300 * MIB, "max_shards": 1},
            {
                "give each device 196.0 MiB more": each("196MiB"),
                "--reserve 104.0 MiB instead of 300.0 MiB": rules(reserve_bytes=104 * MIB),
            },
            rules(reserve_bytes=105 * MIB),
            id="reserved",
        ),
        pytest.param(
            [BIG, SMALL],
            [600, 600],
            {"reserve_share": 0.5, "max_shards": 1},
            {
                "give each device 392.0 MiB more": each("392MiB"),
                "--reserve 17% instead of 50%": rules(reserve_share=0.17),
            },
            rules(reserve_share=0.18),
            id="reserved in percent",
        ),
        pytest.param(
            [BIG, BIG],
            [800, 800],
            {"together": (("t0", "t1"),)},
            {"do not keep tables t0, t1 together": rules(together=())},
            each("190MiB"),
            id="kept together",
        ),
        pytest.param(
            [BIG, BIG, BIG],
            [600, 300],
            {},
            {
                "use 5 devices instead of 2, the new with 300.0 MiB": devices(5),
                "give each device 300.3 MiB more": each("300.3MiB"),
            },
            devices(3),
            id="too few devices",
        ),
    ],
)
def test_what_is_reported_does_and_a_little_less_does_not(make_task, shapes, memory_mib, constraints, outs, less):
    task = changed(make_task(shapes, [mib / 1024 for mib in memory_mib]), **constraints)
    with pytest.raises(Infeasible) as caught:
        search(task, AnalyticModel())
    for told, mended in outs.items():
        assert told in str(caught.value)
        assert len(search(mended(task), AnalyticModel(), SearchSettings(rounds=0)).shards) >= len(shapes)
    with pytest.raises(Infeasible):
        search(less(task), AnalyticModel())


def test_a_set_of_tables_is_said_to_be_too_large_in_the_plural(make_task, model):
    task = changed(make_task([BIG, BIG], [0.6, 0.6, 0.6, 0.6]), together=(("t0", "t1"),))
    with pytest.raises(Infeasible, match=r"^no device can hold tables 't0', 't1' \(kept together\): they need "):
        search(task, model)


def test_of_many_rules_that_must_all_be_looser_it_is_said_how_many(make_task, model):
    task = make_task([BIG] * 4, [0.4] * 8)
    pinned = tuple(TableRule(table=f"t{i}", devices=(0, 1)) for i in range(4))
    with refused(Infeasible, "3 tables", "(t0, t1, t2)"):
        search(changed(task, tables=pinned), model)
    assert search(changed(task, tables=pinned[3:]), model, SearchSettings(rounds=0)).cost_ms > 0


def test_rows_are_no_way_out_where_costs_are_of_whole_tables(make_task, model):
    task = make_task([(2**29, 4, 1.0)] * 3, [18, 18])
    costs = GivenCosts.parse({"tables": [{"name": f"t{i}", "cost_ms": 1.0} for i in range(3)]}, "test")
    for asked, so in ((model, True), (Given(costs, 65536), False)):
        with pytest.raises(Infeasible) as caught:
            search(task, asked)
        assert ("--row-wise" in str(caught.value)) is so


def test_what_is_reserved_counts_where_memory_is_short_in_all(make_task, model):
    task = changed(make_task([BIG], [0.3, 0.3]), reserve_bytes=100 * MIB)
    with refused(Infeasible, "414.4 MiB", "100.0 MiB", "81.5 MiB"):
        search(task, model)


def test_more_devices_are_whole_domains() -> None:
    tables = tuple(Table(name=f"t{i}", rows=2_000_000, dim=64, pooling_factor=20.0) for i in range(5))
    task = ShardingTask(
        tables=tables,
        device_memory_bytes=(540 * MIB,) * 4,
        batch_size=1024,
        topology=Topology(domain=4, local_world_size=4),
    )
    with refused(Infeasible, "use 8 devices instead of 4"):
        search(task, open_cost_model("analytic:h100", 1024))


def test_where_less_held_by_the_allocator_would_do_expandable_segments_are_a_way_out(make_task, model):
    tables = make_task([(1000, 64, 20.0)] * 4, [1.0, 1.0])
    task = tables.model_copy(update={"pipeline": "none", "step_ledger": 1, "allocator_share": 0.9})
    little = search(task.model_copy(update={"allocator_share": 0.2}), model, SearchSettings(rounds=0))
    memory = {"device_memory_bytes": (max(little.memory_bytes()),) * 2}
    with refused(Infeasible, "PYTORCH_ALLOC_CONF=expandable_segments:True", "--allocator-share 10%"):
        search(task.model_copy(update=memory), model, SearchSettings(rounds=0))
    assert search(task.model_copy(update={**memory, "allocator_share": 0.1}), model, SearchSettings(rounds=0)).shards
