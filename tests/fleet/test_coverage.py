"""Which kinds need measuring, and why, by cost models in a folder store; and the command that tells it."""

import json
import os
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helpers.costs import random_model
from helpers.nodes import node
from helpers.plans import NOW
from helpers.refusals import refused
from helpers.tier_costs import TRUTH
from neuroshard.cli import app
from neuroshard.core.cost import Hardware
from neuroshard.core.errors import StoreError
from neuroshard.core.release import ModelRelease
from neuroshard.core.table import Table
from neuroshard.core.value import canonical_json, sha256
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.features import FEATURES
from neuroshard.costmodel.manifest import MODEL_FORMAT
from neuroshard.costmodel.nets import to_tensors
from neuroshard.deploy.golive import go_live, next_number, put
from neuroshard.fleet.cluster import Node
from neuroshard.fleet.coverage import KindCoverage, coverage
from neuroshard.fleet.labels import Kind, kinds_of
from neuroshard.fleet.run import TOLERATIONS
from neuroshard.models.published import list_published
from neuroshard.models.serving import Wanted, known_models, serves, usable
from neuroshard.store.bundles import find_hardware, models_of
from neuroshard.store.folder import FolderStore
from neuroshard.store.track import live_or_none

DAY = 86400.0
TABLE = Table(name="t", rows=10**5, dim=64, pooling_factor=8.0)


def kind(**changes: Any) -> Kind:
    [found], _ = kinds_of([Node.from_json(node("n", **changes), "n")], {}, TOLERATIONS)
    return found


