"""What an S3 store may answer, or a proxy in front of one: each is read for what it says, in bounded time."""

import gzip
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from helpers.faults import faulty
from helpers.plans import NOW, make_plan
from helpers.refusals import refused
from helpers.servers import answering
from neuroshard.client import load_plan
from neuroshard.core.errors import Conflict, InvalidInput, NotFound, StoreError, Unreachable
from neuroshard.deploy.run import deploy
from neuroshard.store import s3
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import plans_of, read_live
from neuroshard.store.s3 import S3Store
from neuroshard.store.s3_errors import MEANINGS, Busy, meaning_of, request_errors
from neuroshard.store.track import all_releases

A, B = make_plan("a"), make_plan("b")


def said(status: str, body: str = "", *fields: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *fields)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body.encode()


def error(status: str, code: str) -> bytes:
    return said(status, f"<Error><Code>{code}</Code><Message>hunter2</Message></Error>")


@pytest.fixture
def answered(aws, moto, monkeypatch) -> Callable[[bytes], AbstractContextManager[Store]]:
    """`with answered(answer) as store`: whatever is asked, that is the answer."""
    url = aws(moto)
    once = Config(retries={"total_max_attempts": 1, "mode": "standard"})
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG.merge(once))
    monkeypatch.setattr(s3, "BUSY_SECONDS", 0.001)

    @contextmanager
    def answered(answer: bytes) -> Iterator[Store]:
        with answering(answer) as (endpoint, _):
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            yield open_store(url)

    return answered


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (error("400 Bad Request", "ExpiredToken"), StoreError, "credentials have expired (400 ExpiredToken)"),
        (error("403 Forbidden", "RequestTimeTooSkewed"), StoreError, "this machine's clock"),
        (error("400 Bad Request", "KMS.DisabledException"), StoreError, "NEUROSHARD_SSE_KMS_KEY"),
        (error("400 Bad Request", "AuthorizationHeaderMalformed"), StoreError, "AWS_REGION"),
        (error("400 Bad Request", "RequestTimeout"), Unreachable, "400 RequestTimeout"),
        (error("429 Too Many Requests", "SlowDown"), Unreachable, "429 SlowDown"),
        (error("301 Moved Permanently", "PermanentRedirect"), StoreError, "AWS_REGION"),
        (said("307 Temporary Redirect", "", "Location: /elsewhere"), StoreError, "AWS_ENDPOINT_URL"),
        (said("308 Permanent Redirect", "", "Location: /elsewhere"), StoreError, "AWS_ENDPOINT_URL"),
        (said("200 OK", "{}"), StoreError, "has no ETag"),
        (said("403 Forbidden"), StoreError, "access denied (403); check the credentials"),  # as to a HEAD
        # what each store answers where it is full, by its own source or page
        (error("403 Forbidden", "QuotaExceeded"), StoreError, "no room left (403 QuotaExceeded); delete"),  # Ceph RGW
        (error("400 Bad Request", "XMinioAdminBucketQuotaExceeded"), StoreError, "no room left"),  # MinIO
        (error("507 Insufficient Storage", "XMinioStorageFull"), StoreError, "raise the quota"),  # MinIO
        (said("507 Insufficient Storage"), StoreError, "no room left"),  # a gateway
        (error("400 Bad Request", "XAmzContentSHA256Mismatch"), Unreachable, "a proxy on the way changes bodies"),
        (error("400 Bad Request", "BadDigest"), Unreachable, "what arrived is not what was sent"),
        (error("411 Length Required", "MissingContentLength"), StoreError, "look at the proxies before the store"),
        (error("413 Payload Too Large", "EntityTooLarge"), StoreError, "client_max_body_size"),
        (said("413 Payload Too Large", "<html>nginx</html>"), StoreError, "client_max_body_size"),
        (error("403 Forbidden", "InvalidAccessKeyId"), StoreError, "does not know this access key"),
        (error("401 Unauthorized", "Unauthorized"), StoreError, "does not know this access key"),  # R2
        (error("403 Forbidden", "SignatureDoesNotMatch"), StoreError, "AWS_SECRET_ACCESS_KEY"),
        (error("403 Forbidden", "UserSuspended"), StoreError, "ask who runs the store"),  # Ceph RGW
        (error("403 Forbidden", "UserProjectAccountProblem"), StoreError, "ask who runs the store"),  # Google
        (error("400 Bad Request", "ExpiredRequest"), StoreError, "this machine's clock"),  # R2
        (error("400 Bad Request", "CloudKmsDisabledKey"), StoreError, "NEUROSHARD_SSE_KMS_KEY"),  # Google
        (error("403 Forbidden", "RetentionPolicyNotMet"), StoreError, "live.json must be replaced"),  # Google
        (error("403 Forbidden", "InvalidObjectState"), StoreError, "restore it"),  # AWS Glacier
        (error("405 Method Not Allowed", "MethodNotAllowed"), StoreError, "not of its console"),
        (error("400 Bad Request", "KeyTooLongError"), StoreError, "another folder"),
        (error("409 Conflict", "OperationAborted"), Unreachable, "try again"),
        (error("403 Forbidden", "AccessDenied"), StoreError, "s3:GetObject"),
        (error("400 Bad Request", "SomethingNew"), StoreError, "AWS_REGION"),
        (error("418 I'm a teapot", "A\nB" * 100), StoreError, "answered 418 A BA BA"),
        (
            said("403 Forbidden", "<Error><Message>m</Message></Error>"),
            StoreError,
            "access denied (403 without a code)",
        ),
        (error("403 Forbidden", "<Code/>"), StoreError, "AWS_ENDPOINT_URL"),
        (b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\nzz", Unreachable, "broke off"),
    ],
)
def test_an_error_is_reported_for_what_it_is(answered, answer, kind, words):
    with answered(answer) as store, pytest.raises(StoreError) as caught:
        store.read("m/live.json")

    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert words in message
    assert "\n" not in message
    assert len(message) < 300
    assert "hunter2" not in message


