"""How much memory each part of a measurement on the CPU may take, as shares of the memory of this machine or its container.

These are shares of the total, not of what is free: a run that continues must have the sizes with which its costs were measured.
"""

from dataclasses import dataclass

from neuroshard import system

PROCESS_BYTES = 256 * 2**20  # a worker with torch and FBGEMM loaded holds 180 MiB of its own, a rank without FBGEMM 150
MOST_FLUSH_BYTES = 256 * 2**20  # 25 ms at 10 GB/s, ten times as long as most steps
MOST_READ_BYTES = 256 * 2**20  # of the reference kernel of random reads; far more than most last-level caches
# Kept for later cases with the same table: 2,000 tables at batch 65,536 and pooling factor 2.
MOST_LOOKUP_BYTES = 2 * 2**30
SHARE = 1 / 16  # of all memory, for the flush, and another for the random reads
LOOKUP_SHARE = 1 / 8


@dataclass(frozen=True)
class MemoryQuotas:
    """Bytes for each part, on a machine with `memory_bytes`."""

    memory_bytes: int

    @classmethod
    def here(cls) -> "MemoryQuotas":
        return cls(system.memory_bytes())

    @property
    def most_flush_bytes(self) -> int:
        return min(MOST_FLUSH_BYTES, int(self.memory_bytes * SHARE))

    @property
    def read_bytes(self) -> int:
        return min(MOST_READ_BYTES, int(self.memory_bytes * SHARE))

    @property
    def lookup_bytes(self) -> int:
        return min(MOST_LOOKUP_BYTES, int(self.memory_bytes * LOOKUP_SHARE))

    @property
    def worker_bytes(self) -> int:
        """Bytes of the worker for table sets, without the tables."""
        return PROCESS_BYTES + self.most_flush_bytes + self.read_bytes + self.lookup_bytes
