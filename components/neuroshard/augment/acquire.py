"""Acquisition: choose the cases that a cost model would learn most from, among many random devices of plans.

neuroshard augment tables.json --acquire model/ --compute-cases 500 … -o cases2/

The model's prediction is treated as a sum of terms, the outputs of the net's last layers. Least squares then gives how much a
measured case reduces the uncertainty of each term's weight. So the cases are chosen greedily: each is the one that reduces the
predictions' variance most, on average over all plans and sets as they are drawn. This is only an approximation, since a net also
changes its terms as it learns. So only few candidates are drawn for each case, and random sets are not chosen at all.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from neuroshard.core.case import ComputeCase
from neuroshard.core.part import Part
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.compute_net import steps
from neuroshard.costmodel.protocol import CostModel, Floats, sums_of_sets
from neuroshard.models.open import at_batch_size

CANDIDATES: Final = 4  # devices drawn for each one that is chosen; with more, the chosen ones are more extreme
_LEAST_KNOWN: Final = 0.1  # cases that every model is assumed to have seen, so that the precision matrix has an inverse
_RIDGE: Final = 1e-3  # of the average variance of a term, for terms that hardly vary
_SHORTEST_MS: Final = 1e-9  # the shortest case, so that no division is by zero
_BLOCK: Final = 2_000  # devices that are compared with each other
_CHUNK: Final = 2_000  # cases whose features are computed at once

_T = TypeVar("_T")


def acquire(
    devices: Sequence[ComputeCase], sets: Sequence[ComputeCase], model: TrainedCostModel, count: int
) -> Iterator[ComputeCase]:
    """`count` of the `devices` of plans, the most informative first, given that the `sets` are measured too.

    Large numbers of devices are split into blocks, and compared within these only.
    """
    blocks = max(-(-count // _BLOCK), 1)
    known = model.manifest.provenance.compute_cases
    pieces = zip(_split(devices, blocks), _split(range(count), blocks), _split(sets, blocks), strict=True)
    for candidates, places, some_sets in pieces:
        chosen = most_informative(terms(candidates, model), terms(some_sets, model), known, len(places))
        yield from (candidates[place] for place in chosen)
        known += len(places) + len(some_sets)


def terms(cases: Sequence[ComputeCase], model: TrainedCostModel) -> Floats:
    """The terms that add up to the compute net's prediction for each case, as shares of the prediction: (cases, T)."""
    sums = np.empty((len(cases), model.nets.compute.width))
    for batch_size in sorted({case.batch_size or 0 for case in cases}):
        at = at_batch_size(model, batch_size or None)
        of_size = np.array([i for i, case in enumerate(cases) if (case.batch_size or 0) == batch_size])
        for chunk in np.array_split(of_size, -(-len(of_size) // _CHUNK)):
            sums[chunk] = _sums([cases[i] for i in chunk], at)
    head = model.nets.compute.mean
    rates = steps(sums, head.used) * (sums @ head.rates)
    parts = np.concatenate([sums * head.skip, head.hidden(sums) * head.out, rates], axis=1)
    shares: Floats = parts / np.maximum(model.compute_ms(sums), _SHORTEST_MS)[:, None]
    return shares


def most_informative(of_devices: Floats, of_sets: Floats, known: int, count: int) -> Iterator[int]:
    """Places of `count` devices among (N, T) terms, given (M, T) terms of sets that are measured too, and `known` older cases.

    Each device is the one that leaves the least average variance of the predictions for devices and sets.
    """
    count = min(count, len(of_devices))
    usual = count * of_devices.T @ of_devices / max(len(of_devices), 1) + of_sets.T @ of_sets
    usual /= max(count + len(of_sets), 1)
    present = np.diag(usual) > 0
    size = np.sqrt(np.diag(usual)[present])
    scaled, scaled_sets = of_devices[:, present] / size, of_sets[:, present] / size
    usual = usual[np.ix_(present, present)] / np.outer(size, size)
    ridge = _RIDGE * np.trace(usual) / max(len(usual), 1) * np.eye(len(usual))
    # The covariance of the terms' weights, in units of label noise. Measuring a case with terms x would lower the average
    # variance of the predictions by (x @ spared @ x) / (1 + x @ unsure @ x).
    unsure = np.linalg.inv(known * usual + _LEAST_KNOWN * (usual + ridge) + scaled_sets.T @ scaled_sets)
    spared = unsure @ usual @ unsure
    # both products for every case, kept up to date below: a measured case changes both matrices by rank one (Sherman-Morrison)
    variance, gain = (np.einsum("nt,nt->n", scaled @ of, scaled) for of in (unsure, spared))
    for _ in range(count):
        best = int(np.argmax(gain / (1 + variance)))
        yield best
        term = scaled[best]
        towards, saves = unsure @ term, spared @ term
        left, gained = 1 + term @ towards, term @ saves
        covariance, saved = scaled @ towards, scaled @ saves
        variance -= covariance**2 / left
        gain += covariance**2 * gained / left**2 - 2 * covariance * saved / left
        unsure -= np.outer(towards, towards) / left
        crossed = np.outer(towards, saves)
        spared += np.outer(towards, towards) * gained / left**2 - (crossed + crossed.T) / left
        gain[best] = -np.inf


def _sums(cases: Sequence[ComputeCase], model: CostModel) -> Floats:
    """The vector sums of cases of the model's batch size: (N, K)."""
    parts = [Part.of(table) for case in cases for table in case.tables]
    return sums_of_sets(model.part_vectors(parts), [len(case.tables) for case in cases])


def _split(some: Sequence[_T], blocks: int) -> list[Sequence[_T]]:
    """Consecutive pieces of nearly equal length."""
    ends = [len(some) * block // blocks for block in range(blocks + 1)]
    return [some[begin:end] for begin, end in pairwise(ends)]
