"""Whole nights in this process, on the synthetic backend: the steps that the pipeline calls, one after another."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from neuroshard.augment.night import run as augment
from neuroshard.core.errors import NeuroshardError
from neuroshard.core.nightly import Request, Survey
from neuroshard.fleet.run import TOLERATIONS
from neuroshard.measure.workers.job import run as measure
from neuroshard.nightly.learn import run as learn
from neuroshard.nightly.plan import run as plan
from neuroshard.nightly.release import Verdict, check_red, conclude
from neuroshard.nightly.release import run as release
from neuroshard.nightly.survey import planned_after, planned_at_once
from neuroshard.nightly.survey import run as survey
from neuroshard.pretrain.run import run as pretrain
from neuroshard.store.folder import FolderStore

CLOCKS = ("nightly.survey", "deploy.night", "deploy.run", "search.night")  # who asks what time it is
WRITES = ("create", "swap", "delete")


class Killed(BaseException):
    """The process of a step is gone."""


class Night(NamedTuple):
    """How it ended: "" or the error that made it red; the verdicts by model, and the kinds that were measured or learned."""

    error: str
    verdicts: dict[str, Verdict]
    works: tuple[str, ...]
    killed: bool = False

    @property
    def ends(self) -> dict[str, str]:
        return {name: verdict.end for name, verdict in self.verdicts.items()}

    @property
    def instead(self) -> str:
        """Why the first model's plan is less certain than it could be."""
        return "; ".join(next(iter(self.verdicts.values())).doubts)


class Place:
    """A store, a fleet, models and parameters, over many nights."""

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

    def night(self, **changes: Any) -> Night:
        """One night, with these requests in place of the usual; then a day goes by, by the store's clock too."""
        with clocks_at(self.now):
            found = self._night(Request.parse({**self.request, **changes}, "request"))
        self.a_day_goes_by()
        return found

    def a_day_goes_by(self, days: float = 1.0) -> None:
        self.now += timedelta(days=days)
        for path in Path(self.store).rglob("*"):
            if path.is_file():
                earlier = path.stat().st_mtime - 86400 * days
                os.utime(path, (earlier, earlier))

    def _night(self, request: Request) -> Night:
        (self.folder / "nodes.json").write_text(json.dumps({"items": self.nodes}))
        verdicts: dict[str, Verdict] = {}
        works: tuple[str, ...] = ()
        try:
            found = survey(
                json.dumps(self.models),
                self.store,
                request=request,
                recorded=str(self.folder / "nodes.json"),
                node_selector={},
                tolerations=TOLERATIONS,
                most_pods=self.pods,
                max_age_seconds=self.max_age_seconds,
                max_error=self.max_error,
            )
            works = tuple(work.hardware.name for work in found.works)
            for name in planned_at_once(found, self.store):
                verdicts[name] = self._plan(found, name)
            if found.works:
                self._renew(found)
                for name in planned_after(found):
                    verdicts[name] = self._plan(found, name)
                conclude(found, self.store)
            for verdict in verdicts.values():
                check_red(found, verdict)
        except NeuroshardError as error:
            return Night(str(error), verdicts, works)
        except Killed:
            return Night("", verdicts, works, killed=True)
        return Night("", verdicts, works)

    def _renew(self, night: Survey) -> None:
        for job in augment(night, self.store):
            self.measure(night, job)
        with patch("neuroshard.nightly.learn.pretrain", partial(pretrain, epochs=self.epochs)):
            for number, work in enumerate(night.works):
                costs, model = (self.fresh(f"{name}-{number}") for name in ("costs", "model"))
                learn(night, work, self.store, costs, model)

    def measure(self, night: Survey, job: Any) -> None:
        request = night.request
        measure(
            job,
            self.store,
            backend=request.backend,
            batch_size=request.batch_size,
            budget_seconds=self.budget_seconds,
            seed=request.seed,
        )

    def _plan(self, night: Survey, name: str) -> Verdict:
        tables, out, released, page = (
            self.fresh(each) for each in ("tables.json", "plan.json", "release.json", "p.html")
        )
        _, searched = plan(night, name, self.store, tables, out, algorithm="size")
        with patch("neuroshard.nightly.release.report"):
            return release(
                night, name, searched, out, tables, self.store, released, page, min_gain=None, memory_margin=0.0
            )

    def fresh(self, name: str) -> Path:
        import tempfile

        return Path(tempfile.mkdtemp(dir=self.folder), name)


@contextmanager
def clocks_at(now: datetime) -> Iterator[None]:
    """This machine's clock, as far as nights look at it."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now

    with ExitStack() as stack:
        for module in CLOCKS:
            stack.enter_context(patch(f"neuroshard.{module}.datetime", Clock))
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
