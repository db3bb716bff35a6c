"""NeuroShard's search as published, the way the original runs it: every prediction is one call of torch modules, at batch 1.

Written from the paper and from notes on the original, not copied. Predicted compute costs are kept in a hash map by set of
shards, as the paper does. The weights are those of the cost model that everybody else is asked with, so plans can be compared;
the loops and ties are those of `--algorithm neuroshard-2023`, so the plan is too, and only the time differs.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bench.searching.scoring import Row, launched_ms
from bench.searching.torch_nets import TorchNets
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.costmodel.bundle import TrainedCostModel

CANDIDATES, BEAM, DEPTH, GRID = 10, 3, 10, 11  # the paper's N, K, L, M

Shard = tuple[int, int]  # table and columns


@dataclass
class PublishedSearch:
    """One task, one set of shards asked at a time."""

    task: ShardingTask
    predictor: "Predictor"
    known: dict[tuple[Shard, ...], float] = field(default_factory=dict)
    launched: dict[frozenset[str], float] = field(default_factory=dict)  # ms by the modules in which a table is cut
    asked: int = 0

    def compute_ms(self, shards: Sequence[Shard]) -> float:
        key = tuple(sorted(shards))
        if key not in self.known:
            self.asked += 1
            self.known[key] = self.predictor.compute_ms(key)
        return self.known[key]

    def cost_ms(self, devices: Sequence[Sequence[Shard]]) -> float:
        """Without what is launched, which is the same of all placements of a list of shards."""
        compute = [self.compute_ms(held) if held else 0.0 for held in devices]
        return self.predictor.slowest_ms(compute, [sum(map(self.columns, held)) for held in devices])

    def launched_ms(self, shards: Sequence[Shard]) -> float:
        counts = Counter(table for table, _ in shards)
        cut_in = frozenset(self.task.tables[table].module for table, count in counts.items() if count > 1)
        if cut_in not in self.launched:
            self.launched[cut_in] = self.predictor.launched_ms(shards)
        return self.launched[cut_in]

    def columns(self, shard: Shard) -> float:
        """What its device sends for a sample: a table that several features read sends an output for each."""
        table = self.task.tables[shard[0]]
        return Part(table, table.rows, shard[1]).sent_columns

    def nbytes(self, shard: Shard) -> int:
        table = self.task.tables[shard[0]]
        return Part(table, table.rows, shard[1]).memory().total

    def order(self, shards: Sequence[Shard]) -> list[Shard]:
        """Costliest first; of equally costly ones the largest, then by place in the task and width."""
        return sorted(shards, key=lambda shard: (-self.compute_ms([shard]), -self.nbytes(shard), shard))

    def greedy(self, shards: Sequence[Shard], cap: float) -> list[list[Shard]] | None:
        held: list[list[Shard]] = [[] for _ in self.task.device_memory_bytes]
        free, sent, load = list(self.task.device_memory_bytes), [0.0] * len(held), [0.0] * len(held)
        for shard in shards:
            size, columns = self.nbytes(shard), self.columns(shard)
            room = [d for d in range(len(held)) if size <= free[d] and sent[d] + columns <= cap]
            if not room:
                return None
            device = min(room, key=lambda d: (load[d], -free[d], d))
            held[device].append(shard)
            free[device] -= size
            sent[device] += columns
            load[device] = self.compute_ms(held[device])
        return held

    def evaluate(self, shards: Sequence[Shard]) -> tuple[float, list[list[Shard]] | None]:
        mean = sum(map(self.columns, shards)) / self.task.devices
        best_ms, best = math.inf, None
        for scale in np.linspace(1.0, 1.5, GRID):
            held = self.greedy(shards, mean * scale)
            if held is not None and (cost_ms := self.cost_ms(held)) < best_ms:
                best_ms, best = cost_ms, held
        return best_ms + self.launched_ms(shards), best

    def children(self, shards: Sequence[Shard]) -> list[list[Shard]]:
        largest = sorted(range(len(shards)), key=lambda i: -self.nbytes(shards[i]))[:CANDIDATES]
        found = []
        for i in sorted({*range(min(CANDIDATES, len(shards))), *largest}):
            table, dim = shards[i]
            if dim % 8 == 0:  # halves must be multiples of 4
                found.append(self.order([*shards[:i], *shards[i + 1 :], (table, dim // 2), (table, dim // 2)]))
        return found

    def search(self) -> tuple[float, list[Row]] | None:
        """Cost by the nets and the plan, or None where nothing fits."""
        states = [self.order([(index, table.dim) for index, table in enumerate(self.task.tables)])]
        best_ms, best = self.evaluate(states[0])
        for _ in range(DEPTH):
            children = [child for state in states for child in self.children(state)]
            priced = [self.evaluate(child) for child in children]
            kept = sorted(range(len(children)), key=lambda i: priced[i][0])[:BEAM]
            if not kept:
                break
            states = [children[i] for i in kept]
            if priced[kept[0]][0] < best_ms:
                best_ms, best = priced[kept[0]]
        if best is None:
            return None
        return best_ms, [
            (table, dim, device, self.task.tables[table].rows)
            for device, held in enumerate(best)
            for table, dim in held
        ]


class Predictor:
    """The cost model's nets as torch modules; features of a shard are looked up, everything else is computed at batch 1."""

    def __init__(self, task: ShardingTask, model: TrainedCostModel) -> None:
        torch.set_num_threads(1)
        self.task, self.model, self.nets = task, model, TorchNets(model, task.devices)
        self.features: dict[Shard, torch.Tensor] = {}

    @torch.inference_mode()
    def compute_ms(self, shards: Sequence[Shard]) -> float:
        return float(self.nets.compute(torch.stack([self._features(shard) for shard in shards])))

    @torch.inference_mode()
    def slowest_ms(self, compute_ms: Sequence[float], dims: Sequence[float]) -> float:
        """Compute, backward all-to-all, then the forward all-to-all, which waits for the last to be ready."""
        if len(dims) == 1:
            return compute_ms[0]
        columns = torch.tensor(dims, dtype=torch.float64)
        ready = torch.tensor(compute_ms, dtype=torch.float64) + self.nets.backward(columns)
        forward = self.nets.forward(columns, ready - ready.min())
        return float((ready + forward).max())

    def launched_ms(self, shards: Sequence[Shard]) -> float:
        return launched_ms(
            self.model, self.task, [(table, dim, 0, self.task.tables[table].rows) for table, dim in shards]
        )

    def _features(self, shard: Shard) -> torch.Tensor:
        if shard not in self.features:
            self.features[shard] = self.nets.features(self.task.tables[shard[0]], shard[1])
        return self.features[shard]
