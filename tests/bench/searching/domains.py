"""Plans over several hosts: ours, peers that are told the same hosts and network, and one sharding type for all.

All are priced by one datasheet's cost model on the task's network, so this compares searches, not machines.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.searching import peers_hugectr, peers_torchrec, tasks
from bench.searching.scoring import Row
from neuroshard.core.constraints import Constraints
from neuroshard.core.errors import Infeasible
from neuroshard.core.plan import Shard
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import DATASHEETS, Analytic
from neuroshard.costmodel.pricing import price_shards
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tuning import TUNING

# (tables, devices, devices of a domain, GB/s of a device to other domains) of each world: from two hosts with a port a GPU to
# eight with a shared one, and racks whose domains are several hosts. TorchRec's planner takes minutes for larger ones
WORLDS = (
    (40, 16, 8, 50), (60, 16, 8, 25), (80, 16, 4, 50), (60, 32, 8, 50), (100, 32, 8, 25),
    (120, 32, 16, 25), (100, 64, 8, 50), (120, 64, 8, 25), (150, 64, 32, 12.5), (80, 32, 4, 12.5),
)  # fmt: skip
WIDEST = 2_000  # devices x tables above which TorchRec's planner is asked at one width of column shards only
SEED = 22_000  # of the first world; looked at three times: the first time two were lost to grids, which no search made then
ABLATION_SEEDS = (89_000, 90_000)  # new ones for each ablation that decides
ABLATION_DEVICES = 32  # at most
HARDWARE = "h100"
OURS, COPIES_TOO = "local-search", "local-search, copies too"
NO_DOMAINS = "local-search, column-wise and row-wise"
FOR_ALL = {"row-wise for all": ("row-wise",), "table-row-wise for all": ("table-row-wise",)}


def worlds(folder: Path, seed: int = SEED) -> list[ShardingTask]:
    """The tasks, with tables of a public set in the paper's widths, and memory to spare."""
    found = []
    for place, (count, devices, domain, rate) in enumerate(WORLDS):
        task = tasks.drawn(count, devices, seed + place, folder, tightness=4.0, largest=1.5)
        topology = Topology(domain=domain, local_world_size=min(domain, 8), network_bytes_per_s=rate * 1e9)
        found.append(task.model_copy(update={"topology": topology}))
    return found


def ablation_worlds(folder: Path) -> list[ShardingTask]:
    """The smaller worlds with other tables."""
    drawn = [task for seed in ABLATION_SEEDS for task in worlds(folder, seed)]
    return [task for task in drawn if task.devices <= ABLATION_DEVICES]


def without(task: ShardingTask, switch: str | None, seed: int = 0) -> tuple[float, float]:
    """Ms of our plan without one part of the search, and CPU seconds that the search took."""
    tuning = TUNING if switch is None else replace(TUNING, **dict[str, Any]({switch: False}))
    settings = SearchSettings(seed=seed, simplicity=0, try_row_wise=True, tuning=tuning)
    began = time.process_time()
    plan = search(task, Analytic(HARDWARE, task.batch_size), settings)
    assert plan.cost_ms is not None
    return plan.cost_ms, time.process_time() - began


def costs(task: ShardingTask) -> Mapping[str, float | None]:
    """Ms of each method's plan; None where it found none."""
    model = Analytic(HARDWARE, task.batch_size)
    found: dict[str, float | None] = {
        OURS: _ours(task, model, None),
        COPIES_TOO: _ours(task, model, None, try_data_parallel=True),
        NO_DOMAINS: _ours(task, model, ("column-wise", "row-wise")),
    }
    widths = peers_torchrec.WIDTHS if task.devices * len(task.tables) <= WIDEST else peers_torchrec.WIDTHS[:1]
    rows = [peers_torchrec.plan(task, width, peers_torchrec.HOST_TYPES)[0] for width in widths]
    found["TorchRec's planner, all types"] = min((_priced(task, model, one) for one in rows if one), default=None)
    memory = DATASHEETS[HARDWARE].memory * 1e3
    found["HugeCTR's rule"] = _cheapest(model, peers_hugectr.plans(task, memory, 0))
    found["HugeCTR's rule, copies too"] = _cheapest(
        model, peers_hugectr.plans(task, memory, peers_hugectr.COPIED_BYTES)
    )
    for name, types in FOR_ALL.items():
        found[name] = _all_split(task, model, types)
    return found


def _ours(
    task: ShardingTask, model: Analytic, types: Sequence[str] | None, try_data_parallel: bool = False
) -> float | None:
    constraints = Constraints.model_validate({"sharding_types": types})
    settings = SearchSettings(try_row_wise=True, try_data_parallel=try_data_parallel)
    try:
        plan = search(task.model_copy(update={"constraints": constraints}), model, settings)
    except Infeasible:
        return None
    return plan.cost_ms


def _all_split(task: ShardingTask, model: Analytic, types: Sequence[str]) -> float | None:
    """All tables that can be, split one way; table-row-wise ones dealt to domains by their lookups, the rest whole."""
    domain = task.devices if task.topology is None or types == ("row-wise",) else task.topology.domain
    load, shards = [0.0] * (task.devices // domain), list[Shard]()
    for table in sorted(task.tables, key=lambda table: -table.pooling_factor * table.dim):
        place = min(range(len(load)), key=load.__getitem__)
        load[place] += table.pooling_factor * table.dim
        if not table.has_rows_for(domain):
            shards.append(Shard(table=table.name, rows=table.rows, dim=table.dim, device=place * domain))
            continue
        shards += [
            Shard(table=table.name, row_offset=first, rows=rows, dim=table.dim, device=place * domain + device)
            for device, (first, rows) in enumerate(table.row_blocks(domain))
        ]
    prices = price_shards(model, task, shards)
    return None if prices is None else float(prices.total_ms.max())


def _cheapest(model: Analytic, plans: Iterable[tuple[ShardingTask, list[Shard]]]) -> float | None:
    """Ms of the cheapest of these plans by our cost model, whichever their own rule would take; None where none fits."""
    prices = [price_shards(model, task, shards) for task, shards in plans]
    return min((float(each.total_ms.max()) for each in prices if each is not None), default=None)


def _priced(task: ShardingTask, model: Analytic, rows: Sequence[Row]) -> float:
    """Ms of a peer's plan: what its shards are matters, not where in the table they begin."""
    shards = [Shard(table=task.tables[t].name, rows=n, dim=dim, device=device) for t, dim, device, n in rows]
    prices = price_shards(model, task, shards)
    assert prices is not None
    return float(prices.total_ms.max())
