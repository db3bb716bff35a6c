"""`make run`: the compiled pipeline on this machine, then a TorchRec trainer that follows the plan it put live.

    python -m pipelines.run_local                        the tables of MLPerf's DLRM-DCNv2, measured on this CPU
    python -m pipelines.run_local --backend synthetic    costs by a formula instead: quick
    python -m pipelines.run_local --models models.yaml   models of your own, as a night plans them; no trainer follows

KFP's own local runner runs pipelines/neuroshard.yaml, each step in a process of its own. Every run has a folder of its own
under --out; the store is kept, so a second run on the same hardware measures nothing and plans at once. Progress goes to
stderr, the summary to stdout.
"""

import argparse
import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from neuroshard.core.clean import accept_all_characters
from neuroshard.core.errors import NeuroshardError
from neuroshard.core.plan import Plan
from neuroshard.core.release import Release
from neuroshard.core.value import decode_json
from neuroshard.costmodel.bundle import MANIFEST, load_cost_model
from neuroshard.files.plan import read_plan
from neuroshard.orders.nightly import VERDICTS_FOLDER, Verdict, read_specs
from neuroshard.orders.parameters import faults
from neuroshard.report.text import costs_by_device_text, plan_text
from neuroshard.store.measuring import read_record
from neuroshard.store.open import open_store
from neuroshard.store.tables import load_tables
from neuroshard.submit.package import read_parameters
from neuroshard.system import fbgemm_lacks, loopback_address

if TYPE_CHECKING:
    from pipelines.steps import Children

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipelines" / "neuroshard.yaml"

SCRATCH = ".scratch"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
END_WITH_PARENT = "NEUROSHARD_END_WITH_PARENT"  # make's process id: make does not forward signals to its children
RANK_SECONDS = 600  # that ranks of the trainer wait for one another: on a busy machine they start minutes apart

# Where KFP's local runner leaves what the steps made (step/output), and under which name a user finds it. The pipeline has
# the step that plans a model in three places: plan-2, plan-3.
OUTPUTS = {
    "pretrain/costs": "costs",
    "pretrain/cost_model": "cost_model",
    "plan*/tables": "tables.json",
    "plan*/plan": "plan.json",
    "plan*/release": "release.json",
    "plan*/page": "report.html",
}
# Options that are parameters of the pipeline, and where these have other names
_PASSED = "batch_size store backend nodes compute_cases collective_cases max_error memory_margin algorithm seed"
PASSED = _PASSED.split()
OPTION_NAMES = {"measure_budget": "--budget"} | {name: f"--{name.replace('_', '-')}" for name in PASSED}
TRAINER_RANKS = 16  # as in examples/train.py
USER_ERROR = re.compile(r"neuroshard\.core\.errors\.\w+: (.*)")
OTHER_ERROR = re.compile(r"[\w.]*(Error|Exception)(: .*)?$")
COLOR = re.compile(r"\x1b\[\d+m")
# KFP indents what a step prints by four spaces: deeper lines are tracebacks and the executor's JSON, which only the log holds.
CHATTER = re.compile(
    r"    ( |[{}]$|Traceback|KeyboardInterrupt$|neuroshard\.core\.errors|\[KFP Executor)"
    r"|    \w+: (Artifact|Dataset|HTML|Metrics|Model)\("
    r"|    (Output|at_once|cpus|gpus|image|kinds|later|memory|nodes|resource|shares|tolerations): "
    r"|.* - INFO - (Streamed logs|Task '[\w-]+' outputs):|-{20,}|\s*$"
)


class Failed(Exception):
    """A step of the pipeline, or the trainer, failed; the message is one line."""


def main() -> None:
    accept_all_characters()
    options = parse_arguments()
    if wrong := faults_of(options):
        sys.exit("\n".join(f"error: {line}" for line in wrong))
    from pipelines.steps import Children, Stopped, watch_parent  # after the arguments: kfp takes a second to import

    children = Children()
    children.listen()
    if parent := os.environ.pop(END_WITH_PARENT, ""):
        watch_parent(int(parent))
    folder = options.out
    try:
        with nullcontext() if "://" in options.store else in_use(Path(options.store), fresh=options.fresh):
            folder = make_folder(options.out)
            with scratch(options.out, folder) as steps, contextlib.closing(children):
                run_pipeline(options, folder, steps, children)
                trained = run_trainer(options, folder, children) if options.steps else ""
    except Failed as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        way_out = "; give --out a folder that can be written" if error.errno in NOT_WRITABLE else ""
        sys.exit(f"error: {error.filename or folder}: {error.strerror or error}{way_out}")
    except Stopped as stopped:
        print(f"stopped by {stopped}: its steps are ended; the next run goes on with what is measured", file=sys.stderr)
        sys.exit(stopped.exit_code)
    print(summary(options, folder, trained))


