"""Room 1: tables -> cases: random table sets that fit a device, random all-to-alls between devices, and tables beyond HBM.

    neuroshard augment tables.json --compute-cases 2000 --collective-cases 400 --devices 4 --memory 32GiB -o cases/

The cases are in random order, so a run of `measure` that ends early has measured a fair sample of them.
"""

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from neuroshard.augment.draw import Draw
from neuroshard.augment.pools import Pool, fitting, hold_out
from neuroshard.augment.settings import AugmentSettings
from neuroshard.augment.tiers import draw_tiers
from neuroshard.core.case import TEST_SETS_SHARE, VALID_SHARE, Cases, CollectiveCase, ComputeCase, Split
from neuroshard.core.clean import log
from neuroshard.core.errors import Infeasible
from neuroshard.core.part import Part
from neuroshard.core.table import DIM_STEP, Table
from neuroshard.core.text import agreeing
from neuroshard.core.units import format_bytes
from neuroshard.core.value import sha256
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.files.cases import write_cases
from neuroshard.files.disk import check_can_write
from neuroshard.files.tables import read_tables
from neuroshard.models.open import open_trained
from neuroshard.progress import Bar, progress

TEST_TABLES_SHARE = 0.125  # of the compute cases have tables that are never seen in training
_TRIES = 1000  # draws in a row of cases that are known already; after them no more cases of that kind are drawn

_Case = TypeVar("_Case", ComputeCase, CollectiveCase)
_Kind = TypeVar("_Kind")


def augment(
    tables: Sequence[Table],
    settings: AugmentSettings,
    *,
    acquire_for: TrainedCostModel | None = None,
    held_out: Collection[str] | None = None,
) -> Cases:
    """Cases to measure. Deterministic for a seed; case ids are distinct.

    An eighth of the compute cases are of tables held out: those named in `held_out`, or else a share of all tables. With a cost
    model to `acquire_for`, the devices of plans to train on are chosen from 4 times as many, so that the model learns most. The
    seed of the model's own cases then holds out the same tables again, and draws other cases.

    Tables of which not even 4 columns fit a device are left out of the compute cases. Raises Infeasible where that is all of
    them, or all that may be trained on. Where fewer distinct cases exist than were asked for, the result has fewer, and the
    progress line says so.
    """
    rng = np.random.default_rng(settings.seed)
    fit = fitting(tables, settings.memory_bytes)
    if not fit:
        raise _none_fits(tables, settings.memory_bytes)
    if held_out is None:
        train_tables, test_tables = hold_out(fit, settings.test_share, rng)
    else:
        train_tables = tuple(table for table in fit if table.name not in held_out)
        test_tables = tuple(table for table in fit if table.name in held_out)
    if not train_tables:
        raise Infeasible(
            f"no table to train on: {agreeing(len(fit), 'table', 'fits', 'fit')} a device of "
            f"{format_bytes(settings.memory_bytes)}, and all are held out; give more memory, or tables that are not held out"
        )
    if acquire_for is not None:
        rng = np.random.default_rng([settings.seed, int(sha256(acquire_for.name.encode())[:15], 16)])
    seen, unseen = (Pool.of(some, settings.max_dim, settings.memory_bytes) for some in (train_tables, test_tables))
    sent = [DIM_STEP * math.ceil(Part.of(table).sent_columns / DIM_STEP) for table in tables]
    draw = Draw(settings, seen, unseen, np.array(sent, dtype=np.int64), len(fit), rng)

    splits = _splits(settings.compute_cases, TEST_TABLES_SHARE if test_tables else 0.0, rng)
    counts = _device_counts(settings.collective_cases, settings.devices, rng)
    all_to_alls = list(zip(counts, _splits(settings.collective_cases, 0.0, rng), strict=False))
    draw_compute = draw.compute if acquire_for is None else draw.acquired(splits, acquire_for)
    asked = len(splits) + len(all_to_alls)
    with progress("augment", total=asked, unit="cases") as bar:
        compute = _distinct(splits, draw_compute, bar)
        collective = _distinct(all_to_alls, draw.all_to_all, bar, len(compute))
        bar.advance(0, _shortfall(len(tables) - len(fit), asked - len(compute) - len(collective)))
    return Cases(
        tables=tuple(tables),
        compute=tuple(compute),
        collective=tuple(collective),
        tiers=draw_tiers(tables, settings),
        max_dim=max(seen.max_dim, unseen.max_dim),
        seed=settings.seed,
    )


