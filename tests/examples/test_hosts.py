"""The worked trainer on two hosts of two ranks, with a slow link between them: every sharding type, outputs as unsharded."""

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from helpers.forked import run_scripts
from helpers.hosts import Rank, enter, environment_of, hosts, lacks_hosts
from helpers.limits import HANGS
from helpers.plans import NOW
from neuroshard.core.plan import Plan, Provenance, Shard
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.topology import Topology
from neuroshard.core.value import decode_json
from neuroshard.deploy.run import deploy
from neuroshard.store.folder import FolderStore

pytestmark = pytest.mark.slow


def test_all_sharding_types_train_over_two_hosts_as_uncut(tmp_path: Path, example: ModuleType) -> None:
    if why := lacks_hosts():
        pytest.skip(f"{why}; to run: make test as root, with iproute2")
    tables = tuple(
        Table(name=name, rows=400, dim=16, pooling_factor=5.0, optimizer_bytes_per_row=0)
        for name in ("whole", "columns", "rows", "host_rows", "grid")
    )
    shards = [
        Shard(table="whole", rows=400, dim=16, device=3),
        *(Shard(table="columns", rows=400, column_offset=8 * half, dim=8, device=1 + half) for half in range(2)),
        *(Shard(table="rows", row_offset=100 * rank, rows=100, dim=16, device=rank) for rank in range(4)),
        *(Shard(table="host_rows", row_offset=200 * half, rows=200, dim=16, device=2 + half) for half in range(2)),
        *(
            Shard(table="grid", row_offset=200 * half, rows=200, column_offset=8 * host, dim=8, device=2 * host + half)
            for host in range(2)
            for half in range(2)
        ),
    ]
    task = ShardingTask(
        tables=tables,
        device_memory_bytes=(2**24,) * 4,
        batch_size=64,
        topology=Topology(domain=2, local_world_size=2),
    )
    plan = Plan(task=task, shards=tuple(shards), provenance=Provenance(neuroshard_version="0", algorithm="by hand"))
    deploy(plan, FolderStore(tmp_path / "store"), "m", now=NOW)
    summary = tmp_path / "summary.json"
    given = ["--store", tmp_path / "store", "--name", "m", "--steps", 4, "--batch-size", 64, "--timeout", HANGS]

    def on(rank: Rank) -> int:
        enter(rank.namespace)
        code: int = example.main()
        return code

    with hosts(2, 2, "100mbit") as there:
        ranks = run_scripts(
            [partial(on, rank) for rank in there],
            *(*given, "--summary", summary),
            cwd=tmp_path,
            environments=[environment_of(there, number) for number in range(4)],
        )
    assert [rank.returncode for rank in ranks] == [0] * 4, ranks[0].stderr
    found = decode_json(summary.read_bytes(), "summary")
    assert found["first_forward_max_abs_difference"] < 1e-5
    assert len(found["embeddings"]["measured_ms"]) == 4
