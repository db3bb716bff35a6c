"""Every make target, bench, documented command and example: run in a small form, or who runs it, or why nobody does.

    make everything                              two hours on two cores
    make everything ARGS="docs bench-truth"      only these targets

Targets run with their ARGS of SMALL, in a copy of this tree with its .venv; nothing here is changed but the packages that a
target installs (`make docs`). What a bench reads that is not ours to ship is drawn at random. A line each, and exit code 1 where
one failed; what each printed is in build/everything/. tests/infra/test_everything.py fails where something is in none of the
lists.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.test_commands import HELP, PAGES, commands, reason
from helpers.kubeflow import KfpStub, serving
from infra.tried import STEPS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3600


class Small(NamedTuple):
    """A target's ARGS, {drawn} for the folder of what is drawn, and what it needs: programs, `root`, or `a package index`."""

    args: str = ""
    needs: tuple[str, ...] = ()


SMALL = {
    "help": Small(),
    "setup": Small(),
    "run": Small("--backend synthetic --compute-cases 120 --collective-cases 24 --steps 2"),
    "test-fast": Small("tests/infra/test_makefile.py"),
    "test-kfp": Small("tests/pipelines/test_compiled_pipeline.py", ("a package index",)),
    "fix": Small(),
    "size": Small(),
    "compile": Small(),
    "images-check": Small(needs=("root", "buildah", "debootstrap", "a package index")),
    "manifests-check": Small(needs=("kubectl",)),
    "apiserver-test": Small(),  # it says itself what it lacks
    "gpu": Small("--backend synthetic --cases 60 --tasks 1 --minutes 10"),
    "extras-check": Small("--only client", ("a package index",)),
    "nightly": Small("--help"),  # it runs targets of CI
    "findings": Small("findings/pyarrow*", ("a package index",)),
    "package": Small(),
    "docs": Small(needs=("a package index",)),
    "bench": Small("--help"),  # its scripts are run by the targets below
    "bench-cache": Small("--quick --ratings {drawn}/u.data"),
    "bench-corpus": Small("--quick"),
    "bench-pretrain": Small("--quick"),
    "bench-release": Small("--quick"),
    # without `production`: a plan that others printed cannot be drawn; tests/bench/searching/test_peers.py reads a small one
    "bench-search": Small(
        "--quick --tasks 1 --tables-dir {drawn} --only compare,time,named,measured,hosts,ablation,ablation-hosts"
    ),
    "bench-sequences": Small("--quick"),
    "bench-rows": Small("--quick"),
    "bench-tiers": Small("--quick --tables-dir {drawn}"),
    "bench-memory": Small("--quick"),
    "bench-nights": Small("--quick"),
    "bench-hosts": Small("--quick --only networks --budget 20s --steps 3", ("root", "ip")),
    "bench-seen": Small("--quick"),
    "bench-traces": Small("--quick --ratings {drawn}/u.data"),
    "bench-truth": Small(f"--figures {ROOT.parent}/shared/truth"),
    "bench-page": Small(),
    "submit": Small("store=s3://bucket/prefix"),  # to a stub of Kubeflow Pipelines
    "lock": Small(needs=("a package index",)),
    "clean": Small(),
}
NOT_RUN = re.compile(r"^(?:nothing is (?:run|compared)|skipped): (.*)", re.M)  # a script that says why it did nothing
TABLE_SETS = {"meta-production-1935": 300} | {
    f"nvidia-synthetic-{size}": 20 for size in ("small", "medium", "large", "jumbo", "colossal")
}


def targets() -> list[str]:
    return re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)


def of_ci() -> set[str]:
    """The targets that .ci/run runs, some of them where their inputs changed."""
    return {*STEPS, *re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.M)}


def benches() -> dict[str, list[str]]:
    """The targets but `bench` that run a script of tests/bench, by script."""
    recipes = re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    scripts = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests" / "bench").glob("*.py"))]
    return {script: [name for name, recipe in recipes if script in recipe] for script in scripts}


