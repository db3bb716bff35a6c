"""Which store a URL opens."""

from pathlib import Path
from typing import Any

import pytest

from neuroshard.core.errors import UsageError
from neuroshard.orders.parameters import faults
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.s3 import S3Store


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("runs/store", "runs/store"),
        ("/srv/store", "/srv/store"),
        ("file:///srv/store", "/srv/store"),
        ("file:///srv/my%20store", "/srv/my store"),
        ("./a:b", "./a:b"),
    ],
)
def test_a_path_or_file_url_is_a_folder(url, root):
    store: Any = open_store(url)

    assert isinstance(store, FolderStore)
    assert faults({"store": url}) == ()
    assert store.root == Path(root)


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [("s3://bucket", "bucket", ""), ("s3://bucket/", "bucket", ""), ("s3://bucket/a/b/", "bucket", "a/b")],
)
def test_an_s3_url_is_a_bucket_and_a_prefix(url, bucket, prefix):
    store: Any = open_store(url)

    assert isinstance(store, S3Store)
    assert faults({"store": url}) == ()
    assert (store.bucket, store.prefix) == (bucket, prefix)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://x",
        "gs://bucket/x",
        "s3:/bucket",
        "s3:bucket",
        "s3://",
        "s3:///x",
        "s3://b/../x",
        "s3://b//x",
        "s3://b/.x",
        "s3://b",
        f"s3://bucket/{'x' * 1000}",
        "S3://bucket",
        "file://host/x",
        "file://[/x",
        "file:///x?y",
        "a\nb",
    ],
)
def test_another_url_is_refused_and_is_no_parameter_of_a_run_either(url):
    with pytest.raises(UsageError):
        open_store(url)
    assert len(faults({"store": url})) == 1


@pytest.mark.parametrize("url", ["s3://KEY:hunter2@bucket/x", "https://me:hunter2@host/x"])
def test_a_password_in_a_url_is_not_repeated(url):
    with pytest.raises(UsageError) as caught:
        open_store(url)

    assert "hunter2" not in str(caught.value)


def test_an_endpoint_of_ones_own_is_addressed_path_style_also_by_name(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example:9000")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    client = vars(open_store("s3://bucket/prefix"))["client"]
    url = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "prefix/a"})

    assert url.startswith("http://store.example:9000/bucket/prefix/a?")
