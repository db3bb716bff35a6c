"""How a store holds the measuring of a kind of hardware: cases in draws, costs in shares. Publishing deletes none of it.

_measuring/<fingerprint>/<key>/
    draw-0001/cases/...             what to measure; a later run that asks for more adds a draw
    draw-0001/costs-1-of-2/...      the costs of a share, as `neuroshard measure` writes them
    draw-0001/ended-1-of-2.json     how many cases of a share were `left` to measure after its last run
    draw-0001/lease-1-of-2.json     which run measures the share now
    learned.json                    which costs the newest cost model was learned from
    failed.json                     why the last attempt failed
    aside/...                       objects that no step could use

`<key>` is a digest of what makes costs comparable: backend, batch size, seed and format. What a run asks for (tables, numbers of
devices, cases, budget) is not in it. A share whose `left` is 0 is done, any other is continued; cases that shares of another
division have measured are not measured again, and all shares are merged. A table that was trained on stays trained on even if its
rows have changed: then its name in the cases ends in `~` and a digest. Cases and costs that cannot be read, or of another bench
than the newest share's, go to `aside/`. A lease is taken over where it was not renewed for ten minutes by the store's clock; its
holder renews it every minute.
"""

import re
from contextlib import suppress
from typing import Any, NamedTuple

from neuroshard.core.clean import log
from neuroshard.core.errors import Conflict, InvalidInput, NotFound, StoreError, Unreachable
from neuroshard.core.value import canonical_json, decode_json, sha256
from neuroshard.store.folders import MOST_BYTES, delete_folder
from neuroshard.store.lease import expired
from neuroshard.store.protocol import ObjectInfo, Store

LEARNED, FAILED, AUGMENT_LEASE = "learned.json", "failed.json", "lease-augment.json"
TRIES = 5  # of a write that meets another one


class Share(NamedTuple):
    """A share of a draw, named as in costs-2-of-4."""

    draw: int
    number: int
    of: int

    @property
    def costs(self) -> str:
        return f"draw-{self.draw:04d}/costs-{self.number}-of-{self.of}"

    @property
    def ended(self) -> str:
        return f"draw-{self.draw:04d}/ended-{self.number}-of-{self.of}.json"

    @property
    def lease(self) -> str:
        return f"draw-{self.draw:04d}/lease-{self.number}-of-{self.of}.json"


def cases_of(draw: int) -> str:
    return f"draw-{draw:04d}/cases"


