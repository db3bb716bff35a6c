"""The kinds of hardware of a fleet, and where work finds each."""

from typing import Annotated, Any, Literal

from pydantic import Field

from neuroshard.core.cost import Hardware
from neuroshard.core.value import Value, canonical_json, sha256

FLEET_FORMAT: Literal[1] = 1
Count = Annotated[int, Field(ge=0)]


class Kind(Value):
    """One kind of hardware. `nodes` take work now, each with `devices` of them at most; `out_of_service` do not.

    A pod finds it by `node_selector` and `tolerations`, and asks for its devices as `resource`; all three are empty for the
    machine that this is told on. `node_selector` leads to `alike` nodes, which are alike to the last digit of the driver, so
    that what they measure can be merged. The fingerprint is the hardware's: nothing else here has a part in it.
    """

    hardware: Hardware
    nodes: Count
    devices: Count
    out_of_service: Count = 0
    alike: Count = 1
    resource: str = ""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()

    @property
    def fingerprint(self) -> str:
        return self.hardware.fingerprint


class Fleet(Value):
    """What is there, by fingerprint, seen at `source`. `notes` tell what was left out and why."""

    format_version: Literal[1] = FLEET_FORMAT
    source: str
    kinds: tuple[Kind, ...]
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when a kind comes or goes, and only then."""
        return sha256(canonical_json(sorted(kind.fingerprint for kind in self.kinds)))[:16]
