"""A store in an S3 bucket, AWS's or any other that speaks its protocol. Only this file and s3_errors.py import boto3.

Endpoint, profile and credentials come from boto3's own chain: AWS_ENDPOINT_URL, AWS_PROFILE, a web identity … So does the
region, except that AWS_REGION comes first, as in AWS's other clients; boto3 reads AWS_DEFAULT_REGION only. Objects are encrypted
as the bucket's default says. Where a bucket's policy requires every write to name a key, NEUROSHARD_SSE_KMS_KEY is the key's id,
ARN or alias. In a step of the pipeline the bucket of Kubeflow Pipelines is in its own object store, unless AWS_ACCESS_KEY_ID is
set.
"""

import base64
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import count
from typing import Any, TypeVar

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from neuroshard.core.errors import Conflict, InvalidInput, NeuroshardError, NotFound, StoreError, Unsafe
from neuroshard.core.store_url import KUBEFLOW_BUCKET, check_key, is_key
from neuroshard.store.deadline import too_late, within
from neuroshard.store.protocol import MAX_BYTES, ObjectInfo
from neuroshard.store.s3_errors import ATTEMPTS, BROKEN_OFF, Busy, request_errors

# For a request with all its attempts, which take 95 s if each of them hangs. boto3's own limits do not suffice: read_timeout
# restarts with every byte, and a credential_process may never end.
REQUEST_SECONDS = 120.0
MAX_PAGES = 10_000  # of one listing, up to 1,000 objects each; a nightly run writes thousands of objects
BUSY_SECONDS = 0.2  # to wait where another write of the key is under way
# What proxies that compress make of the ETag "abc": W/"abc" or "abc-gzip", of which the store would know neither.
COMPRESSED = re.compile(r'^W/|-(gzip|br|zstd|deflate)(?="$)')
CONFIG = Config(
    connect_timeout=5,
    read_timeout=20,
    retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
    # newer default checksums fail on stores that are not AWS; plans carry their own sha256
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
)


# At DEBUG these loggers write credentials, session tokens and whole answers of STS into the log, and botocore.credentials warns
# with the URL of an endpoint, including its password. A root logger at DEBUG must not cause that; a user who wants it sets the
# level of a logger by name.
CHATTY = {
    "boto3": logging.INFO,
    "botocore": logging.INFO,
    "urllib3": logging.INFO,
    "botocore.credentials": logging.CRITICAL,
}

T = TypeVar("T")


# Where the object store of Kubeflow Pipelines 2.17 is, and under which names the pipeline gives a step its keys
KUBEFLOW_ENDPOINT = "http://seaweedfs.kubeflow:9000"
KUBEFLOW_KEYS = ("KUBEFLOW_ACCESS_KEY", "KUBEFLOW_SECRET_KEY")


def _client(bucket: str) -> Any:
    key, secret = map(os.environ.get, KUBEFLOW_KEYS)
    if bucket != KUBEFLOW_BUCKET or os.environ.get("AWS_ACCESS_KEY_ID") or not (key and secret):
        return Session(region_name=os.environ.get("AWS_REGION") or None).client("s3", config=CONFIG)
    session = Session(region_name="us-east-1", aws_access_key_id=key, aws_secret_access_key=secret)
    return session.client("s3", config=CONFIG, endpoint_url=KUBEFLOW_ENDPOINT)


