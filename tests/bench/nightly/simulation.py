"""Two simulated months of nights: what happens each day is drawn from a seed, and what must never happen is counted.

Every day something may go wrong: the run is killed at some write, this machine's clock is years off, the budget buys nothing, the
fleet, the models, their tables, the batch size or the library's version change, two nights write at once, objects of the store
are damaged. Every week is followed by quiet nights.

    stuck   a model that has no plan, or a less certain one, after three quiet nights
    lost    a plan that was live could not be read after a night
    red     a night failed though every model that it planned for had a plan live; or by an error that is none of ours
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from helpers.nightly import Killed, NightlyRun, Place, at_write, killed_after, spec, tables
from helpers.nodes import node
from neuroshard.core.errors import NeuroshardError
from neuroshard.files.tables import write_tables
from neuroshard.store.folder import FolderStore
from neuroshard.store.releases import read_live, read_plan

FLEETS: tuple[list[dict[str, Any]], ...] = (
    [node("a"), node("c")],
    [node("a"), node("b", product="NVIDIA-H100")],
    [node("a", driver="580.65.06")],
    [node("a"), node("c"), node("b", product="NVIDIA-H100", ready=False)],
    [node("a", ready=False)],
)
FILES = {"two.json": tables(2), "six.json": tables(6), "nine.json": tables(9), "grown.json": tables(6, rows=1300)}
QUIET = 3  # nights after a week
VERSIONED = ("measure.synthetic", "nightly.pretrain", "nightly.survey")


class Months:
    """A store over the days, and what was counted."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.found = random.Random(seed), Counter[str]()
        self.causes: list[Any] = []
        self.place = Place(folder, FLEETS[0])
        for name, some in FILES.items():
            write_tables(folder / name, some)
        self.place.models = [spec(self.place)]
        self.batch_size, self.version = 512, "0.1.0"

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def day(self) -> None:
        """Draw what changes and what goes wrong, and let a night go by."""
        rng, place = self.rng, self.place
        if self.chance(0.2):
            place.nodes = rng.choice(FLEETS)
        if self.chance(0.3):
            file = rng.choice([*FILES, "not-there.json"])
            place.models = [spec(place, file=rng.choice(list(FILES)), devices=rng.choice((2, 4, 8)))]
            if self.chance(0.5):
                place.models.append(spec(place, "feed", file, hardware=rng.choice(("h100", "h200"))))
        if self.chance(0.2):
            self.batch_size = rng.choice((512, 1024))
        if self.chance(0.07):
            self.version = f"0.1.{rng.randrange(1, 100)}"
        if self.chance(0.15):
            self.damage()
        place.pods = rng.choice((1, 2, 2))
        place.budget_seconds = 0.0 if self.chance(0.15) else None
        before = place.now
        if self.chance(0.08):
            place.now += timedelta(days=rng.choice((-400, 5000)))
        kill = killed_after(rng.randrange(rng.choice((3, 6, 15, 70)))) if self.chance(0.4) else nullcontext()
        meets = self.chance(0.15)
        write = rng.randrange(rng.choice((3, 10, 40)))
        with kill, at_write(write, self.another_night) if meets else nullcontext():
            self.night()
        place.now, place.budget_seconds = before + timedelta(days=1), None

    def another_night(self) -> None:
        """A whole night of another seed, in the middle of one."""
        self.place.run_steps(self.request(seed=1))

    def request(self, **changes: Any) -> Any:
        from neuroshard.orders.nightly import Request

        return Request.parse({**self.place.request, "batch_size": self.batch_size, **changes}, "request")

    def night(self) -> NightlyRun | None:
        live = self.live()
        try:
            with as_version(self.version):
                night = self.place.nightly_run(batch_size=self.batch_size)
        except Killed:  # in what a night does when it ends
            return None
        except Exception as error:
            self.count("red", f"{type(error).__name__}: {error}")
            return None
        self.found["nights"] += 1
        self.found["killed"] += night.killed
        self.found["degraded"] += any(verdict.doubts for verdict in night.verdicts.values())
        for name in live:
            if name not in self.live():
                self.count("lost", name)
        if night.error:
            self.found["red with a cause"] += 1
            if not self.has_a_cause(night, live):
                self.count("red", night.error)
        return night

    def has_a_cause(self, night: NightlyRun, live: dict[str, str]) -> bool:
        """Was there a model that could not be planned and had nothing live, and is it named?"""
        missing = [one["name"] for one in self.place.models if not Path(one["tables"]).exists()]
        return any(name not in live and name in night.error for name in missing)

    def live(self) -> dict[str, str]:
        """The plans that a trainer can load, by model."""
        store, found = FolderStore(Path(self.place.store)), {}
        for name in ("ads", "feed"):
            try:
                digest = read_live(store, name).release.plan_digest
                read_plan(store, name, digest)
                found[name] = digest
            except NeuroshardError:
                continue
        return found

    def damage(self) -> None:
        """Spoil, truncate or delete an object of the store that no trainer reads."""
        paths = [path for folder in ("_measuring", "hardware", "_nightly")
                 for path in sorted(Path(self.place.store, folder).rglob("*.*")) if path.is_file()]  # fmt: skip
        if not paths:
            return
        path = self.rng.choice(paths)
        how = self.rng.choice(("spoil", "truncate", "delete"))
        if how == "delete":
            path.unlink()
        else:
            path.write_bytes(b"garbage" if how == "spoil" else path.read_bytes()[: path.stat().st_size // 2])

    def quiet_nights(self) -> None:
        """Nothing goes wrong: then every model has a plan, without a doubt after QUIET nights."""
        place = self.place
        place.nodes, place.pods, place.models = FLEETS[0], 2, [spec(place), spec(place, "feed", devices=2)]
        night = None
        for _ in range(QUIET):
            night = self.night()
        if night is None or night.error or any(one.doubts for one in night.verdicts.values()):
            self.count("stuck", night.error or night.instead if night else "no night")

    def count(self, what: str, why: str) -> None:
        self.found[what] += 1
        self.causes.append(f"{what}, day {self.place.now:%Y-%m-%d}: {why}")


@contextmanager
def as_version(version: str) -> Iterator[None]:
    patches = [patch(f"neuroshard.{module}.__version__", version) for module in VERSIONED]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


COLUMNS = ["seed", "nights", "killed", "degraded", "red with a cause", "stuck", "lost", "red without a cause"]


def show(scratch: Path, seed: int, weeks: int) -> tuple[bool, list[list[str]]]:
    """Simulate, and print a row; whether nothing was stuck, lost, or red without a cause, and the row."""
    months = Months(scratch, seed)
    for _ in range(weeks):
        for _ in range(7):
            months.day()
        months.quiet_nights()
    found = months.found
    row = [str(seed), *(str(found[name]) for name in (*COLUMNS[1:-1], "red"))]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n| {' | '.join(row)} |", flush=True)
    print(*(f"- {cause}\n" for cause in months.causes), sep="", end="", flush=True)
    return not (found["stuck"] or found["lost"] or found["red"]), [row]
