"""What a run is given: a parameters file, a list of models, settings; and what they must not be."""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import yaml

from helpers.refusals import refused
from neuroshard.cli.cluster import RunOptions
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.orders.nightly import ModelSpec, read_specs
from neuroshard.orders.options import settings_of
from neuroshard.submit.package import PACKAGE, RunSettings, known_parameters, packaged, read_parameters

ROOT = Path(__file__).parents[2]


def written(folder: Path, text: str, name: str = "models.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.slow
def test_the_package_carries_the_compiled_pipeline(tmp_path: Path) -> None:
    assert PACKAGE.read_bytes() == (ROOT / "pipelines" / "neuroshard.yaml").read_bytes()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = (
        tmp_path / "source"
    )  # setuptools would leave a `build` folder in the tree, which other suites may be building too
    shutil.copytree(
        ROOT / "components", source / "components", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([*command, "-w", tmp_path, source], check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("neuroshard/submit/neuroshard.yaml") == PACKAGE.read_bytes()


def test_settings_go_over_models_and_those_over_the_file(parameters: Path, models: Path) -> None:
    given = read_parameters(parameters, models, ["batch_size=1024", "measure_cpus=4", "single_writer=true"])
    assert json.loads(given.pop("models"))[1]["name"] == "feed"
    assert given == {"store": "s3://bucket/p", "batch_size": 1024, "measure_cpus": "4", "single_writer": True}


def test_nothing_given_is_every_default() -> None:
    assert read_parameters(None, None) == {}
    assert known_parameters()["store"] == "STRING"


def test_a_run_with_other_settings_has_another_digest() -> None:
    different = [
        RunSettings({}),
        RunSettings({"pods": 1}),
        RunSettings({"pods": 1}, "runner"),
        RunSettings({"pods": 1}, "runner", 60.0),
        RunSettings({"pods": 1}, "runner", 60.0, 4),
    ]
    assert len({one.digest() for one in different}) == 5
    assert RunSettings({"pods": 1, "seed": 2}).digest() == RunSettings({"seed": 2, "pods": 1}).digest()


def loop_limits(path: Path) -> list[int | None]:
    """The limit of every loop in a package."""
    spec = next(yaml.safe_load_all(path.read_text()))
    pipelines = [one["dag"] for one in (spec["root"], *spec["components"].values()) if "dag" in one]
    loops = [task for dag in pipelines for task in dag["tasks"].values() if "parameterIterator" in task]
    return [task.get("iteratorPolicy", {}).get("parallelismLimit") for task in loops]


@pytest.mark.slow
def test_the_parallelism_limits_every_loop_of_the_package_that_is_uploaded() -> None:
    with packaged(RunSettings({})) as path:
        unlimited = loop_limits(path)
    with packaged(RunSettings({}, parallelism=3)) as path:
        limited = loop_limits(path)
    assert set(unlimited) == {None}
    assert limited == [3] * len(unlimited)


def test_the_limit_that_kfp_compiles_is_the_one_that_is_set() -> None:
    from kfp import compiler, dsl

    @dsl.component(base_image="python:3.11")
    def step(name: str) -> None: ...

    @dsl.pipeline
    def loop() -> None:
        with dsl.ParallelFor(["a", "b"], parallelism=3) as name:
            step(name=name)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loop.yaml")
        compiler.Compiler().compile(loop, str(path))
        assert loop_limits(path) == [3]


def test_the_parallelism_of_the_command_goes_over_that_of_the_file(tmp_path: Path) -> None:
    given = {"endpoint": "http://x", "parameters": written(tmp_path, "store: s3://bucket/p\nparallelism: 4\n")}
    for asked, limit in (
        ({}, 4),
        ({"parallelism": 2}, 2),
        ({"parallelism": 0}, 0),
        ({"settings": ["parallelism=7"]}, 7),
    ):
        _, settings = settings_of(RunOptions, {**given, **asked}).read()
        assert (settings.parallelism, settings.parameters) == (limit, {"store": "s3://bucket/p"})
    assert settings_of(RunOptions, {"endpoint": "http://x"}).read()[1].parallelism == 0
    for wrong in (-1, 10_001):
        with refused(UsageError, "--parallelism", 10000, wrong):
            settings_of(RunOptions, {**given, "parallelism": wrong})


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("{", ["YAML"]),
        ("- a", ["not ['a']"]),
        ("", ["not None"]),
        ("batchsize: 8", ["'batchsize'", "algorithm"]),
        ("2: 8", ["2 is no parameter"]),
        ("measure_cpus: 8", ["measure_cpus", "not 8", "quote"]),
        ("batch_size: '8'", ["batch_size", "not '8'"]),
        ("batch_size: true", ["batch_size", "not True"]),
        ("single_writer: 1", ["single_writer", "not 1"]),
        ("node_selector: {a: b}", ["node_selector", "not {'a': 'b'}"]),
        ("store: 2026-02-31", ["YAML", "day is out of range"]),
        ("models: '[]'", ["models", "at least one model"]),
        ("a: &a [*a]", ["is no parameter"]),
        ("store: x\nbackend: cpu\nstore: y", ["'store'", "twice"]),
        ("min_gain: .inf", ["min_gain", "not inf"]),
        ("parallelism: 10001", ["parallelism", "not 10001"]),
        ("models: [a]", ["models", "--models", "not ['a']"]),
        ("pods: 2\n---\nbatch_size: 8", ["2 YAML documents"]),
    ],
)
def test_parameters_that_cannot_be_are_one_line(tmp_path: Path, text: str, facts: list[str]) -> None:
    path = written(tmp_path, text, "parameters.yaml")
    with refused(InvalidInput, *facts) as caught:
        read_parameters(path, None)
    assert str(caught.value).startswith(str(path))


# ten lines that say a thousand million items
LAUGHS = "- &a0 [x]\n" + "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))

OF_A = "[{name: a, tables: t, devices: 8, memory: 1GiB, constraints: "
SIZE = "[{name: a, tables: t, devices: 8, memory: 1GiB, hardware: h200, size: "


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ["models", "at least one model"]),
        ("[]", ["models", "at least one model"]),
        ("a: 1", ["models", "JSON list"]),
        ("[1]", ["models[0]"]),
        ("[{name: a, tables: t, devices: 8, memory: 1GiB}]\n---\n[]", ["2 YAML documents"]),
        ("[{tables: t}]", ["models[0]", "name", "missing"]),
        (
            "[{tables: t}, {name: b, tables: t, devices: 8, memory: 80}]",
            ["models[0]", "missing", "models[1]", "not 80"],
        ),
        ("[{name: a, tables: t, devices: 8, memory: 80}]", ["models[0]", "memory", "not 80"]),
        ("[{name: a, tables: t, devices: 8, memory: lots}]", ["'lots'"]),
        ("[{name: a, tables: t, devices: 8, memory: 1GiB, move_budget: lots}]", ["'lots'"]),
        ("[{name: a, tables: t, devices: 8, memory: 1GiB, constraints: {pins: 3}}]", ["model 'a'", "pins"]),
        (
            "[{name: a, tables: t, devices: 8, memory: 1GiB, constraints: {tables: [{match: b, pin: 0}]}}]",
            ["model 'a'", "tables[0]", "pin", "devices"],
        ),
        ("[{name: a, tables: t, devices: '8', memory: 1GiB}]", ["models[0]", "devices", "not '8'"]),
        ("[{name: a, tables: t, devices: 8, memory: 1GiB, hardwere: h200}]", ["model 'a'", "hardwere"]),
        ("[{name: a, tables: t, devices: 8, memory: 1GiB, constraints: {min_dim: 3}}]", ["model 'a'", "min_dim"]),
        ("[{name: _measuring, tables: t, devices: 8, memory: 1GiB}]", ["models[0]", "name"]),
        ("[{name: on, tables: t, devices: 8, memory: 1GiB}]", ["models[0]", "name", "not True"]),
        ("- &a {name: a, tables: t, devices: 1, memory: 1GiB}\n- *a", ["model 'a'", "2 times"]),
        ("[{name: a, name: b, tables: t, devices: 1, memory: 1GiB}]", ["'name'", "twice"]),
        (LAUGHS, ["1,048,576 characters"]),
        ("[{name: a, tables: 2026-01-01, devices: 8, memory: 1GiB}]", ["date", "quote"]),
        ("[{name: a, tables: t, devices: .inf, memory: 1GiB}]", ["inf"]),
        ("\x00", ["YAML"]),
        ("[{name: a, tables: t, devices: 1:30, memory: 1GiB}]", ["'1:30'", "base 60", "quote"]),
        ("[{name: a, tables: t, devices: 010, memory: 1GiB}]", ["'010'", "base 8"]),
        (OF_A + "{tables: [{match: 'u_*', devices: [0, 9]}]}}]", ["model 'a'", "'u_*'", "device 9", "8"]),
        (OF_A + "{together: [[b, c]], tables: [{match: c, devices: [1]}, {match: b, devices: [0]}]}}]", ["'b'", "'c'"]),
        (OF_A + "{row_wise: true, max_shards: 2}}]", ["model 'a'", "row-wise", "2 shards"]),
        (OF_A + "{tables: [{match: b, split: false}, {match: b, row_wise: true}]}}]", ["model 'a'", "'b'"]),
        (OF_A + "{reserve: 2GiB}}]", ["model 'a'", "reserve"]),
        (OF_A + "{row_wise: 'no'}}]", ["model 'a'", "row_wise", "true or false", "'no'"]),
        (OF_A + "{}, keep_optimizer_state: 1}]", ["models[0]", "keep_optimizer_state", "true or false", "1"]),
        (OF_A + "{}, domain: 3}]", ["8", "3"]),
        (SIZE + "yes}]", ["models[0]", "size", "True"]),
        (SIZE + "{}}]", ["models[0]", "size.devices", "missing"]),
        (SIZE + "{devices: [true]}}]", ["models[0]", "size.devices", "True"]),
        (SIZE + "{devices: many}}]", ["size of model 'a'", "devices 'many'"]),
        (SIZE + "{devices: 8, prise: 1/h}}]", ["size of model 'a'", "prise", "price"]),
        (SIZE + "{devices: 8, price: cheap}}]", ["size of model 'a'", "'cheap'", "2.40/h"]),
        (SIZE + "{devices: 8, price: 2.40}}]", ["models[0]", "size.price", "2.4"]),
        (SIZE + "{devices: 8, price: [1EUR/h, $2/h]}}]", ["size of model 'a'", "given twice"]),
        (SIZE + "{devices: 8, memory: b200=1GiB}}]", ["size of model 'a'", "'b200'", "h200"]),
        (SIZE + "{devices: 8, time_budget: soon}}]", ["size of model 'a'", "'soon'"]),
        (SIZE + "{devices: 8, batch_per_device: 0}}]", ["models[0]", "size.batch_per_device", "0"]),
        (SIZE + "{devices: 8, models: 'analytic:h999'}}]", ["size of model 'a'", "unknown analytic model 'h999'"]),
        (SIZE + "{devices: 8, models: 'given:costs.json'}}]", ["size of model 'a'", "'given:costs.json'", "h100"]),
        (SIZE + "{devices: 8, models: 's3://b#h200'}}]", ["size of model 'a'", "'s3://b#h200'", "h200"]),
        (SIZE + "{devices: 6, domain: 4}}]", ["size of model 'a'", "no size is left", "6 devices"]),
        (SIZE + "{devices: 8, network: 400Gb/s}}]", ["size of model 'a'", "network", "domain"]),
        (SIZE.replace("hardware: h200, ", "") + "{devices: 8}}]", ["size of model 'a'", "models:"]),
        (
            OF_A.replace("tables: t", "tables: mlperf-dlrm-dcnv2") + "{tables: [{match: user, devices: [1]}]}}]",
            ["'user'"],
        ),
    ],
)
def test_models_that_cannot_be_are_one_line(tmp_path: Path, text: str, facts: list[str]) -> None:
    path = written(tmp_path, text)
    with refused(NeuroshardError, *facts) as caught:
        read_parameters(None, path)
    assert str(caught.value).startswith(str(path))


