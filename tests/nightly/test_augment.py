"""The tables of all models of a nightly run, whose cases are drawn together."""

import numpy as np
import pytest

from neuroshard.core.case import Cases, ComputeCase
from neuroshard.core.table import MAX_NAME, Table
from neuroshard.files.tables import write_tables
from neuroshard.nightly.augment import renamed, roles, tables_of
from neuroshard.orders.nightly import ModelSpec


def spec(name: str, path: str) -> ModelSpec:
    return ModelSpec(name=name, tables=path, devices=2, memory="1GiB")


def test_tables_of_one_name_in_two_models_stay_distinct(tmp_path):
    write_tables(tmp_path / "t.json", (Table(name="user", rows=10, dim=4, pooling_factor=1.0),))

    found, faults = tables_of([spec(model, str(tmp_path / "t.json")) for model in ("ads", "feed")])

    assert {model: [table.name for table in tables] for model, tables in found.items()} == {
        "ads": ["ads/user"],
        "feed": ["feed/user"],
    }
    assert faults == {}


def test_tables_that_cannot_be_read_are_said_of_their_model_alone(tmp_path):
    write_tables(tmp_path / "t.json", (Table(name="user", rows=10, dim=4, pooling_factor=1.0),))
    found, faults = tables_of([spec("ads", str(tmp_path / "t.json")), spec("feed", "not-there.json")])

    assert (list(found), list(faults)) == (["ads"], ["feed"])
    assert "is neither a file nor a preset" in faults["feed"]


def test_the_longest_names_that_tables_may_have_stay_names_and_stay_apart(tmp_path):
    longest = [f"{'x' * (MAX_NAME - 1)}{end}" for end in "ab"]
    write_tables(tmp_path / "t.json", tuple(Table(name=n, rows=10, dim=4, pooling_factor=1.0) for n in longest))

    tables = tables_of([spec("ads", str(tmp_path / "t.json"))])[0]["ads"]

    assert len({table.name for table in tables}) == 2
    assert [Table.parse(table.model_dump(), "here") for table in tables] == list(tables)


SMALL, OTHER = (Table(name=f"ads/{name}", rows=100, dim=4, pooling_factor=1.0) for name in ("small", "other"))
TALL = tuple(Table(name=f"ads/tall{i}", rows=10**9 + i, dim=4, pooling_factor=1.0) for i in range(9))


def test_a_table_that_is_alone_in_fitting_a_device_is_trained_on():
    for seed in range(20):
        unseen, pool = roles((*TALL, SMALL), [], 2**20, np.random.default_rng(seed))
        assert (unseen, pool) == (frozenset(), (*TALL, SMALL))


@pytest.mark.parametrize(
    "names", [[f"ads/{kind}~{i}" for kind in "ab" for i in range(6)], ["x" * 499 + f"{i:x}" for i in range(12)]]
)
def test_a_table_keeps_its_role_when_its_rows_change_whatever_its_name(names):
    tables = tuple(Table(name=name, rows=100 + i, dim=4, pooling_factor=1.0) for i, name in enumerate(names))
    held_out, _ = roles(tables, [], 2**30, np.random.default_rng(0))
    compute = tuple(
        ComputeCase(tables=(table,), split="test_tables" if table.name in held_out else "train") for table in tables
    )
    drawn = Cases(tables=tables, compute=compute, collective=(), max_dim=4, seed=0)

    grown = renamed([table.model_copy(update={"rows": 10 * table.rows}) for table in tables], [drawn])
    unseen, _ = roles(grown, [drawn], 2**30, np.random.default_rng(1))

    assert 0 < len(held_out) < len(tables)
    assert len({table.name for table in grown}) == len(tables)
    assert {place for place, table in enumerate(grown) if table.name in unseen} == {
        place for place, table in enumerate(tables) if table.name in held_out
    }


def test_where_all_that_fits_is_held_out_tables_of_earlier_draws_are_trained_on():
    drawn = Cases(
        tables=(OTHER, SMALL),
        compute=(ComputeCase(tables=(OTHER,)), ComputeCase(tables=(SMALL,), split="test_tables")),
        collective=(),
        max_dim=4,
        seed=0,
    )
    unseen, pool = roles((TALL[0], SMALL), [drawn], 2**20, np.random.default_rng(0))
    assert (unseen, pool) == ({"ads/small"}, (TALL[0], SMALL, OTHER))
