"""Nodes -> kinds: what is cut, shared, kept away or out of order, and what a fingerprint changes by."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.nodes import GPU_TAINT, mixed_fleet, node
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.core.topology import Topology
from neuroshard.fleet.cluster import AMD_DEVICE, AMD_PRODUCT, Node, labelled, list_nodes
from neuroshard.fleet.labels import Kind, kinds_of
from neuroshard.fleet.run import TOLERATIONS

# `kubectl get nodes -o json` of a real kube-apiserver (1.20.2) that helpers.nodes.mixed_fleet had been put into
RECORDED = Path(__file__).with_name("nodes-recorded.json")
GIB = 2**30


def kinds(*nodes: dict[str, Any], tolerations: Any = TOLERATIONS, **selector: str) -> tuple[Kind, ...]:
    found, notes = kinds_of([Node.from_json(one, one["metadata"]["name"]) for one in nodes], selector, tolerations)
    assert notes == ()
    return found


def one_kind(*nodes: dict[str, Any], **selector: str) -> Kind:
    [kind] = kinds(*nodes, **selector)
    return kind


def fingerprint(**changes: Any) -> str:
    return one_kind(node("n", **changes)).fingerprint


def test_the_recorded_nodes_of_a_real_api_server() -> None:
    found, notes = kinds_of(labelled(list_nodes(RECORDED)[1]), {}, TOLERATIONS)
    rows = {kind.hardware.name: kind for kind in found}
    assert {name: (kind.nodes, kind.out_of_service, kind.devices) for name, kind in rows.items()} == {
        "NVIDIA-H200": (2, 1, 8),  # one is cordoned
        "NVIDIA-H100-80GB-HBM3": (1, 1, 8),  # one is not ready
        "NVIDIA-A100-SXM4-80GB": (1, 0, 6),
        "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb": (1, 0, 14),
        "NVIDIA-A100-SXM4-80GB-MIG-2g.20gb": (1, 0, 24),
        "NVIDIA-L4": (1, 0, 1),  # 4 to give, of one device
    }
    assert notes == ("node no-gfd: has no label nvidia.com/gpu.product; is GPU feature discovery running there?",)
    assert rows["NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"].resource == "nvidia.com/mig-1g.10gb"
    assert rows["NVIDIA-A100-SXM4-80GB-MIG-2g.20gb"].resource == "nvidia.com/gpu"
    assert rows["NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"].hardware.memory_bytes == 10 * GIB
    assert rows["NVIDIA-L4"].hardware.sharing == "time-slicing, 4 to a device"
    assert rows["NVIDIA-H200"].node_selector == {
        "nvidia.com/gpu.product": "NVIDIA-H200",
        "nvidia.com/gpu.machine": "p5en.48xlarge",
        "nvidia.com/cuda.driver-version.full": "570.86.15",
    }


def test_the_recording_is_of_the_nodes_that_tests_make() -> None:
    recorded = {one["metadata"]["name"]: one for one in json.loads(RECORDED.read_text())["items"]}
    for made in mixed_fleet():
        labels = made["metadata"].get("labels", {})
        assert recorded[made["metadata"]["name"]]["metadata"].get("labels", {}).items() >= labels.items()


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": {"nvidia.com/gfd.timestamp": "1", "kubernetes.io/hostname": "elsewhere", "team": "ads"}},
        {"driver": "570.195.03"},
        {"memory_mib": 143700},
        {"devices": 4},
        {"cordoned": True},
        {"taints": [GPU_TAINT]},
        {"labels": {"nvidia.com/gpu.clique": "7.3"}},
    ],
)
def test_the_fingerprint_is_blind_to_what_does_not_change_speed(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) == fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"product": "NVIDIA-H200-NVL"},
        {"product": "NVIDIA-H200-MIG-1g.18gb", "memory_mib": 16384},
        {"memory_mib": 81559},
        {"compute": "10.0"},
        {"driver": "580.65.06"},
        {"machine": "DGX-H200"},
        {"product": "NVIDIA-H200-SHARED", "labels": {"nvidia.com/gpu.replicas": "4"}},
    ],
)
def test_the_fingerprint_changes_by_what_changes_speed(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) != fingerprint()


def test_names_and_order_of_nodes_do_not_matter() -> None:
    a, b, c = node("a"), node("b", product="NVIDIA-L40S"), node("c")
    assert kinds(a, b, c) == kinds(c, b, a)
    assert [kind.fingerprint for kind in kinds(a, b)] == [
        kind.fingerprint for kind in kinds(node("y", product="NVIDIA-L40S"), node("x"))
    ]


def test_the_driver_by_its_older_labels() -> None:
    old = node("old")
    for name in [name for name in old["metadata"]["labels"] if "driver-version" in name]:
        del old["metadata"]["labels"][name]
    older = {"major": "570", "minor": "124", "rev": "06"}
    old["metadata"]["labels"] |= {f"nvidia.com/cuda.driver.{part}": value for part, value in older.items()}
    kind = one_kind(old)
    assert (kind.hardware.driver, kind.fingerprint) == ("570.124.06", fingerprint())
    assert kind.node_selector["nvidia.com/cuda.driver.major"] == "570"


def test_work_goes_where_most_nodes_are_alike_to_the_last_digit_of_the_driver() -> None:
    newer = [node("b", driver="570.195.03"), node("c", driver="570.195.03")]
    kind = one_kind(node("a"), *newer, node("d", driver="570.195.03", cordoned=True))
    assert (kind.nodes, kind.alike, kind.out_of_service) == (3, 2, 1)
    assert kind.node_selector["nvidia.com/cuda.driver-version.full"] == "570.195.03"


def test_shared_devices_that_keep_their_product_and_change_their_resource() -> None:
    shared = {"nvidia.com/gpu.replicas": "2", "nvidia.com/gpu.sharing-strategy": "mps"}
    kind = one_kind(node("s", devices=0, labels=shared, allocatable={"nvidia.com/gpu.shared": "16"}))
    assert (kind.hardware.sharing, kind.resource, kind.devices) == ("mps, 2 to a device", "nvidia.com/gpu.shared", 8)


def test_a_taint_that_nobody_bears_keeps_the_node_out_of_service() -> None:
    reserved = node("r", taints=[GPU_TAINT, {"key": "team", "value": "search", "effect": "NoSchedule"}])
    assert (one_kind(reserved).nodes, one_kind(reserved).out_of_service) == (0, 1)
    [kind] = kinds(reserved, tolerations=[{"operator": "Exists"}])
    assert (kind.nodes, kind.tolerations) == (1, ({"operator": "Exists"},))
    [kind] = kinds(reserved, tolerations=[*TOLERATIONS, {"key": "team", "value": "ads", "effect": "NoSchedule"}])
    assert kind.nodes == 0
    preferred = [{"key": "team", "value": "search", "effect": "PreferNoSchedule"}]
    assert one_kind(node("p", taints=preferred)).nodes == 1


def test_only_nodes_of_the_selector_count_and_pods_get_it_too() -> None:
    train = node("t", labels={"pool": "train"})
    assert kinds(node("n"), train, pool="serve") == ()
    kind = one_kind(node("n"), train, pool="train")
    assert (kind.nodes, kind.node_selector["pool"]) == (1, "train")


def test_a_node_without_its_device_plugin_is_out_of_service() -> None:
    kind = one_kind(node("n", devices=0))
    assert (kind.nodes, kind.out_of_service, kind.devices) == (0, 1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nvidia.com/gpu.memory": "lots"}, "label nvidia.com/gpu.memory is 'lots', not a whole number"),
        ({"nvidia.com/gpu.product": "NVIDIA-H200-MIG-INVALID"}, "its GPUs have different MIG slices"),
        ({AMD_DEVICE: "74a5", AMD_PRODUCT: "AMD_Instinct_MI325_OAM"}, "(--model analytic:mi325x)"),
        ({AMD_DEVICE: "1", f"{AMD_PRODUCT}.AMD_Radeon_8060S_Graphics": "1"}, "AMD_Radeon_8060S_Graphics (amd.com/gpu"),
        ({AMD_DEVICE: "74b5", "amd.com/gpu.driver-version": "6.12.12"}, "(device 74b5) (amd.com/gpu, driver 6.12.12)"),
        ({"feature.node.kubernetes.io/amd-gpu": "true"}, "(device unknown)"),
    ],
)
def test_labels_that_cannot_be_become_a_note_and_the_others_are_seen(change: dict[str, str], message: str) -> None:
    nodes = [Node.from_json(one, "n") for one in (node("bad", labels=change), node("good"))]
    found, notes = kinds_of(nodes, {}, TOLERATIONS)
    assert [kind.nodes for kind in found] == [1]
    [note] = notes
    assert note.startswith("node bad: ")
    assert message in note


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"metadata": {}},
        {"metadata": {"name": "n", "labels": 3}},
        {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "9" * 5000}}},
    ],
)
def test_what_is_no_node_is_reported(data: Any) -> None:
    with refused(InvalidInput, "here"):
        Node.from_json(data, "here")


def test_a_node_is_a_domain_unless_its_clique_reaches_over_nodes() -> None:
    alone = one_kind(node("a"), node("b", devices=8))
    assert alone.topology == Topology(domain=8, local_world_size=8)
    racks = [node(f"n{i}", devices=4, labels={"nvidia.com/gpu.clique": f"cluster.{i // 3}"}) for i in range(6)]
    assert one_kind(*racks).topology == Topology(domain=12, local_world_size=4)
    assert one_kind(*racks[:5]).topology == Topology(domain=8, local_world_size=4)  # as the smallest clique


def test_slices_shared_gpus_and_nodes_out_of_service_have_no_topology() -> None:
    shared = node("s", product="NVIDIA-L4-SHARED", devices=4, labels={"nvidia.com/gpu.replicas": "4"})
    slices = node("m", product="NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", memory_mib=9728, devices=14)
    for one in (shared, slices, node("n", ready=False)):
        assert one_kind(one).topology is None
