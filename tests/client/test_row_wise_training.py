"""Real TorchRec trainers on gloo by plans that split rows: what they compute is what the unsharded tables compute."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType

from helpers.gloo import on_ranks
from helpers.plans import row_wise as row_wise_shards
from helpers.sharded import OPTIMIZERS, local_parts, sharded, sharders_of, table_of
from neuroshard.client.checkpoint import load_resharded
from neuroshard.client.torchrec import to_torchrec
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology

pytestmark = pytest.mark.slow


STEPS, LOCAL_BATCH, LEARNING_RATE = 10, 6, 0.02
POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
DATA_TYPES = {4: DataType.FP32, 2: DataType.FP16}


def tables(element_bytes: int = 4) -> tuple[Table, ...]:
    """Row-wise: an uneven last block, one row a rank, means, weights. Column-wise, and whole."""

    def table(name: str, rows: int, dim: int, **fields: object) -> Table:
        return Table(name=name, rows=rows, dim=dim, pooling_factor=3.0, element_bytes=element_bytes, **fields)

    return (
        table("rows_uneven", 1003, 16),
        table("rows_one_each", 4, 12),
        table("columns", 200, 16),
        table("columns_mean", 90, 8, pooling="mean"),
        table("whole", 50, 8),
        table("rows_mean", 301, 8, pooling="mean"),
        table("rows_sum", 77, 4),
        table("rows_weighted", 97, 8, weighted=True),
        table("whole_weighted", 30, 4, weighted=True),
    )


def mixed_plan(devices: int, element_bytes: int = 4) -> Plan:
    """Tables called rows… row-wise, those called columns… in two, the others whole on the last device."""
    some = tables(element_bytes)
    shards: list[Shard] = []
    for table in some:
        if table.name.startswith("rows"):
            shards += row_wise_shards(table, devices)
        elif table.name.startswith("columns"):
            shards += [
                Shard(table=table.name, rows=table.rows, column_offset=at, dim=table.dim // 2, device=at % 3 % devices)
                for at in (0, table.dim // 2)
            ]
        else:
            shards.append(Shard(table=table.name, rows=table.rows, dim=table.dim, device=devices - 1))
    return Plan(
        task=ShardingTask(tables=some, device_memory_bytes=(2**20,) * devices, batch_size=LOCAL_BATCH * devices),
        shards=tuple(shards),
        provenance=Provenance(neuroshard_version="0", algorithm="by hand"),
    )


def on_hosts(plan: Plan, local: int) -> Plan:
    """The plan with rows_uneven over all ranks, and the other rows by turns over those of one host, the last one first."""
    tables = {table.name: table for table in plan.task.tables}
    shards = [shard for shard in plan.shards if shard.rows == tables[shard.table].rows or shard.table == "rows_uneven"]
    split = [name for name in tables if name.startswith("rows") and name != "rows_uneven"]
    for turn, name in enumerate(split, 1):
        first = -turn * local % plan.task.devices
        shards += [s.model_copy(update={"device": first + s.device}) for s in row_wise_shards(tables[name], local)]
    return plan.model_copy(update={"shards": tuple(shards)})


def groups(some: tuple[Table, ...]) -> list[list[Table]]:
    """Tables by collection: TorchRec cannot have means of split rows beside tables whose rows are whole."""
    means = [table for table in some if table.name in ("rows_mean", "rows_sum")]
    weighted = [table for table in some if table.weighted]
    return [[table for table in some if table not in means + weighted], means, weighted]


class Model(nn.Module):
    """Pooled embeddings of all tables, by name, of three collections."""

    def __init__(self, some: tuple[Table, ...], device: str) -> None:
        super().__init__()
        self.bags = nn.ModuleList(self.collection(of, of[0].weighted, device) for of in groups(some))

    @staticmethod
    def collection(some: list[Table], weighted: bool, device: str) -> EmbeddingBagCollection:
        configs = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=[table.name],
                pooling=POOLING[table.pooling],
                data_type=DATA_TYPES[table.element_bytes],
            )
            for table in some
        ]
        return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device(device))

    def forward(self, features: list[KeyedJaggedTensor]) -> dict[str, Tensor]:
        pooled = [bag(jagged) for bag, jagged in zip(self.bags, features, strict=True)]
        return {name: value for one in pooled for name, value in one.to_dict().items()}


def batch(some: list[Table], weighted: bool, samples: int, generator: torch.Generator) -> KeyedJaggedTensor:
    """0 to 6 ids a sample and table, some of them again and again, and weights."""
    lengths = torch.randint(7, (len(some), samples), generator=generator)
    ids = [
        torch.randint(min(table.rows, 1 + 40 * (row % 2) + table.rows // 2), (int(n),), generator=generator)
        for table, of_table in zip(some, lengths, strict=True)
        for row, n in enumerate(of_table)
    ]
    values = torch.cat([*ids, torch.tensor([0])])[:-1].long()
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor(
        keys=[table.name for table in some], values=values, lengths=lengths.flatten(), weights=weights
    )


def samples_of(jagged: KeyedJaggedTensor, first: int, count: int) -> KeyedJaggedTensor:
    """Some of the samples of a batch."""
    lengths = jagged.lengths().view(len(jagged.keys()), -1)
    kept = torch.zeros_like(lengths, dtype=torch.bool)
    kept[:, first : first + count] = True
    taken = torch.repeat_interleave(kept.flatten(), lengths.flatten())
    weights = jagged.weights_or_none()
    return KeyedJaggedTensor(
        keys=jagged.keys(),
        values=jagged.values()[taken],
        lengths=lengths[:, first : first + count].flatten(),
        weights=None if weights is None else weights[taken],
    )


class Reference:
    """The unsharded tables, trained by all samples with torch's own gradients."""

    def __init__(self, some: tuple[Table, ...], optimizer: str) -> None:
        self.model = Model(some, "cpu").float()  # fused kernels sum fp16 rows in fp32
        self.optimizer = optimizer
        self.moments = {name: torch.zeros(len(w)) for name, w in self.model.named_parameters()}

    def step(self, loss: Tensor) -> None:
        self.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                rate = torch.full((len(weight), 1), LEARNING_RATE)
                if self.optimizer == "rowwise_adagrad":
                    self.moments[name] += weight.grad.square().mean(dim=1)
                    rate = rate / (self.moments[name].sqrt() + 1e-8)[:, None]
                weight.sub_(rate * weight.grad)