def test_every_code_that_is_known_says_what_helps_and_whether_to_try_again(answered):
    assert all(meaning_of(status, code) is MEANINGS[code] for code in MEANINGS for status in (400, 403, 404, 503))
    for code in {meaning: code for code, meaning in MEANINGS.items()}.values():  # one of each meaning
        with answered(error("403 Forbidden", code)) as store, pytest.raises(StoreError) as caught:
            store.read("m/live.json")
        message = str(caught.value)
        assert f"(403 {code}); {MEANINGS[code].way_out}" in message
        assert (type(caught.value) is Unreachable) == MEANINGS[code].passes == ("; try again" in message)


@pytest.mark.parametrize("code", ["QuotaExceeded", "MissingContentLength"])
def test_a_write_that_a_store_refuses_says_what_helps_too(answered, code):
    with answered(error("403 Forbidden", code)) as store, refused(StoreError, code, "m/probe"):
        store.create("m/plans/x.json", b"x")


@pytest.mark.parametrize("body", ["<html>please log in</html>", "", "\x1f\x8b"])
def test_what_is_no_release_is_not_taken_for_one(answered, body):
    with answered(said("200 OK", body, 'ETag: "x"')) as store, refused(InvalidInput, "live.json"):
        load_plan(store.url, "m", cache_dir=False)


def listing(token: str) -> bytes:
    return said(
        "200 OK",
        "<ListBucketResult><IsTruncated>true</IsTruncated>"
        f"<NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>",
    )


def contents(found: str) -> str:
    return f"<ListBucketResult><IsTruncated>false</IsTruncated><Contents>{found}</Contents></ListBucketResult>"


