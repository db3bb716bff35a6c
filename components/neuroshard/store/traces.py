"""The lookups that a model's trainer recorded (client/access.py), in a store.

<model>/access/<sha256>.safetensors    a traces file, written once under the digest of its bytes
<model>/access/trace.json              a TracePointer to the one that readers take
"""

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field

from neuroshard.core.errors import InvalidInput, NewerFormat, NotFound, UsageError
from neuroshard.core.release import MODEL_NAME, Sealed
from neuroshard.core.value import Digest, Moment, Whole, sha256
from neuroshard.files.disk import write_bytes
from neuroshard.files.traces import Recorded
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import check_model
from neuroshard.store.track import MAX_RELEASE_BYTES

MOST_TRACE_BYTES = 256 * 2**20  # a trainer writes at most a quarter
_FRESH = timedelta(days=1)  # a guess: a trainer writes several times a day


class TracePointer(Sealed):
    """The trace that readers take: `batches` of the `steps` steps of a trainer up to `time` (UTC, ISO 8601)."""

    model: Annotated[str, Field(pattern=MODEL_NAME)]
    trace_digest: Digest
    batches: Annotated[Whole, Field(ge=1)]
    steps: Annotated[Whole, Field(ge=1)]
    time: Moment

    @property
    def said(self) -> str:
        """In a few words, for notes on tables and plans."""
        return f"{self.batches:,} of {self.steps:,} steps of a trainer, up to {self.time}"


def access_folder(model: str) -> str:
    return f"{check_model(model)}/access/"


def is_recorded(model: str, key: str) -> bool:
    """Whether an object of a store is a trace or its pointer."""
    return re.fullmatch(re.escape(access_folder(model)) + r"([0-9a-f]{64}\.safetensors|trace\.json)", key) is not None


def trace_key(model: str, digest: str) -> str:
    return f"{access_folder(model)}{digest}.safetensors"


def pointer_key(model: str) -> str:
    return f"{access_folder(model)}trace.json"


def put_trace(store: Store, model: str, data: bytes, recorded: Recorded, *, keep_longer: bool = False) -> str:
    """Write a trace, and let readers take it; "". With `keep_longer` one of the last day that has more batches stays: why.
    Raises StoreError."""
    digest = sha256(data)
    pointer = TracePointer(
        model=model, trace_digest=digest, batches=recorded.batches, steps=recorded.steps, time=recorded.time
    )
    key, there, token = pointer_key(model), None, None
    try:
        found, token = store.read_versioned(key, MAX_RELEASE_BYTES)
        there = TracePointer.from_json(found, f"{store.url}/{key}")
    except NewerFormat:
        raise
    except NotFound:
        pass
    except InvalidInput:  # one that is damaged points to nothing
        if token is None:
            raise
    is_fresh = there and datetime.fromisoformat(pointer.time) - datetime.fromisoformat(there.time) < _FRESH
    if keep_longer and there is not None and is_fresh and there.batches > pointer.batches:
        return f"{store.url} has {there.said}, and this trace has {pointer.batches:,} batches"
    store.create(trace_key(model, digest), data)
    store.swap(key, pointer.canonical_json(), token)
    return ""


def read_trace_pointer(store: Store, model: str) -> TracePointer:
    """The pointer. Raises NotFound where no trainer has written a trace, InvalidInput and NewerFormat."""
    key = pointer_key(model)
    try:
        pointer = TracePointer.from_json(store.read(key, MAX_RELEASE_BYTES), f"{store.url}/{key}")
    except NotFound as error:
        raise NotFound(
            f"{error}; no trainer of {model!r} has recorded how its tables are read (docs/cache.md)"
        ) from None
    if pointer.model != model:
        raise InvalidInput(f"{store.url}/{key}: is of the model {pointer.model!r}, not of {model!r}")
    return pointer


def fetch_trace(store: Store, model: str, path: Path) -> TracePointer:
    """Copy the trace that readers take to a file, once its digest was checked. Raises NotFound, InvalidInput, StoreError."""
    pointer = read_trace_pointer(store, model)
    key = trace_key(model, pointer.trace_digest)
    data = store.read(key, MOST_TRACE_BYTES)
    if sha256(data) != pointer.trace_digest:
        raise InvalidInput(
            f"{store.url}/{key}: its bytes do not have its digest, so it was cut off or changed; a trainer writes a new one"
        )
    write_bytes(path, data)
    return pointer


def fetch_trace_of(place: str, folder: Path) -> Path:
    """The trace of the model at `place`, `s3://bucket/prefix/ads-ranker` or such a folder, as a file in `folder`. Raises as
    `fetch_trace`, and UsageError."""
    url, _, model = place.rstrip("/").rpartition("/")
    if not url or url.endswith(":/"):
        raise UsageError(f"{place!r} is not a model in a store; write s3://bucket/prefix/ads-ranker, or its folder")
    path = folder / f"{check_model(model)}.safetensors"
    fetch_trace(open_store(url), model, path)
    return path
