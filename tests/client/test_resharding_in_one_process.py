"""What a checkpoint of some shards gives to others, by torch.distributed on one rank that holds all of them: the arithmetic of
weights and moments, from files and from host memory, and what is refused."""

import gc
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.state_dict_saver import save

from helpers.gloo import world
from helpers.refusals import refused
from helpers.trainers import cut_plan
from neuroshard.client.checkpoint import load_resharded
from neuroshard.client.checkpoint.in_memory import InMemory
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.table import Table

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

ROWS, COLUMNS, KEY = 6, 16, "m.embedding_bags.t.weight"
MOMENT = f"optimizer.state.{KEY}.t.momentum1"
Rectangle = tuple[int, int, int, int]  # first row, rows, first column, columns
WHOLE: list[Rectangle] = [(0, 6, 0, 16)]
HALVES: list[Rectangle] = [(0, 6, 0, 8), (0, 6, 8, 8)]
COLUMN_WISE: list[Rectangle] = [(0, 6, 0, 8), (0, 6, 8, 4), (0, 6, 12, 4)]
OTHER_COLUMNS: list[Rectangle] = [(0, 6, 0, 4), (0, 6, 4, 12)]
ROW_WISE: list[Rectangle] = [(0, 3, 0, 16), (3, 3, 0, 16)]
OTHER_ROWS: list[Rectangle] = [(0, 2, 0, 16), (2, 4, 0, 16)]
GRID: list[Rectangle] = [(0, 4, 0, 8), (4, 2, 0, 8), (0, 4, 8, 8), (4, 2, 8, 8)]
plan = partial(cut_plan, (Table(name="t", rows=ROWS, dim=COLUMNS, pooling_factor=1.0),), 1, batch_size=4)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with world(tmp_path_factory.mktemp("one") / "rendezvous", 0, 1):
        yield
    gc.collect()  # of the process group, while its threads are there


def sharded(parts: Sequence[tuple[list[int], Tensor]], *size: int) -> ShardedTensor:
    """A tensor of which this rank has all shards."""
    shards = [Shard(tensor, ShardMetadata(at, list(tensor.size()), "rank:0/cpu")) for at, tensor in parts]
    return ShardedTensor._init_from_local_shards(shards, *size)


def state(shards: Sequence[Rectangle], fill: float | None = None, kind: str = "row") -> dict[str, Any]:
    """A table's weights and moments, those of a row (one for each shard) or of an element, as TorchRec gives them. The moment of
    a row in a shard is 100 times the row and the shard's first column."""
    number = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    whole = torch.from_numpy(number if fill is None else np.full_like(number, fill))
    of_rows = sorted({first for _, _, first, _ in shards})
    by_element = [([row, first], whole[row : row + rows, first : first + n].clone()) for row, rows, first, n in shards]
    by_row = [
        (
            [of_rows.index(first) * ROWS + row],
            torch.tensor([100.0 * one + first if fill is None else fill for one in range(row, row + rows)]),
        )
        for row, rows, first, _ in shards
    ]
    twice = [(at, 2 * tensor) for at, tensor in by_element]
    moment = sharded(by_row, ROWS * len(of_rows)) if kind == "row" else sharded(twice, ROWS, COLUMNS)
    moments = {KEY: {"t.momentum1": moment}} if kind != "none" else {}
    return {"model": {KEY: sharded(by_element, ROWS, COLUMNS)}, "optimizer": {"state": moments}}


def copied(fill: float) -> dict[str, Any]:
    """A table of which every rank has a copy, which has no fused moments."""
    return {"model": {KEY: torch.full((ROWS, COLUMNS), fill)}, "optimizer": {"state": {}}}


@pytest.fixture(params=["files", "host memory"])
def resharded(request: Any, tmp_path: Path) -> Any:
    """Loads one state into another; the names of tables with other moments than before."""

    def load(old: dict[str, Any], new: dict[str, Any], **plans: Any) -> tuple[str, ...]:
        if request.param == "files":
            save(old, checkpoint_id=tmp_path)
            return load_resharded(new, tmp_path, **plans)
        group = dist.group.WORLD
        assert group is not None
        return load_resharded(new, "in memory", storage_reader=InMemory(group, old), group=group, **plans)

    return load


def parts(value: ShardedTensor) -> list[np.ndarray]:
    return [shard.tensor.numpy() for shard in value.local_shards()]


def moments(of: dict[str, Any]) -> list[list[float]]:
    return [part.tolist() for part in parts(of["optimizer"]["state"][KEY]["t.momentum1"])]


CUTS = [WHOLE, COLUMN_WISE, OTHER_COLUMNS, OTHER_ROWS, GRID]


@pytest.mark.parametrize("new", CUTS)
@pytest.mark.parametrize("old", CUTS)
def test_weights_and_moments_of_elements_go_to_any_shards_exactly(resharded: Any, old: Any, new: Any) -> None:
    found, wanted = state(new, -1.0, "element"), state(new, None, "element")
    assert resharded(state(old, None, "element"), found) == ()
    for key in ("model", "optimizer"):
        ours, theirs = found[key], wanted[key]
        ours, theirs = (one if key == "model" else one["state"][KEY] for one in (ours, theirs))
        for name, value in ours.items():
            assert [one.tolist() for one in parts(value)] == [one.tolist() for one in parts(theirs[name])]


def row(shard: float) -> list[float]:
    """The moments of all rows in a shard."""
    return [100.0 * one + shard for one in range(ROWS)]


