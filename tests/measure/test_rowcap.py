"""Row caps: tables too large for memory are measured with fewer rows, and no more is cut than must be."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.refusals import refused
from neuroshard import system
from neuroshard.core.case import ComputeCase
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import Table
from neuroshard.measure.rowcap import (
    CAP_STEP,
    buffer_bytes,
    capped_rows,
    capped_tables,
    case_cap,
    default_memory_limit,
    least_cap,
    row_bytes,
)

MIB = 2**20
MakeTable = Callable[..., Table]


def test_cases_that_fit_are_not_capped(table: MakeTable) -> None:
    case = ComputeCase(tables=(table("a"), table("b")))
    assert case_cap(case.tables, "sgd", 200 * MIB) is None
    assert case_cap(case.tables, "sgd", None) is None
    assert capped_rows(case.tables[0], "sgd", None) == 1000


def test_only_the_large_tables_of_a_set_are_cut(table: MakeTable) -> None:
    small, large, larger = (table(name, rows=mib * MIB // 64) for name, mib in (("s", 10), ("l", 100), ("xl", 1000)))
    case = ComputeCase(tables=(small, large, larger))
    cap = case_cap(case.tables, "sgd", 150 * MIB)
    assert cap == 70 * MIB
    assert [capped_rows(t, "sgd", cap) for t in case.tables] == [small.rows, 70 * MIB // 64, 70 * MIB // 64]
    assert capped_tables([case], "sgd", 150 * MIB) == ("l", "xl")


def test_a_large_set_does_not_cut_the_tables_of_a_small_one(table: MakeTable) -> None:
    tables = tuple(table(f"t{i}", rows=MIB) for i in range(100))  # 64 MiB each
    few, many = ComputeCase(tables=tables[:2]), ComputeCase(tables=tables)
    assert case_cap(few.tables, "sgd", 200 * MIB) is None
    assert least_cap([few, many], "sgd", 200 * MIB) == case_cap(many.tables, "sgd", 200 * MIB) == 2 * MIB


def test_optimizer_state_counts(table: MakeTable) -> None:
    assert [row_bytes(table("a", dim=8), o) for o in ("sgd", "rowwise_adagrad", "adagrad")] == [32, 36, 64]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 32)), min_size=1, max_size=8), min_size=1),
    st.integers(16 * MIB, 2**36),
    st.sampled_from(["sgd", "rowwise_adagrad", "adagrad"]),
)
def test_every_case_fits_and_one_that_is_cut_nearly_fills_the_limit(
    shapes: list[list[tuple[int, int]]], limit: int, optimizer: str
) -> None:
    cases = [
        ComputeCase(
            tables=tuple(
                Table.model_validate({"name": "t", "rows": rows, "dim": 4 * width, "pooling_factor": 1.0})
                for rows, width in shape
            )
        )
        for shape in shapes
    ]
    for case in cases:
        cap = case_cap(case.tables, optimizer, limit)
        size = sum(capped_rows(t, optimizer, cap) * row_bytes(t, optimizer) for t in case.tables)
        assert size <= limit
        assert cap is None or size > limit - 8 * (CAP_STEP + 1024)
    weights, state = buffer_bytes(cases, optimizer, limit)
    assert max(weights, state) <= limit


def test_a_limit_too_small_says_what_would_do(table: MakeTable) -> None:
    case = ComputeCase(tables=tuple(table(f"t{i}", rows=10**7) for i in range(4)))
    with refused(MeasureError, "256.0 KiB"):
        least_cap([case], "sgd", MIB // 8)


def test_the_default_leaves_most_of_the_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    available = system.available_bytes()
    monkeypatch.setattr(system, "available_bytes", lambda: available)  # others take some, and give some back
    assert 0 < default_memory_limit() <= available / 3
