"""What goes live and what does not: today's tables, memory, the cost model's error, the gain over the live plan."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from helpers.analytic import AnalyticModel
from helpers.plans import NOW, TABLES, make_plan, row_plan
from helpers.refusals import refused
from helpers.trainers import cut_plan
from neuroshard.client import load_plan
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import Refused, UsageError
from neuroshard.core.id_map import IdMap
from neuroshard.core.moves import moved_bytes
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import MOST_PREDICTED_MS, Plan, Shard
from neuroshard.core.release import Decision
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import SPREAD, analytic_model
from neuroshard.costmodel.given import Given, GivenCosts
from neuroshard.costmodel.pricing import launch_ms
from neuroshard.costmodel.report import STAND_IN_ERROR as GUESS
from neuroshard.deploy.gate import Gate, decide
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy, price, promote, publish
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.store.folder import FolderStore
from neuroshard.store.releases import plans_of, read_refusals
from neuroshard.store.track import all_releases

USER, ITEM, COUNTRY = TABLES
MAPPED = {"id_map": IdMap(kind="mch", bytes_per_row=24)}


def plan_of(cost_ms: float, *, cost_model: str | None = "a", error: float | None = None, **fields: Any) -> Plan:
    """A plan with a predicted cost by a cost model."""
    plan = make_plan(**fields)
    by = plan.provenance.model_copy(update={"cost_model": cost_model, "cost_model_error": error})
    return plan.model_copy(update={"predicted_ms": (cost_ms, 0.0), "provenance": by})


def decision_of(store: FolderStore, plan: Plan, gate: Gate = Gate()) -> Decision:  # noqa: B008
    """What the gate recorded, in the release or beside the releases."""
    try:
        release = deploy(plan, store, "m", now=NOW, gate=gate)
    except Refused:
        return read_refusals(store, "m")[0].decision
    if release.plan_digest == plan.digest():
        assert release.decision is not None
        return release.decision
    refusal = read_refusals(store, "m")[0]
    assert refusal.plan_digest == plan.digest()
    return refusal.decision


@pytest.mark.parametrize(
    ("cost_ms", "gate", "error", "verdict", "min_gain"),
    [
        (9.0, Gate(), None, "passed", 0.0),
        (10.0, Gate(), None, "kept", 0.0),
        (11.0, Gate(), None, "kept", 0.0),
        (9.0, Gate(), 0.05, "passed", 0.05),
        (9.6, Gate(), 0.05, "kept", 0.05),
        (9.6, Gate(min_gain=0.02), 0.05, "passed", 0.02),
        (9.0, Gate(min_gain=0.2), None, "kept", 0.2),
    ],
)
def test_a_plan_goes_live_if_it_is_better_by_more_than_asked(store, cost_ms, gate, error, verdict, min_gain):
    old, new = plan_of(10.0), plan_of(cost_ms, error=error, note="new")
    deploy(old, store, "m", now=NOW)
    decision = decision_of(store, new, gate)

    assert decision == Decision(
        verdict=verdict,
        comparison="both carry the predictions of one cost model, on the same tables",
        live_number=1,
        live_digest=old.digest(),
        cost_ms=cost_ms,
        live_cost_ms=10.0,
        gain=1 - cost_ms / 10,
        min_gain=min_gain,
        cost_model_error=error,
        memory_left=1 - 50_800 / 2**20,
        memory_margin=0,
        moved_bytes=0,
    )
    assert load_plan(store.url, "m") == (new if verdict == "passed" else old)


@pytest.mark.parametrize(
    ("cost_ms", "gate", "error", "comparison"),
    [
        (9.0, Gate(), 0.05, ", more than the 5.0% that its cost model is off by"),
        (9.6, Gate(), 0.05, ", not more than the 5.0% that its cost model is off by"),
        (9.6, Gate(min_gain=0.06), 0.05, ", not more than the 6.0% asked for"),
        (
            1.0,
            Gate(),
            1.2,
            ", not more than the 120.0% that its cost model is off by, and no gain ever is: measure more cases, or set "
            "--min-gain",
        ),
        (1.0, Gate(min_gain=0.5), 1.2, ", more than the 50.0% asked for"),
    ],
)
def test_it_is_reported_where_the_least_gain_comes_from_and_what_to_do_where_none_is_enough(
    store, cost_ms, gate, error, comparison
):
    deploy(plan_of(10.0), store, "m", now=NOW)
    assert decision_of(store, plan_of(cost_ms, error=error, note="new"), gate).why.endswith(
        f"{comparison}; 0 B to move"
    )


def test_a_plan_that_is_kept_back_is_published_recorded_and_can_be_promoted(store):
    old, new = plan_of(10.0), plan_of(10.0, note="new")
    first = deploy(old, store, "m", now=NOW)

    assert deploy(new, store, "m", now=NOW) == first
    assert [r.plan_digest for r in read_refusals(store, "m")] == [new.digest()]
    promoted = promote(store, "m", new.digest()[:8], now=NOW)
    assert (promoted.action, promoted.number, promoted.plan_digest) == ("promote", 2, new.digest())
    assert (promoted.decision.verdict, promoted.decision.forced, promoted.decision.gain) == ("kept", True, 0.0)
    assert load_plan(store.url, "m") == new


def test_force_makes_live_and_says_so(store):
    deploy(plan_of(10.0), store, "m", now=NOW)
    decision = decision_of(store, plan_of(20.0), Gate(force=True, max_error=0.1))

    assert (decision.verdict, decision.forced, decision.gain) == ("refused", True, -1.0)
    assert "not known" in decision.faults[0]
    assert load_plan(store.url, "m") == plan_of(20.0)


@pytest.mark.parametrize(
    ("tables", "facts"),
    [
        (TABLES[1:], ["'user'"]),
        ((*TABLES, USER.model_copy(update={"name": "new"})), ["'new'"]),
        ((USER.model_copy(update={"rows": 999}), ITEM, COUNTRY), ["'user'", "1,000 rows", "999 rows"]),
        ((USER, ITEM.with_dim(12), COUNTRY), ["'item'", "dim 8", "dim 12"]),
        ((USER, ITEM.model_copy(update={"element_bytes": 2}), COUNTRY), ["'item'", "4 bytes", "has 2"]),
        ((USER, ITEM, COUNTRY.model_copy(update=MAPPED)), ["'country'", "ids that are its rows", "kind mch"]),
    ],
)
def test_a_plan_for_other_tables_than_todays_is_refused(store, tables, facts):
    with refused(Refused, "nothing is live", "--force", *facts):
        deploy(make_plan(), store, "m", now=NOW, gate=Gate(tables=tables))

    assert [(r.decision.verdict, len(r.decision.faults)) for r in read_refusals(store, "m")] == [("refused", 1)]


def test_todays_tables_may_be_read_otherwise_and_come_in_any_order(store):
    tables = tuple(table.model_copy(update={"pooling_factor": 99.0}) for table in reversed(TABLES))

    assert decision_of(store, make_plan(), Gate(tables=tables)).verdict == "passed"


@pytest.mark.parametrize(("margin", "fits"), [(0.0, True), (0.15, True), (0.154, False), (0.2, False)])
def test_a_plan_must_leave_the_margin_of_memory(store, margin, fits):
    """Rank 1 has 50,800 of 60,000 bytes: 15.3 % are left."""
    decision = decision_of(store, make_plan(memory_bytes=60_000), Gate(memory_margin=margin))

    assert decision.memory_left == pytest.approx(1 - 50_800 / 60_000)
    assert (decision.verdict == "passed") == fits
    why = f"device 1 needs 49.6 KiB of 58.6 KiB, which leaves less than the margin of {margin:.1%}"
    assert fits or f"{why}; search with --reserve {100 * margin:g}%" in decision.why


def test_maps_of_ids_count_for_the_margin_of_memory():
    """8 bytes of every rank for each of 1,000 listed rows of USER, in 60,000."""
    order = {"rows": USER.rows, "hot_rows": USER.rows, "lookup_share": 1.0, "points": ((9, 0.5),)}
    user = USER.model_copy(update={"row_order": RowOrder(ids_digest="a" * 64, time="2025-11-20T12:00:00Z", **order)})
    rule = TableRule(table=USER.name, rows_by_access=RowsByAccess(dealt=True))
    fields = {"tables": (user, ITEM, COUNTRY), "device_memory_bytes": (60_000,) * 2}
    task = row_plan().task.model_copy(update={**fields, "constraints": Constraints(tables=(rule,))})
    plan = Plan(task=task, shards=row_plan().shards, provenance=row_plan().provenance)
    left = 1 - (max(row_plan().memory_bytes()) + 8 * USER.rows) / 60_000

    for margin, verdict in ((left - 0.001, "passed"), (left + 0.001, "refused")):
        decision = decide(plan, Gate(memory_margin=margin), None, None)
        assert (decision.memory_left, decision.verdict) == (pytest.approx(left), verdict)


@pytest.mark.parametrize(("error", "word"), [(0.2, "is 20.0%, more than the 10.0%"), (None, "not known"), (0.05, None)])
def test_the_cost_models_error_must_be_within_its_limit(store, error, word):
    decision = decision_of(store, plan_of(1.0, error=error), Gate(max_error=0.1))

    assert decision.verdict == ("refused" if word else "passed")
    assert (word or "nothing was live before") in decision.why


@pytest.mark.parametrize(
    ("backend", "cost_model", "passes"),
    [
        ("cuda", "a", False),
        ("analytic", "analytic:h100", False),
        ("cpu", "a", True),
        ("analytic", "analytic:cpu", True),
        (None, None, True),
    ],
)
def test_a_plan_for_gpus_with_a_shard_that_their_operator_cannot_hold_is_refused(store, backend, cost_model, passes):
    wide = USER.model_copy(update={"dim": 1028})
    plan = make_plan(tables=(wide,), memory_bytes=2**30)
    whole = Shard(table=wide.name, rows=wide.rows, dim=1028, device=0)
    by = plan.provenance.model_copy(update={"cost_model_backend": backend, "cost_model": cost_model})
    decision = decision_of(store, Plan(task=plan.task, shards=(whole,), provenance=by), Gate())
    assert (decision.verdict == "passed") == passes
    assert [("1,028 columns" in fault, "search again" in fault) for fault in decision.faults] == [(True, True)] * (
        not passes
    )


def test_every_fault_is_recorded(store):
    gate = Gate(tables=TABLES[1:], memory_margin=0.99, max_error=0.1)

    assert len(decision_of(store, make_plan(), gate).faults) == 3


BIGGER = (USER.model_copy(update={"rows": 1100}), ITEM, COUNTRY)


# a byte too little is left for the live plan: what its task reserves does not count
RESERVING = Plan(
    task=row_plan().task.model_copy(update={"constraints": Constraints(reserve_bytes=2**20 - 50_799)}),
    shards=row_plan().shards,
    predicted_ms=(90.0, 0.0),
    provenance=plan_of(90.0).provenance,
)


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (plan_of(90.0, tables=BIGGER), "the live plan has table 'user' with 1,000 rows"),
        (plan_of(90.0, memory_bytes=2**21), "the live plan is for devices of other memory"),
        (RESERVING, "the live plan does not fit today's task: device 1 needs 49.7 KiB of 49.6 KiB"),
    ],
)
def test_a_plan_goes_live_whatever_it_costs_where_the_live_one_is_not_for_today(store, new, why):
    deploy(plan_of(10.0), store, "m", now=NOW)
    decision = decision_of(store, new, Gate(min_gain=0.5))

    assert (decision.verdict, decision.gain) == ("passed", None)
    assert decision.comparison.startswith(why)


OTHER_LOOKUPS = (USER.model_copy(update={"pooling_factor": 9.0}), ITEM, COUNTRY)


@pytest.mark.parametrize(
    ("new", "why"),
    [(plan_of(90.0, cost_model="b"), "other cost models"), (plan_of(90.0, tables=OTHER_LOOKUPS), "other tables")],
)
def test_what_cannot_be_compared_goes_live_unless_a_gain_is_demanded(store, new, why):
    old = plan_of(10.0)
    deploy(old, store, "m", now=NOW)

    demanding = decision_of(store, new, Gate(min_gain=0.0))
    assert (demanding.verdict, demanding.gain) == ("kept", None)
    assert why in demanding.comparison
    assert decision_of(store, new).verdict == "passed"


@pytest.mark.parametrize("cost_ms", [math.nan, math.inf])
def test_a_price_that_is_no_number_compares_nothing(store, cost_ms):
    deploy(plan_of(10.0), store, "m", now=NOW)
    new, gate = plan_of(9.0, note="new"), Gate(price=lambda live, today: cost_ms)

    demanding = decision_of(store, new, replace(gate, min_gain=0.0))
    assert (demanding.verdict, demanding.live_cost_ms, demanding.gain) == ("kept", None, None)
    assert demanding.comparison == "not compared: the cost model cannot price the live plan"
    assert decision_of(store, new, gate).verdict == "passed"


@pytest.mark.parametrize(("live_ms", "new_ms", "gain"), [(0.0, 9.0, 0.0), (5e-324, MOST_PREDICTED_MS, -1e9)])
def test_a_gain_is_a_number_whatever_is_divided(store, live_ms, new_ms, gain):
    deploy(plan_of(live_ms), store, "m", now=NOW)
    decision = decision_of(store, plan_of(new_ms, note="new"))

    assert (decision.verdict, decision.gain) == ("kept", gain)


def test_a_live_plan_that_is_broken_is_replaced(store):
    deploy(plan_of(1.0), store, "m", now=NOW)
    (store.root / "m" / "plans" / f"{plan_of(1.0).digest()}.json").write_bytes(b"{")

    assert decision_of(store, plan_of(9.0), Gate(min_gain=0.5)).comparison == "the live plan cannot be read"


def test_a_plan_that_was_rolled_back_does_not_come_back_by_itself(store):
    a, b, c = plan_of(10.0), plan_of(9.0), plan_of(8.0)
    for plan in (a, b, c):
        deploy(plan, store, "m", now=NOW)
    roll_back(store, plans_of("m"), now=NOW)
    roll_back(store, plans_of("m"), now=NOW)
    for plan in (b, c):
        with refused(Refused, "release 5", "rolled back"):
            deploy(plan, store, "m", now=NOW)

    assert promote(store, "m", c.digest(), now=NOW).number == 6
    assert load_plan(store.url, "m") == c


@pytest.mark.parametrize(
    "gate",
    [
        Gate(min_gain=1.0),
        Gate(min_gain=-0.1),
        Gate(min_gain=math.nan),
        Gate(memory_margin=1.5),
        Gate(memory_margin=math.nan),
        Gate(max_error=0.0),
        Gate(max_error=-1),
        Gate(max_error=math.nan),
        Gate(max_error=math.inf),
    ],
)
def test_a_rule_that_cannot_be_is_refused_before_anything_is_written(store, gate):
    with refused(UsageError, "share"):
        deploy(make_plan(), store, "m", now=NOW, gate=gate)
    assert not store.root.exists()


def shards_of(*pieces: tuple[int, int, int]) -> Plan:
    """USER in (column, width, device)."""
    plan = make_plan(tables=(USER,))
    shards = tuple(Shard(table="user", rows=1000, column_offset=c, dim=d, device=r) for c, d, r in pieces)
    return Plan(task=plan.task, shards=shards, provenance=plan.provenance)


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [
        (shards_of((0, 16, 0)), shards_of((0, 16, 0)), 0),
        (shards_of((0, 16, 0)), shards_of((0, 16, 1)), 1000 * (16 * 4 + 4)),
        (shards_of((0, 16, 0)), shards_of((0, 8, 0), (8, 8, 1)), 1000 * (8 * 4 + 4)),
        (shards_of((0, 8, 0), (8, 8, 1)), shards_of((0, 16, 0)), 1000 * 8 * 4),
        (shards_of((0, 4, 0), (4, 12, 0)), shards_of((0, 12, 0), (12, 4, 0)), 0),
        (shards_of((0, 8, 0), (8, 8, 1)), shards_of((0, 8, 1), (8, 8, 0)), 1000 * 16 * 4),
    ],
)
def test_moved_bytes_are_those_that_a_device_did_not_hold(old, new, moved):
    assert moved_bytes(old, new) == moved


@pytest.mark.parametrize(("shards", "changed"), [(((0, 16, 1),), 0), (((0, 8, 0), (8, 8, 1)), 1)])
def test_a_release_counts_tables_whose_optimizer_state_does_not_carry_over_exactly(store, shards, changed):
    live, new = shards_of((0, 16, 0)), shards_of(*shards)
    deploy(live, store, "m", now=NOW)
    decision = decision_of(store, new, Gate())

    assert decision.changed_state == changed
    assert ("; the optimizer state of 1 table does not carry over exactly" in decision.why) == bool(changed)
    assert ("changed_state" in decision.model_dump()) == bool(changed)
    assert Decision.parse(decision.model_dump(), "x") == decision


def test_a_release_names_modules_whose_outputs_come_in_another_order(store):
    tables = tuple(Table(name=name, module="m", rows=10, dim=8, pooling_factor=1.0) for name in "ab")
    live, new = (
        cut_plan(tables, 2, {"a": [(8, a)], "b": [(8, 1 - a)]}, batch_size=2).model_copy(
            update={"predicted_ms": (cost,) * 2}
        )
        for a, cost in ((0, 2.0), (1, 1.0))
    )
    first, decision = (decision_of(store, plan, Gate()) for plan in (live, new))

    assert "reordered" not in first.model_dump(mode="json")
    assert decision.goes_live
    assert decision.reordered == ("m",)
    assert (
        "; the outputs of module 'm' come in another order: read them by key, or call keep_output_order(model)"
        in decision.why
    )
    assert Decision.parse(decision.model_dump(), "x") == decision


def task_of(tables: list[tuple[int, int, float]], devices: int) -> ShardingTask:
    return ShardingTask(
        tables=tuple(Table(name=f"t{i}", rows=r, dim=d, pooling_factor=p) for i, (r, d, p) in enumerate(tables)),
        device_memory_bytes=(2**30,) * devices,
        batch_size=65536,
    )


def test_the_live_plan_is_priced_again_as_the_search_would_price_it(store):
    model = AnalyticModel()
    task = task_of([(100_000 * i, 4 * i, i) for i in range(1, 15)], devices=3)
    best, other = (search(task, model, SearchSettings(algorithm=name)) for name in ("local-search", "size"))

    for plan in (best, other):
        assert price(plan, best, model) == pytest.approx(plan.cost_ms, rel=1e-12)
    deploy(plan_like(other, cost_model="another"), store, "m", now=NOW)
    decision = decision_of(store, best, Gate(price=lambda live, today: price(live, today, model), min_gain=0.0))
    assert decision.verdict == "passed"
    assert decision.gain == pytest.approx(1 - best.cost_ms / other.cost_ms)
    assert decision.comparison.startswith("the live plan was priced again")
    assert "other" not in decision.comparison
    larger = search(task.model_copy(update={"batch_size": 8192}), model, SearchSettings(algorithm="size"))
    assert "other batch sizes" in decision_of(store, larger, Gate(price=lambda live, today: 1.0)).comparison


def plan_like(plan: Plan, **provenance: Any) -> Plan:
    return plan.model_copy(update={"provenance": plan.provenance.model_copy(update=provenance)})


def test_a_live_plan_with_split_rows_is_priced_as_tables_of_their_own_that_all_to_all_all_columns():
    plan, model = row_plan(devices=3), AnalyticModel()
    user = plan.task.tables[0]
    parts = [user.model_copy(update={"name": f"u{i}", **part}) for i, part in enumerate(SHARES)]
    whole = [Shard(table=part.name, rows=part.rows, dim=16, device=device) for device, part in enumerate(parts)]
    same = Plan(
        task=plan.task.model_copy(update={"tables": (*parts, *plan.task.tables[1:])}),
        shards=(*whole, *(shard for shard in plan.shards if shard.table != "user")),
        provenance=plan.provenance,
    )

    launched = launch_ms(
        model, 3, operators=1, outputs=1
    ).total_ms  # the row-wise table has its own operator and collectives
    assert price(plan, plan, model) == pytest.approx(price(same, same, model) + launched)
    columns = make_plan(devices=3)
    assert price(plan, columns, model) == price(plan, plan, model)


SHARES = [
    {"rows": 334, "pooling_factor": 2.5 * 0.334},
    {"rows": 334, "pooling_factor": 2.5 * 0.334},
    {"rows": 332, "pooling_factor": 2.5 * 0.332},
]


def test_given_costs_do_not_tell_of_rows_so_the_gate_does_not_compare(store):
    costs = [{"name": table.name, "cost_ms": 1.0} for table in TABLES]
    model = Given(GivenCosts.parse({"tables": costs}, "costs"), 64)
    deploy(row_plan(), store, "m", now=NOW)
    decision = decision_of(store, plan_of(1.0), Gate(price=lambda live, today: price(live, today, model)))

    assert price(row_plan(), plan_of(1.0), model) is None
    assert price(make_plan(), plan_of(1.0), model) == pytest.approx(1.5)
    assert decision.comparison == "not compared: the cost model cannot price the live plan"


def test_publishing_makes_nothing_live(store):
    publish(plan_of(1.0), store, "m")

    assert [entry.key for entry in store.list("m/")] == [f"m/plans/{plan_of(1.0).digest()}.json"]


def test_a_kept_plan_costs_no_release(store):
    deploy(plan_of(10.0), store, "m", now=NOW)
    for hour in range(3):
        deploy(plan_of(10.0, note=str(hour)), store, "m", now=NOW + timedelta(hours=hour))

    assert [r.number for r in all_releases(store, plans_of("m"))] == [1]
    assert [r.time[11:13] for r in read_refusals(store, "m")] == ["14", "13", "12"]


def test_a_damaged_refusal_is_named_and_the_others_are_listed(store, capsys):
    for hour in range(3):
        deploy(plan_of(10.0, note=str(hour)), store, "m", now=NOW + timedelta(hours=hour))
    *_, newest = store.list("m/decisions/")
    store.swap(newest.key, b"{", store.read_versioned(newest.key)[1])

    assert [r.time[11:13] for r in read_refusals(store, "m")] == ["13"]
    assert newest.key in capsys.readouterr().err


def guessed(cost_ms: float, **fields: Any) -> Plan:
    """A plan by the analytic model."""
    return plan_of(cost_ms, cost_model="analytic:h100", error=None, **fields)


@pytest.mark.parametrize(("cost_ms", "verdict"), [(9.89, "kept"), (7.1, "kept"), (6.9, "passed")])
def test_a_guess_must_gain_more_than_it_may_be_off(store, cost_ms, verdict):
    deploy(guessed(10.0), store, "m", now=NOW)
    decision = decision_of(store, guessed(cost_ms, note="new"))
    assert (decision.verdict, decision.min_gain) == (verdict, GUESS)
    assert decision_of(store, guessed(6.0, note="newer"), Gate(min_gain=0.01)).verdict == "passed"


def test_a_stand_in_must_gain_as_much_as_a_guess(store):
    by = plan_of(9.0, error=0.05).provenance.model_copy(update={"instead": "its all-to-all is a guess"})
    plan = plan_of(9.0).model_copy(update={"provenance": by})
    decision = decide(plan, Gate(), None, None)
    assert (decision.verdict, decision.instead) == ("passed", "its all-to-all is a guess")
    assert decision.why == "less certain: its all-to-all is a guess; nothing was live before"
    deploy(plan_of(10.0), store, "m", now=NOW)
    decision = decision_of(store, plan)
    assert (decision.verdict, decision.min_gain) == ("kept", GUESS)
    assert ", not more than the 30.0% that its predicted cost may be off by" in decision.why


def test_a_guess_is_as_far_off_as_the_analytic_model_says():
    assert GUESS == SPREAD
    assert analytic_model("h100", 512).error_on_unseen_tables == SPREAD


def test_a_night_keeps_what_is_live_for_a_plan_too_uncertain_and_takes_it_where_nothing_serves(store):
    nightly = Gate(max_error=0.2, nightly=True)
    assert decision_of(store, plan_of(9.0, error=0.3), nightly).verdict == "passed"  # nothing is live
    decision = decision_of(store, plan_of(1.0, error=0.3, note="new"), nightly)
    assert (decision.verdict, decision.faults) == ("kept", ())
    assert "30.0%, more than the 20.0% of --max-error" in decision.why
    assert decision.why.endswith("; the live plan stays")
    with pytest.raises(Refused):
        deploy(plan_of(1.0, error=0.3, note="new"), store, "m", now=NOW, gate=Gate(max_error=0.2))


def test_a_night_keeps_the_plan_that_a_person_went_back_to(store):
    old, bad = plan_of(10.0), plan_of(5.0, note="bad")
    deploy(old, store, "m", now=NOW)
    deploy(bad, store, "m", now=NOW)
    roll_back(store, plans_of("m"), now=NOW)
    release = deploy(bad, store, "m", now=NOW + timedelta(days=1), gate=Gate(nightly=True))
    assert release.plan_digest == old.digest()
    assert read_refusals(store, "m")[0].decision.why == "it was live, and was rolled back; the live plan stays"
    with refused(Refused, "rolled back"):
        deploy(bad, store, "m", now=NOW + timedelta(days=1))
