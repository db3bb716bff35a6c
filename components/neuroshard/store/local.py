"""Where this machine keeps copies of objects of a store."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/neuroshard, by default ~/.cache/neuroshard. Raises RuntimeError where there is no home."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "neuroshard"
