"""Every command in the README, in docs/ and in the examples of --help is one that exists, and all but those of NOT_RUN run.

They run one after another: those of the README in an empty folder that has examples/ beside it; those of the tutorial in
another, and then those of every other page in a copy of what the tutorial made. FASTER changes them: the formula in place of
measuring, few cases, few epochs, a folder in place of S3; Kubeflow Pipelines is a stub. What does not run is looked up: targets,
options, paths.
"""

import ast
import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from helpers.forked import run_script
from helpers.kubeflow import KfpStub, serving
from helpers.limits import HANGS
from neuroshard.cli import app
from neuroshard.files.plan import read_plan

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]
TUTORIAL = "docs/tutorial.md"
HELP = "neuroshard --help"  # a page too: the example of each command's help
BEFORE = {  # what a page's commands find where they run, beside what the tutorial made
    "docs/trainer.md": ["publish-model model/ --store s3 --max-error 1"],
    HELP: [
        "deploy theirs.json --store s3 --name ads-ranker",
        *(f"measure cases --backend synthetic --batch-size 512 -o costs-{n}" for n in (1, 2)),  # of two machines
    ],
}
FASTER = [
    (r"--backend (cpu|cuda)", "--backend synthetic"),
    (r"--compute-cases \d+", "--compute-cases 120"),
    (r"--collective-cases \d+", "--collective-cases 24"),
    (r"--memory-limit \S+", ""),
    (r"^neuroshard pretrain(?!.*--epochs)", "neuroshard pretrain --epochs 25"),
    (r"^neuroshard search(?!.*(--rounds|--time-budget))", "neuroshard search --rounds 0"),
    (r"^neuroshard size(?!.*--rounds)", "neuroshard size --rounds 0 --processes 1"),
    (r"--devices 4-128", "--devices 4-8"),
    (r"--devices (64|8-32/8)", "--devices 16"),
    (r"^(python examples/train.py .*?)( --steps \d+)?$", r"\1 --steps 2 --memory 64MiB"),
    (r"s3://bucket/prefix", "s3"),
    (r"runs/store", "store"),
    (r"my_package\.model:", "examples.ads_model:"),
    (r"#h200", "#h100"),
    (r"--hardware h200 --devices 16", "--hardware h100 --devices 4"),  # as the tutorial's cost model has them
    (r" (other|new)\.json", " first.json"),
    (r" old\.json", " theirs.json"),
    (r" --endpoint \S+", ""),
]
# what a command looks like -> why it is not run, and what is run in place of it; the first that fits counts
NOT_RUN = {
    r"make ": "a target: tests/infra/everything.py runs it or says why not",
    r"neuroshard doctor": "its exit status is this machine's; tests/doctor runs it, also with a cluster's answers",
    r"neuroshard fleet --kubernetes": "needs a cluster; tests/fleet asks a server that answers as one does",
    r"neuroshard network": "needs two hosts with GPUs; tests/measure runs it with processes for hosts",
    r"neuroshard --(install|show)-completion|eval": "changes the reader's shell; tests/cli asks for completions",
    r"kubectl kustomize": "YOURS is the reader's; `make manifests-check` does it to the overlays that are shipped",
    r"kubectl": "needs a cluster; `make apiserver-test` has a real API server without one",
    r"kfp ": "needs a cluster; tests/submit runs it against a server that answers as one does, tests/pipelines the steps",
    r"docker": "needs a registry; `make images-check` builds the same files without one",
    r"pip (uninstall|install --no-deps)": "is for nodes with GPUs; `make images-check` installs the same locks in the gpu image",
    r"pip": "changes the reader's Python; `make extras-check` installs every extra in a fresh one",
    r"export": "sets what commands after it read, here the stub's address",
}
KNOWN = ("neuroshard", "make", "python", "pip", "kubectl", "kfp", "docker", "git", "export", "cd", "eval")
PLACEHOLDER = re.compile(r"[$…]|\b[A-Z]{3,}\b")
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
COMMANDS = vars(typer.main.get_command(app))["commands"]


class Line(NamedTuple):
    """A command, and where it stands."""

    where: str
    text: str
    fence: str  # what a fenced block says it is, or "" for one that is indented


