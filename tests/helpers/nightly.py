"""Whole nightly runs in this process, on the synthetic backend: the steps of the pipeline, one after another."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from neuroshard.core.errors import MeasureError, NeuroshardError
from neuroshard.core.table import Table
from neuroshard.fleet.survey import SurveySettings
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.run import run as measure_run
from neuroshard.measure.shares.job import run as measure
from neuroshard.nightly.augment import run as augment
from neuroshard.nightly.deploy import ReleaseFiles, check_red
from neuroshard.nightly.deploy import run as release
from neuroshard.nightly.pretrain import run as learn
from neuroshard.nightly.search import run as plan
from neuroshard.nightly.survey import planned_after
from neuroshard.nightly.survey import run as survey
from neuroshard.orders.nightly import Job, Request, Survey, Verdict
from neuroshard.pretrain.run import run as pretrain
from neuroshard.store.folder import FolderStore

CLOCKS = ("nightly.survey", "nightly.pretrain", "nightly.fallbacks", "deploy.run")  # who asks what time it is
PARAMETERS = {"algorithm": "size", "memory_margin": 0.0, "min_gain": -1.0}
WRITES = ("create", "swap", "delete")


class Killed(BaseException):
    """The process of a step was killed."""


class NightlyRun(NamedTuple):
    """How a nightly run ended: "" or the error that made it red; the verdicts by model, and the kinds measured or learned."""

    error: str
    verdicts: dict[str, Verdict]
    campaigns: tuple[str, ...]
    killed: bool = False

    @property
    def ends(self) -> dict[str, str]:
        return {name: verdict.end for name, verdict in self.verdicts.items()}

    @property
    def instead(self) -> str:
        """Why the first model's plan is less certain than it could be."""
        return "; ".join(next(iter(self.verdicts.values())).doubts)


class Place:
    """A store, a fleet, models and parameters, over many nightly runs."""

    def __init__(self, folder: Path, nodes: Sequence[dict[str, Any]], **request: Any) -> None:
        self.folder, self.nodes = folder, list(nodes)
        self.store = str(folder / "store")
        self.models: list[dict[str, Any]] = []
        usual = {"compute_cases": 40, "collective_cases": 32, "batch_size": 512, "seed": 0, "backend": "synthetic"}
        self.request: dict[str, Any] = {**usual, **request}
        self.max_error: float | None = 10.0
        self.max_age_seconds: float | None = None
        self.budget_seconds: float | None = None
        self.pods = 2
        self.now = datetime(2026, 1, 1, 2, tzinfo=UTC)
        self.epochs = 2
        folder.mkdir(parents=True, exist_ok=True)

    def nightly_run(self, **changes: Any) -> NightlyRun:
        """One nightly run, with these requests in place of the usual; then a day goes by, by the store's clock too."""
        with clocks_at(self.now):
            found = self.run_steps(Request.parse({**self.request, **changes}, "request"))
        self.a_day_goes_by()
        return found

    def a_day_goes_by(self, days: float = 1.0) -> None:
        self.now += timedelta(days=days)
        age(Path(self.store), days)

    def run_steps(self, request: Request) -> NightlyRun:
        (self.folder / "nodes.json").write_text(json.dumps({"items": self.nodes}))
        verdicts: dict[str, Verdict] = {}
        campaigns: tuple[str, ...] = ()
        try:
            settings = SurveySettings(
                request=request,
                nodes=str(self.folder / "nodes.json"),
                most_pods=self.pods,
                max_age_seconds=self.max_age_seconds,
                max_error=self.max_error,
            )
            found = survey(json.dumps(self.models), self.store, settings, parameters=PARAMETERS)
            campaigns = tuple(campaign.hardware.name for campaign in found.campaigns)
            red = self._plan_all(found, found.at_once, verdicts, at_once=True)
            self._renew(found)
            red += self._plan_all(found, planned_after(found), verdicts)
            if red:
                return NightlyRun("; ".join(red), verdicts, campaigns)
        except NeuroshardError as error:
            return NightlyRun(str(error), verdicts, campaigns)
        except Killed:
            return NightlyRun("", verdicts, campaigns, killed=True)
        return NightlyRun("", verdicts, campaigns)

    def _plan_all(
        self, found: Survey, names: Iterable[str], verdicts: dict[str, Verdict], *, at_once: bool = False
    ) -> list[str]:
        """Plan models, and return the errors: as in a loop of the pipeline, one that fails stops no other."""
        errors = []
        for name in names:
            try:
                verdicts[name] = self._plan(found, name)
                check_red(found, verdicts[name], at_once=at_once)
            except NeuroshardError as error:
                errors.append(str(error))
        return errors

    def _renew(self, found: Survey) -> None:
        for campaign in found.campaigns:
            for share in augment(found, campaign, self.store):
                self.measure(found, Job(campaign=campaign, share=share, owner=found.owner))
        with patch("neuroshard.nightly.pretrain.pretrain", partial(pretrain, epochs=self.epochs)):
            for number, campaign in enumerate(found.campaigns):
                costs, model = (self.fresh(f"{name}-{number}") for name in ("costs", "model"))
                learn(found, campaign, self.store, costs, model)

    def measure(self, found: Survey, job: Any) -> None:
        asked = found.request.model_dump(include={"backend", "batch_size", "seed"})
        measure(job, self.store, **asked, budget_seconds=self.budget_seconds)

    def _plan(self, found: Survey, name: str) -> Verdict:
        tables, out, released, page = (
            self.fresh(each) for each in ("tables.json", "plan.json", "release.json", "p.html")
        )
        _, searched = plan(found, name, self.store, tables, out)
        with patch("neuroshard.nightly.deploy.report"):
            files = ReleaseFiles(out, tables, released, page)
            return release(found, name, searched, files, self.store)

    def fresh(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder), name)


