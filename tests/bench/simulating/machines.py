"""Machines that this one is not: each is a way to start a command so that it finds itself there.

What the kernel can do is done by the kernel (namespaces, control groups, taskset); what only a file says is said by a folder that
stands for `/` (NEUROSHARD_SYSTEM_ROOT). What cannot be had here raises Skip with the reason.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

ROOT = Path(__file__).parents[3]
GIB, MIB = 2**30, 2**20
PR_SET_THP_DISABLE = 41  # linux/prctl.h; children inherit it
PERIOD_US = 10_000  # of a CPU quota: short, as a slower core would be slow at any moment
ENDS_WITH_US = [sys.executable, "-I", "-S", str(ROOT / "pipelines" / "tied.py")]
ODD_NAME = 'we ird "quoted" it\'s $(touch executed) `touch executed`'
LOOPBACK_V6 = "ip link set lo up && ip address del 127.0.0.1/8 dev lo"


class Skip(Exception):
    """This machine cannot be simulated here; the message is the reason."""


@dataclass
class Launch:
    """How to start a command on a simulated machine: what stands before it, its environment, and where it runs.

    `stack` undoes at its end what was set up.
    """

    folder: Path
    stack: ExitStack
    prefix: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    clone: Path = ROOT

    def shell(self, script: str, *before: str) -> None:
        """Let a shell do something in the process that then becomes the command."""
        self.prefix += [*before, "sh", "-ec", f'{script}; exec "$@"', "sh"]


Prepare = Callable[[Launch], None]


@dataclass(frozen=True)
class Machine:
    """`quick` machines are tried by .ci/run, on the backend given there."""

    name: str
    prepare: Prepare
    quick: str = ""


def all_of(*parts: Prepare) -> Prepare:
    def prepare(launch: Launch) -> None:
        for part in parts:
            part(launch)

    return prepare


def cache(size: str | None, cores: int = 2) -> Prepare:
    """A sysfs that says so of the last-level cache; None where it says nothing of caches."""

    def prepare(launch: Launch) -> None:
        root = system_root(launch)
        for core in range(cores):
            cpu = root / "sys/devices/system/cpu" / f"cpu{core}"
            cpu.mkdir(parents=True, exist_ok=True)
            if size is None:
                continue
            index = cpu / "cache/index3"
            index.mkdir(parents=True)
            told = {"size": size, "level": "3", "type": "Unified", "shared_cpu_list": f"0-{cores - 1}"}
            for name, text in told.items():
                (index / name).write_text(f"{text}\n" if text else "")

    return prepare


def system_root(launch: Launch) -> Path:
    """A folder that stands for `/`, with the files of this machine that the reading of memory and the CPU's name needs."""
    root = launch.folder / "system"
    if not root.exists():
        for name in ("proc/meminfo", "proc/cpuinfo", "proc/self/cgroup"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                (root / name).write_text(Path("/", name).read_text())
        launch.environment["NEUROSHARD_SYSTEM_ROOT"] = str(root)
    return root


def one_core(launch: Launch) -> None:
    if not shutil.which("taskset"):
        raise Skip("needs taskset")
    launch.prefix += ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


def cores(count: int) -> Prepare:
    """Python believes in so many cores; there are no more than there are, so processes share them."""

    def prepare(launch: Launch) -> None:
        cache("32768K", count)(launch)
        (launch.folder / "python").mkdir()
        (launch.folder / "python" / "sitecustomize.py").write_text(
            f"import os\nos.cpu_count = lambda: {count}\nos.sched_getaffinity = lambda pid: set(range({count}))\n"
        )
        launch.environment["PYTHONPATH"] = str(launch.folder / "python")

    return prepare


def slower(times: float) -> Prepare:
    """Every core at a fraction of its speed: a quota in every 10 ms."""

    def prepare(launch: Launch) -> None:
        quota = max(1000, int(PERIOD_US * len(os.sched_getaffinity(0)) / times))
        join_group(
            launch,
            "cpu",
            v1={"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": quota},
            v2={"cpu.max": f"{quota} {PERIOD_US}"},
        )

    return prepare


def memory(limit: int) -> Prepare:
    """A control group that kills what takes more."""

    def prepare(launch: Launch) -> None:
        join_group(
            launch, "memory", v1={"memory.limit_in_bytes": limit}, v2={"memory.max": limit, "memory.swap.max": 0}
        )

    return prepare


def join_group(launch: Launch, controller: str, v1: dict[str, Any], v2: dict[str, object]) -> None:
    """A new control group of version 1 or 2, whichever is here, that the command joins."""
    mount = Path("/sys/fs/cgroup")
    if (mount / controller / "cgroup.procs").exists():
        group, settings = mount / controller / f"neuroshard-{uuid4().hex[:8]}", v1
    elif controller in _read(mount / "cgroup.subtree_control").split():
        group, settings = mount / f"neuroshard-{uuid4().hex[:8]}", v2
    else:
        raise Skip(
            f"no control group for {controller} can be made here: needs root, and the controller in /sys/fs/cgroup"
        )
    try:
        group.mkdir()
        launch.stack.callback(_remove, group)
        for name, value in settings.items():
            if name == "memory.swap.max" and not (group / name).exists():
                continue
            (group / name).write_text(str(value))
    except OSError as error:
        raise Skip(f"no control group for {controller} can be made here: {error.strerror}") from None
    launch.environment["NEUROSHARD_BENCH_GROUP"] = str(group)
    launch.shell('echo $$ > "$NEUROSHARD_BENCH_GROUP/cgroup.procs"')


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _remove(group: Path) -> None:
    for _ in range(50):  # until the last of its processes is gone
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def busy(processes: int) -> Prepare:
    """A load average of so many: processes without end, as ordinary as we are."""

    def prepare(launch: Launch) -> None:
        for _ in range(processes):
            loop = subprocess.Popen([*ENDS_WITH_US, str(os.getpid()), sys.executable, "-S", "-c", "while True: pass"])
            launch.stack.callback(loop.wait)
            launch.stack.callback(loop.kill)

    return prepare


def no_huge_pages(launch: Launch) -> None:
    refuse = f"ctypes.CDLL(None).prctl({PR_SET_THP_DISABLE}, 1, 0, 0, 0)"
    launch.prefix += [sys.executable, "-c", f"import ctypes, os, sys; {refuse}; os.execvp(sys.argv[1], sys.argv[1:])"]


def mounted(options: str, at: str) -> Prepare:
    """A temporary file system of its own at a path; `{folder}` is the launch's."""

    def prepare(launch: Launch) -> None:
        namespace("--mount")
        path = at.format(folder=launch.folder)
        if path.startswith(str(launch.folder)):
            Path(path).mkdir()
            launch.environment["TMPDIR"] = path
        launch.environment["NEUROSHARD_BENCH_MOUNT"] = path
        launch.shell(f'mount -t tmpfs -o {options} tmpfs "$NEUROSHARD_BENCH_MOUNT"', "unshare", "--mount")

    return prepare


def network(setup: str) -> Prepare:
    """A network of its own, with a loopback that `setup` makes what it is."""

    def prepare(launch: Launch) -> None:
        namespace("--net")
        if not shutil.which("ip"):
            raise Skip("needs ip, of iproute2")
        if setup == LOOPBACK_V6 and not Path("/proc/net/if_inet6").exists():
            raise Skip("the kernel has no IPv6")
        launch.shell(setup, "unshare", "--net")

    return prepare


def unknown_host(launch: Launch) -> None:
    namespace("--uts")
    launch.shell("hostname no-such-host.invalid", "unshare", "--uts")


def namespace(kind: str) -> None:
    """Raise Skip where no such namespace can be had."""
    if not shutil.which("unshare"):
        raise Skip("needs unshare, of util-linux")
    if subprocess.run(["unshare", kind, "true"], capture_output=True).returncode:
        raise Skip(f"unshare {kind} is not allowed here: needs root")


def limited(resource: str) -> Prepare:
    """A shell's ulimit: `-n 64` for open files, `-v 4194304` for KiB of address space of each process."""
    return lambda launch: launch.shell(f"ulimit {resource}")


def odd_path(launch: Launch) -> None:
    """A clone under a path that a shell would take apart or execute; its environment is this one's."""
    launch.clone = launch.folder / ODD_NAME / "neuroshard"
    for name in ("components", "pipelines", "examples"):
        shutil.copytree(ROOT / name, launch.clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (launch.clone / ".venv").symlink_to(sys.prefix)


def no_home(launch: Launch) -> None:
    """A home that cannot be written, and a temporary folder that does not exist."""
    launch.environment |= {"HOME": "/proc/none", "TMPDIR": "/proc/none/tmp"}


def odd_environment(launch: Launch) -> None:
    """A proxy that is not there, a terminal of ASCII alone, and values that others left."""
    proxies = dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
    )
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    left = {"OMP_NUM_THREADS": "64", "CUDA_VISIBLE_DEVICES": "junk", "PYTHONHASHSEED": "7"}
    launch.environment |= proxies | ascii_alone | left


def meminfo(total: int) -> Prepare:
    def prepare(launch: Launch) -> None:
        path = system_root(launch) / "proc/meminfo"
        path.write_text(
            f"MemTotal: {total // 1024} kB\nMemFree: {total // 2048} kB\nMemAvailable: {total // 1280} kB\n"
        )
        group = _read(Path("/proc/self/cgroup"))
        (system_root(launch) / "proc/self/cgroup").write_text(group)

    return prepare


MACHINES = (
    Machine("as it is", all_of()),
    Machine("cache of 480 MiB", cache("491520K"), quick="cpu"),
    Machine("cache of 1.1 GiB", cache("1153433K")),
    Machine("no cache in sysfs", cache(None)),
    Machine("empty cache size", cache("")),
    Machine("cache size 64M", cache("64M")),
    Machine("1 core", one_core),
    Machine("64 cores", cores(64)),
    Machine("8 times slower", slower(8)),
    Machine("load average 12", busy(12)),
    Machine("4 GiB of memory", all_of(meminfo(4 * GIB), memory(4 * GIB))),
    Machine("cgroup of 2 GiB", memory(2 * GIB)),
    Machine("cgroup of 1.5 GiB", memory(3 * GIB // 2)),
    Machine("no huge pages", no_huge_pages),
    Machine("64 MiB /dev/shm", mounted("size=64m", "/dev/shm")),
    Machine("odd path", odd_path),
    Machine("noexec tmp", mounted("size=512m,noexec", "{folder}/noexec"), quick="synthetic"),
    Machine("no home, no tmp", no_home),
    Machine("IPv6 only", network(LOOPBACK_V6)),
    Machine("unknown host name", all_of(network("ip link set lo up"), unknown_host)),
    Machine("64 open files", limited("-n 64")),
    Machine("4 GiB of address space", limited("-v 4194304")),
    Machine("odd environment", odd_environment),
)
