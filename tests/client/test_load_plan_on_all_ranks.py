"""One plan on all ranks, in real gloo worlds: with deploys in between, with ranks that die, with a rank 0 that fails."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from helpers.limits import HANGS
from helpers.loopback import HOST
from helpers.plans import NOW, TABLES, make_plan
from helpers.refusals import refused
from neuroshard.client import load_plan, load_plan_on_all_ranks, ranks
from neuroshard.client.ranks import PART_BYTES, Channel, share_plan
from neuroshard.core.errors import InvalidInput, NeuroshardError, NotFound, UsageError
from neuroshard.core.plan import Plan, Provenance
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore
from neuroshard.store.releases import Published

pytestmark = pytest.mark.slow


RANKS = 3
PLAN, OTHER = (make_plan(note, devices=RANKS) for note in ("A", "B"))
DEAD = "dead"


@pytest.fixture
def store(store: FolderStore) -> FolderStore:
    deploy(PLAN, store, "m", now=NOW)
    return store


def on_ranks(work: Callable[[int], Any], ranks: int = RANKS) -> list[Any]:
    """What `work(rank)` returns on each rank of a world, an error as (kind, text); "dead" for a rank that returned nothing."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    ports = [context.Pipe(duplex=False) for _ in range(ranks)]

    def run(rank: int) -> None:
        if rank == 0:  # at a port that nobody else can take in between
            key_value = TCPStore(HOST, 0, ranks, is_master=True, wait_for_workers=False)
            for _, sender in ports:
                sender.send(key_value.port)
        else:
            key_value = TCPStore(HOST, ports[rank][0].recv(), ranks, wait_for_workers=False)
        dist.init_process_group("gloo", store=key_value, rank=rank, world_size=ranks)
        connected(rank, ranks)
        try:
            result = work(rank)
        except NeuroshardError as error:
            result = type(error), str(error)
        pipes[rank][1].send(result)
        time.sleep(10 * HANGS)  # the key-value store lives in rank 0: all are ended together, below

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    results = []
    for process, (receiver, _) in zip(processes, pipes, strict=True):
        ready = multiprocessing.connection.wait([receiver, process.sentinel], timeout=HANGS)
        assert ready, "a rank hangs"
        results.append(receiver.recv() if receiver in ready and receiver.poll() else DEAD)
    for process in processes:
        process.kill()
        process.join()
    return results


def connected(rank: int, ranks: int) -> None:
    """Return once nobody connects any more, on rank 0 after all others: with it the key-value store may die."""
    key_value = dist.distributed_c10d._get_default_store()
    for step in ("begun", "seen"):
        key_value.set(f"{step}/{rank}", "")
        if step == "begun" or rank == 0:
            key_value.wait([f"{step}/{other}" for other in range(ranks)])


def load(url: str, rank: int, **options: Any) -> str:
    """Other ranks than 0 are cut off from the store."""
    here = url if rank == 0 else "/nonexistent/store"
    return load_plan_on_all_ranks(here, "m", cache_dir=False, **options).digest()


def test_ranks_that_are_cut_off_get_the_plan_of_rank_0(store):
    assert on_ranks(partial(load, store.url)) == [PLAN.digest()] * RANKS


def test_all_ranks_agree_while_plans_are_deployed(store):
    """Each rank arrives at another time, and the live plan changes all the time."""
    done = threading.Event()

    def keep_deploying() -> None:
        while not done.is_set():
            deploy(OTHER, store, "m", now=NOW)
            deploy(PLAN, store, "m", now=NOW)

    def work(rank: int) -> list[str]:
        seen = []
        for round_ in range(20):
            time.sleep(0.002 * ((rank + round_) % RANKS))
            seen.append(load_plan_on_all_ranks(store.url, "m", cache_dir=False).digest())
        return seen

    deployer = threading.Thread(target=keep_deploying)
    deployer.start()
    try:
        first, *others = on_ranks(work)
    finally:
        done.set()
        deployer.join()

    assert len(first) == 20
    assert set(first) <= {PLAN.digest(), OTHER.digest()}
    assert others == [first] * (RANKS - 1)


def test_a_plan_of_a_given_digest_is_loaded_whatever_is_live(store):
    deploy(OTHER, store, "m", now=NOW)

    assert on_ranks(partial(load, store.url, digest=PLAN.digest())) == [PLAN.digest()] * RANKS


def test_what_fails_on_rank_0_is_raised_on_all_ranks(tmp_path):
    first, *others = on_ranks(partial(load, str(tmp_path / "empty")))

    assert first[0] is NotFound
    assert others == [(NotFound, f"rank 0: {first[1]}")] * (RANKS - 1)


