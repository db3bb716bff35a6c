"""Cost models released like plans: under their hardware, once under their digest, one of them live."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from helpers.costs import BENCH, random_model, with_error
from helpers.kills import killed_everywhere
from helpers.plans import NOW
from helpers.refusals import refused
from neuroshard.core.errors import Conflict, InvalidInput, NewerFormat, NotFound, Refused, UsageError
from neuroshard.core.value import sha256
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.deploy.bundles import PublishRule, promote_model, publish_model
from neuroshard.deploy.gc import gc
from neuroshard.deploy.golive import mend_live, roll_back
from neuroshard.deploy.run import deploy
from neuroshard.models.open import open_cost_model
from neuroshard.models.published import list_published, open_published
from neuroshard.report.text import listing_text
from neuroshard.store.bundles import models_of, track_of
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.track import all_releases, read_pointer

FINGERPRINT = BENCH.hardware.fingerprint
BATCH = BENCH.batch_size
NAME = f"hardware/{FINGERPRINT}/{BATCH}"
LINE = models_of(FINGERPRINT, BATCH)
MODELS = [with_error(random_model(2, 4, seed=seed), 0.05 + seed / 100) for seed in range(4)]
POOR, UNKNOWN = with_error(random_model(2, seed=9), 0.4), random_model(2, seed=8)


@pytest.fixture(autouse=True)
def _no_copies_of_other_tests(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folders(tmp_path):
    """Folders as `pretrain` writes them, by the model's name."""
    made = {}
    for model in (*MODELS, POOR, UNKNOWN):
        made[model.name] = tmp_path / "models" / model.name
        save_cost_model(made[model.name], model)
    return made


def publish(store, folders, *models):
    return [publish_model(folders[model.name], store, now=NOW) for model in models][-1]


def stood_in(model, *parts):
    """The model with these parts not learned."""
    sentences = tuple(f"{part} are those of analytic:h100, times 1.1 by 3 measured" for part in parts)
    report = model.report.model_copy(update={"stand_ins": sentences})
    return replace(model, manifest=model.manifest.model_copy(update={"report": report}))


def live_model(store) -> str:
    return open_published(f"{store.url}#{FINGERPRINT}").name


def test_a_published_model_is_live_for_its_hardware_and_opens_as_it_was(store, folders):
    release = publish(store, folders, MODELS[0])

    assert (release.name, release.bundle_digest, release.number) == (NAME, MODELS[0].name, 1)
    assert {entry.key for entry in store.list("hardware/")} == {
        f"{NAME}/{MODELS[0].name}/model.json",
        f"{NAME}/{MODELS[0].name}/nets.safetensors",
        f"{NAME}/live.json",
        f"{NAME}/releases/00000001.json",
    }
    assert open_published(f"{store.url}#{FINGERPRINT}").manifest == MODELS[0].manifest


def test_publishing_what_is_live_changes_nothing(store, folders):
    assert publish(store, folders, MODELS[0]) == publish(store, folders, MODELS[0])


def test_rollbacks_walk_back_and_promote_goes_anywhere(store, folders):
    publish(store, folders, *MODELS[:3])
    assert roll_back(store, LINE, now=NOW).action == "rollback"
    assert live_model(store) == MODELS[1].name
    roll_back(store, LINE, now=NOW)
    assert live_model(store) == MODELS[0].name
    promote_model(store, LINE, MODELS[2].name[:8], now=NOW)
    assert live_model(store) == MODELS[2].name
    with refused(NotFound, "00000000"):
        promote_model(store, LINE, "0" * 8, now=NOW)

    assert [(r.number, r.action) for r in all_releases(store, LINE)] == [
        (6, "promote"), (5, "rollback"), (4, "rollback"), (3, "publish"), (2, "publish"), (1, "publish"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "facts"), [(POOR, ["40.0%", "measure more cases"]), (UNKNOWN, ["not known", "3 kinds of tables"])]
)
def test_a_model_with_too_large_an_error_is_published_but_not_live_unless_forced(store, folders, model, facts):
    publish(store, folders, MODELS[0])
    with refused(Refused, "unseen tables", "20.0%", "release 1 stays live", "--force", *facts):
        publish(store, folders, model)
    assert live_model(store) == MODELS[0].name
    assert model.name in {one.digest for one in list_published(store)}

    release = publish_model(folders[model.name], store, now=NOW, asked=PublishRule(force=True))
    assert (release.forced, live_model(store)) == (True, model.name)


