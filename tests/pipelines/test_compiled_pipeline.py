"""pipelines/neuroshard.yaml: current, and free of the traps that a real Kubeflow Pipelines has."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuroshard import __version__

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "pipelines" / "neuroshard.yaml").read_text()
SPEC, PLATFORM = yaml.safe_load_all(TEXT)
TASKS: dict[str, Any] = SPEC["root"]["dag"]["tasks"]
PARAMETERS: dict[str, Any] = SPEC["root"]["inputDefinitions"]["parameters"]
PLACEHOLDER = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")


def executor(task: str) -> Any:
    component = SPEC["components"][TASKS[task]["componentRef"]["name"]]
    return SPEC["deploymentSpec"]["executors"][component["executorLabel"]]["container"]


def values(tree: Any, key: str) -> Iterator[Any]:
    """Everything that stands under `key`, at any depth."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        for branch in tree:
            yield from values(branch, key)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_it_is_what_its_source_compiles_to_byte_for_byte(hash_seed: str) -> None:
    check = subprocess.run(
        [sys.executable, "-m", "pipelines.compile", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_who_feeds_whom() -> None:
    feeds = {
        name: {source["taskOutputArtifact"]["producerTask"] for source in task["inputs"].get("artifacts", {}).values()}
        for name, task in TASKS.items()
    }
    assert feeds == {
        "load": set(),
        "augment": {"load"},
        "measure": {"augment"},
        "pretrain": {"measure"},
        "search": {"load", "pretrain"},
        "deploy": {"load", "pretrain", "search"},
    }


@pytest.mark.parametrize("task", TASKS)
def test_every_input_of_a_task_resolves(task: str) -> None:
    inputs = TASKS[task]["inputs"]
    component = SPEC["components"][TASKS[task]["componentRef"]["name"]]
    declared = component["inputDefinitions"]

    for source in inputs.get("artifacts", {}).values():
        producer = SPEC["components"][TASKS[source["taskOutputArtifact"]["producerTask"]]["componentRef"]["name"]]
        assert source["taskOutputArtifact"]["outputArtifactKey"] in producer["outputDefinitions"]["artifacts"]
    assert declared.get("artifacts", {}).keys() == inputs.get("artifacts", {}).keys()
    assert declared["parameters"].keys() <= inputs["parameters"].keys()
    assert set(values(inputs, "componentInputParameter")) <= PARAMETERS.keys()
    used = set(PLACEHOLDER.findall(str(inputs))) | set(PLACEHOLDER.findall(str(executor(task))))
    assert used <= inputs["parameters"].keys()


def test_every_parameter_has_a_default_a_description_and_a_use() -> None:
    for name, parameter in PARAMETERS.items():
        assert "defaultValue" in parameter, name
        assert parameter["description"], name
    used = set(values(TASKS, "componentInputParameter")) | set(values(PLATFORM, "componentInputParameter"))
    assert used == PARAMETERS.keys()


def test_the_gpu_count_is_text() -> None:
    """An int is dropped without a word, and the pod gets no GPU."""
    count = executor("measure")["resources"]["accelerator"]["resourceCount"]
    [name] = PLACEHOLDER.findall(count)
    assert PARAMETERS[name.removeprefix("pipelinechannel--")]["parameterType"] == "STRING"


def test_images_are_our_own_of_this_version() -> None:
    """The cache key holds the image's name, not its contents."""
    images = {PLACEHOLDER.fullmatch(executor(task)["image"])[1] for task in TASKS}  # type: ignore[index]
    defaults = {PARAMETERS[name.removeprefix("pipelinechannel--")]["defaultValue"] for name in images}
    assert defaults == {f"neuroshard-cpu:{__version__}", f"neuroshard-gpu:{__version__}"}


def test_nothing_is_installed_at_run_time() -> None:
    assert "pip install" not in TEXT


def test_secrets_come_from_a_secret() -> None:
    assert list(values(SPEC, "env")) == []
    for secret in values(PLATFORM, "secretAsEnv"):
        assert [entry["secretNameParameter"] for entry in secret] == [{"componentInputParameter": "store_secret"}]


def test_what_depends_on_the_world_is_not_cached() -> None:
    cached = {name for name, task in TASKS.items() if task["cachingOptions"].get("enableCache")}
    assert cached == {"augment", "pretrain", "search"}


def test_only_measuring_asks_for_gpus_and_shared_memory() -> None:
    with_gpus = {name for name in TASKS if "accelerator" in executor(name)["resources"]}
    executors = PLATFORM["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert with_gpus == {"measure"}
    assert [name for name, config in executors.items() if "emptyDirMounts" in config] == ["exec-measure"]
