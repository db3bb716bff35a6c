"""Cases beyond HBM in a run: left out by name where there are no tiers; else budgeted, written, continued, merged."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import Done
from helpers.refusals import refused
from helpers.tier_costs import TRUTH, gpu_bench, tables_beyond, tier_cost
from neuroshard.augment.settings import AugmentSettings
from neuroshard.augment.tiers import draw_tiers
from neuroshard.core.case import Cases, TierCase
from neuroshard.core.cost import TierCost
from neuroshard.core.errors import InvalidInput, MeasureError
from neuroshard.files.cases import read_cases, write_cases
from neuroshard.files.costs import CostWriter, merge_costs, read_costs
from neuroshard.files.tables import write_tables
from neuroshard.measure.backends import MeasureSettings, open_backend
from neuroshard.measure.budget import TIERS, ranks_of, trial
from neuroshard.measure.formula import Synthetic
from neuroshard.measure.run import run
from neuroshard.measure.schedule import LEAST_TIERS, Step, schedule
from neuroshard.measure.verify import run as verify

SETTINGS = MeasureSettings(batch_size=512)


@pytest.fixture
def with_tiers(cases: Cases) -> Cases:
    """The cases of all measuring tests, and 30 beyond HBM."""
    tables = tables_beyond()
    settings = AugmentSettings(
        compute_cases=0, collective_cases=0, devices=(1,), memory_bytes=80 * 2**30, tier_cases=30, seed=0
    )
    return cases.model_copy(update={"tables": (*cases.tables, *tables), "tiers": draw_tiers(tables, settings)})


@pytest.fixture
def folder(with_tiers: Cases, tmp_path: Path) -> Path:
    write_cases(tmp_path / "with tiers", with_tiers)
    return tmp_path / "with tiers"


@pytest.fixture
def on_tiers(monkeypatch: pytest.MonkeyPatch) -> list[TierCase]:
    """The synthetic backend measures them too, by a formula; returns those that it was asked for."""
    asked: list[TierCase] = []

    def measured(self: Synthetic, case: TierCase, round_: int) -> TierCost:
        asked.append(case)
        rng = np.random.default_rng([int(case.case_id, 16), round_])
        return tier_cost(case, gpu_bench(), TRUTH, rng, 0.02).model_copy(update={"round": round_})

    monkeypatch.setattr(Synthetic, "no_tiers", "")
    monkeypatch.setattr(Synthetic, "beyond_hbm", measured)
    return asked


def test_the_files_hold_them_and_folders_without_them_are_as_before(
    with_tiers: Cases, cases: Cases, folder: Path, tmp_path: Path
) -> None:
    assert read_cases(folder) == with_tiers
    write_cases(folder, cases)  # over the other
    write_cases(tmp_path / "plain", cases)
    written = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    assert written == {path.name: path.read_bytes() for path in sorted((tmp_path / "plain").iterdir())}
    assert "tiers.parquet" not in written
    assert b"tier_cases" not in written["cases.json"]


def test_faults_of_the_file_are_named(with_tiers: Cases, folder: Path) -> None:
    (folder / "tiers.parquet").unlink()
    with refused(InvalidInput, "tiers.parquet"):
        read_cases(folder)
    write_cases(folder, with_tiers)
    manifest = (folder / "cases.json").read_text()
    (folder / "cases.json").write_text(manifest.replace('"tier_cases":30', '"tier_cases":31'))
    with refused(InvalidInput, "31 cases", "tiers.parquet", "holds 30"):
        read_cases(folder)
    changed = with_tiers.tiers[0].model_copy(update={"missed_share": 0.5})
    object.__setattr__(changed, "case_id", with_tiers.tiers[0].case_id)
    write_cases(folder, with_tiers.model_copy(update={"tiers": (changed,)}))
    with refused(InvalidInput, "tiers.parquet row 0", "does not match its contents"):
        read_cases(folder)


@pytest.mark.parametrize("backend", ["synthetic", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("forked_workers")
def test_without_tiers_they_are_left_out_and_the_run_says_why(with_tiers: Cases, tmp_path: Path, backend: str) -> None:
    few = with_tiers.model_copy(update={"compute": with_tiers.compute[:2], "collective": ()})
    write_cases(tmp_path / "few", few)
    summary = run(tmp_path / "few", tmp_path / "costs", backend, SETTINGS)
    assert summary.left == 0
    assert summary.without_tiers == 30
    assert f"30 cases beyond HBM left out: {summary.no_tiers}" in str(summary)
    assert "no tiers" in summary.no_tiers
    assert read_costs(tmp_path / "costs").tiers == ()
    assert not list((tmp_path / "costs").glob("tiers-*"))


def test_who_asks_for_them_all_the_same_is_refused(with_tiers: Cases) -> None:
    with refused(MeasureError, "no tiers"):
        open_backend("synthetic", with_tiers, SETTINGS).beyond_hbm(with_tiers.tiers[0], 0)


def test_they_are_measured_once_each_and_read_back(
    with_tiers: Cases, folder: Path, tmp_path: Path, on_tiers: list[TierCase]
) -> None:
    summary = run(folder, tmp_path / "costs", "synthetic", SETTINGS)
    assert (summary.left, summary.without_tiers) == (0, 0)
    assert summary.now_by_ranks[TIERS] == 30
    assert "30 cases beyond HBM" in str(summary)
    found = read_costs(tmp_path / "costs").tiers
    assert {case for case, _ in found} == set(with_tiers.tiers) == set(on_tiers)
    assert len(on_tiers) == 30
    for case, cost in found:
        assert cost.case_id == case.case_id
        assert len(cost.distinct_rows) == len(cost.missed_rows) == len(case.tables)
        assert min(cost.times_ms) > 0
    again = run(folder, tmp_path / "costs", "synthetic", SETTINGS)
    assert (again.now, len(on_tiers)) == (0, 30)


def test_a_draw_may_have_nothing_else(with_tiers: Cases, tmp_path: Path, on_tiers: list[TierCase]) -> None:
    """As a nightly run draws for a kind of GPU that has been measured in all else."""
    write_cases(tmp_path / "only", with_tiers.model_copy(update={"compute": (), "collective": ()}))
    summary = run(
        tmp_path / "only", tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512, budget_seconds=600)
    )
    assert (summary.planned, summary.measured, summary.left) == (30, 30, 0)
    assert len(read_costs(tmp_path / "costs").tiers) == len(on_tiers) == 30


def test_an_error_is_a_row(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Synthetic, case: TierCase, round_: int) -> TierCost:
        return TierCost(case_id=case.case_id, round=round_, error="out of memory")

    monkeypatch.setattr(Synthetic, "no_tiers", "")
    monkeypatch.setattr(Synthetic, "beyond_hbm", failing)
    assert run(folder, tmp_path / "costs", "synthetic", SETTINGS).errors == 30
    assert {cost.error for _, cost in read_costs(tmp_path / "costs").tiers} == {"out of memory"}


def test_a_row_that_counts_other_tables_than_its_cases_is_named(with_tiers: Cases, tmp_path: Path) -> None:
    case = with_tiers.tiers[0]
    cost = tier_cost(case, gpu_bench(), TRUTH, np.random.default_rng(0), 0.0)
    more = cost.model_copy(update={name: (*getattr(cost, name), 1.0) for name in ("distinct_rows", "missed_rows")})
    with CostWriter(tmp_path / "costs", gpu_bench(), with_tiers.tables) as writer:
        writer.add(case, more)
    with refused(InvalidInput, "tiers-00000.parquet row 0", f"but the case has {len(case.tables)}"):
        read_costs(tmp_path / "costs")


def test_shares_are_merged(with_tiers: Cases, folder: Path, tmp_path: Path, on_tiers: list[TierCase]) -> None:
    for number in (1, 2):
        run(folder, tmp_path / f"costs-{number}", "synthetic", SETTINGS, share=(number, 2))
    assert [len(read_costs(tmp_path / f"costs-{n}").tiers) for n in (1, 2)] == [15, 15]
    merge_costs([tmp_path / "costs-1", tmp_path / "costs-2"], tmp_path / "costs")
    assert {case for case, _ in read_costs(tmp_path / "costs").tiers} == set(with_tiers.tiers)


def test_rounds_are_rows_of_their_own(folder: Path, tmp_path: Path, on_tiers: list[TierCase]) -> None:
    run(folder, tmp_path / "costs", "synthetic", SETTINGS, rounds=2)
    assert sorted(cost.round for _, cost in read_costs(tmp_path / "costs").tiers) == [0] * 30 + [1] * 30


def test_the_least_has_enough_of_them_and_one_is_timed_first(with_tiers: Cases, cases: Cases) -> None:
    planned = schedule(with_tiers, seed=0)
    of_tiers = [step for step in planned.least if step.kind == "tiers"]
    assert len(of_tiers) == LEAST_TIERS
    assert sum(step.kind == "tiers" for step in planned.steps) == 30
    assert [ranks_of(step) for step in trial(planned.steps)].count(TIERS) == 1
    first = [step for step in planned.steps[: len(planned.steps) // 4] if step.kind == "tiers"]
    assert first  # blocks have some of each kind
    without = [step for step in planned.steps if step.kind != "tiers"]
    assert [key(step) for step in without if step.round_ >= 0] == [
        key(step) for step in schedule(cases, seed=0).steps if step.round_ >= 0
    ]


def key(step: Step) -> tuple[str, int]:
    return step.case.case_id, step.round_


def test_a_budget_says_how_many_of_them_it_is_enough_for(
    folder: Path, tmp_path: Path, on_tiers: list[TierCase], capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512, budget_seconds=600))
    assert "measurements of tables beyond HBM" in capsys.readouterr().err
    assert len(on_tiers) == 30


def test_verifying_costs_leaves_them_alone(folder: Path, tmp_path: Path, on_tiers: list[TierCase]) -> None:
    run(folder, tmp_path / "costs", "synthetic", SETTINGS)
    before = len(on_tiers)
    assert verify(tmp_path / "costs", count=10).cases == 10
    assert len(on_tiers) == before


def test_augment_draws_them_and_leaves_all_other_cases_as_they_are(
    tmp_path: Path, neuroshard: Callable[..., Done[str]]
) -> None:
    write_tables(tmp_path / "tables.json", tables_beyond())
    drawing = ("augment", tmp_path / "tables.json", "--compute-cases", 20, "--collective-cases", 4, "--devices", 2)
    for name, options in (("plain", ()), ("more", ("--tier-cases", 12))):
        done = neuroshard(*drawing, "--memory", "80GiB", "-o", tmp_path / name, *options)
        assert done.returncode == 0, done.stderr
        assert ("12 cases beyond HBM" in done.stdout + done.stderr) == (name == "more")
    plain, drawn = (read_cases(tmp_path / name) for name in ("plain", "more"))
    assert drawn.model_copy(update={"tiers": ()}) == plain
    assert len(drawn.tiers) == 12


def test_measuring_them_needs_few_packages() -> None:
    """On a GPU's machine there need be no SciPy, nor what serves a store or a pipeline."""
    code = (
        "import sys; import neuroshard.measure.timing.table_sets, neuroshard.measure.run; "
        "print([name for name in ('pandas', 'scipy', 'boto3', 'kfp', 'kubernetes', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
