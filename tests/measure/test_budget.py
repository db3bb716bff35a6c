"""What a budget buys: the least of every kind first, fewer repeats before too few cases, and time dealt out by kind."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase, Split
from neuroshard.core.table import Table
from neuroshard.measure.budget import ENOUGH, SETS, TIME_SHARES, Bought, buy, trial
from neuroshard.measure.schedule import DRIFT, LEAST_ALL_TO_ALLS, LEAST_SETS, Schedule, Step, schedule

TABLE = Table.model_validate({"name": "a", "rows": 10_000, "dim": 128, "pooling_factor": 1.0})
SPLITS: tuple[Split, ...] = ("train",) * 8 + ("valid", "test_sets")


def cases(sets: int, all_to_alls: dict[int, int]) -> Cases:
    """Table sets of one table of many widths and sizes, and all-to-alls of each number of ranks."""
    compute = tuple(
        ComputeCase(
            tables=(
                TABLE.model_copy(update={"name": f"held-{i}" if i % 8 == 0 else "a", "rows": i + 1}).with_dim(
                    4 + 4 * (i % 32)
                ),
            ),
            split="test_tables" if i % 8 == 0 else SPLITS[i % 10],
        )
        for i in range(sets)
    )
    collective = tuple(
        CollectiveCase(
            device_dims=(4 * i + 4, *(8,) * (ranks - 1)), start_delays_ms=(0.0,) * ranks, split=SPLITS[i % 10]
        )
        for ranks, count in all_to_alls.items()
        for i in range(count)
    )
    return Cases(tables=(TABLE,), compute=compute, collective=collective, max_dim=128, seed=0)


def kinds(steps: Sequence[Step]) -> Counter[tuple[int, str]]:
    return Counter(
        (len(step.case.device_dims) if isinstance(step.case, CollectiveCase) else SETS, step.case.split)
        for step in steps
        if step.round_ == 0
    )


PLANNED = schedule(cases(2_000, {2: 200, 4: 200}), seed=0)


def bought(seconds: float, each: dict[int, float], planned: Schedule = PLANNED, usual: int = 7) -> Bought:
    return buy(planned.least, planned.others, each, seconds, usual)


def test_the_least_has_every_split_of_every_kind() -> None:
    found = kinds(PLANNED.least)
    assert all(found[SETS, split] == count for split, count in LEAST_SETS.items())
    assert all(found[ranks, split] == count for ranks in (2, 4) for split, count in LEAST_ALL_TO_ALLS.items())


def test_any_beginning_of_the_least_has_both_kinds_and_many_widths() -> None:
    half = PLANNED.least[: len(PLANNED.least) // 2]
    found = kinds(half)
    assert all(found[kind, "train"] >= 9 for kind in (SETS, 2, 4))
    widths = {t.dim for step in PLANNED.least if isinstance(step.case, ComputeCase) for t in step.case.tables}
    assert len(widths) >= 24


def test_what_is_asked_for_is_measured_once_each_whatever_the_order() -> None:
    steps = bought(1e9, {SETS: 1.0, 2: 1.0, 4: 1.0}).steps
    assert sorted((s.case.case_id, s.round_) for s in steps if s.round_ != DRIFT) == sorted(
        (s.case.case_id, s.round_) for s in PLANNED.steps if s.round_ != DRIFT
    )


def test_with_time_for_all_repeats_stay_as_asked() -> None:
    assert bought(1e9, {SETS: 1.0, 2: 1.0, 4: 1.0}).repeats == 7


def test_a_slow_machine_repeats_less_before_it_measures_too_few() -> None:
    each = {SETS: 0.4, 2: 1.0, 4: 1.0}
    assert [bought(seconds, each).repeats for seconds in (1_200.0, 240.0, 120.0)] == [7, 4, 2]


def test_on_the_slowest_machine_the_least_still_comes_first() -> None:
    """3 minutes where a case takes a second: no more than 180 cases, and all that a model for 4 ranks needs are among them."""
    found = bought(180.0, {SETS: 2.0, 2: 2.0, 4: 2.0})
    affordable = found.steps[: sum(found.expected.values())]
    assert all(kinds(affordable)[ranks, "train"] >= 20 for ranks in (2, 4))
    assert kinds(affordable)[SETS, "train"] >= 24
    assert found.steps[: len(PLANNED.least)] == PLANNED.least


def test_beyond_the_least_each_kind_gets_its_share_of_the_time() -> None:
    found = bought(300.0, {SETS: 0.1, 2: 1.0, 4: 1.0}, usual=2)
    others = found.steps[len(PLANNED.least) : sum(found.expected.values())]
    seconds = {"compute": 0.0, "collective": 0.0}
    for step in others:
        seconds[step.kind] += 0.1 if step.kind == "compute" else 1.0
    assert abs(seconds["collective"] / sum(seconds.values()) - TIME_SHARES["collective"]) < 0.1


def test_where_processes_must_take_turns_they_do_so_seldom() -> None:
    each = {SETS: 0.1, 2: 0.1, 4: 0.1}
    changes = {
        apart: sum(
            one.kind != two.kind for one, two in pairwise(buy(PLANNED.least, PLANNED.others, each, 1e9, 7, apart).steps)
        )
        for apart in (False, True)
    }
    assert changes[True] < changes[False] / 3


def test_a_run_says_what_its_budget_is_enough_for() -> None:
    assert str(bought(1e9, {SETS: 1.0, 2: 1.0, 4: 1.0})) == (
        "1000000000 s are enough for about 2,061 of 2,061 measurements of table sets and 413 of 413 measurements of all-to-alls"
    )
    short = str(bought(60.0, {SETS: 1.0, 2: 1.0, 4: 1.0}))
    assert short.endswith("all-to-alls, each with 2 repeats instead of 7")


def test_a_few_of_each_kind_are_timed_first() -> None:
    assert Counter(step.kind for step in trial(PLANNED.steps)) == {"compute": 3, "collective": 2}
    assert {len(s.case.device_dims) for s in trial(PLANNED.steps) if isinstance(s.case, CollectiveCase)} == {2, 4}
    assert ENOUGH.keys() == TIME_SHARES.keys()