def run(tables_path: Path, out: Path, settings: AugmentSettings, *, acquire_for: str | Path | None = None) -> Cases:
    """A tables.json -> a folder of cases (see files/cases.py); stderr says what of the file was ignored.

    `acquire_for` names a cost model, as `--model` does. Raises what `augment` raises, and InvalidInput.
    """
    check_can_write(out, folder=True)
    tables, notes = read_tables(tables_path)
    log(*(f"note: {note}" for note in notes))
    model = None if acquire_for is None else open_trained(acquire_for, "--acquire")
    cases = augment(tables, settings, acquire_for=model)
    write_cases(out, cases)
    return cases


def _none_fits(tables: Sequence[Table], memory_bytes: int) -> Infeasible:
    """The error that names the smallest table."""
    smallest = min((table.with_dim(table.narrowest_cut) for table in tables), key=lambda table: table.memory_bytes)
    return Infeasible(
        f"no table fits a device: {smallest.dim} columns of the smallest one, {smallest.name!r}, need "
        f"{format_bytes(smallest.memory_bytes)} of {format_bytes(memory_bytes)}; give more --memory"
    )


def _splits(count: int, test_tables_share: float, rng: np.random.Generator) -> list[Split]:
    """Splits of `count` cases in random order: a share of test_tables, and the rest 80/10/10."""
    test_tables = round(test_tables_share * count)
    valid, test_sets = (
        max(round(share * (count - test_tables)), min(count // 3, 1)) for share in (VALID_SHARE, TEST_SETS_SHARE)
    )
    train = count - test_tables - valid - test_sets
    counts: dict[Split, int] = {"train": train, "valid": valid, "test_sets": test_sets, "test_tables": test_tables}
    kinds = [split for split, number in counts.items() for _ in range(number)]
    return [kinds[i] for i in rng.permutation(count)]


def _device_counts(count: int, devices: tuple[int, ...], rng: np.random.Generator) -> list[int]:
    """A number of devices for each of `count` all-to-alls, in random order, each number equally often."""
    several = [number for number in devices if number > 1]
    return rng.permutation(np.resize(several, count)).tolist() if several else []


def _distinct(kinds: Sequence[_Kind], draw: Callable[[_Kind], _Case], bar: Bar, before: int = 0) -> list[_Case]:
    """A case of each kind in turn, all distinct. A kind ends after 1,000 draws in a row of cases that are known already."""
    cases: list[_Case] = []
    known: set[str] = set()
    exhausted: set[_Kind] = set()
    for kind in kinds:
        if kind not in exhausted:
            fresh = (case for case in (draw(kind) for _ in range(_TRIES)) if case.case_id not in known)
            case = next(fresh, None)
            if case is None:
                exhausted.add(kind)
            else:
                known.add(case.case_id)
                cases.append(case)
        bar.advance(1, f"{before + len(cases):,} distinct")
    return cases


def _shortfall(tables_left_out: int, cases_missing: int) -> str:
    """What of the request is missing from the result, for the progress line."""
    tables = f"{agreeing(tables_left_out, 'table', 'is', 'are')} too large for a device" if tables_left_out else ""
    cases = f"{cases_missing} fewer than asked for: there are no more distinct cases" if cases_missing else ""
    return "; ".join(filter(None, (tables, cases)))
