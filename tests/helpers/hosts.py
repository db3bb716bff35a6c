"""Hosts with a slow network between them, on one machine: network namespaces that a shaped bridge joins. Needs root, ip and tc.

Ranks of one namespace reach each other through its loopback at full speed; ranks of different ones share what their host may
send. What is made here is taken away again, also after an error.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

INTERFACE: Final = "net0"  # of every host
NEEDED: Final = ("ip", "tc")


@dataclass(frozen=True)
class Host:
    """A network namespace and its address."""

    namespace: str
    address: str

    def command(self, *words: object) -> list[str]:
        """The command, to be run on this host."""
        return ["ip", "netns", "exec", self.namespace, *map(str, words)]


def lacks_hosts() -> str:
    """Why no hosts can be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        return f"no {' and no '.join(missing)} here (iproute2)"
    try:
        with hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


@contextmanager
def hosts(count: int, rate: str = "", prefix: str = "") -> Iterator[list[Host]]:
    """`count` hosts, each of which sends and receives at most `rate` (tc's words, such as 200mbit); unlimited without one."""
    prefix = prefix or f"ns{os.getpid()}"
    switch, made = f"{prefix}-switch", []
    try:
        run("ip", "netns", "add", switch)
        made.append(switch)
        run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge0", "up")
        found = []
        for number in range(count):
            host = Host(f"{prefix}-{number}", f"10.77.0.{number + 1}")
            run("ip", "netns", "add", host.namespace)
            made.append(host.namespace)
            port = f"port{number}"
            run(
                "ip",
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                host.namespace,
            )
            run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                run("ip", "-n", host.namespace, "link", "set", device, "up")
            if rate:
                shape(switch, port, rate)
                shape(host.namespace, INTERFACE, rate)
            found.append(host)
        yield found
    finally:
        for namespace in made:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def shape(namespace: str, device: str, rate: str) -> None:
    """A token bucket: 256 KiB at once, what follows waits for at most half a second."""
    run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb",
        "latency", "500ms")  # fmt: skip


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def start_ranks(
    there: Sequence[Host], ranks_a_host: int, command: Sequence[object], port: int = 29511
) -> list[subprocess.Popen[str]]:
    """The command as every rank of a process group over these hosts, as torchrun would start it, one thread each."""
    ranks = []
    for rank in range(len(there) * ranks_a_host):
        host = there[rank // ranks_a_host]
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % ranks_a_host),
            "WORLD_SIZE": str(len(there) * ranks_a_host),
            "LOCAL_WORLD_SIZE": str(ranks_a_host),
            "MASTER_ADDR": there[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(
            subprocess.Popen(
                host.command(*command),
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return ranks
