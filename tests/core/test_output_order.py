"""The order of a module's outputs under a plan. tests/client/test_output_order.py compares with real modules."""

import pytest

from helpers.trainers import cut_plan
from neuroshard.core.output_order import Reordered, output_orders, reordered, said_reordered
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table


def table(name: str, module: str = "m", **how: object) -> Table:
    return Table.model_validate({"name": name, "rows": 12, "dim": 8, "pooling_factor": 1.0, "module": module, **how})


A, B, C, D = (table(name) for name in "abcd")
HALF = table("b", element_bytes=2)


def plan(*tables: Table, copied: str = "", **cuts: list[tuple[int, int]]) -> Plan:
    return cut_plan(tables, 2, cuts, batch_size=2, copied=tuple(copied))


@pytest.mark.parametrize(
    ("given", "order"),
    [
        (plan(A, B, C, a=[(8, 1)], b=[(8, 0)], c=[(8, 1)]), "bac"),  # by device
        (plan(A, B, C, a=[(8, 1)], b=[(8, 0)], c=[(4, 1), (4, 0)]), "bca"),  # a cut table where its first device is
        (plan(A, B, C, D, a=[(8, 1)], b=[], c=[(8, 0)], d=[]), "cabd"),  # by sharding type, whole tables first here,
        (plan(B, A, C, D, a=[(8, 1)], b=[], c=[(8, 0)], d=[]), "bdca"),  # row-wise ones there
        (plan(A, B, C, a=[(8, 1)], b=[], c=[(8, 0)], copied="b"), "cab"),
        (plan(A, HALF, C, a=[(8, 0)], b=[(8, 0)], c=[(8, 0)]), "acb"),  # by operator
        (plan(HALF, A, C, D, b=[(4, 0), (4, 1)], a=[(8, 1)], c=[(8, 0)], d=[(8, 1)]), "bcad"),
    ],
)
def test_outputs_come_by_sharding_type_then_device_then_operator(given: Plan, order: str) -> None:
    assert output_orders(given, given.task.tables) == {"m": tuple(order)}


def test_each_module_has_an_order_of_its_own() -> None:
    other = table("d", module="n.deep")

    given = plan(A, other, B, a=[(8, 1)], b=[(8, 0)], d=[(8, 0)])
    found = output_orders(given, given.task.tables)

    assert found == {"m": ("b", "a"), "n.deep": ("d",)}


def test_a_new_plan_names_the_modules_that_return_their_outputs_in_another_order() -> None:
    old, new = plan(A, B, a=[(8, 0)], b=[(8, 1)]), plan(A, B, a=[(8, 1)], b=[(8, 0)])

    assert reordered(old, new) == (Reordered("m", "a", "b"),)
    assert reordered(new, new) == ()
    assert said_reordered(["m"]) == (
        "the outputs of module 'm' come in another order: read them by key, or call keep_output_order(model)"
    )


def test_the_order_of_the_tables_in_the_older_task_does_not_matter() -> None:
    assert reordered(plan(B, A, a=[(8, 0)], b=[(8, 0)]), plan(A, B, a=[(8, 1)], b=[(8, 1)])) == ()


def test_tables_of_one_plan_alone_change_no_order() -> None:
    old, new = plan(A, B, D, a=[(8, 0)], b=[(8, 1)], d=[(8, 0)]), plan(A, C, B, a=[(8, 0)], b=[(8, 1)], c=[(8, 1)])

    assert reordered(old, new) == ()


def test_tables_that_name_no_module_count_as_collections_of_their_kinds() -> None:
    sums, sequences = (
        tuple(table(name, module="", pooling=how) for name in names) for names, how in (("ab", "sum"), ("cd", "none"))
    )
    cuts = {"a": [(8, 1)], "b": [(8, 0)], "c": [(8, 1)], "d": [(8, 0)]}

    given = cut_plan((*sums, *sequences), 2, cuts, batch_size=2)
    assert output_orders(given, given.task.tables) == {"": ("b", "a", "d", "c")}
    assert said_reordered([""]).startswith("the outputs of the model come in another order: ")
