"""The corpus: sharding tasks that together cover every option of a search, in pairs, and all kinds of tables.

A task is what a user can write: tables as in tables.json, keyword arguments of `neuroshard.search`, and for some the arguments of
the search that made their previous plan. So any version of the package can run it. Nothing here imports the package.
"""

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
Table = dict[str, Any]
GIVEN = "given:{folder}/costs.json"  # replaced by `given_costs` of the task's tables
NETS = str(Path(__file__).parents[2] / "golden" / "model-1")
H100 = "analytic:h100"


class Task(NamedTuple):
    """`memory` of the options is text or bytes, or `full`: the share of all devices' memory that weights and state fill.

    `before` are options in which the search of the previous plan differs, and `new` tables that it does not have. `refused` names
    the class of the error and facts of its message. A `timed` plan depends on the machine.
    """

    name: str
    tables: list[Table]
    options: dict[str, Any]
    model: str = H100
    full: float = 0.0
    before: dict[str, Any] | None = None
    new: int = 0
    refused: tuple[str, ...] = ()
    timed: bool = False

    def asked(self) -> dict[str, Any]:
        """Keyword arguments of the search, but for its tables and previous plan."""
        if not self.full:
            return self.options
        group = self.options.get("group_size")
        devices = group if isinstance(group, int) else self.options["devices"]
        return {**self.options, "memory": math.ceil(sum(map(nbytes, self.tables)) / devices / self.full)}


def nbytes(table: Table) -> int:
    """Weights and state, as docs/formats.md counts them."""
    element = table.get("element_bytes", 4) + table.get("optimizer_bytes_per_element", 0)
    row = table["dim"] * element + table.get("optimizer_bytes_per_row", 4)
    return int(table["rows"] * row)


