"""`neuroshard doctor`: all checks of this machine, one after another."""

from collections.abc import Iterator
from pathlib import Path

from neuroshard import devices
from neuroshard.core.versions import installed
from neuroshard.doctor.checks import Check
from neuroshard.doctor.machine import check_backends, check_machine
from neuroshard.doctor.packages import check_packages
from neuroshard.doctor.services import check_kfp, check_runs, check_store


def examine(
    folder: Path,
    *,
    store: str | None = None,
    kfp: str | None = None,
    account: str | None = None,
    namespace: str = "kubeflow",
) -> Iterator[Check]:
    """Each check when it is done; some take seconds. `store`, `kfp` and `account` are checked only if given."""
    gpus = devices.gpus()
    yield from check_packages(has_gpu=bool(gpus))
    yield from check_machine(folder)
    yield from check_backends(gpus)
    if store is None:
        yield Check("store", "none", "no store was checked", "to check one: --store s3://bucket/prefix, or a folder")
    else:
        yield check_store(store)
    yield check_kfp(kfp, installed("kfp"))
    if account is not None:
        yield check_runs(namespace, account)
