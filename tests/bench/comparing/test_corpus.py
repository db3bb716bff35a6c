"""What `make bench-corpus` rests on: tasks that cover every option and end as they name, and differences that are seen."""

from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.comparing.tasks import TASKS, Task
from bench.comparing.worker import answer, facts, forked, make_previous, previous_of
from bench.corpus import as_named, checked_out, difference, summary
from neuroshard.core.step_memory import Pipeline
from neuroshard.orders.options import OPTIONS

QUICK = [task for task in TASKS if not task.full or task.refused]
PLAN = {"shards": "a", "wire": "b", "notes": ["c"], "cost_ms": 2.0, "bound_ms": 1.5, "cpu_s": 1.0, "peak_mib": 10.0}
REFUSAL = {"refused": "Infeasible", "message": "1.5 GiB short", "facts": ["1.5"], "cpu_s": 1.0, "peak_mib": 1.0}


def test_every_option_and_pipeline_stands_in_two_tasks() -> None:
    found = Counter(name for task in TASKS for name in task.asked())
    found["previous"] = sum(task.before is not None for task in TASKS)
    assert {name: found[name] for name in OPTIONS if found[name] < 2} == {}
    assert Counter(task.options.get("pipeline") for task in TASKS).keys() >= {*get_args(Pipeline)}


def test_tasks_have_names_of_their_own_and_the_sizes_that_models_have() -> None:
    assert len({task.name for task in TASKS}) == len(TASKS) >= 80
    assert {2, 64} == {f(task.options["devices"] for task in TASKS) for f in (min, max)}
    assert {5, 200} == {f(len(task.tables) for task in TASKS) for f in (min, max)}


@pytest.mark.parametrize("task", QUICK[2::6], ids=lambda task: task.name)
def test_a_task_ends_as_it_names(task: Task, tmp_path: Path) -> None:
    if task.before is not None:
        make_previous(task, tmp_path)
    assert as_named(task, answer(task, tmp_path)), answer(task, tmp_path)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (PLAN, PLAN, []),
        (PLAN, PLAN | {"cost_ms": 2.1}, ["cost +5.000%"]),
        (PLAN, PLAN | {"cpu_s": 9.0, "peak_mib": 1.0}, []),
        *((PLAN, PLAN | {key: "other"}, [f"other {key}"]) for key in ("shards", "wire", "notes")),
        (PLAN, PLAN | {"bound_ms": 1.0}, ["bound 1.5 -> 1.0"]),
        (PLAN, REFUSAL, ["a plan -> refused: Infeasible: 1.5 GiB short"]),
        (REFUSAL, REFUSAL | {"message": "short of 1.5 GiB"}, []),
        (REFUSAL, REFUSAL | {"message": "2 GiB short", "facts": ["2"]}, ["other facts: 1.5 GiB short -> 2 GiB short"]),
        (REFUSAL, REFUSAL | {"refused": "A"}, ["refused: Infeasible: 1.5 GiB short -> refused: A: 1.5 GiB short"]),
        ({"failed": "KeyError: 'a'"}, PLAN, ["failed: KeyError: 'a' -> a plan"]),
    ],
)  # fmt: skip
def test_what_differs_between_two_trees_is_named(was: dict[str, Any], now: dict[str, Any], said: list[str]) -> None:
    assert difference(TASKS[0], was, now) == said


def test_the_summary_counts_what_is_equal_and_has_mean_worst_and_ratios() -> None:
    now = PLAN | {"cost_ms": 2.2, "cpu_s": 2.0, "peak_mib": 5.0}
    said = summary(TASKS[:2], [(PLAN, PLAN), (PLAN, now)])
    assert said.startswith("1 of 2 equal; cost +5.000% in the mean, +10.000% at worst; CPU 2.0 -> 3.0 s, x 1.50;")
    assert said.endswith("peak memory x 0.75, at worst x 1.00")


def test_a_bound_above_its_plan_is_not_as_named() -> None:
    assert as_named(TASKS[0], PLAN)
    assert not as_named(TASKS[0], PLAN | {"bound_ms": 2.1})


def test_facts_are_numbers_options_tables_and_what_is_quoted() -> None:
    assert facts("table t3 needs 1.5 GiB of 2,048: give --memory, not 'x'") == ["'x'", "--memory", "1.5", "2,048", "t3"]


def test_an_option_that_a_tree_does_not_have_is_refused_and_a_process_that_dies_is_said(tmp_path: Path) -> None:
    task = TASKS[0]._replace(options={**TASKS[0].options, "of_tomorrow": 1})
    assert answer(task, tmp_path)["refused"] == "TypeError"
    assert "status" in forked(lambda task, folder: __import__("os")._exit(0), task, tmp_path)


def test_the_other_tree_is_that_of_the_commit(tmp_path: Path) -> None:
    if not (Path(__file__).parents[3] / ".git").exists():
        pytest.skip("this tree is not of git")
    with checked_out("HEAD") as tree:
        assert (tree / "components" / "neuroshard" / "__init__.py").is_file()
    assert not tree.exists()
    with pytest.raises(SystemExit, match="no-such-commit"), checked_out("no-such-commit"):
        pass
    assert previous_of(TASKS[0], tmp_path) != previous_of(TASKS[1], tmp_path)
