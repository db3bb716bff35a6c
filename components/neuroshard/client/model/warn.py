"""ShardingWarnings, of which the ranks of a trainer say each once. Needs torch."""

import hashlib
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._shard._utils import DEPRECATE_MSG

from neuroshard.core.clean import log

PACKAGE = str(Path(__file__).parents[2])
SECONDS_TO_WAIT = 5.0  # for rank 0, which says the same at about the same time
POLL_SECONDS = 0.02


class ShardingWarning(UserWarning):
    """The plan can be used, but something about it may surprise."""


def warn(what: str) -> None:
    """Issue a ShardingWarning where the caller of this package stands; on rank 0 for all ranks where torch.distributed is
    initialised.

    Another rank issues it too if rank 0 has not within `SECONDS_TO_WAIT`: then it concerns that rank alone, or rank 0 does not
    make the same call.
    """
    if not _said_by_rank_0(what):
        warnings.warn(what, ShardingWarning, stacklevel=_level_of_the_caller())


def warn_and_go_on(kind: type[Warning], what: str) -> None:
    """Issue a warning of what does not end training, where warnings are errors either."""
    try:
        warnings.warn(f"{what}; training goes on", kind, stacklevel=_level_of_the_caller())
    except kind as warning:
        log(f"warning: {warning}")


def and_more(some: Sequence[object]) -> str:
    """` (and 2 more)`, after the first of several."""
    return f" (and {len(some) - 1} more)" if len(some) > 1 else ""


def warn_of(some: Sequence[str], what: str) -> None:
    """Issue one ShardingWarning for all of these, which names the first; none for none."""
    if some:
        warn(f"{some[0]}{and_more(some)}{what}")


@contextmanager
def sharded_tensors_allowed() -> Iterator[None]:
    """Without torch's FutureWarning that ShardedTensors shall be DTensors: TorchRec has them, and its users have no choice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(DEPRECATE_MSG), FutureWarning)
        yield


def _said_by_rank_0(what: str) -> bool:
    """Whether this is another rank, and rank 0 issues the same warning; seen in the key-value store of the default group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    key = f"neuroshard/warned/{hashlib.sha256(what.encode()).hexdigest()}"
    ends = time.monotonic() + SECONDS_TO_WAIT
    try:
        store = distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set(key, "said")
            return False
        while not store.check([key]):
            if time.monotonic() > ends:
                return False
            time.sleep(POLL_SECONDS)
    except (RuntimeError, ValueError):  # the store's process is gone, or the group is; it is worth saying all the same
        return False
    return True


def _level_of_the_caller() -> int:
    """The `stacklevel`, of a warning issued by `warn`, of the first frame outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level