def make_live(
    store: FolderStore,
    hardware: Hardware,
    days_old: float = 1.0,
    error: float | None = 0.08,
    batch_size: int = 65536,
    **manifest: Any,
) -> str:
    """A cost model of this hardware, live since `days_old` days, with these fields of model.json changed; its digest."""
    model = of_pooled_tables(random_model(2, 4))
    bench = model.manifest.bench.model_copy(update={"hardware": hardware, "batch_size": batch_size})
    fields = {"bench": bench, "hardware_fingerprint": hardware.fingerprint, "batch_size": batch_size}
    changed = model.manifest.model_copy(update={**fields, "batch_sizes": (batch_size,)})
    data = canonical_json({**changed.model_dump(mode="json"), **manifest})
    line, digest = models_of(hardware.fingerprint, batch_size), sha256(data)
    put(store, line, digest, dict(zip(line.keys(digest), (to_tensors(model.nets), data), strict=True)))
    live = live_or_none(store, line)
    release = ModelRelease(
        fingerprint=hardware.fingerprint,
        bundle_digest=digest,
        number=next_number(live, store, line),
        time=(NOW - timedelta(days=days_old)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        backend="cuda",
        device_name=hardware.name,
        batch_size=batch_size,
        error=error,
    )
    go_live(release, live, store, line)
    return digest


def of_pooled_tables(model: TrainedCostModel) -> TrainedCostModel:
    """The model, trained on no sequences and no tables pooled by mean."""
    scale = model.nets.compute.scale
    other = np.array(FEATURES) != "mean_pooling"
    scale = replace(scale, low=scale.low * other, high=scale.high * other)
    nets = replace(model.nets, compute=replace(model.nets.compute, scale=scale))
    manifest = model.manifest.model_copy(update={"tensors_sha256": sha256(to_tensors(nets))})
    return replace(model, nets=nets, manifest=manifest)


def stands(store: FolderStore, kind: Kind, **limits: Any) -> KindCoverage:
    [one] = coverage([kind], known_models(store)[0], now=NOW, usual=Wanted(**limits))
    return one


def test_a_kind_is_covered_by_its_own_live_model_whatever_node_it_was_measured_on(store: FolderStore) -> None:
    digest = make_live(store, kind().hardware.model_copy(update={"name": "NVIDIA H200", "driver": "570.1"}))
    one = stands(store, kind(), max_age_seconds=2 * DAY, max_error=0.1)
    assert (one.state, one.to_measure, one.bundle, one.release) == ("covered", False, digest, 1)
    assert one.why == f"cost model {digest[:12]}, 1.0 days old, error on unseen tables 8.0%"


def test_an_empty_store_and_a_kind_that_was_never_seen(store: FolderStore) -> None:
    assert stands(store, kind()).state == "new"
    make_live(store, kind(product="NVIDIA-L40S", memory_mib=46068).hardware)
    one = stands(store, kind())
    assert (one.state, one.why, one.to_measure) == ("new", "no cost model of this kind is live", True)


@pytest.mark.parametrize(
    ("live", "wanted", "state", "why"),
    [
        ({"days_old": 31}, {"max_age_seconds": 31 * DAY}, "covered", ""),
        (
            {"days_old": 31},
            {"max_age_seconds": 30 * DAY},
            "model too old",
            ": it is 31.0 days old, and 30.0 are allowed",
        ),
        ({"error": 0.2}, {}, "covered", ""),
        (
            *({"error": 0.2}, {"max_error": 0.1}, "error too high"),
            ": its error on unseen tables is 20.0%, and 10.0% is allowed",
        ),
        (
            *({"error": None}, {"max_error": 0.1}, "error too high"),
            ": its error on unseen tables was not measured, and 10.0% is allowed",
        ),
        ({}, {"batch_size": 65536}, "covered", ""),
        (
            *({}, {"batch_size": 512}, "batch size changed"),
            "cost models are live for 65,536 samples a step, and 512 are asked for",
        ),
        (
            *({"days_old": -365}, {}, "dated in the future"),
            "it is dated 2026-11-20T12:00:00Z, which is in the future, so its age is not known",
        ),
        (
            *({"hardware": kind(driver="570.86.15").hardware}, {}, "driver changed"),
            "its cost model is of driver 570.86.15, and the nodes have 580.65.06",
        ),
        ({"format_version": MODEL_FORMAT + 1}, {}, "unreadable", ""),
        ({"features": ["rows", "dim"]}, {}, "unreadable", "trained on other features"),
        ({}, {"ranks": (4,), "measurable": (4,)}, "covered", ""),
        ({}, {"ranks": (64,), "measurable": (2, 4)}, "covered", ""),  # extrapolated, as nothing here measures it
        ({}, {"ranks": (8,), "measurable": (8,)}, "ranks missing", ""),
        ({}, {"columns": 128}, "covered", ""),
        ({}, {"columns": 132}, "too narrow", ""),
        ({}, {"tables": (TABLE,)}, "covered", ""),
        ({}, {"tables": (TABLE, TABLE.model_copy(update={"pooling": "none"}))}, "other kinds of tables", ""),
    ],
)
def test_a_live_model_covers_its_kind_unless_it_lacks_what_is_wanted(
    store: FolderStore, live: dict[str, Any], wanted: dict[str, Any], state: str, why: str
) -> None:
    here = kind(driver="580.65.06")
    make_live(store, **{"hardware": here.hardware, **live})
    one = stands(store, here, **wanted)
    assert (one.state, one.to_measure) == (state, state != "covered")
    assert why in one.why


def test_models_of_two_batch_sizes_are_live_beside_each_other(store: FolderStore) -> None:
    for size in (512, 65536):
        make_live(store, kind().hardware, batch_size=size)
    assert {stands(store, kind(), batch_size=size).state for size in (512, 65536)} == {"covered"}


def test_everything_in_which_a_model_falls_short_is_said(store: FolderStore) -> None:
    make_live(store, kind().hardware, days_old=3)
    one = stands(store, kind(), ranks=(8,), measurable=(8,), max_age_seconds=DAY, max_error=0.01)
    assert one.lacks == ("ranks missing", "model too old", "error too high")


def test_what_cannot_be_had_tonight_or_is_shared_is_not_measured(store: FolderStore) -> None:
    gone = stands(store, kind(ready=False))
    shared = stands(store, kind(product="NVIDIA-H200-SHARED", labels={"nvidia.com/gpu.replicas": "4"}))
    assert (gone.state, gone.to_measure) == ("new", False)
    assert (shared.state, shared.to_measure) == ("shared", False)


def test_a_bundle_that_never_went_live_covers_nothing(store: FolderStore) -> None:
    line, manifest = models_of(kind().fingerprint, 512), b"{}"
    store.create(line.keys(sha256(manifest))[1], manifest)
    assert known_models(store) == ({}, {})


@pytest.mark.parametrize("file", [0, 1])
@pytest.mark.parametrize(
    ("damage", "reason"), [(None, "does not exist"), (b"numb3rs", "it is cut off or was changed|damaged")]
)
def test_a_live_bundle_whose_files_are_lost_or_damaged_is_reported_and_its_kind_measured_anew(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: int, damage: bytes | None, reason: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = make_live(store, kind().hardware)
    key = models_of(kind().fingerprint, 65536).keys(digest)[file]
    store.delete(key)
    if damage is not None:
        store.create(key, damage)
    one = stands(store, kind())
    assert (one.state, one.to_measure) == ("unreadable", True)
    assert re.search(rf"{digest}/.*({reason})", one.why)


@pytest.mark.parametrize("data", [b"garbage", b'{"format_version": 999}'])
def test_a_pointer_that_cannot_be_read_is_noted_and_holds_up_no_other(store: FolderStore, data: bytes) -> None:
    make_live(store, kind().hardware)
    broken = store.root / models_of("0" * 16, 512).live_key
    broken.parent.mkdir(parents=True)
    broken.write_bytes(data)
    assert stands(store, kind()).state == "covered"
    assert [*known_models(store)[1]] == ["0" * 16]


def test_a_kind_that_may_not_be_listed_is_noted_and_holds_up_no_other(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digest, own, other = make_live(store, kind().hardware), kind().fingerprint, "0" * 16
    for stray in ("README", f"{other}/512/live.json", "lost+found/x"):
        (store.root / "hardware" / stray).parent.mkdir(parents=True, exist_ok=True)
        (store.root / "hardware" / stray).touch()
    scandir = os.scandir

    def denied(path: str) -> object:
        if str(path).endswith((other, "lost+found")):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert stands(store, kind()).state == "covered"
    assert [*known_models(store)[1]] == [other]
    assert [one.digest for one in list_published(store)] == [digest]
    assert other in capsys.readouterr().err
    assert find_hardware(store, own).release.bundle_digest == digest
    with refused(StoreError, other):
        find_hardware(store, other)


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["fleet", *arguments])


@pytest.fixture
def nodes(tmp_path: Path) -> str:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"items": [node("a"), node("b", labels={"nvidia.com/gpu.product": "NVIDIA-H100"})]}))
    return str(path)


