"""Checkpoints of tables held by access: they have the tables' own names and rows, and go to any plan and back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from helpers.gloo import on_ranks
from helpers.row_trainers import Case, Trainer, dealt, in_parts
from neuroshard.client.checkpoint import load_model_state, load_resharded, model_state
from neuroshard.client.rows.collection import TableRows
from neuroshard.client.torchrec import keep_output_order, output_order
from neuroshard.core.errors import InvalidInput, UsageError

pytestmark = pytest.mark.slow

DEALT = {"a": dealt(41, 2), "c": dealt(29, 2)}
COPIED = {"a": in_parts(41, 7, copied=True, blocks=(1, 2)), "b": in_parts(17, 5, blocks=(2, 1)), "c": dealt(29, 2)}
OTHER = {"a": in_parts(41, 19, copied=True, count=30), "c": in_parts(29, 3, blocks=(1, 2), count=11)}
ON_FOUR = {"a": in_parts(41, 7, copied=True, blocks=(1, 4)), "b": dealt(17, 4), "c": in_parts(29, 12, blocks=(4, 4))}
ON_HOSTS = {"a": dealt(41, 2), "b": dealt(17, 4), "c": in_parts(29, 12, blocks=(2, 2))}
CUT = {"a": in_parts(41, 7), "c": in_parts(29, 12, copied=True)}
Held = Mapping[str, TableRows] | None
BEFORE, AFTER = 3, 3


def saving(rank: int, case: Case, held: Held, folder: Path, cut: Sequence[str] = ()) -> Any:
    trainer = Trainer(case, held, cut=cut)
    for step in range(BEFORE):
        trainer.step(step)
    state = model_state(trainer.model)
    save(state, checkpoint_id=folder)
    loss = [trainer.step(step)[1] for step in range(BEFORE, BEFORE + AFTER)]
    return sorted(state["model"]), sorted(state["optimizer"]["state"]), loss


def going_on(rank: int, case: Case, held: Held, folder: Path, split: str, cut: Sequence[str] = ()) -> Any:
    trainer = Trainer(case, held, list(split), cut)
    for step in range(20, 22):  # what it had learned is gone
        trainer.step(step)
    state = model_state(trainer.model)
    inexact = load_resharded(state, folder)
    load_model_state(trainer.model, state)
    return inexact, [trainer.step(step)[1] for step in range(BEFORE, BEFORE + AFTER)]


@pytest.mark.parametrize(
    ("kind", "optimizer", "old", "new"),
    [
        ("pooled", "adagrad", DEALT, None),
        ("pooled", "adagrad", COPIED, None),
        *[
            ("sequences", "rowwise_adagrad", *both)
            for both in ((COPIED, None), (None, COPIED), (COPIED, OTHER), (DEALT, COPIED))
        ],
    ],
    ids=["from-dealt", "from-pooled-parts", "from-parts", "to-parts", "other-order", "dealt-to-parts"],
)
def test_training_goes_on_under_any_plan(tmp_path: Path, kind: str, old: Held, new: Held, optimizer: str) -> None:
    case = Case(kind=kind, optimizer=optimizer)
    for part in ("old", "new"):
        (tmp_path / part).mkdir()
    saved = on_ranks(2, tmp_path / "old", saving, case, old, tmp_path / "saved")
    loaded = on_ranks(2, tmp_path / "new", going_on, case, new, tmp_path / "saved", "b")
    for (_, _, losses), (inexact, after) in zip(saved, loaded, strict=True):
        assert inexact == ()
        assert after == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(("optimizer", "new"), [("adagrad", None), ("rowwise_adagrad", CUT)], ids=["whole", "the-same"])
def test_parts_may_be_cut_at_other_columns(tmp_path: Path, optimizer: str, new: Held) -> None:
    case, cold = Case(optimizer=optimizer), ["a/cold", "c/cold"]
    for part in ("old", "new"):
        (tmp_path / part).mkdir()
    saved = on_ranks(2, tmp_path / "old", saving, case, CUT, tmp_path / "saved", cold)
    loaded = on_ranks(2, tmp_path / "new", going_on, case, new, tmp_path / "saved", "", cold)
    for (_, _, losses), (inexact, after) in zip(saved, loaded, strict=True):
        assert inexact == ()
        assert after == pytest.approx(losses, rel=1e-6 if new is None else 0)


@pytest.mark.parametrize(
    ("kind", "optimizer", "held", "cut"),
    [("sequences", "rowwise_adagrad", ON_FOUR, ""), ("pooled", "adagrad", ON_HOSTS, "a")],
    ids=["row-wise", "over-hosts"],
)
def test_and_on_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, optimizer: str, held: Held, cut: str
) -> None:
    """On four, as one host or as two, over each of which rows are dealt, of the tables `cut` in a grid."""
    (tmp_path / "two").mkdir()
    case = Case(kind=kind, optimizer=optimizer)
    on_ranks(2, tmp_path / "two", saving, case, COPIED, tmp_path / "saved")
    if held is ON_HOSTS:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for inexact, weights in on_ranks(4, tmp_path, loaded_weights, case, held, tmp_path / "saved", cut):
        assert inexact == ()
        assert weights


def loaded_weights(rank: int, case: Case, held: Held, folder: Path, cut: str) -> Any:
    """Whether four ranks, and four that hold nothing by access, have loaded the same."""
    ours, theirs, found = Trainer(case, held, cut=cut), Trainer(case), []
    for trainer in (ours, theirs):
        state = model_state(trainer.model)
        inexact = load_resharded(state, folder)
        load_model_state(trainer.model, state)
        found.append({**trainer.weights(), **trainer.moments()})
    return inexact, all(bool((value == found[1][key]).all()) for key, value in found[0].items())


def test_a_checkpoint_has_the_tables_own_names(tmp_path: Path) -> None:
    case = Case(optimizer="rowwise_adagrad")
    names = {f"e.embedding_bags.{table}.weight" for table in case.rows}
    model, state = set(), set()
    for mine, moments, _ in on_ranks(2, tmp_path, saving, case, COPIED, tmp_path / "saved"):
        model |= set(mine)
        state |= set(moments)
    assert model == state == names


def parts_as_they_are(rank: int, folder: Path) -> Any:
    trainer = Trainer(Case(), COPIED)
    bare = {"model": trainer.model.state_dict(), "optimizer": trainer.model.fused_optimizer.state_dict()}
    save(bare, checkpoint_id=folder)
    with pytest.raises(InvalidInput) as caught:
        load_resharded(bare, folder)
    before = trainer.weights()
    for lacking in (bare, {}):
        with pytest.raises(
            InvalidInput, match=r"the state lacks weight of table 'a' on rank 0; give what model_state\(model\)"
        ):
            load_model_state(trainer.model, lacking)
    assert all(bool((weight == before[table]).all()) for table, weight in trainer.weights().items())
    return str(caught.value), output_order(keep_output_order(trainer.model))


def test_what_is_no_state_of_tables_is_refused_by_name(tmp_path: Path) -> None:
    for call in (model_state, lambda model: load_model_state(model, {})):
        with pytest.raises(
            UsageError, match="_state needs what DistributedModelParallel returned, and the model is a Linear"
        ):
            call(torch.nn.Linear(2, 2))
    for said, order in on_ranks(2, tmp_path, parts_as_they_are, tmp_path):
        assert "a part of a table that is held by access" in said
        assert "give model_state(model)" in said
        assert order == {"e": ["f", "g@a", "g@b", "h"]}
