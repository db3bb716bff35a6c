"""How far labels repeat: random cases of a folder of costs, measured again on this machine.

neuroshard measure --verify costs/ -n 100
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from neuroshard.core.case import Cases, CollectiveCase, ComputeCase
from neuroshard.core.cost import Bench, CollectiveCost, ComputeCost, Cost, Costs
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.label import labels, rounds_of
from neuroshard.core.text import counted
from neuroshard.files.costs import difference, read_costs, read_manifest
from neuroshard.measure.backends import MeasureSettings, of_bench, open_backend
from neuroshard.measure.machine import with_hidden_facts
from neuroshard.measure.run import can_measure, measure
from neuroshard.measure.schedule import Step
from neuroshard.progress import progress

CALM = "compute, undisturbed"
ENOUGH_CALM = 10  # cases
# Largest median difference from the label. An all-to-all waits for its slowest process, so any other load shows in it.
TOLERANCES = {"compute": 0.05, CALM: 0.05, "all-to-all, forward": 0.10, "all-to-all, backward": 0.10}
KINDS = ("compute", CALM, "compute, forward", "compute, backward", "all-to-all, forward", "all-to-all, backward")
VERIFYING = 99  # the round of these measurements; no costs have it, so the synthetic backend draws new noise
SEED = 1  # of the choice of cases; lookups have the bench's seed


@dataclass(frozen=True)
class Verified:
    """Relative differences |again / label - 1| by KINDS; "compute" is forward + backward."""

    differences: dict[str, list[float]]
    cases: int
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def agrees(self) -> bool:
        """Whether there is a difference to judge, and no median exceeds its tolerance."""
        judged = {what: values for what, values in self.differences.items() if self._is_judged(what)}
        return bool(judged) and all(float(np.median(values)) <= TOLERANCES[what] for what, values in judged.items())

    def _is_judged(self, what: str) -> bool:
        """Compute is judged by the cases that were undisturbed both times, if there are enough."""
        calm = len(self.differences[CALM]) >= ENOUGH_CALM
        return what in TOLERANCES and bool(self.differences[what]) and what != ("compute" if calm else CALM)

    def __str__(self) -> str:
        lines = [f"{self.cases} cases measured again: median and 90th percentile of the difference from the label"]
        for what, values in self.differences.items():
            if values:
                median, p90 = np.quantile(values, [0.5, 0.9])
                limit = TOLERANCES.get(what, 0.0)
                verdict = (
                    f"   at most {limit:.0%}: {'yes' if median <= limit else 'NO'}" if self._is_judged(what) else ""
                )
                lines.append(f"  {what:<22} {median:7.1%} {p90:7.1%}   {len(values)} values{verdict}")
        lines += [f"error: {error}" for error in self.errors[:3]]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def run(
    folder: Path, *, count: int, timeout_seconds: float = MeasureSettings.timeout_seconds, traces: Path | None = None
) -> Verified:
    """Measure `count` random cases of the costs again, with the settings of their bench.

    Raises UsageError, InvalidInput where this machine is of another kind or the costs have no label, and what a backend raises.
    """
    if count < 1:
        raise UsageError(f"the number of cases to verify must be at least 1, not {count}")
    costs = read_costs(folder)
    chosen = _chosen(costs, count)
    if not chosen:
        raise InvalidInput(f"{folder}: holds no label to verify")
    cases = Cases(
        tables=read_manifest(folder).tables,
        compute=tuple(case for case, _ in chosen if isinstance(case, ComputeCase)),
        collective=tuple(case for case, _ in chosen if isinstance(case, CollectiveCase)),
        max_dim=0,
        seed=costs.bench.seed,
    )
    settings = MeasureSettings(
        **of_bench(costs.bench),
        memory_limit_bytes=costs.bench.memory_limit_bytes,
        traces=traces,
        timeout_seconds=timeout_seconds,
    )
    differences: dict[str, list[float]] = {kind: [] for kind in KINDS}
    errors = []
    label_of = {cost.case_id: cost for _, cost in chosen}
    with closing(open_backend(costs.bench.backend, cases, settings, costs.bench)) as opened:
        notes = _same_kind(costs.bench, opened.bench, folder)
        # all-to-alls last, since table sets are measured several at once
        steps = sorted((Step(case, VERIFYING) for case, _ in chosen), key=lambda step: step.kind != "compute")
        possible = [step for step in steps if can_measure(step, opened)]
        with progress(f"verify on {opened.bench.hardware.name}", len(possible), "cases") as bar:
            for step, cost in measure(possible, opened):
                if cost.error:
                    errors.append(f"case {cost.case_id}: {cost.error}")
                else:
                    _compare(label_of[step.case.case_id], cost, differences)
                bar.advance(1, counted(len(errors), "error"))
    return Verified(differences, len(possible) - len(errors), tuple(errors), notes)


def _chosen(costs: Costs, count: int) -> list[tuple[ComputeCase | CollectiveCase, ComputeCost | CollectiveCost]]:
    """`count` random labels, those of compute and all-to-all in proportion, in random order."""
    known = [*labels(rounds_of(costs.compute)), *labels(rounds_of(costs.collective))]
    order = np.random.default_rng(SEED).permutation(len(known))[:count]
    return [known[place] for place in order]


def _same_kind(bench: Bench, here: Bench, folder: Path) -> tuple[str, ...]:
    """Notes on what differs between the benches. Raises InvalidInput for other hardware, whose costs cannot be compared."""
    hardware = with_hidden_facts(here.hardware, bench.hardware)
    if not bench.hardware.machine:  # it was hidden then
        hardware = hardware.model_copy(update={"machine": ""})
    here = here.model_copy(update={"hardware": hardware})
    if bench.hardware.fingerprint != here.hardware.fingerprint:
        raise InvalidInput(
            f"{folder}: was measured on other hardware ({difference(bench.hardware, here.hardware)}); verify it on its own kind"
        )
    capped = {"capped_tables": (), "row_cap_bytes": None}
    one, other = bench.model_copy(update=capped), here.model_copy(update=capped)
    return () if one == other else (f"the bench is not quite the same: {difference(one, other)}",)


def _compare(label: ComputeCost | CollectiveCost, again: Cost, into: dict[str, list[float]]) -> None:
    if isinstance(label, ComputeCost) and isinstance(again, ComputeCost):
        into["compute"] += _differences([label.total_ms], [again.total_ms])
        if not label.disturbed and not again.disturbed:
            into[CALM] += into["compute"][-1:]
        into["compute, forward"] += _differences([label.forward_ms or 0], [again.forward_ms or 0])
        into["compute, backward"] += _differences([label.backward_ms or 0], [again.backward_ms or 0])
    elif isinstance(label, CollectiveCost) and isinstance(again, CollectiveCost):
        into["all-to-all, forward"] += _differences(label.forward_ms or (), again.forward_ms or ())
        into["all-to-all, backward"] += _differences(label.backward_ms or (), again.backward_ms or ())


def _differences(label: Sequence[float], again: Sequence[float]) -> list[float]:
    return [abs(b / a - 1) for a, b in zip(label, again, strict=True) if a > 0]
