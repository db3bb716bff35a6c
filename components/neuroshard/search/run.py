"""Sharding task + cost model -> plan.

    neuroshard search tables.json --model model/ --devices 4 --memory 32GiB -o plan.json

`local-search` starts from many greedy placements and improves them until its effort or time is spent; `neuroshard-2023` is the
beam search of the NeuroShard paper (MLSys 2023, arXiv 2305.01868) as published; the rest are heuristics that need no cost model.
"""

import math
import threading
from pathlib import Path

import numpy as np

from neuroshard import __version__
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.analytic import SPREAD
from neuroshard.costmodel.protocol import CostModel
from neuroshard.files.constraints import ConstraintsFile, resolve
from neuroshard.files.disk import check_can_write
from neuroshard.files.plan import read_plan, write_plan
from neuroshard.files.tables import read_tables
from neuroshard.models.open import open_cost_model
from neuroshard.search.algorithms import ALGORITHMS, ROUNDS, ROUNDS_AT_MOST, SEARCHES, Effort, at_least, or_alike
from neuroshard.search.bound.bound import lower_bound
from neuroshard.search.infeasible.feasibility import feasible
from neuroshard.search.problem.current import Held
from neuroshard.search.problem.layout import caveats, make_plan
from neuroshard.search.problem.problem import Placement
from neuroshard.search.problem.state import State
from neuroshard.search.proposers.baselines import Attempt, baseline, baselines
from neuroshard.search.proposers.beam import PAPER, Width
from neuroshard.search.proposers.row_wise import worth_allowing
from neuroshard.search.watch import OnImprovement, Watch


