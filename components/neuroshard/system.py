"""What Linux reports about this machine: memory, cores, caches, the name of its CPU.

Nothing here raises. A file that is missing, empty or of an unknown form is skipped, and the next best source is used.
NEUROSHARD_SYSTEM_ROOT names a folder that replaces `/`, so that a test can describe another machine.
"""

import os
import re
import resource
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

ROOT_VARIABLE = "NEUROSHARD_SYSTEM_ROOT"
UNLIMITED = 2**60  # bytes: cgroup v1 writes "no limit" as the largest multiple of a page below 2^63
_DATA = resource.getrlimit(resource.RLIMIT_DATA)[0]  # the user's: `take_no_more` sets it anew
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def read(path: str) -> str:
    """The content of the file at an absolute `path`, stripped; empty if it cannot be read."""
    return _text(_under_root(path))


def last_level_cache_bytes() -> int | None:
    """Bytes of the largest data cache of one of our cores, from sysfs; None if sysfs does not say.

    This is an upper bound: virtual machines report the cache of a whole socket, of which a core can use a part.
    """
    sizes = []
    for cpu in _cpu_folders():
        for index in sorted(cpu.glob("cache/index*")):
            size = _size(_text(index / "size"))
            if size and _text(index / "type") != "Instruction":
                sizes.append(size)
        if sizes:
            break
    return max(sizes, default=None)


