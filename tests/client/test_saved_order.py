"""The order of outputs in a checkpoint against that of the model that loads it, and what `to_torchrec` says of a plan's."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from helpers.gloo import on_ranks
from helpers.refusals import warned
from helpers.sharded import sharded as sharded_by
from helpers.sharded import sharders_of
from helpers.trainers import cut_plan
from neuroshard.client.checkpoint import load_resharded
from neuroshard.client.torchrec import ShardingWarning, keep_output_order, output_order, to_torchrec
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's jit, while it is imported
    from torch.distributed.optim.apply_optimizer_in_backward import (
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )

NAMES = ("user", "item", "shop")
TABLES = tuple(Table(name=name, module="m.deep", rows=12, dim=8, pooling_factor=1.0) for name in NAMES)


def plan(user: int, item: int, shop: int) -> Plan:
    """Each table whole, on a rank."""
    return cut_plan(TABLES, 2, {"user": [(8, user)], "item": [(8, item)], "shop": [(8, shop)]}, batch_size=2)


def make_model() -> nn.Module:
    configs = [EmbeddingBagConfig(name=n, feature_names=[n], num_embeddings=12, embedding_dim=8) for n in NAMES]
    deep = nn.ModuleDict({"deep": EmbeddingBagCollection(tables=configs, device=torch.device("meta"))})
    return nn.ModuleDict({"m": deep})


OWN, OTHER = plan(0, 0, 1), plan(1, 0, 0)


def sharded(given: Plan) -> Any:
    model = make_model()
    return sharded_by(model, to_torchrec(given, model, any_output_order=True), sharders_of("sgd"))


def loads(rank: int, folder: Path) -> list[tuple[list[str], Any]]:
    """What is said of loads of a checkpoint with and without an order, and what order the state has then."""
    old = sharded(OWN)
    without = {"model": old.state_dict()}
    saved = {
        "with": without | {"output_order": output_order(old)},
        "without": without,
        "other": without | {"output_order": 7},
    }
    for name, state in saved.items():
        save(state, checkpoint_id=folder / name)
    found = []
    cases: list[tuple[str, bool, bool, dict[str, Any]]] = [
        ("with", False, True, {}),
        ("with", True, True, {}),
        ("with", False, False, {}),
        ("without", False, True, {}),
        ("without", False, True, {"old_plan": OWN, "new_plan": OTHER}),
        ("without", False, False, {"old_plan": OWN, "new_plan": OWN}),
        ("other", False, False, {}),
    ]
    for name, kept, recorded, plans in cases:
        model = sharded(OWN if plans.get("new_plan") is OWN else OTHER)
        if kept:
            keep_output_order(model)
        state = {"model": model.state_dict()} | ({"output_order": output_order(model)} if recorded else {})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", ShardingWarning)
            load_resharded(state, folder / name, **plans)
        found.append(([str(warning.message) for warning in caught], state.get("output_order")))
    return found


@pytest.mark.slow
def test_a_checkpoint_of_another_order_is_warned_of_by_rank_0(tmp_path: Path) -> None:
    found, second = on_ranks(2, tmp_path, loads, tmp_path)

    assert second == [([], order) for _, order in found]
    other, kept, unrecorded, old, of_plans, same_plans, another = found
    own_order, plans_order = {"m.deep": ["user", "item", "shop"]}, {"m.deep": ["item", "shop", "user"]}
    (message,), order = other
    assert message.endswith(
        "/with was trained with the outputs of module 'm.deep' in another order, 'user' where the model has 'item': dense layers "
        "that read them by position (values()) read other columns; keep that order by keep_output_order(model, "
        'state["output_order"]), or read by key'
    )
    assert order == own_order
    assert kept == ([], own_order)
    (message,), order = unrecorded
    assert "the state does not" in message
    assert 'put output_order(model) into the state as "output_order"' in message
    assert order is None
    assert old == ([], plans_order)  # nothing is known
    (message,), order = of_plans
    assert message.startswith(
        f"plan {OTHER.digest()[:12]} returns the outputs of module 'm.deep' in another order than plan {OWN.digest()[:12]}, "
        "table 'item' where that had 'user': "
    )
    assert order == plans_order
    assert same_plans == another == ([], None)


def test_a_plan_of_another_order_than_the_models_is_warned_of_once() -> None:
    with pytest.warns(ShardingWarning) as caught:
        to_torchrec(OTHER, make_model())

    (warning,) = caught
    assert warning.filename == __file__  # where the trainer called, not where the package warns
    assert str(warning.message) == (
        "module 'm.deep' returns its outputs in another order by this plan than in the model, 'item' where the model has 'user': "
        "dense layers that read them by position (values()) are right by this plan alone; read them by key, or call "
        "keep_output_order(model) after DistributedModelParallel, and say any_output_order=True here"
    )


@pytest.mark.filterwarnings("error")
def test_a_plan_is_not_warned_of_where_its_order_is_the_models_or_does_not_matter() -> None:
    to_torchrec(OWN, make_model())
    to_torchrec(OTHER, make_model(), any_output_order=True)


@pytest.mark.filterwarnings("ignore:tables 'user' and 'item'")
def test_tables_with_an_optimizer_of_their_own_come_apart() -> None:
    model, here = make_model(), plan(0, 0, 0)
    item = model.get_submodule("m.deep.embedding_bags.item")
    apply_optimizer_in_backward(torch.optim.SGD, item.parameters(), {"lr": 0.5})

    with warned(ShardingWarning, "'shop' where the model has 'item'"):
        to_torchrec(here, model)
