"""The formula: what makes a set costly, and what an all-to-all waits for."""

from collections.abc import Callable

import numpy as np
import pytest

from helpers.parts import cut_to, wholes
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.protocol import device_costs
from neuroshard.measure import formula

BATCH = 65536
MakeTable = Callable[..., Table]


@pytest.mark.parametrize("larger", [{"dim": 64}, {"pooling_factor": 8.0}, {"rows": 2_000_000}, {"element_bytes": 4}])
def test_a_bigger_table_costs_more(table: MakeTable, larger: dict[str, float]) -> None:
    small = {"rows": 1_000_000, "dim": 32, "pooling_factor": 4.0, "element_bytes": 2}
    assert formula.compute_ms([table("a", **(small | larger))], BATCH) > formula.compute_ms(
        [table("a", **small)], BATCH
    )


def test_a_larger_batch_costs_more(table: MakeTable) -> None:
    assert formula.compute_ms([table("a")], 2 * BATCH) > formula.compute_ms([table("a")], BATCH)


def test_adding_a_table_costs_more_but_less_than_the_table_alone(table: MakeTable) -> None:
    tables = [table(f"t{i}", rows=10_000, pooling_factor=i + 1) for i in range(8)]
    together = formula.compute_ms(tables, 512)
    assert formula.compute_ms(tables[:-1], 512) < together
    assert together < 0.5 * sum(formula.compute_ms([one], 512) for one in tables)


def test_tables_that_fill_the_cache_cost_more_together_than_their_shares_say(table: MakeTable) -> None:
    """Costs are not additive in the other direction either, once launches no longer matter."""
    hot = [table(f"t{i}", rows=200_000, dim=64, pooling_factor=80.0) for i in range(15)]
    first, more = formula.compute_ms(hot[:1], BATCH), formula.compute_ms(hot, BATCH)
    assert more > 15 * first


def test_two_halves_cost_more_than_the_whole_table(table: MakeTable) -> None:
    whole = table("a", rows=1_000_000, dim=64, pooling_factor=10.0)
    halves = 2 * formula.compute_ms([whole.with_dim(32)], BATCH)
    assert halves > formula.compute_ms([whole], BATCH)


def test_no_tables_cost_nothing() -> None:
    nothing = np.zeros(len(formula.TERMS))
    assert float(formula.forward_ms(nothing)) == float(formula.backward_ms(nothing)) == 0.0


def test_many_sets_at_once_cost_what_each_does(table: MakeTable) -> None:
    tables = [table(f"t{i}", rows=1000 * 3**i, dim=4 * i + 4, pooling_factor=i) for i in range(6)]
    terms = formula.part_terms(wholes(tables), BATCH)
    sums = np.cumsum(terms, axis=0)
    one_by_one = [formula.compute_ms(tables[: n + 1], BATCH) for n in range(6)]
    np.testing.assert_allclose(formula.forward_ms(sums) + formula.backward_ms(sums), one_by_one, rtol=1e-12)


def test_the_order_of_devices_does_not_change_what_each_costs() -> None:
    rng = np.random.default_rng(0)
    dims, delays = rng.integers(0, 2000, (50, 16)).astype(float), rng.uniform(0, 20, (50, 16))
    order = rng.permutation(16)
    forward = formula.forward_collective_ms(dims, delays, BATCH)
    np.testing.assert_allclose(
        formula.forward_collective_ms(dims[:, order], delays[:, order], BATCH), forward[:, order]
    )
    backward = formula.backward_collective_ms(dims, BATCH)
    np.testing.assert_allclose(formula.backward_collective_ms(dims[:, order], BATCH), backward[:, order])


def test_who_starts_first_waits_for_who_starts_last() -> None:
    together, late = (
        formula.forward_collective_ms(np.full(4, 512.0), np.array(delays), BATCH)
        for delays in ([0.0] * 4, [0.0, 0.0, 0.0, 7.0])
    )
    np.testing.assert_allclose(late - together, [7.0, 7.0, 7.0, 0.0])


def test_lopsided_dims_cost_every_device_more_than_balanced_ones() -> None:
    balanced = formula.backward_collective_ms(np.array([512.0, 512.0, 512.0, 512.0]), BATCH)
    lopsided = formula.backward_collective_ms(np.array([1700.0, 116.0, 116.0, 116.0]), BATCH)
    assert (lopsided > balanced).all()
    assert lopsided.argmax() == 0


def test_the_formula_is_a_cost_model(table: MakeTable) -> None:
    tables = [table("a", rows=10**6, dim=64), table("b", rows=10**5, dim=32)]
    task = ShardingTask(tables=tuple(tables), device_memory_bytes=(2**40,) * 2, batch_size=BATCH)
    model = formula.Formula(BATCH)
    vectors = model.part_vectors(cut_to(task.tables, [64, 32]))
    compute, forward, backward = device_costs(model, vectors, np.array([64.0, 32.0]))
    np.testing.assert_allclose(compute, [formula.compute_ms([one], BATCH) for one in tables])
    waited = forward + compute + backward
    assert waited.max() - waited.min() < 0.01 * waited.max()


def test_the_slope_of_the_formula_is_what_another_table_adds(table: MakeTable) -> None:
    model = formula.Formula(BATCH)
    many = model.part_vectors(cut_to([table(f"t{i}", rows=10**6, dim=64) for i in range(200)], np.full(200, 64)))
    sums = many[1:].sum(axis=0)

    added = model.compute_slope(sums) @ many[0]

    assert added == pytest.approx(model.compute_ms(sums + many[0]) - model.compute_ms(sums), rel=0.02)