def examples() -> dict[str, list[str]]:
    """What runs each file of examples/: tests, or commands of pages that tests/docs runs."""
    found = {}
    for path in sorted(path for path in (ROOT / "examples").iterdir() if path.is_file()):
        tests = [test for test in sorted((ROOT / "tests" / "examples").glob("*.py")) if path.name in test.read_text()]
        lines = [line for page in (*PAGES, HELP) for line in commands(page) if not reason(line)]
        pages = [line.where for line in lines if re.search(rf"examples[/.]{path.stem}\b", line.text)]
        found[path.name] = [str(test.relative_to(ROOT)) for test in tests] + pages
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="*", help="only these")
    asked = parser.parse_args().target
    if unknown := [target for target in asked if target not in SMALL]:
        parser.error(f"no target of SMALL: {', '.join(unknown)}")
    logs, failed = ROOT / "build" / "everything", []
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="neuroshard-everything-") as folder, ExitStack() as stack:
        tree, drawn = Path(folder, "tree"), Path(folder, "drawn")
        copy_tree(tree)
        draw(drawn)
        endpoint = stack.enter_context(serving(KfpStub())).url
        for target in asked or SMALL:
            said, good = attempt(target, tree, drawn, endpoint, logs / f"{target}.log")
            failed += [] if good else [target]
            print(f"make {target:<16} {said}", flush=True)
    if not asked:
        show_the_others()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; what they printed is in {logs.relative_to(ROOT)}/")


def attempt(target: str, tree: Path, drawn: Path, endpoint: str, log: Path) -> tuple[str, bool]:
    """Run a target in its small form: what to say of it, and whether that is good."""
    if missing := [need for need in SMALL[target].needs if not there(need)]:
        return f"not run: needs {', '.join(missing)}", True
    if not (tree / ".venv").exists():  # as at first, and after `make clean`
        (tree / ".venv").symlink_to(ROOT / ".venv")
    args = SMALL[target].args
    paths = os.pathsep.join(str(tree / name) for name in ("components", ""))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment = {**kept, "PYTHONPATH": paths, "KFP_ENDPOINT": endpoint, "XDG_CACHE_HOME": str(drawn / "cache")}
    began = time.monotonic()
    with log.open("w+") as out:
        command = ["timeout", str(TIMEOUT_S), "make", target, f"ARGS={args.format(drawn=drawn)}"]
        ended = subprocess.run(command, cwd=tree, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        out.seek(0)
        text = out.read()
    shown = f"{time.monotonic() - began:.0f} s{args and ', with '}{args}"
    if ended.returncode:
        return f"FAILED: {shown}", False
    if why := NOT_RUN.search(text):
        return f"not run: {why[1]}", True
    return f"passed: {shown}", True


def there(need: str) -> bool:
    if need == "root":
        return os.geteuid() == 0
    if need == "a package index":
        with tempfile.TemporaryDirectory() as folder:
            asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "wheel"]
            return subprocess.run(asked, capture_output=True).returncode == 0
    return shutil.which(need) is not None


def copy_tree(tree: Path) -> None:
    """What git has of this tree or would add, with its times, by which make sees what is installed."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def draw(folder: Path) -> None:
    """Table sets and ratings in place of the public ones."""
    folder.mkdir()
    rng = random.Random(0)
    for name, count in TABLE_SETS.items():
        tables = [
            {
                "name": f"t{i}",
                "rows": 10 ** rng.randint(2, 6),
                "dim": 2 ** rng.randint(4, 7),
                "pooling_factor": rng.choice([1, 5, 20]),
            }
            for i in range(count)
        ]
        (folder / f"{name}.json").write_text(json.dumps({"tables": tables}))
    ratings = [(rng.randint(1, 99), rng.randint(1, 999), 3, when) for when in range(20_000)]
    (folder / "u.data").write_text("".join("\t".join(map(str, rating)) + "\n" for rating in ratings))


def show_the_others() -> None:
    """What is run by CI and by tests, and what by nobody."""
    for target in sorted(of_ci()):
        print(f"make {target:<16} not run here: .ci/run does")
    for name, by in examples().items():
        print(f"examples/{name:<16} not run here: {', '.join(by)} (make test)")
    lines = [line for page in (*PAGES, HELP) for line in commands(page)]
    print(f"{sum(not reason(line) for line in lines)} commands on pages: not run here: tests/docs does (make test)")
    for line in lines:
        if reason(line):
            print(f"{line.where}: {line.text.split('#')[0].strip()[:60]}: not run: {reason(line)}")


if __name__ == "__main__":
    main()
