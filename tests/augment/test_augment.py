"""Tables to cases: which, how many, in what order, and what is said where there are none."""

from collections import Counter
from typing import Any

import pytest

from helpers.refusals import names as named
from helpers.refusals import refused
from neuroshard.augment.run import augment, run
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import Cases
from neuroshard.core.errors import Infeasible, InvalidInput, UsageError
from neuroshard.core.part import Part
from neuroshard.core.table import Table
from neuroshard.files.cases import read_cases
from neuroshard.files.importers.presets import preset
from neuroshard.files.tables import write_tables

TABLES = tuple(Table(name=f"t{i}", rows=1000 * 3**i, dim=16, pooling_factor=1.0 + i) for i in range(10))
ASKED: dict[str, Any] = {
    "compute_cases": 400,
    "collective_cases": 90,
    "devices": (2, 4, 8),
    "memory_bytes": 2**29,
    "seed": 1,
}
FEW: dict[str, Any] = {"compute_cases": 60, "collective_cases": 9}


def made(tables=TABLES, **changes) -> Cases:
    return augment(tables, AugmentSettings(**{**ASKED, **changes}))


@pytest.fixture(scope="module")
def cases() -> Cases:
    return made()


def names(cases: Cases, *splits: str) -> set[str]:
    return {table.name for case in cases.compute if case.split in splits for table in case.tables}


def test_as_many_cases_as_asked_for_in_their_shares(cases):
    assert Counter(case.split for case in cases.compute) == {
        "train": 280, "valid": 35, "test_sets": 35, "test_tables": 50
    }  # fmt: skip
    assert Counter(case.split for case in cases.collective) == {"train": 72, "valid": 9, "test_sets": 9}
    assert Counter(len(case.device_dims) for case in cases.collective) == {2: 30, 4: 30, 8: 30}
    assert (cases.tables, cases.max_dim, cases.seed) == (TABLES, 128, 1)


def test_tables_held_out_are_in_no_other_case(cases):
    held_out = names(cases, "test_tables")
    assert len(held_out) == 2
    assert held_out | names(cases, "train") == {table.name for table in TABLES}
    assert not held_out & names(cases, "train", "valid", "test_sets")


def a_rectangle(shard: Table) -> bool:
    """Of one of TABLES as it is: some of its rows have their share of the lookups."""
    whole = next(table for table in TABLES if table.name == shard.name)
    return shard == Part(whole, shard.rows, shard.dim).as_table()


def test_test_cases_are_of_tables_as_they_are(cases):
    for case in cases.compute:
        if case.split in ("test_sets", "test_tables"):
            assert all(map(a_rectangle, case.tables))
    varied = [s for c in cases.compute if c.split == "train" for s in c.tables if not a_rectangle(s)]
    assert 0.4 < len(varied) / sum(len(c.tables) for c in cases.compute if c.split == "train") < 0.6


def test_nothing_is_varied_unless_wanted():
    assert all(a_rectangle(shard) for case in made(vary_share=0.0, **FEW).compute for shard in case.tables)


def test_every_set_fits_the_device_and_case_ids_are_distinct(cases):
    assert all(sum(s.memory_bytes for s in case.tables) <= 2**29 for case in cases.compute)
    assert len({case.case_id for case in cases.compute}) == len(cases.compute)
    assert len({case.case_id for case in cases.collective}) == len(cases.collective)


def test_every_beginning_of_the_cases_is_a_fair_sample(cases):
    first = Counter(case.split for case in cases.compute[:100])
    assert 60 <= first["train"] <= 80
    assert min(first["valid"], first["test_sets"], first["test_tables"]) >= 3
    assert len({len(case.device_dims) for case in cases.collective[:10]}) == 3


def test_the_same_seed_gives_the_same_cases():
    assert made(**FEW) == made(**FEW)
    assert made(**FEW, seed=2).compute != made(**FEW).compute


def test_a_wider_table_also_has_its_own_width_and_the_cases_say_the_widest():
    wide = (*TABLES, Table(name="wide", rows=100, dim=512, pooling_factor=1.0))
    cases = made(wide, max_dim=32)
    assert cases.max_dim == 512
    assert {s.dim for c in cases.compute for s in c.tables if s.name != "wide"} == set(range(4, 36, 4))
    assert {s.dim for c in cases.compute for s in c.tables if s.name == "wide"} > {64, 128, 256, 512}


def test_tables_too_large_for_a_device_are_left_out_and_counted(capsys):
    huge = Table(name="huge", rows=10**9, dim=4, pooling_factor=1.0)
    cases = made((*TABLES, huge), **FEW)
    assert "huge" not in names(cases, "train", "valid", "test_sets", "test_tables")
    assert cases.tables[-1] == huge
    assert named(capsys.readouterr().err, "1 table")


