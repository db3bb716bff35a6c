"""Plans for groups of ranks with TorchRec's own DMPCollection, on gloo: its ranks, its arguments, and what it trains.

DMPCollection asserts that it is on GPUs. Its module is compiled here without assertions, and averages by an all-reduce of the
tests' own.
"""

import os
import types
import warnings
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.remote_device import _remote_device
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import model_parallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from helpers import step_cases
from helpers.gloo import on_ranks
from helpers.plans import NOW, row_wise
from neuroshard.client.checkpoint import load_resharded
from neuroshard.client.load import check_world_size
from neuroshard.client.peak_memory import peak_memory
from neuroshard.client.torchrec import NeuroShardPlanner, dmp_collection, to_torchrec
from neuroshard.client.torchrec.planner import rank_storage
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.core.groups import Groups, sizes_of
from neuroshard.core.plan import Plan, Provenance, Shard, peaks_of
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore

RANKS, BATCH, STEPS, RATE = 4, 3, 5, 0.1
TABLES = tuple(
    Table(name=name, rows=rows, dim=8, pooling_factor=2.0)
    for name, rows in (("whole", 30), ("cut", 20), ("rows", 47), ("copied", 6))
)


def plan_of(size: int, groups: Groups | None, domain: int | None = None) -> Plan:
    """A table whole on the last device, one cut over the first two, one row-wise over all or over the last `domain`, and one
    copied."""
    whole, cut, rows, copied = TABLES
    shards = [Shard(table="whole", rows=whole.rows, dim=8, device=size - 1)]
    shards += [Shard(table="cut", rows=cut.rows, dim=4, column_offset=4 * half, device=half) for half in (0, 1)]
    over = domain or size
    shards += [one.model_copy(update={"device": size - over + one.device}) for one in row_wise(rows, over)]
    shards += [Shard(table="copied", rows=copied.rows, dim=8, device=device) for device in range(size)]
    task = ShardingTask.parse(
        {
            "tables": TABLES,
            "device_memory_bytes": (2**20,) * size,
            "batch_size": BATCH * size,
            "constraints": {"tables": [{"table": "copied", "data_parallel": True}]},
            "dense_optimizer": "sgd",
            "groups": groups,
            "topology": groups.topology(size, None)
            if groups
            else domain and Topology(domain=domain, local_world_size=domain),
        },
        "a task",
    )
    return Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def groups_of(ranks: int, contiguous: bool, **others: int) -> Groups:
    return Groups(**{"ranks": ranks, "contiguous": contiguous, "domain": ranks, "local_world_size": ranks, **others})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in TABLES
        ]
        self.tables = EmbeddingBagCollection(tables=configs)
        self.over = nn.Linear(8 * len(TABLES), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.tables(features)
        return self.over(torch.cat([pooled[t.name] for t in TABLES], dim=1))


@cache
def without_assertions() -> Any:
    """TorchRec's module of DMPCollection."""
    source = Path(model_parallel.__file__)
    module = types.ModuleType(model_parallel.__name__)
    exec(compile(source.read_text(), str(source), "exec", optimize=1), module.__dict__)
    return module


def on_cpu(kind: Any) -> Any:
    """DMPCollection, whose shards are on `cpu`, not on the cpu:0 that it writes."""

    class OnCpu(kind):  # type: ignore[misc]
        def _remap_sharding_plan(self, plan: Any, **how: Any) -> None:
            super()._remap_sharding_plan(plan=plan, **how)
            for tables in plan.plan.values():
                for one in tables.values():
                    for shard in one.sharding_spec.shards if one.sharding_spec else ():
                        shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    return OnCpu


def trainer_of(
    plan: Plan, optimizer: str, make: Callable[[], nn.Module] = Model
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The sharded model, and the weights that it had before."""
    warnings.simplefilter("ignore")
    module = without_assertions()
    torch.manual_seed(0)
    model = make()
    fused = {"optimizer": getattr(EmbOptimType, optimizer), "learning_rate": RATE, "eps": 1e-8}
    sharders, groups, cpu = [EmbeddingBagCollectionSharder(fused_params=fused)], plan.task.groups, torch.device("cpu")
    begins = {name: value.clone() for name, value in model.state_dict().items()}
    size = None if groups is None else plan.task.devices
    given = to_torchrec(plan, model, device_type="cpu", sharders=sharders, sharding_group_size=size)
    held: dict[str, Any] = {}

    def average(tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=held["replicas"])
            tensor.div_(dist.get_world_size(held["replicas"]))

    if groups is None:
        env = module.ShardingEnv.from_process_group(dist.group.WORLD)
        return module.DistributedModelParallel(model, env=env, device=cpu, plan=given, sharders=sharders), begins
    trained = on_cpu(module.DMPCollection)(
        model,
        cpu,
        given,
        global_pg=dist.group.WORLD,
        sharders=sharders,
        custom_all_reduce=average,
        **dmp_collection(plan),
    )
    held["replicas"] = trained._default_ctx.replica_pg
    return trained, begins


def train(rank: int, plan: Plan, optimizer: str, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses of all ranks' samples, and the table "whole" with its state, if it has any, after the last step."""
    trained, begins = trainer_of(plan, optimizer)
    groups = plan.task.groups
    _set(trained, begins, plan, rank)
    dense = [one for name, one in trained.named_parameters() if "over" in name or "copied" in name]
    descent, losses = torch.optim.SGD(dense, lr=RATE), []
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        lengths = torch.full((BATCH * len(TABLES),), 2)
        values = torch.cat([torch.randint(0, t.rows, (2 * BATCH,), generator=generator) for t in TABLES])
        features = KeyedJaggedTensor([t.name for t in TABLES], values, lengths=lengths)
        descent.zero_grad()
        loss = ((trained(features) - 1) ** 2).mean()
        loss.backward()
        descent.step()
        if groups is not None and (step + 1) % groups.sync_every == 0:
            trained.sync()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses, _moments(trained)


def peak_of(rank: int, plan: Plan) -> int:
    """Of live tensors in steps that average replicas."""
    tables = plan.task.tables
    trained, _ = trainer_of(plan, "EXACT_SGD", lambda: step_cases.Model(tables))
    descent = torch.optim.SGD([one for _, one in trained.named_parameters()], lr=RATE)
    made = step_cases.batches(tables, plan.task.batch_size // plan.task.devices, rank, 12)

    def steps(number: int) -> None:
        for batch in islice(made, number):
            descent.zero_grad(set_to_none=False)
            trained(batch)[0].backward()
            descent.step()
            trained.sync()

    steps(4)
    with peak_memory() as peak:
        steps(8)
    return peak.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("contiguous", [False, True])
def test_each_rank_of_groups_takes_in_a_step_what_the_ledger_says_of_its_device(tmp_path, contiguous):
    ways = ("whole", "columns", "rows", "copies")
    named = [{"name": way, "features": [{"name": way, "pooling_factor": 20}]} for way in ways]
    tables = tuple(Table.model_validate({"module": "m", "rows": 1000, "dim": 32, **one}) for one in named)
    groups = groups_of(RANKS, contiguous)
    given = {"tables": tables, "device_memory_bytes": (2**30,) * 2, "batch_size": 512, "pipeline": "none"}
    given |= {"step_ledger": 1, "groups": groups, "topology": groups.topology(2, None), "dense_optimizer": "sgd"}
    task = ShardingTask.model_validate(given).with_copies(["copies"])
    shards = tuple(one for table in tables for one in step_cases.held(table, table.name, 1, 2, 2))
    plan = Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    said = [peak.nbytes for peak in peaks_of(plan.held, shards, gloo=True)]
    assert abs(said[0] / said[1] - 1) > 0.1
    measured = on_ranks(RANKS, tmp_path, peak_of, plan)
    assert measured == [pytest.approx(said[groups.of_rank(rank, 2)[1]], rel=0.05) for rank in range(RANKS)]


def _set(trained: Any, begins: dict[str, torch.Tensor], plan: Plan, rank: int) -> None:
    """Give each shard, and each dense parameter, the values that the model had."""
    device = rank if plan.task.groups is None else plan.task.groups.of_rank(rank, plan.task.devices)[1]
    mine = {shard.table: shard for shard in plan.shards if shard.device == device}  # each table has one shard at most
    for name, weight in trained.named_parameters():
        value, table = begins[name], name.split(".")[-2]
        if table in mine:
            shard = mine[table]
            value = value[shard.row_offset :][: shard.rows, shard.column_offset :][:, : shard.dim]
        if weight.numel():
            weight.data.copy_(value)


def _moments(trained: Any) -> list[float]:
    """Adagrad's state of the table "whole"; empty on ranks without it, and without any."""
    for lookup in (each for module in trained.modules() for each in getattr(module, "_lookups", ())):
        for operator in getattr(lookup, "_emb_modules", ()):
            names = [config.name for config in operator._config.embedding_tables]
            if "whole" in names and (states := operator.emb_module.get_optimizer_state()):
                return states[names.index("whole")]["sum"].tolist()
    return []


@pytest.mark.slow
@pytest.mark.parametrize("contiguous", [False, True])
def test_two_groups_averaged_each_step_train_as_one_group_with_sgd(tmp_path, contiguous):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = on_ranks(RANKS, tmp_path / "one", train, plan_of(RANKS, None), "EXACT_SGD")
    two = on_ranks(RANKS, tmp_path / "two", train, plan_of(2, groups_of(RANKS, contiguous)), "EXACT_SGD")
    assert one[0][0][-1] < 0.8 * one[0][0][0]
    for losses, _ in two:
        assert losses == pytest.approx(one[0][0], rel=1e-5)


@pytest.mark.slow
def test_rows_over_a_domain_of_a_group_are_trained_as_over_a_host(tmp_path):
    """Eight ranks on hosts of four. Of a strided group, two ranks are on each host."""
    found = []
    for name, plan in {
        "one": plan_of(8, None, 4),
        "two": plan_of(4, groups_of(8, False, domain=4, local_world_size=4), 2),
    }.items():
        (tmp_path / name).mkdir()
        found.append(on_ranks(8, tmp_path / name, on_hosts_of_four, plan)[0][0])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def on_hosts_of_four(rank: int, plan: Plan) -> tuple[list[float], list[float]]:
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    return train(rank, plan, "EXACT_SGD")


@pytest.mark.slow
def test_averaged_moments_of_adagrad_are_the_mean_of_what_groups_see(tmp_path):
    """Of a row that one of two groups looked up, the squared gradient is four times that of all samples, and halved in the mean.
    Of other rows the mean of squares is at least the square of the mean."""
    found: dict[str, torch.Tensor] = {}
    for name, plan in {"one": plan_of(RANKS, None), "two": plan_of(2, groups_of(RANKS, True))}.items():
        (tmp_path / name).mkdir()
        states = on_ranks(RANKS, tmp_path / name, train, plan, "EXACT_ROWWISE_ADAGRAD", 1)
        held = [state for _, state in states if state]
        assert len(held) == (1 if name == "one" else 2)
        assert all(state == held[0] for state in held)
        found[name] = torch.tensor(held[0])
    assert (found["two"] >= (1 - 1e-4) * found["one"]).all()
    seen = [torch.unique(torch.cat([_first_lookups(rank) for rank in ranks])) for ranks in ((0, 1), (2, 3))]
    alone = [row for row in range(TABLES[0].rows) if sum(row in rows for rows in seen) == 1]
    assert len(alone) > 5
    assert (found["two"][alone] / found["one"][alone]).tolist() == pytest.approx([2.0] * len(alone), rel=1e-4)


def _first_lookups(rank: int) -> torch.Tensor:
    """The rows of "whole" that a rank looks up in its first step."""
    return torch.randint(0, TABLES[0].rows, (2 * BATCH,), generator=torch.Generator().manual_seed(rank))


def checkpoints(rank: int, plan: Plan, one: Plan, folder: Path) -> dict[str, Any]:
    """A checkpoint of groups, read by groups and by one group, and one of one group, read by groups."""
    trained, begins = trainer_of(plan, "EXACT_ROWWISE_ADAGRAD")
    _set(trained, begins, plan, rank)
    save(_state(trained), checkpoint_id=folder / "groups")
    same, whole = (trainer_of(each, "EXACT_ROWWISE_ADAGRAD")[0] for each in (plan, one))
    state, said = _state(same), []
    cases: list[dict[str, Any]] = [{}, {"new_plan": plan}, {"old_plan": plan, "new_plan": plan}]
    for given in cases:
        with pytest.raises(InvalidInput) as caught:
            load_resharded(_state(same), folder / "groups", **given)
        said.append(str(caught.value))
    load(state, checkpoint_id=folder / "groups")
    load_resharded(_state(whole), folder / "groups", old_plan=plan, new_plan=one)
    save(_state(whole), checkpoint_id=folder / "one")
    other = trainer_of(plan, "EXACT_ROWWISE_ADAGRAD")[0]
    load({"model": other.state_dict()}, checkpoint_id=folder / "one")
    rights = []
    for model, held_by in ((same, plan), (whole, one), (other, plan)):
        now = [weight.detach().clone() for weight in model.parameters()]
        _set(model, begins, held_by, rank)
        rights.append(all(map(torch.equal, now, model.parameters())))
    return {"said": said, "right": rights}


def _state(trained: Any) -> dict[str, Any]:
    return {"model": trained.state_dict(), "optimizer": trained.fused_optimizer.state_dict()}


@pytest.mark.slow
def test_a_checkpoint_of_groups_goes_to_one_group_and_what_groups_cannot_read_is_refused(tmp_path):
    plan = plan_of(2, groups_of(RANKS, True))
    for found in on_ranks(RANKS, tmp_path, checkpoints, plan, plan_of(RANKS, None), tmp_path / "saved"):
        assert found["right"] == [True, True, True]
        assert all(
            "table 'cut' in a DTensor, as DMPCollection and output_dtensor give it" in said for said in found["said"]
        )


@pytest.mark.parametrize(
    ("ranks", "size"), [(ranks, size) for ranks in (4, 6, 8, 12, 16, 24, 48) for size in sizes_of(ranks)]
)
@pytest.mark.parametrize("contiguous", [False, True])
def test_ranks_of_groups_are_those_of_torchrec(ranks, size, contiguous, monkeypatch):
    groups, meshes = groups_of(ranks, contiguous), []

    class Mesh:
        def __init__(self, mesh: list[list[int]], **_: object) -> None:
            meshes.append(mesh)

        def get_group(self, mesh_dim: str) -> None: ...

        def __getitem__(self, name: str) -> str:
            return name

    monkeypatch.setattr(model_parallel, "DeviceMesh", Mesh)
    monkeypatch.setattr(model_parallel, "get_local_size", lambda: 4)
    collection = types.SimpleNamespace(_device=torch.device("cpu"))
    model_parallel.DMPCollection._create_process_groups(collection, 0, ranks, size, contiguous)
    assert meshes == [[list(groups.members(group, size)) for group in range(ranks // size)]]
    plan = plan_of(size, groups)
    for rank in range(ranks):
        group, device = groups.of_rank(rank, size)
        members = groups.members(group, size)
        assert members[device] == rank
        given = to_torchrec(plan, Model(), device_type="cpu", sharding_group_size=size, world_size=ranks)
        model_parallel.DMPCollection._remap_sharding_plan(collection, given, rank, ranks // size, size, contiguous)
        for name, sharding in given.plan["tables"].items():
            shards = plan.by_table()[name]
            assert sorted(sharding.ranks) == sorted({members[shard.device] for shard in shards})
            if sharding.sharding_spec is not None:
                placed = {(*s.shard_offsets, s.placement.rank()) for s in sharding.sharding_spec.shards}
                assert placed == {(s.row_offset, s.column_offset, members[s.device]) for s in shards}


def test_a_trainer_must_say_the_groups_of_its_plan():
    plan, model = plan_of(2, groups_of(RANKS, False, sync_every=3)), Model()
    with pytest.raises(
        InvalidInput,
        match=r"2 groups of 2 of 4 ranks \(strided\), averaged every 3 steps: DistributedModelParallel would",
    ):
        to_torchrec(plan, model, device_type="cpu")
    with pytest.raises(InvalidInput, match="the trainer has groups of 4: search a plan with --group-size 4"):
        to_torchrec(plan, model, device_type="cpu", sharding_group_size=4)
    with pytest.raises(InvalidInput, match="is for 4 ranks without groups, and the trainer has groups of 2"):
        to_torchrec(plan_of(4, None), model, device_type="cpu", sharding_group_size=2)
    with pytest.raises(InvalidInput, match="is for 4 ranks, but the trainer has 2"):
        to_torchrec(plan, model, device_type="cpu", sharding_group_size=2, world_size=2)
    check_world_size(plan, RANKS, "the plan")
    with pytest.raises(InvalidInput, match="without groups; search one with --group-size"):
        dmp_collection(plan_of(4, None))


def test_a_planner_counts_the_batch_of_a_group(tmp_path):
    plan = plan_of(2, groups_of(RANKS, False))
    task = plan.task.model_copy(update={"pipeline": "sparse-dist"})
    plan = Plan(task=task, shards=plan.shards, provenance=plan.provenance)
    deploy(plan, FolderStore(tmp_path), "m", now=NOW)
    how: dict[str, Any] = {
        "world_size": RANKS,
        "sharding_group_size": 2,
        "device_type": "cpu",
        "any_output_order": True,
    }
    planner = NeuroShardPlanner(str(tmp_path), "m", batch_size=plan.task.global_batch_size, **how)
    model = Model()
    planner.plan(model, [EmbeddingBagCollectionSharder()])
    used = rank_storage(planner.get_selected_options(), 2)
    assert [one.ddr for one in used] == list(plan.memory_bytes())


def test_what_replicas_cannot_be_averaged_in_is_refused():
    plan, model = plan_of(2, groups_of(RANKS, False)), Model()
    with pytest.raises(InvalidInput, match="'whole' is trained by adam, whose state DMPCollection cannot average"):
        to_torchrec(plan, model, device_type="cpu", sharding_group_size=2, optimizer="adam")
    with pytest.raises(UsageError, match="without writing back what caches hold"):
        to_torchrec(plan, model, device_type="cpu", sharding_group_size=2, compute_kernel="fused_uvm_caching")
    for optimizer in ("sgd", "adagrad"):
        to_torchrec(plan, model, device_type="cpu", sharding_group_size=2, optimizer=optimizer)


def test_arguments_say_numbering_and_hosts_of_a_group():
    groups = Groups(ranks=16, contiguous=False, domain=8, local_world_size=8)
    assert dmp_collection(plan_of(8, groups)) == {
        "world_size": 16,
        "sharding_group_size": 8,
        "use_inter_host_allreduce": False,
        "node_group_size": 4,
    }
    near = groups.model_copy(update={"contiguous": True})
    assert dmp_collection(plan_of(4, near))["node_group_size"] is None  # a group is in one domain


def test_a_batch_is_of_all_ranks():
    plan, model = plan_of(2, groups_of(RANKS, False)), Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "module .* returns its outputs in another order")
        how: Any = {"device_type": "cpu", "sharding_group_size": 2, "optimizer": "sgd"}
        to_torchrec(plan, model, batch_size=BATCH * RANKS, **how)
    with pytest.warns(UserWarning, match="searched for 12 samples a step over all ranks, and the trainer has 24"):
        to_torchrec(plan, model, batch_size=24, **how)
