"""Nights of the compiled pipeline as processes, whose store goes away in each step, or of which two run at once."""

from pathlib import Path
from typing import Any

import pytest

from bench.nights import Table, store_down, two_at_once


@pytest.mark.slow
@pytest.mark.parametrize("mishap", [store_down, two_at_once])
def test_nights_end_well_whatever_happens_to_their_store(mishap: Any, tmp_path: Path) -> None:
    table = Table()
    mishap(table, tmp_path)
    assert [row[:2] for row in table.rows if row[1] != "ended well"] == []
