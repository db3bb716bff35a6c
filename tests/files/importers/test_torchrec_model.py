"""Tables of a user's own model, named as package.module:make_model."""

import sys
import textwrap

import pytest
import torch
from torch import nn

from helpers.refusals import names, refused
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.id_map import IdMap
from neuroshard.core.units import parse_bytes
from neuroshard.files.importers.tables_source import Asked, from_torchrec
from neuroshard.files.importers.torchrec_model import dense_bytes, reserve_notes, torch_embeddings

MODEL = """
    import torch
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
    from torchrec.modules.embedding_configs import DataType
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule, ManagedCollisionCollection

    class Model(nn.Module):
        def __init__(self, device=None):
            super().__init__()
            user = EmbeddingBagConfig(name="user", num_embeddings=10**10, embedding_dim=128, feature_names=["id", "friend"])
            ad = EmbeddingBagConfig(name="ad", num_embeddings=10**8, embedding_dim=64, feature_names=["ad"],
                                    data_type=DataType.FP16, pooling=PoolingType.MEAN)
            tag = EmbeddingBagConfig(name="tag", num_embeddings=10**9, embedding_dim=32, feature_names=["tag"])
            seq = EmbeddingConfig(name="seq", num_embeddings=10**9, embedding_dim=128, feature_names=["seq"])
            self.sparse = nn.ModuleDict({"a": EmbeddingBagCollection(tables=[user, ad], device=device),
                                         "b": EmbeddingBagCollection(tables=[tag], is_weighted=True, device=device)})
            self.sequence = EmbeddingCollection(tables=[seq], device=device)
            self.dense = nn.Linear(10, 10, device="cpu")
            self.register_buffer("steps", torch.zeros(10**12, device=device))

    def make():
        print("as verbose as models are")
        return Model()

    def with_optimizers():
        model = Model()
        tables = model.sparse["a"].embedding_bags
        apply_optimizer_in_backward(torch.optim.Adam, tables["user"].parameters(), {"lr": 0.1})
        apply_optimizer_in_backward(RowWiseAdagrad, tables["ad"].parameters(), {"lr": 0.1})
        return model

    def on_a_device():
        return Model(torch.device("cpu")).to("cuda:0", torch.float16).cuda().cpu()

    def collisions():
        tables = [EmbeddingBagConfig(name="hashed", num_embeddings=100, embedding_dim=16, feature_names=["id"])]
        remap = MCHManagedCollisionModule(zch_size=100, device=torch.device("cpu"), input_hash_size=1000,
                                          eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=2)
        return ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables), ManagedCollisionCollection({"hashed": remap}, tables))

    def twins():
        def bags(*names):
            return EmbeddingBagCollection(tables=[
                EmbeddingBagConfig(name=n, num_embeddings=9, embedding_dim=4, feature_names=[n]) for n in names])
        return nn.ModuleDict({"a": bags("user", "ad"), "b": nn.ModuleDict({"c": bags("ad")})})

    def reads_weights():
        return Model() if torch.ones(3).sum().item() > 2 else None

    def raises():
        raise ValueError("two\\nlines")

    def exits():
        raise SystemExit("bye")

    class Odd(BaseException):
        pass

    def odd():
        raise Odd("farewell")

    def needs(batch_size, *, device):
        return Model()

    def other():
        return {}

    def plain():
        return nn.Linear(2, 2)

    def bags_of(is_weighted=False, **fields):
        return EmbeddingBagCollection(is_weighted=is_weighted, tables=[
            EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=4, feature_names=[name], **more)
            for name, more in fields.items()])

    def apart():
        return bags_of(plain={}, stashed={"stash_weights": True}, updated={"enable_embedding_update": True})

    def weighted_means():
        return bags_of(is_weighted=True, plain={}, averaged={"pooling": PoolingType.MEAN})

    number = 3
"""


