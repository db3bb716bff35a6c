"""The page as a person meets it, in a real Chromium: no error, the lists and charts say what the plan says, on any screen."""

import shutil
from collections.abc import Iterator

import pytest

from helpers.hostile import HOSTILE
from helpers.limits import HANGS
from helpers.plans import make_plan, row_plan
from neuroshard.core.part import Part
from neuroshard.core.plan import Baseline, DeviceCost, Improvement, Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.core.units import format_bytes
from neuroshard.files.plan import write_plan
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.evaluate import run as evaluate
from neuroshard.report.live import LivePlan
from neuroshard.report.run import report
from neuroshard.report.trust import read_evaluation

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, timeout=HANGS * 1000)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """Opens a page from a file and waits until it is drawn; at the end nothing may have been logged, thrown or asked for."""
    troubles: list[str] = []
    contexts = []

    def open_page(html: str, width: int = 1280, scheme: str = "light"):
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(HANGS * 1000)
        page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        page.on("request", lambda asked: troubles.append(asked.url) if asked.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture(scope="module")
def html(parts, tmp_path_factory):
    write_plan(tmp_path_factory.getbasetemp() / "plan.json", parts["plan"])
    out = tmp_path_factory.getbasetemp() / "evaluation.json"
    evaluate(out.with_name("plan.json"), out, "synthetic", MeasureSettings(1))
    return report(
        parts["plan"],
        model=parts["model"],
        costs=parts["costs"],
        live=LivePlan(parts["live"], "release <7>"),
        evaluated=read_evaluation(out, parts["plan"]),
    )


def cells(page, of: str) -> list[list[str]]:
    return page.eval_on_selector_all(
        f"#list-{of} tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )


@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (1280, "dark"), (1920, "light")])
def test_it_fits_every_screen_in_light_and_in_dark(opened, html, width, scheme):
    page = opened(html, width, scheme)

    charts = page.eval_on_selector_all(".chart svg", "all => all.map(one => one.getBoundingClientRect().width)")
    assert len(charts) == 15  # what a run that left everything behind has to show
    assert min(charts) > 150
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("html").get_attribute("data-theme") == scheme


def test_the_button_changes_light_to_dark_and_draws_all_anew(opened, html):
    page = opened(html)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.wait_for_selector("html[data-drawn=dark]")

    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    assert page.locator(".chart svg").count() == 15


def test_the_lists_say_what_the_plan_says(opened, html, parts):
    page, plan = opened(html), parts["plan"]
    tables = {table.name: table for table in plan.task.tables}
    shown = {row[0]: row for row in cells(page, "tables")}

    assert shown.keys() == tables.keys()
    for name, shards in plan.by_table().items():
        table, row = tables[name], shown[name]
        assert row[1:3] == [f"{table.rows:,}", str(table.dim)]
        assert row[4] == format_bytes(sum(Part(table, shard.rows, shard.dim).memory().total for shard in shards))
        assert row[6:] == [str(len(shards)), ", ".join(map(str, sorted({shard.device for shard in shards})))]
    totals = [row[5] for row in cells(page, "devices")]
    assert totals == [f"{ms:.3f}" for ms in plan.predicted_ms]
    assert f"{plan.cost_ms:.3f} ms" in page.inner_text(".cards")


def test_the_search_box_finds_a_table_and_the_device_its_tables(opened, html, parts):
    page, plan = opened(html), parts["plan"]
    page.fill("#find", "T1")
    assert {row[0] for row in cells(page, "tables")} == {t.name for t in plan.task.tables if "t1" in t.name.lower()}

    page.fill("#find", "")
    page.select_option("#device", "2")
    assert {row[0] for row in cells(page, "tables")} == {shard.table for shard in plan.shards if shard.device == 2}
    assert page.inner_text("#found").endswith("of 24 tables")

    page.fill("#find", "no such table")
    assert cells(page, "tables") == []


def test_a_click_on_a_devices_bar_lists_its_tables(opened, html, parts):
    page = opened(html)
    page.locator("#chart-memory path[aria-label^='device: 1;']").first.click()

    expected = {shard.table for shard in parts["plan"].shards if shard.device == 1}
    assert {row[0] for row in cells(page, "tables")} == expected
    assert page.input_value("#device") == "1"


