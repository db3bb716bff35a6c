"""The tables of all models of a nightly run, whose cases are drawn together."""

import numpy as np
import pytest

from neuroshard.augment.tiers import TIER_CASES
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import Hardware
from neuroshard.core.table import MAX_NAME, Table
from neuroshard.files.tables import write_tables
from neuroshard.nightly.augment import (
    Lacking,
    _drawn,
    _put,
    extend,
    lacking,
    left_over,
    read_draws,
    renamed,
    roles,
    tables_of,
)
from neuroshard.orders.nightly import Campaign, ModelSpec, Request
from neuroshard.store.folder import FolderStore
from neuroshard.store.measuring import Share, measuring, write_record
from neuroshard.store.patience import PatientStore


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
    assert len({table.name for table in grown if len(table.name) <= MAX_NAME}) == len(tables)
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


def campaign(tiers: bool) -> Campaign:
    gpu = Hardware(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30)
    return Campaign(
        hardware=gpu,
        folder="f",
        pods=1,
        devices=8,
        resource="",
        node_selector={},
        tolerations=(),
        measurable=(2,),
        tiers=tiers,
    )


REQUEST = Request(compute_cases=20, collective_cases=4, batch_size=65536, seed=0, backend="cuda")


def test_cases_beyond_hbm_are_drawn_once_and_only_where_plans_need_them():
    tables = tuple(Table(name=f"ads/t{i}", rows=10**6 + i, dim=64, pooling_factor=2.0 + i) for i in range(8))
    everything = lacking(campaign(True), REQUEST, tables, [])
    assert (everything.tiers, lacking(campaign(False), REQUEST, tables, []).tiers) == (TIER_CASES, 0)

    first = _drawn(campaign(True), REQUEST, tables, [], everything, 1)
    assert len(first.tiers) == TIER_CASES
    plain = _drawn(campaign(False), REQUEST, tables, [], lacking(campaign(False), REQUEST, tables, []), 1)
    assert first.model_copy(update={"tiers": ()}) == plain

    assert not lacking(campaign(True), REQUEST, tables, [first])
    only = lacking(campaign(True), REQUEST, tables, [plain])
    assert (bool(only), only) == (True, Lacking(0, {}, TIER_CASES))
    second = _drawn(campaign(True), REQUEST, tables, [plain], only, 2)
    assert (second.compute, second.collective, len(second.tiers)) == ((), (), TIER_CASES)
    assert not lacking(campaign(True), REQUEST, tables, [plain, second])


def test_a_draw_beyond_hbm_alone_is_whole_in_the_store(tmp_path):
    plain = _drawn(campaign(False), REQUEST, T8, [], lacking(campaign(False), REQUEST, T8, []), 1)
    _put(plain, store := FolderStore(tmp_path), "f", 1)
    extend(PatientStore(store), campaign(True), REQUEST, T8, "night")
    second = _drawn(campaign(True), REQUEST, T8, [plain], Lacking(0, {}, TIER_CASES), 2)
    assert read_draws(store, "f") == {1: plain, 2: second}


T8 = tuple(Table(name=f"ads/t{i}", rows=10**6 + i, dim=64, pooling_factor=2.0 + i) for i in range(8))
GPU_PAIR = CollectiveCase(device_dims=(64, 64), start_delays_ms=(0.0, 0.0), batch_size=65536)


@pytest.mark.parametrize(
    ("known", "drawn", "compute"),
    [
        (0, 0, 20),  # nothing is drawn yet
        (8, 20, 0),
        (8, 12, 8),
        (6, 20, 5),  # 2 of the 8 tables are new: a quarter of the cases, though as many as asked for are drawn
        (6, 12, 8),
        (7, 20, 2),  # round(2.5)
    ],
)
def test_new_tables_get_their_share_of_the_cases(known: int, drawn: int, compute: int) -> None:
    cases = ComputeCase(tables=(T8[0],))
    earlier = [Cases(tables=T8[:known], compute=(cases,) * drawn, collective=(), max_dim=64, seed=0)] if known else []
    request = REQUEST.model_copy(update={"collective_cases": 0})
    assert lacking(campaign(False), request, T8, earlier).compute == compute


@pytest.mark.parametrize(
    ("trained", "validated", "missing"), [(0, 0, 40), (16, 0, 20), (16, 24, 20), (27, 0, 6), (28, 0, 0)]
)
def test_all_to_alls_for_training_alone_count_and_the_other_splits_get_theirs(
    trained: int, validated: int, missing: int
) -> None:
    """40 are asked for, of which 32 are for training: 16 of these are worth 20 of all, and 28 (9 of 10) are enough."""
    collective = (GPU_PAIR,) * trained + (GPU_PAIR.model_copy(update={"split": "valid"}),) * validated
    earlier = [Cases(tables=T8, compute=(), collective=collective, max_dim=64, seed=0)]
    request = REQUEST.model_copy(update={"collective_cases": 40})
    assert lacking(campaign(False), request, T8, earlier).collective == ({2: missing} if missing else {})


def test_a_draw_is_numbered_after_all_of_which_anything_is_there(tmp_path):
    """What a killed run left of draw 7, whose cases and costs cannot be read, must not count for another draw."""
    store = FolderStore(tmp_path)
    store.create(f"f/{Share(7, 1, 2).costs}/costs.json", b"damaged")
    extend(PatientStore(store), campaign(False), REQUEST, T8, "night")
    assert measuring(store, "f").draws == (8,)


def test_of_a_draw_in_several_divisions_as_much_is_left_as_the_one_that_came_farthest_left(tmp_path):
    store = FolderStore(tmp_path)
    store.create("f/draw-0001/cases/cases.json", b"{}")
    for share, left in ((Share(1, 1, 1), 9), (Share(1, 1, 2), 2), (Share(1, 2, 2), 3), (Share(1, 1, 3), 0)):
        write_record(store, f"f/{share.ended}", {"left": left})
    assert left_over(store, "f") == 5
