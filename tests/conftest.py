"""Fixtures that several rooms' tests share."""

import functools
import gc
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import typer.main
import yaml
from hypothesis import HealthCheck, settings

# No process of a test takes more: where a kernel refuses nothing (vm.overcommit_memory=1), one that did would end others.
# Before what reads the limit as it is imported (neuroshard/system.py).
MOST_BYTES = 8 * 2**30
_, most = resource.getrlimit(resource.RLIMIT_DATA)
if most == resource.RLIM_INFINITY or most > MOST_BYTES:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))

from helpers import commands, servers, skipped  # noqa: E402

if TYPE_CHECKING:
    from neuroshard.store.folder import FolderStore

CommandLine = Callable[..., "commands.Done[str]"]

# The same examples on every machine, however long each takes there, and nothing kept in the working directory.
settings.register_profile(
    "facts", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("facts")


# What is imported stays: looking through torch and kfp for garbage, again and again, takes a quarter of the collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# The compiled pipeline is read some three hundred times, most of them by kfp: by libyaml in a tenth of the time.
if yaml.__with_libyaml__:
    yaml.safe_load_all = functools.partial(yaml.load_all, Loader=yaml.CSafeLoader)
    yaml.safe_dump_all = functools.partial(yaml.dump_all, Dumper=yaml.CSafeDumper)

# Making the command line's tree of commands is three quarters of a short command; it keeps nothing of a call.
typer.main.get_command = functools.cache(typer.main.get_command)

# Whoever asks for one of these starts a process, a server or a browser, or trains nets: marked slow with those that say so
# themselves.
SLOW = {"chain", "chromium", "kfp_stub", "made", "moto", "neuroshard_process", "parts", "rclone", "run_local"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-fast` leaves out what is slow."""
    for item in items:
        of_parameters = getattr(item, "callspec", None)
        named = [value for value in (of_parameters.params.values() if of_parameters else ()) if isinstance(value, str)]
        asked = {*getattr(item, "fixturenames", ()), *named}
        if SLOW & asked:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """End by saying what was skipped, why, and what would run it."""
    yield
    reports = terminalreporter.stats.get("skipped", ())
    reasons = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    for line in skipped.summary(reasons):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory) -> Iterator[None]:
    """Plans that tests load are kept away from those of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _only_this_machine() -> Iterator[None]:
    """Every server that tests ask is on the loopback interface: no proxy leads there, no name of this host, and no kubeconfig.

    The client of Kubernetes reads KUBECONFIG once, when it is imported.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.lower().endswith("_proxy") or name == "KUBECONFIG"]:
            patch.delenv(name)
        if Path("/sys/class/net/lo").exists():
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Files are written, but not waited for: no test cuts the power, and a release waits for the disk ten times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _a_short_look() -> Iterator[None]:
    """Tests that measure on this CPU do not look for 10 s how calm it can be; commands in processes of their own do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neuroshard.measure.real_devices.CALM_SECONDS", 0.3)
        yield


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Workers that measure in this process's name are forked: for what is measured, not for how a worker starts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of FBGEMM, while it is imported
        import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401

    from helpers.forked import ForkedWorker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neuroshard.measure.workers.processes._start", ForkedWorker)
        yield


@pytest.fixture(scope="session")
def neuroshard() -> CommandLine:
    """Runs the command as it is typed, in this process: `neuroshard("show", plan)`."""
    return commands.in_this_process


@pytest.fixture(scope="session")
def neuroshard_process() -> CommandLine:
    """The same in a process of its own, for what is about the process: its streams, its environment, its end."""
    return commands.in_its_own_process


@pytest.fixture
def store(tmp_path: Path) -> "FolderStore":
    """A store in a folder, where nothing is yet."""
    from neuroshard.store.folder import FolderStore

    return FolderStore(tmp_path / "store")


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """URL of a moto server: honours conditional writes, checks no signature."""
    with servers.moto() as url:
        yield url


@pytest.fixture(scope="session")
def rclone(tmp_path_factory) -> Iterator[str]:
    """URL of `rclone serve s3`: checks signatures, ignores conditions, so only a single writer may use it."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as url:
        yield url


@functools.cache
def _read_once(data_path: str | None) -> Any:
    """What botocore reads of its own files, once for all sessions: most of the CPU time of a client is reading them."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


@pytest.fixture
def aws(monkeypatch, tmp_path) -> Callable[[str], str]:
    """Points boto3's environment at an endpoint and makes a bucket there: `aws(moto)` returns `s3://<bucket>/runs`."""

    def point_at(endpoint: str) -> str:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET)

        import boto3

        monkeypatch.setattr("botocore.session.create_loader", _read_once)
        bucket = f"bucket-{uuid4().hex}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        return f"s3://{bucket}/runs"

    return point_at
