"""Sharding task + cost model -> plan.

    neuroshard search tables.json --model model/ --devices 4 --memory 32GiB -o plan.json

`neuroshard` is the beam search of the NeuroShard paper (MLSys 2023, arXiv 2305.01868) made to fit tight memory, then improved
in small steps; `paper` is that search as published; the rest are heuristics that need no cost model.
"""

from pathlib import Path

import numpy as np

from neuroshard import __version__
from neuroshard.core.errors import Infeasible, UsageError
from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.open import error_on_unseen_tables, open_cost_model
from neuroshard.costmodel.protocol import CostModel
from neuroshard.files.plan import write_plan
from neuroshard.files.tables import read_tables
from neuroshard.search.algorithms import ALGORITHMS, SEARCHES
from neuroshard.search.baselines import KEYS, baseline
from neuroshard.search.beam import Effort
from neuroshard.search.feasibility import check_feasible
from neuroshard.search.layout import Attempt, caveats, make_plan
from neuroshard.search.problem import Placement, Problem

IMPROVE_STEPS = 500


def search(
    task: ShardingTask,
    cost_model: CostModel,
    *,
    algorithm: str = "neuroshard",
    seed: int = 0,
    candidates: int = 10,
    beam: int = 3,
    depth: int = 10,
    grid: int = 11,
    improve: bool = True,
    cost_model_error: float | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan whose slowest device is fastest, as far as `algorithm` finds it; with the heuristics' costs beside it.

    `candidates`, `beam`, `depth` and `grid` are the paper's N, K, L and M. Only `random` uses the seed. `cost_model_error`
    (how far the model's predictions lie from measured costs, as a share) and `notes` go into the plan's provenance.

    Raises UsageError for what is not an algorithm, Infeasible where no plan fits or none is found, and what the cost model
    raises where it knows no exchange between so many devices.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    for name, value, least in (
        ("candidates", candidates, 1),
        ("beam", beam, 1),
        ("depth", depth, 0),
        ("grid", grid, 1),
    ):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    check_feasible(task)
    problem, rng = Problem(task, cost_model), np.random.default_rng(seed)

    heuristics = {name: _attempt(problem, name, rng) for name in ([algorithm] if algorithm in KEYS else KEYS)}
    if algorithm in SEARCHES:
        effort = Effort(candidates, beam, depth, grid, IMPROVE_STEPS if improve else 0)
        solved = [placement for placement in heuristics.values() if isinstance(placement, Placement)]
        found: Attempt = SEARCHES[algorithm](problem, effort, solved)
    else:
        found = heuristics.pop(algorithm)
    if isinstance(found, str):
        raise Infeasible(found)
    provenance = Provenance(
        neuroshard_version=__version__,
        algorithm=algorithm,
        seed=seed,
        cost_model=cost_model.name,
        cost_model_backend=cost_model.backend,
        cost_model_device=cost_model.device_name,
        cost_model_error=cost_model_error,
        notes=(*notes, *caveats(problem, found)),
    )
    return make_plan(problem, found, heuristics, provenance)


def _attempt(problem: Problem, name: str, rng: np.random.Generator) -> Attempt:
    try:
        return baseline(problem, name, rng)
    except Infeasible as error:
        return str(error)


def run(
    tables_path: Path,
    cost_model: str | Path,
    out: Path,
    *,
    devices: int,
    memory_bytes: tuple[int, ...],
    batch_size: int | None = None,
    algorithm: str = "neuroshard",
    seed: int = 0,
    improve: bool = True,
) -> Plan:
    """Search a plan for a tables.json with a cost model (see costmodel/open.py), and write it as plan.json.

    `memory_bytes` is one number for each device; `batch_size` is the cost model's unless given. Raises InvalidInput,
    UsageError and Infeasible; then nothing is written.
    """
    if len(memory_bytes) != devices:
        raise UsageError(f"memory of {len(memory_bytes)} devices for {devices} devices; give one amount per device")
    tables, notes = read_tables(tables_path)
    model = open_cost_model(cost_model, batch_size)
    task = ShardingTask.parse(
        {
            "tables": tables,
            "device_memory_bytes": memory_bytes,
            "batch_size": model.batch_size if batch_size is None else batch_size,
        },
        str(tables_path),
    )
    # The folder's name would make the digests of equal plans differ
    short = tuple(note.replace(str(tables_path), tables_path.name) for note in notes)
    plan = search(
        task,
        model,
        algorithm=algorithm,
        seed=seed,
        improve=improve,
        cost_model_error=error_on_unseen_tables(model),
        notes=short,
    )
    write_plan(out, plan)
    return plan
