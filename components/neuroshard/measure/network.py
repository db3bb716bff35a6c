"""The network between hosts, measured: the rate at which a rank can send to other domains, and the latency.

neuroshard network --hosts 2 --host 0 --ranks 8 --address node-a:29400      on every host, each with a --host of its own

Every host runs the processes of its own ranks, and asks them for the same all-to-alls in the same order. A rank answers with the
time of the slowest of all ranks, so all hosts read the same figures and make the same next decision.
"""

import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from neuroshard.core.errors import MeasureError, UsageError
from neuroshard.core.topology import Topology, topology_of
from neuroshard.core.units import format_bytes
from neuroshard.measure.timing.all_to_all import COLLECTIVES
from neuroshard.measure.timing.clocks import open_device, take_core
from neuroshard.measure.workers.processes import STARTUP_SECONDS, WorkerLost, WorkerPool, first_line, out_of_memory
from neuroshard.orders import values as take
from neuroshard.orders.options import Option
from neuroshard.progress import progress

# Who sends: all ranks, inside their domain, to other domains, or to all; or one rank of each domain alone, to other domains
Pattern = Literal["near", "far", "all", "alone"]
REPEATS = 5
SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface
MEET_SECONDS = 240.0  # for the ranks of all hosts to meet; a pod may have to fetch its image first


@dataclass(frozen=True)
class NetworkSettings:
    """This is host `host` of `hosts`; all meet at `address`. Raises UsageError for invalid settings."""

    hosts: Annotated[int, "Hosts that take part.", Option(int, least=2)]
    host: Annotated[int, "The number of this one, from 0.", Option(int, least=0)]
    ranks: Annotated[int, "Ranks of a host: its GPUs.", Option(int, least=1)]
    address: Annotated[str, "HOST:PORT of host 0, where all meet; hosts also use other ports.", Option(str, "ADDRESS")]
    kind: Annotated[str, "cuda (NCCL) or cpu (gloo).", Option(str, "WORD", flag="--backend", choices=("cuda", "cpu"))]
    domain: Annotated[
        int | None, "Ranks that share fast links (NVLink) [default: those of a host].", Option(int, least=1)
    ] = None
    timeout_seconds: Annotated[
        float, "Longest time of an all-to-all.", Option(take.duration, "TIME", "60s", flag="--timeout")
    ] = 60.0
    meet_seconds: Annotated[
        float, "Longest time until all hosts have met.", Option(take.duration, "TIME", "4m", flag="--meet")
    ] = MEET_SECONDS

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise UsageError(f"unknown backend {self.kind!r}; a network is measured with cpu (gloo) or cuda (NCCL)")
        if not 0 <= self.host < self.hosts:
            raise UsageError(f"--host {self.host} is none of {self.hosts} hosts; they are numbered from 0")
        topology = topology_of(self.devices, self.domain, self.ranks)
        if topology is None or topology.domains(self.devices) < 2:
            raise UsageError(
                f"{self.hosts} x {self.ranks} ranks are one domain, without a network to measure; give more --hosts, "
                "or a smaller --domain"
            )
        _ = self.meeting_point

    @property
    def devices(self) -> int:
        return self.hosts * self.ranks

    @property
    def domain_ranks(self) -> int:
        return self.domain or self.ranks

    @property
    def meeting_point(self) -> tuple[str, int]:
        name, colon, port = self.address.rpartition(":")
        if not colon or not name or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UsageError(f"--address {self.address!r} is not the HOST:PORT of host 0, as in node-a:29400")
        return name.strip("[]"), int(port)


PATTERNS: tuple[Pattern, ...] = ("far", "near", "all", "alone")
# Bytes that a rank sends in all: from a message that is latency alone to that of a step of a large model
SIZES = tuple(2**power for power in range(12, 29, 2))
LONG_MS = 1000.0  # of an all-to-all; sizes that would take longer are left out
# If one rank of a domain alone sends this much faster than all at once, it shares a port with the others.
SHARED_PORT = 1.25


class Line(NamedTuple):
    """Milliseconds of an all-to-all by the bytes that a rank sends: `latency_ms` + bytes / `bytes_per_s`.

    The latency is that of the smallest all-to-all, the rate that of the largest, of `nbytes`: buffers on the way let sizes in
    between pass faster than the network can sustain.
    """

    bytes_per_s: float
    latency_ms: float
    nbytes: int

    def ms(self, nbytes: float) -> float:
        return self.latency_ms + 1e3 * nbytes / self.bytes_per_s