def tables(
    seed: int,
    count: int,
    *,
    most: float = 6.5,
    dims: tuple[int, ...] = (16, 32, 64, 128),
    zipf: bool = False,
    every: dict[str, int] | None = None,
    **fields: Any,
) -> list[Table]:
    """Drawn: up to 10^most rows, and 1 to 40 lookups a sample. `every` says of kinds of table that every n-th is of it."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        table: Table = {
            "name": f"t{number}",
            "rows": int(10 ** rng.uniform(2, most)),
            "dim": rng.choice(dims),
            "pooling_factor": round(10 ** rng.uniform(0, 1.6), 1),
        }
        if zipf:
            table["access"] = f"zipf:{rng.uniform(0.6, 1.3):.2f}"
        for kind, step in (every or {}).items():
            if number % step == 0:
                table |= KINDS[kind](table)
        found.append({**table, **fields})
    return found


def _ordered(table: Table) -> Table:
    """With a row order: a tenth of the rows have 80 % of the lookups."""
    hot = max(1, table["rows"] // 10)
    order = {
        "ids_digest": "",
        "rows": table["rows"],
        "hot_rows": hot,
        "lookup_share": 0.8,
        "time": "2026-01-01T00:00:00Z",
    }
    return {"row_order": order}


KINDS: dict[str, Any] = {
    "mean": lambda table: {"pooling": "mean"},
    "weighted": lambda table: {"weighted": True},
    "fp16": lambda table: {"element_bytes": 2},
    "adam": lambda table: {"optimizer_bytes_per_row": 0, "optimizer_bytes_per_element": 8},
    "sequence": lambda table: {"pooling": "none", "dim": 64, "module": "sequences"},
    "two features": lambda table: {
        "features": [
            {"name": f"{table['name']}_{side}", "pooling_factor": table["pooling_factor"] / 2} for side in "ab"
        ]
    },
    "uneven": lambda table: {"lookups_by_id": [0.4, 0.3, 0.2, 0.1]},
    "ordered": _ordered,
    "map": lambda table: {
        "rows": 64 * (table["rows"] // 64 + 64),
        "id_map": {"kind": "mpzch", "bytes_per_row": 16, "buckets": 64},
    },
    "sorted map": lambda table: {
        "rows": 64 * (table["rows"] // 64 + 64),
        "id_map": {"kind": "mch", "bytes_per_row": 24, "bytes_per_lookup": 8.0, "bytes_per_rank": 4096},
    },
}


def given_costs(some: list[Table]) -> dict[str, Any]:
    """As a printed plan has them."""
    rng = random.Random(len(some))
    return {
        "format_version": 1,
        "batch_size": 4096,
        "fixed_ms": 0.1,
        "tables": [{"name": table["name"], "cost_ms": round(rng.uniform(0.01, 2.0), 4)} for table in some],
        "narrow": [{"below": 32, "factor": 1.6}, {"below": 64, "factor": 1.2}],
    }


def of(devices: int, **more: Any) -> dict[str, Any]:
    """Options; the batch is 1,024 samples a device unless said."""
    return {"devices": devices, "memory": "80GiB", "batch_size": 1024 * devices, **more}


def hosts(devices: int, domain: int, **more: Any) -> dict[str, Any]:
    return of(devices, domain=domain, local_world_size=domain, network="50GB/s,0.02ms", **more)


ALL_KINDS = {"mean": 5, "weighted": 7, "fp16": 3, "two features": 4, "adam": 11}
SEQUENCES = {"sequence": 3}
CACHED = {"match": "t0", "tier": "cached", "cached_rows": 100}

TASKS: list[Task] = [
    # nothing but memory
    Task("2 devices", tables(1, 5), of(2)),
    Task("3 devices, odd", tables(2, 11), of(3, memory=16 * GIB)),
    Task("64 devices", tables(3, 200), of(64, rounds=2)),
    Task("few tables, many devices", tables(4, 6), of(32, rounds=10)),
    Task("memory of each device", tables(5, 20), of(4, memory=["8GiB", "8GiB", "4GiB", "2GiB"])),
    Task("90 % full", tables(6, 40), of(8, batch_size=1024), full=0.9),
    Task("95 % full", tables(7, 60), of(8, batch_size=512, rounds=10), full=0.95),
    Task("99 % full", tables(8, 80), of(4, batch_size=64, rounds=10), full=0.99),
    Task("95 % full of wide tables", tables(9, 12, dims=(256, 512, 1024), most=5.5), of(8, batch_size=64, rounds=5), full=0.95),
    Task("fuller than full", tables(10, 30), of(4, batch_size=64), full=1.02, refused=("Infeasible", "short")),
    Task("one table larger than a device", tables(11, 5, most=7), of(2, memory="64MiB"), refused=("Infeasible", "short")),
    # all kinds of pooled tables, and pipelines
    Task("kinds", tables(12, 30, every=ALL_KINDS), of(8)),
    Task("kinds, 92 % full", tables(13, 30, every=ALL_KINDS), of(8, batch_size=512), full=0.92),
    Task("no pipeline", tables(14, 24, every=ALL_KINDS), of(4, pipeline="none")),
    Task("pipeline base", tables(15, 24), of(4, pipeline="base", memory="4GiB")),
    Task("pipeline sparse-dist", tables(16, 24, every=SEQUENCES), of(4, pipeline="sparse-dist", memory="8GiB")),
    Task("pipeline sparse-dist-lite", tables(17, 24), of(4, pipeline="sparse-dist-lite", data_parallel=["auto"])),
    Task("pipeline fused-sparse-dist", tables(18, 24), of(4, pipeline="fused-sparse-dist"), full=0.5),
    Task("pipeline semi-sync", tables(19, 24, every=SEQUENCES), of(4, pipeline="semi-sync"), full=0.2),
    Task(
        "pipeline semi-sync, copies", tables(19, 24),
        of(4, pipeline="semi-sync", data_parallel=["t3"]), refused=("InvalidInput", "t3", "SemiSync"),
    ),
    Task("pipeline prefetch", tables(20, 24, zipf=True), of(4, pipeline="prefetch", dense_memory="1GiB")),
    Task("dense layers leave little", tables(21, 24), of(4, memory="8GiB", dense_memory="3GiB", pipeline="sparse-dist")),
    Task(
        "dense layers leave nothing", tables(21, 24),
        of(4, memory="8GiB", dense_memory="8GiB"), refused=("Infeasible", "8.0 GiB", "dense_memory"),
    ),
    Task("segments that expand", tables(21, 24), of(4, allocator_share="10%"), full=0.5),
    Task("an allocator that holds nothing", tables(23, 9, every={"sequence": 1}, most=6), of(8, allocator_share=0)),
    Task(
        "inputs freed early", tables(20, 24),
        of(4, pipeline="sparse-dist", pipeline_options=["free_features_storage_early", "clear_data_dist_inputs"]),
    ),
    Task("batches queued late", tables(20, 24), of(4, pipeline_options="enqueue_batch_after_forward"), full=0.5),
    Task("ids sent once", tables(23, 9, every={"sequence": 1}, most=6), of(8, index_dedup="on")),
    Task("ids sent once over hosts", tables(24, 16, every=SEQUENCES), hosts(16, 8, rounds=10, index_dedup="on")),
    # sequences, orders, ids
    Task("sequences", tables(22, 20, every=SEQUENCES), of(4)),
    Task("sequences only", tables(23, 9, every={"sequence": 1}, most=6), of(8)),
    Task("sequences over hosts", tables(24, 16, every=SEQUENCES), hosts(16, 8, rounds=10)),
    Task("sequences with orders", tables(25, 12, every={"sequence": 2, "ordered": 2}), of(4), full=0.5),
    Task("rows by access", tables(26, 10, every={"sequence": 2, "ordered": 2}), of(4, rows_by_access="auto", rounds=5)),
    Task("rows by access, pooled", tables(27, 12, every={"ordered": 1}), of(4, rows_by_access="auto", rounds=5), full=0.6),
    Task("uneven ids", tables(28, 16, every={"uneven": 2}), of(8, row_wise=["*"]), full=0.7),
    Task("uneven ids of sequences", tables(29, 16, every={"uneven": 2, "sequence": 4}), of(8, memory="4GiB")),
    Task("id maps", tables(30, 16, every={"map": 4}), of(8)),
    Task("sorted id maps, 80 % full", tables(31, 16, every={"sorted map": 5, "fp16": 2}), of(4, batch_size=512), full=0.8),
    Task("id maps that devices cannot share", tables(30, 16, every={"map": 4}), of(6), refused=("InvalidInput", "64", "t0")),
    # how tables may be cut
    Task("never row-wise", tables(32, 30), of(8, no_row_wise=True), full=0.7),
    Task("never row-wise, wide", tables(33, 8, dims=(256, 512)), of(8, no_row_wise=True, max_shards=4)),
    Task("row-wise only named", tables(34, 20), of(8, row_wise=["t1*"]), full=0.7),
    Task("column-wise only", tables(35, 20), of(8, sharding_types="column-wise", min_dim=16), full=0.6),
    Task("row-wise only", tables(36, 20), of(8, sharding_types=["row-wise"], data_parallel=["auto"])),
    Task("grids", tables(37, 20), hosts(16, 4, sharding_types="grid,table-row-wise", rounds=10), full=0.5),
    Task("widths", tables(38, 20, dims=(64, 128, 256)), of(8, min_dim=32, max_shards=2), full=0.25),
    Task("some stay whole", tables(39, 30), of(8, never_split=["t1*", "t2"], simplicity="2%"), full=0.4),
    Task("all stay whole", tables(40, 30), of(8, never_split=["*"], simplicity=0)),
    Task(
        "whole, too large", tables(11, 5, most=7),
        of(2, memory="240MiB", never_split=["*"]), refused=("Infeasible", "t1"),
    ),
    Task("the cheapest", tables(41, 30), of(8, simplicity="0%", seed=3), full=0.5),
    Task("fewer cuts for 5 %", tables(41, 30), of(8, simplicity="5%", seed=3), full=0.5),
    # rules
    Task("pins", tables(42, 30), of(8, pin=["t1=0", "t2=1,2", "t1?=3,4,5"], reserve="40MiB"), full=0.4),
    Task("pins to hosts", tables(43, 30), hosts(16, 8, pin=["t1=host:1", "t2?=host:0"], rounds=10)),
    Task("together", tables(44, 30), of(8, together=["t1,t2,t3", "t5,t6"]), full=0.7),
    Task("together and pinned", tables(45, 30), of(8, together=["t1,t2"], pin=["t1=0,1"], never_split=["t7"]), full=0.5),
    Task("reserve a share", tables(46, 30), of(8, memory="4GiB", reserve="15%", pipeline="none")),
    Task(
        "rules of a file",
        tables(47, 20),
        of(
            8,
            constraints={
                "reserve": "1GiB",
                "min_dim": 8,
                "tables": [
                    {"match": "t1?", "devices": [0, 1, 2]},
                    {"match": "t2", "split": False},
                    {"match": "t3", "min_dim": 16, "max_shards": 2},
                    {"match": "t4", "data_parallel": True},
                    {"match": "t5", "row_wise": True},
                ],
                "together": [["t6", "t7"]],
            },
        ),
    ),
    Task("rules of tiers", tables(48, 12, zipf=True), of(4, host_memory="64GiB", constraints={"tables": [CACHED]})),
    Task(
        "rules that contradict", tables(42, 30),
        of(8, pin=["t1=0"], data_parallel=["t1"]), refused=("InvalidInput", "t1"),
    ),
    Task("a rule that matches nothing", tables(42, 30), of(8, never_split=["user_*"]), refused=("InvalidInput", "user_*")),
    Task("a pin to no device", tables(42, 30), of(8, pin=["t1=8"]), refused=("InvalidInput", "t1", "8")),
    # copies and precision
    Task("copies chosen", tables(49, 40, most=5), of(8, data_parallel=["auto"]), full=0.1),
    Task("copies named", tables(50, 20, most=5), of(8, data_parallel=["t1", "t2"], dense_optimizer="sgd")),
    Task(
        "copies over hosts", tables(51, 30, most=5),
        hosts(32, 8, data_parallel=["auto"], dense_optimizer="adagrad", rounds=5),
    ),
    Task("fp16", tables(52, 30), of(8, collective_precision="fp16"), full=0.6),
    Task("fp16 and bf16 over hosts", tables(53, 30), hosts(16, 8, collective_precision="fp16:bf16", rounds=10), full=0.4),
    Task("int8", tables(54, 30, every=ALL_KINDS), of(8, collective_precision="int8", pipeline="none")),
    Task(
        "int8 of sequences", tables(22, 20, every=SEQUENCES),
        of(4, collective_precision="int8"), refused=("InvalidInput",),
    ),
    # topology and groups of ranks
    Task("domains", tables(55, 40), hosts(16, 8, rounds=10), full=0.4),
    Task("domains of several hosts", tables(56, 30), of(16, domain=8, local_world_size=4, network="100Gb/s", rounds=10)),
    Task("2 hosts, 93 % full", tables(57, 40), hosts(16, 8, rounds=3, batch_size=1024), full=0.93),
    Task("groups of 8", tables(58, 30, most=5.5), hosts(32, 8, group_size=8, rounds=3), full=0.25),
    Task("groups, averaged seldom", tables(59, 30, most=5.5), hosts(16, 4, group_size=8, sync_every=10, rounds=2)),
    Task("groups chosen", tables(60, 12, most=5), hosts(8, 4, group_size="auto", rounds=1, sync_every=4)),
    Task("groups of 5", tables(60, 16), hosts(16, 8, group_size=5), refused=("UsageError", "16", "5")),
    # tiers
    Task("host memory", tables(61, 12, zipf=True), of(4, host_memory="1TiB", batch_size=2048, rounds=5), full=2),
    Task(
        "host memory, prefetched", tables(62, 12, zipf=True, element_bytes=2),
        of(4, host_memory="1TiB", pipeline="prefetch", dense_time="5ms", rounds=1), full=2,
    ),
    Task(
        "host memory, half hidden", tables(63, 7, zipf=True),
        of(2, host_memory="64GiB", pipeline="prefetch", dense_time="0.2ms", rounds=1), full=4,
    ),
    Task("host memory, uniform reads", tables(64, 10), of(4, host_memory="64GiB", rounds=3, batch_size=512), full=1.5),
    Task("host memory over hosts", tables(65, 12, zipf=True), hosts(8, 4, host_memory="64GiB", rounds=2), full=1.6),
    Task(
        "host memory, rows whole", tables(66, 12, zipf=True),
        of(4, host_memory="64GiB", no_row_wise=True, rounds=4), full=2,
    ),
    Task("host memory not needed", tables(67, 20, zipf=True), of(4, host_memory="64GiB", simplicity="1%")),
    Task(
        "host memory too small", tables(61, 12, zipf=True),
        of(4, host_memory="1MiB"), full=4, refused=("Infeasible", "1.0 MiB", "host_memory"),
    ),
    Task(
        "host memory of hosts too small", tables(262, 16, zipf=True),
        hosts(8, 4, host_memory="300MiB", rounds=2), full=1.3, refused=("Infeasible", "300.0 MiB", "host_memory"),
    ),
    # previous plans
    Task("from a plan", tables(68, 30), of(8), full=0.7, before={"rounds": 0}),
    Task("from a plan, nothing moves", tables(69, 30), of(8, move_budget=0), before={"rounds": 0}),
    Task(
        "from a plan, some moves", tables(70, 30),
        of(8, move_budget="200MiB"), full=0.6, before={"rounds": 0, "algorithm": "random"},
    ),
    Task("from a plan, new tables", tables(71, 30), of(8, move_budget="1GiB"), full=0.45, before={}, new=6),
    Task(
        "from a plan, keep state", tables(72, 20, dims=(128, 256)),
        of(8, keep_optimizer_state=True), full=0.5, before={"rounds": 2, "max_shards": 2},
    ),
    Task(
        "from a plan, keep state, fuller", tables(73, 20, dims=(128, 256)),
        of(8, keep_optimizer_state=True, batch_size=512, move_budget="2GiB"), full=0.8, before={"no_row_wise": True},
    ),
    Task("from a plan on fewer devices", tables(74, 30), of(8), before={"devices": 4}),
    Task("from a plan over hosts", tables(75, 30), hosts(16, 8, rounds=5), full=0.6, before={"rounds": 0, "seed": 5}),
    Task(
        "from a plan with copies", tables(76, 30, most=5),
        of(8, data_parallel=["auto"], move_budget="64MiB"), before={"rounds": 1},
    ),
    Task(
        "from a plan with tiers", tables(77, 10, zipf=True),
        of(4, host_memory="64GiB", rounds=1, move_budget="256MiB"), full=2, before={},
    ),
    Task("from a plan in groups", tables(78, 20, most=5), hosts(16, 4, group_size=8, rounds=4), before={"rounds": 1}),
    Task(
        "from a plan, 95 % full", tables(79, 30),
        of(4, batch_size=256, move_budget="512MiB"), full=0.95, before={"seed": 2},
    ),
    # algorithms, costs and time
    Task("published", tables(80, 20), of(4, algorithm="neuroshard-2023"), full=0.5),
    Task("published, too full", tables(80, 20), of(4, algorithm="neuroshard-2023"), full=0.7, refused=("Infeasible", "t7")),
    Task("random", tables(81, 20), of(4, algorithm="random", seed=7)),
    Task("by size and lookups", tables(82, 40), of(8, algorithm="size-lookup", seed=1)),
    Task("given costs", tables(83, 40, dims=(64, 128)), {**of(8), "batch_size": 4096}, model=GIVEN),
    Task("given costs, 80 % full", tables(84, 60), {**of(8, rounds=10), "batch_size": 4096}, model=GIVEN, full=0.8),
    Task("nets", tables(85, 20, dims=(16, 32, 64)), {"devices": 2, "memory": "8GiB"}, model=NETS),
    Task("nets, cut", tables(86, 12), {"devices": 2, "memory": "8GiB", "no_row_wise": True}, model=NETS),
    Task(
        "an A100", tables(87, 40),
        of(16, network="200Gb/s", domain=8, local_world_size=4, rounds=10), model="analytic:a100", full=0.5,
    ),
    Task("an L40S", tables(88, 40, every=ALL_KINDS), of(8, memory="44GiB"), model="analytic:l40s"),
    Task("a CPU", tables(89, 12, most=5), of(2, batch_size=512), model="analytic:cpu"),
    Task("half a second", tables(90, 20), of(4, time_budget=0.5), timed=True),
    Task("a second over hosts", tables(91, 20), hosts(16, 8, time_budget=1), timed=True),
]  # fmt: skip
