"""As a user has it: traces, tables, constraints, search, deploy, and a trainer that has the plan and its lists from the store."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from helpers.gloo import on_ranks
from helpers.row_trainers import sharders_by_access
from helpers.sharded import local_parts
from helpers.sharded import sharded as sharded_by
from neuroshard.client import load_plan_on_all_ranks
from neuroshard.client.checkpoint import load_model_state, load_resharded, model_state
from neuroshard.client.rows.held import by_access
from neuroshard.client.rows.lists import hot_ids
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.plan import Plan
from neuroshard.core.row_order import LISTS_FOLDER
from neuroshard.files.plan import read_plan
from neuroshard.files.traces import Lookups, Traces, write_traces

ROWS, BATCH, STEPS = {"clicks": 120_001, "ads": 3001, "seen": 2003}, 64, 6
RULES = [{"match": "seen", "rows_by_access": {"hot_rows": 100}}, {"match": "seen/hot", "data_parallel": True}]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {name: {"num_embeddings": rows, "embedding_dim": 8, "name": name} for name, rows in ROWS.items()}
        self.pooled = EmbeddingBagCollection(
            [EmbeddingBagConfig(**sizes[name], feature_names=[f"f_{name}"]) for name in ("clicks", "ads")]
        )
        self.sequences = EmbeddingCollection([EmbeddingConfig(**sizes["seen"], feature_names=["f_seen"])])
        self.over = nn.Linear(24, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled, rows = self.pooled(features), self.sequences(features)["f_seen"]
        sample = torch.repeat_interleave(torch.arange(features.stride()), rows.lengths())
        history = rows.values().new_zeros(features.stride(), 8).index_add(0, sample, rows.values())
        return self.over(torch.cat([pooled["f_clicks"], pooled["f_ads"], history], 1)).squeeze(1)


def ids(seed: int, name: str, count: int) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).zipf(1.2, count)
    return (drawn * 7919 % ROWS[name]).astype(np.int64)


def batch(step: int, rank: int) -> tuple[KeyedJaggedTensor, Tensor]:
    lookups = [torch.from_numpy(ids(100 * step + 10 * rank + at, name, 4 * BATCH)) for at, name in enumerate(ROWS)]
    labels = (torch.stack(lookups).sum(0).view(BATCH, 4).sum(1) % 2).float()
    lengths = torch.full((len(ROWS) * BATCH,), 4)
    return KeyedJaggedTensor([f"f_{name}" for name in ROWS], torch.cat(lookups), lengths=lengths), labels


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    features, labels = batch(step, rank)
    return nn.functional.binary_cross_entropy_with_logits(model(features), labels)


def sharded(plan: Plan, given: dict[str, Any]) -> Any:
    sharders, whole = sharders_by_access("adagrad"), Model()
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    model = by_access(whole, plan, given)
    parallel = sharded_by(model, to_torchrec(plan, model, sharders=sharders, batch_size=BATCH), sharders)
    set_weights(parallel, start)
    return parallel


def set_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """TorchRec draws the weights of pooled tables anew."""
    state = model_state(model)
    for key, place, part in local_parts(state["model"]):
        part.copy_(weights[key.replace("over.module.", "over.")][place])
    load_model_state(model, state)


def train(model: nn.Module, dense: torch.optim.Optimizer, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        dense.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses


def trainer(rank: int, store: str, folder: Path, other: Path) -> tuple[list[float], list[float]]:
    """Losses under the live plan, and from its checkpoint on under another plan."""
    warnings.simplefilter("ignore")
    plan = load_plan_on_all_ranks(store, "ads-ranker", cache_dir=folder / f"cache{rank}")
    # only rank 0 needs the store
    lists = hot_ids(plan, store if rank == 0 else "nowhere", "ads-ranker", cache_dir=folder / f"cache{rank}")
    model = sharded(plan, lists)
    first = train(model, torch.optim.SGD(dense_of(model), 0.1), range(STEPS), rank)
    save({**model_state(model), "plan": plan.digest()}, checkpoint_id=folder / "ckpt")

    then = read_plan(other)
    again = sharded(then, hot_ids(then, store, "ads-ranker", cache_dir=False))
    state = model_state(again)
    load_resharded(state, folder / "ckpt", old_plan=plan, new_plan=then)
    load_model_state(again, state)
    for name, value in again.state_dict().items():
        if "over" in name:
            value.copy_(state["model"][name])
    return first, train(again, torch.optim.SGD(dense_of(again), 0.1), range(STEPS, 2 * STEPS), rank)


def dense_of(model: nn.Module) -> list[Tensor]:
    return [value for name, value in model.named_parameters() if "over" in name]


def unsplit() -> list[list[float]]:
    """Losses of both ranks' batches, of a model in one process: each step's gradients are the mean of the ranks'."""
    model, found = Model(), []
    tables = [value for name, value in model.named_parameters() if "over" not in name]
    optimizers = torch.optim.Adagrad(tables, 0.05, eps=1e-8), torch.optim.SGD(dense_of(model), 0.1)
    for step in range(2 * STEPS):
        losses = [loss_of(model, step, rank) for rank in (0, 1)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append([loss.item() for loss in losses])
    return found


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tables.json and constraints.json of a user, and rows/ beside the tables."""
    folder = tmp_path_factory.mktemp("user")
    found = {name: Lookups(ids(5, name, 4 * BATCH * 400), np.full(BATCH * 400, 4)) for name in ROWS}
    write_traces(folder / "traces", Traces(found))
    modules = {"clicks": "pooled", "ads": "pooled", "seen": "sequences"}
    entries = [
        {
            "name": name,
            "rows": rows,
            "dim": 8,
            "pooling_factor": 4,
            "module": modules[name],
            "pooling": "none" if name == "seen" else "sum",
            "features": [{"name": f"f_{name}", "pooling_factor": 4}],
        }
        for name, rows in ROWS.items()
    ]
    (folder / "given.json").write_text(json.dumps({"format_version": 1, "tables": entries}))
    (folder / "constraints.json").write_text(json.dumps({"format_version": 1, "tables": RULES}))
    return folder


@pytest.mark.slow
def test_from_traces_to_training_under_two_plans(planned: Path, tmp_path: Path, neuroshard: Any) -> None:
    tables, store = planned / "tables.json", str(tmp_path / "store")

    def run(*words: object) -> str:
        done = neuroshard(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(
        *("tables", "--from", planned / "given.json", "--access-from", planned / "traces"),
        *("--batch-size", BATCH, "--row-orders", "--optimizer", "adagrad", "-o", tables),
    )
    usual = ("--devices", 2, "--memory", "5MiB", "--batch-size", BATCH, "--model", "analytic:h100", "--rounds", 1)
    plan, other = tmp_path / "plans" / "plan.json", tmp_path / "plans" / "other.json"
    plan.parent.mkdir()
    run("search", tables, "--constraints", planned / "constraints.json", *usual, "-o", plan)
    run("search", tables, *usual, "-o", other)
    assert len(list((plan.parent / LISTS_FOLDER).iterdir())) == 1  # beside the plan, in another folder than the tables
    assert "1 table in two parts" in " ".join(run("show", plan).split())
    run("diff", other, plan)
    run("deploy", plan, "--store", store, "--name", "ads-ranker", "--tables", tables)
    expected = unsplit()
    found = on_ranks(2, tmp_path, trainer, store, tmp_path, other)
    for rank, (first, then) in enumerate(found):
        assert first + then == pytest.approx([losses[rank] for losses in expected], abs=2e-6)
