"""A store from its URL: `s3://bucket/prefix`, `file:///folder`, or the path of a folder."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from neuroshard.core.errors import UsageError
from neuroshard.store.folder import FolderStore
from neuroshard.store.protocol import Store, check_key

BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


def open_store(url: str, *, single_writer: bool = False) -> Store:
    """The store at `url`, without a request to it yet. boto3 is imported only for an s3 URL. Raises UsageError.

    `single_writer` declares that nobody else writes there, for an S3 store that ignores conditional writes.
    """
    scheme, colon, rest = url.partition(":")
    if not url or not url.isprintable():
        raise UsageError("the store's URL is empty or not text; write s3://bucket/prefix or a folder")
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return FolderStore(Path(url))
    if scheme == "file" and rest.startswith("//"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
            raise UsageError(f"{url!r} is not a folder's URL; write file:///absolute/path")
        return FolderStore(Path(unquote(parts.path)))
    if scheme == "s3" and rest.startswith("//"):
        bucket, _, prefix = rest[2:].partition("/")
        prefix = prefix.rstrip("/")
        if not BUCKET.fullmatch(bucket):  # not echoed: somebody may have put a secret in front of an @
            raise UsageError("the s3 URL does not name a usable bucket; write s3://bucket/prefix")
        if prefix:
            check_key(prefix)
        from neuroshard.store.s3 import S3Store

        return S3Store(bucket, prefix, single_writer=single_writer)
    raise UsageError(f"{scheme!r} is not a kind of store; write s3://bucket/prefix, file:///folder, or a folder's path")
