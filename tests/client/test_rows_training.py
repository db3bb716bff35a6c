"""Tables held by access on real TorchRec and gloo: they return and learn what the same tables do that are held as ever."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType, PoolingType

from helpers import refusals
from helpers.gloo import on_ranks
from helpers.row_trainers import Case, Trainer, dealt, differences, in_parts
from helpers.step_cases import Batch
from neuroshard.client.rows.collection import CollectionByAccess, TableRows
from neuroshard.client.rows.map import Part
from neuroshard.core.errors import InvalidInput

pytestmark = pytest.mark.slow

Sequences, Means = partial(Case, kind="sequences"), partial(Case, pooling=PoolingType.MEAN)
DEALT = {"a": dealt(41, 2), "c": dealt(29, 2)}
APART = {"a": in_parts(41, 7, blocks=(1, 2)), "b": in_parts(17, 3), "c": in_parts(29, 12, blocks=(2, 2))}
COPIED = {"a": in_parts(41, 7, copied=True, blocks=(1, 2)), "c": in_parts(29, 12, copied=True)}
APART_ON_ONE, COPIED_ON_ONE = {"a": in_parts(41, 7)}, {"a": in_parts(41, 7, copied=True)}
ON_FOUR = {"a": in_parts(41, 7, copied=True, blocks=(1, 4)), "b": dealt(17, 4), "c": in_parts(29, 12, blocks=(1, 4))}
ON_HOSTS = {"a": dealt(41, 2), "b": in_parts(17, 5, blocks=(2, 4)), "c": in_parts(29, 12, copied=True, blocks=(1, 2))}


def check(
    ranks: int, folder: Path, case: Case, held: Mapping[str, TableRows], most: float = 1e-6, cut: str = ""
) -> None:
    every = on_ranks(ranks, folder, differences, case, held, list(cut))
    for found in every:
        assert found.pop("learned") > 1e-4
        assert max(found.values()) <= most, found


@pytest.mark.parametrize(
    ("kind", "held", "optimizer"),
    [
        ("pooled", DEALT, "adagrad"),
        ("pooled", COPIED, "rowwise_adagrad"),
        ("sequences", APART, "rowwise_adagrad"),
        *[("sequences", COPIED, optimizer) for optimizer in ("sgd", "adagrad", "rowwise_adagrad")],
    ],
    ids=["pooled-dealt", "pooled-copied", "apart", "copied-sgd", "copied-adagrad", "copied-rowwise"],
)
def test_tables_held_by_access_learn_what_others_do(
    tmp_path: Path, kind: str, held: Mapping[str, TableRows], optimizer: str
) -> None:
    check(2, tmp_path, Case(kind=kind, optimizer=optimizer), held)


@pytest.mark.parametrize(("kind", "optimizer"), [("pooled", "rowwise_adagrad"), ("sequences", "adagrad")])
def test_and_on_four_ranks(tmp_path: Path, kind: str, optimizer: str) -> None:
    check(4, tmp_path, Case(kind=kind, optimizer=optimizer), ON_FOUR)


def test_and_over_the_ranks_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two ranks: blocks table-row-wise, and of table a in a grid, whose parts lie on both hosts."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check(4, tmp_path, Case(optimizer="rowwise_adagrad", weighted=True), ON_HOSTS, cut="a")


@pytest.mark.parametrize("held", [APART, COPIED], ids=["apart", "copied"])
def test_means_are_divided_by_all_lookups_of_a_sample(tmp_path: Path, held: Mapping[str, TableRows]) -> None:
    check(2, tmp_path, Means(optimizer="rowwise_adagrad"), held)


@pytest.mark.parametrize("held", [DEALT, COPIED], ids=["dealt", "copied"])
def test_lookups_have_their_weights(tmp_path: Path, held: Mapping[str, TableRows]) -> None:
    check(2, tmp_path, Case(weighted=True, optimizer="rowwise_adagrad"), held)


@pytest.mark.parametrize(
    ("kind", "held"),
    [("pooled", DEALT), ("pooled", APART), ("sequences", APART), ("sequences", COPIED)],
    ids=["dealt", "pooled", "apart", "copied"],
)
def test_fp16_rows_are_rounded_alike(tmp_path: Path, kind: str, held: Mapping[str, TableRows]) -> None:
    case = Case(kind=kind, data_type=DataType.FP16, fused={"stochastic_rounding": False})
    check(2, tmp_path, case, held, most=0.0 if kind == "sequences" and held is not COPIED else 3e-4)


def test_sequences_are_bit_equal(tmp_path: Path) -> None:
    """Nothing is added up, so nothing is rounded."""
    check(2, tmp_path, Sequences(optimizer="rowwise_adagrad"), APART, most=0.0)


def test_a_sorted_order_needs_no_list(tmp_path: Path) -> None:
    parts = Part("hot", 0, 7, copied=True), Part("cold", 7, 34, 2)
    check(2, tmp_path, Sequences(), {"a": TableRows(parts)})


class Under(torch.nn.Module):
    """A model whose loss is of one feature of each table."""

    def __init__(self, tables: torch.nn.Module) -> None:
        super().__init__()
        self.tables, self.over = tables, torch.nn.Linear(8, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.tables(batch.parts["tables"])
        loss = self.over(found["f"]).square().mean() + found["h"].square().mean() + found["g@b"].square().mean()
        return loss, loss.detach()


def piped(rank: int, held: Mapping[str, TableRows]) -> tuple[list[float], list[float], str]:
    """Losses without a pipeline and in one, and what its collection does in it."""
    case, losses = Case(), []
    batches = [Batch({"tables": case.batch(step, rank)}) for step in range(5)]
    for pipeline in (False, True):
        sharded = Trainer(case, held).sharded
        torch.manual_seed(0)
        model, found = Under(sharded), []
        if pipeline:
            optimizer = torch.optim.SGD(model.over.parameters(), lr=0.0)
            given, runs = iter(batches), TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
            found = [float(runs.progress(given)) for _ in batches]
        else:
            for batch in batches:
                loss, value = model(batch)
                loss.backward()
                found.append(float(value))
        losses.append(found)
    return losses[0], losses[1], type(sharded.forward).__name__


def test_torchrecs_pipeline_sends_ids_ahead(tmp_path: Path) -> None:
    for plain, in_pipeline, forward in on_ranks(2, tmp_path, piped, {**COPIED, "b": dealt(17, 2)}):
        assert in_pipeline == plain
        assert len(set(plain)) == 5
        assert forward == "PipelinedForward"


def unsharded(case: Case, held: Mapping[str, TableRows]) -> tuple[dict[str, Any], dict[str, Any]]:
    features, outputs = case.batch(0, 0), []
    for module in (CollectionByAccess(case.collection(), held), case.collection()):
        found = module(features)
        pooled = isinstance(found, KeyedTensor)
        outputs.append(found.to_dict() if pooled else {key: of.values() for key, of in found.items()})
        assert list(outputs[-1]) == ["f", "g@a", "g@b", "h"]
    return outputs[0], outputs[1]


@pytest.mark.parametrize(
    "case", [Case(), Means(), Case(weighted=True), Sequences()], ids=["sum", "mean", "weights", "sequences"]
)
@pytest.mark.parametrize("held", [DEALT, APART, COPIED], ids=["dealt", "apart", "copied"])
def test_the_model_returns_the_same_before_it_is_sharded(case: Case, held: Mapping[str, TableRows]) -> None:
    ours, theirs = unsharded(case, held)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-6)


def test_indices_come_with_sequences_that_need_them() -> None:
    configs = Sequences().collection().embedding_configs()
    module = EmbeddingCollection(configs, need_indices=True)
    features = Sequences().batch(0, 0)
    wanted, found = module(features), CollectionByAccess(module, APART)(features)
    for key, value in wanted.items():
        assert found[key].weights().tolist() == value.weights().tolist()
        assert found[key].lengths().tolist() == value.lengths().tolist()


def with_id(row: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["f", "g", "h"], torch.tensor([row, 1, 1, 1, 1, 1]), lengths=torch.ones(6, dtype=torch.long)
    )


def looked_up(rank: int, held: Mapping[str, TableRows] | None, row: int) -> str:
    trainer = Trainer(Case(fused={"bounds_check_mode": BoundsCheckMode.FATAL}), held)
    try:
        trainer.outputs(with_id(row))
    except RuntimeError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize("row", [-7, 41, 1000])
@pytest.mark.parametrize("held", [None, {"a": dealt(41, 1)}, APART_ON_ONE, COPIED_ON_ONE])
def test_ids_that_the_table_lacks_fail_as_ever(tmp_path: Path, row: int, held: Mapping[str, TableRows] | None) -> None:
    (said,) = on_ranks(1, tmp_path, looked_up, held, row)
    assert said.startswith(f"Expected idx {'>= 0' if row < 0 else '< num_rows'} to be true")


@pytest.mark.parametrize("row", [-7, 41, 1000])
def test_wrong_ids_go_where_they_went_to_a_dealt_table(row: int) -> None:
    module = CollectionByAccess(Case().collection(), DEALT)
    inside, _ = module.rows.split(with_id(row))
    assert inside["f->a/dealt"].values().tolist()[0] == row


def test_means_with_weights_are_refused() -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"], pooling=PoolingType.MEAN
    )
    with refusals.refused(InvalidInput, "'t'", "mean", "weights"):
        CollectionByAccess(EmbeddingBagCollection([config], is_weighted=True), {"t": in_parts(9, 3, count=3)})


def test_variable_batches_are_refused() -> None:
    features = KeyedJaggedTensor(
        ["f", "g", "h"],
        torch.tensor([1, 1, 1]),
        lengths=torch.ones(3, dtype=torch.long),
        stride_per_key_per_rank=[[1], [1], [1]],
    )
    with pytest.raises(InvalidInput, match="batch sizes of their own"):
        CollectionByAccess(Case().collection(), APART)(features)


def test_weights_of_means_that_are_not_weighted_are_refused() -> None:
    """TorchRec's operator would use them, sharded: a mean of another value."""
    features = Case(weighted=True).batch(0, 0)
    for held in (APART, DEALT):
        with pytest.raises(InvalidInput, match="the batch has weights, and table 'a', which is pooled by mean"):
            CollectionByAccess(Means().collection(), held)(features)
    CollectionByAccess(Case().collection(), APART)(features)


@pytest.mark.parametrize("held", [DEALT, APART, COPIED], ids=["dealt", "apart", "copied"])
def test_a_batch_may_have_no_samples(held: Mapping[str, TableRows]) -> None:
    nothing = torch.empty(0, dtype=torch.long)
    batch = KeyedJaggedTensor(["f", "g", "h"], nothing, lengths=nothing)
    inside, _ = CollectionByAccess(Case().collection(), held).rows.split(batch)
    assert (inside.stride(), len(inside.values())) == (0, 0)


def refused(rank: int, case: Case) -> str:
    try:
        Trainer(case, COPIED)
    except InvalidInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            Case(optimizer="adam"),
            "copies are trained by exact_sgd, exact_row_wise_adagrad, exact_adagrad only, not by adam",
        ),
        (Case(fused={"weight_decay": 0.1}), "copies do not follow weight_decay=0.1"),
        (Case(fused={"gradient_clipping": True}), "copies do not follow gradient_clipping=True"),
    ],
)
def test_copies_that_would_learn_otherwise_are_refused(tmp_path: Path, case: Case, said: str) -> None:
    for line in on_ranks(2, tmp_path, refused, case):
        assert said in line
        assert "table 'a'" in line
