"""constraints.json as people write it by hand, with faults: each is reported in the words of the file, with its place."""

import json

import pytest

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.files.constraints import ConstraintsFile, read_constraints, resolve, with_flags


@pytest.mark.parametrize(
    ("written", "reserve"), [(0, 0), (1e9, 10**9), ("2GiB", 2 * 2**30), ("1048576", 2**20), ("64B", 64)]
)
def test_an_amount_to_reserve_is_bytes_or_a_text(tmp_path, written, reserve):
    path = tmp_path / "constraints.json"
    path.write_text(json.dumps({"reserve": written}))
    given = read_constraints(path)[0]
    assert given.reserve == reserve
    assert ConstraintsFile.parse(given.model_dump(), "what it writes") == with_flags(given) == given
    for few in (80, "80", 1024.0):
        with refused(InvalidInput, "reserve", "bytes", "write"):
            ConstraintsFile.parse({"reserve": few}, "constraints")


def test_a_percentage_to_reserve_is_of_each_device_and_a_flag_replaces_it(tmp_path):
    path = tmp_path / "constraints.json"
    path.write_text(json.dumps({"reserve": "12.5%"}))
    given = read_constraints(path)[0]
    tables = (Table(name="a", rows=8, dim=4, pooling_factor=1),)

    reserved = resolve(given, tables, "constraints")
    task = ShardingTask(tables=tables, device_memory_bytes=(8000, 801), batch_size=1, constraints=reserved)
    assert task.usable_bytes == (7000, 700)
    assert ShardingTask.parse(task.model_dump(), "the task") == task
    in_bytes = resolve(with_flags(given, reserve="1KiB"), tables, "constraints")
    assert (in_bytes.reserved(80_000), in_bytes.reserved(801)) == (1024, 1024)
    assert resolve(with_flags(with_flags(given, reserve="1KiB"), reserve="50%"), tables, "constraints").reserved(9) == 5


def test_keys_that_nobody_reads_are_reported_for_a_misspelt_rule_constrains_nothing(tmp_path):
    path = tmp_path / "constraints.json"
    path.write_text(json.dumps({"mindim": 8, "tables": [{"match": "a", "pin": [0]}, {"match": "b", "split": False}]}))
    given, notes = read_constraints(path)
    assert given == ConstraintsFile.parse({"tables": [{"match": "a"}, {"match": "b", "split": False}]}, "")
    assert notes == (f"{path}: ignored unknown keys, which constrain nothing: mindim, pin of tables",)
    path.write_text(json.dumps({"format_version": 1, "min_dim": 8}))
    assert read_constraints(path)[1] == ()


def test_a_pin_names_devices_or_whole_hosts() -> None:
    given = with_flags(ConstraintsFile(), 4, pin=["a=host:1", "b=0,host:2"])
    assert [rule.devices for rule in given.tables] == [(4, 5, 6, 7), (0, 8, 9, 10, 11)]
    with refused(UsageError, "--local-world-size", "'a=host:1'"):
        with_flags(ConstraintsFile(), pin=["a=host:1"])
    for wrong in ("a=host:", "a=host:x", "a=hosts:1", "host:1", "=0"):
        with refused(UsageError, wrong):
            with_flags(ConstraintsFile(), 4, pin=[wrong])


def test_a_rule_may_name_the_tier_of_tables():
    tables = [Table(name=name, rows=100, dim=8, pooling_factor=1.0) for name in ("user_a", "user_b", "item")]
    rules = [{"match": "user_*", "tier": "cached", "cached_rows": 64}, {"match": "item", "tier": "host"}]
    found = resolve(ConstraintsFile.model_validate({"tables": rules}), tables, "constraints.json")
    assert {rule.table: (rule.tier, rule.cached_rows) for rule in found.tables} == {
        "user_a": ("cached", 64),
        "user_b": ("cached", 64),
        "item": ("host", None),
    }


@pytest.mark.parametrize(
    ("rules", "facts"),
    [
        ([{"match": "a", "tier": "cached"}], ["'a'", "tier 'cached'", "no cached_rows"]),
        ([{"match": "a", "tier": "host", "cached_rows": 5}], ["'a'", "tier 'host'", "5 cached_rows"]),
        ([{"match": "*", "tier": "host"}, {"match": "a", "tier": "hbm"}], ["'*'", "'a'", "tier host and hbm"]),
        ([{"match": "a", "tier": "host", "data_parallel": True}], ["'a'", "data-parallel", "tier 'host'"]),
    ],
)
def test_rules_of_tiers_that_contradict_each_other_are_refused(rules, facts):
    given = ConstraintsFile.model_validate({"tables": rules})
    with refused(InvalidInput, "constraints.json", *facts):
        resolve(given, [Table(name="a", rows=100, dim=8, pooling_factor=1.0)], "constraints.json")


def test_rules_of_a_table_in_two_parts_hold_for_both_and_parts_may_have_rules_of_their_own():
    sequence = {"rows": 1000, "dim": 16, "pooling_factor": 1.0, "pooling": "none"}
    tables = [Table(name=name, **sequence) for name in ("ads", "user")]
    rules = [
        {"match": "ads", "rows_by_access": {"hot_rows": 10}},
        {"match": "ads/hot", "data_parallel": True},
        {"match": "*/cold", "tier": "host"},
        {"match": "*", "min_dim": 8},
    ]
    found = resolve(ConstraintsFile.model_validate({"tables": rules}), tables, "c.json")
    assert {rule.table: rule.model_dump(exclude_none=True) for rule in found.tables} == {
        "ads": {"table": "ads", "min_dim": 8, "rows_by_access": {"hot_rows": 10}},
        "user": {"table": "user", "min_dim": 8},
        "ads/hot": {"table": "ads/hot", "data_parallel": True},
        "ads/cold": {"table": "ads/cold", "tier": "host"},
    }
    with refused(InvalidInput, "no table matches 'user/hot'"):
        resolve(ConstraintsFile.model_validate({"tables": [*rules, {"match": "user/hot"}]}), tables, "c.json")