def test_the_limit_is_the_users(store, folders):
    publish_model(folders[POOR.name], store, now=NOW, asked=PublishRule(max_error=0.5))
    with refused(UsageError, "--max-error"):
        publish_model(folders[POOR.name], store, now=NOW, asked=PublishRule(max_error=0.0))


def test_the_slower_of_two_publishers_learns_who_won(store, folders):
    class Slow:
        def __getattr__(self, name):
            return getattr(store, name)

        def swap(self, *arguments):
            publish(store, folders, MODELS[1])
            store.swap(*arguments)

    with refused(Conflict, MODELS[1].name[:12]):
        publish_model(folders[MODELS[0].name], Slow(), now=NOW)
    assert live_model(store) == MODELS[1].name


@pytest.mark.slow
def test_a_kill_leaves_the_old_or_the_new_model_live(tmp_path, folders):
    start = tmp_path / "start"
    publish(FolderStore(start), folders, MODELS[0])

    seen = []
    for root in killed_everywhere(start, tmp_path, lambda store: publish(store, folders, MODELS[1])):
        seen.append(live_model(FolderStore(root)))
        publish(FolderStore(root), folders, MODELS[1], MODELS[2])
        assert [r.number for r in all_releases(FolderStore(root), LINE)] == [3, 2, 1]
    switch = seen.index(MODELS[1].name)
    assert seen == [MODELS[0].name] * switch + [MODELS[1].name] * (len(seen) - switch)
    assert 8 < switch < len(seen) - 1


@pytest.mark.parametrize("pointer", [b"{", b'{"format_version": 999}'])
def test_a_pointer_that_cannot_be_read_holds_up_no_other_hardware(store, folders, capsys, pointer):
    publish(store, folders, MODELS[0])
    broken = store.root / models_of("0" * 16, BATCH).live_key
    broken.parent.mkdir(parents=True)
    broken.write_bytes(pointer)

    assert open_published(f"{store.url}#{BENCH.hardware.name}").name == MODELS[0].name
    assert "0" * 16 in capsys.readouterr().err
    assert [one.is_live for one in list_published(store)] == [True]


def test_models_are_listed_where_it_is_unknown_which_is_live(store, folders):
    publish(store, folders, *MODELS[:2])
    (store.root / LINE.live_key).write_bytes(b"{")

    listed = list_published(store)
    assert {one.digest for one in listed if one.manifest and not one.is_live} == {MODELS[0].name, MODELS[1].name}
    assert listing_text(listed, "the store").count("is what the store holds, put the newest file") == 2


def test_gc_takes_old_models_whole(store, folders):
    publish(store, folders, *MODELS)
    long_ago = datetime.now(UTC).timestamp() - 30 * 86_400
    for path in store.root.rglob("*.*"):
        os.utime(path, (long_ago, long_ago))
    gone = gc(store, track_of(NAME), keep=1, age_seconds=86_400, apply=True)

    assert {model.name for model in MODELS[:2]} == {
        LINE.digest_of(e.key) for e in gone.entries if LINE.digest_of(e.key)
    }
    assert {one.digest for one in list_published(store)} == {model.name for model in MODELS[2:]}
    assert live_model(store) == MODELS[3].name


def test_on_s3_too(aws, moto, folders):
    store = open_store(aws(moto))
    publish(store, folders, *MODELS[:2])

    assert live_model(store) == MODELS[1].name
    assert roll_back(store, LINE, now=NOW).bundle_digest == MODELS[0].name
    assert [one.is_live for one in list_published(store)].count(True) == 1


