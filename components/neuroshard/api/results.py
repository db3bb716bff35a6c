"""What the verbs of the Python API return: frozen values with a `repr` of two lines, HTML for notebooks, and `to_frame()`."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from neuroshard.core.notebook import frame, html_table
from neuroshard.core.plan import DeviceCost
from neuroshard.core.release import Decision, Release
from neuroshard.core.table import Table
from neuroshard.core.text import counted, short_name, wrapped
from neuroshard.core.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

REPORT_HEIGHT = 800  # pixels of a report in a notebook; it scrolls inside


class Tables(tuple[Table, ...]):
    """Embedding tables, distinct by name: a tuple of `Table`, with the `notes` on what was assumed or left out.

    >>> import neuroshard as ns
    >>> tables = ns.tables("mlperf-dlrm-dcnv2")
    >>> tables
    Tables: 26 tables, 98.1 GiB with optimizer state
    >>> tables[0].name, tables[0].rows, tables[0].dim
    ('cat_0', 40000000, 128)
    """

    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, tables: tuple[Table, ...], notes: tuple[str, ...] = ()) -> Self:
        """These tables, with notes."""
        made = cls(tables)
        made.notes = notes
        return made

    def save(self, path: str | Path) -> None:
        """Write tables.json, as `neuroshard tables -o` does. Raises NeuroshardError for a path that cannot be written."""
        from neuroshard.files.tables import write_tables

        write_tables(Path(path), tuple(self))

    def to_frame(self) -> pd.DataFrame:
        """One row per table: name, rows, dim, pooling_factor, pooling, memory_bytes (weights and optimizer state).

        Raises NeuroshardError where pandas is missing.
        """
        return frame(self._columns())

    def _columns(self) -> dict[str, list[Any]]:
        fields = ("name", "rows", "dim", "pooling_factor", "pooling", "memory_bytes")
        return {field: [getattr(table, field) for table in self] for field in fields}

    def __repr__(self) -> str:
        total = format_bytes(sum(table.memory_bytes for table in self))
        return f"Tables: {counted(len(self), 'table')}, {total} with optimizer state"

    def _repr_html_(self) -> str:
        columns = self._columns()
        columns["memory"] = list(map(format_bytes, columns.pop("memory_bytes")))
        columns["rows"] = [f"{rows:,}" for rows in columns["rows"]]
        return html_table(repr(self), columns, self.notes)


@dataclass(frozen=True, repr=False)
class Price:
    """What a plan costs by one cost model: predicted ms of each of D devices.

    `data` is what `neuroshard price --json` prints of a plan, `str(price)` what `price` prints of it.
    """

    plan_digest: str
    model: str
    batch_size: int
    devices: tuple[DeviceCost, ...]

    @property
    def total_ms(self) -> tuple[float, ...]:
        """Predicted ms of each device in a step, (D,)."""
        return tuple(device.total_ms for device in self.devices)

    @property
    def cost_ms(self) -> float:
        """Predicted ms of the slowest device in a step."""
        return max(self.total_ms)

    @property
    def slowest_device(self) -> int:
        """The device with the highest total. Waiting makes totals equal (to 1 us); of these the one with most compute."""
        return max(range(len(self.devices)), key=lambda d: (round(self.total_ms[d], 3), self.devices[d].compute_ms))

    @property
    def data(self) -> dict[str, Any]:
        """All of it as JSON has it; costs are predicted ms a step."""
        return {
            "plan": self.plan_digest,
            "model": self.model,
            "batch_size": self.batch_size,
            "cost_ms": self.cost_ms,
            "slowest_device": self.slowest_device,
            "devices": [
                {"device": device, **cost.model_dump(), "total_ms": cost.total_ms}
                for device, cost in enumerate(self.devices)
            ],
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per device, all columns in predicted ms. Raises NeuroshardError where pandas is missing."""
        return frame(self._columns())

    def __str__(self) -> str:
        from neuroshard.report.text import DEVICES_SHOWN, averaging_line

        of = f"plan {self.plan_digest[:12]}, batch {self.batch_size:,}, cost model {short_name(self.model)}"
        slowest = f"{self.cost_ms:.3f} ms a step on the slowest device, {self.slowest_device}"
        lines = [
            *wrapped(f"{of}: {slowest}"),
            "device    compute    forward   backward      total",
            "       (predicted ms; all-to-all forward, with waiting, and backward)",
        ]
        devices = list(enumerate(self.devices))
        if len(devices) > DEVICES_SHOWN:
            devices.sort(key=lambda one: -one[1].total_ms)
        for device, cost in devices[:DEVICES_SHOWN]:
            parts = cost.compute_ms, cost.forward_collective_ms, cost.backward_collective_ms, cost.total_ms
            lines.append(f"{device:>6} " + " ".join(f"{ms:10.3f}" for ms in parts))
        if left := devices[DEVICES_SHOWN:]:
            lines.append(f"the {DEVICES_SHOWN} slowest; {counted(len(left), 'device')} more with --json")
        if averaging := averaging_line(self.devices):
            lines.append(averaging)
        return "\n".join(lines)

    def _columns(self) -> dict[str, list[Any]]:
        parts = {name: [getattr(cost, name) for cost in self.devices] for name in DeviceCost.model_fields}
        if not any(parts["averaging_ms"]):
            del parts["averaging_ms"]
        return {"device": list(range(len(self.devices))), **parts, "total_ms": [*self.total_ms]}

    def __repr__(self) -> str:
        what = f"Price of plan {self.plan_digest[:12]} by {short_name(self.model)}:"
        return f"{what}\n{self.cost_ms:.3f} ms a step (slowest device, predicted)"

    def _repr_html_(self) -> str:
        return html_table(repr(self), self._columns())


