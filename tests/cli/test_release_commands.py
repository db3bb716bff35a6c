"""Deploy past the gate, publish, promote and gc, as typed."""

from pathlib import Path

import pytest

from helpers.plans import TABLES, make_plan
from neuroshard.core.plan import Plan
from neuroshard.files.plan import write_plan
from neuroshard.files.tables import write_tables


def costing(cost_ms: float, note: str) -> Plan:
    plan = make_plan(note)
    by = plan.provenance.model_copy(update={"cost_model": "a", "cost_model_error": 0.05})
    return plan.model_copy(update={"predicted_ms": (cost_ms, cost_ms), "provenance": by})


OLD, EQUAL, BETTER = costing(2.0, "old"), costing(1.95, "equal"), costing(1.0, "better")


@pytest.fixture
def place(tmp_path: Path, neuroshard) -> tuple[object, ...]:
    for name, plan in {"old": OLD, "equal": EQUAL, "better": BETTER}.items():
        write_plan(tmp_path / f"{name}.json", plan)
    write_tables(tmp_path / "tables.json", TABLES)
    write_tables(tmp_path / "others.json", TABLES[1:])
    return "--store", "store", "--name", "m"


def test_a_day_of_releases(tmp_path, neuroshard, place):
    def step(*arguments: object, code: int = 0) -> str:
        done = neuroshard(*arguments, *place, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        lines = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("note: ")]
        return done.stdout + "".join(lines)

    old, equal, better = (plan.digest()[:12] for plan in (OLD, EQUAL, BETTER))
    assert step("deploy", "old.json") == f"store: m release 1 is live, plan {old}\ngate: nothing was live before\n"
    assert step("deploy", "equal.json", "--tables", "tables.json") == (
        f"store: kept the live plan: m release 1, plan {old}\n"
        "gate: predicted 1.95 ms, 2.5% lower than the live plan's 2 ms, not more than the 5.0% that its cost model is off by; "
        "0 B to move\n"
    )
    assert step("deploy", "better.json", "--tables", "others.json", code=1).startswith(
        f"error: store: plan {better} of 'm' does not go live: it has table 'user', which the model lacks"
    )
    held_back = [line.split()[2:] for line in step("releases", "--refused").splitlines() if not line.startswith(" ")]
    assert sorted(held_back, key=lambda words: words[1]) == [[equal, "kept"], [better, "refused"]]
    assert step("deploy", "better.json", "--min-gain", "0.4").startswith("store: m release 2 is live")
    assert step("publish", "equal.json") == f"store: plan {EQUAL.digest()} of m is published\n"
    assert step("promote", equal[:8]) == f"store: m release 3 is live, plan {equal}\n"
    assert step("deploy", "old.json", "--force").endswith("gate: forced; predicted 2 ms, 2.6% higher than the live plan's"
        " 1.95 ms; 0 B to move\n")  # fmt: skip
    assert [line.split()[:1] + line.split()[2:4] for line in step("releases").splitlines()[1:]] == [
        ["4", "deploy", old],
        ["3", "promote", equal],
        ["2", "deploy", better],
        ["1", "deploy", old],
    ]
    assert step("gc", "--keep", 1) == "store: 0 objects, 0 B; 10 are kept\n"


def test_what_the_search_noted_of_a_plan_is_said_where_it_goes_live(tmp_path, neuroshard, place):
    done = neuroshard("deploy", "old.json", *place, cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "note: old.json: old\n")


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("deploy", "old.json", "--min-gain", "2"), 2, "--min-gain"),
        (("deploy", "old.json", "--max-error", "0.01"), 1, "5.0%, more than the 1.0%"),
        (("deploy", "old.json", "--memory-margin", "0.99"), 1, "margin of 99.0%"),
        (("deploy", "old.json", "--model", "nowhere"), 1, "nowhere"),
        (
            ("deploy", "old.json", "--force", "--model", "analytic:h100"),
            1,
            "with cost model a; give that one, give none, or",
        ),
        (("promote", "abc"), 2, "at least 8"),
        (("promote", "0" * 12), 1, "no plan '000000000000'"),
        (("gc", "--older-than", "1m"), 2, "--older-than must be at least 1h"),
        (("gc",), 1, "live.json"),
        (("publish", "nowhere.json"), 1, "nowhere.json"),
        (("gc", "--name", "_measuring", "--keep", "3"), 2, "--keep is for releases"),
        (("releases", "--refused", "--name", "hardware/0123456789abcdef/512"), 2, "--refused lists plans only"),
    ],
)
def test_what_cannot_be_is_reported_in_one_line(tmp_path, neuroshard, place, arguments, code, word):
    done = neuroshard(arguments[0], *place, *arguments[1:], cwd=tmp_path)

    assert done.returncode == code
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1
