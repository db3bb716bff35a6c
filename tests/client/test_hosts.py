"""How many ranks a host has: what launchers say, and what TorchRec takes it to be. Nothing here starts a process."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.refusals import refused, warned
from helpers.torchrec_models import module_of
from neuroshard.client.torchrec import ShardingWarning, to_torchrec
from neuroshard.client.torchrec.hosts import LAUNCHERS, PARSED_BY_TORCHREC, PROCESSES, READ_BY_TORCHREC, hosts_of
from neuroshard.core.errors import InvalidInput
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology

RANKS = 8
TABLES = tuple(
    Table.model_validate(
        {
            "name": f"t{rank}",
            "module": "m",
            "rows": 100,
            "dim": 8,
            "features": [{"name": f"f{rank}", "pooling_factor": 1.0}],
        }
    )
    for rank in range(RANKS)
)
SRUN = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0"}


@pytest.fixture(autouse=True)
def launched_by(monkeypatch):
    """Sets what a launcher has set, in a process of 8 that sees so many GPUs."""
    for name in (
        *READ_BY_TORCHREC,
        *PARSED_BY_TORCHREC,
        *PROCESSES.values(),
        *(name for row in LAUNCHERS for names in row for name in names),
    ):
        monkeypatch.delenv(name, raising=False)

    def launch(gpus: int = 0, **variables: str) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield launch
    dist.destroy_process_group()


def plan_of(topology: Topology | None = None) -> Plan:
    task = ShardingTask(tables=TABLES, device_memory_bytes=(2**30,) * RANKS, batch_size=8192, topology=topology)
    shards = tuple(Shard(table=t.name, rows=t.rows, dim=t.dim, device=rank) for rank, t in enumerate(TABLES))
    return Plan(task=task, shards=shards, provenance=Provenance(neuroshard_version="0", algorithm="by hand"))


def gpus(plan: Plan) -> list[int]:
    given = to_torchrec(plan, module_of(TABLES), device_type="cuda", any_output_order=True)
    return [one.sharding_spec.shards[0].placement.device().index for one in given.plan["m"].values()]


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),  # mpirun
        ({"MPI_LOCALNRANKS": "2"}, 2),  # Hydra
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1(x2)", "LOCAL_RANK": "-1"}, 4),
        ({"LOCAL_WORLD_SIZE": "8", **SRUN, "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"LOCAL_WORLD_SIZE": "16"}, 8),  # more than these ranks
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_NTASKS_PER_NODE": "4"}, 2),
        ({**SRUN, "SLURM_TASKS_PER_NODE": "8"}, 8),
        ({"PMI_SIZE": "8", "PMI_LOCAL_SIZE": "4"}, 4),
        ({"MVP_COMM_WORLD_SIZE": "8", "MVP_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
    ],
)
def test_a_rank_is_on_a_gpu_that_its_host_has_whatever_started_it(launched_by, variables, host):
    launched_by(**variables)
    assert gpus(plan_of()) == [rank % host for rank in range(RANKS)]


SPAWNED = [{size: "2", local: "1"} for local, size in PROCESSES.items()]  # mp.spawn in a process for each host


@pytest.mark.parametrize("variables", [{"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, *SPAWNED])
def test_a_launcher_that_started_something_else_than_the_ranks_is_not_asked(launched_by, variables):
    launched_by(gpus=4, **variables)
    assert gpus(plan_of()) == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("seen", [1, 2, 8, 16])
def test_where_nothing_is_said_a_host_has_the_gpus_that_are_seen(launched_by, seen):
    launched_by(gpus=seen)
    assert gpus(plan_of()) == [rank % seen for rank in range(RANKS)]


@pytest.mark.parametrize("seen", [0, 3])
def test_what_is_guessed_is_said(launched_by, seen):
    launched_by(gpus=seen)
    with warned(ShardingWarning, "LOCAL_WORLD_SIZE", "not set", "takes 8", "local_world_size="):
        assert gpus(plan_of()) == list(range(8))


@pytest.mark.parametrize("variables", SPAWNED)
def test_processes_that_are_not_the_ranks_say_nothing_of_hosts(launched_by, variables):
    launched_by(**variables)
    with warned(ShardingWarning, *variables, "TorchRec takes 1 of these 8", "LOCAL_WORLD_SIZE", "local_world_size="):
        gpus(plan_of())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LOCAL_WORLD_SIZE": "4(x2)"}, ("'4(x2)'", "set LOCAL_WORLD_SIZE=4")),
        ({"LOCAL_WORLD_SIZE": "5,3"}, ("LOCAL_WORLD_SIZE", "'5,3'")),
        ({"LOCAL_WORLD_SIZE": "many"}, ("LOCAL_WORLD_SIZE", "'many'")),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2(x4)"}, ("'2(x4)'", "set OMPI_COMM_WORLD_LOCAL_SIZE=2")),
        ({"LOCAL_WORLD_SIZE": "4", "TORCHREC_RESOLVED_POD_SIZE": "2(x1)"}, ("TORCHREC_RESOLVED_POD_SIZE", "'2(x1)'")),
        ({"LOCAL_WORLD_SIZE": "4", "TORCHREC_RESOLVED_POD_SIZE": "0"}, ("TORCHREC_RESOLVED_POD_SIZE", "'0'")),
        ({"LOCAL_RANK": "one"}, ("LOCAL_RANK", "'one'")),
        ({"TOPOLOGY_DOMAIN_MULTIPLE": ""}, ("TOPOLOGY_DOMAIN_MULTIPLE",)),
    ],
)
@pytest.mark.parametrize("topology", [None, Topology(domain=4, local_world_size=4)])
def test_what_torchrec_cannot_read_is_refused_with_the_number_to_set(launched_by, variables, words, device, topology):
    launched_by(**variables)
    with refused(InvalidInput, *words, "TorchRec", "on every rank"):
        to_torchrec(plan_of(topology), module_of(TABLES), device_type=device, any_output_order=True)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LOCAL_WORLD_SIZE": "3"}, ("LOCAL_WORLD_SIZE", 3, "8 ranks")),
        ({"LOCAL_WORLD_SIZE": ""}, ("LOCAL_WORLD_SIZE",)),
        ({"LOCAL_WORLD_SIZE": "0"}, ("LOCAL_WORLD_SIZE", 0)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, ("SLURM_STEP_TASKS_PER_NODE", "5,3", "LOCAL_WORLD_SIZE")),
    ],
)
def test_hosts_of_unequal_sizes_are_refused_by_the_variable_that_says_so(launched_by, variables, words):
    launched_by(**variables)
    with refused(InvalidInput, *words):
        gpus(plan_of())


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "4"}, ("SLURM_NTASKS_PER_NODE says 4", "set LOCAL_WORLD_SIZE=4")),
        ({}, ("LOCAL_WORLD_SIZE is not set", "8")),
    ],
)
def test_a_plan_for_hosts_names_the_variable_that_torchrec_lacks(launched_by, variables, words):
    launched_by(**variables)
    with refused(InvalidInput, "hosts of 4 ranks", *words):
        gpus(plan_of(Topology(domain=4, local_world_size=4)))
    launched_by(LOCAL_WORLD_SIZE="4")
    assert gpus(plan_of(Topology(domain=4, local_world_size=4))) == [0, 1, 2, 3] * 2


def test_torchrec_reads_no_other_variables(launched_by):
    from torchrec.distributed.comm import get_local_size

    for name in READ_BY_TORCHREC:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, "2")
            assert get_local_size(RANKS) == hosts_of(RANKS).ranks == 2
    launched_by(**SRUN, SLURM_NTASKS_PER_NODE="4", PMI_SIZE="8", PMI_LOCAL_SIZE="4")
    assert get_local_size(RANKS) == 8
