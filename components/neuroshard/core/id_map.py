"""The id map of a table that gives rows to ids as it trains: what TorchRec's managed collisions keep beside the table.

TorchRec holds such a table in one way only: row-wise over all ranks, where each maps the ids of its share of the hash space to
rows of its own block. So its shards follow from the number of devices, and a search places the other tables around them.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from neuroshard.core.value import SparseValue, Whole

MapKind = Literal["mch", "mpzch"]
SORTED: Literal["mch"] = "mch"  # MCHManagedCollisionModule: a sorted list of ids, with the row of each
MOST_RANKS = 1024  # TorchRec's managed collisions have room for the bounds of so many row blocks


class IdMap(SparseValue):
    """What a rank keeps on its device for the ids of its rows: so many bytes for each row, for each lookup that it gets in a step
    (what it remembers until it evicts), and in all. Rows are in `buckets`, none of which is split over ranks; None where each
    rank has one bucket, however many ranks there are."""

    UNSAID: ClassVar = ("bytes_per_lookup", "bytes_per_rank", "buckets")

    kind: MapKind
    bytes_per_row: Annotated[Whole, Field(ge=0, le=4096)]
    bytes_per_lookup: Annotated[float, Field(ge=0, le=2**32)] = 0.0
    bytes_per_rank: Annotated[Whole, Field(ge=0, le=2**32)] = 0
    buckets: Annotated[Whole, Field(ge=1, le=2**31)] | None = None

    def nbytes(self, rows: int, lookups: float) -> int:
        """Bytes of a rank with so many of the rows, that gets so many lookups in a step."""
        return rows * self.bytes_per_row + round(lookups * self.bytes_per_lookup) + self.bytes_per_rank

    def fault(self, rows: int, devices: int) -> str:
        """Why so many devices cannot share a table of so many rows, in words; empty if they can."""
        if devices > MOST_RANKS:
            return f"maps ids to rows on at most {MOST_RANKS:,} ranks in TorchRec, and there are {devices:,} devices; take fewer"
        if self.buckets is not None and self.buckets % devices:
            divisors = [count for count in range(1, min(self.buckets, MOST_RANKS) + 1) if self.buckets % count == 0]
            near = ", ".join(str(count) for count in sorted(divisors, key=lambda count: abs(count - devices))[:3])
            return (
                f"has its ids in {self.buckets:,} buckets (total_num_buckets), which {devices:,} devices cannot share equally; "
                f"take {near} devices, or another number of buckets"
            )
        if -(-rows // devices) * (devices - 1) >= rows:
            return f"maps ids to {rows:,} rows, too few for a block on each of {devices:,} devices; take fewer devices"
        return ""

    def goes_to(self, rows: int, before: int, after: int) -> bool:
        """Whether the ids of a table of so many rows can go from so many ranks to so many others, each with its row. In buckets
        they are at the place of their row; else a rank has those of its block of rows in one list, which cannot be split."""
        if self.kind != SORTED:
            return True
        old, new = -(-rows // before), -(-rows // after)
        return after == 1 or (before % after == 0 and new % old == 0 and new * (after - 1) < rows)
