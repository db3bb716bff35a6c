"""Draws the cases that the nightly run has to measure of a kind of hardware, and puts them into the store.

Cases that earlier runs drew are kept. A run that asks for more (other numbers of devices, new tables, more cases) adds a draw
with what is missing. A table that was held out once stays held out, and a table that was trained on is never tested on. So the
costs of all draws form one set.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neuroshard.augment.pools import fitting, hold_out, trait
from neuroshard.augment.run import augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.augment.tiers import TIER_CASES, draw_tiers
from neuroshard.core.case import FEWEST_TRAIN_ALL_TO_ALLS, TRAIN_SHARE, Cases, ComputeCase
from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, InvalidInput, NeuroshardError, Unreachable, Unsafe
from neuroshard.core.table import DIM_STEP, MAX_NAME, Table
from neuroshard.core.value import sha256
from neuroshard.files.cases import read_cases, write_cases
from neuroshard.files.costs import read_costs
from neuroshard.orders.nightly import Campaign, ModelSpec, Request, Survey
from neuroshard.store.folders import MOST_BYTES, delete_folder, fetch_folder
from neuroshard.store.lease import LeaseHeld, leased
from neuroshard.store.measuring import (
    AUGMENT_LEASE,
    FAILED,
    Measuring,
    Share,
    age_out,
    cases_of,
    left_of,
    measuring,
    note_failure,
    set_aside,
)
from neuroshard.store.patience import PatientStore, open_patiently, patiently
from neuroshard.store.protocol import Store
from neuroshard.store.tables import load_tables

# The last shows that the draw is whole
FILES = ("compute.parquet", "collective.parquet", "tiers.parquet", "cases.json")
TEST_SHARE = AugmentSettings.test_share  # of the kinds of tables, as augment holds out
FEWEST_ALL_TO_ALLS = round(
    1.6 * FEWEST_TRAIN_ALL_TO_ALLS
)  # of each number of devices, with some to spare for the other splits
ENOUGH_SHARE = 0.9  # of the training cases: splits are drawn at random, so a few less are enough
MORE_SHARE = 0.5  # of the cases asked for, added where those measured did not give a good cost model
MOST_DRAWN = 4.0  # times the cases asked for, over all draws
# The name of a table that has changed ends in a mark, and so many digits of the digest of its content.
VERSION_MARK, DIGITS = "~", 16
VERSION_ENDING, ENDING_LENGTH = re.compile(f"{VERSION_MARK}[0-9a-f]{{{DIGITS}}}$"), len(VERSION_MARK) + DIGITS


class Lacking(NamedTuple):
    """What no draw has yet of a request: the number of table sets, of all-to-alls by number of devices, and of cases beyond
    HBM."""

    compute: int
    collective: Mapping[int, int]
    tiers: int = 0

    def __bool__(self) -> bool:
        return self.compute > 0 or any(self.collective.values()) or self.tiers > 0


def run(survey: Survey, campaign: Campaign, store_url: str, *, single_writer: bool = False) -> list[int]:
    """Draw what a campaign lacks into the store, and return the shares in which what is left is measured.

    Where the cases cannot be drawn, the failure is recorded, and what earlier runs drew is measured even so. Raises Unreachable
    where the store does not answer, and Unsafe.
    """
    store = open_patiently(store_url, single_writer=single_writer)
    found, _ = tables_of(survey.models, skip=survey.no_plan)
    tables = [table for tables in found.values() for table in tables]
    with _failures_noted(store, campaign):
        store.delete(f"{campaign.folder}/{FAILED}")  # this run tries again
        if campaign.oldest_seconds is not None:
            age_out(store, campaign.folder, campaign.oldest_seconds)
        extend(store, campaign, survey.request, tables, survey.owner)
    with _failures_noted(store, campaign):
        now = measuring(store, campaign.folder)
        if not all(finished(store, campaign.folder, now, draw) for draw in now.draws):
            return list(range(1, campaign.pods + 1))
    return []


@contextmanager
def _failures_noted(store: Store, campaign: Campaign) -> Iterator[None]:
    """Record a failure of the block, which concerns one kind of hardware. Raises where the whole store cannot be used."""
    try:
        yield
    except (LeaseHeld, Conflict) as error:  # another run draws the same cases
        log(f"note: {error}")
    except (Unreachable, Unsafe):
        raise
    except NeuroshardError as error:
        note_failure(store, campaign.folder, "augment", str(error))


def extend(store: PatientStore, campaign: Campaign, request: Request, tables: Sequence[Table], owner: str) -> None:
    """Add a draw with what the campaign lacks, if it lacks anything. Raises LeaseHeld, StoreError, and what `augment` raises."""
    with leased(store, f"{campaign.folder}/{AUGMENT_LEASE}", owner):
        earlier = read_draws(store, campaign.folder)
        for number in earlier.keys() - set(measuring(store, campaign.folder).draws):
            _put(earlier[number], store, campaign.folder, number)
        named = renamed(tables, earlier.values())
        missing = lacking(campaign, request, named, list(earlier.values()))
        if not missing:
            return
        if not named:
            raise InvalidInput("the tables of no model can be read, so no cases can be drawn")
        number = max((0, *earlier, *measuring(store, campaign.folder).numbers)) + 1
        cases = _drawn(campaign, request, named, list(earlier.values()), missing, number)
        # without any, every new case would repeat an earlier one
        if cases.compute or cases.collective or cases.tiers:
            _put(cases, store, campaign.folder, number)


def read_draws(store: Store, folder: str) -> dict[int, Cases]:
    """The draws of a campaign, by number. A damaged draw is set aside.

    The costs measured for a draw that is damaged or gone stay, so its cases are then those of its costs: a table that was held
    out in it must stay held out.
    """
    found = {}
    now = measuring(store, folder)
    for draw in now.draws:
        with tempfile.TemporaryDirectory(prefix="neuroshard-cases-") as scratch:
            try:
                fetch_folder(store, f"{folder}/{cases_of(draw)}", Path(scratch))
                found[draw] = read_cases(Path(scratch))
            except InvalidInput as error:
                set_aside(store, folder, cases_of(draw), str(error).replace(scratch, cases_of(draw)))
    for draw in sorted({share.draw for share in now.shares} - set(found)):
        if cases := _measured_cases(store, folder, [share for share in now.shares if share.draw == draw]):
            found[draw] = cases
    return found


def _measured_cases(store: Store, folder: str, shares: Sequence[Share]) -> Cases | None:
    """The cases of a draw that have costs; None where no share can be read. Merging sets such shares aside."""
    read = []
    for share in shares:
        with tempfile.TemporaryDirectory(prefix="neuroshard-costs-") as scratch, suppress(InvalidInput):
            fetch_folder(store, f"{folder}/{share.costs}", Path(scratch))
            read.append(read_costs(Path(scratch)))
    compute = {case.case_id: case for costs in read for case, _ in costs.compute}
    cases = Cases(
        tables=tuple({table.name: table for costs in read for table in costs.tables}.values()),
        compute=tuple(compute.values()),
        collective=tuple({case.case_id: case for costs in read for case, _ in costs.collective}.values()),
        tiers=tuple({case.case_id: case for costs in read for case, _ in costs.tiers}.values()),
        max_dim=max((table.dim for case in compute.values() for table in case.tables), default=DIM_STEP),
        seed=0,  # of no draw: these were not drawn
    )
    return cases if cases.compute or cases.collective or cases.tiers else None


def lacking(campaign: Campaign, request: Request, tables: Sequence[Table], earlier: Sequence[Cases]) -> Lacking:
    """What no draw has yet of the request. New tables get their share of the cases; only all-to-alls for training count."""
    drawn = sum(len(cases.compute) for cases in earlier)
    known = {table.name for cases in earlier for table in cases.tables}
    new = sum(table.name not in known for table in tables)
    compute = max(request.compute_cases - drawn, 0)
    if earlier and new:
        compute = max(compute, round(request.compute_cases * new / len(tables)), 1)
    counts = campaign.measurable if request.collective_cases else ()
    each = max(request.collective_cases // max(len(counts), 1), FEWEST_ALL_TO_ALLS)
    learned_from = Counter(
        len(case.device_dims) for cases in earlier for case in cases.collective if case.split == "train"
    )
    collective = {
        count: max(round(each - learned_from[count] / TRAIN_SHARE), 1)
        for count in counts
        if learned_from[count] < int(each * TRAIN_SHARE * ENOUGH_SHARE)
    }
    if campaign.more and not compute and not collective and drawn < MOST_DRAWN * request.compute_cases:
        compute = max(round(MORE_SHARE * request.compute_cases), 1)
    # few constants are learned from them, so once they are drawn they are enough, whatever tables come later
    tiers = TIER_CASES if campaign.tiers and not any(cases.tiers for cases in earlier) else 0
    return Lacking(compute, collective, tiers)


def _drawn(
    campaign: Campaign,
    request: Request,
    tables: Sequence[Table],
    earlier: Sequence[Cases],
    missing: Lacking,
    number: int,
) -> Cases:
    """The missing cases. None of them repeats an earlier case."""
    rng = np.random.default_rng([request.seed, number])
    unseen, pool = roles(tables, earlier, campaign.hardware.memory_bytes, rng)

    def settings(devices: tuple[int, ...], compute: int, collective: int, tiers: int = 0) -> AugmentSettings:
        cases: dict[str, Any] = {"compute_cases": compute, "collective_cases": collective, "tier_cases": tiers}
        seed, memory_bytes = int(rng.integers(2**31)), campaign.hardware.memory_bytes
        return AugmentSettings(devices=devices, memory_bytes=memory_bytes, seed=seed, **cases)

    parts = []
    if missing.compute:
        devices = tuple(sorted({*campaign.measurable, *campaign.ranks})) or (1,)
        parts.append(augment(pool, settings(devices, missing.compute, 0), held_out=unseen))
    for ranks, count in sorted(missing.collective.items()):
        parts.append(augment(pool, settings((ranks,), 0, count), held_out=unseen))
    known = {case.case_id for cases in earlier for case in cases.compute}
    known |= {case.case_id for cases in earlier for case in cases.collective}
    return Cases(
        tables=tuple(pool),
        compute=tuple(case for part in parts for case in part.compute if case.case_id not in known),
        collective=tuple(case for part in parts for case in part.collective if case.case_id not in known),
        tiers=draw_tiers(pool, settings((1,), 0, 0, missing.tiers)) if missing.tiers else (),
        max_dim=max((part.max_dim for part in parts), default=DIM_STEP),
        seed=request.seed,
    )


def roles(
    tables: Sequence[Table], earlier: Sequence[Cases], memory_bytes: int, rng: np.random.Generator
) -> tuple[frozenset[str], tuple[Table, ...]]:
    """The names of the tables to hold out, and the tables to draw from.

    A table keeps the role that it had in an earlier draw, also where its rows have changed since. Only tables of which a shard
    fits `memory_bytes` count. Tables to draw from are `tables`, and those of earlier draws where all of `tables` are held out.
    """
    fit = fitting(tables, memory_bytes)
    trained, tested = (
        {_base(name) for cases in earlier for name in _names(cases.compute, is_test)} for is_test in (False, True)
    )
    if not trained and not tested:
        _, held_out = hold_out(fit, TEST_SHARE, rng)
        return frozenset(table.name for table in held_out), tuple(tables)
    trained_on = [table for cases in earlier for table in cases.tables if _base(table.name) in trained]
    new = [table for table in fit if _base(table.name) not in trained | tested]
    target = max(round(TEST_SHARE * len({_base(table.name) for table in fit} | trained | tested)), 1)
    lacking_tests = min(target - len(tested), len(new) - (0 if trained else 1))
    if lacking_tests > 0 and len(trained | tested) + len(new) >= 3:
        left = Counter(trait(table) for table in {table.name: table for table in (*trained_on, *new)}.values())
        for place in rng.permutation(len(new)):
            if lacking_tests and left[trait(new[place])] > 1:  # as in hold_out
                left[trait(new[place])] -= 1
                tested.add(_base(new[place].name))
                lacking_tests -= 1
    unseen = frozenset(table.name for table in fit if _base(table.name) in tested)
    if len(unseen) < len(fit) or not fit:
        return unseen, tuple(tables)
    before = {table.name: table for table in fitting(trained_on, memory_bytes)}
    if not before:  # no table was ever trained on, so none can be held out
        return frozenset(), tuple(tables)
    return unseen, (*tables, *(table for name, table in before.items() if name not in unseen))


def _names(cases: Iterable[ComputeCase], is_test: bool) -> set[str]:
    return {table.name for case in cases if (case.split == "test_tables") == is_test for table in case.tables}


def renamed(tables: Sequence[Table], earlier: Iterable[Cases]) -> tuple[Table, ...]:
    """The tables, with a digest after the name of each that has changed since an earlier draw.

    A row of costs holds the name of a table alone, so the two versions need different names.
    """
    known = {table.name: table for cases in earlier for table in cases.tables}
    found = []
    for table in tables:
        if known.get(table.name, table) != table:
            ending = f"{VERSION_MARK}{sha256(table.canonical_json())[:DIGITS]}"
            table = table.model_copy(update={"name": f"{_base(table.name)}{ending}"})
        found.append(table)
    return tuple(found)


def _base(name: str) -> str:
    """A table's name without the digest of its version. Of one too long for a version after it, the end is a digest."""
    base, most = VERSION_ENDING.sub("", name), MAX_NAME - ENDING_LENGTH
    return base if len(base) <= most else f"{base[: most - DIGITS]}{sha256(base.encode())[:DIGITS]}"


