"""Groups of ranks (TorchRec's 2D parallelism, DMPCollection): each group holds all tables by one plan, and replicas are averaged.

W ranks train in groups of S. Rank r of a group holds what ranks r of the other groups hold: W / S replicas, whose weights and
optimizer state are averaged every so many steps. TorchRec numbers groups in two ways. Of R = W / S groups, group g has the ranks

    strided (its default)                        g, g + R, g + 2R, …   replicas are neighbours
    contiguous (`use_inter_host_allreduce`)      gS, gS + 1, …, gS + S - 1   a group's ranks are neighbours

So all-to-alls leave fewer domains of fast links with the one, averaging with the other.
"""

from pydantic import Field

from neuroshard.core.text import counted
from neuroshard.core.topology import Topology
from neuroshard.core.value import Value, Whole

MAX_RANKS = 4096
STRIDED, CONTIGUOUS = "strided", "contiguous"


class Groups(Value):
    """All `ranks` of a trainer, which train in groups, numbered `contiguous` or strided. Replicas are averaged every `sync_every`
    steps. `domain` and `local_world_size` are as in Topology, but of all ranks. `size` is the ranks of a group."""

    ranks: Whole = Field(ge=2, le=MAX_RANKS)
    contiguous: bool
    sync_every: Whole = Field(default=1, ge=1, le=2**31)
    domain: Whole = Field(ge=1, le=2**31)
    local_world_size: Whole = Field(ge=1, le=2**31)

    @property
    def numbering(self) -> str:
        return CONTIGUOUS if self.contiguous else STRIDED

    def replicas(self, size: int) -> int:
        """How many ranks hold each shard: the number of groups."""
        return self.ranks // size

    def members(self, group: int, size: int) -> range:
        """The ranks of a group, in the order of the plan's devices."""
        step = self.replicas(size)
        return range(group * size, (group + 1) * size) if self.contiguous else range(group, self.ranks, step)

    def of_rank(self, rank: int, size: int) -> tuple[int, int]:
        """The group of one of all ranks, and the device of the plan that it is."""
        step = self.replicas(size)
        return divmod(rank, size) if self.contiguous else (rank % step, rank // step)

    def replicas_near(self, size: int) -> int:
        """How many of the replicas of a shard are in one domain."""
        first = self.ranks // size if not self.contiguous else max(self.domain // size, 1)
        return min(first, self.domain, self.replicas(size))

    def topology(self, size: int, of_all: Topology | None) -> Topology:
        """How the ranks of a group are joined; the network between domains is that of all ranks. For groups without a fault."""
        domain, local = (self._inside(size, ranks) for ranks in (self.domain, self.local_world_size))
        fields = {} if of_all is None else of_all.model_dump()
        return Topology(**{**fields, "domain": domain, "local_world_size": local})

    def of_all_ranks(self, topology: Topology | None) -> Topology:
        """How all ranks are joined, by the network of the `topology` of a group."""
        fields = {} if topology is None else topology.model_dump()
        return Topology(**{**fields, "domain": self.domain, "local_world_size": self.local_world_size})

    def fault(self, size: int) -> str:
        """Why there are no groups of `size`; empty if there are."""
        if size < 2 or self.ranks % size or size == self.ranks:
            sizes = [str(one) for one in sizes_of(self.ranks)]
            could = f"groups of {', '.join(sizes)} do" if sizes else "no groups do"
            return f"groups of {size} do not divide {counted(self.ranks, 'rank')} into several groups of several ranks; {could}"
        if fault := self.of_all_ranks(None).fault(self.ranks):
            return fault
        for what, ranks in (("domain", self.domain), ("host", self.local_world_size)):
            if not self._inside(size, ranks):
                return (
                    f"{self.numbering} groups of {size} of {counted(self.ranks, 'rank')} cut {what}s of {ranks} unevenly, so "
                    "that groups are joined in several ways; take another --group-size"
                )
        return ""

    def _inside(self, size: int, together: int) -> int:
        """Of `together` ranks (of a domain, or a host), those that are in one group of `size`; 0 where their number differs."""
        if self.contiguous:
            return min(size, together) if together % size == 0 or size % together == 0 else 0
        step = self.replicas(size)
        return together // step if together % step == 0 else 1 if step % together == 0 else 0

    def text(self, size: int) -> str:
        """Such as `4 groups of 8 of 32 ranks (strided), averaged every 10 steps`."""
        groups = f"{self.replicas(size)} groups of {size} of {self.ranks:,} ranks ({self.numbering})"
        return f"{groups}, averaged {every(self.sync_every)}"


def every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps:,} steps"


def sizes_of(ranks: int) -> list[int]:
    """The sizes of several groups of several ranks each that so many ranks divide into."""
    return [size for size in range(2, ranks // 2 + 1) if ranks % size == 0]
