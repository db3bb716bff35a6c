"""Build the sdist and the wheel, and try both, each in a fresh venv: `make package`. They are left in dist/.

A venv sees the packages of the Python that runs this, so nothing is downloaded; `make extras-check` installs them anew. On a
package page no link into the repository works: the page gets absolute links under the project URL `Source` of pyproject.toml
where there is one, and no links else (`package_page`).
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from neuroshard import __version__

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (  # by the sdist; the wheel has the package alone
    *("components", "docs", "examples", "pyproject.toml", "MANIFEST.in"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"),
)
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+://)([^)\s]+)\)")

TRIAL = """
import importlib.metadata, subprocess, sys
from pathlib import Path
import neuroshard as ns
assert Path(ns.__file__).is_relative_to(sys.prefix), ns.__file__
assert importlib.metadata.version("neuroshard") == ns.__version__
command = Path(sys.executable).with_name("neuroshard")
search = "search tables.json --model analytic:h100 --batch-size 4096 --devices 4 --memory 64GiB --rounds 1 --quiet -o plan.json"
for words in (
    "--version",
    "tables --preset mlperf-dlrm-dcnv2 -o tables.json",
    search,
    "report plan.json --model analytic:h100 -o report.html",
    "deploy plan.json --store store --name ads-ranker",
):
    done = subprocess.run([command, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
assert ns.load_plan("store", "ads-ranker") == ns.load_plan("plan.json")
assert Path(ns.__file__).with_name("py.typed").is_file()
from neuroshard.submit.package import known_parameters  # reads the compiled pipeline
assert "store" in known_parameters()
"""


def main() -> None:
    dist = ROOT / "dist"
    with tempfile.TemporaryDirectory(prefix="neuroshard-package-") as folder:
        scratch = Path(folder)
        built = build(copy_of_the_tree(scratch / "tree"), scratch / "dist")
        for archive in built:
            check_page(archive)
            attempt(archive, scratch)
            print(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB, installs and works", flush=True)
        shutil.rmtree(dist, ignore_errors=True)
        shutil.copytree(scratch / "dist", dist)
    print(f"in {dist.relative_to(ROOT)}/: {', '.join(archive.name for archive in built)}")


def copy_of_the_tree(tree: Path) -> Path:
    """What is shipped, with the README as a package page shows it."""
    tree.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, tree / name)
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"].get("Source")
    (tree / "README.md").write_text(package_page((ROOT / "README.md").read_text(), source))
    return tree


def package_page(text: str, source: str | None) -> str:
    """The text with absolute links for those into the repository; without an address, their words alone, and no pictures."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if source:
            return f"{picture}[{words}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"
        return "" if picture else words

    return RELATIVE.sub(absolute, text)


def build(tree: Path, dist: Path) -> list[Path]:
    """The sdist, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree)
    return sorted(dist.iterdir())


def check_page(archive: Path) -> None:
    """The version is `neuroshard.__version__`, no link of the page is relative, and the sdist has docs and examples."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(wheel.read(name).decode())
    else:
        with tarfile.open(archive) as sdist:
            inside = {member.name.partition("/")[2]: member for member in sdist}
            missing = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.*")} - inside.keys()
            missing |= set(SHIPPED) - inside.keys()
            assert not missing, f"{archive.name} lacks {sorted(missing)}"
            member = sdist.extractfile(inside["PKG-INFO"])
            assert member is not None
            metadata = HeaderParser().parsestr(member.read().decode())
    assert metadata["Version"] == __version__, metadata["Version"]
    page = str(metadata.get_payload())
    assert page.lstrip().startswith("# NeuroShard"), page[:80]
    assert not RELATIVE.findall(page), RELATIVE.findall(page)


def attempt(archive: Path, scratch: Path) -> None:
    """Install into a fresh venv, and run TRIAL in an empty folder."""
    folder, work = scratch / f"venv-{archive.suffix[1:]}", scratch / f"work-{archive.suffix[1:]}"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "of-the-builder.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", archive)
    work.mkdir()
    run(python, "-I", "-c", TRIAL, cwd=work)


def run(*command: object, cwd: Path | None = None) -> None:
    """Run a command, which says what went wrong if something does."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))[:200]}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
