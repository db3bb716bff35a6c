"""boto3's exceptions, and the statuses and codes of S3 stores -> our errors, in one line.

The texts of boto3's exceptions are left out, because they may quote secrets. The codes (s3_meanings.toml) are those that reads,
writes, deletions and listings of objects may end in, of AWS, MinIO, Ceph RGW, Google's interoperability, R2, SeaweedFS. A code
that is not there is read by its status.
"""

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from urllib3.exceptions import HTTPError

from neuroshard.core.errors import NO_CREDENTIALS, PASSING_STATUSES, Conflict, NotFound, StoreError, Unreachable
from neuroshard.core.text import one_line

ATTEMPTS = 4  # boto3's "standard" mode: again after 500, 502, 503, 504, throttling and timeouts; never after 403 or 404

# urllib3's own error is raised where the text of an error breaks off
BROKEN_OFF = (IncompleteReadError, ResponseStreamingError, HTTPError)


class Busy(Conflict):
    """409: another write of the key is under way. Nothing was written, and the end of the other write is not known."""


@contextmanager
def request_errors(where: str, endpoint_url: str, has_condition: bool = False) -> Iterator[None]:
    """Turn an error of a request for `where` (s3://bucket/key) into a StoreError. `has_condition`: it is a conditional write."""
    try:
        yield
    except ClientError as error:
        raise _answered(error, where, _host(endpoint_url), has_condition) from None
    except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
        raise StoreError(f"{where}: {NO_CREDENTIALS} ({type(error).__name__}); {_way_to_credentials()}") from None
    except BROKEN_OFF:
        raise Unreachable(f"{where}: the answer broke off, {ATTEMPTS} times; try again") from None
    except (BotoConnectionError, HTTPClientError) as error:
        raise Unreachable(
            f"{where}: cannot reach the store at {_host(endpoint_url)} ({type(error).__name__}); check AWS_ENDPOINT_URL "
            "and the network"
        ) from None
    except RecursionError:  # boto3 asks for the bucket's region, is redirected, asks for the bucket's region, …
        raise StoreError(f"{where}: the store redirects in a circle; check AWS_REGION and AWS_ENDPOINT_URL") from None
    except OSError as error:  # boto3 reads a token, a certificate or a credential_process
        raise StoreError(
            f"{where}: boto3 cannot read {error.filename or 'a file of its configuration'} ({type(error).__name__}); check "
            "AWS_WEB_IDENTITY_TOKEN_FILE, AWS_CA_BUNDLE and the AWS configuration files"
        ) from None
    except (BotoCoreError, LookupError, ValueError) as error:  # an answer that is not S3's, or was damaged
        raise StoreError(
            f"{where}: the store's answer is not valid S3 ({type(error).__name__}); is AWS_ENDPOINT_URL that of an S3 store?"
        ) from None


def _answered(error: ClientError, where: str, host: str, has_condition: bool) -> StoreError:
    """The error that a status of the store means."""
    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
    bucket = "/".join(where.split("/")[:3])
    code = one_line(error.response["Error"].get("Code", "without a code"), 60)
    answer = code if code == str(status) else f"{status} {code}"  # the answer to HEAD has no code but the status
    if error.operation_name.startswith("AssumeRole") and status < 500:
        return StoreError(
            f"{where}: {NO_CREDENTIALS} ({error.operation_name} answered {answer}); check AWS_ROLE_ARN, "
            "AWS_WEB_IDENTITY_TOKEN_FILE and what the role trusts"
        )
    if code == "NoSuchBucket":
        return NotFound(f"{bucket}: no such bucket at {host}")
    if has_condition and status == 409:
        return Busy(f"{where}: another write of it is under way (409 {code}), {ATTEMPTS} times")
    if has_condition and (status == 412 or code == "NoSuchKey"):
        return Conflict(f"{where}: somebody else changed it in between")
    if meaning := meaning_of(status, code):
        said = f"{where}: {meaning.what} ({answer}); {meaning.way_out}"
        return Unreachable(said) if meaning.passes else StoreError(said)
    if status == 404:
        return NotFound(f"{where}: does not exist")
    if status in (401, 403):
        return StoreError(
            f"{where}: access denied ({answer}); check the credentials; they need s3:GetObject, s3:PutObject and "
            "s3:ListBucket here, and s3:DeleteObject for gc"
        )
    if status == 501 and has_condition:
        return StoreError(
            f"{bucket}: this store has no conditional writes (501); if nobody else deploys here, give --single-writer"
        )
    if status in PASSING_STATUSES:
        return Unreachable(f"{where}: the store answered {answer}; try again")
    return StoreError(f"{where}: the store answered {answer}; check AWS_REGION and AWS_ENDPOINT_URL")


def _way_to_credentials() -> str:
    """What gives credentials here: in a pod it is not a profile."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return (
            "give the pod AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (of the pipeline: by the secret that store_secret "
            "names), or its service account a role"
        )
    return "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def _host(endpoint_url: str) -> str:
    """Host and port of the endpoint: its URL may carry a password."""
    return urlsplit(endpoint_url).netloc.rpartition("@")[2]


class Meaning(NamedTuple):
    """What a store refused, the way out, and whether the same request may succeed later."""

    what: str
    way_out: str
    passes: bool = False


MEANINGS, _STATUSES = dict[str, Meaning](), dict[int, Meaning]()
_SAID: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("s3_meanings.toml").read_text())
for _one in _SAID.values():
    _codes, _statuses = _one.pop("codes").split(), _one.pop("statuses", ())
    MEANINGS |= dict.fromkeys(_codes, Meaning(**_one))
    _STATUSES |= dict.fromkeys(_statuses, Meaning(**_one))
_ENCRYPTION = MEANINGS["KMSNotConfigured"]


def meaning_of(status: int, code: str) -> Meaning | None:
    """What an answer means beyond its status; None if its status says it all."""
    if code.startswith(("KMS.", "CloudKms", "XMinioKMS", "KMSKey")):
        return _ENCRYPTION
    return MEANINGS.get(code) or _STATUSES.get(status)
