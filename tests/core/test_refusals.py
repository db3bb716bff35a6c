"""What the ground floor refuses: an input, the error, and the facts that its line names."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from helpers.refusals import refused
from neuroshard.core.access import stated_curve
from neuroshard.core.case import CollectiveCase, ComputeCase
from neuroshard.core.cost import CollectiveCost, ComputeCost
from neuroshard.core.errors import InvalidInput, NewerFormat, UsageError
from neuroshard.core.plan import PLAN_FORMAT, Plan, Shard, check_tiles
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import topology_of
from neuroshard.core.units import (
    parse_bytes,
    parse_counts,
    parse_duration,
    parse_network,
    parse_portion,
    parse_rate,
    parse_share,
    parse_step_time,
)
from neuroshard.core.value import canonical_json, check_format, decode_json, shown

TABLE = Table(name="a", rows=10, dim=16, pooling_factor=1.0)
TASK = {"tables": (TABLE,), "device_memory_bytes": (1,), "batch_size": 1}
MANY = "9" * 400
DURATION = "--give-up: ", "length of time"
NO_SIZES = ("", "GiB", "-1GiB", "1e9", "nan", "32 giraffes", "0", "0.2B", MANY + "GiB", "1,5GB")
NO_NETWORKS = ("50GB/s,", "50GB/s,0.06", "50GB/s,-1ms", "50GB/s,1ms,1ms", "0.06ms,50GB/s")
HALVES = [Shard(table="a", row_offset=5 * d, rows=5 + (d == 0), dim=16, device=d) for d in (0, 1)]
NO_PLAN = b'{"format_version": 2, "features": [], "hardware": {}, "x": 1}'
TOMORROWS = b'{"format_version": %d, "task": {}, "shards": []}' % (PLAN_FORMAT + 1)
NO_TIMES: list[dict[str, Any]] = [
    {},
    {"forward_ms": 1.0},
    {"forward_ms": 1.0, "backward_ms": 2.0, "error": "out of memory"},
    {"forward_ms": 1.0, "error": "out of memory"},
]


def each(
    call: Callable[[Any], object], values: Iterable[Any], *facts: object, quoted: bool = False
) -> Iterator[tuple[Any, ...]]:
    """UsageErrors of values, each of which is quoted if so."""
    return ((partial(call, value), UsageError, *facts, *([shown(value)] if quoted else [])) for value in values)


def of_two(times: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name == "error" else (value,) for name, value in times.items()}


REFUSED: list[tuple[Any, ...]] = [
    *each(parse_bytes, NO_SIZES, "memory", quoted=True),
    *each(partial(parse_duration, option="--give-up"), ("", "0s", "5", "soon", "-3m", "3 days", MANY + "s"), *DURATION),
    *each(parse_share, ("", "2", "0/8", "9/8", "1/0", "-1/2", "1/2/3", "a/b", "1 /2"), "2/8"),
    *each(lambda text: parse_counts(text, "--devices"), ("", "0", "4,", "-4", "4.0", "²", "9" * 5000, "4294967296"), "--devices"),
    *each(parse_portion, ("", "%", "half", "0.5 per cent", "nan"), "per cent", quoted=True),
    *each(parse_step_time, ("12", "0ms", "-3ms", "nan", "infms", "1h", "", "ms"), "unit", "12ms", quoted=True),
    *each(parse_rate, ("50", "50GB", "GB/s", "0GB/s", "5x/s", "50GB/m", "", "nanGB/s", "1.2.3GB/s"), "50GB/s", quoted=True),
    (lambda: topology_of(16, 5, None), UsageError, "16 devices", "5 ranks"),
    (lambda: topology_of(12, None, 8), UsageError, "12 devices", "hosts of 8 ranks", "unequal"),
    (lambda: topology_of(16, 4, 8), UsageError, "4 ranks", "hosts of 8 ranks"),
    (lambda: topology_of(8, 16, 4), UsageError, "8 devices", "domains of 16 ranks"),
    (lambda: topology_of(8, None, None, "50GB/s"), UsageError, "network", "--domain"),
    *each(partial(topology_of, 16, 8, None), NO_NETWORKS, "50GB/s,0.06ms"),
    (lambda: topology_of(16, 8, None, ",0.06ms"), UsageError, "as in 50GB/s"),
    (lambda: stated_curve("pareto:2", 10, 1.0, 10), UsageError, "zipf:1.05"),
    (lambda: canonical_json({"a": math.nan}), ValueError, "JSON"),
    (lambda: setattr(TABLE, "rows", 3), ValueError, "rows"),
    (lambda: check_format({"format_version": 2}, 1, "x"), NewerFormat, "x", "format_version", 2, 1),
    *(
        (partial(check_format, {"format_version": version}, 1, "x"), InvalidInput, "x", "format_version")
        for version in (0, -1, "1", True, 1.0, None)
    ),
    (lambda: decode_json(b'{"a": 1, "b": 2, "a": 3}', "x.json"), InvalidInput, "x.json", "'a'", 1, 3),
    (lambda: decode_json(b'{"tables": [{"a": 1}, {"a": 1, "a": 3}]}', "x.json"), InvalidInput, "x.json", "'a'", 1, 3),
    (lambda: CollectiveCase(device_dims=(8,), start_delays_ms=(0,)), ValidationError, "2 devices", "not 1"),
    (lambda: CollectiveCase(device_dims=(8, 8), start_delays_ms=(0,)), ValidationError, "1 start delays", "2 devices"),
    (lambda: ComputeCase(tables=()), ValidationError, "tables"),
    (lambda: ComputeCase(tables=(TABLE,), split="holiday"), ValidationError, "test_tables"),
    *((partial(ComputeCost, case_id="c", **times), ValidationError, "error") for times in NO_TIMES),
    *((partial(CollectiveCost, case_id="c", **of_two(times)), ValidationError, "error") for times in NO_TIMES),
    *(
        (partial(kind, case_id="a", **fields), ValidationError, "forward_ms" if kind is ComputeCost else "backward_ms")
        for ms in (-1.0, math.nan, math.inf, 1e308)
        for kind, fields in (
            (ComputeCost, {"forward_ms": ms, "backward_ms": 1.0}),
            (CollectiveCost, {"forward_ms": (1.0, 1.0), "backward_ms": (ms, 1.0)}),
        )
    ),
    *(
        (partial(ShardingTask, **{**TASK, name: value}), ValidationError, name, fact)
        for name, value, fact in (
            ("device_memory_bytes", (), "not 0"),
            ("device_memory_bytes", (0,), "greater than 0"),
            ("batch_size", 0, "greater than 0"),
            ("tables", (TABLE, TABLE), "both named 'a'"),
            ("tables", (), "empty"),
        )
    ),
    (lambda: check_tiles(TABLE, HALVES), ValueError, "rows 0-5", "rows 5-9", "columns 0-15", "device 0", "device 1"),
    (lambda: Plan.from_json(NO_PLAN, "model.json"), InvalidInput, "model.json", "'features'", "'hardware'"),
    (lambda: Plan.from_json(TOMORROWS, "plan.json"), NewerFormat, "plan.json", PLAN_FORMAT + 1, PLAN_FORMAT),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_it_is_refused(row: tuple[Any, ...]) -> None:
    call, kind, *facts = row
    with refused(kind, *facts):
        call()


@pytest.mark.parametrize(
    "parse", [parse_bytes, parse_rate, parse_network, parse_duration, parse_portion, parse_share, parse_step_time]
)
def test_a_text_of_a_million_digits_is_refused_at_once_in_a_short_line(parse: Callable[[str], object]) -> None:
    with refused(UsageError) as raised:
        parse("9" * 10**6 + "!")
    assert len(str(raised.value)) < 300
