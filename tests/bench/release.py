"""Stores and releases under stress, as a table.

    make bench-release            (or: .venv/bin/python tests/bench/release.py --quick --only damaged)

Folder stores lie in a temporary folder; S3 is moto's server, one Python process, so its figures are of moto and not of S3.
The trainer's step time under several planners' plans is trainer.py's.
"""

import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import median
from threading import Barrier, Event
from typing import NamedTuple
from uuid import uuid4

from botocore.config import Config

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.publishing import page
from helpers import servers
from helpers.costs import random_model, with_error
from helpers.damage import CHECKS, fuzz
from helpers.faults import FAULTS, Fault
from helpers.kills import killed_everywhere
from helpers.meetings import meet
from helpers.plans import NOW, make_plan
from helpers.releasing import COMMANDS, check_works_on, live, prepare
from helpers.spoiled import spoiled_day
from neuroshard.client import load_plan
from neuroshard.client.cache import cache_of
from neuroshard.client.load import load_published
from neuroshard.client.ranks import share_plan
from neuroshard.core.errors import Conflict
from neuroshard.core.units import format_bytes
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.deploy.bundles import publish_model
from neuroshard.deploy.golive import roll_back
from neuroshard.deploy.run import deploy
from neuroshard.store import s3
from neuroshard.store.bundles import models_of
from neuroshard.store.folder import FolderStore
from neuroshard.store.open import open_store
from neuroshard.store.protocol import Store
from neuroshard.store.releases import Published, plans_of, read_live, read_plan, read_published
from neuroshard.store.track import all_releases, read_artifact, read_pointer


class Sizes(NamedTuple):
    """How much of everything."""

    rounds: int
    reads: int
    commands: int
    meetings: int
    mutations: int
    starts: int


FULL, QUICK = Sizes(200, 10_000, 60, 2_000, 20_000, 20), Sizes(5, 400, 20, 100, 600, 2)
WRITERS, READERS, DEPLOYERS = 32, 16, 8
RANKS, DEPLOYS, CUT_OFF = 256, 3, 8  # ranks of a job, deploys while it starts, ranks whose host has only an older plan
CASTS = (("gc", "promote"), ("gc", "gc", "promote"), ("gc", "deploy", "rollback"))
SPOILED = 0.3  # of all answers; a request is tried four times


