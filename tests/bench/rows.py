"""What rows by access cost and save a trainer on two gloo ranks of this CPU. Run `make bench-rows`, or with ARGS=--quick.

Three questions, each of runs that take turns step by step in the same processes, so that whatever else this machine does meets
all of them alike; medians, and the quarter of steps below and above:
- what it costs to map an id, by listed ids;
- a row-wise table whose ids are in order of access: a step as TorchRec deals rows out, and with rows dealt by access;
- sequences: bytes sent and a step, with hot rows copied to both ranks. TorchRec's use_index_dedup has no kernel for CPUs
  (jagged_unique_indices); what it would send is counted.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from helpers.gloo import on_ranks
from helpers.row_trainers import sharding
from neuroshard.client.rows import CollectionByAccess, TableRows
from neuroshard.client.rows_map import Part, RowMap
from neuroshard.client.rows_sharded import CollectionByAccessSharder

RANKS, DIM, LOOKUPS, WARM_UP = 2, 64, 20, 3
FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01}
EXPONENTS = (0.8, 1.05, 1.3)
HOT_SHARE = 0.8  # of the lookups of sequences


class Zipf:
    """Ids of a table whose ids are in order of access."""

    def __init__(self, rows: int, exponent: float) -> None:
        weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent
        self.shares = torch.cumsum(weights / weights.sum(), 0)
        self.rows = rows

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(count, generator=generator, dtype=torch.float64)
        return torch.searchsorted(self.shares, drawn).clamp(max=self.rows - 1)

    def hot_rows(self, share: float) -> int:
        """How many of the hottest rows have this share of the lookups."""
        return int(torch.searchsorted(self.shares, share)) + 1


def model(rows: int, held: TableRows | None, *, pooled: bool) -> Any:
    """One row-wise table on all ranks, sharded, held by access or not."""
    warnings.simplefilter("ignore")
    of = {"name": "t", "num_embeddings": rows, "embedding_dim": DIM, "feature_names": ["f"]}
    given: Any = (
        EmbeddingBagCollection([EmbeddingBagConfig(**of)]) if pooled else EmbeddingCollection([EmbeddingConfig(**of)])
    )
    given = given if held is None else CollectionByAccess(given, {"t": held})
    plan = EmbeddingModuleShardingPlan()
    for config_name, config_rows in (
        [("t", rows)] if held is None else [(held.name_of("t", p), p.rows) for p in held.parts if not p.copied]
    ):
        plan[config_name] = sharding(config_rows, DIM, RANKS, 0)
    sharders = (
        EmbeddingBagCollectionSharder(dict(FUSED)),
        EmbeddingCollectionSharder(dict(FUSED)),
    )
    return DistributedModelParallel(
        nn.ModuleDict({"e": given}),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"e": plan}),
        sharders=[*sharders, CollectionByAccessSharder(*sharders)],
    ).module["e"]


@contextmanager
def sent_bytes() -> Iterator[dict[str, float]]:
    """Bytes that this rank sends to the other: in all-to-alls of ids, of rows and gradients, and in all-reduces (by a ring)."""
    found = {"ids": 0.0, "rows": 0.0, "all-reduce": 0.0}
    to_all, reduce = dist.all_to_all_single, dist.all_reduce

    def all_to_all_single(output: Tensor, input: Tensor, *args: Any, **more: Any) -> Any:  # noqa: A002
        splits = more.get("input_split_sizes") or (args[1] if len(args) > 1 else None)
        own = splits[dist.get_rank()] / max(sum(splits), 1) if splits else 1 / RANKS
        found["rows" if input.is_floating_point() else "ids"] += input.nbytes * (1 - own)
        return to_all(output, input, *args, **more)

    def all_reduce(tensor: Tensor, *args: Any, **more: Any) -> Any:
        found["all-reduce"] += 2 * (RANKS - 1) / RANKS * tensor.nbytes
        return reduce(tensor, *args, **more)

    dist.all_to_all_single, dist.all_reduce = all_to_all_single, all_reduce
    try:
        yield found
    finally:
        dist.all_to_all_single, dist.all_reduce = to_all, reduce


def step(sharded: Any, ids: Tensor, samples: int) -> None:
    lengths = torch.full((samples,), LOOKUPS)
    found = sharded(KeyedJaggedTensor(["f"], ids, lengths=lengths)).wait()
    found["f"].values().mean().backward() if isinstance(found, dict) else found["f"].mean().backward()


def in_turn(
    rank: int, rows: int, samples: int, steps: int, exponent: float, runs: Mapping[str, Mapping[str, Any]]
) -> Any:
    """Milliseconds of each step, CPU milliseconds of this rank, and bytes, of each run."""
    zipf, generator = Zipf(rows, exponent), torch.Generator().manual_seed(rank)
    models = {name: model(rows, **how) for name, how in runs.items()}
    found: dict[str, Any] = {name: ([], [], {}) for name in models}
    for number in range(WARM_UP + steps):
        ids = zipf.draw(samples * LOOKUPS, generator)
        for name, sharded in models.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            with sent_bytes() as sent:
                step(sharded, ids, samples)
            spent = time.process_time() - cpu
            dist.barrier()
            if number >= WARM_UP:
                found[name][0].append((time.perf_counter() - begin) * 1e3)
                found[name][1].append(spent * 1e3)
                for kind, amount in sent.items():
                    found[name][2][kind] = found[name][2].get(kind, 0.0) + amount / steps
    return found


def on_two(*arguments: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(RANKS, Path(folder), in_turn, *arguments, timeout=500)


def spread(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def print_run(name: str, by_rank: list[Any], base: str, *, with_bytes: bool) -> None:
    ratios = [mine / theirs for mine, theirs in zip(by_rank[0][name][0], by_rank[0][base][0], strict=True)]
    cpu = " and ".join(f"{statistics.median(found[name][1]):.1f}" for found in by_rank)
    line = f"| {name} | {spread(by_rank[0][name][0])} | {statistics.median(ratios):.2f} | {cpu} |"
    if with_bytes:
        sent = [sum(found[name][2][kind] for found in by_rank) / 2**20 for kind in ("ids", "rows", "all-reduce")]
        before = sum(found[base][2]["ids"] + found[base][2]["rows"] for found in by_rank) / 2**20
        share = (sent[0] + sent[1]) / before
        line += f" {sent[0]:.2f} | {sent[1]:.2f} | {share:.0%} | {sent[2]:.2f} |"
    print(line, flush=True)


COLUMNS = "run", "step, ms (quartiles)", "ratio of pairs, median", "CPU ms of the ranks"
BYTES = "all-to-all of ids, MiB", "of rows, MiB", "all-to-all beside the first's", "all-reduce, MiB"


def head(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def map_cost(rows: int, quick: bool) -> None:
    print(
        "\n## What it costs to map an id\n\n| listed ids | ns a lookup, dealt | ns a lookup, rank only |\n|---|---|---|"
    )
    generator = torch.Generator().manual_seed(0)
    ids, count = Zipf(rows, 1.05).draw(2**17, generator), 5 if quick else 15
    shuffled = torch.randperm(rows, generator=generator)
    for listed in (0, 2**10, 2**14, 2**17, *([] if quick else [2**20])):
        order, part = RowMap("t", rows, shuffled[:listed] if listed else None), Part("dealt", 0, rows, RANKS)
        asked, costs = shuffled[ids] if listed else ids, []
        for dealt in (True, False):
            spent = []
            for _ in range(count):
                begin = time.process_time()
                ranks, _ = order.ranks(asked)
                if dealt:
                    part.held_in(ranks)
                spent.append((time.process_time() - begin) / len(ids) * 1e9)
            costs.append(statistics.median(spent))
        print(f"| {listed:,} | {costs[0]:.0f} | {costs[1]:.0f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tables and fewer steps")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows, samples, steps = (100_000, 256, 8) if quick else (1_000_000, 2048, 24)
    print(
        f"{rows:,} rows x {DIM} fp32, {samples:,} samples a rank of {LOOKUPS} lookups, {RANKS} gloo ranks, {steps} steps"
    )
    map_cost(rows, quick)
    for exponent in EXPONENTS:
        print(f"\n## A row-wise table, ids in order of access, zipf {exponent}\n\n{head(*COLUMNS)}")
        runs: dict[str, dict[str, Any]] = {
            "as TorchRec deals rows": {"held": None, "pooled": True},
            "dealt by access": {"held": TableRows((Part("dealt", 0, rows, RANKS),)), "pooled": True},
        }
        by_rank = on_two(rows, samples, steps, exponent, runs)
        for name in runs:
            print_run(name, by_rank, next(iter(runs)), with_bytes=False)
    hot = Zipf(rows, 1.05).hot_rows(HOT_SHARE)
    print(
        f"\n## Sequences, zipf 1.05, the {hot:,} hottest rows ({HOT_SHARE:.0%} of lookups) apart\n\n{head(*COLUMNS, *BYTES)}"
    )
    parts = Part("hot", 0, hot, copied=True), Part("cold", hot, rows - hot, RANKS)
    sharded = Part("hot", 0, hot, RANKS), parts[1]
    runs = {
        "row-wise": {"held": None, "pooled": False},
        "dealt by access": {"held": TableRows((Part("dealt", 0, rows, RANKS),)), "pooled": False},
        "hot rows copied": {"held": TableRows(parts), "pooled": False},
        "hot rows row-wise": {"held": TableRows(sharded), "pooled": False},
    }
    ids = Zipf(rows, 1.05).draw(samples * LOOKUPS, torch.Generator().manual_seed(0))
    once = len(ids.unique()) / len(ids)
    by_rank = on_two(rows, samples, steps, 1.05, runs)
    for name in runs:
        print_run(name, by_rank, next(iter(runs)), with_bytes=True)
    print(
        f"\nuse_index_dedup would send {once:.0%} of the first's lookups: those are the distinct ids of a rank's batch."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
