"""All-to-alls inside a domain and between domains, timed with torch.distributed over several hosts.

Every host runs the processes of its own ranks, and asks them for the same all-to-alls in the same order. A rank answers with the
time of the slowest of all ranks, so all hosts read the same figures and make the same next decision.
"""

import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any, Literal, NamedTuple

from neuroshard.core.errors import MeasureError
from neuroshard.measure.timing.all_to_all import COLLECTIVES
from neuroshard.measure.timing.clocks import open_device, take_core
from neuroshard.measure.workers.processes import first_line, out_of_memory

# Who sends: all ranks, inside their domain, to other domains, or to all; or one rank of each domain alone, to other domains
Pattern = Literal["near", "far", "all", "alone"]
REPEATS = 5
SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


class Place(NamedTuple):
    """Rank `rank` of `devices`, the `local`-th on its host; `domain` consecutive ranks share fast links."""

    rank: int
    local: int
    devices: int
    domain: int

    def bytes_to(self, peer: int, pattern: Pattern, nbytes: int, sender: int) -> int:
        """The bytes that `sender` sends to `peer`, of `nbytes` in all."""
        near = peer // self.domain == sender // self.domain
        if peer == sender or (pattern == "alone" and sender % self.domain):
            return 0
        peers = {"near": self.domain - 1, "all": self.devices - 1}.get(pattern, self.devices - self.domain)
        takes_part = pattern == "all" or near == (pattern == "near")
        return nbytes // peers if takes_part else 0


class TimePattern(NamedTuple):
    """A request to a rank: time an all-to-all in which each sender sends `nbytes` in all."""

    pattern: Pattern
    nbytes: int


class NetworkRank:
    """One rank of the all-to-alls. Serves `TimePattern -> ms`, or None where a rank has too little memory for it.

    Ranks meet at `address` (host, port), where rank 0 listens; `interface` is for gloo, which otherwise takes the one that the
    host's name belongs to. Raises MeasureError where they do not meet within `meet_seconds`.
    """

    def __init__(
        self,
        kind: str,
        place: Place,
        address: tuple[str, int],
        interface: str,
        meet_seconds: float,
        timeout_seconds: float,
    ) -> None:
        import torch.distributed as dist

        self.place = place
        if kind == "cpu":
            take_core(place.local, first=True)
        self.device = open_device(kind, place.local, threads=1)
        host, port = address
        store_address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        try:
            dist.init_process_group(
                COLLECTIVES[kind],
                init_method=store_address,
                rank=place.rank,
                world_size=place.devices,
                timeout=timedelta(seconds=meet_seconds),
            )
            self.clocks = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            self.group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
            self(TimePattern("all", 4 * place.devices))  # connections are made at the first use
        except Exception as error:
            raise MeasureError(
                f"rank {place.rank} of {place.devices} did not meet the others at {host}:{port} within "
                f"{meet_seconds:g} s ({first_line(error):.200}); is every host started, with the same --hosts and --ranks and a "
                "--host of its own, and may hosts reach one another on all ports?"
            ) from None

    def __call__(self, request: TimePattern) -> float | None:
        import torch
        import torch.distributed as dist

        try:
            step = self._all_to_all(request)
        except Exception as caught:
            if not out_of_memory(caught):
                raise
            step = None
        fits = torch.tensor([int(step is not None)])
        dist.all_reduce(fits, dist.ReduceOp.MIN, group=self.clocks)
        if step is None or not fits.item():
            self.device.release()
            return None
        took = []
        for _ in range(1 + REPEATS):
            dist.barrier(group=self.clocks)
            took.append(self.device.timed(step, waiting=True)[0])
        slowest = torch.tensor(took[1:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.clocks)
        self.device.release()
        return median(slowest.tolist())

    def _all_to_all(self, request: TimePattern) -> Callable[[], Any]:
        import torch
        import torch.distributed as dist

        peers, place = range(self.place.devices), self.place
        sent = [place.bytes_to(peer, *request, place.rank) // 4 for peer in peers]
        received = [place.bytes_to(place.rank, *request, peer) // 4 for peer in peers]
        mine, theirs = (torch.ones(sum(sizes), device=self.device.torch) for sizes in (sent, received))

        def step() -> None:
            dist.all_to_all_single(theirs, mine, received, sent, group=self.group)

        return step


def interface_to(address: tuple[str, int]) -> str:
    """The network interface by which this host reaches an address; empty where it is unknown.

    Raises MeasureError for a host name that does not resolve.
    """
    try:
        family, _, _, _, there = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise MeasureError(
            f"{address[0]!r} does not resolve here ({error.strerror or error}); give the address of host 0"
        ) from None
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.connect(there)  # sends nothing
            own = one.getsockname()[0]
            names = [name for _, name in socket.if_nameindex()]
            return next((name for name in names if own == _address_of(name)), "")
    except OSError:
        return ""


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface; empty if it has none. Linux only."""
    try:
        from fcntl import ioctl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            answer = ioctl(one.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return ""
