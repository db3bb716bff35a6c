"""How a store and the objects in it are named: `s3://bucket/prefix`, `file:///folder` or a folder's path, and keys."""

import os
import re
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote

from neuroshard.core.errors import UsageError

StoreUrl: TypeAlias = str | os.PathLike[str]
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
KUBEFLOW_BUCKET = "mlpipeline"  # of the object store that Kubeflow Pipelines comes with


class StorePlace(NamedTuple):
    """A bucket and a prefix in it; or, where `bucket` is empty, a folder."""

    folder: str = ""
    bucket: str = ""
    prefix: str = ""


def parse_store_url(url: StoreUrl) -> StorePlace:
    """The place that a store's URL, or the path of a folder, names. Raises UsageError."""
    if isinstance(url, os.PathLike):
        return StorePlace(folder=os.fspath(url))
    if not isinstance(url, str):
        raise UsageError(f"the store's URL is a {type(url).__name__}; write s3://bucket/prefix or a folder")
    scheme, colon, rest = url.partition(":")
    if not url or not url.isprintable():
        raise UsageError("the store's URL is empty or not text; write s3://bucket/prefix or a folder")
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return StorePlace(folder=url)
    if scheme == "file" and rest.startswith("//"):
        found = re.fullmatch(r"file://(?:localhost)?(/[^?#]*)", url)
        if not found:
            raise UsageError(f"{url!r} is not a folder's URL; write file:///absolute/path")
        return StorePlace(folder=unquote(found[1]))
    if scheme == "s3" and rest.startswith("//"):
        bucket, _, prefix = rest[2:].partition("/")
        prefix = prefix.rstrip("/")
        if not BUCKET.fullmatch(bucket):  # not echoed: somebody may have put a secret in front of an @
            raise UsageError("the s3 URL does not name a usable bucket; write s3://bucket/prefix")
        return StorePlace(bucket=bucket, prefix=prefix and check_key(prefix))
    raise UsageError(f"{scheme!r} is not a kind of store; write s3://bucket/prefix, file:///folder, or a folder's path")


def check_key(key: str) -> str:
    """Return `key`, if it is safe both in a folder and in a bucket. Raises UsageError.

    Segments that start with a dot are reserved for the stores' own scratch files.
    """
    segments = key.split("/")
    if any(not segment or segment.startswith(".") for segment in segments):
        raise UsageError(f"{key!r} is not a usable key: no part between the slashes may be empty or start with a dot")
    if not key.isprintable() or "\\" in key or len(key.encode()) > 900:  # S3 takes 1,024 bytes
        raise UsageError(
            f"{key[:60]!r} is not a usable key: at most 900 bytes, without backslashes or control characters"
        )
    return key


def is_key(text: str) -> bool:
    """Whether `check_key` accepts it."""
    try:
        check_key(text)
    except UsageError:
        return False
    return True