def test_a_models_plans_and_a_hardwares_models_do_not_meet(store, folders):
    from helpers.plans import make_plan

    publish(store, folders, MODELS[0])
    for name in ("hardware", f"hardware/{FINGERPRINT}", "hardware/../m"):
        with refused(UsageError, name):
            deploy(make_plan(), store, name, now=NOW)


@pytest.mark.parametrize(
    "name", ["../../etc", "", "x", "0" * 15, "0" * 17, f"{FINGERPRINT}/..", "G" * 16, FINGERPRINT + "\n"]
)
def test_what_is_no_fingerprint_is_no_folder(name):
    with refused(UsageError, "fingerprint"):
        models_of(name, BATCH)


@pytest.mark.parametrize(
    "name", [f"hardware/{FINGERPRINT}", f"{NAME}/1", f"hardware/{FINGERPRINT}/0", f"hardware/{FINGERPRINT}/x"]
)
def test_a_hardwares_cost_models_are_named_with_their_batch_size(name):
    with refused(UsageError, "hardware/FINGERPRINT/BATCH"):
        track_of(name)
    assert track_of(NAME).name == NAME


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "kind", "fact"),
    [
        ({"feature_version": 999}, NewerFormat, "feature_version 999"),
        ({"format_version": 999}, NewerFormat, "format_version 999"),
        ({"hardware_fingerprint": "0" * 16}, InvalidInput, "hardware_fingerprint"),
        ({"hardware_fingerprint": "../../../x"}, InvalidInput, "hardware_fingerprint"),
        ({"tensors_sha256": "0" * 64}, InvalidInput, "nets.safetensors"),
    ],
)
def test_a_model_that_cannot_be_used_is_not_published(store, folders, fields, kind, fact):
    folder = folders[MODELS[0].name]
    change(folder / "model.json", **fields)
    with refused(kind, fact):
        publish_model(folder, store, now=NOW)

    assert not store.root.exists()


def test_a_bundle_that_was_changed_in_the_store_is_never_opened(store, folders):
    publish(store, folders, MODELS[0])
    nets, manifest = (store.root / key for key in LINE.keys(MODELS[0].name))
    good = nets.read_bytes(), manifest.read_bytes()
    for path in (nets, manifest):
        path.write_bytes(path.read_bytes()[:-1] + b" ")
        with refused(InvalidInput, path.name):
            live_model(store)
        nets.write_bytes(good[0])
        manifest.write_bytes(good[1])


def forge(store, **fields) -> str:
    """A bundle in the store, and live there, whose model.json somebody wrote by hand."""
    nets, manifest = (store.read(key) for key in LINE.keys(read_pointer(store, LINE).release.bundle_digest))
    data = json.dumps({**json.loads(manifest), **fields}).encode()
    for key, bytes_ in zip(LINE.keys(sha256(data)), (nets, data), strict=True):
        store.create(key, bytes_)
    live = read_pointer(store, LINE)
    forged = live.release.model_copy(update={"bundle_digest": sha256(data)})
    store.swap(LINE.live_key, forged.canonical_json(), live.token)
    return sha256(data)


@pytest.mark.parametrize(
    ("fields", "kind", "facts"),
    [
        ({"hardware_fingerprint": "0" * 16}, InvalidInput, [f"'{'0' * 16}'", FINGERPRINT]),
        ({"batch_size": 7}, InvalidInput, [7, BATCH]),
        ({"feature_version": 0}, InvalidInput, ["features"]),
        ({"feature_version": 999}, NewerFormat, ["feature_version 999"]),
        ({"bench": None}, InvalidInput, ["bench"]),
    ],
)  # fmt: skip
def test_a_foreign_model_that_is_live_is_reported_by_where_it_lies(store, folders, fields, kind, facts):
    publish(store, folders, MODELS[0])
    digest = forge(store, **fields)
    with refused(kind, f"{NAME}/{digest}/model.json", *facts):
        live_model(store)


