"""Every parameter of the compiled pipeline is checked before anything is measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.refusals import names
from neuroshard.core.cost import BACKENDS
from neuroshard.core.errors import UsageError
from neuroshard.measure.backends import BACKENDS as MEASURED
from neuroshard.orders.options import ALGORITHMS, LOCAL_SEARCH, PUBLISHED
from neuroshard.orders.parameters import CHECKS, check_parameters, faults, quantity
from neuroshard.search.proposers.baselines import KEYS

YAML = Path(__file__).parents[2] / "pipelines" / "neuroshard.yaml"
PARAMETERS = next(yaml.safe_load_all(YAML.read_text()))["root"]["inputDefinitions"]["parameters"]


def model(**fields: Any) -> str:
    return json.dumps([{"name": "ads", "tables": "mlperf-dlrm-dcnv2", "devices": 4, "memory": "80GiB", **fields}])


# some of what each may not be
BAD: dict[str, list[object]] = {
    "models": [
        *("", "{}", "[]", "[1]", f"{model()[:-1]}, {model()[1:]}"),
        *(model(name="hardware"), model(name="_measuring"), model(devices=0), model(memory="x"), model(tables=" ")),
    ],
    "store": ["", 3, "gs:bucket", "s3://b//x"],
    "backend": ["", "tpu", "CPU"],
    "batch_size": [0, -1, 1.5, 2**40, True],
    "compute_cases": [-1, 0, 0.5],
    "collective_cases": [-1, 10**12],
    "measure_budget": ["", "90", "garbage", "0", "-3m", "3w"],
    "max_age": ["soon", "0"],
    "max_error": [-1, -0.01, float("inf"), float("nan")],
    "min_gain": [1, 1.5, float("nan")],
    "memory_margin": [1.5, 1, -0.1, float("nan")],
    "algorithm": ["nope", "", "Random"],
    "seed": [-1, 0.5, 2**70],
    "single_writer": ["yes", 1],
    "nodes": [3, "a\nb"],
    "node_selector": ["", "[]", '{"a": 1}', "{", '{"a":' * 100_000],
    "tolerations": [
        "{}",
        "[1]",
        '[{"operator": "Sometimes", "key": "a"}]',
        "[{}]",
        '[{"key": "a", "effect": "Never"}]',
        "[" * 100_000,
    ],
    "pods": [0, -1, 2.5],
    "training_runtime": ["Not A Name", "a" * 60, "-a", "a-"],
    "measure_cpus": ["", "many", "-1", "16 "],
    "measure_memory": ["", "128GiB", "lots", "128"],
    "measure_image": ["", "two words", "-x"],
    "step_cpus": ["", "two"],
    "step_memory": ["8 Gi", "", "8192"],
    "step_image": ["", "a\nb"],
    "store_secret": ["Not A Secret", "a_b"],
}


def test_every_parameter_of_the_compiled_pipeline_has_a_check_that_its_default_passes() -> None:
    assert CHECKS.keys() == BAD.keys() == PARAMETERS.keys()
    assert faults({name: parameter["defaultValue"] for name, parameter in PARAMETERS.items()}) == ()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_one_line_with_the_name(name: str, value: object) -> None:
    [line] = faults({name: value})
    assert line.startswith(name)
    assert "\n" not in line
    assert "Traceback" not in line


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        check_parameters({"memory_margin": 1.5, "seed": 3, "algorithm": "nope", "colour": "red"})
    lines = faults({"memory_margin": 1.5, "seed": 3, "algorithm": "nope", "colour": "red"})
    assert [line.split(maxsplit=1)[0] for line in lines] == ["memory_margin:", "algorithm:", "'colour'"]
    assert str(caught.value) == "; ".join(lines)
    assert "memory_margin: must be a share of at least 0 and below 1 (0.1 is 10 %), not 1.5" in str(caught.value)


def test_the_model_and_the_key_of_a_bad_value_are_named() -> None:
    for key in ("memory", "host_memory", "move_budget"):
        [line] = faults({"models": model(**{key: "80G"})})
        assert all(names(line.replace("--", ""), fact) for fact in ("model 'ads'", key, "'80G'", "80GB")), line


@pytest.mark.parametrize("kept", [{"move_budget": "0"}, {"keep_optimizer_state": True}])
def test_what_starts_from_the_live_plan_needs_local_search(kept: dict[str, Any]) -> None:
    """Else all nights but the first would end without a plan, after all was measured."""
    assert faults({"models": model(**kept), "algorithm": "local-search"}) == faults({"models": model(**kept)}) == ()
    [line] = faults({"models": model(**kept), "algorithm": "size"})
    assert all(names(line, fact) for fact in ("algorithm", "size", *kept, "local-search"))


def test_the_names_are_those_of_the_rooms() -> None:
    assert set(BACKENDS) == set(MEASURED)
    assert set(ALGORITHMS) == {LOCAL_SEARCH, PUBLISHED, *KEYS}


def test_what_is_right_passes() -> None:
    check_parameters(
        {
            "models": model(memory="80GiB,80GiB,40GiB,40GiB"),
            "store": "/a folder/with: colon",
            "max_error": 0,
            "min_gain": -1.0,
            "batch_size": 512.0,  # KFP passes numbers as doubles
            "measure_memory": "1.5e3",
            "measure_image": "localhost:5000/a/b@sha256:0123",
        }
    )


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        *(
            ("16", 16),
            ("500m", 0),
            ("2500m", 2),
            ("128Gi", 128 * 2**30),
            ("1.5G", 15 * 10**8),
            (".5Ki", 512),
            ("8.", 8),
        ),
        *(("7k", 7000), ("3E", 3 * 10**18), ("3Ei", 3 * 2**60), ("1e9", 10**9), ("1E9", 10**9), ("1e999999999", 2**62)),
    ],
)
def test_an_amount_is_what_kubernetes_takes_it_for(text: str, amount: int) -> None:
    CHECKS["measure_cpus"]("measure_cpus", text)
    assert quantity(text) == amount
