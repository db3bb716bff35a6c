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
from neuroshard.store.s3 import KUBEFLOW_KEYS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "pipelines" / "neuroshard.yaml").read_text()
SPEC, PLATFORM = yaml.safe_load_all(TEXT)
COMPONENTS: dict[str, Any] = SPEC["components"]
EXECUTORS: dict[str, Any] = SPEC["deploymentSpec"]["executors"]
CONFIGS: dict[str, Any] = PLATFORM["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
PARAMETERS: dict[str, Any] = SPEC["root"]["inputDefinitions"]["parameters"]
PLACEHOLDER = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")
DAGS: dict[str, Any] = {"root": SPEC["root"], **{name: c for name, c in COMPONENTS.items() if "dag" in c}}
TASKS = [(dag, task) for dag, body in DAGS.items() for task in body["dag"]["tasks"]]
STEPS = {  # the dag and the name of the task of each, by its executor: `plan` is in two places
    COMPONENTS[body["componentRef"]["name"]]["executorLabel"].removeprefix("exec-"): (dag, task)
    for dag, holder in DAGS.items()
    for task, body in holder["dag"]["tasks"].items()
    if "executorLabel" in COMPONENTS[body["componentRef"]["name"]]
}


def task_of(step: str) -> Any:
    dag, task = STEPS[step]
    return DAGS[dag]["dag"]["tasks"][task]


def container(step: str) -> Any:
    return EXECUTORS[f"exec-{step}"]["container"]


def inputs_of(dag: str) -> set[str]:
    """The parameters that a DAG knows."""
    return set(DAGS[dag].get("inputDefinitions", {}).get("parameters", {}))


def values(tree: Any, key: str) -> Iterator[Any]:
    """Everything that stands under `key`, at any depth."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        for branch in tree:
            yield from values(branch, key)


@pytest.mark.slow
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


def test_who_comes_after_whom() -> None:
    after = [(task, set(DAGS[dag]["dag"]["tasks"][task].get("dependentTasks", ()))) for dag, task in TASKS]
    assert {task: before for task, before in after if before} == {
        "night": {"survey"},
        "kind": {"augment"},
        "pretrain": {"for-loop-1"},  # the shares of a kind
        "for-loop-2": {"pretrain"},  # models that wait for a kind
    }


def test_a_driver_that_is_made_again_is_looked_up_by_none_but_the_one_right_after_it() -> None:
    """KFP 2.17 looks an output up by the names of all that has begun in a task's pipeline, and in those inside of it, and fails
    where a name is there twice: so nothing but the producer, a step, may have begun when a task looks up."""
    looking = {
        (dag, task): set(values(DAGS[dag]["dag"]["tasks"][task], "producerTask"))
        for dag, task in TASKS
        if list(values(DAGS[dag]["dag"]["tasks"][task], "producerTask"))
    }
    assert {task: producers for (_, task), producers in looking.items()} == {"night": {"survey"}, "kind": {"augment"}}
    for (dag, task), producers in looking.items():
        assert DAGS[dag]["dag"]["tasks"].keys() == {task, *producers}
        assert producers <= STEPS.keys()
    assert list(values([DAGS[dag]["dag"].get("outputs", {}) for dag in DAGS], "parameters")) == []
    assert list(values(PLATFORM, "taskOutputParameter")) == []  # a pod's fields would be looked up too


def resolves(source: Any, dag: str) -> bool:
    """Does a parameter's source exist where it is asked for?"""
    tasks = DAGS[dag]["dag"]["tasks"]
    if "componentInputParameter" in source:
        return source["componentInputParameter"] in inputs_of(dag)
    if "taskOutputParameter" in source:
        output = source["taskOutputParameter"]
        producer = COMPONENTS[tasks[output["producerTask"]]["componentRef"]["name"]]
        return output["outputParameterKey"] in producer["outputDefinitions"]["parameters"]
    return "constant" in source["runtimeValue"]


@pytest.mark.parametrize(("dag", "name"), TASKS)
def test_every_input_of_a_task_resolves(dag: str, name: str) -> None:
    task = DAGS[dag]["dag"]["tasks"][name]
    component = COMPONENTS[task["componentRef"]["name"]]
    declared, inputs = component.get("inputDefinitions", {}), task.get("inputs", {})

    for source in inputs.get("artifacts", {}).values():
        producer = DAGS[dag]["dag"]["tasks"][source["taskOutputArtifact"]["producerTask"]]
        outputs = COMPONENTS[producer["componentRef"]["name"]]["outputDefinitions"]["artifacts"]
        assert source["taskOutputArtifact"]["outputArtifactKey"] in outputs
    assert declared.get("artifacts", {}).keys() == inputs.get("artifacts", {}).keys()
    given = inputs.get("parameters", {})
    assert all(resolves(source, dag) for source in given.values()), given
    looped = {task["parameterIterator"]["itemInput"]} if "parameterIterator" in task else set()
    assert declared.get("parameters", {}).keys() <= given.keys() | looped
    used = set(PLACEHOLDER.findall(str(inputs)))
    if "executorLabel" in component:
        used |= set(PLACEHOLDER.findall(str(EXECUTORS[component["executorLabel"]])))
    assert used <= given.keys()


@pytest.mark.parametrize("step", STEPS)
def test_what_kubernetes_gets_resolves_where_the_step_runs(step: str) -> None:
    dag, _ = STEPS[step]
    sources = [
        {key: found}
        for key in ("componentInputParameter", "taskOutputParameter")
        for found in values(CONFIGS.get(f"exec-{step}", {}), key)
    ]
    assert all(resolves(source, dag) for source in sources), sources
    producers = {source["taskOutputParameter"]["producerTask"] for source in sources if "taskOutputParameter" in source}
    assert producers <= set(task_of(step).get("dependentTasks", ()))


def test_nothing_is_conditional_as_what_comes_after_a_skipped_step_is_left_out() -> None:
    assert list(values(SPEC, "triggerPolicy")) == []


def test_every_parameter_has_a_default_a_description_and_a_use() -> None:
    for name, parameter in PARAMETERS.items():
        assert "defaultValue" in parameter, name
        assert parameter["description"], name
        assert parameter["parameterType"] not in ("STRUCT", "LIST"), f"{name}: numbers in it would become floats"
    used = set(values(SPEC["root"]["dag"]["tasks"], "componentInputParameter"))
    used |= {name for name in values(CONFIGS, "componentInputParameter") if name in PARAMETERS}
    assert used == PARAMETERS.keys()


def test_the_gpu_count_is_text() -> None:
    """An int is dropped without a word, and the pod gets no GPU."""
    count = container("measure")["resources"]["accelerator"]["resourceCount"]
    [name] = PLACEHOLDER.findall(count)
    assert name == "pipelinechannel--gpus"
    assert COMPONENTS["comp-augment"]["outputDefinitions"]["parameters"]["gpus"]["parameterType"] == "STRING"


def test_images_are_our_own_of_this_version() -> None:
    """The cache key holds the image's name, not its contents."""
    images = {step: PLACEHOLDER.fullmatch(container(step)["image"])[1] for step in STEPS}
    assert {step: name.removeprefix("pipelinechannel--") for step, name in images.items()} == {
        step: "image" if step == "measure" else "step_image"  # as augment says, by whether a TrainJob measures
        for step in STEPS
    }
    assert PARAMETERS["step_image"]["defaultValue"] == f"neuroshard-cpu:{__version__}"
    assert PARAMETERS["measure_image"]["defaultValue"] == f"neuroshard-gpu:{__version__}"


def test_nothing_is_installed_at_run_time() -> None:
    assert "pip install" not in TEXT


def test_secrets_come_from_the_secret_of_the_store_and_that_of_kubeflows_own_which_may_both_be_absent() -> None:
    assert list(values(SPEC, "env")) == []
    for secret in values(PLATFORM, "secretAsEnv"):
        store, kubeflows = (entry["secretNameParameter"] for entry in secret)
        assert store["componentInputParameter"].removeprefix("pipelinechannel--") == "store_secret"
        assert kubeflows == {"runtimeValue": {"constant": "mlpipeline-minio-artifact"}}
        assert [entry["optional"] for entry in secret] == [True, True]
        names = [{one["envVar"] for one in entry["keyToEnv"]} for entry in secret]
        assert names[0].isdisjoint(names[1])  # the store's own keys win, and an account's are not hidden
        assert names[1] == set(KUBEFLOW_KEYS)


def test_every_step_has_the_secret_of_the_store_where_steps_meet() -> None:
    assert {step for step in STEPS if "secretAsEnv" in CONFIGS[f"exec-{step}"]} == STEPS.keys()


def test_nothing_is_cached_as_every_step_reads_the_world() -> None:
    """The fleet, the store, the files behind the models' tables: what covers a kind is read from the store, not by a cache."""
    assert [step for step in STEPS if task_of(step).get("cachingOptions", {}).get("enableCache")] == []


def test_only_measuring_asks_for_gpus_nodes_and_shared_memory() -> None:
    assert {step for step in STEPS if "accelerator" in container(step).get("resources", {})} == {"measure"}
    for wish in ("emptyDirMounts", "nodeSelector", "tolerations"):
        assert [name for name, config in CONFIGS.items() if wish in config] == ["exec-measure"]


def test_the_survey_gets_every_parameter_to_check() -> None:
    assert task_of("survey")["inputs"]["parameters"].keys() >= PARAMETERS.keys()


def test_the_guide_knows_the_parameters_of_the_pipeline() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    table = guide.partition("| | parameter | default | what it does |")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.split("|")] for row in table.splitlines() if "`" in row]
    defaults = {name: default for _, _, name, default, *_ in rows}
    assert defaults.keys() == PARAMETERS.keys()
    for name, default in defaults.items():
        value = PARAMETERS[name]["defaultValue"]
        assert name == "models" or default == (
            f"{value:g}" if type(value) is float else str(value).replace("False", "false")
        )
