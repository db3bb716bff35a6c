"""How a model's tables are read, as its trainers counted it (core/counted.py), in a store.

<model>/access/<sha256>.json     a CountedAccess, written once under the digest of its bytes
<model>/access/newest.json       a CountedPointer to the one that readers take
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from neuroshard.core.counted import COUNTED_FORMAT, CountedAccess, CountedPointer
from neuroshard.core.errors import Conflict, InvalidInput, NewerFormat, NotFound, UsageError
from neuroshard.core.value import check_format, decode_json, sha256
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import check_model
from neuroshard.store.row_orders import fetch_ids, put_ids
from neuroshard.store.track import MAX_RELEASE_BYTES

MOST_COUNTED_BYTES = 256 * 2**20  # as of any JSON file; a table has at most 50 kB, usually 5
_OLD = timedelta(days=1)  # a guess: a run that trains on counts as many steps as the one before within a day
_TRIES = 3  # of a swap that another run wins


def counted_key(model: str, digest: str) -> str:
    return f"{check_model(model)}/access/{digest}.json"


def pointer_key(model: str) -> str:
    return f"{check_model(model)}/access/newest.json"


def put_counted(store: Store, counted: CountedAccess, lists: Iterable[bytes] = ()) -> str:
    """Write what a run counted, with the lists of hot rows that its tables name, and let readers take it. Returns why not where
    they had better keep what is there, else "".

    A run replaces what it wrote before, and what another run wrote where it has counted as many steps, or where that is a day
    older: a run that has just started again does not hide a long one. Raises StoreError.
    """
    data = counted.canonical_json()
    digest = sha256(data)
    pointer = CountedPointer(
        model=counted.model, counted_digest=digest, run=counted.run, steps=counted.steps, time=counted.time
    )
    key = pointer_key(counted.model)
    for left in reversed(range(_TRIES)):
        there, token = None, None
        with suppress(NotFound):
            found, token = store.read_versioned(key, MAX_RELEASE_BYTES)
            there = _undamaged(found, f"{store.url}/{key}")
        if there is not None and (why := _keeps(there, pointer)):
            return why
        for one in lists:
            put_ids(store, counted.model, one)
        store.create(counted_key(counted.model, digest), data)
        try:
            store.swap(key, pointer.canonical_json(), token)
            return ""
        except Conflict:
            if not left:
                raise
    return ""


def _undamaged(data: bytes, where: str) -> CountedPointer | None:
    """The pointer of a file; None where it is damaged, and so points to nothing. Raises NewerFormat."""
    try:
        return CountedPointer.from_json(data, where)
    except NewerFormat:
        raise
    except InvalidInput:
        return None


def _keeps(there: CountedPointer, new: CountedPointer) -> str:
    """Why readers keep what is there; empty where they do not."""
    age = datetime.fromisoformat(new.time) - datetime.fromisoformat(there.time)
    if there.run == new.run or new.steps >= there.steps or age > _OLD:
        return ""
    return (
        f"run {there.run} has counted {there.steps:,} steps up to {there.time}, this one {new.steps:,}: it is written when it "
        "has as many, or a day later"
    )


def read_pointer_to_counted(store: Store, model: str) -> CountedPointer:
    """The pointer. Raises NotFound where no trainer has counted, InvalidInput and NewerFormat."""
    key = pointer_key(model)
    try:
        pointer = CountedPointer.from_json(store.read(key, MAX_RELEASE_BYTES), f"{store.url}/{key}")
    except NotFound as error:
        raise NotFound(
            f"{error}; no trainer of {model!r} has counted how its tables are read (docs/cache.md)"
        ) from None
    if pointer.model != model:
        raise InvalidInput(f"{store.url}/{key}: is of the model {pointer.model!r}, not of {model!r}")
    return pointer


def read_counted(store: Store, model: str) -> CountedAccess:
    """What readers take, once its digest was checked. Raises NotFound, InvalidInput and NewerFormat."""
    digest = read_pointer_to_counted(store, model).counted_digest
    key = counted_key(model, digest)
    where, data = f"{store.url}/{key}", store.read(key, MOST_COUNTED_BYTES)
    if sha256(data) != digest:
        raise InvalidInput(
            f"{where}: its bytes do not have its digest, so it was cut off or changed; a trainer writes a new one"
        )
    return CountedAccess.parse(check_format(decode_json(data, where), COUNTED_FORMAT, where), where)


def read_counted_at(place: str, row_orders: Path | None = None) -> CountedAccess:
    """What the trainers of the model at `place` counted: `s3://bucket/prefix/ads-ranker`, or such a folder. The lists of hot rows
    are copied into the folder `row_orders`. Raises as `read_counted`, and UsageError."""
    url, _, model = place.rstrip("/").rpartition("/")
    if not url or url.endswith(":/"):
        raise UsageError(f"{place!r} is not a model in a store; write s3://bucket/prefix/ads-ranker, or its folder")
    store = open_store(url)
    found = read_counted(store, model)
    if row_orders is not None:
        fetch_ids(store, model, found.tables, row_orders)
    return found


def counted_digests(model: str, keys: Iterable[str]) -> dict[str, str]:
    """Of the keys in a store, those of this model's counts, and their digests."""
    form = re.compile(rf"{re.escape(model)}/access/([0-9a-f]{{64}})\.json")
    return {key: found[1] for key in keys if (found := form.fullmatch(key))}
