"""The batched search against the same told plainly, one placement and one question at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest

from helpers.analytic import AnalyticModel
from helpers.parts import cut_to
from neuroshard.core.part import Part
from neuroshard.core.task import ShardingTask
from neuroshard.search.proposers.lockstep import Devices, Shards, place
from neuroshard.search.run import search
from neuroshard.search.settings import SearchSettings
from neuroshard.search.tuning import TUNING, BeamWidth


class Plainly:
    """The NeuroShard paper's search, one set of tables at a time. A shard is (table, columns)."""

    def __init__(self, task: ShardingTask, model: AnalyticModel) -> None:
        self.task, self.model = task, model

    def nbytes(self, shard: tuple[int, int]) -> int:
        table = self.task.tables[shard[0]]
        return Part(table, table.rows, shard[1]).memory().total

    def compute_ms(self, shards: list[tuple[int, int]]) -> float:
        if not shards:
            return 0.0
        vectors = [self.model.part_vectors(cut_to([self.task.tables[t]], [dim]))[0] for t, dim in shards]
        return float(self.model.compute_ms(np.sum(vectors, axis=0)))

    def cost_ms(self, devices: list[list[tuple[int, int]]]) -> float:
        dims = np.array([float(sum(dim for _, dim in shards)) for shards in devices])
        compute = np.array([self.compute_ms(shards) for shards in devices])
        backward = self.model.backward_collective_ms(dims)
        ready = compute + backward
        return float((ready + self.model.forward_collective_ms(dims, ready - ready.min())).max())

    def order(self, shards: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return sorted(shards, key=lambda s: (-self.compute_ms([s]), -self.nbytes(s), s))

    def greedy(self, shards: list[tuple[int, int]], cap: float) -> list[list[tuple[int, int]]] | None:
        devices: list[list[tuple[int, int]]] = [[] for _ in self.task.device_memory_bytes]
        for shard in self.order(shards):
            choices = []
            for device, held in enumerate(devices):
                free = self.task.device_memory_bytes[device] - sum(map(self.nbytes, held))
                if self.nbytes(shard) <= free and sum(dim for _, dim in [*held, shard]) <= cap:
                    choices.append((self.compute_ms(held), -free, device))
            if not choices:
                return None
            devices[min(choices)[-1]].append(shard)
        return devices

    def best_ms(self, shards: list[tuple[int, int]], grid: int) -> float:
        mean = sum(dim for _, dim in shards) / self.task.devices
        placed = [self.greedy(shards, mean * scale) for scale in np.linspace(1.0, 1.5, grid)]
        return min((self.cost_ms(devices) for devices in placed if devices), default=math.inf)

    def search_ms(self, candidates: int, beam: int, depth: int, grid: int) -> float:
        states = [self.order([(t, table.dim) for t, table in enumerate(self.task.tables)])]
        best = self.best_ms(states[0], grid)
        for _ in range(depth):
            children = []
            for shards in states:
                largest = sorted(range(len(shards)), key=lambda i: -self.nbytes(shards[i]))[:candidates]
                for i in sorted({*range(min(candidates, len(shards))), *largest}):
                    table, dim = shards[i]
                    if dim % 8 == 0:
                        children.append(
                            self.order([*shards[:i], *shards[i + 1 :], (table, dim // 2), (table, dim // 2)])
                        )
            priced = sorted(((self.best_ms(shards, grid), n) for n, shards in enumerate(children)))[:beam]
            states = [children[n] for _, n in priced]
            best = min([best, *(ms for ms, _ in priced)])
        return best


@pytest.mark.parametrize("seed", range(6))
def test_neuroshard_2023_finds_the_plan_of_a_plain_search_that_prices_one_set_at_a_time(make_task, model, seed):
    rng = np.random.default_rng(seed)
    shapes = [(int(10 ** rng.uniform(3, 6)), int(rng.choice([4, 16, 32, 64])), rng.uniform(0, 100)) for _ in range(7)]
    task = make_task(shapes, [1.0, 0.5, 0.4])
    effort = {"candidates": 2, "beam": 2, "depth": 3, "grid": 4}
    plan = search(task, model, SearchSettings(algorithm="neuroshard-2023", width=BeamWidth(**effort)))
    assert plan.cost_ms == pytest.approx(Plainly(task, model).search_ms(**effort), rel=1e-12)


def test_the_published_search_asks_the_cost_model_in_batches(make_task, model):
    rng = np.random.default_rng(1)
    shapes = [(int(10 ** rng.uniform(3, 6)), 128, rng.uniform(0, 100)) for _ in range(26)]
    search(make_task(shapes, [4.0] * 4), model, SearchSettings(algorithm="neuroshard-2023"))
    sizes = [math.prod(shape[:-1]) for shape in model.asked]
    steps = (26 + 10) * 11  # shards x levels; a plain one would ask some 36 x 11 x 11 x 60 times
    assert len(sizes) <= steps + 60
    assert np.median(sizes) >= 100


def test_memory_of_the_running_sums_is_bounded_by_going_in_chunks(make_task):
    rng = np.random.default_rng(1)
    shapes = [(int(10 ** rng.uniform(3, 6)), 64, rng.uniform(0, 100)) for _ in range(12)]
    task = make_task(shapes, [4.0] * 4)
    at_once = search(task, AnalyticModel(), SearchSettings(algorithm="neuroshard-2023"))
    assert (
        search(
            task, AnalyticModel(), SearchSettings(algorithm="neuroshard-2023", tuning=replace(TUNING, lockstep_bytes=1))
        )
        == at_once
    )


def lay(
    weights: list[float],
    nbytes: list[int],
    dims: list[int],
    caps: list[float],
    memory: list[int],
    soft: bool = False,
    allowed: list[list[bool]] | None = None,
) -> list[list[int]]:
    """Devices of one order of shards under each cap, weighed by plain sums."""
    permitted = None if allowed is None else np.array(allowed)
    shards = Shards(np.array(weights)[:, None], np.array(dims), np.array(nbytes), permitted)
    devices = Devices(np.array(memory), lambda sums: sums[..., 0])
    placed = place(shards, devices, np.arange(len(weights))[None], np.array(caps)[None], soft)
    return placed.devices[0].tolist()


def test_the_greedy_takes_the_lightest_device_with_room():
    assert lay([5, 4, 3, 2], [1, 1, 1, 1], [4] * 4, [np.inf], [9, 9]) == [[0, 1, 1, 0]]
    assert lay([5, 4, 3, 2], [1, 1, 1, 1], [4] * 4, [np.inf], [9, 1]) == [[0, 1, 0, 0]]
    assert lay([5, 4, 3, 2], [1, 1, 1, 1], [4] * 4, [8, 4], [9, 9]) == [[0, 1, 1, 0], [0, 1, -1, -1]]


def test_a_soft_cap_gives_way_to_the_fewest_columns_where_there_are_bytes():
    dims, no_first = [8, 4, 4], [[True, True], [True, True], [False, True]]
    assert lay([5, 4, 3], [1, 1, 1], dims, [8], [9, 9], soft=True) == [[0, 1, 1]]
    assert lay([5, 4, 3], [1, 1, 1], dims, [4], [9, 9], soft=True) == [[0, 1, 1]]
    assert lay([5, 4, 3], [1, 1, 1], [8, 4, 8], [4], [9, 1], soft=True) == [[0, 1, 0]]
    assert lay([4, 5, 3], [1, 1, 1], [4, 8, 4], [4], [9, 9], soft=True, allowed=no_first) == [[0, 1, 1]]
    assert lay([5, 4, 3], [1, 1, 1], dims, [8], [1, 1], soft=True) == [[0, 1, -1]]


def test_equally_light_devices_are_distinguished_by_free_memory():
    assert lay([0, 0, 0], [2, 2, 2], [4] * 3, [np.inf], [5, 6]) == [[1, 0, 1]]


def test_a_shard_without_columns_changes_nothing():
    assert lay([5, 0, 3], [1, 0, 1], [4, 0, 4], [np.inf], [9, 9]) == [[0, 1, 1]]
