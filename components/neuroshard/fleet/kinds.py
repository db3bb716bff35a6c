"""The kinds of hardware of a fleet, and where pods find each of them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from neuroshard.core.cost import Hardware
from neuroshard.core.topology import Topology
from neuroshard.core.value import Value, canonical_json, sha256

FLEET_FORMAT: Literal[1] = 1
Count = Annotated[int, Field(ge=0)]


class Kind(Value):
    """One kind of hardware: `nodes` nodes take pods now, each with at least `devices` devices; `out_of_service` nodes do not.

    A pod finds the kind by `node_selector` and `tolerations`, and requests its devices as `resource`; all three are empty for
    this machine. `node_selector` selects `alike` nodes with exactly the same driver, so that their costs can be merged. The
    fingerprint is the hardware's alone. `topology` is how a cluster's nodes in service are joined.
    """

    hardware: Hardware
    nodes: Count
    devices: Count
    out_of_service: Count = 0
    alike: Count = 1
    resource: str = ""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    topology: Topology | None = None

    @property
    def fingerprint(self) -> str:
        return self.hardware.fingerprint


class Fleet(Value):
    """The kinds of hardware found at `source`, by fingerprint. `notes` say which nodes were left out, and why."""

    format_version: Literal[1] = FLEET_FORMAT
    source: str
    kinds: tuple[Kind, ...]
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change only when a kind is added or removed."""
        return sha256(canonical_json(sorted(kind.fingerprint for kind in self.kinds)))[:16]