class Measuring(NamedTuple):
    """What the folder of a campaign holds.

    `draws` are the numbers of complete draws. `shares` maps each share with costs to the object of it that changed last,
    `begun` to its costs.json, `leases` to its lease. `ended` are the shares with a record of their last run. `others` are the
    names of all other objects.
    """

    draws: tuple[int, ...]
    shares: dict[Share, ObjectInfo]
    begun: dict[Share, ObjectInfo]
    ended: tuple[Share, ...]
    leases: dict[Share, ObjectInfo]
    others: frozenset[str]

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of all draws with cases, costs or records: what is measured of one must not count for another."""
        return frozenset((*self.draws, *(share.draw for share in (*self.shares, *self.ended, *self.leases))))


def measuring(store: Store, folder: str) -> Measuring:
    """List the folder of a campaign. Raises StoreError."""
    draws, others = set(), set()
    found: dict[str, dict[Share, ObjectInfo]] = {what: {} for what in ("costs", "begun", "ended", "lease")}
    form = re.compile(r"draw-([0-9]{4}|[1-9][0-9]{4,})/(cases|costs|ended|lease)(?:-([0-9]+)-of-([0-9]+))?(/.+|\.json)")
    for entry in store.list(f"{folder}/"):
        name = entry.key.removeprefix(f"{folder}/")
        if not (matched := form.fullmatch(name)):
            others |= set() if "/" in name else {name}
            continue
        draw, what, number, of, end = matched.groups()
        if what == "cases" and end == "/cases.json":  # written last
            draws.add(int(draw))
        elif what != "cases" and number is not None:
            share = Share(int(draw), int(number), int(of))
            if entry.modified >= found[what].get(share, entry).modified:
                found[what][share] = entry
            if (what, end) == ("costs", "/costs.json"):
                found["begun"][share] = entry
    return Measuring(
        tuple(sorted(draws)), found["costs"], found["begun"], tuple(found["ended"]), found["lease"], frozenset(others)
    )


def read_record(store: Store, key: str) -> dict[str, Any] | None:
    """A small JSON object; None where it is missing or cannot be read, since a record only saves work. Raises Unreachable."""
    try:
        raw = decode_json(store.read(key), f"{store.url}/{key}")
    except Unreachable:
        raise
    except (StoreError, InvalidInput):
        return None
    return raw if isinstance(raw, dict) else None


def write_record(store: Store, key: str, fields: dict[str, Any]) -> None:
    """Write a small JSON object over whatever is there. Raises StoreError."""
    write_over(store, key, canonical_json({"format_version": 1, **fields}))


def write_over(store: Store, key: str, data: bytes) -> None:
    """Write a record of a night over whatever is there. Raises StoreError."""
    for left in reversed(range(TRIES)):
        try:
            _put(store, key, data)
            return
        except Conflict:
            if not left:
                raise


def _put(store: Store, key: str, data: bytes) -> None:
    try:
        there, token = store.read_versioned(key)
    except NotFound:
        store.create(key, data)
        return
    except Unreachable:
        raise
    except (StoreError, InvalidInput):  # unreadable, or too large: a record may be lost
        store.delete(key)
        store.create(key, data)
        return
    if there != data:
        store.swap(key, data, token)


def left_of_share(store: Store, folder: str, share: Share) -> int | None:
    """How many cases of a share were left after its last run; None where no record says so."""
    left = (read_record(store, f"{folder}/{share.ended}") or {}).get("left")
    return left if isinstance(left, int) and not isinstance(left, bool) and left >= 0 else None


def left_of(store: Store, folder: str, draw: int, of: int, ended: tuple[Share, ...]) -> int | None:
    """How many cases of a draw, measured in `of` shares, are left; None where a share was never run to its end."""
    total = 0
    for number in range(1, of + 1):
        share = Share(draw, number, of)
        left = left_of_share(store, folder, share) if share in ended else None
        if left is None:
            return None
        total += left
    return total


def set_aside(store: Store, folder: str, name: str, why: str) -> None:
    """Move the objects under `name` in the folder of a campaign to aside/, with a note on stderr. Raises StoreError.

    They replace what was set aside under this name before.
    """
    log(f"note: {store.url}/{folder}/{name}: set aside in {folder}/aside: {why}")
    delete_folder(store, f"{folder}/aside/{name}")
    for entry in store.list(f"{folder}/{name}/"):
        kept = f"{folder}/aside/{entry.key.removeprefix(f'{folder}/')}"
        with suppress(NotFound, InvalidInput):  # deleted since, or too large to be ours
            data = store.read(entry.key, MOST_BYTES)
            with suppress(Conflict):
                store.create(kept, data)
        store.delete(entry.key)


def set_aside_share(store: Store, folder: str, share: Share, why: str) -> None:
    """Set the costs of a share aside, so that its cases are measured again.

    Other shares of the draw, of a nightly run with more or fewer pods, may have ended because this one had measured their
    cases. So none of them counts as ended any more.
    """
    set_aside(store, folder, share.costs, why)
    for ended in {share, *(one for one in measuring(store, folder).ended if one.draw == share.draw)}:
        store.delete(f"{folder}/{ended.ended}")


def age_out(store: Store, folder: str, oldest_seconds: float) -> None:
    """Set aside the costs that were begun more than `oldest_seconds` ago, so that their cases are measured again."""
    for share, entry in measuring(store, folder).begun.items():
        if expired(store, entry, oldest_seconds):
            set_aside_share(store, folder, share, "it is older than max_age allows")


def costs_digest(store: Store, folder: str) -> str:
    """A digest that changes when costs are added or removed."""
    entries = store.list(f"{folder}/draw-")
    return sha256(canonical_json([[one.key, one.size] for one in entries if "/costs-" in one.key]))


def note_failure(store: Store, folder: str, step: str, why: str) -> None:
    """Record why this attempt failed, for the end of this run and for the next run. Never raises.

    It follows what an earlier step of this attempt recorded.
    """
    log(f"note: {step} failed: {why}")
    try:
        earlier = read_record(store, f"{folder}/{FAILED}")
        if earlier and earlier.get("step") != step:
            step, why = str(earlier.get("step")), f"{earlier.get('why')}; {step}: {why}"
        write_record(store, f"{folder}/{FAILED}", {"step": step, "why": why})
    except StoreError as error:
        log(f"note: the failure could not be recorded: {error}")
