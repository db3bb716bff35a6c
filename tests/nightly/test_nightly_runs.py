"""The next nightly run alone continues from whatever state a run leaves behind. Whole runs, on the synthetic backend."""

import json
import os
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from helpers.nightly import NightlyRun, Place, clocks_at, killed_after, lost_on_h100, spec, tables
from helpers.nodes import node
from helpers.refusals import refused
from neuroshard.client import load_plan
from neuroshard.core.case import Cases
from neuroshard.core.errors import MeasureError, StoreError
from neuroshard.core.plan import Plan
from neuroshard.deploy.bundles import MAX_ERROR
from neuroshard.deploy.gate import Gate
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy
from neuroshard.files.cases import read_cases, write_cases
from neuroshard.files.tables import write_tables
from neuroshard.fleet.survey import SurveySettings
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.run import RunSummary
from neuroshard.measure.run import run as measure_run
from neuroshard.measure.shares import job as job_module
from neuroshard.models.open import open_cost_model
from neuroshard.models.serving import known_models
from neuroshard.nightly import survey as survey_module
from neuroshard.nightly.augment import read_draws
from neuroshard.nightly.augment import run as augment
from neuroshard.nightly.deploy import UNSERVED
from neuroshard.orders.nightly import Request, Verdict
from neuroshard.store.folder import FolderStore
from neuroshard.store.lease import LeaseHeld, leased
from neuroshard.store.measuring import AUGMENT_LEASE, FAILED, measuring
from neuroshard.store.patience import PatientStore
from neuroshard.store.releases import plans_of

pytestmark = pytest.mark.slow