def test_hostile_names_in_a_bundle_reach_no_file(store, folders, tmp_path):
    publish(store, folders, MODELS[0])
    hostile = {"files": ["../../../evil"], "tensors": "/etc/passwd", "nets.safetensors": "../../evil", "../evil": 1}
    digest = forge(store, **hostile)
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    open_published(f"{store.url}#{FINGERPRINT}")

    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    kept = {str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert kept == {f"neuroshard/models/{digest}/{name}" for name in ("model.json", "nets.safetensors")}


def test_a_model_is_fetched_once_and_a_damaged_copy_again(store, folders, tmp_path, monkeypatch):
    publish(store, folders, MODELS[0])
    keys, read = [], FolderStore.read
    monkeypatch.setattr(FolderStore, "read", lambda self, key, *rest: keys.append(key) or read(self, key, *rest))
    live_model(store)
    assert len(keys) == 3
    del keys[:]
    live_model(store)
    assert keys == [LINE.live_key]
    (copy,) = (tmp_path / "cache").rglob("nets.safetensors")
    copy.write_bytes(b"damaged")

    assert live_model(store) == MODELS[0].name
    assert copy.read_bytes() == store.read(LINE.keys(MODELS[0].name)[0])


@pytest.mark.parametrize("name", ["test device", "Test-Device", "device", FINGERPRINT])
def test_hardware_goes_by_its_name_or_fingerprint(store, folders, name):
    publish(store, folders, MODELS[0])

    assert open_published(f"{store.url}#{name}").name == MODELS[0].name


def test_hardware_that_is_not_there_or_not_the_only_one_is_reported(store, folders, tmp_path):
    with refused(NotFound, "'h200'"):
        open_published(f"{store.url}#h200")
    publish(store, folders, MODELS[0])
    with refused(NotFound, FINGERPRINT, "test device", "65,536"):
        open_published(f"{store.url}#h200")
    with refused(NotFound, "publish-model"):
        open_published(f"{store.url}#{'0' * 16}")

    other = BENCH.model_copy(update={"hardware": BENCH.hardware.model_copy(update={"name": "test device 2"})})
    manifest = MODELS[0].manifest.model_copy(
        update={"bench": other, "hardware_fingerprint": other.hardware.fingerprint}
    )
    second = with_error(replace(MODELS[0], manifest=manifest), 0.1)
    save_cost_model(tmp_path / "second", second)
    publish_model(tmp_path / "second", store, now=NOW + timedelta(hours=1))
    with refused(UsageError, "'device'", 2, "fingerprint"):
        open_published(f"{store.url}#device")
    assert open_published(f"{store.url}#device 2").name == second.name


def at_batch(model, batch_size, tmp_path):
    """The folder of the same cost model, said to be measured at another batch size."""
    bench = BENCH.model_copy(update={"batch_size": batch_size})
    changed = {"bench": bench, "batch_size": batch_size, "batch_sizes": (batch_size,)}
    other = replace(model, manifest=model.manifest.model_copy(update=changed), batch_size=batch_size)
    save_cost_model(tmp_path / f"at-{batch_size}", other)
    return tmp_path / f"at-{batch_size}"


def test_each_batch_size_keeps_its_live_model(store, folders, tmp_path):
    publish(store, folders, MODELS[0])
    for _ in range(2):
        publish_model(at_batch(MODELS[1], 512, tmp_path), store, now=NOW)
        publish(store, folders, MODELS[0])

    assert open_published(f"{store.url}#test device", 512).batch_size == 512
    assert open_published(f"{store.url}#test device", BATCH).name == MODELS[0].name
    with refused(UsageError, "--batch-size"):
        open_published(f"{store.url}#test device")
    with refused(InvalidInput, "batch size 7"):
        open_published(f"{store.url}#{FINGERPRINT}", 7)


def test_a_wrong_batch_size_is_refused_with_the_way_out(store, folders):
    publish(store, folders, MODELS[0])
    for spec in (f"{store.url}#{FINGERPRINT}", folders[MODELS[0].name]):
        with refused(InvalidInput, "65,536", "2,048", "--batch-size 2048"):
            open_cost_model(spec, 2048)
        assert open_cost_model(spec, BATCH).batch_size == open_cost_model(spec).batch_size == BATCH


def test_a_very_cost_model_is_named_by_its_digest_live_or_not(store, folders):
    publish(store, folders, MODELS[0], MODELS[1])
    spec = f"{store.url}#{FINGERPRINT}@{MODELS[0].name[:12]}"

    assert open_cost_model(spec, BATCH).name == MODELS[0].name
    with refused(NotFound, "'000000000000'"):
        open_cost_model(f"{store.url}#{FINGERPRINT}@{'0' * 12}")


def test_a_model_that_is_live_with_a_date_in_the_future_goes_live_again_with_todays(store, folders):
    folder = folders[MODELS[0].name]
    publish_model(folder, store, now=datetime(2040, 1, 1, tzinfo=UTC))
    again = publish_model(folder, store, now=NOW)

    assert (again.number, again.time, again.bundle_digest) == (2, "2025-11-20T12:00:00Z", MODELS[0].name)
    assert publish_model(folder, store, now=NOW) == again


@pytest.mark.parametrize("history", [True, False])
def test_a_pointer_of_garbage_is_mended_from_the_history_and_kept(store, folders, history):
    publish(store, folders, MODELS[0], MODELS[1])
    good = (store.root / LINE.live_key).read_bytes()
    (store.root / LINE.live_key).write_bytes(b"garbage")
    if not history:
        for path in (store.root / NAME / "releases").iterdir():
            path.unlink()

    assert "not JSON" in mend_live(store, LINE)
    assert mend_live(store, LINE) is None
    assert [path.read_bytes() for path in (store.root / NAME / "aside").iterdir()] == [b"garbage"]
    assert not history or (store.root / LINE.live_key).read_bytes() == good
    publish(store, folders, MODELS[2])
    assert live_model(store) == MODELS[2].name


def test_a_pointer_of_a_newer_version_is_left_alone(store, folders):
    publish(store, folders, MODELS[0])
    (store.root / LINE.live_key).write_bytes(b'{"format_version": 999}')
    assert mend_live(store, LINE) is None
    assert (store.root / LINE.live_key).read_bytes() == b'{"format_version": 999}'


@pytest.mark.parametrize("damaged_after", [0, 1])
def test_no_older_release_takes_the_place_of_one_that_a_newer_version_wrote(store, folders, damaged_after):
    publish(store, folders, *MODELS[:3])
    history = store.root / NAME / "releases"
    (history / f"{3 - damaged_after:08d}.json").write_bytes(b'{"format_version": 999}')
    if damaged_after:
        (history / "00000003.json").write_bytes(b"garbage")
    (store.root / LINE.live_key).write_bytes(b"garbage")
    before = {entry.key: store.read(entry.key) for entry in store.list("")}

    with refused(NewerFormat, LINE.live_key, LINE.release_key(3 - damaged_after), "999"):
        mend_live(store, LINE)
    assert {entry.key: store.read(entry.key) for entry in store.list("")} == before


def test_a_stand_in_never_replaces_what_was_learned_however_much_error_is_allowed(store, tmp_path):
    learned, guessed = MODELS[0], stood_in(MODELS[1], "all-to-all costs of 4 ranks")
    first, second = (with_folder(tmp_path, model) for model in (guessed, learned))
    lax = PublishRule(10.0)
    publish_model(first, store, now=NOW, asked=lax)  # better than none
    publish_model(second, store, now=NOW, asked=lax)
    with refused(Refused, "4 ranks", "release 2"):
        publish_model(first, store, now=NOW, asked=lax)
    assert live_model(store) == learned.name
    publish_model(first, store, now=NOW, asked=PublishRule(10.0, force=True))
    assert live_model(store) == guessed.name


def test_a_stand_in_goes_live_where_it_answers_for_more_ranks(store, tmp_path):
    more = stood_in(random_model(2, 4, 8, seed=5), "compute costs", "all-to-all costs of 8 ranks")
    publish_model(with_folder(tmp_path, MODELS[0]), store, now=NOW)
    publish_model(with_folder(tmp_path, more), store, now=NOW, asked=PublishRule(None))
    assert live_model(store) == more.name


def with_folder(tmp_path, model):
    save_cost_model(tmp_path / "saved" / model.name, model)
    return tmp_path / "saved" / model.name
