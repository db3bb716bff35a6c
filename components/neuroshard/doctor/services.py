"""All checks of `neuroshard doctor`, one after another, and those of services: the store, Kubeflow Pipelines, the cluster."""

import http.client
import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from neuroshard import devices
from neuroshard.core.errors import Conflict, NeuroshardError
from neuroshard.core.extras import install_command
from neuroshard.core.versions import installed
from neuroshard.doctor.checks import Check, Verdict
from neuroshard.doctor.machine import check_backends, check_machine
from neuroshard.doctor.packages import check_packages
from neuroshard.kube import admission
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store

FOLDER = "neuroshard-doctor"  # in the store; everything written there is deleted again
KFP_SECONDS = 15
HEALTH = "/apis/v2beta1/healthz"
KFP_VERSION = "2.17"  # the pipeline's, as docs/operating.md says
MEND_KFP = (
    "give the API's address; from outside: kubectl -n kubeflow port-forward svc/ml-pipeline 8888; --kfp localhost:8888"
)
MEND_S3 = "check AWS_PROFILE, AWS_ENDPOINT_URL and AWS_REGION; a store without conditional writes needs a single writer"
MEND_FOLDER = "give a folder that can be written, with flock (local disks and NFS have it)"
MEND_RUNS = (
    "apply the overlay, which makes the account (manifests/base/serviceaccounts.yaml); images other than ours must run as a user "
    "that is not root; docs/operating.md: Pod Security"
)


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


def check_store(url: str) -> Check:
    """Writes, reads, swaps and deletes scratch objects. A store that ignores conditional writes fails."""
    try:
        store = open_store(url)
        with _cleaned_up(store):
            _prove(store)
    except NeuroshardError as error:
        return Check("store", "fail", str(error), MEND_S3 if url.startswith("s3:") else MEND_FOLDER)
    return Check("store", "ok", f"{store.url}: reads, writes once, swaps only what is unchanged, deletes")


@contextmanager
def _cleaned_up(store: Store) -> Iterator[None]:
    """Remove the folders that the block makes in a folder store: deleting objects leaves their folders and locks."""
    if not isinstance(store, FolderStore):
        yield
        return
    scratch = store.root / FOLDER
    missing = [folder for folder in (scratch, *scratch.parents) if not folder.exists()]
    try:
        yield
    finally:
        if scratch in missing:
            shutil.rmtree(scratch, ignore_errors=True)
        for folder in missing[1:]:
            with suppress(OSError):
                folder.rmdir()


def _prove(store: Store) -> None:
    """Raises NeuroshardError where the store breaks a rule of store/protocol.py."""
    key = f"{FOLDER}/{uuid4().hex}/object"
    try:
        if not store.create(key, b"one") or store.read(key) != b"one":
            raise NeuroshardError(f"{store.url}: reads something else than was written")
        _must_conflict(store, lambda: store.create(key, b"two"), "overwrites an object that exists")
        _, token = store.read_versioned(key)
        store.swap(key, b"two", token)
        _must_conflict(
            store, lambda: store.swap(key, b"three", token), "swaps an object that has changed since it was read"
        )
        if store.read(key) != b"two" or [entry.key for entry in store.list(key)] != [key]:
            raise NeuroshardError(f"{store.url}: shows a swap too late")
    finally:
        for scratch in (key, f"{FOLDER}/probe"):  # an S3 store writes the second before its first write
            with suppress(NeuroshardError):  # an earlier error says more
                store.delete(scratch)


def _must_conflict(store: Store, attempt: Callable[[], object], otherwise: str) -> None:
    with suppress(Conflict):
        attempt()
        raise NeuroshardError(f"{store.url}: {otherwise}: two deployers could overwrite each other's release")


def check_kfp(host: str | None, version: str | None) -> Check:
    """Whether kfp is installed (in this `version`), and whether the API answers at `host` if given."""
    client = f"kfp {version}" if version else "kfp is not installed"
    if host is None and version:
        return Check("kfp", "ok", f"{client}; no cluster was checked", "to check one: --kfp http://localhost:8888")
    if host is None:
        return Check("kfp", "none", client, f"for make run and make submit: {install_command('pipeline')}")
    url = (host if "://" in host else f"http://{host}").rstrip("/") + HEALTH
    if urlsplit(url).scheme not in ("http", "https"):
        return Check(
            "kfp", "fail", f"{host!r} is not an address of http or https", "give one: --kfp http://localhost:8888"
        )
    reached, says, mend = _health(url)
    if not reached:
        return Check("kfp", "fail", says, MEND_KFP)
    if not version:
        return Check("kfp", "warn", f"{says}, but {client}", install_command("pipeline"))
    return Check("kfp", "warn" if mend else "ok", f"{client}; {says}", mend)


def check_runs(namespace: str, account: str, context: str | None = None) -> Check:
    """Whether the cluster takes the pods of a run in `namespace` under `account`, by a dry run."""
    verdict, says, _ = admission(namespace, account, context)
    answers: dict[str, tuple[Verdict, str]] = {
        "admitted": ("ok", ""),
        "refused": ("fail", MEND_RUNS),
        "unknown": ("warn", "use a kubeconfig whose account may create pods there"),
    }
    of, mend = answers[verdict]
    return Check("runs", of, says, mend)


def _health(url: str) -> tuple[bool, str, str]:
    """Whether Kubeflow Pipelines answers at the URL, a sentence about it, and what to heed."""
    where = url.removesuffix(HEALTH)  # of http or https
    try:
        with urllib.request.urlopen(url, timeout=KFP_SECONDS) as answer:  # nosec B310
            found = dict(json.loads(answer.read(65536)))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return True, f"{where} answers, and requires a login ({error.code})", ""
        return False, f"{where} answers {error.code} to {HEALTH}: is it Kubeflow Pipelines 2?", ""
    except (ValueError, TypeError):
        return False, f"{where} answers, but not like Kubeflow Pipelines", ""
    except (OSError, http.client.HTTPException) as error:
        return False, f"{where} cannot be reached: {getattr(error, 'reason', None) or error}", ""
    version = re.match(r"v?(\d+\.\d+)[.\w-]*", str(found.get("tag_name")))  # a build of somebody's own has none
    users = "of several users" if found.get("multi_user") else ""
    other = f"of version {version[0]}, not {KFP_VERSION}" if version and version[1] != KFP_VERSION else ""
    heed = [
        "give submit and schedule the profile's namespace: --namespace" if users else "",
        f"the pipeline was tried with Kubeflow Pipelines {KFP_VERSION} alone" if other else "",
    ]
    which = ", ".join(filter(None, (users, other)))
    return True, f"Kubeflow Pipelines answers at {where}{which and f', {which}'}", "; ".join(filter(None, heed))
