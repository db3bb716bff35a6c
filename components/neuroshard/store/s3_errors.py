"""boto3's exceptions, and the statuses and codes of S3 stores -> our errors, in one line.

The texts of boto3's exceptions are left out, because they may quote secrets. The codes are those that reads, writes, deletions
and listings of objects may end in, of AWS, MinIO, Ceph RGW, Google's interoperability, R2, SeaweedFS. Sources: AWS's "List of
error codes", MinIO's cmd/api-errors.go, Ceph's rgw_common.cc, Google's "HTTP status and error codes for XML", Cloudflare's "R2
error codes", NetApp's StorageGRID. A code that is not here is read by its status.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
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


FULL = Meaning(
    "the store has no room left",
    "delete what is not needed (neuroshard gc), or let who runs the store raise the quota of the bucket or of the account",
)
EXPIRED = Meaning("the credentials have expired", "renew them, then try again")
CLOCK = Meaning("this machine's clock is too far from the store's", "set it")
UNKNOWN_KEY = Meaning(
    "the store does not know this access key",
    "are the credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID) those of the store at AWS_ENDPOINT_URL?",
)
WRONG_SECRET = Meaning(
    "the signature does not fit", "check AWS_SECRET_ACCESS_KEY; if it is right, a proxy on the way changes requests"
)
ACCOUNT = Meaning("the account is suspended, unpaid or not set up for this store", "ask who runs the store")
ENCRYPTION = Meaning("its encryption key cannot be used", "check NEUROSHARD_SSE_KMS_KEY, the key and its policy")
REGION = Meaning("the bucket is elsewhere", "check AWS_REGION and AWS_ENDPOINT_URL")
DAMAGED = Meaning(
    "what arrived is not what was sent", "try again; if it stays so, a proxy on the way changes bodies", passes=True
)
HEADERS = Meaning(
    "a header is missing or was changed on the way",
    "boto3 sends all that S3 needs, so look at the proxies before the store (HTTPS_PROXY, AWS_ENDPOINT_URL)",
)
TOO_LARGE = Meaning(
    "is larger than the store takes", "raise its limit, or that of a proxy before it (nginx: client_max_body_size)"
)
NAME = Meaning("the store does not take this name", "use another folder of the bucket, or another name of the model")
KEPT = Meaning(
    "the bucket keeps its objects for a time (object lock, a hold, a retention policy)",
    "use a bucket without, or without for this folder: live.json must be replaced, and gc deletes",
)
ARCHIVED = Meaning(
    "it was moved to an archive", "restore it, and keep this folder out of the bucket's rules for archives"
)
NOT_S3 = Meaning("the store has no such request", "is AWS_ENDPOINT_URL that of its S3 interface, not of its console?")
WAIT = Meaning("the store is busy, or not ready", "try again", passes=True)

_CODES = {
    FULL: (
        "QuotaExceeded BucketQuotaExceeded XMinioAdminBucketQuotaExceeded XMinioStorageFull XMinioStorageBackendFull StorageFull "
        "InsufficientStorage InsufficientCapacity LimitExceeded ServiceLimitExceeded"
    ),
    EXPIRED: "ExpiredToken InvalidToken TokenRefreshRequired ExpiredTokenException",
    CLOCK: "RequestTimeTooSkewed RequestExpired ExpiredRequest RequestNotYetValid",
    UNKNOWN_KEY: "InvalidAccessKeyId InvalidSecurity Unauthorized",
    WRONG_SECRET: "SignatureDoesNotMatch InvalidSignature",
    ACCOUNT: (
        "UserSuspended AccountProblem UserAccountProblem UserProjectAccountProblem UserProjectInvalid AllAccessDisabled "
        "AccessKeyDisabled XMinioAccessKeyDisabled NotSignedUp InvalidPayer"
    ),
    ENCRYPTION: (
        "InvalidEncryptionAlgorithmError InvalidEncryptionMethod ServerSideEncryptionConfigurationNotFoundError "
        "KMSNotConfigured InsecureSSECustomerRequest"
    ),
    REGION: (
        "AuthorizationHeaderMalformed IllegalLocationConstraintException InvalidLocationConstraint InvalidRegion "
        "InvalidRegionName XMinioInvalidRegion PermanentRedirect TemporaryRedirect Redirect"
    ),
    DAMAGED: (
        "BadDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch XMinioContentChecksumMismatch ContentChecksumMismatch "
        "CrcMismatch IncompleteBody"
    ),
    HEADERS: (
        "MissingContentLength MissingContentMD5 InvalidDigest InvalidContentLength MissingSecurityHeader MissingSecurityElement "
        "MissingRequestBodyError MetadataTooLarge RequestHeaderSectionTooLarge"
    ),
    TOO_LARGE: "EntityTooLarge MaxMessageLengthExceeded",
    NAME: (
        "KeyTooLong KeyTooLongError InvalidBucketName InvalidObjectName InvalidKey InvalidURI XMinioInvalidObjectName "
        "XMinioInvalidResourceName XMinioObjectExistsAsDirectory XMinioParentIsObject UserKeyMustBeSpecified"
    ),
    KEPT: (
        "ObjectLocked ObjectLockedByBucketPolicy ObjectUnderActiveHold RetentionPolicyNotMet WORMProtected "
        "XComplianceConflict"
    ),
    ARCHIVED: "InvalidObjectState",
    NOT_S3: "MethodNotAllowed",
    WAIT: (
        "RequestTimeout RequestTimeoutException SlowDown SlowDownRead SlowDownWrite Throttling ThrottlingException "
        "TooManyRequests RequestLimitExceeded OperationAborted OperationTimedOut XMinioServerNotInitialized Busy ServerBusy"
    ),
}  # fmt: skip
MEANINGS = {code: meaning for meaning, codes in _CODES.items() for code in codes.split()}
_STATUSES = {413: TOO_LARGE, 507: FULL}


def meaning_of(status: int, code: str) -> Meaning | None:
    """What an answer means beyond its status; None if its status says it all."""
    if code.startswith(("KMS.", "CloudKms", "XMinioKMS", "KMSKey")):
        return ENCRYPTION
    return MEANINGS.get(code) or _STATUSES.get(status)
