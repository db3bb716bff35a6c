"""What copies of hot rows cost and save a trainer of sequences on two gloo ranks of this CPU.

Run `make bench-rows`, or with ARGS=--quick; with ARGS="--ratings u.data --requests cloudPhysicsIO.txt" real streams, never
committed: MovieLens 100K's ratings (GroupLens), and block requests, a number a line (libCacheSim's data/).

Two questions, each of runs that take turns step by step in the same processes, so that whatever else this machine does meets all
of them alike; medians, and the quarter of steps below and above:
- what it costs to map an id, where ids are in order and by listed ids, beside what a plan's cost has for it;
- real streams in order of time: bytes sent and a step of sequences with hot rows copied to both ranks, by an order that the
  product makes of the first half, while steps read the second, beside TorchRec's use_index_dedup. FBGEMM has the kernel of that
  (jagged_unique_indices) for GPUs alone: here torch.unique stands for it.
"""

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from bench.publishing import page
from helpers.gloo import on_ranks
from helpers.row_trainers import sharding
from helpers.streams import in_time, ordered
from neuroshard.client.rows import CollectionByAccessSharder
from neuroshard.client.rows.collection import CollectionByAccess, TableRows
from neuroshard.client.rows.map import Part
from neuroshard.core.parts import ByAccess, RowsByAccess
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Table
from neuroshard.costmodel.pricing import MAP_MS

RANKS, DIM, LOOKUPS, WARM_UP = 2, 64, 20, 3
FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01}
HOT_SHARE = 0.8  # of the lookups of sequences
STREAM_SAMPLES, STREAM_PASSES = 256, 32  # half of 100,000 ids are 4 steps
STREAM_DIMS = 64, 256


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


def model(rows: int, held: TableRows | None = None, *, dedup: bool = False, dim: int = DIM) -> Any:
    """One row-wise sequence on all ranks, sharded, held by access or not; with use_index_dedup or not."""
    warnings.simplefilter("ignore")
    of: dict[str, Any] = {"name": "t", "num_embeddings": rows, "embedding_dim": dim, "feature_names": ["f"]}
    given: Any = EmbeddingCollection([EmbeddingConfig(**of)])
    given = given if held is None else CollectionByAccess(given, {"t": held})
    plan = EmbeddingModuleShardingPlan()
    for config_name, config_rows in (
        [("t", rows)] if held is None else [(held.name_of("t", p), p.rows) for p in held.parts if not p.copied]
    ):
        plan[config_name] = sharding(config_rows, dim, RANKS, 0)
    sharders = (
        EmbeddingBagCollectionSharder(dict(FUSED)),
        EmbeddingCollectionSharder(dict(FUSED), use_index_dedup=dedup),
    )
    return DistributedModelParallel(
        nn.ModuleDict({"e": given}),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"e": plan}),
        sharders=[*sharders, CollectionByAccessSharder(*sharders)],
    ).module["e"]