@pytest.mark.parametrize(
    "body",
    [
        contents(""),
        contents("<Key>runs/m/a</Key>"),
        contents("<Key>runs/m/a</Key><Size>1</Size><LastModified>2025-11-20T12:00:99</LastModified>"),
        contents("<Key>runs/m/a</Key><Size>1</Size><LastModified>2025-11-20T12:00:00</LastModified>"),
        contents("<Key>elsewhere/m/a</Key><Size>1</Size><LastModified>2025-11-20T12:00:00Z</LastModified>"),
        "<html><body>please log in</body></html>",
        "<ListBucketResult></ListBucketResult>",
        "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        None,
        "<<<",
        "{}",
        "<!DOCTYPE l [<!ENTITY a 'b'>]><l>&a;</l",
    ],
)
def test_what_is_no_whole_listing_is_an_error(answered, body):
    """Nonsense, one that may not be whole, one that turns in a circle (None), and no XML, which botocore calls a 500."""
    fact = 500 if body and body[:2] in ("<<", "{}", "<!") else "AWS_ENDPOINT_URL"
    with answered(said("200 OK", body) if body is not None else listing("again")) as store, refused(StoreError, fact):
        store.list("m/")


def test_a_listing_that_does_not_end_is_ended(answered, monkeypatch):
    monkeypatch.setattr(s3, "MAX_PAGES", 2)
    pages = iter(range(10))
    with answered(listing("")) as store:
        store.client.meta.events.register(
            "after-call.s3.ListObjectsV2", lambda parsed, **_: parsed.update(NextContinuationToken=str(next(pages)))
        )
        with refused(StoreError, "2 pages"):
            store.list("m/")


