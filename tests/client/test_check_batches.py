"""Batches that TorchRec reads otherwise than unsharded collections, on gloo: in silence, and then refused."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from helpers.gloo import on_ranks
from helpers.refusals import refused
from helpers.row_trainers import Case, Trainer, dealt
from helpers.sharded import sharded as sharded_by
from helpers.sharded import sharders_of
from helpers.tensor_dicts import as_tensor_dict
from helpers.torchrec_models import module_of
from helpers.trainers import Cuts, cut_plan
from neuroshard.client.checkpoint import reshard
from neuroshard.client.torchrec import check_batches, to_torchrec
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.plan import Plan
from neuroshard.core.table import Table

pytestmark = pytest.mark.slow

SAMPLES = 4
CUT: Cuts = {"x": [(4, 0), (4, 1)], "y": []}  # column-wise, row-wise
WHOLE: Cuts = {"x": [(8, 1)], "y": [(8, 1)]}


def plan(*, weighted: bool = False, cuts: Cuts | None = None, pooling: str = "sum") -> Plan:
    tables = [
        Table.model_validate(
            {
                "name": name,
                "module": "m",
                "rows": 16,
                "dim": 8,
                "pooling_factor": 2.0,
                "pooling": pooling,
                "weighted": weighted,
                "features": [{"name": name, "pooling_factor": 2.0}],
            }
        )
        for name in ("x", "y")
    ]
    if cuts is None:
        return cut_plan(tables, 2, {}, batch_size=2 * SAMPLES, copied=("x", "y"))
    return cut_plan(tables, 2, cuts, batch_size=2 * SAMPLES)


def batch(names: Sequence[str] = "xy", weights: Tensor | None = None) -> KeyedJaggedTensor:
    """Two lookups a sample and feature; each feature's ids are its own."""
    ids = [torch.arange(2 * SAMPLES) % (3 + "xyz".index(name)) for name in names]
    lengths = torch.full((len(names) * SAMPLES,), 2)
    return KeyedJaggedTensor(keys=list(names), values=torch.cat(ids), lengths=lengths, weights=weights)


def nested(names: Sequence[str] = "xy") -> TensorDict:
    return as_tensor_dict(batch(names))


def looking_up(wrong: int, samples: int = SAMPLES) -> KeyedJaggedTensor:
    """Ids of x that it has, and one that it lacks."""
    ids = torch.full((2 * samples,), 3)
    ids[1:] = wrong
    lengths = torch.full((2 * samples,), 2, dtype=torch.int64)
    return KeyedJaggedTensor(keys=["x", "y"], values=torch.cat([ids, ids * 0]), lengths=lengths)


class Model(nn.Module):
    def __init__(self, given: Plan) -> None:
        super().__init__()
        self.m: Any = module_of(given.task.tables).get_submodule("m")

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        if hasattr(self.m, "embedding_bags"):
            pooled = self.m(features)
            found = torch.cat([pooled["x"], pooled["y"]], dim=1)
        else:
            read = self.m(features=features)
            found = torch.cat([read["x"].values(), read["y"].values()], dim=1)
        return found.square().sum(), found.detach()


def sharded(given: Plan) -> Any:
    warnings.simplefilter("ignore")
    model = Model(given)
    return sharded_by(model, to_torchrec(given, model), sharders_of("sgd"))


def refused_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except InvalidInput as error:
        return str(error)
    return ""


def in_silence(rank: int) -> list[bool]:
    """Whether TorchRec reads each of these batches as another: features of other places, weights, none, and no gradient back."""
    bags, weighted = sharded(plan(cuts=CUT)), sharded(plan(cuts=CUT, weighted=True))
    weights = torch.full((4 * SAMPLES,), 3.0)
    first, turned, weighed = bags(batch("xy"))[1], bags(batch("yx"))[1], bags(batch("xy", weights))[1]
    ones, none = weighted(batch("xy", torch.ones(4 * SAMPLES)))[1], weighted(batch("xy"))[1]
    weights.requires_grad_()
    weighted(batch("xy", weights * 1))[0].backward()
    turning = sharded(plan(cuts=WHOLE))
    before, by_name, after = (turning(one("yx"))[1] for one in (batch, nested, batch))
    return [
        torch.equal(first, bags(nested("xy"))[1]) and not torch.equal(first, bags(nested("yx"))[1]),
        torch.equal(before, by_name) and not torch.equal(before, after),
        not torch.allclose(first, turned),
        torch.allclose(3 * first, weighed),
        torch.equal(ones, none),
        weights.grad is None,
    ]


def test_torchrec_still_takes_batches_for_others_without_an_error(tmp_path):
    """Where this fails, TorchRec was mended, and a check of client/torchrec/batches.py can go."""
    assert on_ranks(2, tmp_path, in_silence) == [[True] * 6] * 2


def said(rank: int, given: Plan, batches: Sequence[KeyedJaggedTensor]) -> list[str]:
    """What is said of each batch, one after the other."""
    model = check_batches(check_batches(sharded(given)))
    return [refused_of(partial(model, one)) for one in batches]


