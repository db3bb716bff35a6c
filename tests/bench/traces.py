"""Do lookups that are drawn by a table's reuse bins cost what real ones cost? Film ratings in the order in which they came.

    make bench-traces ARGS="--ratings u.data"       ten minutes; u.data is MovieLens 100K's (GroupLens), never committed

Features are made of the ratings as recommenders make them: user, film, the last films of the user, pairs of these hashed into
large tables. Each table, and sets of them, are measured on this CPU with the real lookups (twice, which shows the noise), with
lookups drawn by the reuse bins counted on them, and with those of a Zipf distribution that knows rows and pooling factors alone:
one run, in turns.
"""

import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.publishing import page
from bench.trainer import neuroshard
from neuroshard.core.access import access_law
from neuroshard.core.case import Cases, ComputeCase
from neuroshard.core.reuse import zipf_bins
from neuroshard.core.table import Table
from neuroshard.files.access import count_bins
from neuroshard.files.cases import write_cases
from neuroshard.files.costs import read_costs
from neuroshard.files.traces import Lookups, Traces, draw_lookups, write_traces

BATCH_SIZE = 2048
HISTORY = (5, 20, 50)  # films of a user, the last so many
HASHED_ROWS = (2**17, 2**20)  # of tables of pairs
DIMS = (16, 32, 64, 128)
SETS, SET_SIZES = 40, (2, 8)
REAL, BINS = "real", "reuse bins"
ZIPF = "zipf:1.05"  # what NVIDIA's synthetic models say where nothing is known
COUNTED_BATCHES = 16  # bins are the mean over so many, evenly spaced
ROUNDS = 2
MULTIPLIER = 2_654_435_761  # Knuth's: spreads pairs over the rows of a hashed table
COLUMNS = ["lookups", "cases", "cost over that of real ones: mean", "half of the cases within", "worst"]


Set = tuple[tuple[str, int], ...]  # names and widths of tables


def main() -> None:
    parser = page.parser(__doc__, "two sets")
    parser.add_argument("--ratings", type=Path, help="u.data: user, film, rating, time a line")
    parser.add_argument("--sets", type=int, default=SETS, help=f"sets of several tables [{SETS}]")
    options = page.asked(parser)
    if options.ratings is None:
        print("nothing is run: give --ratings, the file of ratings")
        return
    lookups = features(options.ratings)
    tables = {REAL: {name: table_of(name, found) for name, found in lookups.items()}}
    tables[BINS] = {name: renamed(one, BINS) for name, one in tables[REAL].items()}
    tables[ZIPF] = {name: renamed(by_zipf(one), ZIPF) for name, one in tables[REAL].items()}
    rng, traces = np.random.default_rng(0), dict(lookups)
    for way in (BINS, ZIPF):
        traces |= {one.name: drawn(one, rng) for one in tables[way].values()}
    sets = drawn_sets(list(lookups), 2 if options.quick else options.sets)
    with tempfile.TemporaryDirectory() as named:
        write_traces(Path(named) / "traces", Traces(traces))
        ms = measured(Path(named), tables, sets)
    rows = []
    for shown, way, round_ in (("real, again", REAL, 1), (f"drawn by {BINS}", BINS, 0), (f"drawn by {ZIPF}", ZIPF, 0)):
        both = [
            (ms[way, some, round_], ms[REAL, some, 0])
            for some in sets
            if {(way, some, round_), (REAL, some, 0)} <= ms.keys()
        ]
        off = np.array([one / real - 1 for one, real in both])
        rows.append(
            [
                shown,
                f"{len(off)}",
                f"{off.mean():+.1%}",
                f"{np.median(np.abs(off)):.1%}",
                f"{off[np.abs(off).argmax()]:+.1%}",
            ]
        )
    question = (
        f"Do lookups drawn by reuse bins cost what real ones do? {len(lookups)} tables of MovieLens 100K's ratings in their "
        f"order, alone and in sets, batch {BATCH_SIZE:,}."
    )
    page.show("measure-traces", question, COLUMNS, rows, "measured", published=options.publish)


