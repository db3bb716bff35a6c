"""Ranks that say the same say it once, by rank 0; what one rank alone has to say is heard."""

import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
import neuroshard.client.model.warn as how
from helpers.gloo import on_ranks
from neuroshard.client.model.warn import warn


def said(rank: int) -> list[str]:
    if rank == 0:
        time.sleep(0.2)  # others are earlier
    else:
        how.SECONDS_TO_WAIT = 2.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("of all")
        if rank == 2:
            warn("of rank 2")
        warn("of all again")
    return [str(warning.message) for warning in caught]


@pytest.mark.slow
def test_rank_0_warns_for_all_ranks_and_a_rank_of_what_concerns_it_alone(tmp_path: Path) -> None:
    assert on_ranks(3, tmp_path, said) == [["of all", "of all again"], [], ["of rank 2"]]
