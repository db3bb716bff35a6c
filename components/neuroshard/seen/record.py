"""What the steps of a trainer took, as client/seen/watch.py measures them, beside what the plan promised."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Annotated, NamedTuple

from pydantic import Field, field_validator

from neuroshard.core.cost import Milliseconds, NumberOfBytes
from neuroshard.core.errors import InvalidInput
from neuroshard.core.hardware_names import is_same_name
from neuroshard.core.operator_limits import device_of
from neuroshard.core.plan import Plan
from neuroshard.core.release import MODEL_NAME, Sealed
from neuroshard.core.task import ShardingTask
from neuroshard.core.text import counted
from neuroshard.core.units import format_bytes
from neuroshard.core.value import Digest, Moment, Value
from neuroshard.costmodel.analytic import sheet_of
from neuroshard.seen.corrected import are_bounded, factors_of, suffix

# of a step's embeddings, in the order in which they are made; an exchange includes what it waits for other ranks
PARTS = ("lookup_forward", "exchange_forward", "exchange_backward", "lookup_backward")
CPU = "CPU"  # the device of trainers on CPUs; of others it is its maker's name
Quantiles = tuple[Milliseconds, Milliseconds, Milliseconds]  # of steps: 10th of 100, median, 90th of 100


class RankSeen(Value):
    """What one rank's steps took: `PARTS`, their sum, and what of the exchanges was waiting for other ranks, in ms.

    `allocated_bytes` and `reserved_bytes` are the most so far by CUDA's caching allocator, None on a CPU.
    """

    parts: dict[str, Quantiles]
    embeddings_ms: Quantiles
    waiting_ms: Quantiles
    allocated_bytes: NumberOfBytes | None = None
    reserved_bytes: NumberOfBytes | None = None

    @field_validator("parts")
    @classmethod
    def _all_parts(cls, parts: dict[str, Quantiles]) -> dict[str, Quantiles]:
        if parts.keys() != {*PARTS}:
            raise ValueError(f"must be of {', '.join(PARTS)}, not of {', '.join(sorted(parts))!r:.80}")
        return parts


class Seen(Sealed):
    """What `steps` timed steps of a job took up to `time`: whole steps (`step_ms`), and the embeddings of the slowest rank.

    `ranks` has every rank of the trainer, in order; `versions` those of torch, FBGEMM and TorchRec. There are no ids in it and no
    weights. A job writes one now and then, and each has the steps since the one before it.
    """

    model: Annotated[str, Field(pattern=MODEL_NAME)]
    plan_digest: Digest
    job: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    time: Moment
    steps: Annotated[int, Field(ge=1)]
    step_ms: Quantiles
    embeddings_ms: Quantiles
    ranks: Annotated[tuple[RankSeen, ...], Field(min_length=1, max_length=4096)]
    device: str
    batch_size: Annotated[int, Field(ge=1)] | None = None  # samples a step over all ranks, where the trainer says
    versions: dict[str, str] = Field(default_factory=dict)


class Compared(NamedTuple):
    """One part of a step: ms promised and seen, in the mean of the ranks."""

    part: str
    promised_ms: float
    seen_ms: float


class Truth(NamedTuple):
    """A plan's promise beside what its trainers saw. Ranks are of a trainer; with groups, one promise is that of several.

    `embeddings_ms` are the medians, over what jobs wrote, of the quantiles of the slowest rank. `memory` is a line on the rank
    whose peak is furthest above its promise, "" where no GPU was seen.
    """

    promised_ms: float
    promised_rank: int
    embeddings_ms: Quantiles
    rank: int
    parts: tuple[Compared, ...]
    waiting_ms: float
    step_ms: float
    memory: str
    steps: int
    jobs: int
    time: str
    note: str = ""

    @property
    def line(self) -> str:
        """In one line: what was seen for what was promised."""
        seen = self.embeddings_ms[1]
        off = f"{seen / self.promised_ms - 1:+.0%}, " if self.promised_ms else ""
        where = "; ".join(filter(None, [f"{counted(self.steps, 'step')} of {counted(self.jobs, 'job')}", self.note]))
        return f"trainers saw {seen:.4g} ms for {self.promised_ms:.4g} promised ({off}{where})"

    def __str__(self) -> str:
        low, middle, high = self.embeddings_ms
        ranks = "" if self.rank == self.promised_rank else f", rank {self.promised_rank} was promised to be"
        lines = [
            f"seen in {counted(self.steps, 'step')} of {counted(self.jobs, 'job')}, the last at {self.time}",
            f"{'ms':<38} promised      seen",
            _line("slowest rank's embeddings", self.promised_ms, middle),
            f"  in 8 of 10 steps {low:.3f} to {high:.3f}",
            f"  rank {self.rank} is the slowest{ranks}",
            *(_line(f"{part}, mean of ranks", promised, seen) for part, promised, seen in self.parts),
            f"  of it waiting for other ranks {self.waiting_ms:>26.3f}",
            f"{'whole step':<47}{self.step_ms:>10.3f}",
        ]
        return "\n".join([*lines, *filter(None, [self.memory, self.note])])


def _line(what: str, promised: float, seen: float) -> str:
    return f"{what:<38}{promised:>9.3f}{seen:>10.3f}" + (f" {seen / promised - 1:>+7.0%}" if promised else "")


def truth_of(plan: Plan, seen: Sequence[Seen]) -> Truth:
    """The plan's promise beside what its trainers saw, which is at least one. Raises InvalidInput for a plan without predictions,
    and for what other ranks saw."""
    if other := next((one for one in seen if not comparable(plan, one)), None):
        planned = f"plan {plan.digest()[:12]} promises no parts of a step, or to {plan.task.ranks:,} ranks"
        raise InvalidInput(f"{planned}; job {other.job} had {len(other.ranks):,}")
    ranks, places, costs = plan.task.ranks, devices_of_ranks(plan.task), plan.predicted or ()
    promised = [cost.total_ms - cost.averaging_ms for cost in costs]  # averaging of replicas is not timed
    totals = [median(one.ranks[rank].embeddings_ms[1] for one in seen) for rank in range(ranks)]

    def seen_of(*parts: str) -> float:
        by_rank = ([sum(one.ranks[rank].parts[part][1] for part in parts) for one in seen] for rank in range(ranks))
        return fmean(map(median, by_rank))

    def promised_of(part: str) -> float:
        return fmean(getattr(costs[place], part) for place in places)

    slowest = max(range(ranks), key=lambda rank: promised[places[rank]])
    return Truth(
        promised_ms=promised[places[slowest]],
        promised_rank=slowest,
        embeddings_ms=tuple(median(one.embeddings_ms[place] for one in seen) for place in range(3)),  # type: ignore[arg-type]
        rank=totals.index(max(totals)),
        parts=(
            Compared("lookups", promised_of("compute_ms"), seen_of("lookup_forward", "lookup_backward")),
            Compared("exchange of outputs", promised_of("forward_collective_ms"), seen_of("exchange_forward")),
            Compared("exchange of gradients", promised_of("backward_collective_ms"), seen_of("exchange_backward")),
        ),
        waiting_ms=fmean(median(one.ranks[rank].waiting_ms[1] for one in seen) for rank in range(ranks)),
        step_ms=median(one.step_ms[1] for one in seen),
        memory=_memory(plan, seen, places),
        steps=sum(one.steps for one in seen),
        jobs=len({one.job for one in seen}),
        time=max(one.time for one in seen),
        note=next((said for one in seen if (said := _other_batch(plan, one))), ""),
    )


def comparable(plan: Plan, seen: Seen) -> bool:
    """Whether the plan promises parts, and to as many ranks as saw something."""
    return plan.predicted is not None and len(seen.ranks) == plan.task.ranks


def _on_its_device(plan: Plan, seen: Seen) -> bool:
    by = plan.provenance
    promised, trained = device_of(by.cost_model_backend, by.cost_model), "cpu" if seen.device == CPU else "cuda"
    if promised != trained or promised == "cpu":
        return promised == trained
    if by.cost_model_backend == "analytic":
        return factors_of(by.cost_model or "")[0] == f"analytic:{sheet_of(seen.device)}"
    return is_same_name(seen.device, by.cost_model_device or "")


def _other_batch(plan: Plan, seen: Seen) -> str:
    planned, trained = plan.task.global_batch_size, seen.batch_size or plan.task.global_batch_size
    return "" if planned == trained else f"trained with batches of {trained:,}, and planned for {planned:,}"


def devices_of_ranks(task: ShardingTask) -> list[int]:
    """Of each rank of a trainer the device of the plan that it is."""
    groups = task.groups
    return [groups.of_rank(rank, task.devices)[1] if groups else rank for rank in range(task.ranks)]


def promised_tensors(plan: Plan) -> list[int]:
    """What tensors take of each device, in bytes: all but what CUDA's allocator holds beyond a step's."""
    each = zip(plan.memory_bytes(), plan.step_peaks(), strict=True)
    return [nbytes - peak.causes.get("allocator", 0) for nbytes, peak in each]


def _memory(plan: Plan, seen: Sequence[Seen], places: Sequence[int]) -> str:
    allocated = [max(one.ranks[rank].allocated_bytes or 0 for one in seen) for rank in range(len(places))]
    if not any(allocated) or not plan.task.counts_steps:
        return ""
    of_devices = promised_tensors(plan)
    said = [max(of_devices[place], 1) for place in places]
    rank = max(range(len(places)), key=lambda one: allocated[one] / said[one])
    there = f"{format_bytes(allocated[rank])} allocated with its dense layers, {format_bytes(said[rank])} promised"
    return f"memory of rank {rank}: {there} ({allocated[rank] / said[rank] - 1:+.0%})"


class Correction(NamedTuple):
    """By how much a cost model's times are multiplied, of lookups and of exchanges, so that its promises are what jobs saw.

    `error` and `corrected_error` are mean |promised / seen - 1| of the embeddings of a job, without waiting; the latter of each
    job by the factors of the others, None for a single job.
    """

    lookups: float
    exchanges: float
    jobs: int
    error: float
    corrected_error: float | None

    @property
    def helps(self) -> bool:
        known = are_bounded(self.lookups, self.exchanges)
        return known and (self.corrected_error is None or self.corrected_error < self.error)

    @property
    def suffix(self) -> str:
        """What makes of a cost model the corrected one, as `--model` names it."""
        return suffix(self.lookups, self.exchanges)

    def __str__(self) -> str:
        tried = ""
        if self.corrected_error is not None:
            tried = f", {self.corrected_error:.0%} off where each is left out, instead of {self.error:.0%}"
        return f"as {counted(self.jobs, 'job')} saw{tried}"


class OfJob(NamedTuple):
    """Means of the ranks: ms of lookups, and of exchanges without waiting."""

    promised: tuple[float, float]
    seen: tuple[float, float]


def correction(model: str, jobs: Sequence[tuple[Plan, Seen]]) -> Correction | None:
    """The factors for a cost model (its name, uncorrected) from what jobs saw of plans by it, corrected or not; None where there
    is no such job.

    The last of what a job saw counts; jobs of another batch or device than their plan's do not. Factors are medians over jobs.
    """
    by_job: dict[str, OfJob] = {}
    for plan, seen in sorted(jobs, key=lambda one: one[1].time):
        name, by = factors_of(plan.provenance.cost_model or "")
        if name == model and comparable(plan, seen) and not _other_batch(plan, seen) and _on_its_device(plan, seen):
            by_job[seen.job] = of_job(plan, seen, *by)
    every = [one for one in by_job.values() if min(one.promised) > 0 and min(one.seen) > 0]
    if not every:
        return None
    apart = [off_by(one, _factors([*every[:place], *every[place + 1 :]])) for place, one in enumerate(every)]
    error, corrected = fmean(map(off_by, every)), fmean(apart) if len(every) > 1 else None
    return Correction(*_factors(every), len(every), error, corrected)


def of_job(plan: Plan, seen: Seen, lookups_by: float = 1.0, exchanges_by: float = 1.0) -> OfJob:
    """What a job was promised, but for the factors that were in it, and what it saw."""
    costs = plan.predicted or ()
    ready = [cost.compute_ms + cost.backward_collective_ms for cost in costs]
    sent = [
        cost.backward_collective_ms + max(cost.forward_collective_ms - (max(ready) - mine), 0.0)
        for cost, mine in zip(costs, ready, strict=True)
    ]
    lookups = fmean(sum(rank.parts[part][1] for part in ("lookup_forward", "lookup_backward")) for rank in seen.ranks)
    embeddings = fmean(rank.embeddings_ms[1] - rank.waiting_ms[1] for rank in seen.ranks)
    promised = fmean(cost.compute_ms for cost in costs) / lookups_by, fmean(sent) / exchanges_by
    return OfJob(promised, (lookups, max(embeddings - lookups, 0.0)))


def _factors(jobs: Sequence[OfJob]) -> tuple[float, float]:
    if not jobs:
        return 1.0, 1.0
    lookups, exchanges = (median(job.seen[place] / job.promised[place] for job in jobs) for place in (0, 1))
    return lookups, exchanges


def off_by(job: OfJob, factors: tuple[float, float] = (1.0, 1.0)) -> float:
    """|promised / seen - 1| of a job's embeddings, by these factors."""
    return abs(sum(ms * factor for ms, factor in zip(job.promised, factors, strict=True)) / sum(job.seen) - 1)
