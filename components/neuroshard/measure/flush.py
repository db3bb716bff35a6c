"""How much to write before a timed step, so that the cache holds nothing of the step before: found by timing.

The size that sysfs gives is an upper bound only: a virtual machine passes on the cache of a whole socket, hundreds of MiB, of
which one core keeps a part. Writing all of it before every step would take longer than the steps. So a core reads a small
buffer again after it has written 8, 16, 32 … MiB. Once the buffer has left the cache, reading it again takes longer.
"""

import statistics
from collections.abc import Callable

from neuroshard.measure.room import Room

LEAST_BYTES = 8 * 2**20  # the first size tried, and more than a core's own caches
PROBE_BYTES = 4 * 2**20
PROBE_READS = 4_000  # rows of 256 bytes: 0.05 ms from a cache, 0.3 ms from memory
LOOKS = 5  # at each size; their median counts
OUT = 0.6  # of the way from the time after 8 MiB to the time after the most: then most of the buffer has left the cache
CLEAR = 1.5  # the time after the most is at least so many times the time after the least, or no size stood out


def sizes_up_to(most: int) -> list[int]:
    """Bytes to try, each twice the one before: 8 MiB, 16 MiB, … and `most`."""
    sizes = [LEAST_BYTES]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] >= most else [*sizes, most]


def most_bytes(room: Room, last_level_cache: int | None) -> int:
    """The most that a flush may write: twice the cache that sysfs says, if it says one, within what memory allows."""
    return room.most_flush_bytes if last_level_cache is None else min(2 * last_level_cache, room.most_flush_bytes)


def find_flush_bytes(read_ms_after: Callable[[int], float], most: int) -> int:
    """Bytes that push a buffer out of the cache, at most `most`.

    `read_ms_after(n)` reads a buffer, writes `n` bytes elsewhere, and returns the ms that reading the buffer again takes. The
    result is twice the first size that makes it slow, since caches do not drop the oldest line first. Where no size makes it
    slow (a cache larger than `most`), it is `most`.
    """
    sizes = sizes_up_to(most)
    looks = [[read_ms_after(size) for size in sizes] for _ in range(LOOKS)]
    ms = [statistics.median(of_size) for of_size in zip(*looks, strict=True)]
    if ms[-1] < CLEAR * ms[0]:
        # one core's cache may be smaller than the first size: then every size makes it slow
        return most if ms[-1] <= CLEAR * read_ms_after(0) else min(2 * LEAST_BYTES, most)
    slow = ms[0] + OUT * (ms[-1] - ms[0])
    return min(2 * next(size for size, of_size in zip(sizes, ms, strict=True) if of_size >= slow), most)
