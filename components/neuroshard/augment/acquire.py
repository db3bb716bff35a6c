"""Of many devices of plans drawn at random, first those that a cost model would learn most from about all of them.

neuroshard augment tables.json --acquire model/ --compute-cases 500 … -o cases2/

A prediction is a sum of terms: what the net's last layers make of the sums of vectors. What the model does not know is how much
each term counts for, and a measured case tells as much of that as its terms say, by the rules of least squares. So each case in
turn is the one after which all cases, of plans and sets as they are drawn, are known best on average. Nets are no sums of given
terms, so what is most telling by this rule is taken with care: of few candidates, and random sets stay as chance has them
(docs/decisions/0067-acquired-of-few.md).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from neuroshard.core.case import ComputeCase
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.compute_net import steps
from neuroshard.costmodel.protocol import CostModel, Floats
from neuroshard.models.open import at_batch_size

CANDIDATES: Final = 4  # drawn for every device that is kept: the more, the more extreme are those
_LEAST_KNOWN: Final = 0.1  # cases that every model knows, so that what is known has an inverse
_SHRUNK: Final = 1e-3  # of what varies on average, for terms that hardly do
_SHORTEST_MS: Final = 1e-9  # of a case, so that there are shares of it
_BLOCK: Final = 2_000  # devices that are chosen by one another
_CHUNK: Final = 2_000  # cases whose features are computed at once

_T = TypeVar("_T")


def acquire(
    devices: Sequence[ComputeCase], sets: Sequence[ComputeCase], model: TrainedCostModel, count: int
) -> Iterator[ComputeCase]:
    """`count` of the `devices` of plans, the most telling first, where the `sets` are measured too.

    Where there are very many, each is chosen beside those of its block.
    """
    blocks = max(-(-count // _BLOCK), 1)
    known = model.manifest.provenance.compute_cases
    pieces = zip(_split(devices, blocks), _split(range(count), blocks), _split(sets, blocks), strict=True)
    for some, more, beside in pieces:
        chosen = most_telling(terms(some, model), terms(beside, model), known, len(more))
        yield from (some[place] for place in chosen)
        known += len(more) + len(beside)


def terms(cases: Sequence[ComputeCase], model: TrainedCostModel) -> Floats:
    """Of what the compute net's answer for each case is made, as shares of it: (cases, T)."""
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


def most_telling(of_devices: Floats, of_sets: Floats, known: int, count: int) -> Iterator[int]:
    """Places of `count` devices by their terms (N, T), beside sets by theirs (M, T), where so many of both are `known`.

    Each is the one after which the variance of what the terms of all say, on average over both, is least.
    """
    count = min(count, len(of_devices))
    usual = count * of_devices.T @ of_devices / max(len(of_devices), 1) + of_sets.T @ of_sets
    usual /= max(count + len(of_sets), 1)
    present = np.diag(usual) > 0
    size = np.sqrt(np.diag(usual)[present])
    scaled, beside = of_devices[:, present] / size, of_sets[:, present] / size
    usual = usual[np.ix_(present, present)] / np.outer(size, size)
    ridge = _SHRUNK * np.trace(usual) / max(len(usual), 1) * np.eye(len(usual))
    unsure = np.linalg.inv(known * usual + _LEAST_KNOWN * (usual + ridge) + beside.T @ beside)
    spared = unsure @ usual @ unsure
    # Of each case its own variance, and by how much that of all falls with it, but for the noise of its label
    variance, gain = (np.einsum("nt,nt->n", scaled @ of, scaled) for of in (unsure, spared))
    for _ in range(count):
        best = int(np.argmax(gain / (1 + variance)))
        yield best
        term = scaled[best]
        towards, saves = unsure @ term, spared @ term
        left, gained = 1 + term @ towards, term @ saves
        alike, likewise = scaled @ towards, scaled @ saves
        variance -= alike**2 / left
        gain += alike**2 * gained / left**2 - 2 * alike * likewise / left
        unsure -= np.outer(towards, towards) / left
        crossed = np.outer(towards, saves)
        spared += np.outer(towards, towards) * gained / left**2 - (crossed + crossed.T) / left
        gain[best] = -np.inf


def _sums(cases: Sequence[ComputeCase], model: CostModel) -> Floats:
    tables = [table for case in cases for table in case.tables]
    starts = np.cumsum([0, *(len(case.tables) for case in cases)])[:-1]
    dims = np.array([table.dim for table in tables], dtype=np.int64)
    return np.add.reduceat(model.table_vectors(tables, dims), starts, axis=0)


def _split(some: Sequence[_T], blocks: int) -> list[Sequence[_T]]:
    """In so many pieces of about as many each, one after another."""
    ends = [len(some) * block // blocks for block in range(blocks + 1)]
    return [some[begin:end] for begin, end in pairwise(ends)]
