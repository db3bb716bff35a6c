"""What measuring the network between hosts is asked for. Apart from what measures, so that `--help` is quick."""

from dataclasses import dataclass
from typing import Annotated

from neuroshard.core.errors import UsageError
from neuroshard.core.topology import topology_of
from neuroshard.orders import values as take
from neuroshard.orders.options import Option

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
