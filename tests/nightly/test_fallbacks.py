"""Which cost models a plan is searched with where its hardware's own live one cannot be used."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.memory_store import MemoryStore
from neuroshard.core.cost import Hardware
from neuroshard.models.published import Listed
from neuroshard.models.serving import Known, known_models
from neuroshard.nightly import fallbacks
from neuroshard.nightly.fallbacks import candidates, choose
from neuroshard.orders.nightly import ModelSpec, Request, Survey
from neuroshard.seen.record import Correction

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
            0.3,  # what is just as far off as may be goes live
            {
                "a": "another cost model of its hardware, 30.0% off on unseen tables",
                "b": "another cost model of its hardware, 4.0% off on unseen tables",
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


H200 = Hardware(kind="cuda", name="NVIDIA-H200", memory_bytes=140 * 2**30)
L4 = Hardware(kind="cuda", name="NVIDIA-L4", memory_bytes=22 * 2**30)
CANNOT_LIST = "no hardware can be measured in this run: the Kubernetes API answered 403"


@pytest.mark.parametrize(
    ("hardware", "there", "taken", "memory", "notes", "facts"),
    [
        ("", [], None, "80GiB", [CANNOT_LIST], ["analytic:h100", "names no hardware", CANNOT_LIST]),
        ("", [], None, "80GiB", [], ["analytic:h100", "names no hardware", "backend cuda"]),
        ("h200", [], None, "80GiB", [CANNOT_LIST], ["analytic:h200", "no cost model of h200", CANNOT_LIST]),
        ("", [H200, L4], H200, "80GiB", [], ["of NVIDIA-H200, NVIDIA-L4", "for NVIDIA-H200", "name it"]),
        ("", [L4], L4, "80GiB", [], ["80.0 GiB", "NVIDIA-L4 has 22.0 GiB"]),
        ("l4", [H200, L4], L4, "1GiB,80GiB", [], ["80.0 GiB", "NVIDIA-L4 has 22.0 GiB"]),
    ],
)
def test_a_plan_says_what_is_not_known_of_its_hardware(
    hardware: str, there: list[Hardware], taken: Hardware | None, memory: str, notes: list[str], facts: list[str]
) -> None:
    model = ModelSpec(name="ads", tables="t.json", devices=memory.count(",") + 1, memory=memory, hardware=hardware)
    survey = Survey(
        request=REQUEST,
        models=(model,),
        hardware={"ads": taken.fingerprint if taken else ""},
        kinds={one.fingerprint: one for one in there},
        campaigns=(),
        notes=tuple(notes),
    )
    instead = choose(survey, model, MemoryStore()).instead
    assert [fact for fact in facts if fact not in instead] == [], instead


def test_a_plan_for_hardware_that_is_known_and_large_enough_guesses_nothing() -> None:
    for model in (SPEC, ModelSpec(name="ads", tables="t.json", devices=1, memory="140GiB", hardware="h200")):
        kinds = {H200.fingerprint: H200} if not model.hardware else {one.fingerprint: one for one in (H200, L4)}
        survey = Survey(request=REQUEST, models=(model,), hardware={"ads": H200.fingerprint}, kinds=kinds, campaigns=())
        assert fallbacks._guessed(survey, model) == ""


def test_hardware_that_is_not_known_is_not_taken_for_the_cpu_of_another_backends_nights() -> None:
    release: Any = SimpleNamespace(
        fingerprint="c" * 16, time="2026-01-01T00:00:00Z", bundle_digest="d" * 64, device_name="EPYC"
    )
    hardware = Hardware(kind="cpu", name="EPYC", memory_bytes=2**30)
    model: Any = SimpleNamespace(manifest=SimpleNamespace(bench=SimpleNamespace(hardware=hardware)))
    survey = Survey(request=REQUEST, models=(SPEC,), hardware={"ads": ""}, campaigns=())
    known: Any = Known(release, model)
    found = list(candidates(survey, SPEC, MemoryStore(), {release.fingerprint: known}))
    assert [one.cost_model for one in found] == ["analytic:h100"]


def test_a_datasheet_is_corrected_by_what_trainers_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"hardware": {"ads": H200.fingerprint}, "kinds": {H200.fingerprint: H200}}
    survey = Survey(request=REQUEST, models=(SPEC,), campaigns=(), **there)
    by = Correction(2.0, 3.0, 4, 0.5, 0.1)
    monkeypatch.setattr(fallbacks, "correction_seen", lambda _, model: by if model == "analytic:h200" else None)
    found = list(candidates(survey, SPEC, MemoryStore(), {}))
    assert [one.cost_model for one in found] == ["analytic:h200*2*3", "analytic:h200"]
    assert "corrected as 4 jobs saw, 10% off where each is left out, instead of 50%" in found[0].what
