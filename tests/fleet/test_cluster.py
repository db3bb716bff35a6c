"""The official client against a fake API server that speaks HTTP (helpers/nodes.py); no cluster is asked."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.nodes import FakeApiServer, mixed_fleet, node, serving
from helpers.refusals import refused
from helpers.servers import nobody
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.fleet import cluster
from neuroshard.fleet.run import TOLERATIONS, kubernetes_fleet, pods_fleet


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    from kubernetes.config import kube_config

    with serving(FakeApiServer(mixed_fleet())) as server:
        config = server.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(config))
        yield server


def test_it_asks_for_all_nodes_at_once(api: FakeApiServer) -> None:
    fleet = kubernetes_fleet()
    assert (len(fleet.kinds), fleet.source) == (6, api.url)
    api.nodes = [node(f"n{index}") for index in range(1001)]
    [kind] = kubernetes_fleet().kinds
    assert kind.nodes == 1001
    assert api.asked == [{"resourceVersion": "0"}] * 2


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "the token is not valid there"), (500, "answered 500: fault 500")],
)
def test_what_the_api_refuses_is_one_line(api: FakeApiServer, status: int, message: str) -> None:
    api.faults = [status] * 10
    with pytest.raises(NeuroshardError) as caught:
        kubernetes_fleet()
    assert str(caught.value).startswith(api.url)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_permission_the_way_out_is_reported(api: FakeApiServer, tmp_path: Path) -> None:
    api.kubeconfig(tmp_path / "kubeconfig", token="somebody-else")
    with refused(NeuroshardError, "ClusterRole neuroshard-fleet"):
        kubernetes_fleet()


def test_a_server_that_is_gone_is_one_line(api: FakeApiServer, tmp_path: Path) -> None:
    with nobody() as address:
        api.url = f"http://{address}"
        api.kubeconfig(tmp_path / "kubeconfig")
        with refused(NeuroshardError, api.url, "refused"):
            kubernetes_fleet()


def test_no_kubeconfig_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with refused(UsageError, "Kubernetes", "pod"):
        kubernetes_fleet()


def test_a_context_that_is_not_there_is_one_line(api: FakeApiServer) -> None:
    with refused(UsageError, "moon"):
        kubernetes_fleet(context="moon")


@pytest.mark.parametrize("text", ["{", "[]", '{"items": 3}', '{"items": [{}]}'])
def test_a_file_that_is_no_list_of_nodes_is_reported_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    with refused(InvalidInput, path):
        kubernetes_fleet(recorded=path)


def test_a_pod_is_known_by_its_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEUROSHARD_SYSTEM_ROOT", str(tmp_path))
    assert not cluster.in_cluster()
    (tmp_path / cluster.ACCOUNT[1:]).mkdir(parents=True)
    (tmp_path / cluster.ACCOUNT[1:] / "token").write_text("t")
    assert cluster.in_cluster()


def test_cpus_of_measuring_pods_are_on_the_nodes_that_a_run_names_but_not_on_those_of_gpus_alone() -> None:
    dedicated = {"key": "dedicated", "operator": "Exists"}
    [kind] = pods_fleet(2**32, {"pool": "cpu"}, [*TOLERATIONS, dedicated]).kinds
    assert (kind.node_selector, kind.tolerations, kind.resource) == ({"pool": "cpu"}, (dedicated,), "")
    assert (kind.hardware.kind, kind.hardware.memory_bytes) == ("cpu", 2**32)


def test_a_recording_and_the_api_tell_the_same(api: FakeApiServer, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"kind": "List", "items": mixed_fleet()}))
    assert kubernetes_fleet(recorded=path).kinds == kubernetes_fleet().kinds


def test_where_no_node_has_the_label_it_is_named_with_the_nodes_that_have_gpus(api: FakeApiServer) -> None:
    label = {"nvidia.com/gpu.present": "false"}
    api.nodes[:] = [node("cpu-0", labels=label, allocatable={"nvidia.com/gpu": "0"})]
    looked_for = f"no node has the label {' or '.join(cluster.GPU_NODES)}"
    assert kubernetes_fleet().notes == (looked_for,)
    api.nodes += [node("a", labels=label), node("b", labels=label)]
    assert kubernetes_fleet().notes == (
        f"{looked_for}, and there are GPUs without it in a, b: is GPU feature discovery running there?",
    )