def finished(store: Store, folder: str, now: Measuring, draw: int) -> bool:
    """Whether all cases of a draw are measured, in whatever number of shares."""
    return 0 in _left(store, folder, now, draw)


def left_over(store: Store, folder: str) -> int:
    """How many cases earlier runs left, whose budget ended before their cases did."""
    now = measuring(store, folder)
    return sum(min(_left(store, folder, now, draw), default=0) for draw in now.draws)


def _left(store: Store, folder: str, now: Measuring, draw: int) -> list[int]:
    """How many cases of a draw are left, by each number of shares in which it was measured to an end."""
    lefts = (left_of(store, folder, draw, of, now.ended) for of in {s.of for s in now.ended if s.draw == draw})
    return [left for left in lefts if left is not None]


def _put(cases: Cases, store: Store, folder: str, number: int) -> None:
    """Write a draw. What a killed run left of another draw under this number is deleted first.

    Raises InvalidInput, before anything is changed, for one too large to be read again: it would be drawn anew every night.
    """
    prefix = f"{folder}/{cases_of(number)}"
    with tempfile.TemporaryDirectory(prefix="neuroshard-cases-") as scratch:
        write_cases(Path(scratch), cases)
        files = {name: path.read_bytes() for name in FILES if (path := Path(scratch, name)).exists()}
    for name, data in files.items():
        if len(data) > MOST_BYTES:
            raise InvalidInput(
                f"{store.url}/{prefix}/{name}: {len(data):,} bytes, more than the {MOST_BYTES:,} that it may have; ask for fewer "
                "compute_cases or collective_cases"
            )
    delete_folder(store, prefix)
    for name, data in files.items():
        store.create(f"{prefix}/{name}", data)


def tables_of(
    specs: Sequence[ModelSpec], skip: Mapping[str, str] | None = None
) -> tuple[dict[str, tuple[Table, ...]], dict[str, str]]:
    """The tables of each model, by model; and for each model whose tables cannot be read, the reason.

    Each table is renamed to `model/table`, since tables of two models may have one name.
    """
    found: dict[str, tuple[Table, ...]] = {}
    faults: dict[str, str] = {}
    for spec in specs:
        if spec.name in (skip or {}):
            continue
        try:
            tables, notes = patiently(partial(load_tables, spec.tables))
        except NeuroshardError as error:
            faults[spec.name] = str(error)
            continue
        log(*(f"note: {spec.name}: {note}" for note in notes))
        found[spec.name] = tuple(table.model_copy(update={"name": _name(spec, table)}) for table in tables)
    return found, faults


def _name(spec: ModelSpec, table: Table) -> str:
    """`model/table`. A digest takes the place of the end of a name that would be too long."""
    name = f"{spec.name}/{table.name}"
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 17]}#{sha256(name.encode())[:16]}"
