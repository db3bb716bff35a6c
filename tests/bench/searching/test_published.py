"""The rows that `make bench-search ARGS="--publish …"` writes into docs/benchmarks/ from the answers of the methods."""

import json

import pytest

from bench.publishing.page import TABLES
from bench.searching import published
from bench.searching.published import ALL_TYPES, OURS, PUBLISHED, ROWS_TOO


def figures(method: str, ms: float | None, task: str = "a", **more: object) -> dict:
    costs = {} if ms is None else {"nets_ms": ms, "truth_ms": ms, "bound_ms": ms / 1.25}
    return {"task": task, "tables": 26, "devices": 8, "method": method, "cpu_s": 1.0, **costs, **more}


ANSWERS = [
    *(figures(OURS, 8.0), figures(ROWS_TOO, 4.0), figures(PUBLISHED, 10.0), figures("torchrec", None)),
    *(figures(ALL_TYPES, 5.0), figures("dim", 16.0), figures("size", 20.0)),
    *(figures(OURS, 9.0, "b"), figures(ROWS_TOO, 9.0, "b"), figures(PUBLISHED, 10.0, "b"), figures("dim", None, "b")),
]


def test_plans_are_compared_on_the_tasks_that_both_solve_and_column_wise_ones_not_with_planners_that_split_rows():
    assert published.plans(ANSWERS, 8) == [
        ["8", "neuroshard-2023", "15.00 %", "10.00 %", "35.00 %", "10.00 %"],
        ["8", "TorchRec's planner", "", "", "", ""],
        ["8", "TorchRec's planner, all types", "", "", "20.00 %", "20.00 %"],
        ["8", "best heuristic", "50.00 %", "50.00 %", "75.00 %", "75.00 %"],
    ]


def test_the_gap_is_that_to_the_bound_of_the_same_search():
    assert published.solved_row(ANSWERS, 8) == ["8", "2", "2", "2", "2", "0", "25.00 %", "25.00 %"]


def test_a_time_is_that_to_the_published_searchs_own_cost():
    both = [
        (figures(PUBLISHED, 10.0, cpu_s=s), figures(OURS, 8.0, trace=[(0.01, 11.0), (0.02, 10.0), (0.5, 8.0)]))
        for s in (2.0, 4.0, 6.0)
    ]
    assert published.time_row("35 x 4", both) == ["35 x 4", "4.00", "0.0200", "200 (150, 250)"]


def test_of_a_named_task_the_best_other_is_named():
    answers = [figures(OURS, 8.0, "MLPerf x 8", trace=[(0.01, 11.0), (0.03, 8.1), (0.5, 8.0)])]
    answers += [figures(ROWS_TOO, 4.0, "MLPerf x 8"), figures("dim", 9.0, "MLPerf x 8")]
    answers += [figures(ALL_TYPES, 7.0, "MLPerf x 8")]
    assert published.named_row(answers) == ["MLPerf", "26 x 8", "8.000, 4.000", "7.000 (TorchRec, all types)", "0.03"]


def test_a_part_is_left_out_under_nets_and_under_the_analytic_model():
    of_nets = [figures("all parts", 10.0), figures("without swaps", 10.1, cpu_s=0.5)]
    of_formula = [figures("all parts", 10.0), figures("without swaps", None)]
    (row,) = published.ablation([*of_nets], of_formula)
    assert row == ["swaps", "+1.00%, +1.00%", "-, -", "1, 0", "50%"]


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("search-plans", published.PLANS),
        ("search-solved", published.SOLVED),
        ("search-time", published.TIME),
        ("search-named", published.NAMED),
        ("search-measured", published.MEASURED),
        ("search-printed", published.PRINTED),
    ],
)
def test_the_columns_are_those_of_the_page(name, columns):
    assert tuple(json.loads((TABLES / f"{name}.json").read_text())["columns"]) == columns
