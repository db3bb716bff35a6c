"""Is a plan that knows the network faster than one that does not? Real TorchRec trainers on hosts with slow links between them.

    make bench-hosts                                    half an hour; as root, with iproute2
    make bench-hosts ARGS="--worlds 1 --rounds 1"

Tables are measured on this CPU, and a cost model is trained of them, inside one host. For each network two plans are searched
with it: one is told `--domain` and `--network`, the other nothing. Then examples/train.py trains by both in turns, its ranks in
network namespaces that a shaped bridge joins (tests/helpers/hosts.py): FBGEMM's operator, gloo, and a step's wall time. Ranks
share this machine's cores, so compute weighs more than on GPUs.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.publishing import page
from bench.trainer import neuroshard
from helpers.hosts import Rank, hosts, lacks_hosts, start_ranks
from neuroshard.core.table import Table
from neuroshard.core.value import decode_json
from neuroshard.files.plan import read_plan
from neuroshard.files.tables import write_tables

ROOT = Path(__file__).resolve().parents[2]
MEMORY, BATCH_SIZE, RANKS_A_HOST = "256MiB", 2304, 2  # a batch that 4 and 6 ranks share evenly
COLUMNS = [
    "hosts",
    "tables",
    "network of a rank",
    "plan that does not know it",
    "plan that knows it",
    "faster",
    "predicted",
]


class Network(NamedTuple):
    """So many hosts, each rank of which sends and receives `rate`, in tc's words, and bytes a second."""

    hosts: int
    rate: str
    bytes_per_s: float


NETWORKS = (Network(2, "500mbit", 5e8 / 8), Network(2, "100mbit", 1e8 / 8), Network(3, "100mbit", 1e8 / 8))

SLOW, PRECISIONS = NETWORKS[1], ("fp32", "fp16", "int8")


def main() -> None:
    parser = page.parser(__doc__, "one table set, one round")
    parser.add_argument("--worlds", type=int, default=3, help="table sets, drawn at random [3]")
    parser.add_argument("--rounds", type=int, default=3, help="times that each plan trains [3]")
    parser.add_argument("--steps", type=int, default=12, help="of a training [12]")
    parser.add_argument("--budget", default="90s", help="to measure a table set for [90s]")
    parser.add_argument("--seed", type=int, default=0, help="of the first table set [0]")
    parser.add_argument("--only", choices=["networks", "precisions"], help="one of the two tables")
    options = page.asked(parser)
    if options.quick:
        options.worlds = options.rounds = 1
    if why := lacks_hosts():
        print(f"nothing is run: {why}")
        return
    if options.only != "precisions":
        race_networks(options)
    if options.only != "networks":
        race_precisions(options)