def unique_indices(sizes: Tensor, features: Tensor, offsets: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """What FBGEMM's jagged_unique_indices returns on GPUs for the ids of one feature: how many of the distinct ones each sample
    has, as evenly as can be, and from where on; these ids; and the place of each id among them."""
    assert len(features) == 2
    distinct, places = ids.unique(return_inverse=True)
    samples = len(offsets) - 1
    lengths = torch.full((samples,), len(distinct) // samples)
    lengths[: len(distinct) % samples] += 1
    return lengths, nn.functional.pad(lengths.cumsum(0), (1, 0)), distinct, places


@contextmanager
def sent_bytes() -> Iterator[dict[str, float]]:
    """Bytes that this rank sends to the other: in all-to-alls of ids, of rows and gradients, and in all-reduces (by a ring)."""
    found = {"ids": 0.0, "rows": 0.0, "all-reduce": 0.0}
    to_all, reduce = dist.all_to_all_single, dist.all_reduce

    def all_to_all_single(output: Tensor, input: Tensor, *args: Any, **more: Any) -> Any:  # noqa: A002
        splits = more.get("input_split_sizes") or (args[1] if len(args) > 1 else None)
        group = more.get("group")
        own = splits[dist.get_rank(group)] / max(sum(splits), 1) if splits else 1 / dist.get_world_size(group)
        found["rows" if input.is_floating_point() else "ids"] += input.nbytes * (1 - own)
        return to_all(output, input, *args, **more)

    def all_reduce(tensor: Tensor, *args: Any, **more: Any) -> Any:
        found["all-reduce"] += 2 * (1 - 1 / dist.get_world_size()) * tensor.nbytes
        return reduce(tensor, *args, **more)

    dist.all_to_all_single, dist.all_reduce = all_to_all_single, all_reduce
    try:
        yield found
    finally:
        dist.all_to_all_single, dist.all_reduce = to_all, reduce


def one_after_another(steps: Tensor, rank: int) -> Iterator[Tensor]:
    """Ids of a rank's steps, of a tensor (steps, ranks, lookups), again from the first after the last."""
    while True:
        yield from steps[:, rank]


def step(sharded: Any, ids: Tensor, samples: int) -> None:
    lengths = torch.full((samples,), LOOKUPS)
    found = sharded(KeyedJaggedTensor(["f"], ids, lengths=lengths)).wait()
    found["f"].values().mean().backward() if isinstance(found, dict) else found["f"].mean().backward()


def in_turn(
    rank: int,
    rows: int,
    samples: int,
    steps: int,
    ids_of: Callable[[int], Iterator[Tensor]],
    runs: Mapping[str, Mapping[str, Any]],
) -> Any:
    """Milliseconds of each step, CPU milliseconds of this rank, and bytes, of each run."""
    models = {name: model(rows, **how) for name, how in runs.items()}
    found: dict[str, Any] = {name: ([], [], {}) for name in models}
    for number, ids in enumerate(islice(ids_of(rank), WARM_UP + steps)):
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


def on_gloo(*arguments: Any) -> list[Any]:
    """What RANKS ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(RANKS, Path(folder), in_turn, *arguments, timeout=500, begin=on_one_host)


def on_one_host(_: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)


def spread(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def row_of(name: str, by_rank: list[Any], base: str, *, with_bytes: bool) -> list[str]:
    """A run's row of a table: its steps, beside those of the run `base` that they took turns with."""
    ratios = [mine / theirs for mine, theirs in zip(by_rank[0][name][0], by_rank[0][base][0], strict=True)]
    cpu = " and ".join(f"{statistics.median(found[name][1]):.1f}" for found in by_rank)
    row = [name, spread(by_rank[0][name][0]), f"{statistics.median(ratios):.2f}", cpu]
    if with_bytes:
        sent = [sum(found[name][2][kind] for found in by_rank) / 2**20 for kind in ("ids", "rows", "all-reduce")]
        before = sum(found[base][2]["ids"] + found[base][2]["rows"] for found in by_rank) / 2**20
        share = (sent[0] + sent[1]) / before
        row += [f"{sent[0]:.2f}", f"{sent[1]:.2f}", f"{share:.0%}", f"{sent[2]:.2f}"]
    return row


STREAM = "stream", "rows"
COLUMNS = "run", "step, ms (quartiles)", "ratio of pairs, median", "CPU ms of the ranks"
BYTES = "all-to-all of ids, MiB", "of rows, MiB", "all-to-all beside the first's", "all-reduce, MiB"


def map_cost(rows: int, quick: bool) -> tuple[list[str], list[list[str]]]:
    """What the wrapper takes for the ids of one feature, CPU time; beside what a plan's cost has for it."""
    generator = torch.Generator().manual_seed(0)
    zipf, samples, count = Zipf(rows, 1.05), 2048, 5 if quick else 25
    shuffled = torch.randperm(rows, generator=generator)
    price, found = MAP_MS["cpu"], []
    for listed in (0, 2**10, 2**14, *([] if quick else [2**17, 2**19])):
        hot = listed or zipf.hot_rows(HOT_SHARE)
        ids = zipf.draw(samples * LOOKUPS, generator)
        ids = shuffled[ids] if listed else ids
        cells = [f"{listed:,}" if listed else "none: ids are in order"]
        parts = Part("hot", 0, hot, copied=True), Part("cold", hot, rows - hot, RANKS)
        held = TableRows(parts, shuffled[:listed] if listed else None)
        config = EmbeddingConfig(name="t", num_embeddings=rows, embedding_dim=4, feature_names=["f"])
        collection = EmbeddingCollection([config], device=torch.device("meta"))
        split, spent = CollectionByAccess(collection, {"t": held}).rows.split, []
        for _ in range(count):
            batch = KeyedJaggedTensor(["f"], ids, lengths=torch.full((samples,), LOOKUPS))
            begin = time.process_time()
            split(batch)
            spent.append((time.process_time() - begin) / len(ids) * 1e9)
        digest, when = "0" * 64 if listed else "", "2025-11-20T12:00:00Z"
        order = RowOrder(ids_digest=digest, rows=rows, hot_rows=hot, lookup_share=1.0, time=when)
        table = Table(name="t", rows=rows, dim=4, pooling_factor=1, pooling="none", row_order=order)
        by_access = ByAccess.of([table], {"t": RowsByAccess(hot_rows=hot)})
        a_lookup = price.a_sample(by_access) + by_access.kernels * price.kernel / len(ids)
        found.append([*cells, spread(spent), f"{a_lookup * 1e6:.0f}"])
    return ["listed ids", "in two parts, ns a lookup (quartiles)", "priced"], found


def of_streams(streams: Iterable[tuple[str, NDArray[np.int64], int]], samples: int, passes: int) -> list[list[str]]:
    """Rows of a table: sequences with hot rows copied."""
    sequences = list[list[str]]()
    for name, ids, rows in streams:
        first, second = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        a_step = RANKS * samples * LOOKUPS
        steps = torch.from_numpy(second[: len(second) // a_step * a_step]).reshape(-1, RANKS, samples * LOOKUPS)
        found = ordered(np.array_split(first, len(steps)), rows)
        if found is None:
            sequences.append([name, f"{rows:,}", "no order", *[""] * (2 + len(COLUMNS + BYTES))])
            continue
        hot_ids, base = torch.from_numpy(found[1].astype(np.int64)), "row-wise"
        hot = next((n for n in range(1, len(hot_ids)) if found[0].share_of(n) >= HOT_SHARE), len(hot_ids))
        parts = Part("hot", 0, hot, copied=True), Part("cold", hot, rows - hot, RANKS)
        share = float(torch.isin(steps, hot_ids[:hot]).double().mean())
        for dim in STREAM_DIMS:
            runs: dict[str, dict[str, Any]] = {
                base: {"dim": dim},
                "hot rows copied": {"dim": dim, "held": TableRows(parts, hot_ids[:hot])},
                "use_index_dedup": {"dim": dim, "dedup": True},
            }
            by_rank = on_gloo(rows, samples, passes * len(steps), partial(one_after_another, steps), runs)
            head = [name, f"{rows:,}", f"{hot:,}", f"{share:.1%}", f"{dim}"]
            sequences += [[*head, *row_of(run, by_rank, base, with_bytes=True)] for run in runs]
    return sequences


def main() -> int:
    parser = page.parser(__doc__, "smaller tables and fewer steps")
    parser.add_argument("--ratings", type=Path, help="u.data: user, film, rating, time a line")
    parser.add_argument("--requests", type=Path, help="a number a line, in order of time")
    parser.add_argument("--only", default="map,streams", help="some of them, separated by commas")
    options = page.asked(parser)
    torch.set_num_threads(1)
    rows = 100_000 if options.quick else 1_000_000

    def show(name: str, question: str, columns: Sequence[str], found: Sequence[Sequence[str]]) -> None:
        page.show(f"trainer-rows-{name}", question, columns, found, "measured", published=options.publish)

    only = options.only.split(",")
    torch.library.impl("fbgemm::jagged_unique_indices", "CPU", unique_indices)  # there is none
    if "map" in only:
        columns, found = map_cost(rows, options.quick)
        show(
            "map",
            f"What does it cost to map an id of a table held by access? CPU time, one core; {rows:,} rows, zipf 1.05.",
            columns,
            found,
        )
    if "streams" in only and (options.ratings or options.requests):
        samples, passes = STREAM_SAMPLES, 1 if options.quick else STREAM_PASSES
        how = (
            "Public streams in order of time: MovieLens 100K's ratings, requests of libCacheSim's cloudPhysicsIO. The order is "
            f"made of the first half, steps read the second, {passes} times over: {samples} samples a rank of {LOOKUPS} ids that "
            f"follow each other, fp32, {RANKS} gloo ranks."
        )
        sequences = of_streams(in_time(options.ratings, options.requests), samples, passes)
        show(
            "streams-sequences",
            f"What do copies of hot rows save sequences, where the hottest rows of the first half ({HOT_SHARE:.0%} of its "
            f"lookups, or all that its order lists) are copied? {how}",
            (*STREAM, "hot", "of the second half's lookups", "columns", *COLUMNS, *BYTES),
            sequences,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
