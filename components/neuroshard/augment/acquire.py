"""Of many cases drawn at random, first those that a cost model would learn most from: where its nets disagree.

neuroshard augment tables.json --acquire model/ --compute-cases 500 … -o cases2/
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from neuroshard.core.case import ComputeCase
from neuroshard.costmodel.open import at_batch_size
from neuroshard.costmodel.protocol import CostModel, Floats

CANDIDATES: Final = 20  # drawn for every case that is kept
SHARPNESS: Final = 2.0  # a case that is twice as uncertain is this power of 2 likelier to come first
_CHUNK: Final = 2_000  # cases whose features are computed at once


def acquire(candidates: Sequence[ComputeCase], model: CostModel, rng: np.random.Generator) -> list[ComputeCase]:
    """The candidates, drawn one after another in proportion to a power of the model's relative spread.

    So the most uncertain come first, and yet not sets of one kind only, which would teach one lesson many times. Where the
    model knows no spread their order is random.
    """
    uncertain = np.maximum(relative_spread(candidates, model), 1e-12)
    keys = SHARPNESS * np.log(uncertain) + rng.gumbel(size=len(uncertain))
    return [candidates[i] for i in np.argsort(-keys, kind="stable")]


def relative_spread(cases: Sequence[ComputeCase], model: CostModel) -> Floats:
    """The predicted standard deviation of each case's cost, as a share of it: (cases,)."""
    spread = np.zeros(len(cases))
    for batch_size in sorted({case.batch_size or 0 for case in cases}):
        at = at_batch_size(model, batch_size or None)
        of_size = np.array([i for i, case in enumerate(cases) if (case.batch_size or 0) == batch_size])
        for chunk in np.array_split(of_size, -(-len(of_size) // _CHUNK)):
            spread[chunk] = _relative_spread([cases[i] for i in chunk], at)
    return spread


def _relative_spread(cases: Sequence[ComputeCase], model: CostModel) -> Floats:
    tables = [table for case in cases for table in case.tables]
    starts = np.cumsum([0, *(len(case.tables) for case in cases)])[:-1]
    dims = np.array([table.dim for table in tables], dtype=np.int64)
    sums = np.add.reduceat(model.table_vectors(tables, dims), starts, axis=0)
    columns = np.add.reduceat(dims, starts).astype(np.float64)
    share: Floats = model.spread_ms(sums[:, None, :], columns[:, None])[:, 0] / np.maximum(model.compute_ms(sums), 1e-9)
    return share
