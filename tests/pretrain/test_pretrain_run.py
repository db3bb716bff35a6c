"""From costs to a cost model: how good, how reproducible, and what it says where data is missing."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from helpers.costs import BENCH, formula_costs, random_tables
from helpers.parts import cut_to, wholes
from helpers.refusals import names, refused
from neuroshard.core.cost import CollectiveCost, ComputeCost, Costs
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.bundle import load_cost_model
from neuroshard.costmodel.report import ModelReport
from neuroshard.files.costs import CostWriter
from neuroshard.measure import formula
from neuroshard.pretrain.checkpoint import Checkpoint
from neuroshard.pretrain.run import pretrain, run
from neuroshard.pretrain.stand_in import completed

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuroshard.pretrain.train.MOST_EPOCHS", 100)


def few(compute=0, collective=0, **change):
    return formula_costs(random_tables(20), compute, collective, twice=0, **change)


def with_errors(costs, kind):
    """The same cost set, where every case of one kind ran out of memory."""
    cost = {"compute": ComputeCost, "collective": CollectiveCost}[kind]
    rows = tuple((case, cost(case_id=case.case_id, error="out of memory")) for case, _ in getattr(costs, kind))
    return costs.model_copy(update={kind: rows})


def by_name(report: ModelReport):
    return {net.name: net for net in report.nets}


def test_errors_on_tables_never_seen_are_a_few_per_cent(model):
    nets = by_name(model.report)

    assert set(nets) == {"compute"} | {f"{w} all-to-all, {d} devices" for w in ("forward", "backward") for d in (2, 4)}
    for split in ("test_sets", "test_tables"):
        errors = nets["compute"].splits[split]
        assert errors.mape < 0.08
        assert errors.kendall_tau > 0.93
        assert errors.r2 > 0.97
    for name, net in nets.items():
        if name != "compute":
            assert set(net.splits) == {"test_sets"}
            assert net.splits["test_sets"].mape < 0.04


def test_the_report_shows_the_noise_of_the_labels_beside_the_errors(model):
    for net in model.report.nets:
        assert net.label_noise.mape == pytest.approx(0.01, rel=0.9)
    assert by_name(model.report)["compute"].label_noise.values == 10
    assert [(size.fewest, size.most) for size in by_name(model.report)["compute"].by_size] == [(1, 3), (4, 8), (9, 15)]


def test_sets_beyond_15_tables_have_an_error_of_their_own():
    costs = formula_costs(random_tables(20), 150, max_tables=40)

    (net,) = pretrain(costs, epochs=1).report.nets

    assert "16 or more tables" in [size.name for size in net.by_size]
    assert sum(size.values for size in net.by_size) == sum(errors.values for errors in net.splits.values())


def test_the_model_says_what_it_is_for(model, costs):
    assert (model.backend, model.device_name, model.batch_size) == ("synthetic", "test device", 65536)
    assert model.device_counts == ()
    assert model.manifest.device_counts == (2, 4)
    assert model.manifest.batch_sizes == (65536,)
    assert model.max_dim == max(table.dim for case, _ in costs.compute for table in case.tables)
    assert model.manifest.provenance.compute_cases == 700
    assert model.manifest.hardware_fingerprint == BENCH.hardware.fingerprint


def test_what_the_report_says_is_what_the_model_predicts(model, costs):
    rows = [(case, cost) for case, cost in costs.compute if case.split == "test_tables" and cost.round == 0]
    off = []
    for case, cost in rows:
        vectors = model.part_vectors(wholes(case.tables))
        off.append(abs(float(model.compute_ms(vectors.sum(axis=0))) / cost.total_ms - 1))

    assert by_name(model.report)["compute"].splits["test_tables"].mape == pytest.approx(np.mean(off))


def test_sets_far_larger_than_measured_cost_more_in_proportion(model):
    tables = random_tables(500, seed=1)
    dims = np.full(500, 64)
    sums = model.part_vectors(cut_to(tables, dims)).cumsum(axis=0)

    predicted = model.compute_ms(sums[[14, 49, 99, 249, 499]])
    terms = formula.part_terms(cut_to(tables, dims), 65536).cumsum(axis=0)[[14, 49, 99, 249, 499]]
    true = formula.forward_ms(terms) + formula.backward_ms(terms)

    assert (np.diff(predicted) > 0).all()
    assert predicted / true == pytest.approx(np.ones(5), abs=0.25)


def test_another_table_never_lowers_the_prediction(model):
    tables, rng = random_tables(500, seed=2), np.random.default_rng(0)
    vectors = model.part_vectors(cut_to(tables, rng.integers(1, 33, 500) * 4))
    sets = [rng.choice(500, rng.integers(1, 16), replace=False) for _ in range(10_000)]
    sums = np.array([vectors[some].sum(axis=0) for some in sets])

    lower = model.compute_ms(sums + vectors[rng.integers(0, 500, 10_000)]) < model.compute_ms(sums)

    assert model.bounded
    assert lower.sum() == 0  # the original: 2.9 %


def test_the_head_is_used_where_it_bends(model):
    vectors, rng = model.part_vectors(cut_to(random_tables(500, seed=2), np.full(500, 64))), np.random.default_rng(0)
    sets = [rng.choice(500, rng.integers(1, 16), replace=False) for _ in range(1000)]

    slopes = model.compute_slope(np.array([vectors[some].sum(axis=0) for some in sets]))

    assert len(np.unique(slopes.round(9), axis=0)) > 20


def test_a_net_in_which_a_table_may_lower_a_cost_is_not_said_to_give_bounds():
    model = pretrain(few(compute=60), monotone=False, epochs=100)  # after a few it still grows, by chance

    assert not model.bounded


def test_two_thirds_of_the_errors_lie_within_the_predicted_deviation(model):
    ((split, covered),) = by_name(model.report)["compute"].coverage.items()
    assert split == "test_tables"
    assert covered.share == pytest.approx(0.68, abs=0.2)
    assert covered.two_share > 0.8
    assert 0.01 < covered.spread < covered.two_spread < 0.2


@pytest.mark.parametrize("devices", [3, 8])
def test_all_to_alls_between_more_devices_than_were_measured_are_foreseen(model, devices):
    rng = np.random.default_rng(devices)
    dims = rng.dirichlet(np.full(devices, 3.0), 200) * 4000

    predicted, true = model.backward_collective_ms(dims), formula.backward_collective_ms(dims, 65536)

    assert 1 - ((predicted - true) ** 2).mean() / true.var() > 0.95


def test_one_net_serves_batch_sizes_of_which_it_saw_only_some():
    sets = formula_costs(random_tables(30), 300, twice=0).compute
    rng, sizes = np.random.default_rng(0), (8192, 16384, 65536)
    compute = []
    for case, _ in sets:
        size = int(rng.choice(sizes))
        case = case.model_copy(update={"batch_size": size})
        ms = formula.compute_ms(case.tables, size)
        compute.append((case, ComputeCost(case_id=case.case_id, forward_ms=ms / 3, backward_ms=ms * 2 / 3)))

    model = pretrain(Costs(bench=BENCH, compute=tuple(compute), collective=()), epochs=60)

    assert model.manifest.batch_sizes == sizes
    for size in (8192, 32768):
        at = model.at_batch_size(size)
        off = []
        for case, _ in sets[:200]:
            vectors = at.part_vectors(wholes(case.tables))
            off.append(abs(at.compute_ms(vectors.sum(axis=0)) / formula.compute_ms(case.tables, size) - 1))
        assert np.mean(off) < 0.12, size


def half_as_fast(costs):
    """What the same cases would cost on a device that takes twice as long."""
    rows = tuple(
        (case, cost.model_copy(update={"forward_ms": cost.forward_ms * 2, "backward_ms": cost.backward_ms * 2}))
        for case, cost in costs.compute
    )
    return costs.model_copy(update={"compute": rows, "collective": ()})


def test_on_new_hardware_a_model_of_another_needs_fewer_cases(model, costs):
    new = half_as_fast(costs)
    train = [row for row in new.compute if row[0].split == "train"][:30]
    rest = [row for row in new.compute if row[0].split == "test_sets"]
    little = new.model_copy(update={"compute": (*train, *rest)})

    anew, started = (pretrain(little, epochs=160, start=start) for start in (None, model))

    assert started.manifest.provenance.started_from == model.name
    errors = [by_name(one.report)["compute"].splits["test_sets"].mape for one in (started, anew)]
    assert errors[0] < 0.6 * errors[1]
    assert errors[0] < 0.06


def test_predictions_are_positive_and_finite_for_the_strangest_tables(model):
    strange = random_tables(3) + tuple(
        table.model_copy(update=change)
        for table in random_tables(1)
        for change in (
            {"rows": 1},
            {"rows": 2**40},
            {"pooling_factor": 0.0},
            {"pooling_factor": 1e9},
            {"element_bytes": 2},
        )
    )
    for dims in (np.full(8, 4), np.full(8, 2**16)):
        costs = model.compute_ms(model.part_vectors(cut_to(strange, dims)))
        assert np.isfinite(costs).all()
        assert (costs > 0).all()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path):
    costs = few(compute=60, collective=40)
    with CostWriter(tmp_path / "costs", costs.bench, random_tables(20)) as writer:
        for case, cost in costs.compute:
            writer.add(case, cost)
        for case, cost in costs.collective:
            writer.add(case, cost)
    torch.manual_seed(1)
    first = run(tmp_path / "costs", tmp_path / "one", epochs=3)
    torch.manual_seed(2)  # the global generator plays no part
    run(tmp_path / "costs", tmp_path / "two", epochs=3)
    other = run(tmp_path / "costs", tmp_path / "three", epochs=3, seed=1)

    for name in ("model.json", "nets.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert load_cost_model(tmp_path / "one").name == first.name != other.name


class Killed(BaseException):
    """What ends a run at once."""


@pytest.mark.parametrize("epoch", [2, 9, 13])
def test_a_run_cut_off_goes_on_and_ends_as_one_that_was_not(tmp_path, monkeypatch, epoch):
    costs = few(compute=60, collective=40)
    with CostWriter(tmp_path / "costs", costs.bench, random_tables(20)) as writer:
        for case, cost in costs.compute:
            writer.add(case, cost)
        for case, cost in costs.collective:
            writer.add(case, cost)
    whole = run(tmp_path / "costs", tmp_path / "whole", epochs=6)
    monkeypatch.setattr("neuroshard.pretrain.checkpoint.SAVE_EVERY_SECONDS", 0.0)
    save, saved, epochs = Checkpoint.save, [], []

    def dying(self, *state):
        save(self, *state)
        saved.append(self.path.name)
        if len(saved) == epoch:
            raise Killed

    monkeypatch.setattr(Checkpoint, "save", dying)
    with pytest.raises(Killed):
        run(tmp_path / "costs", tmp_path / "cut", epochs=6)
    assert not (tmp_path / "cut" / "model.json").exists()
    monkeypatch.setattr(Checkpoint, "save", lambda self, state, *rest: epochs.append(state.epoch))
    run(tmp_path / "costs", tmp_path / "cut", epochs=6)

    trained = {net.kind: net.fit.epochs for net in whole.report.nets}
    assert len(saved) + len(epochs) == sum(trained.values())  # of three nets, no epoch twice
    for name in ("model.json", "nets.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["model.json", "nets.safetensors"]


def test_while_one_run_trains_into_a_folder_another_is_refused_and_takes_nothing_from_it(tmp_path, monkeypatch):
    costs, out = few(compute=60, collective=40), tmp_path / "model"
    with CostWriter(tmp_path / "costs", costs.bench, random_tables(20)) as writer:
        for case, cost in costs.compute:
            writer.add(case, cost)
    alone = run(tmp_path / "costs", tmp_path / "alone", epochs=2)
    monkeypatch.setattr("neuroshard.pretrain.checkpoint.SAVE_EVERY_SECONDS", 0.0)
    save, met = Checkpoint.save, []

    def meeting(self, *state):
        save(self, *state)
        with refused(InvalidInput, out, "another run is writing a cost model"):
            run(tmp_path / "costs", out, epochs=2, seed=1)
        met.append(self.path.exists())

    monkeypatch.setattr(Checkpoint, "save", meeting)
    assert run(tmp_path / "costs", out, epochs=2).name == alone.name == load_cost_model(out).name
    assert all(met)


@pytest.mark.parametrize("damage", ["other settings", "torn", "another net"])
def test_a_checkpoint_that_is_not_of_this_run_is_not_used(tmp_path, monkeypatch, damage):
    monkeypatch.setattr("neuroshard.pretrain.checkpoint.SAVE_EVERY_SECONDS", 0.0)
    costs, folder = few(compute=40), tmp_path / "checkpoints"
    expected = pretrain(costs, epochs=3)
    pretrain(costs, epochs=3, seed=1 if damage == "other settings" else 0, checkpoints=folder)
    path = folder / "compute.safetensors"
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:1000])
    if damage == "another net":  # of an older neuroshard
        tensors = {name: tensor for name, tensor in load(path.read_bytes()).items() if "skip" not in name}
        path.write_bytes(save(tensors))

    assert pretrain(costs, epochs=3, checkpoints=folder).name == expected.name


def test_costs_of_several_folders_train_one_model(tmp_path):
    costs = few(compute=60)
    for name, rows in (("one", costs.compute[:30]), ("two", costs.compute[30:])):
        with CostWriter(tmp_path / name, costs.bench, random_tables(20)) as writer:
            for case, cost in rows:
                writer.add(case, cost)

    model = run(tmp_path / "one", tmp_path / "model", tmp_path / "two", epochs=1)

    assert model.manifest.provenance.compute_cases == 60


def test_costs_without_all_to_alls_make_a_model_for_one_device():
    model = pretrain(few(compute=40), epochs=1)

    assert model.device_counts == (1,)
    assert model.report.gaps == ("no all-to-all was asked for: plans for one device only",)
    assert model.report.stand_ins == ()


def all_to_all_ms(model, ranks):
    """Slowest backward all-to-all of 1,024 columns on each of so many ranks."""
    return float(model.backward_collective_ms(np.full((1, ranks), 1024.0)).max())


def test_too_few_all_to_alls_of_a_number_of_ranks_are_stood_in_for_by_the_analytic_model():
    costs = few(compute=40, collective=12)
    model = pretrain(costs, epochs=60)

    assert model.device_counts == (1, 4)
    (stand_in,) = model.report.stand_ins
    assert re.fullmatch(
        r"all-to-all costs of 4 ranks are those of analytic:h100, times [\d.]+ forward and times [\d.]+ backward by 10 measured "
        "all-to-alls; a net needs 20 to train on",
        stand_in,
    )
    truth = formula.backward_collective_ms(np.full(4, 1024.0), BENCH.batch_size).max()
    assert 0.5 < all_to_all_ms(model, 4) / truth < 2
    assert model.report.uncertainty >= 0.3
    assert model.report.unseen_tables_error != model.report.uncertainty  # table sets were learned
    assert model.bounded


def test_ranks_asked_for_and_never_measured_have_costs_too():
    asked = few(compute=40, collective=40, devices=(2,)).model_copy(update={"device_counts": (2, 8)})
    model = pretrain(asked, epochs=20)

    assert model.manifest.device_counts == (2, 8)
    (stand_in,) = model.report.stand_ins
    assert stand_in.startswith("all-to-all costs of 8 ranks are those of analytic:h100, times ")
    assert 0 < all_to_all_ms(model, 8) < 1e3


def test_all_to_alls_that_all_failed_are_stood_in_for_and_counted():
    costs = with_errors(few(compute=40, collective=60), "collective")

    model = pretrain(costs, epochs=1)

    assert model.device_counts == (1, 4)
    assert model.report.left_out == 60
    (stand_in,) = model.report.stand_ins
    assert all(names(stand_in, fact) for fact in ("4 ranks", "analytic:h100", "60 of 60", "'out of memory'"))


@pytest.mark.parametrize("measured", [0, 5])
def test_table_sets_that_are_too_few_are_stood_in_for_and_the_scale_is_theirs(measured):
    whole = few(compute=60)
    train = [row for row in whole.compute if row[0].split == "train"]
    costs = whole.model_copy(update={"compute": tuple(train[:measured]), "tables": random_tables(20)})
    model = pretrain(costs, epochs=30)

    (stand_in,) = model.report.stand_ins
    assert stand_in.startswith("compute costs are those of analytic:h100, ")
    assert ("by 5 measured table sets" in stand_in) == bool(measured)
    assert model.report.unseen_tables_error == 0.3
    others = [(case, cost) for case, cost in train[measured:] if len(case.tables) > 2]
    predicted = [float(model.compute_ms(model.part_vectors(wholes(c.tables)).sum(axis=0))) for c, _ in others]
    ratios = np.array([cost.total_ms for _, cost in others]) / predicted
    assert measured == 0 or 0.6 < np.median(ratios) < 1.7
    dims = np.array([t.dim for t in others[0][0].tables])
    sums = model.part_vectors(cut_to(others[0][0].tables, dims)).sum(axis=0)
    assert float(model.nets.compute.spread_ms(sums)) >= 0.29 * float(model.compute_ms(sums))


def test_all_to_alls_are_drawn_of_the_columns_that_the_tables_send():
    """A sequence sends its columns once for each lookup."""
    tables = tuple(table.model_copy(update={"pooling": "none", "pooling_factor": 50.0}) for table in random_tables(3))
    drawn = completed(Costs(bench=BENCH, compute=(), collective=(), tables=tables, device_counts=(2,)), seed=0)

    sent = sum(part.sent_columns for part in wholes(tables))
    sums = [sum(case.device_dims) for case, _ in drawn.all_to_alls["forward"]]
    assert sent > 40 * sum(table.dim for table in tables)
    assert 0.2 * sent < min(sums) < 0.5 * sent < 1.2 * sent < max(sums) < 1.6 * sent


def test_sequences_are_drawn_at_the_widths_that_a_plan_can_have():
    tables = tuple(
        table.model_copy(update={"pooling": pooling, "dim": 128})
        for table, pooling in zip(random_tables(2), ("none", "sum"), strict=True)
    )
    drawn = completed(Costs(bench=BENCH, compute=(), collective=(), tables=tables), seed=0).costs

    widths = {
        pooling: {t.dim for c, _ in drawn.compute for t in c.tables if t.pooling == pooling}
        for pooling in ("none", "sum")
    }
    assert widths["none"] == widths["sum"] == {4, 8, 16, 32, 64, 128}


def test_a_net_of_few_cases_that_the_scaled_datasheet_beats_is_not_used(monkeypatch):
    """The costs are the datasheet's own, three times: nothing that a net of 40 cases could know better."""
    costs = few(compute=60)
    analytic = Analytic("h100", BENCH.batch_size)

    def threefold(case):
        vectors = analytic.part_vectors(wholes(case.tables))
        forward, backward = analytic.parts_ms(vectors.sum(axis=0))
        return ComputeCost(case_id=case.case_id, forward_ms=3 * float(forward), backward_ms=3 * float(backward))

    exact = costs.model_copy(update={"compute": tuple((case, threefold(case)) for case, _ in costs.compute)})
    monkeypatch.setattr("neuroshard.pretrain.run.STAND_IN_EPOCHS", 5)
    report = pretrain(exact).report

    (line,) = report.datasheet_better
    assert all(
        names(line, fact) for fact in ("compute costs", "analytic:h100", "times 3", "0.0% off on 18 cases held back")
    )
    assert line in report.doubts  # so plans have it among their notes
    assert report.stand_ins == ()
    assert 0 < report.uncertainty < 0.3  # what the tests say, not a guess


