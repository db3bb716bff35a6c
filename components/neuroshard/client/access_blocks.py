"""Blocks of steps, as ranks send each other their samples, and what the rank that counts a table makes of them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neuroshard.client.access_sample import Reading, Sample
from neuroshard.core.table import Table
from neuroshard.core.text import counted
from neuroshard.files.access import Floats, Ints
from neuroshard.files.count_access import AccessCounter, counted_table, sampled_places
from neuroshard.files.hot_rows import FEWEST_COUNTERS, HotRows

TRACKED_ROWS = 2**14  # of a table, in about 1 MB of the rank that counts it


@dataclass
class Block:
    """Steps in a row of one rank: from `first` on, `steps` of them. A block with a step that was `left_out` counts nothing."""

    first: int
    samples: list[Sample] = field(default_factory=list)
    steps: int = 0
    left_out: bool = False
    write: int = -1
    ended: str = ""

    def to_bytes(self, tables: Sequence[int]) -> bytes:
        """What the rank that counts these tables needs of it."""
        some = [] if self.left_out else self.samples
        rows = [sample.rows[table] for sample in some for table in tables]
        counts = [sample.counts[table] for sample in some for table in tables]
        drawn = [sample.drawn[table] for sample in some for table in tables]
        header = {
            "first": self.first,
            "steps": self.steps,
            "left_out": self.left_out,
            "write": self.write,
            "ended": self.ended,
            "outside": sum(sample.outside for sample in some),
            "shares": [min((sample.shares[table] for sample in some), default=1.0) for table in tables],
            "samples": [sample.samples for sample in some],
            "lookups": [sample.lookups[table].tolist() for sample in some for table in tables],
            "sizes": [len(one) for one in rows],
            "drawn": [len(one) for one in drawn],
        }
        arrays = [
            np.concatenate([*some, np.empty(0, dtype=np.int64)]).astype("<i8").tobytes()
            for some in (rows, counts, drawn)
        ]
        return b"\n".join([json.dumps(header).encode(), b"".join(arrays)])


@dataclass
class Taken:
    """A block of another rank, or of this one, as it was taken: of each step and table the sampled rows, their lookups, and the
    rows of the sampled lookups."""

    header: dict[str, Any]
    rows: list[Ints]
    counts: list[Ints]
    drawn: list[Ints]

    @classmethod
    def of(cls, data: bytes) -> "Taken":
        head, _, body = data.partition(b"\n")
        header = json.loads(head)
        every, size = np.frombuffer(body, dtype="<i8"), sum(header["sizes"])
        rows, counts, drawn = np.split(every, [size, 2 * size])
        ends = np.cumsum(header["sizes"])[:-1]
        return cls(
            header, np.split(rows, ends), np.split(counts, ends), np.split(drawn, np.cumsum(header["drawn"])[:-1])
        )


class Merged:
    """The tables that this rank counts."""

    def __init__(self, readings: Sequence[Reading], places: Sequence[int]) -> None:
        self.readings, self.places = readings, places
        self.counters = [AccessCounter(readings[place].table.rows, TRACKED_ROWS) for place in places]
        self.hot_rows = [HotRows(readings[place].table.rows, FEWEST_COUNTERS) for place in places]
        self.lookups: list[Floats] = [np.zeros(len(readings[place].features)) for place in places]
        self.batch_size = self.steps = self.left_out = self.outside = 0
        self.why: Counter[str] = Counter()

    def add(self, blocks: Sequence[Taken]) -> None:
        """Count a block of each rank, all of the same steps."""
        headers = [block.header for block in blocks]
        behind = [rank for rank, header in enumerate(headers) if header["left_out"]]
        self.outside += sum(header["outside"] for header in headers)
        if behind:
            self._leave_out(headers[0]["steps"], f"rank {behind[0]} was behind, or its sample was too large")
            return
        for step in range(headers[0]["steps"]):
            of_ranks = [header["samples"][step] for header in headers]
            samples = sum(of_ranks)
            if not min(of_ranks):
                self._leave_out(1, f"rank {of_ranks.index(0)} had no samples")
                continue
            if self.batch_size not in (0, samples):
                self._leave_out(1, f"the batch did not have {self.batch_size:,} samples over all ranks")
                continue
            self.batch_size, self.steps = samples, self.steps + 1
            for place in range(len(self.places)):
                self._add(blocks, step * len(self.places) + place, place, samples)

    def _add(self, blocks: Sequence[Taken], entry: int, place: int, samples: int) -> None:
        share = min(block.header["shares"][place] for block in blocks)
        found, where = np.unique(np.concatenate([block.rows[entry] for block in blocks]), return_inverse=True)
        each = np.bincount(where, np.concatenate([block.counts[entry] for block in blocks]), len(found)).astype(
            np.int64
        )
        if any(block.header["shares"][place] > share for block in blocks):
            kept = sampled_places(found, share)
            found, each = found[kept], each[kept]
        lookups = np.sum([block.header["lookups"][entry] for block in blocks], axis=0)
        self.lookups[place] += lookups
        self.counters[place].add_sample(found, each, share, int(lookups.sum()), samples)
        drawn = np.concatenate([block.drawn[entry] for block in blocks])
        self.hot_rows[place].add(*np.unique(drawn, return_counts=True))

    def _leave_out(self, steps: int, why: str) -> None:
        self.left_out += steps
        self.why[why] += steps

    def tables(self, source: str, time: str) -> tuple[list[Table], list[bytes]]:
        """The tables that this rank counts, as counted, and the lists of hot rows that they name."""
        tables, lists = [], []
        for number, (place, counter) in enumerate(zip(self.places, self.counters, strict=True)):
            _, _, features = reading = self.readings[place]
            table = counted_table(reading.table, counter, "time", features, self.lookups[number], source)
            hot = self.hot_rows[number].order(source, time)
            order, by_id = None if hot is None else hot.order, self.hot_rows[number].lookups_by_id
            tables.append(table.model_copy(update={"row_order": order, "lookups_by_id": by_id}))
            lists += [hot.file] if hot is not None and hot.file else []
        return tables, lists

    @property
    def notes(self) -> tuple[str, ...]:
        said = [f"{counted(steps, 'step')} left out: {why}" for why, steps in self.why.most_common(8)]
        if self.outside:
            said.append(
                f"{counted(self.outside, 'sampled lookup')} of rows that their table lacks, which were left out"
            )
        return tuple(said)
