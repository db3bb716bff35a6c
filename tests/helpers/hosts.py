"""Hosts with a slow network between them, on one machine: network namespaces that shaped links join. Needs root, ip and tc.

Every rank has a namespace with two interfaces: `near`, on a bridge with the ranks of its host, at full speed, and `far`, on one
with all ranks, at a port's rate, as a GPU has NVLink and a port of its own. Two, since gloo's sockets do not say which interface
they mean. What is made here is taken away again, also after an error.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NEEDED: Final = ("ip", "tc")
CLONE_NEWNET: Final = 0x40000000  # linux/sched.h


@dataclass(frozen=True)
class Rank:
    """A rank's network namespace and address, and its place on its host, of `of` ranks."""

    namespace: str
    address: str
    place: int
    of: int


def lacks_hosts() -> str:
    """Why no hosts can be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        return f"no {' and no '.join(missing)} here (iproute2)"
    try:
        with hosts(1, 1, "1gbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


@contextmanager
def hosts(count: int, ranks: int, rate: str) -> Iterator[list[Rank]]:
    """`count` hosts of `ranks` each; to other hosts a rank sends and receives at most `rate` (tc's words, such as 100mbit)."""
    prefix, made = f"ns{os.getpid()}", []

    def namespace(name: str) -> str:
        run("ip", "netns", "add", f"{prefix}-{name}")
        made.append(f"{prefix}-{name}")
        return made[-1]

    try:
        switch, found = namespace("switch"), []
        bridge(switch, "far")
        for host in range(count):
            bridge(switch, f"near{host}")
            for place in range(ranks):
                rank = Rank(namespace(f"{host}-{place}"), f"10.77.{host}.{place + 1}", place, ranks)
                run("ip", "-n", rank.namespace, "link", "set", "lo", "up")
                join(switch, f"near{host}", f"near{host}-{place}", rank, "near")
                join(switch, "far", f"far{host}-{place}", rank, "far")
                run("ip", "-n", rank.namespace, "addr", "add", f"{rank.address}/16", "dev", "far")
                run(
                    "ip", "-n", rank.namespace, "route", "add", f"10.77.{host}.0/24", "dev", "near", "src", rank.address
                )
                for where, device in ((switch, f"far{host}-{place}"), (rank.namespace, "far")):
                    shape(where, device, rate)
                found.append(rank)
        yield found
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def bridge(namespace: str, name: str) -> None:
    run("ip", "-n", namespace, "link", "add", name, "type", "bridge")
    run("ip", "-n", namespace, "link", "set", name, "up")


def join(switch: str, to: str, port: str, rank: Rank, device: str) -> None:
    """An interface of the rank on the bridge `to`."""
    run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", rank.namespace)
    run("ip", "-n", switch, "link", "set", port, "master", to, "up")
    run("ip", "-n", rank.namespace, "link", "set", device, "up")


def shape(namespace: str, device: str, rate: str) -> None:
    """A token bucket: 256 KiB at once, what follows waits for at most half a second."""
    run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb",
        "latency", "500ms")  # fmt: skip


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def start_ranks(there: Sequence[Rank], command: Sequence[object], port: int = 29511) -> list[subprocess.Popen[str]]:
    """The command as every rank of a process group over these hosts, as torchrun would start it, one thread each."""
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", rank.namespace, *map(str, command)],
            env={**os.environ, **environment_of(there, number, port)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number, rank in enumerate(there)
    ]


def environment_of(there: Sequence[Rank], number: int, port: int = 29511) -> dict[str, str]:
    """What torchrun sets for a rank, and its interface to all others."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(there[number].place),
        "WORLD_SIZE": str(len(there)),
        "LOCAL_WORLD_SIZE": str(there[number].of),
        "MASTER_ADDR": there[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "far",
        "OMP_NUM_THREADS": "1",
    }


def enter(namespace: str) -> None:
    """Move this process, of one thread, into a namespace. `ip netns exec` does so before it starts a program."""
    with Path("/run/netns", namespace).open() as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
