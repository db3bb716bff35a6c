"""What is known of a cell: its plan, ms, samples a second, memory left, money, or why there is no plan."""

from dataclasses import dataclass
from typing import Any, Literal

from neuroshard.core.groups import Groups
from neuroshard.core.plan import Plan
from neuroshard.core.text import short_name
from neuroshard.report.numbers import source
from neuroshard.size.cells import Cell

State = Literal["fits", "proven not to fit", "no plan found", "not priced", "not tried"]


@dataclass(frozen=True)
class Row:
    """A cell, and the `plan` found for it, or `why` there is none. No plan costs less than `bound_ms` of embeddings, by the cost
    model; None where nothing is proven. `caveats` say which of its costs are beyond what was measured."""

    cell: Cell
    state: State
    why: str = ""
    plan: Plan | None = None
    bound_ms: float | None = None
    caveats: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def found(self) -> Plan:
        """The plan of a row that has one."""
        assert self.plan is not None
        return self.plan

    @property
    def embeddings_ms(self) -> float:
        """Predicted ms of a step, of embeddings alone."""
        assert self.found.cost_ms is not None
        return self.found.cost_ms

    @property
    def step_ms(self) -> float:
        """The same with the dense time, where one is given."""
        return self.embeddings_ms + self.dense_ms

    @property
    def dense_ms(self) -> float:
        """Ms of a step that are not of embeddings; 0 where no dense time is given."""
        dense = self.cell.kind.dense
        return 0.0 if dense is None else dense.at(self.batch_size / self.cell.devices)

    @property
    def bound_step_ms(self) -> float | None:
        return None if self.bound_ms is None else self.bound_ms + self.dense_ms

    @property
    def error(self) -> float | None:
        """How far the cost model may be off, as a share of the ms of embeddings; None where it is unknown."""
        return self.found.provenance.cost_model_error

    @property
    def interval_ms(self) -> tuple[float, float] | None:
        """What a step may measure: as the plan says, in 68 % of the cases. Where its cost model states no such range, predicted =
        measured x (1 ± error); the upper end is infinite from an error of 1 on."""
        if (ranges := self.found.provenance.cost_ranges) is not None:
            return ranges.one[0] + self.dense_ms, ranges.one[1] + self.dense_ms
        if self.error is None:
            return None
        high = self.embeddings_ms / (1 - self.error) if self.error < 1 else float("inf")
        return self.embeddings_ms / (1 + self.error) + self.dense_ms, high + self.dense_ms

    @property
    def groups(self) -> Groups | None:
        """Those that its ranks train in, if several."""
        return self.found.task.groups

    @property
    def batch_size(self) -> int:
        return self.found.task.global_batch_size

    @property
    def sample_ms(self) -> float:
        """Ms of a step over its samples: what sizes are compared by, since their batches may differ."""
        return self.step_ms / self.batch_size

    @property
    def samples_per_s(self) -> float:
        return 1000 / self.sample_ms

    @property
    def money(self) -> float | None:
        """Price of a billion samples; None where no price is given."""
        price = self.cell.kind.price
        return None if price is None else price * self.cell.devices * self.sample_ms * 1e9 / 3.6e6

    @property
    def money_text(self) -> str:
        """The same, as people read it; empty where no price is given."""
        money = self.money
        return "" if money is None else f"{money:,.0f}" if 1000 <= money < 1e7 else f"{money:.4g}"

    @property
    def memory_left_bytes(self) -> int:
        """Of the fullest device, what is neither used nor reserved."""
        task = self.found.task
        return min(have - used for have, used in zip(task.usable_bytes, self.found.memory_bytes(), strict=True))

    @property
    def memory_used_bytes(self) -> int:
        """Of the fullest device."""
        return max(self.found.memory_bytes())

    @property
    def host_bytes(self) -> int:
        """Of the fullest host, for tables beyond HBM."""
        return max(self.found.host_memory()) if self.found.task.host_memory_bytes else 0

    @property
    def basis(self) -> str:
        """`datasheet`, `measured`, or what else the costs come from, in a word."""
        backend = self.found.provenance.cost_model_backend or ""
        return {"analytic": "datasheet", "given": "given", "synthetic": "formula"}.get(backend, "measured")

    @property
    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        cell = self.cell
        data: dict[str, Any] = {
            "model": cell.kind.name,
            "devices": cell.devices,
            "memory_bytes": cell.memory_bytes,
            "domain": cell.domain,
            "local_world_size": cell.local_world_size,
            "state": self.state,
        }
        if self.plan is None:
            return {**data, "why": self.why}
        provenance, interval = self.found.provenance, self.interval_ms
        high = None if interval is None or interval[1] == float("inf") else interval[1]
        return {
            **data,
            "batch_size": self.batch_size,
            "groups": None if self.groups is None else self.groups.text(self.found.task.devices),
            "step_ms": self.step_ms,
            "embeddings_ms": self.embeddings_ms,
            "dense_ms": self.dense_ms,
            "lower_bound_ms": self.bound_step_ms,
            "interval_ms": None if interval is None else [interval[0], high],
            "samples_per_s": self.samples_per_s,
            "samples_per_s_per_device": self.samples_per_s / cell.devices,
            "memory_used_bytes": self.memory_used_bytes,
            "memory_left_bytes": self.memory_left_bytes,
            "host_memory_bytes": self.host_bytes,
            "money_per_billion_samples": self.money,
            "basis": self.basis,
            "costs": source(provenance.cost_model_backend, provenance.cost_model_device),
            "caveats": list(self.caveats),
            "plan": self.found.digest(),
        }


def name_of(row: Row) -> str:
    """`analytic:h100 x 8`."""
    return f"{short_name(row.cell.kind.name)} x {row.cell.devices}"
