"""How many devices, of which kind, with how much memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from neuroshard.api.arguments import public, takes
from neuroshard.api.plans import stop_event, tables_or_file
from neuroshard.core.notebook import frame, html_table
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table
from neuroshard.core.units import format_bytes
from neuroshard.orders import values as take
from neuroshard.orders.sizes import MOST_PROCESSES, SizeOptions, size_order
from neuroshard.orders.values import FilePath

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from neuroshard.size.run import Sizes as Found

COLUMNS = (
    "model",
    "devices",
    "memory_bytes",
    "state",
    "step_ms",
    "lower_bound_ms",
    "samples_per_s",
    "basis",
    "frontier",
)


@dataclass(frozen=True, repr=False)
class Sizes:
    """A row for each size: a kind of hardware, so many devices of it, so much memory. `data` is what `neuroshard size --json`
    prints, `str(sizes)` its text."""

    found: Found

    @property
    def data(self) -> dict[str, Any]:
        """`rows`, of which those that fit have step_ms, lower_bound_ms, samples_per_s and others; `frontier`, their places;
        `memory_frontiers`, `fewest_devices` and `notes`."""
        return self.found.data

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of every row of the frontiers, by a file name that says the size."""
        from neuroshard.size.rows import plans_of

        return plans_of(self.found.rows)

    def write(self, folder: str | Path) -> list[Path]:
        """Write the plans of the frontiers into a folder, which is made; the paths. Raises NeuroshardError where that fails."""
        from neuroshard.files.disk import disk_errors
        from neuroshard.files.plan import write_plan

        written = []
        with disk_errors(Path(folder), "write plans into it"):
            Path(folder).mkdir(parents=True, exist_ok=True)
        for name, plan in self.plans.items():
            write_plan(Path(folder) / name, plan)
            written.append(Path(folder) / name)
        return written

    def save(self, path: str | Path) -> int:
        """Write an HTML page with pictures and all rows; its size in bytes.

        Raises NeuroshardError for a path that cannot be written.
        """
        from neuroshard.report.page import write_page
        from neuroshard.size.shown import sizes_page

        return write_page(Path(path), sizes_page(self.found))

    def to_frame(self) -> pd.DataFrame:
        """One row a size. Raises NeuroshardError where pandas is missing."""
        return frame(self._columns())

    def _columns(self) -> dict[str, list[Any]]:
        rows = self.data["rows"]
        names = [*COLUMNS, *(["money_per_billion_samples"] if self.found.order.priced else [])]
        return {name: [row.get(name) for row in rows] for name in names}

    def __str__(self) -> str:
        from neuroshard.size.shown import sizes_text

        return sizes_text(self.found)

    def __repr__(self) -> str:
        rows, best = self.found.rows, self.found.frontier
        fitting = sum(row.fits for row in rows)
        return f"Sizes: {fitting} of {len(rows)} fit, {len(best)} that no other beats"

    def _repr_html_(self) -> str:
        columns = self._columns()
        columns["memory"] = list(map(format_bytes, columns.pop("memory_bytes")))
        return html_table(repr(self), columns, self.data["notes"])


@public
@takes(SizeOptions)
def size(
    tables: FilePath | nn.Module | pd.DataFrame | Iterable[Table | Mapping[str, Any]],
    models: Sequence[str] | str,
    *,
    processes: int = 1,
    quiet: bool = False,
    stop: threading.Event | None = None,
    **options: Unpack[SizeOptions],
) -> Sizes:
    """How many devices, of which kind, with how much memory, for which step time and money; as `neuroshard size`.

    `tables` is whatever `search` takes, `models` the names of cost models, one a kind of hardware. `devices` may be a list, as in
    [4, 12]. What differs by kind is a list of texts, each a value for all kinds or KIND=VALUE: memory=["80GiB,40GiB",
    "analytic:b200=179GiB"], price=["analytic:h100=2.40/h"], dense_time=["12ms@8192"].

    `processes` other than 1 start Python anew: a script then needs `if __name__ == "__main__":`. Once `stop` is set, or the
    `time_budget` is spent, what was found is returned.

    OPTIONS

    Raises UsageError for an invalid argument, InvalidInput for a fault in a file, Infeasible if no size fits, StoreError; all are
    NeuroshardError, in one line.

    >>> import neuroshard as ns
    >>> tables = [{"name": f"t{i}", "rows": 100_000, "dim": 64, "pooling_factor": 10.0} for i in range(8)]
    >>> sizes = ns.size(tables, ["analytic:h100", "analytic:a100"], devices="1-4", batch_size=4096, rounds=1, quiet=True)
    >>> sizes
    Sizes: 6 of 6 fit, 3 that no other beats
    """
    from neuroshard.core.clean import silent

    with silent(take.switch("quiet", quiet)):
        from neuroshard.size.run import run

        names = (
            [take.name("models", models, "the name of a cost model")]
            if isinstance(models, str)
            else take.several("models", models)
        )
        order = size_order(names, **options)
        count = take.whole("processes", processes, 1, MOST_PROCESSES)
        return Sizes(run(tables_or_file(tables), order, stop=stop_event(stop), processes=count))
