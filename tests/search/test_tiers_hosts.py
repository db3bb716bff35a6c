"""Host memory steers a search that chooses tiers: plans hold what each host has, wherever such a plan is to be found."""

from typing import Any

import pytest

from helpers.refusals import refused
from neuroshard.core.errors import Infeasible
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import Tier
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from search.test_tiers import drawn

# seed, tables, devices, share of HBM, hosts: without a limit one host has up to 1.5 times its share of what HBM lacks
DRAWN = [(1, 16, 4, 0.25, 4), (6, 16, 4, 0.3, 2)]


def on_hosts(seed: int, count: int, devices: int, share: float, hosts: int) -> ShardingTask:
    task, host = drawn(seed, count, devices, share), devices // hosts
    return task.model_copy(update={"topology": Topology(domain=host, local_world_size=host)})


def planned(task: ShardingTask, **settings: Any) -> Plan:
    """The plan, which a Plan checks: HBM of each device, memory of each host. Its price is that of its shards."""
    model = analytic_model("h100", task.batch_size)
    plan = search(task, model, SearchSettings(rounds=4, **settings))
    prices = price_shards(model, plan.held, plan.shards)
    assert plan.cost_ms == pytest.approx(float(prices.total_ms.max()))
    assert plan.lower_bound_ms <= plan.cost_ms
    assert task.topology is not None  # whose network is that of the datasheet
    doubts = [note for note in plan.provenance.notes if "between two racks" in note]
    assert len(doubts) == (task.topology.domains(task.devices) > 1)
    return plan


def least_host_bytes(task: ShardingTask) -> int:
    """What must be in host memory, whatever the plan."""
    return task.need_bytes - sum(task.placeable_bytes)


@pytest.mark.parametrize(("drawn_as", "little"), list(zip(DRAWN, (1.1, 1.05), strict=True)))
def test_hosts_with_little_more_than_what_hbm_lacks_are_filled_evenly(drawn_as, little):
    task = on_hosts(*drawn_as)
    free, of_host = planned(task), int(little * least_host_bytes(task) / drawn_as[-1])
    assert max(free.host_memory()) > of_host
    plan = planned(task.model_copy(update={"host_memory_bytes": of_host}))
    assert max(plan.host_memory()) <= of_host
    assert plan.cost_ms <= 1.3 * free.cost_ms
    assert plan.improvements[-1].cost_ms == pytest.approx(plan.cost_ms)


def test_one_host_with_little_memory_has_hbm_filled_with_tables_instead_of_caches():
    task = on_hosts(4, 16, 4, 0.2, 1)
    of_host = int(1.08 * least_host_bytes(task))
    assert max(planned(task).host_memory()) > of_host
    assert max(planned(task.model_copy(update={"host_memory_bytes": of_host})).host_memory()) <= of_host


def test_a_time_budget_leaves_time_for_what_hosts_have():
    task = on_hosts(1, 24, 4, 0.25, 4)
    task = task.model_copy(update={"host_memory_bytes": int(1.3 * least_host_bytes(task) / 4)})
    assert max(planned(task, time_budget_s=0.01).host_memory()) <= task.host_memory_bytes


def test_too_little_host_memory_in_all_is_refused_with_the_bytes_that_lack():
    task = on_hosts(1, 24, 4, 0.25, 4)
    least = least_host_bytes(task)
    with refused(Infeasible, "4 hosts have", "must be in host memory", "more of --host-memory"):
        planned(task.model_copy(update={"host_memory_bytes": least // 4 - 2**20}))
    alone = on_hosts(1, 24, 4, 0.25, 1)
    with refused(Infeasible, "1 host has", "must be in host memory"):
        planned(alone.model_copy(update={"host_memory_bytes": least_host_bytes(alone) - 2**20}))


def test_tables_whose_tiers_are_named_are_dealt_to_the_hosts_that_have_room():
    """Four tables in host memory, on two hosts that hold two each; HBM has room for all others."""
    tables = tuple(Table(name=f"t{n}", rows=100_000, dim=64, pooling_factor=1.0 + 8 * (n == 0)) for n in range(5))
    task = ShardingTask(
        tables=tables,
        device_memory_bytes=(2**30,) * 2,
        batch_size=4096,
        topology=Topology(domain=1, local_world_size=1),
        host_memory_bytes=int(2.1 * tables[0].rows * 64 * 4),
    )
    named: dict[str, tuple[Tier | None, int | None]] = {f"t{n}": ("host", None) for n in range(1, 5)}
    for rules in (named, named | {"t0": ("hbm", None)}):
        plan = planned(task.with_tiers(rules))
        assert set(plan.held.constraints.beyond_hbm) == set(named)
        assert plan.host_memory()[0] == plan.host_memory()[1]