@dataclass(frozen=True, repr=False)
class Diff:
    """What changes from one plan to another. `data` is what `neuroshard diff --json` prints, `str(diff)` what `diff` prints.

    `data["moved_bytes"]` are weights and optimizer state that change devices, in bytes.
    """

    data: dict[str, Any]
    text: str

    @property
    def gain_ms(self) -> float | None:
        """Predicted ms a step that the new plan is faster by; None where the predictions cannot be compared."""
        gain: float | None = self.data["gain_ms"]
        return gain

    @property
    def moved_bytes(self) -> int:
        """Bytes that change devices, weights and optimizer state."""
        moved: int = self.data["moved_bytes"]
        return moved

    def to_frame(self) -> pd.DataFrame:
        """One row per rectangle of a table that moves or is initialised. Raises NeuroshardError where pandas is missing."""
        moves: list[dict[str, Any]] = self.data["moves"]
        return frame({name: [move[name] for move in moves] for name in (moves[0] if moves else ())})

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        gain = "not comparable" if self.gain_ms is None else f"{self.gain_ms:.3f} ms a step to gain (predicted)"
        return f"Diff {self.data['old'][:12]} -> {self.data['new'][:12]}:\n{format_bytes(self.moved_bytes)} to move, {gain}"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


@dataclass(frozen=True, repr=False)
class Report:
    """The report of a plan: one HTML page that fetches nothing. In a notebook it shows itself."""

    html: str
    title: str

    def save(self, path: str | Path) -> int:
        """Write the page; its size in bytes. Raises NeuroshardError for a path that cannot be written."""
        from neuroshard.report.page import write_page

        return write_page(Path(path), self.html)

    def __repr__(self) -> str:
        size = format_bytes(len(self.html.encode(errors="replace")))
        return f"Report of plan {self.title}: {size} of HTML; .save(path) writes it"

    def _repr_html_(self) -> str:
        # a document of its own, which may run its scripts and reach nothing of the notebook
        page = escape(self.html.encode(errors="replace").decode())
        return (
            f'<iframe sandbox="allow-scripts" title="Report of plan {escape(self.title)}" srcdoc="{page}" '
            f'style="width: 100%; height: {REPORT_HEIGHT}px; border: 0"></iframe>'
        )


@dataclass(frozen=True, repr=False)
class Deployment:
    """The release that is live after a deploy, and the gate's `decision`; None where the plan was live already."""

    store: str
    release: Release
    decision: Decision | None

    @property
    def kept(self) -> bool:
        """Whether the gate kept the plan that was live as the better one."""
        return self.decision is not None and not self.decision.goes_live

    @property
    def data(self) -> dict[str, Any]:
        """What `neuroshard deploy --json` prints: the store, whether the live plan was kept, its release, the decision."""
        decision = None if self.decision is None else self.decision.model_dump(mode="json")
        release = self.release.model_dump(mode="json")
        return {"store": self.store, "kept": self.kept, "release": release, "decision": decision}

    def __repr__(self) -> str:
        live = self.release
        of = f"{live.model} release {live.number}"
        is_live = f"kept the live plan: {of}, plan" if self.kept else f"{of} is live, plan"
        lines = [f"{self.store}: {is_live} {live.plan_digest[:12]}"]
        if self.decision is not None:
            lines.append(f"gate: {'forced; ' if self.decision.forced else ''}{self.decision.why}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"
