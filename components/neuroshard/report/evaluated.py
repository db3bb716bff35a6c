"""A plan that was run for real: what `neuroshard evaluate -o evaluation.json` measured of it, beside what was predicted."""

from pathlib import Path

from neuroshard.core.cost import Bench
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import DeviceCost, Plan
from neuroshard.core.value import Value, check_format, decode_json
from neuroshard.files.disk import read_bytes


class Device(Value):
    """One device's cost as measured; None where an error was met."""

    device: int
    measured: DeviceCost | None = None


class Evaluated(Value):
    """As much of an evaluation as the page shows. Where the all-to-all was not measured only compute is compared."""

    plan_digest: str
    bench: Bench
    all_to_all_measured: bool
    devices: tuple[Device, ...]

    @property
    def what(self) -> str:
        """What was measured, and on what."""
        told = "" if self.all_to_all_measured else "compute alone, "
        return f"{told}{self.how} {'by' if self.how == 'computed' else 'on'} {self.bench.hardware.name}"

    @property
    def how(self) -> str:
        """A formula's costs are not measured."""
        return "computed" if self.bench.backend == "synthetic" else "measured"

    def ms(self) -> list[float | None]:
        """Of each device: its total, or only its compute."""
        return [None if one.measured is None else self._part(one.measured) for one in self.devices]

    def predicted_ms(self, plan: Plan) -> list[float]:
        """The same part of what was predicted; empty where the plan does not carry the parts."""
        return [self._part(cost) for cost in plan.predicted or ()]

    def _part(self, cost: DeviceCost) -> float:
        return cost.total_ms if self.all_to_all_measured else cost.compute_ms


def read_evaluation(path: Path, plan: Plan) -> Evaluated:
    """The evaluation of just this plan. Raises InvalidInput in one line."""
    raw = check_format(decode_json(read_bytes(path), str(path)), 1, str(path))
    found = Evaluated.parse(raw, str(path))
    if found.plan_digest != plan.digest():
        raise InvalidInput(
            f"{path}: is of plan {found.plan_digest[:12]}, not {plan.digest()[:12]}; run `neuroshard evaluate` on this plan"
        )
    if [one.device for one in found.devices] != list(range(plan.task.devices)):
        raise InvalidInput(f"{path}: does not tell of devices 0 to {plan.task.devices - 1}, each once and in order")
    return found
