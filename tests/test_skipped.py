"""What `make test` says of tests that it skipped."""

import re
from pathlib import Path

from helpers.skipped import summary, way_out


def test_every_reason_to_skip_has_a_way_out() -> None:
    sources = [path.read_text() for path in Path(__file__).parent.rglob("*.py") if "bench" not in path.parts]
    reasons = [reason for text in sources for reason in re.findall(r'skipif\([^\n]*reason="([^"]+)"', text)]
    assert len(reasons) > 8
    assert [reason for reason in reasons if not way_out(reason)] == []


def test_reasons_are_counted_and_the_most_frequent_comes_first() -> None:
    gpu, odd = "Skipped: needs an NVIDIA GPU; torch sees none here", "Skipped: it rains"
    assert summary([odd, gpu, gpu]) == [
        "   2 skipped: needs an NVIDIA GPU; torch sees none here; to run: a machine with an NVIDIA GPU, and the fbgemm-gpu that "
        "fits its torch",
        "   1 skipped: it rains; to run: (see the reason)",
    ]