def race_networks(options: argparse.Namespace) -> None:
    """Plans that know the network against plans that do not, for several table sets and networks."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows = []
    for seed in range(options.seed, options.seed + options.worlds):
        with tempfile.TemporaryDirectory() as folder:
            tables = make_tables(seed)
            learn(Path(folder), tables, options.budget)
            for network in NETWORKS:
                row = race(Path(folder), network, options.rounds, options.steps, f"{len(tables)} tables, seed {seed}")
                print(f"| {' | '.join(row)} |", flush=True)
                rows.append(row)
    if options.publish:
        page.publish(
            "trainer-hosts",
            "Is a plan that knows the network between hosts faster? Ranks of TorchRec in network namespaces, "
            f"{RANKS_A_HOST} a host, batch {BATCH_SIZE:,}.",
            COLUMNS,
            rows,
            costs="measured",
        )


def race_precisions(options: argparse.Namespace) -> None:
    """Plans for several precisions of all-to-alls, over one network: median steps, in turns."""
    known = ("--domain", RANKS_A_HOST, "--network", f"{SLOW.bytes_per_s:.0f}B/s")
    predicted, took = dict[str, float | None](), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        learn(folder, make_tables(options.seed), options.budget)
        for words in PRECISIONS:
            neuroshard(folder, "search", "tables.json", "--model", "model", "--devices", SLOW.hosts * RANKS_A_HOST, "--memory",
                MEMORY, "-o", f"{words}.json", "--collective-precision", words, *known)  # fmt: skip
            neuroshard(folder, "deploy", f"{words}.json", "--store", "store", "--name", words, "--force")
            predicted[words], took[words] = read_plan(folder / f"{words}.json").cost_ms, []
        with hosts(SLOW.hosts, RANKS_A_HOST, SLOW.rate) as there:
            for round_ in range(options.rounds):
                for words in PRECISIONS[:: 1 if round_ % 2 == 0 else -1]:
                    took[words].append(train(folder, there, words, options.steps))
    plain = statistics.median(took[PRECISIONS[0]])
    rows = [
        (
            words,
            f"{statistics.median(each):.1f} ms ({min(each):.1f} to {max(each):.1f})",
            f"{1 - statistics.median(each) / plain:.1%}",
            f"{predicted[words]:.1f} ms",
        )
        for words, each in took.items()
    ]
    columns = ["all-to-alls in", "a step", "faster", "predicted"]
    question = (
        f"What do all-to-alls of fewer bytes save over a slow network? {SLOW.hosts} x {RANKS_A_HOST} ranks of TorchRec in "
        f"network namespaces, {SLOW.rate} a rank, plans that know it."
    )
    page.show("trainer-precision", question, columns, rows, "measured", published=options.publish)


def make_tables(seed: int) -> tuple[Table, ...]:
    """Ten tables read a little, two read a lot: what they send and what they compute are not proportional."""
    rng = np.random.default_rng([seed, 22])
    tables = [
        Table(
            name=f"t{i}",
            rows=int(10 ** rng.uniform(3, 4.7)),
            dim=int(rng.choice([16, 32, 64, 128])),
            pooling_factor=round(float(rng.uniform(1, 20)), 1),
        )
        for i in range(10)
    ]
    tables += [
        Table(name=f"hot{i}", rows=100_000, dim=32, pooling_factor=float(rng.uniform(60, 150))) for i in range(2)
    ]
    return tuple(tables)


def learn(folder: Path, tables: tuple[Table, ...], budget: str) -> None:
    """tables.json -> cases -> costs -> model, as typed, for the ranks of a host."""
    write_tables(folder / "tables.json", tables)
    neuroshard(folder, "augment", "tables.json", "-o", "cases", "--devices", f"{RANKS_A_HOST},4,6", "--memory", MEMORY,
        "--max-dim", 128, "--compute-cases", 400, "--collective-cases", 90)  # fmt: skip
    neuroshard(folder, "measure", "cases", "-o", "costs", "--backend", "cpu", "--batch-size", BATCH_SIZE, "--optimizer", "sgd",
        "--budget", budget)  # fmt: skip
    neuroshard(folder, "pretrain", "costs", "-o", "model")


def race(folder: Path, network: Network, rounds: int, steps: int, tables: str) -> tuple[str, ...]:
    """A row of the table: both plans' median steps, in turns."""
    devices = network.hosts * RANKS_A_HOST
    known = ("--domain", RANKS_A_HOST, "--network", f"{network.bytes_per_s:.0f}B/s")
    ways: dict[str, Sequence[object]] = {"blind": (), "knowing": known}
    for name, more in ways.items():
        neuroshard(folder, "search", "tables.json", "--model", "model", "--devices", devices, "--memory", MEMORY, "-o",
            f"{name}.json", *more)  # fmt: skip
        neuroshard(folder, "deploy", f"{name}.json", "--store", "store", "--name", f"{name}-{network.hosts}-{network.rate}",
            "--force")  # fmt: skip
    took: dict[str, list[float]] = {name: [] for name in ways}
    with hosts(network.hosts, RANKS_A_HOST, network.rate) as there:
        for round_ in range(rounds):
            for name in list(ways)[:: 1 if round_ % 2 == 0 else -1]:
                took[name].append(train(folder, there, f"{name}-{network.hosts}-{network.rate}", steps))
    blind, knowing = (statistics.median(took[name]) for name in ways)
    before, after = price_of(folder, "blind", known), read_plan(folder / "knowing.json").cost_ms
    assert after is not None
    return (
        f"{network.hosts} x {RANKS_A_HOST} ranks",
        tables,
        network.rate,
        *(f"{statistics.median(each):.1f} ms ({min(each):.1f} to {max(each):.1f})" for each in took.values()),
        f"{1 - knowing / blind:.1%}",
        f"{before:.1f} -> {after:.1f} ms",
    )


def price_of(folder: Path, name: str, known: Sequence[object]) -> float:
    """Predicted ms of a plan on the network that it does not know."""
    from neuroshard.core.topology import Topology
    from neuroshard.costmodel.bundle import load_cost_model
    from neuroshard.costmodel.pricing import price_shards

    plan = read_plan(folder / f"{name}.json")
    rate = float(str(known[-1]).removesuffix("B/s"))
    topology = Topology(domain=RANKS_A_HOST, local_world_size=RANKS_A_HOST, network_bytes_per_s=rate)
    prices = price_shards(
        load_cost_model(folder / "model"), plan.task.model_copy(update={"topology": topology}), plan.shards
    )
    assert prices is not None
    return float(prices.total_ms.max())


def train(folder: Path, there: Sequence[Rank], name: str, steps: int) -> float:
    """The median step in ms of examples/train.py on these hosts, by the live plan of that name."""
    summary = folder / "summary.json"
    command = [sys.executable, ROOT / "examples" / "train.py", "--store", folder / "store", "--name", name, "--steps", steps,
        "--batch-size", BATCH_SIZE, "--summary", summary]  # fmt: skip
    ranks = start_ranks(there, command)
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), f"the trainer failed with {name}: {said[0]}"
    written = decode_json(summary.read_bytes(), "summary")
    assert not written["capped_tables"], "a table was cut to fewer rows"
    return float(written["step_ms_median"])


if __name__ == "__main__":
    main()
