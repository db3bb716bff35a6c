"""Sizes as text, JSON, a page and files."""

import json
from pathlib import Path

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
        "EUR/M",
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


def test_a_network_joins_the_domains_of_every_size(folder: Path) -> None:
    options = "--model analytic:h100 --devices 2,8 --memory 1GiB --batch-size 512 --rounds 0 --domain 2 --json --quiet"
    slow, fast = (
        json.loads(size(folder, f"{options} --network {rate}").stdout)["rows"] for rate in ("10Gb/s", "400Gb/s")
    )
    assert slow[0]["step_ms"] == fast[0]["step_ms"]  # one domain
    assert slow[1]["step_ms"] > fast[1]["step_ms"]
    assert slow[1]["lower_bound_ms"] <= slow[1]["step_ms"]


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
