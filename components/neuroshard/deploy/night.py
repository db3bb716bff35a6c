"""The end of measuring a kind of hardware: its cost model goes live, and the work that led there is cleared away."""

import sys
from pathlib import Path

from neuroshard.core.nightly import WORK_FOLDER, Work
from neuroshard.core.release import ModelRelease
from neuroshard.deploy.bundles import MAX_ERROR, run
from neuroshard.store.folders import delete_folder, patiently
from neuroshard.store.open import open_store


def publish(
    work: Work, cost_model: Path, store_url: str, *, max_error: float, single_writer: bool = False
) -> ModelRelease:
    """Publish a work's cost model; its release. `max_error` 0 asks for what `publish-model` asks for.

    Raises Refused where its error on unseen tables is higher, StoreError, Conflict. The work then stays, to be gone on with.
    """
    release = patiently(
        lambda: run(cost_model, store_url, max_error=max_error or MAX_ERROR, single_writer=single_writer)
    )
    delete_folder(open_store(store_url, single_writer=single_writer), f"{WORK_FOLDER}/{work.hardware.fingerprint}")
    error = "" if release.error is None else f", error on unseen tables {release.error:.1%}"
    print(f"{release.device_name}: cost model {release.bundle_digest[:12]} is live{error}", file=sys.stderr)
    return release
