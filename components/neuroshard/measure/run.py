"""Room 2: cases -> costs. `neuroshard measure cases/ --backend cpu --batch-size 512 --budget 3m -o costs/`.

A second run on the same folder continues where the first one stopped: out of budget, interrupted, or killed.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroshard.core.case import Cases, ComputeCase, TierCase
from neuroshard.core.clean import log
from neuroshard.core.cost import COST_OF_KIND, Bench, CollectiveCost, ComputeCost, Cost, Costs
from neuroshard.core.errors import InvalidInput, MeasureError, UsageError
from neuroshard.core.text import agreeing, counted
from neuroshard.measure.backends import BACKENDS, Backend, MeasureSettings, open_backend
from neuroshard.measure.budget import FEWEST_REPEATS, SETS, TRIAL_SETS, Bought, buy, ranks_of, share_of_time, trial
from neuroshard.measure.schedule import DRIFT, Schedule, Step, schedule
from neuroshard.measure.workers.processes import WorkerLost, tried
from neuroshard.progress import progress

if TYPE_CHECKING:
    from neuroshard.files.costs import CostWriter

MOST_ROUNDS = 20  # with more, the error of a label no longer comes from chance
STILL_DISTURBED = 10  # repeated measurements in a row that were disturbed again: the rest waits for a later run
LOST_IN_A_ROW = 3  # cases whose workers were lost: from there on the machine may be at fault, and the run checks that


@dataclass(frozen=True)
class RunSummary:
    """How a run went. Counts are of measurements: one for each case, and a second one for some of them."""

    costs: Costs  # that the run left in its folder
    planned: int
    measured: int  # by this run and those before it
    # by this run: table sets under 0, tables beyond HBM under -1, all-to-alls under their number of ranks
    now_by_ranks: Mapping[int, int]
    impossible: int  # all-to-alls among more ranks than this machine can have
    without_tiers: int  # cases beyond HBM that were left out, and why there are …
    no_tiers: str  # … no tiers here; empty where there are
    seconds: float  # of this run
    drift_case_ms: Sequence[float]

    @property
    def errors(self) -> int:
        """Among the measured."""
        return sum(bool(cost.error) for _, cost in self.costs.every)

    @property
    def disturbed(self) -> int:
        """Labels that were measured while something else kept the machine busy."""
        return sum(cost.disturbed for _, cost in self.costs.compute if cost.round == 0)

    @property
    def repeatability(self) -> dict[str, float | None]:
        """The median relative difference between a first and a later measurement of a case; None where none was."""
        forward, backward = collective_repeatability(self.costs)
        compute = compute_repeatability(self.costs)
        return {"compute": compute, "forward all-to-alls": forward, "backward all-to-alls": backward}

    def as_json(self) -> dict[str, Any]:
        """What was measured, and how well it repeats, as `measure --json` prints it."""
        counts = (
            "planned",
            "measured",
            "errors",
            "impossible",
            "without_tiers",
            "no_tiers",
            "seconds",
            "drift",
            "disturbed",
        )
        names = ("compute", "forward_collective", "backward_collective")
        twice = {f"{name}_repeatability": own for name, own in zip(names, self.repeatability.values(), strict=True)}
        return {"now_by_ranks": dict(self.now_by_ranks), **{name: getattr(self, name) for name in counts}, **twice}

    @property
    def drift(self) -> float | None:
        """How much slower the drift case was in the second half of the run than in the first: the medians; None for fewer than
        four samples."""
        taken, half = self.drift_case_ms, len(self.drift_case_ms) // 2
        return statistics.median(taken[-half:]) / statistics.median(taken[:half]) - 1 if half >= 2 else None

    @property
    def now(self) -> int:
        """What this run measured."""
        return sum(self.now_by_ranks.values())

    @property
    def left(self) -> int:
        """What a later run would still measure."""
        return self.planned - self.measured

    def __str__(self) -> str:
        text = [
            f"{self.measured} of {self.planned} measured ({self.now} now, in {self.seconds:.0f} s), "
            f"{counted(self.errors, 'error')}"
        ]
        if self.now:
            text.append(f"now: {_kinds(self.now_by_ranks)}")
        if self.left and not self.now:
            # workers start, and a first run finds out how fast the machine is in calm
            text.append(
                f"the start took the whole budget: run it again, as the next start into this folder may be faster, or give more "
                f"than {math.ceil(self.seconds)}s"
            )
        elif self.left:
            text.append(f"the budget is used up with {self.left} left: run it again to continue")
        if self.disturbed:
            disturbed = agreeing(self.disturbed, "label", "was", "were")
            text.append(f"{disturbed} measured while the machine was disturbed, and marked so")
        if self.impossible:
            text.append(f"{counted(self.impossible, 'all-to-all')} left out, of more ranks than this machine can have")
        if self.without_tiers:
            text.append(f"{counted(self.without_tiers, 'case')} beyond HBM left out: {self.no_tiers}")
        for name, value in self.repeatability.items():
            if value is not None:
                text.append(f"{name} measured again differ by {value:.1%} (median)")
        if self.drift is not None:
            text.append(f"drift {self.drift:+.1%}")
        return "; ".join(text)


def _kinds(by_ranks: Mapping[int, int]) -> str:
    """`310 table sets, 62 all-to-alls of 4 ranks`."""
    return ", ".join(
        f"{counted(count, 'all-to-all')} of {ranks:,} ranks"
        if ranks > 0
        else f"{counted(count, 'case')} beyond HBM"
        if ranks < 0
        else counted(count, "table set")
        for ranks, count in by_ranks.items()
    )


def compute_repeatability(costs: Costs) -> float | None:
    """Median of |later / first - 1| of forward + backward, over the table sets measured twice.

    Leaves out a disturbed repetition of an undisturbed label: it says nothing about the noise of that label.
    """
    first = {cost.case_id: cost for _, cost in costs.compute if cost.round == 0 and not cost.error}
    pairs = [
        (first[cost.case_id], cost)
        for _, cost in costs.compute
        if cost.round == 1 and not cost.error and cost.case_id in first
    ]
    return _median_difference([(one.total_ms, two.total_ms) for one, two in pairs if one.disturbed >= two.disturbed])


def collective_repeatability(costs: Costs) -> tuple[float | None, float | None]:
    """The same for all-to-alls, forward and backward, over all devices of those measured twice."""
    first = {cost.case_id: cost for _, cost in costs.collective if cost.round == 0 and not cost.error}
    pairs = [(first[c.case_id], c) for _, c in costs.collective if c.round == 1 and not c.error and c.case_id in first]
    forward = [times for one, two in pairs for times in zip(one.forward_ms or (), two.forward_ms or (), strict=True)]
    backward = [times for one, two in pairs for times in zip(one.backward_ms or (), two.backward_ms or (), strict=True)]
    return _median_difference(forward), _median_difference(backward)


def _median_difference(pairs: Sequence[tuple[float, float]]) -> float | None:
    return statistics.median(abs(again / first - 1) for first, again in pairs if first) if pairs else None


def measure(
    steps: Sequence[Step], backend: Backend, deadline: float = math.inf, before: Iterable[Step] = ()
) -> Iterator[tuple[Step, Cost]]:
    """Each step with its cost, until `deadline` on the monotonic clock. Steps that succeeded `before` count as such here.

    A lost worker is replaced and its case is tried again. A case that loses a second worker is a cost with an error. That cost
    is held back until another case succeeds: after LOST_IN_A_ROW lost cases, a case of the same kind that succeeded before is
    measured again, to see whether the machine is at fault. Raises MeasureError if that one is lost too, if no case has
    succeeded, or if the backend cannot measure.
    """
    lost: list[tuple[Step, Cost]] = []
    succeeded = {step.kind: step for step in before}
    for chunk in in_chunks(steps, lambda: backend.concurrency):
        if time.monotonic() >= deadline:
            break
        together = _together(chunk, backend)
        for place, step in enumerate(chunk):
            try:
                cost = together[place] if together else _measured(step, backend)
                succeeded[step.kind] = step
            except WorkerLost as error:
                lost.append((step, _failed(step, str(error))))
                if len(lost) < LOST_IN_A_ROW:
                    continue
                if not _succeeds(succeeded.get(step.kind), backend):
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


def _succeeds(step: Step | None, backend: Backend) -> bool:
    """Whether a worker survives this step."""
    try:
        return step is not None and bool(_measured(step, backend))
    except WorkerLost:
        return False


def in_chunks(steps: Sequence[Step], concurrency: Callable[[], int]) -> Iterator[list[Step]]:
    """The steps in order, up to `concurrency` table sets in a chunk. Any other case and the drift case are chunks alone.

    `concurrency` is called at every step, since it falls while table sets take long.
    """
    chunk: list[Step] = []
    for step in steps:
        alone = step.kind != "compute" or step.round_ == DRIFT
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
    """The costs of several table sets. None for a single one, and where a worker was lost: each is then tried alone."""
    cases = [(step.case, max(step.round_, 0)) for step in chunk if isinstance(step.case, ComputeCase)]
    if len(cases) < 2:
        return None
    try:
        return backend.compute_many(cases)
    except WorkerLost:
        return None


def _measured(step: Step, backend: Backend) -> Cost:
    """The cost of a step. Raises WorkerLost."""
    case, round_ = step.case, max(step.round_, 0)
    if isinstance(case, ComputeCase):
        return tried(lambda: backend.compute(case, round_))
    if isinstance(case, TierCase):
        return tried(lambda: backend.beyond_hbm(case, round_))
    return tried(lambda: backend.all_to_all(case, round_))


def _failed(step: Step, error: str) -> Cost:
    return COST_OF_KIND[step.kind](case_id=step.case.case_id, round=max(step.round_, 0), error=error)


def run(
    cases_path: Path,
    out: Path,
    backend: str,
    settings: MeasureSettings,
    *,
    share: tuple[int, int] = (1, 1),
    rounds: int = 1,
) -> RunSummary:
    """Measure a folder of cases into a folder of costs, within the budget of the settings, and report how it went.

    A `share` of (2, 8) is every eighth case, starting with the second; `merge_costs` joins what eight machines measured.
    With several `rounds` all cases are measured once a round, and the mean is the label. With one round, a few cases are
    measured again, which shows how repeatable labels are. Raises UsageError, MeasureError, and InvalidInput, also where another
    bench began `out`; `out` then holds what was measured before.
    """
    from neuroshard.files.cases import read_cases
    from neuroshard.files.costs import CostWriter, read_costs
    from neuroshard.files.disk import check_can_write

    began = time.monotonic()
    if not 1 <= rounds <= MOST_ROUNDS:
        raise UsageError(f"rounds must be 1 to {MOST_ROUNDS}, not {rounds}")
    check_can_write(out, folder=True)
    cases = read_cases(cases_path)
    begun = _begun(out, backend)
    deadline = math.inf if settings.budget_seconds is None else began + settings.budget_seconds
    with (
        closing(open_backend(backend, cases, settings, begun)) as opened,
        CostWriter(out, opened.bench, cases.tables, _device_counts(cases)) as writer,
    ):
        planned = schedule(_share_of(cases, share), settings.seed, rounds)
        possible = planned.only(lambda step: can_measure(step, opened))
        left_out = [step for step in planned.steps if not can_measure(step, opened)]
        left = possible.only(lambda step: (step.case.case_id, step.round_) not in writer.done[step.kind])
        this_run = _Run(writer, opened, deadline, possible.steps)
        this_run.measure_all(left)
        _measure_disturbed_again(writer, planned.steps, opened, deadline)
    return RunSummary(
        costs=read_costs(out),
        planned=_rows(possible.steps),
        measured=_rows(possible.steps) - _rows(left.steps) + this_run.rows,
        now_by_ranks={kind: len(seconds) for kind, seconds in sorted(this_run.seconds_of.items())},
        impossible=sum(step.kind == "collective" for step in left_out),
        without_tiers=sum(step.kind == "tiers" for step in left_out),
        no_tiers=opened.no_tiers,
        seconds=time.monotonic() - began,
        drift_case_ms=this_run.drift_case_ms,
    )


def _begun(out: Path, backend: str) -> Bench | None:
    """The bench of the costs that are in `out` already.

    Raises InvalidInput if it is of another known backend, before one is opened: that starts workers and waits for calm, and
    continues with the memory limit of `out`, which another backend may lack.
    """
    from neuroshard.files.costs import read_manifest

    path = out / "costs.json"
    begun = read_manifest(out).bench if path.exists() else None
    if begun is not None and begun.backend != backend and backend in BACKENDS:
        raise InvalidInput(
            f"{path}: was measured on another bench (backend: {begun.backend} there, {backend} now); give another -o"
        )
    return begun


def _share_of(cases: Cases, share: tuple[int, int]) -> Cases:
    first, of = share
    own = {kind: getattr(cases, kind)[first - 1 :: of] for kind in ("compute", "collective", "tiers")}
    return cases.model_copy(update=own)


def _succeeded(planned: Sequence[Step], writer: "CostWriter") -> list[Step]:
    """The planned steps that were measured without an error, in this run or before it."""
    return [step for step in planned if (step.case.case_id, step.round_) in writer.succeeded[step.kind]]


def _disturbed_once(planned: Sequence[Step], writer: "CostWriter") -> list[Step]:
    """The next free round of each table set that has one time only, and a disturbed one.

    It is round 1, unless that ended in an error: a row of a round that is there already would not be kept.
    """
    once = (step.case for step in planned if step.round_ == 0 and isinstance(step.case, ComputeCase))
    again = [case for case in once if writer.disturbed.get(case.case_id) == [True]]
    return [Step(case, next(n for n in count() if (case.case_id, n) not in writer.done["compute"])) for case in again]


class _Run:
    """What this run has measured so far: rows written, ms of the drift case (not written), and seconds of the steps."""

    def __init__(self, writer: "CostWriter", backend: Backend, deadline: float, planned: Sequence[Step]) -> None:
        self.writer, self.backend, self.deadline, self.planned = writer, backend, deadline, planned
        self.rows = self.errors = self.disturbed = 0
        self.drift_case_ms: list[float] = []
        # Of each step by its kind, scaled to the usual number of repeats. What a chunk takes counts at its first step.
        self.seconds_of: dict[int, list[float]] = {}
        self.first_chunk = min(backend.concurrency, TRIAL_SETS)  # number of table sets

    def measure_all(self, left: Schedule) -> None:
        """Measure and write until the deadline.

        With a deadline, the first few cases decide what the time buys. That is decided again once the least is measured.
        """
        total, usual = _rows(left.steps), self.backend.repeats
        limited = not math.isinf(self.deadline)
        ends_in = max(self.deadline - time.monotonic(), 0.0) if limited else None
        with progress(f"measure on {self.backend.bench.hardware.name}", total, "runs", ends_in) as self.bar:
            if not total:
                return
            if not limited:
                self._measure(left.steps, usual)
                return
            self._measure(trial(left.steps), min(FEWEST_REPEATS, usual))
            bought = self._buy(left, usual)
            log(str(bought))
            least = len(self._unmeasured(left.least))
            self._measure(bought.steps[:least], bought.repeats)
            bought = self._buy(left, usual)
            self._measure(bought.steps, bought.repeats)

    def _unmeasured(self, steps: Sequence[Step]) -> list[Step]:
        """The steps without a cost so far; none where only the drift case is left."""
        done = self.writer.done
        found = [step for step in steps if (step.case.case_id, step.round_) not in done[step.kind]]
        return found if _rows(found) else []

    def _buy(self, left: Schedule, usual_repeats: int) -> Bought:
        # the first table sets also draw lookups that later ones reuse
        first = self.first_chunk
        each = {
            kind: statistics.mean(taken[first:] if kind == SETS and len(taken) > first else taken)
            for kind, taken in self.seconds_of.items()
        }
        seconds, backend = max(self.deadline - time.monotonic(), 0.0), self.backend
        return buy(
            self._unmeasured(left.least), self._unmeasured(left.others), each, seconds, usual_repeats, backend.apart
        )

    def _measure(self, steps: Sequence[Step], repeats: int) -> None:
        usual, self.backend.repeats = self.backend.bench.repeats, repeats
        began = time.monotonic()
        for step, cost in measure(steps, self.backend, self.deadline, _succeeded(self.planned, self.writer)):
            self._add(step, cost)
            now = time.monotonic()
            if step.round_ != DRIFT:
                self.seconds_of.setdefault(ranks_of(step), []).append((now - began) / share_of_time(repeats, usual))
            began = now

    def _add(self, step: Step, cost: Cost) -> None:
        if step.round_ == DRIFT:
            self.drift_case_ms += [cost.total_ms] if isinstance(cost, ComputeCost) and not cost.error else []
            return
        self.writer.add(step.case, cost)
        self.rows += 1
        self.errors += cost.error is not None
        self.disturbed += not isinstance(cost, CollectiveCost) and cost.disturbed
        self.bar.advance(1, f"{counted(self.errors, 'error')}, {self.disturbed / self.rows:.0%} disturbed")


def _device_counts(cases: Cases) -> tuple[int, ...]:
    """Numbers of ranks of the all-to-alls, in order."""
    return tuple(sorted({len(case.device_dims) for case in cases.collective}))


def _measure_disturbed_again(writer: "CostWriter", planned: Sequence[Step], backend: Backend, deadline: float) -> None:
    """Measure disturbed table sets once more, until STILL_DISTURBED in a row show that the machine has not calmed down."""
    steps = _disturbed_once(planned, writer)
    if not steps or time.monotonic() >= deadline:
        return
    in_a_row = calm = 0
    with progress("measure again what was disturbed", len(steps), "cases") as bar:
        for step, cost in measure(steps, backend, deadline, _succeeded(planned, writer)):
            assert isinstance(cost, ComputeCost)
            writer.add(step.case, cost)
            in_a_row = in_a_row + 1 if cost.disturbed else 0
            calm += not cost.disturbed
            bar.advance(1, f"{calm} calm now")
            if in_a_row == STILL_DISTURBED:
                return


def _rows(steps: Sequence[Step]) -> int:
    """How many of the steps become rows of the costs: all but those of the drift case."""
    return sum(step.round_ != DRIFT for step in steps)


def can_measure(step: Step, backend: Backend) -> bool:
    """Whether a backend has the devices or the tiers that the step needs."""
    if isinstance(step.case, TierCase):
        return not backend.no_tiers
    most = backend.most_devices
    return isinstance(step.case, ComputeCase) or most is None or len(step.case.device_dims) <= most
