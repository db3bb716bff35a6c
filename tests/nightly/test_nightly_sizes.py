"""A model's page of sizes: put beside its release, and no harm to it where that fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.costs import BENCH, random_model, random_tables
from helpers.nightly import Killed
from helpers.plans import NOW
from neuroshard.core.errors import NotFound, StoreError
from neuroshard.core.units import parse_bytes
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.deploy.bundles import PublishRule, publish_model
from neuroshard.files.tables import write_tables
from neuroshard.nightly import deploy as room
from neuroshard.nightly.deploy import ReleaseFiles
from neuroshard.nightly.deploy import run as release
from neuroshard.nightly.search import run as plan
from neuroshard.orders.nightly import Request, Survey, Verdict, read_specs
from neuroshard.store.folder import FolderStore
from neuroshard.store.releases import read_live, size_keys
from neuroshard.submit.wait import told

Night = Callable[..., Verdict]
FEW = {"devices": "2,4", "time_budget": "10m"}
PAGE, DATA = size_keys("ads")


def found(**asked: Any) -> Survey:
    spec = {
        "name": "ads",
        "tables": "tables.json",
        "devices": 4,
        "memory": "8GiB",
        "hardware": BENCH.hardware.name,
        **asked,
    }
    request = Request(compute_cases=1, collective_cases=0, batch_size=BENCH.batch_size, seed=0, backend=BENCH.backend)
    hardware = {"ads": BENCH.hardware.fingerprint}
    return Survey(
        owner="tonight",
        request=request,
        models=read_specs(json.dumps([spec])),
        hardware=hardware,
        campaigns=(),
        parameters={"algorithm": "size", "memory_margin": 0.1, "min_gain": -1.0},
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderStore:
    """A store with a cost model of one kind of hardware."""
    monkeypatch.chdir(tmp_path)
    made, model = FolderStore(tmp_path / "store"), random_model(2, 4)
    save_cost_model(tmp_path / "model", model)
    publish_model(tmp_path / "model", made, now=NOW, asked=PublishRule(max_error=None))
    write_tables(tmp_path / "tables.json", random_tables(9))
    return made


@pytest.fixture
def night(store: FolderStore, tmp_path: Path) -> Night:
    """The steps of a model in one night: search, then deploy."""

    def steps(survey: Survey) -> Verdict:
        names = ("t.json", "plan.json", "release.json", "page.html")
        tables, out, released, page = (tmp_path / name for name in names)
        for left in (tables, out, released, page):
            left.unlink(missing_ok=True)
        _, searched = plan(survey, "ads", store.url, tables, out)
        return release(survey, "ads", searched, ReleaseFiles(out, tables, released, page), store.url)

    return steps


def swept(store: FolderStore) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(store.read(DATA))
    return data


def test_sizes_of_a_measured_kind_and_of_a_datasheet_are_put_beside_the_release(
    store: FolderStore, night: Night
) -> None:
    memory = f"{BENCH.hardware.name}=40GiB"
    verdict = night(found(size={**FEW, "models": [BENCH.hardware.name, "analytic:h100"], "memory": [memory]}))
    data, page = swept(store), store.read(PAGE).decode()
    assert (verdict.end, verdict.no_sizes) == ("live", "")
    assert [(row["basis"], row["devices"]) for row in data["rows"]] == [
        ("formula", 2),
        ("formula", 4),
        ("datasheet", 2),
        ("datasheet", 4),
    ]
    assert (data["model"], data["run"], data["release"]) == ("ads", "tonight", read_live(store, "ads").release.number)
    assert {row["memory_bytes"] for row in data["rows"][:2]} == {parse_bytes("40GiB")}
    for said in (f"of ads, release 1, {data['time']}", "analytic:h100 x 4", f"{store.url}#{BENCH.hardware.name} x 2"):
        assert said in page
    margin = [row["memory_bytes"] - row["memory_left_bytes"] - row["memory_used_bytes"] for row in data["rows"]]
    assert all(left >= 0.1 * row["memory_bytes"] - 1 for left, row in zip(margin, data["rows"], strict=True))


def test_a_sweep_has_what_the_model_asks_of_its_own_search(store: FolderStore, night: Night) -> None:
    bound = {"max_shards": 1, "tables": [{"match": "t0", "devices": [3]}]}
    night(found(constraints=bound, pipeline="none", size=FEW))
    two, four = swept(store)["rows"]
    assert two["state"] != "fits"
    assert "device 3" in two["why"]
    assert four["state"] == "fits"


def test_each_night_replaces_the_page_and_its_date(store: FolderStore, night: Night) -> None:
    night(found(size=FEW))
    first = swept(store)
    write_tables(Path("tables.json"), random_tables(5))
    assert night(found(size=FEW)).no_sizes == ""
    second = swept(store)
    assert [row["plan"] for row in first["rows"]] != [row["plan"] for row in second["rows"]]


def test_a_kind_without_a_cost_model_is_left_out_and_named(store: FolderStore, night: Night) -> None:
    assert night(found(size={**FEW, "models": ["b300", "analytic:h100"]})).no_sizes == ""
    data = swept(store)
    assert {row["model"] for row in data["rows"]} == {"analytic:h100"}
    assert any("#b300 is left out" in note and "no cost model" in note for note in data["notes"])


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ({"models": "b300"}, "no cost model of hardware 'b300'"),
        ({"memory": "1MiB"}, "no size of any kind fits"),
        ({"time_budget": "0.001s"}, "1 size not searched"),
    ],
)
def test_a_sweep_that_fails_leaves_the_release_and_says_why(
    store: FolderStore, night: Night, size: dict[str, Any], why: str
) -> None:
    survey = found(size={"devices": 4, **size})
    verdict = night(survey)
    assert (verdict.end, verdict.doubts, verdict.release) == ("live", (), 1)
    assert why in verdict.no_sizes
    assert verdict.text.endswith(f"no page of sizes: {verdict.no_sizes}")
    assert Verdict.parse(json.loads(store.read("_nightly/ads.json")), "ads") == verdict
    with pytest.raises(NotFound):
        store.read(PAGE)
    assert told(store, survey, ended_well=True) == (f"degraded: {verdict.text}",)


def test_neither_a_fault_of_ours_nor_a_page_that_may_not_be_written_fails_the_step(
    store: FolderStore, night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by\nzero")

    with monkeypatch.context() as patch:
        patch.setattr(room, "size", broken)
        verdict = night(found(size=FEW))
    assert (verdict.end, verdict.no_sizes) == ("live", "the sweep failed: ZeroDivisionError: by zero")

    create = FolderStore.create

    def denied(store: FolderStore, key: str, data: bytes) -> bool:
        if key == PAGE:
            raise StoreError(f"{key}: permission denied")
        return create(store, key, data)

    monkeypatch.setattr(FolderStore, "create", denied)
    verdict = night(found(size=FEW))
    assert (verdict.release, verdict.no_sizes) == (1, f"{PAGE}: permission denied")


def test_where_the_sweep_is_killed_the_release_and_its_verdict_are_there(
    store: FolderStore, night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(room, "size", killed)
    with pytest.raises(Killed):
        night(found(size=FEW))
    assert read_live(store, "ads").release.number == 1
    assert Verdict.parse(json.loads(store.read("_nightly/ads.json")), "ads").end == "live"


def test_a_model_without_a_plan_still_gets_its_sizes(store: FolderStore, night: Night) -> None:
    verdict = night(found(memory="20MiB", size={**FEW, "memory": "20GiB"}))
    assert verdict.end == "red"
    assert (verdict.no_sizes, swept(store)["release"]) == ("", 0)
    assert all(row["state"] == "fits" for row in swept(store)["rows"])


def test_without_tables_there_is_neither_a_plan_nor_sizes(night: Night) -> None:
    Path("tables.json").unlink()
    verdict = night(found(size=FEW))
    assert verdict.end == "red"
    assert verdict.no_sizes == f"its tables are not known: {verdict.why}"
    assert "tables.json" in verdict.why


def test_a_model_that_asks_for_none_has_none(store: FolderStore, night: Night) -> None:
    assert night(found()).no_sizes == ""
    assert not [entry.key for entry in store.list("ads/size")]
