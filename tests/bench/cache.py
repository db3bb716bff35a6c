"""Are the misses that we predict those of FBGEMM's cache? Beside a simulation of it: 32 ways, hashed sets, LRU by batch.

    make bench-cache ARGS="--quick"                                       two minutes
    make bench-cache ARGS="--ratings u.data --requests blocks.txt"

The second with real streams too: MovieLens 100K's ratings (GroupLens), and a file of a number a line; neither is ever
committed.

Distributions and streams are drawn by seed. A stream is counted on its first part, and its later part is simulated, with the
cache filled by the first. Caches hold at least 1.5 times a batch's distinct rows, 3 times with prefetch, and are warm.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.publishing import page
from helpers.fbgemm_cache import simulated
from helpers.streams import Batch, cycles, drifting, in_time, independent, sessions, zipf
from neuroshard.core.access import AccessCurve
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.costmodel.cache import MissCurve, miss_curve
from neuroshard.files.access import count_bins
from neuroshard.files.count_access import AccessCounter

MOST_WARM_UP = 400  # batches; what needs more is left out
TIMED_ROWS = 100_000  # distinct rows of the batches after the warm-up, so that a rate is known to 0.3 points
SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
OURS, NO_SETS, BINS = "ours", "Che, no sets", "reuse bins"
COUNTED, TESTED, CHE = "counted", "counted on the tested half itself", "Che"
VARIES = "varies"
WAYS_TO_PREDICT = {"distributions": (OURS, NO_SETS, BINS), "streams": (COUNTED, CHE), "real": (COUNTED, TESTED, CHE)}
Found = dict[str, dict[str, list[float]]]  # by kind of access and by prediction: off by so much of the distinct rows


def main() -> None:
    parser = page.parser(__doc__, "two tasks of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=12, help="of each kind [12]")
    parser.add_argument("--only", default="distributions,streams,real", help="some of them, separated by commas")
    parser.add_argument("--ratings", type=Path, help="u.data: user, film, rating, time a line")
    parser.add_argument("--requests", type=Path, help="a number a line, in order of time")
    options = page.asked(parser)
    tasks, only = 2 if options.quick else options.tasks, options.only.split(",")
    questions = {
        "distributions": "Are misses predicted from a distribution those of a simulated cache? Tables of 100,000 rows, drawn.",
        "streams": "Are misses counted on two thirds of a stream with locality those of the last third? 60,000 rows, drawn.",
        "real": "Are misses counted on the first half of a real stream those of the second?",
    }
    runs: dict[str, Callable[[], Found]] = {
        "distributions": lambda: of_distributions(tasks, options.seed),
        "streams": lambda: of_streams(tasks, options.seed),
        "real": lambda: of_real_streams(options.ratings, options.requests),
    }

    def show(name: str, question: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        page.show(f"cache-{name}", question, columns, rows, "none", published=options.publish)

    for name, run in runs.items():
        if name not in only:
            continue
        if name == "real" and not (options.ratings or options.requests):
            print("skipped: real streams need --ratings or --requests")
            continue
        show(name, questions[name], *table_of(run(), WAYS_TO_PREDICT[name]))


def table_of(found: Found, ways: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Points of the distinct rows that predictions are off, by kind of access: the mean, and the worst."""
    columns = ["rows are read", "caches", *(f"{way}: points off, mean and worst" for way in ways)]
    if any(VARIES in of_ways for of_ways in found.values()):
        columns.append("points that quarters of what was counted vary by, as the file says")
    rows = []
    for kind, of_ways in found.items():
        cells = [np.array(of_ways[way]) * 100 for way in ways]
        shown = [f"{np.abs(one).mean():.2f}, {one[np.abs(one).argmax()]:+.2f}" for one in cells]
        rows.append([kind, str(len(cells[0])), *shown, *(f"{share * 100:.1f}" for share in of_ways.get(VARIES, []))])
    return columns, rows


def of_distributions(tasks: int, seed: int) -> Found:
    """Rows read independently: by Zipf, uniformly, and in mixtures of a few groups."""
    found: Found = defaultdict(lambda: defaultdict(list))
    rows = 100_000
    for task in range(tasks):
        rng = np.random.default_rng([seed, task])
        exponents = {f"zipf {low:.1f} to {low + 0.2:.1f}": rng.uniform(low, low + 0.2) for low in (0.6, 0.8, 1.0)}
        kinds = {**exponents, "zipf 1.2 to 1.3": rng.uniform(1.2, 1.3), "uniform": 0.0}
        lookups = int(rows * 10 ** rng.uniform(-2.2, -0.8))
        for kind, exponent in kinds.items():
            stated = table(rows, lookups, f"zipf:{exponent}")
            bins = table(rows, lookups, None, zipf_bins(rows, lookups, exponent, 1))
            compare(found, kind, zipf(rows, exponent), lookups, rng, stated, bins)
        probability, curve = mixture(rows, lookups, rng)
        counted_on = rng.choice(len(probability), size=lookups, p=probability)
        bins = table(rows, lookups, None, count_bins(counted_on))
        compare(found, "mixtures", probability, lookups, rng, table(rows, lookups, curve), bins)
    return found


