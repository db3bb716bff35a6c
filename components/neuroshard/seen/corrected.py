"""Cost models whose times are multiplied, as trainers saw them: `analytic:h100*1.3*0.9`, of lookups and of exchanges."""

import copy
import re
from dataclasses import replace
from typing import Any

from neuroshard.core.errors import UsageError
from neuroshard.costmodel.analytic import Analytic
from neuroshard.costmodel.bundle import TrainedCostModel
from neuroshard.costmodel.protocol import CostModel

LEAST, MOST = 1e-3, 1e3
LOOKUP_TIMES = ("forward_launch_ms", "backward_launch_ms", "memory_wait_ms", "cache_wait_ms", "lookup_ms")
EXCHANGE_TIMES = ("latency_ms", "network_latency_ms")


def suffix(lookups: float, exchanges: float) -> str:
    """What follows the name of a cost model: four digits of each factor."""
    return f"*{lookups:.4g}*{exchanges:.4g}"


def factors_of(name: str) -> tuple[str, tuple[float, ...]]:
    """The name of a cost model without its suffix, and the two factors; none where it has no suffix."""
    found = re.fullmatch(r"([^*]+)\*(\d+(?:\.\d+)?)\*(\d+(?:\.\d+)?)", name)
    return (found[1], (float(found[2]), float(found[3]))) if found else (name, ())


def are_bounded(lookups: float, exchanges: float) -> bool:
    """Whether a cost model can be corrected by these factors."""
    return LEAST <= min(lookups, exchanges) <= max(lookups, exchanges) <= MOST


def corrected(model: CostModel, lookups: float, exchanges: float) -> CostModel:
    """The same model whose lookups and exchanges take so many times longer. Raises UsageError."""
    if not are_bounded(lookups, exchanges):
        given = f"{lookups:g} and {exchanges:g}"
        raise UsageError(f"a cost model is corrected by factors of {LEAST:g} to {MOST:,.0f}, not {given}")
    by = suffix(lookups, exchanges)
    _, (lookups, exchanges) = factors_of(f"model{by}")  # as the name says them
    if isinstance(model, Analytic):
        found, sheet = copy.copy(model), model.sheet
        times = {**dict.fromkeys(LOOKUP_TIMES, lookups), **dict.fromkeys(EXCHANGE_TIMES, exchanges)}
        times |= {"memory": 1 / lookups, "cache": 1 / lookups, "link": 1 / exchanges, "network": 1 / exchanges}
        changed: dict[str, Any] = {field: getattr(sheet, field) * factor for field, factor in times.items()}
        found.name, found.sheet = model.name + by, replace(sheet, **changed)
        return found
    if isinstance(model, TrainedCostModel):
        of = {"compute": lookups, "forward": exchanges, "backward": exchanges}
        nets: dict[str, Any] = {part: getattr(model.nets, part) for part in of}
        nets = {part: net and replace(net, unit_ms=net.unit_ms * of[part]) for part, net in nets.items()}
        return replace(model, nets=replace(model.nets, **nets), by=by)
    raise UsageError(f"{model.name} cannot be corrected: given costs are what they are; correct their file")
