"""Tables whose optimizer state does not carry over exactly from one plan to another."""

import pytest

from helpers.plans import row_wise
from helpers.trainers import cut_plan
from neuroshard.core.moves import changed_state
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

TABLE = Table(name="t", rows=12, dim=16, pooling_factor=1.0, optimizer_bytes_per_row=4)


def plan(*columns: tuple[int, int], table: Table = TABLE) -> Plan:
    """The table in shards of so many columns, each on a device, from the left; row-wise without any."""
    shards, first = [], 0
    for dim, device in columns:
        shards.append(Shard(table="t", rows=table.rows, column_offset=first, dim=dim, device=device))
        first += dim
    task = ShardingTask(tables=(table,), device_memory_bytes=(10**6,) * 3, batch_size=1)
    provenance = Provenance(neuroshard_version="0", algorithm="test")
    return Plan(task=task, shards=tuple(shards) or row_wise(table, 3), provenance=provenance)


def copied(table: Table) -> Plan:
    return cut_plan((table,), 3, {}, batch_size=1, copied={"t"})


WHOLE, ROWS, HALVES = plan((16, 0)), plan(), plan((8, 0), (8, 1))
SAME = [
    (WHOLE, plan((16, 2))),
    (WHOLE, ROWS),
    (ROWS, WHOLE),
    (HALVES, plan((8, 2), (8, 0))),
    (HALVES, plan((8, 2), (8, 2))),
    (WHOLE, plan((12, 1), (4, 1))),  # unequal neighbours on one device, which TorchRec holds as one
]
CHANGED = [
    (WHOLE, HALVES),
    (HALVES, ROWS),
    (HALVES, plan((4, 0), (12, 1))),
    (plan((8, 0), (4, 0), (4, 1)), plan((8, 0), (4, 1), (4, 2))),
]


@pytest.mark.parametrize(("old", "new"), SAME)
def test_the_same_columns_of_each_shard_keep_the_state(old, new):
    assert changed_state(old, new) == ()


@pytest.mark.parametrize(("old", "new"), CHANGED)
def test_other_columns_of_a_shard_change_state_kept_by_the_row(old, new):
    assert changed_state(old, new) == changed_state(new, old) == ("t",)


def test_state_kept_by_the_element_and_none_at_all_carry_over():
    for per_element in (0, 4):
        table = TABLE.model_copy(update={"optimizer_bytes_per_row": 0, "optimizer_bytes_per_element": per_element})
        assert changed_state(plan((16, 0), table=table), plan((8, 0), (8, 1), table=table)) == ()


@pytest.mark.parametrize(("per_row", "per_element"), [(4, 0), (0, 8)])
def test_state_of_a_table_that_only_one_plan_copies_does_not_carry_over(per_row, per_element):
    table = TABLE.model_copy(update={"optimizer_bytes_per_row": per_row, "optimizer_bytes_per_element": per_element})
    whole, copies = plan((16, 0), table=table), copied(table)
    assert changed_state(whole, copies) == changed_state(copies, whole) == ("t",)
    assert changed_state(copies, copies) == ()
    without = table.model_copy(update={"optimizer_bytes_per_row": 0, "optimizer_bytes_per_element": 0})
    assert changed_state(plan((16, 0), table=without), copied(without)) == ()


def test_a_table_of_another_width_or_of_one_plan_only_is_made_anew():
    wider = TABLE.model_copy(update={"dim": 32})
    other = Table(name="other", rows=12, dim=16, pooling_factor=1.0)
    task = ShardingTask(tables=(other,), device_memory_bytes=(10**6,) * 3, batch_size=1)
    elsewhere = Plan(task=task, shards=(Shard(table="other", rows=12, dim=16, device=0),), provenance=WHOLE.provenance)
    assert changed_state(HALVES, plan((32, 0), table=wider)) == changed_state(HALVES, elsewhere) == ()
