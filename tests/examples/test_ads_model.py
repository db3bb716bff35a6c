"""examples/ads_model.py: both planners plan its tables with the same lookups, and its dense layers go on under another plan."""

import json
import re
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import neuroshard as ns
from helpers.gloo import on_ranks
from neuroshard.core.output_order import reordered
from neuroshard.core.plan import Plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAMPLES, LEARNING_RATE = 3, 24, 0.1
TABLE_BYTES = 2**20  # of all tables together, cut to few rows


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def lookups() -> dict[str, float]:
    found: dict[str, float] = json.loads((ROOT / "examples" / "ads_lookups.json").read_text())
    return found


def test_both_planners_plan_with_the_same_lookups(neuroshard, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from examples import ads_model

    ads_model.print_planner()
    (tmp_path / "planner.log").write_text(caplog.text)
    done = neuroshard("tables", "--from-stats", tmp_path / "planner.log", "-o", tmp_path / "printed.json")
    assert done.returncode == 0, done.stderr

    ours = ns.tables("examples.ads_model:make_model", pooling_factors=lookups(), quiet=True)
    printed = ns.tables(tmp_path / "printed.json", quiet=True)
    assert {t.name: t.pooling_factor for t in printed} == {t.name: t.pooling_factor for t in ours}
    assert {f.name: f.pooling_factor for t in ours for f in t.features} == {
        name: lookups()[name] for name in ("shown_ad", "recent_ads", "shown_page", "recent_pages")
    }


@cache
def plan(devices: int, batch_size: int) -> Plan:
    """What a search finds for the example, cut to few rows."""
    tables = ns.tables("examples.ads_model:make_model", pooling_factors=lookups(), quiet=True)
    found = ns.search(tables, devices=devices, batch_size=batch_size, memory="40GiB", model="analytic:h100", quiet=True)
    capped: Plan = import_module("examples.train").cap_rows(found, TABLE_BYTES)[0]
    return capped


class Trainer:
    """The example's model under a plan, trained by SGD, whose updates are the same under every plan."""

    def __init__(self, given: Plan, reads: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import DistributedModelParallel, ShardingEnv
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

        from examples import ads_model
        from neuroshard.client.torchrec import keep_output_order, to_torchrec

        class ByPosition(ads_model.AdsModel):
            def forward(self, dense: torch.Tensor, features: Any) -> torch.Tensor:
                logits: torch.Tensor = self.over(torch.cat([dense, self.sparse(features).values()], dim=1))
                return logits

        rows = {table.name: table.rows for table in given.task.tables}
        ads_model.TABLES = {name: (rows[name], dim, of) for name, (_, dim, of) in ads_model.TABLES.items()}
        torch.manual_seed(0)
        model = ads_model.make_model() if reads == "by key" else ByPosition()
        self.rows = {feature: rows[name] for name, (_, _, features) in ads_model.TABLES.items() for feature in features}
        fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=to_torchrec(given, model, any_output_order=True),
            sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
        )
        if reads == "in the model's order":
            keep_output_order(self.model)
        self.dense = torch.optim.SGD(self.model.module.over.parameters(), lr=LEARNING_RATE)

    def logits(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this rank's samples of a step, which are the same for any number of ranks in all; and their labels."""
        from torchrec import KeyedJaggedTensor

        generator = torch.Generator().manual_seed(step)
        dense, labels = torch.randn(SAMPLES, 13, generator=generator), torch.rand(SAMPLES, 1, generator=generator)
        ids = {name: torch.randint(rows, (SAMPLES, 2), generator=generator) for name, rows in self.rows.items()}
        each = SAMPLES // dist.get_world_size()
        mine = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
        values = torch.cat([of[mine].flatten() for of in ids.values()])
        features = KeyedJaggedTensor(keys=list(ids), values=values, lengths=torch.full((len(ids) * each,), 2))
        return self.model(dense[mine], features), labels[mine].round()

    def train(self, first: int, end: int) -> list[float]:
        """The losses of all ranks together, step by step."""
        losses = []
        for step in range(first, end):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(*self.logits(step))
            self.dense.zero_grad()
            loss.backward()
            self.dense.step()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(float(mean))
        return losses

    def all_logits(self, step: int) -> list[float]:
        with torch.no_grad():
            mine, _ = self.logits(step)
        each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(each, mine)
        return torch.cat(each).flatten().tolist()

    def state(self) -> dict[str, Any]:
        from neuroshard.client.torchrec import output_order

        fused = self.model.fused_optimizer.state_dict()
        return {"model": self.model.state_dict(), "optimizer": fused, "output_order": output_order(self.model)}


def save_and_go_on(rank: int, given: Plan, reads: str, folder: Path) -> tuple[list[float], list[float]]:
    """Train and save; then the logits of a batch, and the losses of the steps that follow."""
    from torch.distributed.checkpoint.state_dict_saver import save

    warnings.simplefilter("ignore")
    trainer = Trainer(given, reads)
    trainer.train(0, STEPS)
    save(trainer.state(), checkpoint_id=folder / "saved")
    return trainer.all_logits(STEPS), trainer.train(STEPS, 2 * STEPS)


def load_and_go_on(
    rank: int, given: Plan, reads: str, folder: Path, as_saved: bool
) -> tuple[list[float], list[float], list[str]]:
    """The same under another plan, and what was warned of."""
    from neuroshard.client.checkpoint import load_resharded
    from neuroshard.client.torchrec import ShardingWarning, keep_output_order

    warnings.simplefilter("ignore")
    trainer = Trainer(given, reads)
    state = trainer.state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        load_resharded(state, folder / "saved", new_plan=given)
    if as_saved:
        keep_output_order(trainer.model, state["output_order"])
    said = [str(warning.message) for warning in caught if warning.category is ShardingWarning]
    return trainer.all_logits(STEPS), trainer.train(STEPS, 2 * STEPS), said


@pytest.mark.parametrize(
    ("reads", "as_saved", "right"),
    [
        ("by key", False, True),
        ("in the model's order", False, True),
        ("in the plan's order", False, False),
        ("in the plan's order", True, True),
    ],
)
def test_dense_layers_go_on_under_another_plan(tmp_path: Path, reads: str, as_saved: bool, right: bool) -> None:
    old, others = plan(2, 512), [plan(2, 65_536), plan(4, 512)]
    before = on_ranks(2, tmp_path, save_and_go_on, old, reads, tmp_path)[0]

    for new in others:
        assert reordered(old, new)
        (tmp_path / "rendezvous").unlink()
        logits, losses, said = on_ranks(new.task.devices, tmp_path, load_and_go_on, new, reads, tmp_path, as_saved)[0]

        same = logits == pytest.approx(before[0], abs=1e-5) and losses == pytest.approx(before[1], abs=1e-5)
        assert same == right, (logits, before[0], losses, before[1])
        if reads == "in the plan's order":
            (message,) = said
            assert re.search(r"was trained with the outputs of module 'sparse' in another order, '\w+' where", message)
        elif reads == "in the model's order":
            assert said == []
