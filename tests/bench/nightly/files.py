"""Each object of a night's store, damaged in each way, one at a time: the next night goes on, and no model loses its plan.

A store of three models and two kinds of hardware, of a few nights, is copied for each case. Then one object is cut in half,
emptied, deleted, replaced by a folder, by what a later version might write, or made unreadable, and two nights go by. In half
of the cases, drawn from the seed, the first of them has to measure more. An object stays unreadable for the first night only.

    stuck   the first night did not plan the other models; or the second one failed, or has less certain plans than it could
    lost    a model whose object was not damaged had a plan before the first night, and trainers cannot load it after
    red     the first night failed, and does not name the damaged object
"""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.nightly.buckets import BUCKET, bucket
from helpers.faults import faulty
from helpers.nightly import NightlyRun, Place, spec, tables
from helpers.nodes import node
from neuroshard.client import load_plan
from neuroshard.core.errors import NeuroshardError
from neuroshard.files.tables import write_tables
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store

MODELS = ("ads", "feed", "old")
DAMAGES = ("cut in half", "empty", "deleted", "a folder", "a later version's", "unreadable")
COLUMNS = ["store", "damage", "seed", "objects", "next night degraded", "stuck", "lost", "red without a cause"]
ON_S3 = 0.15  # of the cases are tried on S3 too, where a night takes several times as long


class Damage(NamedTuple):
    """One case: the object and what is done to it; whether more is to be measured the night after."""

    key: str
    how: str
    more: bool

    @property
    def model(self) -> str:
        """The model whose object it is, or "" for one of hardware or of the measuring."""
        names = (self.key.split("/")[0], Path(self.key).stem)  # ads/…, _nightly/ads.json
        return next((name for name in names if name in MODELS), "")


def original(folder: Path) -> Path:
    """The store of a few nights: a second plan of a model, a rejected one, and the lease of a night that died."""
    place = place_at(folder)
    for memory in ("8GiB", "7GiB", "8GiB"):
        place.models[0]["memory"] = memory
        place.nightly_run()
    measured = next(Path(place.store, "_measuring").rglob("draw-0001"))
    (measured / "lease-1-of-1.json").write_text('{"format_version": 1, "owner": "dead", "nonce": "1", "renewed": 0}')
    place.a_day_goes_by()
    return Path(place.store)


def place_at(folder: Path) -> Place:
    place = Place(folder, [node("a"), node("b", product="NVIDIA-H100")])
    for name, count in (("two", 2), ("six", 6)):
        write_tables(folder / f"{name}.json", tables(count))
    place.models = [spec(place), spec(place, "feed", "two.json", devices=2), spec(place, "old", hardware="h100")]
    return place


def later(data: bytes) -> bytes:
    """What a later version might have written in place of it."""
    try:
        return json.dumps({**json.loads(data), "format_version": 999}).encode()
    except (ValueError, TypeError):
        return b"a format of tomorrow"


