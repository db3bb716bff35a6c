"""`import neuroshard as ns`: what is public, that it is light, and that a verb does what its subcommand does."""

import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import neuroshard as ns
from helpers.limits import HANGS
from helpers.refusals import refused
from neuroshard import api
from neuroshard.cli import app
from neuroshard.core.errors import InvalidInput, NotFound, UsageError

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ["deploy", "report", "search", "size"]
TABLES = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0 + i} for i in range(6)]
OPTIONS: dict[str, Any] = {"devices": 3, "memory": "1GiB", "batch_size": 4096, "rounds": 1, "quiet": True}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def plan() -> ns.Plan:
    return ns.search(TABLES, "analytic:h100", **OPTIONS)


def test_importing_neuroshard_loads_nothing_but_python() -> None:
    code = "import sys; before = set(sys.modules); import neuroshard as ns; dir(ns); ns.__version__; "
    code += "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"

    assert set(python(code).split()) - sys.stdlib_module_names == {"neuroshard"}


def test_the_verbs_load_no_heavy_package_before_they_are_called() -> None:
    code = "import sys, neuroshard as ns; [getattr(ns, name) for name in ns.__all__ if name != 'search']; ns.search; "
    code += "print(*sorted({'torch', 'pandas', 'pyarrow', 'boto3', 'jinja2', 'typer', 'kfp'} & sys.modules.keys()))"

    assert python(code) == ""


def test_figures_as_text_need_nothing_that_pages_are_made_with() -> None:
    code = "import sys; sys.modules['jinja2'] = sys.modules['vl_convert'] = None; import neuroshard as ns; "
    code += f"of = {{'batch_size': 64, 'quiet': True}}; print(ns.cache({TABLES}, **of)); "
    code += f"print(ns.size({TABLES}, 'analytic:h100', devices='1', rounds=0, **of))"

    assert "devices" in python(code)


def test_what_is_public_is_listed_once() -> None:
    assert set(ns.__all__) == {*api.__all__, "__version__"}
    assert set(ns.__all__) <= set(dir(ns))
    page = (ROOT / "docs" / "python.md").read_text()
    assert [name for name in ns.__all__ if f"`{name}" not in page and f"`ns.{name}" not in page] == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    name = "nothing"
    with refused(AttributeError, "'neuroshard'", "'nothing'"):
        getattr(ns, name)


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("first", ["", "import neuroshard.{}.run; ", "from neuroshard.{}.run import run; "])
def test_a_verb_that_is_a_package_too_can_be_called_whoever_imported_it_first(room: str, first: str) -> None:
    code = first.format(room) + f"import neuroshard as ns, neuroshard.{room}.run as m; from neuroshard import {room}\n"
    code += (
        f"try: ns.{room}(no_such_option=1)\nexcept TypeError as error: print({room} is ns.{room}, m.__name__, error)"
    )

    got = python(code)

    assert got.startswith(f"True neuroshard.{room}.run {room}() ")  # the verb's own refusal


@pytest.mark.parametrize("room", ROOMS)
def test_help_shows_the_signature_and_the_docstring_of_the_verb(room: str) -> None:
    verb = getattr(api, room)

    assert inspect.signature(getattr(ns, room)) == inspect.signature(verb)
    shown = pydoc.plain(pydoc.render_doc(getattr(ns, room)))
    first, *more = (inspect.getdoc(verb) or "").splitlines()
    assert first in shown
    assert "\n".join(f"    {line}" for line in more[1:]) in shown
    call = shown[shown.index(f"    {room}(\n") :].partition("    ) -> ")[0]
    for name, parameter in inspect.signature(verb).parameters.items():
        assert re.search(rf"^ +{name}: .*" + re.escape(usual(parameter)) + ",$", call, re.M), name


