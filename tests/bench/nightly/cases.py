"""Mishaps of stores, disks, clocks and names, one after another: how the night ends, and how the ones after it do. States of what
nights leave for one another are tests (tests/nightly/test_nightly_runs.py).

Nights in this process, on the synthetic backend, with few cases and epochs: it is about who goes on, not how good a model is.
"""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.nightly.buckets import bucket
from helpers.faults import faulty
from helpers.nightly import NightlyRun, Place, at_write, clocks_at, spec, tables
from helpers.nodes import node
from neuroshard.deploy.gc import run as gc
from neuroshard.files.tables import write_tables
from neuroshard.nightly.search import run as search_run
from neuroshard.orders.nightly import Request
from neuroshard.store import folder as folder_module

Case = Callable[[Place], list[NightlyRun]]
H200, H100 = node("a"), node("b", product="NVIDIA-H100")


def new_place(folder: Path) -> Place:
    place = Place(folder, [H200])
    write_tables(folder / "two.json", tables(2))
    write_tables(folder / "six.json", tables(6))
    place.models = [spec(place)]
    return place


def collected(place: Place) -> list[NightlyRun]:
    first = place.nightly_run()
    place.a_day_goes_by(40)
    gc(place.store, "_measuring", keep=1, age_seconds=30 * 86400.0, apply=True)
    place.models = [spec(place, devices=8)]
    return [first, place.nightly_run(), place.nightly_run()]


def comes_and_goes(place: Place) -> list[NightlyRun]:
    both = [spec(place), spec(place, "feed")]
    nights = []
    for place.models in (both, both[:1], both[1:], both):
        nights.append(place.nightly_run())
    return nights


def renamed(place: Place) -> list[NightlyRun]:
    first = place.nightly_run()
    place.nodes = [node("a", product="NVIDIA-H200-SXM")]
    return [first, place.nightly_run(), place.nightly_run()]


def disk_full(part: str) -> Case:
    """One night on a disk that has no room for any object whose key holds `part`."""
    temporary = folder_module._temporary

    @contextmanager
    def full(path: Path, data: bytes) -> Iterator[Path]:
        if part in path.as_posix():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with temporary(path, data) as written:
            yield written

    def case(place: Place) -> list[NightlyRun]:
        place.models = [spec(place), spec(place, "feed", "two.json", devices=2)]
        with patch.object(folder_module, "_temporary", full):
            first = place.nightly_run()
        return [first, place.nightly_run(), place.nightly_run()]

    return case


def half_unreadable(place: Place) -> list[NightlyRun]:
    place.models = [spec(place), spec(place, "feed", "two.json", devices=2)]
    first = place.nightly_run()
    opened = os.open

    def denied(path: Any, *rest: Any, **options: Any) -> int:
        if not Path(path).name.startswith(".") and Path(path).is_file() and len(Path(path).as_posix()) % 2:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest, **options)

    with patch.object(os, "open", denied):
        second = place.nightly_run()
    return [first, second, place.nightly_run(), place.nightly_run()]


def clocks_apart(place: Place) -> list[NightlyRun]:
    """Another machine's night, an hour ahead, in the middle of a night, first where all is measured, then where nothing is."""
    ahead = place.now + timedelta(hours=1)

    def another() -> None:
        with clocks_at(ahead):
            place.run_steps(Request.parse({**place.request, "seed": 1}, "request"))

    nights = []
    for write in (6, 2):
        with at_write(write, another):
            nights.append(place.nightly_run())
        place.models = [spec(place, devices=8)]
    return [*nights, place.nightly_run()]


def tables_replaced(place: Place) -> list[NightlyRun]:
    """A file of tables is replaced between the survey and the search."""
    first, search = place.nightly_run(), search_run

    def replaced(*arguments: Any, **options: Any) -> Any:
        write_tables(place.folder / "six.json", tables(5, rows=1300))
        return search(*arguments, **options)

    with patch("helpers.nightly.plan", replaced):
        second = place.nightly_run()
    return [first, second, place.nightly_run(), place.nightly_run()]


def model_renamed(place: Place) -> list[NightlyRun]:
    first = place.nightly_run()
    place.models = [spec(place, "adverts")]
    return [first, place.nightly_run(), place.nightly_run()]


def in_bucket(choose: Callable[[bytes], Any]) -> Case:
    """A night on S3, with what `choose` does to each of its requests; then one without."""

    def case(place: Place) -> list[NightlyRun]:
        with bucket() as url:
            place.store = f"{url}/prefix"
            first = place.nightly_run()
            direct = os.environ["AWS_ENDPOINT_URL"]
            with faulty(direct, choose, random.Random(0)) as proxy, patch.dict(os.environ, AWS_ENDPOINT_URL=proxy):
                place.models = [spec(place), spec(place, "feed", "two.json", devices=2)]
                second = place.nightly_run()
            return [first, second, place.nightly_run()]

    return case


def slow(_: bytes) -> None:
    time.sleep(2)


def slow_down() -> Callable[[bytes], Any]:
    rng = random.Random(0)
    return lambda _: "503" if rng.random() < 0.3 else None


CASES: dict[str, Case] = {
    "gc takes the measuring, then 8 devices": collected,
    "models leave the list and come back": comes_and_goes,
    "the hardware is renamed": renamed,
    "no room on the disk for a draw": disk_full("/cases/"),
    "no room on the disk for costs": disk_full("/costs-"),
    "no room on the disk for a cost model": disk_full("/hardware/"),
    "no room on the disk for plans": disk_full("/plans/"),
    "no room on the disk for verdicts": disk_full("/_nightly/"),
    "half of the objects cannot be read for a night": half_unreadable,
    "two writers, their clocks an hour apart": clocks_apart,
    "tables are replaced between survey and search": tables_replaced,
    "a model is renamed": model_renamed,
    "S3 takes 2 s for each request": in_bucket(slow),
    "S3 answers 503 SlowDown to 30 % of requests": in_bucket(slow_down()),
}


def show(scratch: Path) -> tuple[bool, list[list[str]]]:
    """Print every case as a row of a table; whether all of them ended well, and the rows."""
    print("| state | the nights, one after another | measured or learned in each | the last one |\n|---|---|---|---|")
    good, rows = True, []
    for number, (what, case) in enumerate(CASES.items()):
        nights = case(new_place(scratch / str(number)))
        last = nights[-1]
        ended = "DID NOT GO ON" if last.error else "ended well"
        ended += "" if not any(one.doubts for one in last.verdicts.values()) else ", degraded"
        good = good and not ended.startswith("DID")
        kinds = ", ".join(str(len(night.campaigns)) for night in nights)
        rows.append([what, "; ".join(map(told, nights)), kinds, ended])
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    return good, rows


def told(night: NightlyRun) -> str:
    """A night in a few words."""
    if night.killed:
        return "killed"
    ends = "/".join(night.ends.values())
    doubts = any(verdict.doubts for verdict in night.verdicts.values())
    return f"{'RED: ' if night.error else ''}{ends}{' (degraded)' if doubts else ''}"
