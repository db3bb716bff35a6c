"""Nights of the compiled pipeline as processes, whose store goes away in each step, or of which two run at once."""

from pathlib import Path
from typing import Any

import pytest

from bench.nights import Table, store_down, two_at_once


@pytest.mark.slow
@pytest.mark.parametrize("mishap", [lambda table, folder: store_down(table, folder, seconds=7), two_at_once])
def test_nights_end_well_whatever_happens_to_their_store(mishap: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
            patch.setenv(name, "")  # which the bench sets
        table = Table()
        mishap(table, tmp_path / "nights")
    assert [row[:2] for row in table.rows if row[1] != "ended well"] == []
    assert table.rows[-1][3] == "nothing"  # was measured by the last one
