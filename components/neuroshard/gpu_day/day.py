"""One day on a device: how much is done, the folder that holds its results, and the time that is left."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuroshard.augment.tiers import TIER_CASES
from neuroshard.files.disk import write_bytes


@dataclass(frozen=True)
class Scale:
    """How much is done, on a GPU or, to rehearse, on a CPU."""

    backend: str
    batch_size: int
    other_batch_size: int  # table sets are measured at both
    memory: str  # of a device, for drawing cases
    most_rows: int  # larger tables are cut
    most_pooling: float
    compute_cases: int = 2000
    collective_cases: int = 200
    tier_cases: int = TIER_CASES
    tasks: int = 30
    rounds: int = 7  # of all devices of all plans of a task
    epochs: int | None = None  # of training, at most


SCALES = {
    "cuda": Scale("cuda", 65536, 16384, "40GiB", 20_000_000, 200.0),
    "cpu": Scale("cpu", 1024, 512, "2GiB", 30_000, 60.0, 200, 40, 12, 3, 3),
    "synthetic": Scale("synthetic", 65536, 16384, "40GiB", 20_000_000, 200.0, 200, 40, 12, 2, 3),
}


@dataclass
class Day:
    """One folder of results, and the time that this call may still take."""

    folder: Path
    scale: Scale
    table_sets: Sequence[Path]
    devices: Sequence[int]  # whose all-to-alls are measured; none with one GPU
    ends: float  # by `clock`, in seconds
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = field(default=lambda line: print(line, flush=True))

    @property
    def left_s(self) -> float:
        return self.ends - self.clock()

    def read(self, stage: str) -> Any:
        return json.loads((self.folder / f"{stage}.json").read_text())

    def write(self, stage: str, found: Any) -> None:
        write_bytes(self.folder / f"{stage}.json", (json.dumps(found, indent=1) + "\n").encode())

    def has(self, stage: str) -> bool:
        return (self.folder / f"{stage}.json").exists()


class OutOfTime(Exception):
    """This call has no time left; the next one continues."""
