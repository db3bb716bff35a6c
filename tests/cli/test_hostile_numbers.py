"""Every number of a plan, a cost set's and a cost model's manifest, at and beyond what it may be: a value, or one line."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.costs import formula_costs, random_tables
from neuroshard.core.errors import InvalidInput
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import decode_json
from neuroshard.costmodel.bundle import load_cost_model, save_cost_model
from neuroshard.files.costs import CostWriter, read_costs
from neuroshard.pretrain.run import pretrain

HOSTILE = (10**400, 10**25, 2**62, 10**6, -1, 0, 1, 60_000, 1e308, 1e-320)
Place = tuple[str | int, ...]


def numbers(data: Any, place: Place = ()) -> Iterator[Place]:
    """Where JSON holds a number: of a list, its first."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else list(enumerate(data))[:1]:
            yield from numbers(value, (*place, key))
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield place


def spoiled(data: Any) -> Iterator[tuple[str, Any]]:
    """The data with each number replaced by each hostile one, all of a list at once."""
    for place in numbers(data):
        for value in HOSTILE:
            copied = copy.deepcopy(data)
            inner = copied
            for key in place[:-1]:
                inner = inner[key]
            for key in range(len(inner)) if isinstance(inner, list) else place[-1:]:
                inner[key] = value
            yield f"{place} {value:.3g}" if isinstance(value, float) else f"{place} {str(value)[:30]}", copied


@pytest.mark.slow
def test_a_plan_with_any_number_in_it_is_used_or_refused_in_one_line(neuroshard, tmp_path):
    plan, hostile = tmp_path / "plan.json", tmp_path / "hostile.json"
    searched = (
        "--model analytic:h100 --batch-size 512 --devices 4 --domain 2 --local-world-size 2 --network 43GB/s,0.06ms"
    )
    tables = [{"name": f"t{n}", "rows": 1000, "dim": 16, "pooling_factor": 2} for n in range(3)]
    (tmp_path / "tables.json").write_text(json.dumps({"tables": tables}))
    done = neuroshard("search", tmp_path / "tables.json", *searched.split(), "--memory", "1GiB", "-o", plan)
    assert done.returncode == 0, done.stderr
    data = json.loads(plan.read_text())
    commands = (
        ["show", hostile],
        ["diff", plan, hostile],
        ["price", hostile, "--model", "analytic:h100"],
        ["deploy", hostile, "--store", tmp_path / "store", "--name", "m"],
    )
    refused = 0
    for what, number in spoiled(data):
        with suppress(InvalidInput):
            number["task_digest"] = ShardingTask.parse(number["task"], "task").digest()
        hostile.write_text(json.dumps(number))
        for command in commands:
            done = neuroshard(*command)
            assert done.returncode in (0, 1, 2, 3, 4), (what, command)
            if done.returncode == 1 and done.stderr.startswith("error: "):
                refused += 1
                assert done.stderr.count("\n") == 1, (what, command, done.stderr)
                break  # so do the others, which read it alike
    assert refused > 100


def refusal(read: Callable[[Path], object], folder: Path) -> str:
    """What reading the folder is refused with; empty if it is not."""
    try:
        read(folder)
    except InvalidInput as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_manifest_with_any_number_in_it_is_read_or_refused_in_one_line(tmp_path):
    costs = formula_costs(random_tables(20), compute_cases=12, collective_cases=4, devices=(2,))
    with CostWriter(tmp_path / "costs", costs.bench, costs.tables, (2,)) as writer:
        writer.add(*costs.compute[0])
    save_cost_model(tmp_path / "model", pretrain(costs, epochs=1))
    refused = 0
    for path, read in (
        (tmp_path / "costs" / "costs.json", read_costs),
        (tmp_path / "model" / "model.json", load_cost_model),
    ):
        whole = path.read_bytes()
        for what, data in spoiled(json.loads(whole)):
            path.write_text(json.dumps(data))
            said = refusal(read, path.parent)
            refused += bool(said)
            assert "\n" not in said, what
        path.write_bytes(whole)
    assert refused > 100


def test_a_number_of_ranks_that_keeps_pretrain_busy_for_ever_is_refused_where_it_is_read(tmp_path: Path) -> None:
    costs = formula_costs(random_tables(20), compute_cases=12, collective_cases=4, devices=(2,))
    with CostWriter(tmp_path, costs.bench, costs.tables, (2,)) as writer:
        writer.add(*costs.compute[0])
    path = tmp_path / "costs.json"
    data = json.loads(path.read_text())
    for hostile in (10**6, 10**400, -1):
        path.write_text(json.dumps({**data, "device_counts": [hostile]}))
        with pytest.raises(InvalidInput, match=r"costs\.json: "):
            read_costs(tmp_path)


def test_a_whole_number_of_hundreds_of_digits_is_refused_and_digits_of_texts_and_fractions_are_not() -> None:
    for text in ("9" * 150, '"' + "9" * 400 + '"', "0." + "3" * 300):
        decode_json(b'{"a": %s}' % text.encode(), "x.json")
    for text in ("9" * 151, "-" + "9" * 150, "1" + "0" * 5000):
        with pytest.raises(InvalidInput, match=f"^x.json: .*{len(text)} digits"):
            decode_json(b'{"a": %s}' % text.encode(), "x.json")
