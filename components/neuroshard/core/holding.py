"""How a plan holds a table: part of the answer, where rules (core/constraints.py) are part of the question."""

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from neuroshard.core.parts import RowsByAccess
from neuroshard.core.table import MAX_ROWS
from neuroshard.core.tiers import TIERS, Tier, TierFacts
from neuroshard.core.value import SparseValue, Whole

HOLDINGS_SINCE = 7  # the oldest format of plans that has any
FIELDS = ("data_parallel", "tier", "cached_rows", "rows_by_access", "index_dedup")


class Holding(SparseValue):
    """What a plan holds of a `table`, or of a part of one, that its task does not ask for: copies on all devices, the tier and
    the rows that a cache has room for, what is made of its row order, ids sent once (core/dedup.py). None: as its rule says or,
    without one, sharded in HBM. The sharding type of other tables is that of their shards (`sharding_of` in core/plan.py)."""

    UNSAID: ClassVar[Collection[str]] = FIELDS

    table: str
    data_parallel: bool | None = None
    tier: Tier | None = None
    cached_rows: Annotated[Whole, Field(ge=1, le=MAX_ROWS)] | None = None
    rows_by_access: RowsByAccess | None = None
    index_dedup: Literal[True] | None = None

    @property
    def in_tier(self) -> TierFacts:
        """The tier that it names: HBM where it names none."""
        return TIERS[self.tier or "hbm"]

    @property
    def since(self) -> int:
        """The oldest format of plans that knows it."""
        return max(HOLDINGS_SINCE, self.in_tier.since)

    def fault(self, rule: "Holding | None") -> str:
        """Why a table with this rule cannot be held so, as words after its name; empty if it can."""
        for name in FIELDS:
            own, said = getattr(self, name), getattr(rule, name, None)
            if own is not None and said is not None and own != said:
                return f"is held with {name} {own}, and its rule says {said}"
        return ""

    @classmethod
    def beyond(cls, asked: "Mapping[str, Holding]", named: "Holding") -> Self | None:
        """What a rule names beyond the rules that were asked for, of the same table; None where that is nothing."""
        rule = asked.get(named.table)
        said = {name: getattr(named, name) for name in FIELDS if getattr(named, name) != getattr(rule, name, None)}
        if said.get("tier") == "hbm":
            del said["tier"]
        said = {name: value for name, value in said.items() if value is not None}
        return cls(table=named.table, **said) if said else None
