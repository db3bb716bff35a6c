"""What is said not to fit does not, by an independent packing; what fits keeps its memory."""

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from helpers.sizes import MIB, some_tables
from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from size.conftest import Swept


def packs(sizes: list[int], devices: int, memory: int) -> bool:
    """Whether whole items of these sizes fit into so many bins, by SciPy's MILP: x[item, bin] are 0 or 1."""
    items = len(sizes)
    once = np.kron(np.eye(items), np.ones(devices))
    held = np.kron(np.array(sizes, dtype=float), np.eye(devices)).reshape(devices, items * devices) / memory
    found = milp(
        np.zeros(items * devices),
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(held, -np.inf, 1 + 1e-9)],
        integrality=np.ones(items * devices),
        bounds=Bounds(0, 1),
    )
    return bool(found.success)


@pytest.mark.parametrize("seed", range(6))
def test_whole_tables_fit_where_a_packing_solver_finds_room_and_nowhere_else(seed: int, swept: Swept) -> None:
    rng = np.random.default_rng(seed)
    tables = some_tables(rng.integers(30, 100, size=7).tolist())
    task = ShardingTask(tables=tables, device_memory_bytes=(2**40,), batch_size=512, pipeline="none")
    sizes = [task.memory(Part.of(table)).total for table in tables]
    memory = max(*sizes, int(sum(sizes) / 3 * rng.uniform(0.98, 1.15)))
    for row in swept(tables, "2-7/1", str(memory), never_split=["*"], no_row_wise=True, allocator_share=0).rows:
        expected = "fits" if packs(sizes, row.cell.devices, memory) else "proven not to fit"
        assert row.state == expected, (row.cell.devices, row.why)


def test_below_the_fewest_devices_no_search_finds_a_plan(swept: Swept) -> None:
    tables = some_tables([100, 90, 80, 70, 60])
    sizes = swept(tables, "8", "64MiB")
    (fewest,) = sizes.fewest_devices.values()
    assert fewest == -(-400 // 64)
    with pytest.raises(Infeasible) as error:
        swept(tables, f"1-{fewest - 1}/1", "64MiB")
    assert error.value.proven


def test_sizes_proven_one_after_another_raise_the_fewest(swept: Swept) -> None:
    tables = some_tables([60, 60, 60])  # 180 MiB: by bytes 2 devices of 100 MiB would do
    sizes = swept(tables, "2-4/1", "100MiB", never_split=["*"], no_row_wise=True)
    assert [row.state for row in sizes.rows] == ["proven not to fit", "fits", "fits"]
    assert [*sizes.fewest_devices.values()] == [3]


def test_nothing_fits_says_the_nearest_and_what_it_lacks(swept: Swept) -> None:
    with pytest.raises(Infeasible, match=r"analytic:h100 x 4 of 20.0 MiB: .*320.0 MiB short") as error:
        swept(some_tables([200, 200]), "1-4", "100KiB,20MiB")
    assert "\n" not in str(error.value)


def test_a_proof_of_more_memory_names_that_memory(swept: Swept) -> None:
    rows = swept(some_tables([60, 60, 60]), "2,4", "20MiB,30MiB,100MiB").rows
    assert [row.why for row in rows if row.cell.devices == 2] == [
        f"not even with 30.0 MiB: {rows[1].why}",
        "weights and optimizer state need 180.0 MiB, 2 devices have 60.0 MiB together: 120.0 MiB short",
        "",
    ]


def test_a_plan_of_every_row_keeps_its_memory_and_bound(swept: Swept) -> None:
    sizes = swept(some_tables([40, 30, 20, 10, 10, 10]), "2-8", "32MiB,48MiB,64MiB,1GiB")
    for row in sizes.rows:
        if row.fits:
            assert set(row.found.task.device_memory_bytes) == {row.cell.memory_bytes}
            assert row.memory_left_bytes == row.cell.memory_bytes - row.memory_used_bytes >= 0
            assert row.bound_ms is not None
            assert row.bound_ms <= row.embeddings_ms
            assert row.found.lower_bound_ms == row.bound_ms
    assert any(row.memory_used_bytes > 30 * MIB for row in sizes.rows if row.fits)