@pytest.mark.parametrize(
    ("old", "new", "wanted", "exact"),
    [
        (COLUMN_WISE, COLUMN_WISE, [row(0), row(8), row(12)], True),
        (ROW_WISE, OTHER_ROWS, [row(0)[:2], row(0)[2:]], True),
        (HALVES, GRID, [row(0)[:4], row(0)[4:], row(8)[:4], row(8)[4:]], True),
        (GRID, HALVES, [row(0), row(8)], True),
        (COLUMN_WISE, WHOLE, [row((8 * 0 + 4 * 8 + 4 * 12) / 16)], False),  # shards joined: the mean, by their columns
        (WHOLE, COLUMN_WISE, 3 * [row(0)], False),  # parts of a shard: its own
        (COLUMN_WISE, OTHER_COLUMNS, [row(0), row((4 * 0 + 4 * 8 + 4 * 12) / 12)], False),
        (GRID, ROW_WISE, [row(4)[:3], row(4)[3:]], False),
    ],
)
def test_a_row_s_moment_is_the_mean_of_the_old_shards_by_the_columns_that_the_new_one_has_of_each(
    resharded: Any, old: Any, new: Any, wanted: list[list[float]], exact: bool
) -> None:
    found = state(new, -1.0)
    assert resharded(state(old), found) == (() if exact else ("t",))
    assert moments(found) == [pytest.approx(each, rel=1e-6) for each in wanted]


def test_a_table_that_only_one_plan_copies_keeps_its_weights_and_has_new_moments(resharded: Any) -> None:
    old, new = plan(copied={"t"}, cuts={}), plan(cuts={"t": [(8, 0), (8, 0)]})
    found = state(HALVES, -1.0)
    assert resharded(copied(5.0), found, old_plan=old) == ("t",)
    assert all((part == 5.0).all() for part in parts(found["model"][KEY]))
    assert moments(found) == 2 * [[0.0] * ROWS]
    back = copied(-1.0)
    assert resharded(state(HALVES), back, old_plan=new) == ("t",)
    assert torch.equal(back["model"][KEY].flatten(), torch.arange(96.0))


def test_in_host_memory_a_table_without_moments_is_known_to_have_been_copied(tmp_path: Path) -> None:
    """In a checkpoint in files it may be one whose moments were not saved."""
    group, found = dist.group.WORLD, state(WHOLE, -1.0)
    assert group is not None
    assert load_resharded(found, "", storage_reader=InMemory(group, copied(5.0)), group=group) == ("t",)
    assert moments(found) == [[0.0] * ROWS]
    save(copied(5.0), checkpoint_id=tmp_path)
    with refused(InvalidInput, MOMENT):
        load_resharded(state(WHOLE), tmp_path)


def test_what_leaves_a_device_is_read_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuroshard.client.checkpoint.in_memory.is_elsewhere", lambda storage: True)  # as on a GPU
    old, found, group = state(COLUMN_WISE), state(WHOLE, -1.0), dist.group.WORLD
    assert group is not None
    memory = InMemory(group, old)
    memory.free()
    assert all(not shard.tensor.untyped_storage().nbytes() for shard in old["model"][KEY].local_shards())
    assert load_resharded(found, "in memory", storage_reader=memory, group=group) == ("t",)
    assert parts(found["model"][KEY])[0].flatten().tolist() == list(range(96))
    memory.bring_back()
    assert moments(old) == [row(0), row(8), row(12)]


def without_weights() -> dict[str, Any]:
    return {"model": {"other": torch.zeros(1)}, "optimizer": state(HALVES)["optimizer"]}


@pytest.mark.parametrize(
    ("old", "new", "plans", "facts"),
    [
        (partial(state, HALVES, kind="none"), partial(state, HALVES), {}, (MOMENT, "another model or optimizer")),
        (partial(state, HALVES), partial(state, HALVES, kind="none"), {}, ("t.momentum1", "which the state lacks")),
        (partial(state, HALVES), partial(state, HALVES, kind="element"), {}, ("12", "6 x 16", "another optimizer")),
        (partial(state, HALVES), without_weights, {}, (MOMENT, "'t'", "without the weights")),
        (
            partial(state, HALVES),
            partial(state, WHOLE),
            {"old_plan": plan(cuts={"t": [(16, 0)]})},
            ("'t'", "2 shards", "columns 0-7"),
        ),
        (
            partial(state, HALVES),
            partial(state, HALVES),
            {"new_plan": plan(cuts={"t": [(16, 0)]})},
            ("'t'", "2 shards", "the model", "columns 0-7"),
        ),
        (
            partial(state, HALVES),
            partial(state, HALVES),
            {"new_plan": plan(copied={"t"}, cuts={})},
            ("'t'", "sharded in the model", "copied to every rank"),
        ),
    ],
    ids=["no moments", "moments left", "other moments", "no weights", "old plan", "new plan", "copied by the plan"],
)
def test_what_is_of_another_model_optimizer_or_plan_is_refused(
    tmp_path: Path, old: Any, new: Any, plans: dict[str, Any], facts: tuple[object, ...]
) -> None:
    save(old(), checkpoint_id=tmp_path)
    with refused(InvalidInput, *facts):
        load_resharded(new(), tmp_path, **plans)


def test_what_is_no_state_and_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with refused(UsageError, "model.state_dict()"):
        load_resharded([], tmp_path)  # type: ignore[arg-type]
    with refused(InvalidInput, str(tmp_path), ".metadata"):
        load_resharded(state(WHOLE), tmp_path)
