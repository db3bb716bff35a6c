"""From the name that a user types to its release track: a model's plans, or the cost models of hardware/FINGERPRINT/BATCH."""

import re
from datetime import UTC, datetime
from typing import Any

from neuroshard.core.errors import UsageError
from neuroshard.core.release import HARDWARE, Pointer
from neuroshard.deploy.golive import roll_back
from neuroshard.store.bundles import BATCH_SIZE, models_of
from neuroshard.store.open import open_store
from neuroshard.store.releases import plans_of
from neuroshard.store.track import ReleaseTrack


def track_of(name: str) -> ReleaseTrack[Any]:
    """The release track of a name. Raises UsageError for an invalid name."""
    folder, _, rest = name.partition("/")
    if folder != HARDWARE or not rest:
        return plans_of(name)
    fingerprint, _, batch_size = rest.partition("/")
    if not re.fullmatch(BATCH_SIZE, batch_size):
        raise UsageError(
            f"{name[:80]!r} is not the name of cost models; write hardware/FINGERPRINT/BATCH, as in "
            "hardware/1f0c6a2b9d3e4857/512 (`neuroshard models` shows both)"
        )
    return models_of(fingerprint, int(batch_size))


def run_promote(store_url: str, name: str, digest: str, *, single_writer: bool = False) -> Pointer:
    """Make a published plan or cost model live, by this machine's clock."""
    store, now = open_store(store_url, single_writer=single_writer), datetime.now(UTC)
    if track_of(name).noun == "plan":
        from neuroshard.deploy.run import promote

        return promote(store, name, digest, now=now)
    from neuroshard.deploy.bundles import promote_model

    return promote_model(store, track_of(name), digest, now=now)


def run_rollback(store_url: str, name: str, *, single_writer: bool = False) -> Pointer:
    """Make the plan or cost model live again that the live one replaced, by this machine's clock."""
    release: Pointer = roll_back(
        open_store(store_url, single_writer=single_writer), track_of(name), now=datetime.now(UTC)
    )
    return release
