"""What a package index shows of this project, and that its version is written down once; `make package` builds and tries it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from infra import package
from infra.extras import VERSIONS
from neuroshard import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_page_has_no_link_that_leads_nowhere() -> None:
    page = package.package_page((ROOT / "README.md").read_text(), None)
    assert package.RELATIVE.findall(page) == []
    assert re.findall(r"\]\(([^)]+)\)", page) == ["https://arxiv.org/abs/2305.01868"]
    assert "docs/tutorial.md" in page


def test_with_an_address_of_the_source_the_links_lead_there() -> None:
    text = "![a picture](docs/a.png) of [docs](docs/b.md#part), not of [others](https://example.com/c.md)"
    assert package.package_page(text, "https://example.com/n/") == (
        "![a picture](https://example.com/n/raw/main/docs/a.png) of [docs](https://example.com/n/blob/main/docs/b.md#part), "
        "not of [others](https://example.com/c.md)"
    )
    assert package.package_page(text, None) == " of docs, not of [others](https://example.com/c.md)"


def test_the_project_says_who_made_it_what_it_is_and_where_to_read_more() -> None:
    assert PROJECT["authors"]
    assert PROJECT["keywords"]
    assert {"Development Status", "Intended Audience", "Topic", "Typing"} <= {
        one.split(" :: ")[0] for one in PROJECT["classifiers"]
    }
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"])
def test_what_a_reader_looks_for_is_there_and_shipped(name: str) -> None:
    assert (ROOT / name).stat().st_size > 500
    assert name in package.SHIPPED


def test_pip_and_make_take_the_same_pythons_which_are_those_that_are_tried() -> None:
    asked = SpecifierSet(PROJECT["requires-python"])
    taken = [version for version in (f"3.{minor}" for minor in range(8, 20)) if asked.contains(f"{version}.1")]
    assert taken == list(VERSIONS)
    least, past = re.findall(r"\(3, (\d+)\) <= sys.version_info < \(3, (\d+)\)", (ROOT / "Makefile").read_text())[0]
    assert taken == [f"3.{minor}" for minor in range(int(least), int(past))]
    assert taken == [one.split()[-1] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {taken[0]} to {taken[-1]}," in (ROOT / page).read_text()


def test_every_place_that_names_the_version_names_the_packages() -> None:
    assert PROJECT["dynamic"] == ["version"]
    folders = ("docs", "images", "manifests", "pipelines")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    texts = [file.read_text() for file in files if file.name == "Dockerfile" or file.suffix in (".md", ".yaml")]
    found = re.findall(r"neuroshard-(?:cpu|gpu|\$kind):([\d.]*\d)|ARG VERSION=(\S+)", "\n".join(texts))
    assert len(found) > 10
    assert {image or argument for image, argument in found} == {__version__}
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()
