"""How far a device of a plan can be into each dip of a compute cost that is not convex.

A device holds at most one shard of each table group, or one block of it, and the tangent of its compute cost is at most what the
plan costs. Over all such devices, the range of each dip's weight times the sum of vectors is sought: a knapsack. Its Lagrangian
bounds it for any multiplier. A few multipliers are tried for all dips at once, and the best counts.
"""

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Dips, Floats
from neuroshard.search.problem.problem import Problem

MULTIPLIERS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)  # in units of all groups' gain per load
AT_ONCE = 4096  # shards in one array operation: larger arrays fit no cache


class Reach:
    """The ranges of all J dips over devices that hold `possible` shards (S,), and blocks of row-wise groups if `row_wise`."""

    def __init__(self, problem: Problem, possible: NDArray[np.bool_], row_wise: bool, dips: Dips) -> None:
        group, vectors = problem.group[possible], problem.vectors[possible]
        if row_wise:
            blocks = problem.row_blocks
            group = np.concatenate([group, np.repeat(blocks.groups, 2 * len(blocks.split_over))])
            vectors = np.concatenate([vectors, blocks.vectors.reshape(-1, vectors.shape[1])])
            order = np.argsort(group, kind="stable")
            group, vectors = group[order], vectors[order]
        self.vectors, self.bias, self.along = vectors, dips.bias, vectors @ dips.weight
        self.begins = np.flatnonzero(np.diff(group, prepend=-1))

    def anywhere(self) -> tuple[Floats, Floats]:
        """The least and the most of each dip, two (J,), whatever the device costs."""
        nothing = np.zeros(len(self.bias))
        return self._range(*self._gains(np.zeros(len(self.vectors)), nothing, nothing))

    def within(self, slope: Floats, most_ms: float) -> tuple[Floats, Floats]:
        """The same over devices for which `slope` (K,) times the sum of vectors is at most `most_ms`."""
        load, nothing = self.vectors @ slope, np.zeros(len(self.bias))
        least, most = self._gains(load, nothing, nothing)
        whole = max(float(np.maximum.reduceat(load, self.begins).sum()), 1e-12)
        usual = least / whole, most / whole
        for times in MULTIPLIERS:
            less, more = self._gains(load, usual[0] * times, usual[1] * times)
            least = np.minimum(least, usual[0] * times * most_ms + less)
            most = np.minimum(most, usual[1] * times * most_ms + more)
        return self._range(least, most)

    def _gains(self, load: Floats, for_least: Floats, for_most: Floats) -> tuple[Floats, Floats]:
        """How far the best choice of shards leads down and up each dip, two (J,), if a shard's `load` costs so many multipliers
        (J,). The best choice has of each group the shard that gains most, or none."""
        least, most = np.zeros(len(self.bias)), np.zeros(len(self.bias))
        for some in np.array_split(self.begins, len(self.along) // AT_ONCE + 1):
            if len(some):
                end = self.begins[self.begins > some[-1]]
                there = slice(some[0], end[0] if len(end) else None)
                along, loaded = self.along[there], load[there, None]
                for found, gain in ((least, -along - for_least * loaded), (most, along - for_most * loaded)):
                    found += np.maximum(np.maximum.reduceat(gain, some - some[0]), 0.0).sum(axis=0)
        return least, most

    def _range(self, least: Floats, most: Floats) -> tuple[Floats, Floats]:
        slack = 1e-9 * (least + most + np.abs(self.bias))
        return self.bias - least - slack, self.bias + most + slack
