"""States that once stopped every later night, one after another: how the night ends, and how the ones after it do.

Nights in this process, on the synthetic backend, with few cases and epochs: it is about who goes on, not how good a model is.
"""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from helpers.night import Night, Place, killed_after
from helpers.nodes import node
from neuroshard.core.errors import MeasureError
from neuroshard.core.table import Table
from neuroshard.deploy.gc import run as gc
from neuroshard.deploy.run import rollback
from neuroshard.files.tables import write_tables
from neuroshard.measure import job as job_module
from neuroshard.store.folder import FolderStore

Case = Callable[[Place], list[Night]]
H200, H100 = node("a"), node("b", product="NVIDIA-H100")


def tables(count: int, rows: int = 1000) -> tuple[Table, ...]:
    return tuple(Table(name=f"t{i}", rows=rows * (i + 1), dim=64, pooling_factor=2.0 + 3 * i) for i in range(count))


def order(place: Place, name: str = "ads", file: str = "six.json", **more: Any) -> dict[str, Any]:
    asked = {"name": name, "tables": str(place.folder / file), "devices": 4, "memory": "8GiB", "hardware": "h200"}
    return {**asked, **more}


def new_place(folder: Path) -> Place:
    place = Place(folder, [H200])
    write_tables(folder / "two.json", tables(2))
    write_tables(folder / "six.json", tables(6))
    place.models = [order(place)]
    return place


def more_devices(place: Place) -> list[Night]:
    first = place.night()
    place.models = [order(place, devices=8)]
    return [first, place.night(), place.night()]


def few_all_to_alls(place: Place) -> list[Night]:
    return [place.night(collective_cases=20), place.night(collective_cases=20)]


def no_budget(place: Place) -> list[Night]:
    place.budget_seconds = 0.0
    first = place.night()
    place.budget_seconds = 300.0
    return [first, place.night(), place.night()]


def two_tables(place: Place) -> list[Night]:
    place.models = [order(place, file="two.json")]
    first = place.night()
    place.models = [order(place)]
    return [first, place.night(), place.night()]


def batch_sizes(place: Place) -> list[Night]:
    return [place.night(batch_size=size) for size in (512, 1024, 512, 1024)]


def spoil(place: Place, ending: str, data: bytes) -> None:
    next(one for one in sorted(Path(place.store).rglob(ending)) if "aside" not in one.parts).write_bytes(data)


