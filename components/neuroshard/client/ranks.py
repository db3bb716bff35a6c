"""One plan for all ranks: rank 0 loads it, and every other rank gets the same bytes.

    plan = load_plan_on_all_ranks("s3://bucket/prefix", "ads-ranker")  # on every rank, after init_process_group

Ranks that each load a plan may get different ones: a deploy happens between two reads, or a host is cut off and falls back to
its cache. Here one rank reads. Either every rank returns the same plan, or every rank raises the same error.

The plan travels through the key-value store that `torch.distributed.init_process_group` made, with any backend. That store may
be older than the ranks: torchrun keeps it when it starts them again, and what an attempt before has written is still there. So
rank r writes a token that nobody had before, and takes only what was written for this token:

    hello/<r>            rank r writes its token.
    welcome/<token>      Rank 0 writes the prefix of this call, which nobody had before either. Under it:
    part/<i>             rank 0 writes the plan's bytes,
    offer                then their number of parts and sha256, or its error.
    answer/<r>           Rank r writes "" once it holds the plan, and the plan fits rank r; or its error.
    verdict              Rank 0 writes "" where every answer is "", else the error that every rank raises.
"""

import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from neuroshard.client.load import DEADLINE_SECONDS, CacheDir, check_fits_trainer, load_published, name_of
from neuroshard.core import errors
from neuroshard.core.errors import InvalidInput, NeuroshardError, Unreachable, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.store_url import StoreUrl
from neuroshard.core.table import Table
from neuroshard.core.text import one_line
from neuroshard.core.value import sha256
from neuroshard.store.deadline import Reader
from neuroshard.store.releases import Published

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT_SECONDS = 300.0  # hosts start minutes apart
MARGIN_SECONDS = 10.0  # for an answer of the key-value store, and how much longer than rank 0 the other ranks wait
POLL_SECONDS = 0.25
PART_BYTES = 2**20  # of one value; torch's TCPStore accepts up to 8 MiB
RANKS_NAMED = 8

T = TypeVar("T")
# Calls for each model in each process group, so that every call has keys of its own. A group that was made anew counts anew: some
# of its ranks may be new processes.
_calls: "WeakKeyDictionary[Any, Counter[str]]" = WeakKeyDictionary()
_counting = threading.Lock()


