"""What a trainer's steps take: timed on real gloo ranks, and written to a store."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.plans import make_plan
from helpers.refusals import refused
from neuroshard.core.errors import UsageError
from neuroshard.core.plan import Plan, Provenance
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.seen.record import PARTS
from neuroshard.seen.stored import read_seen
from neuroshard.store.folder import FolderStore

torch = pytest.importorskip("torch")

from helpers.gloo import on_ranks  # noqa: E402
from helpers.step_cases import PIPELINES, StepCase, batches, held, sharded_model  # noqa: E402
from neuroshard.client.seen.watch import EXCHANGES, WARM_UP, Watch, WatchWarning, _OfRank, _Step, summary, watch_plan  # noqa: E402

EVERY, STEPS = 6, 3


def case_of(pipeline: Any, ranks: int = 2) -> StepCase:
    """A table that is read a lot on rank 0, one that is hardly read on the last rank, and one in blocks of rows."""
    tables = tuple(
        Table.model_validate(
            {
                "name": name,
                "module": "m",
                "rows": 2000,
                "dim": 32,
                "features": [{"name": f"f-{name}", "pooling_factor": pooling}],
                "pooling_factor": pooling,
                "optimizer_bytes_per_row": 0,
            }
        )
        for name, pooling in (("much", 400), ("little", 1), ("blocks", 1))
    )
    task = ShardingTask(tables=tables, device_memory_bytes=(2**30,) * ranks, batch_size=ranks * 256, step_ledger=1)
    ways = (("whole", 0), ("whole", ranks - 1), ("rows", 0))
    shards = tuple(
        shard
        for table, (way, first) in zip(tables, ways, strict=True)
        for shard in held(table, way, first, ranks, ranks)
    )
    provenance = Provenance(neuroshard_version="0", algorithm="by hand")
    return StepCase(Plan(task=task, shards=shards, provenance=provenance), pipeline, ranks)


def trained(
    rank: int, case: StepCase, store: str, steps: int, before: Callable[[int, Any, Watch], None] | None = None
) -> list[str]:
    """Warnings of a rank that trains so many steps, watched by a clock of its own CPU time, which others do not change."""
    time.perf_counter = time.thread_time
    model = sharded_model(case)
    made = batches(case.plan.task.tables, case.plan.task.batch_size // case.plan.task.devices, rank, steps + 2)
    with watched(model, case, [store], EVERY) as ((watch,), said):
        if case.pipeline == "none":
            for step, batch in zip(range(steps), made, strict=False):
                if before is not None:
                    before(step, model, watch)
                model(batch)[0].backward()
        else:
            pipeline = PIPELINES[case.pipeline](model, torch.optim.SGD([torch.zeros(1)]), torch.device("cpu"))
            for _ in range(steps):
                pipeline.progress(made)
    return said


@contextmanager
def watched(model: Any, case: StepCase, stores: list[str], every: int) -> Iterator[tuple[list[Watch], list[str]]]:
    """Watches of a model, one for each store, and at the end their warnings. TorchRec's functions are its own again then."""
    were, said = [vars(kind)["forward"] for kind in EXCHANGES], list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", WatchWarning)
        with ExitStack() as using:
            each = [watch_plan(model, case.plan, store, "m", every=every, steps=STEPS) for store in stores]
            yield [using.enter_context(one) for one in each], said
    assert were == [vars(kind)["forward"] for kind in EXCHANGES]
    said += [str(one.message) for one in caught]


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["none", "base", "sparse-dist"])
def test_every_rank_says_what_its_embeddings_took(pipeline: str, tmp_path: Path) -> None:
    case = case_of(pipeline)
    store = tmp_path / "store"
    assert on_ranks(2, tmp_path, trained, case, str(store), WARM_UP + 2 * EVERY + STEPS + 1) == [[], []]
    found = read_seen(FolderStore(store), "m")  # one after the first timed steps, and one at the end
    first, last = sorted(found, key=lambda one: one.steps)
    assert (first.steps, last.steps, first.job) == (STEPS, 2 * STEPS, last.job)
    assert {one.plan_digest for one in (first, last)} == {case.plan.digest()}
    assert last.versions.keys() >= {"torch", "torchrec"}
    for rank in last.ranks:
        assert list(rank.parts) == sorted(PARTS)
        assert all(ms > 0 for of_part in rank.parts.values() for ms in of_part)
        assert rank.waiting_ms[1] <= rank.embeddings_ms[1] <= last.step_ms[2]
    much, little = ([rank.parts[part][0] for part in PARTS] for rank in last.ranks)
    assert min(much[0] / little[0], much[3] / little[3]) > 1.5  # lookups, forward and backward