@contextlib.contextmanager
def in_use(store: Path, fresh: bool) -> Iterator[None]:
    """Hold the store, so that no other run sets it aside. A `fresh` run sets aside what is there first.

    Raises Failed where another run holds it. Folders without locks (NFS locks no folders) are not protected.
    """
    if fresh and store.exists():
        with _flocked(store, fcntl.LOCK_EX | fcntl.LOCK_NB) as (_, state):
            if state == "taken":
                raise Failed(f"--fresh: {store} is in use by another run; wait for that run, or give another --store")
            print(f"--fresh: {store} is kept as {set_aside(store)}", file=sys.stderr)
    while True:
        store.mkdir(parents=True, exist_ok=True)
        with _flocked(store, fcntl.LOCK_SH) as (lock, _):
            if not store.exists() or not os.path.samestat(os.fstat(lock), store.stat()):
                continue  # set aside between the two
            yield
            return


@contextlib.contextmanager
def _flocked(folder: Path, how: int) -> Iterator[tuple[int, str]]:
    """Hold a folder's lock, which the kernel frees with this process. Yields its descriptor, and whether the lock is "held",
    "taken" by another process, or neither, where the file system has no locks."""
    lock, state = os.open(folder, os.O_RDONLY | os.O_CLOEXEC), "held"
    try:
        try:
            fcntl.flock(lock, how)
        except BlockingIOError:
            state = "taken"
        except OSError:
            state = ""
        yield lock, state
    finally:
        os.close(lock)


def set_aside(store: Path) -> Path:
    """Rename a store, so that a run begins without cost models and plans; nothing is deleted. Returns where it is now."""
    name = f"{store.name}-until-{datetime.now():%Y-%m-%d-%H%M%S}"
    aside = next(path for number in itertools.count(1) if not (path := store.with_name(f"{name}-{number}")).exists())
    return store.rename(aside)