def features(path: Path) -> dict[str, Lookups]:
    """The lookups of each table, a sample for each rating by a user with as many before as the longest history."""
    ratings = np.loadtxt(path, dtype=np.int64)
    found: dict[str, list[list[int]]] = defaultdict(list)
    last: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=max(HISTORY)))
    for user, film, _, when in ratings[np.argsort(ratings[:, 3], kind="stable")].tolist():
        seen = list(last[user])
        last[user].append(film)
        if len(seen) < max(HISTORY):
            continue
        found["user"].append([user])
        found["film"].append([film])
        found["hour"].append([when // 3600 % 168])
        for n in HISTORY:
            found[f"last_{n}"].append(seen[-n:])
            for rows in HASHED_ROWS:
                pairs = [(before * 4096 + film) * MULTIPLIER % 2**32 % rows for before in seen[-n:]]
                found[f"pairs_{n}_{rows}"].append(pairs)
    return {
        name: Lookups(
            np.array([row for sample in samples for row in sample], dtype=np.int64),
            np.array([len(sample) for sample in samples], dtype=np.int64),
        )
        for name, samples in found.items()
    }


def table_of(name: str, lookups: Lookups) -> Table:
    """The table of a feature, with the reuse bins of its lookups."""
    ends = np.cumsum(lookups.lengths)
    begins = np.linspace(0, len(ends) - BATCH_SIZE - 1, COUNTED_BATCHES).astype(int)
    bins = [count_bins(lookups.indices[ends[b] : ends[b + BATCH_SIZE]]) for b in begins]
    hashed = name.startswith("pairs")
    return Table(
        name=name,
        rows=int(name.rpartition("_")[2]) if hashed else int(lookups.indices.max()) + 1,
        dim=64,
        pooling_factor=float(lookups.lengths.mean()),
        reuse_bins=tuple(np.mean(bins, axis=0).tolist()),
        reuse_batch_size=BATCH_SIZE,
    )


def drawn(table: Table, rng: np.random.Generator) -> Lookups:
    """As many batches as bins were counted over."""
    batches = [draw_lookups(table, BATCH_SIZE, rng) for _ in range(COUNTED_BATCHES)]
    return Lookups(*(np.concatenate(each) for each in zip(*batches, strict=True)))


def by_zipf(table: Table) -> Table:
    bins = zipf_bins(table.rows, table.pooling_factor, access_law(ZIPF)[0], BATCH_SIZE)
    return table.model_copy(update={"reuse_bins": bins})


def renamed(table: Table, way: str) -> Table:
    return table.model_copy(update={"name": f"{table.name}, {way}"})


def drawn_sets(names: Sequence[str], count: int) -> list[Set]:
    """Each table alone, and sets of several."""
    rng = np.random.default_rng(24)
    alone = [((name, int(dim)),) for name in names for dim in rng.choice(DIMS, size=2, replace=False)]
    several = [rng.choice(names, size=rng.integers(*SET_SIZES, endpoint=True), replace=False) for _ in range(count)]
    return alone + [tuple((str(name), int(rng.choice(DIMS))) for name in sorted(some)) for some in several]


def measured(
    folder: Path, tables: Mapping[str, Mapping[str, Table]], sets: Sequence[Set]
) -> dict[tuple[str, Set, int], float]:
    """Ms of each set, forward and backward, by the way of its lookups and by the round: all in turns, in one run."""
    cases = {
        ComputeCase(tables=tuple(of[name].with_dim(dim) for name, dim in some)): (way, some)
        for some in sets
        for way, of in tables.items()
    }
    every = tuple(one for of in tables.values() for one in of.values())
    found = Cases(tables=every, compute=tuple(cases), collective=(), max_dim=max(DIMS), seed=0)
    write_cases(folder / "cases", found)
    neuroshard(folder, "measure", "cases", "-o", "costs", "--backend", "cpu", "--batch-size", BATCH_SIZE, "--rounds", ROUNDS,
        "--traces", "traces")  # fmt: skip
    of_case = {case.case_id: what for case, what in cases.items()}
    return {
        (*of_case[cost.case_id], cost.round): cost.forward_ms + cost.backward_ms
        for _, cost in read_costs(folder / "costs").compute
        if cost.forward_ms is not None and cost.backward_ms is not None
    }


if __name__ == "__main__":
    main()
