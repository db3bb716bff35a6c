"""An order of a table's rows by access: its hot ids, most read first.

Only the hot ids are listed, in a file of their own (files/row_orders.py). The rank of a listed id is its place in the list; the
others come after, in the order of their ids, rows that a table has grown by since too (docs/rows.md). Where ids are in this
order already, nothing is stored: an order with the `ids_digest` "" lists the ids 0, 1, 2, …, and a rank is an id. Of a table in
two parts the first K listed ids are the hot part, and the cold part has all others.
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from neuroshard.core.value import Digest, Moment, Number, Source, Value, Whole

LISTS_FOLDER = "rows"  # of the files of hot ids, beside a tables.json or a plan
MOST_POINTS = 64  # of a curve; writers have one at each power of two

RowCount = Annotated[Whole, Field(ge=1, le=2**40)]
Share = Annotated[Number, Field(ge=0, le=1)]


class RowOrder(Value):
    """The `hot_rows` hottest ids of a table that had `rows` rows at `time` (UTC, ISO 8601), when `source` was counted.

    `ids_digest` is the sha256 of the file that lists them, "" where they are 0, 1, 2, …. They had `lookup_share` of all lookups,
    and the hottest n of them the share that `points` (n, share) say, of numbers of rows that rise and are below `hot_rows`.
    """

    ids_digest: Digest | Literal[""]
    rows: RowCount
    hot_rows: RowCount
    lookup_share: Share
    points: Annotated[tuple[tuple[RowCount, Share], ...], Field(max_length=MOST_POINTS)] = ()
    source: Source = ""
    time: Moment

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.hot_rows > self.rows:
            raise ValueError(f"lists {self.hot_rows:,} rows, but the table had {self.rows:,}")
        before = (0, 0.0)
        for index, point in enumerate((*self.points, (self.hot_rows, self.lookup_share))):
            if point[0] <= before[0] or point[1] < before[1]:
                what = f"points[{index}]" if index < len(self.points) else "hot_rows and lookup_share"
                raise ValueError(
                    f"{what}: {point[0]:,} rows have {point[1]:g} of the lookups, after {before[0]:,} with {before[1]:g}; rows "
                    "must rise from point to point up to hot_rows, and shares never fall"
                )
            before = point
        return self

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """All points: of the hottest n rows of the table the share of lookups that they had. Others share the rest."""
        rest = ((self.rows, 1.0),) if self.rows > self.hot_rows else ()
        return ((0, 0.0), *self.points, (self.hot_rows, self.lookup_share), *rest)

    def share_of(self, rows: int) -> float:
        """The share of lookups that the hottest `rows` rows had; between points a line, which is a little too little."""
        for (low, least), (high, most) in pairwise(self.curve):
            if rows <= high:
                return least + (most - least) * (rows - low) / (high - low)
        return self.curve[-1][1]
