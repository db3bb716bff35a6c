"""A store from its URL: `s3://bucket/prefix`, `file:///folder`, or the path of a folder."""

import os
from pathlib import Path

from neuroshard.core.store_url import StoreUrl, parse_store_url
from neuroshard.store.folder import FolderStore
from neuroshard.store.protocol import Store


def open_store(url: StoreUrl, *, single_writer: bool = False) -> Store:
    """The store at `url`, without a request to it yet. boto3 is imported only for an s3 URL. Raises UsageError.

    `single_writer` declares that nobody else writes there, for an S3 store that ignores conditional writes.
    """
    place = parse_store_url(url)
    if not place.bucket:
        return FolderStore(Path(place.folder))
    from neuroshard.store.s3 import S3Store

    return S3Store(place.bucket, place.prefix, single_writer=single_writer)


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/neuroshard, by default ~/.cache/neuroshard. Raises RuntimeError where there is no home."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "neuroshard"
