"""The precision of all-to-alls: in words, in a task, and what it makes of bytes."""

import pytest

from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.precision import CollectivePrecision, parse_precision
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask


def task_of(batch_size: int = 64, **changes: object) -> ShardingTask:
    table = {"name": "t", "rows": 100, "dim": 8, "pooling_factor": 1.0, **changes}
    given = {"tables": [table], "device_memory_bytes": [2**20] * 2, "batch_size": batch_size}
    return ShardingTask.parse({**given, "collective_precision": {"forward": "int8", "backward": "fp16"}}, "task")


@pytest.mark.parametrize("text", ["fp16", "bf16", "int8", "fp8", "fp16:bf16", "fp32:fp16"])
def test_words_are_read_as_they_are_written(text: str) -> None:
    found = parse_precision(text)
    assert found is not None
    assert found.text == text


def test_fp32_is_as_if_nothing_was_said() -> None:
    assert parse_precision("fp32") is None
    assert parse_precision("fp32:fp32") is None


@pytest.mark.parametrize("text", ["fp4", "", "fp16:", "fp16:fp16:fp16", "FP16", "fp16:half", "16"])
def test_other_words_are_refused(text: str) -> None:
    if text == "fp16:":
        assert parse_precision(text) == parse_precision("fp16")
        return
    with refused(UsageError, f"{text!r}", "fp16, bf16, int8"):
        parse_precision(text)


def test_what_a_reduce_scatter_sends_is_what_sums_survive() -> None:
    assert CollectivePrecision(forward="fp16", backward="bf16").rows_factor == 1
    assert CollectivePrecision(forward="int8", backward="int8").rows_factor == pytest.approx(0.5 / 0.3125)


def test_int8_is_refused_where_fbgemm_would_end_training() -> None:
    assert task_of().collective_precision is not None
    with refused(InvalidInput, "sequence 't'", "use fp16"):
        task_of(pooling="none", optimizer_bytes_per_row=0)
    with refused(InvalidInput, "a batch of 60", "multiple of 16"):
        task_of(60)


def test_a_task_without_it_is_written_as_before() -> None:
    task = ShardingTask(
        tables=(Table(name="t", rows=100, dim=8, pooling_factor=1.0),), device_memory_bytes=(2**20,), batch_size=64
    )
    assert "collective_precision" not in task.model_dump()
    assert task.model_copy(update={"collective_precision": parse_precision("fp16")}).digest() != task.digest()
