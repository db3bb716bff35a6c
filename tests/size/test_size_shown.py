"""Sizes as text, JSON, a page and files."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import neuroshard as ns
from helpers.costs import random_model
from helpers.plans import NOW
from helpers.sizes import some_tables
from neuroshard.cli import app
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.deploy.bundles import PublishRule, publish_model
from neuroshard.files.tables import write_tables
from neuroshard.orders.sizes import Kind
from neuroshard.size.rows import Cell, Row, plans_of
from neuroshard.store.folder import FolderStore

MODELS = "--model analytic:h100 --model analytic:a100"
SMALL = "--devices 1-4 --memory 32MiB,1GiB --batch-size 512 --rounds 0 --pipeline none --processes 1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tables(tmp_path / "tables.json", some_tables([40, 30, 20, 10]))
    return tmp_path


def size(folder: Path, options: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(app, f"size tables.json {options}".split())


def test_the_text_says_what_is_proven_and_fits_a_terminal(folder: Path) -> None:
    done = size(folder, f"{MODELS} {SMALL} --price 2EUR/h")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    for said in (
        "nothing below 4 devices of 32.0 MiB fits (proven)",
        "datasheets, not measured",
        "EUR/bn",
        "embeddings alone",
    ):
        assert said in done.stdout


def test_json_page_and_plans_are_of_the_same_rows(folder: Path) -> None:
    done = size(folder, f"{MODELS} {SMALL} --json --write plans -o size.html --quiet")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    rows = data["rows"]
    assert [row["frontier"] for row in rows] == [place in data["frontier"] for place in range(len(rows))]
    assert {row["basis"] for row in rows if row["state"] == "fits"} == {"datasheet"}
    page = (folder / "size.html").read_text()
    assert "<script" not in page
    assert page.count("<svg") == 2
    written = {path.name: ns.load_plan(path) for path in (folder / "plans").iterdir()}
    assert {plan.digest() for plan in written.values()} >= {rows[place]["plan"] for place in data["frontier"]}
    assert all(f"{row['step_ms']:.3f}" in page for row in rows if row["state"] == "fits")


def test_python_has_what_the_command_prints(folder: Path) -> None:
    sizes = ns.size(
        folder / "tables.json", "analytic:h100", devices="1-2", memory=["1GiB"], batch_size=512, rounds=0, quiet=True
    )
    done = size(folder, "--model analytic:h100 --devices 1-2 --memory 1GiB --batch-size 512 --rounds 0 --json --quiet")
    assert json.loads(done.stdout) == json.loads(json.dumps(sizes.data))
    assert len(sizes.to_frame()) == 2
    assert repr(sizes) == "Sizes: 2 of 2 fit, 1 that no other beats"  # one device sends nothing


def test_a_trained_cost_model_of_a_store_is_mixed_with_a_datasheet(folder: Path) -> None:
    model = random_model(2, 4)
    save_cost_model(folder / "model", model)
    publish_model(folder / "model", FolderStore(folder / "store"), now=NOW, asked=PublishRule(max_error=None))
    trained = f"{folder / 'store'}#{model.manifest.bench.hardware.name}"
    sizes = ns.size(
        folder / "tables.json",
        [trained, "analytic:h100"],
        devices="2-4",
        memory=[f"{trained}=1GiB", "analytic:h100=2GiB"],
        price=[f"{trained}=1EUR/h", "analytic:h100=2EUR/h"],
        batch_size=model.manifest.batch_size,
        rounds=0,
        quiet=True,
    )
    said = [(row["model"], row["devices"], row["state"], row.get("basis")) for row in sizes.data["rows"]]
    assert said == [
        (trained, 2, "fits", "formula"),
        (trained, 4, "fits", "formula"),
        ("analytic:h100", 2, "fits", "datasheet"),
        ("analytic:h100", 4, "fits", "datasheet"),
    ]
    two = ns.search(
        folder / "tables.json",
        trained,
        devices=2,
        memory="1GiB",
        batch_size=model.manifest.batch_size,
        rounds=0,
        quiet=True,
    )
    assert sizes.data["rows"][0]["embeddings_ms"] == two.cost_ms
    assert {plan.provenance.cost_model for plan in sizes.plans.values()} <= {model.name, "analytic:h100"}
    assert trained in " ".join(str(sizes).split())


def test_sizes_beyond_what_was_measured_say_so(folder: Path) -> None:
    model = random_model(2, 4)
    save_cost_model(folder / "model", model)
    batch = model.manifest.batch_size
    options = (
        f"--model model --model analytic:h100 --devices 2-8 --memory 1GiB --batch-size {batch} --rounds 0 --processes 1"
    )
    text = " ".join(size(folder, options).stdout.split())
    said = "costs of an all-to-all between 8 devices are extrapolated: 2 to 4 were measured"
    assert f"model x 8: {said}" in text
    rows = json.loads(size(folder, f"{options} --json -o size.html --quiet").stdout)["rows"]
    assert [(row["model"], row["devices"]) for row in rows if said in row["caveats"]] == [("model", 8)]
    assert all(not row["caveats"] for row in rows if row["model"] == "analytic:h100")
    assert f"model x 8: {said}" in (folder / "size.html").read_text()


def test_what_a_search_notes_of_a_plan_is_said_of_its_size(folder: Path) -> None:
    """That nothing is known of how a table's rows are read, and what that means for row-wise shards, say."""
    tables = some_tables([400])
    asked: dict[str, Any] = {"memory": "600MiB", "batch_size": 4096, "rounds": 0, "dense_memory": "1MiB", "quiet": True}
    plan = ns.search(tables, "analytic:h100", devices=2, row_wise=["*"], **asked)
    assert plan.provenance.notes
    sizes = ns.size(tables, "analytic:h100", devices="2", row_wise=["*"], **{**asked, "memory": ["600MiB"]})
    (row,) = sizes.data["rows"]
    assert row["notes"] == list(plan.provenance.notes)
    sizes.save(folder / "size.html")
    for shown in (str(sizes), unescape((folder / "size.html").read_text())):
        words = " ".join(shown.split())
        assert all(f"analytic:h100 x 2: {note}" in words for note in plan.provenance.notes)


