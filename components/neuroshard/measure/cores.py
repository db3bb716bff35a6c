"""Which core a process of an all-to-all keeps, and whom it has to wait for there."""

import contextlib
import os
import sys

FIRST = 1  # the least of the real-time priorities: ahead of all that have none


def may_go_first() -> bool:
    """May processes here run ahead of others, in real time? It takes the right to (CAP_SYS_NICE, or an RLIMIT_RTPRIO)."""
    if sys.platform != "linux":
        return False
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    may = _go_first()
    if may:
        os.sched_setscheduler(0, policy, parameters)
    return may


def _go_first() -> bool:
    """Run ahead of others from now on, where that is allowed; and say whether it is."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(FIRST))
    except OSError:
        return False
    return True


def take_core(rank: int) -> None:
    """Keep this process and its threads-to-be on one core, in turn with the other ranks there, and ahead of whatever else runs.

    A rank that wakes up pushes aside none that runs: else a quarter of the all-to-alls of 4 ranks on 2 cores took five times as
    long as the others. Where it may, it does push aside what is no rank: else each message waits for the slice of whoever
    has the core, 4 ms at a time, in all-to-alls of 0.7 ms.
    """
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
            if not _go_first():
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
