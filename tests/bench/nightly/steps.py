"""The compiled pipeline by KFP's local runner, whose steps are forked, and share what this process has imported. Cases are
repeated twice, and nets trained for two epochs: nights are about who goes on, not how good a model is."""

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kfp import components, local
from kfp.dsl.executor_main import executor_main
from kfp.local import subprocess_task_handler
from kubernetes.config import kube_config

import neuroshard.nightly.augment
import neuroshard.nightly.deploy
import neuroshard.nightly.measure
import neuroshard.nightly.pretrain
import neuroshard.nightly.search
import neuroshard.nightly.survey
from neuroshard.measure import real_devices
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.shares import job

ROOT = Path(__file__).parents[3]
Environments = Mapping[str, Mapping[str, str]]  # by the name of a step, "step" for all others


def run(parameters: Mapping[str, Any], root: str, environments: Environments | None = None) -> None:
    """Run the compiled pipeline, whose outputs lie below `root`. Raises RuntimeError where a step fails."""
    warnings.filterwarnings("ignore")
    learning = vars(neuroshard.nightly.pretrain)
    learning["pretrain"] = partial(learning["pretrain"], epochs=2)
    real_devices.CALM_SECONDS = 0.3  # as in conftest.py
    vars(job)["MeasureSettings"] = partial(MeasureSettings, warmup=0, repeats=2)
    subprocess_task_handler.run_local_subprocess = partial(forked, environments=environments or {})
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=root, workspace_root=f"{root}/workspace")
    components.load_component_from_file(str(ROOT / "pipelines" / "neuroshard.yaml"))(**parameters)


def ended(parameters: Mapping[str, Any], root: str, environments: Environments | None = None) -> int:
    """The exit code of a run in a forked process."""
    return _exit_code(partial(run, parameters, root, environments))


def _exit_code(work: Callable[[], None]) -> int:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    try:
        work()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def forked(
    full_command: Sequence[str], env_vars: Mapping[str, str] | None = None, *, environments: Environments
) -> int:
    """The exit code of a step, which does what its command does: writes its source into a file, and runs kfp's executor on it."""
    _shell, _flags, _script, source, *arguments = full_command
    step = arguments[arguments.index("--function_to_execute") + 1]
    environment = {**(env_vars or {}), **environments.get(step, environments.get("step", {}))}
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.dup2(writing, 1), os.dup2(writing, 2)
        os._exit(_exit_code(partial(_execute, source, arguments, environment)))
    os.close(writing)
    with open(reading, errors="replace") as said:
        for line in said:
            print(line, end="")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _execute(source: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ.get("KUBECONFIG", "")  # read as it was imported
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        module = Path(folder, "ephemeral_component.py")
        module.write_text(source)
        sys.argv = ["executor", "--component_module_path", str(module), *arguments]
        executor_main()