def evaluates(step: int, model: Any, _: Watch) -> None:
    if step == WARM_UP + 1:
        with torch.no_grad():
            model(next(batches(case_of("none").plan.task.tables, 256, 9, 1)))


@pytest.mark.slow
def test_steps_around_an_evaluation_are_not_counted(tmp_path: Path) -> None:
    steps = WARM_UP + EVERY + STEPS + 1
    on_ranks(2, tmp_path, trained, case_of("none"), str(tmp_path / "store"), steps, evaluates)
    (seen,) = read_seen(FolderStore(tmp_path / "store"), "m")
    assert seen.steps == STEPS  # of the second time alone


def takes_another(step: int, _: Any, watch: Watch) -> None:
    if step == WARM_UP + EVERY + 1:  # between two timed steps
        watch.now_by(make_plan("another"))


@pytest.mark.slow
def test_of_two_plans_each_has_its_own_steps(tmp_path: Path) -> None:
    case, steps = case_of("none"), WARM_UP + 2 * EVERY + STEPS + 1
    on_ranks(2, tmp_path, trained, case, str(tmp_path / "store"), steps, takes_another)
    found = read_seen(FolderStore(tmp_path / "store"), "m")
    assert {one.plan_digest: one.steps for one in found} == {
        case.plan.digest(): STEPS,
        make_plan("another").digest(): STEPS,
    }


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, where a folder should be")
    first, other = on_ranks(2, tmp_path, trained, case_of("none"), str(tmp_path / "store"), WARM_UP + STEPS + 1)
    assert "what steps took is not in the store" in first[0]
    assert "training goes on" in first[0]
    assert other == []


def watched_twice(rank: int, case: StepCase, stores: list[str], accumulated: int) -> list[str]:
    model = sharded_model(case)
    made = batches(case.plan.task.tables, case.plan.task.batch_size // case.plan.task.devices, rank, 100)
    with watched(model, case, stores, EVERY + STEPS) as (_, said):
        for _ in range(0, WARM_UP + 2 * EVERY + 3 * STEPS, accumulated):
            for loss in [model(next(made))[0] for _ in range(accumulated)]:
                loss.backward()
    return said


@pytest.mark.slow
def test_of_two_that_watch_one_times_at_once(tmp_path: Path) -> None:
    stores = [str(tmp_path / name) for name in ("first", "second")]
    assert on_ranks(2, tmp_path, watched_twice, case_of("none"), stores, 1) == [[], []]
    counts = [sum(one.steps for one in read_seen(FolderStore(Path(store)), "m")) for store in stores]
    assert counts == [2 * STEPS, 2 * STEPS]


@pytest.mark.slow
def test_forwards_whose_backwards_come_later_are_not_taken_for_steps(tmp_path: Path) -> None:
    first, other = on_ranks(2, tmp_path, watched_twice, case_of("none"), [str(tmp_path / "store")], 3)
    assert "a forward and no backward" in first[0]
    assert other == []
    assert not (tmp_path / "store" / "m").exists()


@pytest.mark.slow
def test_too_few_steps_are_said(tmp_path: Path) -> None:
    first, _ = on_ranks(2, tmp_path, trained, case_of("none"), str(tmp_path / "store"), 3)
    assert "of the model's 3 forwards none were timed" in first[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"every": 5, "steps": 5}, "steps is 5 of every 5"),
        ({"steps": 0}, "steps is 0"),
        ({"every": 2.5}, "every is 2.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"wait_seconds": "10"}, "wait_seconds"),
        ({}, "no sharded collection"),
    ],
)
def test_what_cannot_be_watched_is_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with refused(UsageError, says), watch_plan(torch.nn.Linear(1, 1), make_plan(), tmp_path, "m", **given):
        pass


def step(whole: float, *parts: tuple[float, ...]) -> _Step:
    return _Step(whole, {part: list(ms) for part, ms in zip(PARTS, parts, strict=True)})


def test_waiting_is_what_exchanges_take_longer_than_for_the_last_to_come() -> None:
    ranks = [
        _OfRank([step(20, (1, 2), (3, 4), (5,), (6,))], 100, 200),
        _OfRank([step(19, (1,), (1, 6), (8,), (2,))], None, None),
    ]
    found = summary([ranks])
    assert [one.waiting_ms[1] for one in found["ranks"]] == [2 + 0 + 0, 0 + 2 + 3]
    assert [one.embeddings_ms[1] for one in found["ranks"]] == [21, 18]
    assert (found["steps"], found["step_ms"], found["embeddings_ms"]) == (1, (20, 20, 20), (21, 21, 21))
    assert (found["ranks"][0].allocated_bytes, found["ranks"][0].reserved_bytes) == (100, 200)