def other_bench(place: Place) -> list[Night]:
    place.nodes = [node("a"), node("c")]
    first = place.night()
    path = next(Path(place.store).rglob("costs-2-of-2/costs.json"))
    other = json.loads(path.read_text())
    other["bench"]["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(other))
    place.models = [order(place, devices=8)]
    return [first, place.night(), place.night()]


def truncated(place: Place) -> list[Night]:
    place.nodes = [node("a"), node("c")]
    first = place.night()
    spoil(place, "costs-2-of-2/costs.json", b'{"bench": ')
    place.pods = 1
    place.models = [order(place, devices=8)]
    return [first, place.night(), place.night()]


def damaged_cases(place: Place) -> list[Night]:
    place.budget_seconds = 0.0
    first = place.night()
    spoil(place, "cases/compute.parquet", b"damaged")
    place.budget_seconds = None
    return [first, place.night(), place.night()]


def of_2040(place: Place) -> list[Night]:
    today, place.now = place.now, datetime(2040, 1, 1, tzinfo=UTC)
    first = place.night()
    place.now = today
    return [first, place.night(), place.night()]


def broken_kind(place: Place) -> list[Night]:
    first = place.night()
    place.nodes = [H200, H100]
    place.models = [order(place), order(place, "old", hardware="h100")]
    measure = job_module.measure

    def broken(*arguments: Any, **told: Any) -> Any:
        if "H100" in told["hardware"].name:
            raise MeasureError("the workers of 3 cases in a row were lost")
        return measure(*arguments, **told)

    with patch.object(job_module, "measure", broken):
        second = place.night()
    return [first, second, place.night(), place.night()]


def missing_tables(place: Place) -> list[Night]:
    first = place.night()
    place.models = [order(place), order(place, "feed", "not-there.json")]
    second = place.night()
    place.models = [order(place), order(place, "feed")]
    return [first, second, place.night(), place.night()]


def refused(place: Place) -> list[Night]:
    place.max_error = 1e-4
    nights = [place.night() for _ in range(3)]
    place.max_error = 10.0
    return [*nights, place.night(), place.night()]


def foreign(data: bytes, whose: str) -> Case:
    def case(place: Place) -> list[Night]:
        place.nodes = [H200, H100]
        place.models = [order(place), order(place, "old", hardware="h100")]
        first = place.night()
        pointers = sorted(Path(place.store, "hardware").rglob("live.json"))
        hardware = next(one for one in pointers if "H100" in json.loads(one.read_text())["device_name"])
        {"hardware": hardware, "model": Path(place.store, "old", "live.json")}[whose].write_bytes(data)
        return [first, place.night(), place.night(), place.night()]

    return case


def rolled_back(place: Place) -> list[Night]:
    first = place.night()
    place.models = [order(place, memory="7GiB")]
    second = place.night()
    rollback(FolderStore(Path(place.store)), "ads", now=datetime.now(UTC))
    return [first, second, place.night(), place.night()]


def two_seeds(place: Place) -> list[Night]:
    return [place.night(seed=0), place.night(seed=1), place.night(seed=0)]


def killed(place: Place) -> list[Night]:
    with killed_after(12):
        first = place.night()
    return [first, place.night(), place.night()]


def misspelt(place: Place) -> list[Night]:
    place.models = [order(place, hardware="h20O")]
    first = place.night()
    place.models = [order(place)]
    return [first, place.night(), place.night()]


def damaged_plan(place: Place) -> list[Night]:
    first = place.night()
    spoil(place, "ads/plans/*.json", b"damaged")
    return [first, place.night(), place.night()]


def lease_of_2033(place: Place) -> list[Night]:
    place.budget_seconds = 0.0
    first = place.night()
    place.budget_seconds = None
    lease = next(Path(place.store, "_measuring").rglob("draw-0001")) / "lease-1-of-1.json"
    lease.write_text('{"owner": "dead", "nonce": "1"}')
    os.utime(lease, (2e9, 2e9))
    return [first, place.night(), place.night()]


def collected(place: Place) -> list[Night]:
    first = place.night()
    place.a_day_goes_by(40)
    gc(place.store, "_measuring", keep=1, age_seconds=30 * 86400.0, apply=True)
    place.models = [order(place, devices=8)]
    return [first, place.night(), place.night()]


def comes_and_goes(place: Place) -> list[Night]:
    both = [order(place), order(place, "feed")]
    nights = []
    for place.models in (both, both[:1], both[1:], both):
        nights.append(place.night())
    return nights


def renamed(place: Place) -> list[Night]:
    first = place.night()
    place.nodes = [node("a", product="NVIDIA-H200-SXM")]
    return [first, place.night(), place.night()]


CASES: dict[str, Case] = {
    "4 devices, then 8": more_devices,
    "20 all-to-alls asked for": few_all_to_alls,
    "a budget that buys nothing, then 5 min": no_budget,
    "two tables, refused; then six": two_tables,
    "batches of 512 and 1,024 in turns": batch_sizes,
    "shares of different benches": other_bench,
    "a truncated costs.json of an abandoned share": truncated,
    "damaged cases": damaged_cases,
    "a live cost model dated 2040": of_2040,
    "an h100 joins, its measuring fails": broken_kind,
    "one model's tables are missing": missing_tables,
    "a cost model is refused, then more error is allowed": refused,
    "another hardware's live.json is garbage": foreign(b"garbage", "hardware"),
    "another hardware's live.json is of a newer version": foreign(b'{"format_version": 999}', "hardware"),
    "a model's live.json is garbage": foreign(b"garbage", "model"),
    "a model's live.json is of a newer version": foreign(b'{"format_version": 999}', "model"),
    "a rolled back plan": rolled_back,
    "seeds 0 and 1 on one store": two_seeds,
    "killed while it measures": killed,
    "hardware is misspelt, then not": misspelt,
    "the live plan is damaged": damaged_plan,
    "a dead night's lease dated 2033": lease_of_2033,
    "gc takes the measuring, then 8 devices": collected,
    "models leave the list and come back": comes_and_goes,
    "the hardware is renamed": renamed,
}


def show(scratch: Path) -> bool:
    """Every case as a row of a table; whether all of them ended well."""
    print("| state | the nights, one after another | measured or learned in each | the last one |\n|---|---|---|---|")
    good = True
    for number, (what, case) in enumerate(CASES.items()):
        nights = case(new_place(scratch / str(number)))
        last = nights[-1]
        ended = "DID NOT GO ON" if last.error else "ended well"
        ended += "" if not any(one.doubts for one in last.verdicts.values()) else ", degraded"
        good = good and not ended.startswith("DID")
        kinds = ", ".join(str(len(night.works)) for night in nights)
        print(f"| {what} | {'; '.join(map(told, nights))} | {kinds} | {ended} |", flush=True)
    return good


def told(night: Night) -> str:
    """A night in a few words."""
    if night.killed:
        return "killed"
    ends = "/".join(night.ends.values())
    doubts = any(verdict.doubts for verdict in night.verdicts.values())
    return f"{'RED: ' if night.error else ''}{ends}{' (degraded)' if doubts else ''}"
