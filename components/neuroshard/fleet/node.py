"""The parts of a Kubernetes node that a fleet needs, from the JSON of the API or of `kubectl get nodes -o json`."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field

from neuroshard.core.errors import InvalidInput
from neuroshard.core.value import Value, shown


class Taint(Value):
    key: str
    value: str = ""
    effect: str


class Toleration(Value):
    """A toleration, by the rules of Kubernetes: an empty effect, or an empty key, tolerates any."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def bears(self, taint: Taint) -> bool:
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == taint.value)


class Node(Value):
    """A node. `allocatable` counts each resource that its pods may have in all."""

    name: str
    labels: dict[str, str]
    allocatable: dict[str, Annotated[int, Field(ge=0, lt=2**63)]]  # int64 in Kubernetes
    taints: tuple[Taint, ...]
    cordoned: bool
    ready: bool

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Parse a Node object of the API. Raises InvalidInput."""
        try:
            metadata, spec, status = data["metadata"], data.get("spec") or {}, data.get("status") or {}
            conditions = {condition["type"]: condition["status"] for condition in status.get("conditions") or ()}
            return cls.parse(
                {
                    "name": metadata["name"],
                    "labels": metadata.get("labels") or {},
                    # devices are whole numbers; CPUs and memory have units (7820m, 32Gi), and are not needed here
                    "allocatable": {
                        name: int(count)
                        for name, count in (status.get("allocatable") or {}).items()
                        if str(count).isdecimal()
                    },
                    "taints": spec.get("taints") or (),
                    "cordoned": bool(spec.get("unschedulable")),
                    "ready": conditions.get("Ready") == "True",
                },
                where,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{where}: is not a Kubernetes node: {type(error).__name__}: {shown(error)}") from None

    def takes_work(self, tolerations: Sequence[Toleration]) -> bool:
        """Whether a pod with these tolerations would be scheduled here and stay."""
        keeping_off = (taint for taint in self.taints if taint.effect in ("NoSchedule", "NoExecute"))
        return (
            self.ready and not self.cordoned and all(any(t.bears(taint) for t in tolerations) for taint in keeping_off)
        )

    def label(self, key: str) -> str:
        """The value of a label. Raises InvalidInput where the node lacks it."""
        if key not in self.labels:
            raise InvalidInput(f"node {self.name}: has no label {key}; is GPU feature discovery running there?")
        return self.labels[key]

    def number(self, key: str, default: int | None = None) -> int:
        """The value of a label that is a number. Raises InvalidInput."""
        text = self.labels.get(key, "" if default is None else str(default)) or self.label(key)
        if not text.isdecimal() or len(text) > 12:
            raise InvalidInput(f"node {self.name}: label {key} is {shown(text)}, not a whole number")
        return int(text)