def test_a_net_of_all_to_alls_that_is_worse_than_the_datasheet_is_not_used_and_the_other_direction_is():
    """Backward takes three times what the datasheet says. While the cases to train on were measured, the machine was busy."""
    analytic, rng = Analytic("h100", BENCH.batch_size), np.random.default_rng(0)

    def threefold(case, cost):
        ms = 3 * analytic.backward_collective_ms(np.array(case.device_dims, dtype=float))
        ms *= np.where((rng.random(4) < 0.3) & (case.split == "train"), 10, 1)
        return case, cost.model_copy(update={"backward_ms": tuple(ms.tolist())})

    costs = few(compute=40, collective=60)
    model = pretrain(costs.model_copy(update={"collective": tuple(threefold(*row) for row in costs.collective)}))

    (line,) = (line for line in model.report.datasheet_better if "all-to-all" in line)
    assert line.startswith("backward all-to-all costs of 4 ranks are those of analytic:h100, times 3 by 48 measured")
    assert model.report.stand_ins == ()


def test_without_test_and_valid_cases_the_report_has_none_and_no_nan():
    costs = few(compute=60)
    rows = tuple((case, cost) for case, cost in costs.compute if case.split == "train")

    model = pretrain(costs.model_copy(update={"compute": rows}), epochs=2)

    (net,) = model.report.nets
    assert net.splits == {"test_sets": None, "test_tables": None}
    assert net.label_noise is None
    assert net.by_size == ()
    assert net.fit.valid_cases == len(rows) // 10
    assert net.fit.train_cases + net.fit.valid_cases == len(rows)


