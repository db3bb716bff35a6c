"""How the ranks of a trainer are joined: hosts, domains of fast links, and the network between domains.

Ranks are numbered host by host, as torchrun numbers them. Inside a domain (NVLink) every rank reaches every other at full speed,
whatever host it is on; between domains it has its share of the network. TorchRec calls a domain's ranks its intra group.
"""

from pydantic import Field

from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.text import counted
from neuroshard.core.units import parse_network
from neuroshard.core.value import Value, Whole

LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 1.0, 1e15  # costs stay below what a plan may be predicted to take
MOST_LATENCY_MS = 60_000.0


class Topology(Value):
    """`domain` consecutive ranks share fast links, `local_world_size` of them a host.

    `network_bytes_per_s` is what a rank can send to other domains, and receive from them at the same time, while all ranks do so;
    `network_latency_ms` is what an all-to-all between domains takes that sends next to nothing. Where either is None, the
    hardware's datasheet has it. `neuroshard network` measures both.
    """

    domain: Whole = Field(ge=1, le=2**31)
    local_world_size: Whole = Field(ge=1, le=2**31)
    network_bytes_per_s: float | None = Field(default=None, ge=LEAST_BYTES_PER_S, le=MOST_BYTES_PER_S)
    network_latency_ms: float | None = Field(default=None, ge=0, le=MOST_LATENCY_MS)

    @property
    def has_measured_network(self) -> bool:
        """Whether both are given, as `neuroshard network` prints them."""
        return self.network_bytes_per_s is not None and self.network_latency_ms is not None

    def fault(self, devices: int) -> str:
        """Why `devices` devices do not make whole hosts and domains; empty if they do."""
        hosts, domains = counted(self.local_world_size, "rank"), counted(self.domain, "rank")
        if devices % self.local_world_size:
            return f"{counted(devices, 'device')} do not make whole hosts of {hosts}; hosts of unequal size cannot be planned"
        if devices % self.domain:
            return (
                f"{counted(devices, 'device')} do not make whole domains of {domains}; a domain must divide the devices"
            )
        if self.domain % self.local_world_size:
            return f"domains of {domains} do not hold whole hosts of {hosts}; TorchRec's domains are whole hosts"
        return ""

    def domains(self, devices: int) -> int:
        """The number of domains that `devices` devices make."""
        return devices // self.domain

    def text(self, devices: int) -> str:
        """Such as `8 hosts of 8 ranks, 2 domains of 32`."""
        hosts = f"{counted(devices // self.local_world_size, 'host')} of {counted(self.local_world_size, 'rank')}"
        return f"{hosts}, {counted(self.domains(devices), 'domain')} of {self.domain}"


def topology_of(
    devices: int, domain: int | None, local_world_size: int | None, network: str | None = None
) -> Topology | None:
    """The topology that options give: a domain is a host where only one of the two is given; None where neither is.

    Raises UsageError where the devices do not make whole hosts and domains, a `network` (`"50GB/s"`, `"50GB/s,0.06ms"`) is
    invalid, or one is given without domains to join.
    """
    rate, latency_ms = parse_network(network) if network else (None, None)
    if domain is None and local_world_size is None:
        if network:
            raise UsageError("a network joins domains: give the ranks of a domain too (--domain 8)")
        return None
    for what, ranks in (("a domain", domain), ("a host", local_world_size)):
        if ranks is not None and ranks < 1:
            raise UsageError(f"{what} has 1 rank or more, not {ranks}")
    ranks = domain or local_world_size or devices
    fields = {"domain": ranks, "local_world_size": local_world_size or ranks}
    try:
        found = Topology.parse(
            {**fields, "network_bytes_per_s": rate, "network_latency_ms": latency_ms}, "the topology"
        )
    except InvalidInput as error:
        raise UsageError(str(error)) from None
    if fault := found.fault(devices):
        raise UsageError(fault)
    return found


def near_ranks(devices: int, topology: Topology | None) -> int:
    """The ranks of an all-to-all that a cost model must know: all, or those of a domain if the devices are several.

    Domains of one rank have no all-to-all of their own to measure, so the model knows that of all ranks.
    """
    if topology is None or topology.domain == 1 or devices <= topology.domain or topology.fault(devices):
        return devices
    return topology.domain
