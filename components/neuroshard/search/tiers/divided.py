"""A cost model of devices that divide their HBM among their tables as is cheapest.

Dividing HBM is a convex problem: a part of a table takes fewer ms the more bytes it has. By duality its optimum is

    max over prices p of (sum over parts of min over their points (ms + p x bytes)) - p x HBM

with p in ms a byte. So the vector of a part gets one term more for each of some prices, the least of ms + p x bytes. What a
device takes more than in HBM is then a maximum of linear functions of the sum of its vectors: convex, as any other cost that a
search, and its lower bound, can use. Fewer prices than all make it less than the optimum, never more.

Where a task hides H ms of what is fetched ahead, a device takes max(0, fetched - H) of it: the most, over weights w from 0 to 1,
of w x (fetched - H). So there the maximum is over prices and weights, of

    (sum over parts of min over their points (other ms + w x fetched ms + p x bytes)) - p x HBM - w x H
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from neuroshard.core.part import Part
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.costmodel.tiers import MoreTerms
from neuroshard.search.tiers.points import PartPoints, Points


class Divided(MoreTerms):
    """`inner` for devices with `hbm` bytes each, by `prices` (M,) in ms a byte, each with the weight (M,) of what is fetched
    ahead, by default 1. The first price of each weight is 0. Tables `whole` are in HBM, those `beyond` are not, and those with
    `cached` rows have so many cached (0: they are in host memory), and each part of the others is in any tier."""

    def __init__(
        self,
        inner: CostModel,
        hbm: float,
        prices: Floats,
        points: PartPoints,
        whole: Collection[str] = (),
        beyond: Collection[str] = (),
        cached: Mapping[str, int] = MappingProxyType({}),
        weights: Floats | None = None,
    ) -> None:
        super().__init__(inner, len(prices))
        self.prices, self.points = prices, points
        self.weights = np.ones(len(prices)) if weights is None else weights
        self.free_ms = prices * hbm + self.weights * points.task.hidden_ms  # what a device need not take
        self.whole, self.beyond, self.cached = whole, beyond, cached

    def of_parts(self, parts: Sequence[Part]) -> Floats:
        found = np.zeros((len(parts), self.terms))
        for number, (part, points) in enumerate(zip(parts, self.points(parts), strict=True)):
            some = self.permitted(part.table.name, points)
            ms = some.ms - (1 - self.weights[:, None]) * some.fetched_ms
            found[number] = (ms + self.prices[:, None] * some.nbytes).min(axis=1)
        return found

    def permitted(self, name: str, points: Points) -> Points:
        """Of the points of a part of a table, those that it may have."""
        if name in self.whole:
            return Points(*(of[:1] for of in points))
        if name in self.cached:
            return points.at(self.cached[name])
        return Points(*(of[1:] for of in points)) if name in self.beyond else points

    def terms_ms(self, terms: Floats) -> Floats:
        ms: Floats = np.maximum((terms - self.free_ms).max(axis=-1), 0.0)
        return ms

    def terms_slope(self, terms: Floats) -> Floats:
        ms, slope = terms - self.free_ms, np.zeros_like(terms)
        at = ms.argmax(axis=-1)[..., None]
        np.put_along_axis(slope, at, np.take_along_axis(ms, at, axis=-1) > 0, axis=-1)
        return slope

    def price_of(self, vector_sums: Floats) -> Floats:
        """What a byte of HBM is worth on each device, in ms: (D, K) -> (D,). 0 where there is enough."""
        return np.asarray(self.prices[self._price_number(vector_sums)])

    def worth_of_bytes(self, vector_sums: Floats) -> Floats:
        """The slope of ms + price x bytes at that price; nothing of what `inner` takes: (D, K) -> (D, K)."""
        slope = np.zeros_like(vector_sums)
        at = self._price_number(vector_sums) - self.terms
        np.put_along_axis(slope, at[..., None] + vector_sums.shape[-1], 1.0, axis=-1)
        return slope

    def _price_number(self, vector_sums: Floats) -> Ints:
        """Which of the prices holds on each device; the first, 0, where there is enough HBM."""
        ms = vector_sums[..., -self.terms :] - self.free_ms
        return np.where(ms.max(axis=-1) > 0, ms.argmax(axis=-1), 0)
