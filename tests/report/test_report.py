"""The page as text: what is in it, what never is, and what is refused."""

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from functools import partial
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.costs import random_model
from helpers.hostile import HOSTILE
from helpers.plans import NOW, make_plan, row_plan
from helpers.refusals import names, refused
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.moves import changed_state, moved_bytes
from neuroshard.core.output_order import reordered
from neuroshard.core.part import Part
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.topology import Topology
from neuroshard.core.units import format_bytes
from neuroshard.core.value import sha256
from neuroshard.costmodel.analytic import analytic_model
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.costmodel.given import Given, GivenCosts
from neuroshard.costmodel.pricing import launch_ms, price_shards
from neuroshard.costmodel.uncertainty import off_by
from neuroshard.deploy.gate import Gate
from neuroshard.deploy.run import as_read_now, deploy, price
from neuroshard.files.plan import write_plan
from neuroshard.files.row_orders import bytes_of_ids, write_ids
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.evaluate import run as evaluate
from neuroshard.report import charts
from neuroshard.report.live import LivePlan, change, open_live, sides
from neuroshard.report.moves import diff_json, diff_text
from neuroshard.report.numbers import fullest_step, hosts_memory, percent
from neuroshard.report.run import report, run
from neuroshard.report.text import plan_json, plan_text
from neuroshard.store.open import open_store
from neuroshard.store.row_orders import put_ids, read_ids