def tables(count: int, rows: int = 1000) -> tuple[Table, ...]:
    return tuple(Table(name=f"t{i}", rows=rows * (i + 1), dim=64, pooling_factor=2.0 + 3 * i) for i in range(count))


def spec(place: Place, name: str = "ads", file: str = "six.json", **more: Any) -> dict[str, Any]:
    asked = {"name": name, "tables": str(place.folder / file), "devices": 4, "memory": "8GiB", "hardware": "h200"}
    return {**asked, **more}


def lost_on_h100(cases: Path, costs: Path, backend: str, settings: MeasureSettings) -> Any:
    """In place of measure's own: the workers on H100 are lost."""
    if settings.hardware is not None and "H100" in settings.hardware.name:
        raise MeasureError("the workers of 3 cases in a row were lost")
    return measure_run(cases, costs, backend, settings)


def age(store: Path, days: float) -> None:
    """Let so many days go by on the clock of a store in a folder."""
    for path in store.rglob("*"):
        if path.is_file():
            earlier = path.stat().st_mtime - 86400 * days
            os.utime(path, (earlier, earlier))


@contextmanager
def clocks_at(now: datetime) -> Iterator[None]:
    """This machine's clock, as far as nightly runs look at it."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now

    with ExitStack() as stack:
        for module in CLOCKS:
            stack.enter_context(patch(f"neuroshard.{module}.datetime", Clock))
        yield


@contextmanager
def at_write(number: int, do: Callable[[], None]) -> Iterator[None]:
    """At this write to a store in a folder somebody else does something whole."""
    count = [number]
    create = FolderStore.create

    def write(store: FolderStore, key: str, data: bytes) -> bool:
        count[0] -= 1
        if count[0] == -1:
            do()
        return create(store, key, data)

    with patch.object(FolderStore, "create", write):
        yield


@contextmanager
def killed_after(writes: int) -> Iterator[None]:
    """The process dies at this write to the store: it and all that follow do not happen."""
    left = [writes]

    def dying(method: Callable[..., Any]) -> Callable[..., Any]:
        def write(store: FolderStore, key: str, *rest: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return method(store, key, *rest)

        return write

    with ExitStack() as stack:
        for name in WRITES:
            stack.enter_context(patch.object(FolderStore, name, dying(getattr(FolderStore, name))))
        yield
