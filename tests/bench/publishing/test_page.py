"""docs/benchmarks.md is what the tables in docs/benchmarks/ render to, and each table names a bench that exists."""

import re
import shlex
import sys
from datetime import UTC, datetime

import pytest

from bench.publishing.page import PAGE, ROOT, TABLES, Table, command, publish, read, render, sections
from helpers.refusals import refused

WORDS = "## Search\n\n<!-- tables: search time -->\n\n## Cost models\n\n<!-- tables: cost cases -->\n"
NAMES = sorted(path.stem for path in TABLES.glob("*.json"))
COLUMNS = ["plan", "ms"]
ROWS: list[list[object]] = [["ours", "1.0"], ["theirs | others", 2]]


def test_the_page_is_what_the_tables_render_to():
    page = PAGE.read_text()
    assert page == render(page), "run make bench-page"


@pytest.mark.parametrize("name", NAMES)
def test_a_table_stands_in_a_section_and_names_a_bench_and_its_options(name):
    assert name.partition("-")[0] in sections(PAGE.read_text())
    program, script, *words = shlex.split(read(TABLES / f"{name}.json").command)
    assert program == "python"
    source = (ROOT / script).read_text()
    assert not [word for word in words if word.startswith("--") and f'"{word}"' not in source]


@pytest.fixture
def page(tmp_path):
    (tmp_path / "page.md").write_text(WORDS)
    return tmp_path / "page.md"


def test_a_bench_publishes_its_table_of_today(tmp_path, page, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "tests/bench/search.py"), "--only", "time", "--publish"])
    publish("search-time", "How soon?", COLUMNS, ROWS, costs="measured", folder=tmp_path, page=page)
    table = read(tmp_path / "search-time.json")
    assert (table.command, table.columns) == ("python tests/bench/search.py --only time", ("plan", "ms"))
    assert table.date == f"{datetime.now(UTC):%Y-%m-%d}"
    written = page.read_text()
    assert written.startswith("## Search\n\n<!-- tables: search time -->\n\n**How soon?** ")
    assert written.endswith(
        "\n\n|plan|ms|\n|---|---|\n|ours|1.0|\n|theirs / others|2|\n\n## Cost models\n\n<!-- tables: cost cases -->\n"
    )
    assert render(written, tmp_path) == written


def test_a_table_that_its_mark_does_not_name_stays_in_its_file(tmp_path, page, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "tests/bench/search.py")])
    publish("search-worlds", "How soon? On 2 cores.", COLUMNS, ROWS, costs="none", folder=tmp_path, page=page)
    listed = f"In files alone (`{tmp_path.name}/search-….json`): worlds.\n\n## Cost"
    assert listed in page.read_text()
    assert "|plan|ms|" not in page.read_text()


def test_a_command_shows_no_path_of_the_machine(tmp_path):
    words = [
        str(ROOT / "tests/bench/search.py"),
        "--tables-dir",
        str(tmp_path),
        "--only",
        "8 times slower",
        "--publish",
    ]
    assert command(words) == "python tests/bench/search.py --tables-dir … --only '8 times slower'"


def test_machines_that_differ_stand_at_their_tables(tmp_path, page, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "tests/bench/search.py")])
    for name in ("search-time", "cost-cases"):
        publish(name, "How soon?", COLUMNS, ROWS, costs="formula", folder=tmp_path, page=page)
    machine = read(tmp_path / "search-time.json").machine
    words = f"<!-- machine -->\n\n{WORDS}"
    assert render(words, tmp_path).count(machine) == 1
    (tmp_path / "cost-cases.json").write_text((tmp_path / "cost-cases.json").read_text().replace(machine, "8 x H100"))
    assert re.search(rf"\d, {re.escape(machine)}, by our formula", render(words, tmp_path))
    assert ", 8 x H100, by our formula" in render(words, tmp_path)


@pytest.mark.parametrize(
    ("broken", "fact"),
    [
        ({"costs": "guessed"}, "'guessed'"),
        ({"date": "22 November"}, "22 November"),
        ({"rows": (("ours",),)}, "2 columns"),
    ],
    ids=["costs", "date", "rows"],
)
def test_a_broken_table_is_refused(broken, fact):
    whole = {"question": "?", "costs": "none", "command": "python a", "date": "2026-11-22", "machine": "a CPU"}
    with refused(ValueError, fact):
        Table(**{**whole, "columns": ("plan", "ms"), "rows": (("ours", "1"),), **broken})


def test_a_name_without_a_section_is_refused(tmp_path, page):
    with refused(ValueError, "'speed-of-it'"):
        publish("speed-of-it", "?", COLUMNS, ROWS, costs="none", folder=tmp_path, page=page)
