"""The worked trainer: real processes, real TorchRec, from a folder store."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from helpers.commands import Done
from helpers.forked import run_script
from helpers.limits import HANGS
from helpers.plans import NOW, TABLES, make_plan, row_plan, row_wise
from helpers.processes import alive, needs_proc, new_mark, wait_until
from helpers.refusals import names, refused
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.groups import Groups
from neuroshard.core.part import Part
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore

pytestmark = pytest.mark.slow


TRAIN = Path(__file__).parents[2] / "examples" / "train.py"


def lopsided_plan(devices: int = 3, element_bytes: int = 4) -> Plan:
    """Uneven columns of user, two of them on one rank; everything else on rank 0; the last rank is empty."""
    tables = tuple(table.model_copy(update={"element_bytes": element_bytes}) for table in TABLES)
    plan = make_plan(devices=devices, tables=tables)
    shards = [
        Shard(table="user", rows=1000, column_offset=8, dim=8, device=0),
        Shard(table="user", rows=1000, column_offset=0, dim=4, device=1),
        Shard(table="user", rows=1000, column_offset=4, dim=4, device=0),
        Shard(table="item", rows=300, dim=8, device=0),
        Shard(table="country", rows=7, dim=4, device=0),
    ]
    return Plan(task=plan.task, shards=tuple(shards), provenance=plan.provenance)


def command(store: Path, *arguments: object) -> list[str]:
    given = ("--store", store, "--name", "m", "--batch-size", 96, "--timeout", HANGS, *arguments)
    return [sys.executable, str(TRAIN), *map(str, given)]


# Progress is shown from the first step on, so that nobody waits five seconds to see that it has begun.
SHOWN_AT_ONCE = """
import runpy, sys
import neuroshard.progress
neuroshard.progress.LINE_EVERY_SECONDS = 0.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def begun(store: Path, mark: dict[str, str]) -> "subprocess.Popen[str]":
    """A trainer of very many steps, that has taken one."""
    python, *script = command(store, "--steps", 10**9)
    given = [python, "-c", SHOWN_AT_ONCE, *script]
    process = subprocess.Popen(given, stderr=subprocess.PIPE, text=True, env={**os.environ, **mark})
    assert process.stderr is not None
    assert any(line.startswith("train: ") for line in process.stderr)
    return process


Train = Callable[..., Done[str]]


@pytest.fixture
def train(example: ModuleType, tmp_path: Path) -> Train:
    """`train(store, "--steps", 3)`, forked: as the command is run, which tests of the docs type."""

    def run(store: Path, *arguments: object, **environment: str) -> Done[str]:
        return run_script(example.main, *command(store, *arguments)[2:], cwd=tmp_path, environment=environment)

    return run


def deployed(tmp_path: Path, plan: Plan) -> Path:
    deploy(plan, FolderStore(tmp_path / "store"), "m", now=NOW)
    return tmp_path / "store"


@pytest.mark.parametrize(("element_bytes", "optimizer"), [(4, "sgd"), (2, "adagrad")])
def test_three_ranks_train_on_the_live_plan(tmp_path, train, element_bytes, optimizer):
    plan = lopsided_plan(element_bytes=element_bytes)
    store = deployed(tmp_path, plan)
    out = tmp_path / "summary.json"
    given = ("--steps", 12, "--optimizer", optimizer, "--learning-rate", 0.5, "--summary", out)
    done = train(store, *given)

    assert done.returncode == 0, done.stderr
    summary = json.loads(out.read_text())
    assert summary["plan_digest"] == plan.digest()
    assert (summary["world_size"], summary["tables"], summary["shards"], summary["steps"]) == (3, 3, 5, 12)
    assert summary["first_forward_max_abs_difference"] == 0
    assert summary["last_loss"] < summary["first_loss"]
    assert len(summary["step_ms"]) == 12
    assert min(summary["step_ms"]) <= summary["step_ms_median"] <= max(summary["step_ms"])
    assert "differs by 0 from the unsharded tables" in done.stdout
    assert "measured on 3 ranks (cpu, gloo)" in done.stdout
    assert len(summary["embeddings"]["measured_ms"]) == 3
    assert "no prediction" in done.stdout
    assert done.stderr.count("Warning") == done.stderr.count("search with --batch-size 96") == 1  # the plan is for 64


