"""A trainer in TorchRec's pipeline, which works on batches ahead, takes another plan."""

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from helpers.gloo import on_ranks
from helpers.sharded import sharded, sharders_of
from helpers.step_cases import Batch
from helpers.trainers import cut_plan
from helpers.whole_model import SAMPLES, TABLES, Model, batch
from neuroshard.client.checkpoint import reshard
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.errors import UsageError

pytestmark = pytest.mark.slow

STEPS, LEARNING_RATE = 3, 0.05
plan = partial(cut_plan, TABLES[:3], 2, batch_size=SAMPLES)
ONE = plan({"shared": [(8, 1), (8, 0)], "wide": [(16, 0)], "tiny": [(8, 0)]})
OTHER = plan({"shared": [(16, 0)], "wide": [], "tiny": [(8, 1)]})


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags: EmbeddingBagCollection = Model().bags
        self.over = nn.Linear(3 * 16 + 8, 1)

    def forward(self, given: Batch) -> tuple[Tensor, Tensor]:
        losses = (self.over(self.bags(given.parts["bags"]).values()) - 1).square()
        return losses.mean(), losses.detach()


class Trainer:
    def __init__(self) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        meta = Scored()
        sharders = sharders_of("adagrad", LEARNING_RATE)
        self.model = sharded(meta, to_torchrec(ONE, meta, sharders=sharders), sharders)
        self.dense = torch.optim.SGD(self.model.module.over.parameters(), lr=LEARNING_RATE)

    def batches(self, first: int, end: int) -> Iterator[Batch]:
        return (Batch({"bags": batch(step, dist.get_rank(), 2)["bags"]}) for step in range(first, end))

    def train(self, first: int, end: int) -> list[float]:
        found = []
        for each in self.batches(first, end):
            loss, losses = self.model(each)
            self.dense.zero_grad()
            loss.backward()
            self.dense.step()
            found.append(float(losses.mean()))
        return found


def through(pipeline: Any, batches: Iterator[Batch]) -> list[float]:
    """The losses of all batches, until the pipeline is empty."""
    found = []
    while True:
        try:
            found.append(float(pipeline.progress(batches).mean()))
        except StopIteration:
            return found


def pipelined(rank: int) -> dict[str, Any]:
    trainer, plain, unstopped = Trainer(), Trainer(), Trainer()
    pipeline = TrainPipelineSparseDist(trainer.model, trainer.dense, torch.device("cpu"))
    batches = trainer.batches(0, 100)
    first, before = [float(pipeline.progress(batches).mean())], unstopped.train(0, 1)
    said = {}
    base = TrainPipelineBase(trainer.model, trainer.dense, torch.device("cpu"))
    for name, given in (("ahead", [pipeline]), ("not given", []), ("base", [base])):
        with pytest.raises(UsageError) as caught:
            reshard(trainer.model, OTHER, pipelines=given)
        said[name] = str(caught.value)
    pipeline.detach()
    with pytest.raises(UsageError) as caught:
        reshard(trainer.model, OTHER)
    said["detached"] = str(caught.value)
    # two batches are ahead: 1 and 2
    first += through(pipeline, iter(()))
    before += unstopped.train(1, STEPS)
    plain.train(0, STEPS)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        reshard(trainer.model, OTHER, step=STEPS, pipelines=[pipeline])
    said["another"] = "; ".join(str(one.message) for one in heard)
    reshard(plain.model, OTHER, step=STEPS)

    losses = through(pipeline, islice(batches, STEPS))
    assert isinstance(trainer.model.module.bags.forward, PipelinedForward)

    adds_up = GradientAccumulationConfig(num_steps=2)
    accumulating = GradientAccumulationWrapper(pipeline, trainer.dense, trainer.model, adds_up)
    accumulating.set_step(STEPS)  # as after an iterator that ended between two steps of the optimizer
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        reshard(trainer.model, ONE, step=2 * STEPS, pipelines=[accumulating])
    said["accumulating"] = "; ".join(str(one.message) for one in heard)
    return {
        "said": said,
        "first": (first, before),
        "losses": losses,
        "plain": plain.train(STEPS, 2 * STEPS),
        "unstopped": unstopped.train(STEPS, 2 * STEPS),
    }


def test_a_pipeline_goes_on_by_the_new_plan_once_it_is_empty(tmp_path: Path) -> None:
    every = on_ranks(2, tmp_path, pipelined)
    assert "the trainer's pipeline is sparse-dist (TrainPipelineSparseDist)" in every[0]["said"]["another"]
    assert "the GradientAccumulationWrapper has ended after 1 of the 2 batches" in every[0]["said"]["accumulating"]
    for found in every:
        assert "the TrainPipelineSparseDist holds 2 batches, on their way by the old plan" in found["said"]["ahead"]
        assert "a TrainPipelineBase cannot be taken off the model (detach); leave it out" in found["said"]["base"]
        for name in ("not given", "detached"):
            assert "module 'bags' has run in a pipeline of TorchRec, which may hold batches" in found["said"][name]
        assert found["first"][0] == found["first"][1]
        assert found["losses"] == found["plain"] == pytest.approx(found["unstopped"], rel=1e-5)
