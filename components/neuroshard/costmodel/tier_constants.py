"""The constants of tables beyond HBM that were measured (pretrain/tiers.py), as a cost model carries them."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from neuroshard.core.value import Value

MOST_RATE_MS = 1e6  # a lookup that takes longer was not measured
Rate = Annotated[float, Field(ge=0, le=MOST_RATE_MS)]


class Rates(Value):
    """Ms of a pass more than in HBM: of a table, of a lookup, of a row that comes over the bus, and of a byte of such rows."""

    table_ms: Rate = 0.0
    lookup_ms: Rate = 0.0
    row_ms: Rate = 0.0
    byte_ms: Rate = 0.0

    def ms(self, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of work (…, 4): tables, lookups, rows and bytes -> (…)."""
        ms: NDArray[np.float64] = work @ np.array([self.table_ms, self.lookup_ms, self.row_ms, self.byte_ms])
        return ms


class MeasuredTiers(Value):
    """The constants of each pass, and from how many measurements they are. Rows of a cache are those that it missed, before
    forward; rows in host memory are read forward, and written backward, as is state of elements there."""

    cached_forward: Rates
    cached_backward: Rates
    host_forward: Rates
    host_backward: Rates
    cases: Annotated[int, Field(ge=0)]


def rates(constants: Sequence[float]) -> Rates:
    """Constants in the order of `Rates.ms`."""
    names: dict[str, Any] = dict(zip(Rates.model_fields, constants, strict=True))
    return Rates(**names)
