"""Laws of every way to hold a table: what TorchRec gets is what the records say, and comes back as it was."""

import warnings
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import PoolingType

from helpers.plans import row_wise
from neuroshard.client.torchrec import from_torchrec, to_torchrec
from neuroshard.core.constraints import Constraints, TableRule
from neuroshard.core.plan import Plan, Provenance, Shard, sharding_of
from neuroshard.core.sharding import GRID, SHARDINGS, Sharding
from neuroshard.core.table import Table
from neuroshard.core.task import ShardingTask
from neuroshard.core.tiers import TIERS, WAYS, TierFacts
from neuroshard.core.topology import Topology

RANKS, DOMAIN = 4, 2
Pooling = Literal["sum", "mean", "none"]


def shards(kind: Sharding, table: Table) -> list[Shard]:
    """The table held so on two domains of two ranks."""
    if kind.copied:
        return [Shard(table=table.name, rows=table.rows, dim=table.dim, device=rank) for rank in range(RANKS)]
    rows = row_wise(table, DOMAIN if kind.over_domains else RANKS) if kind.splits_rows else None
    whole = [Shard(table=table.name, rows=table.rows, dim=table.dim, device=2)]
    found, parts = rows or whole, 2 if kind.splits_columns else 1
    return [
        one.model_copy(
            update={
                "dim": table.dim // parts,
                "column_offset": part * table.dim // parts,
                "device": (one.device + part * DOMAIN) % RANKS,
            }
        )
        for part in range(parts)
        for one in found
    ]


def can_be(kind: Sharding, tier: TierFacts, pooling: Pooling) -> bool:
    """What no rule and no check of TorchRec's refuses."""
    if pooling == "none" and (kind.over_domains or kind.copied):
        return False
    return not (kind.copied and tier.beyond_hbm) and not (kind is GRID and pooling == "mean")


ALL = product(SHARDINGS, TIERS.values(), ("sum", "mean", "none"), ("none", "prefetch"))
CAN_BE = [(kind, tier, pooling, pipeline) for kind, tier, pooling, pipeline in ALL if can_be(kind, tier, pooling)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "tier", "pooling", "pipeline"), CAN_BE, ids=lambda one: getattr(one, "name", one))
@pytest.mark.parametrize("path", ["", "a.b"])
def test_every_way_goes_to_torchrec_as_its_records_say_and_comes_back(
    kind: Sharding, tier: TierFacts, pooling: Pooling, pipeline: Any, path: str
) -> None:
    table = Table(name="item", rows=301, dim=16, pooling_factor=2.0, pooling=pooling, optimizer_bytes_per_row=0)
    cached_rows = WAYS if tier.cached else None
    rule = TableRule(table="item", data_parallel=kind.copied or None)
    if tier.beyond_hbm:
        rule = rule.model_copy(update={"tier": tier.name, "cached_rows": cached_rows})
    task = ShardingTask(
        tables=(table,),
        device_memory_bytes=(2**20,) * RANKS,
        batch_size=8,
        host_memory_bytes=2**30,
        pipeline=pipeline,
        step_ledger=1,
        topology=Topology(domain=DOMAIN, local_world_size=DOMAIN),
        constraints=Constraints(tables=(rule,) if kind.copied or tier.beyond_hbm else ()),
    )
    plan = Plan(
        task=task, shards=tuple(shards(kind, table)), provenance=Provenance(neuroshard_version="0", algorithm="by hand")
    )
    assert sharding_of(plan.held, table, plan.shards) is kind
    named: dict[str, Any] = {"name": "item", "num_embeddings": 301, "embedding_dim": 16, "feature_names": ["item"]}
    bags = None if pooling == "none" else EmbeddingBagConfig(**named, pooling=PoolingType[pooling.upper()])
    meta = torch.device("meta")
    inner: Any = (
        EmbeddingBagCollection(tables=[bags], device=meta)
        if bags
        else EmbeddingCollection(tables=[EmbeddingConfig(**named)], device=meta)
    )
    module = nn.ModuleDict({"a": nn.ModuleDict({"b": inner})}) if path else inner

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = to_torchrec(plan, module, device_type="cuda", local_world_size=DOMAIN)
        back = from_torchrec(
            given,
            module,
            device_memory_bytes=task.device_memory_bytes,
            host_memory_bytes=task.host_memory_bytes,
            batch_size=8,
            tables=[table],
            pipeline=pipeline,
            local_world_size=DOMAIN,
        )
        again = to_torchrec(back, module, device_type="cuda", local_world_size=DOMAIN)
    of = given.plan[path]["item"]
    assert (of.sharding_type, of.compute_kernel) == (kind.torchrec, tier.kernel if tier.beyond_hbm else kind.kernel)
    fetches_ahead = bool(of.cache_params and of.cache_params.prefetch_pipeline)
    assert fetches_ahead == (tier.cached and pipeline == "prefetch")
    assert bool(of.cache_params and of.cache_params.load_factor) == tier.cached
    assert again == given
    assert (back.held.constraints.rules(), set(back.shards)) == (plan.held.constraints.rules(), set(plan.shards))
    assert (back.memory_bytes(), back.host_memory()) == (plan.memory_bytes(), plan.host_memory())
    assert (back.predicted_ms, back.provenance.algorithm) == (None, "torchrec")
