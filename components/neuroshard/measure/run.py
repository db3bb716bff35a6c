"""Room 2: cases -> costs. `neuroshard measure cases/ --backend cpu --batch-size 512 --budget 3m -o costs/`.

Started again on the same folder it goes on where it stopped, whether it was out of budget, interrupted, or killed.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.clean import log
from neuroshard.core.cost import CollectiveCost, ComputeCost, Hardware
from neuroshard.core.errors import MeasureError, UsageError
from neuroshard.core.text import counted
from neuroshard.measure.backends import Backend, Settings, open_backend
from neuroshard.measure.budget import FEWEST_REPEATS, SETS, Bought, buy, kind_of, share_of_time, trial
from neuroshard.measure.schedule import REFERENCE, Schedule, Step, schedule
from neuroshard.measure.summary import Measured, collective_repeatability, compute_repeatability, drift
from neuroshard.measure.worker import WorkerLost, tried
from neuroshard.progress import progress

if TYPE_CHECKING:
    from neuroshard.files.costs import CostWriter

MOST_ROUNDS = 20  # by then it is not chance that keeps a label from being true
NO_CALMER = 10  # second looks in a row that were disturbed too: then the others are left to a later run
LOST_IN_A_ROW = 3  # cases; then it may be the machine instead, and the run stops if it is

Cost = ComputeCost | CollectiveCost


def measure(steps: Sequence[Step], backend: Backend, deadline: float = math.inf) -> Iterator[tuple[Step, Cost]]:
    """Each step with its cost, until `deadline` on the monotonic clock.

    A lost worker is replaced and the case tried again; then it is a cost with an error, told only once a worker has lived
    through another case. Where LOST_IN_A_ROW cases in a row lose theirs, one of their kind that went well is measured again,
    to see who is at fault. Raises MeasureError where that is lost too, or there is none, or the backend cannot measure.
    """
    lost: list[tuple[Step, Cost]] = []
    went_well: dict[str, Step] = {}
    for chunk in in_chunks(steps, lambda: backend.concurrency):
        if time.monotonic() >= deadline:
            break
        together = _together(chunk, backend)
        for place, step in enumerate(chunk):
            try:
                cost = together[place] if together else _measured(step, backend)
                went_well[step.kind] = step
            except WorkerLost as error:
                lost.append((step, _failed(step, str(error))))
                if len(lost) < LOST_IN_A_ROW:
                    continue
                if not _can_be_had(went_well.get(step.kind), backend):
                    raise MeasureError(
                        f"the workers of {len(lost)} cases in a row were lost, the last: {error}"
                    ) from None
                yield from lost
                lost.clear()
                continue
            yield from lost
            lost.clear()
            yield step, cost
    yield from lost


def _can_be_had(step: Step | None, backend: Backend) -> bool:
    """Does a worker live through this step?"""
    try:
        return step is not None and bool(_measured(step, backend))
    except WorkerLost:
        return False


def in_chunks(steps: Sequence[Step], concurrency: Callable[[], int]) -> Iterator[list[Step]]:
    """The steps in order, up to `concurrency` table sets at a time. Alone are an all-to-all, and the reference kernel:
    always on one device.

    `concurrency` is asked whenever there is a step: of long ones fewer may be wanted.
    """
    chunk: list[Step] = []
    for step in steps:
        alone = step.kind == "collective" or step.round_ == REFERENCE
        if chunk and (alone or len(chunk) >= concurrency()):
            yield chunk
            chunk = []
        chunk.append(step)
        if alone:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _together(chunk: Sequence[Step], backend: Backend) -> list[ComputeCost] | None:
    """The costs of several table sets; None where there is but one, or a worker was lost: then each is to be tried alone."""
    cases = [(step.case, max(step.round_, 0)) for step in chunk if isinstance(step.case, ComputeCase)]
    if len(cases) < 2:
        return None
    try:
        return backend.compute_concurrency(cases)
    except WorkerLost:
        return None


def _measured(step: Step, backend: Backend) -> Cost:
    """The cost of a step. Raises WorkerLost."""
    case, round_ = step.case, max(step.round_, 0)
    if isinstance(case, ComputeCase):
        return tried(lambda: backend.compute(case, round_))
    return tried(lambda: backend.all_to_all(case, round_))


def _failed(step: Step, error: str) -> Cost:
    kind = ComputeCost if isinstance(step.case, ComputeCase) else CollectiveCost
    return kind(case_id=step.case.case_id, round=max(step.round_, 0), error=error)


def run(
    cases_path: Path,
    out: Path,
    *,
    backend: str,
    batch_size: int,
    budget_seconds: float | None = None,
    warmup: int = Settings.warmup,
    repeats: int = Settings.repeats,
    optimizer: str = Settings.optimizer,
    threads: int = Settings.threads,
    memory_limit_bytes: int | None = None,
    traces: Path | None = None,
    seed: int = 0,
    timeout_seconds: float = Settings.timeout_seconds,
    share: tuple[int, int] = (1, 1),
    rounds: int = 1,
    hardware: Hardware | None = None,
) -> Measured:
    """Measure a folder of cases into a folder of costs, for `budget_seconds` at most, and say how it went.

    `batch_size` is the global batch of a step. Of `share` (2, 8) every eighth case is measured, from the second on: what
    eight machines measure, merge.py makes one. In several `rounds` all cases are measured as often, a round after another, and
    the mean is the label; with one, a few cases are measured again, which tells how repeatable labels are. `hardware` is the
    kind that this machine must be of, where that matters. Raises UsageError, InvalidInput (also where `out` was begun on
    another bench) and MeasureError; what was measured before is then in `out`.
    """
    from neuroshard.files.cases import read_cases
    from neuroshard.files.costs import CostWriter, read_costs, read_manifest
    from neuroshard.files.disk import check_can_write

    began = time.monotonic()
    if not 1 <= rounds <= MOST_ROUNDS:
        raise UsageError(f"rounds must be 1 to {MOST_ROUNDS}, not {rounds}")
    check_can_write(out, folder=True)
    settings = Settings(
        batch_size=batch_size,
        warmup=warmup,
        repeats=repeats,
        optimizer=optimizer,
        threads=threads,
        memory_limit_bytes=memory_limit_bytes,
        traces=traces,
        seed=seed,
        timeout_seconds=timeout_seconds,
        budget_seconds=budget_seconds,
        hardware=hardware,
    )
    cases = read_cases(cases_path)
    begun = read_manifest(out).bench if (out / "costs.json").exists() else None
    with (
        closing(open_backend(backend, cases, settings, begun)) as opened,
        CostWriter(out, opened.bench, cases.tables, _device_counts(cases)) as writer,
    ):
        first, of = share
        planned = schedule(
            cases.model_copy(
                update={"compute": cases.compute[first - 1 :: of], "collective": cases.collective[first - 1 :: of]}
            ),
            seed,
            rounds,
        )
        possible = planned.only(lambda step: _possible(step, opened.most_devices))
        left = possible.only(lambda step: (step.case.case_id, step.round_) not in writer.done[step.kind])
        run = _Run(writer, opened, math.inf if budget_seconds is None else began + budget_seconds)
        run.measure_all(left)
        _look_again(writer, planned.steps, opened, run.deadline)

    costs = read_costs(out)
    forward, backward = collective_repeatability(costs)
    return Measured(
        planned=_rows(possible.steps),
        measured=_rows(possible.steps) - _rows(left.steps) + run.rows,
        now=run.rows,
        now_by_ranks={kind: len(seconds) for kind, seconds in sorted(run.seconds_of.items())},
        errors=sum(bool(cost.error) for _, cost in costs.compute)
        + sum(bool(cost.error) for _, cost in costs.collective),
        impossible=_rows(planned.steps) - _rows(possible.steps),
        seconds=time.monotonic() - began,
        compute_repeatability=compute_repeatability(costs),
        forward_collective_repeatability=forward,
        backward_collective_repeatability=backward,
        drift=drift(run.reference_ms),
        disturbed=sum(cost.disturbed for _, cost in costs.compute if cost.round == 0),
    )


def second_looks(planned: Sequence[Step], disturbed: Mapping[str, Sequence[bool]]) -> list[Step]:
    """One more measurement, in the round that is free, of each table set that was disturbed the only time it was measured."""
    once = (step.case for step in planned if step.round_ == 0 and isinstance(step.case, ComputeCase))
    return [Step(case, 1) for case in once if tuple(disturbed.get(case.case_id, ())) == (True,)]


class _Run:
    """What one run has measured so far: rows written, ms of the reference kernel (not written), and how long steps took."""

    def __init__(self, writer: "CostWriter", backend: Backend, deadline: float) -> None:
        self.writer, self.backend, self.deadline = writer, backend, deadline
        self.rows = self.errors = self.disturbed = 0
        self.reference_ms: list[float] = []
        self.seconds_of: dict[
            int, list[float]
        ] = {}  # of the steps of each kind, as a step with the usual repeats takes

    def measure_all(self, left: Schedule) -> None:
        """Measure and write until the deadline. Where there is one, what its time buys is decided by the first few cases, and
        once more when the least is measured."""
        total, usual = _rows(left.steps), self.backend.repeats
        limited = not math.isinf(self.deadline)
        ends_in = max(self.deadline - time.monotonic(), 0.0) if limited else None
        with progress(f"measure on {self.backend.bench.hardware.name}", total, "cases", ends_in) as self.bar:
            if not total:
                return
            if not limited:
                self._measure(left.steps, usual)
                return
            self._measure(trial(left.steps), min(FEWEST_REPEATS, usual))
            bought = self._buy(left, usual)
            log(str(bought))
            least = len(self._still(left.least))
            self._measure(bought.steps[:least], bought.repeats)
            bought = self._buy(left, usual)
            self._measure(bought.steps, bought.repeats)

    def _still(self, steps: Sequence[Step]) -> list[Step]:
        """Those that are not measured yet."""
        done = self.writer.done
        found = [step for step in steps if (step.case.case_id, step.round_) not in done[step.kind]]
        return found if _rows(found) else []

    def _buy(self, left: Schedule, usual_repeats: int) -> Bought:
        # the first table set also draws lookups that the next ones find drawn
        each = {
            kind: statistics.mean(taken[1:] if kind == SETS and len(taken) > 1 else taken)
            for kind, taken in self.seconds_of.items()
        }
        seconds, backend = max(self.deadline - time.monotonic(), 0.0), self.backend
        return buy(self._still(left.least), self._still(left.others), each, seconds, usual_repeats, backend.apart)

    def _measure(self, steps: Sequence[Step], repeats: int) -> None:
        usual, self.backend.repeats = self.backend.bench.repeats, repeats
        began = time.monotonic()
        for step, cost in measure(steps, self.backend, self.deadline):
            self._add(step, cost)
            now = time.monotonic()
            if step.round_ != REFERENCE:
                self.seconds_of.setdefault(kind_of(step), []).append((now - began) / share_of_time(repeats, usual))
            began = now

    def _add(self, step: Step, cost: Cost) -> None:
        if isinstance(step.case, ComputeCase) and isinstance(cost, ComputeCost):
            if step.round_ == REFERENCE:
                self.reference_ms += [] if cost.error else [cost.total_ms]
                return
            self.writer.add_compute(step.case, cost)
        elif isinstance(step.case, CollectiveCase) and isinstance(cost, CollectiveCost):
            self.writer.add_collective(step.case, cost)
        self.rows += 1
        self.errors += cost.error is not None
        self.disturbed += isinstance(cost, ComputeCost) and cost.disturbed
        self.bar.advance(1, f"{counted(self.errors, 'error')}, {self.disturbed / self.rows:.0%} disturbed")


def _device_counts(cases: Cases) -> tuple[int, ...]:
    """Numbers of ranks whose all-to-alls are asked for."""
    return tuple(sorted({len(case.device_dims) for case in cases.collective}))


def _look_again(writer: "CostWriter", planned: Sequence[Step], backend: Backend, deadline: float) -> None:
    """Measure once more what was disturbed, in the round that is free, unless the machine is no calmer now."""
    steps = second_looks(planned, writer.disturbed)
    if not steps or time.monotonic() >= deadline:
        return
    in_a_row = calm = 0
    with progress("measure again what was disturbed", len(steps), "cases") as bar:
        for step, cost in measure(steps, backend, deadline):
            assert isinstance(step.case, ComputeCase)
            assert isinstance(cost, ComputeCost)
            writer.add_compute(step.case, cost)
            in_a_row = in_a_row + 1 if cost.disturbed else 0
            calm += not cost.disturbed
            bar.advance(1, f"{calm} calm now")
            if in_a_row == NO_CALMER:
                return


def _rows(steps: Sequence[Step]) -> int:
    """How many of the steps give a row of the costs."""
    return sum(step.round_ != REFERENCE for step in steps)


def _possible(step: Step, most_devices: int | None) -> bool:
    """Are there devices enough for the step?"""
    return isinstance(step.case, ComputeCase) or most_devices is None or len(step.case.device_dims) <= most_devices
