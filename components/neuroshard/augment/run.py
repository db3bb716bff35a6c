"""Room 1, tables -> cases: random table sets that fit a device, and random all-to-alls between devices, for `measure`.

    neuroshard augment tables.json --compute-cases 2000 --collective-cases 400 --devices 4 --memory 32GiB -o cases/

The cases come in random order, so that a run of `measure` that its budget cuts short has measured a fair sample of them.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from neuroshard.augment.acquire import CANDIDATES, acquire
from neuroshard.augment.placements import draw_all_to_all
from neuroshard.augment.plans import draw_device
from neuroshard.augment.pools import Pool, hold_out
from neuroshard.augment.sets import SetSizes, draw_set, in_order
from neuroshard.core.case import Cases, CollectiveCase, ComputeCase, Split
from neuroshard.core.clean import log
from neuroshard.core.cost import MOST_MS
from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.table import DIM_STEP, MAX_DIM, Table
from neuroshard.core.task import MAX_DEVICES
from neuroshard.core.text import agreeing
from neuroshard.core.units import format_bytes
from neuroshard.core.value import sha256
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.files.cases import write_cases
from neuroshard.files.disk import check_can_write
from neuroshard.files.tables import read_tables
from neuroshard.models.open import open_trained
from neuroshard.progress import Bar, progress

DEFAULT_MAX_DIM = 128  # as in the paper
PLAN_SHARE = 0.75  # of the compute cases are what a device of a plan holds
TEST_TABLES_SHARE = 0.125  # of the compute cases are of tables never seen in training
VALID_SHARE = TEST_SETS_SHARE = 0.1  # of the other cases, and of the all-to-alls
MOST_CASES = 10_000_000  # a hundred times the paper's; MOST_TABLES is all of a large task on one device
MOST_TABLES = 100_000
_TRIES = 1000  # draws of a case that all turn out to be known: then no other is looked for

_Case = TypeVar("_Case", ComputeCase, CollectiveCase)
_Kind = TypeVar("_Kind")


def augment(
    tables: Sequence[Table],
    *,
    compute_cases: int,
    collective_cases: int,
    devices: tuple[int, ...],
    memory_bytes: int,
    max_dim: int | None = None,
    max_tables: int | None = None,
    max_delay_ms: float = 20.0,
    test_share: float = 0.2,
    vary_share: float = 0.5,
    plan_share: float = PLAN_SHARE,
    batch_sizes: tuple[int, ...] = (),
    acquire_for: TrainedCostModel | None = None,
    held_out: Collection[str] | None = None,
    seed: int,
) -> Cases:
    """Cases to measure. Deterministic for a seed; case ids are distinct.

    `collective_cases` are split evenly over the numbers of `devices`; one device needs none. `max_dim` (by default 128) is
    the widest shard drawn, except that wider tables also come in their own width and its halves. `test_share` of the
    tables, or those named in `held_out`, are kept for the split `test_tables`, an eighth of the compute cases. In training
    and validation `vary_share` of the shards have other rows and pooling factors than their table
    (docs/decisions/0002-augmentation.md). Each compute case has one of `batch_sizes`, if there are any; else the one that they
    are measured with.

    `plan_share` of the compute cases are what a device holds in a random plan for one of the numbers of `devices`; the others are
    random sets. Of these a set has 1 to 15 tables; where a device has more on average, a fifth have more, up to 1.3 times that on
    the least of `devices`. `max_tables` says otherwise: 1 to that many, and in no case more.

    With a cost model to `acquire_for`, the devices of plans to train on are those of 4 times as many that tell it most. The seed
    of its own cases holds out the same tables again; the draws are others.

    Tables of which not even 4 columns fit into `memory_bytes` are left out of the compute cases; Infeasible where that is
    all of them. Where fewer distinct cases exist than were asked for, the result has fewer; the progress line says both.
    Raises UsageError for a width or share that cannot be.
    """
    widest = DEFAULT_MAX_DIM if max_dim is None else max_dim
    if not DIM_STEP <= widest <= MAX_DIM or widest % DIM_STEP:
        raise UsageError(
            f"the widest shard must have a multiple of {DIM_STEP} columns, at most {MAX_DIM}, not {widest}"
        )
    shares = (vary_share, plan_share)
    if not 0 <= test_share < 1 or not all(0 <= s <= 1 for s in shares) or (max_tables is not None and max_tables < 1):
        raise UsageError(
            f"test share {test_share:g}, vary share {vary_share:g} and plan share {plan_share:g} must be shares, and at least "
            f"1 table in a set, not {max_tables}"
        )

    if not 0 <= max_delay_ms <= MOST_MS:
        raise UsageError(f"the latest start must be from 0 to {MOST_MS:,.0f} ms, not {max_delay_ms:g}")
    if max(compute_cases, collective_cases) > MOST_CASES or (max_tables or 0) > MOST_TABLES:
        raise UsageError(
            f"at most {MOST_CASES:,} table sets and as many all-to-alls can be drawn, of {MOST_TABLES:,} tables each, not "
            f"{compute_cases:,} and {collective_cases:,}" + (f" of {max_tables:,}" if max_tables else "")
        )
    if max(devices) > MAX_DEVICES:
        raise UsageError(f"an all-to-all is of at most {MAX_DEVICES:,} devices, not {max(devices):,}")

    rng = np.random.default_rng(seed)
    fitting = _fitting(tables, memory_bytes)
    if held_out is None:
        train_tables, test_tables = hold_out(fitting, test_share, rng)
    else:
        train_tables = tuple(table for table in fitting if table.name not in held_out)
        test_tables = tuple(table for table in fitting if table.name in held_out)
    if acquire_for is not None:
        rng = np.random.default_rng([seed, int(sha256(acquire_for.name.encode())[:15], 16)])
    seen, unseen = (Pool.of(some, widest, memory_bytes) for some in (train_tables, test_tables))
    dims = np.array([table.dim for table in tables], dtype=np.int64)

    sizes = SetSizes.for_plans(len(fitting), min(devices)) if max_tables is None else SetSizes(max_tables)

    def draw_compute(split: Split, of_plan: bool | None = None) -> ComputeCase:
        pool = unseen if split == "test_tables" else seen
        vary = vary_share if split in ("train", "valid") else 0.0
        if (rng.random() < plan_share) if of_plan is None else of_plan:
            drawn = draw_device(
                pool,
                tables=len(fitting),
                devices=int(rng.choice(devices)),
                memory_bytes=memory_bytes,
                max_dim=widest,
                vary_share=vary,
                rng=rng,
            )
            if max_tables is not None and len(drawn) > max_tables:
                drawn = in_order(drawn[i] for i in rng.choice(len(drawn), size=max_tables, replace=False))
        else:
            drawn = draw_set(pool, sizes=sizes, memory_bytes=memory_bytes, vary_share=vary, rng=rng)
        return ComputeCase(tables=drawn, split=split, batch_size=int(rng.choice(batch_sizes)) if batch_sizes else None)

    def draw_collective(kind: tuple[int, Split]) -> CollectiveCase:
        device_dims, start_delays_ms = draw_all_to_all(dims, kind[0], max_delay_ms, rng)
        return CollectiveCase(device_dims=device_dims, start_delays_ms=start_delays_ms, split=kind[1])

    compute_splits = _splits(compute_cases, TEST_TABLES_SHARE if test_tables else 0.0, rng)
    all_to_alls = list(
        zip(_device_counts(collective_cases, devices, rng), _splits(collective_cases, 0.0, rng), strict=False)
    )
    draw_set_of: Callable[[Split], ComputeCase] = draw_compute
    if acquire_for is not None:
        of_plans = (rng.random(compute_splits.count("train")) < plan_share).tolist()
        sets = [draw_compute("train", of_plan=False) for of_plan in of_plans if not of_plan]
        devices_held = [draw_compute("train", of_plan=True) for _ in range(CANDIDATES * sum(of_plans))]
        telling, others = acquire(devices_held, sets, acquire_for, sum(of_plans)), iter(sets)
        acquired = (next(telling if of_plan else others) for of_plan in of_plans)

        def draw_set_of(split: Split) -> ComputeCase:
            return (next(acquired, None) if split == "train" else None) or draw_compute(split)

    with progress("augment", total=len(compute_splits) + len(all_to_alls), unit="cases") as bar:
        compute = _distinct(compute_splits, draw_set_of, bar)
        collective = _distinct(all_to_alls, draw_collective, bar, len(compute))
        bar.advance(
            0,
            _shortfall(
                len(tables) - len(fitting), len(compute_splits) + len(all_to_alls) - len(compute) - len(collective)
            ),
        )
    return Cases(
        tables=tuple(tables),
        compute=tuple(compute),
        collective=tuple(collective),
        max_dim=max(seen.max_dim, unseen.max_dim),
        seed=seed,
    )


def run(
    tables_path: Path,
    out: Path,
    *,
    compute_cases: int,
    collective_cases: int,
    devices: tuple[int, ...],
    memory_bytes: int,
    max_dim: int | None = None,
    max_tables: int | None = None,
    max_delay_ms: float = 20.0,
    test_share: float = 0.2,
    vary_share: float = 0.5,
    batch_sizes: tuple[int, ...] = (),
    acquire_for: str | Path | None = None,
    seed: int,
) -> Cases:
    """A tables.json -> a folder of cases (see files/cases.py); stderr says what of the file was ignored.

    `acquire_for` names a cost model, as `--model` does. Raises what `augment` raises, and InvalidInput.
    """
    check_can_write(out, folder=True)
    tables, notes = read_tables(tables_path)
    log(*(f"note: {note}" for note in notes))
    cases = augment(
        tables,
        compute_cases=compute_cases,
        collective_cases=collective_cases,
        devices=devices,
        memory_bytes=memory_bytes,
        max_dim=max_dim,
        max_tables=max_tables,
        max_delay_ms=max_delay_ms,
        test_share=test_share,
        vary_share=vary_share,
        batch_sizes=batch_sizes,
        acquire_for=None if acquire_for is None else open_trained(acquire_for, "--acquire"),
        seed=seed,
    )
    write_cases(out, cases)
    return cases


def _fitting(tables: Sequence[Table], memory_bytes: int) -> list[Table]:
    """The tables of which at least 4 columns fit. Raises Infeasible where none does."""
    fitting = [table for table in tables if table.with_dim(DIM_STEP).memory_bytes <= memory_bytes]
    if not fitting:
        smallest = min(tables, key=lambda table: table.with_dim(DIM_STEP).memory_bytes)
        need = smallest.with_dim(DIM_STEP).memory_bytes
        raise Infeasible(
            f"no table fits a device: of the smallest, {smallest.name!r}, {DIM_STEP} columns need {format_bytes(need)} of "
            f"{format_bytes(memory_bytes)}; give more --memory"
        )
    return fitting


def _splits(count: int, test_tables_share: float, rng: np.random.Generator) -> list[Split]:
    """Splits of `count` cases in random order: a share of test_tables, and 80/10/10 of the rest."""
    test_tables = round(test_tables_share * count)
    valid, test_sets = (
        max(round(share * (count - test_tables)), min(count // 3, 1)) for share in (VALID_SHARE, TEST_SETS_SHARE)
    )
    train = count - test_tables - valid - test_sets
    counts: dict[Split, int] = {"train": train, "valid": valid, "test_sets": test_sets, "test_tables": test_tables}
    kinds = [split for split, number in counts.items() for _ in range(number)]
    return [kinds[i] for i in rng.permutation(count)]


def _device_counts(count: int, devices: tuple[int, ...], rng: np.random.Generator) -> list[int]:
    """A number of devices for each of `count` all-to-alls, in random order, each as often as the others."""
    several = [number for number in devices if number > 1]
    return rng.permutation(np.resize(several, count)).tolist() if several else []


def _distinct(kinds: Sequence[_Kind], draw: Callable[[_Kind], _Case], bar: Bar, before: int = 0) -> list[_Case]:
    """A case of each kind in turn, none twice. After 1,000 draws in a row of known cases, no more of that kind are drawn."""
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
    """What the user did not get, or nothing."""
    tables = f"{agreeing(tables_left_out, 'table', 'is', 'are')} too large for a device" if tables_left_out else ""
    cases = f"{cases_missing} fewer than asked: there are no more distinct cases" if cases_missing else ""
    return "; ".join(filter(None, (tables, cases)))
