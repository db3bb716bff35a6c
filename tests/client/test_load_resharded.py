"""Real TorchRec trainers on gloo that go on under another plan: what they load, and what they train then."""

import re
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from helpers.gloo import on_ranks
from helpers.sharded import local_parts, sharded, sharders_of, table_of
from helpers.trainers import Saved, cut_plan
from neuroshard.client.checkpoint import load_resharded
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.moves import changed_state
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table

pytestmark = pytest.mark.slow

STEPS, SAMPLES = 6, 12
TABLES = tuple(
    Table(name=name, rows=rows, dim=dim, pooling_factor=2.0)
    for name, rows, dim in (("user", 40, 16), ("shop", 23, 8), ("page", 11, 8))
)
plan = partial(cut_plan, TABLES, batch_size=SAMPLES)
CUT = plan(2, {"user": [(8, 1), (4, 0), (4, 0)], "shop": [], "page": [(8, 0)]})
WIDER = plan(2, {"user": [(4, 0), (12, 1)], "shop": [(8, 1)], "page": []})
WHOLE = plan(2, {"user": [(16, 0)], "shop": [(8, 0)], "page": [(8, 1)]})
MOVED = plan(2, {"user": [(8, 0), (4, 1), (4, 1)], "shop": [(8, 1)], "page": []})  # CUT's columns, elsewhere
FOUR = plan(4, {"user": [(4, 3), (4, 2), (4, 0), (4, 0)], "shop": [], "page": [(4, 1), (4, 3)]})


class Model(nn.Module):
    """Pooled embeddings by name, of two collections."""

    def __init__(self, tables: tuple[Table, ...], device: str) -> None:
        super().__init__()
        self.first = self.collection(tables[:1], device)
        self.rest = nn.ModuleDict({"deep": self.collection(tables[1:], device)})

    @staticmethod
    def collection(tables: tuple[Table, ...], device: str) -> EmbeddingBagCollection:
        configs = [
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in tables
        ]
        return EmbeddingBagCollection(tables=configs, device=torch.device(device))

    def forward(self, features: dict[str, KeyedJaggedTensor]) -> dict[str, Tensor]:
        return self.first(features["first"]).to_dict() | self.rest["deep"](features["rest"]).to_dict()


