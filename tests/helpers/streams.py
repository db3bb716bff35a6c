"""Streams of batches with locality in time, drawn by a seed: what a later part of a stream misses, an earlier part tells. And
public ones, read from files, with the order of rows that some batches make."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuroshard.core.row_order import RowOrder
from neuroshard.core.value import timestamp
from neuroshard.files.access import Ints
from neuroshard.files.hot_rows import HotRows
from neuroshard.files.row_orders import first_ids, ids_in

Batch = NDArray[np.int64]


def in_time(ratings: Path | None, requests: Path | None) -> Iterator[tuple[str, Batch, int]]:
    """Public streams in order of time: what is read, its ids, as rows of a table that has the ids of the stream, in their order,
    and its number of rows. Of ratings (user, film, rating, time a line) users and films; requests are a number a line."""
    streams: dict[str, Batch] = {}
    if ratings is not None:
        read = np.loadtxt(ratings, dtype=np.int64)
        read = read[np.argsort(read[:, 3], kind="stable")]
        streams |= {"users": read[:, 0], "films": read[:, 1]}
    if requests is not None:
        streams["requests"] = np.loadtxt(requests, dtype=np.int64)
    for name, ids in streams.items():
        rows, places = np.unique(ids, return_inverse=True)
        yield name, places, len(rows)


def ordered(batches: Sequence[Batch], rows: int) -> tuple[RowOrder, Ints] | None:
    """The order of the rows by these batches, and its ids; None where rows are read alike."""
    hot = HotRows(rows)
    for batch in batches:
        hot.add(*np.unique(batch, return_counts=True))
    if (found := hot.order("bench", timestamp(datetime.now(UTC)))) is None:
        return None
    return found.order, ids_in(found.file, found.order, "bench") if found.file else first_ids(found.order)


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
