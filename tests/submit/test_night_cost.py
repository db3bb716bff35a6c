"""The pods of a night and their time by a formula: it is held against recorded runs, and docs/operating.md against it."""

import copy
import itertools
import re
from pathlib import Path

import pytest
import yaml

from helpers.kubeflow import recorded
from helpers.night_cost import NightCost, night_cost
from neuroshard.submit.package import PACKAGE, limit_loops

OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"


@pytest.mark.parametrize(
    ("items", "cost"),
    [
        # those pipelines called campaigns works; run-cpu3: 22 pods in 202 s
        ({"names": 1, "jobs": 0, "works": 0, "gangs": 0}, NightCost(22, 20, 2)),
        # run-own-synthetic: 34 pods; run-gpu1: 43 pods in 356 s, of which some went into measuring
        ({"names": 1, "jobs": 1, "works": 1, "gangs": 0}, NightCost(34, 32, 2)),
        ({"names": 2, "jobs": 1, "works": 1, "gangs": 0}, NightCost(43, 32, 2)),
    ],
)
def test_the_formula_counts_the_pods_of_recorded_runs(items: dict[str, int], cost: NightCost) -> None:
    spec = recorded("cpu2")["pipeline_spec"]["pipeline_spec"]
    assert night_cost(spec, items) == cost


def test_the_docs_say_what_nights_of_this_pipeline_cost() -> None:
    spec = next(yaml.safe_load_all(PACKAGE.read_text()))
    limited = copy.deepcopy(spec)
    limit_loops(limited, 10)
    rows = []
    for models, kinds in itertools.product((1, 100), (0, 1)):
        items = {"kinds": kinds, "shares": 1, "later": models, "at_once": 0 if kinds else models - 1}
        cost, slower = night_cost(spec, items), night_cost(limited, items)
        assert slower.pods == cost.pods
        times = [f"{one.at_once} | {one.seconds / 60:.1f} min" for one in (cost, slower)]
        rows.append(f"| {models} | {kinds} | {cost.pods} | {' | '.join(times)} |")
    table = re.findall(r"^\| \d+ \| [01] \| .*$", OPERATING.read_text(), re.M)
    assert table == rows, "docs/operating.md, What a night costs, must say:\n" + "\n".join(rows)


@pytest.mark.parametrize(("parallelism", "at_once"), [(0, 26), (1, 3), (4, 13), (10, 26)])
def test_a_run_has_at_most_as_many_pods_at_once_as_its_kinds_and_one_times_a_loop(
    parallelism: int, at_once: int
) -> None:
    """Each kind of hardware is in one of its loops at a time; models that need not wait are planned meanwhile, and the first."""
    spec = next(yaml.safe_load_all(PACKAGE.read_text()))
    if parallelism:
        limit_loops(spec, parallelism)
    items = {"at_once": 5, "later": 10, "kinds": 2, "shares": 8}
    cost = night_cost(spec, items)
    assert cost.at_once == at_once
    assert not parallelism or cost.at_once - 1 <= (min(items["kinds"], parallelism) + 1) * parallelism