def search(
    task: ShardingTask,
    cost_model: CostModel,
    *,
    algorithm: str = "local-search",
    seed: int = 0,
    rounds: int | None = None,
    time_budget_s: float | None = None,
    on_improvement: OnImprovement | None = None,
    width: Width = PAPER,
    previous: Plan | None = None,
    move_budget_bytes: int | None = None,
    cost_model_error: float | None = None,
    instead: str = "",
    notes: tuple[str, ...] = (),
    stop: threading.Event | None = None,
) -> Plan:
    """The plan whose slowest device is fastest, as far as `algorithm` finds it; with the heuristics' costs beside it.

    Improvement takes so many `rounds`, or, with a time budget, as many as there is time for: the plan then depends on the
    machine, else on the seed alone. `on_improvement` is told the seconds since the search began and the cost in ms of every plan
    that is better than all before. `width` is that of the published search. With a `previous` plan the search starts from it, and
    moves at most `move_budget_bytes` of weights and optimizer state. `cost_model_error` (how far the model's predictions
    lie from measured costs, as a share), `instead` and `notes` go into the plan's provenance. Once `stop` is set, the search
    comes to an end, with the best so far.

    Raises UsageError for what is not an algorithm or no effort, Infeasible where no plan fits or none is found, and what the
    cost model raises where it knows no all-to-all between so many devices.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if time_budget_s is not None and not 0 < time_budget_s < math.inf:
        raise UsageError(
            f"the time budget must be above 0 seconds, not {time_budget_s:g}; leave it out to search to the end"
        )
    if rounds is not None and rounds < 0:
        raise UsageError(f"rounds must be at least 0, not {rounds}")
    width.check()
    if previous is not None and algorithm != "local-search":
        raise UsageError(f"{algorithm} places all tables anew; only local-search starts from a plan")
    if move_budget_bytes is not None and previous is None:
        raise UsageError("a move budget is for a search that starts from a plan; give it with --from")
    watch = Watch(time_budget_s, on_improvement, stop)
    problem, rng = feasible(task, cost_model), np.random.default_rng(seed)
    problem.alone_ms(problem.whole)  # whose costs are none is told before anybody reckons with them
    if len(problem.row_blocks.items):
        if not cost_model.prices_rows:
            raise UsageError(
                "given costs are of whole tables: they do not tell what some of the rows cost; search without --row-wise"
            )
        if algorithm != "local-search":
            notes = (*notes, f"{algorithm} splits tables column-wise only, not row-wise")

    if previous is not None:
        problem.held = Held(problem, previous, move_budget_bytes)
        notes = (*notes, *problem.held.notes)

    heuristics: dict[str, Attempt] = {}
    if algorithm in SEARCHES:
        if rounds is None:
            rounds = ROUNDS if time_budget_s is None else ROUNDS_AT_MOST
        effort = Effort(rounds, width)
        found = SEARCHES[algorithm](problem, effort, rng, watch)
        heuristics = baselines(problem, seed)
        if algorithm == "local-search" and move_budget_bytes is None:
            found = at_least(
                problem, found, [one for one in heuristics.values() if isinstance(one, Placement)], rng, watch
            )
            found = or_alike(problem, found, rng, watch)
    else:
        found = baseline(problem, algorithm, rng)
    state = State.of(problem, found)
    if (
        algorithm == "local-search"
        and previous is None
        and not len(problem.row_blocks.items)
        and cost_model.prices_rows
    ):
        notes = (*notes, *worth_allowing(problem, state))
    if watch.stopped:
        notes = (*notes, "the search was stopped by hand: more of it might have found a better plan")
    provenance = Provenance(
        neuroshard_version=__version__,
        algorithm=algorithm,
        seed=seed,
        rounds=rounds if algorithm == "local-search" and time_budget_s is None else None,
        time_budget_s=time_budget_s if algorithm == "local-search" else None,
        cost_model=cost_model.name,
        cost_model_backend=cost_model.backend,
        cost_model_device=cost_model.device_name,
        cost_model_error=cost_model_error,
        instead=instead,
        notes=(*notes, *caveats(problem, found)),
    )
    bound = lower_bound(problem, state)
    return make_plan(problem, found, heuristics, bound, watch.improvements, provenance)


def run(
    tables_path: Path,
    cost_model: str | Path,
    out: Path,
    *,
    devices: int,
    memory_bytes: tuple[int, ...],
    batch_size: int | None = None,
    algorithm: str = "local-search",
    seed: int = 0,
    rounds: int | None = None,
    time_budget_s: float | None = None,
    constraints: ConstraintsFile | None = None,
    previous: Path | Plan | None = None,
    move_budget_bytes: int | None = None,
    instead: str = "",
    stop: threading.Event | None = None,
) -> Plan:
    """Search a plan for a tables.json with a cost model (see models/open.py), and write it as plan.json.

    `memory_bytes` is one number for each device; `batch_size` is the cost model's unless given; `previous` is a
    plan to start from, or its file; `stop`, once it is set, ends the search. `instead` says why this cost model is not the
    one of the plan's hardware: then it may be off by no less than a guess. Raises InvalidInput, UsageError and Infeasible;
    then nothing is written.
    """
    if len(memory_bytes) != devices:
        raise UsageError(f"memory of {len(memory_bytes)} devices for {devices} devices; give one amount per device")
    check_can_write(out)
    tables, notes = read_tables(tables_path)
    model = open_cost_model(cost_model, batch_size)
    task = ShardingTask.parse(
        {
            "tables": tables,
            "device_memory_bytes": memory_bytes,
            "batch_size": model.batch_size if batch_size is None else batch_size,
            "constraints": resolve(constraints or ConstraintsFile(), tables, "constraints"),
        },
        "the task",
    )
    # The folder's name would make the digests of equal plans differ
    short = tuple(note.replace(str(tables_path), tables_path.name) for note in notes)
    plan = search(
        task,
        model,
        algorithm=algorithm,
        seed=seed,
        rounds=rounds,
        time_budget_s=time_budget_s,
        previous=read_plan(previous) if isinstance(previous, Path) else previous,
        move_budget_bytes=move_budget_bytes,
        cost_model_error=max(model.error_on_unseen_tables or 0.0, SPREAD) if instead else model.error_on_unseen_tables,
        instead=instead or "; ".join(model.stand_ins),
        notes=short,
        stop=stop,
    )
    write_plan(out, plan)
    return plan