def drawn_in(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def data_of(html: str) -> dict:
    return drawn_in(html)["sets"]


@pytest.fixture(scope="module")
def html(parts):
    live = LivePlan(parts["live"], "release 7")
    return report(parts["plan"], model=parts["model"], costs=parts["costs"], live=live, files={"plan.json": "0123"})


def test_the_numbers_are_the_plans(html, parts):
    plan, data = parts["plan"], data_of(html)

    assert data["devices"]["total"] == pytest.approx(plan.predicted_ms, rel=1e-6)
    assert data["devices"]["memory"] == list(plan.memory_bytes())
    assert data["devices"]["limit"] == list(plan.task.device_memory_bytes)
    assert data["tables"]["name"] == [table.name for table in plan.task.tables]
    assert [data["tables"]["name"][place] for place in data["shards"]["table"]] == [s.table for s in plan.shards]
    assert data["shards"]["device"] == [shard.device for shard in plan.shards]
    assert sum(data["change"]["arriving"]) == sum(data["change"]["leaving"]) == moved_bytes(parts["live"], plan)
    assert f"{plan.cost_ms:.3f} ms" in html
    assert plan.digest() in html


def test_the_page_counts_tables_whose_optimizer_state_does_not_carry_over_exactly(html, parts):
    changed = changed_state(parts["live"], parts["plan"])
    said = f"The optimizer state of {counted(len(changed), 'table')} does not carry over exactly: {escape(changed[0])}"

    assert changed
    assert said in html
    same = report(parts["plan"], model=parts["model"], live=LivePlan(parts["plan"], "release 7"))
    assert "carry over exactly" not in same


def test_the_page_says_whether_outputs_come_in_another_order(html, parts):
    said = ". The outputs of the model come in another order: read them by key, or call keep_output_order(model)."

    assert reordered(parts["live"], parts["plan"])
    assert said in html
    assert said not in report(parts["plan"], model=parts["model"], live=LivePlan(parts["plan"], "release 7"))


@pytest.mark.parametrize("most", [0, 3, 10**6])
def test_shards_that_are_not_distinguished_are_there_in_sum(parts, monkeypatch, most):
    monkeypatch.setattr(charts, "MOST_SHARDS", most)
    plan = parts["plan"]
    data = data_of(report(plan, model=parts["model"]))
    apart, smaller = data["shards"], data.get("smaller") or {"device": [], "count": [], "bytes": [], "adds": []}

    assert len(apart["table"]) == min(most, len(plan.shards)) == len(plan.shards) - sum(smaller["count"])
    memory, adds = [0] * plan.task.devices, sum(apart["adds"])
    for some in (apart, smaller):
        for device, nbytes in zip(some["device"], some["bytes"], strict=True):
            memory[device] += nbytes
    adds += sum(one * count for one, count in zip(smaller["adds"], smaller["count"], strict=True))
    assert memory == list(plan.memory_bytes())
    assert sum(data["tables"]["bytes"]) == sum(memory)
    assert sum(data["tables"]["adds"]) == pytest.approx(adds, rel=1e-5)
    by_table = plan.by_table()
    assert data["tables"]["count"] == [len(by_table[name]) for name in data["tables"]["name"]]
    assert [{d for a, b in spans for d in range(a, b + 1)} for spans in data["tables"]["devices"]] == [
        {shard.device for shard in by_table[name]} for name in data["tables"]["name"]
    ]


def test_what_is_gained_over_the_live_plan_stands_beside_what_predictions_may_be_off_by(html, parts):
    cost, live = parts["plan"].cost_ms, parts["live"].cost_ms
    assert cost < live
    than = "more" if 1 - cost / live > off_by(parts["plan"]) else "not more"
    assert f"predicted, {than} than the {percent(off_by(parts['plan']))} that predictions may be off by" in html


def test_the_live_plan_is_priced_as_its_own_search_priced_it(html, parts):
    assert data_of(html)["devices"]["live"] == pytest.approx(parts["live"].predicted_ms, rel=1e-6)


def test_what_a_shard_adds_is_what_its_device_saves_without_it(parts):
    plan, model = parts["plan"], parts["model"]
    prices = price_shards(model, plan.held, plan.shards)

    for left_out in (0, len(plan.shards) - 1):
        others = plan.shards[:left_out] + plan.shards[left_out + 1 :]
        without = price_shards(model, plan.held, others)
        device = plan.shards[left_out].device
        assert prices.adds_ms[left_out] == pytest.approx(prices.compute_ms[device] - without.compute_ms[device])


def test_a_shard_that_is_alone_adds_all_that_its_device_computes():
    plan, model = make_plan(), random_model(2)
    first = plan.task.tables[0]
    alone = Shard(table=first.name, rows=first.rows, dim=first.dim, device=0)

    task = ShardingTask(tables=(first,), device_memory_bytes=(2**30,), batch_size=plan.task.batch_size)
    prices = price_shards(model, task, [alone])

    assert prices is not None
    assert (
        model.compute_ms(np.zeros((1, 64))) > 0
    )  # of a device that holds something: one that does not computes nothing
    assert prices.adds_ms.tolist() == prices.alone_ms.tolist() == prices.compute_ms.tolist()


def test_rows_of_a_table_are_priced_as_a_table_of_their_own():
    plan, model = row_plan(), analytic_model("h100", 64)
    user = plan.task.tables[0]
    data = data_of(report(searched_with(model, plan), model=model, live=LivePlan(make_plan(), "before")))

    half = model.compute_ms(model.part_vectors([Part(user, 500, 16)]))
    assert data["shards"]["alone"][:2] == pytest.approx([half[0]] * 2)
    assert [data["shards"][name][:2] for name in ("row", "rows", "dim")] == [[0, 500], [500, 500], [16, 16]]
    assert (0, 500) in set(zip(data["moves"]["row"], data["moves"]["rows"], strict=True))
    assert data["devices"]["live"] is not None
    dims = np.array([16 + 4, 16 + 4 + 4.0])  # each device sends all columns of user
    prices = price_shards(model, plan.held, plan.shards)
    # The row-wise table has all-to-alls of its own. Since item is cut, its outputs and those of country are put into order, and
    # then all are concatenated.
    launched = launch_ms(model, 2, operators=1, outputs=1, reordered=8 + 4 + (16 + 8 + 4)).backward_ms
    assert prices.backward_collective_ms == pytest.approx(model.backward_collective_ms(dims) + launched)


def searched_with(model, plan):
    return plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"cost_model": model.name})})


def test_given_costs_price_no_rows_and_the_page_says_so():
    costs = [{"name": table.name, "cost_ms": 1.0} for table in row_plan().task.tables]
    model = Given(GivenCosts.parse({"tables": costs}, "costs"), 64)
    page = report(searched_with(model, make_plan()), model=model, live=LivePlan(row_plan(), "before"))

    assert "the live plan splits tables row-wise, which given costs do not cover" in page
    assert "adds" in data_of(page)["shards"]