def test_a_fault_of_the_program_on_rank_0_ends_the_others_too(store):
    def work(rank: int) -> str:
        tables: Any = 7 if rank == 0 else TABLES  # not tables
        try:
            return load(store.url, rank, tables=tables)
        except TypeError:
            return "TypeError"

    first, *others = on_ranks(work)

    assert first == "TypeError"
    assert others == [(NeuroshardError, "rank 0: TypeError: 'int' object is not iterable")] * (RANKS - 1)


def begin_to_wait_when_answered_by(rank: int) -> None:
    """In this process, which ends with its test: however busy the machine is, this rank is not late."""
    welcome = Channel.welcome

    def patient(self: Channel, ranks: Iterable[int], prefix: str, seconds: float) -> list[int]:
        assert welcome(self, [rank], prefix, HANGS) == []
        return welcome(self, ranks, prefix, seconds)

    Channel.welcome = patient


def test_a_rank_that_dies_is_named_on_all_others(store):
    def work(rank: int) -> str:
        if rank == 1:
            os._exit(1)
        if rank == 0:
            begin_to_wait_when_answered_by(2)
        return load(store.url, rank, timeout_seconds=1.0 if rank == 0 else HANGS)

    first, dead, last = on_ranks(work)

    assert dead == DEAD
    assert first[0] is last[0] is NeuroshardError
    assert first[1].startswith(f"rank 1 did not take plan {PLAN.digest()[:12]} of 'm' within 1 s")
    assert first == last


def test_where_rank_0_dies_the_others_say_so(store):
    def work(rank: int) -> str:
        if rank == 0:
            os._exit(1)
        return load(store.url, rank, timeout_seconds=1.0, deadline_seconds=1.0)

    dead, *others = on_ranks(work)

    assert dead == DEAD
    assert [kind for kind, _ in others] == [NeuroshardError] * (RANKS - 1)
    assert all("rank 0" in text and "ended" in text for _, text in others)


def test_where_rank_0_never_calls_the_others_do_not_wait_for_ever(store):
    def work(rank: int) -> str:
        if rank == 0:
            return "does something else"
        return load(store.url, rank, timeout_seconds=0.5, deadline_seconds=0.5)

    _, *others = on_ranks(work)

    assert [kind for kind, _ in others] == [NeuroshardError] * (RANKS - 1)
    assert all("rank 0 gave no plan of 'm' within 1 s" in text for _, text in others)


def test_a_plan_for_another_number_of_ranks_is_refused_on_all_with_their_names(store):
    deploy(make_plan("wide", devices=2), store, "m", now=NOW)
    results = on_ranks(partial(load, store.url))

    assert {kind for kind, _ in results} == {InvalidInput}
    assert {text.partition("; start")[0] for _, text in results} == {
        f"ranks 0-2: plan {make_plan('wide', devices=2).digest()[:12]} of 'm' is for 2 ranks, but the trainer has 3"
    }


def test_a_plan_that_does_not_fit_one_rank_is_refused_on_all(store):
    def work(rank: int) -> str:
        return load(store.url, rank, tables=TABLES[:1] if rank == 2 else TABLES)

    results = on_ranks(work)

    assert {kind for kind, _ in results} == {InvalidInput}
    assert len({text for _, text in results}) == 1
    assert results[0][1].startswith(f"rank 2: plan {PLAN.digest()[:12]} of 'm'")


def test_a_group_agrees_without_the_other_ranks(store):
    def work(rank: int) -> str:
        group = dist.new_group([1, 2])
        if rank == 0:
            with refused(UsageError, "group"):
                load_plan_on_all_ranks(store.url, "m", group=group)
            return ""
        here = store.url if rank == 1 else "/nonexistent/store"
        return load_plan_on_all_ranks(here, "m", group=group, world_size=RANKS, cache_dir=False).digest()

    assert on_ranks(work) == ["", PLAN.digest(), PLAN.digest()]


def test_without_a_process_group_there_is_one_clear_line(store):
    with refused(UsageError, "torch.distributed.init_process_group", "load_plan"):
        load_plan_on_all_ranks(store.url, "m")


def test_many_ranks_share_a_plan_of_several_parts():
    long = Provenance(**{**PLAN.provenance.model_dump(), "notes": ("x" * (2 * PART_BYTES),)})
    plan = Plan(**{**dict(PLAN), "provenance": long})
    key_value = HashStore()
    published = Published(plan, plan.canonical_json())

    def work(rank: int) -> Plan:
        return share_plan(
            key_value,
            rank,
            64,
            lambda: published,
            lambda *_: None,
            prefix="p",
            model="m",
            load_seconds=HANGS,
            timeout_seconds=HANGS,
        )

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(lambda rank: work(rank).digest(), range(64))) == {plan.digest()}


def attempt(key_value: Any, ranks: Iterable[int], of: int, plan: Plan, seconds: float) -> list[Any]:
    """What these ranks of so many get when they share a plan under the same prefix as ever: digests, or errors in words."""

    def work(rank: int) -> str:
        try:
            return share_plan(
                key_value,
                rank,
                of,
                lambda: Published(plan, plan.canonical_json()),
                lambda *_: None,
                prefix="p",
                model="m",
                load_seconds=seconds,
                timeout_seconds=seconds,
            ).digest()
        except NeuroshardError as error:
            return str(error)

    with ThreadPoolExecutor(of) as pool:
        return list(pool.map(work, ranks))