@pytest.fixture
def user_model(tmp_path, monkeypatch):
    """The name of a module in the working directory, as a user has it."""
    name = f"user_model_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / f"{name}_broken.py").write_text("import no_such_package\n")
    (tmp_path / f"{name}_raises.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def read(spec, *, factors=None, default=None):
    return from_torchrec(spec, Asked(optimizer="sgd", pooling_factors=factors or {}, default_pooling_factor=default))


@pytest.mark.parametrize("function", ["make", "on_a_device", "Model"])
def test_terabytes_of_tables_are_read_without_weights_on_whatever_device(user_model, function, capsys):
    found = read(f"{user_model}:{function}", factors={"friend": 20.0, "tag": 3.5}).tables()

    assert [
        (t.name, t.rows, t.dim, t.pooling_factor, t.element_bytes, t.pooling, t.weighted) for t in found.tables
    ] == [
        ("user", 10**10, 128, 21.0, 4, "sum", False),
        ("ad", 10**8, 64, 1.0, 2, "mean", False),
        ("tag", 10**9, 32, 3.5, 4, "sum", True),
        ("seq", 10**9, 128, 1.0, 4, "none", False),
    ]
    assert [(feature.name, feature.pooling_factor) for feature in found.tables[0].features] == [
        ("id", 1.0),
        ("friend", 20.0),
    ]
    assert [note.split(": ", 1)[1][:31] for note in found.notes] == [
        "user, ad, seq: no pooling facto",
        "the model's dense parameters ne",
    ]
    assert capsys.readouterr().out == ""


def test_memory_counts_the_optimizer_that_is_on_a_table_before_the_one_that_is_said(user_model):
    found = read(f"{user_model}:with_optimizers").tables()  # read says sgd
    state = {table.name: (table.optimizer_bytes_per_row, table.optimizer_bytes_per_element) for table in found.tables}
    assert state == {"user": (0, 8), "ad": (4, 0), "tag": (0, 0), "seq": (0, 0)}


def test_what_to_reserve_for_the_dense_part_counts_weights_gradients_and_adams_moments(user_model):
    note = read(f"{user_model}:make").tables().notes[-1]
    assert note.endswith(
        "the model's dense parameters need 1.8 KiB of every rank (weights, gradients, Adam's moments): search with --reserve "
        "1.8KiB, or more, for activations are not in it"
    )
    assert 4 * 4 * (10 * 10 + 10) == 1760 <= parse_bytes("1.8KiB")


def test_frozen_parameters_need_their_weights_only_and_lazy_ones_are_not_known():
    tables = nn.EmbeddingBag(1000, 64, device="meta")
    frozen = nn.Linear(8, 16, bias=False, dtype=torch.float16).requires_grad_(requires_grad=False)
    model = nn.ModuleList([tables, frozen, nn.LazyLinear(5)])
    assert dense_bytes(model, [tables]) == 2 * 8 * 16
    assert reserve_notes(tables, [tables]) == []
    assert torch_embeddings(model, []) == ["0 (nn.EmbeddingBag, 1,000 x 64)"]
    assert torch_embeddings(model, [tables]) == []


def test_a_table_s_own_pooling_factor_counts_before_its_features_and_a_default(user_model):
    found = read(f"{user_model}:make", factors={"user": 50.0}, default=2.0).tables()
    assert [table.pooling_factor for table in found.tables] == [50.0, 2.0, 2.0, 2.0]
    assert [feature.pooling_factor for feature in found.tables[0].features] == [25.0, 25.0]
    assert not any("no pooling factor" in note for note in found.notes)
    found = read(f"{user_model}:make", factors={"user": 50.0, "friend": 20.0}, default=2.0).tables()
    assert [(feature.name, feature.pooling_factor) for feature in found.tables[0].features] == [
        ("id", 30.0),
        ("friend", 20.0),
    ]


@pytest.mark.parametrize(
    ("spec", "error", "facts"),
    [
        ("{0}", UsageError, ("package.module:function",)),
        ("{0}:make it", UsageError, ("package.module:function",)),
        ("no_such_module:make", InvalidInput, ("'no_such_module'",)),
        ("{0}_broken:make", InvalidInput, ("no_such_package",)),
        ("{0}_raises:make", InvalidInput, ("ZeroDivisionError", "division by zero")),
        ("{0}:mak", InvalidInput, ("'mak'", "has Model, make,")),
        ("{0}:Model.mak", InvalidInput, ("'mak'",)),
        ("{0}:number", InvalidInput, (3,)),
        ("{0}:needs", InvalidInput, ("batch_size", "device")),
        ("{0}:raises", InvalidInput, ("ValueError", "two lines", "{0}.py")),
        ("{0}:reads_weights", InvalidInput, ("meta tensors", "weights")),
        ("{0}:exits", InvalidInput, ("SystemExit", "bye")),
        ("{0}:odd", InvalidInput, ("Odd", "farewell")),
        ("{0}:other", InvalidInput, ("{{}}", "torch.nn.Module")),
        ("{0}:plain", InvalidInput, ("EmbeddingBagCollection", "EmbeddingCollection")),
    ],
)
def test_what_is_no_model_is_reported_in_one_line(user_model, spec, error, facts):
    with refused(error, *(str(fact).format(user_model) for fact in facts)):
        read(spec.format(user_model))


def test_tables_that_give_rows_to_ids_as_they_train_have_the_bytes_of_their_id_map(user_model):
    (table,) = read(f"{user_model}:collisions", default=1.0).tables().tables

    assert (table.rows, table.module) == (100, "")
    # an id, its row, its count and when it was last seen; of a lookup the id and when, of 1.25 x 2 steps
    assert table.id_map == IdMap(
        kind="mch", bytes_per_row=4 * 8, bytes_per_lookup=1.25 * 2 * 2 * 8, bytes_per_rank=1028 * 8
    )


def test_tables_say_their_module_and_have_its_path_in_a_name_that_two_modules_use(user_model):
    found = read(f"{user_model}:twins", factors={"b.c.ad": 5.0}, default=2.0).tables()

    assert [(t.name, t.module, t.name_in_module, t.pooling_factor) for t in found.tables] == [
        ("user", "a", "user", 2.0),
        ("a.ad", "a", "ad", 2.0),
        ("b.c.ad", "b.c", "ad", 5.0),
    ]
    assert any("got the module's path: a.ad, b.c.ad" in note for note in found.notes)


def test_a_pooling_factor_of_nothing_in_the_model_is_refused(user_model):
    with refused(InvalidInput, "'usr'"):
        read(f"{user_model}:make", factors={"usr": 2.0})


@pytest.mark.parametrize(
    ("make", "facts"),
    [("apart", ["stashed", "updated", "stash_weights"]), ("weighted_means", ["averaged", "mean with weights", "sum"])],
)
def test_what_torchrec_does_otherwise_than_costs_or_the_model_say_is_a_note(user_model, make, facts):
    notes = read(f"{user_model}:{make}").tables().notes
    assert any(all(names(note, fact) for fact in facts) for note in notes), notes
    assert not any(names(note, "plain") and names(note, facts[0]) for note in notes if "pooling factor" not in note)
