"""Ceilings of lines hold what is there, and only fall."""

import pytest

from infra.size import faults, room_of

CEILINGS = {"components/neuroshard": 10, "components/neuroshard/core": 100, "tests": 50, "docs": 1000}


def test_a_file_counts_to_the_innermost_room_and_pages_to_docs() -> None:
    files = {
        "components/neuroshard/core/plan.py": "components/neuroshard/core",
        "components/neuroshard/new/file.py": "components/neuroshard",
        "components/neuroshard/api.py": "components/neuroshard",
        "tests/core/data.json": "",
        "docs/search.md": "docs",
        "README.md": "docs",
        "CHANGELOG.md": "",
        "docs/fields.py": "",
    }
    assert {path: room_of(path, CEILINGS) for path in files} == files


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({}, ["core has 104, 4 above"]),
        ({"components/neuroshard/core": 104}, ["core rose from 100 to 104", "all rooms of components rose"]),
        ({"components/neuroshard/core": 90}, ["core has 104, 14 above"]),
        ({"components/neuroshard/new": 5}, ["core has 104", "all rooms of components rose from 110 to 115"]),
        ({"components/neuroshard/new": 5, "components/neuroshard": 5}, ["core has 104"]),
        ({"docs": 900}, ["core has 104"]),
    ],
)
def test_a_room_above_its_ceiling_and_a_ceiling_that_rose_are_a_line_each(
    now: dict[str, int], named: list[str]
) -> None:
    said = faults(
        {**CEILINGS, **now},
        CEILINGS,
        {**dict.fromkeys(now, 0), **CEILINGS, **now, "components/neuroshard/core": 104},
    )
    assert [fact in line for line, fact in zip(said, named, strict=True)] == [True] * len(named)
