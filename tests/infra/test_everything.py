"""Nothing is documented and never run: CI runs it, a test does, or `make everything`, which says what it did not run and why."""

from infra.everything import SMALL, benches, examples, of_ci, targets


def test_every_target_is_run_by_ci_or_by_make_everything() -> None:
    assert sorted([*SMALL, *of_ci(), "everything"]) == sorted(targets())


def test_every_bench_has_a_target_that_runs_it_small() -> None:
    by_script = benches()
    assert len(by_script) > 8
    assert {script for script, found in by_script.items() if not {*SMALL, *of_ci()} & {*found}} == set()


def test_every_example_is_run_by_a_test() -> None:
    assert {name for name, by in examples().items() if not by} == set()