class Files:
    """The cases on one kind of store, and what was counted."""

    def __init__(self, scratch: Path, store: Path, kind: str) -> None:
        self.scratch, self.store, self.kind, self.number = scratch, store, kind, 0
        self.causes: list[str] = []

    def rows(self, damages: list[Damage], seed: int) -> list[list[str]]:
        found = {how: Counter[str]() for how in DAMAGES}
        for damage in damages:
            found[damage.how].update(self.case(damage))
        return [
            [self.kind, how, str(seed), *(str(count[name]) for name in ("objects", "degraded", "stuck", "lost", "red"))]
            for how, count in found.items()
        ]

    def case(self, damage: Damage) -> list[str]:
        """What happened, as the names of what is counted."""
        self.number += 1
        place = place_at(self.scratch / str(self.number))
        found = ["objects"]
        with self.damaged(place, damage) as mend:
            if damage.more:
                place.models[2]["devices"] = 8
            before = plans(place)
            first = place.nightly_run()
            after = plans(place)
            mend()
            second = place.nightly_run()
        if unplanned := [name for name in MODELS if name not in first.verdicts and name != damage.model]:
            found.append("stuck")
            self.note(f"stuck: {self.kind}, {damage}: {unplanned} not planned: {first.error}")
        found += ["degraded"] * any(one.doubts for one in first.verdicts.values())
        if first.error and damage.key not in first.error:
            found.append("red")
            self.note(f"red: {self.kind}, {damage}: {first.error}")
        if lost := [name for name in before if name not in after and name != damage.model]:
            found.append("lost")
            self.note(f"lost: {self.kind}, {damage}: {lost}: {first.error}")
        if why := self.stuck(damage, place, second):
            found.append("stuck")
            self.note(f"stuck: {self.kind}, {damage}: {why}")
        shutil.rmtree(place.folder)
        return found

    def note(self, cause: str) -> None:
        self.causes.append(cause)
        print(f"- {cause}", flush=True)

    def stuck(self, damage: Damage, place: Place, night: NightlyRun) -> str:
        """Why the second night is not as good as if nothing had been damaged; "" if it is."""
        if night.error:
            return night.error
        newer = damage.how == "a later version's" and damage.key.endswith("live.json")  # newer trainers can read it
        there = plans(place)
        if missing := [name for name in MODELS if name not in there and not (newer and name == damage.model)]:
            return f"no plan of {missing}"
        doubts = [f"{name}: {one.doubts}" for name, one in night.verdicts.items() if one.doubts]
        return "" if newer else "; ".join(doubts)

    @contextmanager
    def damaged(self, place: Place, damage: Damage) -> Iterator[Callable[[], None]]:
        """The store with the damage. Yields what makes an unreadable object readable again."""
        shutil.copytree(self.store, place.store)
        path = Path(place.store, damage.key)
        data = path.read_bytes()
        if damage.how == "cut in half":
            path.write_bytes(data[: len(data) // 2])
        elif damage.how == "empty":
            path.write_bytes(b"")
        elif damage.how == "a later version's":
            path.write_bytes(later(data))
        elif damage.how == "deleted":
            path.unlink()
        elif damage.how == "a folder":
            path.unlink()
            path.mkdir()
            (path / "file").write_bytes(b"somebody's")
        with ExitStack() as stack:
            denied = stack.enter_context(ExitStack())
            if self.kind == "S3":
                stack.enter_context(in_bucket(place, denied, damage))
            elif damage.how == "unreadable":
                denied.enter_context(unreadable(path))
            yield denied.close


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """A file that this user may not read, even if this user is root."""
    opened = os.open

    def denied(which: Any, *rest: Any, **options: Any) -> int:
        if str(which) == str(path):
            raise PermissionError(13, "Permission denied", str(which))
        return opened(which, *rest, **options)

    with patch("neuroshard.store.folder.os.open", denied):
        yield


@contextmanager
def in_bucket(place: Place, denied: ExitStack, damage: Damage) -> Iterator[None]:
    """The place's store, moved into a bucket of a server that honours conditional writes."""
    local, prefix = FolderStore(Path(place.store)), f"night-{place.folder.name}"
    place.store = f"s3://{BUCKET}/{prefix}"
    store = open_store(place.store)
    for path in sorted(local.root.rglob("*")):
        key = path.relative_to(local.root).as_posix()
        if path.is_file() and not path.name.startswith("."):
            store.create(key, path.read_bytes())
    if damage.how != "unreadable":
        yield
        return

    def choose(head: bytes) -> Any:
        asked = head.split(b" ", 2)
        return "403" if asked[0] == b"GET" and asked[1].endswith(f"/{prefix}/{damage.key}".encode()) else None

    direct = os.environ["AWS_ENDPOINT_URL"]
    os.environ["AWS_ENDPOINT_URL"] = denied.enter_context(faulty(direct, choose, random.Random(0)))
    denied.callback(os.environ.__setitem__, "AWS_ENDPOINT_URL", direct)
    yield


def plans(place: Place) -> dict[str, str]:
    """The plans that a trainer can load, by model."""
    found = {}
    for name in MODELS:
        try:
            found[name] = load_plan(place.store, name, cache_dir=False).digest()
        except NeuroshardError:
            continue
    return found


def show(scratch: Path, seed: int, share: float = 1.0) -> tuple[bool, list[list[str]]]:
    """Try every case, or a share of them, and print a row for each damage; whether nothing was stuck, lost or red."""
    store, rng = original(scratch / "original"), random.Random(seed)
    keys = [path.relative_to(store).as_posix() for path in sorted(store.rglob("*")) if path.is_file()]
    damages = [
        Damage(key, how, rng.random() < 0.5)
        for key in keys
        if not Path(key).name.startswith(".")
        for how in DAMAGES
        if rng.random() < share
    ]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    rows: list[list[str]] = []
    causes: list[str] = []
    for kind in ("folder", "S3"):
        some = damages if kind == "folder" else [one for one in damages if rng.random() < ON_S3]
        files = Files(scratch / kind, store, kind)
        with bucket() if kind == "S3" else nullcontext():
            found = files.rows(some, seed)
        print(*(f"| {' | '.join(row)} |\n" for row in found), sep="", end="", flush=True)
        rows, causes = rows + found, causes + files.causes
    return not causes, rows


def by_store(rows: list[list[str]]) -> list[list[str]]:
    """Rows of `show`, added up for each store: for a page."""
    sums: dict[str, list[int]] = {}
    for store, _, _, *counts in rows:
        known = sums.setdefault(store, [0] * len(counts))
        sums[store] = [one + int(other) for one, other in zip(known, counts, strict=True)]
    return [[store, *map(str, counts)] for store, counts in sums.items()]