def main() -> None:
    parser = page.parser(__doc__, "a thirtieth of it or so, to see that it runs")
    parser.add_argument("--only", default="", help="the rows in whose names this occurs")
    options = page.asked(parser)
    if options.publish and options.only:
        parser.error("--publish is for whole runs, not for --only")
    sizes, only = QUICK if options.quick else FULL, options.only
    figures: dict[str, str] = {}

    def row(name: str, measure: Callable[[], str]) -> None:
        """Run one, print its line. An AssertionError ends the bench: then a promise is broken."""
        if only not in name:
            return
        began = time.monotonic()
        figures[name] = measure()
        print(f"| {name} | {figures[name]} | {time.monotonic() - began:.1f} |", flush=True)

    print("| | figure | seconds |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder, servers.moto() as moto, s3_environment(moto):
        for name, open_fresh in {"folder": folders(Path(folder)), "moto": buckets()}.items():
            row(f"{WRITERS} writers race to swap, {sizes.rounds} rounds, {name}", partial(race, open_fresh(), sizes))
            row(
                f"{READERS} readers, {DEPLOYERS} writers, {sizes.reads:,} reads, {name}",
                partial(read_while_written, open_fresh(), sizes),
            )
        row(
            f"{RANKS} ranks start during {DEPLOYS} deploys, {sizes.starts} times",
            lambda: start_ranks(Path(folder) / uuid4().hex, sizes),
        )
        for command in COMMANDS:
            row(f"kill -9 at every write of: {command}", partial(kill, command, Path(folder) / uuid4().hex))
        row("kill -9 at every write of: publish-model", lambda: kill_publish_model(Path(folder) / uuid4().hex))
        for cast in CASTS:
            row(f"{sizes.meetings:,} meetings of {' and '.join(cast)}, some killed", partial(meetings, cast, sizes))
        for fault in FAULTS:
            row(f"{SPOILED:.0%} of answers: {fault}", partial(spoil, fault, moto, sizes))
        for kind in CHECKS:
            row(f"{share_of(sizes.mutations):,} damaged {kind} files", partial(damage, kind, sizes))
        for name, measure in WAITING.items():
            row(name, partial(measure, Path(folder) / "large"))
    if options.publish:
        publish_both(figures)


def publish_both(figures: dict[str, str]) -> None:
    """What the attacks found, those of one kind in one row; and what a trainer waits for."""
    found: dict[str, list[str]] = {}
    for name, figure in figures.items():
        kind, _, which = name.partition(": ")
        short = re.split(r"[;:] | [(]", figure)[0]
        if name not in WAITING:
            found.setdefault(kind, []).append(f"{which}: {short}" if which else short)
    page.publish(
        "release-faults",
        "Do releases survive races, kills, spoiled answers and damaged files? A broken promise ends the run.",
        ["", "found"],
        [(kind, "; ".join(shorts)) for kind, shorts in found.items()],
        costs="none",
    )
    waited = [(name, figures[name]) for name in WAITING]
    page.publish("release-time", "How long does a trainer wait for its plan?", ["", "found"], waited, costs="none")


@contextmanager
def s3_environment(endpoint: str) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": servers.KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    # a hang is one of our own making, so there is no need to wait as long as for a real network
    usual, s3.CONFIG = s3.CONFIG, s3.CONFIG.merge(Config(read_timeout=5, max_pool_connections=64))
    yield
    s3.CONFIG = usual


def folders(parent: Path) -> Callable[[], Store]:
    return lambda: FolderStore(parent / uuid4().hex)


def buckets() -> Callable[[], Store]:
    return lambda: open_store(new_bucket())


def new_bucket() -> str:
    import boto3

    bucket = f"bucket-{uuid4().hex}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/runs"


def race(store: Store, sizes: Sizes) -> str:
    """Every round, all writers swap from the same token, begun together; each round must have one winner."""
    store.swap("m/live.json", b"start", None)
    barrier = Barrier(WRITERS)
    lost = 0
    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(sizes.rounds):
            token = store.read_versioned("m/live.json")[1]

            def swap(writer: int, number: int = number, token: str = token) -> bytes | None:
                data = b"%d by %d" % (number, writer)
                barrier.wait()
                try:
                    store.swap("m/live.json", data, token)
                except Conflict:
                    return None
                return data

            winners = [data for data in pool.map(swap, range(WRITERS)) if data is not None]
            assert len(winners) == 1, f"{len(winners)} winners in round {number}"
            lost += store.read("m/live.json") != winners[0]
    assert not lost
    return f"{sizes.rounds} rounds of {sizes.rounds} with one winner, {lost} lost updates"


def read_while_written(store: Store, sizes: Sizes) -> str:
    """Readers load the live plan while deployers deploy; every reading must give one of the plans, whole."""
    plans = {plan.digest(): plan for plan in (make_plan(str(number)) for number in range(DEPLOYERS * 4))}
    deploy(next(iter(plans.values())), store, "m", now=NOW)
    done = Event()
    deployed: Counter[str] = Counter()

    def write(writer: int) -> None:
        rng = random.Random(writer)
        while not done.is_set():
            try:
                deploy(plans[rng.choice(list(plans))], store, "m", now=NOW + timedelta(seconds=writer))
                deployed["deploys"] += 1
            except Conflict:
                deployed["conflicts"] += 1

    def read(_: int) -> tuple[int, float]:
        torn, slowest = 0, 0.0
        for _ in range(sizes.reads // READERS):
            began = time.monotonic()
            release = read_live(store, "m").release
            torn += read_plan(store, "m", release.plan_digest) != plans[release.plan_digest]
            slowest = max(slowest, time.monotonic() - began)
        return torn, slowest

    with ThreadPoolExecutor(READERS + DEPLOYERS) as pool:
        writers = [pool.submit(write, writer) for writer in range(DEPLOYERS)]
        try:
            seen = list(pool.map(read, range(READERS)))
        finally:
            done.set()
        for writer in writers:
            writer.result()
    torn = sum(count for count, _ in seen)
    numbers = [release.number for release in all_releases(store, plans_of("m"))]
    assert torn == 0
    assert numbers == list(range(len(numbers), 0, -1)), "the history has a gap"
    slowest = max(seconds for _, seconds in seen)
    return (
        f"{torn} torn, 0 errors; slowest {1000 * slowest:.0f} ms; meanwhile {deployed['deploys']} deploys, "
        f"{deployed['conflicts']} conflicts, a history without gaps"
    )


def start_ranks(work: Path, sizes: Sizes) -> str:
    """How many plans the ranks of one job end with: each by `load_plan`, and by the one call in which rank 0 loads for all.

    The first CUT_OFF of the others cannot reach the store; their host has the plan that was live before.
    """
    from torch._C._distributed_c10d import HashStore

    plans = [make_plan(str(number)) for number in range(DEPLOYS + 1)]
    counts: dict[str, list[int]] = {"alone": [], "together": []}
    for number in range(sizes.starts):
        for how, seen in counts.items():
            store, cache = FolderStore(work / f"{number}-{how}"), work / f"{number}-{how}-cache"
            deploy(plans[0], store, "m", now=NOW)
            load_plan(store.url, "m", cache_dir=cache)
            begin, shared = Barrier(RANKS + 1), HashStore()

            def start(
                rank: int,
                how: str = how,
                store: Store = store,
                cache: Path = cache,
                begin: Barrier = begin,
                shared: HashStore = shared,
            ) -> str:
                is_cut_off = 0 < rank <= CUT_OFF
                rng = random.Random(rank)
                begin.wait()
                time.sleep(rng.random())  # imports do not take equally long everywhere

                def load() -> Published:
                    if is_cut_off:
                        cached = cache_of(store, cache)
                        return read_published(cached, "m", read_live(cached, "m").release.plan_digest)
                    return load_published(store.url, "m", None, False, 60.0)

                if how == "alone":
                    return load().plan.digest()
                return share_plan(
                    shared,
                    rank,
                    RANKS,
                    load,
                    lambda *_: None,
                    prefix="start",
                    model="m",
                    load_seconds=60,
                    timeout_seconds=60,
                ).digest()

            with ThreadPoolExecutor(RANKS) as pool:
                ranks = [pool.submit(start, rank) for rank in range(RANKS)]
                begin.wait()
                for plan in plans[1:]:
                    time.sleep(1 / (DEPLOYS + 1))
                    deploy(plan, store, "m", now=NOW)
                seen.append(len({rank.result() for rank in ranks}))
    assert set(counts["together"]) == {1}, f"ranks differ: {counts['together']}"
    alone = Counter(counts["alone"])
    said = ", ".join(f"{count} in {times} of {sizes.starts}" for count, times in sorted(alone.items()))
    return (
        f"distinct plans: each rank by load_plan {said}; load_plan_on_all_ranks 1 in {sizes.starts} of {sizes.starts}"
    )


def kill(name: str, work: Path) -> str:
    command = COMMANDS[name]
    start = work / "start"
    start.mkdir(parents=True)
    prepare(command, FolderStore(start))
    old = command.deployed[-1] if command.deployed else None
    seen: Counter[str] = Counter()
    for root in killed_everywhere(start, work, command.act):
        store = FolderStore(root)
        now_live = live(store)
        assert now_live in (old, command.after)
        seen["new" if now_live == command.after != old else "old"] += 1
        command.act(store) if name == "gc" else None
        check_works_on(store, now_live)
    kills = sum(seen.values()) - 1  # the last one was left alone
    return f"{kills} kills: old or new plan live ({seen['old']}, {seen['new']}), the next deploy and rollback work"


def kill_publish_model(work: Path) -> str:
    models = [with_error(random_model(2, seed=seed), 0.1) for seed in range(2)]
    for model in models:
        save_cost_model(work / model.name, model)
    publish_model(work / models[0].name, FolderStore(work / "start"), now=NOW)
    line = models_of(models[0].manifest.hardware_fingerprint, models[0].manifest.batch_size)
    seen: Counter[str] = Counter()
    for root in killed_everywhere(
        work / "start", work, lambda store: publish_model(work / models[1].name, store, now=NOW)
    ):
        store = FolderStore(root)
        digest = read_pointer(store, line).release.bundle_digest
        assert read_artifact(store, line, digest).digest in (models[0].name, models[1].name)
        seen["new" if digest == models[1].name else "old"] += 1
        publish_model(work / models[1].name, store, now=NOW)
        assert roll_back(store, line, now=NOW).bundle_digest == models[0].name
    return f"{seen.total() - 1} kills: old or new model live ({seen['old']}, {seen['new']}), the next rollback works"


def meetings(cast: tuple[str, ...], sizes: Sizes) -> str:
    """Commands interleaved call by call, by chance; what is live in the end must be there."""
    ends: Counter[str] = Counter()
    with redirect_stderr(StringIO()):  # gc's progress
        for seed in range(sizes.meetings):
            ends[meet(cast, random.Random(seed))] += 1
    told = ", ".join(f"{count:,} {end}" for end, count in sorted(ends.items()))
    return f"0 releases live without their plan ({told})"


def spoil(fault: Fault, moto: str, sizes: Sizes) -> str:
    direct = open_store(new_bucket())

    def aim(endpoint: str) -> Store:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        return open_store(direct.url)

    try:
        commands = max(6, sizes.commands // 5) if fault == "hang" else sizes.commands
        day = spoiled_day(direct, moto, fault, SPOILED, commands, random.Random(0), aim)
    finally:
        os.environ["AWS_ENDPOINT_URL"] = moto
    errors = ", ".join(f"{count} {name}" for name, count in sorted(day.errors.items())) or "no error"
    return f"0 wrong plans in {commands} commands: {day.well} well, {errors}; longest {day.longest_seconds:.1f} s"


def share_of(mutations: int) -> int:
    """Of each kind of file, rounded up."""
    return -(-mutations // len(CHECKS))


def damage(kind: str, sizes: Sizes) -> str:
    """Hypothesis chooses the faults; it takes memory of its own, so files are damaged for a while before it is looked at."""
    fuzz(kind, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tried, taken, slowest = fuzz(kind, share_of(sizes.mutations))
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return (
        f"{tried - taken:,} clear errors, {taken:,} valid; no traceback; slowest {1000 * slowest:.0f} ms; "
        f"peak memory +{format_bytes(grown)}"
    )


LARGE = """
import json, re, sys, time, warnings
warnings.simplefilter("ignore")
from datetime import UTC, datetime
from pathlib import Path
step, root = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, sys.argv[3])
if step == "publish":
    from helpers.plans import NOW, make_plan
    from neuroshard.core.table import Table
    from neuroshard.core.plan import Plan, Shard
    from neuroshard.core.task import ShardingTask
    from neuroshard.deploy.run import deploy
    from neuroshard.store.folder import FolderStore
    tables = tuple(Table(name=f"table_{i}", rows=10_000, dim=128, pooling_factor=1 + i % 40) for i in range(2000))
    shards = tuple(
        Shard(table=t.name, rows=t.rows, column_offset=c, dim=64, device=(2 * i + c // 64) % 128)
        for i, t in enumerate(tables) for c in (0, 64)
    )
    task = ShardingTask(tables=tables, device_memory_bytes=(2**30,) * 128, batch_size=65536)
    plan = Plan(task=task, shards=shards, predicted_ms=(1.0,) * 128, provenance=make_plan().provenance)
    began = time.perf_counter()
    deploy(plan, FolderStore(root), "m", now=datetime(2025, 11, 20, tzinfo=UTC))
else:
    from neuroshard.client import load_plan
    if step == "to_torchrec":
        import torch
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from neuroshard.client.torchrec import to_torchrec
        plan = load_plan(str(root), "m", cache_dir=False)
        module = EmbeddingBagCollection(device=torch.device("meta"), tables=[
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in plan.task.tables])
        began = time.perf_counter()
        to_torchrec(plan, module, device_type="cuda", local_world_size=8, world_size=128)
    else:
        began = time.perf_counter()
        load_plan(str(root), "m", cache_dir=False, world_size=128)
seconds = time.perf_counter() - began
peak = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())  # ru_maxrss would count the parent's
print(json.dumps({"seconds": seconds, "bytes": 1024 * int(peak[1])}))
"""


def large(root: Path) -> str:
    """Each step in a process of its own, so that its peak memory is its own; the best of three loads."""
    figures = []
    for step, times in (("publish", 1), ("load", 3), ("to_torchrec", 1)):
        runs = [
            json.loads(
                subprocess.run(
                    [sys.executable, "-c", LARGE, step, str(root), str(Path(__file__).parents[1])],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.splitlines()[-1]
            )
            for _ in range(times)
        ]
        best = min(runs, key=lambda run: run["seconds"])
        figures.append(f"{step} {best['seconds']:.2f} s, {format_bytes(best['bytes'])}")
    size = next((root / "m" / "plans").glob("*.json")).stat().st_size
    return f"plan of {format_bytes(size)}: " + "; ".join(figures) + " (peak memory of the whole process)"


def imported(_: Path) -> str:
    """The client in a fresh interpreter, ten times: by the clock, and what it computes, whatever else the machine does."""
    script = (
        "import time; a, b = time.perf_counter(), time.process_time(); from neuroshard.client import load_plan; print("
    )
    script += "time.perf_counter() - a, time.process_time() - b)"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(10)
    ]
    seconds, computed = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    return f"median {median(seconds):.2f} s, best {min(seconds):.2f} s; median of CPU time {median(computed):.2f} s"


WAITING: dict[str, Callable[[Path], str]] = {  # not attacks, but what a trainer waits for
    "2,000 tables, 128 ranks": large,
    "from neuroshard.client import load_plan": imported,
}

if __name__ == "__main__":
    main()