class Tags(HTMLParser):
    """The names of all elements, and all attributes that make a browser do something."""

    def __init__(self, html):
        super().__init__()
        self.names, self.active = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.active += [
            (tag, name) for name, _ in attributes if name.startswith("on") or name in ("src", "style", "action")
        ]


def test_a_hostile_name_of_a_table_is_text_and_nothing_else(html, parts):
    tags = Tags(html)
    assert tags.names.count("script") == 3
    assert "img" not in tags.names
    assert tags.active == []
    assert data_of(html)["tables"]["name"][:4] == list(HOSTILE)


def test_nothing_is_fetched_and_only_our_scripts_run(html):
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1])
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]

    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert rules["img-src"] == "data:"
    assert not {"link", "iframe", "base", "form", "object"} & set(Tags(html).names)


def test_the_same_run_gives_the_same_page(html, parts):
    again = report(
        parts["plan"],
        model=parts["model"],
        costs=parts["costs"],
        live=LivePlan(parts["live"], "release 7"),
        files={"plan.json": "0123"},
    )
    assert again == html


def test_costs_of_one_cost_model_for_other_batches_are_not_compared(parts):
    plan = parts["plan"]
    task = plan.task.model_copy(update={"batch_size": 1024})
    other = plan.model_copy(update={"task": task, "task_digest": task.digest(), "predicted_ms": (0.5,) * 4})
    why = "the predictions are for other batch sizes"

    assert (diff_json(plan, other)["gain_ms"], diff_json(plan, other)["not_compared"]) == (None, why)
    assert f"  not comparable: {why}" in diff_text(plan, other, diff_json(plan, other)).splitlines()
    found = change(plan, LivePlan(other, "release 7"), None)
    assert (found.live_ms, found.why) == (None, f"not compared in ms: {why}; --model prices both for this plan's task")


def test_a_gain_by_one_cost_model_is_given_for_the_same_tables_only(parts):
    plan, (first, *others) = parts["plan"], parts["plan"].task.tables
    busier = first.model_copy(update={"pooling_factor": 2 * first.pooling_factor})
    task = plan.task.model_copy(update={"tables": (busier, *others)})
    other = plan.model_copy(update={"task": task, "task_digest": task.digest()})

    assert diff_json(plan, plan, parts["model"])["gain_ms"] == 0.0
    assert diff_json(plan, other, parts["model"])["gain_ms"] is None