@pytest.mark.parametrize("before", [[], [0], [1], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("of", [2, 3, 4])
def test_what_an_attempt_before_left_in_the_key_value_store_is_not_taken(before: list[int], of: int) -> None:
    """torchrun keeps the store when it starts the ranks again, with another number of ranks or not."""
    key_value = HashStore()
    attempt(key_value, before, 3, PLAN, seconds=0.2)

    assert attempt(key_value, range(of), of, OTHER, seconds=HANGS) == [OTHER.digest()] * of


def test_a_rank_that_calls_once_more_ends_in_a_line(store: FolderStore) -> None:
    def work(rank: int) -> Any:
        first = load(store.url, rank)
        if rank != 1:
            return first
        return first, *on_error(lambda: load(store.url, rank, timeout_seconds=0.3, deadline_seconds=0.3))

    first, extra, last = on_ranks(work)

    assert first == last == extra[0] == PLAN.digest()
    assert extra[1] is NeuroshardError
    assert "as often as this rank does" in extra[2]


def on_error(work: Callable[[], Any]) -> tuple[type, str]:
    try:
        return work()
    except NeuroshardError as error:
        return type(error), str(error)


def test_two_models_in_threads_and_a_group_that_is_made_anew_have_keys_of_their_own(store: FolderStore) -> None:
    deploy(OTHER, store, "other", now=NOW)

    def work(rank: int) -> list[str]:
        with ThreadPoolExecutor(2) as pool:
            models = ["m", "other"] if rank == 0 else ["other", "m"]
            loaded = pool.map(lambda model: load_plan_on_all_ranks(store.url, model, cache_dir=False), models)
            found = {model: plan.digest() for model, plan in zip(models, loaded, strict=True)}
        if rank == 1:
            ranks._calls.clear()  # as in a process that was started anew
        group = dist.new_group(list(range(RANKS)))
        again = load_plan_on_all_ranks(store.url, "m", group=group, cache_dir=False).digest()
        return [found["m"], found["other"], again]

    assert on_ranks(work) == [[PLAN.digest(), OTHER.digest(), PLAN.digest()]] * RANKS


def test_bytes_that_were_damaged_on_the_way_are_refused_on_all_ranks():
    class Damaging:
        """A key-value store that turns a digit of the plan."""

        def __init__(self) -> None:
            self.inner = HashStore()

        def get(self, key: str) -> bytes:
            data = self.inner.get(key)
            return data.replace(b"1000", b"1001") if "/part/" in key else data

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    key_value = Damaging()

    assert set(attempt(key_value, range(2), 2, PLAN, HANGS)) == {
        "rank 1: the plan of 'm' was damaged on the way from rank 0"
    }


# `load_plan` by a digest


def test_load_plan_by_digest_loads_that_plan_whatever_is_live(store, tmp_path):
    deploy(OTHER, store, "m", now=NOW)

    assert load_plan(store.url, "m", digest=PLAN.digest(), cache_dir=tmp_path / "cache") == PLAN


def test_a_plan_of_a_digest_that_was_loaded_here_needs_no_store(store, tmp_path):
    load_plan(store.url, "m", digest=PLAN.digest(), cache_dir=tmp_path / "cache")
    store.root.rename(tmp_path / "gone")

    assert load_plan(store.url, "m", digest=PLAN.digest(), cache_dir=tmp_path / "cache") == PLAN


def test_a_plan_of_a_digest_is_verified_and_a_broken_copy_is_replaced(store, tmp_path):
    load_plan(store.url, "m", digest=PLAN.digest(), cache_dir=tmp_path / "cache")
    (kept,) = (tmp_path / "cache").rglob("plans/*.json")
    kept.write_bytes(kept.read_bytes().replace(b"1000", b"1001"))
    assert load_plan(store.url, "m", digest=PLAN.digest(), cache_dir=tmp_path / "cache") == PLAN
    assert kept.read_bytes() == PLAN.canonical_json()

    path = store.root / "m" / "plans" / f"{PLAN.digest()}.json"
    path.write_bytes(path.read_bytes().replace(b"1000", b"1001"))
    with refused(InvalidInput, path.name):
        load_plan(store.url, "m", digest=PLAN.digest(), cache_dir=False)


def test_a_digest_that_is_none_and_one_that_is_not_there(store):
    with refused(UsageError, "64 hex digits"):
        load_plan(store.url, "m", digest=PLAN.digest()[:12])
    with refused(NotFound, OTHER.digest()):
        load_plan(store.url, "m", digest=OTHER.digest(), cache_dir=False)