H200, H100 = node("a"), node("b", product="NVIDIA-H100")
GROWN = "TrainJob"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_place(folder: Path) -> Place:
    """One model of six small tables on four H200."""
    made = Place(folder, [H200])
    write_tables(folder / "six.json", tables(6))
    made.models = [spec(made)]
    return made


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path / "place")


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """That place after its first nightly run, made once; tests get copies."""
    made = make_place(tmp_path_factory.mktemp("first") / "place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        well(made.nightly_run(), ads="live")
    return made


@pytest.fixture
def in_use(first_run: Place, tmp_path: Path) -> Place:
    """The place after its first nightly run."""
    shutil.copytree(first_run.folder, tmp_path / "place")
    copy = make_place(tmp_path / "place")
    copy.now = first_run.now
    return copy


def store_of(place: Place) -> FolderStore:
    return FolderStore(Path(place.store))


def well(ended: NightlyRun, **ends: str) -> NightlyRun:
    """A nightly run that ended well, without a doubt."""
    assert (ended.error, ended.instead) == ("", "")
    assert not ends or ended.ends == ends
    return ended


def campaigns(place: Place) -> list[str]:
    """The folders of all campaigns in the store."""
    return sorted(
        {entry.key.rpartition("/draw-")[0] for entry in store_of(place).list("_measuring/") if "/draw-" in entry.key}
    )


def measured_cases(place: Place) -> dict[str, bytes]:
    return {
        entry.key: store_of(place).read(entry.key)
        for entry in store_of(place).list("_measuring/")
        if ".parquet" in entry.key
    }


def live_model(place: Place, batch_size: int = 512) -> Any:
    (one,) = (known for track, known in known_models(store_of(place))[0].items() if track.batch_size == batch_size)
    return one


def test_an_unchanged_run_measures_nothing_and_plans_anew(in_use: Place) -> None:
    before = measured_cases(in_use)
    ended = well(in_use.nightly_run(), ads="live")
    assert (ended.campaigns, measured_cases(in_use)) == ((), before)


def test_more_devices_are_measured_on_and_nothing_is_measured_anew(in_use: Place) -> None:
    before = measured_cases(in_use)
    in_use.models[0]["devices"] = 8
    assert well(in_use.nightly_run(), ads="live").campaigns
    assert load_plan(in_use.store, "ads").task.devices == 8
    assert before.items() <= measured_cases(in_use).items()
    [folder] = campaigns(in_use)
    first, second = read_draws(store_of(in_use), folder).values()
    assert (len(first.compute), {len(case.device_dims) for case in first.collective}) == (40, {4})
    assert (len(second.compute), {len(case.device_dims) for case in second.collective}) == (0, {8})
    assert live_model(in_use).model.manifest.device_counts == (4, 8)
    assert well(in_use.nightly_run()).campaigns == ()


def test_few_all_to_alls_are_enough_to_learn_each_number_of_devices(place: Place) -> None:
    place.models = [spec(place), spec(place, "feed", devices=2)]
    well(place.nightly_run(collective_cases=20), ads="live", feed="live")
    assert live_model(place).model.manifest.device_counts == (2, 4)
    assert well(place.nightly_run(collective_cases=20)).campaigns == ()


def test_a_budget_that_was_too_small_is_gone_on_with(place: Place) -> None:
    place.budget_seconds = 0.0
    first = place.nightly_run()
    assert (first.error, first.ends) == ("", {"ads": "live"})
    assert "by analytic:h200, made from a datasheet, which may be 30% off" in first.instead
    assert "no case was measured that could be used" in first.instead
    place.budget_seconds = 1e6
    second = place.nightly_run()
    assert (second.error, second.ends, len(second.campaigns)) == (
        "",
        {"ads": "kept"},
        1,
    )  # it searched the very same shards
    assert live_model(place).model.manifest.device_counts == (4,)
    assert well(place.nightly_run(), ads="kept").campaigns == ()


def test_two_tables_that_teach_nothing_of_unseen_ones_are_extended_by_six(place: Place) -> None:
    write_tables(place.folder / "two.json", tables(2))
    place.models = [spec(place, file="two.json")]
    first = place.nightly_run()
    assert first.ends == {"ads": "live"}
    assert "its error on unseen tables is not known" in first.instead
    place.models = [spec(place)]
    second = place.nightly_run()
    assert (second.error, second.ends, len(second.campaigns)) == ("", {"ads": "kept"}, 1)  # planned at once, and again
    [folder] = campaigns(place)
    one, two = read_draws(store_of(place), folder).values()
    assert {case.split for case in one.compute} == {"train", "valid", "test_sets"}
    assert "test_tables" in {case.split for case in two.compute}
    assert well(place.nightly_run()).campaigns == ()


def test_tables_that_have_grown_keep_their_role_and_stop_nobody(in_use: Place) -> None:
    write_tables(in_use.folder / "six.json", tables(6, rows=1100))
    assert well(in_use.nightly_run()).campaigns == ()  # tables alone ask for no measuring
    in_use.models[0]["devices"] = 8
    well(in_use.nightly_run(), ads="live")
    [folder] = campaigns(in_use)
    roles: dict[str, set[bool]] = {}
    for cases in read_draws(store_of(in_use), folder).values():
        for case in cases.compute:
            for table in case.tables:
                roles.setdefault(table.name.partition("~")[0], set()).add(case.split == "test_tables")
    assert {len(found) for found in roles.values()} == {1}


def test_batch_sizes_in_turns_keep_a_live_model_each(place: Place) -> None:
    well(place.nightly_run(batch_size=512))
    well(place.nightly_run(batch_size=1024))
    for batch_size in (512, 1024, 512):
        assert well(place.nightly_run(batch_size=batch_size)).campaigns == ()
        spec = f"{place.store}#{live_model(place).release.fingerprint}"
        assert open_cost_model(spec, batch_size).batch_size == batch_size


def spoil(place: Place, ending: str, data: bytes) -> Path:
    path = next(path for path in sorted(Path(place.store).rglob(ending)) if "aside" not in path.parts)
    path.write_bytes(data)
    return path


def test_a_failure_of_measuring_is_reported_also_where_earlier_costs_gave_a_cost_model(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    well(place.nightly_run())
    place.models[0]["devices"] = 8

    def lost(*given: Any) -> None:
        raise MeasureError("no GPU answers")

    monkeypatch.setattr(job_module, "measure", lost)
    capsys.readouterr()
    assert place.nightly_run().campaigns
    assert re.search(r"^degraded: NVIDIA-H200.*: measure: no GPU answers$", capsys.readouterr().err, re.M)


def test_a_record_that_may_not_be_written_concerns_its_kind_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = FolderStore.create

    def denied(self: FolderStore, key: str, data: bytes) -> bool:
        if key.endswith("learned.json"):
            raise StoreError(f"{key}: access denied")
        return create(self, key, data)

    monkeypatch.setattr(FolderStore, "create", denied)
    assert well(place.nightly_run(), ads="live").campaigns


def test_shares_of_another_bench_are_set_aside_and_measured_again(place: Place) -> None:
    place.nodes = [node("a"), node("c")]
    well(place.nightly_run())
    path = next(Path(place.store).rglob("costs-2-of-2/costs.json"))
    other = json.loads(path.read_text())
    other["bench"]["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(other))
    place.models[0]["devices"] = 8
    healed = place.nightly_run()  # with half of its costs: parts of the cost model are stand-ins until the next run
    assert (healed.error, healed.ends) == ("", {"ads": "live"})
    assert list(Path(place.store).rglob("aside/**/costs-2-of-2/costs.json"))
    assert well(place.nightly_run()).campaigns  # what was set aside is measured again
    assert well(place.nightly_run()).campaigns == ()


@pytest.mark.parametrize("data", [b"", b'{"bench": ', b'{"format_version": 99}'])
def test_a_truncated_share_of_an_earlier_number_of_pods_is_set_aside(place: Place, data: bytes) -> None:
    place.nodes = [node("a"), node("c")]
    well(place.nightly_run())
    spoil(place, "costs-2-of-2/costs.json", data)
    place.pods = 1
    place.models[0]["devices"] = 8
    well(place.nightly_run(), ads="live")
    assert list(Path(place.store).rglob("aside/**/costs-2-of-2/costs.json"))


def test_a_night_that_measures_what_an_earlier_one_left_over_says_so(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cost model of the first night is live and serves searches, but its all-to-alls are a datasheet's."""

    def table_sets_alone(cases: Path, costs: Path, backend: str, settings: MeasureSettings) -> RunSummary:
        whole = read_cases(cases)
        write_cases(cases, whole.model_copy(update={"collective": ()}))
        done = measure_run(cases, costs, backend, settings)
        return replace(done, planned=done.planned + len(whole.collective))

    with monkeypatch.context() as patched:
        patched.setattr(job_module, "measure", table_sets_alone)
        place.nightly_run()
    capsys.readouterr()
    assert place.nightly_run().campaigns
    said = capsys.readouterr().err
    assert "-> partly learned: cost model" in said
    assert "NVIDIA-H200, by a formula: 32 cases are left over from earlier runs, whose budget ended before\n" in said
    assert place.nightly_run().campaigns == ()


@pytest.mark.parametrize("file", ["compute.parquet", "collective.parquet", "cases.json"])
def test_damaged_cases_are_drawn_again_and_their_costs_stay(place: Place, file: str) -> None:
    place.budget_seconds = 0.0
    place.nightly_run()
    spoil(place, f"cases/{file}", b"damaged")
    place.budget_seconds = None
    assert place.nightly_run().campaigns
    assert live_model(place).model.manifest.device_counts == (4,)
    assert well(place.nightly_run(), ads="kept").campaigns == ()


def test_costs_of_fewer_pods_are_gone_on_with(place: Place) -> None:
    place.nodes = [node(name) for name in "abc"]
    place.pods = 3
    well(place.nightly_run())
    rows = len(measured_cases(place))
    [folder] = campaigns(place)
    for ended in Path(place.store, folder).rglob("ended-*"):
        ended.unlink()
    place.pods = 2
    well(place.nightly_run())
    assert len(measured_cases(place)) == rows


def test_a_model_of_the_future_serves_no_more_and_gets_todays_date(place: Place) -> None:
    today = place.now
    place.now = datetime(2040, 1, 1, tzinfo=UTC)
    well(place.nightly_run())
    place.now = today
    ended = place.nightly_run()
    assert (ended.error, len(ended.campaigns)) == ("", 1)
    assert live_model(place).release.time == today.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert well(place.nightly_run()).campaigns == ()


def test_a_model_that_is_too_old_is_measured_anew(in_use: Place) -> None:
    before = live_model(in_use).release
    in_use.a_day_goes_by(30)
    in_use.max_age_seconds = 20 * 86400.0
    well(in_use.nightly_run())
    assert live_model(in_use).release.number > before.number
    assert list(Path(in_use.store).rglob("aside/**/*.parquet"))
    assert well(in_use.nightly_run()).campaigns == ()


def test_another_kind_that_cannot_be_measured_stops_no_model(in_use: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use.nodes = [H200, H100]
    in_use.models = [spec(in_use), spec(in_use, "old", hardware="h100")]
    monkeypatch.setattr(job_module, "measure", lost_on_h100)
    ended = in_use.nightly_run()
    assert (ended.error, ended.ends) == ("", {"ads": "live", "old": "live"})
    assert ended.verdicts["ads"].doubts == ()
    assert "the cost model of NVIDIA-H200" in ended.verdicts["old"].doubts[0]
    assert "the workers of 3 cases in a row were lost" in ended.verdicts["old"].doubts[0]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_use.folder / "cache"))
    assert in_use.nightly_run().ends["old"] in ("live", "kept")
    assert well(in_use.nightly_run()).campaigns == ()


def test_a_changed_model_among_many_is_the_only_one_with_a_new_release(place: Place) -> None:
    place.models = [spec(place, name) for name in ("ads", "feed", "video")]
    well(place.nightly_run())
    place.models[1]["memory"] = "7GiB"
    ended = well(place.nightly_run())
    assert ended.campaigns == ()
    assert {name: verdict.release for name, verdict in ended.verdicts.items()} == {"ads": 1, "feed": 2, "video": 1}


def test_a_fleet_of_two_kinds_of_which_one_vanishes_overnight_and_comes_back(place: Place) -> None:
    place.nodes = [H200, H100]
    place.models = [spec(place, hardware=""), spec(place, "old", hardware="h100")]
    first = place.nightly_run()
    assert (first.error, first.ends, len(first.campaigns)) == ("", {"ads": "live", "old": "live"}, 2)
    held = first.verdicts["ads"].hardware
    place.nodes = [H200] if "H100" in held else [H100]
    second = place.nightly_run()
    assert (second.error, second.campaigns) == ("", ())
    assert (second.verdicts["ads"].before, second.verdicts["old"].before) == (held, "")
    assert f", the night before for {held}: " in second.verdicts["ads"].text
    place.nodes = [H200, H100]
    assert place.nightly_run().verdicts["ads"].hardware == held


def test_a_missing_tables_file_stops_its_own_model_alone(in_use: Place) -> None:
    in_use.models = [spec(in_use), spec(in_use, "feed", "not-there.json")]
    ended = in_use.nightly_run()
    assert ended.ends == {"ads": "live", "feed": "red"}
    assert "feed has no new plan (nothing is live)" in ended.error
    assert "its tables cannot be read" in ended.error
    in_use.models[1] = spec(in_use, "feed")
    well(in_use.nightly_run(), ads="live", feed="live")
    in_use.models[1] = spec(in_use, "feed", "not-there.json")
    ended = in_use.nightly_run()
    assert (ended.error, ended.ends) == ("", {"ads": "live", "feed": "no plan"})
    assert ended.verdicts["feed"].text.startswith(
        "feed has no new plan (release 1 is live): its tables cannot be read: "
    )
    assert ended.verdicts["feed"].text.count("its tables cannot be read") == 1


def test_work_that_may_not_be_touched_stops_no_other_kind(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed on one kind of hardware cannot be forgotten, and nothing under its folder can be listed."""
    place.nodes = [H200, H100]
    place.models = [spec(place), spec(place, "feed", hardware="h100")]
    (place.folder / "nodes.json").write_text(json.dumps({"items": place.nodes}))
    settings = SurveySettings(Request.parse(place.request, "request"), nodes=str(place.folder / "nodes.json"))
    found = survey_module.run(json.dumps(place.models), place.store, settings)
    first, second = found.campaigns
    assert [augment(found, one, place.store) for one in (first, second)] == [[1], [1]]

    for method in ("delete", "list"):
        do = getattr(FolderStore, method)

        def denied(store: FolderStore, key: str, do: Any = do) -> Any:
            if key.startswith(first.folder):
                raise StoreError(f"{key}: access denied")
            return do(store, key)

        with monkeypatch.context() as patched:
            patched.setattr(FolderStore, method, denied)
            assert augment(found, first, place.store) == ([1] if method == "delete" else [])
            assert augment(found, second, place.store) == [1]


def test_the_survey_too_writes_as_the_single_writer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets damaged cases aside, which a store that ignores conditional writes takes from a single writer alone."""
    asked: list[bool] = []

    def opened(url: str, *, single_writer: bool = False) -> PatientStore:
        asked.append(single_writer)
        return PatientStore(FolderStore(Path(url)))

    monkeypatch.setattr(survey_module, "open_patiently", opened)
    (place.folder / "nodes.json").write_text(json.dumps({"items": place.nodes}))
    settings = SurveySettings(Request.parse(place.request, "request"), nodes=str(place.folder / "nodes.json"))
    survey_module.run(json.dumps(place.models), place.store, settings, single_writer=True)
    assert asked == [True]


def test_where_no_model_can_be_planned_nothing_is_measured(place: Place) -> None:
    place.models = [spec(place, file="not-there.json")]
    ended = place.nightly_run()
    assert "model 'ads' gets no plan, and none is live: its tables cannot be read" in ended.error
    assert not Path(place.store).exists()


def test_a_refused_cost_model_plans_with_its_doubt_and_more_is_measured(place: Place) -> None:
    place.max_error = 1e-4
    first = place.nightly_run()
    assert (first.error, first.ends) == ("", {"ads": "live"})
    assert "off on unseen tables, too far to go live" in first.instead
    [folder] = campaigns(place)
    assert len(measuring(store_of(place), folder).draws) == 1
    for draws in (2, 3):
        again = place.nightly_run()
        assert (again.error, again.ends) == ("", {"ads": "kept"})
        assert len(measuring(store_of(place), folder).draws) == draws
    while (last := place.nightly_run()).campaigns:  # four times what was asked for is the most
        assert len(measuring(store_of(place), folder).draws) <= 8
    assert last.error == ""
    place.max_error = 10.0
    assert place.nightly_run().error == ""
    assert live_model(place).release.error


def test_with_any_error_allowed_every_cost_model_goes_live(place: Place) -> None:
    place.max_error = None
    well(place.nightly_run(), ads="live")
    assert live_model(place).release.error > MAX_ERROR


def test_a_fallback_replaces_a_plan_that_serves_only_where_its_error_is_allowed(place: Place) -> None:
    place.nodes = "not a list"  # type: ignore[assignment] # no hardware can be measured, so plans are by the datasheet
    place.request["batch_size"], place.max_error = 2**20, 0.2
    place.models[0]["memory"] = "16GiB"  # one device holds all tables, and what a step of so large a batch needs
    assert place.nightly_run().ends == {"ads": "live"}
    good = load_plan(place.store, "ads")
    on_one_device = tuple(shard.model_copy(update={"device": 0}) for shard in good.shards)
    provenance = good.provenance.model_copy(update={"seed": 1})
    bad = Plan(task=good.task, shards=on_one_device, provenance=provenance)
    deploy(bad, store_of(place), "ads", now=place.now, gate=Gate(force=True))

    night = place.nightly_run()
    assert (night.error, night.ends) == ("", {"ads": "kept"})
    assert (
        "30.0%, more than the 20.0% of --max-error; measure more cases; the live plan stays"
        in night.verdicts["ads"].why
    )
    place.max_error = 0.3
    night = place.nightly_run()
    assert (night.error, night.ends) == ("", {"ads": "live"})
    assert "more than the 30.0% that its cost model is off by" in night.verdicts["ads"].why


@pytest.mark.parametrize("data", [b"garbage", b'{"format_version": 999}'])
def test_a_foreign_pointer_stops_nobody_else(place: Place, data: bytes) -> None:
    place.nodes = [H200, H100]
    place.models = [spec(place), spec(place, "old", hardware="h100")]
    well(place.nightly_run(), ads="live", old="live")
    (broken,) = (
        path
        for path in Path(place.store, "hardware").rglob("live.json")
        if "H100" in json.loads(path.read_text())["device_name"]
    )
    broken.write_bytes(data)
    ended = place.nightly_run()
    assert (ended.error, ended.verdicts["ads"].doubts) == ("", ())
    for _ in range(2):
        last = place.nightly_run()
    garbage = data == b"garbage"
    assert bool(last.verdicts["old"].doubts) is not garbage  # what is garbage heals; what is newer stays, and is named
    assert (broken.read_bytes() == data) is not garbage


@pytest.mark.parametrize("data", [b"garbage", b'{"format_version": 999}'])
def test_a_models_own_pointer_heals_where_nobody_can_follow_it(place: Place, data: bytes) -> None:
    place.models = [spec(place), spec(place, "feed")]
    well(place.nightly_run(), ads="live", feed="live")
    pointer = Path(place.store, "feed", "live.json")
    good = pointer.read_bytes()
    pointer.write_bytes(data)
    ended = place.nightly_run()
    assert (ended.error, ended.verdicts["ads"].doubts) == ("", ())
    assert ended.verdicts["feed"].doubts
    assert pointer.read_bytes() == (good if data == b"garbage" else data)
    in_words = "release 1 is live" if data == b"garbage" else "what is live cannot be read"
    assert in_words in ended.verdicts["feed"].text


def test_no_older_plan_goes_live_in_place_of_one_that_a_newer_version_deployed(place: Place) -> None:
    place.models = [spec(place), spec(place, "feed")]
    well(place.nightly_run(), ads="live", feed="live")
    place.models[1]["memory"] = "7GiB"
    well(place.nightly_run(), ads="live", feed="live")
    newest = Path(place.store, "feed", "releases", "00000002.json")
    newest.write_bytes(b'{"format_version": 999}')
    pointer = Path(place.store, "feed", "live.json")
    pointer.write_bytes(b"garbage")
    night = place.nightly_run()
    assert pointer.read_bytes() == b"garbage"
    assert night.ends["feed"] == "red"
    assert night.verdicts["ads"].doubts == ()
    (doubt, *_) = night.verdicts["feed"].doubts
    assert "feed/live.json: not JSON" in doubt
    assert "releases/00000002.json: format_version 999 is from a newer neuroshard" in doubt


def test_no_older_cost_model_goes_live_in_place_of_one_that_a_newer_version_published(
    in_use: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    (pointer,) = Path(in_use.store, "hardware").rglob("live.json")
    (pointer.parent / "releases" / "00000002.json").write_bytes(b'{"format_version": 999}')
    pointer.write_bytes(b"garbage")
    night = in_use.nightly_run()
    assert night.error == ""
    assert night.campaigns
    assert pointer.read_bytes() == b"garbage"
    begins = f"note: {in_use.store}/{pointer.relative_to(in_use.store)}: not JSON"
    (note,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(begins)]
    assert "releases/00000002.json: format_version 999 is from a newer neuroshard" in note
    assert "not JSON" in night.instead


@pytest.mark.parametrize("file", ["nets.safetensors", "model.json"])
@pytest.mark.parametrize("damage", [b"damaged", None])
def test_a_live_cost_model_that_the_store_lost_or_damaged_is_learned_again(
    in_use: Place, monkeypatch: pytest.MonkeyPatch, file: str, damage: bytes | None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_use.folder / "another-machine"))
    (path,) = Path(in_use.store, "hardware").rglob(file)
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    before = measured_cases(in_use)
    assert in_use.nightly_run().error == ""
    assert live_model(in_use).model is not None
    assert measured_cases(in_use) == before
    assert well(in_use.nightly_run()).campaigns == ()


def test_after_a_rollback_the_run_keeps_the_live_plan_and_ends_well(in_use: Place) -> None:
    in_use.models[0]["devices"] = 8
    well(in_use.nightly_run())
    in_use.models[0]["memory"] = "7GiB"
    well(in_use.nightly_run())
    roll_back(store_of(in_use), plans_of("ads"), now=datetime.now(UTC))
    kept = load_plan(in_use.store, "ads")
    for _ in range(2):
        ended = in_use.nightly_run()
        assert (ended.error, ended.ends) == ("", {"ads": "kept"})
        assert "it was live, and was rolled back; the live plan stays" in ended.verdicts["ads"].why
    assert load_plan(in_use.store, "ads") == kept


def test_runs_at_once_with_other_seeds_leave_one_another_alone(place: Place) -> None:
    well(place.nightly_run(seed=0))
    before = measured_cases(place)
    place.models[0]["devices"] = 8
    well(place.nightly_run(seed=1))
    assert before.items() <= measured_cases(place).items()
    assert len(campaigns(place)) == 2


def test_a_run_that_is_overtaken_by_another_decides_anew(in_use: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use.models[0]["memory"] = "7GiB"
    faster = [True]
    swap = FolderStore.swap

    def overtaken(store: FolderStore, key: str, data: bytes, expected: str | None) -> None:
        if key == "ads/live.json" and faster:
            faster.clear()
            in_use.run_steps(Request.parse({**in_use.request, "seed": 1}, "request"))
        swap(store, key, data, expected)

    monkeypatch.setattr(FolderStore, "swap", overtaken)
    ended = in_use.nightly_run()
    assert (ended.error, faster) == ("", [])
    assert load_plan(in_use.store, "ads").task.device_memory_bytes == (7 * 2**30,) * 4


def test_a_share_that_another_run_measures_is_left_to_it(place: Place) -> None:
    place.budget_seconds = 0.0
    place.nightly_run()
    [folder] = campaigns(place)
    place.budget_seconds = None
    with leased(PatientStore(store_of(place)), f"{folder}/draw-0001/lease-1-of-1.json", "another"):
        ended = place.run_steps(Request.parse(place.request, "request"))
    assert (ended.error, ended.ends) == ("", {"ads": "live"})
    assert not [path for path in Path(place.store, folder).rglob("*.parquet") if "costs-" in str(path)]
    well(place.nightly_run())


def test_models_do_not_wait_for_cases_that_another_run_draws_or_died_drawing(place: Place) -> None:
    place.budget_seconds = 0.0
    place.nightly_run()
    [folder] = campaigns(place)
    settings = SurveySettings(Request.parse(place.request, "request"), nodes=str(place.folder / "nodes.json"))
    found = survey_module.run(json.dumps(place.models), place.store, settings)
    store_of(place).delete(f"{folder}/{FAILED}")
    assert survey_module.planned_at_once(found, store_of(place)) == ()
    store_of(place).create(f"{folder}/{AUGMENT_LEASE}", b"{}")
    assert survey_module.planned_at_once(found, store_of(place)) == ("ads",)


def test_a_dead_runs_lease_is_taken_over_and_a_living_ones_is_not(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with leased(PatientStore(store), "w/lease", "one"):
        with refused(LeaseHeld, "nightly run one"), leased(PatientStore(store), "w/lease", "two"):
            pass
        with leased(PatientStore(store), "w/lease", "two", seconds=0.0):
            assert json.loads(store.read("w/lease"))["owner"] == "two"
    assert store.list("w/") == ()


def test_a_dead_nights_lease_that_is_dated_in_the_future_is_taken_over(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.create("w/lease", b'{"owner": "dead", "nonce": "1"}')
    os.utime(tmp_path / "w" / "lease", (2e9, 2e9))  # the year 2033
    with leased(PatientStore(store), "w/lease", "two"):
        assert json.loads(store.read("w/lease"))["owner"] == "two"


def test_a_cluster_that_cannot_be_asked_is_planned_for_by_what_is_live(in_use: Place) -> None:
    in_use.nodes = "not a list"  # type: ignore[assignment]
    ended = in_use.nightly_run()
    assert (ended.error, ended.ends) == ("", {"ads": "live"})
    assert "no hardware can be measured in this run" in ended.instead


def test_a_run_killed_at_any_write_is_gone_on_with_by_the_next(tmp_path: Path) -> None:
    for write in range(0, 66, 6):
        one = Place(tmp_path / f"killed-{write}", [H200])
        write_tables(one.folder / "six.json", tables(6))
        one.models = [spec(one)]
        with killed_after(write):
            killed = one.nightly_run()
        assert one.nightly_run().error == ""
        assert well(one.nightly_run()).campaigns == ()
        assert load_plan(one.store, "ads").task.devices == 4
        if not killed.killed:
            break
    else:
        pytest.fail("a nightly run has more writes than were tried")


def test_a_run_is_recorded_for_each_model(place: Place) -> None:
    place.budget_seconds = 0.0
    ended = place.nightly_run()
    raw = json.loads(Path(place.store, "_nightly", "ads.json").read_text())
    assert Verdict.parse(raw, "ads") == ended.verdicts["ads"]
    plan = load_plan(place.store, "ads")
    assert isinstance(plan, Plan)
    assert plan.provenance.instead in ended.instead


MISSPELT = "no hardware 'h20O' in the fleet or the store, which have NVIDIA-H200, by a formula; is it misspelt?"


def test_misspelt_hardware_is_refused_before_anything_is_measured(place: Place) -> None:
    place.models = [spec(place, hardware="h20O")]
    night = place.nightly_run()
    assert (MISSPELT in night.error, night.verdicts, campaigns(place)) == (True, {}, [])


def test_misspelt_hardware_costs_one_model_its_plan_and_the_others_go_on(in_use: Place) -> None:
    in_use.models = [spec(in_use, hardware="h20O"), spec(in_use, "feed")]
    night = in_use.nightly_run()
    assert (night.error, night.ends) == ("", {"ads": "no plan", "feed": "live"})
    assert night.verdicts["ads"].why == MISSPELT
    assert (night.verdicts["ads"].release, load_plan(in_use.store, "ads").task.devices) == (1, 4)


def test_hardware_that_has_left_the_fleet_is_known_to_the_store_at_any_batch_size(in_use: Place) -> None:
    in_use.nodes = [H100]
    for size in (512, 1024):
        night = in_use.nightly_run(batch_size=size)
        assert (night.error, "no plan" in night.ends.values()) == ("", False)


def test_a_fleet_without_any_node_tonight_refuses_no_name_of_hardware(place: Place) -> None:
    place.nodes = []
    night = place.nightly_run()
    assert (night.error, night.ends) == ("", {"ads": "live"})


@pytest.mark.parametrize("damage", [b"damaged", b"", None])
def test_a_damaged_live_plan_is_written_again_by_the_next_night(in_use: Place, damage: bytes | None) -> None:
    plan = load_plan(in_use.store, "ads")
    path = Path(in_use.store, "ads", "plans", f"{plan.digest()}.json")
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    night = in_use.nightly_run()
    assert (night.error, load_plan(in_use.store, "ads", cache_dir=False).digest()) == ("", plan.digest())
    assert bool(night.verdicts["ads"].doubts) == (damage is not None)
    well(in_use.nightly_run())


def test_a_damaged_live_plan_of_a_model_without_a_new_one_is_no_plan(in_use: Place) -> None:
    spoil(in_use, "ads/plans/*.json", b"damaged")
    in_use.models[0]["tables"] = str(in_use.folder / "gone.json")
    in_use.models.append(spec(in_use, "feed"))
    night = in_use.nightly_run()
    assert night.ends == {"ads": "red", "feed": "live"}
    assert "gone.json" in night.error
    assert "and the live plan cannot be loaded" in night.error


def test_modules_that_tell_the_time_are_those_that_a_test_can_set() -> None:
    with clocks_at(datetime(2030, 1, 1, tzinfo=UTC)):
        assert vars(survey_module)["datetime"].now(UTC).year == 2030
    assert augment is not None


def rolled_back_place(place: Place) -> tuple[Plan, Plan]:
    """A plan that a person went back to, and the one that was rolled back, which each night finds again."""
    well(place.nightly_run())
    good = load_plan(place.store, "ads")
    place.models = [spec(place, memory="7GiB")]
    well(place.nightly_run())
    bad = load_plan(place.store, "ads")
    roll_back(store_of(place), plans_of("ads"), now=datetime.now(UTC))
    night = place.nightly_run()
    assert (night.ends, load_plan(place.store, "ads").digest()) == ({"ads": "kept"}, good.digest())
    return good, bad


def test_a_rolled_back_plan_does_not_return_where_the_live_one_is_damaged(place: Place) -> None:
    good, bad = rolled_back_place(place)
    spoil(place, f"ads/plans/{good.digest()}.json", b"damaged")
    for night in (place.nightly_run(), place.nightly_run(), place.nightly_run()):
        assert night.error == ""
        found = load_plan(place.store, "ads", cache_dir=False)
        assert set(found.shards) not in (set(bad.shards), set(good.shards))
    assert "was rolled back before, so this one is by " in found.provenance.instead


def test_a_rolled_back_plan_does_not_return_as_the_same_placement_of_another_seed(place: Place) -> None:
    good, _ = rolled_back_place(place)
    night = place.nightly_run(seed=1)  # the seed is in the plan, so this one has another digest
    assert (night.ends, load_plan(place.store, "ads").digest()) == ({"ads": "kept"}, good.digest())


@pytest.mark.parametrize(("change", "fact"), [("rows", "2,000 rows"), ("poolings", "'mean'"), ("devices", "not for 8")])
def test_a_live_plan_that_does_not_serve_after_a_rollback_degrades_every_night(
    in_use: Place, change: str, fact: str
) -> None:
    place = in_use
    good = load_plan(place.store, "ads")
    if change == "devices":
        place.models[0]["devices"] = 8
    else:
        new = (
            tables(6, 2000)
            if change == "rows"
            else tuple(one.model_copy(update={"pooling": "mean"}) for one in tables(6))
        )
        write_tables(place.folder / "six.json", new)
    well(place.nightly_run())
    roll_back(store_of(place), plans_of("ads"), now=datetime.now(UTC))
    for _ in range(2):
        night = place.nightly_run()
        assert (night.error, night.ends) == ("", {"ads": "kept"})
        assert night.verdicts["ads"].doubts == (UNSERVED,)
        assert fact in night.verdicts["ads"].text
    assert load_plan(place.store, "ads").digest() == good.digest()
    place.models[0]["memory"] = "100KiB"
    night = place.nightly_run()
    assert night.ends == {"ads": "no plan"}
    assert UNSERVED in night.verdicts["ads"].text


def test_a_model_whose_every_plan_was_rolled_back_is_red_where_none_can_be_loaded(place: Place) -> None:
    place.models = [spec(place, devices=1)]
    well(place.nightly_run())
    good = load_plan(place.store, "ads")
    place.models = [spec(place, devices=1, memory="7GiB")]
    well(place.nightly_run())
    roll_back(store_of(place), plans_of("ads"), now=datetime.now(UTC))
    spoil(place, f"ads/plans/{good.digest()}.json", b"damaged")
    night = place.nightly_run()
    assert night.ends == {"ads": "red"}
    assert "was rolled back" in night.error


@pytest.mark.parametrize("lost", ["cases.json", "compute.parquet"])
def test_a_draw_whose_cases_are_lost_keeps_the_tables_that_it_held_out(in_use: Place, lost: str) -> None:
    [folder] = campaigns(in_use)
    [before] = read_draws(store_of(in_use), folder).values()
    next(Path(in_use.store, folder).rglob(f"cases/{lost}")).unlink()
    in_use.models = [spec(in_use, devices=8)]
    well(in_use.nightly_run())
    first, second = read_draws(store_of(in_use), folder).values()
    assert {case.case_id for case in first.compute} == {case.case_id for case in before.compute}
    assert held_out(second) <= held_out(before)
    assert 8 in live_model(in_use).model.manifest.device_counts


def held_out(cases: Cases) -> set[str]:
    return {table.name for case in cases.compute if case.split == "test_tables" for table in case.tables}


@pytest.mark.parametrize("data", [b"", b"garbage", b'{"format_version": 999}'])
def test_a_damaged_copy_of_the_live_release_is_written_again(in_use: Place, data: bytes) -> None:
    live = Path(in_use.store, "ads", "live.json").read_bytes()
    copy = Path(in_use.store, "ads", "releases", "00000001.json")
    copy.write_bytes(data)
    night = in_use.nightly_run()
    assert (night.error, night.ends) == ("", {"ads": "live"})
    assert "was not the live release 1; it was put there" in night.instead
    assert copy.read_bytes() == live
    assert [path.read_bytes() for path in Path(in_use.store, "ads", "aside").iterdir()] == [data]
    assert well(in_use.nightly_run()).instead == ""


@pytest.mark.parametrize("key", ["feed/live.json", "feed/releases/00000001.json", "_nightly/feed.json", "hardware"])
def test_an_object_that_may_not_be_read_costs_no_other_model_its_plan(
    place: Place, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.models = [spec(place), spec(place, "feed", hardware="h100")]
    place.nodes = [H200, H100]
    well(place.nightly_run(), ads="live", feed="live")
    if key == "hardware":
        pointers = sorted(Path(place.store, "hardware").rglob("live.json"))
        (denied,) = [path for path in pointers if "H100" in json.loads(path.read_text())["device_name"]]
    else:
        denied = Path(place.store, key)
    opened = os.open

    def open_(path: Any, *rest: Any, **options: Any) -> int:
        if str(path) == str(denied):
            raise PermissionError(13, "Permission denied")
        return opened(path, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr("neuroshard.store.folder.os.open", open_)
        night = place.nightly_run()
    assert night.verdicts["ads"].end in ("live", "kept")
    assert night.verdicts["ads"].doubts == ()
    assert (night.error == "") == (key != "feed/live.json")
    if key == "feed/live.json":
        assert "feed/live.json: cannot read it: Permission denied" in night.error
        assert night.verdicts["feed"].release is None
        assert "nothing is live" not in night.error
    after = well(place.nightly_run())
    assert all(end in ("live", "kept") for end in after.ends.values())
