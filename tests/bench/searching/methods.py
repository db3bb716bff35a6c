"""Every method on one task, with what it took: a dictionary that goes into the run's JSON lines.

Peers that need torch import it when they run, so that the memory of a process that searches is its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.searching.scoring import Row, cost_ms, fault, rows_of
from neuroshard.core.errors import Infeasible
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import CostModel
from neuroshard.measure.formula import Formula
from neuroshard.search.proposers.baselines import KEYS
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tuning import TUNING, Tuning
from neuroshard.search.watch import Watch

Figures = dict[str, Any]
SWITCHES = [
    one.name for one in fields(Tuning) if isinstance(one.default, bool) and one.name != "hints"
]  # parts that a search can leave out
OTHER_SEED = "nothing (another seed)"  # how much of a difference is chance


@dataclass
class Found:
    """Rows of a plan, or none; what the method itself says of it."""

    rows: Sequence[Row] | None
    said: Figures = field(default_factory=dict)


def ours(task: ShardingTask, model: CostModel, budget_s: float | None = None) -> Found:
    """With the trace of its improvements in CPU seconds, and its proven bound."""
    trace: list[tuple[float, float]] = []
    began = time.process_time()
    plan = search(
        task,
        model,
        SearchSettings(time_budget_s=budget_s, simplicity=0),
        watch=Watch(budget_s, on_improvement=lambda _, cost: trace.append((time.process_time() - began, cost))),
    )
    return Found(rows_of(plan), {"trace": trace, "bound_ms": plan.lower_bound_ms})


def ablated(task: ShardingTask, model: CostModel, switch: str | None = None, seed: int = 0) -> Found:
    """Ours of its usual rounds, without one of its parts."""
    tuning = TUNING if switch is None else replace(TUNING, **dict[str, Any]({switch: False}))
    return Found(rows_of(search(task, model, SearchSettings(seed=seed, simplicity=0, tuning=tuning))))


def by_name(algorithm: str) -> Callable[[ShardingTask, CostModel], Found]:
    return lambda task, model: Found(rows_of(search(task, model, SearchSettings(algorithm=algorithm))))


def one_at_a_time(task: ShardingTask, model: TrainedCostModel) -> Found:
    """The published search, a prediction at a time."""
    from bench.searching.peers_paper import Predictor, PublishedSearch

    published = PublishedSearch(task, Predictor(task, model))
    found = published.search()
    if found is None:
        raise Infeasible("paper found no plan")
    return Found(found[1], {"predictions": published.asked})


def rows_too(task: ShardingTask, model: CostModel, budget_s: float | None = None) -> Found:
    """Ours where it may split all tables row-wise."""
    allowed = task.constraints.model_copy(update={"row_wise": True})
    return ours(task.model_copy(update={"constraints": allowed}), model, budget_s)


def torchrec(task: ShardingTask, model: CostModel, all_types: bool = False) -> Found:
    """The best of its plans by the cost model, over the widths of a column split; with rows split where all types are allowed."""
    from bench.searching import peers_torchrec

    types = peers_torchrec.ALL_TYPES if all_types else peers_torchrec.COLUMN_TYPES
    asked = (peers_torchrec.plan(task, width, types)[0] for width in peers_torchrec.WIDTHS)
    plans = [rows for rows in asked if rows is not None]
    if not plans:
        raise Infeasible("TorchRec's planner found no plan")
    return Found(min(plans, key=lambda rows: cost_ms(model, task, rows)))


METHODS: dict[str, Callable[..., Found]] = {
    "local-search": ours,
    "local-search, row-wise too": rows_too,
    "neuroshard-2023": by_name("neuroshard-2023"),
    "neuroshard-2023, one at a time": one_at_a_time,
    **{name: by_name(name) for name in KEYS},
    "all parts": ablated,
    OTHER_SEED: partial(ablated, seed=1),
    **{f"without {switch}": partial(ablated, switch=switch) for switch in SWITCHES},
    "torchrec": torchrec,
    "torchrec, all types": lambda task, model: torchrec(task, model, all_types=True),
}


LIBRARIES = {
    "neuroshard-2023, one at a time": "bench.searching.peers_paper",
    "torchrec": "bench.searching.peers_torchrec",
    "torchrec, all types": "bench.searching.peers_torchrec",
}


def run(method: str, task: ShardingTask, model: CostModel, **options: Any) -> Figures:
    """Costs by the nets and by the truth, CPU and wall seconds, memory. A plan that breaks a rule counts as none.

    What a method imports is there before the clock starts, as NumPy is for ours: torch takes 1 to 2 s of CPU to load.
    """
    if method in LIBRARIES:
        import_module(LIBRARIES[method])
    before = peak_bytes()
    cpu, wall = time.process_time(), time.perf_counter()
    error = None
    try:
        found = METHODS[method](task, model, **options)
    except Infeasible as infeasible:
        found, error = Found(None), str(infeasible)[:200]
    figures: Figures = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_bytes": peak_bytes(),
        "peak_before_bytes": before,
        **found.said,
    }
    if found.rows is not None and (error := fault(task, found.rows)) is None:
        figures["nets_ms"] = cost_ms(model, task, found.rows)
        figures["truth_ms"] = cost_ms(Formula(task.batch_size), task, found.rows)
        figures["shards"] = len(found.rows)
    return figures | {"error": error}


def peak_bytes() -> int:
    """The most memory that this process has had. Not ru_maxrss, which begins with what its parent had when it was forked."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