def test_a_bare_plan_says_what_to_give(tmp_path):
    plan = make_plan()
    write_plan(tmp_path / "plan.json", plan)
    run(tmp_path / "plan.json", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()

    for option in ("--live", "--model", "--fleet"):
        assert f"<code>{option}" in text
    assert "moves" not in data_of(text)
    assert "--evaluation" in text


@pytest.mark.parametrize(("name", "backend"), [("analytic:cpu", "cpu"), ("analytic:h100", "cuda")])
def test_the_page_says_how_to_run_the_plan_on_what_it_is_for(parts, name, backend):
    by = parts["plan"].provenance.model_copy(update={"cost_model": name, "cost_model_backend": "analytic"})
    page = report(parts["plan"].model_copy(update={"provenance": by}))
    assert f"neuroshard evaluate plan.json --backend {backend} -o" in page


def test_a_plan_whose_file_has_a_name_that_is_no_text_is_shown(tmp_path):
    named = tmp_path / os.fsdecode(b"plan\xff.json")
    write_plan(named, make_plan())
    run(named, tmp_path / "report.html")
    assert r"plan\udcff.json" in (tmp_path / "report.html").read_text()


def test_a_plan_that_was_run_shows_what_was_measured(tmp_path, parts):
    write_plan(tmp_path / "plan.json", parts["plan"])
    evaluation = evaluate(tmp_path / "plan.json", tmp_path / "evaluation.json", "synthetic", MeasureSettings(1))
    run(tmp_path / "plan.json", tmp_path / "report.html", evaluation=tmp_path / "evaluation.json")
    text = (tmp_path / "report.html").read_text()

    evaluated = drawn_in(text)["charts"]["evaluated"]["sets"]["between"]
    assert evaluated["computed"] == pytest.approx([one.measured.total_ms for one in evaluation.devices], rel=1e-6)
    assert evaluated["predicted"] == pytest.approx(parts["plan"].predicted_ms, rel=1e-6)
    assert f"{max(evaluated['computed']):.3f} ms: computed by {evaluation.bench.hardware.name}" in text


def test_the_evaluation_of_another_plan_is_refused(tmp_path, parts):
    write_plan(tmp_path / "plan.json", parts["plan"])
    write_plan(tmp_path / "live.json", parts["live"])
    evaluate(tmp_path / "live.json", tmp_path / "evaluation.json", "synthetic", MeasureSettings(1))
    with refused(InvalidInput, tmp_path / "evaluation.json", parts["live"].digest()[:12]):
        run(tmp_path / "plan.json", tmp_path / "report.html", evaluation=tmp_path / "evaluation.json")
    assert not (tmp_path / "report.html").exists()


def test_where_nothing_is_live_yet_the_page_says_so(tmp_path):
    write_plan(tmp_path / "plan.json", make_plan())
    run(tmp_path / "plan.json", tmp_path / "report.html", live=f"{tmp_path}#ads")

    assert "Nothing was live before this plan" in (tmp_path / "report.html").read_text()


def test_what_moves_between_plans_of_other_groups_is_not_said_to_be_nothing(tmp_path):
    plan = make_plan()
    groups = Groups(ranks=4, contiguous=False, domain=4, local_world_size=4)
    task = plan.task.model_copy(update={"groups": groups, "topology": groups.topology(2, None)})
    of_groups = Plan(task=task, shards=plan.shards, provenance=plan.provenance)
    write_plan(tmp_path / "plan.json", plan)
    write_plan(tmp_path / "live.json", of_groups)
    run(tmp_path / "plan.json", tmp_path / "report.html", live=str(tmp_path / "live.json"))

    html = (tmp_path / "report.html").read_text()
    assert "Moves not counted." in html
    assert "to move" not in html
    assert not {"change", "moves"} & data_of(html).keys()


def test_what_is_not_of_the_plan_is_refused(parts):
    hardware = parts["costs"].bench.hardware.model_copy(update={"name": "another"})
    bench = parts["costs"].bench.model_copy(update={"hardware": hardware})
    elsewhere = parts["costs"].model_copy(update={"bench": bench})
    for given, fact in (
        ({"model": random_model(4)}, parts["model"].name[:12]),
        ({"model": parts["model"], "costs": elsewhere}, "another"),
        ({"costs": parts["costs"]}, "--model"),
    ):
        with refused(InvalidInput, fact):
            report(parts["plan"], **given)


def test_live_is_what_the_store_says_and_before_the_plan_is_live_itself_what_it_replaced(tmp_path, parts):
    store, old, new = open_store(str(tmp_path)), parts["live"], parts["plan"]
    spec = f"{tmp_path}#ads"

    assert open_live(spec, new) is None
    deploy(old, store, "ads", now=NOW)
    before = open_live(spec, new)
    deploy(new, store, "ads", now=NOW, gate=Gate(force=True))
    after = open_live(spec, new)

    assert before.plan == after.plan == old
    assert open_live(spec, old).plan == new
    with refused(UsageError, "STORE#MODEL"):
        open_live("#ads", new)


def by_access(day: int, *ids: int) -> Plan:
    """A plan whose first hundred hot rows of a table are copied, as they were counted on a day."""
    data = bytes_of_ids(np.array(ids))
    of = {"ids_digest": sha256(data), "rows": 10_000, "hot_rows": 200, "lookup_share": 0.9, "points": ((100, 0.8),)}
    order = RowOrder(**of, time=f"2026-11-{day}T00:00:00Z")
    table = Table(name="t", rows=10_000, dim=64, pooling_factor=50.0, pooling="none", row_order=order)
    rules = (
        TableRule(table="t", rows_by_access=RowsByAccess(hot_rows=100)),
        TableRule(table="t/hot", data_parallel=True),
    )
    task = ShardingTask(
        tables=(table,), device_memory_bytes=(2**30,) * 2, batch_size=64, constraints=Constraints(tables=rules)
    )
    shards = [Shard(table="t/hot", rows=100, dim=64, device=device) for device in (0, 1)]
    plan = Plan(
        task=task,
        shards=(*shards, Shard(table="t/cold", rows=9900, dim=64, device=0)),
        provenance=Provenance(neuroshard_version="0", algorithm="by hand"),
    )
    return searched_with(analytic_model("h100", 64), plan)


@pytest.mark.parametrize("where", ["store", "folder"])
def test_a_live_plan_is_priced_with_what_its_hot_rows_are_read_now(tmp_path: Path, where: str) -> None:
    old, new, model = by_access(20, *range(200)), by_access(21, *range(150, 350)), analytic_model("h100", 64)
    store, spec = open_store(str(tmp_path)), f"{tmp_path}#ads"
    lists = [bytes_of_ids(np.arange(first, first + 200)) for first in (0, 150)]
    write_ids(tmp_path / "new" / "rows", lists[1:])
    if where == "store":
        put_ids(store, "ads", lists[0])
        deploy(old, store, "ads", now=NOW)
    else:
        write_plan(tmp_path / "old" / "plan.json", old)
        write_ids(tmp_path / "old" / "rows", lists[:1])
        spec = str(tmp_path / "old" / "plan.json")
    live, without_list = open_live(spec, new, tmp_path / "new" / "rows"), open_live(spec, new)
    assert live is not None
    assert without_list is not None
    found = change(new, live, model)
    assert "whether access has drifted from its row orders is not known" in change(new, without_list, model).why
    for data in lists:
        put_ids(store, "ads", data)
    as_gate, (line,) = as_read_now(old, new, partial(read_ids, store, "ads"))
    assert max(found.live_ms or ()) == pytest.approx(price(as_gate, new, model), rel=1e-3) != price(old, new, model)
    assert line.removeprefix("the live plan's ") in found.why
    row = 64 * 4 + 4
    assert found.moved_bytes == pytest.approx(
        99 * row, rel=0.01
    )  # of its hundred hot rows one is hot before too, by chance


def test_the_fleet_is_what_neuroshard_fleet_prints(tmp_path, neuroshard):
    write_plan(tmp_path / "plan.json", make_plan())
    (tmp_path / "fleet.json").write_text(neuroshard("fleet", "--local", "--json").stdout)
    kind = json.loads((tmp_path / "fleet.json").read_text())["kinds"][0]
    done = neuroshard("report", "plan.json", "--fleet", "fleet.json", "-o", "report.html", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert kind["fingerprint"] in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("[]", "fleet"),
        ('{"kinds": 3}', "fleet"),
        ('{"kinds": [3]}', "kinds[0]"),
        ('{"kinds": [{"hardware": {}}]}', "kinds[0].hardware"),
        (
            '{"kinds": [{"hardware": {"kind": "cuda", "name": "<b>", "memory_bytes": 1}, "nodes": "many"}]}',
            "kinds[0].nodes",
        ),
    ],
)
def test_what_is_no_fleet_is_reported_in_one_line_and_nothing_is_written(tmp_path, content, fact):
    write_plan(tmp_path / "plan.json", make_plan())
    (tmp_path / "fleet.json").write_text(content)
    with refused(InvalidInput, tmp_path / "fleet.json", fact):
        run(tmp_path / "plan.json", tmp_path / "report.html", fleet=tmp_path / "fleet.json")

    assert not (tmp_path / "report.html").exists()


