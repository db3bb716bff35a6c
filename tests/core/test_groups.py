"""Groups of ranks: which there are, how their ranks are joined, and what a task and a plan of a group are."""

import json

import pytest

from neuroshard.core import plan as plans
from neuroshard.core.comparable import other_groups, other_work
from neuroshard.core.errors import InvalidInput, NewerFormat
from neuroshard.core.groups import Groups, sizes_of
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology

TABLE = Table(name="a", rows=100, dim=8, pooling_factor=2.0)


def groups(ranks: int = 32, *, contiguous: bool = False, domain: int = 8, local: int = 8, every: int = 1) -> Groups:
    return Groups(ranks=ranks, contiguous=contiguous, sync_every=every, domain=domain, local_world_size=local)


def fields(size: int, of: Groups) -> dict[str, object]:
    return {
        "tables": [TABLE],
        "device_memory_bytes": [2**20] * size,
        "batch_size": 64,
        "topology": of.topology(size, None),
        "groups": of,
    }


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("ranks", "domain", "local"), [(32, 8, 8), (32, 8, 4), (24, 6, 2), (16, 16, 8), (48, 12, 4)])
def test_joined_ranks_of_a_group_are_those_of_one_domain(contiguous, ranks, domain, local):
    for size in sizes_of(ranks):
        of = groups(ranks, contiguous=contiguous, domain=domain, local=local)
        members = [list(of.members(group, size)) for group in range(ranks // size)]
        assert sorted(rank for group in members for rank in group) == list(range(ranks))
        assert all(of.of_rank(rank, size) == (g, d) for g, group in enumerate(members) for d, rank in enumerate(group))

        def runs(together: int, group: list[int]) -> list[int]:
            """How many neighbours in the order of the group share a domain, or a host."""
            of_each = [rank // together for rank in group]
            return [of_each.count(one) for one in dict.fromkeys(of_each)]

        replicas = [[group[device] for group in members] for device in range(size)]
        even = [{count for group in members for count in runs(width, group)} for width in (domain, local)]
        alike = [{count for each in replicas for count in runs(width, each)} for width in (domain, local)]
        assert (of.fault(size) == "") == all(len(counts) == 1 for counts in (*even, *alike))
        if of.fault(size):
            continue
        topology = of.topology(size, None)
        assert [{topology.domain}, {topology.local_world_size}] == even
        assert topology.fault(size) == ""
        assert {of.replicas_near(size)} == alike[0]


def test_sizes_that_make_no_groups_are_named():
    assert (
        groups(12).fault(5)
        == "groups of 5 do not divide 12 ranks into several groups of several ranks; groups of 2, 3, 4, 6 do"
    )
    assert groups(7).fault(3).endswith("; no groups do")
    assert (
        groups(32, domain=64, contiguous=True).fault(8)
        == "32 devices do not make whole domains of 64 ranks; a domain must divide the devices"
    )
    assert "contiguous groups of 12 of 24 ranks cut domains of 8 unevenly" in groups(24, contiguous=True).fault(12)


def test_the_network_is_that_of_all_ranks():
    given = Topology(domain=8, local_world_size=8, network_bytes_per_s=1e9, network_latency_ms=0.5)
    of_group = groups().topology(8, given)
    assert (of_group.domain, of_group.local_world_size) == (2, 2)
    assert (of_group.network_bytes_per_s, of_group.network_latency_ms) == (1e9, 0.5)
    assert groups().of_all_ranks(of_group) == given


def test_a_task_of_a_group_knows_all_ranks():
    task = ShardingTask.parse(fields(8, groups()), "a task")
    assert (task.devices, task.ranks, task.global_batch_size) == (8, 32, 256)
    everyone = task.of_all_ranks
    assert (everyone.devices, everyone.batch_size, everyone.groups) == (32, 256, None)
    assert everyone.topology == Topology(domain=8, local_world_size=8)
    assert ShardingTask.parse(json.loads(task.canonical_json()), "a task") == task


def test_a_task_without_groups_is_written_as_ever():
    task = ShardingTask(tables=(TABLE,), device_memory_bytes=(2**20,), batch_size=64)
    assert b"groups" not in task.canonical_json()
    assert (task.ranks, task.global_batch_size, task.of_all_ranks) == (1, 64, task)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"device_memory_bytes": [2**20] * 5, "topology": None}, "groups of 5 do not divide 32 ranks"),
        ({"topology": None}, "the topology is not that of strided groups of 8 of 32 ranks"),
        ({"topology": Topology(domain=8, local_world_size=8)}, "the topology is not that of strided groups"),
        ({"groups": {**groups().model_dump(), "ranks": 2**31 - 1}}, "groups.ranks: must be less than or equal to 4096"),
        ({"host_memory_bytes": 2**30}, "groups of ranks cannot hold tables beyond HBM"),
    ],
)
def test_a_task_that_is_of_no_group_is_refused(changed, says):
    with pytest.raises(InvalidInput, match=says):
        ShardingTask.parse({**fields(8, groups()), **changed}, "a task")


def test_plans_of_groups_are_of_format_4_and_older_programs_refuse_them(monkeypatch):
    task = ShardingTask.parse(fields(2, groups(8, domain=8)), "a task")
    shard = Shard(table="a", rows=100, dim=8, device=1)
    plan = Plan(task=task, shards=(shard,), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    assert plan.format_version == 4
    assert Plan.from_json(plan.canonical_json(), "plan.json") == plan
    pretends = json.loads(plan.canonical_json()) | {"format_version": 3}
    with pytest.raises(InvalidInput, match="names groups of ranks, which format_version 3 lacks; it is 4"):
        Plan.parse(pretends, "plan.json")
    monkeypatch.setattr(plans, "PLAN_FORMAT", 3)
    with pytest.raises(NewerFormat, match="format_version 4 is from a newer neuroshard"):
        Plan.from_json(plan.canonical_json(), "plan.json")


def test_costs_of_other_sizes_can_be_compared_and_moves_cannot():
    some = ShardingTask.parse({**fields(8, groups()), "batch_size": 64}, "a task")
    halves = ShardingTask.parse({**fields(16, groups()), "batch_size": 128}, "a task")
    rarely = ShardingTask.parse({**fields(8, groups(every=10)), "batch_size": 64}, "a task")
    assert other_work(some, halves) == other_work(some, some.of_all_ranks) == ""
    assert other_work(some, rarely) == "the predictions are for other steps between averagings"
    assert other_groups(some, rarely) == ""
    assert other_groups(some, halves).startswith(
        "4 groups of 8 of 32 ranks (strided), averaged every step, and 2 groups of 16"
    )
    assert other_groups(some, some.of_all_ranks).endswith("and ranks that are no groups")