def test_the_command_tells_people_and_programs_the_same(nodes: str, store: FolderStore) -> None:
    make_live(store, kind().hardware)
    text = command("--nodes", nodes, "--against", store.url).output
    listed = json.loads(command("--nodes", nodes, "--against", store.url, "--json").output)
    assert {entry["hardware"]["name"]: entry["state"] for entry in listed["kinds"]} == {
        "NVIDIA-H100": "new",
        "NVIDIA-H200": "covered",
    }
    for entry in listed["kinds"]:
        assert entry["fingerprint"] in text
        assert f"{entry['state']}: {entry['why'][:20]}" in text


def test_this_machine_has_a_cpu() -> None:
    listed = json.loads(command("--local", "--json").output)
    assert listed["kinds"][0]["hardware"]["kind"] == "cpu"
    assert "to_measure" not in listed["kinds"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local", "--nodes", "n.json"], "--local asks this machine alone"),
        (["--local", "--selector", "{}"], "leave out --nodes, --context, --selector and --tolerations"),
        (["--local", "--tolerations", "[]"], "leave out --nodes, --context, --selector and --tolerations"),
        (["--local", "--max-age", "3h"], "--max-age is for --against"),
        (["--nodes", "n.json"], "n.json: no such file"),
        (["--kubernetes", "--selector", "[]"], "--selector must be a JSON object, not '[]'"),
        (["--kubernetes", "--tolerations", "{"], "--tolerations must be a JSON list, not '{'"),
        (["--kubernetes", "--tolerations", "[" * 100_000], "--tolerations must be a JSON list, not '[[["),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str) -> None:
    assert message in str(command(*arguments).exception)


def test_a_model_that_learned_nothing_beyond_hbm(store: FolderStore) -> None:
    """It is asked for where plans have host memory, and plans can be searched without it."""
    make_live(store, kind().hardware)
    one = stands(store, kind(), tiers=True)
    assert (one.state, one.to_measure) == ("tiers not measured", True)
    assert "datasheet's bus" in one.why
    [known] = known_models(store)[0].values()
    assert usable(serves(known, Wanted(tiers=True), NOW))
    make_live(store, kind().hardware, tiers=TRUTH.model_dump(mode="json"))
    assert stands(store, kind(), tiers=True).state == "covered"
