"""What a nightly run costs on a cluster: its pods, how many there are at once, and how long they take one after another.

Kubeflow Pipelines makes two pods of a step (a driver, then the step itself) and a driver of every pipeline inside of it, of
every loop and of every item of a loop.
"""

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

POD_SECONDS = 10.0  # at least, from one pod to the next: Argo checks every 10 s (KFP 2.17 with Argo 4.0.5)


class NightCost(NamedTuple):
    """The pods of a run, the longest chain of pods that wait for each other, and the most pods at once. The items of a loop run
    at once, as many as its iteratorPolicy allows."""

    pods: int
    in_a_row: int
    at_once: int

    @property
    def seconds(self) -> float:
        """The least time of a run: if steps take no time and no pod waits for a node."""
        return self.in_a_row * POD_SECONDS


def night_cost(spec: Mapping[str, Any], items: Mapping[str, int]) -> NightCost:
    """The cost of a run whose loops have this many `items` each, by the output or parameter that they come from."""
    inside = _dag(spec, spec["root"]["dag"], items)
    return NightCost(1 + inside.pods, 1 + inside.in_a_row, inside.at_once)  # the root has a driver too


def _dag(spec: Mapping[str, Any], dag: Mapping[str, Any], items: Mapping[str, int]) -> NightCost:
    costs = {name: _task(spec, task, items) for name, task in dag["tasks"].items()}
    ends: dict[str, int] = {}

    def end(name: str) -> int:
        if name not in ends:
            before = dag["tasks"][name].get("dependentTasks", ())
            ends[name] = max(map(end, before), default=0) + costs[name].in_a_row
        return ends[name]

    pods, in_a_row = sum(cost.pods for cost in costs.values()), max(map(end, costs), default=0)
    return NightCost(pods, in_a_row, _at_once(dag, {name: cost.at_once for name, cost in costs.items()}))


def _at_once(dag: Mapping[str, Any], pods: Mapping[str, int]) -> int:
    """The most pods of tasks of which none waits for another. A pipeline has a handful of tasks, so all sets are tried."""
    before: dict[str, set[str]] = {}

    def all_before(name: str) -> set[str]:
        if name not in before:
            direct = set(dag["tasks"][name].get("dependentTasks", ()))
            before[name] = direct.union(*map(all_before, direct))
        return before[name]

    def apart(names: tuple[str, ...]) -> bool:
        return not any(one in all_before(other) for one in names for other in names)

    sets = (names for size in range(1, len(pods) + 1) for names in combinations(pods, size))
    return max((sum(pods[name] for name in names) for names in sets if apart(names)), default=1)


def _task(spec: Mapping[str, Any], task: Mapping[str, Any], items: Mapping[str, int]) -> NightCost:
    component = spec["components"].get(task["componentRef"]["name"], {})
    if "dag" not in component:
        return NightCost(2, 2, 1)
    one = _dag(spec, component["dag"], items)
    loop = task.get("parameterIterator", {}).get("items", {}).get("inputParameter")
    if loop is None:
        return NightCost(1 + one.pods, 1 + one.in_a_row, one.at_once)
    count = items[loop.rpartition("-")[2]]  # pipelinechannel--survey-names: the name of the output or parameter
    limit = task.get("iteratorPolicy", {}).get("parallelismLimit") or max(count, 1)
    return NightCost(
        1 + count * (1 + one.pods),
        1 + math.ceil(count / limit) * (1 + one.in_a_row),
        max(min(count, limit) * one.at_once, 1),
    )
