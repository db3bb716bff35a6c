"""The name that a user types: a model's, whose plans are meant, or hardware/FINGERPRINT, whose cost models are."""

from typing import Any

from neuroshard.core.release import HARDWARE
from neuroshard.store.bundles import models_of
from neuroshard.store.line import Line
from neuroshard.store.releases import plans_of


def line_of(name: str) -> Line[Any]:
    """Raises UsageError for what is no usable name of either kind."""
    folder, _, fingerprint = name.partition("/")
    return models_of(fingerprint) if folder == HARDWARE and fingerprint else plans_of(name)