class S3Store:
    """Objects under `s3://bucket/prefix`. Tokens are ETags, which show that an object has changed.

    The first write probes the store: a store that ignores conditional writes is refused. With `single_writer` the caller
    declares that nobody else writes; then a write first compares the token, and overwrites without a condition.
    """

    def __init__(self, bucket: str, prefix: str = "", *, single_writer: bool = False) -> None:
        self.bucket, self.prefix, self.single_writer = bucket, prefix, single_writer
        self.probed = single_writer
        for name, level in CHATTY.items():
            if logging.getLogger(name).level == logging.NOTSET:
                logging.getLogger(name).setLevel(level)
        kms_key = os.environ.get("NEUROSHARD_SSE_KMS_KEY")
        self.encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
        try:
            self.client: Any = within(REQUEST_SECONDS, self.url, partial(_client, bucket), place="credentials")
        except (BotoCoreError, ValueError, OSError) as error:  # the text may quote an endpoint with a password in it
            raise StoreError(
                f"{self.url}: boto3 cannot be set up ({type(error).__name__}); check AWS_PROFILE, AWS_REGION, "
                "AWS_ENDPOINT_URL and the AWS configuration files"
            ) from None

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def identity(self) -> str:
        return f"{self.url} {self.client.meta.endpoint_url}"

    def read(self, key: str, max_bytes: int = MAX_BYTES) -> bytes:
        return self.read_versioned(key, max_bytes)[0]

    def read_versioned(self, key: str, max_bytes: int = MAX_BYTES) -> tuple[bytes, str]:
        full = self._full(check_key(key))

        def get() -> tuple[bytes, str]:
            answer = self.client.get_object(Bucket=self.bucket, Key=full)
            with closing(answer["Body"]) as body:
                if "ETag" not in answer:
                    raise StoreError(f"{self.url}/{key}: the store's answer has no ETag, which shows changes")
                return self._body(key, body, max_bytes), COMPRESSED.sub("", answer["ETag"])

        def get_whole() -> tuple[bytes, str]:
            for _ in range(1, ATTEMPTS):  # boto3 does not retry where the body breaks off
                try:
                    return get()
                except BROKEN_OFF:
                    continue
            return get()

        with self._errors(key):
            return self._in_time(key, get_whole)

    def create(self, key: str, data: bytes) -> bool:
        for _ in range(ATTEMPTS):
            try:
                self._write(key, data, None)
                return True
            except Conflict:
                try:
                    existing = self.read(key, max(MAX_BYTES, len(data)))
                except NotFound:  # the other writer has not finished (409)
                    continue
                if existing != data:
                    raise Conflict(
                        f"{self.url}/{key}: already exists with other content, and is written only once"
                    ) from None
                return False
        raise StoreError(f"{self.url}/{key}: the store refused to create it {ATTEMPTS} times; try again")

    def swap(self, key: str, data: bytes, expected: str | None) -> None:
        self._write(key, data, expected)

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        entries: list[ObjectInfo] = []
        with self._errors(prefix):
            paginator = self.client.get_paginator("list_objects_v2")
            pages = iter(paginator.paginate(Bucket=self.bucket, Prefix=self._full(prefix)))
            for number in count(1):
                page = self._in_time(prefix, lambda: next(pages, None))
                if page is None:
                    break
                if page["IsTruncated"] and not page.get("NextContinuationToken"):
                    raise ValueError("cut off")
                if number > MAX_PAGES:
                    raise StoreError(f"{self.url}/{prefix}: its listing does not end after {MAX_PAGES:,} pages")
                for found in page.get("Contents", ()):
                    if not found["Key"].startswith(self._full(prefix)):
                        raise ValueError(found["Key"])
                    key = found["Key"].removeprefix(self._full(""))
                    if not is_key(key):  # not ours, and unsafe as a path: "a/../../b", or a console's "folder/"
                        continue
                    if found["LastModified"].tzinfo is None:
                        raise ValueError(found["LastModified"])
                    entries.append(ObjectInfo(key, found["Size"], found["LastModified"]))
        return tuple(sorted(entries))

    def delete(self, key: str) -> None:
        delete = partial(self.client.delete_object, Bucket=self.bucket, Key=self._full(check_key(key)))
        with self._errors(key):
            self._in_time(key, delete)

    def clock(self) -> datetime:
        """The Date header of an answer."""
        ask = partial(self.client.list_objects_v2, Bucket=self.bucket, Prefix=self._full(""), MaxKeys=1)
        with self._errors(""):
            headers = self._in_time("", ask)["ResponseMetadata"]["HTTPHeaders"]
            now = parsedate_to_datetime(headers["date"])
            if now.tzinfo is None:
                raise ValueError(headers["date"])
            return now

    def _in_time(self, key: str, ask: Callable[[], T]) -> T:
        """Return or raise what a request does. Raises Unreachable after REQUEST_SECONDS."""

        def asked() -> T:
            try:
                return ask()
            except (NeuroshardError, BotoCoreError, ClientError, HTTPError, OSError, RecursionError):
                raise
            except Exception as error:  # an answer that is not S3's may end in a TypeError in botocore
                raise ValueError(f"{type(error).__name__} of boto3") from error

        return within(REQUEST_SECONDS, f"{self.url}/{key}", asked, place=f"requests to {self.identity}")

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _body(self, key: str, body: Any, max_bytes: int) -> bytes:
        data = bytearray()
        began = time.monotonic()
        while chunk := body.read(2**14):
            data += chunk
            if time.monotonic() - began > REQUEST_SECONDS:  # the caller has given up, and nothing else ends this thread
                raise too_late(f"{self.url}/{key}", REQUEST_SECONDS)
            if len(data) > max_bytes:
                raise InvalidInput(f"{self.url}/{key}: more than the {max_bytes:,} bytes that it may have")
        return bytes(data)

    def _write(self, key: str, data: bytes, expected: str | None) -> None:
        """Put the object if its token still is `expected` (None: if it does not exist). Raises Conflict if not."""
        self._probe_once(key)
        if self.single_writer:
            token = None
            with suppress(NotFound):
                token = self.read_versioned(key, max(MAX_BYTES, len(data)))[1]
            if token != expected:
                raise Conflict(f"{self.url}/{key}: is not as it was when it was read")
            self._put(key, data)
        elif expected is None:
            self._put(key, data, IfNoneMatch="*")
        else:
            self._put(key, data, IfMatch=expected)

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        # by which the store refuses a damaged body
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        put = partial(
            self.client.put_object,
            Bucket=self.bucket,
            Key=self._full(check_key(key)),
            Body=data,
            ContentMD5=md5,
            **self.encryption,
            **condition,
        )
        for attempt in range(ATTEMPTS):
            try:
                with self._errors(key, has_condition=bool(condition)):
                    self._in_time(key, put)
                return
            except Busy:  # the same condition fails now if the other write succeeded
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(BUSY_SECONDS * 2**attempt)

    def _probe_once(self, key: str) -> None:
        """Raise StoreError unless the store refuses to create an object twice, and to swap an object that has changed.

        The scratch object is in the folder of the first key that is written, where the credentials allow writes. It stays.
        """
        if self.probed:
            return
        scratch = f"{key.partition('/')[0]}/probe"
        self._refuses(scratch, IfNoneMatch="*")  # the scratch object exists after this
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"00000000000000000000000000000000"'}):
            if not self._refuses(scratch, **condition):
                raise Unsafe(
                    f"{self.url}: this store ignores conditional writes ({next(iter(condition))}), so two deployers could "
                    "overwrite each other's release; if nobody else deploys here, give --single-writer"
                )
        self.probed = True

    def _refuses(self, key: str, **condition: str) -> bool:
        try:
            self._put(key, b"neuroshard asks whether this store honours conditional writes\n", **condition)
        except Conflict:
            return True
        return False

    def _errors(self, key: str, has_condition: bool = False) -> AbstractContextManager[None]:
        return request_errors(f"{self.url}/{key}", self.client.meta.endpoint_url, has_condition)
