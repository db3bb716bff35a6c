"""The whole chain by hand, as a new user types it, on the synthetic backend."""

import json
import re
from pathlib import Path

import pytest

from helpers.shared import copy_of_made
from neuroshard.files.plan import read_plan


@pytest.fixture(scope="module")
def chain(tmp_path_factory, neuroshard) -> Path:
    """A folder in which every subcommand up to `search` has run."""
    steps = [
        "tables --preset mlperf-dlrm-dcnv2 -o tables.json",
        "augment tables.json --compute-cases 150 --collective-cases 60 --devices 4 --memory 32GiB -o cases",
        "measure cases --backend synthetic --batch-size 65536 -o costs",
        "pretrain costs --epochs 30 -o model",
        "search tables.json --model model --devices 4 --memory 32GiB -o plan.json",
    ]

    def fill(folder: Path) -> None:
        for step in steps:
            done = neuroshard(*step.split(), cwd=folder)
            assert done.returncode == 0, done.stderr

    return copy_of_made(tmp_path_factory, "chain", fill)


def test_the_plan_fits_and_says_what_each_device_costs(chain):
    plan = json.loads((chain / "plan.json").read_text())

    assert len(plan["predicted_ms"]) == 4
    assert min(plan["predicted_ms"]) > 0
    assert max(read_plan(chain / "plan.json").memory_bytes()) <= 32 * 2**30


def test_no_baseline_is_predicted_better_than_the_plan(chain):
    plan = read_plan(chain / "plan.json")

    solved = [b.cost_ms for b in plan.baselines if b.cost_ms is not None]
    assert {b.algorithm for b in plan.baselines} == {"random", "size", "dim", "lookup", "size-lookup"}
    assert all(plan.cost_ms <= cost + 1e-9 for cost in solved)


def test_show_prints_every_device_within_80_columns(chain, neuroshard):
    done = neuroshard("show", chain / "plan.json")

    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if re.match(r" *[0-9].*GiB of", line)] == [
        "0",
        "1",
        "2",
        "3",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_same_seed_gives_the_same_plan_byte_for_byte_in_another_process(chain, neuroshard_process):
    arguments = ("search", "tables.json", "--model", "model", "--devices", 4, "--memory", "32GiB", "-o", "again.json")
    assert neuroshard_process(*arguments, cwd=chain).returncode == 0

    assert (chain / "again.json").read_bytes() == (chain / "plan.json").read_bytes()


@pytest.mark.parametrize("algorithm", ["neuroshard-2023", "random", "size", "dim", "lookup", "size-lookup"])
def test_every_algorithm_finds_a_valid_plan(chain, neuroshard, algorithm):
    out = chain / f"{algorithm}.json"
    arguments = ("search", "tables.json", "--model", "model", "--devices", 4, "--memory", "48GiB", "-o", out)
    done = neuroshard(*arguments, "--algorithm", algorithm, cwd=chain)

    assert done.returncode == 0, done.stderr
    assert read_plan(out).provenance.algorithm == algorithm


def test_deploy_releases_and_rollback_follow_the_live_plan(chain, neuroshard, tmp_path):
    other = chain / "other.json"
    arguments = ("search", "tables.json", "--model", "model", "--devices", 4, "--memory", "48GiB", "-o", other)
    assert neuroshard(*arguments, cwd=chain).returncode == 0
    place = ("--store", tmp_path / "store", "--name", "ads-ranker")

    for plan in ("plan.json", "other.json"):
        assert neuroshard("deploy", chain / plan, *place).returncode == 0
    assert neuroshard("rollback", *place).returncode == 0
    listed = neuroshard("releases", *place)

    plans = [line.split()[3] for line in listed.stdout.splitlines()[1:]]
    first, second = (read_plan(chain / name).digest()[:12] for name in ("plan.json", "other.json"))
    assert plans == [first, second, first]


def test_a_cost_model_is_published_where_it_is_trained(chain, neuroshard, tmp_path):
    store = tmp_path / "store"
    done = neuroshard("pretrain", "costs", "--epochs", 5, "-o", tmp_path / "model", "--publish", store, cwd=chain)
    listed = json.loads(neuroshard("models", "--store", store, "--json").stdout)

    assert [(row["live"], row["error"] <= 0.2) for row in listed] in ([(True, True)], [(False, False)])
    assert done.returncode == (0 if listed[0]["live"] else 1), done.stderr
    assert f"cost model {listed[0]['digest'][:12]}" in done.stdout


def test_a_single_writer_publishes_where_it_trains_to_a_store_that_ignores_conditions(
    chain, neuroshard, tmp_path, aws, rclone
):
    store = aws(rclone)
    arguments = ("pretrain", "costs", "--epochs", 5, "-o", tmp_path / "model", "--publish", store, "--single-writer")
    done = neuroshard(*arguments, cwd=chain)
    listed = json.loads(neuroshard("models", "--store", store, "--json").stdout)

    assert len(listed) == 1, done.stderr
    assert done.returncode == (0 if listed[0]["live"] else 1), done.stderr


def test_measuring_again_measures_nothing_twice(chain, neuroshard):
    before = {part.name: part.read_bytes() for part in (chain / "costs").iterdir()}
    arguments = ("measure", "cases", "--backend", "synthetic", "--batch-size", 65536, "-o", "costs")

    assert neuroshard(*arguments, cwd=chain).returncode == 0
    assert {part.name: part.read_bytes() for part in (chain / "costs").iterdir()} == before
