"""Releases of a model, told from other objects by their keys; artifacts found by the beginning of their digests."""

import pytest

from helpers.memory_store import MemoryStore
from helpers.refusals import refused
from neuroshard.core.errors import NeuroshardError, NotFound, UsageError
from neuroshard.store.releases import plans_of
from neuroshard.store.track import find_artifact

ADS = plans_of("ads")
DIGESTS = [f"{start}{'0' * 55}{end}" for start, end in (("0123abcd", 1), ("0123abcd", 2), ("89abcdef", 1))]


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("ads/releases/00000012.json", 12),
        ("ads/releases/123456789.json", 123456789),
        ("ads/releases/00000000.json", None),  # they begin at 1
        ("ads/releases/000000012.json", None),
        ("ads/releases/12.json", None),
        ("00000012.json", None),
        ("feed/releases/00000012.json", None),
        ("ads/releases/00000012", None),
        ("ads/live.json", None),
    ],
)
def test_a_release_has_its_number_in_its_key(key: str, number: int | None) -> None:
    assert ADS.number_of(key) == number


@pytest.mark.parametrize(
    ("prefix", "kind", "facts"),
    [
        ("0123abc", UsageError, ["'0123abc'", "at least 8"]),
        ("0123abcg", UsageError, ["'0123abcg'"]),
        ("0" * 65, UsageError, ["at least 8"]),
        ("../live.json", UsageError, ["'../live.json'"]),
        ("0123abcd", UsageError, ["2 plans", "'ads'", "more digits"]),
        ("ffffffff", NotFound, ["'ffffffff'", "'ads'"]),
    ],
)
def test_what_names_no_plan_alone_is_refused(prefix: str, kind: type[NeuroshardError], facts: list[str]) -> None:
    store = MemoryStore()
    for digest in DIGESTS:
        store.create(f"ads/plans/{digest}.json", b"")
    assert find_artifact(store, ADS, "89abcdef") == DIGESTS[2]
    with refused(kind, *facts):
        find_artifact(store, ADS, prefix)
