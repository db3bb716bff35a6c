"""Tables -> cases beyond HBM: one to four tables behind caches that miss a known share of their rows, or in host memory.

They give a few constants (pretrain/tiers.py), so a few dozen are enough. The tables are made unlike each other in width,
rows and lookups, as those of plans are. Test cases are of the same tables: constants do not learn tables by heart.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from neuroshard.augment.pools import MAX_POOLING_CHANGE, held_shard, in_order, log_uniform, widths
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import TierCase
from neuroshard.core.table import Table

TIER_CASES: Final = 48  # for each kind of GPU: a minute or two of it, by our guess
# Of a batch's distinct rows: of a cache that holds them all, to one that is of no use
MISSED_SHARES: Final = (0.0, 0.05, 0.2, 0.5, 1.0)
HOST_EVERY, TEST_EVERY = 3, 4  # with the number of shares, these have no common divisor: all kinds of cases occur
ONE_TABLE_SHARE: Final = 0.5
MOST_TABLES: Final = 4
CASE_BYTES: Final = 4 * 2**30  # of weights: far more than any cache of a GPU, and written in seconds
NARROWEST: Final = 8  # columns; narrower shards are hardly worth a tier of their own
# Rows that batches need, over those that one reads: of a host's tables all move on (measure/timing/beyond_hbm.py)
ROWS_A_BATCH: Final = 6
USUAL_BATCH_SIZE: Final = 65536  # where cases have the batch size that they are measured with
_OWN_STREAM: Final = 0x71E25  # reads TIERS: the other cases are drawn as they are without these
_TRIES: Final = 1000


def draw_tiers(tables: Sequence[Table], settings: AugmentSettings) -> tuple[TierCase, ...]:
    """The settings' `tier_cases`, all distinct; fewer where there are no more. Deterministic for a seed."""
    rng = np.random.default_rng([settings.seed, _OWN_STREAM])
    shards = [shard for table in tables if table.pooling_factor > 0 for shard in held_shard(table, settings.max_dim)]
    cases: dict[str, TierCase] = {}
    for number in range(settings.tier_cases if shards else 0):
        for _ in range(_TRIES):
            case = _draw(number, shards, settings, rng)
            if case.case_id not in cases:
                cases[case.case_id] = case
                break
    return tuple(cases.values())


def _draw(number: int, shards: Sequence[Table], settings: AugmentSettings, rng: np.random.Generator) -> TierCase:
    several = 1 if rng.random() < ONE_TABLE_SHARE else int(rng.integers(2, MOST_TABLES + 1))
    batch_size = int(rng.choice(settings.batch_sizes)) if settings.batch_sizes else None
    chosen = rng.choice(len(shards), size=several, replace=several > len(shards))
    each = CASE_BYTES // several
    in_host = number % HOST_EVERY == HOST_EVERY - 1
    return TierCase(
        tables=in_order(
            _resized(shards[place], batch_size or USUAL_BATCH_SIZE, each, settings, rng) for place in chosen
        ),
        tier="host" if in_host else "cached",
        missed_share=0.0 if in_host else MISSED_SHARES[number % len(MISSED_SHARES)],
        split="test_sets" if number % TEST_EVERY == TEST_EVERY - 1 else "train",
        batch_size=batch_size,
    )


def _resized(
    table: Table, batch_size: int, most_bytes: int, settings: AugmentSettings, rng: np.random.Generator
) -> Table:
    """The table in another width, with other lookups (1/4 to 4 times), and with fewer rows where its weights are too many."""
    wanted = log_uniform(NARROWEST, max(settings.max_dim, table.dim, NARROWEST), rng)
    dim = min(widths(table, settings.max_dim), key=lambda width: abs(width - wanted))
    most_rows = most_bytes // (dim * table.element_bytes)
    pooling = table.pooling_factor * log_uniform(1 / MAX_POOLING_CHANGE, MAX_POOLING_CHANGE, rng)
    pooling = min(max(pooling, min(table.pooling_factor, 1.0)), most_rows / (ROWS_A_BATCH * batch_size))
    return table.resized(min(table.rows, most_rows), dim, pooling)
