"""Shares of one case set, measured apart and joined again."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from helpers.refusals import refused
from neuroshard.core.case import Cases
from neuroshard.core.errors import InvalidInput
from neuroshard.files.cases import write_cases
from neuroshard.files.costs import CostWriter, merge_costs, read_costs, read_manifest
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.run import run


def share(cases: Path, out: Path, first: int = 1, of: int = 1, **changes: object) -> Path:
    settings = MeasureSettings(**{"batch_size": 512, **changes})  # type: ignore[arg-type]
    run(cases, out, "synthetic", settings, share=(first, of))
    return out


def test_shares_of_a_case_set_make_the_whole(cases: Cases, cases_folder: Path, tmp_path: Path) -> None:
    parts = [share(cases_folder, tmp_path / f"costs-{n}", n, 3) for n in (1, 2, 3)]
    merged = merge_costs(parts, tmp_path / "costs")

    labels = sorted(cost.case_id for _, cost in merged.compute + merged.collective if cost.round == 0)
    assert labels == sorted(case.case_id for case in cases.compute + cases.collective)
    whole = read_costs(share(cases_folder, tmp_path / "whole"))
    assert {cost for _, cost in merged.compute if not cost.round} == {c for _, c in whole.compute if not c.round}
    read = read_costs(tmp_path / "costs")
    assert (read.bench, set(read.compute), set(read.collective)) == (
        whole.bench,
        set(merged.compute),
        set(merged.collective),
    )
    again = run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512))
    assert again.now == 0  # of so few cases the shares measured each again, as the whole run some


def test_a_share_cut_short_says_what_is_left_of_it(cases: Cases, cases_folder: Path, tmp_path: Path) -> None:
    part = share(cases_folder, tmp_path / "costs", 2, 3, budget_seconds=1e-9)
    finished = run(cases_folder, part, "synthetic", MeasureSettings(batch_size=512), share=(2, 3))
    assert (finished.left, finished.now) == (0, finished.planned)
    assert len({cost.case_id for _, cost in read_costs(part).compute}) == len(cases.compute[1::3])


def test_a_case_measured_on_two_machines_has_a_second_round_and_a_copied_row_has_not(
    cases_folder: Path, tmp_path: Path
) -> None:
    one = share(cases_folder, tmp_path / "one")
    costs = read_costs(one)
    assert read_costs(one, one) == costs

    with CostWriter(tmp_path / "slower", costs.bench, read_manifest(one).tables) as writer:
        for case, cost in costs.compute:
            if cost.round == 0:
                writer.add(case, cost.model_copy(update={"forward_ms": 1000.0}))
    joined = read_costs(one, tmp_path / "slower").compute
    assert joined[: len(costs.compute)] == costs.compute
    for case_id in {cost.case_id for _, cost in costs.compute}:
        rounds = {cost.round: cost.forward_ms for _, cost in joined if cost.case_id == case_id}
        assert sorted(rounds) == list(range(len(rounds)))
        assert rounds[max(rounds)] == 1000.0


def test_costs_of_different_benches_are_refused_by_what_differs(cases_folder: Path, tmp_path: Path) -> None:
    one = share(cases_folder, tmp_path / "one")
    for changes, facts in (
        ({"batch_size": 1024}, ("batch_size", 512, 1024)),
        ({"memory_limit_bytes": 2**30}, ("hardware.memory_bytes", 85899345920, 1073741824)),
    ):
        two = share(cases_folder, tmp_path / "two", **changes)
        with refused(InvalidInput, two, one, *facts):
            merge_costs([one, two], tmp_path / "costs")
        two.rename(tmp_path / str(changes))
    assert not (tmp_path / "costs").exists()
    assert not list(tmp_path.glob(".costs*"))


def test_two_tables_of_one_name_are_not_merged(cases: Cases, cases_folder: Path, tmp_path: Path) -> None:
    other = cases.tables[0].model_copy(update={"pooling": "mean"})
    write_cases(tmp_path / "cases-2", Cases(tables=(other,), compute=(), collective=(), max_dim=4, seed=0))
    folders = [share(cases_folder, tmp_path / "one"), share(tmp_path / "cases-2", tmp_path / "two")]
    with refused(InvalidInput, tmp_path / "two", "'t0'", tmp_path / "one"):
        merge_costs(folders, tmp_path / "costs")


def test_what_is_there_is_not_written_over(cases_folder: Path, tmp_path: Path) -> None:
    one = share(cases_folder, tmp_path / "one")
    with refused(InvalidInput, one, "-o"):
        merge_costs([one], one)


def test_the_command_line_measures_a_share_and_merges(
    neuroshard: Callable[..., "subprocess.CompletedProcess[str]"], cases_folder: Path, tmp_path: Path
) -> None:
    for n in (1, 2):
        done = neuroshard(
            "measure", cases_folder, "--backend", "synthetic", "--share", f"{n}/2", "-o", tmp_path / f"costs-{n}"
        )
        assert done.returncode == 0, done.stderr
    done = neuroshard("merge", tmp_path / "costs-1", tmp_path / "costs-2", "-o", tmp_path / "costs")
    assert (done.returncode, done.stderr) == (0, "")
    assert "of 2 folders" in done.stdout
    alone = neuroshard("merge", tmp_path / "costs-1", "-o", tmp_path / "copy")
    assert alone.stdout.endswith("of 1 folder\n")
    wrong = neuroshard("measure", cases_folder, "--backend", "synthetic", "--share", "3/2", "-o", tmp_path / "x")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: '3/2' is not a share; write which of how many, as in 2/8\n",
    )
