"""In-batch repeats, sent once: TorchRec's `use_index_dedup` of EmbeddingCollections.

Each rank looks up and sends each distinct id of its own batch once, and copies the rows to all places of their ids. A sequence
held so stands in `ShardingTask.parted` as a table with fewer lookups. Hot rows make no hot blocks then: each rank sends one once.
"""

import math

from neuroshard.core.part import Part
from neuroshard.core.reuse import uniform_bins
from neuroshard.core.table import Table


def sent_once(table: Table, batch_size: int, ranks: int) -> Table:
    """The table that stands for a sequence whose ids are sent once by each of so many ranks, of a global batch of `batch_size`
    samples. Its lookups are the distinct ids of all ranks: of a row with λ lookups in the batch `ranks` (1 - exp(-λ / ranks)).
    Without an access curve rows are taken to be read alike."""
    own, curve = batch_size / ranks, table.access
    distinct = Part.of(table).distinct_rows(own)
    if curve is not None:
        each = [-ranks * math.expm1(-lookups / ranks) for _, lookups in curve.rates(batch_size)]
        distinct = math.fsum(map(math.prod, zip(curve.group_rows, each, strict=True))) / ranks
        scaled = tuple(lookups * curve.batch_size / batch_size for lookups in each)
        curve = curve.model_copy(update={"lookups_per_row": scaled})
    found = table.resized(table.rows, table.dim, distinct / own)
    bins = uniform_bins(table.rows, distinct / own, batch_size) if curve is None else curve.reuse_bins(batch_size)
    counted = {"reuse_bins": bins, "reuse_batch_size": batch_size, "access": curve}
    found = found.model_copy(update={**counted, "row_order": None, "lookups_by_id": ()})
    found._every_lookup = table.pooling_factor
    return found
