"""Install every extra of pyproject.toml alone, each in a fresh venv, and run what it is for: `make extras-check`.

    make extras-check                                          every extra, with each Python of 3.11 to 3.13 that is found here
    make extras-check ARGS="--only client,search --python 3.12"

What is installed is a wheel built from this tree, so the run shows too that the wheel holds every file it needs. `client` is
the wheel without any extra. pip needs its package index; where it finds no CPU build of torch, an extra with torch takes 5 GB
while it is tried. The GPUs' extra (`cuda`) is only resolved, since nothing could run it here. One line an extra, and exit code 1
where one failed. What runs is in TRIALS.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from neuroshard.core.versions import PAIRS

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
BUILT_FROM = ("components", "pyproject.toml", "README.md", "LICENSE")


class Trial(NamedTuple):
    """How an extra is tried: what is said of it, and a Python script, run in a folder with the files of `make_files`."""

    says: str
    code: str
    without_requirements: str = ""  # a package to install after the extra by `--no-deps`
    resolve_only: bool = False


LOAD_PLAN = """
from neuroshard.client import load_plan
plan = load_plan("store", "ads-ranker", world_size=2)
assert len(plan.shards) >= 3, plan
"""
SEARCH = """
from pathlib import Path
from neuroshard.core.task import ShardingTask
from neuroshard.models.open import open_cost_model
from neuroshard.files.tables import read_tables
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
tables, _ = read_tables(Path("tables.json"))
task = ShardingTask(tables=tables, device_memory_bytes=(2**34, 2**34), batch_size=4096)
plan = search(task, open_cost_model("analytic:h100", batch_size=4096), SearchSettings(rounds=1))
assert len(plan.shards) >= len(tables)
"""
MEASURE = """
import subprocess, sys
from pathlib import Path
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.run import run
subprocess.run([sys.executable, "-m", "neuroshard.doctor.operator", "cpu"], check=True)
run(Path("cases"), Path("measured"), "synthetic", MeasureSettings(batch_size=4096))
assert list(Path("measured").glob("*.parquet"))
"""
PRETRAIN = """
from pathlib import Path
from neuroshard.pretrain.run import run
model = run(Path("costs"), Path("model"), epochs=2)
assert Path("model").is_dir()
"""
REPORT = """
from pathlib import Path
from neuroshard.models.open import open_cost_model
from neuroshard.files.plan import read_plan
from neuroshard.report.run import report
page = report(read_plan(Path("plan.json")), model=open_cost_model("analytic:h100", batch_size=4096))
assert page.lstrip().lower().startswith("<!doctype html>") and page.rstrip().endswith("</html>")
"""
FILES = """
from pathlib import Path
from neuroshard.files.cases import read_cases
from neuroshard.files.costs import read_costs
from neuroshard.files.tables import read_tables, write_tables
tables, notes = read_tables(Path("tables.json"))
write_tables(Path("again.json"), tables)
assert read_tables(Path("again.json")) == (tables, ())
read_cases(Path("cases")), read_costs(Path("costs"))
"""
CLI = """
import subprocess, sys
from pathlib import Path
command = Path(sys.executable).with_name("neuroshard")
for arguments in (["--version"], ["search", "--help"], ["doctor"], ["releases", "--store", "store", "--name", "ads-ranker"]):
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 or arguments == ["doctor"], (arguments, done.stderr)  # doctor finds what is not installed
    assert "Traceback" not in done.stderr and done.stdout, (arguments, done.stderr)
"""
FLEET = """
from pathlib import Path
import kubernetes
from neuroshard.fleet.run import kubernetes_fleet, local_fleet
assert local_fleet().kinds
assert kubernetes_fleet(recorded=Path("nodes.json")).kinds
"""
PIPELINE = """
import kfp
from neuroshard.submit.kubeflow import Kubeflow
from neuroshard.submit.package import known_parameters
assert "store" in known_parameters()
from neuroshard.nightly import component
"""
TORCHREC = f"torchrec=={PAIRS[0].torchrec}"
TO_TORCHREC = """
import warnings
warnings.simplefilter("ignore")  # FBGEMM and torchrec, while they are imported
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from neuroshard.client import load_plan
from neuroshard.client.torchrec import from_torchrec, to_torchrec
plan = load_plan("store", "ads-ranker", world_size=2)
configs = [
    EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
    for t in plan.task.tables
]
module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
assert set(to_torchrec(plan, module, world_size=2).plan[""]) == {t.name for t in plan.task.tables}
"""

TRIALS = {
    "client": Trial("load_plan from a folder", LOAD_PLAN),
    "files": Trial("tables, cases and costs are read", FILES),
    "measure": Trial("FBGEMM's operator, formula costs", MEASURE),
    "cuda": Trial("nothing: resolved only", "", resolve_only=True),
    "pretrain": Trial("two epochs on synthetic costs", PRETRAIN),
    "search": Trial("a plan by the analytic model", SEARCH),
    "report": Trial("a page of a plan", REPORT),
    "fleet": Trial("this machine, and recorded nodes", FLEET),
    "cli": Trial("doctor, releases, --help", CLI),
    "pipeline": Trial("the compiled pipeline is read", PIPELINE),
    "torchrec": Trial("to_torchrec of the live plan", TO_TORCHREC, TORCHREC),
    "all": Trial(
        "all of the above but cuda",
        "\n".join((LOAD_PLAN, FILES, MEASURE, PRETRAIN, SEARCH, REPORT, FLEET, CLI, PIPELINE, TO_TORCHREC)),
        TORCHREC,
    ),
}


class Result(NamedTuple):
    """A line of the table."""

    extra: str
    python: str
    installed: str
    ran: str
    result: str

    @property
    def failed(self) -> bool:
        return self.result.startswith("FAILED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=words(TRIALS), default=tuple(TRIALS), help="extras, as in client,search")
    parser.add_argument("--python", type=words(VERSIONS), default=VERSIONS, help="versions, as in 3.11,3.12")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="neuroshard-extras-") as scratch:
        wheel = build_wheel(Path(scratch))
        files = Path(scratch, "files")
        make_files(files)
        print(line(Result("extra", "python", "installed", "ran", "result")), flush=True)
        for version in options.python:
            python = find_python(version)
            for extra in options.only:
                if python is None:
                    result = Result(extra, version, "", "", "skipped: no such Python runs here")
                else:
                    result = try_extra(extra, version, python, wheel, files, Path(scratch))
                results.append(result)
                print(line(result), flush=True)
    failed = sum(result.failed for result in results)
    print(f"{len(results)} tried, {failed} failed", flush=True)
    sys.exit(1 if failed else 0)


def words(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """An argparse type: some of the known words, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        unknown = [word for word in given if word not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return given

    return parse


def line(result: Result) -> str:
    """A line of the table, in columns."""
    return f"{result.extra:<9} {result.python:<7} {result.installed:<28} {result.ran:<34} {result.result}".rstrip()


def candidates(version: str) -> list[str]:
    """Where a Python of this version may be: this one, on the PATH, and among pyenv's, whose shims may exist and not run."""
    here = [sys.executable] if sys.version_info[:2] == tuple(map(int, version.split("."))) else []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    return [*here, f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True))]


