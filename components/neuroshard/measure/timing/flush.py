"""How many bytes to write before a timed step, so that the cache holds nothing of the step before: found by timing.

The cache size in sysfs is only an upper bound. A virtual machine reports the cache of a whole socket, hundreds of MiB, of which
one core gets a part; writing all of it would take longer than the steps. So this writes 8, 16, 32 … MiB and reads a small buffer
again after each size. Reading takes longer once the buffer has left the cache.
"""

import statistics
from collections.abc import Callable

from neuroshard.measure.memory_quotas import MemoryQuotas

LEAST_BYTES = 8 * 2**20  # the first size tried, and more than a core's own caches
PROBE_BYTES = 4 * 2**20
PROBE_READS = 4_000  # rows of 256 bytes: 0.05 ms from a cache, 0.3 ms from memory
TRIALS = 5  # of each size, of which the median counts
# Of the way from the time after 8 MiB to the time after the most: most of the buffer has then left the cache.
EVICTED = 0.6
CLEAR = 1.5  # times the time after the least, that the time after the most must be; otherwise no size stands out


def sizes_up_to(most: int) -> list[int]:
    """Bytes to try, each size twice the one before: 8 MiB, 16 MiB, … and `most`."""
    sizes = [LEAST_BYTES]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] >= most else [*sizes, most]


def most_bytes(quotas: MemoryQuotas, last_level_cache: int | None) -> int:
    """The most bytes that a flush may write: twice the cache size in sysfs, if it gives one, and no more than memory allows."""
    return quotas.most_flush_bytes if last_level_cache is None else min(2 * last_level_cache, quotas.most_flush_bytes)


def find_flush_bytes(read_ms_after: Callable[[int], float], most: int) -> int:
    """Bytes that push a buffer out of the cache, at most `most`.

    `read_ms_after(n)` reads a buffer, writes `n` bytes elsewhere, and returns the ms of reading the buffer again. The result is
    twice the first size that makes this slow, since caches do not evict the oldest line first. If no size makes it slow (the
    cache is larger than `most`), the result is `most`.
    """
    sizes = sizes_up_to(most)
    trials = [[read_ms_after(size) for size in sizes] for _ in range(TRIALS)]
    ms = [statistics.median(of_size) for of_size in zip(*trials, strict=True)]
    if ms[-1] < CLEAR * ms[0]:
        # every size is slow where one core's cache is smaller than the first size
        return most if ms[-1] <= CLEAR * read_ms_after(0) else min(2 * LEAST_BYTES, most)
    slow = ms[0] + EVICTED * (ms[-1] - ms[0])
    return min(2 * next(size for size, of_size in zip(sizes, ms, strict=True) if of_size >= slow), most)