def test_an_answer_that_trickles_is_given_up_in_bounded_time(aws, moto, monkeypatch):
    """Each byte comes well within the read timeout, and there is no end of them: only all of it together takes too long."""
    url = aws(moto)
    store: Any = open_store(url)
    deploy(A, store, "m", now=NOW)
    monkeypatch.setattr(s3, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(store.client, "get_object", lambda **_: {"Body": Trickle(), "ETag": '"x"'})
    with refused(Unreachable, "m/live.json", "0.3 s"):
        read_live(store, "m")


class Trickle:
    """A body that comes byte by byte, for ever."""

    def read(self, _: int) -> bytes:
        time.sleep(0.05)
        return b" "

    def close(self) -> None:
        pass


@pytest.fixture
def busy(aws, moto, monkeypatch):
    """`busy(times)`: a store with A live that answers 409 to so many of the next writes of the pointer; and its bucket's own."""
    monkeypatch.setattr(s3, "BUSY_SECONDS", 0.001)
    url = aws(moto)
    direct = open_store(url)
    deploy(A, direct, "m", now=NOW)
    store: Any = open_store(url)
    put, left = store.client.put_object, [0]

    def busy(times: int, *, does_it: bool = False) -> S3Store:
        left[0] = times

        def answer(**request: object) -> object:
            if not str(request["Key"]).endswith("live.json") or not left[0]:
                return put(**request)
            left[0] -= 1
            if does_it:
                put(**request)
            status = {"HTTPStatusCode": 409}
            raise ClientError(
                {"Error": {"Code": "ConditionalRequestConflict"}, "ResponseMetadata": status}, "PutObject"
            )

        monkeypatch.setattr(store.client, "put_object", answer)
        return store

    return busy


def test_a_swap_while_another_is_under_way_is_tried_again_by_the_same_condition(busy):
    store = busy(2)

    assert deploy(B, store, "m", now=NOW).number == 2
    assert load_plan(store.url, "m", cache_dir=False) == B


def test_a_pointer_that_stays_busy_is_reported_as_that(busy):
    store = busy(100)
    with refused(Conflict, "409"):
        deploy(B, store, "m", now=NOW)

    assert load_plan(store.url, "m", cache_dir=False) == A


def test_a_swap_that_came_through_is_no_conflict_whatever_was_answered(busy):
    store = busy(1, does_it=True)

    assert deploy(B, store, "m", now=NOW).number == 2
    assert [release.number for release in all_releases(store, plans_of("m"))] == [2, 1]


def test_a_trainer_asks_twice(aws, moto, monkeypatch):
    """Counted on the wire, of a client that was never used before."""
    url = aws(moto)
    deploy(A, open_store(url), "m", now=NOW)
    asked: list[str] = []
    with faulty(moto, lambda head: asked.append(head.split(b"?")[0].decode()), random.Random(0)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert load_plan(url, "m", cache_dir=False) == A

    path = url.removeprefix("s3://")
    assert [line.split("\r\n")[0].removesuffix(" HTTP/1.1") for line in asked] == [
        f"GET /{path}/m/live.json",
        f"GET /{path}/m/plans/{A.digest()}.json",
    ]


def test_every_write_says_what_its_bytes_must_be_and_on_which_condition(aws, moto, monkeypatch):
    url = aws(moto)
    heads: list[str] = []
    with faulty(moto, lambda head: heads.append(head.decode().lower()), random.Random(0)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        deploy(A, open_store(url), "m", now=NOW)

    writes = [head for head in heads if head.startswith("put ")]
    assert len(writes) == 6, "three of the probe; plan, pointer and history"
    for head in writes:
        assert "\r\ncontent-md5:" in head
        assert ("\r\nif-none-match: *" in head) != ("\r\nif-match:" in head)


def test_a_plan_that_is_answered_compressed_is_no_plan(aws, moto, monkeypatch):
    """The bytes are what the digest is of; what a proxy makes of them is refused, not guessed at."""
    url = aws(moto)
    store: Any = open_store(url)
    deploy(A, store, "m", now=NOW)
    packed = gzip.compress(json.dumps({}).encode())
    key = f"runs/m/plans/{A.digest()}.json"
    store.client.put_object(Bucket=store.bucket, Key=key, Body=packed, ContentEncoding="gzip")
    with refused(InvalidInput, f"m/plans/{A.digest()}.json"):
        load_plan(url, "m", cache_dir=False)


@pytest.mark.parametrize("form", ['W/"{}"', '"{}-gzip"', 'W/"{}-br"'])
@pytest.mark.parametrize("single_writer", [False, True])
def test_the_etag_of_a_proxy_that_compresses_is_the_stores(aws, moto, monkeypatch, form, single_writer):
    url = aws(moto)
    store: Any = open_store(url, single_writer=single_writer)
    deploy(A, store, "m", now=NOW)
    get = store.client.get_object

    def compressed(**request: object) -> object:
        answer = get(**request)
        return {**answer, "ETag": form.format(answer["ETag"].strip('"'))}

    monkeypatch.setattr(store.client, "get_object", compressed)
    assert deploy(B, store, "m", now=NOW).number == 2
    assert load_plan(url, "m", cache_dir=False) == B


def test_a_bucket_with_versions_is_a_store_like_any_other(aws, moto):
    url = aws(moto)
    store: Any = open_store(url)
    store.client.put_bucket_versioning(Bucket=store.bucket, VersioningConfiguration={"Status": "Enabled"})
    for plan in (A, B):
        deploy(plan, store, "m", now=NOW)
    assert load_plan(url, "m", cache_dir=False) == B

    store.delete("m/live.json")  # which leaves a marker, and all versions
    with pytest.raises(NotFound):
        load_plan(url, "m", cache_dir=False)
    assert deploy(A, store, "m", now=NOW).number == 3
    assert [entry.key for entry in store.list("m/releases/")] == [f"m/releases/{n:08d}.json" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("status", "code", "has_condition", "kind"),
    [
        (412, "PreconditionFailed", True, Conflict),
        (404, "NoSuchKey", True, Conflict),
        (404, "NoSuchKey", False, NotFound),
        (409, "ConditionalRequestConflict", True, Busy),
        (403, "AccessDenied", True, StoreError),
        (500, "InternalError", True, Unreachable),
    ],
)
def test_a_condition_that_does_not_hold_is_a_conflict_and_nothing_else_is(
    status: int, code: str, has_condition: bool, kind: type[StoreError]
) -> None:
    @request_errors("s3://b/k", "http://s3", has_condition)
    def write() -> None:
        raise ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")

    with pytest.raises(StoreError) as caught:
        write()
    assert type(caught.value) is kind
