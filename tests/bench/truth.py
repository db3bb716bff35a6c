"""Costs computed from datasheets beside figures of real GPUs that others measured: docs/benchmarks.md.

    make bench-truth                                 half a minute, of which the plans take most
    make bench-truth ARGS="--figures FOLDER"         where the figures are [../shared/truth, beside this checkout]

Nothing here is fitted. Which of the figures a constant of costmodel/analytic.py came from, its row says; all others were held
back. An MLPerf step also holds dense layers, so it bounds our milliseconds from above, and its ratios between systems are an
anchor, not a label. Ratios are therefore shown twice: of embeddings alone, and of embeddings with a plain model of the dense
layers, which is no part of the product. HugeCTR ran those steps with fp16 all-to-alls, so their bytes are halved for them.
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.publishing import page
from helpers.parts import cut_to
from neuroshard.core.clean import silent
from neuroshard.core.part import Part
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.costmodel.analytic import DATASHEETS, Analytic, sheet_of
from neuroshard.costmodel.features import BIN_TOUCHES
from neuroshard.files.importers.presets import preset
from neuroshard.orders.sizes import size_order
from neuroshard.size.run import run as size

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT.parent / "shared" / "truth"
STATE_BYTES = {"sgd": 0, "adam": 8}  # of the optimizer, an element
# Rows that a batch of all ten tables misses, by the cache's rows as a share of those that 100 batches read. They are not
# published: the benchmark's generator was run through a simulation of FBGEMM's cache, 100 batches twice, as the benchmark does.
SIMULATED_MISSES = {1.0: 81_657, 0.8: 150_411}
SOURCES = {"read_file id 51884305790": "a cloud's page of its GB300 cluster"}  # ids of a page that has no address
BASIS = "8 x 1 x h100"  # the system that others are compared with

# The dense layers of DLRM-DCNv2 (README of torchrec_dlrm in facebookresearch/dlrm): a bottom MLP, three cross layers of rank 512
# over 27 vectors of 128 columns, and a top MLP.
VECTOR, CROSS_LAYERS, RANK = 27 * 128, 3, 512
MLPS = ((13, 512, 256, 128), (VECTOR, 1024, 1024, 512, 256, 1))
DENSE_PARAMETERS = 2 * CROSS_LAYERS * VECTOR * RANK + sum(a * b for mlp in MLPS for a, b in pairwise(mlp))
FLOPS_PER_PARAMETER = 6  # of a sample in a step: 2 forward, 4 backward
DENSE_BYTES = 2  # of a gradient: fp16
# Of the peak, what training reaches: 57.8 % of BF16 on 64 H100 (NVIDIA/dgxc-benchmarking, Nemotron4 15b)
FLOPS_SHARE = 0.578
# Dense fp16 tensor FLOPs a ms: NVIDIA's datasheets, without sparsity
PEAK_FLOPS = {
    "a100": 312e9,
    "h100-pcie": 756e9,
    "h100": 989e9,
    "h200": 989e9,
    "b200": 2250e9,
    "gb200": 2450e9,
    "b300": 2250e9,
    "l40s": 362e9,
    "l40": 181e9,
    "a40": 150e9,
}


@dataclass(frozen=True)
class Figure:
    """What others measured, what we compute, and whether a constant of ours came from it."""

    what: str
    source: str
    theirs: float
    ours: float
    used: str = "no"
    with_dense: float | None = None  # where theirs is a ratio of whole steps

    @property
    def error(self) -> float:
        """Of ours, relative to theirs."""
        return self.ours / self.theirs - 1

    @property
    def dense_error(self) -> float:
        """Of ours with dense layers, relative to theirs."""
        return (self.ours if self.with_dense is None else self.with_dense) / self.theirs - 1


def main() -> None:
    parser = page.parser(__doc__, "for `make bench`: it takes a second either way")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder of the figures [../shared/truth]")
    options = page.asked(parser)
    if not options.figures.is_dir():
        print(f"nothing is compared: {options.figures} is no folder; name the folder of the figures with --figures")
        return
    show("operator", "FBGEMM's operator on one H100, ms", list(operator(options.figures)), options.publish)
    show("all-to-alls", "All-to-alls, GB/s a GPU", list(all_to_alls(options.figures)), options.publish)
    show(
        "ratios",
        "Ms of embeddings on 8 GPUs over those on 8 H100, beside ratios of whole MLPerf steps",
        list(ratios(options.figures)),
        options.publish,
    )
    show(
        "hosts",
        "What more hosts change: ms of embeddings over those before, beside ratios of whole MLPerf steps",
        list(more_hosts(options.figures)),
        options.publish,
    )
    found = list(steps(options.figures))
    show_shares(found, options.publish)
    show_order(found, options.publish)


def show(name: str, question: str, figures: list[Figure], published: bool) -> None:
    dense = any(each.with_dense is not None for each in figures)
    more = ["with dense layers", "error of that"] if dense else []
    columns = ["what", "measured", "computed", "error", *more, "used for a constant", "source"]
    rows = [
        (
            each.what,
            f"{each.theirs:.3g}",
            f"{each.ours:.3g}",
            f"{each.error:+.0%}",
            *([] if each.with_dense is None else [f"{each.with_dense:.3g}", f"{each.dense_error:+.0%}"]),
            each.used,
            each.source,
        )
        for each in figures
    ]
    table(name, question, columns, rows, published)


def show_shares(found: list["Step"], published: bool) -> None:
    columns = [
        "GPUs x hosts",
        "batch",
        "whole step, ms",
        "computed: compute",
        "all-to-alls",
        "both, of the step",
        "dense layers",
    ]
    rows = [
        (
            step.system,
            f"{step.batch:,}",
            f"{step.step_ms:.2f}",
            f"{step.compute_ms:.2f}",
            f"{step.all_to_all_ms:.2f}",
            f"{step.embeddings_ms / step.step_ms:.0%}",
            f"{step.dense_ms:.2f}",
        )
        for step in found
    ]
    question = "Ms of embeddings, computed for an even share of all tables, in a whole MLPerf step of DLRM-DCNv2"
    table("steps", question, columns, rows, published)


def show_order(found: list["Step"], published: bool) -> None:
    """Which of two systems at one batch is faster: as measured, and as `neuroshard size` has it."""
    mapped = {id(step): mapped_ms(step) for step in found}
    columns = [
        "global batch",
        "systems",
        "pairs that differ as measured",
        "in that order",
        "with dense layers",
        "sure",
        "right",
    ]
    rows, wrong = [], list[tuple[str, ...]]()
    for batch in sorted({step.batch for step in found}):
        some = [step for step in found if step.batch == batch]
        pairs = [
            (a, b) for a, b in combinations(sorted(some, key=lambda one: one.step_ms), 2) if a.most_ms < b.least_ms
        ]
        if not pairs:
            continue
        alone = [(a, b) for a, b in pairs if mapped[id(a)][0] < mapped[id(b)][0]]
        dense = [(a, b) for a, b in pairs if mapped[id(a)][0] + a.dense_ms < mapped[id(b)][0] + b.dense_ms]
        apart = [(a, b) for a, b in pairs if _apart(mapped[id(a)][1], mapped[id(b)][1])]
        right = [pair for pair in apart if pair in alone]
        rows.append((f"{batch:,}", str(len(some)), *(str(len(those)) for those in (pairs, alone, dense, apart, right))))
        wrong += [
            (
                f"{batch:,}",
                f"{a.system} before {b.system}",
                f"{a.step_ms:.2f}, {b.step_ms:.2f}",
                f"{mapped[id(a)][0]:.2f}, {mapped[id(b)][0]:.2f}",
                "yes" if (a, b) in dense else "no",
                "yes" if (a, b) in apart else "no",
            )
            for a, b in pairs
            if (a, b) not in alone
        ]
    question = "Pairs of MLPerf systems at one batch in their measured order by `neuroshard size`, embeddings alone"
    table("order", question, columns, rows, published)
    question = "The pairs that it has the other way round"
    columns = [
        "global batch",
        "measured",
        "ms of the step",
        "ms of embeddings",
        "right with dense layers",
        "said to be sure",
    ]
    table("order-wrong", question, columns, wrong, published)


def _apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def mapped_ms(step: "Step") -> tuple[float, tuple[float, float]]:
    """Ms of embeddings by `neuroshard size` for a system, and what they may be by the error of its datasheet."""
    gpus, hosts, name = step.system.split(" x ")
    devices = int(gpus) * int(hosts)
    domain = min(devices, max(DATASHEETS[name].node, int(gpus))) if DATASHEETS[name].node == 72 else int(gpus)
    order = size_order(
        [f"analytic:{name}"],
        devices=devices,
        domain=[str(domain)],
        local_world_size=[gpus],
        batch_size=step.batch,
        collective_precision="fp16",
    )
    with silent(True):
        row = size(preset("mlperf-dlrm-dcnv2", optimizer="adagrad"), order).rows[0]
    assert row.interval_ms is not None
    return row.step_ms, row.interval_ms


def table(name: str, question: str, columns: list[str], rows: Sequence[tuple[str, ...]], published: bool) -> None:
    page.show(f"truth-{name}", question, columns, rows, "others", published=published)


def operator(folder: Path) -> Iterator[Figure]:
    """Forward and backward of every row: tables in the GPU's memory, behind a cache there, and in host memory. The rows without
    HBM are those without a cache, once more: for FBGEMM both are the same."""
    for row in json.loads((folder / "fbgemm_h100_tbe.json").read_text()):
        if "no_hbm" in row["label"]:
            continue
        where, used = "in HBM" if "_gpu_" in row["label"] else "in host memory", "no"
        if row["caching"]:
            where = f"cached, {row['cache_footprint_ratio']} of the rows read"
            used = "yes" if row["optimizer_type"] == "adam" else "no"
        for part, ours in zip(("forward", "backward"), operator_ms(row), strict=True):
            what = f"{row['num_tables']} tables {where}, unpooled, {row['optimizer_type']}, {part}"
            yield Figure(what, "NVIDIA/recsys-examples@43465aea", row[f"trc_{part}_ms"], ours, used)


def operator_ms(row: dict[str, Any]) -> tuple[float, float]:
    """Forward and backward ms on an H100 of one row of fbgemm_h100_tbe.json."""
    lookups, batch_size = row["avg_n_total"] / row["num_tables"], row["batch_size"]
    tables = [
        Table.parse(
            {
                "name": f"t{i}",
                "rows": rows,
                "dim": row["embedding_dim"],
                "pooling_factor": lookups / batch_size,
                "pooling": "none",
                "reuse_bins": bins_of(row["avg_n_total"] / row["avg_n_unique"]),
                "reuse_batch_size": batch_size,
                "optimizer_bytes_per_row": 0,
                "optimizer_bytes_per_element": STATE_BYTES[row["optimizer_type"]],
            },
            row["label"],
        )
        for i, rows in enumerate(row["num_embeddings_per_feature"])
    ]
    model, parts = Analytic("h100", batch_size), list(map(Part.of, tables))
    forward, backward = model.parts_ms(model.part_vectors(parts).sum(axis=0))
    beyond = model.beyond_hbm(parts)
    if row["caching"]:
        missed = SIMULATED_MISSES[row["cache_footprint_ratio"]] / len(tables)
        forward = forward + (beyond.cached_forward + missed * beyond.missed).sum()
        backward = backward + beyond.cached_backward.sum()
    elif "_gpu_" not in row["label"]:
        forward, backward = forward + beyond.host_forward.sum(), backward + beyond.host_backward.sum()
    return float(forward), float(backward)


def bins_of(touches: float) -> list[float]:
    """Reuse bins of rows that a batch touches so often on average, in the two bins that the average lies between."""
    high = int(np.searchsorted(BIN_TOUCHES, touches))
    share = (touches - BIN_TOUCHES[high - 1]) / (BIN_TOUCHES[high] - BIN_TOUCHES[high - 1])
    bins = np.zeros(len(BIN_TOUCHES))
    bins[high - 1], bins[high] = 1 - share, share
    return bins.tolist()


def all_to_alls(folder: Path) -> Iterator[Figure]:
    """Bus bandwidths: bytes of a GPU x (GPUs - 1) / GPUs, over the time."""
    for row in json.loads((folder / "all_to_all_anchors.json").read_text())["all_to_all_busbw_GBps"]:
        name = sheet_of(row["gpu"])
        if name is None or not isinstance(row["busbw"], int | float):
            continue
        size = float(row.get("bytes", 2**32))  # large, where no size is told
        racks = f", {row['racks']} racks" if row.get("racks", 1) > 1 else ""
        what = f"{row['gpus']} {row['gpu']}, {row['hosts']} host{'s' * (row['hosts'] > 1)}{racks}"
        used = "yes" if name == "h100" else "no"
        source = row["source"].replace("same", "as above").partition(" doc/")[0]
        yield Figure(
            what,
            SOURCES.get(source.partition(" (")[0], source),
            row["busbw"],
            bus_gb_per_s(name, row["gpus"], size, row["gpus"] // row.get("racks", 1)),
            used,
        )


def bus_gb_per_s(name: str, gpus: int, size: float, domain: int) -> float:
    """Of an all-to-all in which each GPU has `size` bytes of outputs for all GPUs together, and `domain` share fast links."""
    columns, batch_size = 128.0, round(size / 4 / 128 * gpus)
    model = Analytic(name, batch_size)
    model.sheet = replace(model.sheet, node=domain)
    ms = float(model.backward_collective_ms(np.full(gpus, columns / gpus)).max())
    return size * (gpus - 1) / gpus / ms / 1e6


@dataclass(frozen=True)
class Step:
    """A system's MLPerf step of DLRM-DCNv2, the median over its submissions, and what we compute for its embeddings."""

    system: str
    batch: int
    step_ms: float
    compute_ms: float
    all_to_all_ms: float
    dense_ms: float
    least_ms: float  # the lowest tenth of the steps of its fastest submission
    most_ms: float  # the highest tenth of its slowest one's

    @property
    def embeddings_ms(self) -> float:
        return self.compute_ms + self.all_to_all_ms

    @property
    def ours_ms(self) -> float:
        """Embeddings, then dense layers: nothing overlaps."""
        return self.embeddings_ms + self.dense_ms


