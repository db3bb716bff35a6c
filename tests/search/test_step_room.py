"""Laws of tasks near the limit of their memory: what is found fits with its step, and what is said to help does."""

import re
from typing import Any

import numpy as np
import pytest

import neuroshard as ns
from neuroshard.core.errors import Infeasible
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.units import parse_bytes
from neuroshard.models.open import open_cost_model
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings

SETTINGS = SearchSettings(rounds=4, try_row_wise=True)


def drawn(seed: int, full: float) -> ShardingTask:
    """A task whose tables, uncut and with the least that a step takes, fill so much of its devices."""
    rng = np.random.default_rng(seed)
    devices, sequences = int(rng.choice([2, 4])), rng.random() < 0.4
    tables = tuple(
        Table(
            name=f"t{number}",
            rows=int(np.exp(rng.normal(9, 1.5))) + 10,
            dim=int(rng.choice([16, 32, 64, 128])),
            pooling_factor=float(round(np.exp(rng.normal(1, 1)), 2)),
            pooling="none" if sequences and number % 3 == 0 else "sum",
        )
        for number in range(int(rng.integers(6, 13)))
    )
    precision = {"forward": "fp16", "backward": "fp16"} if rng.random() < 0.3 else None
    given = {"tables": tables, "batch_size": 2048, "step_ledger": 1}
    more = {"collective_precision": precision, "pipeline": str(rng.choice(["none", "sparse-dist", "semi-sync"]))}
    roomy = ShardingTask.model_validate({**given, **more, "device_memory_bytes": (2**40,) * devices})
    memory = int((roomy.need_bytes / devices + roomy.least_step_bytes) / full)
    return roomy.model_copy(update={"device_memory_bytes": (memory,) * devices})


@pytest.mark.parametrize("full", [0.6, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("seed", [9, *range(20, 24)])
def test_a_plan_fits_with_its_step_and_what_is_said_to_help_does(seed: int, full: float) -> None:
    task, model = drawn(seed, full), open_cost_model("analytic:h100", 2048)
    try:
        plan = search(task, model, SETTINGS)
    except Infeasible as error:
        said = re.search(r"(?:give each device |give )([\d.]+ [KMG]iB) more", str(error))
        more = parse_bytes(said[1].replace(" ", "")) if said is not None else 0
        roomier = task.model_copy(update={"device_memory_bytes": tuple(b + more for b in task.device_memory_bytes)})
        plan = search(roomier, model, SETTINGS)
    for memory, peak, usable in zip(plan.memory_bytes(), plan.step_peaks(), plan.task.usable_bytes, strict=True):
        assert peak.nbytes < memory <= usable
    assert plan.lower_bound_ms is None or plan.lower_bound_ms <= plan.cost_ms
    assert all(one.cost_ms is None or one.cost_ms >= plan.cost_ms for one in plan.baselines)


def test_where_a_step_needs_far_more_than_tables_it_is_said_how_much() -> None:
    given = [{"name": "t0", "rows": 10, "dim": 4, "pooling_factor": 100}]
    options: dict[str, Any] = {"devices": 2, "batch_size": 4096, "pipeline": "prefetch", "rounds": 1, "quiet": True}
    with pytest.raises(Infeasible, match=r"give each device [\d.]+ MiB more") as error:
        ns.search(given, "analytic:h100", memory=2**20, **options)
    more = str(error.value).partition("give each device ")[2].partition(" more")[0]
    assert ns.search(given, "analytic:h100", memory=2**20 + parse_bytes(more), **options).shards


def test_what_is_kept_free_for_a_step_is_no_assumption_of_a_bound() -> None:
    task, model = drawn(21, 0.8), open_cost_model("analytic:h100", 2048)
    assert not [why for why in search(task, model, SETTINGS).bound_assumptions if "free" in why]


def test_where_what_is_kept_beside_row_blocks_leaves_no_room_none_are_made() -> None:
    """A device with less than nothing would never be relieved of enough: a search went on for ever."""
    tables = [{"name": f"t{i}", "rows": 20_000 // (i + 1), "dim": 64, "pooling_factor": 20.0} for i in range(2)]
    tables += [{"name": f"tiny{i}", "rows": 20, "dim": 64, "pooling_factor": 2.0} for i in range(8)]
    hosts: dict[str, Any] = {"devices": 4, "domain": 2, "local_world_size": 2, "network": "10Gb/s"}
    step: dict[str, Any] = {"batch_size": 512, "pipeline": "none", "allocator_share": 0}
    plan = ns.search(
        tables, "analytic:h100", memory="3MiB", host_memory="1GiB", data_parallel=["auto"], rounds=2, **hosts, **step
    )
    assert max(plan.memory_bytes()) <= 3 * 2**20
