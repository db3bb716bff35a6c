"""Real TorchRec trainers on gloo that take another plan between two steps, and go on as if they had been started again by it."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.optim.optimizers import in_backward_optimizer_filter

from helpers.gloo import on_ranks
from helpers.trainers import Saved, cut_plan
from helpers.whole_model import SAMPLES, TABLES, Model, batch
from neuroshard.client.torchrec import to_torchrec
from neuroshard.client.torchrec_optimizer import load_resharded
from neuroshard.client.torchrec_reshard import reshard
from neuroshard.core.errors import InvalidInput, NeuroshardError, UsageError
from neuroshard.core.plan import Plan

pytestmark = pytest.mark.slow

STEPS, LEARNING_RATE, WIDTH = 3, 0.05, 5 * 16 + 8 + 16
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
plan = partial(cut_plan, TABLES, batch_size=SAMPLES)
ONE = plan(
    2,
    {"shared": [(8, 1), (8, 0)], "wide": [(16, 0)], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []},
    copied={"tiny"},
)
OTHER = plan(
    2,
    {"shared": [(16, 0)], "wide": [], "read": [(8, 1), (8, 0)], "seen": [], "placed": [(4, 0), (12, 1)]},
    copied={"tiny"},
)
BAGS_ONLY = plan(  # the sequences and the position weights of ONE
    2,
    {"shared": [(4, 0), (12, 1)], "wide": [(16, 1)], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []},
    copied={"tiny"},
)
NO_COPY = plan(
    2,
    {"shared": [(16, 0)], "wide": [], "tiny": [(8, 1)], "read": [(16, 1)], "seen": [(8, 0), (8, 1)], "placed": []},
)
FOUR = plan(
    4,
    {"shared": [], "wide": [(4, 3), (12, 1)], "read": [(8, 2), (8, 3)], "seen": [(16, 0)], "placed": [(16, 2)]},
    copied={"tiny"},
)
OTHER_FOUR = plan(
    4,
    {"shared": [(8, 2), (8, 0)], "wide": [], "read": [(16, 1)], "seen": [], "placed": [(8, 3), (8, 0)]},
    copied={"tiny"},
)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = Model()
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, features: dict[str, KeyedJaggedTensor]) -> Tensor:
        return self.over(self.tables(features))


class Trainer(Saved):
    def __init__(self, given: Plan, optimizer: str, seed: int = 1) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # what every rank has a copy of begins alike
        meta = Scored()
        fused = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": LEARNING_RATE}
        bags = EmbeddingBagCollectionSharder(fused_params=fused)
        self.model = DistributedModelParallel(
            meta,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=to_torchrec(given, meta),
            sharders=[
                bags,
                FeatureProcessedEmbeddingBagCollectionSharder(bags),
                EmbeddingCollectionSharder(fused_params=fused),
            ],
        )
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense = torch.optim.Adagrad(dense.values(), lr=0.01)

    def train(self, first: int, end: int) -> list[float]:
        """The losses of all ranks together, step by step."""
        losses = []
        for step in range(first, end):
            features = batch(step, dist.get_rank(), dist.get_world_size())
            loss = (self.model(features) - 1).square().mean()
            self.dense.zero_grad()
            loss.backward()
            self.dense.step()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(float(mean))
        return losses


def live(rank: int, old: Plan, new: Plan, optimizer: str, folder: Path) -> dict[str, Any]:
    """The losses of a trainer that takes a new plan, of one that starts again by it from a checkpoint of the same step, and of one
    that goes on by the old plan."""
    trainer, unstopped = Trainer(old, optimizer), Trainer(old, optimizer)
    for each in (trainer, unstopped):
        each.train(0, STEPS)
    save(trainer.state(), checkpoint_id=folder)
    dense = [parameter for name, parameter in trainer.model.named_parameters() if "over" in name or "_feature_proc" in name]
    fused = trainer.model.fused_optimizer

    said = reshard(trainer.model, new, step=STEPS, optimizer_of_copies=trainer.dense)

    after = dict(trainer.model.named_parameters())
    assert all(any(parameter is each for each in after.values()) for parameter in dense)
    assert trainer.model.fused_optimizer is fused
    again = Trainer(new, optimizer, seed=2)
    again.train(0, 1)  # what a model had before must not stay
    estimated = load_resharded(again.state(), folder, old_plan=old, new_plan=new)
    again.dense.load_state_dict(copy.deepcopy(unstopped.dense.state_dict()))
    return {
        "said": (said, estimated),
        "losses": trainer.train(STEPS, 3 * STEPS),
        "started again": again.train(STEPS, 3 * STEPS),
        "unstopped": unstopped.train(STEPS, 3 * STEPS),
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("old", "new"), [(ONE, OTHER), (OTHER, ONE), (FOUR, OTHER_FOUR)], ids=["2", "2 back", "4"])
def test_losses_are_those_of_a_run_that_was_started_again(old: Plan, new: Plan, optimizer: str, tmp_path: Path) -> None:
    for found in on_ranks(old.task.devices, tmp_path, live, old, new, optimizer, tmp_path / "saved"):
        assert found["losses"] == found["started again"]
        assert found["said"][0] == found["said"][1]
        assert found["losses"] == pytest.approx(found["unstopped"], rel=5e-3 if optimizer == "rowwise_adagrad" else 1e-4)
