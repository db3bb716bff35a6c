"""What a cache in HBM misses, and how much HBM all caches need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroshard.api.arguments import public
from neuroshard.api.results import Tables
from neuroshard.api.sources import tables as tables_of
from neuroshard.core.errors import UsageError
from neuroshard.core.notebook import frame, html_table
from neuroshard.core.table import Table
from neuroshard.core.text import counted
from neuroshard.core.value import shown
from neuroshard.orders import values as take
from neuroshard.orders.values import FilePath

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from neuroshard.report.cache import CacheMisses


@dataclass(frozen=True, repr=False)
class Cache:
    """Misses of each table's cache by rows kept in HBM. `data` is what `neuroshard cache --json` prints, `str(cache)` its
    text."""

    misses: CacheMisses

    @property
    def data(self) -> dict[str, Any]:
        """`tables` with rows, distinct_rows, and lists cached_rows, missed_rows and warm_up_batches; `model` with what it
        needs."""
        return self.misses.data

    @property
    def torchrec_stats(self) -> dict[str, Any]:
        """The arguments of TorchRec's `EmbeddingOffloadStats` by table; `mrc_hist_counts` becomes a tensor."""
        return self.misses.torchrec_stats()

    def save(self, path: str | Path) -> int:
        """Write an HTML page with curves of the tables, HBM of the model and all figures; its size in bytes.

        Raises NeuroshardError for a path that cannot be written.
        """
        from neuroshard.report.cache import cache_page
        from neuroshard.report.page import write_page

        return write_page(Path(path), cache_page(self.misses))

    def to_frame(self) -> pd.DataFrame:
        """A row a table and load factor: cached_rows, distinct_rows, missed_rows and warm_up_batches.

        Raises NeuroshardError where pandas is missing.
        """
        return frame(self._columns())

    def _columns(self) -> dict[str, list[Any]]:
        factors = self.data["load_factors"]
        of_tables = [(one, place) for one in self.data["tables"] for place in range(len(factors))]
        alike = {name: [one[name] for one, _ in of_tables] for name in ("table", "rows", "distinct_rows")}
        each = ("cached_rows", "missed_rows", "warm_up_batches")
        by_factor = {name: [one[name][place] for one, place in of_tables] for name in each}
        return {**alike, "load_factor": [factors[place] for _, place in of_tables], **by_factor}

    def __str__(self) -> str:
        from neuroshard.report.cache import cache_text

        return cache_text(self.misses)

    def __repr__(self) -> str:
        tables, samples = len(self.data["tables"]), self.data["batch_size"]
        return f"Cache misses of {counted(tables, 'table')} a step of {counted(samples, 'sample')}, predicted"

    def _repr_html_(self) -> str:
        return html_table(repr(self), self._columns(), self.data["notes"])


@public
def cache(
    tables: FilePath | nn.Module | pd.DataFrame | Iterable[Table | Mapping[str, Any]],
    *,
    batch_size: int,
    load_factors: Sequence[float | str] | None = None,
    quiet: bool = False,
) -> Cache:
    """Which rows an LRU cache in HBM misses, as `neuroshard cache` predicts it.

    `tables` is whatever `ns.tables` takes, `batch_size` the samples of a step over all ranks. `load_factors` are shares of a
    table's rows that are cached, such as [0.05, "20%"]. Notes on what the figures assume go to stderr unless `quiet`.

    Raises UsageError and InvalidInput; both are NeuroshardError, in one line.

    >>> import neuroshard as ns
    >>> tables = ns.tables([{"name": "user", "rows": 1_000_000, "dim": 64, "pooling_factor": 3.0, "access": "zipf:1.05"}])
    >>> missed = ns.cache(tables, batch_size=65536, load_factors=[0.1])
    >>> missed.data["tables"][0]["cached_rows"]
    [100000]
    """
    from neuroshard.core.clean import log
    from neuroshard.report.cache import LOAD_FACTORS, cache_misses

    batch_size, quiet = take.whole("batch_size", batch_size), take.switch("quiet", quiet)
    if load_factors is not None and not isinstance(load_factors, list | tuple):
        raise UsageError(f"load_factors is a list of shares, as in [0.05, 0.2], not {shown(load_factors)}")
    factors = LOAD_FACTORS if load_factors is None else [take.portion("load_factors", one) for one in load_factors]
    listed = tables if isinstance(tables, Tables) else tables_of(tables, quiet=quiet)
    found = Cache(cache_misses(listed, batch_size, factors))
    if not quiet:
        log(*(f"note: {note}" for note in found.data["notes"]))
    return found
