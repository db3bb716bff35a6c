"""How far a device of a plan of some cost can be into each dip of the compute cost, for the bound.

A device holds at most one part of each item, or one block of its rows, and what a tangent of its cost says is at most that cost.
Of all such devices the least and the most of a dip's weight times their sum of vectors are sought, for all dips at once: a
knapsack, bounded from outside by its Lagrangian, which holds for any multiplier. The best of some is taken.
"""

import numpy as np
from numpy.typing import NDArray

from neuroshard.costmodel.protocol import Dips, Floats
from neuroshard.search.problem.problem import Problem

TRIED = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)  # multipliers, of what items gain for their load all together
AT_ONCE = 4096  # parts, of all dips


class Reach:
    """Of devices that hold `possible` parts, and blocks of rows where those are looked at."""

    def __init__(self, problem: Problem, possible: NDArray[np.bool_], row_wise: bool, dips: Dips) -> None:
        item, vectors = problem.group[possible], problem.vectors[possible]
        if row_wise:
            blocks = problem.row_blocks
            item = np.concatenate([item, np.repeat(blocks.groups, 2)])
            vectors = np.concatenate([vectors, blocks.vectors.reshape(-1, vectors.shape[1])])
            order = np.argsort(item, kind="stable")
            item, vectors = item[order], vectors[order]
        self.vectors, self.bias, self.along = vectors, dips.bias, vectors @ dips.weight
        self.begins = np.flatnonzero(np.diff(item, prepend=-1))

    def anywhere(self) -> tuple[Floats, Floats]:
        """The least and the most of every dip, (J,) each, whatever the device costs."""
        nothing = np.zeros(len(self.bias))
        return self._range(*self._held(np.zeros(len(self.vectors)), nothing, nothing))

    def within(self, slope: Floats, most_ms: float) -> tuple[Floats, Floats]:
        """The same, where `slope` times the sum of vectors is at most `most_ms`."""
        load, nothing = self.vectors @ slope, np.zeros(len(self.bias))
        least, most = self._held(load, nothing, nothing)
        whole = max(float(np.maximum.reduceat(load, self.begins).sum()), 1e-12)
        usual = least / whole, most / whole
        for times in TRIED:
            less, more = self._held(load, usual[0] * times, usual[1] * times)
            least = np.minimum(least, usual[0] * times * most_ms + less)
            most = np.minimum(most, usual[1] * times * most_ms + more)
        return self._range(least, most)

    def _held(self, load: Floats, for_least: Floats, for_most: Floats) -> tuple[Floats, Floats]:
        """How far down and up the parts lead that do most of it, of each item one or none, where `load` (parts,) costs as much as
        the multipliers (J,) say: two (J,)."""
        least, most = np.zeros(len(self.bias)), np.zeros(len(self.bias))
        for some in np.array_split(self.begins, len(self.along) // AT_ONCE + 1):
            if len(some):
                end = self.begins[self.begins > some[-1]]
                part = slice(some[0], end[0] if len(end) else None)
                along, loaded = self.along[part], load[part, None]
                for found, gain in ((least, -along - for_least * loaded), (most, along - for_most * loaded)):
                    found += np.maximum(np.maximum.reduceat(gain, some - some[0]), 0.0).sum(axis=0)
        return least, most

    def _range(self, least: Floats, most: Floats) -> tuple[Floats, Floats]:
        slack = 1e-9 * (least + most + np.abs(self.bias))
        return self.bias - least - slack, self.bias + most + slack