def batch(step: int, rank: int, ranks: int) -> tuple[dict[str, KeyedJaggedTensor], dict[str, Tensor]]:
    """This rank's samples of a step, and what their tables shall give: the same for any number of ranks in all."""
    generator = torch.Generator().manual_seed(step)
    ids = {table.name: torch.randint(table.rows, (SAMPLES, 2), generator=generator) for table in TABLES}
    wanted = {table.name: torch.randn(SAMPLES, table.dim, generator=generator) for table in TABLES}
    mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)

    def jagged(*names: str) -> KeyedJaggedTensor:
        values = torch.cat([ids[name][mine].flatten() for name in names])
        return KeyedJaggedTensor(keys=list(names), values=values, lengths=torch.full((len(values) // 2,), 2))

    return {"first": jagged("user"), "rest": jagged("shop", "page")}, {name: of[mine] for name, of in wanted.items()}


class Trainer(Saved):
    def __init__(self, given: Plan, optimizer: str) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        meta = Model(given.task.tables, "meta")
        self.model = sharded(meta, to_torchrec(given, meta), sharders_of(optimizer))
        generator = torch.Generator().manual_seed(7)
        whole = {t.name: torch.rand(t.rows, t.dim, generator=generator) for t in given.task.tables}
        for key, place, part in local_parts(self.model.state_dict()):
            part.copy_(whole[table_of(key)][place])

    def train(self, first: int, end: int) -> list[float]:
        """The losses of all ranks together, step by step."""
        losses = []
        for step in range(first, end):
            features, wanted = batch(step, dist.get_rank(), dist.get_world_size())
            pooled = self.model(features)
            loss = torch.stack([(value - wanted[name]).square().mean() for name, value in pooled.items()]).sum()
            loss.backward()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(float(mean))
        return losses

    def weights(self) -> dict[str, np.ndarray]:
        """Whole tables, of all ranks' shards."""
        return summed(local_parts(self.model.state_dict()))

    def moments(self) -> dict[str, np.ndarray]:
        """Row-wise Adagrad's moments of every element of a table: its row's in its shard."""
        state = self.model.fused_optimizer.state_dict()["state"].values()
        of = {name.partition(".")[0]: iter(value.local_shards()) for each in state for name, value in each.items()}
        own = local_parts(self.model.state_dict())
        return summed((key, place, next(of[table_of(key)]).tensor[:, None]) for key, place, _ in own)


def summed(parts: Iterable[tuple[str, tuple[slice, ...], Tensor]]) -> dict[str, np.ndarray]:
    """Whole tables, of the parts that all ranks have."""
    found = {table.name: torch.zeros(table.rows, table.dim) for table in TABLES}
    for key, place, part in parts:
        found[table_of(key)][place] = part
    for whole in found.values():
        dist.all_reduce(whole)
    return {name: whole.numpy() for name, whole in found.items()}


def go_on(rank: int, old: Plan, new: Plan, optimizer: str, folder: Path) -> dict[str, Any]:
    """Train, save, load under the new plan, and train on; and what the uninterrupted training of the old plan loses."""
    trainer = Trainer(old, optimizer)
    trainer.train(0, STEPS)
    before, moments = trainer.weights(), trainer.moments() if optimizer == "rowwise_adagrad" else {}
    save(trainer.state(), checkpoint_id=folder)
    changed = Trainer(new, optimizer)
    changed.train(0, 1)  # what a model had before must not stay
    estimated = load_resharded(changed.state(), folder, old_plan=old, new_plan=new)
    weights = changed.weights()
    return {
        "estimated": estimated,
        "same_weights": all(np.array_equal(before[name], weights[name]) for name in before),
        "moments": (moments, changed.moments() if moments else {}),
        "uninterrupted": trainer.train(STEPS, 2 * STEPS),
        "losses": changed.train(STEPS, 2 * STEPS),
        "without_moments": weights_only(new, optimizer, folder).train(STEPS, 2 * STEPS),
    }


def weights_only(new: Plan, optimizer: str, folder: Path) -> Trainer:
    trainer = Trainer(new, optimizer)
    load({"model": trainer.model.state_dict()}, checkpoint_id=folder)
    return trainer


def inexact(found: list[dict[str, Any]]) -> set[str]:
    return {name for of_rank in found for name in of_rank["estimated"]}


@pytest.mark.parametrize(("optimizer", "old", "new"), [("sgd", CUT, WIDER), ("adagrad", WIDER, CUT)])
def test_a_plan_with_other_cuts_goes_on_exactly_where_the_optimizer_keeps_nothing_by_the_row(
    tmp_path, optimizer, old, new
):
    found = on_ranks(2, tmp_path, go_on, old, new, optimizer, tmp_path / "saved")

    assert inexact(found) == set()
    for each in found:
        assert each["same_weights"]
        assert each["losses"] == pytest.approx(each["uninterrupted"], rel=1e-5)


@pytest.mark.parametrize("new", [WIDER, WHOLE, MOVED])
def test_row_wise_adagrad_goes_on_within_noise_and_exactly_where_the_cuts_are_the_same(tmp_path, new):
    found = on_ranks(2, tmp_path, go_on, CUT, new, "rowwise_adagrad", tmp_path / "saved")

    assert inexact(found) == set(changed_state(CUT, new)) == (set() if new is MOVED else {"user"})
    for each in found:
        assert each["same_weights"]
        noise = 1e-5 if new is MOVED else 2e-3
        assert each["losses"] == pytest.approx(each["uninterrupted"], rel=noise)
        assert each["without_moments"] != pytest.approx(each["uninterrupted"], rel=0.02)
        before, after = each["moments"]
        for name in before:
            if name not in inexact(found):
                assert np.array_equal(before[name], after[name])
            else:  # the sum of a row's squared gradients stays, whatever the cuts
                assert np.allclose(before[name].sum(1), after[name].sum(1)) or new is WIDER
    if new is WIDER:
        gets_the_mean_by_columns(*found[0]["moments"])


def gets_the_mean_by_columns(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    """A wider shard has the mean of the old moments by their columns."""
    eight, four, last = (before["user"][:, column] for column in (0, 8, 12))
    assert eight.min() != eight.max()
    assert not np.array_equal(eight, four)
    assert not np.array_equal(four, last)
    assert np.array_equal(after["user"][:, 0], eight)
    assert np.allclose(after["user"][:, 4], (4 * eight + 4 * four + 4 * last) / 12)


def save_only(rank: int, old: Plan, folder: Path) -> tuple[dict[str, np.ndarray], list[float]]:
    trainer = Trainer(old, "rowwise_adagrad")
    trainer.train(0, STEPS)
    save(trainer.state(), checkpoint_id=folder)
    return trainer.weights(), trainer.train(STEPS, 2 * STEPS)


def load_only(rank: int, old: Plan, new: Plan, folder: Path) -> tuple[dict[str, np.ndarray], list[float]]:
    trainer = Trainer(new, "rowwise_adagrad")
    load_resharded(trainer.state(), folder, old_plan=old, new_plan=new)
    return trainer.weights(), trainer.train(STEPS, 2 * STEPS)


@pytest.mark.parametrize(("old", "new"), [(FOUR, CUT), (WIDER, FOUR)])
def test_another_number_of_ranks_goes_on(tmp_path, old, new):
    for name in "old", "new":
        (tmp_path / name).mkdir()
    folder = tmp_path / "saved"
    weights, uninterrupted = on_ranks(old.task.devices, tmp_path / "old", save_only, old, folder)[0]
    for loaded, losses in on_ranks(new.task.devices, tmp_path / "new", load_only, old, new, folder):
        assert all(np.array_equal(weights[name], loaded[name]) for name in weights)
        assert losses == pytest.approx(uninterrupted, rel=2e-3)


def by_the_docs(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of an uninterrupted run, and of one that goes on as the two snippets of docs/replan.md say."""
    page = (Path(__file__).parents[2] / "docs" / "replan.md").read_text().replace("ckpt/1200", str(folder))
    section = page.partition("## A checkpoint under another plan")[2].partition("\n## ")[0]
    saving, loading = re.findall(r"```python\n(.*?)```", section, re.S)
    old, new = Trainer(CUT, "rowwise_adagrad"), Trainer(WHOLE, "rowwise_adagrad")
    old.train(0, STEPS)
    exec(saving, {"model": old.model, "plan": CUT})
    made: dict[str, Any] = {"model": new.model}
    exec(saving.partition("save({**state")[0], made)
    exec(loading, {**made, "plan": WHOLE})
    return old.train(STEPS, 2 * STEPS), new.train(STEPS, 2 * STEPS)


def test_the_snippets_of_the_docs_run(tmp_path):
    for uninterrupted, losses in on_ranks(2, tmp_path, by_the_docs, tmp_path / "saved"):
        assert losses == pytest.approx(uninterrupted, rel=2e-3)


def as_objects(rank: int, folder: Path) -> tuple[bool, list[str]]:
    """Whether a state of modules and optimizers themselves, as torch takes them, is loaded; and what is said of what it lacks."""
    old, new = Trainer(CUT, "rowwise_adagrad"), Trainer(MOVED, "rowwise_adagrad")
    old.train(0, STEPS)
    adam = KeyedOptimizerWrapper({"over": nn.Parameter(torch.ones(2))}, torch.optim.Adam)
    adam.init_state()
    layers = {**old.model.state_dict(), "over": torch.ones(2), "over.bias": torch.ones(1)}
    save({"model": layers, "optimizer": old.model.fused_optimizer, "dense": adam}, checkpoint_id=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_resharded({"model": new.model, "optimizer": new.model.fused_optimizer}, folder, new_plan=MOVED)
    return old.train(STEPS, 7) == new.train(STEPS, 7), [str(one.message) for one in caught]


def test_modules_may_be_given_themselves_and_what_is_not_loaded_is_said(tmp_path):
    (same, said), other = on_ranks(2, tmp_path, as_objects, tmp_path / "saved")

    assert same
    assert other == (True, [])
    assert [words.partition(" has ")[2].partition(";")[0] for words in said] == [
        "'dense.state.over.step' (and 2 more), which the state lacks: what this optimizer has learned is lost",
        "'model.over' (and 1 more), which the state lacks: it is not loaded",
    ]


class Named:
    """A trainer's state as one object, its optimizers by name."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        named = CombinedOptimizer([("sparse", self.trainer.model.fused_optimizer)])
        return {"model": self.trainer.model.state_dict(), "optimizer": named.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # its tensors are the trainer's own


def by_name(rank: int, folder: Path) -> list[tuple[tuple[str, ...], dict[str, np.ndarray]]]:
    """What was estimated, and the moments, of a checkpoint by the optimizer's own keys and of one by an optimizer's name."""
    trainer, found = Trainer(CUT, "rowwise_adagrad"), []
    trainer.train(0, STEPS)
    save(trainer.state(), checkpoint_id=folder / "own")
    save({"model": Named(trainer)}, checkpoint_id=folder / "named")
    for kind in ("own", "named"):
        new = Trainer(WIDER, "rowwise_adagrad")
        state = new.state() if kind == "own" else {"model": Named(new)}
        found.append((load_resharded(state, folder / kind, old_plan=CUT, new_plan=WIDER), new.moments()))
    return found


def test_optimizers_may_have_names_and_the_state_may_be_one_object(tmp_path):
    for (estimated, moments), (estimated_by_name, by_names) in on_ranks(2, tmp_path, by_name, tmp_path / "saved"):
        assert estimated == estimated_by_name != ()
        assert all(np.array_equal(moments[name], by_names[name]) for name in moments)


def in_folders(rank: int, folder: Path) -> dict[str, Any]:
    """Weights and moments of a checkpoint in one folder and of the same in two, and what is said where they are read apart."""
    old, new = Trainer(CUT, "rowwise_adagrad"), Trainer(WIDER, "rowwise_adagrad")
    old.train(0, 2)
    state = old.state()
    save(state, checkpoint_id=folder / "one")
    for name, values in {**state, "meta": {"plan": CUT.digest()}}.items():
        save(values, checkpoint_id=folder / "two" / name)
    found: dict[str, Any] = {}
    readers: dict[str, Any] = {"one": None, "two": None, "by fsspec": FsspecReader(folder / "two")}
    for name, reader in readers.items():
        loaded = Trainer(WIDER, "rowwise_adagrad").state()
        where = folder / ("one" if name == "one" else "two")
        inexact = load_resharded(loaded, where, old_plan=CUT, new_plan=WIDER, storage_reader=reader)
        found[name] = inexact, numbers(loaded)
    state = new.state()
    refused: dict[str, tuple[dict[str, Any], str]] = {
        "moments alone": (state["optimizer"], "two/optimizer"),
        "no moments": ({"model": state["model"]}, "two"),
        "other names": ({"dense": state["model"], "optim": state["optimizer"]}, "two"),
        "one other name": ({"model": state["model"], "optim": state["optimizer"]}, "two"),
        "other keys": (state, "two/model"),
    }
    before = numbers(state)
    for name, cut in {"cut": "optimizer", "no weights": "model"}.items():
        refused[name] = state, name
        for part in ("model", "optimizer"):
            save(state[part], checkpoint_id=folder / name / part)
        if rank == 0:
            (folder / name / cut / ".metadata").unlink()
    refused["absent"] = state, "absent"
    save(state["model"], checkpoint_id=folder / "absent" / "model")
    refused["twice"] = state, "twice"
    save(state, checkpoint_id=folder / "twice")
    save(state["optimizer"], checkpoint_id=folder / "twice" / "optimizer")
    dist.barrier()
    for name, (given, inside) in refused.items():
        with pytest.raises(InvalidInput) as caught:
            load_resharded(given, folder / inside)
        found[name] = str(caught.value)
    assert before == numbers(state)
    return found


def numbers(state: dict[str, Any]) -> dict[str, list[Any]]:
    """The weights and moments of this rank, by table."""
    moments = {k: v for of in state["optimizer"]["state"].values() for k, v in of.items()}
    values = (state["model"] | moments).items()
    return {name: [shard.tensor.tolist() for shard in value.local_shards()] for name, value in values}


def test_weights_and_moments_in_folders_of_their_own_are_read_together(tmp_path):
    for found in on_ranks(2, tmp_path, in_folders, tmp_path / "saved"):
        assert found["one"] == found["two"] == found["by fsspec"]
        for name, words in {
            "moments alone": ("without the weights", "together", "folder"),
            "no moments": ("momentum1", "the state lacks"),
            "other names": ("no checkpoint here", "meta/, model/, optimizer/"),
            "one other name": ("'optim.state", "it has 'optimizer.state"),
            "other keys": ("has no 'model.", "it has 'first.embedding_bags"),
            "cut": ("optimizer/ is missing or unfinished", ".metadata"),
            "absent": ("optimizer/ is missing or unfinished", ".metadata"),
            "no weights": ("model/ is missing or unfinished", ".metadata"),
            "twice": ("twice has a checkpoint of its own (.metadata)", "others in optimizer/", "remove"),
        }.items():
            assert all(word in found[name] for word in words), found[name]


def by_torch_alone(rank: int, old: Plan, new: Plan, folder: Path) -> str | bool:
    """What torch.distributed.checkpoint says of it; or whether it took other columns' moments."""
    trainer, other = Trainer(old, "rowwise_adagrad"), Trainer(new, "rowwise_adagrad")
    trainer.train(0, STEPS)
    save(trainer.state(), checkpoint_id=folder)
    try:
        load(other.state(), checkpoint_id=folder)
    except CheckpointException as error:
        return str(error)
    taken = other.moments()["user"]
    load_resharded(other.state(), folder, storage_reader=FileSystemReader(folder))
    return not np.allclose(taken, other.moments()["user"])


def test_torch_alone_still_refuses_other_cuts_or_takes_moments_of_other_columns(tmp_path):
    """Where this fails, TorchRec was mended, and load_resharded may go."""
    assert "Size mismatch" in on_ranks(2, tmp_path, by_torch_alone, CUT, WIDER, tmp_path / "saved")[0]
    other = plan(2, {"user": [(4, 0), (4, 0), (8, 1)], "shop": [], "page": [(8, 0)]})
    (tmp_path / "as_many").mkdir()
    folder = tmp_path / "as_many"
    assert on_ranks(2, folder, by_torch_alone, CUT, other, folder / "saved") == [True, True]


def with_table(given: Plan, **changes: object) -> Plan:
    """The plan for a model whose first table is another one."""
    first = given.task.tables[0].model_copy(update=changes)
    shards = [
        s.model_copy(update={"table": first.name, "rows": first.rows}) if s.table == TABLES[0].name else s
        for s in given.shards
    ]
    task = given.task.model_copy(update={"tables": (first, *given.task.tables[1:])})
    return Plan(task=task, shards=tuple(shards), provenance=given.provenance)


def refusals(rank: int, folder: Path) -> dict[str, str]:
    """What is said of bad input, by what is bad."""
    save(Trainer(CUT, "rowwise_adagrad").state(), checkpoint_id=folder)
    save(Trainer(CUT, "sgd").state(), checkpoint_id=folder / "sgd")
    state, weights = Trainer(WIDER, "rowwise_adagrad").state(), Trainer(WIDER, "rowwise_adagrad").model.state_dict()
    two = cut_plan(TABLES[:2], 2, {"user": [(16, 0)], "shop": []}, batch_size=SAMPLES)
    fewer = Trainer(two, "rowwise_adagrad").state()
    grouped = Trainer(WIDER, "rowwise_adagrad")
    grouped.model.fused_optimizer.save_param_groups(True)
    cases: dict[str, tuple[dict[str, Any], Path, dict[str, Any]]] = {
        "absent": (state, folder / "none", {}),
        "old plan": (state, folder, {"old_plan": WHOLE}),
        "new plan": (state, folder, {"old_plan": CUT, "new_plan": CUT}),
        "ranks": (state, folder, {"new_plan": FOUR}),
        "other model": (Trainer(with_table(CUT, name="item"), "sgd").state(), folder, {}),
        "other rows": (Trainer(with_table(CUT, rows=41), "rowwise_adagrad").state(), folder, {}),
        "other plan's model": (state, folder, {"old_plan": with_table(CUT, name="item")}),
        "no optimizer given": ({"model": weights}, folder, {}),
        "other optimizer": (state, folder / "sgd", {}),
        "adagrad": (Trainer(WIDER, "adagrad").state(), folder, {}),
        "no weights": ({}, folder, {}),
        "two models": ({"model": weights, "teacher": Trainer(CUT, "sgd").model.state_dict()}, folder, {}),
        "fewer tables": (fewer, folder, {}),
        "groups": (grouped.state(), folder, {}),
    }
    said = {}
    before = Trainer(WIDER, "rowwise_adagrad").model.state_dict()["first.embedding_bags.user.weight"].local_shards()
    for name, (given, where, plans) in cases.items():
        with pytest.raises(InvalidInput) as caught:
            load_resharded(given, where, **plans)
        said[name] = str(caught.value).replace(str(folder), "FOLDER")
    now = state["model"]["first.embedding_bags.user.weight"].local_shards()
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(before, now, strict=True))
    with pytest.raises(UsageError, match="the state is Model"):
        load_resharded(Model(TABLES, "meta"), folder)  # type: ignore[arg-type]
    for file in folder.glob("*.distcp"):
        file.write_bytes(b"broken")
    dist.barrier()
    with pytest.raises(InvalidInput) as caught:
        load_resharded(state, folder)
    said["broken"] = str(caught.value).replace(str(folder), "FOLDER")
    return said


def test_bad_input_is_one_line_the_same_on_every_rank(tmp_path):
    one, other = on_ranks(2, tmp_path, refusals, tmp_path / "saved")

    assert one == other
    assert not any("\n" in line for line in one.values())
    for name, words in {
        "absent": "FOLDER/none: rank 0 finds no checkpoint here",
        "old plan": "table 'user' is in 3 shards (rows 0-39 of columns 0-7) in checkpoint FOLDER, but in 1 (rows 0-39 of "
        f"columns 0-15) by plan {WHOLE.digest()[:12]}",
        "new plan": "table 'user' is in 2 shards (rows 0-39 of columns 0-3) in the model, but in 3 (rows 0-39",
        "ranks": f"plan {FOUR.digest()[:12]} is for 4 ranks, but the trainer has 2",
        "other model": "has no 'model.first.embedding_bags.item.weight', which the state has",
        "other rows": "table 'user' is 40 x 16 in checkpoint FOLDER, but 41 x 16 in the model",
        "other plan's model": "checkpoint FOLDER has table 'user', which plan",
        "no optimizer given": "has optimizer state 'user.momentum1', which the state lacks",
        "other optimizer": "checkpoint FOLDER/sgd has no 'optimizer.state.first.embedding_bags.user.weight.user.momentum1'",
        "adagrad": "has 120 values of 'optimizer.state.first.embedding_bags.user.weight.user.momentum1', and the state 40 x 16",
        "no weights": "the state has no weights of sharded tables",
        "fewer tables": "checkpoint FOLDER has table 'page', which the model lacks",
        "groups": "the state has 'optimizer.param_groups.0.params', a group of the fused optimizer with 'first.embedding_bags."
        "user.weight', and groups are those of one rank under one plan: call model.fused_optimizer.save_param_groups(False)",
        "two models": "the state has table 'user' twice, as 'model.first.embedding_bags.user.weight' and 'teacher.first.embedd",
        "broken": "checkpoint FOLDER cannot be loaded: rank 0: ",
    }.items():
        assert words in one.pop(name), name
    assert not one
