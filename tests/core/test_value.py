"""What all values share: canonical bytes, digests, and faults in one line."""

import pytest
from pydantic import ValidationError

from neuroshard.core.errors import InvalidInput
from neuroshard.core.release import Condemned, ModelRelease, Refusal, Release
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import canonical_json, check_format, decode_json
from neuroshard.files.traces import Recorded
from neuroshard.store.traces import TracePointer

TABLE = {"name": "a", "rows": 10, "dim": 8, "pooling_factor": 1.0}


def fault(data, cls=Table) -> str:
    with pytest.raises(InvalidInput) as caught:
        cls.parse(data, "here")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_canonical_json_does_not_depend_on_the_order_of_keys():
    assert canonical_json({"b": 1, "a": "é"}) == '{"a":"é","b":1}'.encode() == canonical_json({"a": "é", "b": 1})


def test_a_value_has_the_digest_of_its_contents():
    assert Table(**TABLE).digest() == Table(**TABLE).digest() != Table(**{**TABLE, "rows": 11}).digest()
    assert len(Table(**TABLE).digest()) == 64


@pytest.mark.parametrize("kind", [TracePointer, Condemned, ModelRelease, Recorded, Refusal, Release, RowOrder])
@pytest.mark.parametrize(
    "time", ["2026-13-01T00:00:00Z", "2025-02-29T00:00:00Z", "0000-01-01T00:00:00Z", "٢٠٢٦-01-01T00:00:00Z"]
)
def test_a_moment_that_no_calendar_has_is_refused(kind, time):
    assert any(one.startswith("time: ") and time in one for one in faults(kind, {"time": time}))
    assert not any(one.startswith("time: ") for one in faults(kind, {"time": "2024-02-29T23:59:59Z"}))


def faults(kind, data) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(data)
    return [f"{one['loc'][0]}: {one['msg']}, {one['input']}" for one in caught.value.errors() if one["loc"]]


def test_unknown_keys_are_ignored():
    assert Table.parse({**TABLE, "colour": "red"}, "here") == Table(**TABLE)


def test_a_fault_says_place_rule_and_value():
    task = {"tables": [TABLE, {**TABLE, "name": "b", "dim": 6}], "device_memory_bytes": [1], "batch_size": 1}
    assert fault(task, ShardingTask) == (
        "here: tables[1].dim: must be a positive multiple of 4 (FBGEMM's fused kernels need it), not 6"
    )
    assert fault({**TABLE, "rows": "many"}).endswith("rows: must be a whole number, not 'many'")
    assert fault({**TABLE, "rows": 1e30}).endswith("rows: must be a smaller whole number, not 1e+30")
    assert fault({**TABLE, "pooling_factor": float("nan")}).endswith("not nan")
    assert fault({"name": "a", "dim": 4, "pooling_factor": 1}) == "here: rows: is missing"
    assert fault({"dim": 6, "rows": 0, "name": "a", "pooling_factor": 1}).endswith("not 0 (and 1 more)")
    assert len(fault({**TABLE, "rows": 10**400})) < 200


def test_broken_json_is_reported_by_place():
    def broken(data: bytes) -> str:
        with pytest.raises(InvalidInput) as caught:
            decode_json(data, "x.json")
        return str(caught.value)

    assert broken(b'{"a": 1, }').startswith("x.json: not JSON: ")
    assert broken(b'{"tables": [{"name": "a"').endswith("the file is cut off")
    assert broken(b" \n").endswith("it is empty")
    for comment in (b"// one", b"/* one */", b"# one"):
        assert broken(b'{"a": ' + comment + b"\n1}").endswith("JSON has no comments: take them out")
    for last in (b'{"a": 1, }', b"[1,\n]"):
        assert "comma" in broken(last)  # from Python 3.13 on by itself
    assert broken(b"[\xff]") == "x.json: not UTF-8 text (byte 1); if it is JSON, save it as UTF-8"
    assert broken(b"[" * 100_000) == "x.json: not usable JSON: nested too deep"
    assert "digits" in broken(b"1" * 5000)


def test_a_byte_order_mark_does_no_harm():
    assert decode_json(b"\xef\xbb\xbf[1]", "x.json") == [1]


def test_no_format_version_means_the_first():
    assert check_format({"a": 1}, 1, "x") == {"a": 1}