def compare(
    found: Found,
    kind: str,
    probability: NDArray[np.float64],
    lookups: int,
    rng: np.random.Generator,
    stated: Table,
    bins: Table,
) -> None:
    """Three caches of one table, one of them with prefetch."""
    predicted = {OURS: miss_curve(stated, 1), NO_SETS: miss_curve(stated, 1, ways=0), BINS: miss_curve(bins, 1)}
    ours = predicted[OURS]
    fitting = [int(share * len(probability)) // 32 * 32 for share in SHARES]
    for prefetch, least in ((False, 1.5), (True, 3.0)):
        usable = [k for k in fitting if k >= least * ours.distinct_rows and ours.warm_up(k) * 1.5 < MOST_WARM_UP]
        for cached in rng.choice(usable, size=min(2 - prefetch, len(usable)), replace=False):
            warm_up = int(ours.warm_up(cached) * 1.5) + 5
            timed = min(max(int(TIMED_ROWS / ours.distinct_rows), 20), MOST_WARM_UP)
            batches = islice(independent(probability, lookups, rng), warm_up + timed)
            rate = simulated(batches, int(cached), warm_up, prefetch).miss_rate
            for way, curve in predicted.items():
                found[kind + (", prefetch" if prefetch else "")][way].append(share_of(curve, cached) - rate)


def share_of(curve: MissCurve, cached: float) -> float:
    return float(curve.missed(cached)) / curve.distinct_rows


def table(rows: int, lookups: int, access: object, bins: tuple[float, ...] | None = None) -> Table:
    """A table whose batch is one sample of so many lookups."""
    said = {"access": access} if bins is None else {"reuse_bins": bins}
    return Table.parse(
        {"name": "t", "rows": rows, "dim": 4, "pooling_factor": lookups, "reuse_batch_size": 1, **said}, "t"
    )


def mixture(rows: int, lookups: int, rng: np.random.Generator) -> tuple[NDArray[np.float64], AccessCurve]:
    """Two to five groups of rows, each read uniformly, and rows that are never read."""
    count = int(rng.integers(2, 6))
    sizes = rng.multinomial(int(rows * rng.uniform(0.4, 1)), rng.dirichlet(np.ones(count)))
    sizes = sizes[sizes > 0]
    rates = np.sort(10.0 ** -rng.uniform(0, 3, size=len(sizes)))[::-1]
    rates /= rates @ sizes
    curve = AccessCurve(
        batch_size=1, group_rows=tuple(sizes.tolist()), lookups_per_row=tuple((lookups * rates).tolist())
    )
    return np.repeat(rates, sizes) / float(rates @ sizes), curve


def of_streams(tasks: int, seed: int) -> Found:
    """Streams with locality in time, counted on two thirds."""
    found: Found = defaultdict(lambda: defaultdict(list))
    rows = 60_000
    for task in range(tasks):
        rng = np.random.default_rng([seed, 1, task])
        lookups = int(10 ** rng.uniform(3, 3.7))
        streams: dict[str, Iterator[Batch]] = {
            "sessions": sessions(
                rows, lookups, rng, active=int(lookups * rng.uniform(0.3, 1)), stay=rng.uniform(3, 20)
            ),
            "the newest are hottest": drifting(rows, lookups, rng, a_batch=rng.uniform(1, 60)),
            "half a scan, again and again": cycles(rows, lookups, rng, length=int(rows * rng.uniform(0.1, 0.5))),
            "drawn by Zipf": independent(zipf(rows, rng.uniform(0.6, 1.3)), lookups, rng),
        }
        for kind, stream in streams.items():
            batches = list(islice(stream, 360))
            of_stream(found[kind], batches, 240, rows)
    return found


def of_stream(off: dict[str, list[float]], batches: Sequence[Batch], part: int, rows: int) -> None:
    """Caches that the counted part fills, so far as the stream read so many rows."""
    counted = counted_table(batches[:part], rows)
    assert counted.access is not None
    assert counted.access.stream is not None
    independent_reads = counted.access.model_copy(update={"stream": None})
    curves = {
        COUNTED: miss_curve(counted, 1),
        CHE: miss_curve(counted.model_copy(update={"access": independent_reads}), 1),
    }
    if len(batches) == 2 * part:  # of a stream the last half is counted, here the part that is tested
        curves[TESTED] = miss_curve(counted_table(batches, rows), 1)
        off[VARIES].append(counted.access.stream.varies)
    most = min(counted.access.stream.cached_rows[-1], float(curves[COUNTED].rows_touched(part * 2 / 3)))
    for share in SHARES:
        cached = -(-int(share * rows) // 32) * 32
        if 1.5 * curves[COUNTED].distinct_rows <= cached <= most:
            rate = simulated(batches, cached, part).miss_rate
            for way, curve in curves.items():
                off[way].append(share_of(curve, cached) - rate)


def counted_table(batches: Sequence[Batch], rows: int) -> Table:
    """A table of which a stream was counted, each batch one sample."""
    counter = AccessCounter(rows)
    for batch in batches:
        counter.add(batch, 1)
    return Table.parse({"name": "t", "rows": rows, "dim": 4, **counter.fields("time")}, "t")


def of_real_streams(ratings: Path | None, requests: Path | None) -> Found:
    """Users and films of ratings, and requests, in batches in order of time and shuffled."""
    found: Found = defaultdict(lambda: defaultdict(list))
    for name, batches, rows in real_streams(ratings, requests):
        of_stream(found[name], batches, len(batches) // 2, rows)
    return found


def real_streams(ratings: Path | None, requests: Path | None) -> Iterator[tuple[str, list[Batch], int]]:
    """What is read, its batches, and the rows of the table."""
    rng = np.random.default_rng(0)
    for name, ids, rows in in_time(ratings, requests):
        size = 512 if name == "requests" else 256
        for order, in_order in (("in order of time", ids), ("shuffled", rng.permutation(ids))):
            half = len(ids) // size // 2
            yield f"{name}, {order}", list(in_order[: 2 * half * size].reshape(-1, size)), rows


if __name__ == "__main__":
    main()