def available_bytes() -> int:
    """Bytes that this process can still allocate in RAM: what the machine has available, or less by a limit.

    Limits are those of cgroups, ulimits (-v, -d), and a kernel that promises no more than it has (vm.overcommit_memory=2). Swap
    does not count: tables that lie in it cost nothing like tables in RAM.
    """
    meminfo = _meminfo()
    available = meminfo.get("MemAvailable", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    left = [limit - used for limit, used in _cgroup_memory()]
    if (promises := _promises(meminfo)) is not None:
        left.append(promises - meminfo.get("Committed_AS", 0))
    left += [limit - used for _, limit, used in _ulimits()]
    return max(min([available, *left]), 0)


def binding_ulimit() -> str:
    """The ulimit that leaves no more than `available_bytes`, as `ulimit -d`; empty where none does."""
    available = available_bytes()
    return next((name for name, limit, used in _ulimits() if limit - used <= available), "")


def take_no_more(room: int) -> None:
    """Let this process take `room` bytes more than it has, and no more: an allocation beyond is refused (RLIMIT_DATA).

    A kernel that promises more than it has (vm.overcommit_memory=1, which the kubelet sets) refuses nothing by itself. It kills
    whoever writes to what it lacks; in a pod all processes at once (memory.oom.group). Address space would be no measure: CUDA
    reserves far more than it takes. Linux only.
    """
    pages = read("/proc/self/statm").split()
    if len(pages) > 5 and pages[5].isdecimal():
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = min(int(pages[5]) * os.sysconf("SC_PAGE_SIZE") + room, most % 2**64, _DATA % 2**64)  # -1 is no limit
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def memory_bytes() -> int:
    """Bytes that a process here can use: the machine's memory, or a lower limit, as for `available_bytes`."""
    meminfo = _meminfo()
    physical = meminfo.get("MemTotal", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits = [limit for limit, _ in _cgroup_memory()]
    if (promises := _promises(meminfo)) is not None:
        limits.append(promises)
    limits += [limit for _, limit, _ in _ulimits()]
    return min([physical, *limits])


def cores() -> int:
    """Cores that this process may use: those it may run on, or fewer by a quota of a cgroup, as containers with a limit have."""
    return max(min([_may_run_on(), *_cgroup_cores()]), 1)


def heed_quota(environment: MutableMapping[str, str]) -> None:
    """Let the thread pools of numpy and torch, which ignore a quota, be no larger than it, unless the user set them.

    Threads beyond a quota spend it on waiting for each other: a pod with 2 of 64 cores would start 64.
    """
    if cores() < _may_run_on():
        environment.setdefault("OMP_NUM_THREADS", str(cores()))


def cpu_name() -> str:
    """The model name of the CPU from /proc/cpuinfo; empty if it has none."""
    found = re.search(r"^model name\s*:\s*(.+)$", read("/proc/cpuinfo"), re.M)
    return found[1].strip() if found else ""


def fbgemm_lacks() -> str:
    """What FBGEMM's operators on a CPU need but this machine hides, with the fix; empty if nothing."""
    if sys.platform != "linux" or read("/proc/cpuinfo"):
        return ""
    return "FBGEMM needs /proc/cpuinfo, which cannot be read here; mount /proc: mount -t proc proc /proc"


def loopback_address() -> str:
    """Where processes of this machine can reach each other: 127.0.0.1, or ::1 if there is IPv6 only; empty if nowhere."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.create_server((address, 0), family=family) as server:
            socket.create_connection((address, server.getsockname()[1]), timeout=5).close()
            return address
    return ""


def _may_run_on() -> int:
    """Cores of the affinity mask of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _meminfo() -> dict[str, int]:
    """Bytes by name, as /proc/meminfo has them."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s*(\d+) kB$", read("/proc/meminfo"), re.M)}


def _promises(meminfo: Mapping[str, int]) -> int | None:
    """Bytes that all processes together may ask for, if the kernel promises no more than it has; None if it does not count."""
    return meminfo.get("CommitLimit") if read("/proc/sys/vm/overcommit_memory") == "2" else None


def _ulimits() -> Iterator[tuple[str, int, int]]:
    """The name, limit and use, both in bytes, of each ulimit on the memory of a process."""
    pages = read("/proc/self/statm").split()
    for name, limit, field in ("ulimit -v", resource.getrlimit(resource.RLIMIT_AS)[0], 0), ("ulimit -d", _DATA, 5):
        if limit != resource.RLIM_INFINITY and len(pages) > field:
            yield name, limit, int(pages[field]) * os.sysconf("SC_PAGE_SIZE")


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """Limit and usage in bytes of each limited memory cgroup of this process, from the innermost out.

    Inactive file pages do not count as used: the kernel drops them under memory pressure.
    """
    for version, folder in _cgroups("memory"):
        limits, usage, stat = (
            (("memory.max", "memory.high"), "memory.current", "inactive_file")  # above high the kernel stalls a process
            if version == 2
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
        )
        used = read(f"{folder}/{usage}")
        for limit in (read(f"{folder}/{name}") for name in limits):
            if limit.isdecimal() and used.isdecimal() and int(limit) < UNLIMITED:
                idle = re.search(rf"^{stat} (\d+)$", read(f"{folder}/memory.stat"), re.M)
                yield int(limit), max(int(used) - (int(idle[1]) if idle else 0), 0)


def _cgroup_cores() -> Iterator[int]:
    """Whole cores that each CPU cgroup of this process with a quota leaves it, from the innermost out."""
    for version, folder in _cgroups("cpu"):
        quota, _, period = (
            read(f"{folder}/cpu.max").partition(" ")
            if version == 2
            else (read(f"{folder}/cpu.cfs_quota_us"), "", read(f"{folder}/cpu.cfs_period_us"))
        )
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) // int(period)


def _cgroups(controller: str) -> Iterator[tuple[int, str]]:
    """The version, 1 or 2, and the folder of each cgroup of this process that may limit it, from the innermost out."""
    for line in read("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            version, mounts = 2, ["/sys/fs/cgroup"]
        elif controller in controllers.split(","):  # mounted alone or, without a link, under all its names: cpu,cpuacct
            version, mounts = 1, [f"/sys/fs/cgroup/{name}" for name in dict.fromkeys((controller, controllers))]
        else:
            continue
        # a container sees its own group at the mount itself, whatever the path says
        for mount in mounts:
            for group in [*_upwards(path), ""]:
                yield version, f"{mount}{group}"


def _upwards(path: str) -> list[str]:
    """A cgroup's path and those above it: `/a/b` -> `/a/b`, `/a`. One outside our namespace begins with `/..`."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/" + "/".join(parts[:depth]) for depth in range(len(parts), 0, -1)]


def _cpu_folders() -> list[Path]:
    """Folders of the CPUs in sysfs, those that this process may run on first."""
    ours = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    base = _under_root("/sys/devices/system/cpu")
    others = sorted(base.glob("cpu[0-9]*"))
    return list(dict.fromkeys([*(base / f"cpu{core}" for core in ours[:1]), *others[:1]]))


def _size(text: str) -> int | None:
    """Bytes of a size as sysfs writes it (`32768K`, `64M`); None of anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    return int(float(found[1]) * _UNITS[found[2].upper()]) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _under_root(path: str) -> Path:
    return Path(os.environ.get(ROOT_VARIABLE) or "/", path.lstrip("/"))
