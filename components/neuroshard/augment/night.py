"""The cases of every kind of hardware that a night has to measure, drawn once and put where its pods find them."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from neuroshard.augment.run import augment
from neuroshard.augment.source import load_tables
from neuroshard.core.case import Cases
from neuroshard.core.errors import InvalidInput
from neuroshard.core.nightly import Job, Order, Survey, Work
from neuroshard.core.table import MAX_NAME, Table
from neuroshard.core.value import sha256
from neuroshard.files.cases import read_cases, write_cases
from neuroshard.store.folders import delete_folder, fetch_folder, patiently
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store

FILES = ("compute.parquet", "comm.parquet", "cases.json")  # the last one tells that they are whole


def run(
    night: Survey, store_url: str, *, compute_cases: int, comm_cases: int, seed: int, single_writer: bool = False
) -> list[Job]:
    """Put each work's cases into the store, unless an earlier run did, and return the jobs that measure them.

    They are of the tables of all models together. Raises what reading those tables and drawing raises, and StoreError.
    """
    jobs = []
    tables = all_tables(night.orders) if night.works else ()
    store = open_store(store_url, single_writer=single_writer)
    for work in night.works:
        if not _are_whole(store, f"{work.folder}/cases"):
            counts = device_counts(work, night.orders)
            cases = augment(
                tables,
                compute_cases=compute_cases,
                comm_cases=comm_cases if counts else 0,
                devices=counts or (1,),
                memory_bytes=work.hardware.memory_bytes,
                seed=seed,
            )
            _put(cases, store, f"{work.folder}/cases")
        jobs += [Job(work=work, share=share) for share in range(1, work.pods + 1)]
    return jobs


def _are_whole(store: Store, prefix: str) -> bool:
    """Whether the cases there can be measured: an earlier run may have been killed, or the store may have damaged them."""
    with tempfile.TemporaryDirectory(prefix="neuroshard-cases-") as scratch:
        if FILES[-1] not in fetch_folder(store, prefix, Path(scratch)):
            return False
        try:
            read_cases(Path(scratch))
        except InvalidInput as error:
            print(f"note: {store.url}/{prefix}: drawn again, for {error}", file=sys.stderr)
            return False
    return True


def _put(cases: Cases, store: Store, prefix: str) -> None:
    """Write a case set under `prefix`, in place of what a killed run may have left of another."""
    delete_folder(store, prefix)
    with tempfile.TemporaryDirectory(prefix="neuroshard-cases-") as scratch:
        write_cases(Path(scratch), cases)
        for name in FILES:
            data = Path(scratch, name).read_bytes()
            patiently(lambda key=f"{prefix}/{name}", data=data: store.create(key, data))  # type: ignore[misc]


def all_tables(orders: Sequence[Order]) -> tuple[Table, ...]:
    """The tables of all models, each under its model's name, as two models may call different tables alike."""
    named = []
    for order in orders:
        tables, notes = load_tables(order.tables)
        print(*(f"note: {order.name}: {note}\n" for note in notes), sep="", end="", file=sys.stderr)
        named += [table.model_copy(update={"name": _name(order, table)}) for table in tables]
    return tuple(named)


def _name(order: Order, table: Table) -> str:
    """A digest in place of the end of what is too long for a name."""
    name = f"{order.name}/{table.name}"
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 17]}#{sha256(name.encode())[:16]}"


def device_counts(work: Work, orders: Sequence[Order]) -> tuple[int, ...]:
    """Numbers of devices whose exchange to measure: 2, 4, 8 … and all on GPUs; on a CPU or by a formula the models' own."""
    if work.hardware.kind == "cuda":
        doubled = {2**power for power in range(1, work.devices.bit_length()) if 2**power <= work.devices}
        return tuple(sorted(doubled | ({work.devices} - {1})))
    return tuple(sorted({order.devices for order in orders} - {1}))