def steps(folder: Path) -> Iterator[Step]:
    """Of every system that has a datasheet."""
    found: dict[tuple[str, int, int, int], list[tuple[float, float, float]]] = {}
    with (folder / "mlperf_dlrm_dcnv2_step_ms.csv").open() as file:
        for row in csv.DictReader(file):
            name = sheet_of(row["accelerator"])
            if name is None or "NVL" in row["accelerator"]:  # H200 NVL: other links, no datasheet here
                continue
            key = (name, int(row["nodes"]), int(row["gpus_per_node"]), int(row["global_batch"]))
            found.setdefault(key, []).append((float(row["ms_step_median"]), float(row["p10"]), float(row["p90"])))
    for (name, hosts, gpus, batch), measured in sorted(found.items()):
        compute, all_to_all = embeddings_ms(name, hosts, gpus, batch)
        dense = dense_ms(name, hosts, gpus, batch)
        medians, least, most = zip(*measured, strict=True)
        system = f"{gpus} x {hosts} x {name}"
        yield Step(system, batch, median(medians), compute, all_to_all, dense, min(least), max(most))


def dense_ms(name: str, hosts: int, gpus: int, batch_size: int) -> float:
    """FLOPs of the dense layers over a share of the peak, and the all-reduce of their gradients: a ring of the GPUs that share
    fast links, then each of these with its part over the network."""
    sheet, devices = DATASHEETS[name], hosts * gpus
    near = min(devices, gpus if sheet.node < 72 else sheet.node)
    far = devices // near
    flops = FLOPS_PER_PARAMETER * DENSE_PARAMETERS * batch_size / devices
    size = 2.0 * DENSE_PARAMETERS * DENSE_BYTES  # it goes out once as sums of parts, once as sums of all
    reduced = sheet.latency_ms + size * (near - 1) / near / (sheet.link * sheet.link_share)
    if far > 1:
        reduced += sheet.network_latency_ms + size / near * (far - 1) / far / sheet.network_rate
    return flops / (PEAK_FLOPS[name] * FLOPS_SHARE) + reduced


