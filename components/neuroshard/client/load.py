"""Load the live plan of a model, or the plan of a digest, from a store, checked; and watch for the next live one."""

import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from neuroshard.client.cache import cache_of, last, outdated, remember, remember_plan
from neuroshard.core.errors import InvalidInput, NeuroshardError, StoreError, Unreachable, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.release import Release
from neuroshard.core.shapes import shape_fault, shapes_of
from neuroshard.core.store_url import StoreUrl
from neuroshard.core.table import Table
from neuroshard.core.text import counted
from neuroshard.core.value import sha256, whole_number
from neuroshard.store.deadline import Reader, within
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import default_cache_dir, open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import Published, check_model, read_live, read_published
from neuroshard.store.track import Live

DEADLINE_SECONDS = 60.0
CACHE_SECONDS = 10.0  # limit, so that a home folder on a dead file server does not keep a trainer from starting
CacheDir = Path | str | Literal[False] | None
T = TypeVar("T")


class StaleWarning(UserWarning):
    """The plan may be outdated: the store did not answer, or answered with an old copy; or `watch` found a plan there that is
    damaged or not for this trainer."""


def load_plan(
    store_url: StoreUrl,
    model: str,
    *,
    digest: str | None = None,
    tables: Iterable[Table] | None = None,
    world_size: int | None = None,
    cache_dir: CacheDir = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Plan:
    """The plan of `model` that is live now in the store at `store_url` (`s3://bucket/prefix`, or a folder). Two reads.

    With `digest` (64 hex digits, as `plan.digest()` returns them) it is the published plan of that digest, whatever is live.
    Ranks that each load the live plan may get different ones if a deploy happens in between: see `load_plan_on_all_ranks`.

    Its digest, format and every rule of a valid plan are checked; also that it is for exactly `tables` (names, rows, dims)
    and for `world_size` ranks where these are given. Raises NotFound, StoreError, InvalidInput or NewerFormat in one line.

    The plan is kept in `cache_dir` (None: ~/.cache/neuroshard; False: nowhere). If the store does not answer within
    `deadline_seconds`, or answers that it cannot now, the plan kept last is returned, checked the same way, with a StaleWarning.
    Any other answer is an error: no plan, a damaged one, "access denied". An answer older than the kept release is used, with a
    StaleWarning. A plan of a given digest is read from `cache_dir` if it is there, otherwise from the store.
    """
    published = load_published(store_url, model, digest, cache_dir, deadline_seconds)
    check_fits_trainer(published.plan, name_of(published, model), tables, world_size)
    return published.plan


def load_published(
    store_url: StoreUrl, model: str, digest: str | None, cache_dir: CacheDir, deadline_seconds: float
) -> Published:
    """`load_plan` without the check against a trainer, and the plan's bytes."""
    check_model(model)
    if digest is not None and not re.fullmatch("[0-9a-f]{64}", digest):
        raise UsageError(
            f"digest {digest[:80]!r} is not a plan's digest; give its 64 hex digits, as plan.digest() returns them"
        )
    ends = time.monotonic() + deadline_seconds
    store, cache = opened(store_url, cache_dir, deadline_seconds)
    return _load(store, model, cache, ends) if digest is None else _load_digest(store, model, digest, cache, ends)


def name_of(published: Published, model: str) -> str:
    """What messages call a plan: by its digest and its model."""
    return f"plan {sha256(published.data)[:12]} of {model!r}"


def watch(
    store_url: StoreUrl,
    model: str,
    *,
    seen: str | None = None,
    every_seconds: float = 30.0,
    stop: threading.Event | None = None,
    tables: Iterable[Table] | None = None,
    world_size: int | None = None,
    cache_dir: CacheDir = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Iterator[Plan]:
    """Yield every plan that goes live, checked as by `load_plan`, until `stop` is set. It polls every `every_seconds`.

    `seen` is the digest of the plan that the trainer has (`plan.digest()`); without it the live plan is yielded first. A store
    that is down, and a plan that is damaged or not for this trainer, give one StaleWarning and are skipped. A plan that is
    replaced between two polls is not seen. A release older than one already seen is an old copy and is skipped.
    """
    stop = stop or threading.Event()
    tables = None if tables is None else tuple(tables)
    check_model(model)
    world_size = None if world_size is None else whole_number("world_size", world_size)
    store, cache = opened(store_url, cache_dir, deadline_seconds)
    reader = Reader()  # one thread for all polls, so a store that hangs blocks no more than one
    refused, warned = "", ""
    newest: Release | None = None
    while not stop.is_set():
        new: Plan | None = None
        try:
            live = reader.within(deadline_seconds, store.url, lambda: read_live(store, model))
            if newest is not None and outdated(live.release, newest):
                raise StoreError(
                    f"{store.url}: answers with release {live.release.number} ({live.release.time}) after release "
                    f"{newest.number} ({newest.time}): an old copy, or live.json was put back"
                )
            newest, digest = live.release, live.release.plan_digest
            if digest not in (seen, refused):
                published = reader.within(deadline_seconds, store.url, partial(read_published, store, model, digest))
                refused = digest  # until the checks have passed
                check_fits_trainer(published.plan, name_of(published, model), tables, world_size)
                if cache is not None:
                    _keep(cache, live, published)
                new, seen, refused = published.plan, digest, ""
            if digest == seen:
                warned = ""
        except NeuroshardError as error:
            if str(error) != warned:
                warned = str(error)
                warnings.warn(f"{error}; still watching", StaleWarning, stacklevel=2)
        if new is not None:
            yield new
        stop.wait(every_seconds)


def check_fits_trainer(plan: Plan, whose: str, tables: Iterable[Table] | None, world_size: int | None) -> None:
    """Raise InvalidInput unless the plan is for these tables and ranks, where they are given."""
    if tables is not None and (fault := shape_fault(plan, shapes_of(tables))):
        raise InvalidInput(f"{whose} {fault}; search a plan for today's tables")
    if world_size is not None:
        check_world_size(plan, world_size, whose)


def check_world_size(plan: Plan, world_size: int, whose: str) -> None:
    """Raise InvalidInput unless the plan is for `world_size` ranks, those of all groups, and UsageError for what is no number."""
    if (planned := plan.task.ranks) != (world_size := whole_number("world_size", world_size)):
        several = planned < world_size and world_size % planned == 0
        groups = f" (and --group-size {planned}, if they train in groups)" if several else ""
        raise InvalidInput(
            f"{whose} is for {counted(planned, 'rank')}, but the trainer has {world_size}; start {planned}, or search a plan "
            f"with --devices {world_size}{groups}"
        )


def opened(store_url: StoreUrl, cache_dir: CacheDir, seconds: float) -> tuple[Store, FolderStore | None]:
    """A store, and where copies of its objects are kept on this machine; None for nowhere."""
    # creating a boto3 client may already ask a credential_process or the instance for credentials
    store = within(seconds, "the store, before anything was asked of it", lambda: open_store(store_url))
    if cache_dir is False:
        return store, None
    try:
        return store, cache_of(store, default_cache_dir() if cache_dir is None else Path(cache_dir))
    except RuntimeError:  # there is no home folder
        return store, None


def _load_digest(store: Store, model: str, digest: str, cache: FolderStore | None, ends: float) -> Published:
    """The plan of a digest, by `ends` of time.monotonic."""
    if cache is not None:
        with suppress(NeuroshardError):  # if the cache has no valid copy, the store has it
            return _within(CACHE_SECONDS, cache, lambda: read_published(cache, model, digest))
    published = _within(ends - time.monotonic(), store, lambda: read_published(store, model, digest))
    if cache is not None:
        with suppress(Unreachable):
            _within(CACHE_SECONDS, cache, lambda: remember_plan(cache, model, published))
    return published


def _load(store: Store, model: str, cache: FolderStore | None, ends: float) -> Published:
    """The live plan, by `ends` of time.monotonic."""
    for again in (True, False):  # another rank of this host may have cached a later release since: then read again
        try:
            live, published = _within(ends - time.monotonic(), store, lambda: _read(store, model))
        except Unreachable as error:
            if cache is None:
                raise
            return _last_kept(cache, model, error)
        newer = _keep(cache, live, published) if cache is not None else None
        if newer is None:
            break
        if not again:
            warnings.warn(
                f"{store.url}: release {live.release.number} ({live.release.time}) is live, but release {newer.number} "
                f"({newer.time}) was when it was loaded here before: the store answers with an old copy, or live.json was "
                "put back",
                StaleWarning,
                stacklevel=4,
            )
    return published


def _last_kept(cache: FolderStore, model: str, error: Unreachable) -> Published:
    """The cached plan, with a warning that quotes `error`. Raises `error` if the cache has no valid plan."""
    try:
        live, published = _within(CACHE_SECONDS, cache, lambda: _read(cache, model))
    except NeuroshardError:
        raise error from None  # the user asked about the store, not about the cache
    release = live.release
    warnings.warn(
        f"{error}; using plan {release.plan_digest[:12]} of release {release.number} ({release.time}), the last that was "
        "loaded here",
        StaleWarning,
        stacklevel=5,
    )
    return published


def _keep(cache: FolderStore, live: Live[Release], published: Published) -> Release | None:
    """Write what was read into the cache, in bounded time. If the cache has a newer release, return that instead."""

    def keep() -> Release | None:
        kept = last(cache, live.release.model)
        if kept is not None and outdated(live.release, kept.release):
            return kept.release
        remember(cache, live, published)
        return None

    with suppress(Unreachable):
        return _within(CACHE_SECONDS, cache, keep)
    return None


def _within(seconds: float, store: Store, read: Callable[[], T]) -> T:
    return within(seconds, store.url, read, place=store.identity)


def _read(store: Store, model: str) -> tuple[Live[Release], Published]:
    live = read_live(store, model)
    return live, read_published(store, model, live.release.plan_digest)