def test_an_error_names_the_smallest_table_if_none_fits_and_says_if_all_that_fit_are_held_out():
    with refused(Infeasible, "4 columns", "'t0'", "19.5 KiB", "19.0 KiB", "--memory"):
        made(memory_bytes=19456)
    tall = Table(name="tall", rows=10**9, dim=4, pooling_factor=1.0)
    with refused(Infeasible, "1 table fits", "512.0 MiB", "held out", "give more memory"):
        augment((tall, TABLES[0]), AugmentSettings(**ASKED), held_out={"t0"})


def test_if_there_are_fewer_distinct_cases_all_come_and_the_bar_says_so(capsys):
    one = Table(name="one", rows=1, dim=16, pooling_factor=0.0)
    cases = made((one,), max_dim=16, max_tables=1, vary_share=0.0, **FEW)
    assert sorted(case.tables[0].dim for case in cases.compute) == [4, 8, 12, 16]
    assert named(capsys.readouterr().err, 56)


def test_few_tables_are_all_trained_on():
    assert not names(made(TABLES[:2], **FEW), "test_tables")
    assert len(names(made(TABLES[:3], **FEW), "test_tables")) == 1
    assert not names(made(test_share=0.0, **FEW), "test_tables")


def test_one_device_has_no_all_to_all():
    assert made(**FEW, devices=(1,)).collective == ()
    assert {len(case.device_dims) for case in made(**FEW, devices=(1, 2)).collective} == {2}
    assert made(compute_cases=1, collective_cases=0).collective == ()


def test_a_handful_of_cases_has_every_split():
    cases = made(compute_cases=4, collective_cases=3)
    assert {case.split for case in cases.compute} >= {"train", "valid", "test_sets"}
    assert {case.split for case in cases.collective} == {"train", "valid", "test_sets"}


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"max_dim": 6}, ["multiple of 4", 65536, "not 6"]),
        ({"max_dim": 0}, ["columns", "not 0"]),
        ({"max_dim": 2**17}, ["columns", "not 131072"]),
        ({"test_share": 1.0}, ["test share", "not 1"]),
        ({"vary_share": 2.0}, ["vary share", "not 2"]),
        ({"max_tables": 0}, ["table", "not 0"]),
        ({"plan_share": 1.5}, ["plan share", 0, 1, 1.5]),
    ],
)
def test_what_cannot_be_is_a_usage_error(change, facts):
    with refused(UsageError, *facts):
        made(**change)


def test_the_preset_s_cases_are_written_and_read_back(tmp_path):
    write_tables(tmp_path / "tables.json", preset("mlperf-dlrm-dcnv2"))
    asked: dict[str, Any] = {
        "compute_cases": 100,
        "collective_cases": 40,
        "devices": (4,),
        "memory_bytes": 32 * 2**30,
        "seed": 0,
    }
    cases = run(tmp_path / "tables.json", tmp_path / "cases", AugmentSettings(**asked))
    assert read_cases(tmp_path / "cases") == cases
    assert (len(cases.compute), len(cases.collective)) == (100, 40)


def test_unknown_keys_of_a_tables_file_produce_a_note(tmp_path, capsys):
    path = tmp_path / "tables.json"
    path.write_text('{"tables": [{"name": "a", "rows": 10, "dim": 4, "pooling_factor": 1, "colour": "red"}]}')
    run(path, tmp_path / "cases", AugmentSettings(**{**ASKED, **FEW}))
    assert f"note: {path}: ignored unknown keys of tables: colour\n" in capsys.readouterr().err


def test_broken_tables_write_nothing(tmp_path):
    (tmp_path / "tables.json").write_text('{"tables": []}')
    with refused(InvalidInput, tmp_path / "tables.json"):
        run(tmp_path / "tables.json", tmp_path / "cases", AugmentSettings(**ASKED))
    assert not (tmp_path / "cases").exists()


def test_cases_have_one_of_the_batch_sizes_asked_for_or_none_of_their_own(cases):
    drawn = Counter(case.batch_size for case in made(batch_sizes=(256, 512, 1024)).compute)
    assert drawn.keys() == {256, 512, 1024}
    assert min(drawn.values()) > 100
    assert {case.batch_size for case in cases.compute} == {None}


def test_sets_grow_with_the_tables_of_a_device_unless_said_otherwise():
    many = tuple(Table(name=f"t{i}", rows=100, dim=4, pooling_factor=1.0 + i) for i in range(120))
    asked: dict[str, Any] = {
        "compute_cases": 200,
        "collective_cases": 0,
        "devices": (8, 2),
        "memory_bytes": 2**40,
        "test_share": 0.0,
    }
    assert 15 < max(len(case.tables) for case in made(many, **asked).compute) <= 78
    assert max(len(case.tables) for case in made(many, **asked, max_tables=20).compute) == 20