class KeyValueStore(Protocol):
    """The part of torch.distributed.Store that is used here. Its methods raise RuntimeError if the store's process is gone."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> Any: ...
    def check(self, keys: Any, /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def load_plan_on_all_ranks(
    store_url: StoreUrl,
    model: str,
    *,
    group: "ProcessGroup | None" = None,
    digest: str | None = None,
    tables: Iterable[Table] | None = None,
    world_size: int | None = None,
    cache_dir: CacheDir = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Plan:
    """The plan that rank 0 gets from `load_plan`, on all ranks of `group` (by default, of the world).

    Every rank must call it. Rank 0 alone needs the store: other ranks use none of `store_url`, `digest` and `cache_dir`.
    Each rank checks the plan against its `tables` (where given) and `world_size` (by default, the number of ranks of `group`).

    If rank 0 fails, or the plan does not fit a rank, every rank raises that error with the rank's number. If ranks do not answer
    within `timeout_seconds`, all others raise a NeuroshardError that names them. The call ends within about `deadline_seconds`
    plus twice `timeout_seconds`. Raises UsageError without a process group.
    """
    chosen, key_value, rank, ranks = parts_of(group, "load_plan_on_all_ranks")
    return share_plan(
        key_value,
        rank,
        ranks,
        lambda: load_published(store_url, model, digest, cache_dir, deadline_seconds),
        lambda plan, whose: check_fits_trainer(plan, whose, tables, ranks if world_size is None else world_size),
        prefix=prefix_of(chosen, model),
        model=model,
        load_seconds=deadline_seconds,
        timeout_seconds=timeout_seconds,
    )


def share_plan(
    key_value: KeyValueStore,
    rank: int,
    ranks: int,
    load: Callable[[], Published],
    check: Callable[[Plan, str], None],
    *,
    prefix: str,
    model: str,
    load_seconds: float,
    timeout_seconds: float,
) -> Plan:
    """The plan that `load` returns on rank 0, on all `ranks`, once `check(plan, its name)` has passed on each of them.

    The keys begin with `prefix`, the same on all ranks. What attempts before have written under it does not matter. Raises as
    `load_plan_on_all_ranks` does.
    """

    def load_bytes() -> tuple[Plan, bytes]:
        published = load()
        return published.plan, published.data

    words = Words(
        f"plan of {model!r}", lambda data: f"plan {sha256(data)[:12]} of {model!r}", "load_plan_on_all_ranks", "loaded"
    )
    sharing = Sharing(Channel(key_value, prefix, rank), ranks, words, load_seconds, timeout_seconds)
    return sharing.of(
        load_bytes,
        lambda data: Plan.from_json(data, "the plan that rank 0 loaded"),
        lambda plan, data: check(plan, name_of(Published(plan, data), model)),
    )


class Words(NamedTuple):
    """What messages call that which rank 0 gives all ranks: what it is; its name, of its bytes; the function that every rank
    calls for it; and what rank 0 did to have it."""

    what: str
    name_of: Callable[[bytes], str]
    caller: str
    had: str


class Channel:
    """The keys of one call, written and read in bounded time."""

    def __init__(self, key_value: KeyValueStore, prefix: str, rank: int) -> None:
        self.key_value, self.prefix, self.rank, self.reader = key_value, prefix, rank, Reader()

    def under(self, prefix: str) -> "Channel":
        """The keys of the call that has this prefix."""
        return Channel(self.key_value, f"{self.prefix}/{prefix}", self.rank)

    def write(self, name: str, value: str | bytes) -> None:
        self._bounded(MARGIN_SECONDS, lambda: self.key_value.set(f"{self.prefix}/{name}", value))

    def read(self, name: str) -> bytes:
        """The value of a key that was written."""
        return bytes(self._bounded(MARGIN_SECONDS, lambda: self.key_value.get(f"{self.prefix}/{name}")))

    def wait(self, names: Sequence[str], seconds: float) -> list[str]:
        """Wait until all keys are written. Returns those that are missing after `seconds`."""
        missing = list(names)

        def all_there() -> bool:  # by `check`, since torch's `wait` would lock the connection for so long
            while missing and self.key_value.check([f"{self.prefix}/{missing[-1]}"]):
                missing.pop()
            return not missing

        self._until(all_there, seconds)
        # the poll stops at a missing key, so those before it were not looked at
        return [name for name in missing if not self._is_there(name)]

    def welcome(self, ranks: Iterable[int], prefix: str, seconds: float) -> list[int]:
        """Rank 0: tell each of the ranks that says hello the prefix of the call, until all have answered. Returns those that have
        not after `seconds`.

        A token may be that of a rank that has ended, so tokens are read until they are answered.
        """
        welcomed = dict.fromkeys(ranks, b"")
        call = self.under(prefix).prefix

        def all_answered() -> bool:
            for rank in [*welcomed]:
                if self.key_value.check([f"{call}/answer/{rank}"]):
                    del welcomed[rank]
                elif self.key_value.check([f"{self.prefix}/hello/{rank}"]):
                    token = bytes(self.key_value.get(f"{self.prefix}/hello/{rank}"))
                    if token != welcomed[rank]:
                        self.key_value.set(f"{self.prefix}/welcome/{token.decode()}", prefix)
                        welcomed[rank] = token
            return not welcomed

        self._until(all_answered, seconds)
        return sorted(welcomed)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._bounded(MARGIN_SECONDS, lambda name=name: self.key_value.delete_key(f"{self.prefix}/{name}"))  # type: ignore[misc]

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Look until it is done, or the time is up."""
        ends = time.monotonic() + seconds

        def poll() -> None:
            pause = 0.005
            while not done() and (left := ends - time.monotonic()) > 0:
                time.sleep(min(pause, left))
                pause = min(2 * pause, POLL_SECONDS)

        self._bounded(seconds + MARGIN_SECONDS, poll)

    def _is_there(self, name: str) -> bool:
        return self._bounded(MARGIN_SECONDS, lambda: self.key_value.check([f"{self.prefix}/{name}"]))

    def _bounded(self, seconds: float, ask: Callable[[], T]) -> T:
        """The answer of the key-value store. Raises NeuroshardError if its process has ended or hangs."""
        why = f"no answer within {seconds:g} s"
        try:
            return self.reader.within(seconds, "", ask)
        except Unreachable:
            pass
        except RuntimeError as error:  # torch's DistError
            why = one_line(error, 120)
        raise NeuroshardError(
            f"rank {self.rank} cannot reach the key-value store of torch.distributed ({why}): rank 0, or the launcher on its "
            "host, which keeps that store, has ended"
        )


