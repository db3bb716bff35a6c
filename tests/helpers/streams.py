"""Streams of batches with locality in time, drawn by a seed: what a later part of a stream misses, an earlier part tells."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Batch = NDArray[np.int64]


def zipf(rows: int, exponent: float) -> NDArray[np.float64]:
    """Probabilities of the rows."""
    weights = np.arange(1, rows + 1.0) ** -exponent
    return weights / weights.sum()


def independent(probability: NDArray[np.float64], lookups: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Every lookup is drawn by itself; ids are in no order."""
    ids = rng.permutation(len(probability))
    while True:
        yield ids[rng.choice(len(probability), size=lookups, p=probability)]


def sessions(rows: int, lookups: int, rng: np.random.Generator, active: int, stay: float) -> Iterator[Batch]:
    """A set of active rows, of which each leaves after `stay` batches on average, for another drawn by Zipf: users in bursts."""
    probability, ids = zipf(rows, 0.8), rng.permutation(rows)
    here = rng.choice(rows, size=active, p=probability)
    while True:
        yield ids[here[rng.integers(active, size=lookups)]]
        gone = rng.random(active) < 1 / stay
        here[gone] = rng.choice(rows, size=int(gone.sum()), p=probability)


def drifting(rows: int, lookups: int, rng: np.random.Generator, a_batch: float) -> Iterator[Batch]:
    """Zipf over the rows in an order that moves on by `a_batch` rows a batch: news, of which the latest is the hottest."""
    probability, ids, newest = zipf(rows, 1.0), rng.permutation(rows), 0.0
    while True:
        yield ids[(int(newest) - rng.choice(rows, size=lookups, p=probability)) % rows]
        newest += a_batch


def cycles(rows: int, lookups: int, rng: np.random.Generator, length: int) -> Iterator[Batch]:
    """Half of the lookups by Zipf, half a scan over `length` rows again and again: a kink in the curve of misses."""
    probability, ids, at = zipf(rows, 1.0), rng.permutation(rows), 0
    while True:
        scan = (at + np.arange(lookups // 2)) % length
        yield ids[np.concatenate([scan, rng.choice(rows, size=lookups - lookups // 2, p=probability)])]
        at += lookups // 2
