"""The result of running a plan: measured and predicted costs of each device, as a value and as text of 80 columns."""

from collections.abc import Iterator

from neuroshard.core.cost import Bench
from neuroshard.core.plan import DeviceCost
from neuroshard.core.text import agreeing, counted, wrapped
from neuroshard.core.units import format_bytes
from neuroshard.core.value import Value


class DeviceEvaluation(Value):
    """One device of a plan: `measured` or `error`. All-to-alls that were not measured are 0 ms in `measured`."""

    device: int
    shards: int
    dim: int  # summed over its shards
    measured: DeviceCost | None = None
    predicted: DeviceCost | None = None
    error: str | None = None


class Evaluation(Value):
    """A plan measured. Without `all_to_all_measured`, only compute was measured, and only compute is compared."""

    plan_digest: str
    bench: Bench
    exact: bool  # the formula's costs, without noise
    all_to_all_measured: bool
    all_to_all_left_out: str = ""  # why, if it was not to be measured here
    predicted_for: str  # backend and device of the plan's cost model
    devices: tuple[DeviceEvaluation, ...]
    # by what share a device's slowest round of compute exceeds its fastest, in the median of devices
    rounds_differ: float | None = None
    at_once: bool = False  # all devices took steps at the same time, not one after another
    row_wise_tables: int = 0  # of the plan
    data_parallel_tables: int = 0  # of the plan
    predicted_precision: str = ""  # of the plan's all-to-alls, if not fp32, in which they are run
    domains: int = 1  # of the plan, all of whose devices are on this machine
    waits_for_input: bool = False  # whether the plan's predictions have the wait for input in them
    plan_notes: tuple[str, ...] = ()  # of the plan on its predictions, such as another batch size
    other_versions: str = ""  # of torch and FBGEMM, that the plan's costs were measured under, and those here

    @property
    def errors(self) -> int:
        return sum(device.error is not None for device in self.devices)

    def ms(self, cost: DeviceCost) -> float:
        """The ms to compare: the total, or only compute."""
        return cost.total_ms if self.all_to_all_measured else cost.compute_ms

    def slowest(self, which: str) -> tuple[int, float] | None:
        """Device and ms of the slowest one, `measured` or `predicted`; None where no device has such a cost."""
        costs = [(d.device, self.ms(getattr(d, which))) for d in self.devices if getattr(d, which) is not None]
        return max(costs, key=lambda cost: cost[1], default=None)

    @property
    def foreign(self) -> bool:
        """Whether the plan was predicted for other hardware than it was run on."""
        here = f"{self.bench.backend} ({self.bench.hardware.name})"
        return any(one.predicted for one in self.devices) and self.predicted_for != here

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        kind = "by the formula, exact" if self.exact else f"measured on {self.bench.hardware.name}"
        yield f"plan {self.plan_digest[:12]} {kind}, batch {self.bench.batch_size:,}"
        yield "device shards    dims    compute  all-to-alls   measured  predicted  ratio"
        yield f"{'(ms; ratio is measured / predicted)':>57}"
        slowest = self.slowest("measured")
        for one in self.devices:
            place = f"{one.device:>6} {one.shards:>6} {one.dim:>7,} "
            if one.measured is None:
                yield place + f"error: {one.error}"
                continue
            all_to_alls = one.measured.total_ms - one.measured.compute_ms if self.all_to_all_measured else None
            predicted = self.ms(one.predicted) if one.predicted else None
            cells = [_ms(one.measured.compute_ms), _ms(all_to_alls), _ms(self.ms(one.measured)), _ms(predicted)]
            ratio = f"{self.ms(one.measured) / predicted:6.2f}" if predicted else f"{'-':>6}"
            yield place + " ".join([*cells, ratio]) + (" slowest" if slowest and slowest[0] == one.device else "")
        yield from self._verdict()
        for note in self._notes():
            yield from wrapped(f"note: {note}")

    def _verdict(self) -> Iterator[str]:
        measured, predicted = self.slowest("measured"), self.slowest("predicted")
        if measured is None:
            return
        line = f"slowest device: {measured[0]}, {measured[1]:.3f} ms {'exact' if self.exact else 'measured'}"
        if predicted is not None and measured[1] > 0:
            line += f"; predicted: {predicted[0]}, {predicted[1]:.3f} ms"
            line += "" if self.foreign else f" ({predicted[1] / measured[1] - 1:+.1%})"
        yield line

    def _notes(self) -> Iterator[str]:
        if self.rounds_differ is not None:
            yield f"rounds of a device's compute differ by {self.rounds_differ:.1%} (median): smaller differences are noise"
        if self.at_once:
            yield "all devices ran at the same time, each on a core, as ranks of a trainer on this CPU do"
        if not self.all_to_all_measured:
            why = "not every device's tables could be run" if self.errors else self.all_to_all_left_out
            yield f"the all-to-all among {len(self.devices)} devices was not measured: {why}"
        if self.row_wise_tables:
            yield (
                f"{counted(self.row_wise_tables, 'table')} split row-wise: run as if all rows were looked up equally often, and "
                "with an all-to-all of as many columns in place of the trainer's reduce-scatter"
            )
        yield from self._only_predicted()
        if self.bench.capped_tables:
            yield (
                f"{agreeing(len(self.bench.capped_tables), 'table', 'was', 'were')} run with fewer rows, so that each device's "
                f"fit {format_bytes(self.bench.memory_limit_bytes or 0)}"
            )
        for note in self.plan_notes:
            yield f"the plan says: {note}"
        if self.other_versions:
            yield f"predicted by costs measured under {self.other_versions}: some of the difference may be theirs"
        if self.foreign:
            yield f"predicted for {self.predicted_for}: compare the devices with each other, not the ms"

    def _only_predicted(self) -> Iterator[str]:
        """What predictions of all-to-alls have in them and no run has. Where all-to-alls are not compared, neither is this."""
        if not self.all_to_all_measured or len(self.devices) == 1 or not any(one.predicted for one in self.devices):
            return
        if self.data_parallel_tables:
            yield (
                f"{counted(self.data_parallel_tables, 'table')} data-parallel: the all-reduce of gradients is predicted, and not "
                "measured"
            )
        if self.predicted_precision:
            yield f"all-to-alls are measured in fp32, and predicted in the plan's precision, {self.predicted_precision}"
        if self.domains > 1:
            yield (
                f"all devices are on one machine: the all-to-all between {self.domains} domains is predicted over their network, "
                "and measured without"
            )
        if self.waits_for_input:
            yield "the wait for input is predicted, and not measured"


def _ms(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:10.3f}"
