"""Pointer, history and plan files that were damaged: what they were, or a clear error; never another plan, nor a hang."""

import json
import random
import resource
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.damage import CHECKS, fuzz, two_releases
from helpers.limits import HANGS
from helpers.plans import make_plan
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan, Shard, overlapping
from neuroshard.store.folder import FolderStore
from neuroshard.store.protocol import MAX_BYTES
from neuroshard.store.releases import plan_key, read_plan


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKS)
def test_a_damaged_file_is_what_it_was_or_a_clear_error(kind):
    tried, taken, _ = fuzz(kind, 150)

    assert tried >= 150
    assert taken < tried / 2, "most mutations do harm"


@pytest.mark.parametrize("kind", CHECKS)
def test_faults_of_chance_do_no_more_than_hypothesis(kind):
    store, rng = two_releases(), random.Random(0)

    assert sum(CHECKS[kind](store, rng) for _ in range(150)) < 75


GOOD = make_plan().canonical_json()
WITH = GOOD[:-1] + b',"x":'
HOSTILE = {
    "deep lists": b"[" * 200_000,
    "deep objects in a plan": WITH + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "an integer of 4 million digits": WITH + b"9" * 4_000_000 + b"}",
    "not a number": GOOD.replace(b"1.5", b"NaN", 1),
    "infinity": GOOD.replace(b"1.5", b"1e999", 1),
    "half a surrogate pair": GOOD.replace(b'"user"', rb'"\ud800"'),
    "UTF-16": GOOD.decode().encode("utf-16"),
    "two versions": GOOD[:-1] + b',"format_version":2}',
    "ten million devices": GOOD.replace(b"[1048576,1048576]", b"[" + b"1," * 5_000_000 + b"1]"),
    "a shard a hundred thousand times": json.dumps(
        {**json.loads(GOOD), "shards": json.loads(GOOD)["shards"] * 20_000}
    ).encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_plan_is_one_short_line(data):
    with pytest.raises(InvalidInput) as caught:
        Plan.from_json(data, "plan.json")

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_hundred_megabytes_are_refused_before_they_are_read(tmp_path):
    store = FolderStore(tmp_path)
    path = tmp_path / plan_key("m", "0" * 64)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused(InvalidInput, f"{MAX_BYTES:,}"):
        read_plan(store, "m", "0" * 64)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * MAX_BYTES / 1024


# VmHWM, since ru_maxrss of a new process counts what its parent had in memory when it was started
WORST = """
import re
from pathlib import Path
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan
from neuroshard.store.protocol import MAX_BYTES
data = b'{"x":[' + b"[]," * (MAX_BYTES // 3 - 10) + b"0]}"
try:
    Plan.from_json(data, "plan.json")
except InvalidInput:
    print(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024 / len(data))
"""


@pytest.mark.slow
def test_the_largest_file_that_is_read_takes_bounded_memory():
    """Empty lists are the dearest: 3 bytes become 64."""
    done = subprocess.run([sys.executable, "-c", WORST], capture_output=True, text=True, timeout=HANGS, check=True)

    assert float(done.stdout) < 45  # times its size, the interpreter included: 0.6 GiB for 16 MiB


RECTANGLES = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(0, 6), st.integers(1, 4)), max_size=7)


@settings(max_examples=300, deadline=None)
@given(RECTANGLES)
def test_overlaps_are_found_as_by_looking_at_every_pair(rectangles):
    shards = [Shard(table="t", row_offset=r, rows=h, column_offset=c, dim=w, device=0) for r, h, c, w in rectangles]

    def overlap(one: Shard, other: Shard) -> bool:
        rows = one.row_offset < other.row_offset + other.rows and other.row_offset < one.row_offset + one.rows
        columns = (
            one.column_offset < other.column_offset + other.dim and other.column_offset < one.column_offset + one.dim
        )
        return rows and columns

    found = overlapping(shards)
    assert (found is not None) == any(overlap(a, b) for i, a in enumerate(shards) for b in shards[:i])
    assert found is None or overlap(*found)
