"""Ids of a table to the rows that hold them, and back, on tensors. Needs torch.

Ids become ranks (core/row_order.py) by the listed ids alone, and ranks rows of a part of the table, dealt over the part's row
blocks. An id that the table lacks (below 0, or from its number of rows on) is given back as it is, so that
the operator that gets it treats it as it treats any wrong id.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuroshard.core.errors import InvalidInput
from neuroshard.core.parts import MOST_INT32_ROWS


@dataclass(frozen=True)
class Part:
    """A part of a table: `rows` ranks from `first` on, dealt over `blocks` row blocks; `copied` to every rank or sharded."""

    name: str
    first: int
    rows: int
    blocks: int = 1
    copied: bool = False

    @property
    def dealing(self) -> tuple[int, int, int]:
        """How TorchRec cuts the rows: so many a block, of which so many are full; the next has the rest. So the first ranks go to
        one block more than those after them."""
        block_rows = -(-self.rows // self.blocks)
        return block_rows, *divmod(self.rows, block_rows)

    def held_in(self, ranks: Tensor) -> Tensor:
        """The row of the part that holds each of these ranks, all of this part: dealt as cards are, one to each block in turn,
        until a block is full."""
        block_rows, full, rest = self.dealing
        ranks = ranks - self.first
        if full + (rest > 0) == 1:
            return ranks
        if not rest:
            return _dealt(ranks, full, block_rows)
        late = ranks - rest * (full + 1)
        return torch.where(late < 0, _dealt(ranks, full + 1, block_rows), _dealt(late, full, block_rows) + rest)

    def ranks_of(self, rows: Tensor) -> Tensor:
        """The rank that each of these rows of the part holds: the inverse of `held_in`."""
        block_rows, full, rest = self.dealing
        block, row = rows // block_rows, rows % block_rows
        early = rest * (full + 1)
        return self.first + torch.where(row < rest, row * (full + 1) + block, early + (row - rest) * full + block)


class RowMap(nn.Module):
    """Ids of a table of `rows` rows to ranks, and back. `hot_ids` are its listed ids, most read first; None where they are
    0, 1, 2, … and nothing needs to be kept.

    It keeps the listed ids and their places: 8 bytes each (16 for a table of 2^31 rows or more), as buffers that are in no state
    dict. Raises InvalidInput, which names the `table`, for ids that are not distinct ones of the table.
    """

    ids: Tensor | None
    places: Tensor | None

    def __init__(self, table: str, rows: int, hot_ids: Tensor | None) -> None:
        super().__init__()
        self.rows = rows
        ids = places = None
        if hot_ids is not None:
            _check(table, rows, hot_ids)
            kind = torch.int32 if rows <= MOST_INT32_ROWS else torch.int64
            ids, places = hot_ids.to(kind).sort()
            if not bool(ids.diff().all()):
                raise InvalidInput(f"the row order of table {table!r} lists an id twice; make it again")
            places = places.to(kind)
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("places", places, persistent=False)

    def ranks(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rank of each id, and which ids the table has; the rank of one that it lacks is the id itself."""
        there = (ids >= 0) & (ids < self.rows)
        if self.ids is None or self.places is None or not len(self.ids):
            return ids, there
        asked = ids.clamp(-1, self.rows).to(self.ids.dtype)
        below = torch.searchsorted(self.ids, asked, out_int32=self.ids.dtype == torch.int32)
        at = below.clamp(max=len(self.ids) - 1)
        ranks = torch.where(self.ids[at] == asked, self.places[at], asked + (len(self.ids) - below))
        return torch.where(there, ranks.to(ids.dtype), ids), there

    def ids_of(self, ranks: Tensor) -> Tensor:
        """The id of each rank: the inverse of `ranks`. `ranks` are of the table, int64."""
        if self.ids is None or self.places is None or not len(self.ids):
            return ranks
        listed, count = self.ids.long(), len(self.ids)
        by_place = torch.empty_like(listed)
        by_place[self.places.long()] = listed
        unlisted_below = listed - torch.arange(count, device=listed.device)
        cold = ranks - count
        others = cold + torch.searchsorted(unlisted_below, cold, right=True)
        return torch.where(cold < 0, by_place[ranks.clamp(max=count - 1)], others)


def _dealt(ranks: Tensor, blocks: int, block_rows: int) -> Tensor:
    """Where each rank is, dealt over so many blocks, by one division: it takes most of the time."""
    row = torch.div(ranks, blocks, rounding_mode="trunc")
    return (ranks - row * blocks) * block_rows + row


def _check(table: str, rows: int, hot_ids: Tensor) -> None:
    if hot_ids.dim() != 1 or hot_ids.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(
            f"the row order of table {table!r} is a tensor of {hot_ids.dtype} in {hot_ids.dim()} dimensions; it lists "
            "ids, int32 or int64, in one"
        )
    if len(hot_ids) and not (int(hot_ids.min()) >= 0 and int(hot_ids.max()) < rows):
        wrong = hot_ids[(hot_ids < 0) | (hot_ids >= rows)][0]
        raise InvalidInput(
            f"the row order of table {table!r} lists id {int(wrong)}, and the table has {rows:,} rows: it is of another "
            "table, or of another day's"
        )