def loss_of(pooled: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return torch.stack([(value - targets[name]).square().sum() for name, value in pooled.items()]).sum()


def by_plan(plan: Plan, optimizer: str) -> Any:
    model = Model(plan.task.tables, "meta")
    return sharded(model, to_torchrec(plan, model), sharders_of(optimizer, LEARNING_RATE))


def differences(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, float]:
    """The largest of each table between this rank's shards and the whole weights."""
    found: dict[str, float] = {}
    for name, place, part in local_parts(model.state_dict()):
        if part.numel():
            table = table_of(name)
            found[table] = max(found.get(table, 0.0), float((part.float() - weights[name][place]).abs().max()))
    return found


class Training:
    """A sharded model and the unsharded one beside it, step by step on the same batches."""

    def __init__(self, rank: int, plan: Plan, optimizer: str) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        self.rank, self.ranks, self.tables, self.optimizer = rank, plan.task.devices, plan.task.tables, optimizer
        self.reference = Reference(self.tables, optimizer)
        if self.tables[0].element_bytes == 2:
            for weight in self.reference.model.parameters():
                weight.data = weight.data.half().float()
        self.model = by_plan(plan, optimizer)
        for name, place, part in local_parts(self.model.state_dict()):
            part.copy_(self.weights[name][place])
        self.generator = torch.Generator().manual_seed(1)

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.reference.model.state_dict()

    def step(self) -> dict[str, float]:
        """Train both; largest difference of this rank's pooled embeddings by table."""
        samples = self.ranks * LOCAL_BATCH
        whole = [batch(of, of[0].weighted, samples, self.generator) for of in groups(self.tables)]
        targets = {table.name: torch.randn(samples, table.dim, generator=self.generator) for table in self.tables}
        first = self.rank * LOCAL_BATCH
        got = self.model([samples_of(jagged, first, LOCAL_BATCH) for jagged in whole])
        expected = self.reference.model(whole)
        loss_of(got, {name: of[first : first + LOCAL_BATCH] for name, of in targets.items()}).backward()
        self.reference.step(loss_of(expected, targets) / self.ranks)  # TorchRec takes the mean over the ranks
        return {
            name: float((value.float() - expected[name][first : first + LOCAL_BATCH]).abs().max())
            for name, value in got.items()
        }

    def go_on_with(self, plan: Plan, folder: Path) -> None:
        """Save everything, shard anew, and read it back."""
        save(self.state(), checkpoint_id=folder)
        self.model = by_plan(plan, self.optimizer)
        assert load_resharded(self.state(), folder) == ()

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.model.fused_optimizer.state_dict()}