def usual(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"


@pytest.mark.parametrize("verb", ["search", "report", "deploy", "diff", "price"])
def test_a_verb_has_every_option_of_its_subcommand(verb: str) -> None:
    command = vars(typer.main.get_command(app))["commands"][verb]
    options = {parameter.name for parameter in command.params} - {"help"}
    renamed = {
        "tables_json": "tables",
        "plans": "plan",
        "as_json": None,
        "quiet": "quiet" if verb == "search" else None,
        "store": None if verb == "search" else "store",
        "hardware": None,
    }
    renamed |= {"out": None} if verb == "report" else {}

    wanted = {renamed.get(option, option) for option in options} - {None}

    assert wanted <= inspect.signature(getattr(api, verb)).parameters.keys()


@pytest.mark.slow
def test_search_from_python_writes_the_bytes_that_the_command_writes(tmp_path: Path) -> None:
    ns.tables(TABLES).save(tmp_path / "tables.json")
    words = (
        "search tables.json --model analytic:h100 --devices 3 --memory 1GiB --batch-size 4096 --rounds 1 --reserve 15% "
    )
    words += "--never-split t1 --pin t0=0,1 --domain 3 -o command.json"
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        done = CliRunner().invoke(app, words.split())
    finally:
        os.chdir(before)
    assert done.exit_code == 0, done.output

    options = {**OPTIONS, "reserve": "15%", "never_split": ["t1"], "pin": ["t0=0,1"], "domain": 3}
    of_values = ns.search(TABLES, "analytic:h100", out=tmp_path / "python.json", **options)
    of_a_file = ns.search(tmp_path / "tables.json", "analytic:h100", **options)

    assert (tmp_path / "python.json").read_bytes() == (tmp_path / "command.json").read_bytes()
    assert ns.load_plan(tmp_path / "command.json") == of_values == of_a_file


def test_with_a_move_budget_of_0_nothing_moves(plan: ns.Plan) -> None:
    kept = ns.search(TABLES, "analytic:h100", **{**OPTIONS, "rounds": 3}, previous=plan, move_budget=0)

    assert kept.shards == plan.shards


def test_tables_come_from_a_file_a_frame_a_model_and_a_list(tmp_path: Path) -> None:
    import pandas as pd

    tables = ns.tables(TABLES)
    tables.save(tmp_path / "tables.json")
    frame = pd.DataFrame(TABLES)
    frame["module"] = [None] * 6

    assert ns.tables(tmp_path / "tables.json") == tables == ns.tables(list(tables))
    assert ns.tables(frame) == tables == ns.tables(str(tmp_path / "tables.json"))
    assert list(tables.to_frame().name) == [table["name"] for table in TABLES]


def test_search_takes_whatever_tables_come_from(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("name,rows,dim,pooling_factor\na,1000,64,3\nb,2000,64,3\n")
    given: dict[str, Any] = {"devices": 2, "memory": "80GiB", "batch_size": 512, "rounds": 0, "quiet": True}
    for tables, count in ((str(tmp_path / "t.csv"), 2), (tmp_path / "t.csv", 2), ("mlperf-dlrm-dcnv2", 26)):
        assert len(ns.search(tables, "analytic:h100", **given).task.tables) == count


def test_tables_come_from_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuroshard.store import tables
    from neuroshard.store.folder import FolderStore

    ns.tables(TABLES).save(tmp_path / "tables.json")
    monkeypatch.setattr(tables, "open_store", {"s3://bucket/today": FolderStore(tmp_path)}.__getitem__)

    assert ns.tables("s3://bucket/today/tables.json") == ns.tables(TABLES)
    plan = ns.search("s3://bucket/today/tables.json", "analytic:h100", **OPTIONS)
    assert plan.task.tables == ns.tables(TABLES)
    with refused(UsageError, "files"):
        ns.tables("s3://bucket/today/tables.json", optimizer="adam")


def test_unknown_columns_of_a_frame_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    import pandas as pd

    tables = ns.tables(pd.DataFrame([{**TABLES[0], "owner": "ads"}]))

    assert tables.notes == ("the DataFrame: unknown keys were ignored: owner",)
    assert capsys.readouterr().err == "note: the DataFrame: unknown keys were ignored: owner\n"


@pytest.mark.slow
def test_tables_of_a_torch_module_are_those_that_the_command_finds() -> None:
    pytest.importorskip("torchrec")
    import torch

    from examples.ads_model import make_model

    with torch.device("meta"):
        model = make_model()

    of_the_module = ns.tables(model, pooling_factors={"query_terms": 20.0}, quiet=True)
    of_its_name = ns.tables("examples.ads_model:make_model", pooling_factors={"query_terms": 20.0}, quiet=True)

    assert of_the_module == of_its_name
    assert {table.name: table.pooling_factor for table in of_the_module}["query_terms"] == 20.0


def test_quiet_says_nothing_and_otherwise_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    ns.search(TABLES, "analytic:h100", **OPTIONS)
    assert capsys.readouterr() == ("", "")

    ns.search(TABLES, "analytic:h100", **{**OPTIONS, "quiet": False})
    out, err = capsys.readouterr()
    assert (out, "search without cuts: 0/1 rounds" in err) == ("", True)


def test_two_plans_are_held_against_one_cost_model(plan: ns.Plan) -> None:
    other = ns.search(TABLES, "analytic:a100", **{**OPTIONS, "algorithm": "random"})

    assert ns.diff(plan, other).gain_ms is None
    assert plan.cost_ms is not None
    by_h100 = ns.diff(other, plan, model="analytic:h100")

    assert by_h100.gain_ms == pytest.approx(ns.price(other, "analytic:h100").cost_ms - plan.cost_ms)
    assert by_h100.gain_ms is not None
    assert by_h100.gain_ms > 0
    assert by_h100.data["old"] == other.digest()
    assert ns.price(plan, "analytic:h100").total_ms == pytest.approx(plan.predicted_ms)


def test_the_command_diff_takes_a_cost_model(plan: ns.Plan, tmp_path: Path) -> None:
    other = ns.search(TABLES, "analytic:a100", **{**OPTIONS, "algorithm": "random"})
    for name, one in (("a.json", other), ("b.json", plan)):
        (tmp_path / name).write_bytes(one.canonical_json())
    words = ["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--model", "analytic:h100"]

    as_text, as_json = (CliRunner().invoke(app, [*words, *more]).stdout for more in ([], ["--json"]))

    found = ns.diff(other, plan, "analytic:h100")
    assert json.loads(as_json) == found.data
    assert as_text == f"{found}\n"
    assert "not comparable" not in as_text


def test_the_command_prices_several_plans_as_the_verb_does(plan: ns.Plan, tmp_path: Path) -> None:
    other = ns.search(TABLES, "analytic:a100", **{**OPTIONS, "algorithm": "random"})
    larger = ns.search(TABLES, "analytic:h100", **{**OPTIONS, "batch_size": 8192})
    files = [str(tmp_path / f"{name}.json") for name in ("plan", "other", "larger")]
    for file, one in zip(files, (plan, other, larger), strict=True):
        Path(file).write_bytes(one.canonical_json())
    words = ["price", *files, "--model", "analytic:h100"]

    as_text, as_json = (CliRunner().invoke(app, [*words, *more]).stdout for more in ([], ["--json"]))

    prices = [ns.price(one, "analytic:h100") for one in (plan, other, larger)]
    apart = [None, None, "the predictions are for other batch sizes"]
    assert json.loads(as_json) == [
        {"file": file, **price.data, "not_compared": why} for file, price, why in zip(files, prices, apart, strict=True)
    ]
    assert [str(price) in as_text for price in prices] == [True] * 3
    first, worse, of_other_work = as_text.splitlines()[-3:]
    assert first.split() == [f"{prices[0].cost_ms:.3f}", "ms", files[0]]
    assert f"{prices[1].cost_ms / prices[0].cost_ms - 1:.1%} higher" in worse
    assert "not compared" in of_other_work
    assert "%" not in of_other_work
    said = " ".join(as_text.split("\n\n")[0].split())
    assert said.startswith(f"{files[2]} is not compared with {files[0]}: ")
    assert "batch sizes" in said
    assert CliRunner().invoke(app, [words[0], files[0], *words[4:]]).stdout == f"{prices[0]}\n"


def test_plans_for_other_hosts_are_not_compared_by_any_verb(plan: ns.Plan, tmp_path: Path) -> None:
    apart = ns.search(TABLES, "analytic:h100", **{**OPTIONS, "local_world_size": 1})
    files = [str(tmp_path / f"{name}.json") for name in ("plan", "apart")]
    for file, one in zip(files, (plan, apart), strict=True):
        Path(file).write_bytes(one.canonical_json())

    priced = CliRunner().invoke(app, ["price", *files, "--model", "analytic:h100"]).stdout
    found = [ns.diff(plan, apart), ns.diff(plan, apart, "analytic:h100")]

    said = [priced, *map(str, found), ns.report(plan, model="analytic:h100", live=files[1]).html]
    assert all("for other topologies" in " ".join(text.split()) for text in said)
    assert [one.gain_ms for one in found] == [None, None]
    assert "%" not in priced
    ns.deploy(apart, str(tmp_path / "store"), "ads")
    decision = ns.deploy(plan, str(tmp_path / "store"), "ads", model="analytic:h100").decision
    assert decision is not None
    assert (decision.gain, "3 hosts of 1 rank" in decision.comparison) == (None, True)


def test_the_slowest_device_is_the_one_that_the_others_wait_for(plan: ns.Plan) -> None:
    other = ns.search(TABLES, "analytic:a100", **{**OPTIONS, "algorithm": "random"})

    price = ns.price(other, "analytic:h100")

    compute = [device.compute_ms for device in price.devices]
    assert len(set(compute)) > 1
    assert price.data["slowest_device"] == price.slowest_device == compute.index(max(compute))


def test_of_many_devices_the_price_shows_the_slowest(plan: ns.Plan) -> None:
    price = ns.Price("0" * 64, "m", 64, tuple(plan.predicted or ()) * 12)

    lines = str(price).splitlines()

    assert lines[-1] == "the 32 slowest; 4 devices more with --json"
    assert max(map(len, lines)) <= 80
    totals = [float(line.split()[-1]) for line in lines if line[:6].strip().isdigit()]
    assert len(totals) == 32
    assert totals == sorted(totals, reverse=True)


def test_plans_for_other_batch_sizes_are_not_priced_together(plan: ns.Plan) -> None:
    other = ns.search(TABLES, "analytic:h100", **{**OPTIONS, "batch_size": 8192})

    with refused(InvalidInput, "4,096", "8,192"):
        ns.diff(plan, other, "analytic:h100")


@pytest.mark.slow
def test_the_report_saves_the_page_that_the_command_writes(plan: ns.Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(plan.canonical_json())
    words = ["report", str(tmp_path / "plan.json"), "--model", "analytic:h100", "-o", str(tmp_path / "command.html")]
    assert CliRunner().invoke(app, words).exit_code == 0

    page = ns.report(tmp_path / "plan.json", model="analytic:h100")

    assert page.save(tmp_path / "python.html") == (tmp_path / "command.html").stat().st_size
    assert (tmp_path / "python.html").read_bytes() == (tmp_path / "command.html").read_bytes()
    shown = page._repr_html_()
    assert shown.startswith("<iframe sandbox=")
    assert "<script" not in shown


def test_every_result_has_two_lines_and_html(plan: ns.Plan, tmp_path: Path) -> None:
    results: list[Any] = [ns.tables(TABLES), plan, ns.price(plan, "analytic:h100"), ns.diff(plan, plan)]
    results += [ns.deploy(plan, tmp_path / "store", "ads"), ns.deploy(plan, tmp_path / "store", "ads")]

    for result in results:
        assert 1 <= len(repr(result).splitlines()) <= 2
        assert result._repr_html_().startswith("<p")


def test_a_printed_plan_says_how_tables_are_held_and_what_is_full(plan: ns.Plan) -> None:
    what, cost, held, room = str(plan).splitlines()

    assert (what, cost.partition(" (cost model analytic:h100)")[0]) == tuple(repr(plan).splitlines())
    counts = [int(part.split()[0]) for part in held.removeprefix("tables: ").split(", ")]
    assert sum(counts) == len(plan.task.tables)
    fullest = max(plan.memory_bytes())
    assert f"device {plan.memory_bytes().index(fullest)} is fullest" in room


def test_names_of_tables_are_escaped() -> None:
    (row,) = TABLES[:1]

    assert "<script>" not in ns.tables([{**row, "name": "<script>alert(1)</script>"}])._repr_html_()


def test_of_many_rows_the_first_are_shown_and_the_rest_is_counted() -> None:
    shown = ns.tables([{**TABLES[0], "name": f"t{i}"} for i in range(40)])._repr_html_()

    assert shown.count("<tr>") == 1 + 32
    assert "8 more rows (to_frame has all)" in shown


def test_frames_have_a_row_a_shard_and_a_row_a_device(plan: ns.Plan) -> None:
    shards, devices = plan.to_frame(), plan.to_frame("devices")

    assert len(shards) == len(plan.shards)
    kept = [memory.total - memory.step for memory in plan.device_memory()]
    assert list(shards.groupby("device").memory_bytes.sum()) == kept
    assert tuple(devices.total_ms) == plan.predicted_ms
    assert tuple(ns.price(plan, "analytic:h100").to_frame().device) == (0, 1, 2)
    assert len(ns.diff(plan, plan).to_frame()) == 0


def test_without_pandas_to_frame_says_how_to_get_it(plan: ns.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)

    with refused(ns.NeuroshardError, "to_frame", "pandas", "install"):
        plan.to_frame()


@pytest.mark.parametrize(
    ("call", "error", "facts"),
    [
        (lambda: ns.search(TABLES, "analytic:h100", devices=0, memory="1GiB"), UsageError, ("devices", 4096, 0)),
        (lambda: ns.search(TABLES, "analytic:h100", devices=2, memory="1 lot"), UsageError, ("'1 lot'",)),
        (
            lambda: ns.search(TABLES, "analytic:h100", **OPTIONS, pin="t0=0"),
            UsageError,
            ("pin", "['t0=0']"),
        ),
        (lambda: ns.search("no.json", "analytic:h100", **OPTIONS), InvalidInput, ("no.json",)),
        (lambda: ns.search("t.json", "analytic:h100", **OPTIONS, out="./t.json"), UsageError, ("t.json",)),
        (lambda: ns.tables(3), UsageError, (3, "preset")),  # type: ignore[arg-type]
        (lambda: ns.tables([3]), InvalidInput, ("tables[0]", 3, "Table")),  # type: ignore[list-item]
        (lambda: ns.tables(TABLES, pooling_factors={"t0": 2.0}), UsageError, ("pooling factors", "model")),
        (lambda: ns.price(3, "analytic:h100"), UsageError, (3, "plan.json")),  # type: ignore[arg-type]
        (lambda: ns.load_plan("s3://bucket/prefix"), UsageError, ("s3://bucket/prefix", "name='ads-ranker'")),
        (lambda: ns.load_plan("nowhere", "ads"), NotFound, ("nowhere",)),
    ],
)
def test_errors_are_the_projects_own_in_one_line(call: Any, error: type[Exception], facts: tuple[object, ...]) -> None:
    with refused(error, *facts) as raised:
        call()

    assert isinstance(raised.value, ns.NeuroshardError)


@pytest.mark.slow
def test_a_users_file_is_checked_by_mypy_from_outside(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "import pandas as pd\n\nimport neuroshard as ns\n\n"
        "tables: ns.Tables = ns.tables('mlperf-dlrm-dcnv2')\n"
        "plan: ns.Plan = ns.search(tables, model='analytic:h100', devices=8, memory='80GiB', quiet=True)\n"
        "cost: float = ns.price(plan, 'analytic:a100').cost_ms\n"
        "gain: float | None = ns.diff('old.json', plan, model='analytic:h100').gain_ms\n"
        "size: int = ns.report(plan).save('report.html')\n"
        "shards: pd.DataFrame = plan.to_frame()\n"
        "number: int = ns.deploy(plan, 'store', 'ads-ranker').release.number\n"
        "sizes: ns.Sizes = ns.size(tables, 'analytic:h100', devices='4-8', memory=['80GiB'], batch_size=512, min_dim=8)\n"
        "ns.deploy(plan, 'store', 'ads-ranker', min_gain='5%', force=True)\n"
        "wrong: str = ns.load_plan('store', 'ads-ranker')\n"
        "ns.search(tables, model='analytic:h100', devices='8', memory='80GiB')\n"
        "ns.size(tables, 'analytic:h100', devices='4-8', batch_size='512')\n"
        "ns.deploy(plan, 'store', 'ads-ranker', min_gains=0.05)\n"
    )
    # torch is no part of what a user sees, and two thirds of all that mypy would read
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "user.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "components")}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS)

    lines = [line.split(" error: ")[0] for line in done.stdout.splitlines() if " error: " in line]
    assert lines == [f"user.py:{number}:" for number in (14, 15, 16, 17)], done.stdout + done.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(ns.__file__ or "").parent / "py.typed").exists()
    assert json.loads(python("import json, neuroshard; print(json.dumps(neuroshard.__version__))")) == ns.__version__
