"""Tables drawn at random."""

from collections.abc import Sequence

import numpy as np

from neuroshard.core.table import Table


def drawn_tables(
    rng: np.random.Generator, count: int, *, rows: tuple[float, float], dims: Sequence[int] = (16, 32, 64, 128)
) -> tuple[Table, ...]:
    """With 10 to the power of `rows` rows, and 1 to 20 lookups."""
    return tuple(
        Table(
            name=f"t{i}",
            rows=int(10 ** rng.uniform(*rows)),
            dim=int(rng.choice(dims)),
            pooling_factor=float(np.exp(rng.uniform(0, 3))),
        )
        for i in range(count)
    )
