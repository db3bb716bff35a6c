"""Any argument of any public function, of any type: a result, or one line."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import neuroshard as ns
from helpers.refusals import refused
from neuroshard import api
from neuroshard.core.errors import NeuroshardError, UsageError

TABLES = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0 + i} for i in range(3)]
MODEL = "analytic:h100"
SEARCH: dict[str, Any] = {"devices": 2, "memory": "1GiB", "batch_size": 4096, "rounds": 0, "quiet": True}
NO_CUTS = [{**table, "dim": 4} for table in TABLES]  # found in half the time
ANYTHING = [
    *("x", "", " ", "1", "-1", "5%", "1,2", "a/b", "\0", b"x"),
    *(["x"], ["1GiB", "2GiB"], [1], [None], [[]], [], (), ("x",), {"x": 1}, {1}, {}),
    *(None, True, False, 0, 1, -1, 2.5, math.nan, math.inf, 10**400, np.int64(2), np.float32(0.5), np.array([1, 2])),
    *(object(), len, ns.search, Path("nowhere.json"), ns.Plan, iter([1])),
]


@pytest.fixture(scope="module")
def plan() -> ns.Plan:
    return ns.search(TABLES, MODEL, **SEARCH)


def given(verb: str, plan: ns.Plan, store: Path) -> dict[str, Any]:
    """Arguments with which a verb works."""
    return {
        "search": {"tables": NO_CUTS, "model": MODEL, **SEARCH},
        "size": {"tables": NO_CUTS, "models": [MODEL], **SEARCH, "memory": [str(SEARCH["memory"])]},
        "price": {"plan": plan, "model": MODEL},
        "diff": {"old": plan, "new": plan},
        "report": {"plan": plan},
        "deploy": {"plan": plan, "store": store, "name": "m"},
        "load_plan": {"source": store, "name": "m"},
        "tables": {"source": TABLES, "quiet": True},
        "cache": {"tables": TABLES, "batch_size": 4096, "quiet": True},
    }[verb]


VERBS = [verb for verb in api.__all__ if inspect.isfunction(getattr(api, verb))]
ARGUMENTS = [(verb, name) for verb in VERBS for name in inspect.signature(getattr(api, verb)).parameters]


@pytest.mark.parametrize(("verb", "argument"), ARGUMENTS)
def test_no_argument_of_any_type_ends_in_another_error_than_ours(
    verb: str, argument: str, plan: ns.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = given(verb, plan, tmp_path / "store")
    if verb == "load_plan":
        ns.deploy(plan, tmp_path / "store", "m")

    for value in ANYTHING:
        said = refusal_of(lambda value=value: getattr(ns, verb)(**{**usual, argument: value}))  # type: ignore[misc]
        assert said is None or (said and "\n" not in said), value


def refusal_of(call: Callable[[], object]) -> str | None:
    """What our error says; None where there is none. Other errors are the test's."""
    try:
        call()
    except NeuroshardError as error:
        return str(error)
    return None