class Sharing(NamedTuple):
    """One call, on every one of `ranks`, in which rank 0 gives all ranks a value. Keys, time and errors are as in
    `load_plan_on_all_ranks`."""

    channel: Channel
    ranks: int
    words: Words
    load_seconds: float
    timeout_seconds: float

    def of(
        self, load: Callable[[], tuple[T, bytes]], parse: Callable[[bytes], T], check: Callable[[T, bytes], None]
    ) -> T:
        """What `load` returns on rank 0 with its bytes, which every other rank parses, once `check` has passed on each of them.
        `check` runs on every rank, and only once rank 0 has loaded."""
        return self._give(load, check) if self.channel.rank == 0 else self._take(parse, check)

    def _give(self, load: Callable[[], tuple[T, bytes]], check: Callable[[T, bytes], None]) -> T:
        """Rank 0: load, offer, collect the answers, and write the verdict."""
        channel, timeout_seconds = self.channel, self.timeout_seconds
        others, prefix = range(1, self.ranks), secrets.token_hex(8)
        call = channel.under(prefix)
        try:
            value, data = load()
            fault = _fault(value, data, check)
        except BaseException as error:  # an interrupt too: the other ranks must not wait for a rank that has ended
            with suppress(NeuroshardError):
                call.write("offer", json.dumps({"error": error_to_json(error, 0)}))
                channel.welcome(others, prefix, timeout_seconds if isinstance(error, Exception) else 0.0)
            raise
        parts = [data[i : i + PART_BYTES] for i in range(0, len(data), PART_BYTES)]
        names = [f"part/{number}" for number in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            call.write(name, part)
        call.write("offer", json.dumps({"parts": len(parts), "sha256": sha256(data)}))

        found = {} if fault is None else {0: fault}
        verdict = ""
        try:
            late = channel.welcome(others, prefix, timeout_seconds)
            for rank in set(others) - set(late):
                if answer := call.read(f"answer/{rank}"):
                    found[rank] = error_from_json(json.loads(answer))
            _raise_verdict(found, late, self.words.name_of(data), timeout_seconds)
        except BaseException as error:
            verdict = json.dumps(error_to_json(error, 0))
            raise
        finally:
            call.write("verdict", verdict)
        call.delete(names)  # every rank has answered, so every rank has read them
        return value

    def _take(self, parse: Callable[[bytes], T], check: Callable[[T, bytes], None]) -> T:
        """Any other rank: read what rank 0 offers, answer, and follow the verdict."""
        channel, words = self.channel, self.words
        offer_seconds = self.load_seconds + self.timeout_seconds
        verdict_seconds = self.timeout_seconds + MARGIN_SECONDS
        answer, token = f"answer/{channel.rank}", secrets.token_hex(8)
        channel.write(f"hello/{channel.rank}", token)
        if channel.wait([f"welcome/{token}"], offer_seconds):
            raise NeuroshardError(
                f"rank {channel.rank}: rank 0 gave no {words.what} within {offer_seconds:g} s; has rank 0 ended, or does it not "
                f"call {words.caller}, as often as this rank does?"
            )
        call = channel.under(channel.read(f"welcome/{token}").decode())
        offer = json.loads(call.read("offer"))
        if "error" in offer:
            call.write(answer, "")
            raise error_from_json(offer["error"], "rank 0: " if offer["error"]["kind"] else "")
        said, fault = "", None
        try:
            data = b"".join(call.read(f"part/{number}") for number in range(offer["parts"]))
            if sha256(data) != offer["sha256"]:
                raise InvalidInput(f"the {words.what} was damaged on the way from rank 0")
            value = parse(data)
            fault = _fault(value, data, check)
        except NeuroshardError as error:
            fault = error
        except BaseException as error:
            said = json.dumps(error_to_json(error, channel.rank))
            raise
        finally:
            if fault is not None:
                said = json.dumps(error_to_json(fault, channel.rank))
            call.write(answer, said)
        if call.wait(["verdict"], verdict_seconds):
            raise NeuroshardError(
                f"rank {channel.rank}: rank 0 {words.had} the {words.what}, but did not say within {verdict_seconds:g} s that "
                "all ranks have it; rank 0 has ended"
            )
        if verdict := call.read("verdict"):
            raise error_from_json(json.loads(verdict))
        if fault is not None:
            raise fault
        return value


def _fault(value: T, data: bytes, check: Callable[[T, bytes], None]) -> NeuroshardError | None:
    """Why what rank 0 gave does not fit this rank; None where it does."""
    try:
        check(value, data)
    except NeuroshardError as error:
        return error
    return None


def _raise_verdict(
    found: Mapping[int, NeuroshardError], late: Sequence[int], whose: str, timeout_seconds: float
) -> None:
    """Raise the error that all ranks get, if some ranks have errors or did not answer."""
    if late:
        raise NeuroshardError(
            f"{_ranks(late)} did not take {whose} within {timeout_seconds:g} s, so no rank trains with it; look at the logs of "
            f"{'that rank' if len(late) == 1 else 'those ranks'}, then start all ranks again"
        )
    if not found:
        return
    # a rank that lost the others fails because one of them has
    first = found[min(found, key=lambda rank: (isinstance(found[rank], Unreachable), rank))]
    same = [rank for rank in sorted(found) if str(found[rank]) == str(first)]
    others = f"; other errors on {_ranks(sorted(set(found) - set(same)))}" if len(same) < len(found) else ""
    raise type(first)(f"{_ranks(same)}: {first}{others}")


def _ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7, 9, … (12 in all)`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    named = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    cut = f", … ({len(numbers)} in all)" if len(named) > RANKS_NAMED else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(named[:RANKS_NAMED])}{cut}"


def error_to_json(error: BaseException, rank: int) -> dict[str, str]:
    """An error for the key-value store: the name of its class, or of the nearest base in core/errors.py, and its text."""
    if isinstance(error, NeuroshardError):
        kind = next(kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
        return {"kind": kind.__name__, "text": str(error)}
    return {"kind": "", "text": f"rank {rank}: {type(error).__name__}: {one_line(error)}".removesuffix(": ")}


def error_from_json(value: Mapping[str, str], before: str = "") -> NeuroshardError:
    kind = getattr(errors, value["kind"], NeuroshardError) if value["kind"] else NeuroshardError
    error: NeuroshardError = kind(f"{before}{value['text']}")
    return error


def gathered(group: "ProcessGroup | None", mine: Any) -> list[Any]:
    """What every rank has; without torch.distributed, this process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


def prefix_of(group: "ProcessGroup", model: str) -> str:
    """Of the keys of one call. Jobs that share a store have other names, and two models in two threads of a job other keys."""
    with _counting:
        calls = _calls.setdefault(group, Counter())
        calls[model] += 1
        return f"neuroshard/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{group.group_name}/{model}/{calls[model]}"


def parts_of(group: "ProcessGroup | None", whose: str) -> tuple["ProcessGroup", KeyValueStore, int, int]:
    """A process group, its key-value store, this process's rank and the number of ranks. Raises UsageError."""
    try:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d
    except ImportError:
        raise UsageError(f"{whose} needs torch; where there is none, use load_plan") from None
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{whose}: there is no process group yet; call torch.distributed.init_process_group before, or "
            "load_plan where one process trains alone"
        )
    chosen = dist.group.WORLD if group is None else group
    rank = dist.get_rank(chosen)
    if chosen is None or rank < 0:
        raise UsageError(f"{whose}: this process is not in the group that was given")
    key_value = distributed_c10d._get_process_group_store(chosen)
    if key_value is None:
        raise UsageError(f"{whose}: a group of backend {dist.get_backend(chosen)} has no key-value store")
    return chosen, key_value, rank, dist.get_world_size(chosen)
