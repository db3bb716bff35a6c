"""How much memory each part of a measurement on the CPU may take, from what this machine, or its container, has in all.

Of the total, not of what is free just now: a run that goes on must find the sizes with which its costs were measured.
"""

from dataclasses import dataclass

from neuroshard import system

PROCESS_BYTES = 256 * 2**20  # a worker with torch and FBGEMM loaded holds 180 MiB of its own, a rank without FBGEMM 150
MOST_FLUSH_BYTES = 256 * 2**20  # at 10 GB/s 25 ms, ten times what most steps take
MOST_READ_BYTES = 256 * 2**20  # of the random reads timed beside each repeat; far more than most last-level caches
MOST_LOOKUP_BYTES = 2 * 2**30  # kept for the next case with the same table: 2,000 tables at batch 65,536 and pooling 2
SHARE = 1 / 16  # of all memory, for the flush, and as much for the random reads
LOOKUP_SHARE = 1 / 8


@dataclass(frozen=True)
class Room:
    """Bytes for each part, on a machine with `memory_bytes`."""

    memory_bytes: int

    @classmethod
    def here(cls) -> "Room":
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
        """What the worker that measures table sets takes beside the tables."""
        return PROCESS_BYTES + self.most_flush_bytes + self.read_bytes + self.lookup_bytes
