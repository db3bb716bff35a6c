"""Rows by access: a table held in two parts is as much as the whole table, and a plan of parts is checked as one of tables."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from neuroshard.core import plan as plans
from neuroshard.core.access import AccessCurve
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import NewerFormat
from neuroshard.core.moves import changed_state, changed_tiers, moved_bytes, moves
from neuroshard.core.parts import RowsByAccess, hot_and_cold
from neuroshard.core.plan import Plan, Provenance, Shard, parts_of, shardings_of
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Feature, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.features import distinct_rows

ROWS, HOT, DIM = 100_000, 1_000, 16
ORDER = RowOrder(
    ids_digest="a" * 64, rows=ROWS, hot_rows=5_000, lookup_share=0.8, points=((HOT, 0.5),), time="2025-11-20T12:00:00Z"
)
ADS = Table(name="ads", rows=ROWS, dim=DIM, pooling_factor=20.0, row_order=ORDER)
USER = Table(name="user", rows=400, dim=32, pooling_factor=1.0)


def task(*rules: TableRule, tables: tuple[Table, ...] = (ADS, USER), **more: Any) -> ShardingTask:
    fields = {"tables": tables, "device_memory_bytes": (2**24,) * 2, "batch_size": 512, **more}
    return ShardingTask(constraints=Constraints(tables=rules), **fields)


def rule(table: str = "ads", **fields: Any) -> TableRule:
    return TableRule(table=table, **fields)


IN_TWO = rule(rows_by_access=RowsByAccess(hot_rows=HOT))
DEALT = rule(rows_by_access=RowsByAccess(dealt=True))


def plan(of: ShardingTask, *shards: tuple[str, int, int, int]) -> Plan:
    """Shards as (table, first row, rows, device), at full width; and the other table whole on device 1."""
    widths = {"ads": DIM, "ads/hot": DIM, "ads/cold": DIM}
    held = [Shard(table=t, row_offset=at, rows=rows, dim=widths[t], device=on) for t, at, rows, on in shards]
    user = Shard(table="user", rows=400, dim=32, device=1)
    return Plan(task=of, shards=(*held, user), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


COPIED = task(IN_TWO, rule("ads/hot", data_parallel=True))
IN_PARTS = plan(COPIED, ("ads/hot", 0, HOT, 0), ("ads/hot", 0, HOT, 1), ("ads/cold", 0, ROWS - HOT, 0))
WHOLE = plan(task(), ("ads", 0, ROWS, 0))
BLOCKS = ("ads", 0, ROWS // 2, 0), ("ads", ROWS // 2, ROWS // 2, 1)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """A table that is read by a drawn curve, or without one as its order says."""
    sizes = draw(st.lists(st.floats(0.5, 3_000), min_size=1, max_size=12))
    rates = sorted(draw(st.lists(st.floats(0, 50), min_size=len(sizes), max_size=len(sizes))), reverse=True)
    access = AccessCurve(batch_size=1024, group_rows=tuple(sizes), lookups_per_row=tuple(rates))
    exponent = draw(st.sampled_from(["uniform", "zipf:0.8", "zipf:1.2"]))
    known = draw(st.booleans())
    pooling_factor = access.lookups / 1024 if known else draw(st.floats(0, 40))
    fields = {"name": "t", "rows": 50_000, "dim": 8, "row_order": ORDER.model_copy(update={"rows": 50_000})}
    shares = {"f": pooling_factor / 4, "g": pooling_factor * 3 / 4}
    features = tuple(Feature(name=name, pooling_factor=lookups) for name, lookups in shares.items())
    if known and draw(st.booleans()):
        return Table(**fields, features=features, access=access)
    counted = Table(name="b", rows=50_000, dim=4, pooling_factor=max(pooling_factor, 1), access=exponent).reuse_bins
    return Table(**fields, features=features, access=access if known else None, reuse_bins=counted)


def distinct(table: Table) -> float:
    """Rows that a batch of as many samples as the bins were counted on reads, as they say of any number of rows."""
    facts = (np.array([each]) for each in (2.0**60, table.pooling_factor, table.reuse_bins, table.reuse_batch_size))
    rows, pooling, bins, batch = facts
    return float(distinct_rows(rows, pooling, bins, batch, table.reuse_batch_size)[0])


@settings(max_examples=80)
@given(table=tables(), hot_rows=st.integers(1, 5_000))
def test_two_parts_are_together_as_much_as_the_table(table: Table, hot_rows: int) -> None:
    hot, cold = hot_and_cold(table, hot_rows)
    assert (hot.rows, hot.rows + cold.rows) == (hot_rows, table.rows)
    assert hot.memory_bytes + cold.memory_bytes == table.memory_bytes
    assert hot.pooling_factor + cold.pooling_factor == pytest.approx(table.pooling_factor)
    for number, feature in enumerate(table.features):
        of_parts = sum(part.features[number].pooling_factor for part in (hot, cold))
        assert of_parts == pytest.approx(feature.pooling_factor)
    assert distinct(hot) + distinct(cold) == pytest.approx(distinct(table), rel=1e-6, abs=1e-6)
    if table.access is None:
        assert hot.pooling_factor == pytest.approx(table.pooling_factor * ORDER.share_of(hot_rows))
    elif hot.access is not None and cold.access is not None:
        assert hot.access.rows == pytest.approx(min(hot_rows, table.access.rows))
        assert hot.access.lookups + cold.access.lookups == pytest.approx(table.access.lookups)
        if table.ordered_share(hot_rows) == table.hottest_share(hot_rows):
            assert hot.access.lookups_per_row[-1] >= cold.access.lookups_per_row[0]
        assert hot.access.lookups / 1024 == pytest.approx(hot.pooling_factor)
    for part in (hot, cold):
        assert sum(part.reuse_bins) == pytest.approx(1) or not any(part.reuse_bins)


def test_parts_of_means_are_sums_and_have_rules_of_their_own_above_those_of_the_table() -> None:
    mean = ADS.model_copy(update={"pooling": "mean"})
    given_ = task(
        IN_TWO.model_copy(update={"devices": (0,), "tier": "host"}),
        rule("ads/hot", tier="hbm"),
        tables=(mean, USER),
        host_memory_bytes=2**30,
    )
    parted = given_.parted
    assert [(table.name, table.pooling) for table in parted.tables] == [
        ("ads/hot", "sum"),
        ("ads/cold", "sum"),
        ("user", "sum"),
    ]
    assert parted.constraints.rules() == {
        "ads/hot": rule("ads/hot", devices=(0,), tier="hbm"),
        "ads/cold": rule("ads/cold", devices=(0,), tier="host"),
    }
    assert parted.parted is parted
    assert parted.unparted(given_).parted == parted


def test_a_task_is_told_by_the_table_why_it_cannot_be_held_so() -> None:
    for tables_, rules, words in (
        ((USER,), [rule("user", rows_by_access=RowsByAccess(dealt=True))], "'user' has no row order"),
        ((ADS,), [rule(rows_by_access=RowsByAccess(hot_rows=ROWS))], "100,000 rows, of which 100,000 cannot be apart"),
        (
            (ADS,),
            [rule(rows_by_access=RowsByAccess(hot_rows=5_001))],
            "lists 5,000 rows, fewer than the 5,001 hot_rows",
        ),
        ((ADS, USER.model_copy(update={"name": "ads/hot"})), [IN_TWO], "both named 'ads/hot'"),
        ((ADS,), [rule("ads/hot", tier="hbm")], "a rule is about table 'ads/hot', which is not in the task"),
        ((ADS,), [IN_TWO, IN_TWO], "'ads' has two rules"),
        ((USER,), [IN_TWO], "'ads', which is not in the task"),
        ((ADS,), [IN_TWO, rule("ads/cold", tier="cached", cached_rows=ROWS)], "no host memory"),
        (
            (ADS.model_copy(update={"pooling": "none"}),),
            [IN_TWO, rule("ads/cold", data_parallel=True)],
            "'ads/cold' is a sequence",
        ),
        ((ADS.model_copy(update={"pooling": "mean", "weighted": True}),), [DEALT], "pooled by mean with weights"),
        *(
            ((ADS, USER), [IN_TWO.model_copy(update=said), rule("ads/hot", data_parallel=True)], f"'ads/hot' .* {word}")
            for said, word in (
                ({"devices": (0, 1)}, "pinned"),
                ({"row_wise": True}, "row-wise"),
                ({"tier": "host"}, "'host'"),
            )
        ),
        (
            (ADS, USER),
            [IN_TWO.model_copy(update={"row_wise": True}), rule("ads/hot", max_shards=1)],
            "'ads/hot' .* 1 shard",
        ),
    ):
        with pytest.raises(ValidationError, match=words):
            task(*rules, tables=tables_)
    for fields, words in (
        ({"data_parallel": True, "rows_by_access": {"dealt": True}}, "cannot be dealt over row blocks"),
        (
            {"tier": "cached", "cached_rows": 9, "rows_by_access": {"hot_rows": 3}},
            "say of which part, 'ads/hot' or 'ads/cold'",
        ),
        ({"rows_by_access": {}}, "either dealt .* or hot_rows"),
        ({"rows_by_access": {"dealt": True, "hot_rows": 3}}, "not both"),
    ):
        with pytest.raises(ValidationError, match=words):
            rule(**fields)


def test_a_sequences_hot_part_may_be_copied_with_the_state_of_its_table_and_one_gradient() -> None:
    sequence = ADS.model_copy(update={"pooling": "none"})
    held = task(*COPIED.constraints.tables, tables=(sequence, USER), dense_optimizer="adam")
    copied = parts_of(held, IN_PARTS.shards)[0]
    assert copied.copies == 2
    memory = held.parted.memory(copied)
    assert (memory.weights, memory.optimizer, memory.step) == (HOT * DIM * 4, HOT * 4, HOT * DIM * 4)


def test_the_map_of_listed_ids_takes_memory_of_every_device_unless_they_are_in_order() -> None:
    def room(of: ShardingTask) -> tuple[int, ...]:
        return tuple(have + of.copies_bytes for have in of.placeable_bytes)

    assert room(task()) == (2**24,) * 2
    # of a table in two parts the hot ids alone are needed
    assert room(COPIED) == room(COPIED.parted) == (2**24 - 8 * HOT,) * 2
    assert room(task(DEALT)) == (2**24 - 8 * 5_000,) * 2
    in_order = ADS.model_copy(update={"row_order": ORDER.model_copy(update={"ids_digest": ""})})
    assert room(task(DEALT, tables=(in_order, USER))) == (2**24,) * 2
    huge = ADS.model_copy(update={"rows": 2**31})
    assert task(DEALT, tables=(huge, USER)).by_access.map_bytes == 16 * 5_000
    long = huge.model_copy(update={"row_order": ORDER.model_copy(update={"rows": 2**31, "hot_rows": 2**19})})
    of_long = task(DEALT, tables=(long, USER)).by_access
    assert (of_long.compared, of_long.far) == pytest.approx((15 * ADS.pooling_factor, 4 * ADS.pooling_factor), rel=1e-5)
    full, held = IN_PARTS.memory_bytes()[0], IN_PARTS.device_memory()[0]
    assert full == held.weights + held.optimizer + held.step + 8 * HOT
    assert IN_PARTS.to_frame("devices")["memory_bytes"][0] == full
    assert f"device 0 is fullest, {format_bytes(full)} of" in str(IN_PARTS)
    fits, lacks = (COPIED.model_copy(update={"device_memory_bytes": (full - less, 2**24)}) for less in (0, 1))
    Plan(task=fits, shards=IN_PARTS.shards, provenance=IN_PARTS.provenance)
    with pytest.raises(ValidationError, match=r"device 0 needs .* \(1 bytes too many\)"):
        Plan(task=lacks, shards=IN_PARTS.shards, provenance=IN_PARTS.provenance)


def test_shards_tile_each_part() -> None:
    assert {name: kind.name for name, kind in shardings_of(IN_PARTS).items()} == {
        "ads/hot": "data-parallel",
        "ads/cold": "table-wise",
        "user": "table-wise",
    }
    for of, shards, words in (
        (task(IN_TWO), [("ads/hot", 0, HOT, 0)], "'ads/cold' has a gap"),
        (task(IN_TWO), [("ads", 0, ROWS, 0)], "'ads', which is held in two parts"),
        (task(IN_TWO), [("ads/hot", 0, HOT + 1, 0), ("ads/cold", 0, ROWS - HOT - 1, 0)], "'ads/hot' is 1000 x 16"),
        (task(), [("ads/hot", 0, HOT, 0)], "'ads/hot', which is not in the task"),
        (task(DEALT), [("ads", 0, ROWS, 0)], "'ads' is dealt by access, but none of its shards"),
    ):
        with pytest.raises(ValidationError, match=words):
            plan(of, *shards)


def test_plans_by_access_are_of_a_format_that_older_programs_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (IN_PARTS, plan(task(DEALT), *BLOCKS), WHOLE):
        assert one.format_version == 3
        assert Plan.from_json(one.canonical_json(), "plan.json") == one
    by_id = plan(task(tables=(ADS.model_copy(update={"row_order": None, "lookups_by_id": (0.9, 0.1)}), USER)), *BLOCKS)
    assert by_id.format_version == 3
    unknown = task(tables=(ADS.model_copy(update={"row_order": None}), USER))
    assert plan(unknown, *BLOCKS).format_version == 2
    assert b"rows_by_access" not in plan(unknown, *BLOCKS).canonical_json()
    pretends = json.loads(IN_PARTS.canonical_json()) | {"format_version": 2}
    with pytest.raises(Exception, match="rows by access, which format_version 2 lacks; it is 3"):
        Plan.from_json(json.dumps(pretends).encode(), "plan.json")
    monkeypatch.setattr(plans, "PLAN_FORMAT", 2)
    with pytest.raises(NewerFormat, match="format_version 3 is from a newer neuroshard"):
        Plan.from_json(IN_PARTS.canonical_json(), "plan.json")


def test_blocks_of_ids_have_the_lookups_that_were_counted_and_dealt_ones_equal_shares() -> None:
    counted = ADS.model_copy(update={"lookups_by_id": (0.6, 0.2, 0.1, 0.1)})
    first, last = parts_of(task(tables=(counted, USER)), plan(task(), *BLOCKS).shards)[:2]
    assert (first.pooling_factor, last.pooling_factor) == pytest.approx((16.0, 4.0))
    dealt = parts_of(task(DEALT, tables=(counted, USER)), plan(task(), *BLOCKS).shards)[:2]
    assert [part.pooling_factor for part in dealt] == [10.0, 10.0]
    assert first.memory(512, "sparse-dist").step == 2 * 512 * 16 * 8
    assert [part.pooling_factor for part in parts_of(task(), plan(task(), *BLOCKS).shards)[:2]] == [10.0, 10.0]


@settings(max_examples=40)
@given(
    shares=st.lists(st.floats(0.001, 1), min_size=1, max_size=9),
    cuts=st.lists(st.integers(1, ROWS - 1), max_size=6, unique=True),
)
def test_the_lookups_of_blocks_add_up_to_those_of_the_table(shares: list[float], cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), ROWS]
    in_order = ADS.model_copy(update={"row_order": ORDER.model_copy(update={"ids_digest": ""})})
    by_curve = in_order.model_copy(update={"access": Table(**{**ADS.model_dump(), "access": "zipf:1.05"}).access})
    by_count = ADS.model_copy(update={"lookups_by_id": tuple(share / sum(shares) for share in shares)})
    for table in (by_count, in_order, by_curve):
        if not cuts:
            assert table.lookup_share(0, ROWS) is None
            continue
        found = [table.lookup_share(first, end - first) for first, end in pairwise(edges)]
        assert sum(share or 0.0 for share in found) == pytest.approx(1)
        if table is not by_count and len(found) == 2 and cuts[0] == HOT:
            assert found[0] == pytest.approx(table.hottest_share(HOT))


def test_hot_ids_that_come_first_make_the_first_block_the_fullest() -> None:
    in_order = ADS.model_copy(update={"row_order": ORDER.model_copy(update={"ids_digest": ""})})
    first, last = (in_order.lookup_share(at, ROWS // 2) for at in (0, ROWS // 2))
    assert first == pytest.approx(0.8 + 0.2 * 45 / 95)
    assert last == pytest.approx(0.2 * 50 / 95)


def test_rows_of_parts_move_as_those_of_tables_and_copies_take_state_with_them() -> None:
    back = plan(COPIED, ("ads/hot", 0, HOT, 0), ("ads/hot", 0, HOT, 1), ("ads/cold", 0, ROWS - HOT, 1))
    assert [(move.table, move.rows, move.from_device, move.to_device) for move in moves(IN_PARTS, back)] == [
        ("ads/cold", ROWS - HOT, 0, 1)
    ]
    assert moves(IN_PARTS, IN_PARTS) == ()
    # of a whole table on device 0, the cold part stays and one copy goes to device 1, with row-wise state
    copy = HOT * (DIM * 4 + 4)
    assert moved_bytes(WHOLE, IN_PARTS) == copy
    assert moved_bytes(IN_PARTS, WHOLE) == 0
    other_order = ADS.model_copy(update={"row_order": ORDER.model_copy(update={"ids_digest": "b" * 64})})
    refreshed = task(*COPIED.constraints.tables, tables=(other_order, USER))
    anew = Plan(task=refreshed, shards=IN_PARTS.shards, provenance=IN_PARTS.provenance)
    # the same number of hot rows, of which hardly any were in the copy of device 1
    assert moved_bytes(IN_PARTS, anew) == pytest.approx(copy * (1 - HOT / ROWS), rel=1e-3)
    renamed = ADS.model_copy(update={"row_order": ORDER.model_copy(update={"time": "2025-11-21T12:00:00Z"})})
    same = Plan(
        task=task(*COPIED.constraints.tables, tables=(renamed, USER)),
        shards=IN_PARTS.shards,
        provenance=IN_PARTS.provenance,
    )
    assert moved_bytes(IN_PARTS, same) == 0


def test_of_fewer_hot_rows_none_moves_that_a_copy_has_here() -> None:
    fewer = task(rule(rows_by_access=RowsByAccess(hot_rows=HOT // 2)), rule("ads/hot", data_parallel=True))
    held = *(("ads/hot", 0, HOT // 2, device) for device in (0, 1)), ("ads/cold", 0, ROWS - HOT // 2, 1)
    found = [(move.table, move.rows, move.from_device, move.to_device) for move in moves(IN_PARTS, plan(fewer, *held))]
    assert found == [("ads/cold", ROWS - HOT, 0, 1)]


def test_rows_that_are_dealt_come_from_all_blocks_alike() -> None:
    by_id, dealt = plan(task(), *BLOCKS), plan(task(DEALT), *BLOCKS)
    found = moves(by_id, dealt)
    assert [(move.rows, move.from_device, move.to_device) for move in found] == [(ROWS // 4, 1, 0), (ROWS // 4, 0, 1)]
    assert sum(move.nbytes for move in found) == ROWS // 2 * (DIM * 4 + 4)
    assert moves(dealt, dealt) == ()
    grown = ADS.model_copy(update={"rows": ROWS + 1_000})
    more = plan(task(DEALT, tables=(grown, USER)), ("ads", 0, 50_500, 0), ("ads", 50_500, 50_500, 1))
    made = sum(move.nbytes for move in moves(dealt, more) if move.from_device is None)
    assert made == pytest.approx(1_000 * (DIM * 4 + 4), rel=0.01)


def test_rows_whose_ids_are_in_order_stay_however_many_are_hot() -> None:
    fewer = ORDER.model_copy(update={"hot_rows": HOT, "points": (), "lookup_share": 0.5, "ids_digest": ""})
    in_order, shorter = (
        ADS.model_copy(update={"row_order": order}) for order in (ORDER.model_copy(update={"ids_digest": ""}), fewer)
    )
    before, after = (plan(task(DEALT, tables=(ads, USER)), *BLOCKS) for ads in (in_order, shorter))
    assert moves(before, after) == ()


def test_tables_whose_parts_are_cut_or_lie_in_other_tiers_are_named() -> None:
    host: dict[str, Any] = {"host_memory_bytes": 2**30}
    cold = task(*COPIED.constraints.tables, rule("ads/cold", tier="host"), **host)
    in_host = Plan(task=cold, shards=IN_PARTS.shards, provenance=IN_PARTS.provenance)
    assert changed_tiers(IN_PARTS, in_host) == {"ads": (ROWS - HOT) * DIM * 4}
    assert changed_tiers(plan(task(rule(tier="host"), **host), ("ads", 0, ROWS, 0)), in_host) == {"ads": HOT * DIM * 4}
    assert changed_state(WHOLE, IN_PARTS) == ()
    halves = [Shard(table="ads/cold", rows=ROWS - HOT, column_offset=at, dim=8, device=0) for at in (0, 8)]
    cut = Plan(
        task=task(IN_TWO),
        shards=(Shard(table="ads/hot", rows=HOT, dim=DIM, device=0), *halves, WHOLE.shards[-1]),
        provenance=WHOLE.provenance,
    )
    assert changed_state(WHOLE, cut) == changed_state(cut, WHOLE) == ("ads",)
    assert changed_state(cut, cut) == ()
    other = ADS.model_copy(update={"row_order": ORDER.model_copy(update={"ids_digest": "2" * 64})})
    by_other = Plan(task=task(IN_TWO, tables=(other, USER)), shards=cut.shards, provenance=cut.provenance)
    assert changed_state(cut, by_other) == ("ads",)  # rows go from one part to the other


def test_a_task_of_today_takes_over_the_parts_of_a_plan() -> None:
    today = task(tables=(ADS.model_copy(update={"row_order": None}), USER))
    assert today.held_as(COPIED).parted.constraints == COPIED.parted.constraints
    assert today.held_as(COPIED).held_as(today).constraints == today.constraints
    assert COPIED.with_rows_by_access({}).constraints.tables == ()
    again = task().with_rows_by_access({"ads": RowsByAccess(hot_rows=HOT)})
    assert again == task(IN_TWO)
    assert again.parted.with_copies(["ads/hot"]).unparted(again) == COPIED


def test_a_table_with_the_name_of_anothers_part_has_its_rule_once() -> None:
    of = task(tables=(ADS.model_copy(update={"row_order": None}), USER.model_copy(update={"name": "ads/hot"})))
    tiers = of.with_tiers({"ads/hot": ("hbm", None)}).constraints.tables
    assert [rule.table for rule in tiers] == ["ads/hot"]