def test_a_cost_model_of_another_batch_prices_the_sizes_that_have_its_own(folder: Path) -> None:
    model = random_model(2, 4)
    store = FolderStore(folder / "store")
    for name, batch in (("one", 1024), ("other", 4096)):
        bench = model.manifest.bench.model_copy(update={"batch_size": batch})
        own = {"bench": bench, "batch_size": batch, "batch_sizes": (batch,)}
        manifest = model.manifest.model_copy(update=own)
        save_cost_model(folder / name, replace(model, manifest=manifest))
    options = "--model one --model analytic:h100 --devices 2-4 --batch-per-device 256 --rounds 0 --processes 1 --json"
    rows = json.loads(size(folder, options).stdout)["rows"]
    assert [(row["devices"], row["state"]) for row in rows[:2]] == [(2, "not priced"), (4, "fits")]
    assert "measured for a batch of 1,024 samples, not 512" in rows[0]["why"]
    for name in ("one", "other"):
        publish_model(folder / name, store, now=NOW, asked=PublishRule(max_error=None))
    options = options.replace("--model one", f"--model store#{model.manifest.bench.hardware.fingerprint}")
    rows = json.loads(size(folder, options).stdout)["rows"]
    assert [(row["devices"], row["state"]) for row in rows[:2]] == [(2, "not priced"), (4, "fits")]
    assert "has cost models of several batch sizes, and none of 512" in rows[0]["why"]


def test_money_is_in_digits_that_people_read(folder: Path) -> None:
    cheap = "--model analytic:h100 --devices 2 --memory 1GiB --batch-size 65536 --rounds 0 --processes 1"
    done = size(folder, f"{cheap} --price 2.40EUR/h -o size.html --json --quiet")
    (row,) = json.loads(done.stdout)["rows"]
    a_sample = 2 * 2.40 / 3600 / row["samples_per_s"]
    assert row["money_per_billion_samples"] == pytest.approx(1e9 * a_sample)
    shown = f"{row['money_per_billion_samples']:.4g}"
    assert "e-" not in shown
    assert f"{shown} EUR per billion samples" in (folder / "size.html").read_text()
    text = size(folder, f"{cheap} --price 2.40EUR/h").stdout
    assert shown in text
    assert "for a billion samples" in " ".join(text.split())