def test_a_job_that_starts_again_goes_on_under_the_plan_of_its_checkpoint(tmp_path: Path, train: Train) -> None:
    """Whatever is live by then; where that plan is gone from the store, under the live one."""
    old, new = lopsided_plan(devices=2), row_plan(2)
    store, ends = deployed(tmp_path, old), {}

    def run(name: str, *arguments: object) -> str:
        given = ("--optimizer", "rowwise_adagrad", "--summary", tmp_path / name, *arguments)
        done = train(store, *given, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        ends[name] = json.loads((tmp_path / name).read_text())
        return done.stderr

    saving = ("--checkpoints", tmp_path / "saved", "--save-every", 2)
    run("whole", "--steps", 6)
    run("begun", "--steps", 4, *saving)
    (tmp_path / "saved" / "step-000008").mkdir()  # of a job that was killed while it saved
    deploy(new, FolderStore(store), "m", now=NOW)
    run("ended", "--steps", 6, *saving)
    assert ends["ended"]["plan_digest"] == old.digest()
    assert ends["ended"]["last_loss"] == ends["whole"]["last_loss"]

    shutil.rmtree(tmp_path / "saved" / "step-000006")
    shutil.rmtree(tmp_path / "cache")
    (store / "m" / "plans" / f"{old.digest()}.json").unlink()
    run("moved", "--steps", 6, *saving)
    assert ends["moved"]["plan_digest"] == new.digest()
    assert ends["moved"]["last_loss"] == pytest.approx(ends["whole"]["last_loss"], rel=1e-3)  # moments are estimated


def test_a_checkpoint_without_a_plan_and_one_that_names_none(tmp_path: Path, example: ModuleType) -> None:
    saved_plan = example.saved_plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        save({"model": torch.zeros(2)}, checkpoint_id=tmp_path / "before")
        save({"plan": 7}, checkpoint_id=tmp_path / "wrong")

    assert saved_plan(tmp_path / "before") is None
    with refused(InvalidInput, "wrong", "'plan'", "7"):
        saved_plan(tmp_path / "wrong")
    with refused(InvalidInput, "nowhere"):
        saved_plan(tmp_path / "nowhere")
    (tmp_path / "before" / ".metadata").write_bytes(b"cut off")
    with refused(InvalidInput, "before"):
        saved_plan(tmp_path / "before")


def test_larger_tables_are_cut_and_it_says_so_also_of_split_row_wise_state(tmp_path, train):
    store = deployed(tmp_path, make_plan())
    done = train(store, "--steps", 1, "--memory", "60KiB", "--optimizer", "rowwise_adagrad")

    assert done.returncode == 0, done.stderr
    assert "20.0 KiB of tables to stay within 60KiB; 2 larger tables were cut to fewer rows (user, item)" in done.stderr
    assert done.stderr.count("ShardingWarning") == 2
    assert "rowwise_adagrad has one moment per row and shard" in done.stderr
    assert "search with --batch-size" in done.stderr  # the plan's is another one


def test_three_ranks_train_on_rows_that_are_split_over_all_of_them(tmp_path, train):
    store = deployed(tmp_path, row_plan(devices=3))
    out = tmp_path / "summary.json"
    done = train(store, "--steps", 8, "--optimizer", "rowwise_adagrad", "--memory", "200KiB", "--summary", out)

    assert done.returncode == 0, done.stderr
    summary = json.loads(out.read_text())
    assert summary["capped_tables"] == ["user"]
    assert summary["first_forward_max_abs_difference"] < 1e-6
    assert summary["last_loss"] < summary["first_loss"]


@needs_proc
def test_a_killed_rank_ends_the_run_in_bounded_time(tmp_path):
    store = deployed(tmp_path, make_plan())
    mark = new_mark()
    process = begun(store, mark)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), 9)
    rest = process.communicate(timeout=HANGS)[1]

    assert process.returncode == 1
    assert "died" in rest
    assert "Traceback" not in rest
    assert wait_until(lambda: not alive(mark), HANGS), alive(mark)


