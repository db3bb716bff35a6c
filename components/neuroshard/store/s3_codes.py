"""What the error codes of S3 stores mean, and what helps: AWS, MinIO, Ceph RGW, Google's interoperability, R2, SeaweedFS.

Codes that reads, writes, deletions and listings of objects may end in. Sources: AWS's "List of error codes", MinIO's
cmd/api-errors.go, Ceph's rgw_common.cc, Google's "HTTP status and error codes for XML", Cloudflare's "R2 error codes", NetApp's
StorageGRID. A code that is not here is read by its status.
"""

from typing import NamedTuple


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
    "the signature does not fit",
    "check AWS_SECRET_ACCESS_KEY; if it is right, a proxy on the way changes requests",
)
ACCOUNT = Meaning("the account is suspended, unpaid or not set up for this store", "ask who runs the store")
ENCRYPTION = Meaning("its encryption key cannot be used", "check NEUROSHARD_SSE_KMS_KEY, the key and its policy")
REGION = Meaning("the bucket is elsewhere", "check AWS_REGION and AWS_ENDPOINT_URL")
DAMAGED = Meaning(
    "what arrived is not what was sent",
    "try again; if it stays so, a proxy on the way changes bodies",
    passes=True,
)
HEADERS = Meaning(
    "a header is missing or was changed on the way",
    "boto3 sends all that S3 needs, so look at the proxies before the store (HTTPS_PROXY, AWS_ENDPOINT_URL)",
)
TOO_LARGE = Meaning(
    "is larger than the store takes",
    "raise its limit, or that of a proxy before it (nginx: client_max_body_size)",
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
