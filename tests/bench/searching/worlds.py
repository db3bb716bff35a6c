"""Worlds: the formula with other constants, drawn at random around its own. What is tuned to one world fails in others.

A world is named by its seed; world 0 is the formula as it is. Drawn are bandwidths, cache, launches, sort passes or none, how
much is overlapped, and links.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np

from neuroshard.measure import formula

# A constant of the formula -> the factor, to either side, that it is drawn within
FACTORS = {
    "HBM_BYTES": 2.5,
    "CACHE_BYTES": 2.0,
    "CACHE_SIZE": 4.0,
    "FORWARD_VECTORS": 2.0,
    "BACKWARD_VECTORS": 2.0,
    "BAGS_IN_FLIGHT": 2.0,
    "LOOKUP_MS": 2.0,
    "FORWARD_LAUNCH_MS": 3.0,
    "BACKWARD_LAUNCH_MS": 3.0,
    "FORWARD_TABLE_MS": 3.0,
    "BACKWARD_TABLE_MS": 3.0,
    "LINK_BYTES": 3.0,
    "BACKWARD_LINK_BYTES": 3.0,
    "BASE_LATENCY_MS": 2.0,
    "PEER_LATENCY_MS": 2.0,
}


def constants(world: int) -> dict[str, float]:
    """The formula's constants in a world."""
    if world == 0:
        return {}
    rng = np.random.default_rng([world, 24])
    drawn = {name: getattr(formula, name) * factor ** rng.uniform(-1, 1) for name, factor in FACTORS.items()}
    drawn["SORT_BYTES"] = formula.SORT_BYTES * float(rng.choice([0.0, 0.5, 1.0, 2.0]))  # no sort in some worlds
    drawn["OVERLAP"] = float(rng.choice([1.0, 2.0, 4.0, 8.0]))  # 1: nothing overlaps
    drawn["SHARED_WAIT"] = float(rng.uniform(0.4, 1.0))
    return drawn


@contextmanager
def lived_in(world: int) -> Iterator[None]:
    """All costs by the formula are those of a world."""
    changed = constants(world)
    with ExitStack() as stack:
        for name, value in changed.items():
            stack.enter_context(patch.object(formula, name, value))
        operator_ms = formula.FORWARD_LAUNCH_MS + formula.BACKWARD_LAUNCH_MS
        stack.enter_context(patch.object(formula.Formula, "operator_ms", operator_ms))
        yield
