"""The evaluation of a plan on real hardware, as `neuroshard evaluate -o evaluation.json` writes it."""

from pathlib import Path

from neuroshard.core.cost import Bench
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import DeviceCost, Plan
from neuroshard.core.value import Value, check_format, decode_json
from neuroshard.files.disk import read_bytes


class EvaluatedDevice(Value):
    """The measured cost of one device; None where measuring failed."""

    device: int
    measured: DeviceCost | None = None


class Evaluated(Value):
    """The part of an evaluation that the page shows. Without a measured all-to-all, only compute is compared."""

    plan_digest: str
    bench: Bench
    all_to_all_measured: bool
    devices: tuple[EvaluatedDevice, ...]

    @property
    def what(self) -> str:
        """What was measured, and on which hardware."""
        part = "" if self.all_to_all_measured else "compute alone, "
        return f"{part}{self.how} {'by' if self.how == 'computed' else 'on'} {self.bench.hardware.name}"

    @property
    def how(self) -> str:
        """`measured`, or `computed` for the costs of a formula."""
        return "computed" if self.bench.backend == "synthetic" else "measured"

    def ms(self) -> list[float | None]:
        """Measured ms of each device: the total, or only the compute."""
        return [None if one.measured is None else self._part(one.measured) for one in self.devices]

    def predicted_ms(self, plan: Plan) -> list[float]:
        """The same part of the predicted ms; empty where the plan does not carry the parts."""
        return [self._part(cost) for cost in plan.predicted or ()]

    def _part(self, cost: DeviceCost) -> float:
        return cost.total_ms if self.all_to_all_measured else cost.compute_ms


def read_evaluation(path: Path, plan: Plan) -> Evaluated:
    """Read the evaluation of this plan. Raises InvalidInput in one line."""
    raw = check_format(decode_json(read_bytes(path), str(path)), 1, str(path))
    found = Evaluated.parse(raw, str(path))
    if found.plan_digest != plan.digest():
        raise InvalidInput(
            f"{path}: is of plan {found.plan_digest[:12]}, not {plan.digest()[:12]}; run `neuroshard evaluate` on this plan"
        )
    if [one.device for one in found.devices] != list(range(plan.task.devices)):
        raise InvalidInput(f"{path}: must list devices 0 to {plan.task.devices - 1}, each once and in order")
    return found