def test_a_cost_model_without_curves_says_so(parts):
    model = parts["model"]
    nets = tuple(
        net.model_copy(update={"fit": net.fit.model_copy(update={"train_errors": (), "valid_errors": ()})})
        for net in model.report.nets
    )
    bare = replace(
        model, manifest=model.manifest.model_copy(update={"report": model.report.model_copy(update={"nets": nets})})
    )
    by = parts["plan"].provenance.model_copy(update={"cost_model": bare.name})
    page = report(parts["plan"].model_copy(update={"provenance": by}), model=bare)

    assert "train it again" in page
    assert "curves-0" not in drawn_in(page)["charts"]


def test_the_files_that_were_read_are_named_with_their_digests(tmp_path, parts):
    save_cost_model(tmp_path / "model", parts["model"])
    write_plan(tmp_path / "plan.json", parts["plan"])
    size = run(tmp_path / "plan.json", tmp_path / "report.html", model=str(tmp_path / "model"))
    text = (tmp_path / "report.html").read_text()

    assert size == Path(tmp_path / "report.html").stat().st_size
    assert re.search(r"sha256 of model/model\.json</dt><dd>" + parts["model"].name, text)


def test_a_devices_memory_is_split_into_weights_optimizer_step_and_reserve():
    update = {"pipeline": "sparse-dist", "constraints": Constraints(reserve_share=0.25), "batch_size": 3200}
    plan = Plan(
        task=row_plan().task.model_copy(update=update), shards=row_plan().shards, provenance=make_plan().provenance
    )
    weights = 500 * 16 * 4 + 300 * 4 * 4
    step = 2 * 8 * (3200 * 5 // 4 + 3200)  # half of the user's 2.5 lookups a sample, and all of the item's
    split = {"weight_bytes": weights, "optimizer_bytes": 4 * 800, "step_bytes": step, "reserve_bytes": 2**18}

    first = plan_json(plan)["devices"][0]
    assert {name: first[name] for name in split} == split
    assert first["memory_bytes"] == weights + 4 * 800 + step
    text = plan_text(plan)
    assert "device     weights   optimizer        step     reserve        left          of" in text
    assert "     0    35.9 KiB     3.1 KiB   112.5 KiB   256.0 KiB   616.4 KiB     1.0 MiB" in text
    assert "a step's inputs and outputs by pipeline sparse-dist" in " ".join(text.split())
    data = data_of(report(plan))["devices"]
    shown = ("weights", "optimizer state", "inputs and outputs of a step", "limit")
    assert [data[name][0] for name in shown] == [weights, 3200, step, 3 * 2**18]
    assert "not a step's inputs and outputs" in " ".join(plan_text(make_plan()).split())


def test_a_plan_says_how_its_tables_are_held():
    names = ("all", "domain", "grid", "copied", "cut", "whole")
    tables = tuple(Table(name=name, rows=100, dim=8, pooling_factor=1.0) for name in names)
    task = ShardingTask(tables=tables, device_memory_bytes=(2**20,) * 4, batch_size=8).with_copies(["copied"])

    def block(table: str, first: int, rows: int, device: int, column: int = 0, dim: int = 8) -> Shard:
        return Shard(table=table, row_offset=first, rows=rows, column_offset=column, dim=dim, device=device)

    shards = [
        *(block("all", 25 * device, 25, device) for device in range(4)),
        *(block("domain", 50 * number, 50, 2 + number) for number in range(2)),
        *(block("grid", 50 * (device % 2), 50, device, 4 * (device // 2), 4) for device in range(4)),
        *(block("copied", 0, 100, device) for device in range(4)),
        *(block("cut", 0, 100, 0, column, 4) for column in (0, 4)),
        block("whole", 0, 100, 3),
    ]
    text = plan_text(Plan(task=task, shards=tuple(shards), provenance=make_plan().provenance))
    assert "6 tables in 17 shards (1 cut, 3 tables row-wise, 1 table data-parallel)" in " ".join(text.split())
    assert [line for line in text.splitlines() if line.startswith(names)] == [
        "all: row-wise over 4 devices (rows 0-24 on device 0)",
        "domain: table-row-wise over 2 devices (rows 0-49 on device 2)",
        "grid: in a grid over 4 devices (rows 0-49, columns 0-3 on device 0)",
    ]


def test_a_less_certain_plan_says_so_first(tmp_path):
    plan = make_plan("an ordinary note")
    by = plan.provenance.model_copy(update={"instead": "this plan is by analytic:h200"})
    less = plan.model_copy(update={"provenance": by})

    assert plan_text(less).splitlines()[0] == "less certain: this plan is by analytic:h200"
    assert plan_text(plan).splitlines()[0].startswith("plan ")
    page = unescape(report(less))
    assert page.index("Less certain: this plan is by analytic:h200") < page.index("an ordinary note")


def test_both_plans_stand_side_by_side_with_what_differs(html, parts):
    live, plan = make_plan(), row_plan()
    lines = {side.what: side for side in sides(plan, change(plan, LivePlan(live, "before"), None))}
    assert (lines["tables row-wise"].live, lines["tables row-wise"].this) == ("0", "1")
    assert "tables" not in lines
    same = sides(plan, change(plan, LivePlan(plan, "before"), None))
    assert {side.what for side in same} == {"slowest device", "mean device", "fullest device"}
    slowest = {f"{one.cost_ms:.3f} ms, predicted" for one in (parts["plan"], parts["live"])}
    assert all(re.search(rf'<table class="sides">.*<td>{text}</td>', html, re.S) for text in slowest)


def tiered_plan(hosts: int = 2) -> Plan:
    """A plan of four devices a host, each with a table in HBM, one cached and one in host memory."""
    rows = 1000
    names = [f"{tier}{device}" for device in range(2 * hosts) for tier in ("hbm", "cached", "host")]
    tables = tuple(Table(name=name, rows=rows, dim=8, pooling_factor=1.0) for name in names)
    tiers: Any = {name: ("cached", 64) if "cached" in name else ("host", None) for name in names if "hbm" not in name}
    task = ShardingTask(
        tables=tables,
        device_memory_bytes=(2**20,) * 2 * hosts,
        batch_size=8,
        host_memory_bytes=2**30,
        topology=Topology(domain=2, local_world_size=2),
    ).with_tiers(tiers)
    shards = tuple(Shard(table=name, rows=rows, dim=8, device=number // 3) for number, name in enumerate(names))
    return Plan(task=task, shards=shards, provenance=make_plan().provenance)


def test_a_page_shows_tiers():
    plan = tiered_plan()
    html = report(plan)
    data = data_of(html)

    assert data["tables"]["tier"][:3] == ["in HBM", "cached, 64 of 1,000 rows in HBM (6.4%)", "in host memory"]
    assert data["tables"]["host"][:3] == [0, 32_000, 32_000]
    assert sum(data["tables"]["host"]) == sum(plan.host_memory())
    caches = 64 * (32 + 16) + 4 * 1000  # rows with tags and times, and the map of the table
    assert data["devices"]["caches"] == [caches] * 4
    assert data["devices"]["weights"] == [32_000] * 4
    parts = zip(*(data["devices"][part] for part in ("weights", "caches", "optimizer state")), strict=True)
    assert [sum(part) for part in parts] == data["devices"]["memory"] == list(plan.memory_bytes())
    assert "125.0 KiB on host 0, 125.0 KiB on host 1, of 1.0 GiB each" in html
    assert "their caches, and what they keep in HBM" in html


def test_a_page_of_a_plan_in_hbm_says_nothing_of_tiers(html):
    data = data_of(html)
    assert not {"tier", "cached", "host"} & data["tables"].keys()
    assert "caches" not in data["devices"]
    assert "beyond HBM" not in html


def test_hosts_are_listed_up_to_a_few():
    assert hosts_memory(make_plan()) == []
    assert hosts_memory(tiered_plan(1)) == ["host memory: 125.0 KiB of 1.0 GiB"]
    [said] = hosts_memory(tiered_plan(10))
    assert said.endswith("on host 7, at most as much on 2 more hosts, of 1.0 GiB each")
    assert "host memory: 125.0 KiB on host 0, " in plan_text(tiered_plan(3))


def test_the_fullest_device_is_one_line_by_cause_with_what_is_left():
    plan = make_plan()
    task = plan.task.model_copy(update={"pipeline": "none", "step_ledger": 1, "allocator_share": 0.5})
    plan = Plan.model_validate({**dict(plan), "format_version": 6, "task": task, "task_digest": task.digest()})
    left = [limit - used for limit, used in zip(task.device_memory_bytes, plan.memory_bytes(), strict=True)]
    line = fullest_step(plan) or ""
    for fact in ("weights", *plan.step_peaks()[0].causes, f"{format_bytes(min(left))} of"):
        assert names(line, fact)
