"""The cases of every kind of hardware that a night has to measure, put where its pods find them.

What earlier nights drew is kept. A night that asks for more (other numbers of devices, new tables, more cases) adds a draw of
what is not there. A table that was held out once stays so, and one that was trained on is never tested on: so the costs of all
draws are one set.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuroshard.augment.pools import hold_out
from neuroshard.augment.run import augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.augment.source import load_tables
from neuroshard.core.case import FEWEST_TRAIN_ALL_TO_ALLS, TRAIN_SHARE, Cases, ComputeCase
from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, InvalidInput, NeuroshardError, StoreError
from neuroshard.core.nightly import Job, Order, Request, Survey, Work
from neuroshard.core.table import MAX_NAME, Table
from neuroshard.core.value import sha256
from neuroshard.files.cases import read_cases, write_cases
from neuroshard.store.folders import delete_folder, fetch_folder, patiently
from neuroshard.store.lease import Held, leased
from neuroshard.store.measuring import FAILED, age_out, cases_of, left_of, measuring, note_failure, set_aside
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store

FILES = ("compute.parquet", "collective.parquet", "cases.json")  # the last one says that they are whole
TEST_SHARE = AugmentSettings.test_share  # of the kinds of tables
FEWEST_ALL_TO_ALLS = round(
    1.6 * FEWEST_TRAIN_ALL_TO_ALLS
)  # of each number of devices; TRAIN_SHARE of them are to train on
MORE, MOST = (
    0.5,
    4.0,
)  # share of the cases asked for that is added where they did not do, and how often they are drawn at most
VERSION_MARK = (
    "~"  # between a table's name and the digest of its content, where a table of that name was measured before
)


class Lacking(NamedTuple):
    """What of a request is not drawn yet: table sets, and all-to-alls by number of devices."""

    compute: int
    collective: Mapping[int, int]

    def __bool__(self) -> bool:
        return self.compute > 0 or any(self.collective.values())


def run(night: Survey, store_url: str, *, single_writer: bool = False) -> list[Job]:
    """Draw what the night's works lack into the store, and return the jobs that measure what is left there.

    A kind whose cases cannot be drawn is noted and left out; the others go on. Raises StoreError.
    """
    jobs = []
    store = open_store(store_url, single_writer=single_writer)
    found, _ = tables_of(night.orders, skip=night.lost)
    tables = [table for tables in found.values() for table in tables]
    for work in night.works:
        patiently(lambda work=work: store.delete(f"{work.folder}/{FAILED}"))  # type: ignore[misc] # this night tries again
        try:
            if work.oldest_seconds is not None:
                age_out(store, work.folder, work.oldest_seconds)
            extend(store, work, night.request, tables, night.owner)
        except (Held, Conflict) as error:  # another night draws the very same
            log(f"note: {error}")
        except StoreError:
            raise
        except NeuroshardError as error:
            note_failure(store, work.folder, "augment", str(error))
        jobs += [Job(work=work, share=share, owner=night.owner) for share in _to_measure(store, work)]
    return jobs


def extend(store: Store, work: Work, request: Request, tables: Sequence[Table], owner: str) -> None:
    """Add a draw of what the work lacks, if anything. Raises Held, StoreError, and what `augment` raises."""
    with leased(store, f"{work.folder}/lease-augment.json", owner):
        there = read_draws(store, work.folder)
        named = renamed(tables, there.values())
        missing = lacking(work, request, named, list(there.values()))
        if not missing:
            return
        if not named:
            raise InvalidInput("the tables of no model can be read tonight, so no cases can be drawn")
        number = max((0, *there, *measuring(store, work.folder).draws)) + 1
        cases = _drawn(work, request, named, list(there.values()), missing, number)
        if cases.compute or cases.collective:  # else there are no more that differ
            _put(cases, store, work.folder, number)


def read_draws(store: Store, folder: str) -> dict[int, Cases]:
    """The whole draws of a work by number. One that the store damaged is set aside; its costs stay."""
    found = {}
    for draw in measuring(store, folder).draws:
        with tempfile.TemporaryDirectory(prefix="neuroshard-cases-") as scratch:
            fetch_folder(store, f"{folder}/{cases_of(draw)}", Path(scratch))
            try:
                found[draw] = read_cases(Path(scratch))
            except InvalidInput as error:
                set_aside(store, folder, cases_of(draw), str(error).replace(scratch, cases_of(draw)))
    return found


def lacking(work: Work, request: Request, tables: Sequence[Table], there: Sequence[Cases]) -> Lacking:
    """What of the request is in no draw. New tables get their share of the cases; of all-to-alls those for training count."""
    drawn = sum(len(cases.compute) for cases in there)
    known = {table.name for cases in there for table in cases.tables}
    new = sum(table.name not in known for table in tables)
    compute = max(request.compute_cases - drawn, 0)
    if there and new:
        compute = max(compute, round(request.compute_cases * new / len(tables)), 1)
    counts = work.measurable if request.collective_cases else ()
    each = max(request.collective_cases // max(len(counts), 1), FEWEST_ALL_TO_ALLS)
    learned_from = Counter(
        len(case.device_dims) for cases in there for case in cases.collective if case.split == "train"
    )
    collective = {
        count: max(round(each - learned_from[count] / TRAIN_SHARE), 1)
        for count in counts
        if learned_from[count] < int(each * TRAIN_SHARE * 0.9)  # splits are drawn: a few less are as many
    }
    if work.more and not compute and not collective and drawn < MOST * request.compute_cases:
        compute = max(round(MORE * request.compute_cases), 1)
    return Lacking(compute, collective)


def _drawn(
    work: Work, request: Request, tables: Sequence[Table], there: Sequence[Cases], missing: Lacking, number: int
) -> Cases:
    """The cases that are lacking, none of which is there already."""
    rng = np.random.default_rng([request.seed, number])
    unseen, pool = roles(tables, there, rng)
    parts = [
        augment(
            pool,
            AugmentSettings(
                compute_cases=missing.compute if first else 0,
                collective_cases=0 if first else missing.collective[count],
                devices=tuple(sorted({*work.measurable, *work.ranks})) or (1,) if first else (count,),
                memory_bytes=work.hardware.memory_bytes,
                seed=int(rng.integers(2**31)),
            ),
            held_out=unseen,
        )
        for first, count in [
            *([(True, 1)] if missing.compute else []),
            *((False, count) for count in sorted(missing.collective)),
        ]
    ]
    known = {case.case_id for cases in there for case in cases.compute}
    known |= {case.case_id for cases in there for case in cases.collective}
    return Cases(
        tables=tuple(pool),
        compute=tuple(case for part in parts for case in part.compute if case.case_id not in known),
        collective=tuple(case for part in parts for case in part.collective if case.case_id not in known),
        max_dim=max(part.max_dim for part in parts),
        seed=request.seed,
    )


def roles(
    tables: Sequence[Table], there: Sequence[Cases], rng: np.random.Generator
) -> tuple[frozenset[str], tuple[Table, ...]]:
    """The names of the tables to hold out, and the tables to draw from: those given, and earlier ones where all are held out.

    Whatever occurs in an earlier draw keeps its role, also where its rows have changed since.
    """
    trained, tested = (
        {_base(name) for cases in there for name in _names(cases.compute, is_test)} for is_test in (False, True)
    )
    if not trained and not tested:
        _, held_out = hold_out(tables, TEST_SHARE, rng)
        return frozenset(table.name for table in held_out), tuple(tables)
    new = [table for table in tables if _base(table.name) not in trained | tested]
    target = max(round(TEST_SHARE * len({_base(table.name) for table in tables} | trained | tested)), 1)
    lacking_tests = min(target - len(tested), len(new) - (0 if trained else 1))
    if lacking_tests > 0 and len(trained | tested) + len(new) >= 3:
        tested |= {_base(new[place].name) for place in rng.choice(len(new), size=lacking_tests, replace=False)}
    unseen = frozenset(table.name for table in tables if _base(table.name) in tested)
    if len(unseen) < len(tables):
        return unseen, tuple(tables)
    earlier = {table.name: table for cases in there for table in cases.tables if _base(table.name) in trained}
    if not earlier:  # nothing was ever trained on: so nothing is held out
        return frozenset(), tuple(tables)
    return unseen, (*tables, *(table for name, table in earlier.items() if name not in unseen))


def _names(cases: Iterable[ComputeCase], is_test: bool) -> set[str]:
    return {table.name for case in cases if (case.split == "test_tables") == is_test for table in case.tables}


def renamed(tables: Sequence[Table], there: Iterable[Cases]) -> tuple[Table, ...]:
    """The tables, each that differs from an earlier one of its name with a digest after it: a row of costs says only the name."""
    known = {table.name: table for cases in there for table in cases.tables}
    found = []
    for table in tables:
        if known.get(table.name, table) != table:
            ending = f"{VERSION_MARK}{sha256(table.canonical_json())[:16]}"
            table = table.model_copy(update={"name": f"{table.name[: MAX_NAME - len(ending)]}{ending}"})
        found.append(table)
    return tuple(found)


def _base(name: str) -> str:
    return name.rpartition(VERSION_MARK)[0] or name


def _to_measure(store: Store, work: Work) -> list[int]:
    """The shares in which a work's draws are measured: all of them, or none where nothing is left."""
    now = measuring(store, work.folder)
    done = all(finished(store, work.folder, draw) for draw in now.draws)
    return [] if done else list(range(1, work.pods + 1))


