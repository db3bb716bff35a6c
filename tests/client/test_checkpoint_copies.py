"""A checkpoint of tables that are copied to every rank under one plan, and sharded under the other. Two have one name."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from helpers.gloo import on_ranks
from helpers.sharded import sharded, sharders_of
from helpers.trainers import Saved, cut_plan
from neuroshard.client.checkpoint import load_resharded
from neuroshard.client.torchrec import ShardingWarning, to_torchrec
from neuroshard.core.errors import InvalidInput
from neuroshard.core.moves import changed_state
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table

pytestmark = pytest.mark.slow

ROWS = 12
TABLES = tuple(Table(name=name, module=name[0], rows=ROWS, dim=8, pooling_factor=1.0) for name in ("m.a", "b", "n.a"))
plan = partial(cut_plan, TABLES, 2, batch_size=8)
SHARDED = plan({"m.a": [(8, 0)], "b": [(8, 1)], "n.a": [(8, 1)]})
SOME = plan({"m.a": [], "b": [(8, 1)], "n.a": [(8, 1)]}, copied={"m.a"})
ALL = plan({}, copied={"m.a", "b", "n.a"})


class Trainer(Saved):
    def __init__(self, given: Plan, optimizer: str = "rowwise_adagrad") -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        meta = nn.ModuleDict({"m": self.collection("a", "b"), "n": self.collection("a")})
        self.model = sharded(meta, to_torchrec(given, meta), sharders_of(optimizer))

    @staticmethod
    def collection(*names: str) -> EmbeddingBagCollection:
        configs = [EmbeddingBagConfig(name=n, num_embeddings=ROWS, embedding_dim=8, feature_names=[n]) for n in names]
        return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def train(self) -> None:
        """A step; gradients of copies are left to a dense optimizer, which this trainer has not."""
        ids = torch.arange(ROWS)
        for path, names in (("m", ["a", "b"]), ("n", ["a"])):
            jagged = KeyedJaggedTensor(
                keys=names, values=ids.repeat(len(names)), lengths=torch.ones(ROWS * len(names), dtype=torch.int64)
            )
            self.model.module[path](jagged).values().square().sum().backward()

    def tensors(self, of: str) -> dict[str, Tensor]:
        """What this rank has of the model's tables, or of their moments."""
        found: dict[str, Tensor] = {}
        for key, value in self.state()[of].items() if of == "model" else self.moments():
            shards = [part.tensor for part in value.local_shards()] if hasattr(value, "local_shards") else [value]
            if shards:
                found[key] = torch.cat([part.detach().clone() for part in shards])
        return found

    def moments(self) -> list[tuple[str, Any]]:
        return [(key, one) for key, each in self.state()["optimizer"]["state"].items() for one in each.values()]


def of_dense(trainer: Trainer) -> dict[str, Any]:
    """The state of an optimizer of copies, which has the names of their weights, as that of a fused one."""
    dense = dict(in_backward_optimizer_filter(trainer.model.named_parameters()))
    return KeyedOptimizerWrapper(dense, _adam).state_dict() if dense else {}


def _adam(parameters: Any) -> torch.optim.Adam:
    made = torch.optim.Adam(parameters, lr=0.01)
    made.step()
    return made


def go_on(rank: int, old: Plan, new: Plan, old_plan: Plan | None, folder: Path) -> tuple[set[str], set[str], float]:
    """The tables that are said to be inexact, those whose moments are zeros, and how far the weights of whole tables are off."""
    trainer = Trainer(old)
    trainer.train()
    save(trainer.state() | {"dense": of_dense(trainer)}, checkpoint_id=folder)
    changed = Trainer(new)
    changed.train()  # what a model had before must not stay
    state = changed.state() | {"dense": of_dense(changed)}
    said = load_resharded(state, folder, old_plan=old_plan, new_plan=new if old_plan else None)
    anew = {key for key, moment in changed.tensors("optimizer").items() if moment.numel() and not moment.any()}
    before, after = trainer.tensors("model"), changed.tensors("model")
    both = [key for key in before if key in after and before[key].shape == after[key].shape]
    assert both
    return set(said), anew, max(float((before[key] - after[key]).abs().max()) for key in both)


