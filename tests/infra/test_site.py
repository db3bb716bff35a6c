"""The site of `make docs`: its navigation names every page, its API page every public name, its configuration nothing to fetch.

That links lead somewhere is checked by the build itself, and in tests/docs.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import neuroshard as ns

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
COPIED = re.findall(r"^\t@cp -r (.*) build/docs/$", (ROOT / "Makefile").read_text(), re.M)[0].split()


def named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from named(one)


def test_the_navigation_names_every_page_once() -> None:
    copied = [ROOT / name for name in COPIED]
    found = [file for path in copied for file in (path.rglob("*.md") if path.is_dir() else [path])]
    pages = sorted(str(file.relative_to(ROOT)) for file in found if file.suffix == ".md")

    assert sorted(named(CONFIG["nav"])) == pages
    assert len(pages) > 20


def test_the_python_page_has_every_public_name() -> None:
    described = re.findall(r"^::: neuroshard\.([\w.]+)$", (ROOT / "docs" / "python.md").read_text(), re.M)
    names = [path.rpartition(".")[2] for path in described]

    assert sorted(names) == sorted(set(ns.__all__) - {"__version__"})


def test_the_configuration_names_nothing_to_fetch_and_a_broken_link_fails_the_build() -> None:
    assert CONFIG["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & CONFIG.keys()
    assert CONFIG["validation"] == {"nav": {"omitted_files": "warn"}, "links": {"anchors": "warn"}}
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
