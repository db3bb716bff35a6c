"""Credentials by boto3's own chain, buckets encrypted with KMS, and no secret in any log."""

import logging
from typing import Any

import boto3
import pytest
from botocore.config import Config

from helpers.plans import NOW, make_plan
from helpers.servers import KEY, SECRET, answering
from neuroshard.client import load_plan
from neuroshard.core.errors import Conflict, NeuroshardError, StoreError
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy
from neuroshard.store import s3
from neuroshard.store.open import open_store
from neuroshard.store.releases import plans_of

A, B = make_plan("a"), make_plan("b")


def without_keys(monkeypatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def web_identity(aws, moto, monkeypatch, tmp_path) -> str:
    """A bucket's URL, and credentials as a pod with an IAM role for its service account has them."""
    url = aws(moto)
    without_keys(monkeypatch)
    token = tmp_path / "token"
    token.write_text("a-web-identity-token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    return url


def test_a_web_identity_is_exchanged_by_boto3_itself(web_identity):
    store: Any = open_store(web_identity)
    deploy(A, store, "m", now=NOW)

    assert load_plan(web_identity, "m", cache_dir=False) == A
    assert store.client._request_signer._credentials.method == "assume-role-with-web-identity"


def test_a_web_identity_without_its_token_is_reported_in_one_line(web_identity, tmp_path):
    (tmp_path / "token").unlink()
    with pytest.raises(StoreError) as caught:
        load_plan(web_identity, "m", cache_dir=False)

    assert "\n" not in str(caught.value)
    assert f"boto3 cannot read {tmp_path / 'token'}" in str(caught.value)


def test_a_role_that_does_not_trust_us_is_reported_in_one_line(web_identity, monkeypatch):
    body = b"<ErrorResponse><Error><Code>ExpiredTokenException</Code></Error>a-web-identity-token</ErrorResponse>"
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
    with answering(answer) as (endpoint, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", endpoint)
        with pytest.raises(StoreError) as caught:
            load_plan(web_identity, "m", cache_dir=False)

    assert "AssumeRoleWithWebIdentity answered 400 ExpiredTokenException" in str(caught.value)
    assert "a-web-identity-token" not in str(caught.value)


def test_a_profile_of_the_credentials_file_signs(aws, rclone, monkeypatch, tmp_path):
    url = aws(rclone)  # which checks signatures
    without_keys(monkeypatch)
    (tmp_path / "credentials").write_text(f"[trainers]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "trainers")
    deploy(A, open_store(url, single_writer=True), "m", now=NOW)

    assert load_plan(url, "m", cache_dir=False) == A


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        ({"AWS_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-central-1"}, "eu-west-1"),
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": "eu-central-1"}, "eu-central-1"),
    ],
)
def test_aws_region_is_the_region_and_wins_over_the_default_one(aws, moto, monkeypatch, variables, region):
    aws(moto)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert s3.S3Store("bucket").client.meta.region_name == region


KEYS_OF_KUBEFLOW = {"KUBEFLOW_ACCESS_KEY": "minio", "KUBEFLOW_SECRET_KEY": "minio123"}


@pytest.mark.parametrize(
    ("bucket", "variables", "endpoint"),
    [
        ("mlpipeline", KEYS_OF_KUBEFLOW, "http://seaweedfs.kubeflow:9000"),
        # an account's role, as in a cluster of AWS, does not reach it
        (
            "mlpipeline",
            KEYS_OF_KUBEFLOW | {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/r"},
            "http://seaweedfs.kubeflow:9000",
        ),
        ("mlpipeline", KEYS_OF_KUBEFLOW | {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}, None),
        ("mlpipeline", {}, None),
        ("plans", KEYS_OF_KUBEFLOW, None),
    ],
)
def test_kubeflows_bucket_is_in_its_own_store_unless_the_secret_of_the_store_has_keys(
    aws, moto, monkeypatch, bucket, variables, endpoint
):
    aws(moto)
    without_keys(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    client = s3.S3Store(bucket).client

    assert client.meta.endpoint_url == (endpoint or moto)
    if endpoint:
        assert client._request_signer._credentials.access_key == "minio"


@pytest.fixture
def log(caplog, monkeypatch):
    """All that is logged, the root logger being at DEBUG, and nobody having said a word about boto3's."""
    for name in s3.CHATTY:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    caplog.set_level(logging.DEBUG)
    return caplog


def test_no_secret_is_logged_or_printed_even_at_debug(web_identity, log, capfd, monkeypatch):
    store: Any = open_store(web_identity)
    deploy(A, store, "m", now=NOW)
    held = store.client._request_signer._credentials.get_frozen_credentials()
    uses = [
        lambda: load_plan(web_identity, "nobody", cache_dir=False),
        lambda: open_store("s3://no-such-bucket-here/x").create("m/a", b""),
        lambda: store.create(f"m/plans/{A.digest()}.json", b"other"),
        lambda: (monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@127.0.0.1:9"), open_store(web_identity).read("m/a")),
    ]  # fmt: skip
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG.merge(Config(retries={"total_max_attempts": 1, "mode": "standard"})))
    said = ""
    for use in uses:
        with pytest.raises(NeuroshardError) as caught:
            use()
        said += str(caught.value)
    out, error = capfd.readouterr()
    said += out + error + log.text

    for secret in (held.secret_key, held.token, held.access_key, "a-web-identity-token", "hunter2"):
        assert secret not in said


def test_who_asks_for_botos_log_by_name_has_it(web_identity, log):
    logging.getLogger("botocore").setLevel(logging.DEBUG)
    open_store(web_identity).create("m/a", b"")

    assert "botocore" in log.text


@pytest.fixture(params=["bucket's default", "named in every write"])
def encrypted(aws, moto, request, monkeypatch) -> str:
    """A store in a bucket encrypted with KMS: ETags are no MD5, and other ones every time the same bytes are written."""
    url = aws(moto)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    key = boto3.client("kms", region_name="us-east-1").create_key()["KeyMetadata"]["Arn"]
    if request.param == "bucket's default":
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}}
        boto3.client("s3").put_bucket_encryption(
            Bucket=url.split("/")[2], ServerSideEncryptionConfiguration={"Rules": [rule]}
        )
    else:
        monkeypatch.setenv("NEUROSHARD_SSE_KMS_KEY", key)
    return url


def test_an_encrypted_bucket_is_a_store_like_any_other(encrypted):
    store: Any = open_store(encrypted)
    for plan in (A, B, A, B):
        deploy(plan, store, "m", now=NOW)
    assert roll_back(store, plans_of("m"), now=NOW).plan_digest == A.digest()
    assert load_plan(encrypted, "m", cache_dir=False) == A

    head = store.client.head_object(Bucket=store.bucket, Key="runs/m/live.json")
    assert head["ServerSideEncryption"] == "aws:kms"
    token = store.read_versioned("m/live.json")[1]
    store.swap("m/live.json", store.read("m/live.json"), token)
    assert store.read_versioned("m/live.json")[1] != token
    with pytest.raises(Conflict):
        store.swap("m/live.json", b"{}", token)