def test_what_can_mean_one_thing_is_taken(plan: ns.Plan) -> None:
    def shards(**more: Any) -> object:
        return ns.search(TABLES, MODEL, **{**SEARCH, **more}).task

    assert shards(memory=["1GiB", 2**30]) == plan.task == shards(devices=np.int64(2), memory=np.int64(2**30))
    assert shards(sharding_types=["column-wise", "row-wise"]) == shards(sharding_types="column-wise,row-wise")
    assert shards(network=("43GB/s", "0.06ms"), domain=1) == shards(network="43GB/s,0.06ms", domain=1)
    assert shards(reserve=2**20) == shards(reserve="1MiB")
    rules = {"min_dim": 8, "tables": [{"match": "t0", "devices": [0, 1]}, {"match": "t1", "devices": (0,)}]}
    assert shards(constraints=rules) == shards(min_dim=8, pin=["t0=0,1", "t1=0"])
    assert shards(min_dim=8, pin={"t0": [0, 1], "t1": 0}) == shards(min_dim=8, pin={"t0": "0,1", "t1": np.int64(0)})
    assert shards(pin={"t*": "host:1"}, local_world_size=1) == shards(pin=["t*=host:1"], local_world_size=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 80}, ("memory", "80 bytes", "80GiB")),
        ({"memory": ["1GiB", "80"]}, ("memory", "80 bytes", "80GiB")),
        ({"host_memory": 64.0}, ("host_memory", "64.0 bytes")),
        ({"reserve": "2"}, ("reserve", "2 bytes", "2GiB")),
        ({"move_budget": 50}, ("move_budget", "50 bytes")),
        ({"constraints": {"reserve": 2}}, ("constraints", "reserve", "2 bytes")),
        ({"pin": {"t0": True}}, ("pin", "{'t0': True}", "devices")),
        ({"pin": {"t0": []}}, ("pin", "t0")),
        ({"pin": {0: 1}}, ("pin", "{0: 1}")),
        ({"constraints": {"min_dim": len}}, ("constraints", "constraints.json")),
        ({"constraints": {"tables": [{"devices": [0]}]}}, ("constraints", "tables[0].match")),
        ({"network": "1GB/s"}, ("domain=8",)),
        ({"dense_time": "1ms"}, ("host_memory='1TiB'", "dense_time")),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words_of_the_arguments(
    plan: ns.Plan, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refused(NeuroshardError, *words) as raised:
        ns.search(TABLES, MODEL, **SEARCH | options | ({"previous": plan} if "move_budget" in options else {}))
    assert "--" not in str(raised.value)


def test_keys_of_a_mapping_that_constrain_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    ns.search(TABLES, MODEL, **SEARCH | {"quiet": False}, constraints={"min_dims": 8})
    assert "min_dims" in capsys.readouterr().err


def test_a_saved_plan_is_what_search_writes(plan: ns.Plan, tmp_path: Path) -> None:
    ns.search(TABLES, MODEL, **SEARCH, out=tmp_path / "out.json")
    plan.save(tmp_path / "saved.json")
    plan.save(str(tmp_path / "again.json"))
    for name in ("saved.json", "again.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "out.json").read_bytes()
    assert ns.load_plan(tmp_path / "saved.json") == plan
    with refused(NeuroshardError, "out.json"):
        plan.save(tmp_path / "out.json" / "plan.json")


def test_what_cannot_is_refused_by_the_name_of_the_argument(plan: ns.Plan) -> None:
    with refused(UsageError, "previous", "123"):
        ns.search(TABLES, MODEL, **SEARCH, previous=123)  # type: ignore[arg-type]
    with refused(UsageError, "no_row_wise", "'no'"):
        ns.search(TABLES, MODEL, **SEARCH, no_row_wise="no")  # type: ignore[arg-type]
    with refused(UsageError, "make_model()"):
        ns.tables(make_model)  # type: ignore[arg-type]


def test_an_output_over_tables_of_any_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tables.csv"
    path.write_text("name,rows,dim,pooling_factor\na,1000,64,3\n")
    before = path.read_bytes()

    with refused(UsageError, "tables.csv"):
        ns.search(path, MODEL, **SEARCH, out=path)
    assert path.read_bytes() == before


def make_model() -> None:
    pass


def test_shares_are_numbers_or_per_cent(plan: ns.Plan, tmp_path: Path) -> None:
    first = ns.deploy(plan, tmp_path, "m", min_gain="5%", max_error="10%", force=True)

    assert first.release.number == 1
    with refused(UsageError, "min_gain", "'a lot'"):
        ns.deploy(plan, tmp_path, "m", min_gain="a lot")


def test_messages_name_arguments_where_the_command_line_has_flags(
    plan: ns.Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused(UsageError, "previous"):
        ns.search(TABLES, MODEL, **SEARCH, move_budget=0)
    with pytest.raises(UsageError, match=r"^row_wise '\*' and no_row_wise=True contradict"):
        ns.search(TABLES, MODEL, **SEARCH, row_wise=["*"], no_row_wise=True)
    with pytest.raises(UsageError, match="give batch_size"):
        ns.search(TABLES, MODEL, **{**SEARCH, "batch_size": None})