@pytest.mark.parametrize("given", [True, False], ids=["plans given", "not given"])
@pytest.mark.parametrize(
    ("old", "new", "turned"),
    [(SHARDED, SOME, {"m.a"}), (SOME, SHARDED, {"m.a"}), (SHARDED, ALL, {"m.a", "b", "n.a"})],
    ids=["one becomes copies", "one was copies", "all become copies"],
)
def test_moments_start_anew_and_it_is_said(old: Plan, new: Plan, turned: set[str], given: bool, tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, go_on, old, new, old if given else None, tmp_path / "saved")
    said, anew, off = (set().union(*(rank[0] for rank in found)), set().union(*(rank[1] for rank in found)), found)
    assert said == turned == set(changed_state(old, new))
    assert anew == ({"m.embedding_bags.a.weight"} if new is SHARDED else set())
    assert max(rank[2] for rank in off) == 0


def of_copies(rank: int, folder: Path) -> dict[str, Any]:
    """What is said where all tables were copies, so that the checkpoint has no moments at all."""
    save(Trainer(ALL).state(), checkpoint_id=folder)
    state = Trainer(SHARDED).state()
    with pytest.raises(InvalidInput) as unknown:
        load_resharded(state, folder)
    with pytest.raises(InvalidInput) as other:
        load_resharded(state, folder, old_plan=ALL, new_plan=ALL)
    with pytest.raises(InvalidInput) as sharded:
        load_resharded(Trainer(ALL).state(), folder, new_plan=SHARDED)
    sgd = "sgd"
    return {
        "given": load_resharded(state, folder, old_plan=ALL, new_plan=SHARDED),
        "sgd": load_resharded(Trainer(SHARDED, sgd).state(), folder, old_plan=ALL, new_plan=SHARDED),
        "unknown": str(unknown.value),
        "other": str(other.value),
        "sharded": str(sharded.value),
    }


def test_where_all_were_copies_the_old_plan_must_be_given(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, of_copies, tmp_path / "saved")
    assert (first["given"], second["given"]) == (("m.a",), ("b", "n.a"))
    assert first["sgd"] == second["sgd"] == ()
    assert "give old_plan" in first["unknown"]
    assert "is sharded in the model, but copied to every rank by plan" in first["other"]
    assert "is copied to every rank in the model, but sharded by plan" in first["sharded"]


def on_one_rank(rank: int) -> tuple[list[str], float]:
    """The dense parameters of a model whose table `a` of `m` is copied to its one rank, and how much its gradient is."""
    of_one = cut_plan(TABLES, 1, {"b": [(8, 0)], "n.a": [(8, 0)]}, batch_size=8, copied={"m.a"})
    trainer = Trainer(of_one)
    trainer.train()
    dense = {n: p for n, p in trainer.model.named_parameters() if not hasattr(p, "_in_backward_optimizers")}
    return list(dense), float(next(iter(dense.values())).grad.abs().sum())


def test_a_copied_table_on_one_rank_is_the_dense_optimizer_s(tmp_path: Path) -> None:
    ((names, gradient),) = on_ranks(1, tmp_path, on_one_rank)
    assert names == ["m.embedding_bags.a.weight"]
    assert gradient > 0


@pytest.mark.parametrize("given", [{}, {"dense": {"state": {}}}], ids=["not given", "without state yet"])
def test_what_a_dense_optimizer_would_lose_is_warned_of(tmp_path: Path, given: dict[str, object]) -> None:
    weights = {"m.embedding_bags.a.weight": torch.ones(ROWS, 8)}
    saved = {"model": weights, "dense": {"state": {"top.weight": {"exp_avg": torch.ones(3), "step": torch.ones(1)}}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of no process group
        save({"model": weights, "loader": {"state": 5}}, checkpoint_id=tmp_path / "none", no_dist=True)
        save(saved, checkpoint_id=tmp_path / "some", no_dist=True)
        warnings.simplefilter("error", ShardingWarning)
        load_resharded({"model": weights, "loader": {}}, tmp_path / "none")
        with pytest.raises(
            ShardingWarning, match=r"has 'dense\.state\.top\.weight\.exp_avg' \(and 1 more\), which the state"
        ):
            load_resharded({"model": weights} | given, tmp_path / "some")