def test_a_network_joins_the_domains_of_every_size(folder: Path) -> None:
    options = "--model analytic:h100 --devices 2,4 --memory 1GiB --batch-size 512 --rounds 0 --domain 2 --json --quiet"
    slow, fast = (
        json.loads(size(folder, f"{options} --network {rate}").stdout)["rows"] for rate in ("10Gb/s", "400Gb/s")
    )
    assert slow[0]["step_ms"] == fast[0]["step_ms"]  # one domain
    assert slow[1]["step_ms"] > fast[1]["step_ms"]
    assert slow[1]["lower_bound_ms"] <= slow[1]["step_ms"]


def test_long_steps_fit_a_terminal(folder: Path) -> None:
    done = size(folder, f"{MODELS} --devices 1-2 --memory 1000000GiB --batch-size 500000000 --rounds 0 --price 5000/h")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    head = next(line for line in lines if "ms a step" in line)
    rows = [line for line in lines if "PiB" in line or "TiB" in line]
    assert len(rows) == 4
    assert {len(line) for line in rows} == {len(head)}


def test_sizes_that_round_alike_are_written_apart(folder: Path) -> None:
    tables = some_tables([3000, 2500, 2000, 1500])  # a cut costs more than a whole table
    found = ns.size(
        tables, "analytic:h100", devices="4", memory=["2.3441GiB,2.9299GiB"], batch_size=512, rounds=1, quiet=True,
        pipeline="none",
    ).found  # fmt: skip
    one, other = found.rows
    alike = replace(one, cell=replace(one.cell, memory_bytes=other.cell.memory_bytes - 1000))
    plans = plans_of([alike, other])
    assert one.step_ms > other.step_ms  # both are on the frontier of memory
    assert list(plans) == ["h100-4x2.93GiB.json", "h100-4x2.93GiB-2.json"]
    assert {plan.digest() for plan in plans.values()} == {one.found.digest(), other.found.digest()}


def test_a_model_of_a_folder_gives_plain_file_names() -> None:
    kind = Kind(f"../{'models/' * 60}h100")
    plan = ns.search(some_tables([1]), "analytic:h100", devices=2, memory="1GiB", batch_size=512, rounds=0, quiet=True)
    (name,) = plans_of([Row(Cell(kind, 2, 2**30, 512, None, None), "fits", plan=plan)])
    assert name.endswith("models-h100-2x1GiB.json")
    assert name[0] != "-"
    assert len(name) < 80


def test_plans_are_written_into_a_folder_of_new_folders(folder: Path) -> None:
    done = size(folder, f"--model analytic:h100 {SMALL} --write new/plans")
    assert done.exit_code == 0, done.output
    assert any((folder / "new" / "plans").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--model analytic:h100 --devices 2 --memory 1MiB --batch-size 512",
            "no size of any kind fits; the one with most",
        ),
        ("--model analytic:h999 --devices 2 --batch-size 512", "unknown analytic model 'h999'"),
        ("--model analytic:h100 --devices 2", "give --batch-size"),
        ("--model analytic:h100 --devices 2 --batch-size 512 --price analytic:b200=1/h", "not among the models"),
        ("--model analytic:h100 --devices 2 --batch-size 512 --write tables.json", "tables.json"),
        ("--model analytic:h100 --devices 6 --batch-size 512 --domain 4", "no size is left"),
    ],
)
def test_bad_input_is_one_line(folder: Path, options: str, message: str) -> None:
    done = size(folder, f"{options} -o size.html")
    assert done.exit_code in (1, 2)
    assert message in str(done.exception) + done.output
    assert not (folder / "size.html").exists()
