"""Cost models on disk: what is written is read back, and every fault is one line."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from helpers.costs import random_model, random_tables
from helpers.parts import cut_to, wholes
from helpers.refusals import names, refused
from neuroshard.core.errors import InvalidInput, NeuroshardError, NewerFormat
from neuroshard.core.table import Table
from neuroshard.core.value import sha256
from neuroshard.costmodel.bundle import load_cost_model, save_cost_model
from neuroshard.costmodel.features import FEATURES
from neuroshard.costmodel.protocol import device_costs
from neuroshard.costmodel.report import Errors, Fit, ModelReport, NetReport


@pytest.fixture
def saved(tmp_path):
    save_cost_model(tmp_path / "model", random_model(2, 4))
    return tmp_path / "model"


def rewrite(folder, tensors):
    """Replace the tensors, with a manifest that answers for them."""
    data = save(tensors)
    (folder / "nets.safetensors").write_bytes(data)
    change_manifest(folder, tensors_sha256=sha256(data))


def change_manifest(folder, **change):
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def is_refused(folder, *facts):
    """The bundle cannot be read, and the message names the facts."""
    with refused(InvalidInput, *facts):
        load_cost_model(folder)


def test_a_model_read_back_is_the_model_that_was_written(saved):
    model, again = random_model(2, 4), load_cost_model(saved)
    tables, dims = random_tables(20), np.arange(4, 84, 4)
    sums = model.part_vectors(cut_to(tables, dims)).reshape(5, 4, -1)
    device_dims = dims.reshape(5, 4).astype(float)

    assert again.manifest == model.manifest
    assert again.name == model.name
    assert again.device_counts == ()  # any, from two that were measured
    assert again.bounded
    assert (again.part_vectors(cut_to(tables, dims)) == model.part_vectors(cut_to(tables, dims))).all()
    assert (again.nets.compute.spread_ms(sums) == model.nets.compute.spread_ms(sums)).all()
    assert (again.nets.forward.spread, again.nets.backward.spread) == (
        model.nets.forward.spread,
        model.nets.backward.spread,
    )
    for one, other in zip(device_costs(again, sums, device_dims), device_costs(model, sums, device_dims), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(("rates", "width"), [(False, 64), (True, 67)])
def test_nets_may_have_rates(tmp_path, rates, width):
    model = random_model(2, 4, rates=rates)
    save_cost_model(tmp_path, model)
    again, tables, dims = load_cost_model(tmp_path), random_tables(20), np.full(20, 16)
    vectors = again.part_vectors(cut_to(tables, dims))

    assert ("compute.rates" in load((tmp_path / "nets.safetensors").read_bytes())) == rates
    assert vectors.shape == (20, width)
    assert (vectors == model.part_vectors(cut_to(tables, dims))).all()
    assert (again.compute_ms(vectors) == model.compute_ms(vectors)).all()
    assert (again.compute_slope(vectors) == model.compute_slope(vectors)).all()
    assert again.bounded


def test_the_same_model_gives_the_same_bytes(saved, tmp_path):
    save_cost_model(tmp_path / "again", load_cost_model(saved))

    for name in ("model.json", "nets.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_other_numbers_give_another_name():
    assert random_model(4, seed=1).name != random_model(4, seed=2).name


def test_one_device_needs_no_all_to_all_net():
    model = random_model()

    compute, forward, backward = device_costs(model, np.ones((3, 1, 64)), np.ones((3, 1)))

    assert model.device_counts == (1,)
    assert (compute > 0).all()
    assert (forward == 0).all()
    assert (backward == 0).all()


def test_an_all_to_all_that_was_not_measured_is_refused_with_the_way_out():
    with refused(InvalidInput, "4 devices", 8, "--devices 4,8"):
        random_model(4).backward_collective_ms(np.ones(8))
    with refused(InvalidInput, "one device", 3, "--devices 3"):
        random_model().forward_collective_ms(np.ones(3), np.zeros(3))


@pytest.mark.parametrize("devices", [2, 3, 16])
def test_both_transfers_asked_at_once_are_what_each_is_by_itself(devices):
    model = random_model(2, 8)
    dims = np.random.default_rng(0).integers(0, 2000, size=(5, devices)).astype(np.float64)

    forward, backward = model.transfers_ms(dims)

    np.testing.assert_allclose(forward, model.forward_collective_ms(dims, np.zeros_like(dims)), rtol=1e-12)
    np.testing.assert_allclose(backward, model.backward_collective_ms(dims), rtol=1e-12)


def test_a_folder_without_a_model_says_how_to_make_one(tmp_path):
    is_refused(tmp_path / "nowhere", "neuroshard pretrain")


@pytest.mark.parametrize("name", ["model.json", "nets.safetensors"])
@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_truncated_file_is_named(saved, name, share):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: int(len(data) * share)])

    is_refused(saved, name)


def test_a_missing_tensors_file_is_named(saved):
    (saved / "nets.safetensors").unlink()

    is_refused(saved, "nets.safetensors", "no such file")


def test_tensors_of_another_model_are_refused(saved, tmp_path):
    save_cost_model(tmp_path / "other", random_model(2, 4, seed=1))
    (saved / "nets.safetensors").write_bytes((tmp_path / "other" / "nets.safetensors").read_bytes())

    is_refused(saved, "nets.safetensors", "sha256")


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda t: t.pop("compute.head.bias"), ["compute.head.bias", "missing"]),
        (lambda t: t.update(surplus=np.zeros(3)), ["surplus"]),
        (
            lambda t: t.update({"compute.head.bias": np.zeros((4, 1, 33))}),
            ["compute.head.bias", "float64 (4, 1, 33)", "float64 (4, 1, 32)"],
        ),
        (
            lambda t: t.update({"compute.head.bias": np.zeros((4, 1, 32), np.float32)}),
            ["compute.head.bias", "float32 (4, 1, 32)", "float64 (4, 1, 32)"],
        ),
        (lambda t: t["forward.weight"].fill(np.nan), ["forward.weight", "not finite"]),
        (lambda t: t["backward.unit_ms"].fill(0), ["backward.unit_ms", 0]),
    ],
)
def test_a_wrong_tensor_is_named(saved, change, facts):
    tensors = {name: tensor.copy() for name, tensor in load((saved / "nets.safetensors").read_bytes()).items()}
    change(tensors)
    rewrite(saved, tensors)

    is_refused(saved, *facts)


def test_tensors_that_are_not_safetensors_are_refused(saved):
    (saved / "nets.safetensors").write_bytes(b"\xff" * 100)
    change_manifest(saved, tensors_sha256=sha256(b"\xff" * 100))

    is_refused(saved, "nets.safetensors")


@pytest.mark.parametrize("change", [{"format_version": 2}, {"feature_version": 5}])
def test_a_model_from_the_future_is_refused(saved, change):
    change_manifest(saved, **change)

    with refused(NewerFormat, saved / "model.json", *change, *change.values()):
        load_cost_model(saved)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"format_version": 0}, "positive whole number"),
        ({"batch_sizes": []}, "batch_sizes"),
        ({"feature_version": 0}, "`neuroshard pretrain`"),
        ({"features": ["log2_dim"]}, "`neuroshard pretrain`"),
        ({"bench": None}, "bench"),
        ({"device_counts": []}, "backward.bias"),
        ({"device_counts": [1, 2, 4]}, "device_counts"),
        ({"device_counts": [10**9]}, "device_counts"),
        ({"max_dim": 0}, "max_dim"),
        ({"tensors_sha256": "../../etc/passwd"}, "nets.safetensors"),
    ],
)
def test_a_wrong_manifest_is_reported_in_one_line(saved, change, fact):
    change_manifest(saved, **change)

    is_refused(saved, fact)


@pytest.mark.parametrize("step", range(3))
def test_a_save_that_is_cut_off_leaves_the_old_bundle_or_nothing_that_looks_whole(saved, monkeypatch, step):
    """Cut off before the old one's model.json goes, before the tensors are in place, before the new model.json is."""
    before, steps = load_cost_model(saved).name, iter(range(9))

    def cut_off(do):
        def done(path, *arguments, **options):
            if (path.name in ("model.json", "nets.safetensors") or arguments) and next(steps) == step:
                raise OSError(28, "No space left on device")
            return do(path, *arguments, **options)

        return done

    monkeypatch.setattr(Path, "unlink", cut_off(Path.unlink))
    monkeypatch.setattr(Path, "replace", cut_off(Path.replace))
    with refused(NeuroshardError, saved, "No space left on device"):
        save_cost_model(saved, random_model(2, 4, seed=7))

    if step:
        is_refused(saved, "model.json")
    else:
        assert load_cost_model(saved).name == before
    assert [path.name for path in saved.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_is_a_file_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")

    with refused(NeuroshardError, tmp_path / "file"):
        save_cost_model(tmp_path / "file", random_model())


def test_predicting_needs_no_torch():
    code = "import sys, neuroshard.costmodel.bundle; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def with_manifest(**change):
    model = random_model(2, 8)
    return replace(model, manifest=model.manifest.model_copy(update=change))


def test_a_model_of_one_batch_size_refuses_another_with_the_way_out():
    model = random_model(2, 4)

    assert model.at_batch_size(65536) == model
    with refused(InvalidInput, "65,536 samples", "4,096", "--batch-size 4096"):
        model.at_batch_size(4096)


def test_a_model_of_several_batch_sizes_predicts_for_the_one_asked():
    model = with_manifest(batch_sizes=(1024, 65536))
    tables, dims = random_tables(5), np.full(5, 64)

    small = model.at_batch_size(4096)

    assert (small.batch_size, model.batch_size) == (4096, 65536)
    assert (small.part_vectors(cut_to(tables, dims)) != model.part_vectors(cut_to(tables, dims))).any()
    assert (
        small.backward_collective_ms(np.array([64.0, 32.0])) < model.backward_collective_ms(np.array([64.0, 32.0]))
    ).all()
    assert small.name == model.name


def test_predictions_beyond_what_was_measured_are_reported():
    model = with_manifest(batch_sizes=(1024, 65536))

    assert model.caveats(2) == model.caveats(5) == model.caveats(1) == ()
    for caveats, facts in (
        (model.caveats(64), ("64 devices", "2 to 8")),
        (model.at_batch_size(131072).caveats(4), ("131,072 samples", "1,024 to 65,536")),
    ):
        (caveat,) = caveats
        assert all(names(caveat, fact) for fact in facts)


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (0.4, None),
        (12.3, ("1,230%",)),
        (None, ("not tested", "1 set")),
    ],
)
def test_a_plan_says_of_a_cost_model_that_it_is_far_off_or_was_not_tested(error, facts):
    errors = None if error is None else Errors(values=9, mse=1.0, mape=error, r2=None, kendall_tau=None)
    fit = Fit(train_cases=1, valid_cases=1, epochs=1, best_epoch=1)
    report = ModelReport(nets=(NetReport(kind="compute", fit=fit, splits={"test_tables": errors}),))

    notes = with_manifest(report=report).caveats(2, wholes(random_tables(3)))
    assert len(notes) == (facts is not None)
    assert all(names(note, fact) for note in notes for fact in facts)
    assert with_manifest(report=report).caveats(64, wholes(random_tables(3)))[1:] == notes


def test_a_bundle_of_fewer_features_answers_and_says_what_it_does_not_know():
    """An older one, which never saw a table that several features read."""
    model = load_cost_model(Path(__file__).parents[1] / "golden" / "model-1")
    features = [{"name": name, "pooling_factor": 2.0} for name in "xy"]
    shared = Table.model_validate({"name": "t", "rows": 1000, "dim": 8, "features": features})

    assert len(model.manifest.features) < len(FEATURES)
    assert np.isfinite(model.compute_ms(model.part_vectors(cut_to([shared], [8]))[0]))
    assert any("several features that read them" in line for line in model.caveats(2, wholes([shared])))
