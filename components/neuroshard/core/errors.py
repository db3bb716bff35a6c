"""The errors a user can see. Each message is one line: what, where, the value, the way out.

NeuroshardError            exit 1: the world is not as it should be
├── UsageError             exit 2: the command was called wrongly (unknown backend, bad --memory …)
├── InvalidInput           a file or value breaks a rule: dim not a multiple of 4, truncated Parquet, a gap in a plan
│   └── NewerFormat        the file was written by a newer neuroshard
├── Infeasible             no plan fits the devices
├── MeasureError           a backend cannot measure: missing package, worker dead or hung
├── Refused                the gate does not let a plan go live
└── StoreError             a store is unreachable, denies access, or lost a race
    ├── Unreachable        it does not answer, or answers that it cannot now (500, 503): later it may
    ├── Unsafe             it ignores conditional writes, so two writers would overwrite each other
    ├── NotFound           the key, bucket or release does not exist
    └── Conflict           somebody else swapped the pointer first
"""

from neuroshard.core.clean import clean

NO_CREDENTIALS = "no usable credentials"  # how errors of stores begin that say so
PASSING_STATUSES = (429, 500, 502, 503, 504)  # HTTP answers after which a later request may succeed


class NeuroshardError(Exception):
    """Base of all errors with a one-line message. `exit_code` is the exit status of the command line.

    Its text is cleaned (core/clean.py), since a message may quote anything: a key of a store, an answer, a URL with a password.
    """

    exit_code = 1

    def __str__(self) -> str:
        return clean(super().__str__())


class UsageError(NeuroshardError):
    """The command or function was called with an invalid argument."""

    exit_code = 2


class InvalidInput(NeuroshardError):
    """A file or value breaks a rule of its format."""


class NewerFormat(InvalidInput):
    """A file has a format version that this neuroshard does not know."""


class Infeasible(NeuroshardError):
    """No plan fits the devices; the message says what is missing, in bytes. `proven` where no plan can."""

    def __init__(self, message: str, *, proven: bool = False) -> None:
        super().__init__(message)
        self.proven = proven


class MeasureError(NeuroshardError):
    """A backend cannot measure here, or its workers died or hung."""


class Refused(NeuroshardError):
    """A plan may not go live: it is not valid for today, does not fit with its margin, or its cost model is too far off."""


class StoreError(NeuroshardError):
    """A store could not be read or written."""


class Unreachable(StoreError):
    """The store does not answer, or answers that it cannot now. What it holds is unknown."""


class Unsafe(StoreError):
    """The store ignores conditional writes, so it cannot keep two writers apart."""


class NotFound(StoreError):
    """The store answers, but holds no such bucket, key or release."""


class Conflict(StoreError):
    """A compare-and-swap lost: somebody else changed the key in between."""
