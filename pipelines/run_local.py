"""`make run`: the compiled pipeline on this machine, then a TorchRec trainer that follows the plan it put live.

    python -m pipelines.run_local                        the tables of MLPerf's DLRM-DCNv2, measured on this CPU
    python -m pipelines.run_local --backend synthetic    costs by a formula instead: quick

KFP's own local runner runs pipelines/neuroshard.yaml, each step in a process of its own. Every run has a folder of its own
under --out; the store is kept, so a second run on the same hardware measures nothing and plans at once. Progress goes to
stderr, the summary to stdout.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import TextIO

from kfp import components, local

from neuroshard.core.plan import Plan
from neuroshard.core.release import Release
from neuroshard.core.value import decode_json
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.files.plan import read_plan
from neuroshard.report.text import costs_by_device_text, plan_text

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipelines" / "neuroshard.yaml"

# Where KFP's local runner leaves what the steps made (step/output), and what a user shall find it under.
OUTPUTS = {
    "merge/costs": "costs",
    "pretrain/cost_model": "cost_model",
    "load/tables": "tables.json",
    "search/plan": "plan.json",
    "deploy/release": "release.json",
    "report/page": "report.html",
}
USER_ERROR = re.compile(r"neuroshard\.core\.errors\.\w+: (.*)")
OTHER_ERROR = re.compile(r"[\w.]*(Error|Exception)(: .*)?$")
COLOR = re.compile(r"\x1b\[\d+m")
# KFP indents what a step prints by four spaces: deeper lines are tracebacks and the executor's JSON, which only the log holds.
CHATTER = re.compile(
    r"    ( |[{}]$|Traceback|neuroshard\.core\.errors|\[KFP Executor|\w+: (Artifact|Dataset|HTML|Metrics|Model)\()"
    r"|    (Output|gangs|gpus|jobs|names|night|nodes|resource|tolerations|works): "
    r"|.* - INFO - (Streamed logs|Task '[\w-]+' outputs):|-{20,}|\s*$"
)


class Failed(Exception):
    """A step of the pipeline, or the trainer, failed; the message is one line."""


def main() -> None:
    options = parse_arguments()
    folder = options.out / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    try:
        run_pipeline(options, folder)
        trained = run_trainer(options, folder) if options.steps else ""
    except Failed as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or folder}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    print(summary(options, folder, trained))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="mlperf-dlrm-dcnv2", help="a preset, a file, or s3://bucket/tables.json")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--memory", default="32GiB", help="of a device for embeddings; one, or one a device by commas")
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step over all devices")
    parser.add_argument("--backend", default="cpu", help="what is measured: cpu, cuda or synthetic")
    parser.add_argument("--compute-cases", type=int, default=2000)
    parser.add_argument("--comm-cases", type=int, default=400)
    parser.add_argument("--budget", default="3m", help="measuring stops after this long")
    parser.add_argument("--max-error", type=float, default=1.0, help="of a cost model that may go live: 0.1 is 10 %%")
    parser.add_argument(
        "--nodes", default="", help="what `kubectl get nodes -o json` wrote, as the fleet: for synthetic"
    )
    parser.add_argument("--hardware", default="", help="of the fleet, where it is of several kinds: h200")
    parser.add_argument("--algorithm", default="neuroshard")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder for what the runs make")
    parser.add_argument("--store", help="where the plan goes live: a folder or s3://bucket/prefix [default: OUT/store]")
    parser.add_argument("--model", default="mlperf-dlrm-dcnv2", help="the name that the plan goes live under")
    parser.add_argument("--steps", type=int, default=20, help="of the trainer; 0 for none")
    options = parser.parse_args()
    options.store = options.store or str(options.out / "store")
    return options


def order(options: argparse.Namespace) -> dict[str, object]:
    """The one model that this run plans for."""
    told = {"name": options.model, "tables": options.tables, "devices": options.devices, "memory": options.memory}
    return {**told, "hardware": options.hardware}


def run_pipeline(options: argparse.Namespace, folder: Path) -> None:
    """Run the compiled pipeline and put what its steps made into `folder`. Raises Failed, and leaves what there is."""
    folder.mkdir(parents=True)
    steps = Path(tempfile.mkdtemp(prefix=".steps-", dir=folder))
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(steps))
    with (folder / "log.txt").open("w") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"kfp\.local")  # what a cluster would heed: image, CPUs, memory
        log = Log(file)
        try:
            with redirect_stdout(log):
                components.load_component_from_file(str(PACKAGE))(
                    models=json.dumps([order(options)]),
                    batch_size=options.batch_size,
                    store=options.store,
                    backend=options.backend,
                    nodes=options.nodes,
                    compute_cases=options.compute_cases,
                    comm_cases=options.comm_cases,
                    measure_budget=options.budget,
                    max_error=options.max_error,
                    algorithm=options.algorithm,
                    seed=options.seed,
                )
        except RuntimeError as error:  # kfp's "finished with status FAILURE. Inner task failed: …"
            raise Failed(f"{log.error or COLOR.sub('', str(error))} (all output: {folder / 'log.txt'})") from None
        finally:
            for made, name in OUTPUTS.items():
                for nth, path in enumerate(sorted(steps.rglob(made))):
                    path.rename(folder / (f"{nth + 1}-{name}" if nth else name))
            shutil.rmtree(steps)


class Log(io.TextIOBase):
    """What the steps print: all of it into a file, what a person wants to see to stderr. `error` is the last that they told."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.error, self.rest = file, "", ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + COLOR.sub("", text)).split("\n")
        for line in lines:
            self.file.write(f"{line}\n")  # kfp has replaced print while a step runs
            if not CHATTER.match(line):
                sys.stderr.write(f"{line}\n")
            if told := USER_ERROR.match(line.strip()):
                self.error = told[1]
            elif OTHER_ERROR.match(line.strip()):
                self.error = line.strip()
        self.file.flush()
        sys.stderr.flush()
        return len(text)


