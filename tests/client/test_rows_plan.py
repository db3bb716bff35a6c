"""Plans that hold tables by access, from to_torchrec to a step of real TorchRec on gloo."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import neuroshard as ns
from helpers.gloo import on_ranks
from helpers.row_trainers import Case, hot_ids, sharders_by_access
from helpers.sharded import sharded as sharded_by
from neuroshard.client.access import AccessTrace
from neuroshard.client.checkpoint import load_model_state, load_resharded, model_state, reshard
from neuroshard.client.rows.held import by_access
from neuroshard.client.rows.lists import hot_ids as read_hot_ids
from neuroshard.client.torchrec import from_torchrec, to_torchrec
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.parts import RowsByAccess
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.row_order import RowOrder
from neuroshard.core.table import Feature, Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.value import sha256
from neuroshard.files.row_orders import bytes_of_ids

CASES = {"pooled": Case(optimizer="rowwise_adagrad"), "sequences": Case(kind="sequences", optimizer="rowwise_adagrad")}
HOT: dict[str, Any] = {"a": hot_ids(41, 9).numpy().astype(np.int32), "c": hot_ids(29, 9).numpy().astype(np.int32)}
DIGEST = {name: sha256(bytes_of_ids(ids))[:8] for name, ids in HOT.items()}


def table(name: str, rows: int, features: tuple[str, ...], pooling: Any) -> Table:
    digest = sha256(bytes_of_ids(HOT[name])) if name != "b" else ""
    order = RowOrder(ids_digest=digest, rows=rows, hot_rows=9, lookup_share=0.9, time="2026-01-01T00:00:00Z")
    return Table(
        name=name,
        rows=rows,
        dim=8,
        pooling_factor=3.5 * len(features),
        features=tuple(Feature(name=feature, pooling_factor=3.5) for feature in features),
        pooling=pooling,
        module="e",
        row_order=order if name != "b" else None,
    )


def planned(kind: str = "pooled", *, by: bool = True) -> Plan:
    """Table a dealt over two ranks, c with its hot rows copied, b whole."""
    pooling = "sum" if kind == "pooled" else "none"
    tables = tuple(
        table(name, rows, features, pooling)
        for name, rows, features in (("a", 41, ("f", "g")), ("b", 17, ("g",)), ("c", 29, ("h",)))
    )
    blocks = [
        Shard(table="a", row_offset=at, rows=rows, dim=8, device=on)
        for on, (at, rows) in enumerate([(0, 21), (21, 20)])
    ]
    copies = [Shard(table="c/hot", rows=5, dim=8, device=on) for on in (0, 1)]
    cold = [Shard(table="c/cold", rows=24, dim=8, device=0)]
    rules = [
        TableRule(table="a", rows_by_access=RowsByAccess(dealt=True)),
        TableRule(table="c", rows_by_access=RowsByAccess(hot_rows=5)),
        TableRule(table="c/hot", data_parallel=True),
    ]
    whole = [Shard(table="c", rows=29, dim=8, device=0)]
    return Plan(
        task=ShardingTask(
            tables=tables,
            device_memory_bytes=(2**20,) * 2,
            batch_size=32,
            constraints=Constraints(tables=tuple(rules) if by else ()),
        ),
        shards=(*blocks, *(copies + cold if by else whole), Shard(table="b", rows=17, dim=8, device=1)),
        provenance=Provenance(neuroshard_version="0", algorithm="by hand"),
    )


def tables_inside(rank: int, kind: str, folder: Path) -> list[list[str]]:
    """Of a plan with rows by access and of one without, whose checkpoints go from one to the other."""
    warnings.simplefilter("ignore")
    found = []
    for by in (True, False):
        case, plan = CASES[kind], planned(kind, by=by)
        model = by_access(nn.ModuleDict({"e": case.collection()}), plan, HOT)
        sharders = sharders_by_access(case.optimizer)
        sharding_plan = to_torchrec(plan, model, sharders=sharders, batch_size=32)
        sharded = sharded_by(model, sharding_plan, sharders)
        kinds = {name: of.sharding_type for name, of in sharding_plan.plan["e"].items()}
        assert kinds == {
            **(
                {f"a/dealt-{DIGEST['a']}-2": "row_wise", f"c/cold-{DIGEST['c']}-1": "table_wise"}
                if by
                else {"a": "row_wise", "c": "table_wise"}
            ),
            "b": "table_wise",
        }
        state = model_state(sharded)
        if by:
            save(state, checkpoint_id=folder)
        with pytest.raises(InvalidInput) as caught:
            reshard(sharded, planned(kind, by=not by), batch_size=32)
        assert "table 'a' of module 'e' is held by access" in str(caught.value).replace(
            "'a' is", "'a' of module 'e' is"
        )
        other = planned(kind)
        assert load_resharded(state, folder, old_plan=other, new_plan=plan) == ()
        load_model_state(sharded, state)
        found.append(sorted(kinds))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pooled", "sequences"])
def test_a_plan_gives_torchrec_its_parts(tmp_path: Path, kind: str) -> None:
    for parts, plain in on_ranks(2, tmp_path, tables_inside, kind, tmp_path / "saved"):
        assert parts == [f"a/dealt-{DIGEST['a']}-2", "b", f"c/cold-{DIGEST['c']}-1"]
        assert plain == ["a", "b", "c"]


def refused(work: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InvalidInput) as error:
            work()
    return str(error.value)


def model() -> nn.Module:
    return nn.ModuleDict({"e": CASES["pooled"].collection()})


def test_a_model_that_is_not_held_so_is_refused() -> None:
    plan = planned()
    said = refused(lambda: to_torchrec(plan, model(), device_type="cpu"))
    assert "table 'a' is held by access" in said
    assert "in the model not;" in said
    held = by_access(model(), plan, HOT)
    assert "is held by access in the model, and not in" in refused(
        lambda: to_torchrec(planned(by=False), held, device_type="cpu")
    )


def test_lists_of_other_orders_are_refused() -> None:
    plan = planned()
    assert "there is no list of its hot ids" in refused(lambda: by_access(model(), plan, {"a": HOT["a"]}))
    assert "there is no list of its hot ids" in refused(lambda: by_access(model(), plan, None))
    meta, said = torch.from_numpy(HOT["a"]).to("meta"), "of 9 ids in plan"
    wrong = (
        HOT["a"][:5],
        HOT["a"][::-1].copy(),
        HOT["a"].astype(float),
        HOT["a"][:, None],
        [None] * 9,
        meta,
        3,
        "abcdefghi",
    )
    for what in wrong:
        assert said in refused(lambda what=what: by_access(model(), plan, {**HOT, "a": what}))
    for same in (HOT["a"].tolist(), HOT["a"].astype(">i8"), torch.from_numpy(HOT["a"])):
        by_access(model(), plan, {**HOT, "a": same})


def test_a_model_is_given_to_by_access_once() -> None:
    held = by_access(model(), planned(), HOT)
    for plan in planned(), planned(by=False):
        assert "module 'e' has tables held by access already" in refused(lambda plan=plan: by_access(held, plan, HOT))


def test_tables_are_read_from_a_model_as_it_was(tmp_path: Path) -> None:
    held = by_access(model(), planned(), HOT)
    for call in (
        lambda: ns.tables(held),
        lambda: AccessTrace(held, str(tmp_path), "ads"),
        lambda: from_torchrec(ShardingPlan({}), held, device_memory_bytes=(2**20,), batch_size=32),
    ):
        assert "has tables held by access, parts in their places; give the model as it was before by_access" in refused(
            call
        )


def test_maps_take_the_bytes_that_the_plan_counts() -> None:
    plan = planned()
    rows = by_access(model(), plan, HOT)["e"].rows  # type: ignore[index]
    assert plan.held.by_access.map_bytes == 8 * (9 + 5)  # table "a" is dealt by its 9 listed ids, of "c" 5 are hot
    assert sum(each.nbytes for each in rows.buffers()) == plan.held.by_access.map_bytes
    assert all(held.hot_ids is None for held in rows.held.values())


def test_a_feature_that_a_batch_lacks_is_named() -> None:
    held, given = by_access(model(), planned(), HOT), CASES["pooled"].batch(0, 0)
    others = {key: given[key] for key in given.keys() if key != "h"}  # noqa: SIM118
    batch = KeyedJaggedTensor.from_jt_dict(others)
    said = refused(lambda: held["e"](batch))  # type: ignore[index]
    assert "the batch has no feature 'h', which table 'c' reads; it has unused, g, f" in said


def test_feature_processors_are_refused_before_a_module_is_changed() -> None:
    first, *others = CASES["pooled"].collection().embedding_bag_configs()
    collection = EmbeddingBagCollection(others, is_weighted=True)
    processed = FeatureProcessedEmbeddingBagCollection(
        collection, PositionWeightedModuleCollection(dict.fromkeys("gh", 9))
    )
    both = nn.ModuleDict({"d": EmbeddingBagCollection([first]), "e": processed})
    assert "has feature processors" in refused(lambda: by_access(both, planned(), HOT))
    assert type(both["d"]) is EmbeddingBagCollection


def test_other_models_stay_as_they_are() -> None:
    given = model()
    inside = given["e"]  # type: ignore[index]
    assert by_access(given, planned(by=False), {}) is given
    assert given["e"] is inside  # type: ignore[index]


def test_what_is_no_model_no_plan_and_no_lists_is_refused(tmp_path: Path) -> None:
    x: Any = "x"
    for call, said in (
        (lambda: by_access(x, planned(), HOT), "'x' is no torch.nn.Module; give the model itself"),
        (lambda: to_torchrec(planned(), x, device_type="cpu"), "'x' is no torch.nn.Module; give the model itself"),
        (lambda: by_access(model(), x, HOT), "'x' is no plan; give what load_plan returns"),
        (lambda: to_torchrec(x, model()), "'x' is no plan"),
        (lambda: read_hot_ids(x, str(tmp_path), "ads"), "'x' is no plan"),
        (lambda: load_resharded({}, tmp_path, old_plan=x), "'x' is no plan"),
        (lambda: by_access(model(), planned(), x), "hot_ids is 'x'; give a dict of lists"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            call()