def find_python(version: str) -> str | None:
    """The first candidate that runs and can make a venv."""
    for candidate in candidates(version):
        try:
            done = subprocess.run([candidate, "-c", "import ensurepip, ssl"], capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    return None


def build_wheel(scratch: Path) -> Path:
    """A wheel of this tree, built from a copy: setuptools would leave a `build` folder in it."""
    source = scratch / "source"
    source.mkdir()
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source / name)
    done = pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", scratch, source)
    if done.returncode:
        sys.exit(f"error: the wheel cannot be built: {last_line(done)}")
    (wheel,) = scratch.glob("*.whl")
    return wheel


def make_files(folder: Path) -> None:
    """tables.json, cases/, costs/, plan.json, and a store with the plan live: what the trials read."""
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "fleet" / "nodes-recorded.json", folder / "nodes.json")
    tables = [f'{{"name": "t{n}", "rows": {10**n}, "dim": 64, "pooling_factor": {n}}}' for n in range(3, 7)]
    (folder / "tables.json").write_text(f'{{"format_version": 1, "tables": [{", ".join(tables)}]}}')
    for command in (
        "augment tables.json --compute-cases 120 --collective-cases 60 --devices 2 --memory 16GiB -o cases",
        "measure cases --backend synthetic --batch-size 4096 -o costs",
        "search tables.json --model analytic:h100 --batch-size 4096 --devices 2 --memory 16GiB --rounds 1 -o plan.json",
        "deploy plan.json --store store --name ads-ranker",
    ):
        done = subprocess.run(
            [sys.executable, "-m", "neuroshard", *command.split()], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"error: neuroshard {command}: {last_line(done)}")


def try_extra(extra: str, version: str, python: str, wheel: Path, files: Path, scratch: Path) -> Result:
    """Make a venv, install, run; the venv is gone afterwards."""
    trial, venv, began = TRIALS[extra], scratch / "venv", time.monotonic()
    wanted = str(wheel) if extra == "client" else f"{wheel}[{extra}]"
    try:
        subprocess.run([python, "-m", "venv", venv], check=True, capture_output=True)
        inside = str(venv / "bin" / "python")
        asked = [["--dry-run", wanted] if trial.resolve_only else [wanted]]
        if trial.without_requirements:
            asked.append(["--no-deps", trial.without_requirements])
        for arguments in asked:
            if (done := pip(inside, "install", *arguments)).returncode:
                return Result(extra, version, "", "", f"FAILED to install: {last_line(done)}")
        if trial.resolve_only:
            return Result(extra, version, "", trial.says, "resolves")
        copy = scratch / "run"
        shutil.copytree(files, copy)
        try:
            done = subprocess.run(
                [inside, "-c", textwrap.dedent(trial.code)], cwd=copy, env=environment(), capture_output=True, text=True
            )
        finally:
            shutil.rmtree(copy)
        said = f"FAILED: {last_line(done)}" if done.returncode else f"runs ({time.monotonic() - began:.0f} s)"
        return Result(extra, version, installed(inside), trial.says, said)
    finally:
        shutil.rmtree(venv, ignore_errors=True)


def installed(python: str) -> str:
    """How many packages there are, and which builds of torch and FBGEMM."""
    listed = dict(row.split("==", 1) for row in pip(python, "freeze").stdout.splitlines() if "==" in row)
    lowered = {name.lower().replace("_", "-"): found for name, found in listed.items()}
    builds = [
        f"{name} {lowered[key]}" for name, key in (("torch", "torch"), ("torchrec", "torchrec")) if key in lowered
    ]
    return ", ".join([str(len(lowered)), *builds])


def pip(python: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [python, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


def environment() -> dict[str, str]:
    """This process's, without what would let a venv import this tree."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def last_line(done: "subprocess.CompletedProcess[str]") -> str:
    """The last line that a command said, without pip's warnings where there is another; or its exit code."""
    said: Sequence[str] = [row.strip() for row in (done.stdout + done.stderr).splitlines() if row.strip()]
    said = [row for row in said if not row.startswith("WARNING: ")] or said
    return said[-1][:200] if said else f"exit code {done.returncode}"


if __name__ == "__main__":
    main()