def test_a_plan_that_goes_live_is_taken_between_two_steps(tmp_path: Path) -> None:
    first, then = lopsided_plan(), make_plan(devices=3)
    store = deployed(tmp_path, first)
    deployed(tmp_path, then)
    given = command(store, "--digest", first.digest(), "--watch", 0.05, "--steps", 10**9)
    process = subprocess.Popen(given, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = (line for line in process.stderr if line.startswith(("plan ", "step ", "error")))
        assert next(lines).startswith(f"plan {first.digest()[:12]} of m: 3 tables in 5 shards on 3 gloo ranks")
        assert re.match(
            rf"step \d+: plan {then.digest()[:12]} of m: 3 tables in {len(then.shards)} shards", next(lines)
        )
    finally:
        process.terminate()
        process.communicate(timeout=HANGS)


def test_what_cannot_be_trained_is_reported_in_one_line(tmp_path, example, monkeypatch, capsys):
    store = deployed(tmp_path, make_plan())
    wide = make_plan(devices=17)
    deploy(wide, FolderStore(store), "wide", now=NOW)
    groups = Groups(ranks=4, contiguous=False, domain=4, local_world_size=4)
    one = make_plan()
    task = one.task.model_copy(update={"groups": groups, "topology": groups.topology(2, None)})
    of_groups = Plan(task=task, shards=one.shards, provenance=one.provenance)
    deploy(of_groups, FolderStore(store), "groups", now=NOW)
    cases = [
        (("--name", "nobody"), 1, "nobody/live.json: does not exist"),
        (("--name", "wide"), 2, "17 ranks, more than the 16"),
        (
            ("--name", "groups"),
            1,
            "of groups is for 2 groups of 2 of 4 ranks (strided), averaged every step, and this example",
        ),
        (("--batch-size", "3"), 2, "2 ranks can share evenly"),
        (("--steps", "0"), 2, "at least one step"),
        (("--memory", "1B"), 2, "give more --memory"),
        (("--memory", "lots"), 2, "'lots' is not an amount of memory"),
    ]
    for arguments, code, word in cases:
        monkeypatch.setattr(sys, "argv", command(store, *arguments)[1:])
        assert example.main() == code
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert word in error


@pytest.mark.parametrize(
    ("given", "lacks", "code", "facts"),
    [
        (("--batch-size", 500), "", 2, ["--batch-size 500", "8 ranks"]),
        (("--batch-size", 4), "", 2, ["--batch-size 4", "8 ranks"]),
        (("--steps", 0), "", 2, ["--steps 0", "at least one step"]),
        ((), "FBGEMM needs what is not here", 1, ["FBGEMM needs what is not here"]),
    ],
    ids=["uneven batch", "batch below the ranks", "no steps", "no FBGEMM"],
)
def test_torchruns_ranks_check_their_arguments_before_they_wait_for_others(
    example, monkeypatch, capsys, given, lacks, code, facts
):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(example.dist, "init_process_group", lambda *_, **__: pytest.fail("it waits for other ranks"))
    monkeypatch.setattr(example, "fbgemm_lacks", lambda: lacks)
    monkeypatch.setattr(sys, "argv", command(Path("no store"), *given)[1:])

    assert example.main() == code
    error = capsys.readouterr().err
    assert error.startswith("error: rank 3: ")
    assert error.count("\n") == 1
    assert all(names(error, fact) for fact in facts), error


def test_a_capped_plan_has_the_same_shards_with_fewer_rows(example):
    plan = make_plan()
    capped, cut = example.cap_rows(plan, 40_000)

    assert cut == ("user",)
    assert [(s.table, s.column_offset, s.dim, s.device) for s in capped.shards] == [
        (s.table, s.column_offset, s.dim, s.device) for s in plan.shards
    ]
    used = sum(table.memory_bytes for table in capped.task.tables)
    user = capped.task.tables[0]
    assert used <= 40_000 < used + Part(user, 1, user.dim).memory().total
    assert {t.name: t.rows for t in capped.task.tables} == {"user": user.rows, "item": 300, "country": 7}


def test_rows_that_are_split_stay_split_over_all_ranks_in_a_capped_plan(example):
    plan = row_plan(devices=4)
    capped, cut = example.cap_rows(plan, 40_000)

    user = capped.task.tables[0]
    assert cut == ("user",)
    assert [s for s in capped.shards if s.table == "user"] == list(row_wise(user, 4))
    assert [s for s in capped.shards if s.table != "user"] == [s for s in plan.shards if s.table != "user"]


def test_rows_that_are_split_over_a_host_stay_there_in_a_capped_plan(example, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan = row_plan(devices=4)
    host = [s.model_copy(update={"device": 2 + s.device}) for s in row_wise(TABLES[0], 2)]
    others = [s for s in plan.shards if s.table != "user"]
    capped, _ = example.cap_rows(plan.model_copy(update={"shards": (*host, *others)}), 40_000)

    kept = [(s.row_offset, s.rows, s.device) for s in capped.shards if s.table == "user"]
    assert kept == [(first, rows, 2 + rank) for rank, (first, rows) in enumerate(capped.task.tables[0].row_blocks(2))]


def grid_plan() -> Plan:
    """Four ranks on two hosts: each host has half of the columns, each of its ranks half of their rows."""
    table = Table(name="a", rows=100, dim=16, pooling_factor=2.0)
    topology = Topology(domain=2, local_world_size=2)
    task = ShardingTask(tables=(table,), device_memory_bytes=(2**20,) * 4, batch_size=64, topology=topology)
    shards = [
        Shard(table="a", row_offset=50 * place, rows=50, column_offset=8 * host, dim=8, device=2 * host + place)
        for host in range(2)
        for place in range(2)
    ]
    return Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def test_a_grid_that_fits_is_left_as_it_is(example):
    plan = grid_plan()

    assert example.cap_rows(plan, plan.task.tables[0].memory_bytes) == (plan, ())


def test_a_grid_stays_one_on_the_same_hosts_in_a_capped_plan(example):
    plan = grid_plan()
    capped, cut = example.cap_rows(plan, plan.task.tables[0].memory_bytes // 2 - 1)

    assert cut == ("a",)
    (table,) = capped.task.tables
    assert table.rows == 49
    assert [(s.row_offset, s.rows) for s in capped.shards] == 2 * table.row_blocks(2)
    where = [[(s.column_offset, s.dim, s.device) for s in each.shards] for each in (capped, plan)]
    assert where[0] == where[1]


def test_rows_that_torchrec_would_look_for_elsewhere_are_reported_before_any_process_starts(example):
    shards = tuple(s.model_copy(update={"device": 1 - s.device}) for s in row_plan().shards)
    with refused(InvalidInput, "2 ranks"):
        example.cap_rows(row_plan().model_copy(update={"shards": shards}), 10**6)


def test_a_plan_that_fits_is_left_as_it_is(example):
    plan = make_plan()

    assert example.cap_rows(plan, sum(t.memory_bytes for t in TABLES))[1] == ()
    with refused(UsageError, "3 tables", "124 B", "--memory"):
        example.cap_rows(plan, 123)


def test_a_batch_has_as_many_lookups_as_the_pooling_factors_say(example):
    generator = example.torch.Generator().manual_seed(0)
    weighted = TABLES[2].model_copy(update={"weighted": True})
    tables = (*TABLES[:2], weighted)
    collections = example.collections_of(None, make_plan(tables=tables), tables)
    features, labels = example.make_batch(collections, 4000, generator)

    assert {path: of.keys() for path, of in features.items()} == {"plain": ["user", "item"], "weighted": ["country"]}
    assert features["plain"].weights_or_none() is None
    assert float(features["weighted"].weights().min()) >= 0.5
    means = [of.lengths().view(len(of.keys()), -1).float().mean(dim=1).tolist() for of in features.values()]
    assert [mean for of in means for mean in of] == pytest.approx([2.5, 1, 1], abs=0.05)
    assert set(labels.tolist()) == {0.0, 1.0}
    for of in features.values():
        for name in of.keys():  # noqa: SIM118 (it is no dict)
            ids = of[name].values()
            assert 0 <= int(ids.min()) <= int(ids.max()) < {table.name: table.rows for table in tables}[name]


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_trainer_that_is_killed_takes_its_ranks_with_it(tmp_path, number):
    store, mark = deployed(tmp_path, make_plan()), new_mark()
    process = begun(store, mark)
    assert len(alive(mark)) >= 3
    process.send_signal(number)
    assert wait_until(lambda: not alive(mark), HANGS), alive(mark)
    process.communicate()


@pytest.mark.parametrize("cap", ["100GiB", "1MiB"])
def test_tables_take_no_more_than_is_free_here(example, monkeypatch, cap):
    free = 4 * example.RANK_BYTES
    monkeypatch.setattr(example, "available_bytes", lambda: free)
    arguments = example.parse_arguments(["--store", "s", "--name", "m", "--memory", cap])
    left = int(example.SHARE_OF_AVAILABLE * free) - 2 * example.RANK_BYTES
    assert example.memory_for_tables(arguments, 2) == min(left, example.parse_bytes(cap))
    with refused(UsageError, "256.0 MiB", "4 ranks"):
        example.memory_for_tables(arguments, 4)


def test_where_no_process_can_be_started_the_error_names_the_limit(tmp_path, example, monkeypatch, capsys):
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(example.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", command(deployed(tmp_path, make_plan()))[1:])
    assert example.main() == 1
    assert (
        "no process can be started for one of 2 ranks: Resource temporarily unavailable; raise"
        in capsys.readouterr().err
    )


def test_a_machine_without_loopback_is_reported_the_way_out(tmp_path, example, monkeypatch, capsys):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(example, "loopback_address", lambda: "")
    monkeypatch.setattr(example.sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", command(deployed(tmp_path, make_plan()))[1:])
    assert example.main() == 1
    assert "bring it up (ip link set lo up)" in capsys.readouterr().err


MODEL = """
    import torch
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
    from torchrec.modules.feature_processor_ import PositionWeightedModule
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    def bags(*tables, **how):
        return EmbeddingBagCollection(tables=[
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, pooling=pooling)
            for name, rows, dim, features, pooling in tables], **how)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.ModuleDict({
                "user": bags(("id", 1000, 16, ["id", "friend"], PoolingType.SUM), ("age", 90, 8, ["age"], PoolingType.MEAN)),
                "item": bags(("id", 500, 8, ["item"], PoolingType.SUM), ("kind", 40, 8, ["item"], PoolingType.SUM)),
            })
            self.history = FeatureProcessedEmbeddingBagCollection(
                bags(("page", 300, 8, ["page"], PoolingType.SUM), is_weighted=True), {"page": PositionWeightedModule(9)})
            self.over = nn.Linear(7, 1)
"""


@pytest.mark.slow
def test_the_users_own_model_trains_as_the_plan_for_it_says(tmp_path, train, neuroshard):
    """Two tables of one name and two of one feature, several features, means, and position weights: tables, search, deploy,
    train."""
    (tmp_path / "their_model.py").write_text(textwrap.dedent(MODEL))
    for typed in (
        "tables --from-torchrec their_model:Model --pooling-factor tower.user.id=4 -o tables.json",
        "search tables.json --model analytic:cpu --batch-size 96 --devices 2 --memory 1GiB --rounds 3 -o plan.json",
        "deploy plan.json --store store --name m --tables tables.json",
    ):
        done = neuroshard(*typed.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = train(
        tmp_path / "store", "--steps", 40, "--learning-rate", 2.0, "--model", "their_model:Model", "--seen", 30
    )

    assert done.returncode == 0, done.stderr
    seen = neuroshard(*["releases", "--store", "store", "--name", "m", "--seen"], cwd=tmp_path).stdout
    assert "plan by what was seen: --model analytic:cpu*" in seen
    assert "5 tables in" in done.stderr
    assert " ms on one CPU core" in done.stdout
    first, last = (float(word) for word in re.search(r"loss: (\S+) -> (\S+)", done.stdout).groups())
    assert last < first
