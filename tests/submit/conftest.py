"""The stub of the Kubeflow Pipelines API, and an environment without this machine's settings of kfp, Kubernetes and proxies."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import nodes
from helpers.kubeflow import KfpStub, serving
from helpers.nodes import RUNNER, FakeApiServer
from neuroshard.store.folder import FolderStore
from neuroshard.submit import wait


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KFP", "KF_", "POD_", "KUBE")) or "_PROXY" in name.upper():
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> FolderStore:
    """A folder in place of the store of all runs, where their steps recorded nothing."""
    folder = FolderStore(tmp_path_factory.mktemp("store"))
    monkeypatch.setattr(wait, "open_store", lambda url: folder)
    return folder


@pytest.fixture
def kfp_stub() -> Iterator[KfpStub]:
    with serving(KfpStub()) as stub:
        yield stub


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    path = tmp_path / "parameters.yaml"
    path.write_text('store: s3://bucket/p\nbatch_size: 512\nmeasure_cpus: "8"\n')
    return path


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(
        "- {name: ads, tables: 's3://bucket/ads.json', devices: 8, memory: 80GiB, hardware: h200}\n"
        "- {name: feed, tables: 's3://bucket/feed.json', devices: 16, memory: 60GiB, hardware: h100}\n"
    )
    return path


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    """An API server with the runner's account, to which the kubeconfig leads."""
    from kubernetes.config import kube_config

    with nodes.serving(FakeApiServer([], accounts=(RUNNER,))) as server:
        config = server.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(config))
        yield server