def train(rank: int, plan: Plan, optimizers: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """By optimizer the differences by table: of the first forward, of the last one, of the weights after all steps."""
    found = {}
    for optimizer in optimizers:
        training = Training(rank, plan, optimizer)
        forwards = [training.step() for _ in range(STEPS)]
        trained = differences(training.model, training.weights)
        found[optimizer] = {"first": forwards[0], "last": forwards[-1], "trained": trained}
    return found


def moved_on(plan: Plan) -> Plan:
    """All tables whole, one device after another."""
    shards = tuple(
        Shard(table=table.name, rows=table.rows, dim=table.dim, device=index % plan.task.devices)
        for index, table in enumerate(plan.task.tables)
    )
    return Plan(task=plan.task, shards=shards, provenance=plan.provenance)


def check_same(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """What each optimizer's training differs by from that of unsplit tables is rounding."""
    for optimizer, found in results.items():
        # row-wise Adagrad keeps a moment a row and shard: two halves of the columns learn at rates of their own
        same = {name for name in found["first"] if optimizer == "sgd" or not name.startswith("columns")}
        assert max(found["first"].values()) < 1e-6
        for which in ("last", "trained"):
            off = {name: difference for name, difference in found[which].items() if name in same}
            assert max(off.values()) < 2e-6, (optimizer, which)


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_rows_train_as_unsplit_tables_do_also_with_row_wise_adagrad(ranks, tmp_path):
    for results in on_ranks(ranks, tmp_path, train, mixed_plan(ranks), ["sgd", "rowwise_adagrad"]):
        check_same(results)
        assert results["rowwise_adagrad"]["last"]["columns"] > 1e-3


def test_rows_split_over_the_ranks_of_a_host_train_as_unsplit_tables_do(tmp_path, monkeypatch):
    """Two hosts of two ranks, of which TorchRec adds up sums on a host, and then sends them to the other one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan = on_hosts(mixed_plan(4), 2)
    given = to_torchrec(plan, Model(plan.task.tables, "meta")).plan
    kinds = {name: (of.sharding_type, of.ranks) for some in given.values() for name, of in some.items()}
    assert {name: kind for name, kind in kinds.items() if name.startswith("rows")} == {
        "rows_uneven": ("row_wise", [0, 1, 2, 3]),
        "rows_one_each": ("table_row_wise", [2, 3]),
        "rows_mean": ("table_row_wise", [0, 1]),
        "rows_sum": ("table_row_wise", [2, 3]),
        "rows_weighted": ("table_row_wise", [0, 1]),
    }
    for results in on_ranks(4, tmp_path, train, plan, ["sgd", "rowwise_adagrad"]):
        check_same(results)


def test_split_rows_of_half_precision_train_as_unsplit_ones_do(tmp_path):
    for results in on_ranks(2, tmp_path, train, mixed_plan(2, element_bytes=2), ["sgd"]):
        assert max(results["sgd"]["first"].values()) < 1e-6
        for which in ("last", "trained"):
            assert max(results["sgd"][which].values()) < 2e-3


def from_plan_to_plan(rank: int, plan: Plan, folder: Path) -> dict[str, float]:
    """The largest differences after training by whole tables, then by split rows, then by whole tables again."""
    kept = tuple(table for table in plan.task.tables if not table.name.startswith("columns"))
    task, names = plan.task.model_copy(update={"tables": kept}), {table.name for table in kept}
    rows = Plan(task=task, shards=tuple(s for s in plan.shards if s.table in names), provenance=plan.provenance)
    training = Training(rank, moved_on(rows), "rowwise_adagrad")
    for number, other in enumerate((rows, moved_on(rows))):
        for _ in range(3):
            training.step()
        training.go_on_with(other, folder / str(number))
    return max([training.step() for _ in range(3)], key=lambda found: max(found.values()))


def test_a_checkpoint_goes_from_whole_rows_to_split_ones_and_back_with_the_optimizers_state(tmp_path):
    for found in on_ranks(2, tmp_path, from_plan_to_plan, mixed_plan(2), tmp_path):
        assert max(found.values()) < 2e-6


def off_unsharded(rank: int, some: dict[str, tuple[str, str, bool]], key: str) -> float:
    """What TorchRec makes of tables in one collection: the largest difference of what `key` names from the unsharded one's.
    Tables by name: pooling, feature, and whether rows are split."""
    warnings.simplefilter("ignore")
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=10, embedding_dim=8, feature_names=[feature], pooling=POOLING[pooling]
        )
        for name, (pooling, feature, _) in some.items()
    ]
    torch.manual_seed(0)
    unsharded, meta = (EmbeddingBagCollection(tables=configs, device=torch.device(name)) for name in ("cpu", "meta"))
    makers = {name: row_wise() if split else table_wise(rank=1) for name, (_, _, split) in some.items()}
    plan = construct_module_sharding_plan(meta, makers, world_size=2, local_size=2, device_type="cpu")
    model = sharded(meta, ShardingPlan(plan={"": plan}), sharders_of("sgd"))
    for name, place, part in local_parts(model.state_dict()):
        part.copy_(unsharded.state_dict()[name][place])
    features = [Table(name=f, rows=10, dim=8, pooling_factor=2.0) for f in sorted({f for _, f, _ in some.values()})]
    jagged = batch(features, False, 8, torch.Generator().manual_seed(1))
    return float((model(jagged)[key] - unsharded(jagged)[key]).abs().max())


@pytest.mark.parametrize(
    ("some", "key"),
    [
        ({"mean": ("mean", "x", True), "sum": ("sum", "y", False)}, "y"),
        ({"a": ("sum", "x", True), "b": ("sum", "x", True), "mean": ("mean", "y", True)}, "x@b"),
        ({"a": ("mean", "x", True), "b": ("sum", "x", True)}, "x@b"),
    ],
    ids=["whole", "two sums of one feature", "a mean and a sum of one feature"],
)
def test_torchrec_still_divides_other_tables_beside_means_of_split_rows(tmp_path, some, key):
    """Where this fails, TorchRec was mended, and its part of client.torchrec.splits.wrong_means can go."""
    assert min(on_ranks(2, tmp_path, off_unsharded, some, key)) > 0.1


def test_means_of_split_rows_may_share_a_feature(tmp_path):
    some = {"a": ("mean", "x", True), "b": ("mean", "x", True), "sum": ("sum", "y", True)}
    for key in ("x@a", "x@b", "y"):
        (tmp_path / key).mkdir()
        assert max(on_ranks(2, tmp_path / key, off_unsharded, some, key)) < 1e-5


def fault_of_grid(_: int, plan: Plan, optimizer: str) -> str:
    """TorchRec's error where it makes the model that a plan holds, for this optimizer, whatever to_torchrec says of it."""
    (table,) = plan.task.tables
    unsharded = Model.collection([table], False, "meta")
    try:
        sharded(unsharded, to_torchrec(plan, unsharded, optimizer="sgd"), sharders_of(optimizer))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("local", "pod"), [(1, 2), (2, 1)])
def test_torchrec_still_fails_on_state_per_row_in_grids_over_several_hosts(
    tmp_path, monkeypatch, optimizer, local, pod
):
    """Where this fails, TorchRec was mended, and core.sharding.Sharding.trains can go."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setenv("TORCHREC_RESOLVED_POD_SIZE", str(pod))
    table = Table(name="grid", rows=17, dim=8, pooling_factor=2.0)
    shards = [
        one.model_copy(update={"dim": 4, "column_offset": 4 * part, "device": 2 * part + one.device})
        for part in (0, 1)
        for one in row_wise_shards(table, 2)
    ]
    task = ShardingTask(
        tables=(table,),
        device_memory_bytes=(2**20,) * 4,
        batch_size=8,
        topology=Topology(domain=2, local_world_size=local),
    )
    provenance = Provenance(neuroshard_version="0", algorithm="by hand")
    plan = Plan(task=task, shards=tuple(shards), provenance=provenance)

    found = on_ranks(4, tmp_path, fault_of_grid, plan, optimizer)
    if optimizer == "rowwise_adagrad" and pod == 2:
        assert all("Total volume of shards" in fault for fault in found)
    else:
        assert found == [""] * 4
