"""The tables of all models of a night, whose cases are drawn together."""

from neuroshard.augment.night import tables_of
from neuroshard.core.nightly import Order
from neuroshard.core.table import MAX_NAME, Table
from neuroshard.files.tables import write_tables


def order(name: str, path: str) -> Order:
    return Order(name=name, tables=path, devices=2, memory="1GiB")


def test_tables_of_one_name_in_two_models_stay_distinct(tmp_path):
    write_tables(tmp_path / "t.json", (Table(name="user", rows=10, dim=4, pooling_factor=1.0),))

    found, faults = tables_of([order(model, str(tmp_path / "t.json")) for model in ("ads", "feed")])

    assert {model: [table.name for table in tables] for model, tables in found.items()} == {
        "ads": ["ads/user"],
        "feed": ["feed/user"],
    }
    assert faults == {}


def test_tables_that_cannot_be_read_are_said_of_their_model_alone(tmp_path):
    write_tables(tmp_path / "t.json", (Table(name="user", rows=10, dim=4, pooling_factor=1.0),))
    found, faults = tables_of([order("ads", str(tmp_path / "t.json")), order("feed", "not-there.json")])

    assert (list(found), list(faults)) == (["ads"], ["feed"])
    assert "is neither a file nor a preset" in faults["feed"]


def test_the_longest_names_that_tables_may_have_stay_names_and_stay_apart(tmp_path):
    longest = [f"{'x' * (MAX_NAME - 1)}{end}" for end in "ab"]
    write_tables(tmp_path / "t.json", tuple(Table(name=n, rows=10, dim=4, pooling_factor=1.0) for n in longest))

    tables = tables_of([order("ads", str(tmp_path / "t.json"))])[0]["ads"]

    assert len({table.name for table in tables}) == 2
    assert [Table.parse(table.model_dump(), "here") for table in tables] == list(tables)