@dataclass(frozen=True)
class NetworkFigures:
    """`ms` of each pattern by the bytes that a rank sends. `run` fills it, so that what was measured outlives a failure."""

    settings: NetworkSettings
    ms: dict[Pattern, dict[int, float]]

    def line(self, pattern: Pattern) -> Line | None:
        """None for fewer than two sizes."""
        return fitted(self.ms.get(pattern, {}))

    @property
    def text(self) -> str | None:
        """As `--network` takes it, such as `43.1GB/s,0.061ms`; None if nothing was measured between domains."""
        far = self.line("far")
        return None if far is None else f"{_rate_text(far.bytes_per_s)},{_rounded(far.latency_ms)}ms"

    @property
    def overlap(self) -> float | None:
        """How much longer the largest all-to-all of all ranks takes than the slower of its two parts, by their lines."""
        near, far, both = self.line("near"), self.line("far"), self.ms.get("all")
        if near is None or far is None or not both:
            return None
        size, peers = max(both), self.settings.devices - 1
        parts = ((near, self.settings.domain_ranks - 1), (far, self.settings.devices - self.settings.domain_ranks))
        return both[size] / max(line.ms(size * share / peers) for line, share in parts)

    def lines(self) -> list[str]:
        """The figures as text."""
        of = self.settings
        topology = Topology(domain=of.domain_ranks, local_world_size=of.ranks)
        said = [f"{topology.text(of.devices)}, {of.kind}"]
        far, near, alone = (self.line(pattern) for pattern in ("far", "near", "alone"))
        if far is not None:
            said.append(f"to other domains, all ranks at once: {_line_text(far)}")
        if far is not None and alone is not None:
            times = alone.bytes_per_s / far.bytes_per_s
            shared = f", {times:.1f} times as much: ranks share ports" if times > SHARED_PORT else ": a port for each"
            said.append(f"one rank of a domain alone: {_line_text(alone)}{shared}")
        if near is not None:
            said.append(f"inside a domain: {_line_text(near)}")
        if self.overlap is not None:
            said.append(f"inside and between domains at once: {self.overlap:.2f} times as long as the slower of both")
        if self.text is not None:
            said.append(
                f'use it: search --domain {of.domain_ranks} --network {self.text}; for nightly models, network: "{self.text}"'
            )
        return said

    def as_json(self) -> dict[str, object]:
        """For other programs; ms by pattern and bytes of a rank."""
        of = self.settings
        return {
            "hosts": of.hosts,
            "ranks": of.ranks,
            "domain": of.domain_ranks,
            "backend": of.kind,
            "network": self.text,
            "lines": {pattern: line._asdict() for pattern in self.ms if (line := self.line(pattern))},
            "overlap": self.overlap,
            "ms": self.ms,
        }


def run(figures: NetworkFigures) -> None:
    """Measure the network together with the other hosts, which run the same, and add what is measured to `figures.ms`.

    Blocks until all have met. Raises MeasureError in one line where hosts do not meet, or one ends on the way; what was measured
    until then is in `figures`.
    """
    settings, address = figures.settings, figures.settings.meeting_point
    interface = interface_to(address)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    places = [
        Place(settings.host * settings.ranks + local, local, settings.devices, settings.domain_ranks)
        for local in range(settings.ranks)
    ]
    more = (address, interface, settings.meet_seconds, settings.timeout_seconds)
    pool = WorkerPool(
        "neuroshard.measure.network:NetworkRank",
        lambda: [(settings.kind, place, *more) for place in places],
        settings.timeout_seconds * 2,
        {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": interface} if interface else {})},
        settings.meet_seconds + STARTUP_SECONDS,
    )
    patterns = [pattern for pattern in PATTERNS if settings.domain_ranks > 1 or pattern in ("far", "all")]
    try:
        with progress("measure the network", len(patterns) * len(SIZES), "all-to-alls") as bar:
            pool.start()
            for pattern in patterns:
                figures.ms[pattern] = {}
                for size in SIZES:
                    ms = pool.ask(TimePattern(pattern, size))[0]
                    if ms is None:
                        break
                    figures.ms[pattern][size] = ms
                    bar.advance(1, f"{pattern}: {size / 2**20:.3g} MiB a rank in {_rounded(ms)} ms")
                    if ms * SIZES[1] / SIZES[0] > LONG_MS:
                        break
    except WorkerLost as error:
        why = str(error).partition(". ")[0]  # gloo adds its own advice
        raise MeasureError(f"a rank of another host ended, or did not answer in time: {why}") from None
    finally:
        pool.close()


def fitted(ms: dict[int, float]) -> Line | None:
    """The line of ms by bytes; None for fewer than two sizes, or where the largest takes no longer than the smallest."""
    smallest, largest = min(ms, default=0), max(ms, default=0)
    if smallest == largest or ms[largest] <= ms[smallest]:
        return None
    return Line(1e3 * (largest - smallest) / (ms[largest] - ms[smallest]), ms[smallest], largest)


def _rounded(amount: float) -> str:
    """Three significant digits, as `--network` reads them: without the exponent to which .3g switches, as in 1.23e+03."""
    return f"{Decimal(f'{amount:.3g}'):f}"


def _rate_text(bytes_per_s: float) -> str:
    """In the unit of the rounded rate: 999.7 MB/s are 1GB/s."""
    rate = float(_rounded(bytes_per_s))
    unit, factor = next(((u, f) for u, f in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if rate >= f), ("B", 1.0))
    return f"{_rounded(rate / factor)}{unit}/s"


def _line_text(line: Line) -> str:
    return (
        f"{_rate_text(line.bytes_per_s)} a rank and {_rounded(line.latency_ms)} ms (up to {format_bytes(line.nbytes)})"
    )


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