def test_a_click_on_a_heading_sorts_and_a_second_one_turns_it_round(opened, html, parts):
    page, rows = opened(html), sorted(table.rows for table in parts["plan"].task.tables)
    heading = page.locator("#list-tables th", has_text="rows").locator("button")

    heading.click()
    assert [int(row[1].replace(",", "")) for row in cells(page, "tables")] == rows[::-1]
    heading.click()
    assert [int(row[1].replace(",", "")) for row in cells(page, "tables")] == rows


def test_hovering_over_a_table_shows_its_numbers(opened, html, parts):
    page, plan = opened(html), parts["plan"]
    name = HOSTILE[0]
    table = next(table for table in plan.task.tables if table.name == name)
    page.fill("#find", name[:12])
    page.hover("#list-tables tbody tr")
    card = page.inner_text("#hover")

    assert name in card
    assert f"{table.rows:,} rows × {table.dim} columns" in card
    for shard in plan.by_table()[name]:
        assert f"{shard.column_offset}–{shard.column_offset + shard.dim - 1}" in card
        assert format_bytes(Part(table, shard.rows, shard.dim).memory().total) in card
    assert "adds ms" in card


def test_hovering_over_a_shard_in_the_chart_shows_its_numbers(opened, html, parts):
    page, plan = opened(html), parts["plan"]
    block = page.locator("#chart-map path[aria-roledescription=bar]").first
    block.hover(force=True)
    page.wait_for_selector("#vg-tooltip-element.visible")
    tooltip = dict(
        page.eval_on_selector_all(
            "#vg-tooltip-element tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )
    )

    shards = [s for s in plan.shards if s.table == tooltip["table"] and s.device == int(tooltip["device"])]
    table = next(table for table in plan.task.tables if table.name == tooltip["table"])
    assert tooltip["rows"] == f"{table.rows:,}"
    assert tooltip["columns"] in {f"{s.column_offset}–{s.column_offset + s.dim - 1}" for s in shards}
    assert tooltip["adds to its device (predicted)"].endswith(" ms")


def test_a_table_that_is_split_row_wise_is_reported_in_words_and_by_its_rows(opened):
    page = opened(report(row_plan(devices=4), live=LivePlan(make_plan(devices=4), "before")))
    shown = {row[0]: row for row in cells(page, "tables")}

    assert shown["user"][5:] == ["4 row-wise", "0, 1, 2, 3"]
    assert shown["item"][5:] == ["2", "0, 1"]
    page.hover("#list-tables tbody tr:has-text('user')")
    card = page.inner_text("#hover")
    assert "row-wise over 4 devices" in card
    assert "250–499" in card
    assert "A table that is split row-wise" in page.inner_text("#tables")
    assert {row[4] for row in cells(page, "moves") if row[0] == "user"} >= {"0–249", "750–999"}
    page.locator("#chart-map path[aria-roledescription=bar]").first.hover(force=True)
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "–" in page.inner_text("#vg-tooltip-element")


def test_a_plan_with_nothing_beside_it_draws_what_it_has(opened):
    page = opened(report(make_plan()))

    assert page.locator(".chart svg").count() == 3  # its cost, memory and map; it has no parts of its cost
    assert len(cells(page, "tables")) == 3
    assert page.locator(".missing").count() >= 5


@pytest.mark.parametrize(("devices", "named"), [(8, 4), (64, 0)])
def test_hosts_are_drawn_and_listed(opened, devices, named):
    plan = large_plan(tables=64, devices=devices)
    task = plan.task.model_copy(update={"topology": Topology(domain=2, local_world_size=2)})
    page = opened(report(plan.model_copy(update={"task": task})), width=390)
    assert [row[:2] for row in cells(page, "devices")[:3]] == [["0", "0"], ["1", "0"], ["2", "1"]]
    for chart in ("#chart-devices", "#chart-memory"):
        names = page.locator(chart).get_by_text("host ").all_text_contents()
        assert names == [f"host {host}" for host in range(named)]


OUTSIDE = """() => [...document.querySelectorAll('.chart svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.width && (box.right > frame.right + 1 || box.left < frame.left - 1);
  }).map(text => text.textContent);
})"""


def test_on_a_phone_no_legend_and_no_value_is_cut(opened, html):
    page = opened(html, width=400)
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_on_a_phone_the_figure_of_the_longest_bar_is_whole(opened):
    slow = Baseline(algorithm="size-lookup", predicted_ms=(12345.6, 1.0))
    page = opened(report(make_plan().model_copy(update={"baselines": (slow,)})), width=400)
    assert "12345.600" in page.locator("#chart-bars text").all_text_contents()
    assert page.evaluate(OUTSIDE) == []


def test_it_works_in_the_frame_that_kubeflow_shows_it_in(chromium, html):
    context = chromium.new_context()
    page = context.new_page()
    page.set_default_timeout(HANGS * 1000)
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.set_content("<iframe sandbox='allow-scripts' style='width:1200px;height:800px'></iframe>")
    page.eval_on_selector("iframe", "(frame, html) => { frame.srcdoc = html }", html)
    frame = page.frame_locator("iframe")
    frame.locator("#chart-bars svg").wait_for(timeout=HANGS * 1000)
    frame.locator("nav a", has_text="Origin").click()
    frame.locator("#theme").click()

    assert troubles == []
    context.close()


def large_plan(tables: int = 2000, devices: int = 128) -> Plan:
    """Every third table in two shards. Its costs are made up: only the page's size and speed matter here."""
    some = tuple(
        Table(name=f"model.sparse.ebc.table_{i:04d}", rows=1000 + 977 * i, dim=128, pooling_factor=1.5 + i % 40)
        for i in range(tables)
    )
    shards = []
    for i, table in enumerate(some):
        widths = (64, 64) if i % 3 == 0 else (128,)
        for part, dim in enumerate(widths):
            device = (7 * i + part) % devices
            shards.append(Shard(table=table.name, rows=table.rows, column_offset=64 * part, dim=dim, device=device))
    costs = tuple(
        DeviceCost(compute_ms=3 + d / 777, forward_collective_ms=2 - d / 999, backward_collective_ms=1.123)
        for d in range(devices)
    )
    totals = tuple(cost.total_ms for cost in costs)
    return Plan(
        task=ShardingTask(tables=some, device_memory_bytes=(80 * 2**30,) * devices, batch_size=65536),
        shards=tuple(shards),
        predicted=costs,
        predicted_ms=totals,
        baselines=(Baseline(algorithm="size", predicted_ms=totals), Baseline(algorithm="dim", error="no room")),
        lower_bound_ms=5.5,
        improvements=tuple(Improvement(step=step, cost_ms=8 - step / 100) for step in range(100)),
        provenance=Provenance(neuroshard_version="0", algorithm="local-search", cost_model="analytic:h100"),
    )


def test_two_thousand_tables_on_128_devices_are_below_3_mb_and_all_there(opened):
    from neuroshard.costmodel.analytic import analytic_model

    plan = large_plan()
    live = plan.model_copy(
        update={"shards": tuple(s.model_copy(update={"device": (s.device + 1) % 128}) for s in plan.shards)}
    )
    html = report(plan, model=analytic_model("h100", 65536), live=LivePlan(live, "before"))
    page = opened(html)

    assert len(html.encode()) < 3_000_000
    assert len(cells(page, "devices")) == 100
    page.click("#list-devices + .more")
    assert len(cells(page, "devices")) == 128
    page.fill("#find", "table_1777")
    assert [row[0] for row in cells(page, "tables")] == ["model.sparse.ebc.table_1777"]
    assert page.locator("#chart-map canvas").count() == 1


def test_of_very_many_shards_the_largest_are_distinguished_and_all_are_counted(opened):
    tables, devices = 160, 128
    some = tuple(Table(name=f"t{i}", rows=128 * (10 + i), dim=64, pooling_factor=1.5 + i % 40) for i in range(tables))
    shards = tuple(
        Shard(table=table.name, row_offset=first, rows=rows, dim=64, device=device)
        for table in some
        for device, (first, rows) in enumerate(table.row_blocks(devices))
    )
    task = ShardingTask(tables=some, device_memory_bytes=(2**33,) * devices, batch_size=4096)
    plan = Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="local-search"))
    html = report(plan)
    page = opened(html)

    assert len(html.encode()) < 3_000_000
    assert page.get_by_text("The smallest 480 shards are one block for each device").count() == 1
    page.click("#list-tables + .more")
    rows = {row[0]: row[1:] for row in cells(page, "tables")}
    assert rows["t0"] == [
        "1,280", "64", "1.5", format_bytes(1280 * 260), "128 row-wise", "0, 1, 2, 3, 4, 5, 6, 7, … (128)"
    ]  # fmt: skip
    page.select_option("#device", "127")
    assert page.locator("#found").text_content() == "160 of 160 tables"
    page.hover("#list-tables tbody tr:first-child")
    assert page.locator("#hover").text_content().count("more shards") == 1