def test_a_parameter_that_models_are_checked_by_is_blamed_itself(tmp_path: Path, models: Path) -> None:
    with refused(InvalidInput, "parameters.yaml", "batch_size", "not 0") as caught:
        read_parameters(written(tmp_path, "batch_size: 0", "parameters.yaml"), models)
    assert "models.yaml" not in str(caught.value)


def test_models_that_are_set_are_reported_as_such(models: Path) -> None:
    with refused(InvalidInput, "models[0]", "memory") as caught:
        read_parameters(None, models, ['models=[{"name": "a", "tables": "t", "devices": 8, "memory": 80}]'])
    assert str(caught.value).startswith("--set models: ")


def test_a_file_that_is_not_there_or_no_text_is_one_line(tmp_path: Path) -> None:
    with refused(NeuroshardError, tmp_path / "none.yaml"):
        read_parameters(tmp_path / "none.yaml", None)
    (tmp_path / "latin.yaml").write_bytes(b"store: \xe9\xff")
    with refused(InvalidInput, tmp_path / "latin.yaml", "UTF-8"):
        read_parameters(tmp_path / "latin.yaml", None)
    (tmp_path / "huge.yaml").write_text("store: " + "x" * 2**20)
    with refused(InvalidInput, tmp_path / "huge.yaml", "1,048,576"):
        read_parameters(tmp_path / "huge.yaml", None)


