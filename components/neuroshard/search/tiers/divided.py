"""A cost model of devices that divide their HBM among their tables as is cheapest.

Dividing HBM is a convex problem: a part of a table takes fewer ms the more bytes it has. By duality its optimum is

    max over prices p of (sum over parts of min over their points (ms + p x bytes)) - p x HBM

with p in ms a byte. So the vector of a part gets one term more for each of some prices, the least of ms + p x bytes. What a
device takes more than in HBM is then a maximum of linear functions of the sum of its vectors: convex, as any other cost that a
search, and its lower bound, can use. Fewer prices than all make it less than the optimum, never more.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from neuroshard.core.part import Part
from neuroshard.costmodel.protocol import CostModel, Floats, Ints
from neuroshard.costmodel.tiers import MoreTerms
from neuroshard.search.tiers.points import PartPoints, Points


class Divided(MoreTerms):
    """`inner` for devices with `hbm` bytes each, by `prices` (M,) in ms a byte. Tables `whole` are in HBM, those `beyond` are
    not, and those with `cached` rows have so many cached (0: they are in host memory), and each part of the others is in any
    tier. Tables whose tier a rule names are there: `inner` has what that takes, and here only their bytes count. Copies are of
    no device, and their bytes are no part of `hbm`."""

    def __init__(
        self,
        inner: CostModel,
        hbm: float,
        prices: Floats,
        points: PartPoints,
        whole: Collection[str] = (),
        beyond: Collection[str] = (),
        cached: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(inner, len(prices))
        self.hbm, self.prices, self.points = hbm, prices, points
        self.whole, self.beyond, self.cached = whole, beyond, cached

    def of_parts(self, parts: Sequence[Part]) -> Floats:
        found = np.zeros((len(parts), self.terms))
        placed = [(number, part) for number, part in enumerate(parts) if not part.copies]
        for (number, part), points in zip(placed, self.points([part for _, part in placed]), strict=True):
            some = self.permitted(part.table.name, points)
            found[number] = (some.ms + self.prices[:, None] * some.nbytes).min(axis=1)
        return found

    def permitted(self, name: str, points: Points) -> Points:
        """Of the points of a part of a table, those that it may have."""
        if name in self.whole or name not in self.points.tables:
            return Points(*(of[:1] for of in points))
        if name in self.cached:
            return points.at(self.cached[name])
        return Points(*(of[1:] for of in points)) if name in self.beyond else points

    def terms_ms(self, terms: Floats) -> Floats:
        ms: Floats = np.maximum((terms - self.prices * self.hbm).max(axis=-1), 0.0)
        return ms

    def terms_slope(self, terms: Floats) -> Floats:
        ms, slope = terms - self.prices * self.hbm, np.zeros_like(terms)
        at = ms.argmax(axis=-1)[..., None]
        np.put_along_axis(slope, at, np.take_along_axis(ms, at, axis=-1) > 0, axis=-1)
        return slope

    def price_of(self, vector_sums: Floats) -> Floats:
        """What a byte of HBM is worth on each device, in ms: (D, K) -> (D,). 0 where there is enough."""
        return np.asarray(self.prices[self._price_number(vector_sums)])

    def parts_of_slope(self, vector_sums: Floats) -> tuple[Floats, Floats]:
        """At that price, the slopes of what tiers take in ms, and of the bytes of HBM that parts then have; nothing of what
        `inner` takes: (D, K) -> two (D, K). Bytes are how the terms rise from this price to the next."""
        at = np.minimum(self._price_number(vector_sums), self.terms - 2)
        price, step = self.prices[at], self.prices[at + 1] - self.prices[at]
        device, place = np.arange(len(at)), vector_sums.shape[-1] - self.terms + at
        ms, nbytes = np.zeros_like(vector_sums), np.zeros_like(vector_sums)
        nbytes[device, place + 1], nbytes[device, place] = 1 / step, -1 / step
        ms[device, place + 1], ms[device, place] = -price / step, 1 + price / step
        return ms, nbytes

    def _price_number(self, vector_sums: Floats) -> Ints:
        """Which of the prices holds on each device; the first, 0, where there is enough HBM."""
        ms = vector_sums[..., -self.terms :] - self.prices * self.hbm
        return np.where(ms.max(axis=-1) > 0, ms.argmax(axis=-1), 0)
