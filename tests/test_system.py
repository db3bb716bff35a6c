"""What Linux says of a machine, on machines that this one is not: a folder stands for `/`."""

import errno
import os
import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from neuroshard import system

MIB, GIB = 2**20, 2**30
PAGE = os.sysconf("SC_PAGE_SIZE")
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Makes this process see a machine of which only the files written here are known."""
    monkeypatch.setenv(system.ROOT_VARIABLE, str(tmp_path))

    def put(**files: str) -> None:
        for path, text in files.items():
            where = tmp_path / path.lstrip("/")
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text)

    return put


def cache(write: Write, *sizes: str, cpu: int | None = None) -> None:
    cpu = min(os.sched_getaffinity(0)) if cpu is None else cpu
    for index, size in enumerate(sizes):
        write(**{f"/sys/devices/system/cpu/cpu{cpu}/cache/index{index}/size": size})


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (("32K", "1024K", "32768K"), 32 * MIB),
        (("32K", "491520K"), 480 * MIB),
        (("32K", "64M"), 64 * MIB),
        (("1.1G",), int(1.1 * GIB)),
        (("",), None),
        (("lots",), None),
        ((), None),
        (("", "2048K\n"), 2 * MIB),
    ],
)
def test_the_last_level_cache_is_the_largest_that_can_be_read(
    write: Write, sizes: tuple[str, ...], found: int | None
) -> None:
    cache(write, *sizes)
    assert system.last_level_cache_bytes() == found


def test_caches_of_instructions_hold_no_tables(write: Write) -> None:
    cache(write, "64K", "32K")
    cpu = min(os.sched_getaffinity(0))
    write(**{f"/sys/devices/system/cpu/cpu{cpu}/cache/index0/type": "Instruction\n"})
    assert system.last_level_cache_bytes() == 32 * 1024


def test_where_our_cores_say_nothing_another_one_may(write: Write) -> None:
    cache(write, "8M", cpu=9_999)
    assert system.last_level_cache_bytes() == 8 * MIB


def test_available_memory_is_what_linux_says(write: Write) -> None:
    write(**{"/proc/meminfo": "MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable:    2097152 kB\n"})
    assert system.available_bytes() == 2 * GIB
    assert system.memory_bytes() == 4 * GIB


MEMINFO = {"/proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n"}


@pytest.mark.parametrize(
    "files",
    [
        {
            "/proc/self/cgroup": "0::/pod/container\n",
            "/sys/fs/cgroup/pod/container/memory.max": f"{3 * GIB}\n",
            "/sys/fs/cgroup/pod/container/memory.current": f"{2 * GIB}\n",
            "/sys/fs/cgroup/pod/container/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
        },
        {
            "/proc/self/cgroup": "9:cpu:/a\n4:memory:/a/b\n0::/\n",
            "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": f"{3 * GIB}\n",
            "/sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": f"{2 * GIB}\n",
            "/sys/fs/cgroup/memory/a/b/memory.stat": f"inactive_file 3\ntotal_inactive_file {GIB}\n",
        },
        {  # the container sees its own group at the mount, and a path of the host's
            "/proc/self/cgroup": "0::/kubepods/pod1/c2\n",
            "/sys/fs/cgroup/memory.max": f"{3 * GIB}\n",
            "/sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
        {  # a group further out is the tighter one
            "/proc/self/cgroup": "0::/a/b\n",
            "/sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
            "/sys/fs/cgroup/a/memory.current": f"{GIB}\n",
            "/sys/fs/cgroup/a/b/memory.max": f"{30 * GIB}\n",
            "/sys/fs/cgroup/a/b/memory.current": "0\n",
        },
        {  # above its high mark the kernel stalls a process
            "/proc/self/cgroup": "0::/a\n",
            "/sys/fs/cgroup/a/memory.max": f"{30 * GIB}\n",
            "/sys/fs/cgroup/a/memory.high": f"{3 * GIB}\n",
            "/sys/fs/cgroup/a/memory.current": f"{GIB}\n",
        },
        {  # a process of another namespace, and controllers that are mounted together
            "/proc/self/cgroup": "4:memory,hugetlb:/../../a\n",
            "/sys/fs/cgroup/memory,hugetlb/a/memory.limit_in_bytes": f"{3 * GIB}\n",
            "/sys/fs/cgroup/memory,hugetlb/a/memory.usage_in_bytes": f"{GIB}\n",
        },
    ],
    ids=["v2", "v1", "namespace", "outer", "high", "outside"],
)
def test_a_cgroup_below_the_machine_counts(write: Write, files: dict[str, str]) -> None:
    write(**MEMINFO, **files)
    assert system.available_bytes() == 2 * GIB
    assert system.memory_bytes() == 3 * GIB


def test_a_cgroup_without_a_limit_does_not(write: Write) -> None:
    write(
        **MEMINFO,
        **{
            "/proc/self/cgroup": "4:memory:/a\n0::/a\n",
            "/sys/fs/cgroup/a/memory.max": "max\n",
            "/sys/fs/cgroup/a/memory.current": "5\n",
            "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": "5\n",
        },
    )
    assert system.available_bytes() == 16 * GIB
    assert system.memory_bytes() == 32 * GIB


@pytest.mark.parametrize(("mode", "left", "all_of_it"), [("0", 16, 32), ("1", 16, 32), ("2", 5, 12), ("", 16, 32)])
def test_a_kernel_that_promises_no_more_than_it_has_is_a_limit(
    write: Write, mode: str, left: int, all_of_it: int
) -> None:
    promised = f"SwapTotal: 8388608 kB\nCommitLimit: {12 * 2**20} kB\nCommitted_AS: {7 * 2**20} kB\n"
    write(**{"/proc/meminfo": MEMINFO["/proc/meminfo"] + promised, "/proc/sys/vm/overcommit_memory": f"{mode}\n"})
    assert (system.available_bytes(), system.memory_bytes()) == (left * GIB, all_of_it * GIB)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"/proc/self/cgroup": "0::/pod/c\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"/proc/self/cgroup": "0::/pod/c\n", "/sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"/proc/self/cgroup": "0::/pod/c\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"/proc/self/cgroup": "0::/pod/c\n", "/sys/fs/cgroup/pod/cpu.max": "1600000 100000\n"}, 8),
        ({"/proc/self/cgroup": "0::/pod/c\n", "/sys/fs/cgroup/pod/cpu.max": "nonsense"}, 8),
        (
            {
                "/proc/self/cgroup": "3:cpuacct,cpu:/a\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        ({"/proc/self/cgroup": "3:cpu:/\n", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, 8),
    ],
)
def test_a_container_has_the_cores_of_its_quota(
    write: Write, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    write(**files)
    assert system.cores() == cores


@pytest.mark.parametrize(
    ("quota", "before", "after"),
    [
        ("200000 100000", {}, {"OMP_NUM_THREADS": "2"}),
        ("200000 100000", {"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "5"}),
        ("max 100000", {}, {}),
    ],
)
def test_thread_pools_are_no_larger_than_a_quota(
    write: Write, monkeypatch: pytest.MonkeyPatch, quota: str, before: dict[str, str], after: dict[str, str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    write(**{"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": quota})
    environment = dict(before)
    system.heed_quota(environment)
    assert environment == after


@pytest.mark.parametrize(
    ("space", "data", "left", "all_of_it", "binding"),
    [
        (4 * GIB, resource.RLIM_INFINITY, 3, 4, "ulimit -v"),
        (resource.RLIM_INFINITY, 4 * GIB, 2, 4, "ulimit -d"),
        (4 * GIB, 6 * GIB, 3, 4, "ulimit -v"),
        (100 * GIB, 100 * GIB, 16, 32, ""),
        (resource.RLIM_INFINITY, GIB, 0, 1, "ulimit -d"),  # less than is held already
    ],
)
def test_a_ulimit_below_the_machine_counts(
    write: Write, monkeypatch: pytest.MonkeyPatch, space: int, data: int, left: int, all_of_it: int, binding: str
) -> None:
    write(**MEMINFO, **{"/proc/self/statm": f"{GIB // PAGE} 1 1 1 0 {2 * GIB // PAGE} 0\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (space, resource.RLIM_INFINITY))
    monkeypatch.setattr(system, "_DATA", data)
    assert system.available_bytes() == left * GIB
    assert system.memory_bytes() == all_of_it * GIB
    assert system.binding_ulimit() == binding


@pytest.mark.parametrize(
    ("statm", "hard", "soft", "limit"),
    [
        ("900 300 44 1 0 256 0", resource.RLIM_INFINITY, resource.RLIM_INFINITY, GIB + 256 * PAGE),
        ("900 300 44 1 0 256 0", MIB, resource.RLIM_INFINITY, MIB),  # the user's own
        ("900 300 44 1 0 256 0", resource.RLIM_INFINITY, MIB, MIB),
        ("nonsense", resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_what_a_process_may_take_is_what_it_holds_and_no_more_than_is_given_to_it(
    write: Write, monkeypatch: pytest.MonkeyPatch, statm: str, hard: int, soft: int, limit: int | None
) -> None:
    given: list[tuple[int, int]] = []
    write(**{"/proc/self/statm": statm})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (7, hard))
    monkeypatch.setattr(system, "_DATA", soft)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    system.take_no_more(GIB)
    assert given == ([] if limit is None else [(limit, hard)])


def test_of_a_machine_that_says_nothing_the_kernel_is_asked(write: Write) -> None:
    assert system.available_bytes() > 0
    assert system.memory_bytes() > 0
    assert system.cpu_name() == ""
    assert "mount -t proc proc /proc" in system.fbgemm_lacks()
    assert system.last_level_cache_bytes() is None


def test_the_cpu_is_called_as_its_maker_does(write: Write) -> None:
    write(**{"/proc/cpuinfo": "processor: 0\nmodel name\t: Intel(R) Xeon(R) 6975P-C\n"})
    assert system.cpu_name() == "Intel(R) Xeon(R) 6975P-C"


@pytest.mark.parametrize(("down", "address"), [((), "127.0.0.1"), (("127.0.0.1",), "::1"), (("127.0.0.1", "::1"), "")])
def test_the_loopback_address_is_one_that_answers(
    monkeypatch: pytest.MonkeyPatch, down: tuple[str, ...], address: str
) -> None:
    def create_server(at: tuple[str, int], **_: object) -> Mock:
        if at[0] in down:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return MagicMock()

    monkeypatch.setattr(socket, "create_server", create_server)
    monkeypatch.setattr(socket, "create_connection", Mock())
    assert system.loopback_address() == address


def test_no_test_listens_at_an_address_that_a_machine_with_ipv6_only_lacks() -> None:
    listens = re.compile(r"""\(["'](127[.]0[.]0[.]1|localhost)["'], *\w""")
    found = [path.name for path in Path(__file__).parent.rglob("*.py") if listens.search(path.read_text("utf-8"))]
    assert found == [], "helpers.loopback has servers and addresses for these"