def finished(store: Store, folder: str, draw: int) -> bool:
    """Has a draw been measured to its end, in whatever number of shares?"""
    now = measuring(store, folder)
    return any(left_of(store, folder, draw, of, now.ended) == 0 for of in {s.of for s in now.ended if s.draw == draw})


def _put(cases: Cases, store: Store, folder: str, number: int) -> None:
    """Write a draw, in place of what a killed run may have left of another."""
    prefix = f"{folder}/{cases_of(number)}"
    delete_folder(store, prefix)
    with tempfile.TemporaryDirectory(prefix="neuroshard-cases-") as scratch:
        write_cases(Path(scratch), cases)
        for name in FILES:
            data = Path(scratch, name).read_bytes()
            patiently(lambda key=f"{prefix}/{name}", data=data: store.create(key, data))  # type: ignore[misc]


def tables_of(
    orders: Sequence[Order], skip: Mapping[str, str] | None = None
) -> tuple[dict[str, tuple[Table, ...]], dict[str, str]]:
    """The tables of each model, under its model's name, as two models may call different tables alike.

    Of a model whose tables cannot be read the second result says why.
    """
    found: dict[str, tuple[Table, ...]] = {}
    faults: dict[str, str] = {}
    for order in orders:
        if order.name in (skip or {}):
            continue
        try:
            tables, notes = patiently(lambda order=order: load_tables(order.tables))  # type: ignore[misc]
        except NeuroshardError as error:
            faults[order.name] = str(error)
            continue
        log(*(f"note: {order.name}: {note}" for note in notes))
        found[order.name] = tuple(table.model_copy(update={"name": _name(order, table)}) for table in tables)
    return found, faults


def _name(order: Order, table: Table) -> str:
    """A digest in place of the end of what is too long for a name."""
    name = f"{order.name}/{table.name}"
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 17]}#{sha256(name.encode())[:16]}"