def blocks(page: str) -> Iterator[tuple[int, str, list[str]]]:
    """First line, language and lines of every fenced or indented block."""
    fence, begin = None, 0
    held: list[str] = []
    for number, line in enumerate([*(ROOT / page).read_text().splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            if fence is None:
                fence, begin, held = line.strip()[3:], number + 1, []
            else:
                yield begin, fence, held
                fence, held = None, []
        elif fence is not None:
            held.append(line.strip())
        elif line.startswith("    "):
            begin = begin if held else number
            held.append(line.strip())
        elif held and line.strip():
            yield begin, "", held
            held = []
    if held:
        yield begin, "", held


def commands(page: str) -> list[Line]:
    """The commands of a page's blocks. In a block of `sh` every line is one."""
    if page == HELP:
        texts = {name: CliRunner().invoke(app, [name, "--help"]).output.partition("Example:")[2] for name in COMMANDS}
        return [
            Line(f"neuroshard {name} --help", " ".join(text.replace("\\\n", " ").split()), "sh")
            for name, text in texts.items()
        ]
    found = []
    for begin, fence, lines in blocks(page):
        if fence in ("", "sh", "bash", "console"):
            joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
            for offset, text in enumerate(joined):
                text = re.sub(r"^([A-Z_]+=\S+ )+", "", text.removeprefix("$ ").removeprefix(".venv/bin/"))
                is_command = text.split(" ")[0] in KNOWN and not re.search(r": |   \S+ {3}", text.split("#")[0])
                if is_command or (fence == "sh" and text and not text.startswith("#")):
                    found.append(Line(f"{page}:{begin + offset}", text, fence))
    return found


def words_of(text: str) -> list[str]:
    """As a shell splits it, without a comment and without what comes after > or |."""
    words = shlex.split(re.sub(r"\s#.*", "", text))  # shlex would also cut store#ads-ranker
    ends = [index for index, word in enumerate(words) if word in (">", "2>", "|", "&&")]
    return words[: ends[0]] if ends else words


def check(line: Line) -> None:
    """Whether such a command exists: options, targets, scripts, files."""
    program, *words = words_of(line.text)
    assert program in KNOWN, f"{line.where}: what is {program!r}? teach this test to check it"
    if program == "neuroshard":
        name, *arguments = words
        if name.startswith("-"):
            assert_options(typer.main.get_command(app), words, line.where)
            return
        assert name in COMMANDS, f"{line.where}: there is no neuroshard {name}"
        if "…" in arguments:
            assert_options(COMMANDS[name], arguments, line.where)
        else:
            try:
                COMMANDS[name].make_context(name, arguments)
            except typer.Exit:  # --help
                pass
            except Exception as error:  # typer has a click of its own, whose errors have no public name
                pytest.fail(f"{line.where}: {line.text}: {error}")
    elif program == "make":
        targets = [word for word in words if "=" not in word]
        assert set(targets) <= MAKE_TARGETS, f"{line.where}: no such target: {targets}"
    elif program == "python":
        assert_script(words, line.where)
    else:
        assert_paths(words, line.where)


def assert_options(command: Any, words: list[str], where: str) -> None:
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known - {"--help"}
    assert not unknown, f"{where}: neuroshard {command.name} has no {unknown}"


def assert_script(words: list[str], where: str) -> None:
    """Its file is there, and its source names every option that it is given."""
    if words[:1] == ["-m"] and words[1] in ("pip", "pytest", "venv"):
        return
    script = ROOT / (f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0])
    assert script.is_file(), f"{where}: there is no {script.relative_to(ROOT)}"
    source = script.read_text()
    missing = [
        word
        for word in words
        if word.startswith("--") and word != "--help" and f'"{word.partition("=")[0]}"' not in source
    ]
    assert not missing, f"{where}: {script.name} has no {missing}"


def assert_paths(words: list[str], where: str) -> None:
    """Whatever looks like a file of this project is one, but for what the reader fills in: $kind, YOURS."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = [word for word in words if "/" in word and word.split("/")[0] in folders and not PLACEHOLDER.search(word)]
    missing = [word for word in named if not (ROOT / word).exists()]
    assert not missing, f"{where}: there is no {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_that_exists(page, monkeypatch):
    monkeypatch.setenv("KFP_ENDPOINT", "http://localhost:8888")  # stands for --endpoint
    for line in commands(page):
        check(line)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_within_a_sentence_is_one_that_exists(page):
    prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    for text in re.findall(r"`([^`\n]+)`", prose):
        words = text.split()
        if words[0] == "neuroshard" and len(words) > 1 and words[1][0].islower():
            assert words[1] in COMMANDS, f"{page}: there is no {text!r}"
            words = words[1:]
        elif words[0] == "make" and len(words) > 1:
            assert words[1] in MAKE_TARGETS or not words[1].islower(), f"{page}: there is no {text!r}"
        if words[0] in COMMANDS and words[0] != "tables":
            assert_options(COMMANDS[words[0]], words[1:], page)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_compiles_and_imports_what_there_is(page):
    for begin, fence, lines in blocks(page):
        if fence != "python":
            continue
        source = "\n".join((ROOT / page).read_text().splitlines()[begin - 1 : begin - 1 + len(lines)])
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("neuroshard"):
                missing = {alias.name for alias in node.names} - names_of(node.module or "")
                assert not missing, f"{page}:{begin}: {node.module} has no {missing}"


def names_of(module: str) -> set[str]:
    """The names of a module; where it needs a newer TorchRec than is here, those that its source defines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchrec and FBGEMM, while they are imported
            return set(dir(importlib.import_module(module)))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("torchrec."):
            raise
        found = importlib.util.find_spec(module)
        tree = ast.parse(Path(str(found and found.origin)).read_text())
        return {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_picture_is_there(page):
    linked = [one for one in re.findall(r"\]\(([^)\s]+)", (ROOT / page).read_text()) if "://" not in one]
    missing = []
    for one in linked:
        target, _, place = one.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists() or (place and place not in headings(path)):
            missing.append(one)
    assert not missing


def headings(page: Path) -> set[str]:
    """What links may name of a page, as GitHub makes it of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def reason(line: Line) -> str:
    """Why a command is not run; empty for one that is."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, line.text)), "")


def test_every_command_runs_or_has_a_reason_and_every_reason_is_of_a_command() -> None:
    found = [line for page in (*PAGES, HELP) for line in commands(page)]
    assert [line for line in found if not reason(line) and words_of(line.text)[0] not in ("neuroshard", "python")] == []
    assert {reason(line) for line in found} == {"", *NOT_RUN.values()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "later"),
    [
        ("README.md", []),
        (TUTORIAL, [page for page in (*PAGES, HELP) if page not in ("README.md", TUTORIAL) and commands(page)]),
    ],
    ids=["README.md", "tutorial and all other pages"],
)
def test_the_commands_run_one_after_another(page, later, tmp_path, monkeypatch):
    first = tmp_path / "first"
    first.mkdir()
    (first / "examples").symlink_to(ROOT / "examples")
    for name in ("models.yaml", "parameters.yaml"):
        shutil.copy(ROOT / "manifests" / "overlays" / "prod" / name, first)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with serving(KfpStub()) as stub:
        monkeypatch.setenv("KFP_ENDPOINT", stub.url)
        monkeypatch.chdir(first)
        for line in commands(page):
            run(line)
        for number, another in enumerate(later):
            monkeypatch.chdir(shutil.copytree(first, tmp_path / str(number), symlinks=True))
            for command in BEFORE.get(another, []):
                run(Line(f"before {another}", f"neuroshard {command}", ""))
            for line in commands(another):
                if made := re.search(r" -o (\w+)/", line.text):
                    shutil.rmtree(made[1])
                run(line)


@pytest.mark.slow
def test_the_figures_of_the_pages_can_be_drawn_from_their_numbers(tmp_path):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    drawn = {path.name for path in (docs / "images").glob("*.svg")}
    for name in drawn:
        (docs / "images" / name).unlink()
    subprocess.run([sys.executable, docs / "figures.py", "draw"], check=True, capture_output=True, timeout=HANGS)
    assert {path.name for path in (docs / "images").glob("*.svg")} == drawn


def run(line: Line) -> None:
    """A command as FASTER has it, unless it is one of NOT_RUN: ours in this process, a script in one of its own."""
    if reason(line):
        return
    text = line.text
    for pattern, instead in FASTER:
        text = re.sub(pattern, instead, text)
    program, *words = words_of(text)
    if words[0] == "promote":
        words[1] = read_plan(Path("theirs.json")).digest()
    if program == "neuroshard":
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{line.where}: {text}: {done.output}{done.exception!r}"
        return
    assert program == "python", f"{line.where}: {text}: teach this test to run it, or NOT_RUN why it does not"
    if words[0] == "examples/train.py":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main = runpy.run_path(str(ROOT / words[0]), run_name="train")["main"]
        ended = run_script(main, *words[1:], cwd=Path.cwd(), environment={})  # forked: imports take most of a short run
    else:
        command = ["bash", "-c", text.replace("python", sys.executable, 1)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert ended.returncode == 0, f"{line.where}: {text}: {ended.stderr}"
