"""Kubernetes nodes -> kinds of GPUs, by the labels of NVIDIA's GPU feature discovery. AMD's are named, not measured.

The labels say which cost model applies to a node, not how fast the node is. The measuring itself asks NVML.

    MIG, strategy single   product, memory and count are those of the slices
    MIG, strategy mixed    the slices are resources of their own (nvidia.com/mig-1g.10gb), with their own labels
    time-slicing, MPS      the product ends in -SHARED, or the resource in .shared, and one device counts `replicas` times
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from neuroshard.core.cost import Hardware
from neuroshard.core.errors import InvalidInput
from neuroshard.core.topology import Topology
from neuroshard.core.value import Value, canonical_json, sha256
from neuroshard.devices import whole_gib
from neuroshard.fleet.cluster import AMD_DEVICE, AMD_NODES, AMD_PRODUCT, Node, Toleration

NVIDIA = "nvidia.com/"
OLD_DRIVER = tuple(f"nvidia.com/cuda.driver.{part}" for part in ("major", "minor", "rev"))
DRIVER = ("nvidia.com/cuda.driver-version.full", *OLD_DRIVER)  # today's label, and the older ones
SHARED = "-SHARED"
FLEET_FORMAT: Literal[1] = 1
Count = Annotated[int, Field(ge=0)]
CLIQUE = "nvidia.com/gpu.clique"  # nodes with the same value are joined by NVLink


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


class NodeResource(NamedTuple):
    """One resource of one node: `devices` devices of this hardware. Pods find it by `selector`."""

    node: Node
    hardware: Hardware
    resource: str
    devices: int
    selector: dict[str, str]


def kinds_of(
    nodes: Iterable[Node], node_selector: Mapping[str, str], tolerations: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Kind, ...], tuple[str, ...]]:
    """The kinds of GPUs of `nodes`, by fingerprint, and notes on nodes whose labels do not identify their GPUs.

    Only nodes with the labels of `node_selector` count. A node is in service if it is ready, not cordoned, has devices, and
    `tolerations` tolerate every taint that keeps pods off.
    """
    borne = [Toleration.parse(toleration, "tolerations") for toleration in tolerations]
    found: dict[str, list[NodeResource]] = defaultdict(list)
    notes = []
    for node in nodes:
        if node_selector.items() <= node.labels.items():
            try:
                for one in found_on(node):
                    found[one.hardware.fingerprint].append(one)
            except InvalidInput as error:
                notes.append(str(error))

    kinds = []
    for _, group in sorted(found.items()):
        in_service = [one for one in group if one.devices and one.node.takes_work(borne)]
        alike = largest(in_service or group)
        kinds.append(
            Kind(
                hardware=alike[0].hardware,
                nodes=len(in_service),
                devices=min(one.devices for one in alike) if in_service else 0,
                out_of_service=len(group) - len(in_service),
                alike=len(alike) if in_service else 0,
                resource=alike[0].resource,
                node_selector={**node_selector, **alike[0].selector},
                tolerations=tuple(map(dict, tolerations)),
                topology=_topology(alike) if in_service else None,
            )
        )
    return tuple(kinds), tuple(sorted(notes))


def _topology(alike: Sequence[NodeResource]) -> Topology | None:
    """Nodes of one clique (NVLink over nodes) are one domain, as large as the smallest clique; else each node is one."""
    devices = min(one.devices for one in alike)
    if alike[0].hardware.sharing or "-MIG-" in alike[0].hardware.name:  # slices have no links of their own
        return None
    cliques = Counter(one.node.labels.get(CLIQUE, "") for one in alike)
    nodes = 1 if "" in cliques else min(cliques.values())
    return Topology(domain=devices * nodes, local_world_size=devices)


def largest(group: Sequence[NodeResource]) -> list[NodeResource]:
    """The largest part of a group with one selector and resource, sorted by name; of equals the first by its labels."""
    alike: dict[tuple[object, ...], list[NodeResource]] = defaultdict(list)
    for one in sorted(group, key=lambda one: one.node.name):
        alike[(one.resource, one.devices, *sorted(one.selector.items()))].append(one)
    return max(sorted(alike.items(), key=lambda item: str(item[0])), key=lambda item: len(item[1]))[1]


def found_on(node: Node) -> list[NodeResource]:
    """The GPU resources of a node. Raises InvalidInput where its labels do not identify them, and for AMD's."""
    if not node.labels.keys().isdisjoint(AMD_NODES):
        raise InvalidInput(f"node {node.name}: has {_of_amd(node)}")
    if "MIG-INVALID" in node.labels.get("nvidia.com/gpu.product", ""):
        raise InvalidInput(
            f"node {node.name}: its GPUs have different MIG slices, which MIG strategy single cannot name"
        )
    slices = sorted(
        name.removeprefix(NVIDIA).removesuffix(".shared")
        for name in node.allocatable
        if re.fullmatch(r"nvidia\.com/mig-[0-9a-z.]+(\.me)?(\.shared)?", name)
    )
    whole = ["gpu"] if not slices or _allocatable(node, "gpu") else []
    return [_found(node, name) for name in (*slices, *whole)]