def make_folder(out: Path) -> Path:
    """A new folder for this run, called by the time; one more number where another run began in the same second."""
    out.mkdir(parents=True, exist_ok=True)
    began = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    for number in range(1, 1000):
        folder = out / (began if number == 1 else f"{began}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise Failed(f"{out / began}: a thousand runs began in this second")


@contextlib.contextmanager
def scratch(out: Path, folder: Path) -> Iterator[Path]:
    """A folder for all that the steps leave behind, temporary files too, that goes at the end of the run.

    Its owner holds a lock on it, so that a run also removes those of runs that were killed, and of no others.
    """
    for left in out.glob(f"*/{SCRATCH}"):
        with contextlib.suppress(OSError), _flocked(left, fcntl.LOCK_EX | fcntl.LOCK_NB) as (_, state):
            if state == "held":
                shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    with _flocked(new, fcntl.LOCK_EX | fcntl.LOCK_NB):
        steps = new.rename(folder.absolute() / SCRATCH)  # locked already, or another run could take it for a dead one's
        temporary = steps / "tmp"
        temporary.mkdir()
        before = os.environ.get("TMPDIR"), tempfile.tempdir
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        try:
            yield steps
        finally:
            tempfile.tempdir = before[1]
            if before[0] is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before[0]
            shutil.rmtree(steps, ignore_errors=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="mlperf-dlrm-dcnv2", help="a preset, a file, or s3://bucket/tables.json")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--memory", default="32GiB", help="of a device for embeddings; one, or one a device by commas")
    parser.add_argument(
        "--memory-margin", type=float, default=0.1, help="share of that memory that plans leave free: 0.1 is 10 %%"
    )
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step over all devices")
    parser.add_argument("--backend", default="cpu", help="what is measured: cpu, cuda or synthetic")
    parser.add_argument("--compute-cases", type=int, default=2000)
    parser.add_argument("--collective-cases", type=int, default=400)
    parser.add_argument("--budget", default="3m", help="measuring stops after this long")
    parser.add_argument("--max-error", type=float, default=1.0, help="of a cost model that may go live: 0.1 is 10 %%")
    parser.add_argument(
        "--nodes", default="", help="what `kubectl get nodes -o json` wrote, as the fleet: for synthetic"
    )
    parser.add_argument("--hardware", default="", help="of the fleet, where it is of several kinds: h200")
    parser.add_argument("--algorithm", default="local-search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder for what the runs make")
    parser.add_argument("--store", help="where the plan goes live: a folder or s3://bucket/prefix [default: OUT/store]")
    parser.add_argument(
        "--fresh", action="store_true", help="start with an empty store; the old one is renamed, not deleted"
    )
    parser.add_argument("--model", default="mlperf-dlrm-dcnv2", help="the name that the plan goes live under")
    parser.add_argument("--models", type=Path, help="YAML list of models, as for nights, in place of one by options")
    parser.add_argument("--steps", type=int, default=20, help="of the trainer; 0 for none")
    options = parser.parse_args()
    options.store = options.store or str(options.out / "store")
    options.steps = 0 if options.models else options.steps
    return options


def faults_of(options: argparse.Namespace) -> list[str]:
    """What cannot be in these options or on this machine, a line each: found now, not after minutes of measuring."""
    try:
        lines = list(faults(parameters(options)))
    except NeuroshardError as error:  # of the file of models
        return str(error).splitlines()
    lines = [
        OPTION_NAMES.get(name := line.split(maxsplit=1)[0].rstrip(":"), name) + line[len(name) :] for line in lines
    ]
    if options.fresh and "://" in options.store:
        lines.append(f"--fresh renames a store in a folder, not {options.store}; give a --store with another prefix")
    if options.steps < 0:
        lines.append(f"--steps must be at least 0, not {options.steps}")
    if options.steps > 0 and options.devices > TRAINER_RANKS:
        lines.append(
            f"--devices {options.devices}: the trainer starts at most {TRAINER_RANKS} ranks on this machine; give --steps 0 "
            "for none"
        )
    elif options.steps > 0 and options.devices > 0 and options.batch_size % options.devices:
        lines.append(
            f"--batch-size {options.batch_size}: the trainer shares a batch evenly over {options.devices} devices; give a "
            "multiple of that, or --steps 0 for no trainer"
        )
    if options.steps > 0 or options.backend == "cpu":
        if sys.platform == "linux" and not loopback_address():
            lines.append("the loopback interface is down, and processes talk over it; bring it up: ip link set lo up")
        if lacks := fbgemm_lacks():
            lines.append(lacks)
    if not lines:
        try:
            for spec in read_specs(parameters(options)["models"]):
                load_tables(spec.tables)
        except NeuroshardError as error:
            lines.append(str(error))
    return lines


def order(options: argparse.Namespace) -> dict[str, object]:
    """The one model that this run plans for."""
    asked = {name: getattr(options, name) for name in ("tables", "devices", "memory", "hardware")}
    return {"name": options.model, **asked}


def run_pipeline(options: argparse.Namespace, folder: Path, steps: Path, children: "Children") -> None:
    """Run the compiled pipeline and put what its steps made into `folder`. Raises Failed or Stopped, and leaves what there is."""
    from kfp import components, local

    from pipelines.steps import use_own_steps

    use_own_steps(children)
    local.init(
        local.SubprocessRunner(use_venv=False), pipeline_root=str(steps), workspace_root=str(steps / "kfp-workspace")
    )
    with (folder / "log.txt").open("w", encoding="utf-8") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"kfp\.local")  # what a cluster would heed: image, CPUs, memory
        log = Log(file, {str(steps): str(folder)})
        try:
            with redirect_stdout(log):
                components.load_component_from_file(str(PACKAGE))(**parameters(options))
        except RuntimeError as error:  # kfp's "finished with status FAILURE. Inner task failed: …"
            children.check()
            raise Failed(f"{log.error or COLOR.sub('', str(error))} (all output: {folder / 'log.txt'})") from None
        finally:
            for made, name in OUTPUTS.items():
                for nth, path in enumerate(
                    sorted(steps.rglob(made), key=lambda one: one.stat().st_mtime, reverse=True)
                ):
                    path.rename(folder / (f"{nth + 1}-{name}" if nth else name))
    children.check()


def parameters(options: argparse.Namespace) -> dict[str, Any]:
    """The pipeline's parameters, as far as this run does not leave them to their defaults."""
    models = read_parameters(None, options.models)["models"] if options.models else json.dumps([order(options)])
    passed = {name: getattr(options, name) for name in PASSED}
    return {"models": models, "measure_budget": options.budget, **passed}


