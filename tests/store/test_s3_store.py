"""What is special about S3: the probe, and what the store or the network answers when something is wrong."""

from typing import Any

import pytest
from botocore.config import Config

from helpers.refusals import refused
from helpers.servers import SECRET, answering, nobody
from neuroshard.core.errors import InvalidInput, NotFound, StoreError, Unreachable, Unsafe
from neuroshard.store import s3
from neuroshard.store.open import open_store
from neuroshard.store.s3_errors import ATTEMPTS


def fails(use, kind: type[StoreError], *words: str) -> None:
    """`use` raises exactly `kind`, in one line with these words and no secret."""
    with pytest.raises(StoreError) as caught:
        use()
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert "\n" not in message
    assert SECRET not in message
    assert "hunter2" not in message
    for word in words:
        assert word in message


def every_use(url: str, **options: bool) -> list:
    store: Any = open_store(url, **options)
    return [
        lambda: store.read("m/a"),
        lambda: store.read_versioned("m/a"),
        lambda: store.create("m/a", b""),
        lambda: store.swap("m/a", b"", None),
        lambda: store.list("m/"),
        lambda: store.delete("m/a"),
    ]


def test_a_store_that_ignores_conditions_is_refused_before_the_first_write(aws, rclone):
    store: Any = open_store(aws(rclone))

    for use in (lambda: store.create("m/a", b""), lambda: store.swap("m/a", b"", None)):
        fails(use, Unsafe, store.url, "If", "--single-writer")
    assert [entry.key for entry in store.list("m/")] == ["m/probe"]


def test_reading_needs_no_probe(aws, moto):
    store: Any = open_store(aws(moto))

    fails(lambda: store.read("m/a"), NotFound, "m/a")
    assert store.list("") == ()


def test_a_wrong_secret_is_reported_as_denied(aws, rclone, monkeypatch):
    url = aws(rclone)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")

    for single_writer in (False, True):
        for use in every_use(url, single_writer=single_writer):
            fails(
                use, StoreError, url, "the signature does not fit (403 SignatureDoesNotMatch)", "AWS_SECRET_ACCESS_KEY"
            )


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_a_missing_bucket_is_named(aws, request, server):
    endpoint = request.getfixturevalue(server)
    aws(endpoint)

    for use in every_use("s3://no-such-bucket-here/runs"):
        fails(use, NotFound, "s3://no-such-bucket-here: no such bucket", endpoint.removeprefix("http://"))


def test_no_credentials_are_reported_with_the_way_out(aws, moto, monkeypatch):
    url = aws(moto)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    for use in every_use(url):
        fails(use, StoreError, "no usable credentials", "AWS_PROFILE")


def test_an_unknown_profile_is_reported(aws, moto, monkeypatch):
    url = aws(moto)
    monkeypatch.setenv("AWS_PROFILE", "nobody")

    fails(lambda: open_store(url), StoreError, "ProfileNotFound", "AWS_PROFILE")


def test_a_store_that_nobody_serves_is_unreachable(aws, moto, monkeypatch):
    url = aws(moto)
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG.merge(Config(retries={"total_max_attempts": 1, "mode": "standard"})))
    with nobody() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:hunter2@{address}")
        for use in every_use(url):
            fails(use, Unreachable, f"cannot reach the store at {address}", "AWS_ENDPOINT_URL")


def test_an_ipv6_endpoint_is_named_as_in_its_url(aws, moto, monkeypatch):
    url = aws(moto)
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG.merge(Config(retries={"total_max_attempts": 1, "mode": "standard"})))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@[::1]:9")
    fails(lambda: open_store(url).read("m/a"), Unreachable, "cannot reach the store at [::1]:9")


def test_an_answer_that_breaks_off_is_asked_for_again_and_then_reported(aws, moto, monkeypatch):
    url = aws(moto)
    broken = b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\nETag: "x"\r\nConnection: close\r\n\r\n{"format_ver'
    with answering(broken) as (endpoint, requests):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store: Any = open_store(url)
        fails(lambda: store.read("m/live.json"), Unreachable, "m/live.json", "broke off")

    assert len(requests) == ATTEMPTS


@pytest.mark.parametrize(
    ("status", "asked"),
    [("403 Forbidden", 1), ("404 Not Found", 1), ("500 Internal Server Error", 2), ("503 Slow Down", 2)],
)
def test_only_what_may_pass_is_tried_again(aws, moto, monkeypatch, status, asked):
    url = aws(moto)
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG.merge(Config(retries={"total_max_attempts": 2, "mode": "standard"})))
    with answering(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()) as (
        endpoint,
        requests,
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store: Any = open_store(url)
        kind = {"403": StoreError, "404": NotFound}.get(status[:3], Unreachable)
        fails(lambda: store.read("m/a"), kind, "m/a", "" if kind is NotFound else status[:3])

    assert len(requests) == asked


def test_an_endless_answer_is_not_read_to_its_end(aws, moto, monkeypatch):
    url = aws(moto)
    long = b'HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\nETag: "x"\r\nConnection: close\r\n\r\n' + bytes(3_000_000)
    with answering(long) as (endpoint, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with refused(InvalidInput, "m/a", "1,000"):
            open_store(url).read("m/a", max_bytes=1000)


def test_keys_that_lead_elsewhere_are_not_listed(aws, moto):
    url = aws(moto)
    store: Any = open_store(url)
    store.create("m/a", b"")
    for key in ("runs/m/../../evil", "runs/m/", "runs/m/.lock", "runs/m//x", "runs/m/b\\c"):
        store.client.put_object(Bucket=store.bucket, Key=key, Body=b"")

    assert [entry.key for entry in store.list("m/")] == ["m/a", "m/probe"]