def _of_amd(node: Node) -> str:
    """What is known of AMD's GPUs of a node, and what to do. A node of several products has a label for each."""
    from neuroshard.costmodel.analytic import sheet_of

    several = (key.removeprefix(f"{AMD_PRODUCT}.") for key in sorted(node.labels) if key.startswith(f"{AMD_PRODUCT}."))
    device = f"GPUs of AMD's (device {node.labels.get(AMD_DEVICE, 'unknown')})"
    product = node.labels.get(AMD_PRODUCT) or ", ".join(several) or device
    sheet = sheet_of(re.sub(r"(MI\d+)(?=_|$)", r"\1X", product))  # an MI325X is AMD_Instinct_MI325_OAM
    by = f"the datasheet (--model analytic:{sheet})" if sheet else "a datasheet, if it is theirs (analytic:mi300x)"
    driver = node.labels.get("amd.com/gpu.driver-version", "unknown")
    return (
        f"{product} (amd.com/gpu, driver {driver}), and no image of ours measures AMD's GPUs: plan by {by}, or measure there by "
        "hand, with ROCm's builds of torch and FBGEMM, which nobody tried"
    )


def _found(node: Node, name: str) -> NodeResource:
    """The resource `name` of a node: gpu, or mig-1g.10gb."""
    prefix = f"{NVIDIA}{name}."
    product, memory_mib = node.label(f"{prefix}product"), node.number(f"{prefix}memory")
    shared = product.endswith(SHARED) or f"{NVIDIA}{name}.shared" in node.allocatable
    replicas = node.number(f"{prefix}replicas", 1) if shared else 1
    strategy = node.labels.get(f"{prefix}sharing-strategy") or "time-slicing"
    driver = node.labels.get(DRIVER[0]) or ".".join(filter(None, (node.labels.get(one, "") for one in OLD_DRIVER)))
    hardware = Hardware(
        kind="cuda",
        name=product.removesuffix(SHARED),
        memory_bytes=whole_gib(memory_mib * 2**20),
        driver=driver,
        interconnect="NVLink over nodes" if CLIQUE in node.labels else "",
        compute_capability=f"{node.number('nvidia.com/gpu.compute.major')}.{node.number('nvidia.com/gpu.compute.minor')}",
        machine=node.labels.get("nvidia.com/gpu.machine", ""),
        sharing=f"{strategy}, {replicas} to a device" if shared else "",
    )
    identifying = (f"{prefix}product", "nvidia.com/gpu.machine", *DRIVER)
    selector = {key: node.labels[key] for key in identifying if key in node.labels}
    resource = f"{NVIDIA}{name}.shared" if f"{NVIDIA}{name}.shared" in node.allocatable else f"{NVIDIA}{name}"
    return NodeResource(node, hardware, resource, _allocatable(node, name) // max(replicas, 1), selector)


def _allocatable(node: Node, name: str) -> int:
    return sum(node.allocatable.get(f"{NVIDIA}{name}{ending}", 0) for ending in ("", ".shared"))