ONES = torch.ones(4 * SAMPLES)
LEARNED = torch.ones(4 * SAMPLES, requires_grad=True)


@pytest.mark.parametrize(
    ("given", "batches", "words"),
    [
        (plan(cuts=CUT), ["xy", "yx"], ["", "'m' gets a batch that has feature 'x' at place 1, and the first one had it at 0"]),
        (plan(cuts=WHOLE), ["xy", "zxy"], ["", "'x' at place 1"]),
        (plan(cuts=WHOLE), ["xy", "xyz"], ["", "has feature 'z', which the first one had not"]),
        (plan(cuts=WHOLE, pooling="none"), ["xy", "yx"], ["", "'x' at place 1"]),
        (plan(cuts=WHOLE, pooling="none"), ["xyz", "x"], ["", "lacks feature 'y'"]),
        (plan(), ["xy", "yx"], ["", "'x' at place 1"]),
        (plan(cuts=CUT), ["xyz", "xyz", "xy"], ["", "", ""]),
        (plan(cuts=CUT), [nested("xy"), nested("xy"), nested("yx"), "xy"], ["", "", "'x' at place 1", "'m' gets a Keyed"]),
        (plan(cuts=WHOLE), [nested("yx"), nested("yx"), "yx"], ["", "", "'m' gets a KeyedJaggedTensor, and its first batch"]),
        (plan(cuts=WHOLE), ["yx", nested("yx")], ["", "'m' gets a TensorDict, and its first batch was a KeyedJaggedTensor"]),
        (plan(cuts=WHOLE, pooling="none"), ["yx", nested("yx"), "yx"], ["", "", ""]),
        (plan(cuts=WHOLE, weighted=True), [nested("xy")], ["'m' is weighted (is_weighted) and gets a batch without weights"]),
        (plan(cuts=CUT), ["x", "xy", "yx"], ["batch 1 of module 'm' lacks feature 'y', which table 'y'", "", "'x' at place 1"]),
        (plan(cuts=WHOLE, pooling="none"), [nested("y")], ["batch 1 of module 'm' lacks feature 'x'"]),
        (plan(), ["yz"], ["batch 1 of module 'm' lacks feature 'x'"]),
        (plan(cuts=WHOLE), [{"x": [1]}], ["'m' gets 'dict', and TorchRec takes a KeyedJaggedTensor or a TensorDict"]),
    ],
)  # fmt: skip
def test_batches_that_torchrec_would_take_for_others_are_refused(tmp_path, given, batches, words):
    made = [batch(one) if isinstance(one, str) else one for one in batches]
    for found in on_ranks(2, tmp_path, said, given, made):
        assert [*map(bool, found)] == [*map(bool, words)]
        assert all(expected in one for one, expected in zip(found, words, strict=True))


@pytest.mark.parametrize(
    ("given", "weights", "words"),
    [
        (plan(cuts=CUT), ONES, "'m' is not weighted (is_weighted) and gets a batch with weights"),
        (plan(cuts=CUT, weighted=True), None, "'m' is weighted (is_weighted) and gets a batch without weights"),
        (plan(cuts=CUT, weighted=True), LEARNED, "weights have a gradient"),
        (plan(weighted=True), LEARNED, ""),  # copies of all tables: nothing is sent
        (plan(cuts=CUT, weighted=True), ONES, ""),
        (plan(cuts=WHOLE, pooling="none"), ONES, ""),
    ],
)
def test_weights_that_a_collection_does_not_take_are_refused(tmp_path, given, weights, words):
    for (found,) in on_ranks(2, tmp_path, said, given, [batch("xy", weights)]):
        assert bool(found) == bool(words)
        assert words in found


HOLDINGS: dict[str, Cuts | None] = {
    "rows": {"x": [], "y": []},
    "whole": WHOLE,
    "columns": {"x": [(4, 0), (4, 1)], "y": [(4, 0), (4, 1)]},
    "copies": None,
}


def changed(model: nn.Module, features: KeyedJaggedTensor) -> set[int]:
    """The rows of x on this rank that a step changes."""
    of_x = model.state_dict()["m.embedding_bags.x.weight"]
    shards = [(shard.metadata.shard_offsets[0], shard.tensor) for shard in of_x.local_shards()]
    before = [tensor.clone() for _, tensor in shards]
    model(features)[0].backward()
    pairs = zip(shards, before, strict=True)
    return {first + int(row) for (first, now), then in pairs for row in (now != then).any(1).nonzero()}


def trained(rank: int) -> list[object]:
    """What a step trains for an id that its table lacks, and what it raises."""
    rows, whole, columns = (sharded(plan(cuts=HOLDINGS[name])) for name in ("rows", "whole", "columns"))
    found: list[object] = [changed(rows, looking_up(-1)), changed(whole, looking_up(99))]
    with pytest.raises(RuntimeError) as caught:
        columns(looking_up(-1))
    return [*found, "-1" in str(caught.value)]


