"""Cost models in a store, as typed: publish, list, search by hardware, roll back, collect."""

import json

import pytest

from helpers.costs import BENCH, random_model, with_error
from helpers.plans import TABLES
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.files.tables import write_tables

NAME = f"hardware/{BENCH.hardware.fingerprint}/{BENCH.batch_size}"
GOOD, BETTER, POOR = (with_error(random_model(2, seed=seed), error) for seed, error in enumerate((0.1, 0.05, 0.5)))


@pytest.fixture
def step(tmp_path, neuroshard):
    write_tables(tmp_path / "tables.json", TABLES)
    for name, model in {"good": GOOD, "better": BETTER, "poor": POOR}.items():
        save_cost_model(tmp_path / name, model)

    def step(*arguments: object, code: int = 0) -> str:
        done = neuroshard(*arguments, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert done.returncode == code, done.stderr
        assert code == 0 or len(done.stderr.splitlines()) == 1
        return done.stdout + done.stderr

    return step


def test_training_starts_from_a_cost_model_of_a_store(step, tmp_path):
    step("publish-model", "good", "--store", "store")
    step(
        "augment",
        "tables.json",
        "--compute-cases",
        30,
        "--collective-cases",
        0,
        "--devices",
        1,
        "--memory",
        "1GiB",
        "-o",
        "cases",
    )
    step("measure", "cases", "--backend", "synthetic", "-o", "costs")
    for name, start in {"from-store": "store#test-device", "from-folder": "good"}.items():
        step("pretrain", "costs", "--epochs", 1, "--start-from", start, "-o", name)
    one, other = ((tmp_path / name / "model.json").read_bytes() for name in ("from-store", "from-folder"))
    assert one == other
    assert json.loads(one)["provenance"]["started_from"] == GOOD.name


def test_a_life_of_cost_models(step, tmp_path):
    good, better, poor = (model.name[:12] for model in (GOOD, BETTER, POOR))
    assert step("models", "--store", "store") == "store: no cost model is published there\n"
    assert step("publish-model", "good", "--store", "store") == (
        f"store: cost model {good} is live for test device ({NAME}, release 1); error on unseen tables 10.0%\n"
    )
    assert "is published, but does not go live" in step("publish-model", "poor", "--store", "store", code=1)
    step("publish-model", "better", "--store", "store")

    lines = step("models", "--store", "store").splitlines()
    listed = [line for line in lines[1:] if not line.startswith(" ")]  # the device follows on a line of its own
    assert len(lines) == 1 + 2 * len(listed)
    assert {line.split()[1]: line.split()[3] for line in listed} == {good: "10.0%", better: "5.0%", poor: "50.0%"}
    assert [line.split()[1] for line in listed if line.endswith("live")] == [better]
    as_json = json.loads(step("models", "--store", "store", "--json"))
    assert {row["digest"]: (row["live"], row["error"]) for row in as_json} == {
        GOOD.name: (False, 0.1), BETTER.name: (True, 0.05), POOR.name: (False, 0.5),
    }  # fmt: skip

    search = ("search", "tables.json", "--devices", 2, "--memory", "64MiB", "-o", "plan.json")
    step(*search, "--store", "store", "--hardware", "test-device")
    first = (tmp_path / "plan.json").read_bytes()
    assert json.loads(first)["provenance"]["cost_model"] == BETTER.name
    step(*search, "--model", "store#test-device")
    assert (tmp_path / "plan.json").read_bytes() == first
    assert "m release 1 is live" in step("deploy", "plan.json", "--store", "store", "--name", "m",
        "--model", f"store#{BENCH.hardware.fingerprint}")  # fmt: skip

    assert step("rollback", "--store", "store", "--name", NAME) == (
        f"store: {NAME} release 3 is live, cost model {good} (rolled back)\n"
    )
    assert f"release 4 is live, cost model {poor}" in step("promote", poor, "--store", "store", "--name", NAME)
    releases = step("releases", "--store", "store", "--name", NAME).splitlines()
    assert [line.split()[2:5] for line in releases[1:]] == [
        ["promote", poor, "50.0%"], ["rollback", good, "10.0%"], ["publish", better, "5.0%"], ["publish", good, "10.0%"],
    ]  # fmt: skip
    assert "0 objects" in step("gc", "--store", "store", "--name", NAME)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("--store", "store"), 2, "give one cost model"),
        (("--hardware", "h200"), 2, "give one cost model"),
        (("--model", "good", "--store", "store", "--hardware", "x"), 2, "give one cost model"),
        ((), 2, "give one cost model"),
        (("--store", "store", "--hardware", "h200"), 1, "no cost model of hardware 'h200'"),
        (("--store", "store", "--hardware", ""), 2, "of --hardware is empty"),
        (("--model", "#h200"), 2, "STORE#HARDWARE"),
    ],
)
def test_a_search_without_a_clear_cost_model_is_reported(step, arguments, code, word):
    search = ("search", "tables.json", "--devices", 2, "--memory", "32MiB", "-o", "plan.json")

    assert word in step(*search, *arguments, code=code)
