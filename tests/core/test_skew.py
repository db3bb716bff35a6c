"""What the largest row block has of the lookups, beside rows that are placed at random, many times."""

import numpy as np
import pytest

from neuroshard.core.skew import HIGH, Loads, largest_block
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask

OFF = 0.06  # of the mean and of the quantile, of which 600 placements leave 1 to 2 %


def zipf(rows: int, exponent: float, read: int | None = None) -> Loads:
    """Shares of the lookups; of so many rows that are `read`, by default all."""
    each = np.arange(1, (read or rows) + 1.0) ** -exponent
    return Loads(rows, tuple((1.0, load) for load in (each / each.sum()).tolist()))


def drawn(rows: int, spread: float, seed: int) -> Loads:
    each = np.sort(np.random.default_rng(seed).lognormal(0, spread, rows))[::-1]
    return Loads(rows + rows // 2, tuple((1.0, load) for load in (each / each.sum()).tolist()))


def with_padding(share: float) -> Loads:
    """One id has so much of the lookups, and others are read by Zipf's law."""
    rest = zipf(3000, 0.9)
    return Loads(3001, ((1.0, share), *((n, load * (1 - share)) for n, load in rest.groups)))


SHAPES = {
    **{f"zipf {exponent}": zipf(3000, exponent) for exponent in (0.0, 0.3, 0.6, 0.9, 1.1, 1.4, 2.0)},
    "a tenth of the rows is read": zipf(3000, 0.7, read=300),
    "one row has half": Loads(3000, ((1.0, 0.5), (2999.0, 0.5 / 2999))),
    "one row has all": Loads(3000, ((1.0, 1.0),)),
    "three rows have most": Loads(3000, ((3.0, 0.25), (2997.0, 0.25 / 2997))),
    "a padding id": with_padding(0.35),
    "drawn, even": drawn(2000, 0.5, 1),
    "drawn, uneven": drawn(2000, 2.5, 2),
    "few rows": zipf(12, 1.0),
    "hardly more rows than blocks": zipf(37, 1.2),
    "one row": zipf(1, 1.0),
}


def placed(tables: tuple[Loads, ...], blocks: int, draws: int = 600) -> tuple[float, float]:
    """The mean and the quantile of the load of the fullest of so many ranks, where rows lie anywhere."""
    rng, found = np.random.default_rng(0), np.zeros((draws, blocks))
    for table in tables:
        block_rows = -(-table.rows // blocks)
        of_rows, at = np.zeros(table.rows), 0
        for rows, load in table.groups:
            of_rows[at : at + int(rows)] = load
            at += int(rows)
        for draw in range(draws):
            in_blocks = np.zeros(block_rows * blocks)
            in_blocks[: table.rows] = rng.permutation(of_rows)
            found[draw] += in_blocks.reshape(blocks, block_rows).sum(axis=1)
    most = found.max(axis=1)
    return float(most.mean()), float(np.quantile(most, HIGH))


@pytest.mark.parametrize("blocks", [2, 5, 8, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_block_has_what_random_placements_give_it(shape: str, blocks: int) -> None:
    found = largest_block((SHAPES[shape],), blocks)
    assert tuple(found) == pytest.approx(placed((SHAPES[shape],), blocks), rel=OFF)


@pytest.mark.parametrize("blocks", [4, 16])
def test_hot_rows_of_several_tables_rarely_come_together(blocks: int) -> None:
    tables = (zipf(3000, 1.0), zipf(1000, 1.2).times(2), drawn(2000, 2.0, 3), zipf(40, 1.0))
    together = largest_block(tables, blocks)
    assert tuple(together) == pytest.approx(placed(tables, blocks), rel=OFF)
    assert together.high < 0.95 * sum(largest_block((table,), blocks).high for table in tables)


def test_groups_of_rows_are_as_many_single_ones() -> None:
    stated = Table(name="t", rows=50_000, dim=4, pooling_factor=3.0, access="zipf:1.05")
    assert stated.loads is not None
    assert len(stated.loads.groups) < 100
    assert tuple(largest_block((stated.loads,), 8)) == pytest.approx(largest_block((zipf(50_000, 1.05),), 8), rel=0.02)


@pytest.mark.parametrize("access", [None, "uniform", "zipf:0"])
def test_rows_that_are_read_alike_leave_blocks_even(access: str | None) -> None:
    table = Table(name="t", rows=1000, dim=4, pooling_factor=3.0, access=access)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**30,) * 8, batch_size=8, step_ledger=1)
    share = task.lookup_share(task.tables[0], 0, 125, 8)
    assert share == (None if access is None else pytest.approx(1 / 8))


def test_a_block_has_the_share_of_the_largest_only_where_the_shape_of_access_is_all_that_is_known() -> None:
    table = Table(name="t", rows=1000, dim=4, pooling_factor=3.0, access="zipf:1")
    known = table.model_copy(update={"lookups_by_id": (0.7, 0.1, 0.1, 0.1)})
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**30,) * 4, batch_size=8, step_ledger=1)
    old = task.model_copy(update={"step_ledger": None})
    assert table.loads is not None
    assert task.lookup_share(table, 250, 250, 4) == largest_block((table.loads,), 4).expected > 0.3
    assert task.lookup_share(table, 0, 1000, 1) is None
    assert task.lookup_share(known, 0, 250, 4) == pytest.approx(0.7)
    assert old.lookup_share(table, 250, 250, 4) is None


def test_no_block_has_more_lookups_than_there_are() -> None:
    assert largest_block((Loads(3000, ((0.5, 1.0),)),), 4) == (0.5, 0.5)