def test_what_torchrec_does_with_an_id_that_a_table_lacks_depends_on_how_it_is_held(tmp_path):
    """Where this fails, what `check_batches` says of such ids is no longer true."""
    assert on_ranks(2, tmp_path, trained) == [[{3}, set(), True], [{8}, {0, 3}, True]]


def of_values(rank: int) -> dict[str, list[str]]:
    """By holding what is said of the third of three batches, of the second and of others, with values looked at."""
    found = {}
    for name, cuts in HOLDINGS.items():
        late = check_batches(sharded(plan(cuts=cuts)), values_every=3)
        said = [refused_of(partial(late, one)) for one in (batch(), batch(), looking_up(-1), batch())]
        early = check_batches(sharded(plan(cuts=cuts)), values_of_first=2)
        found[name] = [*said, *(refused_of(partial(early, one)) for one in (looking_up(16), looking_up(0, samples=0)))]
    weighted = check_batches(sharded(plan(cuts=WHOLE, weighted=True)), values_every=1)
    weights = torch.ones(4 * SAMPLES)
    found["weights"] = [refused_of(partial(weighted, batch("xy", one))) for one in (weights, weights / 0)]
    found["sequences"] = []
    for features in (nested("xy"), looking_up(-5), looking_up(0, samples=0)):
        sequences = check_batches(sharded(plan(cuts=WHOLE, pooling="none")), values_every=1)
        found["sequences"].append(refused_of(partial(sequences, features)))
    return found


def test_values_are_looked_at_on_request_and_what_becomes_of_them_is_said_by_holding(tmp_path):
    becomes = {
        "rows": ("first row of a block", "first row of a block", "without samples"),
        "whole": ("others lose their connection", "row 0", ""),
        "columns": ("others lose their connection", "row 0", ""),
        "copies": ("every rank has a copy", "every rank has a copy", ""),
    }
    for found in on_ranks(2, tmp_path, of_values):
        for name, (of_missing, of_large, of_empty) in becomes.items():
            first, second, missing, last, large, empty = found[name]
            assert first == second == last == ""
            assert all(word in missing for word in ("'m'", "-1", "'x'", "rows 0 to 15", of_missing))
            assert all(word in large for word in ("16", "'x'", of_large))
            assert of_empty in empty
            assert bool(of_empty) == bool(empty)
        assert found["weights"][0] == ""
        assert "no numbers" in found["weights"][1]
        fine, negative, empty = found["sequences"]
        assert fine == ""
        assert "-5" in negative
        assert "without samples" in empty


def on_the_way(rank: int) -> list[str]:
    """In a pipeline of TorchRec, and after another plan has come."""
    model = check_batches(sharded(plan(cuts=WHOLE)))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD([torch.zeros(1)], lr=1.0), torch.device("cpu"))
    ahead = iter([batch("xy"), batch("xy"), batch("yx")])
    found = [refused_of(lambda: pipeline.progress(ahead)) for _ in range(3)]
    model = check_batches(sharded(plan(cuts=WHOLE)))
    model(batch("xy"))[0].backward()
    reshard(model, plan(cuts=CUT), batch_size=2 * SAMPLES)
    return [*found, refused_of(lambda: model(batch("yx")))]


def test_pipelines_and_new_plans_keep_the_check(tmp_path):
    for found in on_ranks(2, tmp_path, on_the_way):
        assert [*map(bool, found)] == [False, False, True, True]


def by_access(rank: int) -> tuple[bool, str, str]:
    """Whether a table held by access is read by name, and what is said of weights that it has no use for."""
    case = Case()
    trainer = Trainer(case, {"a": dealt(41, 2)})
    check_batches(trainer.model)
    features = case.batch(0, rank)
    turned = features.permute([3, 2, 1, 0])
    first, other, by_key = (trainer.outputs(one) for one in (features, turned, as_tensor_dict(turned)))
    weighed = KeyedJaggedTensor(
        features.keys(), features.values(), torch.ones(len(features.values())), lengths=features.lengths()
    )
    lacking = refused_of(lambda: trainer.outputs(features.permute([0, 1, 2])))
    same = all(torch.equal(first[key], each[key]) for each in (other, by_key) for key in first)
    return same, refused_of(lambda: trainer.outputs(weighed)), lacking


def test_tables_held_by_access_are_read_by_name(tmp_path):
    for same, found, lacking in on_ranks(2, tmp_path, by_access):
        assert same
        assert "batch 4 of module 'e' lacks feature" in lacking
        assert "'e' is not weighted" in found


@pytest.mark.parametrize("name", ["values_of_first", "values_every"])
def test_fewer_than_no_batches_are_refused(name):
    with refused(UsageError, name, -1):
        check_batches(Model(plan(cuts=WHOLE)), **{name: -1})


def test_a_model_without_sharded_collections_is_no_model_to_check():
    with pytest.raises(UsageError, match="the Model has no sharded collection"):
        check_batches(Model(plan(cuts=WHOLE)))