@pytest.mark.parametrize(
    ("setting", "kind", "fact"),
    [("pods", UsageError, "NAME=VALUE"), ("pods=", InvalidInput, "pods"), ("x=1", InvalidInput, "'x'")],
)
def test_settings_that_cannot_be_are_reported(setting: str, kind: type[NeuroshardError], fact: str) -> None:
    with refused(kind, fact):
        read_parameters(None, None, [setting])


def test_the_sizes_of_a_model_may_be_asked_for_by_text_numbers_and_lists(tmp_path: Path) -> None:
    asked = "{devices: [8, 16-64], models: [h200, analytic:b200], price: [h200=2/h, analytic:b200=3/h], domain: 8}"
    path = written(tmp_path, f"{SIZE}{asked}}}]")
    (spec,) = read_specs(read_parameters(None, path)["models"])
    order = spec.sizes(65536, "s3://b/p")
    assert order is not None
    assert order.devices == (8, 16, 32, 64)
    assert [(kind.name, kind.price, kind.domain) for kind in order.kinds] == [
        ("s3://b/p#h200", 2.0, 8),
        ("analytic:b200", 3.0, 8),
    ]
    assert ModelSpec.parse(json.loads(spec.canonical_json()), "a survey") == spec


def test_models_that_no_step_could_be_given_are_refused_before_they_are_submitted(tmp_path: Path) -> None:
    rules = [{"match": f"table_{number}", "min_dim": 16} for number in range(300)]
    model = {"tables": "s3://bucket/t.json", "devices": 4, "memory": "80GiB", "constraints": {"tables": rules}}
    path = tmp_path / "models.yaml"
    path.write_text(json.dumps([{"name": f"model-{number}", **model} for number in range(9)]))
    with refused(InvalidInput, "9 models", "98,304"):
        read_parameters(None, path)
