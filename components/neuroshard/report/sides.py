"""This plan and the live one, side by side: what each costs, how it cuts its tables, and what it fills."""

from collections import Counter
from typing import NamedTuple

from neuroshard.core.plan import Plan, shardings_of
from neuroshard.core.sharding import SHARDINGS
from neuroshard.core.units import format_bytes
from neuroshard.report.live import PlanChange

NOT_KNOWN = "–"


class Side(NamedTuple):
    """One line: its subject, the live plan's value, this plan's value."""

    what: str
    live: str
    this: str


def sides(plan: Plan, change: PlanChange) -> list[Side]:
    """The lines: costs and memory always, other facts only where the two plans differ."""
    live = change.live.plan
    of_live, of_this = (_facts(one, ms) for one, ms in ((live, change.live_ms), (plan, plan.predicted_ms)))
    always = {"slowest device", "mean device", "fullest device"}
    return [
        Side(what, of_live[what], of_this[what]) for what in of_this if what in always or of_live[what] != of_this[what]
    ]


def _facts(plan: Plan, ms: tuple[float, ...] | None) -> dict[str, str]:
    counted = Counter(shardings_of(plan).values())
    used, limits = plan.memory_bytes(), plan.task.usable_bytes
    fullest = max(range(len(used)), key=lambda device: used[device] / limits[device])
    topology, beyond = plan.task.topology, plan.parted.constraints.beyond_hbm
    return {
        "slowest device": f"{max(ms):.3f} ms, predicted" if ms else NOT_KNOWN,
        "mean device": f"{sum(ms) / len(ms):.3f} ms, predicted" if ms else NOT_KNOWN,
        "fullest device": f"{format_bytes(used[fullest])} of {format_bytes(limits[fullest])}",
        "tables": f"{len(plan.task.tables):,}",
        "shards": f"{len(plan.shards):,}",
        **{f"tables {sharding.words}": f"{counted[sharding]:,}" for sharding in SHARDINGS},
        "tables cached": f"{sum(rule.tier == 'cached' for rule in beyond.values()):,}",
        "tables in host memory": f"{sum(rule.tier == 'host' for rule in beyond.values()):,}",
        "fullest host": NOT_KNOWN if not beyond else format_bytes(max(plan.host_memory())),
        "devices": f"{plan.task.devices:,}",
        "hosts": NOT_KNOWN if topology is None else topology.text(plan.task.devices),
        "groups": "none" if plan.task.groups is None else plan.task.groups.text(plan.task.devices),
        "pipeline": plan.task.pipeline or NOT_KNOWN,
        "batch": f"{plan.task.global_batch_size:,}",
        "collectives": plan.task.collective_precision.text if plan.task.collective_precision else "fp32",
        "found by": plan.provenance.algorithm,
    }