class Log(io.TextIOBase):
    """The output of the steps: all of it into a file, the lines for a person to stderr. `error` is the last error in it."""

    def __init__(self, file: TextIO, called: Mapping[str, str]) -> None:
        """`called` gives the folder of the steps the name under which their outputs are found in the end."""
        self.file, self.error, self.rest = file, "", ""
        self.scratch = [  # a loop's steps are in a folder of their own; `plan*` is plan-2, too
            (
                re.compile(rf"{re.escape(steps)}/(?:[^/\s]+/)+" + re.escape(made).replace(r"\*", "[^/]*") + r"\b"),
                f"{folder}/{name}",
            )
            for steps, folder in called.items()
            for made, name in OUTPUTS.items()
        ]

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + COLOR.sub("", text)).split("\n")
        for line in map(self.renamed, lines):
            self.file.write(f"{line}\n")  # kfp has replaced print while a step runs
            if not CHATTER.match(line):
                sys.stderr.write(f"{line}\n")
            if error := USER_ERROR.match(line.strip()):
                self.error = error[1]
            elif OTHER_ERROR.match(line.strip()):
                self.error = line.strip()
        self.file.flush()
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.flush()
        return len(text)

    def renamed(self, line: str) -> str:
        """The line with each output under the path where a user finds it when the run has ended."""
        for path, name in self.scratch:
            line = path.sub(lambda _, name=name: name, line)  # type: ignore[misc]
        return line


def run_trainer(options: argparse.Namespace, folder: Path, children: "Children") -> str:
    """Train some steps with the live plan; what the trainer reports. Raises Failed, Stopped."""
    script: list[str | Path] = [sys.executable, ROOT / "examples" / "train.py", "--summary", folder / "train.json"]
    plan = ["--store", options.store, "--name", options.model]
    work = ["--steps", str(options.steps), "--batch-size", str(options.batch_size)]
    work += ["--timeout", str(RANK_SECONDS)]
    trainer = children.start([*script, *plan, *work], {}, stdout=subprocess.PIPE)
    report = trainer.stdout.read() if trainer.stdout else ""
    if code := children.wait(trainer):
        raise Failed(f"the trainer ended with exit code {code}; the plan of this run is live")
    return report.rstrip()


def summary(options: argparse.Namespace, folder: Path, trained: str) -> str:
    """The summary of a run. Every number says whether it was measured or predicted, and on what."""
    if options.models:
        verdicts = (
            read_record(open_store(options.store), f"{VERDICTS_FOLDER}/{spec.name}.json")
            for spec in read_specs(parameters(options)["models"])
        )
        return "\n".join(Verdict.parse(one, "verdict").text for one in verdicts if one)
    ended = decode_json((folder / "release.json").read_bytes(), "release.json")
    if "end" in ended:  # there is no new plan, and an older one stays live
        return Verdict.parse(ended, "release.json").text
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
        live_text(plan, Release.parse(ended, "release.json")),
        trained,
        "\n".join(f"{name:<11} {path}" for name, path in {**files, "store": options.store}.items()),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def cost_model_text(folder: Path, plan: Plan) -> str:
    """The cost model's errors; only its name, where an earlier run measured this hardware."""
    by = plan.provenance
    if by.cost_model_backend == "analytic":
        return f"cost model {by.cost_model}, of datasheets; nothing of it was measured"
    measured = f"measured on {by.cost_model_device} ({by.cost_model_backend})"
    costs = "by a formula, nothing was measured (synthetic)" if by.cost_model_backend == "synthetic" else measured
    for model in (load_cost_model(one) for one in folder.glob("*cost_model") if (one / MANIFEST).exists()):
        if model.name == by.cost_model:
            return f"cost model, of costs {costs}\n{model.report.text()}"
    return f"cost model {(by.cost_model or '')[:12]} of an earlier run, of costs {costs}"


def live_text(plan: Plan, release: Release) -> str:
    """Which plan is live after the run. The gate keeps a live plan that is predicted as good or better."""
    if release.plan_digest == plan.digest():
        return f"live: this plan, as release {release.number} of {release.model}"
    return (
        f"live: still release {release.number} of {release.model}, plan {release.plan_digest[:12]}; "
        "the gate did not find this one better"
    )


if __name__ == "__main__":
    main()
