"""Which cost models a plan is searched with where its hardware's own live one cannot be used."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.memory_store import MemoryStore
from neuroshard.models.published import Listed
from neuroshard.models.serving import known_models
from neuroshard.nightly import fallbacks
from neuroshard.nightly.fallbacks import candidates, choose
from neuroshard.orders.nightly import ModelSpec, Request, Survey

SPEC = ModelSpec(name="ads", tables="tables.json", devices=1, memory="1GiB")
REQUEST = Request(compute_cases=1, collective_cases=0, batch_size=512, seed=0, backend="cuda")
HARDWARE = "0123456789abcdef"


def published(digest: str, error: float) -> Listed:
    """A cost model of the hardware that is not live."""
    manifest: Any = SimpleNamespace(batch_size=512, report=SimpleNamespace(unseen_tables_error=error))
    return Listed(HARDWARE, digest, datetime.now(UTC), False, manifest)


@pytest.mark.parametrize(
    ("max_error", "found"),
    [
        (
            0.2,
            {
                "b": "another cost model of its hardware, 4.0% off on unseen tables",
                "a": "a cost model that is 30.0% off on unseen tables, too far to go live",
            },
        ),
        (
            None,
            {
                "a": "another cost model of its hardware, 30.0% off on unseen tables",
                "b": "another cost model of its hardware, 4.0% off on unseen tables",
            },
        ),
    ],
)
def test_a_good_cost_model_that_is_live_no_more_comes_before_one_that_is_too_far_off(
    max_error: float | None, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallbacks, "list_published", lambda store: (published("a", 0.3), published("b", 0.04)))
    survey = Survey(request=REQUEST, models=(SPEC,), hardware={"ads": HARDWARE}, campaigns=(), max_error=max_error)

    *others, analytic = candidates(survey, SPEC, MemoryStore(), {})

    assert {one.cost_model.rpartition("@")[2]: one.what for one in others} == found
    assert [one.cost_model.rpartition("@")[2] for one in others] == list(found)
    assert analytic.cost_model.startswith("analytic:")


def test_a_broken_pointer_is_a_reason_for_its_own_hardware_alone() -> None:
    store, other = MemoryStore(), "f" * 16
    store.create(f"hardware/{HARDWARE}/512/live.json", b"{")
    quoting = b'{"format_version": "%s"}' % HARDWARE.encode()  # its fault names the first hardware
    store.create(f"hardware/{other}/512/live.json", quoting)
    why = known_models(store)[1]
    survey = Survey(request=REQUEST, models=(SPEC,), hardware={"ads": HARDWARE}, campaigns=())

    instead = choose(survey, SPEC, store).instead

    assert why[HARDWARE] in instead
    assert why[other] not in instead