def run_trainer(options: argparse.Namespace, folder: Path) -> str:
    """Train some steps with the live plan; what the trainer reports. Raises Failed."""
    script: list[str | Path] = [sys.executable, ROOT / "examples" / "train.py", "--summary", folder / "train.json"]
    plan = ["--store", options.store, "--name", options.model]
    work = ["--steps", str(options.steps), "--batch-size", str(options.batch_size)]
    trainer = subprocess.run([*script, *plan, *work], stdout=subprocess.PIPE, text=True)
    if trainer.returncode:
        raise Failed(f"the trainer ended with exit code {trainer.returncode}; the plan of this run is live")
    return trainer.stdout.rstrip()


def summary(options: argparse.Namespace, folder: Path, trained: str) -> str:
    """What a user wants to know at the end. Every number says whether it was measured or predicted, and on what."""
    plan = read_plan(folder / "plan.json")
    names = {
        "tables": "tables.json",
        "costs": "costs",
        "cost model": "cost_model",
        "plan": "plan.json",
        "report": "report.html",
        "log": "log.txt",
    }
    files = {name: str(folder / path) for name, path in names.items() if (folder / path).exists()}
    paragraphs = [
        plan_text(plan),
        costs_by_device_text(plan),
        cost_model_text(folder, plan),
        live_text(
            plan, Release.parse(decode_json((folder / "release.json").read_bytes(), "release.json"), "release.json")
        ),
        trained,
        "\n".join(f"{name:<11} {path}" for name, path in {**files, "store": options.store}.items()),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def cost_model_text(folder: Path, plan: Plan) -> str:
    """How far the cost model can be trusted; only whose it is, where an earlier run had measured this hardware."""
    told = plan.provenance
    measured = f"measured on {told.cost_model_device} ({told.cost_model_backend})"
    costs = "by a formula, nothing was measured (synthetic)" if told.cost_model_backend == "synthetic" else measured
    for model in map(load_cost_model, folder.glob("*cost_model")):
        if model.name == told.cost_model:
            return f"cost model, of costs {costs}\n{model.report.text()}"
    return f"cost model {(told.cost_model or '')[:12]} of an earlier run, of costs {costs}"


def live_text(plan: Plan, release: Release) -> str:
    """Which plan is live after the run: the gate keeps one that is predicted better, or as good."""
    if release.plan_digest == plan.digest():
        return f"live: this plan, as release {release.number} of {release.model}"
    return (
        f"live: still release {release.number} of {release.model}, plan {release.plan_digest[:12]}; "
        "the gate did not find this one better"
    )


if __name__ == "__main__":
    main()
