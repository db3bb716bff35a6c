"""A checkpoint of a model of every kind of collection under another plan: sequences, feature processors and copies too."""

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict_saver import save

from helpers.gloo import on_ranks
from helpers.sharded import sharded, sharders_of
from helpers.trainers import Saved, cut_plan
from helpers.whole_model import SAMPLES, TABLES, Model, batch
from neuroshard.client.checkpoint import load_resharded
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.plan import Plan

pytestmark = pytest.mark.slow

plan = partial(cut_plan, TABLES, batch_size=SAMPLES, copied={"tiny"})
ONE = plan(
    2, {"shared": [(8, 1), (8, 0)], "wide": [(16, 0)], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []}
)
OTHER = plan(2, {"shared": [(16, 0)], "wide": [], "read": [(8, 1), (8, 0)], "seen": [], "placed": [(4, 0), (12, 1)]})
FOUR = plan(
    4, {"shared": [], "wide": [(4, 3), (12, 1)], "read": [(8, 2), (8, 3)], "seen": [(16, 0)], "placed": [(16, 2)]}
)


class Trainer(Saved):
    def __init__(self, given: Plan, seed: int) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # what every rank has a copy of begins alike
        meta = Model()
        self.model = sharded(meta, to_torchrec(given, meta), sharders_of("rowwise_adagrad"))

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.model(batch(step, dist.get_rank(), dist.get_world_size())).square().sum().backward()

    def outputs(self) -> np.ndarray:
        """Of all samples of a batch."""
        ranks = dist.get_world_size()
        with torch.no_grad():
            mine = self.model(batch(99, dist.get_rank(), ranks))
        every = [torch.zeros_like(mine) for _ in range(ranks)]
        dist.all_gather(every, mine)
        return torch.cat(every).numpy()


def save_under(rank: int, old: Plan, folder: Path) -> np.ndarray:
    trainer = Trainer(old, seed=1)
    trainer.train(3)
    save(trainer.state(), checkpoint_id=folder)
    assert any(isinstance(value, ShardedTensor) for value in trainer.model.state_dict().values())
    return trainer.outputs()


def load_under(rank: int, old: Plan, new: Plan, folder: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    trainer = Trainer(new, seed=2)
    trainer.train(1)  # what a model had before must not stay
    before = trainer.outputs()
    estimated = load_resharded(trainer.state(), folder, old_plan=old, new_plan=new)
    return before, trainer.outputs(), estimated


@pytest.mark.parametrize(("old", "new"), [(ONE, OTHER), (OTHER, ONE), (ONE, FOUR), (FOUR, OTHER), (ONE, ONE)])
def test_a_model_of_every_kind_of_collection_answers_alike_under_another_plan(
    old: Plan, new: Plan, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    for meeting in ("old", "new"):
        (tmp_path / meeting).mkdir()
    saved = on_ranks(old.task.devices, tmp_path / "old", save_under, old, folder)[0]
    loaded = on_ranks(new.task.devices, tmp_path / "new", load_under, old, new, folder)
    for before, after, _ in loaded:
        assert np.abs(before - saved).max() > 1e-3
        np.testing.assert_allclose(after, saved, rtol=1e-6, atol=1e-7)
    if old is new:
        assert not any(estimated for _, _, estimated in loaded)