def embeddings_ms(name: str, hosts: int, gpus: int, batch_size: int) -> tuple[float, float]:
    """Compute and all-to-all ms of an even share of the tables of DLRM-DCNv2: what no plan goes below by much."""
    tables, devices = preset("mlperf-dlrm-dcnv2", optimizer="adagrad"), hosts * gpus
    columns = np.array([table.dim for table in tables])
    models = [Analytic(name, size) for size in (batch_size, batch_size // 2)]  # half the bytes: fp16
    if hosts > 1 and DATASHEETS[name].node < 72:
        task = ShardingTask(
            tables=tables,
            device_memory_bytes=(2**40,) * devices,
            batch_size=batch_size,
            topology=Topology(domain=gpus, local_world_size=gpus),
        )
        models = [model.for_task(task, waiting=False) for model in models]
    model, half = models
    compute = float(model.compute_ms(model.part_vectors(cut_to(tables, columns)).sum(axis=0) / devices))
    return compute, 2 * float(half.backward_collective_ms(np.full(devices, columns.sum() / devices)).max())


def ratios(folder: Path) -> Iterator[Figure]:
    """One host of eight against one host of eight H100, at the batch that all of them ran."""
    found = {step.system: step for step in steps(folder) if step.batch == 55296}
    basis = found[BASIS]
    for system, step in found.items():
        if system.startswith("8 x 1 x ") and step is not basis:
            name = system.split()[-1]
            yield Figure(
                f"{name} over h100",
                "mlcommons/training_results",
                step.step_ms / basis.step_ms,
                step.embeddings_ms / basis.embeddings_ms,
                "choice of a share" if name in ("l40", "l40s") else "no",
                with_dense=step.ours_ms / basis.ours_ms,
            )


def more_hosts(folder: Path) -> Iterator[Figure]:
    """The same model on more hosts than before. Dense layers shrink with the batch a GPU has, so signs say more than sizes."""
    found = {(step.system, step.batch): step for step in steps(folder)}
    for before, after in (
        (("8 x 1 x h100", 55296), ("4 x 2 x h100", 55296)),
        (("8 x 1 x b200", 55296), ("8 x 2 x b200", 55296)),
        (("8 x 1 x b200", 55296), ("4 x 2 x gb200", 55296)),
        (("8 x 1 x h200", 65536), ("8 x 4 x h200", 131200)),
        (("8 x 8 x h100", 135168), ("8 x 16 x h100", 135168)),
    ):
        if before in found and after in found:
            one, more = found[before], found[after]
            yield Figure(
                f"{before[0]} -> {after[0]}, batch {before[1]:,} -> {after[1]:,}",
                "mlcommons/training_results",
                more.step_ms / one.step_ms,
                more.embeddings_ms / one.embeddings_ms,
                with_dense=more.ours_ms / one.ours_ms,
            )


if __name__ == "__main__":
    main()
