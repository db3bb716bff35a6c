"""How much to write before a timed step: on caches of many sizes, timed by a model of one."""

from collections.abc import Callable

import pytest

from neuroshard.measure.rowcap import MemoryQuotas
from neuroshard.measure.timing.table_sets import LEAST_BYTES, find_flush_bytes, most_bytes, sizes_up_to

MIB, GIB = 2**20, 2**30
QUOTAS = MemoryQuotas(24 * GIB)


def core(cache_bytes: float, noise: Callable[[int], float] = lambda look: 1.0) -> Callable[[int], float]:
    """A core with so much cache: reading takes 0.05 ms from it and 0.25 ms from memory, times the `noise` of each trial."""
    looks = 0

    def read_ms_after(count: int) -> float:
        nonlocal looks
        looks += 1
        out = min(max(count / cache_bytes - 0.25, 0.0), 1.0)  # lines leave bit by bit
        return (0.05 + 0.2 * out) * noise(looks)

    return read_ms_after


@pytest.mark.parametrize("cache_mib", [4, 8, 16, 24, 32, 48, 64, 105])
def test_twice_what_it_takes_is_written_and_not_much_more(cache_mib: int) -> None:
    found = find_flush_bytes(core(cache_mib * MIB), 256 * MIB)
    assert cache_mib * MIB <= found <= max(4 * cache_mib, 16) * MIB


def test_sysfs_may_report_the_cache_of_a_socket_of_which_a_core_has_a_part() -> None:
    """480 MiB by sysfs, 32 of which a core of a virtual machine reaches."""
    most = most_bytes(QUOTAS, 480 * MIB)
    assert most == 256 * MIB
    assert find_flush_bytes(core(32 * MIB), most) <= 128 * MIB


def test_a_cache_larger_than_the_most_is_flushed_with_the_most() -> None:
    assert find_flush_bytes(core(2 * GIB), 256 * MIB) == 256 * MIB


def test_at_most_twice_the_cache_size_in_sysfs_is_written() -> None:
    assert most_bytes(QUOTAS, 4 * MIB) == 8 * MIB
    assert find_flush_bytes(core(4 * MIB), 8 * MIB) <= 8 * MIB


def test_without_a_size_in_sysfs_memory_is_the_limit() -> None:
    assert most_bytes(QUOTAS, None) == 256 * MIB
    assert most_bytes(MemoryQuotas(2 * GIB), None) == 128 * MIB


def test_a_moment_of_another_process_does_not_decide() -> None:
    disturbed = core(32 * MIB, noise=lambda look: 6.0 if look % 11 == 0 else 1.0)
    assert 32 * MIB <= find_flush_bytes(disturbed, 256 * MIB) <= 128 * MIB


def test_sizes_double_and_end_at_the_most() -> None:
    assert sizes_up_to(64 * MIB) == [8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB]
    assert sizes_up_to(50 * MIB) == [8 * MIB, 16 * MIB, 32 * MIB, 50 * MIB]
    assert sizes_up_to(MIB)[0] == LEAST_BYTES