def test_a_single_set_is_enough_to_get_a_model():
    costs = few(compute=60)
    rows = tuple((case, cost) for case, cost in costs.compute if case.split == "train")[:1]

    model = pretrain(costs.model_copy(update={"compute": rows}), epochs=2)

    assert np.isfinite(
        model.compute_ms(model.part_vectors(cut_to(rows[0][0].tables, np.array([4] * len(rows[0][0].tables))))).all()
    )


def test_test_tables_that_were_trained_on_are_refused():
    costs = few(compute=60)
    rows = tuple(
        (case.model_copy(update={"split": "test_tables"}) if i % 2 else case, cost)
        for i, (case, cost) in enumerate(costs.compute)
    )

    with refused(InvalidInput, "test_tables"):
        pretrain(costs.model_copy(update={"compute": rows}))


def test_neither_of_no_costs_and_tables_nor_in_no_epochs_is_anything_learned():
    with refused(InvalidInput, "tables"):
        pretrain(Costs(bench=BENCH, compute=(), collective=()))
    with refused(UsageError, "epochs", 1, 0):
        pretrain(few(compute=5), epochs=0)


def test_the_report_fits_80_columns_and_names_every_net(model):
    text = model.report.text()

    assert max(map(len, text.splitlines())) <= 80
    for name in by_name(model.report):
        assert name in text
    assert "unseen tables" in text
    assert "measuring again" in text


def test_what_is_missing_is_reported_below_the_errors_within_80_columns():
    report = pretrain(with_errors(few(compute=40, collective=60), "collective"), epochs=1).report
    text = report.text()

    assert max(map(len, text.splitlines())) <= 80
    (stand_in,) = report.stand_ins
    assert all(names(stand_in, fact) for fact in ("4 ranks", "analytic:h100"))
    assert stand_in in " ".join(text.split())
    assert (report.left_out, names(text, "60 measured rows")) == (60, True)
    assert by_name(report)["compute"].label_noise is None


def test_the_metrics_of_a_run_are_one_number_a_net_and_split(model):
    metrics = model.report.metrics()

    assert metrics["compute_mape_test_tables"] == by_name(model.report)["compute"].splits["test_tables"].mape
    assert "forward_all_to_all_4_devices_mape_test_sets" in metrics
    assert all(isinstance(value, float) for value in metrics.values())
